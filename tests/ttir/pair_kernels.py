"""Loops that split blocks into neighbours or join them, and rows that several programs store a part of."""

import triton
import triton.language as tl


@triton.jit
def rotated(X, Y, N: tl.constexpr, B: tl.constexpr):
    r = tl.program_id(0)
    for k in range(0, N, 2 * B):
        i = r * N + k + tl.arange(0, 2 * B)
        even, odd = tl.split(tl.reshape(tl.load(X + i), (B, 2)))
        tl.store(Y + i, tl.interleave(-odd, even))


@triton.jit
def gated(X, Y, N, B: tl.constexpr):
    r, at = tl.program_id(0), tl.arange(0, 2 * B)
    x = X + r * N + at
    for k in range(0, N, 2 * B):
        gate, up = tl.split(tl.reshape(tl.load(x, mask=k + at < N, other=0.0), (B, 2)))
        half = k // 2 + tl.arange(0, B)
        tl.store(Y + r * (N // 2) + half, gate * tl.sigmoid(gate) * up, mask=half < N // 2)
        x += 2 * B


@triton.jit
def parts_of_rows(X, Y, N: tl.constexpr, B: tl.constexpr):
    """Each program divides a part of a row by the sum of the row."""
    r, i, total = tl.program_id(0), tl.arange(0, B), 0.0
    for k in range(0, N, B):
        total += tl.sum(tl.load(X + r * N + k + i))
    at = r * N + tl.program_id(1) * B + i
    tl.store(Y + at, tl.load(X + at) / total)
