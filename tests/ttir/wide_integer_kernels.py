"""Kernels that store integers of 64 bits."""

import triton
import triton.language as tl


@triton.jit
def copied(X, Y, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(Y + at, tl.load(X + at, mask=at < n, other=0), mask=at < n)


@triton.jit
def packed(X, Y, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(X + at, mask=at < n, other=0)
    tl.store(Y + at, (x.to(tl.int64) << 20) | at.to(tl.int64), mask=at < n)


@triton.jit
def packed_in_loop(X, Y, n, B: tl.constexpr):
    for i in range(0, n, B):
        at = i + tl.arange(0, B)
        x = tl.load(X + tl.program_id(0) * n + at, mask=at < n, other=0)
        tl.store(Y + tl.program_id(0) * n + at, x.to(tl.int64) * 1000000007, mask=at < n)


@triton.jit
def joined_bits(X, Z, Y, n, m, B: tl.constexpr):
    p, i = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + p * B + i, mask=i < n, other=5)
    z = tl.load(Z + p * B + i, mask=i < m, other=9)
    tl.store(Y + p * B + i, x | z)
