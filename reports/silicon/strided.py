"""Loads of columns, of which a lane reads 2 bytes of a row and other programs the rest.

    python -m reports.silicon.strided OUT.json

Needs one GPU, torch and triton.  Each time is that of one launch in a graph of equal launches, in microseconds: the
median of three replays.  A program stores ``columns`` of bfloat16, 256 rows of a tensor of ``length`` rows and
``heads`` columns, as float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from reports.silicon.graph_time import graph_us, write_rows

ROWS = 256


@triton.jit
def strided(x, out, stride, rows: tl.constexpr, columns: tl.constexpr):
    """Store columns as rows."""
    h = tl.program_id(0) * columns + tl.arange(0, columns)
    r = tl.program_id(1) * rows + tl.arange(0, rows)
    loaded = tl.load(x + h[:, None] + r[None, :] * stride).to(tl.float32)
    tl.store(out + h[:, None] * (tl.num_programs(1) * rows) + r[None, :], loaded)


def timed(grid: tuple[int, int], *given: Any) -> float:
    """Return the time of one of many launches in a graph."""
    return graph_us([lambda: strided[grid](*given, num_warps=4)] * 20, 3)


def main() -> None:
    """Measure all tensors."""
    found = list[dict[str, Any]]()
    for heads, length in ((64, 8192), (80, 8192), (48, 65536), (256, 16384)):
        x = torch.zeros(length, heads, dtype=torch.bfloat16, device="cuda")
        out = torch.zeros(heads, length, device="cuda")
        for columns in (1, 2, 4, 8, 16):
            grid = heads // columns, length // ROWS
            case = {"heads": heads, "length": length, "columns": columns}
            found.append({**case, "us": timed(grid, x, out, heads, ROWS, columns)})
    write_rows(found)


if __name__ == "__main__":
    main()
