"""Kernels in the forms that Triton's tutorials and serving libraries have, each launched by a wrapper of its own."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({"B": 64}, num_warps=4), triton.Config({"B": 128}, num_warps=8)], key=["n"])
@triton.jit
def add(X, Y, Z, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(Z + i, tl.load(X + i, mask=i < n) + tl.load(Y + i, mask=i < n), mask=i < n)


@triton.jit
def softmax_rows(Y, X, sy, sx, rows, columns, B: tl.constexpr, num_stages: tl.constexpr):
    first, step = tl.program_id(0), tl.num_programs(0)
    for row in tl.range(first, rows, step, num_stages=num_stages):
        c = tl.arange(0, B)
        x = tl.load(X + row * sx + c, mask=c < columns, other=-float("inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(Y + row * sy + c, e / tl.sum(e, axis=0), mask=c < columns)


@triton.heuristics({"IS_WHOLE": lambda a: a["K"] % a["BK"] == 0})
@triton.jit
def product(A, B, C, Bias, M, N, K, am, ak, bk, bn, cm, cn,
            BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, ACT: tl.constexpr,
            IS_WHOLE: tl.constexpr):  # fmt: skip
    pid, across = tl.program_id(0), tl.cdiv(N, BN)
    size = GROUP * across
    first = pid // size * GROUP
    down = min(tl.cdiv(M, BM) - first, GROUP)
    pm, pn = first + pid % size % down, pid % size // down
    rm, rn, rk = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN), tl.arange(0, BK)
    a = A + (rm % M)[:, None] * am + rk[None, :] * ak
    b = B + rk[:, None] * bk + (rn % N)[None, :] * bn
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(tl.cdiv(K, BK)):
        if IS_WHOLE:
            acc = tl.dot(tl.load(a), tl.load(b), acc)
        else:
            left = K - k * BK
            acc = tl.dot(tl.load(a, mask=rk[None, :] < left, other=0.0),
                         tl.load(b, mask=rk[:, None] < left, other=0.0), acc)  # fmt: skip
        a += BK * ak
        b += BK * bk
    if Bias is not None:
        acc += tl.load(Bias + rn, mask=rn < N, other=0.0)[None, :].to(tl.float32)
    if ACT == "leaky":
        acc = tl.where(acc >= 0, acc, 0.01 * acc)
    if ACT == "clamp":
        acc = tl.minimum(tl.maximum(acc, -2.0), 3.0)
    c = C + rm[:, None] * cm + rn[None, :] * cn
    tl.store(c, acc.to(C.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def layer_norm(X, Y, W, B, Mean, Rstd, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    X += row * stride
    Y += row * stride
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for at in range(0, N, BLOCK):
        c = at + tl.arange(0, BLOCK)
        total += tl.load(X + c, mask=c < N, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / N
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for at in range(0, N, BLOCK):
        c = at + tl.arange(0, BLOCK)
        x = tl.load(X + c, mask=c < N, other=0.0).to(tl.float32)
        x = tl.where(c < N, x - mean, 0.0)
        squares += x * x
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / N + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    for at in range(0, N, BLOCK):
        c = at + tl.arange(0, BLOCK)
        x = tl.load(X + c, mask=c < N, other=0.0).to(tl.float32)
        y = (x - mean) * rstd * tl.load(W + c, mask=c < N) + tl.load(B + c, mask=c < N)
        tl.store(Y + c, y.to(Y.dtype.element_ty), mask=c < N)


@triton.jit
def _inner(acc, l, m, q, K, V, at, low, high, scale, rm, rn, BN: tl.constexpr, IS_DIAGONAL: tl.constexpr):
    for j in tl.range(low, high, BN):
        k = K.load([at + j, 0]).T
        s = tl.dot(q, k)
        if IS_DIAGONAL:
            s = s * scale + tl.where(rm[:, None] >= (j + rn[None, :]), 0, -1.0e6)
            new = tl.maximum(m, tl.max(s, 1))
            s -= new[:, None]
        else:
            new = tl.maximum(m, tl.max(s, 1) * scale)
            s = s * scale - new[:, None]
        p = tl.math.exp2(s)
        alpha = tl.math.exp2(m - new)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(tl.float16), V.load([at + j, 0]), acc)
        l = l * alpha + tl.sum(p, 1)
        m = new
    return acc, l, m


@triton.jit
def attention(Q, K, V, O, L, scale, Z, H, S, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              CAUSAL: tl.constexpr):  # fmt: skip
    pm, head = tl.program_id(0), tl.program_id(1)
    whole = Z * H * S
    Qd = tl.make_tensor_descriptor(Q, shape=[whole, D], strides=[D, 1], block_shape=[BM, D])
    Kd = tl.make_tensor_descriptor(K, shape=[whole, D], strides=[D, 1], block_shape=[BN, D])
    Vd = tl.make_tensor_descriptor(V, shape=[whole, D], strides=[D, 1], block_shape=[BN, D])
    Od = tl.make_tensor_descriptor(O, shape=[whole, D], strides=[D, 1], block_shape=[BM, D])
    at = head * S
    rm, rn = pm * BM + tl.arange(0, BM), tl.arange(0, BN)
    m = tl.zeros([BM], dtype=tl.float32) - float("inf")
    l = tl.zeros([BM], dtype=tl.float32) + 1.0
    acc = tl.zeros([BM, D], dtype=tl.float32)
    q = Qd.load([at + pm * BM, 0])
    scale *= 1.44269504
    if CAUSAL:
        acc, l, m = _inner(acc, l, m, q, Kd, Vd, at, 0, pm * BM, scale, rm, rn, BN, False)
        acc, l, m = _inner(acc, l, m, q, Kd, Vd, at, pm * BM, (pm + 1) * BM, scale, rm, rn, BN, True)
    else:
        acc, l, m = _inner(acc, l, m, q, Kd, Vd, at, 0, S, scale, rm, rn, BN, False)
    tl.store(L + head * S + rm, m + tl.math.log2(l))
    Od.store([at + pm * BM, 0], (acc / l[:, None]).to(tl.float16))


@triton.jit
def persistent_product(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SMS: tl.constexpr):
    across, tiles = tl.cdiv(N, BN), tl.cdiv(M, BM) * tl.cdiv(N, BN)
    rk = tl.arange(0, BK)
    for tile in tl.range(tl.program_id(0), tiles, SMS, flatten=True):
        pm, pn = tile // across, tile % across
        rm, rn = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN)
        fm, fn = tl.where(rm < M, rm, 0), tl.where(rn < N, rn, 0)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(tl.cdiv(K, BK)):
            left = K - k * BK
            a = tl.load(A + fm[:, None] * K + (k * BK + rk)[None, :], mask=rk[None, :] < left, other=0.0)
            b = tl.load(B + (k * BK + rk)[:, None] * N + fn[None, :], mask=rk[:, None] < left, other=0.0)
            acc = tl.dot(a, b, acc)
        tl.store(C + rm[:, None] * N + rn[None, :], acc.to(tl.float16), mask=(rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def descriptor_product(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pm, pn = tl.program_id(0), tl.program_id(1)
    a = tl.make_tensor_descriptor(A, shape=[M, K], strides=[K, 1], block_shape=[BM, BK])
    b = tl.make_tensor_descriptor(B, shape=[N, K], strides=[K, 1], block_shape=[BN, BK])
    c = tl.make_tensor_descriptor(C, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(tl.cdiv(K, BK)):
        acc = tl.dot(a.load([pm * BM, k * BK]), b.load([pn * BN, k * BK]).T, acc)
    c.store([pm * BM, pn * BN], acc.to(tl.float16))


@triton.jit
def rows(X, Y, S, W, xb, xs, xh, yb, ys, yh, heads, length, lengths, columns, B: tl.constexpr, OP: tl.constexpr,
         IS_LEFT: tl.constexpr, STORES: tl.constexpr):  # fmt: skip
    """One row of (batch, sequence, heads, columns) a program; rows beyond a sequence's length are left out."""
    batch, at, head = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    if IS_LEFT:  # noqa: SIM102 - a branch of the kernel, in one of the compiler
        if at >= tl.load(lengths + batch):
            return
    c = tl.arange(0, B)
    low = -float("inf") if OP == "softmax" else 0.0
    x = tl.load(X + batch * xb + at * xs + head * xh + c, mask=c < columns, other=low).to(tl.float32)
    if OP == "softmax":
        e = tl.exp(x - tl.max(x, 0))
        stat = tl.sum(e, 0)
        y = e / stat
    elif OP == "rms":
        stat = tl.rsqrt(tl.sum(x * x, 0) / columns + 1e-6)
        y = x * stat * tl.load(W + c, mask=c < columns, other=0.0).to(tl.float32)
    elif OP == "leaky":
        stat = tl.sum(x, 0)
        y = tl.where(x > 0.25, x, x * 0.5)
    elif OP == "clamp":
        stat = tl.max(tl.abs(x), 0)
        y = tl.minimum(tl.maximum(x, -0.5), stat * 0.25)
    else:
        stat = tl.sum(x, 0)
        y = x * tl.sigmoid(x)
    tl.store(Y + batch * yb + at * ys + head * yh + c, y.to(Y.dtype.element_ty), mask=c < columns)
    if STORES:
        tl.store(S + (batch * length + at) * heads + head, stat)


@triton.jit
def varlen(Q, K, V, O, L, starts, lengths, table, qs, qh, ks, kh, vs, vh, os, oh, scale, groups, pages, length,
           D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr,
           WINDOW: tl.constexpr, LOW: tl.constexpr, SCALED: tl.constexpr, STORES: tl.constexpr):  # fmt: skip
    """Attention of packed sequences of (tokens, heads, size), or of keys in pages that a table names."""
    pm, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, size = tl.load(starts + number), tl.load(lengths + number)
    if pm * BM >= size:
        return
    rm, rn, rd = pm * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    q = tl.load(Q + (start + rm)[:, None] * qs + head * qh + rd[None, :], mask=rm[:, None] < size, other=0.0)
    if SCALED:
        q = (q.to(tl.float32) * (scale * 1.44269504)).to(Q.dtype.element_ty)
    m = tl.full([BM], -float("inf"), dtype=tl.float32)
    l = tl.zeros([BM], dtype=tl.float32)
    acc = tl.zeros([BM, D], dtype=tl.float32)
    end = tl.minimum((pm + 1) * BM, size) if CAUSAL else size
    for j in range(0, end, BN):
        if PAGE:  # noqa: SIM108
            first = tl.load(table + number * pages + j // PAGE) * PAGE + j % PAGE
        else:
            first = start + j
        key = j + rn
        k = tl.load(K + (first + rn)[None, :] * ks + head // groups * kh + rd[:, None], mask=key[None, :] < size,
                    other=0.0)  # fmt: skip
        s = tl.dot(q, k)
        if not SCALED:
            s *= scale * 1.44269504
        if CAUSAL:
            seen = (rm[:, None] >= key[None, :]) & (key[None, :] < size)
            if WINDOW:
                seen = seen & (rm[:, None] - key[None, :] < WINDOW)
            s += tl.where(seen, 0, LOW)
        else:
            s = tl.where(key[None, :] < size, s, -float("inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - new[:, None])
        alpha = tl.math.exp2(m - new)
        v = tl.load(V + (first + rn)[:, None] * vs + head // groups * vh + rd[None, :], mask=key[:, None] < size,
                    other=0.0)  # fmt: skip
        acc = acc * alpha[:, None] + tl.dot(p.to(V.dtype.element_ty), v)
        l = l * alpha + tl.sum(p, 1)
        m = new
    tl.store(O + (start + rm)[:, None] * os + head * oh + rd[None, :], (acc / l[:, None]).to(O.dtype.element_ty),
             mask=rm[:, None] < size)  # fmt: skip
    if STORES:
        tl.store(L + head * length + start + rm, m + tl.math.log2(l), mask=rm < size)


@triton.jit
def scaled_heads(X, Y, S, M, N: tl.constexpr, BM: tl.constexpr):
    rm, rn, head = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, N), tl.program_id(1)
    at = head * M * N + rm[:, None] * N + rn[None, :]
    tl.store(Y + at, tl.load(X + at) * tl.load(S + head))


@triton.jit
def some_tiles(Q, K, V, O, T, S, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rm, rn, rd = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    q = tl.load(Q + rm[:, None] * D + rd[None, :])
    m, l = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for j in range(0, S, BN):
        if tl.load(T + j // BN) != 0:
            s = tl.dot(q, tl.load(K + (j + rn)[None, :] * D + rd[:, None]))
            new = tl.maximum(m, tl.max(s, 1))
            p, alpha = tl.math.exp2(s - new[:, None]), tl.math.exp2(m - new)
            acc = acc * alpha[:, None] + tl.dot(p.to(tl.float16), tl.load(V + (j + rn)[:, None] * D + rd[None, :]))
            l = l * alpha + tl.sum(p, 1)
            m = new
    tl.store(O + rm[:, None] * D + rd[None, :], (acc / l[:, None]).to(tl.float16))


@triton.jit
def in_place(X, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(X + i, tl.load(X + i, mask=i < n) * 2.0, mask=i < n)


@triton.jit
def running_maximum(X, Y, n, B: tl.constexpr):
    row, c = tl.program_id(0), tl.arange(0, B)
    most = -float("inf")
    for at in range(0, n, B):
        x = tl.load(X + row * n + at + c, mask=at + c < n, other=-float("inf"))
        most = tl.max(tl.maximum(x, most))
    total = 0.0
    for at in range(0, n, B):
        x = tl.load(X + row * n + at + c, mask=at + c < n, other=0.0)
        total += tl.sum(tl.where(at + c < n, tl.exp(x - most), 0.0))
    for at in range(0, n, B):
        x = tl.load(X + row * n + at + c, mask=at + c < n)
        tl.store(Y + row * n + at + c, x - most - tl.log(total), mask=at + c < n)


@triton.jit
def turned(Q, Cos, Sin, qs, qh, heads, length, D: tl.constexpr, PER: tl.constexpr):
    """Halves of each head's row turned in their place; a program goes over some heads of a token."""
    at, c = tl.program_id(0), tl.arange(0, D)
    cos = tl.load(Cos + at % length * D + c)
    sin = tl.load(Sin + at % length * D + c)
    first = tl.program_id(1) * PER
    for head in range(first, min(first + PER, heads)):
        q = Q + at * qs + head * qh + c
        a, b = tl.load(q).to(tl.float32), tl.load(q + D).to(tl.float32)
        tl.store(q, (a * cos - b * sin).to(Q.dtype.element_ty))
        tl.store(q + D, (b * cos + a * sin).to(Q.dtype.element_ty))


@triton.jit
def divergence(X, Y, L, G, stride, N, B: tl.constexpr):
    """Two tiles of results: what two rows of logarithms differ by, and how that moves."""
    row = tl.program_id(0) * stride
    for at in range(0, N, B):
        c = at + tl.arange(0, B)
        x = tl.load(X + row + c, mask=c < N, other=-float("inf")).to(tl.float32)
        y = tl.load(Y + row + c, mask=c < N, other=-float("inf")).to(tl.float32)
        most = tl.maximum(tl.max(x, axis=0), tl.max(y, axis=0))
        p, q = tl.exp(x - most), tl.exp(y - most)
        mean = 0.5 * p + 0.5 * q
        tl.store(L + row + c, p * 0.5 + q * 0.25 - mean * 0.125, mask=c < N)
        tl.store(G + row + c, p - mean, mask=c < N)


@triton.jit
def looked_up(X, S, T, Y, xs, ys, columns, B: tl.constexpr):
    """Rows of a table in the order that another says, each times a number of its own."""
    at, c = tl.program_id(0), tl.arange(0, B)
    row = tl.load(T + at)
    x = tl.load(X + row * xs + c, mask=c < columns, other=0.0) * tl.load(S + row)
    tl.store(Y + at * ys + c, x, mask=c < columns)


@triton.jit
def scaled_product(A, B, SA, SB, C, M, N, K, am, bn, cm, steps, GROUP: tl.constexpr, BM: tl.constexpr,
                   BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """A product of which each piece along K has a scale by row of A and by group of columns of B."""
    rm, rn, rk = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    fm, fn = rm % M, rn % N
    a, b = A + fm[:, None] * am + rk[None, :], B + fn[None, :] * bn + rk[:, None]
    sa, sb = SA + fm * steps, SB + fn // GROUP * steps
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(tl.cdiv(K, BK)):
        left = K - k * BK
        x = tl.load(a, mask=rk[None, :] < left, other=0.0)
        y = tl.load(b, mask=rk[:, None] < left, other=0.0)
        acc += tl.dot(x, y) * tl.load(sa)[:, None] * tl.load(sb)[None, :]
        a, b, sa, sb = a + BK, b + BK, sa + 1, sb + 1
    tl.store(C + rm[:, None] * cm + rn[None, :], acc.to(tl.float16), mask=(rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def chunk_outputs(Q, K, V, S, O, scale, T, heads, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
                  BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """What a chunk of tokens reads of the state before it, and of its own keys as far as each token sees them."""
    pv, chunk, bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = (bh // heads * T * heads + bh % heads).to(tl.int64)
    number = (bh // heads * tl.cdiv(T, BT) + chunk) * heads + bh % heads
    rt, rv = chunk * BT + tl.arange(0, BT), pv * BV + tl.arange(0, BV)
    o, a = tl.zeros([BT, BV], dtype=tl.float32), tl.zeros([BT, BT], dtype=tl.float32)
    for k in range(tl.cdiv(D, BK)):
        rk = k * BK + tl.arange(0, BK)
        q = tl.load(Q + first * D + rt[:, None] * heads * D + rk[None, :], mask=rk[None, :] < D, other=0.0)
        y = tl.load(K + first * D + rt[None, :] * heads * D + rk[:, None], mask=rk[:, None] < D, other=0.0)
        s = tl.load(S + number * D * W + rk[:, None] * W + rv[None, :], mask=rk[:, None] < D, other=0.0)
        o += tl.dot(q, s)
        a += tl.dot(q, y)
    a = tl.where(rt[:, None] >= rt[None, :], a, 0)
    v = tl.load(V + first * W + rt[:, None] * heads * W + rv[None, :])
    o = o * scale + tl.dot(a.to(v.dtype), v) * scale
    tl.store(O + first * W + rt[:, None] * heads * W + rv[None, :], o.to(O.dtype.element_ty))


@triton.jit
def norm_rows(X, Y, W, R, stride, N, eps, B: tl.constexpr):
    """RMS norm, of which the root and what it makes of a row are rounded to the weight's format."""
    row, c = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * stride + c, mask=c < N, other=0).to(tl.float32)
    w = tl.load(W + c, mask=c < N, other=0)
    r = tl.math.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    tl.store(R + row, r)
    tl.store(Y + row * stride + c, (x * r).to(w.dtype) * w, mask=c < N)


@triton.jit
def some_programs(X, Y, count, B: tl.constexpr):
    at = tl.program_id(0)
    if at >= count:
        return
    c = at * B + tl.arange(0, B)
    tl.store(Y + c, tl.load(X + c) * 2)


@triton.jit
def repeated_sum(X, Y, B: tl.constexpr, N: tl.constexpr):
    c = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(Y + c, tl.sum(tl.broadcast_to(tl.load(X + c)[:, None], (B, N)), 1))


@triton.jit
def neighbours(X, Y, n, B: tl.constexpr):
    c = tl.program_id(0) * B + tl.arange(0, B)
    after = tl.load(X + c + 1, mask=c + 1 < n, other=0.0)
    tl.store(Y + c, tl.load(X + c, mask=c < n) + after, mask=c < n)


@triton.jit
def some_loaded(X, Y, N, B: tl.constexpr):
    at = tl.program_id(0)
    if at >= tl.load(N):
        return
    c = at * B + tl.arange(0, B)
    tl.store(Y + c, tl.load(X + c) * 2)


@triton.jit
def some_products(A, B, C, count, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    at = tl.program_id(0)
    if at >= count:
        return
    rm, rn, rk = at * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(A + rm[:, None] * K + (k + rk)[None])
        acc = tl.dot(a, tl.load(B + (k + rk)[:, None] * BN + rn[None]), acc)
    tl.store(C + rm[:, None] * BN + rn[None], acc.to(tl.float16))


@triton.jit
def masked_weights(Q, K, V, O, S, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BOTH: tl.constexpr):
    """Attention whose weights have a mask of their own, or whose scores have two."""
    rm, rn, rd = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    q = tl.load(Q + rm[:, None] * D + rd[None, :])
    m, l = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for j in range(0, S, BN):
        key = j + rn
        s = tl.dot(q, tl.load(K + key[None, :] * D + rd[:, None]))
        s = tl.where(rm[:, None] >= key[None, :] - 40, s, -float("inf"))
        if BOTH:
            s = tl.where(rm[:, None] - key[None, :] < 100, s, -float("inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        if not BOTH:
            p = tl.where(rm[:, None] - key[None, :] < 20, p, 0.0)
        alpha = tl.exp(m - new)
        acc = acc * alpha[:, None] + tl.dot(p.to(tl.float16), tl.load(V + key[:, None] * D + rd[None, :]))
        l = l * alpha + tl.sum(p, 1)
        m = new
    tl.store(O + rm[:, None] * D + rd[None, :], (acc / l[:, None]).to(tl.float16))


@triton.jit
def with_scratch(Q, K, V, O, T, S, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Attention that stores a factor and loads it again at once, as early kernels do for its layout."""
    rm, rn, rd = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    q = tl.load(Q + rm[:, None] * D + rd[None, :])
    m, l = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for j in range(0, S, BN):
        s = tl.dot(q, tl.load(K + (j + rn)[None, :] * D + rd[:, None]))
        new = tl.maximum(m, tl.max(s, 1))
        p, alpha = tl.exp(s - new[:, None]), tl.exp(m - new)
        tl.store(T + rm, alpha)
        alpha = tl.load(T + rm)
        acc = acc * alpha[:, None] + tl.dot(p.to(tl.float16), tl.load(V + (j + rn)[:, None] * D + rd[None, :]))
        l = l * alpha + tl.sum(p, 1)
        m = new
    tl.store(O + rm[:, None] * D + rd[None, :], (acc / l[:, None]).to(tl.float16))


@triton.jit
def carried_logarithm(Q, K, V, O, S, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Attention whose running logarithm of sums is read before its second product and changed after it."""
    rm, rn, rd = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    q = tl.load(Q + rm[:, None] * D + rd[None, :])
    m, lse = tl.full([BM], -float("inf"), tl.float32), tl.full([BM], -float("inf"), tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for j in range(0, S, BN):
        s = tl.dot(q, tl.load(K + (j + rn)[None, :] * D + rd[:, None]))
        new = tl.maximum(tl.max(s, 1), lse)
        p = tl.exp(s - new[:, None])
        acc = acc * tl.exp(m - new)[:, None]
        acc += tl.dot(p.to(tl.float16), tl.load(V + (j + rn)[:, None] * D + rd[None, :]))
        lse = new + tl.log(tl.exp(lse - new) + tl.sum(p, 1))
        m = new
    tl.store(O + rm[:, None] * D + rd[None, :], (acc * tl.exp(m - lse)[:, None]).to(tl.float16))


@triton.jit
def some_stored(X, Y, N, K, B: tl.constexpr, SUMS: tl.constexpr):
    row, c = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * N + c, mask=c < N, other=0.0)
    if SUMS:
        tl.store(Y + row * N + c, x - tl.sum(x, 0), mask=c < K)
    else:
        tl.store(Y + row * N + c, tl.where(c < K, x, 5.0), mask=c < N)


@triton.jit
def some_keys(Q, K, V, O, count, S, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rows, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(Q + rows[:, None] * D + d[None, :])
    m, l = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for j in range(0, S, BN):
        keys = j + tl.arange(0, BN)
        s = tl.dot(q, tl.trans(tl.load(K + keys[:, None] * D + d[None, :])))
        s = tl.where(keys[None, :] < count, s, -float("inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p, alpha = tl.exp(s - new[:, None]), tl.exp(m - new)
        l = l * alpha + tl.sum(p, 1)
        v = tl.load(V + keys[:, None] * D + d[None, :])
        acc = tl.dot(p.to(tl.float16), v, acc * alpha[:, None])
        m = new
    tl.store(O + rows[:, None] * D + d[None, :], acc / l[:, None])


@triton.jit
def walked_scratch(X, Y, Z, B: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(Y + i, tl.load(X + i) * 3)
    z, p, total = tl.load(Y + i), Y + i, tl.zeros([B], tl.float32)
    for _ in range(N):
        total += tl.load(p)
        p += 64
    tl.store(Z + i, total + z)


@triton.jit
def own_scratch(X, Y, Z, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(Y + i, tl.load(X + i) * 3)
    tl.store(Z + i, tl.load(Y + i) + 1)


@triton.jit
def some_pages(Q, K, V, T, O, n, D: tl.constexpr, BN: tl.constexpr):
    """Sums of products with pages that a table names; a number below 0 is no page."""
    p, rn, rd = tl.program_id(0), tl.arange(0, BN), tl.arange(0, D)
    q = tl.load(Q + (p * BN + rn)[:, None] * D + rd[None])
    acc = tl.zeros([BN, D], dtype=tl.float32)
    for j in range(n):
        i = tl.load(T + p * n + j)
        keep = (i >= 0) & (rn >= 0)
        k = tl.load(K + (i * BN + rn)[None] * D + rd[:, None], mask=keep[None], other=0.0)
        v = tl.load(V + (i * BN + rn)[:, None] * D + rd[None], mask=keep[:, None], other=0.0)
        acc += tl.dot(tl.dot(q, k).to(tl.float16), v)
    tl.store(O + (p * BN + rn)[:, None] * D + rd[None], acc)
