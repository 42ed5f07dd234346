"""The kernels of `reports.silicon.in_flight`, without torch."""

import triton
import triton.language as tl


@triton.jit
def adds(x, y, size, loads: tl.constexpr, block: tl.constexpr):
    """Store the sum of tiles of several tensors, which follow one another in memory."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.full([block], 1.0, tl.float32)
    for i in tl.static_range(loads):
        total += tl.load(x + i * size + at)
    tl.store(y + at, total)


@triton.jit
def copies(x, y, count, stride, block: tl.constexpr):
    """Copy tiles, one after the other."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    for _ in range(count):
        tl.store(y + at, tl.load(x + at) + 1.0)
        x += stride
        y += stride


@triton.jit
def reads(x, y, count, stride, block: tl.constexpr, stages: tl.constexpr):
    """Add up tiles."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for _ in tl.range(0, count, num_stages=stages):
        total += tl.load(x + at)
        x += stride
    tl.store(y + at, total)


@triton.jit
def fills(y, count, stride, block: tl.constexpr):
    """Store tiles of ones."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    for _ in range(count):
        tl.store(y + at, tl.full([block], 1.0, tl.float32))
        y += stride
