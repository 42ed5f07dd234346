"""Kernels of which loops store their states, and of blocks along other axes than a tensor's last two."""

import triton
import triton.language as tl


@triton.jit
def decayed(X, G, Y, Starts, D, B: tl.constexpr, BACK: tl.constexpr):
    """A decayed running sum of a sequence's tokens, stored for each; ``BACK``: from the last token to the first."""
    i, n = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1)
    first, last = tl.load(Starts + n), tl.load(Starts + n + 1)
    at = (last - 1 if BACK else first) * D + i
    x, g, y = X + at, G + at, Y + at
    state = tl.zeros((B,), tl.float32)
    for _ in range(first, last):
        state = tl.exp(tl.load(g, mask=i < D, other=0.0).to(tl.float32)) * state + tl.load(x, mask=i < D, other=0.0)
        tl.store(y, state.to(Y.dtype.element_ty), mask=i < D)
        x += -D if BACK else D
        g += -D if BACK else D
        y += -D if BACK else D


@triton.jit
def states_of_chunks(K, V, H, Last, T, N: tl.constexpr, D: tl.constexpr, BT: tl.constexpr):
    """The state before each chunk of tokens, and behind the last; heads are interleaved."""
    b, h = tl.program_id(0), tl.program_id(1)
    d, state = tl.arange(0, D), tl.zeros((D, D), tl.float32)
    tile = d[:, None] * D + d[None, :]
    for c in range(tl.cdiv(T, BT)):
        t = c * BT + tl.arange(0, BT)
        tl.store(H + ((b * tl.cdiv(T, BT) + c) * N + h) * D * D + tile, state.to(tl.float16))
        at = (b * T * N + h) * D
        k = tl.load(K + at + d[:, None] + t[None, :] * N * D, mask=t[None, :] < T, other=0.0)
        v = tl.load(V + at + d[None, :] + t[:, None] * N * D, mask=t[:, None] < T, other=0.0)
        state += tl.dot(k, v)
    tl.store(Last + (b * N + h) * D * D + tile, state)


@triton.jit
def corrected(K, V, W, H, U, T, D: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr):
    """The delta rule by chunks: the state before each, and its values without those that the state predicts."""
    d, e = tl.arange(0, D), tl.program_id(0) * BV + tl.arange(0, BV)
    state = tl.zeros((D, BV), tl.float32)
    for c in range(T // BT):
        t = c * BT + tl.arange(0, BT)
        tl.store(H + c * D * D + d[:, None] * D + e[None, :], state.to(tl.float16))
        w = tl.load(W + t[:, None] * D + d[None, :])
        u = tl.load(V + t[:, None] * D + e[None, :]) - tl.dot(w, state.to(tl.float16))
        tl.store(U + t[:, None] * D + e[None, :], u.to(tl.float16))
        state += tl.dot(tl.load(K + d[:, None] + t[None, :] * D), u.to(tl.float16))


@triton.jit
def gradients(X, W, R, Y, P, rows, n, EACH: tl.constexpr, B: tl.constexpr):
    """Some rows a program, each stored, and what they add to a gradient of the weights."""
    p, i = tl.program_id(0), tl.arange(0, B)
    w, total = tl.load(W + i, mask=i < n, other=0.0), tl.zeros((B,), tl.float32)
    for row in range(p * EACH, min((p + 1) * EACH, rows)):
        x, r = tl.load(X + row * n + i, mask=i < n, other=0.0), tl.load(R + row)
        tl.store(Y + row * n + i, (x * w * r - tl.sum(x * w, axis=0) * x).to(tl.float16), mask=i < n)
        total += x * r
    tl.store(P + p * n + i, total, mask=i < n)


@triton.jit
def distances(X, Z, Y, L, n, B: tl.constexpr):
    """A gradient tile by tile, and the sum of the distances behind the loop."""
    row, total = tl.program_id(0) * n, 0.0
    for start in range(0, n, B):
        i = start + tl.arange(0, B)
        x, z = tl.load(X + row + i, mask=i < n, other=0.0), tl.load(Z + row + i, mask=i < n, other=0.0)
        tl.store(Y + row + i, tl.where(x > z, 0.25, -0.25), mask=i < n)
        total += tl.sum(tl.abs(x - z), axis=0)
    tl.store(L + tl.program_id(0), total)


@triton.jit
def delta_of_tokens(Q, K, V, Beta, O, Last, T, D: tl.constexpr, BV: tl.constexpr):
    """The delta rule token by token: sums down the rows of the state."""
    d, e = tl.arange(0, D), tl.program_id(0) * BV + tl.arange(0, BV)
    state = tl.zeros((D, BV), tl.float32)
    for t in range(T):
        q, k, v = tl.load(Q + t * D + d), tl.load(K + t * D + d), tl.load(V + t * D + e)
        u = (v - tl.sum(state * k[:, None], axis=0)) * tl.load(Beta + t)
        state += k[:, None] * u[None, :]
        tl.store(O + t * D + e, tl.sum(state * q[:, None], axis=0))
    tl.store(Last + d[:, None] * D + e[None, :], state)


@triton.jit
def weights_of_keys(Q, K, L, Y, rows, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """How much all queries look at each key: sums down the rows of weights, causal."""
    d, n = tl.arange(0, D), tl.program_id(0) * BN + tl.arange(0, BN)
    k, total = tl.load(K + n[None, :] * D + d[:, None]), tl.zeros((BN,), tl.float32)
    for start in range(0, rows, BM):
        m = start + tl.arange(0, BM)
        q = tl.load(Q + m[:, None] * D + d[None, :])
        p = tl.exp(tl.dot(q, k) * 0.125 - tl.load(L + m)[:, None])
        total += tl.sum(tl.where(m[:, None] >= n[None, :], p, 0.0), 0)
    tl.store(Y + n, total)


@triton.jit
def weighted_values(P, V, O, n, D: tl.constexpr, BN: tl.constexpr):
    """A softmax of a row of scores times values, tile by tile: sums down the rows of the values."""
    row, d = tl.program_id(0), tl.arange(0, D)
    m, l, acc = -float("inf"), 0.0, tl.zeros((D,), tl.float32)
    for start in range(0, n, BN):
        i = start + tl.arange(0, BN)
        s = tl.load(P + row * n + i, mask=i < n, other=-float("inf"))
        v = tl.load(V + i[:, None] * D + d[None, :], mask=i[:, None] < n, other=0.0)
        larger = tl.maximum(m, tl.max(s, 0))
        p, scale = tl.exp(s - larger), tl.exp(m - larger)
        l, acc, m = l * scale + tl.sum(p, 0), acc * scale + tl.sum(p[:, None] * v, 0), larger
    tl.store(O + row * D + d, acc / l)


@triton.jit
def summed_down(X, Y, M, n, BM: tl.constexpr, BN: tl.constexpr):
    """Cumulative sums down the rows of a block."""
    i, j = tl.arange(0, BM)[:, None], tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    seen = (i < M) & (j < n)
    tl.store(Y + i * n + j, tl.cumsum(tl.load(X + i * n + j, mask=seen, other=0.0), axis=0), mask=seen)


@triton.jit
def across(X, B, Y, M, n, BM: tl.constexpr, BN: tl.constexpr):
    """Sums along columns of blocks whose rows are the neighbours in memory."""
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    at, seen = i[:, None] + j[None, :] * n, (i[:, None] < n) & (j[None, :] < M)
    x = tl.load(X + at, mask=seen, other=0.0) + tl.load(B + i, mask=i < n, other=0.0)[:, None]
    x = tl.where(seen, x, 0.0)
    tl.store(Y + at, x / (1.0 + tl.sum(x * x, 1))[:, None], mask=seen)


@triton.jit
def rotated_heads(X, Cos, Sin, Scale, Y, T, heads, BS: tl.constexpr, BH: tl.constexpr, HALF: tl.constexpr):
    """Both halves of tokens' heads turned, in blocks of three axes, a scale for each head."""
    t, h, d = tl.program_id(0) * BS + tl.arange(0, BS), tl.arange(0, BH), tl.arange(0, HALF)
    at = t[:, None, None] * heads * 2 * HALF + h[None, :, None] * 2 * HALF + d[None, None, :]
    seen = (t[:, None, None] < T) & (h[None, :, None] < heads)
    turn = t[:, None, None] * HALF + d[None, None, :]
    c = tl.load(Cos + turn, mask=t[:, None, None] < T, other=1.0)
    s = tl.load(Sin + turn, mask=t[:, None, None] < T, other=0.0)
    a, b = tl.load(X + at, mask=seen, other=0.0), tl.load(X + at + HALF, mask=seen, other=0.0)
    scale = tl.load(Scale + h)[None, :, None]
    tl.store(Y + at, (a * c - b * s) * scale, mask=seen)
    tl.store(Y + at + HALF, (a * s + b * c) * scale, mask=seen)


@triton.jit
def norms_of_heads(X, Y, T, heads, BS: tl.constexpr, BH: tl.constexpr, D: tl.constexpr):
    """The sum of squares of each head of tokens, in blocks of three axes."""
    t, h, d = tl.program_id(0) * BS + tl.arange(0, BS), tl.arange(0, BH), tl.arange(0, D)
    at = t[:, None] * heads + h[None, :]
    seen = (t[:, None] < T) & (h[None, :] < heads)
    x = tl.load(X + at[:, :, None] * D + d[None, None, :], mask=seen[:, :, None], other=0.0)
    tl.store(Y + at, tl.sum(x * x, 2), mask=seen)


@triton.jit
def joined_heads(X, Y, BS: tl.constexpr, BH: tl.constexpr, D: tl.constexpr):
    """Sums over each axis of a block of three."""
    t, h, d = tl.arange(0, BS), tl.arange(0, BH), tl.arange(0, D)
    x = tl.load(X + t[:, None, None] * BH * D + h[None, :, None] * D + d[None, None, :])
    tl.store(Y + d, tl.sum(tl.sum(x, 0), 0))


@triton.jit
def turned_pairs(X, Cos, Sin, Y, HALF: tl.constexpr):
    """Neighbours of a row turned, each of every second element."""
    row, d = tl.program_id(0), tl.arange(0, HALF)
    at = row * 2 * HALF + 2 * d
    a, b = tl.load(X + at), tl.load(X + at + 1)
    c, s = tl.load(Cos + row * HALF + d), tl.load(Sin + row * HALF + d)
    tl.store(Y + at, tl.fma(a, c, -b * s))
    tl.store(Y + at + 1, tl.fma(a, s, b * c))


@triton.jit
def groups_of_a_row(X, Y, S, heads, G: tl.constexpr, D: tl.constexpr):
    """Groups of a row, each divided by its largest magnitude."""
    t, h, g, d = tl.program_id(0), tl.program_id(1), tl.arange(0, G), tl.arange(0, D)
    at = (t * heads + h) * G * D + g[:, None] * D + d[None, :]
    x = tl.load(X + at)
    largest = tl.max(tl.abs(x), axis=1)
    tl.store(Y + at, x / largest[:, None])
    tl.store(S + (t * heads + h) * G + g, largest)


@triton.jit
def pieces(X, Z, n, B: tl.constexpr):
    """The logarithm of the sum of exponentials of each piece of a row; the last one is smaller."""
    row, piece = tl.program_id(0), tl.program_id(1)
    i = piece * B + tl.arange(0, B)
    x = tl.load(X + row * n + i, mask=i < n, other=-float("inf"))
    m = tl.max(x, 0)
    tl.store(Z + row * tl.num_programs(1) + piece, tl.log(tl.sum(tl.exp(x - m), 0)) + m)


@triton.jit
def behind_a_cache(Q, K, V, O, Cached, S, scale, HIDES, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Causal attention behind cached keys; loads leave out the keys that no query of the block sees."""
    first, d = tl.program_id(0) * BM, tl.arange(0, D)
    cached, m_ = tl.load(Cached), first + tl.arange(0, BM)
    new = S - cached
    end = tl.minimum(first + BM + cached, S)
    q = tl.load(Q + m_[:, None] * D + d[None, :], mask=m_[:, None] < new, other=0.0)
    m, l, acc = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM, D], tl.float32)
    for start in range(0, end, BN):
        n = start + tl.arange(0, BN)
        k = tl.load(K + n[None, :] * D + d[:, None], mask=n[None, :] < end, other=0.0)
        s = tl.where(m_[:, None] + cached + HIDES >= n[None, :], tl.dot(q, k) * scale, -1.0e8)
        larger = tl.maximum(m, tl.max(s, 1))
        p, alpha = tl.math.exp2(s - larger[:, None]), tl.math.exp2(m - larger)
        l, acc, m = l * alpha + tl.sum(p, 1), acc * alpha[:, None], larger
        v = tl.load(V + n[:, None] * D + d[None, :], mask=n[:, None] < end, other=0.0)
        acc = tl.dot(p.to(tl.float16), v, acc)
    tl.store(O + m_[:, None] * D + d[None, :], acc / l[:, None], mask=m_[:, None] < new)


@triton.jit
def some_splits(X, Y, L, Counts, n, B: tl.constexpr):
    """Sums of splits of a row, stored in a loop of one iteration or none, as an if."""
    row, split = tl.program_id(0), tl.program_id(1)
    low, high = split * 2 * B, tl.minimum(split * 2 * B + 2 * B, tl.load(Counts + row))
    total, largest = 0.0, -float("inf")
    for start in range(low, high, B):
        i = start + tl.arange(0, B)
        x = tl.load(X + row * n + i, mask=i < high, other=0.0)
        total += tl.sum(x, 0)
        largest = tl.maximum(largest, tl.max(tl.where(i < high, x, -float("inf")), 0))
    for _ in range(tl.where(high > low, 1, 0)):
        tl.store(Y + row * tl.num_programs(1) + split, total)
        tl.store(L + row * tl.num_programs(1) + split, largest)


@triton.jit
def vector_before_tile(X, Y, S, T, D: tl.constexpr):
    """A loop that stores a number of each step before a row."""
    d, state = tl.arange(0, D), tl.zeros((D,), tl.float32)
    for t in range(T):
        x = tl.load(X + t * D + d)
        tl.store(S + t, tl.sum(x, 0))
        state += x
        tl.store(Y + t * D + d, state)


@triton.jit
def products_down(A, B, Y, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    """Sums down the rows of a product."""
    r, k, c = tl.arange(0, M), tl.arange(0, K), tl.program_id(0) * N + tl.arange(0, N)
    x = tl.dot(tl.load(A + r[:, None] * K + k[None, :]), tl.load(B + k[:, None] * 2 * N + c[None, :]))
    tl.store(Y + c, tl.sum(tl.exp(x), axis=0))


@triton.jit
def centred_groups(X, W, Y, SUMS, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IN_ROWS: tl.constexpr):
    """Group norm's mean: a sum along both axes of a block, at once or of the sums of rows."""
    i, j, n = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.program_id(0)
    seen = (i[:, None] < rows) & (j[None, :] < columns)
    at = n * rows * columns + i[:, None] * columns + j[None, :]
    x = tl.load(X + at, mask=seen, other=0.0)
    total = tl.sum(tl.sum(x, 1), 0) if IN_ROWS else tl.sum(x)
    w = tl.load(W + i, mask=i < rows, other=0.0)
    tl.store(Y + at, (x - total) * w[:, None], mask=seen)
    tl.store(SUMS + n, total)


@triton.jit
def groups_in_tiles(X, W, Y, SIZE, EACH, CHANNELS, B: tl.constexpr):
    """Group norm in two loops: a group's sum, and weights of its channels by quotients of a tile's indices."""
    n = tl.program_id(0)
    total = 0.0
    for j in range(0, SIZE, B):
        i = j + tl.arange(0, B)
        total += tl.sum(tl.load(X + n * SIZE + i, mask=i < SIZE, other=0.0))
    for j in range(0, SIZE, B):
        i = j + tl.arange(0, B)
        x = tl.load(X + n * SIZE + i, mask=i < SIZE, other=0.0)
        w = tl.load(W + n * CHANNELS + i // EACH, mask=i < SIZE)
        tl.store(Y + n * SIZE + i, (x - total) * w, mask=i < SIZE)


@triton.jit
def rotated_neighbours(X, C, S, Y, D, B: tl.constexpr, ROWS: tl.constexpr):
    """Rope of GPT-J: neighbours of a row are rotated; rows of a block, or one row in each program."""
    if ROWS == 1:
        n, i, h = tl.program_id(0), tl.arange(0, B), tl.arange(0, B // 2)
    else:
        n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
        i, h = tl.arange(0, B)[None, :], tl.arange(0, B // 2)[None, :]
    x = tl.load(X + n * D + i, mask=i < D, other=0.0).to(tl.float32)
    c = tl.load(C + n * (D // 2) + h, mask=h < D // 2, other=0.0)
    s = tl.load(S + n * (D // 2) + h, mask=h < D // 2, other=0.0)
    if ROWS == 1:
        a, b = tl.split(tl.reshape(x, (B // 2, 2)))
        y = tl.interleave(a * c - b * s, b * c + a * s)
    else:
        a, b = tl.split(tl.reshape(x, (ROWS, B // 2, 2)))
        y = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (ROWS, B))
    tl.store(Y + n * D + i, y.to(Y.dtype.element_ty), mask=i < D)


@triton.jit
def two_products_of_one_pair(A, W, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A state that two products of the same tiles are added to, halved between; the last columns fill no tile."""
    rm, rn = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(A + rm[:, None] * K + (k + rk)[None], mask=rm[:, None] < M, other=0.0)
        w = tl.load(W + (k + rk)[:, None] * N + rn[None], mask=rn[None] < N, other=0.0)
        acc = acc * 0.5 + tl.dot(a, w) + tl.dot(a, w)
    tl.store(C + rm[:, None] * N + rn[None], acc, mask=(rm[:, None] < M) & (rn[None] < N))
