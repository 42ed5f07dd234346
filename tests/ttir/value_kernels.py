"""Kernels of comparisons, maxima and blocks of one element, for `test_values`."""

import triton
import triton.language as tl


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def chosen(X, Y, Z, N, B: tl.constexpr, HOW: tl.constexpr):
    p, r = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + p * N + r, mask=r < N, other=0.0)
    y = tl.load(Y + p * N + r, mask=r < N, other=0.0)
    if HOW == "larger":
        z = tl.where(x > y, 1.0, x)
    elif HOW == "bounded":
        z = tl.where(x > 1.0, 1.0, x)
    elif HOW == "cleaned":
        z = tl.where(x != x, 7.0, x)  # noqa: PLR0124 - of NaN
    elif HOW == "equal":
        z = tl.where(x == y, 1.0, 2.0)
    elif HOW == "infinite":
        z = tl.where(x == float("inf"), 0.0, y)
    elif HOW == "at least":
        z = tl.where(x >= y, x, y)
    elif HOW == "both":
        z = tl.where((x > 0) & ~(y >= 1.0) | (x == y), x, y)
    elif HOW == "counted":
        z = (x > y).to(tl.float32)
    tl.store(Z + p * N + r, z.to(Z.dtype.element_ty), mask=r < N)


@triton.jit
def within(X, Z, N, B: tl.constexpr):
    """A mask of values and indices."""
    p, r = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + p * N + r, mask=r < N, other=-float("inf"))
    most = tl.max(tl.where((r < N) & (x < 2.0), x, -float("inf")), 0)
    tl.store(Z + p * N + r, tl.where(x == most, 1.0, x), mask=r < N)


@triton.jit
def extremes(X, Y, Z, N, B: tl.constexpr, HOW: tl.constexpr, IS_NAN: tl.constexpr):
    p, r = tl.program_id(0), tl.arange(0, B)
    nan: tl.constexpr = tl.PropagateNan.ALL if IS_NAN else tl.PropagateNan.NONE
    x = tl.load(X + p * N + r, mask=r < N, other=-float("inf"))
    y = tl.load(Y + p * N + r, mask=r < N, other=-float("inf"))
    if HOW == "maximum":
        z = tl.maximum(x, y, propagate_nan=nan)
    elif HOW == "minimum":
        z = tl.minimum(x, y, propagate_nan=nan)
    elif HOW == "clamp":
        z = tl.clamp(x, -1.0, 2.0, propagate_nan=nan)
    elif HOW == "row":
        z = x - (tl.reduce(x, 0, larger) if IS_NAN else tl.max(x, 0))
    tl.store(Z + p * N + r, z, mask=r < N)


@triton.jit
def rolled(X, Z, M, N, BM: tl.constexpr, BN: tl.constexpr, IS_NAN: tl.constexpr):
    """The largest of each column of a block of rows."""
    p, rm, rn = tl.program_id(0), tl.arange(0, BM), tl.arange(0, BN)
    x = tl.load(X + (p * BM + rm)[:, None] * N + rn[None, :], mask=rn[None, :] < N, other=0.0)
    tl.store(Z + p * N + rn, tl.reduce(x, 0, larger) if IS_NAN else tl.max(x, 0), mask=rn < N)


@triton.jit
def spread(X, Y, M, N, BM: tl.constexpr, B: tl.constexpr, HOW: tl.constexpr):
    """One element for all lanes of a block, or for those of a row."""
    p, r = tl.program_id(0), tl.arange(0, B)
    if HOW == "lanes":
        tl.store(Y + p * N + r, tl.load(X + p * N + r * 0, mask=r < N), mask=r < N)
    elif HOW == "some lanes":
        tl.store(Y + p * N + r, tl.load(X + p * N + r * 0, mask=r < N - 10, other=5.0), mask=r < N)
    elif HOW == "number":
        tl.store(Y + p * N + r, tl.broadcast_to(tl.load(X + p * N), (B,)), mask=r < N)
    elif HOW == "maximum":
        x = tl.load(X + p * N + r, mask=r < N, other=-float("inf"))
        tl.store(Y + p * N + r, tl.broadcast_to(tl.max(x, 0), (B,)), mask=r < N)
    elif HOW == "hidden":
        x = tl.load(X + p * N + r * 0, mask=r < N, other=0.0)
        tl.store(Y + p * N + r, tl.broadcast_to(tl.max(x, 0), (B,)), mask=r < N)
    elif HOW == "loop":
        for j in range(0, N, B):
            c = j + r
            tl.store(Y + p * N + c, tl.load(X + p * N + c * 0 + j, mask=c < N, other=0.0), mask=c < N)
    else:
        rows = p * BM + tl.arange(0, BM)
        inside = (rows[:, None] < M) & (r[None, :] < N)
        x = tl.load(X + rows[:, None] * N + r[None, :] * 0, mask=inside, other=0.0)
        tl.store(Y + rows[:, None] * N + r[None, :], x, mask=inside)


@triton.jit
def clamped(X, Y, B: tl.constexpr, IS_ALIKE: tl.constexpr):
    """Values between a number and its opposite, or between others."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(X + i)
    tl.store(Y + i, tl.clamp(x, -1.0, 1.0) if IS_ALIKE else tl.clamp(x, -3.0, 2.0))


@triton.jit
def sums_of_some(X, Y, n, end, B: tl.constexpr):
    """The sum of a row's first elements, tile by tile, and of none where ``end`` is 0."""
    row, total = tl.program_id(0), tl.zeros([B], tl.float32)
    for i in range(0, end, B):
        cols = i + tl.arange(0, B)
        total += tl.load(X + row * n + cols, mask=cols < end, other=0.0)
    x = tl.load(X + row * n + tl.arange(0, B))
    tl.store(Y + row * B + tl.arange(0, B), x + tl.sum(total))


@triton.jit
def running_place(X, Y, n, first, R: tl.constexpr, B: tl.constexpr):
    """The index of each row's largest element from ``first`` on, tile by tile."""
    rows = tl.arange(0, R)
    most, place = tl.full([R], float("-inf"), tl.float32), tl.full([R], 0, tl.int32)
    for s in range(first, n, B):
        cols = s + tl.arange(0, B)
        x = tl.load(X + rows[:, None] * n + cols[None, :], mask=(cols < n)[None, :], other=float("-inf"))
        best, i = tl.max(x, 1, return_indices=True)
        place = tl.where(best > most, s + i, place)
        most = tl.maximum(best, most)
    tl.store(Y + rows, place)


@triton.jit
def concatenated(X, Y, B: tl.constexpr):
    """Two blocks in one, in any order."""
    x = tl.load(X + tl.arange(0, B))
    tl.store(Y + tl.arange(0, 2 * B), tl.cat(x, 2.0 * x, can_reorder=True))


@triton.jit
def counted(X, Y, B: tl.constexpr):
    """How many numbers are above 0, by all programs together."""
    x = tl.load(X + tl.program_id(0) * B + tl.arange(0, B))
    tl.atomic_add(Y, tl.sum((x > 0).to(tl.int32)))
