"""Kernels whose integers are random ones, wrap in 32 bits, or are beyond those that float32 has."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dropped(X, Y, M, n, p, seed, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    inside = at < n
    x = tl.load(X + at, mask=inside)
    keeps = tl.rand(seed, at) > p
    tl.store(M + at, keeps, mask=inside)
    tl.store(Y + at, tl.where(keeps, x * 2.0, 0.0), mask=inside)


@triton.jit
def drawn_four(X, Y, n, seed, B: tl.constexpr):
    at = tl.program_id(0) * B * 4 + tl.arange(0, B)
    a, b, c, d = tl.rand4x(seed, at)
    tl.store(Y + at, tl.load(X + at, mask=at < n) + a, mask=at < n)
    tl.store(Y + at + B, b, mask=at + B < n)
    tl.store(Y + at + 2 * B, c, mask=at + 2 * B < n)
    tl.store(Y + at + 3 * B, d, mask=at + 3 * B < n)


@triton.jit
def drawn_integers(Y, Z, n, seed, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(Y + at, tl.randint(seed, at), mask=at < n)
    tl.store(Z + at, at * 100003 + 7, mask=at < n)


@triton.jit
def drawn_in_rows(X, Y, Seeds, rows, n, R: tl.constexpr, B: tl.constexpr):
    seed = tl.load(Seeds + tl.program_id(0))
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    column = tl.arange(0, B)[None]
    inside = (row < rows) & (column < n)
    at = row * n + column
    x = tl.load(X + at, mask=inside)
    tl.store(Y + at, tl.where(tl.rand(seed, at) > 0.5, x, 0.0), mask=inside)


@triton.jit
def attended(Q, K, V, O, n, seed, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DROPS: tl.constexpr):
    head = tl.program_id(1) * n
    row = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    q = tl.load(Q + (head + row[:, None]) * D + d[None])
    total = tl.zeros([M], tl.float32)
    high = tl.full([M], -1e30, tl.float32)
    out = tl.zeros([M, D], tl.float32)
    for start in range(0, n, N):
        key = start + tl.arange(0, N)
        k = tl.load(K + (head + key[:, None]) * D + d[None])
        v = tl.load(V + (head + key[:, None]) * D + d[None])
        scores = tl.dot(q, tl.trans(k))
        new = tl.maximum(high, tl.max(scores, 1))
        weights = tl.exp(scores - new[:, None])
        total = total * tl.exp(high - new) + tl.sum(weights, 1)
        if DROPS:
            weights = tl.where(tl.rand(seed, (head + row[:, None]) * n + key[None]) > 0.25, weights, 0.0)
        out = out * tl.exp(high - new)[:, None] + tl.dot(weights.to(v.dtype), v)
        high = new
    tl.store(O + (head + row[:, None]) * D + d[None], out / total[:, None])


@triton.jit
def weighted_by_place(X, Y, n, B: tl.constexpr):
    out = tl.zeros([B], tl.float32)
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        x = tl.load(X + tl.program_id(0) * n + at, mask=at < n, other=0.0)
        out += x * (at * at).to(tl.float32)
    tl.store(Y + tl.program_id(0), tl.sum(out, 0))
