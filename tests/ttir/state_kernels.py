"""Loops that store a state in each iteration, as the passes of states between chunks do."""

import triton
import triton.language as tl


@triton.jit
def chain(x, out, count, stride, block: tl.constexpr):
    """Load a tile, add it to a state, and store this state: `reports.silicon.passes.chain`."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    state = tl.zeros([block], tl.float32)
    for _ in range(count):
        state = state * 0.5 + tl.load(x + at)
        tl.store(out + at, state)
        x += stride
        out += stride


@triton.jit
def decayed(x, g, out, count, stride, size, block: tl.constexpr):
    """The same with a decay of each iteration, and a mask: loads of a lane wait for one another."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    state = tl.zeros([block], tl.float32)
    for c in range(count):
        new = tl.load(x + at, mask=at < size, other=0.0)
        state = state * tl.exp(tl.load(g + c)) + new
        tl.store(out + at, state.to(tl.bfloat16), mask=at < size)
        x += stride
        out += stride


@triton.jit
def columns_as_rows(x, out, stride, rows: tl.constexpr, columns: tl.constexpr):
    """Store columns as rows: `reports.silicon.strided.strided`."""
    h = tl.program_id(0) * columns + tl.arange(0, columns)
    r = tl.program_id(1) * rows + tl.arange(0, rows)
    loaded = tl.load(x + h[:, None] + r[None, :] * stride).to(tl.float32)
    tl.store(out + h[:, None] * (tl.num_programs(1) * rows) + r[None, :], loaded)


@triton.jit
def last_sum(x, out, stride, count, block: tl.constexpr):
    """Store the sum of a tile over that of the tile before it."""
    for k in range(0, count, block):
        c = k + tl.arange(0, block)
        tile = tl.load(x + tl.program_id(0) * stride + c, mask=c < count, other=0.5)
        tl.store(out + tl.program_id(0), tl.sum(tile, 0))


@triton.jit
def scaled_rows(x, y, w, rows, columns, each: tl.constexpr, block: tl.constexpr, sums: tl.constexpr):
    """Store rows times a vector: `reports.silicon.row_loops.scaled_rows`."""
    at = tl.arange(0, block)
    own = tl.load(w + at, mask=at < columns, other=0.0)
    first = tl.program_id(0) * each
    for i in range(first, tl.minimum(first + each, rows)):
        row = tl.load(x + i * columns + at, mask=at < columns, other=0.0).to(tl.float32) * own
        if sums:
            row = row / (1.0 + tl.sum(row * row))
        tl.store(y + i * columns + at, row.to(y.dtype.element_ty), mask=at < columns)
