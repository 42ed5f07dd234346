"""Kernels whose indices restart within a block (``% 5`` of 16), and loops over lanes that run once."""

import triton
import triton.language as tl


@triton.jit
def converted(X, T, Y):
    at = tl.arange(0, 16)
    tl.store(Y + at, tl.load(X + at) * (at % 5).to(tl.float32))


@triton.jit
def largest(X, T, Y):
    at = tl.arange(0, 16)
    tl.store(Y + at, tl.load(X + at) + tl.maximum(at % 5, 2).to(tl.float32))


@triton.jit
def in_loop(X, T, Y):
    at = tl.arange(0, 16)
    total = tl.zeros([16], tl.float32)
    for i in range(3):
        total += tl.load(X + i * 0 + at) * (at % 5).to(tl.float32)
    tl.store(Y + at, total)


@triton.jit
def loaded(X, T, Y):
    at = tl.arange(0, 16)
    tl.store(Y + at, tl.load(T + at % 5))


@triton.jit
def loaded_or_other(X, T, Y):
    at = tl.arange(0, 16)
    tl.store(Y + at, tl.load(T + at % 5, mask=at < 12, other=7) * 3)


@triton.jit
def rows(X, T, Y):
    row, at = tl.arange(0, 4)[:, None], tl.arange(0, 16)[None, :]
    tl.store(Y + row * 16 + at, tl.load(T + at % 5) * 3 + row * 16 + at)


@triton.jit
def programs(X, T, Y):
    at = tl.program_id(0) * 16 + tl.arange(0, 16)
    loaded = tl.load(T + at % 20)
    tl.store(Y + at, tl.where(loaded > 3, loaded, -loaded))


@triton.jit
def summed(X, T, Y):
    tl.store(Y, tl.sum((tl.arange(0, 16) % 5).to(tl.float32), 0))


@triton.jit
def while_once(X, T, Y, n):
    at = tl.arange(0, 16)
    total = tl.zeros([16], tl.float32)
    i = 0
    while i < n:
        total += tl.load(X + i * 16 + at)
        i += 1
    tl.store(Y + at, total, mask=at % 4 != 1)


@triton.jit
def loaded_count(X, T, Y, n):
    at = tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    total = tl.zeros([4, 4], tl.float32)
    for i in range(tl.load(T)):
        total += tl.load(X + i * 16 + at)
    tl.store(Y + at, total, mask=at < 13)


@triton.jit
def whole_of_subnormal(X, T, Y):
    at = tl.arange(0, 16)
    x = tl.load(X + at)
    tl.store(Y + at, tl.floor(x))
    tl.store(Y + 16 + at, tl.ceil(x))


@triton.jit
def exclusive(X, T, Y):
    at = tl.program_id(0) * 16 + tl.arange(0, 16)
    tl.store(Y + at, (tl.load(X + at) * 1.0).to(tl.int32, bitcast=True), mask=at < 27)


@triton.jit
def largest_place(X, T, Y):
    tl.store(Y, tl.argmax(tl.load(X + tl.arange(0, 16)), 0))


@triton.jit
def weighted_by_column(X, Y, c, T, R: tl.constexpr, C: tl.constexpr):
    """Sums of tiles whose columns a mask ends, with a maximum of columns times their numbers."""
    i, j = tl.arange(0, R)[:, None], tl.arange(0, C)[None]
    acc = tl.zeros([R, C], tl.float32)
    for t in range(T):
        x = tl.load(X + (tl.program_id(0) * T + t) * R * c + i * c + j, mask=j < c, other=0.0)
        acc += x + tl.max(x * (j + 1).to(tl.float32), 0)[None]
    tl.store(Y + tl.program_id(0) * R * c + i * c + j, acc, mask=j < c)
