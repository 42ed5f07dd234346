"""Kernels whose programs do unlike things, whose integers are values of tiles, and that choose by indices."""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def doubled_by_name(X, Y, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(Y + i, tl.load(X + i) * 2)


@triton.jit
def from_the_last(X, Y, N, B: tl.constexpr):
    p, j = tl.program_id(0), tl.arange(0, B)
    s = tl.zeros((B,), tl.float32)
    for t in range(N - B, -1, -B):
        s += tl.load(X + p * N + t + j)
        tl.store(Y + p * N + t + j, s)


@triton.jit
def chosen_blocks(X, Z, Y, N, B: tl.constexpr, KIND: tl.constexpr):
    p, j = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + p * N + j, mask=j < N, other=0.0)
    z = tl.load(Z + p * N + j, mask=j < N, other=0.0)
    if KIND == 0:
        y = tl.where(j % 2 == 0, -x, x * z)
    elif KIND == 1:
        y = tl.where(j < B // 4, 2.0, 5.0) * x
    else:
        y = tl.where((j + p) % 2 == 0, x, z)
    tl.store(Y + p * N + j, y, mask=j < N)


@triton.jit
def by_program(X, Z, Y, N, B: tl.constexpr):
    p, j = tl.program_id(0), tl.arange(0, B)
    if p % 3 == 0:
        y = tl.load(X + p * N + j, mask=j < N, other=0.0)
        y = y - tl.max(y, 0)
    elif p % 3 == 1:
        y = tl.load(Z + p * N + j, mask=j < N, other=0.0) * 2
    else:
        y = tl.zeros((B,), tl.float32)
    tl.store(Y + p * N + j, y, mask=j < N)


@triton.jit
def stored_by_program(X, Z, Y, N, B: tl.constexpr):
    p, j = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + p * N + j, mask=j < N, other=0.0)
    if p >= 5:
        tl.store(Y + p * N + j, x * 2, mask=j < N)
    else:
        tl.store(Y + p * N + j, x - tl.load(Z + p * N + j, mask=j < N, other=0.0), mask=j < N)


@triton.jit
def sums_of_some(X, COUNT, Y, L, N, B: tl.constexpr):
    p, j = tl.program_id(0), tl.arange(0, B)
    n = tl.load(COUNT + p)
    m, s = -float("inf"), 0.0
    for t in range(0, n, B):
        x = tl.load(X + p * N + t + j, mask=t + j < n, other=-float("inf"))
        high = tl.maximum(m, tl.max(x, 0))
        s = s * tl.exp(m - high) + tl.sum(tl.exp(x - high), 0)
        m = high
    tl.store(Y + p, s)
    tl.store(L + p, m)


@triton.jit
def whole(X, Y, B: tl.constexpr, KIND: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(X + i)
    if KIND == 0:
        y = tl.ceil(x)
    elif KIND == 1:
        y = tl.floor(x)
    elif KIND == 2:
        y = libdevice.round(x)
    else:
        y = libdevice.rint(x)
    tl.store(Y + i, y)


@triton.jit
def quantized(X, Q, S, N, B: tl.constexpr, ROUNDS: tl.constexpr):
    p, j = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + p * N + j, mask=j < N, other=0.0)
    s = tl.max(tl.abs(x), 0) / 127
    x = x / s
    x = libdevice.round(x) if ROUNDS else x
    tl.store(Q + p * N + j, x.to(tl.int8), mask=j < N)
    tl.store(S + p, s)


@triton.jit
def integer_product(A, W, S, C, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, K)
    a, w = tl.load(A + i[:, None] * K + k[None, :]), tl.load(W + k[:, None] * N + j[None, :])
    c = tl.dot(a, w).to(tl.float32) * tl.load(S + i)[:, None]
    tl.store(C + i[:, None] * N + j[None, :], c)


@triton.jit
def counted(X, COUNT, Y, N, B: tl.constexpr):
    p, j = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + p * N + j, mask=j < N, other=0.0)
    c = tl.load(COUNT + p * N + j, mask=j < N, other=0)
    x = tl.where(c > 1, x * 0.5, x)
    tl.store(Y + p * N + j, x - c.to(tl.float32) * 3.0, mask=j < N)


@triton.jit
def best(X, V, I, N, B: tl.constexpr, LEAST: tl.constexpr):
    p, j = tl.program_id(0), tl.arange(0, B)
    if LEAST:
        x = tl.load(X + p * N + j, mask=j < N, other=float("inf"))
        tl.store(V + p, tl.min(x, 0))
        tl.store(I + p, tl.argmin(x, 0))
    else:
        x = tl.load(X + p * N + j, mask=j < N, other=-float("inf"))
        tl.store(V + p, tl.max(x, 0))
        tl.store(I + p, tl.argmax(x, 0))


@triton.jit
def best_weights(X, V, I, N, K: tl.constexpr, B: tl.constexpr):
    p, j = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + p * N + j, mask=j < N, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    w = e / tl.sum(e, 0)
    for k in tl.static_range(K):
        i = tl.argmax(w, 0)
        tl.store(V + p * K + k, tl.max(w, 0))
        tl.store(I + p * K + k, i)
        w = tl.where(j == i, -1.0, w)


@triton.jit
def integers_again(X, Q, N, B: tl.constexpr):
    p, j = tl.program_id(0), tl.arange(0, B)
    q = tl.load(Q + p)
    x = tl.load(X + p * N + j)
    tl.store(Q + p, (tl.max(x, 0) + 0.0 * q).to(tl.int32))


@triton.jit
def integer_sum(A, W, C, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.int32)
    for t in range(0, K, BK):
        k = t + tl.arange(0, BK)
        acc += tl.dot(tl.load(A + i[:, None] * K + k[None, :]), tl.load(W + k[:, None] * N + j[None, :]))
    tl.store(C + i[:, None] * N + j[None, :], acc.to(tl.float32))


@triton.jit
def normed_in_place(X, N, B: tl.constexpr, AGAIN: tl.constexpr):
    p, j = tl.program_id(0), tl.arange(0, B)
    m, s = -float("inf"), 0.0
    for t in range(0, N, B):
        x = tl.load(X + p * N + t + j, mask=t + j < N, other=-float("inf"))
        high = tl.maximum(m, tl.max(x, 0))
        s = s * tl.exp(m - high) + tl.sum(tl.exp(x - high), 0)
        m = high
    for t in range(0, N, B):
        x = tl.load(X + p * N + t + j, mask=t + j < N, other=-float("inf"))
        tl.store(X + p * N + t + j, tl.exp(x - m) / s, mask=t + j < N)
        if AGAIN:
            x = tl.load(X + p * N + t + j, mask=t + j < N, other=-float("inf"))
            tl.store(X + p * N + t + j, x * 2, mask=t + j < N)


@triton.jit
def summed_from(X, S, Y, N, H, B: tl.constexpr, KIND: tl.constexpr):
    p, j = tl.program_id(0), tl.arange(0, B)
    m = tl.load(S + p % H)
    if KIND == 1:
        m = m * 2 + 1
    s = 1.0
    for t in range(0, N, B):
        x = tl.load(X + p * N + t + j, mask=t + j < N, other=-float("inf"))
        high = tl.maximum(m, tl.max(x, 0))
        s = s * tl.exp(m - high) + tl.sum(tl.exp(x - high), 0)
        m = high
    tl.store(Y + p, m + tl.log(s))


@triton.jit
def added_from(C, S, D, A, X, Y, K: tl.constexpr, L, N, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    k, t = tl.arange(0, K), tl.arange(0, BK)
    c, s = tl.load(C + i[:, None] * K + k[None, :]), tl.load(S + k[:, None] * N + j[None, :])
    acc = tl.dot(c, s) * tl.exp(tl.load(D + i))[:, None]
    for n in range(0, L, BK):
        a = tl.load(A + i[:, None] * L + n + t[None, :])
        x = tl.load(X + (n + t)[:, None] * N + j[None, :])
        acc += tl.dot(a, x)
    tl.store(Y + i[:, None] * N + j[None, :], acc.to(Y.dtype.element_ty))


@triton.jit
def decayed_products(A, D, X, Y, L, N, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    t = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for n in range(0, L, BK):
        a = tl.load(A + i[:, None] * L + n + t[None, :]).to(tl.float32)
        a = (a * tl.exp(tl.load(D + n + t))[None, :]).to(tl.float16)
        acc += tl.dot(a, tl.load(X + (n + t)[:, None] * N + j[None, :]))
    tl.store(Y + i[:, None] * N + j[None, :], acc)


@triton.jit
def states_passed(S, A, OUT, LAST, N, T, B: tl.constexpr):
    p, j = tl.program_id(0), tl.arange(0, B)
    m = j < N
    out, states = OUT + p * T * N + j, S + p * T * N + j
    s = tl.zeros((B,), tl.float32)
    tl.store(out, s, mask=m)
    out += N
    for t in range(T):
        new = tl.load(states, mask=m, other=0.0)
        s = tl.exp(tl.load(A + p * T + t)) * s + new
        if t < T - 1:
            tl.store(out, s, mask=m)
        else:
            tl.store(LAST + p * N + j, s, mask=m)
        states += N
        out += N


@triton.jit
def rows_by_number(W, I, Y, N, B: tl.constexpr):
    p, j = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)
    i = tl.load(I + p)
    tl.store(Y + p * N + j, tl.load(W + i * N + j, mask=(j < N) & (i >= 0), other=0.0), mask=j < N)


@triton.jit
def combined(X, I, W, Y, N, K: tl.constexpr, B: tl.constexpr):
    p, j = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)
    acc = tl.zeros((B,), tl.float32)
    for k in range(K):
        i = tl.load(I + p * K + k)
        if i >= 0:
            acc += tl.load(X + i * N + j, mask=j < N, other=0.0) * tl.load(W + p * K + k)
    tl.store(Y + p * N + j, acc, mask=j < N)


@triton.jit
def kinds_that_meet(X, Y, Z, Q, N, B: tl.constexpr, KIND: tl.constexpr):
    p, j = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + p * N + j, mask=j < N, other=0.0)
    if KIND == 0:
        if p % 2 == 0:
            tl.store(Y + p // 2 * N + j, x * 2, mask=j < N)
        else:
            tl.store(Z + p // 2 * N + j, tl.load(Y + p // 2 * N + j, mask=j < N, other=0.0) + 1, mask=j < N)
    elif KIND == 1:
        if p % 2 == 0:
            tl.store(Y + p // 2 * N + j, x * 2, mask=j < N)
        else:
            tl.store(Y + p // 2 * N + j, x + 1, mask=j < N)
    elif KIND == 2:
        tl.store(Y + p * N + j, x * 2, mask=j < N)
        if p == 1:
            tl.store(Y + j, x + 1, mask=j < N)
    elif KIND == 3:
        if p % 2 == 0:
            tl.store(Y + p // 2 * N + j, x * 2, mask=j < N)
        else:
            tl.store(Z + p // 2 * N + j, tl.load(Y + (3 + p // 2) * N + j, mask=j < N, other=0.0) + 1, mask=j < N)
    elif p % 2 == 0:
        tl.store(Q + p // 2, tl.max(x, 0).to(tl.int32))
    else:
        tl.store(Z + p // 2 * N + j, x + 1, mask=j < tl.load(Q + p // 2))


@triton.jit
def cut_to_integers(X, Y, N, B: tl.constexpr, BITS: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(X + i, mask=i < N, other=0.0)
    if BITS == 8:
        y = x.to(tl.int8).to(tl.float32)
    elif BITS == 16:
        y = x.to(tl.int16).to(tl.float32)
    else:
        y = x.to(tl.int32).to(tl.float32)
    tl.store(Y + i, y, mask=i < N)


@triton.jit
def stored_number(Y, N, B: tl.constexpr, NUMBER: tl.constexpr):
    j = tl.arange(0, B)
    tl.store(Y + tl.program_id(0) * N + j, tl.full((B,), NUMBER, tl.int32), mask=j < N)


@triton.jit
def compared_number(X, Y, N, B: tl.constexpr, NUMBER: tl.constexpr):
    j = tl.arange(0, B)
    x = tl.load(X + tl.program_id(0) * N + j, mask=j < N, other=0.0)
    tl.store(Y + tl.program_id(0) * N + j, tl.where(x.to(tl.int32) < NUMBER, x, 0.0), mask=j < N)


@triton.jit
def best_of_all_lanes(X, COUNT, V, I, N, B: tl.constexpr, KIND: tl.constexpr):
    p, j = tl.program_id(0), tl.arange(0, B)
    n = N if KIND < 3 else tl.load(COUNT + p)
    x = tl.load(X + p * N + j, mask=j < n, other=0.0)
    if KIND == 1:
        v, i = tl.min(x, 0, return_indices=True)
    elif KIND == 2:
        v, i = tl.min(tl.abs(x), 0, return_indices=True)
    else:
        v, i = tl.max(x, 0, return_indices=True)
    tl.store(V + p, v)
    tl.store(I + p, i)


@triton.jit
def best_again(X, I, N, B: tl.constexpr, OTHER: tl.constexpr):
    p, j = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + p * N + j, mask=j < N, other=OTHER)
    x = tl.where(j == tl.argmax(x, 0), -float("inf"), x)
    tl.store(I + p, tl.argmax(x, 0))


@triton.jit
def least(X, V, N, B: tl.constexpr, KIND: tl.constexpr):
    p, j = tl.program_id(0), tl.arange(0, B)
    if KIND == 0:
        x = tl.load(X + p * N + j, mask=j < N, other=float("inf"))
        v, _ = tl.min(x, 0, return_indices=True)
    elif KIND == 1:
        v = tl.min(tl.cumsum(tl.load(X + p * N + j, mask=j < N, other=0.0), 0), 0)
    else:
        x = tl.load(X + p * N + j, mask=j < N, other=float("inf"))
        v = tl.min(tl.where(j < 10, x, float("inf")), 0)
    tl.store(V + p, v)


@triton.jit
def least_of_some(X, Y, N: tl.constexpr, KIND: tl.constexpr):
    j = tl.arange(0, N)
    x = tl.load(X + tl.program_id(0) * N + j)
    if KIND == 0:
        y = tl.where(~((x > 1.0) | (x < -1.0)), x, 9.0)
    elif KIND == 1:
        y = tl.where((j < 4) | ~(j < 12), x, 9.0)
    else:
        y = tl.cumsum(x, 0)
    tl.store(Y + tl.program_id(0), tl.min(y, 0))


@triton.jit
def best_of_sum(X, Z, Y, N, B: tl.constexpr, KIND: tl.constexpr):
    """A sum or maximum of a masked block that is added to one without a mask."""
    p, j = tl.program_id(0), tl.arange(0, B)
    z = tl.load(Z + p * B + j)
    x = tl.load(X + p * N + j, mask=j < N, other=0.0)
    y = z + x if KIND < 2 else x + z
    tl.store(Y + p, tl.max(y, 0) if KIND % 2 else tl.sum(y, 0))


@triton.jit
def other_index(X, Y, N, B: tl.constexpr, BY: tl.constexpr):
    """A sum of the elements whose index, less a distance, is that of a row's maximum."""
    p, j = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + p * N + j, mask=j < N, other=-float("inf"))
    tl.store(Y + p, tl.sum(tl.where(j - BY == tl.argmax(x, 0), x, 0.0), 0))


@triton.jit
def indices_of_positive(X, Y, C, B: tl.constexpr):
    """The index of each positive element, 0 of others; and a hundred times the element in 8 bits."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(X + i)
    tl.store(Y + i, tl.where(x > 0, i, 0).to(tl.float32))
    tl.store(C + i, (x * 100.0).to(tl.int8))


@triton.jit
def normalised_alone(X, Y, B: tl.constexpr):
    """A row of one element less its sum of squares: a sum of one element is no rounding of its own."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(X + i)
    tl.store(Y + i, x - tl.sum(x * x, 0))


@triton.jit
def in_unsigned_bytes(X, C, B: tl.constexpr):
    """A hundred times each element in 8 bits without a sign."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(C + i, (tl.load(X + i) * 100.0).to(tl.uint8))
