"""Kernels that store several tensors."""

import triton
import triton.language as tl


@triton.jit
def norm_with_numbers(X, Y, Mean, Rstd, n, B: tl.constexpr):
    """A row minus its mean over its deviation, and both numbers of each row."""
    row, column = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * n + column, mask=column < n, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / n
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=0) / n - mean * mean + 1e-5)
    tl.store(Y + row * n + column, (x - mean) * rstd, mask=column < n)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)


@triton.jit
def halves(X, Left, Right, n, B: tl.constexpr):
    """Results of unlike shapes: a row's first half twice as large, and all of the row."""
    row, column = tl.program_id(0), tl.arange(0, B)
    half = tl.arange(0, B // 2)
    tl.store(Left + row * (n // 2) + half, 2.0 * tl.load(X + row * n + half, mask=half < n // 2), mask=half < n // 2)
    tl.store(Right + row * n + column, tl.load(X + row * n + column, mask=column < n) + 1.0, mask=column < n)


@triton.jit
def by_program(X, Y, n, B: tl.constexpr):
    """Programs that do unlike things: the first two rows are squared, and others halved."""
    row, column = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * n + column, mask=column < n, other=0.0)
    if row < 2:
        x = 2.0 * x
        y = x * x
    else:
        y = 0.5 * x
    tl.store(Y + row * n + column, y, mask=column < n)


@triton.jit
def states_of_chunks(K, V, H, HT, C: tl.constexpr, D: tl.constexpr, T: tl.constexpr, LATE: tl.constexpr):
    """States of linear attention: each is stored, then a product is added to it (LATE: it is read behind the sum)."""
    rows, dims = tl.arange(0, C), tl.arange(0, D)
    h = tl.zeros([D, D], tl.float32)
    twice = tl.zeros([D, D], tl.float32)
    for i in range(T // C):
        k = tl.load(K + dims[:, None] + (i * C + rows)[None, :] * D)
        v = tl.load(V + (i * C + rows)[:, None] * D + dims[None, :])
        tl.store(H + i * D * D + dims[:, None] * D + dims[None, :], h)
        new = h + tl.dot(k, v)
        if LATE:
            twice = new - h
        h = new
    tl.store(HT + dims[:, None] * D + dims[None, :], h + twice)


@triton.jit
def scaled_states(K, V, H, HT, C: tl.constexpr, D: tl.constexpr, T: tl.constexpr, STORES: tl.constexpr):
    """States of linear attention: each is halved, and a product is added to it; one of the three is stored."""
    rows, dims = tl.arange(0, C), tl.arange(0, D)
    h = tl.zeros([D, D], tl.float32)
    for i in range(T // C):
        k = tl.load(K + dims[:, None] + (i * C + rows)[None, :] * D)
        v = tl.load(V + (i * C + rows)[:, None] * D + dims[None, :])
        places = H + i * D * D + dims[:, None] * D + dims[None, :]
        h = h * 0.5
        if STORES == "before":
            tl.store(places, h)
        product = tl.dot(k, v)
        if STORES == "product":
            tl.store(places, product)
        h += product
        if STORES == "behind":
            tl.store(places, h)
    tl.store(HT + dims[:, None] * D + dims[None, :], h)


@triton.jit
def summed_states(K, V, H, HT, C: tl.constexpr, D: tl.constexpr, T: tl.constexpr):
    """States that are sums of products, each stored."""
    rows, dims = tl.arange(0, C), tl.arange(0, D)
    h = tl.zeros([D, D], tl.float32)
    for i in range(T // C):
        k = tl.load(K + dims[:, None] + (i * C + rows)[None, :] * D)
        v = tl.load(V + (i * C + rows)[:, None] * D + dims[None, :])
        h += tl.dot(k, v)
        tl.store(H + i * D * D + dims[:, None] * D + dims[None, :], h)
    tl.store(HT + dims[:, None] * D + dims[None, :], h)


@triton.jit
def numbers_of_other_rows(X, Y, T, R, n, tiles, numbers, BR: tl.constexpr, B: tl.constexpr):
    """A tile of some rows, and a number of others."""
    r, c = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, B)
    x = tl.load(X + r[:, None] * n + c[None], mask=(r[:, None] < R) & (c[None] < n), other=0.0)
    total = tl.sum(x, 1)
    tl.store(Y + r[:, None] * n + c[None], x - total[:, None], mask=(r[:, None] < tiles) & (c[None] < n))
    tl.store(T + r, total, mask=r < numbers)


@triton.jit
def number_beside_some_tiles(X, Y, T, n, rows, B: tl.constexpr):
    """A number in each program, and a tile in some."""
    r, c = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + r * n + c, mask=c < n, other=0.0)
    tl.store(Y + r * n + c, x - tl.sum(x, 0), mask=(c < n) & (r < rows))
    tl.store(T + r, tl.sum(x, 0))


@triton.jit
def copied_beside(X, Y, Z, T, n, B: tl.constexpr, KIND: tl.constexpr):
    """A copy of what is loaded, beside results that are computed from it, or a second copy."""
    r, c = tl.program_id(0), tl.arange(0, B)
    if KIND == 0:
        total = tl.zeros([B], tl.float32)
        for j in range(0, n, B):
            x = tl.load(X + r * n + j + c, mask=j + c < n, other=0.0)
            tl.store(Y + r * n + j + c, x, mask=j + c < n)
            total += x
        tl.store(T + r, tl.sum(total, 0))
    else:
        x = tl.load(X + r * n + c, mask=c < n, other=0.0)
        tl.store(Y + r * n + c, x, mask=c < n)
        if KIND == 1:
            tl.store(Z + r * n + c, x, mask=c < n)
        else:
            tl.store(Z + r * n + c, x * 2, mask=c < n)
            tl.store(T + r, tl.sum(x, 0))


@triton.jit
def stored_in_some_tiles(X, Y, Z, n, B: tl.constexpr, KIND: tl.constexpr):
    """Tiles of a row, each a block of its own, of which some have a store before the last one."""
    r = tl.program_id(0)
    for j in range(0, n, B):
        c = j + tl.arange(0, B)
        x = tl.load(X + r * n + c, mask=c < n, other=0.0)
        if j > 0 if KIND == "tiles" else r > 1:
            tl.store(Y + r * n + c, 2 * x, mask=c < n)
        tl.store(Z + r * n + c, 3 * x, mask=c < n)


@triton.jit
def stored_in_inner_tiles(X, Y, n, times, B: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of X that are summed and overwritten tile by tile, several times."""
    r, c = tl.program_id(0), tl.arange(0, BLOCK)
    for _ in range(times):
        total = tl.sum(tl.load(X + r * n + c, mask=c < n, other=0.0), 0)
        for j in range(0, n, B):
            at = j + tl.arange(0, B)
            y = tl.load(Y + r * n + at, mask=at < n, other=0.0)
            tl.store(X + r * n + at, y + total, mask=at < n)
