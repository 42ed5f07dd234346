"""Measure launches that read and write the same bytes again and again, around the size of L2.

    python -m reports.silicon.repeats OUT.json

Needs one GPU, torch and triton.  Each time is that of one launch in a graph of equal launches, in microseconds: the
median of three replays.  All elements are float32.  ``inputs``, ``outputs``: number of tensors that a launch reads and
writes, each of ``kib`` KiB; ``in_place``: whether the outputs are the inputs; ``block``, ``warps``: of a program.
"""

from __future__ import annotations

from typing import Any

import torch

from reports.silicon.graph_time import graph_us, write_rows
from reports.silicon.repeats_kernels import sums

#: Tensors that are read and written, and whether in place; MiB of all tensors together; elements and warps of a
#: program.
FORMS = ((1, 1, False), (2, 1, False), (3, 1, False), (1, 1, True), (2, 2, True), (0, 1, False))
SIZES = (12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 72, 80, 96, 128)
PROGRAMS = ((1024, 4), (4096, 8))


def main() -> None:
    """Measure all forms at all sizes."""
    found = list[dict[str, Any]]()
    x, y = (torch.zeros(1 << 26, device="cuda") for _ in range(2))
    for inputs, outputs, in_place in FORMS:
        for mib in SIZES:
            for block, warps in PROGRAMS:
                tensors = inputs if in_place else inputs + outputs
                programs = (mib << 18) // tensors // block
                size = programs * block
                given = (x, y, inputs, outputs, in_place, size, block)
                launch = sums[(programs,)]
                us = graph_us([lambda: launch(*given, num_warps=warps)] * 10, 3)  # noqa: B023
                case = {"inputs": inputs, "outputs": outputs, "in_place": in_place, "kib": size // 256}
                found.append({**case, "block": block, "warps": warps, "us": round(us, 3)})
    write_rows(found)


if __name__ == "__main__":
    main()
