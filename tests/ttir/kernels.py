"""Kernels of attention as users write them, for tests."""

import triton
import triton.language as tl


@triton.jit
def plain(Q, K, V, O, sc, S, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    pm = tl.program_id(0)
    bh = tl.program_id(1)
    off = bh.to(tl.int64) * S * D
    rm = pm * BM + tl.arange(0, BM)
    rd = tl.arange(0, D)
    rn = tl.arange(0, BN)
    q = tl.load(Q + off + rm[:, None] * D + rd[None], mask=rm[:, None] < S, other=0.0)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    hi = tl.minimum((pm + 1) * BM, S) if CAUSAL else S
    kp = K + off + rn[None] * D + rd[:, None]
    for j in range(0, hi, BN):
        k = tl.load(kp, mask=(j + rn)[None] < S, other=0.0)
        s = tl.dot(q, k) * sc
        s = tl.where((j + rn)[None] < S, s, float("-inf"))
        if CAUSAL:
            s = tl.where(rm[:, None] >= (j + rn)[None], s, float("-inf"))
        mn = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - mn[:, None])
        al = tl.math.exp2(m - mn)
        l = l * al + tl.sum(p, 1)
        acc = acc * al[:, None]
        v = tl.load(V + off + (j + rn)[:, None] * D + rd[None], mask=(j + rn)[:, None] < S, other=0.0)
        acc = tl.dot(p.to(q.dtype), v, acc)
        m = mn
        kp += BN * D
    tl.store(O + off + rm[:, None] * D + rd[None], (acc / l[:, None]).to(q.dtype), mask=rm[:, None] < S)


@triton.jit
def inner(acc, l, m, q, K, V, lo, hi, sc, rm, D: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr):
    rn = tl.arange(0, BN)
    rd = tl.arange(0, D)
    for j in range(lo, hi, BN):
        k = tl.load(K + (j + rn)[:, None] * D + rd[None])
        s = tl.dot(q, tl.trans(k)) * sc
        if MASKED:
            s = tl.where(rm[:, None] >= (j + rn)[None], s, float("-inf"))
        mn = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - mn[:, None])
        al = tl.math.exp2(m - mn)
        l = l * al + tl.sum(p, 1)
        v = tl.load(V + (j + rn)[:, None] * D + rd[None])
        acc = tl.dot(p.to(q.dtype), v, acc * al[:, None])
        m = mn
    return acc, l, m


@triton.jit
def twice(Q, K, V, O, sc, S, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Tiles below the diagonal without a mask, then those on it, as Triton's tutorial has it."""
    pm = tl.program_id(0)
    off = tl.program_id(1).to(tl.int64) * S * D
    rm = pm * BM + tl.arange(0, BM)
    rd = tl.arange(0, D)
    q = tl.load(Q + off + rm[:, None] * D + rd[None])
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    acc, l, m = inner(acc, l, m, q, K + off, V + off, 0, pm * BM, sc, rm, D, BN, False)
    acc, l, m = inner(acc, l, m, q, K + off, V + off, pm * BM, (pm + 1) * BM, sc, rm, D, BN, True)
    tl.store(O + off + rm[:, None] * D + rd[None], (acc / l[:, None]).to(q.dtype))


@triton.jit
def capped(Q, K, V, O, sc, S, cap, W: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Soft-cap and a sliding window: a row may see nothing of its block's first tile, and begins with a number."""
    pm = tl.program_id(0)
    off = tl.program_id(1).to(tl.int64) * S * D
    rm = pm * BM + tl.arange(0, BM)
    rd = tl.arange(0, D)
    rn = tl.arange(0, BN)
    q = tl.load(Q + off + rm[:, None] * D + rd[None])
    m = tl.full([BM], -1.0e30, tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    lo = tl.maximum(0, (pm * BM - W + 1) // BN * BN)
    for j in range(lo, (pm + 1) * BM, BN):
        k = tl.load(K + off + (j + rn)[:, None] * D + rd[None])
        s = tl.dot(q, tl.trans(k)) * sc
        e = tl.exp(s * (2.0 / cap))
        s = cap - 2.0 * cap / (e + 1.0)
        key = (j + rn)[None]
        s = tl.where((rm[:, None] >= key) & (rm[:, None] - key < W), s, float("-inf"))
        mn = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - mn[:, None])
        al = tl.exp(m - mn)
        l = l * al + tl.sum(p, 1)
        v = tl.load(V + off + (j + rn)[:, None] * D + rd[None])
        acc = tl.dot(p.to(q.dtype), v, acc * al[:, None])
        m = mn
    tl.store(O + off + rm[:, None] * D + rd[None], (acc / l[:, None]).to(q.dtype))


@triton.jit
def described(Q, K, V, O, sc, S, B: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Block pointers."""
    pm = tl.program_id(0)
    off = tl.program_id(1).to(tl.int64) * S * D
    q = tl.load(tl.make_block_ptr(Q + off, (S, D), (D, 1), (pm * BM, 0), (BM, D), (1, 0)))
    kb = tl.make_block_ptr(K + off, (D, S), (1, D), (0, 0), (D, BN), (0, 1))
    vb = tl.make_block_ptr(V + off, (S, D), (D, 1), (0, 0), (BN, D), (1, 0))
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for _ in range(0, S, BN):
        s = tl.dot(q, tl.load(kb)) * sc
        mn = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - mn[:, None])
        al = tl.math.exp2(m - mn)
        l = l * al + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), tl.load(vb), acc * al[:, None])
        m = mn
        kb = tl.advance(kb, (0, BN))
        vb = tl.advance(vb, (BN, 0))
    ob = tl.make_block_ptr(O + off, (S, D), (D, 1), (pm * BM, 0), (BM, D), (1, 0))
    tl.store(ob, (acc / l[:, None]).to(q.dtype))


@triton.jit
def padded(Q, K, V, O, sc, S, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Heads of any size in blocks of a power of two."""
    pm = tl.program_id(0)
    off = tl.program_id(1).to(tl.int64) * S * D
    rm = pm * BM + tl.arange(0, BM)
    rd = tl.arange(0, DP)
    rn = tl.arange(0, BN)
    q = tl.load(Q + off + rm[:, None] * D + rd[None], mask=rd[None] < D, other=0.0)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    for j in range(0, S, BN):
        k = tl.load(K + off + (j + rn)[:, None] * D + rd[None], mask=rd[None] < D, other=0.0)
        s = tl.dot(q, tl.trans(k)) * sc
        mn = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - mn[:, None])
        al = tl.math.exp2(m - mn)
        l = l * al + tl.sum(p, 1)
        v = tl.load(V + off + (j + rn)[:, None] * D + rd[None], mask=rd[None] < D, other=0.0)
        acc = tl.dot(p.to(q.dtype), v, acc * al[:, None])
        m = mn
    tl.store(O + off + rm[:, None] * D + rd[None], (acc / l[:, None]).to(q.dtype), mask=rd[None] < D)


@triton.jit
def halved(X, Y, S, D: tl.constexpr, B: tl.constexpr):
    r, d = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, D)
    at = tl.program_id(1) * S * D + r[:, None] * D + d[None]
    tl.store(Y + at, (tl.load(X + at).to(tl.float32) * 0.5).to(Y.dtype.element_ty))


@triton.jit
def state(K, V, O, n, D: tl.constexpr, B: tl.constexpr):
    head, d = tl.program_id(0), tl.arange(0, D)
    acc = tl.zeros([D, D], tl.float32)
    for j in range(0, n, B):
        at = head * n * D + (j + tl.arange(0, B))[:, None] * D + d[None]
        acc += tl.dot(tl.trans(tl.load(K + at)), tl.load(V + at))
    tl.store(O + head * D * D + d[:, None] * D + d[None], acc.to(O.dtype.element_ty))
