"""Kernels that reduce blocks down their rows and along them: Sinkhorn's steps, one query's attention, a norm's backward
pass.
"""

import triton
import triton.language as tl


@triton.jit
def sinkhorn(X, Y, N: tl.constexpr, STEPS: tl.constexpr):
    p = tl.program_id(0)
    at = p * N * N + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.exp(tl.load(X + at))
    for _ in tl.static_range(STEPS):
        x = x / tl.sum(x, axis=1)[:, None]
        x = x / tl.sum(x, axis=0)[None, :]
    tl.store(Y + at, x)


@triton.jit
def largest_each_way(X, Y, N: tl.constexpr, M: tl.constexpr):
    p = tl.program_id(0)
    at = p * M * N + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(X + at)
    tl.store(Y + at, x * tl.max(x, axis=0)[None, :] - tl.max(x, axis=1)[:, None])


@triton.jit
def decode(Q, K, V, O, n, D: tl.constexpr, B: tl.constexpr):
    h, c = tl.program_id(0), tl.arange(0, D)
    q = tl.load(Q + h * D + c)
    m, l, acc = -float("inf"), 0.0, tl.zeros((D,), tl.float32)
    for i in range(0, n, B):
        r = i + tl.arange(0, B)
        at = h * n * D + r[:, None] * D + c[None, :]
        k = tl.load(K + at, mask=r[:, None] < n, other=0.0)
        s = tl.where(r < n, tl.sum(q[None, :] * k, axis=1), -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        a, p = tl.exp(m - m_new), tl.exp(s - m_new)
        v = tl.load(V + at, mask=r[:, None] < n, other=0.0)
        l = l * a + tl.sum(p, 0)
        acc = acc * a + tl.sum(p[:, None] * v, axis=0)
        m = m_new
    tl.store(O + h * D + c, acc / l)


@triton.jit
def norm_backward(DY, X, W, DX, DW, N: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr):
    p, c = tl.program_id(0), tl.arange(0, N)
    w, dw = tl.load(W + c), tl.zeros((N,), tl.float32)
    for i in range(0, ROWS, B):
        at = (p * ROWS + i + tl.arange(0, B))[:, None] * N + c[None, :]
        x, dy = tl.load(X + at), tl.load(DY + at)
        rstd = 1 / tl.sqrt(tl.sum(x * x, axis=1) / N + 1e-5)
        hat = x * rstd[:, None]
        scaled = w[None, :] * dy
        dx = (scaled - hat * (tl.sum(hat * scaled, axis=1) / N)[:, None]) * rstd[:, None]
        tl.store(DX + at, dx)
        dw += tl.sum(dy * hat, axis=0)
    tl.store(DW + p * N + c, dw)


@triton.jit
def centred_products(X, Y, N: tl.constexpr):
    p, c = tl.program_id(0), tl.arange(0, N)
    x = tl.load(X + p * N + c)
    x = x - tl.sum(x) / N
    tl.store(Y + p * N * N + c[:, None] * N + c[None, :], x[:, None] * x[None, :])


@triton.jit
def padded_sinkhorn(X, Y, M: tl.constexpr, N: tl.constexpr, B: tl.constexpr, STEPS: tl.constexpr):
    p, r, c = tl.program_id(0), tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    at, mask = p * M * N + r * N + c, (r < M) & (c < N)
    x = tl.load(X + at, mask=mask, other=-float("inf"))
    x = tl.where(mask, tl.exp(x - tl.max(x, axis=1)[:, None]), 0.0)
    for _ in tl.static_range(STEPS):
        x = x / (tl.sum(x, axis=1)[:, None] + 1e-6)
        x = x / (tl.sum(x, axis=0)[None, :] + 1e-6)
    tl.store(Y + at, x, mask=mask)


@triton.jit
def sums_of_sums_down(X, R, D: tl.constexpr, B: tl.constexpr):
    r, c = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, D)
    x = tl.load(X + r[:, None] * D + c[None, :])
    tl.store(R + r, tl.sum(tl.cumsum(x * 2.0, 0), 1))
