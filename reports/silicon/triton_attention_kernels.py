"""Attention kernels in Triton by where their loop masks, loads and sums: what `h200_triton_attention.csv` measured."""

import triton
import triton.language as tl


@triton.jit
def place(
    Q,
    K,
    V,
    O,
    sc,
    S,
    shift,
    G,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ST: tl.constexpr,
    QREG: tl.constexpr,
    VFIRST: tl.constexpr,
    MASK: tl.constexpr,
    SUMLAST: tl.constexpr,
):
    pm = tl.program_id(0)
    bh = tl.program_id(1)
    off = bh.to(tl.int64) * 4 * BM * D
    kof = (bh // G).to(tl.int64) * 4096 * D
    rm = pm * BM + tl.arange(0, BM)
    rd = tl.arange(0, D)
    rn = tl.arange(0, BN)
    q = tl.load(Q + off + rm[:, None] * D + rd[None])
    if QREG:
        q = (q * sc).to(Q.dtype.element_ty)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for j in tl.range(0, S, BN, num_stages=ST):
        k = tl.load(K + kof + (j + rn)[:, None] * D + rd[None])
        if VFIRST:
            v = tl.load(V + kof + (j + rn)[:, None] * D + rd[None])
        if MASK == 2:
            s = tl.where(rm[:, None] + shift >= (j + rn)[None], 0.0, float("-inf"))
            s += tl.dot(q, tl.trans(k))
        else:
            s = tl.dot(q, tl.trans(k))
            if not QREG:
                s = s * sc
        if MASK == 1:
            s = tl.where(rm[:, None] + shift >= (j + rn)[None], s, float("-inf"))
        mn = tl.maximum(m, tl.max(s, 1))
        p_ = tl.math.exp2(s - mn[:, None])
        al = tl.math.exp2(m - mn)
        if not SUMLAST:
            l = l * al + tl.sum(p_, 1)
        acc = acc * al[:, None]
        if not VFIRST:
            v = tl.load(V + kof + (j + rn)[:, None] * D + rd[None])
        acc = tl.dot(p_.to(q.dtype), v, acc)
        if SUMLAST:
            l = l * al + tl.sum(p_, 1)
        m = mn
    tl.store(O + off + rm[:, None] * D + rd[None], (acc / l[:, None]).to(q.dtype))


@triton.jit
def gqa(
    Q, K, V, O, sc, S, G, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, ST: tl.constexpr
):
    pm = tl.program_id(0)
    bh = tl.program_id(1)
    off = bh.to(tl.int64) * S * D
    kof = (bh // G).to(tl.int64) * S * D
    rm = pm * BM + tl.arange(0, BM)
    rd = tl.arange(0, D)
    rn = tl.arange(0, BN)
    q = tl.load(Q + off + rm[:, None] * D + rd[None])
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    hi = tl.minimum((pm + 1) * BM, S)
    first = 0
    if SPLIT:
        first = (pm * BM) // BN * BN
        for j in tl.range(0, first, BN, num_stages=ST):
            k = tl.load(K + kof + (j + rn)[:, None] * D + rd[None])
            s = tl.dot(q, tl.trans(k)) * sc
            mn = tl.maximum(m, tl.max(s, 1))
            p_ = tl.math.exp2(s - mn[:, None])
            al = tl.math.exp2(m - mn)
            l = l * al + tl.sum(p_, 1)
            acc = acc * al[:, None]
            v = tl.load(V + kof + (j + rn)[:, None] * D + rd[None])
            acc = tl.dot(p_.to(q.dtype), v, acc)
            m = mn
    for j in tl.range(first, hi, BN, num_stages=ST):
        k = tl.load(K + kof + (j + rn)[:, None] * D + rd[None])
        s = tl.dot(q, tl.trans(k)) * sc
        s = tl.where(rm[:, None] >= (j + rn)[None], s, float("-inf"))
        mn = tl.maximum(m, tl.max(s, 1))
        p_ = tl.math.exp2(s - mn[:, None])
        al = tl.math.exp2(m - mn)
        l = l * al + tl.sum(p_, 1)
        acc = acc * al[:, None]
        v = tl.load(V + kof + (j + rn)[:, None] * D + rd[None])
        acc = tl.dot(p_.to(q.dtype), v, acc)
        m = mn
    tl.store(O + off + rm[:, None] * D + rd[None], (acc / l[:, None]).to(q.dtype))
