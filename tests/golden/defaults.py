"""The tiles that runs choose by themselves, beside the best of a whole space: on packaged devices and workloads.

``python tests/golden/defaults.py [WORD...]`` proves the best of each case anew, by a search of its whole space (some
20 minutes on one core), and writes ``defaults.csv``; WORDs choose cases by part of their line, the others stay.  Long
calls and batches, whose tiles a run compares on a shorter call first, stand beside the best of 12 tiles, in both orders
of their blocks (some 5 minutes more).
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
from npusim.errors import TilingError
from npusim.library import find_schedule

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
#: Calls of more pairs than a choice is made on: the devices on which each stands beside its grid.
LONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama2_7b 2k x 4": ({"seq": 2048, "batch": 4}, ("a10", "a100", "ascend_910b4", "ascend_950", "t4", "l4")),
    "llama2_7b 4k x 2": ({"seq": 4096, "batch": 2}, ("l40s", "h100", "ascend_910b2", "a100", "rtx_5090")),
    "llama3_8b 8k": ({"seq": 8192}, ("a100", "h200", "ascend_910b3", "l40s", "ascend_950_28", "gh200")),
    "llama3_8b 16k": ({"seq": 16384}, ("h100", "ascend_910b1")),
    "smollm2 4k x 8": ({"seq": 4096, "batch": 8}, ("t4", "v100", "a10", "l40s", "ascend_910b2", "rtx_4090")),
    "qwen2_7b 2k x 8": ({"seq": 2048, "batch": 8}, ("h200", "v100", "ascend_910b1", "ascend_950", "h800")),
    "mistral_7b 8k": ({"seq": 8192}, ("h100", "a10", "ascend_910b4", "ascend_950_28", "gb10")),
    "opt_30b 4k": ({"seq": 4096}, ("t4", "l40s", "ascend_910b3", "a6000")),
    "svd_img2vid x 4": ({"batch": 4}, ("v100", "a10", "a100", "ascend_950", "h200", "ascend_910b2", "rtx_pro_6000")),
    "deit_b x 512": ({"batch": 512}, ("h200", "ascend_910b1", "h20")),
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
    "block_kv": (16, 32, 64, 128),
    "warps": (4, 8),
    "arrangement": ("4x1", "2x2", "1x4"),
    "launch": ("in_order", "longest_first"),
}
#: Of a long call, in both orders of its blocks: rows, keys, depth; rows, keys, warps, stages; rows, keys, warps, pairs.
TILES: dict[tuple[str, ...], list[tuple[Any, ...]]] = {
    ("block_q", "block_kv", "depth"): [
        *((128, 512, 3), (128, 256, 3), (128, 128, 2), (64, 512, 2), (64, 256, 3), (256, 256, 2))
    ],
    ("block_q", "block_kv", "warps", "stages"): [
        *((128, 64, 4, "library"), (64, 64, 4, "library"), (64, 128, 4, "library"), (128, 128, 8, "library")),
        *((64, 64, 4, 1), (128, 128, 8, 1)),
    ],
    ("block_q", "block_kv", "warps", "arrangement"): [
        *((128, 64, 4, "4x1"), (128, 128, 4, "4x1"), (128, 32, 4, "4x1")),
        *((64, 64, 4, "2x2"), (128, 64, 8, "2x2"), (64, 64, 8, "1x4")),
    ],
}
#: Whose kernel an Ascend device's grid is of: the declared one.
KERNELS: dict[str, dict[str, Any]] = {
    "ascend_910": {"kernel": "cann", "pipeline": "core", "vector_rows": 16},
    "ascend_950": {"pipeline": "core", "vector_rows": 64},
}


class Case(NamedTuple):
    """A call of one schedule on one device."""

    schedule: str
    hw: str
    call: str

    @property
    def options(self) -> dict[str, Any]:
        options = LONG[self.call][0] if self.call in LONG else CALLS[self.call]
        return {"hw": self.hw, "workload": self.call.partition(" ")[0], **options}

    @property
    def grid(self) -> list[dict[str, Any]]:
        """Tiles that a long call stands beside, each in both orders of its blocks."""
        orders = {n: values for n, values in self.space.items() if n in ("deal", "launch")}
        names, tiles = next((names, t) for names, t in TILES.items() if {*names} <= self.space.keys())
        (order, values), *_ = orders.items()
        stages = 1 if self.hw == "t4" else 3  # copies are not asynchronous there
        listed = [
            {n: stages if n == "stages" and v == 1 else v for n, v in zip(names, tile, strict=True)} for tile in tiles
        ]
        whose = KERNELS.get(self.hw[: len("ascend_910")], {})
        return [{**whose, **tile, order: value} for tile in listed for value in values]

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
    listed += [Case(name, hw, call) for call in CALLS for name, hws in every.items() for hw in hws]
    return listed + [Case("flash", hw, call) for call, (_, hws) in LONG.items() for hw in hws]


def proved(case: Case) -> dict[str, object]:
    """Return the row of a case: its default, and the best of its space or grid, no point of which is faster."""
    if case.call in LONG:
        return _row(case, *_best_of_grid(case))
    found = npusim.explore(case.schedule, case.space, studies=True, **case.options)
    assert found.best is not None
    counts = found.counts()
    return _row(case, found.best.latency_us or 1, found.best.label(), sum(counts.values()), counts.get("ok", 0))


def _best_of_grid(case: Case) -> tuple[float, str, int, int]:
    """Return the least latency of the grid in us and its tile, how many tiles there are, and how many fit."""
    fitting: dict[str, float] = {}
    for tile in case.grid:
        try:
            us = npusim.run(case.schedule, **case.options, tiling=tile, numerics=False, trace_groups=()).latency_us
        except TilingError:
            continue
        fitting[" ".join(f"{n}={v}" for n, v in tile.items())] = us
    best = min(fitting, key=lambda words: fitting[words])
    return fitting[best], best, len(case.grid), len(fitting)


def _row(case: Case, best_us: float, best: str, points: int, simulated: int) -> dict[str, object]:
    default = case.default()
    return {
        **case._asdict(),
        "default_us": f"{default.latency_us:.2f}",
        "best_us": f"{best_us:.2f}",
        "ratio": f"{default.latency_us / best_us:.3f}",
        "best": best,
        "points": points,
        "simulated": simulated,
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
