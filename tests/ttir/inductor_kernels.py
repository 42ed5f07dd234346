"""Kernels in the form of torch.compile: one block of flat indices, of which quotients and remainders are the axes."""

import triton
import triton.language as tl


@triton.jit
def repeated(in_ptr0, out_ptr0, XBLOCK: tl.constexpr):
    """Two heads of keys, interleaved in rows of 128, each of them twice: (4 heads, 16 rows, 64)."""
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    x0 = xindex % 64
    x1 = (xindex // 64) % 16
    x2 = xindex // 2048
    tmp0 = tl.load(in_ptr0 + (x0 + 64 * x2 + 128 * x1), None).to(tl.float32)
    tl.store(out_ptr0 + xindex, tmp0, None)


@triton.jit
def rotated(in_ptr0, in_ptr1, in_ptr2, out_ptr0, XBLOCK: tl.constexpr):
    """The same with rotary positions: the halves of a row change places, of which one changes its sign."""
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    x0 = xindex % 64
    x1 = (xindex // 64) % 16
    x2 = (xindex // 2048) % 2
    x4 = xindex // 4096
    x3 = xindex % 1024
    tmp0 = tl.load(in_ptr0 + (x0 + 64 * x2 + 128 * x1 + 2048 * x4), None).to(tl.float32)
    tmp1 = tl.load(in_ptr1 + x3, None).to(tl.float32)
    tmp2 = tl.load(in_ptr2 + x3, None).to(tl.float32)
    tmp3 = x0 < 32
    tmp4 = tl.load(in_ptr0 + (32 + 64 * x2 + 128 * x1 + 2048 * x4 + x0), tmp3, other=0.0).to(tl.float32)
    tmp5 = -tmp4
    tmp6 = tl.where(tmp3, tmp5, 0.0)
    tmp7 = tl.load(in_ptr0 + (64 * x2 + 128 * x1 + 2048 * x4 + ((-32) + x0)), x0 >= 32, other=0.0).to(tl.float32)
    tmp8 = tl.where(tmp3, tmp6, tmp7)
    tl.store(out_ptr0 + xindex, tmp0 * tmp1 + tmp8 * tmp2, None)


@triton.jit
def back_rotated(in_ptr0, in_ptr1, out_ptr0, YBLOCK: tl.constexpr, XBLOCK: tl.constexpr):
    """Blocks of 32 columns of 128 rows of 16, of which the halves change places, stored with the axes exchanged."""
    yindex = tl.program_id(1) * YBLOCK + tl.arange(0, YBLOCK)[:, None]
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[None, :]
    y0 = yindex % 64
    y1 = yindex // 64
    tmp0 = tl.load(in_ptr0 + (xindex + 16 * y0 + 1024 * y1)).to(tl.float32)
    tmp1 = y0 < 32
    tmp2 = tl.load(in_ptr1 + (512 + xindex + 16 * y0 + 1024 * y1), tmp1, other=0.0).to(tl.float32)
    tmp3 = tl.load(in_ptr1 + (xindex + 16 * ((-32) + y0) + 1024 * y1), y0 >= 32, other=0.0).to(tl.float32)
    tmp4 = tl.where(y0 >= 32, -tmp3, 0.0)
    tl.store(out_ptr0 + (yindex + 128 * xindex), tmp0 + tl.where(tmp1, tmp2, tmp4))


@triton.jit
def summed_of_nine(a, b, c, d, e, f, g, h, i, out_ptr0, n, XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr):
    """Sums down the rows of nine tensors, tile by tile."""
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    total = tl.full([XBLOCK, R0_BLOCK], 0, tl.float32)
    for first in tl.range(0, n, R0_BLOCK):
        at = x + 64 * (first + tl.arange(0, R0_BLOCK)[None, :])
        one = tl.load(a + at) + tl.load(b + at) + tl.load(c + at) + tl.load(d + at)
        other = tl.load(e + at) + tl.load(f + at) + tl.load(g + at) + tl.load(h + at)
        total = total + (one + other + tl.load(i + at))
    tl.store(out_ptr0 + x, tl.sum(total, 1)[:, None])
