"""Kernels of the kinds that engines and libraries run, whose results an H200 gave (`silicon_cases`)."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ttir.lane_kernels import rotated as rotated  # noqa: PLC0414 - a case
from ttir.peeled_kernels import counted_mean, label_gradients, label_losses, peeled_softmax, running_place  # noqa: F401 - cases


@triton.jit
def gelu_tanh(X, Y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(X + i, mask=i < n).to(tl.float32)
    t = libdevice.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    tl.store(Y + i, (0.5 * x * (1 + t)).to(Y.dtype.element_ty), mask=i < n)


@triton.jit
def gelu_erf(X, Y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(X + i, mask=i < n).to(tl.float32)
    tl.store(Y + i, (0.5 * x * (1 + tl.math.erf(x * 0.7071067811865476))).to(Y.dtype.element_ty), mask=i < n)


@triton.jit
def silu_mul(G, U, Y, cols, B: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, B)
    g = tl.load(G + r * cols + i, mask=i < cols).to(tl.float32)
    u = tl.load(U + r * cols + i, mask=i < cols)
    tl.store(Y + r * cols + i, (g * tl.sigmoid(g)).to(u.dtype) * u, mask=i < cols)


@triton.jit
def swiglu_bwd(DY, G, U, DG, DU, cols, B: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, B)
    dy = tl.load(DY + r * cols + i, mask=i < cols, other=0)
    g = tl.load(G + r * cols + i, mask=i < cols, other=0).to(tl.float32)
    u = tl.load(U + r * cols + i, mask=i < cols, other=0)
    s = tl.sigmoid(g)
    f = g * s
    tl.store(DU + r * cols + i, dy * f.to(dy.dtype), mask=i < cols)
    tl.store(DG + r * cols + i, (dy * u * (f * (1 - s) + s)).to(dy.dtype), mask=i < cols)


@triton.jit
def softmax_row(X, Y, cols, B: tl.constexpr):
    r = tl.program_id(0)
    i = tl.arange(0, B)
    x = tl.load(X + r * cols + i, mask=i < cols, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(Y + r * cols + i, (e / tl.sum(e, 0)).to(Y.dtype.element_ty), mask=i < cols)


@triton.jit
def log_softmax_loop(X, Y, cols, B: tl.constexpr):
    r = tl.program_id(0)
    m = -float("inf")
    for j in range(0, cols, B):
        i = j + tl.arange(0, B)
        m = tl.maximum(m, tl.max(tl.load(X + r * cols + i, mask=i < cols, other=-float("inf")).to(tl.float32)))
    s = 0.0
    for j in range(0, cols, B):
        i = j + tl.arange(0, B)
        s += tl.sum(tl.exp(tl.load(X + r * cols + i, mask=i < cols, other=-float("inf")).to(tl.float32) - m))
    z = tl.log(s)
    for j in range(0, cols, B):
        i = j + tl.arange(0, B)
        x = tl.load(X + r * cols + i, mask=i < cols).to(tl.float32)
        tl.store(Y + r * cols + i, (x - m - z).to(Y.dtype.element_ty), mask=i < cols)


@triton.jit
def online_lse(X, L, cols, B: tl.constexpr):
    r = tl.program_id(0)
    m = -float("inf")
    d = 0.0
    for j in range(0, cols, B):
        i = j + tl.arange(0, B)
        x = tl.load(X + r * cols + i, mask=i < cols, other=-float("inf")).to(tl.float32)
        mn = tl.maximum(m, tl.max(x))
        d = d * tl.exp(m - mn) + tl.sum(tl.exp(x - mn))
        m = mn
    tl.store(L + r, m + tl.log(d))


@triton.jit
def layer_norm(X, W, Bi, Y, Mean, Rstd, cols, eps, B: tl.constexpr):
    r = tl.program_id(0)
    i = tl.arange(0, B)
    x = tl.load(X + r * cols + i, mask=i < cols, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / cols
    xc = tl.where(i < cols, x - mean, 0.0)
    var = tl.sum(xc * xc, 0) / cols
    rstd = 1 / tl.sqrt(var + eps)
    tl.store(Mean + r, mean)
    tl.store(Rstd + r, rstd)
    w = tl.load(W + i, mask=i < cols).to(tl.float32)
    b = tl.load(Bi + i, mask=i < cols).to(tl.float32)
    tl.store(Y + r * cols + i, (xc * rstd * w + b).to(Y.dtype.element_ty), mask=i < cols)


@triton.jit
def add_rms(X, R, W, Y, S, cols, eps, B: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, B)
    s = tl.load(X + r * cols + i, mask=i < cols, other=0.0) + tl.load(R + r * cols + i, mask=i < cols, other=0.0)
    tl.store(S + r * cols + i, s, mask=i < cols)
    f = s.to(tl.float32)
    rs = tl.rsqrt(tl.sum(f * f, 0) / cols + eps)
    w = tl.load(W + i, mask=i < cols)
    tl.store(Y + r * cols + i, (f * rs).to(w.dtype) * w, mask=i < cols)


@triton.jit
def quant_group(X, Q, S, cols, G: tl.constexpr):
    r = tl.program_id(0)
    g = tl.program_id(1)
    i = g * G + tl.arange(0, G)
    x = tl.load(X + r * cols + i).to(tl.float32)
    a = tl.maximum(tl.max(tl.abs(x)), 1e-10)
    s = a * (1.0 / 448.0)
    tl.store(S + r * (cols // G) + g, s)
    tl.store(Q + r * cols + i, tl.clamp(x / s, -448.0, 448.0).to(Q.dtype.element_ty))


@triton.jit
def l2norm(X, Y, cols, eps, B: tl.constexpr, R: tl.constexpr, rows):
    r = tl.program_id(0) * R + tl.arange(0, R)
    i = tl.arange(0, B)
    m = (r[:, None] < rows) & (i[None] < cols)
    x = tl.load(X + r[:, None] * cols + i[None], mask=m, other=0.0).to(tl.float32)
    y = x / tl.sqrt(tl.sum(x * x, 1) + eps)[:, None]
    tl.store(Y + r[:, None] * cols + i[None], y.to(Y.dtype.element_ty), mask=m)


@triton.jit
def softmax_bwd(P, DP, DX, cols, scale, B: tl.constexpr):
    r = tl.program_id(0)
    i = tl.arange(0, B)
    p = tl.load(P + r * cols + i, mask=i < cols, other=0.0).to(tl.float32)
    d = tl.load(DP + r * cols + i, mask=i < cols, other=0.0).to(tl.float32)
    tl.store(DX + r * cols + i, (p * (d - tl.sum(p * d, 0)) * scale).to(DX.dtype.element_ty), mask=i < cols)


@triton.jit
def unary(X, A, Bo, C, D, E, F, n, BL: tl.constexpr):
    i = tl.program_id(0) * BL + tl.arange(0, BL)
    x = tl.load(X + i, mask=i < n)
    tl.store(A + i, tl.exp(x), mask=i < n)
    tl.store(Bo + i, tl.log(tl.abs(x)), mask=i < n)
    tl.store(C + i, tl.exp2(x), mask=i < n)
    tl.store(D + i, tl.sqrt(tl.abs(x)), mask=i < n)
    tl.store(E + i, 1.0 / (1.0 + x * x), mask=i < n)
    tl.store(F + i, tl.sigmoid(x), mask=i < n)


@triton.jit
def unary2(X, A, Bo, C, D, E, n, BL: tl.constexpr):
    i = tl.program_id(0) * BL + tl.arange(0, BL)
    x = tl.load(X + i, mask=i < n)
    tl.store(A + i, tl.math.erf(x), mask=i < n)
    tl.store(Bo + i, libdevice.tanh(x), mask=i < n)
    tl.store(C + i, tl.log2(tl.abs(x)), mask=i < n)
    tl.store(D + i, tl.rsqrt(tl.abs(x)), mask=i < n)
    tl.store(E + i, tl.floor(x) + tl.ceil(x) * 0.5, mask=i < n)


@triton.jit
def cumsum_row(X, Y, cols, B: tl.constexpr):
    r = tl.program_id(0)
    i = tl.arange(0, B)
    x = tl.load(X + r * cols + i, mask=i < cols, other=0.0)
    tl.store(Y + r * cols + i, tl.cumsum(x, 0), mask=i < cols)


@triton.jit
def matmul(A, Bm, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACT: tl.constexpr):
    pm = tl.program_id(0)
    pn = tl.program_id(1)
    rm = pm * BM + tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        rk = k + tl.arange(0, BK)
        a = tl.load(A + rm[:, None] * K + rk[None], mask=(rm[:, None] < M) & (rk[None] < K), other=0.0)
        b = tl.load(Bm + rk[:, None] * N + rn[None], mask=(rk[:, None] < K) & (rn[None] < N), other=0.0)
        acc = tl.dot(a, b, acc)
    if ACT:
        acc = acc * tl.sigmoid(acc)
    tl.store(C + rm[:, None] * N + rn[None], acc.to(C.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None] < N))


@triton.jit
def fa(Q, K, V, O, L, sc, S, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    pm = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    off = h * S * D
    rm = pm * BM + tl.arange(0, BM)
    rn = tl.arange(0, BN)
    rd = tl.arange(0, D)
    q = tl.load(Q + off + rm[:, None] * D + rd[None], mask=rm[:, None] < S, other=0.0)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for j in range(0, tl.minimum((pm + 1) * BM, S) if CAUSAL else S, BN):
        k = tl.load(K + off + (j + rn)[:, None] * D + rd[None], mask=(j + rn)[:, None] < S, other=0.0)
        s = tl.dot(q, tl.trans(k)) * sc
        s = tl.where((j + rn)[None] < S, s, float("-inf"))
        if CAUSAL:
            s = tl.where(rm[:, None] >= (j + rn)[None], s, float("-inf"))
        mn = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - mn[:, None])
        al = tl.math.exp2(m - mn)
        l = l * al + tl.sum(p, 1)
        v = tl.load(V + off + (j + rn)[:, None] * D + rd[None], mask=(j + rn)[:, None] < S, other=0.0)
        acc = tl.dot(p.to(q.dtype), v, acc * al[:, None])
        m = mn
    tl.store(L + h * S + rm, m + tl.math.log2(l), mask=rm < S)
    tl.store(O + off + rm[:, None] * D + rd[None], (acc / l[:, None]).to(q.dtype), mask=rm[:, None] < S)


@triton.jit
def merge(A, LA, Bm, LB, O, LO, D: tl.constexpr):
    t = tl.program_id(0)
    i = tl.arange(0, D)
    la = tl.load(LA + t)
    lb = tl.load(LB + t)
    m = tl.maximum(la, lb)
    ea = tl.exp(la - m)
    eb = tl.exp(lb - m)
    s = ea + eb
    a = tl.load(A + t * D + i).to(tl.float32)
    b = tl.load(Bm + t * D + i).to(tl.float32)
    tl.store(O + t * D + i, (a * (ea / s) + b * (eb / s)).to(O.dtype.element_ty))
    tl.store(LO + t, tl.log(s) + m)


@triton.jit
def rope(X, Cos, Sin, Y, heads, H: tl.constexpr):
    t = tl.program_id(0)
    h = tl.program_id(1)
    i = tl.arange(0, H)
    c = tl.load(Cos + t * H + i).to(tl.float32)
    s = tl.load(Sin + t * H + i).to(tl.float32)
    b = (t * heads + h) * 2 * H
    x1 = tl.load(X + b + i).to(tl.float32)
    x2 = tl.load(X + b + H + i).to(tl.float32)
    tl.store(Y + b + i, (x1 * c - x2 * s).to(Y.dtype.element_ty))
    tl.store(Y + b + H + i, (x2 * c + x1 * s).to(Y.dtype.element_ty))


@triton.jit
def group_norm(X, W, Bi, Y, C, HW, GC: tl.constexpr, BH: tl.constexpr, eps):
    g = tl.program_id(0)
    n = GC * HW
    s = tl.zeros([GC, BH], tl.float32)
    q = tl.zeros([GC, BH], tl.float32)
    c = tl.arange(0, GC)
    for j in range(0, HW, BH):
        i = j + tl.arange(0, BH)
        x = tl.load(X + (g * GC + c)[:, None] * HW + i[None], mask=i[None] < HW, other=0.0).to(tl.float32)
        s += x
        q += x * x
    mean = tl.sum(tl.sum(s, 1), 0) / n
    var = tl.sum(tl.sum(q, 1), 0) / n - mean * mean
    rstd = tl.rsqrt(var + eps)
    w = tl.load(W + g * GC + c).to(tl.float32)
    b = tl.load(Bi + g * GC + c).to(tl.float32)
    for j in range(0, HW, BH):
        i = j + tl.arange(0, BH)
        x = tl.load(X + (g * GC + c)[:, None] * HW + i[None], mask=i[None] < HW, other=0.0).to(tl.float32)
        y = (x - mean) * rstd * w[:, None] + b[:, None]
        tl.store(Y + (g * GC + c)[:, None] * HW + i[None], y.to(Y.dtype.element_ty), mask=i[None] < HW)


@triton.jit
def kl(P, Q, L, cols, B: tl.constexpr):
    r = tl.program_id(0)
    s = tl.zeros([B], tl.float32)
    for j in range(0, cols, B):
        i = j + tl.arange(0, B)
        p = tl.load(P + r * cols + i, mask=i < cols, other=0.0).to(tl.float32)
        q = tl.load(Q + r * cols + i, mask=i < cols, other=0.0).to(tl.float32)
        s += tl.exp(p) * (p - q)
    tl.store(L + r, tl.sum(s))


@triton.jit
def col_sum(X, Y, rows, cols, BR: tl.constexpr, BC: tl.constexpr):
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    a = tl.zeros([BR, BC], tl.float32)
    for j in range(0, rows, BR):
        r = j + tl.arange(0, BR)
        a += tl.load(X + r[:, None] * cols + c[None], mask=(r[:, None] < rows) & (c[None] < cols), other=0.0).to(
            tl.float32
        )
    tl.store(Y + c, tl.sum(a, 0), mask=c < cols)


@triton.jit
def bwd_pre(O, DO, Delta, S, D: tl.constexpr, BM: tl.constexpr):
    pm = tl.program_id(0)
    h = tl.program_id(1)
    rm = pm * BM + tl.arange(0, BM)
    rd = tl.arange(0, D)
    o = tl.load(O + h * S * D + rm[:, None] * D + rd[None]).to(tl.float32)
    do = tl.load(DO + h * S * D + rm[:, None] * D + rd[None]).to(tl.float32)
    tl.store(Delta + h * S + rm, tl.sum(o * do, 1))


@triton.jit
def attn_dq(Q, K, V, DO, L, Delta, DQ, sc, S, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    pm = tl.program_id(0)
    h = tl.program_id(1)
    off = h * S * D
    rm = pm * BM + tl.arange(0, BM)
    rn = tl.arange(0, BN)
    rd = tl.arange(0, D)
    q = tl.load(Q + off + rm[:, None] * D + rd[None])
    do = tl.load(DO + off + rm[:, None] * D + rd[None])
    l = tl.load(L + h * S + rm)
    de = tl.load(Delta + h * S + rm)
    dq = tl.zeros([BM, D], tl.float32)
    for j in range(0, S, BN):
        k = tl.load(K + off + (j + rn)[:, None] * D + rd[None])
        v = tl.load(V + off + (j + rn)[:, None] * D + rd[None])
        s = tl.dot(q, tl.trans(k))
        p = tl.math.exp2(s * sc - l[:, None])
        dp = tl.dot(do, tl.trans(v))
        ds = p * (dp - de[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + off + rm[:, None] * D + rd[None], dq * sc)


@triton.jit
def attn_dkv(Q, K, V, DO, L, Delta, DK, DV, sc, S, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    pn = tl.program_id(0)
    h = tl.program_id(1)
    off = h * S * D
    rn = pn * BN + tl.arange(0, BN)
    rm = tl.arange(0, BM)
    rd = tl.arange(0, D)
    k = tl.load(K + off + rn[:, None] * D + rd[None])
    v = tl.load(V + off + rn[:, None] * D + rd[None])
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    for j in range(0, S, BM):
        q = tl.load(Q + off + (j + rm)[:, None] * D + rd[None])
        do = tl.load(DO + off + (j + rm)[:, None] * D + rd[None])
        l = tl.load(L + h * S + j + rm)
        de = tl.load(Delta + h * S + j + rm)
        st = tl.dot(k, tl.trans(q))
        pt = tl.math.exp2(st * sc - l[None])
        dv = tl.dot(pt.to(do.dtype), do, dv)
        dpt = tl.dot(v, tl.trans(do))
        dst = pt * (dpt - de[None])
        dk = tl.dot(dst.to(q.dtype), q, dk)
    tl.store(DK + off + rn[:, None] * D + rd[None], dk * sc)
    tl.store(DV + off + rn[:, None] * D + rd[None], dv)


@triton.jit
def decode1(Q, K, V, O, L, sc, S, CH, D: tl.constexpr, G: tl.constexpr, BN: tl.constexpr):
    h = tl.program_id(0)
    c = tl.program_id(1)
    nc = tl.num_programs(1)
    rg = tl.arange(0, G)
    rd = tl.arange(0, D)
    rn = tl.arange(0, BN)
    q = tl.load(Q + (h * G + rg)[:, None] * D + rd[None])
    m = tl.full([G], float("-inf"), tl.float32)
    l = tl.zeros([G], tl.float32)
    acc = tl.zeros([G, D], tl.float32)
    end = tl.minimum((c + 1) * CH, S)
    for j in range(c * CH, end, BN):
        n = j + rn
        k = tl.load(K + (h * S + n)[None] * D + rd[:, None], mask=n[None] < end, other=0.0)
        s = tl.dot(q, k) * sc
        s = tl.where(n[None] < end, s, float("-inf"))
        mn = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - mn[:, None])
        al = tl.exp(m - mn)
        v = tl.load(V + (h * S + n)[:, None] * D + rd[None], mask=n[:, None] < end, other=0.0)
        acc = acc * al[:, None] + tl.dot(p.to(v.dtype), v)
        l = l * al + tl.sum(p, 1)
        m = mn
    tl.store(O + ((h * G + rg)[:, None] * nc + c) * D + rd[None], acc / l[:, None])
    tl.store(L + (h * G + rg) * nc + c, m + tl.log(l))


@triton.jit
def decode2(P, L, O, NC, D: tl.constexpr):
    h = tl.program_id(0)
    rd = tl.arange(0, D)
    m = -float("inf")
    s = 0.0
    acc = tl.zeros([D], tl.float32)
    for c in range(NC):
        x = tl.load(P + (h * NC + c) * D + rd)
        l = tl.load(L + h * NC + c)
        mn = tl.maximum(m, l)
        a = tl.exp(m - mn)
        b = tl.exp(l - mn)
        acc = acc * a + x * b
        s = s * a + b
        m = mn
    tl.store(O + h * D + rd, (acc / s).to(O.dtype.element_ty))


@triton.jit
def mm_scaled(A, B, As, Bs, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pm = tl.program_id(0)
    pn = tl.program_id(1)
    rm = pm * BM + tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    nk = K // BK
    for k in range(nk):
        rk = k * BK + tl.arange(0, BK)
        a = tl.load(A + rm[:, None] * K + rk[None])
        b = tl.load(B + rn[None] * K + rk[:, None])
        sa = tl.load(As + rm * nk + k)
        sb = tl.load(Bs + pn * nk + k)
        acc += tl.dot(a, b) * sa[:, None] * sb
    tl.store(C + rm[:, None] * N + rn[None], acc.to(C.dtype.element_ty))


@triton.jit
def mm_bias_gelu(A, B, Bias, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pm = tl.program_id(0)
    pn = tl.program_id(1)
    rm = pm * BM + tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        rk = k + tl.arange(0, BK)
        acc += tl.dot(tl.load(A + rm[:, None] * K + rk[None]), tl.load(B + rk[:, None] * N + rn[None]))
    x = acc + tl.load(Bias + rn)[None].to(tl.float32)
    y = 0.5 * x * (1 + tl.math.erf(x * 0.7071067811865476))
    tl.store(C + rm[:, None] * N + rn[None], y.to(C.dtype.element_ty))


@triton.jit
def mm_swiglu(A, W1, W2, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pm = tl.program_id(0)
    pn = tl.program_id(1)
    rm = pm * BM + tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    g = tl.zeros([BM, BN], tl.float32)
    u = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        rk = k + tl.arange(0, BK)
        a = tl.load(A + rm[:, None] * K + rk[None])
        g = tl.dot(a, tl.load(W1 + rk[:, None] * N + rn[None]), g)
        u = tl.dot(a, tl.load(W2 + rk[:, None] * N + rn[None]), u)
    tl.store(C + rm[:, None] * N + rn[None], (g * tl.sigmoid(g) * u).to(C.dtype.element_ty))


@triton.jit
def ln_bwd(DY, X, W, Mean, Rstd, DX, cols, B: tl.constexpr):
    r = tl.program_id(0)
    i = tl.arange(0, B)
    m = i < cols
    x = tl.load(X + r * cols + i, mask=m, other=0.0).to(tl.float32)
    dy = tl.load(DY + r * cols + i, mask=m, other=0.0).to(tl.float32)
    w = tl.load(W + i, mask=m, other=0.0).to(tl.float32)
    mean = tl.load(Mean + r)
    rstd = tl.load(Rstd + r)
    xh = tl.where(m, (x - mean) * rstd, 0.0)
    wdy = tl.where(m, w * dy, 0.0)
    c1 = tl.sum(xh * wdy, 0) / cols
    c2 = tl.sum(wdy, 0) / cols
    dx = (wdy - (xh * c1 + c2)) * rstd
    tl.store(DX + r * cols + i, dx.to(DX.dtype.element_ty), mask=m)


@triton.jit
def rms_bwd(DY, X, W, R, DX, cols, B: tl.constexpr):
    r = tl.program_id(0)
    i = tl.arange(0, B)
    m = i < cols
    x = tl.load(X + r * cols + i, mask=m, other=0.0).to(tl.float32)
    dy = tl.load(DY + r * cols + i, mask=m, other=0.0).to(tl.float32)
    w = tl.load(W + i, mask=m, other=0.0).to(tl.float32)
    rs = tl.load(R + r)
    n = x * rs
    dw = dy * w
    s = tl.sum(dw * n, 0)
    tl.store(DX + r * cols + i, (rs / cols * (cols * dw - n * s)).to(DX.dtype.element_ty), mask=m)


@triton.jit
def ce_fwd(X, T, Loss, cols, B: tl.constexpr):
    r = tl.program_id(0)
    t = tl.load(T + r)
    m = -float("inf")
    d = 0.0
    for j in range(0, cols, B):
        i = j + tl.arange(0, B)
        x = tl.load(X + r * cols + i, mask=i < cols, other=-float("inf")).to(tl.float32)
        mn = tl.maximum(m, tl.max(x))
        d = d * tl.exp(m - mn) + tl.sum(tl.exp(x - mn))
        m = mn
    xt = tl.load(X + r * cols + t).to(tl.float32)
    tl.store(Loss + r, tl.log(d) + m - xt)


@triton.jit
def embed(T, W, Y, cols, B: tl.constexpr):
    r = tl.program_id(0)
    t = tl.load(T + r)
    i = tl.arange(0, B)
    tl.store(Y + r * cols + i, tl.load(W + t * cols + i, mask=i < cols), mask=i < cols)


@triton.jit
def rope_gptj(X, Cos, Sin, Y, H: tl.constexpr):
    t = tl.program_id(0)
    i = tl.arange(0, H)
    c = tl.load(Cos + t * H + i).to(tl.float32)
    s = tl.load(Sin + t * H + i).to(tl.float32)
    a = tl.load(X + t * 2 * H + 2 * i).to(tl.float32)
    b = tl.load(X + t * 2 * H + 2 * i + 1).to(tl.float32)
    tl.store(Y + t * 2 * H + 2 * i, (a * c - b * s).to(Y.dtype.element_ty))
    tl.store(Y + t * 2 * H + 2 * i + 1, (b * c + a * s).to(Y.dtype.element_ty))


@triton.jit
def ema(X, A, Y, T, C, B: tl.constexpr):
    c = tl.program_id(0) * B + tl.arange(0, B)
    h = tl.zeros([B], tl.float32)
    for t in range(T):
        a = tl.load(A + t * C + c).to(tl.float32)
        x = tl.load(X + t * C + c).to(tl.float32)
        h = h * tl.exp(-a * a) + x
        tl.store(Y + t * C + c, h)


@triton.jit
def acts(X, A, Bo, C, D, E, F, n, BL: tl.constexpr):
    i = tl.program_id(0) * BL + tl.arange(0, BL)
    x = tl.load(X + i, mask=i < n).to(tl.float32)
    tl.store(A + i, tl.where(x > 0, x, tl.exp(x) - 1), mask=i < n)
    tl.store(Bo + i, tl.log(1 + tl.exp(x)), mask=i < n)
    tl.store(C + i, tl.maximum(x, 0.0) * tl.maximum(x, 0.0), mask=i < n)
    tl.store(D + i, tl.where(x > 0, x, 0.01 * x), mask=i < n)
    tl.store(E + i, x * libdevice.tanh(tl.log(1 + tl.exp(x))), mask=i < n)
    tl.store(F + i, tl.minimum(tl.maximum(x * 0.1666667 + 0.5, 0.0), 1.0) * x, mask=i < n)


@triton.jit
def adamw(P, G, M, V, PO, MO, VO, lr, b1, b2, eps, wd, c1, c2, n, BL: tl.constexpr):
    i = tl.program_id(0) * BL + tl.arange(0, BL)
    k = i < n
    p = tl.load(P + i, mask=k)
    g = tl.load(G + i, mask=k)
    m = b1 * tl.load(M + i, mask=k) + (1 - b1) * g
    v = b2 * tl.load(V + i, mask=k) + (1 - b2) * g * g
    p = p - lr * wd * p
    p = p - lr * (m / c1) / (tl.sqrt(v / c2) + eps)
    tl.store(PO + i, p, mask=k)
    tl.store(MO + i, m, mask=k)
    tl.store(VO + i, v, mask=k)


@triton.jit
def half_math(X, Y, Z, n, BL: tl.constexpr):
    i = tl.program_id(0) * BL + tl.arange(0, BL)
    x = tl.load(X + i, mask=i < n)
    y = tl.load(Y + i, mask=i < n)
    tl.store(Z + i, x * y + x - y * y, mask=i < n)


@triton.jit
def casts(X, A, Bo, C, D, n, BL: tl.constexpr):
    i = tl.program_id(0) * BL + tl.arange(0, BL)
    x = tl.load(X + i, mask=i < n)
    tl.store(A + i, x.to(tl.float16).to(tl.float32) * 3.0, mask=i < n)
    tl.store(Bo + i, x.to(tl.bfloat16).to(tl.float32) + x, mask=i < n)
    tl.store(C + i, x.to(tl.float8e4nv), mask=i < n)
    tl.store(D + i, x.to(tl.float8e5), mask=i < n)


@triton.jit
def lin_attn(Q, K, V, O, S, D: tl.constexpr, BM: tl.constexpr):
    h = tl.program_id(0)
    r = tl.arange(0, BM)
    d = tl.arange(0, D)
    st = tl.zeros([D, D], tl.float32)
    for j in range(0, S, BM):
        p = h * S * D + (j + r)[:, None] * D + d[None]
        q = tl.load(Q + p)
        k = tl.load(K + p)
        v = tl.load(V + p)
        s = tl.dot(q, tl.trans(k))
        s = tl.where(r[:, None] >= r[None], s, 0.0)
        o = tl.dot(s.to(q.dtype), v) + tl.dot(q, st.to(q.dtype))
        st += tl.dot(tl.trans(k), v)
        tl.store(O + p, o)


@triton.jit
def attn_extra(
    Q, K, V, O, sc, S, cap, W, slope, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HOW: tl.constexpr
):
    pm = tl.program_id(0)
    h = tl.program_id(1)
    off = h * S * D
    rm = pm * BM + tl.arange(0, BM)
    rn = tl.arange(0, BN)
    rd = tl.arange(0, D)
    q = tl.load(Q + off + rm[:, None] * D + rd[None])
    m = tl.full([BM], -1e30, tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for j in range(0, (pm + 1) * BM, BN):
        n = j + rn
        k = tl.load(K + off + n[:, None] * D + rd[None])
        s = tl.dot(q, tl.trans(k)) * sc
        if HOW == 0:
            s = cap * libdevice.tanh(s / cap)
        if HOW == 1:
            s = s + slope * (n[None] - rm[:, None]).to(tl.float32)
        ok = rm[:, None] >= n[None]
        if HOW == 2:
            ok = ok & (rm[:, None] - n[None] < W)
        s = tl.where(ok, s, -1e30)
        mn = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - mn[:, None])
        al = tl.exp(m - mn)
        l = l * al + tl.sum(p, 1)
        acc = acc * al[:, None]
        v = tl.load(V + off + n[:, None] * D + rd[None])
        acc = tl.dot(p.to(v.dtype), v, acc)
        m = mn
    tl.store(O + off + rm[:, None] * D + rd[None], (acc / l[:, None]).to(O.dtype.element_ty))


@triton.jit
def paged(Q, K, V, BT, Len, O, sc, MAXB, D: tl.constexpr, G: tl.constexpr, P: tl.constexpr):
    b = tl.program_id(0)
    h = tl.program_id(1)
    H = tl.num_programs(1)
    rg = tl.arange(0, G)
    rd = tl.arange(0, D)
    rn = tl.arange(0, P)
    q = tl.load(Q + ((b * H + h) * G + rg)[:, None] * D + rd[None])
    n = tl.load(Len + b)
    m = tl.full([G], float("-inf"), tl.float32)
    l = tl.zeros([G], tl.float32)
    acc = tl.zeros([G, D], tl.float32)
    for j in range(tl.cdiv(n, P)):
        page = tl.load(BT + b * MAXB + j)
        kk = tl.load(K + ((page * P + rn)[None] * H + h) * D + rd[:, None])
        vv = tl.load(V + ((page * P + rn)[:, None] * H + h) * D + rd[None])
        s = tl.dot(q, kk) * sc
        s = tl.where((j * P + rn)[None] < n, s, float("-inf"))
        mn = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - mn[:, None])
        al = tl.exp(m - mn)
        acc = acc * al[:, None] + tl.dot(p.to(vv.dtype), vv)
        l = l * al + tl.sum(p, 1)
        m = mn
    tl.store(O + ((b * H + h) * G + rg)[:, None] * D + rd[None], (acc / l[:, None]).to(O.dtype.element_ty))


@triton.jit
def loss_parts(X, Y, A, Bo, C, n, BL: tl.constexpr):
    b = tl.program_id(0)
    i = b * BL + tl.arange(0, BL)
    x = tl.load(X + i, mask=i < n, other=0.0).to(tl.float32)
    y = tl.load(Y + i, mask=i < n, other=0.0).to(tl.float32)
    d = x - y
    tl.store(A + b, tl.sum(tl.abs(d), 0))
    tl.store(Bo + b, tl.sum(d * d, 0))
    a = tl.abs(d)
    tl.store(C + b, tl.sum(tl.where(a < 1.0, 0.5 * d * d, a - 0.5), 0))


@triton.jit
def rows2d(X, W, Y, rows, cols, R: tl.constexpr, B: tl.constexpr):
    r = tl.program_id(0) * R + tl.arange(0, R)
    i = tl.arange(0, B)
    k = (r[:, None] < rows) & (i[None] < cols)
    x = tl.load(X + r[:, None] * cols + i[None], mask=k, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / cols
    xc = tl.where(k, x - mean[:, None], 0.0)
    var = tl.sum(xc * xc, 1) / cols
    w = tl.load(W + i, mask=i < cols, other=0.0).to(tl.float32)
    tl.store(
        Y + r[:, None] * cols + i[None], (xc * tl.rsqrt(var + 1e-5)[:, None] * w[None]).to(Y.dtype.element_ty), mask=k
    )


@triton.jit
def bmm_t(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    b = tl.program_id(2)
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        rk = k + tl.arange(0, BK)
        a = tl.load(A + b * M * K + rk[:, None] * M + rm[None])
        w = tl.load(B + b * N * K + rn[:, None] * K + rk[None])
        acc += tl.dot(tl.trans(a), tl.trans(w))
    tl.store(C + b * M * N + rm[:, None] * N + rn[None], acc)


@triton.jit
def mm_half_acc(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float16)
    for k in range(0, K, BK):
        rk = k + tl.arange(0, BK)
        acc = tl.dot(
            tl.load(A + rm[:, None] * K + rk[None]), tl.load(B + rk[:, None] * N + rn[None]), acc, out_dtype=tl.float16
        )
    tl.store(C + rm[:, None] * N + rn[None], acc)


@triton.jit
def conv1d(X, W, Bi, Y, T, C, B: tl.constexpr):
    t = tl.program_id(0)
    c = tl.program_id(1) * B + tl.arange(0, B)
    acc = tl.load(Bi + c).to(tl.float32)
    for k in tl.static_range(4):
        s = t - 3 + k
        x = tl.load(X + s * C + c, mask=(c < C) & (s >= 0), other=0.0).to(tl.float32)
        acc += x * tl.load(W + k * C + c).to(tl.float32)
    tl.store(Y + t * C + c, acc * tl.sigmoid(acc), mask=c < C)


@triton.jit
def mm_by(A, B, C, M, N, K, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A product of float32 numbers: TF32, or IEEE as fused multiply-adds."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        rk = k + tl.arange(0, BK)
        a, b = tl.load(A + rm[:, None] * K + rk[None]), tl.load(B + rk[:, None] * N + rn[None])
        acc += tl.dot(a, b, input_precision=PRECISION)
    tl.store(C + rm[:, None] * N + rn[None], acc)


@triton.jit
def mm_fp8(A, B, C, K, MOST: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    """A product of FP8 numbers whose sums go to registers after MOST products."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    acc = tl.zeros([M, N], tl.float32)
    for j in range(0, K, BK):
        a = tl.load(A + m[:, None] * K + (j + k)[None, :])
        b = tl.load(B + n[None, :] * K + (j + k)[:, None])
        acc = tl.dot(a, b, acc, max_num_imprecise_acc=MOST)
    tl.store(C + m[:, None] * N + n[None, :], acc)


@triton.jit
def peeled_norm(X, W, Bi, Y, MEAN, n, B: tl.constexpr):
    """Layer norm in tiles: moments without a mask but in the last tile, results from the last tile to the first."""
    row = tl.program_id(0)
    X += row * n
    Y += row * n
    s = tl.zeros([B], tl.float32)
    q = tl.zeros([B], tl.float32)
    steps = tl.cdiv(n, B)
    for step in range(steps - 1):
        x = tl.load(X + step * B + tl.arange(0, B)).to(tl.float32)
        s += x
        q += x * x
    for step in range(steps - 1, steps):
        cols = step * B + tl.arange(0, B)
        x = tl.load(X + cols, mask=cols < n, other=0.0).to(tl.float32)
        s += x
        q += x * x
    mean = tl.sum(s, 0) / n
    rstd = tl.rsqrt(tl.sum(q, 0) / n - mean * mean + 1e-5)
    tl.store(MEAN + row, mean)
    for step in range(steps):
        cols = step * B + tl.arange(0, B)
        x = tl.load(X + cols, mask=cols < n, other=0.0).to(tl.float32)
        w = tl.load(W + cols, mask=cols < n, other=0.0).to(tl.float32)
        b = tl.load(Bi + cols, mask=cols < n, other=0.0).to(tl.float32)
        tl.store(Y + cols, ((x - mean) * rstd * w + b).to(Y.dtype.element_ty), mask=cols < n)


@triton.jit
def rope_pairs(X, C, S, Y, D: tl.constexpr):
    """Rotary embedding of neighbouring elements: split, turned, joined."""
    row, half = tl.program_id(0), tl.arange(0, D // 2)
    x = tl.load(X + row * D + tl.arange(0, D)).to(tl.float32)
    a, b = tl.split(tl.reshape(x, [D // 2, 2]))
    c, s = tl.load(C + row * (D // 2) + half), tl.load(S + row * (D // 2) + half)
    y = tl.interleave(a * c - b * s, b * c + a * s)
    tl.store(Y + row * D + tl.arange(0, D), y.to(Y.dtype.element_ty))


@triton.jit
def both_axes(X, Y, V, rows, cols, R: tl.constexpr, B: tl.constexpr):
    """A block less its mean over its variance's root, as a group norm has them; the variance as a result."""
    p, r, i = tl.program_id(0), tl.arange(0, R), tl.arange(0, B)
    k = (r[:, None] < rows) & (i[None] < cols)
    at = p * rows * cols + r[:, None] * cols + i[None]
    x = tl.load(X + at, mask=k, other=0.0).to(tl.float32)
    mean = tl.sum(x) / (rows * cols)
    d = tl.where(k, x - mean, 0.0)
    var = tl.sum(d * d) / (rows * cols)
    tl.store(V + p, var)
    tl.store(Y + at, (d * tl.rsqrt(var + 1e-5)).to(Y.dtype.element_ty), mask=k)
