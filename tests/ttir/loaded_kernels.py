"""Kernels whose masks and rows are given by loaded integers, as serving engines have them, for tests."""

import triton
import triton.language as tl


@triton.jit
def chosen(X, Mask, Y, M, N, BM: tl.constexpr, BN: tl.constexpr, HOW: tl.constexpr):
    """Elements by a mask that is loaded: of all elements, of rows or of columns."""
    rm, rn = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    inside = (rm[:, None] < M) & (rn[None, :] < N)
    x = tl.load(X + rm[:, None] * N + rn[None, :], mask=inside, other=0.0)
    if HOW == "elements":
        y = tl.where(tl.load(Mask + rm[:, None] * N + rn[None, :], mask=inside, other=0), x, -1.0)
    elif HOW == "not elements":
        y = tl.where(tl.load(Mask + rm[:, None] * N + rn[None, :], mask=inside, other=0) == 0, x, -1.0)
    elif HOW == "rows":
        y = tl.where((tl.load(Mask + rm, mask=rm < M, other=0) > 1)[:, None], x, 2.0 * x)
    elif HOW == "columns":
        y = tl.where((tl.load(Mask + rn, mask=rn < N, other=0) != 0)[None, :], x, 0.0)
    else:
        y = x * (tl.load(Mask + rn, mask=rn < N, other=0) != 0)[None, :].to(tl.float32)
    tl.store(Y + rm[:, None] * N + rn[None, :], y, mask=inside)


@triton.jit
def masked_attention(
    Q, K, V, Mask, O, S, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HOW: tl.constexpr
):
    """Attention whose mask is loaded: of queries and keys, or of the keys of a batch."""
    pm, head = tl.program_id(0), tl.program_id(1)
    rm, rn, d = pm * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    q = tl.load(Q + head * S * D + rm[:, None] * D + d[None, :])
    m, l = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for j in range(0, S, BN):
        n = j + rn
        k = tl.load(K + head * S * D + n[:, None] * D + d[None, :])
        s = tl.dot(q, tl.trans(k)) * scale
        if HOW == "matrix":
            s = tl.where(tl.load(Mask + rm[:, None] * S + n[None, :]) != 0, s, -float("inf"))
        else:
            s = tl.where(tl.load(Mask + head * S + n)[None, :] != 0, s, -float("inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p, alpha = tl.exp(s - new[:, None]), tl.exp(m - new)
        v = tl.load(V + head * S * D + n[:, None] * D + d[None, :])
        acc = tl.dot(p.to(tl.float16), v, acc * alpha[:, None])
        l = l * alpha + tl.sum(p, 1)
        m = new
    tl.store(O + head * S * D + rm[:, None] * D + d[None, :], (acc / l[:, None]).to(tl.float16))


@triton.jit
def experts(
    A, B, C, Scale, Tokens, Experts, count, N, K, top, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Tokens in the order of their experts times the experts' matrices, into a row for each choice of a token."""
    pm, pn = tl.program_id(0), tl.program_id(1)
    token = tl.load(Tokens + pm * BM + tl.arange(0, BM)).to(tl.int64)
    is_one = token < count
    expert = tl.load(Experts + pm).to(tl.int64)
    rn, rk = (pn * BN + tl.arange(0, BN)) % N, tl.arange(0, BK)
    a_at = A + token[:, None] // top * K + rk[None, :]
    b_at = B + expert * N * K + rn[None, :] * K + rk[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(a_at, mask=is_one[:, None] & (rk[None, :] < K - k), other=0.0)
        acc = tl.dot(a, tl.load(b_at, mask=rk[:, None] < K - k, other=0.0), acc)
        a_at += BK
        b_at += BK
    if WEIGHTED:
        acc = acc * tl.load(Scale + token, mask=is_one, other=0)[:, None]
    cn = pn * BN + tl.arange(0, BN)
    tl.store(C + token[:, None] * N + cn[None, :], acc.to(C.dtype.element_ty), mask=is_one[:, None] & (cn[None, :] < N))


@triton.jit
def experts_of_eights(
    A, B, C, ScaleA, ScaleB, Tokens, Experts, count, N, K, top, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """As `experts`, in FP8 with a scale for each BK of a row of A and for each BK x BK of B."""
    pm, pn = tl.program_id(0), tl.program_id(1)
    token = tl.load(Tokens + pm * BM + tl.arange(0, BM)).to(tl.int64)
    is_one = token < count
    expert = tl.load(Experts + pm).to(tl.int64)
    rn, rk = pn * BN + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(A + token[:, None] // top * K + (k + rk)[None, :], mask=is_one[:, None], other=0.0)
        b = tl.load(B + expert * N * K + rn[None, :] * K + (k + rk)[:, None])
        left = tl.load(ScaleA + token // top * (K // BK) + k // BK, mask=is_one, other=0.0)
        right = tl.load(ScaleB + (expert * (N // BK) + rn // BK) * (K // BK) + k // BK)
        acc += tl.dot(a, b) * left[:, None] * right[None, :]
    tl.store(C + token[:, None] * N + rn[None, :], acc.to(C.dtype.element_ty), mask=is_one[:, None])


@triton.jit
def chosen_rows(X, Rows, Y, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Embeddings, or any rows by their numbers."""
    rm, rn = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    row = tl.load(Rows + rm, mask=rm < M, other=0)
    x = tl.load(X + row[:, None] * N + rn[None, :], mask=(rm[:, None] < M) & (rn[None, :] < N), other=0.0)
    tl.store(Y + rm[:, None] * N + rn[None, :], 2.0 * x, mask=(rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def scattered(X, Rows, Y, B: tl.constexpr):
    """Elements to where loaded numbers say."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(Y + tl.load(Rows + i), tl.load(X + i))


@triton.jit
def listed_keys(Q, K, V, Slots, O, S, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Attention on keys of a pool, each in a slot of its own."""
    batch, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    rm, d = tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(Q + (batch * BM + rm[:, None]) * heads * D + head * D + d[None, :])
    m, l = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for j in range(0, S, BN):
        n = j + tl.arange(0, BN)
        slot = tl.load(Slots + batch * S + n, mask=n < S, other=0)
        k = tl.load(K + slot[None, :] * heads * D + head * D + d[:, None], mask=n[None, :] < S, other=0.0)
        s = tl.where(n[None, :] < S, tl.dot(q, k) * scale, -float("inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p, alpha = tl.exp(s - new[:, None]), tl.exp(m - new)
        v = tl.load(V + slot[:, None] * heads * D + head * D + d[None, :], mask=n[:, None] < S, other=0.0)
        acc = tl.dot(p.to(tl.float16), v, acc * alpha[:, None])
        l = l * alpha + tl.sum(p, 1)
        m = new
    o = (acc / l[:, None]).to(tl.float16)
    tl.store(O + (batch * BM + rm[:, None]) * heads * D + head * D + d[None, :], o)


@triton.jit
def offset_elements(X, I, Y, B: tl.constexpr, N: tl.constexpr, HOW: tl.constexpr):
    """Elements of a flat tensor by loaded numbers plus a constant, or plus where the program's row begins."""
    p, o = tl.program_id(0), tl.arange(0, B)
    i = tl.load(I + p * B + o) + 5 if HOW == "constant" else p * N + tl.load(I + o)
    tl.store(Y + p * B + o, tl.load(X + i))


@triton.jit
def rows_of_masked_numbers(X, I, Y, n, B: tl.constexpr, D: tl.constexpr):
    """Rows by loaded numbers, of which a mask replaces some, or by their place where a number is below 0."""
    o, d = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, D)
    i = tl.load(I + o, mask=o < n, other=5)
    i = tl.where(i >= 0, i, o)
    tl.store(Y + o[:, None] * D + d[None, :], tl.load(X + i[:, None] * D + d[None, :]))


@triton.jit
def masked_by_places(X, I, Y, n, B: tl.constexpr, D: tl.constexpr, UNSIGNED: tl.constexpr):
    """Rows of which loaded numbers, of which a mask replaces some, are more than their places."""
    o, d = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, D)
    i = tl.load(I + o, mask=o < n, other=1000)
    holds = i.to(tl.uint32) > o.to(tl.uint32) if UNSIGNED else i > o
    x = tl.load(X + o[:, None] * D + d[None, :], mask=holds[:, None], other=0.0)
    tl.store(Y + o[:, None] * D + d[None, :], x)


@triton.jit
def widened_numbers(X, I, Y, n, B: tl.constexpr, D: tl.constexpr):
    """Rows by loaded numbers that are read without a sign, of which a mask replaces some."""
    o, d = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, D)
    i = tl.load(I + o, mask=o < n, other=-1).to(tl.uint32, bitcast=True).to(tl.uint64)
    x = tl.load(X + i[:, None] * D + d[None, :], mask=(o < n)[:, None], other=0.0)
    tl.store(Y + o[:, None] * D + d[None, :], x)


@triton.jit
def omitted_rows(X, Y, B: tl.constexpr):
    """Every third row of eight, added up."""
    o = tl.arange(0, B)
    acc = tl.zeros((B,), tl.float32)
    for q in range(0, 8, 3):
        acc += tl.load(X + q * B + o)
    tl.store(Y + o, acc)


@triton.jit
def loss_in_place(X, L, LOSS, n, HOW: tl.constexpr, B: tl.constexpr):
    """Gradients of a loss in place of the scores, tile by tile, and that of the label over them behind the loop."""
    row = tl.program_id(0)
    label = tl.load(L + row)
    X += row * n
    scored = tl.load(X + label) if HOW != "another row" else tl.load(X - row * n + label)
    m, d = float("-inf"), 0.0
    for i in range(0, n, B):
        cols = i + tl.arange(0, B)
        x = tl.load(X + cols, mask=cols < n, other=float("-inf"))
        larger = tl.maximum(m, tl.max(x))
        d = d * tl.exp(m - larger) + tl.sum(tl.exp(x - larger))
        m = larger
    for i in range(0, n, B):
        cols = i + tl.arange(0, B)
        x = tl.load(X + cols, mask=cols < n, other=float("-inf"))
        tl.store(X + cols, tl.exp(x - m) / d, mask=cols < n)
    if HOW != "no barrier":
        tl.debug_barrier()
    if HOW == "returns":  # noqa: SIM102 - one is known to the compiler, the other is not
        if label > 20:
            return
    if HOW == "loaded again":
        tl.store(X + label, tl.load(X + label) - 1.0)
    elif HOW == "beyond":
        tl.store(X + label + 1, tl.exp(scored - m) / d - 1.0)
    else:
        tl.store(X + label, tl.exp(scored - m) / d - 1.0)
    tl.store(LOSS + row, m + tl.log(d) - scored)


@triton.jit
def experts_by_groups(
    A, B, C, ScaleA, ScaleB, Experts, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, G: tl.constexpr
):  # fmt: skip
    """Rows times an expert's matrix, with scales of G terms that several tiles of BK share."""
    pm, pn = tl.program_id(0), tl.program_id(1)
    expert = tl.load(Experts + pm)
    rm, rn, rk = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(K, BK)):
        a = tl.load(A + rm[:, None] * K + (k * BK + rk)[None, :])
        b = tl.load(B + expert * N * K + rn[None, :] * K + (k * BK + rk)[:, None])
        left = tl.load(ScaleA + rm * (K // G) + k * BK // G)
        right = tl.load(ScaleB + (expert * (N // G) + rn // G) * (K // G) + k * BK // G)
        acc += tl.dot(a, b) * left[:, None] * right[None, :]
    tl.store(C + rm[:, None] * N + rn[None, :], acc)


@triton.jit
def in_loops(X, F, Y, S, n, B: tl.constexpr, BOTH: tl.constexpr):
    """Rows by loops of one iteration or none, as ifs; BOTH: a second such loop has the others, else a sum of each."""
    row, cols, flag = tl.program_id(0), tl.arange(0, B), tl.load(F + tl.program_id(0))
    for _ in range(flag):
        x = tl.load(X + row * n + cols, mask=cols < n)
        tl.store(Y + row * n + cols, 2.0 * x, mask=cols < n)
    if BOTH:
        for _ in range(1 - flag):
            x = tl.load(X + row * n + cols, mask=cols < n)
            tl.store(Y + row * n + cols, 3.0 * x, mask=cols < n)
    else:
        tl.store(S + row, tl.sum(tl.load(X + row * n + cols, mask=cols < n, other=0.0)))


@triton.jit
def gated_by_itself(K, G, A, Z, H, S: tl.constexpr, C: tl.constexpr, IN_PLACE: tl.constexpr):
    """A product of a block by itself, times a vector's differences between rows and columns where these are below 0."""
    row, col, head = tl.arange(0, S), tl.arange(0, C), tl.program_id(1)
    rows = tl.program_id(0) * S + row
    k = tl.load(K + (rows[:, None] * H + head) * C + col[None, :])
    a = tl.dot(k, tl.trans(k))
    g = tl.load(G + rows * H + head)
    by = g[:, None] - g[None, :]
    a = tl.where((by <= 0) & (row[:, None] > row[None, :]), a * tl.exp(by), 0.0)
    if IN_PLACE:
        tl.store(Z + (rows[:, None] * H + head) * C + col[None, :], a.to(tl.float16))
    else:
        tl.store(A + (rows[:, None] * H + head) * S + row[None, :], a)


@triton.jit
def groups_normalized(X, W, Y, S, N, R: tl.constexpr, B: tl.constexpr, MASKED: tl.constexpr):
    """A group of R rows of S elements, which a loop adds up tile by tile and another one takes the mean from."""
    rows, at = tl.arange(0, R), tl.arange(0, B)
    group = tl.program_id(0) * R + rows
    total = tl.zeros((R, B), tl.float32)
    for t in range(0, N, B):
        mask = (t + at < S)[None, :] if MASKED else (t + at < N)[None, :]
        total += tl.load(X + group[:, None] * S + (t + at)[None, :], mask=mask, other=0.0)
    mean = tl.sum(tl.sum(total, 1), 0) / (R * S)
    w = tl.load(W + rows)
    for t in range(0, N, B):
        mask = (t + at < S)[None, :] if MASKED else (t + at < N)[None, :]
        x = tl.load(X + group[:, None] * S + (t + at)[None, :], mask=mask, other=0.0)
        tl.store(Y + group[:, None] * N + (t + at)[None, :], (x - mean) * w[:, None], mask=(t + at < N)[None, :])
