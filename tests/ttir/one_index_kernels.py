"""Kernels whose tensors may have an axis of one index: a product of one row, a vector as a matrix of one column."""

import triton
import triton.language as tl


@triton.jit
def product(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WRAPS: tl.constexpr):
    """C = A B, with rows behind the last one hidden by a mask, or those of the first ones again."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        at, seen = k + rk, (k + rk)[None] < K
        if WRAPS:
            a = tl.load(A + (rm % M)[:, None] * K + at[None], mask=seen, other=0.0)
        else:
            a = tl.load(A + rm[:, None] * K + at[None], mask=(rm[:, None] < M) & seen, other=0.0)
        b = tl.load(B + at[:, None] * N + rn[None], mask=(at[:, None] < K) & (rn[None] < N), other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(C + rm[:, None] * N + rn[None], acc.to(tl.float16), mask=(rm[:, None] < M) & (rn[None] < N))


@triton.jit
def summed(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The sum of all lanes of a product whose rows begin again: not that of the rows of A."""
    rm = tl.arange(0, BM) % M
    rn, rk = tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(A + rm[:, None] * K + (k + rk)[None], mask=(k + rk)[None] < K, other=0.0)
        acc = tl.dot(a, tl.load(B + (k + rk)[:, None] * N + rn[None]), acc)
    tl.store(C + rn, tl.sum(acc, 0).to(tl.float16))


@triton.jit
def with_bias(X, S, Bias, Y, R, n, steps, BR: tl.constexpr, B: tl.constexpr):
    """Rows times a number each, plus a row that is the same for every ``steps``-th row."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    c, one = tl.arange(0, B)[None], tl.arange(0, 2)[None]
    seen = (r < R) & (c < n)
    s = tl.sum(tl.load(S + r + one, mask=(r < R) & (one < 1), other=0.0), 1)
    bias = tl.load(Bias + (r % steps) * n + c, mask=seen, other=0.0)
    tl.store(Y + r * n + c, tl.load(X + r * n + c, mask=seen, other=0.0) * s[:, None] + bias, mask=seen)


@triton.jit
def added_up(X, Y, R, n, BR: tl.constexpr, B: tl.constexpr):
    """The sum of all rows, in blocks of rows."""
    c, acc = tl.arange(0, B), tl.zeros((BR, B), tl.float32)
    for i in range(0, R, BR):
        r = i + tl.arange(0, BR)[:, None]
        acc += tl.load(X + r * n + c[None], mask=(c[None] < n) & (r < R), other=0.0)
    tl.store(Y + c, tl.sum(acc, 0), mask=c < n)


@triton.jit
def next_ones(X, Y, R, n, BR: tl.constexpr, B: tl.constexpr):
    """The largest of each row's elements and its next elements, and 1.25 behind the row's end."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    most = tl.full([BR, 1], 0.0, tl.float32)
    for j in range(0, n, B):
        c = j + tl.arange(0, B)[None]
        v = tl.load(X + r * n + c, mask=(c < n) & (r < R), other=1.5)
        w = tl.load(X + r * n + c + 1, mask=(c + 1 < n) & (r < R), other=1.25)
        most = tl.maximum(most, tl.max(v * w, 1)[:, None])
    tl.store(Y + r, most, mask=r < R)
