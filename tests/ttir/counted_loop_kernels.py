"""Kernels with loops that have a condition, and a kernel whose programs store different integers."""

import triton
import triton.language as tl


@triton.jit
def doubled_rows(X, Y, n, G, B: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, B)
    while row < n:
        tl.store(Y + row * B + at, tl.load(X + row * B + at) * 2.0)
        row += G


@triton.jit
def summed_rows(X, Y, n, G, B: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, B)
    total = tl.zeros([B], tl.float32)
    largest = tl.full([B], -1e30, tl.float32)
    while row < n:
        x = tl.load(X + row * B + at)
        total += x
        row += G
        largest = tl.maximum(largest, x)
    tl.store(Y + tl.program_id(0) * B + at, total + largest)


@triton.jit
def moved_rows(X, I, J, Y, n, width, G, B: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, B)
    while row < n:
        source, target = tl.load(I + row), tl.load(J + row)
        for i in range(tl.cdiv(width, B)):
            column = i * B + at
            x = tl.load(X + source * width + column, mask=column < width)
            tl.store(Y + target * width + column, x, mask=column < width)
        row += G


@triton.jit
def last_row(X, Y, n, G, B: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, B)
    while row < n:
        row += G
    tl.store(Y + tl.program_id(0) * B + at, tl.load(X + at) * row)


@triton.jit
def groups_of_experts(C, Y, P, E: tl.constexpr, B: tl.constexpr):
    expert, all_of = tl.program_id(0), tl.arange(0, E)
    padded = tl.cdiv(tl.load(C + all_of), B) * B
    first = tl.sum(tl.where(all_of < expert, padded, 0))
    count = tl.load(C + expert)
    for start in range(0, tl.cdiv(count, B) * B, B):
        at = start + tl.arange(0, B)
        tl.store(Y + first + at, expert)
        tl.store(P + first + at, tl.where(at >= count, 1, 0))
