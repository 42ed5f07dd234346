"""cuBLAS's matrix products: the tile, the splits of k and the stages that it uses, and the order of its tiles.

A product and its transpose have mirrored tiles in mirrored order: the library computes C, or C^T with its operands
exchanged (kernels of 128 x 256 for one and of 256 x 128 for the other, reports/silicon/h200_products.yaml).
"""

from __future__ import annotations

from itertools import product
from math import sqrt

from npusim.machines.decisions import Charge
from npusim.units import ceil_div

#: Sides of a library's tiles, in either direction, and splits; the cost of a wave of tiles (hopper.md section 3.12): a
#: factor of the tensor cores' time, and the cycles of a wave's start and end.
SIDES, OTHER_SIDES, SPLITS = (64, 128), (32, 64, 128, 192, 256), (1, 2, 4, 8)
WAVE_FACTOR, WAVE_CYCLES = 1.15, 5000.0  # hopper.md section 3.12
#: Number of stages of cuBLAS's kernels if one block fills a core (nvjet's names, reports/silicon/products.json).
MOST_STAGES = 16
#: Cycles of a launch that follows another, and bytes per cycle of memory (hopper.md section 1: 3.1 us, 4.27 TB/s, 1.98
#: GHz).
SPLIT_CYCLES, PART_BYTES = 6100.0, 2157.0
#: Alignment of rows that asynchronous copies move (CUDA C++ Programming Guide, asynchronous copies).
ALIGNED_BYTES = 16
#: Smallest number of tiles along the shorter side of C for a band's width, and this width in tiles (CUTLASS 0046e366,
#: gemm/kernel/tile_scheduler_params.h, get_log_swizzle_size).
BANDS = ((6, 8), (3, 4), (2, 2))
#: Elements of a piece of k, and number of pieces in shared memory, for kernels before sm_80 and since (CUTLASS,
#: default_gemm_configuration.h).
STAGED, COPIED = (32, 2), (64, 3)
#: Time from a tile's end to the next tile's first operand; and the cost of a tile whose rows are not multiples of
#: `ALIGNED_BYTES`.
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
    """Return rows, columns and splits with the smallest time of the waves, among a library's choices; ``given`` values
    are unchanged.

    ``edges``: sum of the rows and columns that fit a core's shared memory; ``area``: elements that fit its registers;
    all choices are tried if a limit is None or no choice fits.  No tile has half of its area beyond C's edge, except
    along the shortest sides: cuBLAS puts the 64 rows of an instruction along the longer side of C
    (reports/silicon/thin_products.json).  Among equal choices, the tile with most elements has precedence; then the one
    nearest to a square; then one that is as long as a side of C, so that the other operand is read once; then the one
    that is longer along the longer side.
    """
    moved = heads * (m * k + k * n + m * n) * 2

    def time(choice: tuple[int, int, int]) -> tuple[float, int, int, bool, bool]:
        rows, columns, splits = choice
        blocks = heads * ceil_div(m, rows) * ceil_div(n, columns) * splits
        waves = ceil_div(blocks, cores)
        # A product of 64 x N x 16 takes N / 2 cycles; its operands arrive at 64 bytes per cycle (hopper.md section 1).
        busy = ceil_div(k, 16 * splits) * max(columns / 2 * rows / 64, (rows + columns) / 2)
        # Parts are written and read again, in float32, by an additional kernel.
        parts = SPLIT_CYCLES + heads * m * n * 4 * (splits + 1) / PART_BYTES if splits > 1 else 0.0
        # No choice is faster than memory; if blocks leave cores idle, they are assumed to use less of the memory's
        # bandwidth. If several choices are as fast as memory, the one without splits is used.
        reached = sqrt(min(1.0, blocks / cores))
        cycles = max(waves * (busy * WAVE_FACTOR + WAVE_CYCLES), moved / PART_BYTES / reached) + parts
        is_cut = rows < m and columns < n
        return cycles, -rows * columns, rows + columns, is_cut, (rows > columns) != (m > n)

    every = dict.fromkeys(tile for pair in product(SIDES, OTHER_SIDES) for tile in (pair, pair[::-1]))
    least = min(OTHER_SIDES)
    tiles = [t for t in every if all(side == least or side < 2 * size for side, size in zip(t, (m, n), strict=True))]
    rows, columns, splits = given
    tiles = [*dict.fromkeys((rows or own[0], columns or own[1]) for own in tiles or every)]
    choices = [(*tile, parts) for tile, parts in product(tiles, (splits,) if splits else SPLITS)]
    fitting = [c for c in choices if c[0] + c[1] <= edges and (area is None or c[0] * c[1] <= area)]
    return min(fitting or choices, key=time)


def tile_order(m: int, n: int, tile: tuple[int, int], band: int | None) -> tuple[int, bool]:
    """Return the number of adjacent tiles of C in a band (``band``: given), and whether they are columns of tiles.

    A band runs along the side of C with fewer tiles, or along the shorter side if the numbers are equal (CUTLASS, the
    same file, get_rasterization_order), so that the operand of that side is the one that is read again.
    """
    sides = ceil_div(m, tile[0]), ceil_div(n, tile[1])
    band = band or next((count for least, count in BANDS if min(sides) >= least), 1)
    return band, (sides[1], n) > (sides[0], m)
