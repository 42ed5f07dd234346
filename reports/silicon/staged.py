"""Measure loops without products whose loads have stages.

    python -m reports.silicon.staged OUT.json

Needs one GPU, torch and triton.  Each time is that of one launch in a graph of equal launches, in microseconds: the
median of three replays.  ``programs``, ``warps``, ``stages``; ``lane``: bytes of a lane in each tile; ``count``: tiles
of a program.

reads, pairs: a program adds up tiles of one tensor, or the products of tiles of two.
moves: a program stores each tile, plus 1.
sums: a program adds up the squares of a row of bfloat16, ``block`` elements at a time.
"""

from __future__ import annotations

from typing import Any

import torch

from reports.silicon.graph_time import graph_us, write_rows
from reports.silicon.staged_kernels import moves, pairs, reads, sums

CORES, LANES, MIB = 132, 32, 1 << 20
#: Bytes that one launch reads of a tensor: beyond L2, and in L2.
BEYOND, WITHIN = 96 * MIB, 16 * MIB
#: Programs on a multiprocessor, warps of a program, bytes of a lane.
SIZES = (
    *((1, 4, 16), (1, 4, 32), (1, 8, 32), (2, 2, 32), (2, 4, 32), (3, 4, 16), (3, 4, 64), (4, 2, 16), (6, 1, 32)),
    *((6, 4, 16), (8, 4, 32), (12, 2, 16), (1, 16, 16), (1, 16, 64)),
)
#: Bytes of shared memory that the tiles of a multiprocessor may have.
SHARED = 200 << 10
ROWS = ((132, 131072), (528, 32768), (2048, 16384), (8192, 8192), (1000, 65536))


def timed(kernel: Any, programs: int, *given: Any, warps: int) -> float:
    """Return the time of one of many launches in a graph."""
    return round(graph_us([lambda: kernel[(programs,)](*given, num_warps=warps)] * 10, 3), 3)


def of_size(dtype: str, residents: int, warps: int, lane: int, whole: int) -> list[dict[str, Any]]:
    """Measure the loops of one size and format that read ``whole`` bytes."""
    found, fmt = list[dict[str, Any]](), getattr(torch, dtype)
    x, z, y = (torch.zeros(2 * BEYOND // fmt.itemsize, device="cuda", dtype=fmt) for _ in range(3))
    block, programs = LANES * warps * lane // fmt.itemsize, CORES * residents
    size = programs * block
    out, count = torch.zeros(size, device="cuda"), whole // (size * fmt.itemsize)
    for stages in (2, 3, 4, 5, 6) if 6 <= count <= 2000 else ():
        if block * fmt.itemsize * stages * residents > SHARED:
            continue
        case = {"programs": programs, "warps": warps, "lane": lane, "dtype": dtype, "count": count, "stages": stages}
        rest = count, size, block, stages
        if dtype == "bfloat16" or (stages in (2, 3, 5) and residents in (1, 3, 6)):
            found.append({"kernel": "reads", **case, "us": timed(reads, programs, x, out, *rest, warps=warps)})
        if dtype == "bfloat16" and stages <= 4 and whole == BEYOND and residents in (1, 2, 4, 8):
            found.append({"kernel": "pairs", **case, "us": timed(pairs, programs, x, z, out, *rest, warps=warps)})
        if dtype == "float32" and stages in (2, 4) and residents in (1, 2, 6, 12):
            found.append({"kernel": "moves", **case, "us": timed(moves, programs, x, y, *rest, warps=warps)})
    return found


def rows() -> list[dict[str, Any]]:
    """Measure sums of rows."""
    found, most = list[dict[str, Any]](), max(n * columns for n, columns in ROWS)
    x, out = torch.zeros(most, device="cuda", dtype=torch.bfloat16), torch.zeros(1 << 20, device="cuda")
    for n, columns in ROWS:
        for block, warps in ((1024, 4), (4096, 8), (2048, 4)):
            for stages in (2, 3, 4):
                case = {"rows": n, "columns": columns, "block": block, "warps": warps, "stages": stages}
                us = timed(sums, n, x, out, columns, block, stages, warps=warps)
                found.append({"kernel": "sums", **case, "us": us})
    return found


def main() -> None:
    """Measure all loops."""
    sizes = [(d, *size, whole) for d in ("bfloat16", "float32") for size in SIZES for whole in (BEYOND, WITHIN)]
    write_rows([*(case for size in sizes for case in of_size(*size)), *rows()])


if __name__ == "__main__":
    main()
