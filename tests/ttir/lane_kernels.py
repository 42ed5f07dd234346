"""Kernels whose masks leave a middle part of a block's lanes, the same in all programs: `cat` of inductor's rope."""

import triton
import triton.language as tl


@triton.jit
def rotated(X, C, S, Y, n, D: tl.constexpr, B: tl.constexpr):
    """Rows of D times C, plus ``cat(-x[D/2:], x[:D/2])`` times S, of flat indices."""
    index = tl.program_id(0) * B + tl.arange(0, B)
    inside, half = index < n, D // 2
    at, row = index % D, index // D
    right = tl.load(X + half + at + D * row, inside & (at < half), other=0.0)
    left = tl.load(X - half + at + D * row, (at >= half) & inside, other=0.0)
    turned = tl.where(at < half, tl.where(at < half, -right, 0.0), left)
    x, c, s = tl.load(X + index, inside), tl.load(C + index, inside), tl.load(S + index, inside)
    tl.store(Y + index, x * c + turned * s, inside)


@triton.jit
def between(X, Y, n, LOW: tl.constexpr, HIGH: tl.constexpr, OTHER: tl.constexpr, B: tl.constexpr, KIND: tl.constexpr):
    """A row of which a mask leaves the lanes from LOW to HIGH, of X LOW elements before: it, its sum or maximum."""
    row, cols = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * n + cols - LOW, mask=(cols >= LOW) & (cols < HIGH) & (cols < n), other=OTHER)
    if KIND == 1:
        x = x * 0.0 + tl.sum(x, 0)
    elif KIND == 2:
        x = x - tl.max(x, 0)
    tl.store(Y + row * n + cols, x, mask=cols < n)


@triton.jit
def of_two_heights(X, Z, Y, U, LOW: tl.constexpr, B: tl.constexpr):
    """Two results of unlike heights, each of lanes from LOW on."""
    cols = tl.arange(0, B)[None, :]
    for_x, for_z = tl.arange(0, 2)[:, None] * B + cols, tl.arange(0, 4)[:, None] * B + cols
    tl.store(Y + for_x, tl.load(X + for_x - LOW, mask=cols >= LOW, other=2.0))
    tl.store(U + for_z, tl.load(Z + for_z - LOW, mask=cols >= LOW, other=3.0))
