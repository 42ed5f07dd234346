"""Loops over rows in which each iteration loads a row, scales it and stores it: a compiler may unroll them.

    python -m reports.silicon.row_loops OUT.json

Needs one GPU, torch and triton.  Each time is that of one launch in a graph of equal launches, in microseconds: the
median of three replays.  A program computes ``each`` rows of bfloat16 of ``columns`` columns, one after the other; with
``sums`` it divides a row by the sum of its squares, which needs a barrier.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from reports.silicon.graph_time import graph_us, write_rows

#: Rows, columns, programs and warps.
CASES = (
    (2048, 1024, 128, 4),
    (8448, 1024, 132, 4),
    (8448, 1024, 528, 4),
    (4224, 2048, 264, 4),
    (2112, 4096, 132, 8),
    (2112, 4096, 264, 8),
    (8448, 4096, 528, 8),
    (4224, 8192, 132, 16),
)


@triton.jit
def scaled_rows(x, y, w, rows, columns, each: tl.constexpr, block: tl.constexpr, sums: tl.constexpr):
    """Store rows times a vector."""
    at = tl.arange(0, block)
    own = tl.load(w + at, mask=at < columns, other=0.0)
    first = tl.program_id(0) * each
    for i in range(first, tl.minimum(first + each, rows)):
        row = tl.load(x + i * columns + at, mask=at < columns, other=0.0).to(tl.float32) * own
        if sums:
            row = row / (1.0 + tl.sum(row * row))
        tl.store(y + i * columns + at, row.to(y.dtype.element_ty), mask=at < columns)


def timed(programs: int, warps: int, *given: Any) -> float:
    """Return the time of one of many launches in a graph."""
    return round(graph_us([lambda: scaled_rows[(programs,)](*given, num_warps=warps)] * 20, 3), 3)


def main() -> None:
    """Measure all cases."""
    found = list[dict[str, Any]]()
    for rows, columns, programs, warps in CASES:
        x, y = (torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        given = (x, y, torch.zeros(columns, dtype=torch.bfloat16, device="cuda"), rows, columns, -(-rows // programs))
        for sums in (False, True):
            case = {"rows": rows, "columns": columns, "programs": programs, "warps": warps, "sums": sums}
            found.append({**case, "us": timed(programs, warps, *given, columns, sums)})
    write_rows(found)


if __name__ == "__main__":
    main()
