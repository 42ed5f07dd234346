"""Kernels whose loops carry masks, and that join masks along an axis."""

import triton
import triton.language as tl


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def both(a, b):
    return a & b


@triton.jit
def any_of_row(X, Y, N, limit, B: tl.constexpr):
    at, holds = tl.arange(0, B), tl.zeros([B], tl.int1)
    for i in range(0, N, B):
        x = tl.load(X + tl.program_id(0) * N + i + at, mask=i + at < N, other=0.0)
        holds = holds | (x > limit)
    tl.store(Y + tl.program_id(0), tl.reduce(holds, 0, either).to(tl.int32))


@triton.jit
def all_of_row(X, Y, N, limit, B: tl.constexpr):
    at, holds = tl.arange(0, B), tl.full([B], 1, tl.int1)
    for i in range(0, N, B):
        x = tl.load(X + tl.program_id(0) * N + i + at, mask=i + at < N, other=1e30)
        holds = holds & (x > limit)
    tl.store(Y + tl.program_id(0), tl.reduce(holds, 0, both).to(tl.int32))


@triton.jit
def any_of_rows(X, Y, M, N, limit, R: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    holds = tl.zeros([R, B], tl.int1)
    for i in range(0, N, B):
        column = i + tl.arange(0, B)[None, :]
        x = tl.load(X + row * N + column, mask=(row < M) & (column < N), other=0.0)
        holds = holds | (x > limit)
    tl.store(Y + row, tl.reduce(holds, 1, either)[:, None].to(tl.int32), mask=row < M)


@triton.jit
def counted_until_met(X, Y, n, B: tl.constexpr):
    p, i, j = tl.program_id(0), tl.arange(0, B), 0
    is_met, count = i < 0, tl.zeros((B,), tl.int32)
    while j < n:
        x = tl.load(X + (p * n + j) * B + i)
        count += tl.where(is_met, 0, 1)
        is_met = is_met | (x > 0.8)
        j += 1
    tl.store(Y + p * B + i, tl.where(is_met, count, -1))
