"""Rows that are gathered or scattered, and small products, on one GPU: ``python -m reports.silicon.gathered OUT.json``.

Needs one GPU, torch and triton.  Measures the cases of gathered.json, of an H200 with Triton 3.6, again.  Each time is
that of one launch in a graph of equal launches, in microseconds: the median of three replays.  `cases` reads a file.

read, write, both: each of ``blocks`` (times ``heads``) blocks reads or writes ``count`` pieces of ``piece`` bytes,
``rows`` of them at a time, whose places it loads; ``both`` stores the pieces that it reads, one after another.  Pieces
are those of rows of ``heads`` pieces in ``mib`` MiB: ``order``: 0 one row after another, 16 in groups of 16 rows in
random order, 1 in random order; ``passes`` times over all rows.  ``stages`` as of `triton.language.range`.
direct: as read, without places to load.
product: each of ``blocks`` blocks adds up ``count`` products of ``m`` x ``k`` and ``k`` x ``n`` of bfloat16, whose rows
are ``count`` times ``k`` long, and stores float32 or bfloat16 (``wide``).
hop, nothing: a block copies ``width`` elements of int32, or does nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
MIB = 1 << 20


def cases(file: Path = FILE) -> list[dict[str, Any]]:
    """Return the cases of a file, each with its kernel, sizes and ``us``; a group's common sizes are in each case."""
    found = json.loads(file.read_text(encoding="utf-8"))
    return [
        dict(zip(group["columns"], row, strict=True), kernel=group["kernel"])
        for group in found["groups"]
        for row in group["rows"]
    ]


def moved_bytes(case: dict[str, Any]) -> int:
    """Return the bytes that a case reads and writes, without places."""
    if case["kernel"] == "product":
        size = (case["m"] + case["n"]) * case["k"] * case["count"] * 2 + case["m"] * case["n"] * (2 + 2 * case["wide"])
        return int(case["blocks"] * size)
    pieces = case["blocks"] * case["heads"] * case["count"]
    return int(pieces * case["piece"] * (2 if case["kernel"] == "both" else 1))


def main() -> None:
    """Measure all cases."""
    import torch

    from reports.silicon.gathered_kernels import launch_of
    from reports.silicon.graph_time import graph_us

    measured = json.loads(FILE.read_text(encoding="utf-8"))
    for group in measured["groups"]:
        for row in group["rows"]:
            case = dict(zip(group["columns"], row, strict=True), kernel=group["kernel"])
            row[-1] = round(graph_us([launch_of(case)] * 20, 3), 3)
    measured["device"] = torch.cuda.get_device_name()
    Path(sys.argv[1]).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
