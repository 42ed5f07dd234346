"""One attention whose loop scales Q before it, or adds up rows behind P V, or neither."""

import triton
import triton.language as tl


@triton.jit
def attention(Q, K, V, O, sc, S, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FORM: tl.constexpr):
    off = tl.program_id(1).to(tl.int64) * S * D
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rd = tl.arange(0, D)
    rn = tl.arange(0, BN)
    q = tl.load(Q + off + rm[:, None] * D + rd[None])
    if FORM == "scaled":
        q = (q * sc).to(Q.dtype.element_ty)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for j in range(0, S, BN):
        k = tl.load(K + off + (j + rn)[:, None] * D + rd[None])
        s = tl.dot(q, tl.trans(k))
        if FORM != "scaled":
            s *= sc
        mn = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - mn[:, None])
        al = tl.math.exp2(m - mn)
        if FORM != "last":
            l = l * al + tl.sum(p, 1)
        acc = acc * al[:, None]
        v = tl.load(V + off + (j + rn)[:, None] * D + rd[None])
        acc = tl.dot(p.to(q.dtype), v, acc)
        if FORM == "last":
            l = l * al + tl.sum(p, 1)
        m = mn
    tl.store(O + off + rm[:, None] * D + rd[None], (acc / l[:, None]).to(q.dtype))


@triton.jit
def listed(Q, K, V, T, O, S, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rd = tl.arange(0, D)
    rn = tl.arange(0, BN)
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    q = tl.load(Q + rm[:, None] * D + rd[None])
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for j in range(0, S, BN):
        at = tl.load(T + j + rn)
        k = tl.load(K + at[:, None] * D + rd[None])
        s = tl.dot(q, tl.trans(k))
        mn = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - mn[:, None])
        al = tl.math.exp2(m - mn)
        l = l * al + tl.sum(p, 1)
        acc = acc * al[:, None]
        v = tl.load(V + at[:, None] * D + rd[None])
        acc = tl.dot(p.to(q.dtype), v, acc)
        m = mn
    tl.store(O + rm[:, None] * D + rd[None], (acc / l[:, None]).to(q.dtype))


@triton.jit
def states(X, B, W, O, D, N, T, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """O = X^T (w B), of columns behind D and N nothing: X (T, D), B (T, N), w (T)."""
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(0, T, BK):
        x = tl.load(X + (i + k)[None, :] * D + m[:, None], mask=m[:, None] < D, other=0.0)
        b = tl.load(B + (i + k)[:, None] * N + n[None, :], mask=n[None, :] < N, other=0.0).to(tl.float32)
        b *= tl.load(W + i + k)[:, None]
        acc += tl.dot(x, b.to(x.dtype))
    tl.store(O + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < D) & (n[None, :] < N))


@triton.jit
def shares(X, LABELS, OWN, N, BLOCK: tl.constexpr):
    """Divide each row of X by its sum, and store the value at the row's label; two passes over the row."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(LABELS + row)
    X += row * N
    total = 0.0
    own = tl.load(X + label).to(tl.float32)
    for i in range(0, N, BLOCK):
        at = i + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(X + at, mask=at < N, other=0.0).to(tl.float32))
    for i in range(0, N, BLOCK):
        at = i + tl.arange(0, BLOCK)
        x = tl.load(X + at, mask=at < N, other=0.0).to(tl.float32)
        tl.store(X + at, x / total, mask=at < N)
    tl.debug_barrier()
    tl.store(OWN + row, own)
