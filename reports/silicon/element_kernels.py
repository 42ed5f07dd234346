"""The kernels of `reports.silicon.element_rows`, without torch."""

import triton
import triton.language as tl


@triton.jit
def polynomial(x, y, block: tl.constexpr, count: tl.constexpr):
    """Multiply and add."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    own = tl.load(x + at).to(tl.float32)
    result = own
    for _ in tl.static_range(count):
        result = result * own + 0.5
    tl.store(y + at, result.to(tl.bfloat16))


@triton.jit
def selected(x, y, block: tl.constexpr, count: tl.constexpr):
    """Multiply, and add one of two numbers."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    own = tl.load(x + at).to(tl.float32)
    result = own
    for _ in tl.static_range(count):
        result = tl.where(result > 0.25, result * own + 0.5, result * own - 0.5)
    tl.store(y + at, result.to(tl.bfloat16))


@triton.jit
def error(x, y, block: tl.constexpr, count: tl.constexpr):
    """Apply the error function."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    result = tl.load(x + at).to(tl.float32)
    for _ in tl.static_range(count):
        result = tl.math.erf(result * 0.7) * result
    tl.store(y + at, result.to(tl.bfloat16))
