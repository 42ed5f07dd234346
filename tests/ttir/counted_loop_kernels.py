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


@triton.jit
def once_in_each_program(X, Y, plane, n, M: tl.constexpr, N: tl.constexpr):
    p, c = tl.program_id(0), tl.arange(0, N)
    r = p * M + tl.arange(0, M)
    at, ok = r[:, None] * n + c[None, :], c[None, :] < n
    total = tl.zeros([M, N], tl.float32)
    for j in range(p, 2 * p + 1):
        total += tl.load(X + at + j * plane, mask=ok)
    tl.store(Y + at, total, mask=ok)


@triton.jit
def later_iterations(X, Y, plane, steps, FIRST: tl.constexpr, N: tl.constexpr):
    p, c = tl.program_id(0), tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for j in range(steps):
        x = tl.load(X + p * N + c + j * plane)
        if j > FIRST:
            total = total * 0.5 + x
    tl.store(Y + p * N + c, tl.where((c ^ p) % 3 != 1, total, 0.5))


@triton.jit
def other_rows_of_later_programs(X, Y, Z, D: tl.constexpr, B: tl.constexpr):
    r, c = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, D)
    x = tl.load(X + r[:, None] * D + c[None, :])
    y = x + 1.0
    if tl.program_id(0) > 0:
        y = x
    tl.store(Y + r[:, None] * D + c[None, :], y)
    tl.store(Z + r[:, None] * D + c[None, :], x)
