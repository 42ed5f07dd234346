"""Bytes without a sign as floats, stored constants of bool, and the largest few of a row, one after another."""

import triton
import triton.language as tl


@triton.jit
def bytes_to_floats(X, ZEROS, SCALE, Y, SEEN, n, B: tl.constexpr):
    """Data of 8 bits without a sign less a zero point, times a scale; and where there was any, a constant."""
    r, i = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + r * n + i, mask=i < n, other=200)
    y = (x.to(tl.float32) - tl.load(ZEROS + r).to(tl.float32)) * tl.load(SCALE + r)
    tl.store(Y + r * n + i, y, mask=i < n)
    tl.store(SEEN + r * n + i, tl.full((B,), 1, tl.int1), mask=i < n)


@triton.jit
def sum_of_bytes(X, Y, n, B: tl.constexpr):
    r, i = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + r * n + i, mask=i < n, other=0)
    tl.store(Y + r, tl.sum(x.to(tl.float32), 0))


@triton.jit
def largest_few(X, W, I, N: tl.constexpr, K):
    """The K largest weights of a softmax, each found behind the others in a loop."""
    r, e = tl.program_id(0), tl.arange(0, N)
    x = tl.load(X + r * N + e)
    x = tl.exp(x - tl.max(x, 0))
    x = x / tl.sum(x, 0)
    for k in range(K):
        j = tl.argmax(x, 0)
        tl.store(W + r * K + k, tl.max(x, 0))
        tl.store(I + r * K + k, j)
        x = tl.where(e == j, -1.0, x)


@triton.jit
def signed_bytes(X, Y, n, B: tl.constexpr):
    i = tl.arange(0, B)
    x = tl.load(X + i, mask=i < n, other=0)
    tl.store(Y + i, x.to(tl.int8, bitcast=True).to(tl.float32), mask=i < n)


@triton.jit
def gated_experts(X, W, I, n, E: tl.constexpr, K: tl.constexpr, B: tl.constexpr, KP: tl.constexpr):
    """The K largest of each row and their indices, each put into its lane, as shares of their sum."""
    r, e, k = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, E), tl.arange(0, KP)
    x = tl.load(X + r[:, None] * E + e[None, :], mask=r[:, None] < n, other=-float("inf"))
    w, at = tl.zeros((B, KP), tl.float32), tl.zeros((B, KP), tl.int32)
    for i in tl.static_range(K):
        j = tl.argmax(x, 1)
        w = tl.where(k[None, :] == i, tl.max(x, 1)[:, None], w)
        at = tl.where(k[None, :] == i, j[:, None], at)
        x = tl.where(e[None, :] == j[:, None], -float("inf"), x)
    stored = (r[:, None] < n) & (k[None, :] < K)
    tl.store(W + r[:, None] * K + k[None, :], w / tl.sum(w, 1)[:, None], mask=stored)
    tl.store(I + r[:, None] * K + k[None, :], at, mask=stored)


@triton.jit
def rows_by_weight(X, KEEP, Y, D: tl.constexpr, B: tl.constexpr):
    r, c = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, D)
    keep = tl.load(KEEP + r) > 0.5
    x = tl.load(X + r[:, None] * D + c[None, :], mask=keep[:, None], other=-2.0)
    tl.store(Y + r[:, None] * D + c[None, :], tl.where(keep[:, None] | (c < 4)[None, :], x, 1.0))


@triton.jit
def rounded_by_the_largest(X, Y, SCALE, D: tl.constexpr, B: tl.constexpr):
    r, c = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, D)
    at = r[:, None] * D + c[None, :]
    x = tl.load(X + at).to(tl.float32)
    scale = tl.max(tl.abs(x)) / 127.0
    y = x / scale
    y += 0.5 * tl.where(y >= 0, 1, -1)
    tl.store(Y + at, y.to(tl.int8))
    tl.store(SCALE + tl.program_id(0), scale)
