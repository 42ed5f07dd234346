"""The kernels of `reports.silicon.met_loops`, without torch."""

import triton
import triton.language as tl


@triton.jit
def sums(x, y, columns, block: tl.constexpr):
    """Store the sum of each row; the block adds each tile of the row before it loads the next one."""
    row = tl.program_id(0)
    at = tl.arange(0, block)
    total = 0.0
    for first in range(0, columns, block):
        total += tl.sum(tl.load(x + row * columns + first + at).to(tl.float32))
    tl.store(y + row, total)


@triton.jit
def logarithms(x, y, columns, block: tl.constexpr):
    """Store the logarithm of each row's sum of exponentials, by a maximum that follows the tiles."""
    row = tl.program_id(0)
    at = tl.arange(0, block)
    most = -1e30
    total = 0.0
    for first in range(0, columns, block):
        tile = tl.load(x + row * columns + first + at).to(tl.float32)
        new = tl.maximum(most, tl.max(tile))
        total = total * tl.exp(most - new) + tl.sum(tl.exp(tile - new))
        most = new
    tl.store(y + row, most + tl.log(total))
