"""Kernels that were once read to wrong values, or whose runs ended in a fault of npusim's own."""

import triton
import triton.language as tl


@triton.jit
def second_loop_later(X, O, N, P, B: tl.constexpr):
    """Two loops over the first part of each row; the second one begins at the second row."""
    p, r = tl.program_id(0), tl.arange(0, B)
    s = 0.0
    for i in range(P):
        s += tl.sum(tl.load(X + (p * P + i) * N + r), 0)
    for i in range(1, P):
        x = tl.load(X + (p * P + i) * N + r)
        tl.store(O + (p * P + i) * N + r, x - s)


@triton.jit
def few_iterations(X, O, H, L, T, N, B: tl.constexpr):
    """A state of lanes with remainders that starts as a loaded block; a program has no iteration."""
    h, r = tl.program_id(0), tl.arange(0, B)
    m, w = r < N, r % 4
    s = tl.load(H + h * N + r, mask=m, other=0.0)
    for t in range(1, tl.load(L + h)):
        x = tl.load(X + (h * T + t) * N + r, mask=m, other=0.0)
        tl.store(O + (h * T + t) * N + r, s + x * w, mask=m)
        s = tl.where(x > 0, s + x, s)


@triton.jit
def in_place_and_o(X, O, N, B: tl.constexpr):
    """A tensor in place, and a second result that is called O."""
    r = tl.program_id(0) * N + tl.arange(0, B)
    m = tl.arange(0, B) < N
    x = tl.load(X + r, mask=m, other=0.0)
    tl.store(X + r, x * 2, mask=m)
    tl.store(O + r, tl.load(X + r, mask=m, other=0.0) + 1, mask=m)


@triton.jit
def least_of_groups(X, O, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """The index of the least element along the last of three axes."""
    p, a, b = tl.program_id(0), tl.arange(0, A)[:, None, None], tl.arange(0, B)[None, :, None]
    x = tl.load(X + p * A * B * C + (a * B + b) * C + tl.arange(0, C)[None, None, :])
    i = tl.arange(0, A)[:, None] * B + tl.arange(0, B)[None, :]
    tl.store(O + p * A * B + i, tl.argmin(x, 2))


@triton.jit
def last_above(X, E, R, N, B: tl.constexpr):
    """The largest index of a positive element of a row, in a loop of one iteration: a maximum of integers."""
    p, cols, last = tl.program_id(0), tl.arange(0, B), -1.0
    for j in range(0, N, B):
        m = j + cols < N
        x = tl.load(X + p * N + j + cols, mask=m, other=0.0)
        last = tl.maximum(last, tl.max(tl.where(m & (x > 0), j + cols, -1), 0).to(tl.float32))
        tl.store(E + p * N + j + cols, x * 2, mask=m)
    tl.store(R + p, last)


@triton.jit
def every_second(X, O, T, N, B: tl.constexpr):
    """A state of lanes with remainders of programs, to which only every second tile of seven is added."""
    b, h = tl.program_id(0) % 3, tl.program_id(0) // 3
    if h >= 2:
        return
    r = b * B + tl.arange(0, B)
    m = r < N
    s = tl.zeros((B,), tl.float32)
    for t in range(T):
        x = tl.load(X + (h * T + t) * N + r, mask=m, other=0.0).to(tl.float32)
        tl.store(O + (h * T + t) * N + r, tl.where(x > 0, s, x), mask=m)
        if t % 2 == 0:
            s = s + x


@triton.jit
def counted_so_far(X, O, N, B: tl.constexpr):
    """The number of positive elements up to each one."""
    r = tl.arange(0, B)
    x = tl.load(X + tl.program_id(0) * N + r)
    tl.store(O + tl.program_id(0) * N + r, tl.cumsum((x > 0).to(tl.int32), 0))
