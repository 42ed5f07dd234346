"""Measure programs that compute a function of each element of a tile: what warps cost besides their instructions.

    python -m reports.silicon.element_rows OUT.json

Needs one GPU, torch and triton.  Each time is that of one launch in a graph of equal launches, in microseconds: the
median of three replays.  A program has one tile of bfloat16, in which each lane of its ``warps`` has ``lane`` elements;
the launch has ``elements`` elements.  ``count``: how often the function is applied.

polynomial: a multiply-add of each element with itself.
selected: the same with a comparison, and a choice of two results.
error: the error function.
"""

from __future__ import annotations

from typing import Any

import torch

from reports.silicon.element_kernels import error, polynomial, selected
from reports.silicon.graph_time import graph_us, write_rows

LANES = 32


def main() -> None:
    """Measure all programs."""
    found = list[dict[str, Any]]()
    for kernel, counts in ((polynomial, (16, 64)), (selected, (16, 32)), (error, (1, 2, 4))):
        for count in counts:
            for lane in (2, 4, 8, 16, 32):
                for warps in (2, 4, 8):
                    for elements in (1 << 22, 1 << 25):
                        block = LANES * warps * lane
                        x, y = (torch.zeros(elements, dtype=torch.bfloat16, device="cuda") for _ in range(2))

                        def call(given: tuple[Any, ...] = (x, y, block, count), warps: int = warps) -> None:
                            kernel[(elements // block,)](*given, num_warps=warps)  # noqa: B023

                        case = {"kernel": kernel.__name__, "count": count, "lane": lane, "warps": warps}
                        found.append({**case, "elements": elements, "us": round(graph_us([call] * 20, 3), 3)})
    write_rows(found)


if __name__ == "__main__":
    main()
