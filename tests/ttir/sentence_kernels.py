"""Kernels of the forms of public ones that ended in internal sentences, in words of our own, for tests."""

import triton
import triton.language as tl


@triton.jit
def polynomial(X, W, Y, n, BLOCK: tl.constexpr):
    """A row's powers, each normed, with weights that are numbers of a tensor."""
    row, c = tl.program_id(0), tl.arange(0, BLOCK)
    inside = c < n
    x = tl.load(X + row * n + c, mask=inside, other=0.0)
    square, cube = x * x, x * x * x
    first, second = tl.load(W), tl.load(W + 1)
    r1 = 1.0 / tl.sqrt_rn(tl.sum(square, 0) / n + 1.0)
    r3 = 1.0 / tl.sqrt_rn(tl.sum(cube * cube, 0) / n + 1.0)
    tl.store(Y + row * n + c, first * x * r1 + second * cube * r3, mask=inside)


@triton.jit
def own_square(X, Y, N: tl.constexpr, D: tl.constexpr):
    """A product of a block with itself, as of keys with keys."""
    r, d = tl.arange(0, N), tl.arange(0, D)
    x = tl.load(X + r[:, None] * D + d[None])
    tl.store(Y + r[:, None] * N + r[None], tl.dot(x, tl.trans(x)))


@triton.jit
def weighted_keys(K, V, W, O, n, D: tl.constexpr, B: tl.constexpr):
    """A state of transposed keys that are weighted before the product."""
    d, r = tl.arange(0, D), tl.arange(0, B)
    acc = tl.zeros((D, D), tl.float32)
    for j in range(0, n, B):
        k = tl.load(K + d[:, None] + (j + r)[None] * D)
        w = tl.load(W + j + r)
        v = tl.load(V + (j + r)[:, None] * D + d[None])
        acc += tl.dot((k * w[None]).to(tl.float16), v)
    tl.store(O + d[:, None] * D + d[None], acc)


@triton.jit
def element_sums(X, Y, n, B: tl.constexpr):
    """Tiles of a row, added element by element."""
    row, c = tl.program_id(0), tl.arange(0, B)
    acc = tl.zeros([B], tl.float32)
    for j in range(0, n, B):
        acc += tl.load(X + row * n + j + c)
    tl.store(Y + row * B + c, acc)


@triton.jit
def five_operands(A, B, C, D, E, O, n, BLOCK: tl.constexpr):
    """Five tensors in every iteration: with two slots each they need ten flags, and a 910B2 has eight."""
    row, c = tl.program_id(0), tl.arange(0, BLOCK)
    acc = 0.0
    for j in range(0, n, BLOCK):
        at = row * n + j + c
        x = tl.load(A + at) * tl.load(B + at) * tl.load(C + at) * tl.load(D + at) * tl.load(E + at)
        acc += tl.sum(x, 0)
    tl.store(O + row, acc)


@triton.jit
def rotated_pairs(Q, C, S, seq, batch, sign, HALF: tl.constexpr, H: tl.constexpr, B: tl.constexpr):
    """Rotary positions whose programs return early for two reasons."""
    token, head = tl.program_id(0), tl.program_id(1)
    if token // seq >= batch:
        return
    if head >= H:
        return
    c = tl.arange(0, B)
    inside = c < HALF
    re = tl.load(C + token % seq * HALF + c, mask=inside, other=0.0)
    im = tl.load(S + token % seq * HALF + c, mask=inside, other=0.0) * sign
    at = Q + (token * H + head) * 2 * HALF + c
    a = tl.load(at, mask=inside, other=0.0)
    b = tl.load(at + HALF, mask=inside, other=0.0)
    tl.store(at, a * re - b * im, mask=inside)
    tl.store(at + HALF, a * im + b * re, mask=inside)


@triton.jit
def doubled(X, Y, Z, n, B: tl.constexpr):
    """Rows of B elements, and a number of each."""
    row, c = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * B + c)
    tl.store(Y + row * B + c, x * 2)
    tl.store(Z + row, tl.max(x, 0))


@triton.jit
def written_out(X, Y, N: tl.constexpr, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(X + r)
    for _ in tl.static_range(N):
        x = x * 0.5
    tl.store(Y + r, x)


@triton.jit
def of_numbers(X, Y, B: tl.constexpr):
    """Functions of numbers that are known."""
    r = tl.program_id(0) * B + tl.arange(0, B)
    three = tl.full([B], 3.0, tl.float32)
    tl.store(Y + r, tl.load(X + r) + tl.clamp(three, -1.0, 2.0) + tl.abs(-three))


@triton.jit
def prepared(Q, K, O, n, D: tl.constexpr, B: tl.constexpr):
    """Rows before the loop, and a state that is stored as the loop leaves it."""
    r, d, b = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, D), tl.arange(0, B)
    q = (tl.load(Q + r[:, None] * D + d[None]) * 0.5).to(tl.float16)
    acc = tl.zeros((B, D), tl.float32)
    for j in range(0, n, B):
        k = tl.load(K + (j + b)[:, None] * D + d[None])
        acc += tl.dot(tl.dot(q, tl.trans(k)).to(tl.float16), k)
    tl.store(O + r[:, None] * D + d[None], acc)


@triton.jit
def one_row(X, W, Y, rows, n, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr, FULL: tl.constexpr):
    """A norm of blocks of XBLOCK rows, as compilers of graphs write it; FULL: without the masks that sizes fill."""
    row = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    c = tl.arange(0, RBLOCK)[None, :]
    mask = tl.full([XBLOCK, RBLOCK], True, tl.int1) if FULL else (c < n) & (row < rows)
    x = tl.load(X + (c + n * row), mask, other=0.0).to(tl.float32)
    w = tl.load(W + c, None if FULL else c < n, other=None if FULL else 0.0).to(tl.float32)
    square = tl.where(mask, tl.broadcast_to(x * x, [XBLOCK, RBLOCK]), 0)
    y = x * (1.0 / tl.sqrt_rn(tl.sum(square, 1)[:, None] / n + 1.0)) * w
    tl.store(Y + (c + n * row), y, mask)


@triton.jit
def one_sum(X, Y, rows, n, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    """A number of each row, stored by blocks of XBLOCK rows."""
    row = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    c = tl.arange(0, RBLOCK)[None, :]
    x = tl.load(X + (c + n * row), (c < n) & (row < rows), other=0.0)
    tl.store(Y + row, tl.sum(x, 1)[:, None], row < rows)


@triton.jit
def one_copy(X, Y, rows, n, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    """Programs beyond the last row, under a mask."""
    row = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    c = tl.arange(0, RBLOCK)[None, :]
    mask = (c < n) & (row < rows)
    tl.store(Y + (c + n * row), tl.load(X + (c + n * row), mask, other=0.0) * 2, mask)


@triton.jit
def sum_of_products(X, Y, Z, n, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of each row of products; SCALE: of the second factor, a number."""
    p, c = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(X + p * n + c, c < n, other=0.0).to(tl.float32)
    y = tl.load(Y + p * n + c, c < n, other=0.0).to(tl.float32)
    z = tl.sum(x * y, 0) if SCALE == 0 else tl.sum(SCALE * x, 0)
    tl.store(Z + p, z)


@triton.jit
def spread_numbers(X, T, n, lo, KIND: tl.constexpr, B: tl.constexpr):
    """Choices between a row's numbers: lanes that no load and no store has, and numbers that a loop chooses."""
    row, number, lanes = tl.program_id(0), 0.0, tl.zeros([B], tl.float32)
    for j in range(0, n, B):
        c = j + tl.arange(0, B)
        x = tl.load(X + row * n + c, mask=c < n, other=0.0)
        s = tl.sum(x, 0)
        if KIND == 0:
            lanes += tl.where(c < n, s, x)
        elif KIND == 1:
            number = tl.where(j < lo, number + s, number)
    tl.store(T + row, number + tl.sum(lanes, 0))


@triton.jit
def spread_sum(X, Y, n, lo, B: tl.constexpr):
    """A sum of lanes that no load has, added to a row."""
    row, c = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * n + c, mask=c < n, other=0.0)
    tl.store(Y + row * n + c, tl.sum(tl.where(c < lo, tl.sum(x, 0), 0.0), 0) + x, mask=c < n)


@triton.jit
def one_constant(Y, n, B: tl.constexpr):
    """One number in all elements of integers or of masks."""
    c = tl.arange(0, B)
    y = tl.full([B], 3, tl.int32)
    tl.store(Y + tl.program_id(0) * n + c, y.to(Y.dtype.element_ty), mask=c < n)


@triton.jit
def read_twice(X, T, n, B: tl.constexpr):
    """A loop that reads a row's tiles two by two, behind one that reads them one by one."""
    row, s, t = tl.program_id(0), 0.0, 0.0
    for j in range(0, n, B):
        c = j + tl.arange(0, B)
        s += tl.sum(tl.load(X + row * n + c, mask=c < n, other=0.0), 0)
    for j in range(0, n, 2 * B):
        c = j + tl.arange(0, B)
        t += tl.sum(tl.load(X + row * n + c, mask=c < n, other=0.0), 0)
        t -= tl.sum(tl.load(X + row * n + c + B, mask=c + B < n, other=0.0), 0)
    tl.store(T + row, s * t)


@triton.jit
def changed_factor(A, B, C, N, K, KIND: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """A product whose right factor is computed, or chosen by its own rows, or whose left one is chosen by both axes."""
    rm, rn = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BM)
    acc = tl.zeros((BM, BM), tl.float32)
    for k in range(0, K, BK):
        rk = k + tl.arange(0, BK)
        a, b = tl.load(A + rm[:, None] * K + rk[None]), tl.load(B + rk[:, None] * N + rn[None])
        if KIND == 0:
            b = (b + 1.0).to(tl.float16)
        elif KIND == 1:
            b = tl.where(rk[:, None] >= 3, b, 0.0).to(tl.float16)
        else:
            a = tl.where(rm[:, None] >= rk[None], a, 0.0).to(tl.float16)
        acc = tl.dot(a, b, acc)
    tl.store(C + rm[:, None] * N + rn[None], acc)


@triton.jit
def narrowed(X, Y, n, B: tl.constexpr):
    """Rows that are stored in a format of 8 bits."""
    c = tl.arange(0, B)
    at = tl.program_id(0) * n + c
    tl.store(Y + at, tl.load(X + at, mask=c < n, other=0.0).to(Y.dtype.element_ty), mask=c < n)
