"""Products of float32 in each precision of their factors."""

import triton
import triton.language as tl


@triton.jit
def product(A, B, C, K, P: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    sums = tl.zeros([M, N], tl.float32)
    for j in range(0, K, BK):
        a = tl.load(A + m[:, None] * K + (j + k)[None, :])
        b = tl.load(B + (j + k)[:, None] * N + n[None, :])
        sums = tl.dot(a, b, sums, input_precision=P)
    tl.store(C + m[:, None] * N + n[None, :], sums)


@triton.jit
def product_of_eights(
    A, B, C, K, MOST: tl.constexpr, OTHER: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    sums = tl.zeros([M, N], tl.float32)
    for j in range(0, K, BK):
        a = tl.load(A + m[:, None] * K + (j + k)[None, :])
        b = tl.load(B + n[None, :] * K + (j + k)[:, None])
        sums = tl.dot(a, b, sums, max_num_imprecise_acc=MOST)
        if OTHER >= 0:
            sums = tl.dot(a, b, sums, max_num_imprecise_acc=OTHER)
    tl.store(C + m[:, None] * N + n[None, :], sums)


@triton.jit
def product_of_bytes(
    A,
    B,
    C,
    K,
    OF: tl.constexpr,
    SUM: tl.constexpr,
    HALF: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BK: tl.constexpr,
):
    """B's elements become floats of another format; with HALF their halves are joined with them."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    columns = tl.arange(0, N // (2 if HALF else 1))
    sums = tl.zeros([M, N], SUM)
    for j in range(0, K, BK):
        a = tl.load(A + m[:, None] * K + (j + k)[None, :])
        b = tl.load(B + (j + k)[:, None] * (N // (2 if HALF else 1)) + columns[None, :]).to(OF)
        if HALF:
            b = tl.interleave(b * 0.5, b).to(OF)
        sums = tl.dot(a, b, sums, out_dtype=SUM)
    tl.store(C + m[:, None] * N + n[None, :], sums)


@triton.jit
def rounded_down(X, Y, T: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(Y + i, tl.load(X + i).to(T, fp_downcast_rounding="rtz").to(tl.float32))
