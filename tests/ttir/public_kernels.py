"""Kernels in forms that public libraries have, for `test_public`."""

import triton
import triton.language as tl


@triton.jit
def smoothed_loss(Loss, Logits, Labels, smoothing, ignored, n, B: tl.constexpr):
    """A sum that the loop carries and that programs of ignored rows do not read."""
    row = tl.program_id(0)
    Logits += row * n
    total, m, s = 0.0, -float("inf"), 0.0
    for at in range(0, n, B):
        c = at + tl.arange(0, B)
        x = tl.load(Logits + c, mask=c < n, other=-float("inf"))
        total += tl.sum(tl.where(c < n, x, 0.0))
        larger = tl.maximum(m, tl.max(x))
        s = tl.exp(m - larger) * s + tl.sum(tl.exp(x - larger))
        m = larger
    label = tl.load(Labels + row)
    if label == ignored:
        loss = 0.0
    else:
        loss = tl.log(s) + m - smoothing * total / n - (1 - smoothing) * tl.load(Logits + label)
    tl.store(Loss + row, loss)


@triton.jit
def int8_product(A, B, C, Row, Column, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Products of int8 that a loop adds up, times a scale of each row and column."""
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), dtype=tl.int32)
    for at in range(0, K, BK):
        a = tl.load(A + (rows % M)[:, None] * K + at + k[None, :], mask=k[None, :] < K - at, other=0)
        b = tl.load(B + (columns % N)[None, :] * K + at + k[:, None], mask=k[:, None] < K - at, other=0)
        acc += tl.dot(a, b)
    scales = tl.load(Row + rows % M)[:, None] * tl.load(Column + columns % N)[None, :]
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(C + rows[:, None] * N + columns[None, :], acc.to(tl.float32) * scales, mask=mask)


@triton.jit
def added_norm(X, R, Y, W, n, eps, B: tl.constexpr):
    """A sum that replaces a tensor in place and that the second loop loads again."""
    X += tl.program_id(0) * n
    R += tl.program_id(0) * n
    Y += tl.program_id(0) * n
    squares = tl.zeros([B], dtype=tl.float32)
    for at in range(0, n, B):
        c = at + tl.arange(0, B)
        x = tl.load(X + c, mask=c < n, other=0.0).to(tl.float32)
        x += tl.load(R + c, mask=c < n, other=0.0).to(tl.float32)
        squares += x * x
        tl.store(X + c, x.to(X.dtype.element_ty), mask=c < n)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / n + eps)
    for at in range(0, n, B):
        c = at + tl.arange(0, B)
        x = tl.load(X + c, mask=c < n, other=0.0).to(tl.float32)
        tl.store(Y + c, (x * scale * tl.load(W + c, mask=c < n, other=0.0)).to(Y.dtype.element_ty), mask=c < n)


@triton.jit
def quantised_norm(X, Normed, Y, Scale, n, eps, SHIFT: tl.constexpr, B: tl.constexpr):
    """Values that one loop stores and the next, which needs their maximum, loads again."""
    row = tl.program_id(0) * n
    squares = tl.zeros([B], dtype=tl.float32)
    for at in range(0, n, B):
        c = at + tl.arange(0, B)
        x = tl.load(X + row + c, mask=c < n, other=0.0).to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / n + eps)
    largest = 0.0
    for at in range(0, n, B):
        c = at + tl.arange(0, B)
        y = tl.load(X + row + c, mask=c < n, other=0.0) * rstd
        tl.store(Normed + row + c, y, mask=c < n)
        largest = tl.maximum(largest, tl.max(tl.abs(y), axis=0))
    tl.store(Scale + tl.program_id(0), largest)
    for at in range(0, n, B):
        c = at + tl.arange(0, B)
        y = tl.load(Normed + row + c + SHIFT, mask=c < n - SHIFT, other=0.0)
        tl.store(Y + row + c, y / largest, mask=c < n)


@triton.jit
def quantised_groups(X, Y, Scale, m, n, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Groups of a row that a reshape makes, each divided by its largest magnitude."""
    c = tl.program_id(0) * GROUPS * SIZE + tl.arange(0, GROUPS * SIZE)
    g = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    x, y, s = X + tl.program_id(1) * n + c, Y + tl.program_id(1) * n + c, Scale + tl.program_id(1) * (n // SIZE) + g
    for _row in tl.range(tl.program_id(1), m, tl.num_programs(1)):
        values = tl.load(x, mask=c < n, other=0.0).reshape(GROUPS, SIZE)
        largest = tl.maximum(tl.max(tl.abs(values), axis=1).to(tl.float32), 1e-6)
        scaled = (values.to(tl.float32) / largest[:, None]).reshape(GROUPS * SIZE)
        tl.store(y, scaled, mask=c < n)
        tl.store(s, largest, mask=g < n // SIZE)
        x += tl.num_programs(1) * n
        y += tl.num_programs(1) * n
        s += tl.num_programs(1) * (n // SIZE)


@triton.jit
def gates(G, Beta, A, B, Bias, rows, heads, BR: tl.constexpr, BH: tl.constexpr):
    """Two results of one size, each computed from a tensor that the other does not read."""
    r, h = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BH)
    at, mask = r[:, None] * heads + h[None, :], (h[None, :] < heads) & (r[:, None] < rows)
    x = tl.load(A + at, mask=mask) + tl.load(Bias + h, mask=h < heads)[None, :]
    tl.store(G + at, tl.where(x <= 2.0, tl.log(1 + tl.exp(x)), x), mask=mask)
    tl.store(Beta + at, tl.sigmoid(tl.load(B + at, mask=mask)), mask=mask)


@triton.jit
def rotated(Q, K, Cos, Sin, tokens, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, B: tl.constexpr):
    """A rotation in place, in blocks with an axis of one head; programs of some heads rotate a key too."""
    head, t = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)
    low, high = tl.arange(0, D // 2), tl.arange(D // 2, D)
    at, mask = t[:, None] * (D // 2) + low[None, :], t[:, None] < tokens
    cos, sin = tl.load(Cos + at, mask=mask, other=0.0), tl.load(Sin + at, mask=mask, other=0.0)
    row, seen = t[:, None, None], (head < HEADS) & (t[:, None, None] < tokens)
    q = Q + row * (HEADS * D) + head * D
    q0 = tl.load(q + low[None, None, :], mask=seen, other=0.0)
    q1 = tl.load(q + high[None, None, :], mask=seen, other=0.0)
    tl.store(q + low[None, None, :], q0 * cos[:, None, :] - q1 * sin[:, None, :], mask=seen)
    tl.store(q + high[None, None, :], q0 * sin[:, None, :] + q1 * cos[:, None, :], mask=seen)
    if head % GROUP == 0:
        k = K + row * (HEADS // GROUP * D) + head // GROUP * D
        k0 = tl.load(k + low[None, None, :], mask=row < tokens, other=0.0)
        k1 = tl.load(k + high[None, None, :], mask=row < tokens, other=0.0)
        tl.store(k + low[None, None, :], k0 * cos[:, None, :] - k1 * sin[:, None, :], mask=row < tokens)
        tl.store(k + high[None, None, :], k0 * sin[:, None, :] + k1 * cos[:, None, :], mask=row < tokens)


@triton.jit
def rotated_pairs(X, Turns, n_heads, tokens, HEADS: tl.constexpr, D: tl.constexpr):
    """A rotation in place by pairs of numbers that are loaded as one block and split."""
    token, head, d = tl.program_id(0), tl.program_id(1), tl.arange(0, D // 2)
    if token >= tokens:
        return
    cos, sin = tl.split(tl.load(Turns + token * D + d[:, None] * 2 + tl.arange(0, 2)[None, :]))
    if head < n_heads:
        x = X + (token * HEADS + head) * D
        real, imaginary = tl.load(x + 2 * d), tl.load(x + 2 * d + 1)
        tl.store(x + 2 * d, real * cos - imaginary * sin)
        tl.store(x + 2 * d + 1, real * sin + imaginary * cos)


@triton.jit
def flat_product(X, Y, Z, n, B: tl.constexpr):
    """Flat indices of tensors that have the same elements along other axes."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(Z + i, tl.load(X + i, mask=i < n) * tl.load(Y + i, mask=i < n), mask=i < n)


@triton.jit
def shifted_difference(X, Y, tokens, D: tl.constexpr, B: tl.constexpr):
    """Each token less the one before it; before the first there is none."""
    t, d = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, D)
    at, mask = t[:, None] * D + d[None, :], t[:, None] < tokens
    before = tl.load(X + at - D, mask=mask & (t[:, None] > 0), other=0.0)
    tl.store(Y + at, tl.load(X + at, mask=mask, other=0.0) - before, mask=mask)


@triton.jit
def greater(a, b):
    mask = a > b
    mask |= a != a  # noqa: PLR0124 of NaN
    return tl.where(mask, a, b)


@triton.jit
def softmax_of_graph(X, Y, M, n: tl.constexpr):
    """A maximum by a function of a compiler of graphs, which returns NaN where there is one."""
    row, c = tl.program_id(0), tl.arange(0, n)
    x = tl.load(X + row * n + c)
    m = tl.reduce(x, 0, greater)
    e = tl.exp(x - m)
    tl.store(Y + row * n + c, e / tl.sum(e, 0))
    tl.store(M + row, m)
