"""Kernels whose blocks of one axis have masks of unlike lanes: lengths of programs, weights that end before the row."""

import triton
import triton.language as tl


@triton.jit
def of_lengths(X, Y, Lengths, n, B: tl.constexpr):
    """Rows of which each program loads its own length, 1.5 beyond, and stores all, with the sum so far."""
    row = tl.program_id(0)
    length, total = tl.load(Lengths + row), 0.0
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        x = tl.load(X + row * n + at, mask=at < length, other=1.5)
        total += tl.sum(x, 0)
        tl.store(Y + row * n + at, x + total, mask=at < n)


@triton.jit
def beside_weights(X, W, Y, n, m, B: tl.constexpr):
    """The sum of a row and of weights that end after m columns, 2 beyond."""
    row, total = tl.program_id(0), 0.0
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        x = tl.load(X + row * n + at, mask=at < n, other=0.0)
        total += tl.sum(x + tl.load(W + at, mask=at < m, other=2.0), 0)
    tl.store(Y + row, total)


@triton.jit
def some_programs(X, Y, n, count, B: tl.constexpr):
    """The largest element from the program's number on, of the programs that do not return early."""
    row, head = tl.program_id(0), tl.program_id(1)
    if row >= count:
        return
    most = tl.full([B], -9.0, tl.float32)
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        most = tl.maximum(most, tl.load(X + (row * 2 + head) * n + at, mask=(at < n) & (at >= row), other=-9.0))
    tl.store(Y + row * 2 + head, tl.max(most, 0))


@triton.jit
def by_parity(X, Y, n, TWICE: tl.constexpr, B: tl.constexpr):
    """A row less the sum of the elements that a mask leaves, of which the even columns are stored."""
    row, at = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * n + at, mask=(at < n) & (at % 3 != 1), other=0.25)
    place = at // 2 if TWICE else at
    tl.store(Y + row * n + place, x - tl.sum(x, 0), mask=(at < n) & ((at % 2 == 0) | TWICE))


@triton.jit
def by_iteration(X, Y, Z, n, B: tl.constexpr):
    """A sum that begins anew in one iteration of each program, and a product with a number for each iteration."""
    row, total, scale = tl.program_id(0), 0.0, 1.0
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        part = tl.sum(tl.load(X + row * n + at, mask=at < n, other=0.0), 0)
        total = tl.where(start == row * B, part, total + part)
        scale = scale * tl.where((start // B) % 2 == 1, -0.5, 2.0)
    tl.store(Y + row, total)
    tl.store(Z + row, scale)


@triton.jit
def beside_rows(X, W, Y, n, B: tl.constexpr):
    """Sums of rows of a tile that a mask cuts, and of weights of whose lanes it cuts others."""
    rows, total = tl.program_id(0) * 4 + tl.arange(0, 4), tl.zeros([4], tl.float32)
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        w = tl.load(W + at, mask=at < n - 5, other=1.0)
        x = tl.load(X + rows[:, None] * n + at[None, :], mask=at[None, :] < n, other=0.0)
        total += tl.sum(x + w[None, :], 1)
    tl.store(Y + rows, total)


@triton.jit
def decode(K, V, O, L, n, KIND: tl.constexpr, D: tl.constexpr, B: tl.constexpr):
    """One query's attention, whose keys are summed along D: the output, and a number of the softmax beside it."""
    row, depth, most, total, acc = tl.program_id(0), tl.arange(0, D), -float("inf"), 0.0, tl.zeros([D], tl.float32)
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        where = (row * n + at)[:, None] * D + depth[None, :]
        scores = tl.sum(tl.load(K + where, mask=at[:, None] < n, other=0.0), 1)
        scores = tl.where(at < n, scores, -float("inf"))
        higher = tl.maximum(tl.max(scores, 0), most)
        scale, weights = tl.exp(most - higher), tl.exp(scores - higher)
        values = tl.load(V + where, mask=at[:, None] < n, other=0.0)
        acc = acc * scale + tl.sum(weights[:, None] * values, 0)
        total = total * scale + tl.sum(weights, 0)
        most = higher
    tl.store(O + row * D + depth, acc / total)
    if KIND == 1:
        tl.store(L + row, most + tl.log(total))


@triton.jit
def beside_bias(X, S, Bias, Y, n, B: tl.constexpr):
    """Rows times a column that is turned into a row, and a bias if there is one."""
    rows, at = tl.program_id(0) * 4 + tl.arange(0, 4), tl.arange(0, B)
    x = tl.load(X + rows[:, None] * n + at[None, :], mask=at[None, :] < n, other=0.0)
    scale = tl.load(S + at[:, None], mask=at[:, None] < n, other=0.0)
    y = x * tl.trans(scale)
    if Bias:
        y += tl.load(Bias + at, mask=at < n, other=0.0)[None, :]
    tl.store(Y + rows[:, None] * n + at[None, :], y, mask=at[None, :] < n)


@triton.jit
def from_the_last(X, G, Y, T, D: tl.constexpr, B: tl.constexpr):
    """States of tiles from the last to the first, scaled by the last number of each tile."""
    head, i = tl.program_id(0), tl.arange(0, D)
    state = tl.zeros([D, D], tl.float32)
    for tile in range(T // B - 1, -1, -1):
        at = tile * B + tl.arange(0, B)
        x = tl.load(X + (head * T + at)[:, None] * D + i[None, :])
        state = state * tl.load(G + head * T + tile * B + B - 1) + tl.dot(tl.trans(x), x)
    tl.store(Y + (head * D + i)[:, None] * D + i[None, :], state)


@triton.jit
def square_beside_sum(X, Y, T, n, q, B: tl.constexpr):
    """The square of a row's sum in each of its columns, and the sum itself beside it; of ``q`` columns."""
    row, acc = tl.program_id(0), tl.zeros([B], tl.float32)
    for start in range(0, q, B):
        at = start + tl.arange(0, B)
        acc += tl.load(X + row * n + at, mask=at < n, other=0.0)
    total = tl.sum(acc, 0)
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        tl.store(Y + row * n + at, total * total, mask=at < n)
    tl.store(T + row, total)


@triton.jit
def over_other_tiles(X, Y, T, n, q, KIND: tl.constexpr, B: tl.constexpr):
    """A decayed sum over some tiles of a row, and a loop over other ones that multiplies the row by it."""
    row = tl.program_id(0)
    acc = tl.full([B], 1.3, tl.float32)
    for start in range(0, q, B):
        at = start + tl.arange(0, B)
        x = tl.load(X + row * n + at + 1, mask=at + 1 < n, other=1.25)
        acc = acc * 0.7 + x if KIND == 0 else (acc + x) * 0.7
    total = tl.sum(acc, 0)
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        tl.store(Y + row * n + at, tl.load(X + row * n + at, mask=at < n) * total, mask=at < n)
    tl.store(T + row, total)


@triton.jit
def with_unlike_masks(X, Y, T, R, n, lo, BR: tl.constexpr, B: tl.constexpr):
    """A sum of a few columns of each row, and a loop over the same tiles with another mask."""
    rows, acc = tl.program_id(0) * BR + tl.arange(0, BR)[:, None], tl.zeros([BR, B], tl.float32)
    for start in range(0, n, B):
        at = start + tl.arange(0, B)[None]
        x = tl.load(X + rows * n + at, mask=(at < n) & (rows < R), other=0.0)
        acc += tl.where(at == 2, tl.where(rows < 2, x, 0.0), 0.0)
    total = tl.sum(acc, 1)[:, None]
    for start in range(0, n, B):
        at = start + tl.arange(0, B)[None]
        x = tl.load(X + rows * n + at, mask=(at < n) & (at != lo) & (rows < R), other=0.0)
        tl.store(Y + rows * n + at, x * total, mask=(at < n) & (rows < R))
    tl.store(T + rows, total, mask=rows < R)


@triton.jit
def of_hidden_rows(W, T, n, q, first, B: tl.constexpr):
    """The largest difference of two loads of one row, of programs before ``first``; others read nothing."""
    row, most = tl.program_id(0), 0.5
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        x = tl.load(W + at, mask=at < n, other=1.25)
        y = tl.load(W + at, mask=at < q, other=1.25)
        most = tl.maximum(most, tl.max(tl.where(row < first, y, -9.0) - tl.where(row < first, x, 0.0), 0))
    tl.store(T + row, most)


@triton.jit
def numbers_by_mask(X, Y, T, n, B: tl.constexpr):
    """The least element of a row in each of its columns, and the sum of a row that has it once and ones elsewhere."""
    row, at = tl.program_id(0), tl.arange(0, B)
    least = tl.min(tl.load(X + row * n + at, mask=at < n, other=9.0), 0)
    tl.store(Y + row * n + at, least, mask=at < n)
    tl.store(T + row, tl.sum(tl.where(at < n, tl.where(at == row, least, 1.0), 0.0), 0))
