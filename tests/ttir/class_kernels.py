"""Kernels whose bits depend on warps: sums of rows that cross warps, and products that the compiler contracts."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_decode(Q, K, V, O, L, scale, keys, split, BN: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """Attention of the heads of one group to a part of the keys: 16 rows, so that warps lie along the keys."""
    kv_head, part = tl.program_id(0), tl.program_id(1)
    rows, at, d = tl.arange(0, 16), tl.arange(0, BN), tl.arange(0, D)
    heads = kv_head * G + rows
    is_head = rows < G
    q = tl.load(Q + heads[:, None] * D + d[None], mask=is_head[:, None], other=0.0)
    m = tl.zeros([16], tl.float32) - float("inf")
    l = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    first = part * split
    for j in range(first, first + split, BN):
        k = tl.load(K + kv_head * keys * D + (j + at)[None] * D + d[:, None])
        s = tl.dot(q, k) * scale
        mn = tl.maximum(m, tl.max(s, 1))
        alpha, p = tl.exp(m - mn), tl.exp(s - mn[:, None])
        v = tl.load(V + kv_head * keys * D + (j + at)[:, None] * D + d[None])
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        l = l * alpha + tl.sum(p, 1)
        m = mn
    parts = tl.num_programs(1)
    tl.store(O + (heads[:, None] * parts + part) * D + d[None], acc / l[:, None], mask=is_head[:, None])
    tl.store(L + heads * parts + part, m + tl.log(l), mask=is_head)


@triton.jit
def rotated(X, Y, Cos, Sin, H: tl.constexpr, D: tl.constexpr):
    """Rotary positions of all heads of a token, in the format of the tensors."""
    row, half = tl.program_id(0), tl.arange(0, D // 2)
    c, s = tl.load(Cos + row * (D // 2) + half), tl.load(Sin + row * (D // 2) + half)
    at = row * H * D + tl.arange(0, H)[:, None] * D + half[None]
    one, other = tl.load(X + at), tl.load(X + at + D // 2)
    tl.store(Y + at + D // 2, other * c + one * s)
    tl.store(Y + at, one * c - other * s)


@triton.jit
def joined(X, Y, B: tl.constexpr):
    """Sums of products of three vectors, element by element."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    x, y, z = tl.load(X + i), tl.load(X + i + 65536), tl.load(X + i + 131072)
    tl.store(Y + i, (x * y + y * z) * x - z * z)
    tl.store(Y + i + 65536, tl.exp(x.to(tl.float32)) * y + x.to(tl.float32) * z)


@triton.jit
def added_up(X, Y, H, N: tl.constexpr, BH: tl.constexpr):
    """Cumulative sums of rows, some of them a program."""
    rows, n = tl.program_id(0) * BH + tl.arange(0, BH), tl.arange(0, N)
    at, inside = rows[:, None] * N + n[None], (rows < H)[:, None]
    tl.store(Y + at, tl.cumsum(tl.load(X + at, mask=inside, other=0.0), 1), mask=inside)


@triton.jit
def beside_square(X, T, Y, Z, n, B: tl.constexpr):
    """A loop that adds the square of a number, which code computes before the loop, and one that contracts a square."""
    row = tl.program_id(0)
    t = tl.load(T + row)
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        x = tl.load(X + row * n + at, mask=at < n, other=0.0)
        tl.store(Y + row * n + at, x + t * t, mask=at < n)
        tl.store(Z + row * n + at, x * x + t, mask=at < n)
