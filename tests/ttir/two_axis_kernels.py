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
