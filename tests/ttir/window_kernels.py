"""Kernels whose masks have lower bounds, chunks of which the last is shorter, and blocks wider than what is stored."""

import triton
import triton.language as tl


@triton.jit
def pooled(X, Y, n, m, rows, columns, P: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr, B: tl.constexpr):
    """Maxima of windows of K by K elements of a padded image."""
    blocks = tl.cdiv(columns, B)
    h = tl.program_id(1) // blocks * B + tl.arange(0, B)
    w = tl.program_id(1) % blocks * B + tl.arange(0, B)
    most = tl.full((B, B), float("-inf"), tl.float32)
    for a in range(K):
        for b in range(K):
            i, j = h[:, None] * STRIDE - P + a, w[None, :] * STRIDE - P + b
            inside = (i >= 0) & (i < n) & (j >= 0) & (j < m)
            most = tl.maximum(most, tl.load(X + tl.program_id(0) * n * m + i * m + j, inside, other=float("-inf")))
    at = tl.program_id(0) * rows * columns + h[:, None] * columns + w[None, :]
    tl.store(Y + at, most, (h[:, None] < rows) & (w[None, :] < columns))


@triton.jit
def averaged(X, Y, n, m, B: tl.constexpr):
    """Means of what an image has of windows of three by three elements."""
    h, w = tl.arange(0, B), tl.arange(0, B)
    total, count = tl.zeros((B, B), tl.float32), tl.zeros((B, B), tl.int32)
    for a in range(3):
        for b in range(3):
            i, j = h[:, None] - 1 + a, w[None, :] - 1 + b
            inside = (i >= 0) & (i < n) & (j >= 0) & (j < m)
            total += tl.load(X + tl.program_id(0) * n * m + i * m + j, inside, other=0.0)
            count += inside.to(tl.int32)
    mean = tl.where(count != 0, total / count.to(tl.float32), 0.0)
    at = tl.program_id(0) * n * m + h[:, None] * m + w[None, :]
    tl.store(Y + at, mean, (h[:, None] < n) & (w[None, :] < m))


@triton.jit
def beyond(X, Y, n, m, B: tl.constexpr):
    """A window whose mask lets it leave the tensor."""
    i, j = tl.arange(0, B)[:, None] - 2, tl.arange(0, B)[None, :] - 2
    x = tl.load(X + i * m + j, (i >= 0) & (i < n + 4) & (j >= 0) & (j < m), other=0.0)
    tl.store(Y + tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :], x)


@triton.jit
def chunk_products(X, Z, Y, n, D: tl.constexpr, C: tl.constexpr, B: tl.constexpr, SAFE: tl.constexpr):
    """Products of a matrix of each chunk of a sequence and the chunk's rows; the last chunk may be shorter."""
    chunk = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    c, d, i = tl.program_id(0) * C, tl.arange(0, D), tl.arange(0, C)
    left = tl.minimum(C, n - c)
    total = tl.zeros((C, D), tl.float32)
    for k in range(tl.cdiv(left, B)):
        j = k * B + tl.arange(0, B)
        z = tl.load(Z + chunk * C * C + i[:, None] * C + j[None, :], j[None, :] < left, other=0.0)
        own = X + (tl.program_id(1) * n + c + j)[:, None] * D + d[None, :]
        x = tl.load(own, j[:, None] < left, other=0.0) if SAFE else tl.load(own)
        total += tl.dot(z, x)
    tl.store(Y + (tl.program_id(1) * n + c + i)[:, None] * D + d[None, :], total, i[:, None] < left)


@triton.jit
def chunk_numbers(X, A, Y, n, PLUS: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """Sums of the rows of each chunk, added to a tensor of whole chunks, and the rows."""
    i, d = tl.arange(0, C), tl.arange(0, D)
    row = tl.program_id(0) * C + i
    at = (tl.program_id(1) * n + row)[:, None] * D + d[None, :]
    x = tl.load(X + at, row[:, None] < n, other=0.0)
    tl.atomic_add(A + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * C + i, tl.sum(x, 1) + PLUS)
    tl.store(Y + at, x * 3.0, row[:, None] < n)


@triton.jit
def first_columns(X, W, Y, m, n, HOW: tl.constexpr, B: tl.constexpr):
    """The first columns of a block, times the numbers of a row or beside a sum of all columns."""
    i = tl.arange(0, B)
    x = tl.load(X + (tl.program_id(0) * B + i)[:, None] * n + i[None, :])
    x = x * tl.load(W + i)[None, :] if HOW == "row" else x - tl.max(x, 1)[:, None]
    tl.store(Y + (tl.program_id(0) * B + i)[:, None] * m + i[None, :], x, i[None, :] < m)


@triton.jit
def chunk_pairs(X, Y, n, OTHER: tl.constexpr, LESS: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """Products of all pairs of rows of each chunk; rows behind the sequence are a number."""
    i, d = tl.arange(0, C), tl.arange(0, D)
    left = tl.minimum(C, n - tl.program_id(0) * C) - LESS
    at = X + (tl.program_id(1) * n + tl.program_id(0) * C) * D
    x = tl.load(at + i[:, None] * D + d[None, :], i[:, None] < left, other=OTHER)
    y = tl.load(at + i[None, :] * D + d[:, None], i[None, :] < left, other=OTHER)
    chunk = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(Y + chunk * C * C + i[:, None] * C + i[None, :], tl.dot(x, y))


@triton.jit
def chunk_differences(G, Y, n, OTHER: tl.constexpr, C: tl.constexpr):
    """Exponentials of the differences of all pairs of numbers of each chunk."""
    i = tl.arange(0, C)
    at = G + tl.program_id(1) * n + tl.program_id(0) * C
    g = tl.load(at + i, tl.program_id(0) * C + i < n, other=OTHER)
    chunk = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(Y + chunk * C * C + i[:, None] * C + i[None, :], tl.exp(g[:, None] - g[None, :]))
