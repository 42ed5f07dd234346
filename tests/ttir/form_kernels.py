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
    for k in range(0, K // B_K):
        group = k * B_K // GROUP
        scale = tl.load(ScaleA + tl.program_id(0) * (K // GROUP) + group) * tl.load(ScaleB + group)
        a = tl.load(A + rows[:, None] * K + (k * B_K + inner)[None, :])
        b = tl.load(B + columns[None, :] * K + (k * B_K + inner)[:, None])
        total += tl.dot(a, b) * scale
    tl.store(C + rows[:, None] * N + columns[None, :], total)
