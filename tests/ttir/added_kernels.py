"""Kernels with atomic additions, and a product of FP8."""

import triton
import triton.language as tl


@triton.jit
def split_product(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr):
    """Each program adds the product of a part of K."""
    rm, rn = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.program_id(2) * BK + tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(K, BK * SPLIT)):
        at = rk + k * BK * SPLIT
        a = tl.load(A + rm[:, None] * K + at[None, :], mask=at[None, :] < K, other=0.0)
        b = tl.load(B + at[:, None] * N + rn[None, :], mask=at[:, None] < K, other=0.0)
        total = tl.dot(a, b, total)
    tl.atomic_add(C + rm[:, None] * N + rn[None, :], total, mask=(rm < M)[:, None] & (rn < N)[None, :])


@triton.jit
def column_sums(X, W, Y, DW, N, B: tl.constexpr, KIND: tl.constexpr):
    """A result for each row, and sums over rows that programs add to one row."""
    row, cols = tl.program_id(0), tl.arange(0, B)
    mask = cols < N
    x = tl.load(X + row * N + cols, mask=mask, other=0.0)
    w = tl.load(W + cols, mask=mask, other=0.0)
    tl.store(Y + row * N + cols, x * w, mask=mask)
    if KIND == 0:
        tl.atomic_add(DW + cols, x, mask=mask)
    elif KIND == 1:
        tl.atomic_max(DW + cols, x, mask=mask)
    elif KIND == 2:
        old = tl.atomic_add(DW + cols, x, mask=mask)
        tl.store(Y + row * N + cols, old, mask=mask)
    else:
        tl.atomic_add(DW + row // 2 + cols, x, mask=mask)


@triton.jit
def narrow_product(A, B, C, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A product of two factors of FP8."""
    rm, rn, rk = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(A + rm[:, None] * K + (k + rk)[None, :])
        b = tl.load(B + rn[None, :] * K + (k + rk)[:, None])
        total = tl.dot(a, b, total)
    tl.store(C + rm[:, None] * N + rn[None, :], total)


@triton.jit
def numbers_added(X, Y, N, K: tl.constexpr, B: tl.constexpr):
    """Each program adds a number to an element that ``K`` programs take turns at."""
    row, cols = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * N + cols, mask=cols < N, other=0.0)
    tl.atomic_add(Y + row % K, tl.sum(x, 0))


@triton.jit
def gradients(Q, K, D, DQ, DK, T, BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr):
    """A sum that a loop adds to in each iteration, and one that it carries: stored, added, or added to the former."""
    cols, rows = tl.arange(0, C), tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.load(K + rows[:, None] * C + cols[None, :])
    dk = tl.zeros((BM, C), tl.float32)
    for t in range(0, T, BN):
        at = (t + tl.arange(0, BN))[:, None] * C + cols[None, :]
        q, d = tl.load(Q + at), tl.load(D + at)
        s = (tl.dot(k, tl.trans(q)) * 0.125).to(tl.float16)
        dk = tl.dot(s, d, dk)
        tl.atomic_add(DQ + at, tl.dot(tl.trans(s), k))
    if KIND == 0:
        tl.store(DK + rows[:, None] * C + cols[None, :], dk)
    elif KIND == 1:
        tl.atomic_add(DK + rows[:, None] * C + cols[None, :], dk)
    elif KIND == 2:
        tl.atomic_add(DQ + rows[:, None] * C + cols[None, :], dk)
    else:
        tl.store(DK + rows[:, None] * C + cols[None, :], dk + tl.load(DQ + rows[:, None] * C + cols[None, :]))


@triton.jit
def added_down(X, Y, R: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr):
    """Each program adds to, or stores in, every row the sums of its columns, alone or beside the elements."""
    rows, cols = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    x = tl.load(X + (tl.program_id(0) * R + rows) * C + cols)
    sums = tl.sum(x, 0)[None, :]
    if KIND == 0:
        tl.atomic_add(Y + rows * C + cols, x + sums)
    elif KIND == 1:
        tl.atomic_add(Y + rows * C + cols, tl.broadcast_to(sums, (R, C)))
    else:
        more = tl.arange(0, 16)[:, None]
        tl.store(Y + (tl.program_id(0) * 16 + more) * C + cols, tl.broadcast_to(sums, (16, C)))


@triton.jit
def chosen_sums(X, O, N, B: tl.constexpr, KIND: tl.constexpr):
    """Additions of the elements that a second condition of a mask chooses."""
    row, cols = tl.program_id(0), tl.arange(0, B)
    mask = cols < N
    x = tl.load(X + row * N + cols, mask=mask, other=0.0)
    if KIND == 0:
        tl.atomic_add(O + cols, x, mask=mask & (cols > 2))
    elif KIND == 1:
        tl.atomic_add(O + cols, x, mask=mask & (x > 0))
    else:
        tl.atomic_add(O + cols, x, mask=x > 0)


@triton.jit
def rows_onto_one(X, O, N, B: tl.constexpr, R: tl.constexpr):
    """All rows of a block are added to one row."""
    rows, cols = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, B)
    x = tl.load(X + rows[:, None] * N + cols[None, :])
    tl.atomic_add(O + cols[None, :] + rows[:, None] * 0, x)
