"""Reductions and scans by own functions, as an H200 computed them (`combines_h200.json`, Triton 3.6)."""

import triton
import triton.language as tl


@triton.jit
def _welford(m1, s1, n1, m2, s2, n2):
    d, n = m2 - m1, n1 + n2
    w = tl.where(n == 0.0, 0.0, n2 / n)
    return m1 + d * w, s1 + s2 + d * d * n1 * w, n


@triton.jit
def _product(a, b):
    return a * b


@triton.jit
def _step(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def _softmax(m1, s1, m2, s2):
    m = tl.maximum(m1, m2)
    return m, s1 * tl.exp(m1 - m) + s2 * tl.exp(m2 - m)


@triton.jit
def _faded(a, b):
    return a * 0.75 + b


@triton.jit
def reduced(X, Y, Z, W, n, KIND: tl.constexpr, B: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, B)
    m = c < n
    x = tl.load(X + r * n + c, mask=m, other=0.0)
    if KIND == 0:
        a, b, w = tl.reduce((x, tl.zeros_like(x), m.to(tl.float32)), 0, _welford)
        tl.store(Y + r, a)
        tl.store(Z + r, b)
        tl.store(W + r, w)
    elif KIND == 1:
        tl.store(Y + r, tl.reduce(tl.where(m, x, 1.0), 0, _product))
    elif KIND == 2:
        a, b = tl.reduce((tl.where(m, x, -1e30), tl.where(m, 1.0, 0.0)), 0, _softmax)
        tl.store(Y + r, a)
        tl.store(Z + r, b)


@triton.jit
def scanned(X, G, Y, n, KIND: tl.constexpr, B: tl.constexpr, REV: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, B)
    m = c < n
    x = tl.load(X + r * n + c, mask=m, other=0.0)
    g = tl.load(G + r * n + c, mask=m, other=1.0)
    if KIND == 1:
        _, y = tl.associative_scan((g, x), 0, _step, reverse=REV)
    elif KIND == 2:
        y = tl.associative_scan(x, 0, _faded, reverse=REV)
    else:
        y = tl.cumsum(x, 0, reverse=REV)
    tl.store(Y + r * n + c, y, mask=m)


@triton.jit
def faded_rows(X, Y, R: tl.constexpr, B: tl.constexpr):
    """Which lane stores a row decides what it stores: this function is not the same in any order."""
    x = tl.load(X + tl.arange(0, R)[:, None] * B + tl.arange(0, B)[None, :])
    tl.store(Y + tl.arange(0, R), tl.reduce(x, 1, _faded))


@triton.jit
def _third(a, b):
    return (a + b) / 3.0


@triton.jit
def thirds(X, Y, N: tl.constexpr):
    p, c = tl.program_id(0), tl.arange(0, N)
    tl.store(Y + p, tl.reduce(tl.load(X + p * N + c), 0, _third))


@triton.jit
def _greater_magnitude(a, b):
    if tl.abs(a) >= tl.abs(b):
        return tl.abs(a)
    elif b < -2.5:
        return tl.maximum(b, tl.abs(b))
    else:
        return tl.abs(b)


@triton.jit
def _sum(a, b):
    if a == 0.0:
        return b
    else:
        return a + b


@triton.jit
def of_narrow_rows(X, Y, n, ADDS: tl.constexpr, B: tl.constexpr):
    """The greatest magnitude of each row by a function with branches; ADDS: a sum by one."""
    row, cols = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * n + cols, mask=cols < n, other=0.0)
    if ADDS:
        tl.store(Y + row, tl.reduce(x, 0, _sum))
    else:
        tl.store(Y + row, tl.reduce(x, 0, _greater_magnitude))
