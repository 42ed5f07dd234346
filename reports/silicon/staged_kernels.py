"""The kernels of `reports.silicon.staged`, without torch."""

import triton
import triton.language as tl


@triton.jit
def reads(x, y, count, stride, block: tl.constexpr, stages: tl.constexpr):
    """Add up tiles."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for _ in tl.range(0, count, num_stages=stages):
        total += tl.load(x + at).to(tl.float32)
        x += stride
    tl.store(y + at, total)


@triton.jit
def pairs(x, z, y, count, stride, block: tl.constexpr, stages: tl.constexpr):
    """Add up the products of tiles of two tensors."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for _ in tl.range(0, count, num_stages=stages):
        total += tl.load(x + at).to(tl.float32) * tl.load(z + at).to(tl.float32)
        x += stride
        z += stride
    tl.store(y + at, total)


@triton.jit
def moves(x, y, count, stride, block: tl.constexpr, stages: tl.constexpr):
    """Copy tiles, and add 1."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    for _ in tl.range(0, count, num_stages=stages):
        tl.store(y + at, tl.load(x + at) + 1.0)
        x += stride
        y += stride


@triton.jit
def sums(x, y, columns, block: tl.constexpr, stages: tl.constexpr):
    """Store the sum of squares of a row, which is read tile by tile."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for i in tl.range(0, columns, block, num_stages=stages):
        v = tl.load(x + row * columns + i + at).to(tl.float32)
        total += v * v
    tl.store(y + row, tl.sum(total, 0))
