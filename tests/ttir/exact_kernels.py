"""Kernels whose integers are random ones, wrap in 32 bits, or are beyond those that float32 has."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dropped(X, Y, M, n, p, seed, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    inside = at < n
    x = tl.load(X + at, mask=inside)
    keeps = tl.rand(seed, at) > p
    tl.store(M + at, keeps, mask=inside)
    tl.store(Y + at, tl.where(keeps, x * 2.0, 0.0), mask=inside)


@triton.jit
def drawn_four(X, Y, n, seed, B: tl.constexpr):
    at = tl.program_id(0) * B * 4 + tl.arange(0, B)
    a, b, c, d = tl.rand4x(seed, at)
    tl.store(Y + at, tl.load(X + at, mask=at < n) + a, mask=at < n)
    tl.store(Y + at + B, b, mask=at + B < n)
    tl.store(Y + at + 2 * B, c, mask=at + 2 * B < n)
    tl.store(Y + at + 3 * B, d, mask=at + 3 * B < n)


@triton.jit
def drawn_integers(Y, Z, n, seed, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(Y + at, tl.randint(seed, at), mask=at < n)
    tl.store(Z + at, at * 100003 + 7, mask=at < n)


@triton.jit
def drawn_in_rows(X, Y, Seeds, rows, n, R: tl.constexpr, B: tl.constexpr):
    seed = tl.load(Seeds + tl.program_id(0))
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    column = tl.arange(0, B)[None]
    inside = (row < rows) & (column < n)
    at = row * n + column
    x = tl.load(X + at, mask=inside)
    tl.store(Y + at, tl.where(tl.rand(seed, at) > 0.5, x, 0.0), mask=inside)


@triton.jit
def attended(Q, K, V, O, n, seed, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DROPS: tl.constexpr):
    head = tl.program_id(1) * n
    row = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    q = tl.load(Q + (head + row[:, None]) * D + d[None])
    total = tl.zeros([M], tl.float32)
    high = tl.full([M], -1e30, tl.float32)
    out = tl.zeros([M, D], tl.float32)
    for start in range(0, n, N):
        key = start + tl.arange(0, N)
        k = tl.load(K + (head + key[:, None]) * D + d[None])
        v = tl.load(V + (head + key[:, None]) * D + d[None])
        scores = tl.dot(q, tl.trans(k))
        new = tl.maximum(high, tl.max(scores, 1))
        weights = tl.exp(scores - new[:, None])
        total = total * tl.exp(high - new) + tl.sum(weights, 1)
        if DROPS:
            weights = tl.where(tl.rand(seed, (head + row[:, None]) * n + key[None]) > 0.25, weights, 0.0)
        out = out * tl.exp(high - new)[:, None] + tl.dot(weights.to(v.dtype), v)
        high = new
    tl.store(O + (head + row[:, None]) * D + d[None], out / total[:, None])


@triton.jit
def weighted_by_place(X, Y, n, B: tl.constexpr):
    out = tl.zeros([B], tl.float32)
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        x = tl.load(X + tl.program_id(0) * n + at, mask=at < n, other=0.0)
        out += x * (at * at).to(tl.float32)
    tl.store(Y + tl.program_id(0), tl.sum(out, 0))


@triton.jit
def exponents(X, E, Y, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    inside = at < n
    x = tl.load(X + at, mask=inside, other=1.0)
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) & 0xFF) - 127
    tl.store(E + at, exponent, mask=inside)
    tl.store(Y + at, x * ((127 - exponent) << 23).to(tl.float32, bitcast=True), mask=inside)


@triton.jit
def rounded_by_hand(X, Y, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    bits = tl.load(X + at, mask=at < n).to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    tl.store(Y + at, bits.to(tl.float32, bitcast=True), mask=at < n)


@triton.jit
def scaled_by_powers(X, Y, S, G: tl.constexpr):
    at = tl.program_id(0) * G + tl.arange(0, G)
    x = tl.load(X + at).to(tl.float32)
    bits = tl.max(tl.abs(x), 0).to(tl.uint32, bitcast=True)
    exponent = (bits >> 23) & 0xFF
    exponent += tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    tl.store(S + tl.program_id(0), exponent.to(tl.uint8))
    tl.store(Y + at, x / (exponent << 23).to(tl.float32, bitcast=True))


@triton.jit
def hashed(X, Y, Z, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    inside = at < n
    x = tl.load(X + at, mask=inside, other=0.0)
    bits = x.to(tl.int32, bitcast=True) * 16777619
    bits = (bits ^ (bits >> 15)) // 7 + bits % 5
    tl.store(Y + at, tl.where(bits > 100, bits, -bits), mask=inside)
    upper = x.to(tl.uint32, bitcast=True)
    tl.store(Z + at, upper.to(tl.float32) * tl.where(upper > 0x80000000, 1.0, 2.0), mask=inside)


@triton.jit
def summed_integers(X, Y, Z, n, B: tl.constexpr):
    at = tl.arange(0, B)
    row = tl.program_id(0) * n + at
    x = tl.load(X + row, mask=at < n, other=0.0)
    whole = (x * 1e8).to(tl.int32)
    tl.store(Y + tl.program_id(0), tl.sum(whole, 0))
    tl.store(Z + row, (whole - 1).to(tl.int64), mask=at < n)


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def packed(W, Y, N: tl.constexpr, BITS: tl.constexpr):
    at = tl.arange(0, N)
    values = tl.load(W + tl.program_id(0) * N + at).to(tl.int32)
    tl.store(Y + tl.program_id(0), tl.reduce(values << (at * BITS), 0, either))


@triton.jit
def halves(X, E, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    bits = tl.load(X + at, mask=at < n, other=0.0).to(tl.int16, bitcast=True)
    tl.store(E + at, ((bits >> 10) & 0x1F).to(tl.int32) - 15, mask=at < n)


@triton.jit
def counted(X, Y, Z, n, B: tl.constexpr):
    row = tl.program_id(0)
    count = 0
    lanes = tl.zeros([B], tl.int32)
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        x = tl.load(X + row * n + at, mask=at < n, other=0.0)
        count += tl.sum((x > 0.5).to(tl.int32), 0)
        lanes += (x < -0.5).to(tl.int32)
    tl.store(Y + row, count)
    tl.store(Z + row, tl.sum(lanes, 0))


@triton.jit
def histogram(X, Counts, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(Counts + tl.load(X + at, mask=at < n, other=0), 1, mask=at < n)


@triton.jit
def dealt_out(In, Out, Which, N: tl.constexpr, SIZE: tl.constexpr, RANK: tl.constexpr):
    extra = tl.full((), 0, tl.int32)
    last = 0
    for i in range(N):
        length = tl.load(In + i) + extra
        own = length // SIZE + (length % SIZE > RANK)
        if own > 0:
            tl.store(Which + last, i)
            tl.store(Out + last, own)
            last += 1
        extra = length - own * SIZE


@triton.jit
def overtaken(X, Y, n):
    tl.store(Y + tl.program_id(0), tl.load(Y + (tl.program_id(0) + 1) % n) + tl.load(X + tl.program_id(0)))


@triton.jit
def numbered(X, Counts, Y):
    tl.store(Y + tl.program_id(0), tl.atomic_add(Counts + tl.load(X + tl.program_id(0)), 1))


@triton.jit
def first_block_added(X, First, Y, n, T: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    row = tl.arange(0, R)[:, None]
    column = tl.arange(0, B)[None]
    for i in range(T):
        at = ((tl.program_id(0) * T + i) * R + row) * n + column
        x = tl.load(X + at)
        if i == 0:
            x += tl.load(First + (tl.program_id(0) * R + row) * n + column)
        else:
            x = x * x
        tl.store(Y + at, x)


@triton.jit
def stepped(X, Y, n, N: tl.constexpr, B: tl.constexpr):
    pointer = X + tl.program_id(0) * n + tl.arange(0, B)
    total = 0.0
    for i in range(N):
        total += tl.sum(tl.load(pointer), 0)
        pointer += tl.where(i >= 0, B, 0)
    tl.store(Y + tl.program_id(0), total)


@triton.jit
def unlike_tiles(X, Y, n, N: tl.constexpr, KIND: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, B)
    out = tl.zeros([B], tl.float32) + 2.0
    for i in range(N):
        x = tl.load(X + (row * N + i) * n + column, mask=column < n, other=0.0)
        if KIND == "first":
            out = tl.where(i == 0, x, out * x)
        elif KIND == "last":
            out = tl.where(i == N - 1, out * x, out + x)
        elif KIND == "branch":
            if i == 0:  # noqa: SIM108 - a branch is what is read
                out = x
            else:
                out = out + x
        elif KIND == "lanes":
            out = tl.where((column + i) % 3 == 0, out + x, out)
        else:
            out = tl.where(row + i < 3, out + x, out)
    tl.store(Y + row * n + column, out, mask=column < n)


@triton.jit
def exchanged(X, Y):
    tl.atomic_xchg(Y + tl.program_id(0), tl.load(X + tl.program_id(0)))


@triton.jit
def added_up(X, Y):
    tl.atomic_add(Y, tl.load(X + tl.program_id(0)) + tl.load(X) * 2)
