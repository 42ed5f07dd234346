"""Kernels whose blocks of two axes have masks of unlike lanes, and addresses across their tensors' rows."""

import triton
import triton.language as tl


@triton.jit
def of_unlike_masks(X, W, Y, T, R, n, first, last, OTHER: tl.constexpr, BR: tl.constexpr, B: tl.constexpr):
    """Rows and weights that end at other columns than the sums and the result."""
    rows, columns = tl.program_id(0) * BR + tl.arange(0, BR)[:, None], tl.arange(0, B)[None]
    inside = rows < R
    x = tl.load(X + rows * n + columns, mask=(columns >= first) & (columns < n) & inside, other=OTHER)
    w = tl.load(W + columns, mask=columns < last, other=2.0)
    total = tl.sum(tl.where(columns <= last, x * w, 0.0), 1)[:, None]
    tl.store(Y + rows * n + columns, x + total, mask=(columns < last) & inside)
    tl.store(T + rows, total, mask=inside)


@triton.jit
def of_a_loop(X, Y, R, n, lengths, OTHER: tl.constexpr, BR: tl.constexpr, B: tl.constexpr):
    """Tiles of rows that each end at a column of their own, with the largest element so far."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    length = tl.load(lengths + rows, mask=rows < R, other=0)
    most = tl.full([BR, 1], -9.0, tl.float32)
    for start in range(0, n, B):
        columns = start + tl.arange(0, B)[None]
        x = tl.load(X + rows * n + columns, mask=(columns < length) & (rows < R), other=OTHER)
        most = tl.maximum(most, tl.max(x, 1)[:, None])
        tl.store(Y + rows * n + columns, x + most, mask=(columns < n) & (rows < R))


@triton.jit
def beside_its_transpose(X, Y, n, B: tl.constexpr):
    """Each tile of a square and the one across its diagonal, at every second row of the result."""
    rows = tl.program_id(0) * B + tl.arange(0, B)[:, None]
    columns = tl.program_id(1) * B + tl.arange(0, B)[None]
    inside = (rows < n) & (columns < n)
    x = tl.load(X + rows * n + columns, mask=inside, other=0.0)
    y = tl.load(X + columns * n + rows, mask=inside & (rows != columns), other=0.5)
    tl.store(Y + 2 * rows * n + columns, x + y, mask=inside & (columns % 3 != 1))


@triton.jit
def unpooled(G, Index, Y, n, B: tl.constexpr):
    """The gradient of a maximum over 2 x 2 elements: at the element that each of them was taken from."""
    batch, rows, columns = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B), tl.program_id(2) * B
    columns += tl.arange(0, B)
    inside = (rows[:, None] < n) & (columns[None] < n)
    here, half = rows[:, None] * n + columns[None], n // 2
    pooled = batch * half * half + (rows[:, None] // 2) * half + columns[None] // 2
    chosen = tl.load(Index + pooled, mask=inside, other=-1)
    tl.store(Y + batch * n * n + here, tl.load(G + pooled, mask=chosen == here, other=0.0), mask=inside)


@triton.jit
def of_values_and_places(X, Y, n, B: tl.constexpr):
    """Elements above 0.3, or at a place whose row and column have one remainder; others are twice as large."""
    rows, columns = tl.program_id(0) * B + tl.arange(0, B)[:, None], tl.arange(0, B)[None]
    inside = (rows < n) & (columns < n)
    x = tl.load(X + rows * n + columns, mask=inside, other=0.0)
    tl.store(Y + rows * n + columns, tl.where((x > 0.3) | (rows % 3 == columns % 2), x, 2.0 * x), mask=inside)


@triton.jit
def states_in_place(H, G, Last, tiles, BEHIND: tl.constexpr, D: tl.constexpr):
    """Sums of tiles, scaled by a number of each, in place of the tiles from the second on."""
    head, i = tl.program_id(0), tl.arange(0, D)
    at, total = i[:, None] * D + i[None], tl.zeros([D, D], tl.float32)
    for tile in range(tiles):
        here = H + (head * tiles + tile) * D * D + at
        total += tl.load(here)
        if tile > 0:
            tl.store(here + BEHIND * D * D, total)
        total *= tl.load(G + head * tiles + tile)
    tl.store(Last + head * D * D + at, total)


@triton.jit
def of_few_rows(X, Y, Z, R, few, n, BR: tl.constexpr, B: tl.constexpr):
    """Rows, of which another tensor has the first ones, or none; columns behind the second are 0.5 in both."""
    rows, columns = tl.program_id(0) * BR + tl.arange(0, BR)[:, None], tl.arange(0, B)[None]
    x = tl.load(X + rows * n + columns, mask=(columns < 2) & (rows < R), other=0.5)
    tl.store(Y + rows * n + columns, x - tl.sum(x, 1)[:, None], mask=(columns < n) & (rows < R))
    tl.store(Z + rows * n + columns, x, mask=(columns < n) & (rows < few))


@triton.jit
def of_some_programs(X, Y, Z, n, B: tl.constexpr, BR: tl.constexpr):
    """Rows of which the first ones are longer; Y has those of every other program, and Z has all."""
    p, cols = tl.program_id(0), tl.arange(0, B)[None]
    rows = p * BR + tl.arange(0, BR)[:, None]
    x = tl.load(X + rows * n + cols, mask=cols < n - rows, other=0.5)
    if p % 2 == 0:
        tl.store(Y + rows * n + cols, 2.0 * x, mask=cols < n)
    tl.store(Z + rows * n + cols, x - tl.sum(x, 1)[:, None], mask=cols < n - 2)
