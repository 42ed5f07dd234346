"""Kernels with blocks of three axes, or with blocks that are reshaped, joined, split or transposed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated(x_ptr, o_ptr, H: tl.constexpr, D: tl.constexpr):
    i = tl.program_id(0)
    h, d = tl.arange(0, H)[:, None], tl.arange(0, D)[None, :]
    x = tl.load(x_ptr + i * H * D + h * D + d).to(tl.float32)
    a, b = tl.split(tl.permute(tl.reshape(x, [H, 2, D // 2]), [0, 2, 1]))
    at = o_ptr + i * H * D + h * D + tl.arange(0, D // 2)[None, :]
    tl.store(at, (a - b).to(tl.float16))
    tl.store(at + D // 2, (a + b).to(tl.float16))


@triton.jit
def middle_softmax(x_ptr, o_ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    a, b, c = tl.arange(0, A)[:, None, None], tl.arange(0, B)[None, :, None], tl.arange(0, C)[None, None, :]
    p = tl.program_id(0) * A * B * C + a * B * C + b * C + c
    x = tl.load(x_ptr + p)
    e = tl.exp(x - tl.max(x, axis=1)[:, None, :])
    tl.store(o_ptr + p, e / tl.sum(e, axis=1)[:, None, :])


@triton.jit
def middle_sums(x_ptr, o_ptr, n, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    i = tl.program_id(0)
    a, b, c = tl.arange(0, A)[:, None, None], tl.arange(0, B)[None, :, None], tl.arange(0, C)[None, None, :]
    x = tl.load(x_ptr + i * A * B * C + a * B * C + b * C + c, mask=a * B + b < n, other=0.0)
    tl.store(o_ptr + i * A * C + tl.arange(0, A)[:, None] * C + tl.arange(0, C)[None, :], tl.sum(x * x, axis=1))


@triton.jit
def transposed_cast(x_ptr, o_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :], mask=(m[:, None] < M) & (n[None, :] < N), other=0.0)
    y = tl.trans((x.to(tl.float32) * 2.0).to(tl.float16))
    tl.store(o_ptr + n[:, None] * M + m[None, :], y, mask=(n[:, None] < N) & (m[None, :] < M))


@triton.jit
def hadamard(x_ptr, o_ptr, N: tl.constexpr):
    n = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + n).to(tl.float32)
    a, b = tl.split(tl.reshape(x, [N // 2, 2]))
    x = tl.reshape(tl.join(a + b, a - b), [N // 4, 2, 2])
    a, b = tl.split(tl.permute(x, [0, 2, 1]))
    x = tl.permute(tl.join(a + b, a - b), [0, 2, 1])
    tl.store(o_ptr + n, tl.reshape(x, [N]).to(tl.float16))


@triton.jit
def unpacked(q_ptr, s_ptr, o_ptr, NC, BX: tl.constexpr, BY: tl.constexpr):
    y = tl.program_id(1) * BY + tl.arange(0, BY)
    x = tl.program_id(0) * BX + tl.arange(0, BX)
    w = tl.load(q_ptr + NC * y[:, None] + x[None, :])
    w = tl.interleave(w, w)
    w = tl.interleave(w, w)
    w = tl.interleave(w, w)
    order = ((tl.arange(0, 2) * 4)[None, :] + tl.arange(0, 4)[:, None]).reshape(8)
    shifts = tl.reshape(tl.broadcast_to((order * 4)[None, :], (BY * BX, 8)), (BY, BX * 8))
    w = (w >> shifts) & 0xF
    at = tl.program_id(0) * BX * 8 + tl.arange(0, BX * 8)
    tl.store(o_ptr + NC * 8 * y[:, None] + at[None, :], ((w - 8) * tl.load(s_ptr + at)[None, :]).to(tl.float16))


@triton.jit
def unpacked_product(a_ptr, q_ptr, s_ptr, o_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n8 = tl.program_id(1) * (BN // 8) + tl.arange(0, BN // 8)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    order = ((tl.arange(0, 2) * 4)[None, :] + tl.arange(0, 4)[:, None]).reshape(8)
    shifts = tl.reshape(tl.broadcast_to((order * 4)[None, :], (BK * (BN // 8), 8)), (BK, BN))
    a_ptrs = a_ptr + K * m[:, None] + k[None, :]
    q_ptrs = q_ptr + N // 8 * k[:, None] + n8[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(K // BK):
        a = tl.load(a_ptrs, mask=m[:, None] < M, other=0.0)
        b = tl.load(q_ptrs)
        b = tl.interleave(b, b)
        b = tl.interleave(b, b)
        b = tl.interleave(b, b)
        b = (((b >> shifts) & 0xF) - 8) * tl.load(s_ptr + i * N + n)[None, :]
        acc = tl.dot(a, b.to(tl.float16), acc)
        a_ptrs += BK
        q_ptrs += BK * (N // 8)
    tl.store(o_ptr + N * m[:, None] + n[None, :], acc.to(tl.float16), mask=m[:, None] < M)


@triton.jit
def joined(x_ptr, o_ptr, N: tl.constexpr):
    n = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + n)
    x = tl.join(x, x * 2.0 + 1.0)
    tl.store(o_ptr + n[:, None] * 2 + tl.arange(0, 2)[None, :], tl.where(x > 0.25, x * 0.5, x - 1.0))


@triton.jit
def shifted_scans(x_ptr, o_ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    a, b, c = tl.arange(0, A)[:, None, None], tl.arange(0, B)[None, :, None], tl.arange(0, C)[None, None, :]
    p = tl.program_id(0) * A * B * C + a * B * C + b * C + c
    tl.store(o_ptr + p, tl.cumsum(tl.load(x_ptr + p), axis=1))


@triton.jit
def reordered(x_ptr, o_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.reshape(tl.load(x_ptr + n), [2, N // 2], can_reorder=True)
    tl.store(o_ptr + n, tl.reshape(tl.trans(x), [N]))
