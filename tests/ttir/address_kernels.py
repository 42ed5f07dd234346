"""Kernels that compute pointers from addresses: of a table, or of a number."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copied_bytes(source_addresses, addresses, sizes, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    source = tl.load(source_addresses + pid)
    address = tl.load(addresses + pid)
    size = tl.load(sizes + pid)
    offsets = tl.arange(0, BLOCK)
    for i in range(0, size, BLOCK):
        mask = (i + offsets) < size
        x = tl.load((source + i + offsets).to(tl.pointer_type(tl.uint8)), mask=mask)
        tl.store((address + i + offsets).to(tl.pointer_type(tl.uint8)), x, mask=mask)


@triton.jit
def grouped_product(a_ptrs, b_ptrs, c_ptrs, m_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    g = tl.program_id(1)
    M = tl.load(m_ptr + g)
    a = tl.load(a_ptrs + g).to(tl.pointer_type(tl.float16))
    b = tl.load(b_ptrs + g).to(tl.pointer_type(tl.float16))
    c = tl.load(c_ptrs + g).to(tl.pointer_type(tl.float16))
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        rk = k + tl.arange(0, BK)
        x = tl.load(a + rm[:, None] * K + rk[None, :], mask=rm[:, None] < M, other=0.0)
        y = tl.load(b + rk[:, None] * N + rn[None, :])
        acc += tl.dot(x, y)
    tl.store(c + rm[:, None] * N + rn[None, :], acc.to(tl.float16), mask=rm[:, None] < M)


@triton.jit
def updated(p_ptrs, g_ptrs, n_ptr, rate, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.load(n_ptr + t)
    p = tl.load(p_ptrs + t).to(tl.pointer_type(tl.float32))
    g = tl.load(g_ptrs + t).to(tl.pointer_type(tl.float32))
    x = tl.load(p + i, mask=i < n)
    y = tl.load(g + i, mask=i < n)
    tl.store(p + i, x - rate * y, mask=i < n)


@triton.jit
def scattered(cache_ptrs, source, index, n, width, is_one, BLOCK: tl.constexpr):
    layer, token = tl.program_id(0), tl.program_id(1)
    cache = tl.load(cache_ptrs + layer).to(source.dtype)
    place = tl.load(index + token)
    if is_one:
        for i in range(0, width, BLOCK):
            at = i + tl.arange(0, BLOCK)
            tl.store(cache + place * width + at, tl.load(source + token * width + at, mask=at < width), mask=at < width)
    else:
        for i in range(0, width, BLOCK):
            at = i + tl.arange(0, BLOCK)
            key = tl.load(source + (2 * layer * n + token) * width + at, mask=at < width)
            value = tl.load(source + (2 * layer * n + n + token) * width + at, mask=at < width)
            tl.store(cache + place * width + at, key, mask=at < width)
            tl.store(cache + (40 + place) * width + at, value, mask=at < width)


@triton.jit
def doubled(address, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(address.to(tl.pointer_type(tl.float16)) + i) * 2.0)


@triton.jit
def of_two_kinds(addresses, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(tl.load(addresses).to(tl.pointer_type(tl.float16)) + i)
    y = tl.load(tl.load(addresses + 1).to(tl.pointer_type(tl.float32)) + i)
    tl.store(out + i, x + y)


@triton.jit
def inserted(k_ptr, slot_ptr, cache, D: tl.constexpr, F: tl.constexpr, S: tl.constexpr, OVER: tl.constexpr):
    pid = tl.program_id(0)
    row = cache + tl.load(slot_ptr + pid) * S
    i, j = tl.arange(0, F), tl.arange(0, D - F)
    x = tl.load(k_ptr + pid * D + i).to(tl.float32)
    scale = tl.max(tl.abs(x)) / 448.0
    tl.store(row + i, (x / scale).to(tl.float8e4nv).to(tl.uint8, bitcast=True))
    tl.store((row + F).to(tl.pointer_type(tl.float32)), scale)
    rest = (row + F + 4 - OVER).to(tl.pointer_type(tl.bfloat16))
    tl.store(rest + j, tl.load(k_ptr + pid * D + F + j))


@triton.jit
def taken_out(out, slot_ptr, cache, D: tl.constexpr, F: tl.constexpr, S: tl.constexpr):
    pid = tl.program_id(0)
    row = cache + tl.load(slot_ptr + pid) * S
    i, j = tl.arange(0, F), tl.arange(0, D - F)
    scale = tl.load((row + F).to(tl.pointer_type(tl.float32)))
    x = tl.load(row + i).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    tl.store(out + pid * D + i, (x * scale).to(tl.bfloat16))
    tl.store(out + pid * D + F + j, tl.load((row + F + 4).to(tl.pointer_type(tl.bfloat16)) + j))


@triton.jit
def moved_bytes(source, cache, slot_ptr, ROW: tl.constexpr):
    pid = tl.program_id(0)
    i = tl.arange(0, ROW)
    x = tl.load(source.to(tl.pointer_type(tl.uint8)) + pid * ROW + i)
    tl.store(cache.to(tl.pointer_type(tl.uint8)) + tl.load(slot_ptr + pid) * ROW + i, x)


@triton.jit
def viewed(out, ROW: tl.constexpr):
    i = tl.program_id(0) * ROW + tl.arange(0, ROW)
    tl.store(out + i, tl.load(out.to(tl.pointer_type(tl.int32)) + i).to(tl.float32))


@triton.jit
def rows_by_bytes(addresses, Y, by, B: tl.constexpr):
    p, i = tl.program_id(0), tl.arange(0, B)
    at = (tl.load(addresses + p) + i * by).to(tl.pointer_type(tl.float32))
    tl.store(Y + p * B + i, tl.load(at))


@triton.jit
def chosen_by_alignment(addresses, Y, BY, B: tl.constexpr):
    p, i = tl.program_id(0), tl.arange(0, B)
    address = tl.load(addresses + p)
    x = tl.load(address.to(tl.pointer_type(tl.float32)) + i)
    tl.store(Y + p * B + i, tl.where(address % BY == 0, x, -x))


@triton.jit
def with_addresses_stored(addresses, copy, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(tl.load(addresses).to(tl.pointer_type(tl.float32)) + i))
    tl.store(copy, tl.load(addresses + 1))


@triton.jit
def of_tuples(X, results, steps, sizes, B: tl.constexpr):
    p, i = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + p * steps[0] + i * steps[1], mask=i < sizes[1], other=0.0)
    tl.store(results[0] + p * sizes[1] + i, x * 2.0, mask=i < sizes[1])
    tl.store(results[1] + p * sizes[1] + i, x + sizes[0], mask=i < sizes[1])


@triton.jit
def of_like_names(X, X_0, scales: tl.constexpr, Y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(X[0] + i, mask=i < n, other=0.0)
    b = tl.load(X[1] + i, mask=i < n, other=0.0)
    tl.store(Y + i, a * scales[0] + b * scales[1] + tl.load(X_0 + i, mask=i < n, other=0.0), mask=i < n)
