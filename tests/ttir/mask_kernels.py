"""Kernels whose masks differ between programs, hide elements without a number, or are no bounds of a block."""

import triton
import triton.language as tl


@triton.jit
def centred(X, Y, n, B: tl.constexpr, KIND: tl.constexpr):
    """``X``: masked without a number for hidden elements; sums, products and maxima of it."""
    cols = tl.arange(0, B)
    x = tl.load(X + tl.program_id(0) * n + cols, mask=cols < n)
    if KIND == 0:
        y = x - tl.sum(x, 0) / n
    elif KIND == 1:
        y = x - tl.max(x, 0)
    else:
        y = x - tl.sum(x - 1.0, 0) / n
    tl.store(Y + tl.program_id(0) * n + cols, y, mask=cols < n)


@triton.jit
def norm_gradient(DY, X, W, R, MU, DX, n, B: tl.constexpr, SHIFT: tl.constexpr):
    """The hidden elements of ``DY`` are 0, those of the normalised row have one number that the row decides."""
    row, cols = tl.program_id(0), tl.arange(0, B)
    mask = cols < n
    dy = tl.load(DY + row * n + cols, mask=mask, other=0.0)
    x = tl.load(X + row * n + cols, mask=mask, other=0.0)
    w = tl.load(W + cols, mask=mask, other=0.0)
    normed = (x - tl.load(MU + row)) * tl.load(R + row)
    dyw = normed - tl.load(MU + row) if SHIFT else dy * w
    tl.store(DX + row * n + cols, (dyw - normed * tl.sum(dyw * normed, 0) / n), mask=mask)


@triton.jit
def labelled(X, L, Y, n, B: tl.constexpr):
    """Subtract 1 where a column is the label that a program loads."""
    row, cols = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)
    x = tl.load(X + row * n + cols, mask=cols < n, other=0.0)
    label = tl.load(L + row)
    y = tl.where(cols == label, x - 1.0, x)
    tl.store(Y + row * n + cols, y, mask=cols < n)


@triton.jit
def triangle(X, Y, L, m, n, R: tl.constexpr, B: tl.constexpr, KIND: tl.constexpr):
    """Blocks of rows and columns of a matrix, chosen by a comparison of both, or by a number of the program."""
    rows, cols = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * B + tl.arange(0, B)
    at = tl.program_id(2) * m * n + rows[:, None] * n + cols[None, :]
    inside = (rows[:, None] < m) & (cols[None, :] < n)
    if KIND == 0:
        y = tl.load(X + at, mask=inside & ~(cols[None, :] > rows[:, None]), other=-5.0)
    else:
        x = tl.load(X + at, mask=inside, other=0.0)
        if KIND == 1:
            y = tl.where(cols[None, :] > rows[:, None], x * 2.0, 3.0 - x)
        elif KIND == 2:
            y = tl.where(rows[:, None] >= tl.load(L + tl.program_id(0)), x, 7.0)
        elif KIND == 3:
            y = tl.where(cols[None, :] >= tl.load(L + tl.program_id(0)), x * 2.0, x)
        else:
            y = tl.where(tl.program_id(1) + cols[None, :] >= 20, x * 2.0, x)
            y = y - (rows[:, None] + tl.program_id(2)).to(tl.float32)
    tl.store(Y + at, y, mask=inside)


@triton.jit
def shifted_load(X, Y, n, S: tl.constexpr, B: tl.constexpr):
    """Elements before the first are hidden by a comparison that is no bound, and have no place in the tensor."""
    cols = tl.arange(0, B)
    x = tl.load(X + tl.program_id(0) * n + cols - S, mask=(cols >= S) & (cols < n), other=0.0)
    tl.store(Y + tl.program_id(0) * n + cols, x, mask=cols < n)


@triton.jit
def labelled_sum(X, L, Y, n, B: tl.constexpr, N: tl.constexpr):
    """Programs of other columns choose by other masks of a row that all of them add up."""
    row, cols, own = tl.program_id(0), tl.arange(0, N), tl.program_id(1) * B + tl.arange(0, B)
    x = tl.load(X + row * N + cols)
    total = tl.sum(tl.where(cols >= tl.program_id(1) * 4, x, 0.5 - x), 0)
    y = tl.load(L + row * n + own, mask=own < n, other=0.0)
    tl.store(Y + row * n + own, y * total, mask=own < n)


@triton.jit
def shifted_rows(X, Y, T, D: tl.constexpr):
    """The first row is negated, each other one is subtracted from the one before it: two stores, two returns."""
    t, cols = tl.program_id(1), tl.arange(0, D)
    at = (tl.program_id(0) * T + t) * D + cols
    x = tl.load(X + at)
    if t == 0:
        tl.store(Y + at, -x)
        return
    before = tl.load(X + at - D)
    tl.store(Y + at, before - x)


@triton.jit
def two_pages(Q, K, V, T, O, n, D: tl.constexpr, B: tl.constexpr):
    """Attention to pages that a table names, at another distance in each program."""
    p, rows, d, k = tl.program_id(0), tl.arange(0, 16), tl.arange(0, D), tl.arange(0, B)
    at = (p * 16 + rows)[:, None] * D + d[None, :]
    q = tl.load(Q + at)
    most, total, out = (
        tl.full([16], float("-inf"), tl.float32),
        tl.zeros([16], tl.float32),
        tl.zeros([16, D], tl.float32),
    )
    for j in range(n):
        of = (tl.load(T + p * n + j) * B + k)[:, None] * D + d[None, :]
        s = tl.dot(q, tl.trans(tl.load(K + of)))
        larger = tl.maximum(most, tl.max(s, 1))
        e, scale = tl.exp2(s - larger[:, None]), tl.exp2(most - larger)
        total = total * scale + tl.sum(e, 1)
        out = out * scale[:, None] + tl.dot(e.to(tl.float16), tl.load(V + of))
        most = larger
    tl.store(O + at, out / total[:, None])


@triton.jit
def in_place(X, n, B: tl.constexpr, KIND: tl.constexpr):
    """A row that two loops read, and the second one stores; ``KIND`` 1: less an element of the first program."""
    row = tl.program_id(0) * n
    first = tl.load(X) if KIND == 1 else 0.0
    total = 0.0
    for start in range(0, n, B):
        cols = start + tl.arange(0, B)
        x = tl.load(X + row + cols, mask=cols < n, other=0.0)
        total += tl.sum(x * x, 0)
    for start in range(0, n, B):
        cols = start + tl.arange(0, B)
        x = tl.load(X + row + cols, mask=cols < n, other=0.0)
        tl.store(X + row + cols, x * total - first, mask=cols < n)


@triton.jit
def grouped_rows(
    Q,
    K,
    V,
    T,
    LENGTHS,
    O,
    heads,
    pages,
    G: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Causal attention to pages; a block's rows are tokens and the query heads of one head of keys."""
    number, kv, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, d, k = tl.arange(0, M), tl.arange(0, D), tl.arange(0, B)
    first, length = tl.load(LENGTHS + number), tl.load(LENGTHS + number + 1) - tl.load(LENGTHS + number)
    token, head = block * (M // G) + rows // G, kv * G + rows % G
    at = ((first + token) * heads + head)[:, None] * D + d[None, :]
    is_there = (token < length) & (head < heads)
    q = tl.load(Q + at, mask=is_there[:, None], other=0.0)
    most, total, out = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, D], tl.float32)
    for j in range(tl.cdiv(length, B)):
        key = j * B + k
        page = tl.load(T + number * pages + key // PAGE)
        of = (page * PAGE + key % PAGE)[:, None] * D + d[None, :]
        s = tl.dot(q, tl.trans(tl.load(K + of, mask=(key < length)[:, None], other=0.0)))
        is_seen = key[None, :] < token[:, None] + 1
        s = tl.where(is_there[:, None] & is_seen, s, float("-inf"))
        larger = tl.maximum(most, tl.max(s, 1))
        larger = tl.where(larger > float("-inf"), larger, 0.0)
        e, scale = tl.exp2(s - larger[:, None]), tl.exp2(most - larger)
        total = total * scale + tl.sum(e, 1)
        v = tl.load(V + of, mask=(key < length)[:, None], other=0.0)
        out = out * scale[:, None] + tl.dot(e.to(tl.float16), v)
        most = larger
    tl.store(O + at, out / total[:, None], mask=is_there[:, None])


@triton.jit
def rescaled(X, L, Y, N: tl.constexpr):
    """A sum that takes a product in, which nothing else reads."""
    row, cols = tl.program_id(0), tl.arange(0, N)
    e = tl.load(L + row * N + cols) * tl.exp(tl.load(X + row * N + cols))
    tl.store(Y + row, tl.sum(e, 0))


@triton.jit
def number_by_column(X, Y, n, low, high, B: tl.constexpr, KIND: tl.constexpr):
    """A number of the row in some columns, and a constant, another number or a mask in the others."""
    row, cols = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * n + cols, mask=cols < n, other=0.0)
    total = tl.sum(x, 0)
    if KIND == 0:
        y = tl.where(cols < low, total, 0.0)
    elif KIND == 1:
        y = tl.where(cols == low, total, 1.0)
    elif KIND == 2:
        y = tl.where((cols < low) | (cols >= high), total, -1.0) * x
    elif KIND == 3:
        y = total + tl.where(cols >= low, 0.0, -float("inf"))
    else:
        y = tl.where(cols % 3 == 1, total, 2.0)
    tl.store(Y + row * n + cols, y, mask=cols < n)


@triton.jit
def number_by_key(X, Y, R, n, low, BR: tl.constexpr, B: tl.constexpr):
    """A number of each row of a block in the columns from its own on."""
    rows, cols = tl.program_id(0) * BR + tl.arange(0, BR)[:, None], tl.arange(0, B)[None]
    x = tl.load(X + rows * n + cols, mask=(rows < R) & (cols < n), other=0.0)
    y = tl.where(cols >= rows, tl.sum(x, 1)[:, None], 0.0) + tl.where(cols < low, tl.sum(x, 1)[:, None], 1.0)
    tl.store(Y + rows * n + cols, y, mask=(rows < R) & (cols < n))


@triton.jit
def first_tile_apart(X, Y, n, START: tl.constexpr, B: tl.constexpr, KIND: tl.constexpr):
    """The state of a loop that the first tile decides alone: by what the loop begins with, or against it."""
    row, m, total, shift = tl.program_id(0), START, 0.0, 0.0
    for j in range(0, n, B):
        x = tl.load(X + row * n + j + tl.arange(0, B))
        largest = tl.max(x, 0)
        if KIND == 2:
            m += (largest - shift) * 0.0
            shift = largest
        new = tl.where(j == 0, largest, tl.maximum(m, largest))
        before = total * tl.exp(m - new)
        if KIND >= 1:
            before = tl.where(j == 0, 0.0, before)
        total = before + tl.sum(tl.exp(x - new), 0)
        m = new
    for j in range(0, n, B):
        x = tl.load(X + row * n + j + tl.arange(0, B))
        tl.store(Y + row * n + j + tl.arange(0, B), tl.exp(x - m) / total)


@triton.jit
def summed_beyond(X, Y, n, most, OTHER: tl.constexpr, B: tl.constexpr, KIND: tl.constexpr):
    """A mask that leaves lanes that no load reads: these have what the load has in their place."""
    row, cols = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * n + cols, mask=cols < n, other=OTHER)
    if KIND == 0:
        y = x - tl.sum(tl.where(cols < most, x, 0.0), 0)
    elif KIND == 1:
        y = x - tl.max(tl.where(cols < most, x, -float("inf")), 0)
    else:
        y = x - tl.sum(tl.where(cols < most, tl.exp(x), 0.0), 0)
    tl.store(Y + row * n + cols, y, mask=cols < n)


@triton.jit
def added_beyond(X, T, n, most, OTHER: tl.constexpr, B: tl.constexpr):
    """The same of lanes of a loop's last tile."""
    row, total = tl.program_id(0), tl.zeros([B], tl.float32)
    for j in range(0, n, B):
        cols = j + tl.arange(0, B)
        x = tl.load(X + row * n + cols, mask=cols < n, other=OTHER)
        total += tl.where(cols < most, x, 0.0)
    tl.store(T + row, tl.sum(total, 0))


@triton.jit
def masked_in_two_loops(Q, K, V, O, S, D: tl.constexpr, B: tl.constexpr, G: tl.constexpr):
    """Products of scores without weights: keys before the block by groups of G, or for 0 by a diagonal; the others by
    another diagonal.
    """
    rows = tl.program_id(0) * B + tl.arange(0, B)
    d, n = tl.arange(0, D), tl.arange(0, B)
    q = tl.load(Q + rows[:, None] * D + d[None])
    acc = tl.zeros([B, D], tl.float32)
    for j in range(0, tl.program_id(0) * B, B):
        k = tl.load(K + (j + n)[:, None] * D + d[None])
        s = tl.dot(q, tl.trans(k))
        if G:
            s = tl.where((rows // G)[:, None] % 2 == ((j + n) // G)[None] % 2, s, 0.0)
        else:
            s = tl.where(rows[:, None] >= (j + n)[None] + 8, s, 0.0)
        acc = tl.dot(s.to(q.dtype), tl.load(V + (j + n)[:, None] * D + d[None]), acc)
    for j in range(tl.program_id(0) * B, S, B):
        k = tl.load(K + (j + n)[:, None] * D + d[None])
        s = tl.dot(q, tl.trans(k))
        s = tl.where(rows[:, None] + B >= (j + n)[None], s, 0.0)
        acc = tl.dot(s.to(q.dtype), tl.load(V + (j + n)[:, None] * D + d[None]), acc)
    tl.store(O + rows[:, None] * D + d[None], acc)
