"""Kernels with tails whose masked lanes reach a loop's state, a sum, a maximum or a product, right and wrong ones."""

import triton
import triton.language as tl


@triton.jit
def lanes(X, Y, N, OTHER: tl.constexpr, HOW: tl.constexpr, B: tl.constexpr):
    """Sums or maxima by lanes over the tiles of a row, then one of all."""
    p = tl.program_id(0)
    r = tl.arange(0, B)
    s = tl.full([B], float("-inf") if HOW == "max" else 0.0, tl.float32)
    for j in range(0, N, B):
        if OTHER is None:
            x = tl.load(X + p * N + j + r, mask=j + r < N)
        else:
            x = tl.load(X + p * N + j + r, mask=j + r < N, other=OTHER)
        if HOW == "max":
            s = tl.maximum(s, x)
        elif HOW == "sum":
            s += x
        elif HOW == "squares from 2":
            s += (x - 2.0) * (x - 2.0)
        else:
            s += tl.where(j + r < N, (x - 2.0) * (x - 2.0), 0.0)
    tl.store(Y + p, tl.max(s, 0) if HOW == "max" else tl.sum(s, 0))


@triton.jit
def online(X, Y, N, BY_LANES: tl.constexpr, OTHER: tl.constexpr, B: tl.constexpr):
    """The logarithm of a row's sum of exponentials, by numbers of the row or by lanes."""
    p = tl.program_id(0)
    r = tl.arange(0, B)
    if BY_LANES:
        m = tl.full([B], -1e30, tl.float32)
        s = tl.zeros([B], tl.float32)
    else:
        m = -float("inf")
        s = 0.0
    for j in range(0, N, B):
        x = tl.load(X + p * N + j + r, mask=j + r < N, other=OTHER)
        n = tl.maximum(m, x if BY_LANES else tl.max(x, 0))
        e = tl.exp(x - n)
        s = s * tl.exp(m - n) + (e if BY_LANES else tl.sum(e, 0))
        m = n
    if BY_LANES:
        most = tl.max(m, 0)
        tl.store(Y + p, most + tl.log(tl.sum(s * tl.exp(m - most), 0)))
    else:
        tl.store(Y + p, m + tl.log(s))


@triton.jit
def second_state(X, Y, N, HOW: tl.constexpr, B: tl.constexpr):
    """A state of lanes that another state, or a sum in the loop, reads."""
    p = tl.program_id(0)
    r = tl.arange(0, B)
    s = tl.zeros([B], tl.float32)
    t = tl.zeros([B], tl.float32)
    total = 0.0
    for j in range(0, N, B):
        x = tl.load(X + p * N + j + r, mask=j + r < N, other=0.0)
        if HOW == "sums of the new one":
            s += x
            total += tl.sum(s, 0)
        elif HOW == "sums of the old one":
            total += tl.sum(s, 0)
            s += x
        else:
            s += x
            t += s
    y = tl.sum(t, 0) if HOW == "a second one" else total
    tl.store(Y + p, y)


@triton.jit
def times(X, U, Y, N, T, HOW: tl.constexpr, TURNS: tl.constexpr, B: tl.constexpr):
    """Steps that go on from states of a row, whose lanes beyond it are hidden in every step."""
    p = tl.program_id(0)
    r = tl.arange(0, B)
    s = tl.zeros([B], tl.float32)
    t = tl.full([B], 3.0 if HOW == "turns to 3" else 0.0, tl.float32)
    for i in range(T):
        x = tl.load(X + (p * T + i) * N + r, mask=r < N, other=0.0)
        y = s * x if HOW == "weighted by a count" else s + x
        tl.store(Y + p * T + i, tl.sum(y, 0))
        if TURNS:
            n = s + x
            s = t
            t = n
        else:
            s = s + x + 1.0


@triton.jit
def by_tiles(X, W, Y, R, N, HOW: tl.constexpr, BY_LANES: tl.constexpr, BR: tl.constexpr, B: tl.constexpr):
    """Sums of rows over tiles of columns."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    r = tl.arange(0, B)
    part = tl.zeros([BR, B], tl.float32)
    s = tl.zeros([BR], tl.float32)
    for j in range(0, N, B):
        x = tl.load(X + rows[:, None] * N + (j + r)[None], mask=(rows < R)[:, None] & (j + r < N)[None], other=0.0)
        if BY_LANES:
            part += x if HOW == "as it is" else x + 1.0
        elif HOW == "weighted":
            s += tl.sum(x * tl.load(W + j + r, mask=j + r < N, other=0.0)[None], 1)
        elif HOW == "with padded weights":
            s += tl.sum(x + tl.load(W + j + r)[None], 1)
        else:
            s += tl.sum(tl.load(W + j + r)[None] + x, 1)
    y = tl.sum(part, 1) if BY_LANES else s
    tl.store(Y + rows, y, mask=rows < R)


@triton.jit
def down(X, W, Y, R, N, HOW: tl.constexpr, BR: tl.constexpr, B: tl.constexpr):
    """Sums or maxima of columns over tiles of rows."""
    c = tl.program_id(0) * B + tl.arange(0, B)
    r = tl.arange(0, BR)
    s = tl.full([BR, B], float("-inf") if HOW == "max" else 0.0, tl.float32)
    for i in range(0, R, BR):
        x = tl.load(X + (i + r)[:, None] * N + c[None], mask=(i + r < R)[:, None] & (c < N)[None], other=0.0)
        if HOW == "max":
            s = tl.maximum(s, x)
        elif HOW == "sum":
            s += x
        else:
            s += x + tl.load(W + c, mask=c < N, other=0.0)[None]
    tl.store(Y + c, tl.max(s, 0) if HOW == "max" else tl.sum(s, 0), mask=c < N)


@triton.jit
def of_rows(X, M, Y, R, N, STEPS: tl.constexpr, HOW: tl.constexpr, BR: tl.constexpr, B: tl.constexpr):
    """Sums of a block and of a number of each row, which masked rows have not, but masked columns have."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    r = tl.arange(0, B)
    m = tl.load(M + rows, mask=rows < R, other=0.0)[:, None]
    for i in range(STEPS):
        mask = (rows < R)[:, None] & (r < N)[None]
        x = tl.load(X + i * R * N + rows[:, None] * N + r[None], mask=mask, other=0.0)
        y = x + m if HOW == "added" else x * m
        tl.store(Y + i * R + rows, tl.sum(y, 1), mask=rows < R)


@triton.jit
def of_numbers(X, A, C, Y, N, OTHER: tl.constexpr, HOW: tl.constexpr, B: tl.constexpr):
    """A row and numbers that are computed of its own."""
    p = tl.program_id(0)
    r = tl.arange(0, B)
    a = tl.load(A + p)
    c = tl.load(C + p)
    x = tl.load(X + p * N + r, mask=r < N, other=OTHER)
    if HOW == "less a difference":
        y = x - (a - c)
    elif HOW == "times a difference":
        y = x * (a - c)
    else:
        y = x - a / c
    tl.store(Y + p, tl.sum(y, 0))


@triton.jit
def product(
    A,
    W,
    V,
    C,
    K,
    N,
    OTHER: tl.constexpr,
    FILL: tl.constexpr,
    HOW: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """A product along keys of which masks hide the last ones."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.arange(0, BN)
    rk = tl.arange(0, BK)
    c = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        a = tl.load(A + rm[:, None] * K + (k + rk)[None], mask=(k + rk)[None] < K, other=OTHER)
        seen = ((k + rk)[:, None] < K) & (rn[None] < N)
        b = tl.load(W + (k + rk)[:, None] * N + rn[None], mask=seen, other=FILL)
        if HOW == "inverse":
            b = (1.0 / b.to(tl.float32)).to(tl.float16)
        elif HOW == "one more":
            b = b + 1.0
        elif HOW == "both one more":
            a = a + 1.0
            b = b + 1.0
        elif HOW == "sum of columns":
            b = b + tl.load(V + rn, mask=rn < N, other=0.0)[None]
        elif HOW == "chosen columns":
            b = tl.where(rn[None] < N, b, 0.0)
        c = tl.dot(a.to(tl.float16), b.to(tl.float16), c)
    tl.store(C + rm[:, None] * N + rn[None], c, mask=rn[None] < N)


@triton.jit
def variance(X, Y, N, IN_TILES: tl.constexpr, FILL: tl.constexpr, B: tl.constexpr):
    """The sum of squares of a row's differences from its mean, of which a mask hides those beyond the row."""
    p = tl.program_id(0)
    r = tl.arange(0, B)
    if IN_TILES:
        sums = tl.zeros([B], tl.float32)
        for j in range(0, N, B):
            sums += tl.load(X + p * N + j + r, mask=j + r < N, other=0.0)
        mean = tl.sum(sums, 0) / N
        squares = tl.zeros([B], tl.float32)
        for j in range(0, N, B):
            d = tl.where(j + r < N, tl.load(X + p * N + j + r, mask=j + r < N, other=0.0) - mean, FILL)
            squares += d * d
    else:
        x = tl.load(X + p * N + r, mask=r < N, other=0.0)
        d = tl.where(r < N, x - tl.sum(x, 0) / N, FILL)
        squares = d * d
    tl.store(Y + p, tl.sum(squares, 0))


@triton.jit
def left_out(X, W, Y, N, S, HOW: tl.constexpr, B: tl.constexpr):
    """Sums of tiles of which a branch, or a mask of another tensor, leaves some out, with loads in front of it."""
    p = tl.program_id(0)
    r = tl.arange(0, B)
    s = 0.0
    for j in range(0, N, B):
        x = tl.load(X + p * N + j + r, mask=j + r < N, other=0.0)
        if HOW == "later tiles":
            if j > 0:
                s += tl.sum(x, 0)
        elif HOW == "later tiles by program":
            if j > p * B:
                s += tl.sum(x, 0)
        elif HOW == "with a load":
            if j > p * B:
                w = tl.load(W + p * N + j + r, mask=j + r < N, other=0.0)
                s += tl.sum(x + w, 0)
        else:
            s += tl.sum(x + tl.load(W + p * N + j + r, mask=j + r < S, other=0.0), 0)
    tl.store(Y + p, s)


@triton.jit
def chosen_down(X, Y, R, KIND: tl.constexpr, BR: tl.constexpr, B: tl.constexpr):
    """The greatest element of each column, in place of all below 0.3; a mask hides the last rows, which are 0."""
    rows, cols = tl.program_id(0) * BR + tl.arange(0, BR)[:, None], tl.arange(0, B)[None, :]
    x = tl.load(X + rows * B + cols, mask=rows < R, other=0.0)
    most = tl.max(x, 0) if KIND == 0 else tl.sum(x, 0)
    tl.store(Y + rows * B + cols, tl.where(x > 0.3, x, most[None, :]), mask=rows < R)


@triton.jit
def one_of_few(X, Y, N, B: tl.constexpr):
    """The greatest of the even elements of a short row and 2 in place of the others."""
    i = tl.arange(0, B)
    tl.store(Y + tl.program_id(0), tl.max(tl.load(X + i, mask=(i < N) & (i % 2 == 0), other=2.0), 0))


@triton.jit
def stored_before(X, B: tl.constexpr):
    """Tiles of which each program stores the next one before it loads it."""
    at, total = tl.program_id(0) * 4 * B + tl.arange(0, B), tl.zeros([B], tl.float32)
    for tile in range(3):
        total += tl.load(X + at + tile * B)
        if tile > 0:
            tl.store(X + at + (tile + 1) * B, total)
