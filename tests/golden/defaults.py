"""The tiles that runs choose by themselves, beside the best of a whole space: on packaged devices and workloads.

``python tests/golden/defaults.py [WORD...]`` proves the best of each case anew, by a search of its whole space (some
20 minutes on one core), and writes ``defaults.csv``; WORDs choose cases by part of their line, the others stay.
The space: blocks, slices, depth and order on Ascend; blocks, warps, stages and order of launch on a GPU.  What says
whose kernel it is (``kernel``, ``barriers``, ``together``, ``running``), and its precision, stays as declared.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any, NamedTuple

import npusim
from npusim.config.load import load_device
from npusim.config.tiling import tiling_fields
from npusim.schedules import find_schedule

TABLE = Path(__file__).with_name("defaults.csv")
#: A default takes at most so much longer than the best.
MOST = 0.05
CALLS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("pangu_38b", "pangu_71b", "llama2_70b", "llama_65b", "opt_30b", "qwen2_7b", "llama2_7b")},
    **{name: {} for name in ("smollm2", "deit_b", "svd_img2vid", "pasa_uniform")},
    "pangu_38b 512": {"seq": 512},
    "qwen2_7b 1024": {"seq": 1024},
    "pangu_38b decode": {"seq_q": 1, "seq_kv": 8192},
    "llama2_70b decode": {"seq_q": 1, "seq_kv": 4096, "batch": 8},
    "smollm2 decode": {"seq_q": 1, "seq_kv": 1024},
}
FEW = ("smollm2", "llama2_70b decode", "pangu_38b", "opt_30b")
ASCEND = {
    "block": (32, 64, 128, 256),
    "block_q": (32, 64, 128, 256),
    "block_kv": (64, 128, 256, 512, 1024),
    "vector_rows": (8, 16, 32, "full"),
    "depth": (1, 2, 3, 4),
    "deal": ("round_robin", "balanced"),
}
GROUPS = {
    "block_q": (64, 128, 256),
    "block_kv": (32, 64, 128, 256),
    "warps": (4, 8),
    "stages": ("library", 1, 2, 3),
    "launch": ("in_order", "longest_first"),
}
LANES = {
    "block_q": (32, 64, 128, 256),
    "block_kv": (16, 32, 64),
    "warps": (4, 8),
    "arrangement": ("4x1", "2x2", "1x4"),
    "launch": ("in_order", "longest_first"),
}


class Case(NamedTuple):
    """A call of one schedule on one device."""

    schedule: str
    hw: str
    call: str

    @property
    def options(self) -> dict[str, Any]:
        return {"hw": self.hw, "workload": self.call.partition(" ")[0], **CALLS[self.call]}

    @property
    def space(self) -> dict[str, tuple[Any, ...]]:
        device = load_device(self.hw)
        fields = {f.name: f for f in tiling_fields(find_schedule(self.schedule, device.family).tiling)}
        whole = ASCEND if device.family == "ascend" else LANES if self.hw == "v100" else GROUPS
        space = {name: values for name, values in whole.items() if name in fields}
        if (stages := fields.get("stages")) and stages.default is not None:  # of kernels with stages only
            space["stages"] = tuple(v for v in space["stages"] if v != "library")
        return space

    def default(self) -> npusim.RunResult:
        return npusim.run(self.schedule, **self.options, numerics=False, trace_groups=())


def cases() -> list[Case]:
    """Return every call for the main schedules, a few for each other schedule and device."""
    every = {"flash": ("ascend_910b2", "h200"), "pasa": ("ascend_910b2",)}
    few = {
        "flash": ("ascend_910b1", "ascend_910b3", "ascend_910b4", "ascend_950", "a10", "t4", "v100"),
        "pasa": ("ascend_950", "h200"),
        "fp8_attention": ("ascend_910b2", "ascend_950", "h200"),
        "split_kv": ("ascend_910b2", "ascend_950", "h200"),
        "two_level": ("ascend_910b2",),
        "unified": ("ascend_910b2",),
        "volta_flash": ("v100",),
    }
    listed = [Case(name, hw, call) for call in FEW for name, hws in few.items() for hw in hws]
    return listed + [Case(name, hw, call) for call in CALLS for name, hws in every.items() for hw in hws]


def proved(case: Case) -> dict[str, object]:
    """Return the row of a case: its default, and the best of its space, no point of which is faster."""
    found = npusim.explore(case.schedule, case.space, studies=True, **case.options)
    assert found.best is not None
    counts, default = found.counts(), case.default()
    return {
        **case._asdict(),
        "default_us": f"{default.latency_us:.2f}",
        "best_us": f"{found.best.latency_us:.2f}",
        "ratio": f"{default.latency_us / (found.best.latency_us or 1):.3f}",
        "best": found.best.label(),
        "points": sum(counts.values()),
        "simulated": counts.get("ok", 0),
    }


def rows() -> dict[Case, dict[str, Any]]:
    """Return the rows of the table that was accepted."""
    with TABLE.open(encoding="utf-8") as file:
        return {Case(row["schedule"], row["hw"], row["call"]): row for row in csv.DictReader(file)}


def main(words: list[str]) -> None:
    known = rows() if TABLE.exists() else {}
    for case in cases():
        if words and not any(word in " ".join(case) for word in words):
            continue
        known[case] = proved(case)
        print(*known[case].values(), flush=True)  # noqa: T201
        with TABLE.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(known[case]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(known[c] for c in cases() if c in known)


if __name__ == "__main__":
    main(sys.argv[1:])
