"""The kernel of `reports.silicon.repeats`, without torch."""

import triton
import triton.language as tl


@triton.jit
def sums(x, y, inputs: tl.constexpr, outputs: tl.constexpr, in_place: tl.constexpr, size, block: tl.constexpr):
    """Store the sum of tiles of several tensors to each of several tensors; each tensor follows the one before."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    total = tl.full([block], 1.0, tl.float32)
    for i in tl.static_range(inputs):
        total += tl.load(x + i * size + at)
    for i in tl.static_range(outputs):
        tl.store((x if in_place else y) + i * size + at, total)
