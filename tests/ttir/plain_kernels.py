"""Kernels on plain tensors as Triton's tutorials have them, written anew, for tests."""

import numpy as np
import triton
import triton.language as tl


@triton.jit
def add(X, Y, O, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    x, y = tl.load(X + offs, mask=mask), tl.load(Y + offs, mask=mask)
    tl.store(O + offs, x + y, mask=mask)


@triton.jit
def softmax(Out, In, n_rows, n_cols, BLOCK: tl.constexpr):
    """Persistent: each program takes row after row."""
    cols = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=2):
        x = tl.load(In + row * n_cols + cols, mask=cols < n_cols, other=-float("inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(Out + row * n_cols + cols, e / tl.sum(e, axis=0), mask=cols < n_cols)


@triton.jit
def matmul(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """Tiles of C in groups of rows; pointers that wrap around at the ends of A and B."""
    pid = tl.program_id(0)
    tall, wide = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = pid // (GROUP * wide) * GROUP
    height = min(tall - first, GROUP)
    pm, pn = first + pid % (GROUP * wide) % height, pid % (GROUP * wide) // height
    rm, rn, rk = (pm * BM + tl.arange(0, BM)) % M, (pn * BN + tl.arange(0, BN)) % N, tl.arange(0, BK)
    a_at, b_at = A + rm[:, None] * K + rk[None], B + rk[:, None] * N + rn[None]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(K, BK)):
        a = tl.load(a_at, mask=rk[None] < K - k * BK, other=0.0)
        b = tl.load(b_at, mask=rk[:, None] < K - k * BK, other=0.0)
        acc = tl.dot(a, b, acc)
        a_at += BK
        b_at += BK * N
    cm, cn = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN)
    tl.store(C + cm[:, None] * N + cn[None], acc.to(tl.float16), mask=(cm[:, None] < M) & (cn[None] < N))


@triton.jit
def bias_gelu(
    A, B, Bias, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr = False
):
    rm, rn = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(A + rm[:, None] * K + (k + rk)[None])
        acc = tl.dot(a, tl.load(B + (k + rk)[:, None] * N + rn[None]), acc)
    x = acc + tl.load(Bias + rn)[None].to(tl.float32)
    if EXACT:
        half = 0.5 * x
        y = half + half * tl.erf(x * 0.7071067811865476)
    else:
        y = x / (1.0 + tl.exp(-1.702 * x))
    tl.store(C + rm[:, None] * N + rn[None], y.to(tl.float16))


@triton.jit
def row_sum(X, O, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(O + row, tl.sum(tl.load(X + row * N + cols, mask=cols < N, other=0.0), axis=0))


@triton.jit
def layer_norm(X, W, B, Y, Mean, Rstd, N, eps, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(X + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / N
    centred = tl.where(mask, x - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / N + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    w, b = tl.load(W + cols, mask=mask), tl.load(B + cols, mask=mask)
    tl.store(Y + row * N + cols, (centred * rstd * w + b).to(tl.float16), mask=mask)


@triton.jit
def roots(X, Y, N, B: tl.constexpr, EXACT: tl.constexpr):
    """Roots of what is not negative, some of it 0, by the approximate instruction or by the correct one."""
    row, cols = tl.program_id(0), tl.arange(0, B)
    x = tl.maximum(tl.load(X + row * N + cols).to(tl.float32), 0.0)
    tl.store(Y + row * N + cols, tl.sqrt_rn(x) if EXACT else tl.sqrt(x))


@triton.jit
def long_softmax(X, Y, N, B: tl.constexpr):
    """Rows longer than a block: statistics in one loop, results in a second."""
    row, m, l = tl.program_id(0), -float("inf"), 0.0
    for j in range(0, N, B):
        cols = j + tl.arange(0, B)
        x = tl.load(X + row * N + cols, mask=cols < N, other=-float("inf")).to(tl.float32)
        mn = tl.maximum(m, tl.max(x, 0))
        l = l * tl.exp(m - mn) + tl.sum(tl.exp(x - mn), 0)
        m = mn
    for j in range(0, N, B):
        cols = j + tl.arange(0, B)
        x = tl.load(X + row * N + cols, mask=cols < N, other=-float("inf")).to(tl.float32)
        tl.store(Y + row * N + cols, (tl.exp(x - m) / l).to(tl.float16), mask=cols < N)


@triton.jit
def long_norm(X, W, B, Y, Mean, Rstd, N, eps, BLOCK: tl.constexpr):
    """As the tutorial has it: sums of a block's columns are carried, and added up behind their loop."""
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(0, N, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        total += tl.load(X + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / N
    squares = tl.zeros([BLOCK], tl.float32)
    for j in range(0, N, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        x = tl.load(X + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        x = tl.where(cols < N, x - mean, 0.0)
        squares += x * x
    rstd = 1 / tl.sqrt(tl.sum(squares, 0) / N + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    for j in range(0, N, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        mask = cols < N
        x = tl.load(X + row * N + cols, mask=mask, other=0.0).to(tl.float32)
        w, b = tl.load(W + cols, mask=mask), tl.load(B + cols, mask=mask)
        tl.store(Y + row * N + cols, ((x - mean) * rstd * w + b).to(tl.float16), mask=mask)


def normed(X, W, B, eps):
    """Return the layer norm of rows."""
    centred = X - X.mean(1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(1, keepdims=True) + eps) * W + B
