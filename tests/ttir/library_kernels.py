"""Kernels with forms that libraries' kernels have: which tensor by the program, flat copies, blocks down columns."""

import triton
import triton.language as tl


@triton.jit
def stacked(A, B, C, Y, rows_a, rows_b, rows_c, columns, BLOCK: tl.constexpr):
    """Tensors copied below each other: the program's number chooses the tensor."""
    which = tl.program_id(1)
    x = tl.where(which == 0, A, B)
    x = tl.where(which == 2, C, x)
    rows = tl.where(which == 0, rows_a, rows_b)
    rows = tl.where(which == 2, rows_c, rows)
    first = tl.where(which == 0, 0, rows_a)
    first = tl.where(which == 2, rows_a + rows_b, first)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < rows * columns
    tl.store(Y + first * columns + i, tl.load(x + i, mask=mask), mask=mask)


@triton.jit
def either_norm(Q, K, OutQ, OutK, WQ, WK, eps, NQ: tl.constexpr, NK: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of one of two tensors divided by their root mean square."""
    row = tl.program_id(0)
    if tl.program_id(1) == 0:
        N = NQ
        x, w, y = Q + row * NQ, WQ, OutQ + row * NQ
    else:
        N = NK
        x, w, y = K + row * NK, WK, OutK + row * NK
    i = tl.arange(0, BLOCK)
    values = tl.load(x + i, mask=i < N, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / N + eps)
    weights = tl.load(w + i, mask=i < N, other=0.0).to(tl.float32)
    tl.store(y + i, (values * scale * weights).to(OutQ.dtype.element_ty), mask=i < N)


@triton.jit
def behind(X, Y, n, first, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + first + i, tl.load(X + i, mask=i < n), mask=i < n)


@triton.jit
def further(X, n, first, BLOCK: tl.constexpr):
    """A part of a tensor that other programs store to: its elements have no defined value."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    tl.store(X + i, tl.load(X + first + j, mask=j < n), mask=i < n)


@triton.jit
def converted_columns(X, S, Y, Z, T, C: tl.constexpr, D: tl.constexpr, BC: tl.constexpr):
    """Products of matrices that are loaded down their columns, scaled by column and by row, hidden and converted."""
    b = tl.program_id(0)
    m, d, c = tl.arange(0, C), tl.arange(0, D), tl.arange(0, BC)
    total = tl.zeros((C, D), tl.float32)
    for i in range(0, C, BC):
        x = tl.load(X + b * C * C + m[:, None] + (i + c)[None, :] * C)
        s = tl.load(S + b * C + i + c)
        x = tl.where(x > 0, x, x * 0.5) * s[None, :]
        y = tl.load(Y + b * C * D + (i + c)[:, None] * D + d[None, :])
        total += tl.dot(x.to(tl.float16), y)
    tl.store(Z + b * C * D + m[:, None] * D + d[None, :], total)


@triton.jit
def advanced(Lengths, Table, Slots, stride, most, PAGE: tl.constexpr):
    """Each sequence's length, one more in place, and the slot of its next token by a table of pages."""
    i = tl.program_id(0)
    length = tl.load(Lengths + i)
    is_over = length + 1 >= most
    at = tl.where(is_over, 0, length)
    slot = tl.load(Table + i * stride + at // PAGE) * PAGE + at % PAGE
    tl.store(Slots + i, tl.where(is_over, -1, slot))
    tl.store(Lengths + i, tl.minimum(length + 1, most))


@triton.jit
def passed_on(Lengths, Slots):
    """The length of the program behind this one, which that one stores: its value is not defined."""
    i = tl.program_id(0)
    length = tl.load(Lengths + (i + 1) % tl.num_programs(0))
    tl.store(Slots + i, length)
    tl.store(Lengths + i, length + 1)


@triton.jit
def counted_twice(Lengths, Slots):
    """A length that is loaded again behind its store."""
    i = tl.program_id(0)
    tl.store(Lengths + i, tl.load(Lengths + i) + 1)
    tl.store(Slots + i, tl.load(Lengths + i) * 2)


@triton.jit
def placed_counts(Counts, First, Last, Ends, n, B: tl.constexpr):
    """Where each expert's tokens begin and end among all, by counts that are known at launch."""
    e, i = tl.program_id(0), tl.arange(0, B)
    counts = tl.load(Counts + i, mask=i < n, other=0)
    ends = tl.cumsum(counts, 0)
    tl.store(First + e, tl.sum(tl.where(i == e, ends - counts, 0)))
    tl.store(Last + e, tl.sum(tl.where(i == e, tl.cumsum(counts, 0, reverse=True), 0)))
    tl.store(Ends + e * B + i, ends)


@triton.jit
def scaled_twice(X, Y, T, BT: tl.constexpr, TIMES: tl.constexpr):
    """Sums of the rows of tiles that a loop within the loop scales."""
    r, d = tl.program_id(0) * 16 + tl.arange(0, 16), tl.arange(0, BT)
    total = tl.zeros((16,), tl.float32)
    for t in range(0, T, BT):
        x = tl.load(X + r[:, None] * T + (t + d)[None, :])
        for k in range(TIMES):
            x = x * 0.5 + k
        total += tl.sum(x, 1)
    tl.store(Y + r, total)


@triton.jit
def summed_heads(X, S, G, Y, Z, H, P: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, ADDS: tl.constexpr):
    """Products of each head, scaled by row and added up; with ``ADDS`` the sums of their rows are added to a tensor."""
    m, n, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, N), tl.arange(0, P)
    x, s = X + m[:, None] * H * P + k[None, :], S + k[:, None] * N + n[None, :]
    g, z = G + m, Z + m
    total = tl.zeros((BM, N), tl.float32)
    for _ in range(H):
        made = tl.dot(tl.load(x), tl.load(s)) * tl.load(g)[:, None]
        if ADDS:
            tl.atomic_add(z, tl.sum(made, axis=1))
        total += made
        x += P
        s += P * N
        g += tl.num_programs(0) * BM
        z += tl.num_programs(0) * BM
    tl.store(Y + m[:, None] * N + n[None, :], total)


@triton.jit
def added_to_rows(X, W, Y, Ids, Experts, Rows, pairs, R: tl.constexpr, N: tl.constexpr, BM: tl.constexpr):
    """Products of sorted pairs of tokens and experts, added in place to the rows that a table has for them."""
    half = tl.program_id(0) % 2
    block = tl.program_id(0) // 2
    expert = tl.load(Experts + block)
    if expert == -1:
        return
    ids = tl.load(Ids + block * BM + tl.arange(0, BM))
    k, n = tl.arange(0, R), half * (N // 2) + tl.arange(0, N // 2)
    is_pair = ids < pairs
    rows = tl.load(Rows + ids, mask=is_pair, other=0)
    at = Y + rows[:, None] * N + n[None, :]
    x = tl.load(X + ids[:, None] * R + k[None, :], mask=is_pair[:, None], other=0.0)
    made = tl.dot(x, tl.load(W + expert * R * N + k[:, None] * N + n[None, :]))
    y = tl.load(at, mask=is_pair[:, None], other=0.0).to(tl.float32)
    tl.store(at, (y + made).to(Y.dtype.element_ty), mask=is_pair[:, None])


@triton.jit
def row_sums_added(X, Z, R: tl.constexpr, N: tl.constexpr, BM: tl.constexpr):
    """Sums of rows that are added to a tensor, each by one program."""
    m, h, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1), tl.arange(0, N)
    tl.atomic_add(Z + h * R + m, tl.sum(tl.load(X + h * R * N + m[:, None] * N + n[None, :]), 1))


@triton.jit
def scaled_factors(A, K, V, S, W, U, T: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, B: tl.constexpr):
    """Products of one matrix with two others, part by part, whose rows are scaled before (FLA's WY representation)."""
    b, t, d = tl.program_id(0), tl.arange(0, T), tl.arange(0, B)
    a, s = tl.load(A + (b * T + t[:, None]) * T + t[None, :]), tl.load(S + b * T + t)
    for i in range(DV // B):
        v = tl.load(V + (b * T + t[:, None]) * DV + i * B + d[None, :])
        u = tl.dot(a, (v * s[:, None]).to(a.dtype))
        tl.store(U + (b * T + t[:, None]) * DV + i * B + d[None, :], u.to(U.dtype.element_ty))
    for i in range(DK // B):
        k = tl.load(K + (b * T + t[:, None]) * DK + i * B + d[None, :])
        w = tl.dot(a, (k * s[:, None] * 2).to(a.dtype))
        tl.store(W + (b * T + t[:, None]) * DK + i * B + d[None, :], w.to(W.dtype.element_ty))


@triton.jit
def split_product(A, B, C, M, N, K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr):
    """A product of which each program adds up a part of the terms; the parts are stored below each other."""
    part, m, n, k = tl.program_id(1), tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BM), tl.arange(0, BK)
    total = tl.zeros((BM, BM), tl.float32)
    for i in range(part * (K // PARTS), (part + 1) * (K // PARTS), BK):
        total += tl.dot(tl.load(A + m[:, None] * K + i + k[None, :]), tl.load(B + (i + k)[:, None] * N + n[None, :]))
    tl.store(C + part * M * N + m[:, None] * N + n[None, :], total)


@triton.jit
def added_product(A, B, C, M, N, K, BM: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr):
    """A product of which each program adds every fourth tile of the terms to the result (split-K)."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BM)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    a, b, total = A + m[:, None] * K + k[None, :], B + k[:, None] * N + n[None, :], tl.zeros((BM, BM), tl.float32)
    for i in range(tl.cdiv(K, BK * PARTS)):
        left = K - i * BK * PARTS
        x = tl.load(a, mask=k[None, :] < left, other=0.0)
        total += tl.dot(x, tl.load(b, mask=k[:, None] < left, other=0.0))
        a += BK * PARTS
        b += BK * PARTS * N
    tl.atomic_add(C + m[:, None] * N + n[None, :], total)


@triton.jit
def goes_on(X, Y, Z, T, B: tl.constexpr):
    """Two values of a loop that both begin with what the loop before leaves."""
    r, d = tl.program_id(0) * 16 + tl.arange(0, 16), tl.arange(0, B)
    m = tl.full((16,), -1e30, tl.float32)
    for t in range(0, T, B):
        m = tl.maximum(m, tl.max(tl.load(X + r[:, None] * T + (t + d)[None, :]), 1))
    a, b = m, m
    for t in range(0, T, B):
        x = tl.load(X + r[:, None] * T + (t + d)[None, :])
        a += tl.sum(x, 1)
        b = tl.maximum(b, tl.sum(x * x, 1))
    tl.store(Y + r, a)
    tl.store(Z + r, b)
