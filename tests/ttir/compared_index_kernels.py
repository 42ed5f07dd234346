"""Kernels that compare indices as floats."""

import triton
import triton.language as tl


@triton.jit
def triangle_of_floats(X, V, Y, N: tl.constexpr, D: tl.constexpr):
    i = tl.arange(0, N).to(tl.float32)
    j, d = tl.arange(0, N), tl.arange(0, D)
    s = tl.load(X + (tl.program_id(0) * N + j)[:, None] * N + j[None, :])
    s = tl.where(i[:, None] >= i[None, :], s, 0.0)
    tl.store(
        Y + (tl.program_id(0) * N + j)[:, None] * D + d[None, :], tl.dot(s, tl.load(V + j[:, None] * D + d[None, :]))
    )


@triton.jit
def thresholds(X, Y, limit: tl.constexpr, B: tl.constexpr, KIND: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    i = at.to(tl.float32)
    x = tl.load(X + at)
    if KIND == 0:
        holds = i < limit
    elif KIND == 1:
        holds = i <= limit
    elif KIND == 2:
        holds = limit < i
    elif KIND == 3:
        holds = limit <= i
    elif KIND == 4:
        holds = i == limit
    else:
        holds = i != limit
    tl.store(Y + at, tl.where(holds, x, -1.0))


@triton.jit
def rounded_indices(X, Y, B: tl.constexpr, KIND: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    if KIND == 0:
        holds = at.to(tl.float16) < (at + 1).to(tl.float16)
    else:
        holds = at.to(tl.float16) < (tl.arange(0, B) + 1).to(tl.float16)
    tl.store(Y + at, tl.where(holds, tl.load(X + at), -1.0))
