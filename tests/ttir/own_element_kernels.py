"""Kernels that store to a tensor which they also access elsewhere."""

import triton
import triton.language as tl


@triton.jit
def in_place(X, n, HOW: tl.constexpr, B: tl.constexpr):
    """Rows of X that are stored over themselves, in part, twice, loaded again, turned, or where they are positive."""
    row, cols = tl.program_id(0), tl.arange(0, B)
    inside = cols < n
    x = tl.load(X + row * n + cols, mask=inside, other=0.0)
    if HOW == "part":
        tl.store(X + row * n + cols, 2.0 * x, mask=cols < n - 3)
    elif HOW == "twice":
        tl.store(X + row * n + cols, 2.0 * x, mask=inside)
        tl.store(X + row * n + cols, 3.0 * x, mask=cols < n // 2)
    elif HOW == "again":
        tl.store(X + row * n + cols, 2.0 * x, mask=inside)
        y = tl.load(X + row * n + cols, mask=inside, other=0.0)
        tl.store(X + row * n + cols, y + 1.0, mask=inside)
    elif HOW == "turned":
        y = tl.load(X + row * n + n - 1 - cols, mask=inside, other=0.0)
        tl.store(X + row * n + cols, x + y, mask=inside)
    elif HOW == "turned behind a barrier":
        y = tl.load(X + row * n + n - 1 - cols, mask=inside, other=0.0)
        tl.debug_barrier()
        tl.store(X + row * n + cols, x + y, mask=inside)
    elif HOW == "positive":
        tl.store(X + row * n + cols, 2.0 * x, mask=inside & (x > 0))
    elif HOW == "the next row's":
        y = tl.load(X + (row + 1) % 4 * n + cols, mask=inside, other=0.0)
        tl.store(X + row * n + cols, x + y, mask=cols < n - 3)
    elif HOW == "one behind":
        tl.store(X + row * n + cols, 2.0 * x, mask=inside)
        y = tl.load(X + row * n + cols + 1, mask=cols < n - 1, other=0.0)
        tl.store(X + row * n + cols, x + y, mask=inside)


@triton.jit
def in_place_of_loops(X, Lengths, n, B: tl.constexpr):
    """The first elements of each row of X, as many as Lengths says, over their sum."""
    row = tl.program_id(0)
    length, total = tl.load(Lengths + row), 0.0
    for k in range(0, n, B):
        cols = k + tl.arange(0, B)
        total += tl.sum(tl.load(X + row * n + cols, mask=cols < length, other=0.0), 0)
    for k in range(0, n, B):
        cols = k + tl.arange(0, B)
        x = tl.load(X + row * n + cols, mask=cols < length, other=0.0)
        tl.store(X + row * n + cols, x / total, mask=cols < length)


@triton.jit
def in_place_of_neighbours(X, Y, Lengths, n, SHIFT: tl.constexpr, B: tl.constexpr):
    """Tiles of rows of X that are stored over the tile next to them; a first tile of zeros in Y."""
    row = tl.program_id(0)
    length = tl.load(Lengths + row)
    for k in range(0, n, B):
        cols = k + tl.arange(0, B)
        at = cols + SHIFT
        x = tl.load(X + row * n + at, mask=(at >= 0) & (at < length), other=0.0)
        tl.store(X + row * n + cols, x + 1.0, mask=cols < length)
    tl.store(Y + row * n + tl.arange(0, B), tl.zeros([B], tl.float32))


@triton.jit
def in_place_and_again(X, Z, n, B: tl.constexpr):
    """Rows of X, one element shorter each, minus their sums, which are stored over them and loaded again for Z."""
    row, total = tl.program_id(0), tl.zeros([B], tl.float32)
    for k in range(0, n, B):
        cols = k + tl.arange(0, B)
        total += tl.load(X + row * n + cols, mask=cols < n - row, other=0.0)
    for k in range(0, n, B):
        cols = k + tl.arange(0, B)
        x = tl.load(X + row * n + cols, mask=cols < n - row, other=0.0)
        tl.store(X + row * n + cols, x - tl.sum(total, 0), mask=cols < n - row)
        y = tl.load(X + row * n + cols, mask=cols < n - row, other=0.0)
        tl.store(Z + row * n + cols, y, mask=cols < n)


@triton.jit
def put(p, value, mask):
    """Store a block."""
    tl.store(p, value, mask=mask)


@triton.jit
def put_twice(X, Z, n, BEFORE: tl.constexpr, BEHIND: tl.constexpr, B: tl.constexpr):
    """Rows that one line of code stores twice, and that are stored a third time from their end."""
    row, cols = tl.program_id(0) * n, tl.arange(0, B)
    p, inside = X + row + cols, cols < n
    z = tl.load(Z + row + cols, mask=inside, other=0.5)
    put(p, z, inside)
    if BEFORE:
        tl.debug_barrier()
    put(p, z + 1.0, inside)
    if BEHIND:
        tl.debug_barrier()
    tl.store(X + row + n - 1 - cols, z + 2.0, mask=inside & (cols != 2))


@triton.jit
def taken_and_set(X, Y, Z, n, BETWEEN: tl.constexpr, B: tl.constexpr):
    """Rows of X in Y, all but one of whose elements become those of Z."""
    row, cols = tl.program_id(0) * n, tl.arange(0, B)
    x = tl.load(X + row + cols, mask=cols < n, other=0.5)
    z = tl.load(Z + row + cols, mask=cols < n, other=0.5)
    tl.store(Y + row + cols, x, mask=cols < n)
    if BETWEEN:
        tl.debug_barrier()
    tl.store(X + row + cols, z, mask=(cols < n) & (cols != 2))
