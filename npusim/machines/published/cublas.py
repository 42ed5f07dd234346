"""cuBLAS's matrix products: the tile, the splits of k and the stages that it takes."""

from __future__ import annotations

from itertools import product

from npusim.machines.decisions import Charge
from npusim.units import ceil_div

#: Tiles and splits that a library has, and what a wave of them costs (hopper.md section 3.12): over the tensor
#: cores' own time, and cycles of its start and end.
ROWS, COLUMNS, SPLITS = (64, 128), (32, 64, 128, 192, 256), (1, 2, 4, 8)
WAVE_FACTOR, WAVE_CYCLES = 1.15, 5000.0  # hopper.md section 3.12
#: Stages that cuBLAS's kernels have where one block fills a core (nvjet's names, reports/silicon/products.json).
MOST_STAGES = 16
#: Cycles of a launch behind another, and bytes a cycle of memory (hopper.md section 1: 3.1 us, 4.27 TB/s, 1.98 GHz).
SPLIT_CYCLES, PART_BYTES = 6100.0, 2157.0
#: Rows of what asynchronous copies move are multiples of it (CUDA C++ Programming Guide, asynchronous copies).
ALIGNED_BYTES = 16
#: Pieces of k, and how many are in shared memory, of kernels before sm_80 and since (CUTLASS,
#: default_gemm_configuration.h).
STAGED, COPIED = (32, 2), (64, 3)
#: From a tile's end to the next one's first operand; and what a tile pays of which rows are off `ALIGNED_BYTES`.
TILE, UNALIGNED = (
    Charge("WARPS.library.tile_cycles", 1, "block"),
    (
        Charge("WARPS.library.unaligned_product_cycles", 1, "multiply_add"),
        Charge("WARPS.library.unaligned_store_cycles", 1, "element"),
    ),
)


def library_tile(
    m: int, n: int, k: int, cores: int, given: tuple[int | None, ...], heads: int, edges: int, area: int | None
) -> tuple[int, int, int]:
    """Return rows, columns and splits with the least waves' time among a library's; ``given`` values stay.

    ``edges``: rows and columns together that fit a core's shared memory, ``area``: elements that fit its registers;
    None, or where no choice fits: all are tried.
    """
    moved = heads * (m * k + k * n + m * n) * 2

    def time(choice: tuple[int, int, int]) -> tuple[float, int]:
        rows, columns, splits = choice
        waves = ceil_div(heads * ceil_div(m, rows) * ceil_div(n, columns) * splits, cores)
        # A product of 64 x N x 16 takes N / 2 cycles, its operands come at 64 bytes a cycle (hopper.md section 1).
        busy = ceil_div(k, 16 * splits) * max(columns / 2 * rows / 64, (rows + columns) / 2)
        # Parts are written and read again, in float32, by a kernel more.
        parts = SPLIT_CYCLES + heads * m * n * 4 * (splits + 1) / PART_BYTES if splits > 1 else 0.0
        # None is faster than memory: where several are as fast as it, nothing is split.
        return max(waves * (busy * WAVE_FACTOR + WAVE_CYCLES), moved / PART_BYTES) + parts, -rows * columns

    rows, columns, splits = (
        (value,) if value else choices for value, choices in zip(given, (ROWS, COLUMNS, SPLITS), strict=True)
    )
    choices = list(product(rows, columns, splits))
    fitting = [c for c in choices if c[0] + c[1] <= edges and (area is None or c[0] * c[1] <= area)]
    best: tuple[int, int, int] = min(fitting or choices, key=time)
    return best
