"""Measure loops over the tiles of a row whose warps meet at a barrier for each tile.

    python -m reports.silicon.met_loops OUT.json

Needs one GPU, torch and triton.  Each time is that of one launch in a graph of equal launches, in microseconds: the
median of three replays.  ``rows``: one program computes each row; ``columns``, ``block``: elements of a row, and of a
tile; ``warps``; ``dtype``: format of the rows.

sums: a program adds up each tile of its row (one reduction in the block for each tile).
logarithms: a program follows the maximum and the sum of exponentials of its row (two reductions for each tile).
"""

from __future__ import annotations

from typing import Any

import torch

from reports.silicon.graph_time import graph_us, write_rows
from reports.silicon.met_loops_kernels import logarithms, sums

#: Rows and columns beyond L2 and in L2; sizes of tiles; warps.
SHAPES = (
    *((132, 1 << 19), (512, 1 << 17), (1056, 1 << 16), (4224, 1 << 14)),
    *((132, 1 << 15), (528, 1 << 14), (2112, 1 << 12)),
)
BLOCKS, WARPS = (1024, 4096, 16384), (4, 8, 32)


def main() -> None:
    """Measure all loops whose lanes have 2 to 128 elements of a tile."""
    found = list[dict[str, Any]]()
    whole = torch.zeros(1 << 27, device="cuda", dtype=torch.bfloat16)
    y = torch.zeros(1 << 13, device="cuda", dtype=torch.float32)
    for name, kernel in (("sums", sums), ("logarithms", logarithms)):
        for dtype in ("bfloat16", "float32"):
            x = whole.view(getattr(torch, dtype))
            for rows, columns in SHAPES:
                for block in BLOCKS:
                    for warps in WARPS:
                        if not 2 <= block // (32 * warps) <= 128 or columns < 2 * block or rows * columns > x.numel():
                            continue
                        case = {"kernel": name, "rows": rows, "columns": columns, "block": block, "warps": warps}
                        launch = kernel[(rows,)]
                        us = graph_us([lambda: launch(x, y, columns, block, num_warps=warps)] * 10, 3)  # noqa: B023
                        found.append({**case, "dtype": dtype, "us": round(us, 3)})
    write_rows(found)


if __name__ == "__main__":
    main()
