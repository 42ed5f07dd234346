"""Kernels whose loops have one tile apart, or carry integers, and kernels that gather an element for each row."""

import triton
import triton.language as tl


@triton.jit
def peeled_softmax(X, Y, n, HIDES, OTHER: tl.constexpr, SCALE: tl.constexpr, B: tl.constexpr):
    """Softmax of a row: all tiles but the last without a mask, then the last one; stored from the last to the first.

    The mask hides HIDES elements more than there are beyond the row; in the last tile the sum is scaled by SCALE.
    """
    row = tl.program_id(0)
    X += row * n
    Y += row * n
    m = tl.full([B], float("-inf"), tl.float32)
    z = tl.zeros([B], tl.float32)
    last = tl.cdiv(n, B) * B - B
    for start in range(0, last, B):
        cols = start + tl.arange(0, B)
        x = tl.load(X + cols)
        new = tl.maximum(m, x)
        z = tl.where(new == float("-inf"), z, z * tl.exp(m - new) + tl.exp(x - new))
        m = new
    for start in range(last, n, B):
        cols = start + tl.arange(0, B)
        x = tl.load(X + cols, mask=cols < n - HIDES, other=OTHER)
        new = tl.maximum(m, x)
        z = tl.where(new == float("-inf"), z, z * tl.exp(m - new) + tl.exp(x - new) * SCALE)
        m = new
    most = tl.max(m, 0)
    total = tl.sum(z * tl.exp(m - most), 0)
    for start in range(0, B, B):
        cols = last - start + tl.arange(0, B)
        x = tl.load(X + cols, mask=cols < n, other=float("-inf"))
        tl.store(Y + cols, tl.exp(x - most) / total, mask=cols < n)
    for start in range(B, n, B):
        cols = last - start + tl.arange(0, B)
        tl.store(Y + cols, tl.exp(tl.load(X + cols) - most) / total)


@triton.jit
def counted_mean(X, MEAN, n, B: tl.constexpr):
    """Means by lanes, each with a counter of its elements, joined behind the loops."""
    row = tl.program_id(0)
    mean = tl.zeros([B], tl.float32)
    count = tl.zeros([B], tl.int32)
    steps = tl.cdiv(n, B)
    for step in range(steps - 1):
        cols = step * B + tl.arange(0, B)
        x = tl.load(X + row * n + cols)
        mean = mean + (x - mean) / (step + 1)
        count += 1
    for step in range(steps - 1, steps):
        cols = step * B + tl.arange(0, B)
        x = tl.load(X + row * n + cols, mask=cols < n)
        mean = tl.where(cols < n, mean + (x - mean) / (step + 1), mean)
        count += (cols < n).to(tl.int32)
    tl.store(MEAN + row, tl.sum(mean * count) / n)


@triton.jit
def running_place(X, Y, rows, n, R: tl.constexpr, B: tl.constexpr):
    """The index of each row's maximum, tile by tile: of equal elements the first."""
    at = tl.program_id(0) * R + tl.arange(0, R)
    most = tl.full([R], float("-inf"), tl.float32)
    place = tl.zeros([R], tl.int64)
    for start in range(0, n, B):
        cols = start + tl.arange(0, B)
        inside = (at < rows)[:, None] & (cols < n)[None, :]
        x = tl.load(X + at[:, None] * n + cols[None, :], mask=inside, other=float("-inf"))
        best, index = tl.max(x, 1, return_indices=True)
        place = tl.where(best > most, start + index, place)
        most = tl.maximum(best, most)
    tl.store(Y + at, place, mask=at < rows)


@triton.jit
def label_losses(X, L, W, Y, n, C, IGNORED, B: tl.constexpr):
    """The weighted score of each row's label; rows of an ignored label have 0."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    label = tl.load(L + at, mask=at < n, other=0)
    known = (at < n) & (label != IGNORED)
    w = tl.load(W + label, mask=known, other=0.0)
    x = tl.load(X + at * C + label, mask=known, other=0.0)
    tl.store(Y + at, -w * x, mask=at < n)


@triton.jit
def label_gradients(X, L, Y, n, C, R: tl.constexpr, B: tl.constexpr):
    """Rows less 1 at their labels."""
    at, cols = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, B)
    inside = (at < n)[:, None] & (cols < C)[None, :]
    x = tl.load(X + at[:, None] * C + cols[None, :], mask=inside, other=0.0)
    label = tl.load(L + at, mask=at < n)
    y = x - (cols[None, :] == label[:, None])
    tl.store(Y + at[:, None] * C + cols[None, :], y, mask=inside)


@triton.jit
def place_of_any(X, Y, n, LEFT: tl.constexpr, B: tl.constexpr):
    """The index of each row's maximum: of equal elements the first, or any."""
    row, cols = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + row * n + cols, mask=cols < n, other=float("-inf"))
    _, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=LEFT)
    tl.store(Y + row, place)


@triton.jit
def sum_of_seen(X, S, Y, n, B: tl.constexpr):
    """Sums of rows' elements whose number in a list is not 0, tile by tile."""
    row, acc = tl.program_id(0), tl.zeros([B], tl.float32)
    for start in range(0, n, B):
        cols = start + tl.arange(0, B)
        seen = tl.load(S + cols, mask=cols < n, other=0)
        acc += tl.load(X + row * n + cols, mask=(cols < n) & (seen != 0), other=0.0)
    tl.store(Y + row, tl.sum(acc, 0))


@triton.jit
def stored_before_a_loop(X, L, Y, n, B: tl.constexpr):
    """A first tile of a row, and those behind it up to a loaded number."""
    row, cols = tl.program_id(0), tl.arange(0, B)
    tl.store(Y + row * n + cols, tl.load(X + row * n + cols) * 3)
    for start in range(B, tl.load(L + row), B):
        tl.store(Y + row * n + start + cols, tl.load(X + row * n + start + cols) * 2)


@triton.jit
def weighted_behind(X, Y, n, B: tl.constexpr):
    """Sums of a row's elements by lanes, each times its lane behind the loop."""
    row, lane = tl.program_id(0), tl.arange(0, B)
    acc = tl.zeros([B], tl.float32)
    for start in range(0, n, B):
        acc += tl.load(X + row * n + start + lane)
    acc = acc * lane.to(tl.float32)
    tl.store(Y + row, tl.sum(acc, 0))


@triton.jit
def doubled(X, Y, n, SEEN, B: tl.constexpr):
    """A row plus itself, times its sum; in the last tile elements from SEEN on are added to 1."""
    row, sums, last = tl.program_id(0) * n, tl.zeros([B], tl.float32), tl.cdiv(n, B) * B - B
    for start in range(0, last, B):
        sums += tl.load(X + row + start + tl.arange(0, B))
    for start in range(last, n, B):
        cols = start + tl.arange(0, B)
        sums += tl.load(X + row + cols, mask=cols < n, other=0.0)
    total = tl.sum(sums, 0)
    for start in range(0, B, B):
        cols = last - start + tl.arange(0, B)
        x = tl.load(X + row + cols, mask=cols < n, other=0.0)
        tl.store(Y + row + cols, (x + tl.load(X + row + cols, mask=cols < SEEN, other=1.0)) * total, mask=cols < n)
    for start in range(B, n, B):
        cols = last - start + tl.arange(0, B)
        tl.store(Y + row + cols, (tl.load(X + row + cols) + tl.load(X + row + cols)) * total)
