"""Kernels of which a load is not read, and kernels whose result may be a value of hidden lanes."""

import triton
import triton.language as tl


@triton.jit
def chosen(X, Z, T, n, first, B: tl.constexpr):
    """The largest element of rows of Z up to a number of rows, of X from there on, and 0."""
    r, acc = tl.program_id(0), 0.0
    for j in range(0, n, B):
        c = j + tl.arange(0, B)
        x = tl.load(X + r * n + c, mask=c < n, other=-float("inf"))
        z = tl.load(Z + r * n + c, mask=c < n, other=-float("inf"))
        acc = tl.maximum(acc, tl.max(tl.where(r < first, z, x), 0))
    tl.store(T + r, acc)


@triton.jit
def largest(Z, T, n, BR: tl.constexpr, B: tl.constexpr):
    """The largest exponential of a row, and of a number that hidden lanes have."""
    r, c = tl.program_id(0) * BR + tl.arange(0, BR)[:, None], tl.arange(0, B)[None]
    z = tl.load(Z + r * n + c, mask=c < n, other=1.5)
    tl.store(T + r, tl.max(tl.exp(z * 0.3), 1)[:, None])


@triton.jit
def signs(X, M, n, B: tl.constexpr):
    """Whether elements are above 0, in two stores of a program."""
    at = tl.program_id(0) * 2 * B + tl.arange(0, B)
    more = at + B
    tl.store(M + at, tl.load(X + at, mask=at < n, other=0.0) > 0, mask=at < n)
    tl.store(M + more, tl.load(X + more, mask=more < n, other=0.0) > 0, mask=more < n)
