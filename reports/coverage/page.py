"""Page: public Triton kernels that npusim reads, and the constructs for which it refuses others."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from reports.parts.document import Section, gather, percent, save_page, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["construct_of", "rows", "write"]

#: Outcomes as `outcomes.py` wrote them.
RECORDED = Path(__file__).resolve().parent / "outcomes.csv"
DEVICES: Mapping[str, str] = MappingProxyType({"h200": "H200", "ascend_910b2": "910B2"})
#: Constructs by words of the message that refuses them; the first entry that fits is used.
CONSTRUCTS: Mapping[str, str] = MappingProxyType(
    {
        "Triton refuses": "no code by this release of Triton",
        "Triton cannot compile": "no code by this release of Triton",
        "than the loop before it": "two loops over unlike tiles",
        "accumulate in float16": "integer products beside products that accumulate in float16",
        "a factor of a product after a loop": "two loops over unlike tiles",
        "ids needed": "more flags than the device has",
        ".UB: ": "blocks that exceed a buffer of the device",
    }
)
OTHER = "other"


def construct_of(message: str) -> str:
    """Return the construct that a message refuses, in the words of the page."""
    return next((name for words, name in CONSTRUCTS.items() if words in message), OTHER)


def rows() -> list[dict[str, str]]:
    """Return the rows of the file, a launch on a device each."""
    with RECORDED.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(folder: Path) -> list[Path]:
    """Write ``coverage.md`` and its data to ``folder``."""
    made = rows()
    return save_page(folder, "coverage", gather("coverage", [_shares(made), _refusals(made), _launches(made)]))


def _shares(made: Sequence[dict[str, str]]) -> Section:
    fields, counts = dict[str, object](), dict[str, dict[str, int]]()
    for device, called in DEVICES.items():
        of = [r for r in made if r["device"] == device]
        read = sum(r["outcome"] == "read" for r in of)
        own = sum(construct_of(r["message"]) == CONSTRUCTS["Triton refuses"] for r in of if r["outcome"] != "read")
        counts[device] = {"launches": len(of), "read": read, "refused by Triton": own}
        fields[f"read_{called}"] = f"{read} of {len(of)} launches ({percent(read / len(of))})"
        fields[f"own_{called}"] = str(own)
    return fields, {"counts": counts}


def _refusals(made: Sequence[dict[str, str]]) -> Section:
    counts = {d: Counter(construct_of(r["message"]) for r in made if _is_refused(r, d)) for d in DEVICES}
    names = sorted(set().union(*counts.values()), key=lambda n: (n == OTHER, -sum(c[n] for c in counts.values()), n))
    listed = [[n, *(str(counts[d][n]) for d in DEVICES)] for n in names]
    return {"refusals": table(["construct", *DEVICES.values()], listed)}, {
        "refusals": {n: {d: counts[d][n] for d in DEVICES} for n in names}
    }


def _is_refused(row: dict[str, str], device: str) -> bool:
    return row["device"] == device and row["outcome"] != "read"


def _launches(made: Sequence[dict[str, str]]) -> Section:
    listed = [
        [r["launch"], r["repository"], DEVICES[r["device"]], construct_of(r["message"])]
        for r in made
        if r["outcome"] != "read"
    ]
    return {"launches": table(["launch", "repository", "device", "construct"], listed)}, {}
