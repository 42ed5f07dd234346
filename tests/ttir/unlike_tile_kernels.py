"""Two loops over one axis whose tiles have different sizes: a masked part in small tiles, the rest in larger ones."""

import triton
import triton.language as tl


@triton.jit
def _part(acc, q, K, V, M, rm, first, count, D: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr):
    rd = tl.arange(0, D)
    for j in range(count):
        rn = first + j * BN + tl.arange(0, BN)
        k = tl.load(K + rn[:, None] * D + rd[None])
        s = tl.dot(q, tl.trans(k)) - tl.load(M + rn)[None]
        if MASKED:
            s = tl.where(rm[:, None] >= rn[None], s, 0.0)
        v = tl.load(V + rn[:, None] * D + rd[None])
        acc += tl.dot(s.to(tl.float16), v)
    return acc


@triton.jit
def masked_first(Q, K, V, M, O, D: tl.constexpr, BM: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr):
    at = tl.program_id(0) * BM
    rm, rd = at + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(Q + rm[:, None] * D + rd[None])
    acc = tl.zeros([BM, D], tl.float32)
    acc = _part(acc, q, K, V, M, rm, at, BM // SMALL, D, SMALL, True)
    acc = _part(acc, q, K, V, M, rm, 0, at // LARGE, D, LARGE, False)
    tl.store(O + rm[:, None] * D + rd[None], acc)


@triton.jit
def summed(Q, K, O, D: tl.constexpr, BM: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr):
    rm, rd = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(Q + rm[:, None] * D + rd[None])
    acc = tl.zeros([BM], tl.float32)
    count = 2 + tl.program_id(0)
    for j in range(count):
        k = tl.load(K + (j * SMALL + tl.arange(0, SMALL))[:, None] * D + rd[None])
        acc += tl.sum(tl.dot(q, tl.trans(k)), 1)
    for j in range(count):
        k = tl.load(K + (count * SMALL + j * LARGE + tl.arange(0, LARGE))[:, None] * D + rd[None])
        acc += tl.sum(tl.dot(q, tl.trans(k)), 1)
    tl.store(O + rm, acc)
