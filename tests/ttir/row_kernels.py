"""A norm of rows, a program a row, as Liger and Unsloth have it."""

import triton
import triton.language as tl


@triton.jit
def rms_norm(x_ptr, y_ptr, w_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=0).to(tl.float32)
    mean = tl.sum(x * x, 0) / columns
    w = tl.load(w_ptr + at, mask=at < columns, other=0)
    y = x * tl.rsqrt(mean + eps)
    tl.store(y_ptr + row * columns + at, y.to(tl.float16) * w, mask=at < columns)


@triton.jit
def add_one_flat(x, y, stride, size, columns: tl.constexpr, block: tl.constexpr):
    """Add 1 to a block of flat indices of a matrix."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    row, column = at // columns, at % columns
    v = tl.load(x + row * stride + column, mask=at < size, other=0.0)
    tl.store(y + row * stride + column, v + 1.0, mask=at < size)
