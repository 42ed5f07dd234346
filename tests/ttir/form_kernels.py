"""Kernels in further forms that public libraries have, in our own words."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scaled_tiles(
    A, B, C, ScaleA, ScaleB, K, N, GROUP: tl.constexpr, M: tl.constexpr, W: tl.constexpr, B_K: tl.constexpr
):
    """Products of tiles, each times two loaded numbers of its group of columns."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * W + tl.arange(0, W)
    inner = tl.arange(0, B_K)
    total = tl.zeros((M, W), dtype=tl.float32)
    for k in range(K // B_K):
        group = k * B_K // GROUP
        scale = tl.load(ScaleA + tl.program_id(0) * (K // GROUP) + group) * tl.load(ScaleB + group)
        a = tl.load(A + rows[:, None] * K + (k * B_K + inner)[None, :])
        b = tl.load(B + columns[None, :] * K + (k * B_K + inner)[:, None])
        total += tl.dot(a, b) * scale
    tl.store(C + rows[:, None] * N + columns[None, :], total)


@triton.jit
def turned_in_part(
    X, Y, Angle, heads, D: tl.constexpr, HALF: tl.constexpr, H: tl.constexpr, W: tl.constexpr, REST: tl.constexpr
):
    """Two halves of some columns that are turned, and the columns behind them as they are."""
    at = tl.program_id(0) * heads * D
    head, c = tl.arange(0, H)[:, None], tl.arange(0, W)[None, :]
    mask = (head < heads) & (c < HALF)
    first, second = at + head * D + c, at + head * D + c + HALF
    a, b = tl.load(X + first, mask=mask, other=0.0), tl.load(X + second, mask=mask, other=0.0)
    w = tl.load(Angle + tl.program_id(0) * HALF + c, mask=c < HALF, other=0.0)
    tl.store(Y + first, a * w - b, mask=mask)
    tl.store(Y + second, b * w + a, mask=mask)
    rest = 2 * HALF + tl.arange(0, REST)[None, :]
    last = at + head * D + rest
    tl.store(Y + last, tl.load(X + last, mask=(head < heads) & (rest < D)), mask=(head < heads) & (rest < D))


@triton.jit
def two_loops(X, Z, Y, Sums, n, m, B: tl.constexpr):
    """A loop that stores a row of one width, and one that stores a row of another tensor."""
    row = tl.program_id(0)
    for i in range(0, n, B):
        c = i + tl.arange(0, B)
        tl.store(Y + row * n + c, tl.load(X + row * n + c, mask=c < n) * 2.0, mask=c < n)
    for i in range(0, m, B):
        c = i + tl.arange(0, B)
        tl.store(Sums + row * m + c, tl.load(Z + row * m + c, mask=c < m) + 1.0, mask=c < m)


@triton.jit
def stored_twice(X, Y, n, B: tl.constexpr, FEW: tl.constexpr):
    """A row, and then its first elements again."""
    row, c, few = tl.program_id(0), tl.arange(0, B), tl.arange(0, FEW)
    tl.store(Y + row * n + c, tl.load(X + row * n + c, mask=c < n), mask=c < n)
    tl.store(Y + row * n + few, tl.load(X + row * n + few) + 1.0)


@triton.jit
def bytes_of_rows(X, Y, Scale, First, n, B: tl.constexpr):
    """FP8 numbers stored as bytes, a scale of each row, and a number that the first program alone stores."""
    row, c = tl.program_id(0), tl.arange(0, B)
    if row == 0:
        tl.store(First, tl.num_programs(0))
    x = tl.load(X + row * n + c, mask=c < n, other=0.0)
    scale = tl.max(tl.abs(x), axis=0) / 448.0
    y = (x / scale).to(tl.float8e4nv)
    tl.store(Y + row * n + c, y.to(tl.uint8, bitcast=True), mask=c < n)
    tl.store(Scale + row, scale)


@triton.jit
def filled_pages(X, Cache, Page, Begin, End, First, D: tl.constexpr, B: tl.constexpr):
    """New tokens of a sequence into its pages, of which the first and the last one have some rows of others."""
    sequence, page, row, d = tl.program_id(1), tl.program_id(0), tl.arange(0, B), tl.arange(0, D)
    begin, end = tl.load(Begin + sequence), tl.load(End + sequence)
    if page * B >= end or (page + 1) * B <= begin:
        return
    at = page * B + row
    is_new = (at >= begin) & (at < end)
    x = tl.load(X + (tl.load(First + sequence) + at - begin)[:, None] * D + d[None, :], mask=is_new[:, None])
    place = tl.load(Page + sequence * tl.num_programs(0) + page)
    tl.store(Cache + (place * B + row)[:, None] * D + d[None, :], x, mask=is_new[:, None])


@triton.jit
def sums_from_the_end(X, Y, length, heads, B: tl.constexpr):
    """Cumulative sums of a sequence from its last element on, tile by tile from the last one."""
    i, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    total = 0.0
    count = tl.cdiv(length, B)
    for k in range(count):
        t = (count - 1 - k) * B + tl.arange(0, B)
        x = tl.load(X + (i * length + t) * heads + h, mask=t < length, other=0.0)
        tl.store(Y + (i * length + t) * heads + h, tl.cumsum(x, 0, reverse=True) + total, mask=t < length)
        total += tl.sum(x, 0)


@triton.jit
def numbers_of_bytes(X, Table, Scale, Y, n, GROUP: tl.constexpr, B: tl.constexpr):
    """Numbers of a table by the bytes of a row of any length, times a scale of each group of bytes."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    code = tl.load(X + at, mask=at < n, other=0).to(tl.uint8)
    y = tl.load(Table + code, mask=at < n) * tl.load(Scale + at // GROUP, mask=at < n, other=0.0)
    tl.store(Y + at, y, mask=at < n)


@triton.jit
def moved_up(X, Cache, W, Y, d, B: tl.constexpr, N: tl.constexpr):
    """The last numbers of each channel, moved up by one in place with a new one at the end, and their weighted sum."""
    c, i = tl.arange(0, B), tl.arange(0, N)
    at = (tl.program_id(0) * d + c)[:, None] * N
    x = tl.load(X + tl.program_id(0) * d + c, mask=c < d, other=0.0)
    known = tl.load(Cache + at + (i + 1)[None, :], mask=(c < d)[:, None] & (i + 1 < N)[None, :], other=0.0)
    known = tl.where((i == N - 1)[None, :], x[:, None], known)
    w = tl.load(W + c[:, None] * N + i[None, :], mask=(c < d)[:, None], other=0.0)
    tl.store(Y + tl.program_id(0) * d + c, tl.sum(known * w, 1), mask=c < d)
    tl.store(Cache + at + i[None, :], known, mask=(c < d)[:, None])


@triton.jit
def turned_by_partner(X, Angle, Y, heads, D: tl.constexpr, HALF: tl.constexpr, B: tl.constexpr):
    """Each element of a head with its partner half a row away, by a table of angles for half a row."""
    d = tl.arange(0, B)
    at = tl.program_id(0) * D
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    w = tl.load(Angle + tl.program_id(0) // heads * HALF + tl.where(d < HALF, d, d - HALF), mask=d < D, other=0.0)
    x, other = tl.load(X + at + d, mask=d < D, other=0.0), tl.load(X + at + partner, mask=d < D, other=0.0)
    tl.store(Y + at + d, x * w + tl.where(d < HALF, -other, other), mask=d < D)


@triton.jit
def turned_round(X, Y, n, m, B: tl.constexpr):
    """The last elements of rows, from the last one on."""
    row, c = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * n + n - 1 - c, mask=c < m, other=0.0)
    tl.store(Y + row * m + c, x * 2.0, mask=c < m)


@triton.jit
def scaled_groups(X, Scale, Y, SIZE: tl.constexpr, GROUP: tl.constexpr, B: tl.constexpr):
    """Numbers of a row times a scale for each group of columns, block after block."""
    row = tl.program_id(0)
    for start in tl.static_range(0, SIZE, B):
        columns = start + tl.arange(0, B)
        x = tl.load(X + row * SIZE + columns)
        scale = tl.load(Scale + row * (SIZE // GROUP) + columns // GROUP)
        tl.store(Y + row * SIZE + columns, x * scale)


@triton.jit
def by_a_constant(X, Y, Z, d, D: tl.constexpr, B: tl.constexpr):
    """Elements over a constant of the kernel, and over a number of the launch."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(X + at)
    tl.store(Y + at, x / D)
    tl.store(Z + at, x / d)


@triton.jit
def cache_and_tail(Cache, Out, Begin, Count, Page, SIZE, D: tl.constexpr, B: tl.constexpr):
    """Pages as one sequence after another; the last programs store zeros behind them, and share a return."""
    page, batch, last = tl.program_id(0), tl.program_id(1), tl.num_programs(1) - 1
    lane, c = tl.arange(0, B), tl.arange(0, D)
    if batch == last:
        begin = tl.load(Begin + last - 1) + tl.load(Count + last - 1)
        if page * B >= SIZE - begin:
            return
        at = page * B + lane
        zeros = tl.zeros((B, D), dtype=tl.float32)
        tl.store(Out + (begin + at[:, None]) * D + c[None, :], zeros, mask=(at < SIZE - begin)[:, None])
        return
    count = tl.load(Count + batch)
    if page * B >= count:
        return
    at = page * B + lane
    x = tl.load(Cache + tl.load(Page + batch * 2 + page) * B * D + lane[:, None] * D + c[None, :])
    tl.store(Out + (tl.load(Begin + batch) + at[:, None]) * D + c[None, :], x * 2.0, mask=(at < count)[:, None])


@triton.jit
def marked_rows(X, Y, Mark, used, rows, N, B: tl.constexpr, PROGRAMS: tl.constexpr):
    """Squares of the rows that a table marks, in a loop under two ifs."""
    if tl.program_id(0) >= used:
        return
    for row in tl.range(tl.program_id(0), rows, PROGRAMS):
        if row < used:
            mark = tl.load(Mark + row)
            if mark >= 0:
                for n in tl.range(0, N, B):
                    o = n + tl.arange(0, B)
                    x = tl.maximum(tl.load(X + row * N + o, mask=o < N), 0.0)
                    tl.store(Y + row * N + o, x * x, mask=o < N)


@triton.jit
def many_results(X, A, B, C, D, E, F, G, H, J, BLOCK: tl.constexpr):
    """Nine results of one block: more than a pair of queues has flags."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at)
    tl.store(A + at, x + 1.0)
    tl.store(B + at, x + 2.0)
    tl.store(C + at, x + 3.0)
    tl.store(D + at, x + 4.0)
    tl.store(E + at, x + 5.0)
    tl.store(F + at, x + 6.0)
    tl.store(G + at, x + 7.0)
    tl.store(H + at, x + 8.0)
    tl.store(J + at, x + 9.0)
