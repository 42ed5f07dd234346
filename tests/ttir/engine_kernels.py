"""Kernels in the forms that compilers of graphs and serving engines write, for `test_engines`."""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def looped_sum(X, Y, rows, n, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr, HOW: tl.constexpr):
    """A reduction whose loop masks the accumulator, not what it adds."""
    row = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    inside = row < rows
    base = tl.arange(0, RBLOCK)[None, :]
    start = -float("inf") if HOW == "max" else 0.0
    acc = tl.full([XBLOCK, RBLOCK], start, tl.float32)
    for at in range(0, n, RBLOCK):
        c = at + base
        mask = c < n
        x = tl.load(X + row * n + c, mask=mask & inside, other=0.0).to(tl.float32)
        if HOW == "squares":
            more = acc + x * x
        elif HOW == "shifted":
            more = acc + (x + 1.0)
        elif HOW == "products":
            more = acc + (x + 1.0) * (x + 2.0)
        else:
            more = tl.maximum(acc, x)
        acc = tl.where(mask & inside, more, acc)
    total = tl.max(acc, 1)[:, None] if HOW == "max" else tl.sum(acc, 1)[:, None]
    tl.store(Y + row, total, mask=inside)


@triton.jit
def looped_norm(X, W, Y, rows, n, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    """A root mean square norm of rows longer than a block, as a compiler of graphs writes it."""
    row = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    inside = row < rows
    base = tl.arange(0, RBLOCK)[None, :]
    acc = tl.full([XBLOCK, RBLOCK], 0.0, tl.float32)
    for at in range(0, n, RBLOCK):
        c = at + base
        mask = c < n
        x = tl.load(X + row * n + c, mask=mask & inside, other=0.0).to(tl.float32)
        more = acc + tl.broadcast_to(x * x, [XBLOCK, RBLOCK])
        acc = tl.where(mask & inside, more, acc)
    total = tl.sum(acc, 1)[:, None]
    for at in range(0, n, RBLOCK):
        c = at + base
        mask = c < n
        x = tl.load(X + row * n + c, mask=mask & inside, other=0.0).to(tl.float32)
        w = tl.load(W + c, mask=mask, other=0.0).to(tl.float32)
        y = x * tl.rsqrt(total / n + 1e-5) * w
        tl.store(Y + row * n + c, y.to(Y.dtype.element_ty), mask=mask & inside)


@triton.jit
def flat(X, W, Y, count, B: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr, HOW: tl.constexpr):
    """Elementwise work on flat indices, whose quotients and remainders address the tensors."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    mask = i < count
    col, row = i % INNER, i // INNER
    if HOW == "bias":
        x = tl.load(X + i, mask) + tl.load(W + col, mask)
    elif HOW == "scale":
        x = tl.load(X + i, mask) * tl.load(W + row, mask)
    elif HOW == "part":
        x = tl.load(X + (col + 2 * INNER * row), mask) * tl.load(X + (INNER + col + 2 * INNER * row), mask)
    elif HOW == "permuted":  # (OUTER, heads, INNER) from (heads, OUTER, INNER)
        head, at = row % OUTER, row // OUTER
        x = tl.load(X + (col + INNER * at + INNER * (count // (INNER * OUTER)) * head), mask)
    elif HOW == "transposed":
        x = tl.load(X + (row + (count // INNER) * col), mask)
    tl.store(Y + i, x, mask)


@triton.jit
def spans(X, R, C, Y, M, N, BM: tl.constexpr, BN: tl.constexpr, HOW: tl.constexpr):
    """Rows, columns and numbers against a tile."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.arange(0, BN)
    inside = (rm[:, None] < M) & (rn[None, :] < N)
    x = tl.load(X + rm[:, None] * N + rn[None, :], mask=inside, other=0.0)
    r = tl.load(R + rm, mask=rm < M, other=0.0)[:, None]
    c = tl.load(C + rn, mask=rn < N, other=0.0)[None, :]
    if HOW == "row condition":
        y = tl.where(r == -float("inf"), -1.0, x - r)
    elif HOW == "infinite":
        y = tl.where(r == float("inf"), 2.0, tl.where(r == -float("inf"), x, x + r))
    elif HOW == "column condition":
        y = tl.where(c > 0.0, x, x * c)
    elif HOW == "row or column":
        y = tl.where((c > 0.0) | (r > 0.0), x, c)
    elif HOW == "row and column":
        y = tl.where(x > 0, r, c)
    elif HOW == "numbers":
        y = tl.where(r > 0, 1.0, 3.0) * x
    elif HOW == "maximum":
        y = tl.maximum(tl.minimum(x, r), c)
    elif HOW == "outer":
        y = r * c
    elif HOW == "outer fma":
        y = r * c + x
    elif HOW == "row fma":
        y = x * r + c
    elif HOW == "added":
        y = (r + c) - x
    elif HOW == "xor":
        y = tl.where((x > 0) ^ (r > 0), x, c)
    tl.store(Y + rm[:, None] * N + rn[None, :], y, mask=inside)


@triton.jit
def searched(X, Starts, Y, count, n, B: tl.constexpr, HOW: tl.constexpr):
    """The sequence of a program, by a search in the starts of all; rows scaled by its number."""
    row = tl.program_id(0)
    low, high = 0, count
    if HOW == "while":
        while low < high:
            mid = (low + high) // 2
            if tl.load(Starts + mid) <= row:
                low = mid + 1
            else:
                high = mid
    else:
        for _ in range(8):
            mid = (low + high) // 2
            is_left = (tl.load(Starts + mid, mask=mid < count, other=1 << 20) <= row) & (low < high)
            low, high = tl.where(is_left, mid + 1, low), tl.where(is_left | (low >= high), high, mid)
    sequence = low - 1
    first = tl.load(Starts + sequence)
    c = tl.arange(0, B)
    x = tl.load(X + (row - first) * n + c, mask=c < n, other=0.0)
    tl.store(Y + row * n + c, x * 2.0, mask=c < n)


@triton.jit
def by_expert(X, W, E, Y, n, B: tl.constexpr, HOW: tl.constexpr):
    """Rows by loaded numbers: some are zero, or ignored."""
    row, c = tl.program_id(0), tl.arange(0, B)
    e = tl.load(E + row)
    if HOW == "zeros":  # noqa: SIM102 - of constexprs and of loaded numbers
        if e == -1:
            tl.store(Y + row * n + c, tl.zeros([B], tl.float32), mask=c < n)
            return
    if HOW == "ignored":  # noqa: SIM102
        if e == -1:
            return
    w = tl.load(W + e * n + c, mask=c < n, other=0.0)
    tl.store(Y + row * n + c, tl.load(X + row * n + c, mask=c < n, other=0.0) * w, mask=c < n)


@triton.jit
def scanned(X, Y, n, B: tl.constexpr, HOW: tl.constexpr):
    row, c = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * n + c, mask=c < n, other=0.0)
    y = tl.cumsum(x, 0)
    if HOW == "reverse":
        y = tl.cumsum(x, 0, reverse=True)
    tl.store(Y + row * n + c, y, mask=c < n)


@triton.jit
def scanned_tile(X, Y, M, n, BM: tl.constexpr, B: tl.constexpr):
    rm, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, B)
    inside = (rm[:, None] < M) & (c[None, :] < n)
    x = tl.load(X + rm[:, None] * n + c[None, :], mask=inside, other=0.0)
    tl.store(Y + rm[:, None] * n + c[None, :], tl.cumsum(x, 1), mask=inside)


@triton.jit
def decode(Q, K, V, O, S, scale, D: tl.constexpr, BN: tl.constexpr):
    """Attention of one query by sums of a block's rows and columns, without products."""
    head, d = tl.program_id(0), tl.arange(0, D)
    q = tl.load(Q + head * D + d).to(tl.float32) * scale
    m, l = -float("inf"), 0.0
    acc = tl.zeros([D], tl.float32)
    for j in range(0, S, BN):
        n = j + tl.arange(0, BN)
        k = tl.load(K + head * S * D + n[:, None] * D + d[None, :], mask=n[:, None] < S, other=0.0).to(tl.float32)
        s = tl.where(n < S, tl.sum(q[None, :] * k, 1), -float("inf"))
        new = tl.maximum(m, tl.max(s, 0))
        p, alpha = tl.exp(s - new), tl.exp(m - new)
        v = tl.load(V + head * S * D + n[:, None] * D + d[None, :], mask=n[:, None] < S, other=0.0).to(tl.float32)
        acc = acc * alpha + tl.sum(p[:, None] * v, 0)
        l = l * alpha + tl.sum(p, 0)
        m = new
    tl.store(O + head * D + d, (acc / l).to(O.dtype.element_ty))


@triton.jit
def constants(X, Y, n, B: tl.constexpr, D: tl.constexpr, HOW: tl.constexpr):
    """Functions of numbers known at the launch."""
    row, c = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * n + c, mask=c < n, other=0.0)
    if HOW == "rsqrt":
        x = x * tl.rsqrt(D * 1.0)
    elif HOW == "exp":
        x = x * tl.exp(-0.125 * D)
    elif HOW == "log":
        x = x + tl.log(D * 1.0)
    tl.store(Y + row * n + c, x, mask=c < n)


@triton.jit
def constant_tile(X, Y, M, n, BM: tl.constexpr, B: tl.constexpr, D: tl.constexpr):
    rm, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, B)
    inside = (rm[:, None] < M) * (c[None, :] < n)
    x = tl.load(X + rm[:, None] * n + c[None, :], mask=inside, other=0.0)
    scale = tl.rsqrt(D * 1.0)
    tl.store(Y + rm[:, None] * n + c[None, :], x * scale + scale, mask=inside)


@triton.jit
def padded_keys(Q, K, V, O, Lens, S, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HOW: tl.constexpr):
    """Attention whose masks hide keys by finite numbers, or by one rule or another."""
    pm, head = tl.program_id(0), tl.program_id(1)
    rm, rn, d = pm * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    q = tl.load(Q + head * S * D + rm[:, None] * D + d[None, :], mask=rm[:, None] < S, other=0.0)
    m = tl.full([BM], -float("inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for j in range(0, S, BN):
        n = j + rn
        k = tl.load(K + head * S * D + n[:, None] * D + d[None, :], mask=n[:, None] < S, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        if HOW == "finite":
            s = tl.where((rm[:, None] >= n[None, :]) & (n[None, :] < S), s, -1.0e8)
        elif HOW == "or":
            s = tl.where((rm[:, None] >= n[None, :]) | (n[None, :] < 16), s, -float("inf"))
        elif HOW == "window or sink":
            near = (rm[:, None] >= n[None, :]) & (rm[:, None] - n[None, :] < 24)
            s = tl.where(near | ((n[None, :] < 4) & (rm[:, None] >= n[None, :])), s, -float("inf"))
        elif HOW == "not":
            s = tl.where(~((rm[:, None] < n[None, :]) | (rm[:, None] - n[None, :] >= 40)), s, -float("inf"))
        elif HOW == "xor":
            s = tl.where((rm[:, None] < n[None, :]) ^ (n[None, :] < 16), s, -float("inf"))
        elif HOW == "number first":
            s = tl.where((rm[:, None] < n[None, :]) | (n[None, :] >= 50), -1.0e8, s)
        elif HOW == "blocks":
            s = tl.where(rm[:, None] // 8 >= n[None, :] // 8, s, -float("inf"))
        elif HOW == "other blocks":
            seen = tl.where((rm[:, None] & 7) == (n[None, :] & 7), 1, 0) | (n[None, :] // 16 == rm[:, None] // 16)
            s = tl.where((seen == 0) | (n[None, :] > 60), -1.0e8, s)
        elif HOW == "one tile":
            first = tl.where(j == 0, 1, 0)
            seen = tl.where(first == 1, tl.where(rm[:, None] // 4 >= n[None, :] // 4, 1, 0), 1)
            s = tl.where(seen > 0, s, -float("inf"))
        elif HOW == "guarded":
            s = tl.where(rm[:, None] >= n[None, :], s, -float("inf"))
        new = tl.maximum(m, tl.max(s, 1))
        if HOW == "guarded":
            p = tl.where(new[:, None] == -float("inf"), 0.0, tl.exp(s - new[:, None]))
            alpha = tl.where(new == -float("inf"), 1.0, tl.exp(m - new))
        else:
            p, alpha = tl.exp(s - new[:, None]), tl.exp(m - new)
        v = tl.load(V + head * S * D + n[:, None] * D + d[None, :], mask=n[:, None] < S, other=0.0)
        acc = tl.dot(p.to(tl.float16), v, acc * alpha[:, None])
        l = l * alpha + tl.sum(p, 1)
        m = new
    y = (acc / l[:, None]).to(tl.float16)
    tl.store(O + head * S * D + rm[:, None] * D + d[None, :], y, mask=rm[:, None] < S)


@triton.jit
def stores_or_ends(X, E, Y, n, B: tl.constexpr):
    """A row by its expert; where that is -1 a program stores zeros and ends."""
    row, i = tl.program_id(0), tl.arange(0, B)
    if tl.load(E + row) == -1:
        tl.store(Y + row * n + i, tl.zeros((B,), tl.float32), mask=i < n)
        return
    x = tl.load(X + row * n + i, mask=i < n)
    tl.store(Y + row * n + i, x * 2.0, mask=i < n)


@triton.jit
def assumed(X, Y, n, B: tl.constexpr):
    """Assumptions that always hold: TTIR has a constant without a type for them."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.assume(tl.program_id(0) >= 0)
    tl.assume(B > 0)
    tl.store(Y + i, tl.load(X + i, mask=i < n) * 2.0, mask=i < n)


@triton.jit
def grouped_norm(X, W, Y, Rstd, M, n, B: tl.constexpr):
    """A norm of each of several groups of a row, whose statistics are stored group after group."""
    row, group, i = tl.program_id(0), tl.program_id(1), tl.arange(0, B)
    stride = n * tl.num_programs(1)
    x = tl.load(X + row * stride + group * n + i, mask=i < n, other=0.0)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=0) / n + 1e-5)
    tl.store(Rstd + group * M + row, rstd)
    w = tl.load(W + group * n + i, mask=i < n)
    tl.store(Y + row * stride + group * n + i, x * rstd * w, mask=i < n)


@triton.jit
def rope_both(Q, K, Cos, Sin, HQ: tl.constexpr, HK: tl.constexpr, HD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr):
    """Rotary embedding of queries and keys in place: two results, of other numbers of heads."""
    token, half = tl.program_id(0), tl.arange(0, HD // 2)
    cos, sin = tl.load(Cos + token * HD + half), tl.load(Sin + token * HD + half)
    at_q = Q + token * HQ * HD + tl.arange(0, BQ)[:, None] * HD + half[None, :]
    at_k = K + token * HK * HD + tl.arange(0, BK)[:, None] * HD + half[None, :]
    has_q, has_k = tl.arange(0, BQ)[:, None] < HQ, tl.arange(0, BK)[:, None] < HK
    q1, q2 = tl.load(at_q, mask=has_q, other=0), tl.load(at_q + HD // 2, mask=has_q, other=0)
    k1, k2 = tl.load(at_k, mask=has_k, other=0), tl.load(at_k + HD // 2, mask=has_k, other=0)
    tl.store(at_q, q1 * cos - q2 * sin, mask=has_q)
    tl.store(at_q + HD // 2, q2 * cos + q1 * sin, mask=has_q)
    tl.store(at_k, k1 * cos - k2 * sin, mask=has_k)
    tl.store(at_k + HD // 2, k2 * cos + k1 * sin, mask=has_k)


@triton.jit
def chunk_states(X, B, Out, Dt, Decay, S, H, CHUNK, D: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    """States of chunks of a state-space model: a product whose factor is scaled by row, up to a chunk's last decay."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    rd, rn, rk = tl.arange(0, D), tl.arange(0, N), tl.arange(0, BK)
    steps = tl.num_programs(0) * CHUNK
    x_at = X + chunk * CHUNK * H * D + head * D + rd[:, None] + rk[None, :] * H * D
    b_at = B + chunk * CHUNK * N + rn[None, :] + rk[:, None] * N
    decay_at, dt_at = Decay + head * steps + chunk * CHUNK + rk, Dt + head * steps + chunk * CHUNK + rk
    last = tl.load(Decay + head * steps + chunk * CHUNK + CHUNK - 1)
    acc = tl.zeros((D, N), tl.float32)
    for k in range(0, CHUNK, BK):
        x = tl.load(x_at, mask=rk[None, :] < CHUNK - k, other=0.0)
        b = tl.load(b_at, mask=rk[:, None] < CHUNK - k, other=0.0).to(tl.float32)
        decay = tl.load(decay_at, mask=rk < CHUNK - k, other=0.0)
        b *= (tl.exp(tl.minimum(last - decay, 0.0)) * tl.load(dt_at, mask=rk < CHUNK - k, other=0.0))[:, None]
        acc += tl.dot(x, b.to(X.dtype.element_ty))
        x_at += BK * H * D
        b_at += BK * N
        decay_at += BK
        dt_at += BK
    tl.store(Out + (chunk * H + head) * D * N + rd[:, None] * N + rn[None, :], acc)


@triton.jit
def read_back(X, Y, Z, n, B: tl.constexpr):
    """A result that another one is computed from, which rows of unlike shape do not make independent."""
    i = tl.arange(0, B)
    tl.store(Y + i, tl.load(X + i) * 2.0)
    tl.store(Z, tl.sum(tl.load(Y + i, mask=i < n, other=0.0), axis=0))


@triton.jit
def two_loops(X, Y, N, B: tl.constexpr, C: tl.constexpr, M: tl.constexpr):
    """A sum by two loops in a row that differ in the size of their blocks alone."""
    row, total = tl.program_id(0) * M + tl.arange(0, M), tl.zeros((M,), tl.float32)
    for j in range(0, N // 2, B):
        total += tl.sum(tl.load(X + row[:, None] * N + (j + tl.arange(0, B))[None, :]), axis=1)
    for j in range(N // 2, N, C):
        total += tl.sum(tl.load(X + row[:, None] * N + (j + tl.arange(0, C))[None, :]), axis=1)
    tl.store(Y + row, total)


@triton.jit
def loss_of_class(X, Class, Loss, n, B: tl.constexpr):
    """Cross entropy of a row: the score of its class is one element by a loaded integer."""
    row = tl.program_id(0)
    score = tl.load(X + row * n + tl.load(Class + row))
    m, d = -float("inf"), 0.0
    for j in range(0, n, B):
        i = j + tl.arange(0, B)
        x = tl.load(X + row * n + i, mask=i < n, other=-float("inf"))
        new = tl.maximum(m, tl.max(x, axis=0))
        d = d * tl.exp(m - new) + tl.sum(tl.exp(x - new), axis=0)
        m = new
    tl.store(Loss + row, m + tl.log(d) - score)


@triton.jit
def library_softmax(X, Y, n, B: tl.constexpr):
    """Softmax by the library's functions, whose hidden elements are 0."""
    row, i = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * n + i, mask=i < n, other=-float("inf"))
    e = libdevice.exp(x - tl.max(x, axis=0)) + 0.0 * libdevice.exp2(x)
    tl.store(Y + row * n + i, e / tl.sum(e, axis=0), mask=i < n)


@triton.jit
def carried_blocks(X, Y, n, steps, B: tl.constexpr):
    """A running sum that is stored each time."""
    i, total = tl.program_id(0) * B + tl.arange(0, B), tl.zeros((B,), tl.float32)
    for t in range(steps):
        total += tl.load(X + t * n + i, mask=i < n, other=0.0)
        tl.store(Y + t * n + i, total, mask=i < n)


@triton.jit
def streamed(Q, K, V, O, Scratch, S, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Attention whose correction goes through memory, in each iteration."""
    rm, rn, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    q = tl.load(Q + rm[:, None] * D + d[None, :])
    m, l, acc = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM, D], tl.float32)
    for j in range(0, S, BN):
        k = tl.load(K + (j + rn)[:, None] * D + d[None, :])
        s = tl.dot(q, tl.trans(k)) * 0.17
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        tl.store(Scratch + rm, tl.exp(m - new))
        alpha = tl.load(Scratch + rm)
        v = tl.load(V + (j + rn)[:, None] * D + d[None, :])
        acc = tl.dot(p.to(tl.float16), v, acc * alpha[:, None])
        l = l * alpha + tl.sum(p, 1)
        m = new
    tl.store(O + rm[:, None] * D + d[None, :], (acc / l[:, None]).to(tl.float16))


@triton.jit
def approximated(X, Y, B: tl.constexpr, HOW: tl.constexpr):
    """The library's functions that flush subnormal numbers."""
    i = tl.arange(0, B)
    x = tl.load(X + i)
    tl.store(Y + i, libdevice.fast_expf(x) if HOW == "exp" else libdevice.fast_log2f(x))


@triton.jit
def summed_result(X, P, Q, B: tl.constexpr):
    """A tile into a result, which a loop then reads by a pointer that it carries."""
    pid, o = tl.program_id(0), tl.arange(0, B)
    tl.store(P + pid * 4 * B + o, tl.load(X + pid * 4 * B + o) * 2)
    acc, p = tl.zeros((B,), tl.float32), P + pid * 4 * B + o
    for _ in range(4):
        acc += tl.load(p)
        p += B
    tl.store(Q + pid, tl.sum(acc))


@triton.jit
def stored_then_loaded(X, P, Q, B: tl.constexpr):
    """A tile into one tensor, and the sum of a tile of another one that is loaded again behind that."""
    pid = tl.program_id(0)
    i = pid * B + tl.arange(0, B)
    tl.store(P + i, tl.load(X + i) * 2)
    tl.store(Q + pid, tl.sum(tl.load(X + i)))


@triton.jit
def doubled(X, Y, B: tl.constexpr):
    """Elements, loaded once and then stored."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(Y + i, tl.load(X + i) * 2)


@triton.jit
def doubled_rows(X, Y, T, LAG: tl.constexpr, D: tl.constexpr):
    """Rows of each program, twice the row that is ``LAG`` rows before."""
    first, d = tl.program_id(0) * T * D, tl.arange(0, D)
    for t in range(LAG, T):
        tl.store(Y + first + t * D + d, tl.load(X + first + (t - LAG) * D + d) * 2)
