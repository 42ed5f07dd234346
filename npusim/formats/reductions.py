"""Sums and maxima along the last axis with a declared dtype, order and start value."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Literal

import numpy as np

from npusim.errors import FormatError
from npusim.formats.cast import Array, cast, widen, with_canonical_nan
from npusim.formats.elementwise import MAX_NANS, MaxNan, add, check_operands, fma, maximum, mul, pattern_limits
from npusim.formats.float_format import FloatFormat, get_format

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Order = Literal["sequential", "tree_halves", "vector_lanes", "four_chains", "mma_lanes"] | str
ORDERS: tuple[str, ...] = ("sequential", "tree_halves", "vector_lanes", "four_chains", "mma_lanes")
#: Accumulators of ``four_chains``.
CHAINS = 4
#: The number of adjacent elements of a row in each lane, and the numbers of lanes and warps. The first constant is for
#: a product's fragment (PTX ISA, m16n8 and wgmma). For any other layout the name of the order states these numbers,
#: and the number of adjacent columns of a warp if lanes repeat.
MMA_LANES, LANES = (2, 4, 1), re.compile(r"(?:lanes|trees)_(\d+)x(\d+)x(\d+)(?:_(\d+))?")
_TREES = "trees_"
#: Sums of rows, and then of these sums: the order of the rows' sums, the length of the rows, and the order of the sums
#: of sums.
ROWS = re.compile(r"(\w+)/(\d+)\+(\w+)")
#: One operand block of the Ascend vector unit (``WholeReduceSum``, ``BlockReduceSum``: 32 bytes).
VECTOR_BLOCK_BYTES = 32


def reduce_sum(
    x: ArrayLike,
    fmt: str | FloatFormat,
    order: Order = "sequential",
    *,
    start: ArrayLike | None = None,
    times: ArrayLike | None = None,
) -> Array:
    """Return the sum of ``x``, or of ``x * times``, along the last axis, every addition rounded to ``fmt``.

    Parameters
    ----------
    x
        ``(..., n)`` in the format's dtype, n >= 1 (n = 0 only with a start value).
    order
        ``sequential``: ((start + x0) + x1) + ...; without a start, (x0 + x1) + .... ``tree_halves``: x[i] + x[i + n/2],
        again on the halves until one is left; at odd n the element in the middle waits for the next round.
        ``vector_lanes``: the Ascend vector unit: 32-byte blocks, each a tree of neighbours (x0 + x1, x2 + x3, then
        their sums, ...), repeated on the block sums until one is left; lanes beyond n do not take part. If n is a power
        of two, this is one tree of neighbours, whichever of the unit's reductions computes it. ``four_chains``: x0, x4,
        x8, ... left to right, so x1, x5, ... and so on, and then (s0 + s1) + (s2 + s3): the registers of an Ascend
        950's vector unit along transposed scores; a chain without elements takes no part. ``mma_lanes``: a row of a
        GPU's product in the arrangement of its lanes: lane l of four adds columns 2 l, 2 l + 1, 2 l + 8, 2 l + 9, ...
        left to right, and then (s0 + s2) + (s1 + s3), as Triton 3.6 compiles it (PTX: shfl.bfly 2, 1). ``lanes_VxLxW``:
        V adjacent elements in each lane, L lanes, W warps, then again from the first lane: each lane adds its own
        elements left to right, then halves of the lanes are added, then halves of the warps (Triton's blocked layouts;
        H100: every bit). ``lanes_VxLxW_C``: a warp's lanes repeat along C neighbouring columns before the next warp's
        begin (wgmma). ``trees_VxLxW``, ``trees_VxLxW_C``: the same, but each lane adds its own elements as a tree of
        neighbours (PTX of Triton 3.8). ``A/N+B``: rows of N elements each in order A, and then these sums in order B; N
        divides n.
    start
        Scalar or ``(...)``; all orders but ``sequential`` add it last, ``start + sum``.
    times
        Of the format and of a shape that broadcasts with ``x``: the sum is that of products, as compiled code contracts
        it (PTX of Triton 3.6 to 3.9: ``mul x1, x1; fma x0, x0; fma x2, x2; ...``).  If an order adds two elements, the
        second product is rounded and the first is not: the addition is one ``fma``.  Each further product is added to
        an accumulator without rounding it first.  If each lane has one element, the lanes of the lower half add their
        own products to the rounded products of the upper half (in a single warp the upper half has other sums).  72
        sums of an H200: every bit. Only for ``sequential``, ``mma_lanes``, ``lanes_*`` and ``trees_*``.

    Returns
    -------
    ndarray
        Shape ``(...)``.  NaN and Inf follow IEEE additions; a NaN result is canonical.

    Raises `FormatError` for an unknown format or order, another dtype, or nothing to add.

    Notes
    -----
    Neighbours two by two, a binary tree: Ascend C API reference, ``BlockReduceSum``, ``ReduceSum``.
    # Model: where that reference cuts a sum beyond 65504 to 65504 (the unit's saturation mode), ours
    is Inf, as every other operation's.

    Examples
    --------
    >>> reduce_sum(np.ones(4096, np.float16), "float16").item()
    2048.0
    """
    target = get_format(fmt)
    if match := ROWS.fullmatch(order):
        return _of_rows(x, target, match, start, times)
    layout = lane_layout(order)
    if order not in ORDERS and not layout:
        raise FormatError(f"unknown reduction order {order!r}; known: {', '.join(ORDERS)}")
    (values,) = check_operands((x,), target)
    first = _start_of(values, target, start)
    if order == "mma_lanes":
        layout = *MMA_LANES, math.prod(MMA_LANES[:2])
    if times is not None:
        return _of_products(values, times, target, order, layout, first)
    if order == "sequential":
        return _sequential(values, target, first)
    if values.shape[-1] == 0:
        return np.array(first)
    if order == "four_chains":
        chains = [_sequential(values[..., at::CHAINS], target, None) for at in range(min(CHAINS, values.shape[-1]))]
        total = _tree(np.stack(chains, axis=-1), target, of_neighbours=True)
    elif order == "tree_halves":
        total = _tree(values, target)
    elif order == "vector_lanes":
        total = _lanes(values, target, VECTOR_BLOCK_BYTES // target.size_bytes)
    else:
        assert layout is not None
        total = _of_lanes(values, target, *layout, in_trees=order.startswith(_TREES))
    return total if first is None else add(first, total, target)


def rows_order(order: str, columns: int, of_sums: str) -> str:
    """Return the order that sums rows of ``columns`` elements, and then these sums in the order ``of_sums``.

    >>> rows_order("lanes_2x32x1", 64, "sequential")
    'lanes_2x32x1/64+sequential'
    """
    return f"{order}/{columns}+{of_sums}"


def _of_rows(
    x: ArrayLike, target: FloatFormat, match: re.Match[str], start: ArrayLike | None, times: ArrayLike | None
) -> Array:
    """Return sums of rows, and then of these sums; raise `FormatError` if the last row is shorter."""
    order, columns, of_sums = match[1], int(match[2]), match[3]
    (values,) = check_operands((x,), target)
    if not columns or values.ndim == 0 or values.shape[-1] % columns:
        raise FormatError(
            f"a sum of {values.shape[-1:]} elements in order {match[0]}: this order is for rows of {columns} elements"
        )
    shape = *values.shape[:-1], -1, columns
    factors = times if times is None else np.broadcast_to(check_operands((times,), target)[0], values.shape)
    rows = reduce_sum(values.reshape(shape), target, order, times=None if factors is None else factors.reshape(shape))
    return reduce_sum(rows, target, of_sums, start=start)


def lane_layout(order: str) -> tuple[int, int, int, int] | None:
    """Return neighbours, lanes, warps and columns of a warp; None for an order that does not name them, or for numbers
    that are not powers of two.
    """
    if (match := LANES.fullmatch(order)) is None:
        return None
    neighbours, lanes, warps = map(int, match.groups()[:3])
    columns = int(match[4] or neighbours * lanes)
    is_known = all(n > 0 and n & (n - 1) == 0 for n in (neighbours, lanes, warps, columns))
    return (neighbours, lanes, warps, columns) if is_known and columns >= neighbours * lanes else None


def lanes_order(neighbours: int, lanes: int, warps: int, columns: int = 0) -> str:
    """Return the order of lanes and warps with this number of neighbouring ``columns`` each; 0: the number of columns
    that its lanes hold once.

    >>> lanes_order(2, 4, 4, 8), lanes_order(2, 4, 2, 64)
    ('lanes_2x4x4', 'lanes_2x4x2_64')
    """
    repeats = f"_{columns}" if warps > 1 and columns > neighbours * lanes else ""
    return f"lanes_{neighbours}x{lanes}x{warps}{repeats}"


def in_trees(order: str) -> str:
    """Return the order that differs from an order of lanes only in that each lane adds its own values as a tree.

    >>> in_trees("lanes_4x32x4"), in_trees("mma_lanes")
    ('trees_4x32x4', 'trees_2x4x1')
    """
    return (lanes_order(*MMA_LANES) if order == "mma_lanes" else order).replace("lanes_", _TREES)


def normal_order(order: str, size: int) -> str:
    """Return the order of a sum of ``size`` elements, without the lanes and warps that only hold copies of other lanes'
    elements.

    >>> normal_order("lanes_1x32x16", 128), normal_order("lanes_2x4x2_64", 64)
    ('lanes_1x32x4', 'mma_lanes')
    """
    if (layout := lane_layout(order)) is None:
        return order
    neighbours, lanes, warps, columns = layout
    whole = 1 << (size - 1).bit_length()  # a compiler's tile has a power of two of elements
    lanes = min(lanes, max(1, whole // neighbours))
    warps = min(warps, max(1, whole // max(columns, neighbours * lanes)))
    is_mma = (neighbours, lanes, warps) == MMA_LANES
    normal = "mma_lanes" if is_mma else lanes_order(neighbours, lanes, warps, columns)
    return in_trees(normal) if order.startswith(_TREES) else normal


def _start_of(values: Array, target: FloatFormat, start: ArrayLike | None) -> Array | None:
    if values.ndim == 0:
        raise FormatError("a reduction needs at least one axis")
    if start is None:
        if values.shape[-1] == 0:
            raise FormatError("an empty sum needs a start value")
        return None
    (first,) = check_operands((start,), target)
    try:
        return np.broadcast_to(first, values.shape[:-1])
    except ValueError:
        raise FormatError(f"start of shape {first.shape} does not match results of shape {values.shape[:-1]}") from None


def _plan(target: FloatFormat) -> tuple[int, int, float] | None:
    """Return the plan that rounds a lane to ``target``; None if the lane already has that format."""
    if target.name in ("float32", "float64"):
        return None
    return target.mantissa_bits, target.min_exponent, target.max_finite


def _stored(out: Array, target: FloatFormat) -> Array:
    return with_canonical_nan(out, target) if _plan(target) is None else cast(out, target)


def _sequential(values: Array, target: FloatFormat, first: Array | None) -> Array:
    """Sum from left to right; narrow formats are added in wider lanes, where double rounding of an addition is
    innocuous.
    """
    from npusim.formats import reduction_kernels

    shape, columns = values.shape[:-1], values.shape[-1]
    wide = widen(values).reshape(math.prod(shape), columns)
    skip = 0 if first is not None else 1
    begin = wide[:, 0] if first is None else widen(np.ascontiguousarray(first)).reshape(-1)
    body, begin = np.ascontiguousarray(wide[:, skip:]), np.ascontiguousarray(begin)
    out = np.empty(wide.shape[0], wide.dtype)
    plan = _plan(target)
    if plan is None:
        reduction_kernels.sum_rows(body, begin, out)
    else:
        rows = reduction_kernels.ROWS
        scratch = np.empty(rows, np.float64), np.empty((body.shape[1], rows), np.float32)
        reduction_kernels.sum_rows_rounded(body, begin, out, plan, scratch)
    return _stored(out, target).reshape(shape)


def _tree(values: Array, target: FloatFormat, *, of_neighbours: bool = False) -> Array:
    """Fold the upper half onto the lower, or neighbours onto each other, until one element is left."""
    from npusim.formats import reduction_kernels

    shape = values.shape[:-1]
    wide = np.ascontiguousarray(widen(values)).reshape(math.prod(shape), -1)
    out = np.empty(wide.shape[0], wide.dtype)
    plan = _plan(target)
    row = np.empty(wide.shape[1], np.float64 if plan else wide.dtype)
    reduction_kernels.fold_rows(wide, row, out, of_neighbours, plan)
    return _stored(out, target).reshape(shape)


def _filled(values: Array, multiple: int, empty: float = -0.0) -> Array:
    """Return rows whose length is a multiple of a number of columns, filled up with ``empty``: -0 is the value that
    changes no sum.
    """
    missing = -values.shape[-1] % multiple
    if not missing:
        return values
    return np.concatenate([values, np.full((*values.shape[:-1], missing), empty, values.dtype)], -1)


def in_lanes(values: Array, neighbours: int, lanes: int, warps: int, columns: int, *, empty: float = -0.0) -> Array:
    """Return ``(..., warps, lanes, n)``: the columns of each lane from left to right."""
    shape, filled = values.shape[:-1], _filled(values, columns * warps, empty)
    repeats = columns // (neighbours * lanes)
    cut = filled.reshape(*shape, -1, warps, repeats, lanes, neighbours)
    cut = np.moveaxis(cut, (-4, -2), (-5, -4))
    return np.ascontiguousarray(cut).reshape(*shape, warps, lanes, -1)


def _of_lanes(
    values: Array, target: FloatFormat, neighbours: int, lanes: int, warps: int, columns: int, *, in_trees: bool
) -> Array:
    """Sum each lane's columns left to right or as a tree of neighbours, and the sums across lanes and warps."""
    own = in_lanes(values, neighbours, lanes, warps, columns)
    sums = _tree(own, target, of_neighbours=True) if in_trees else _sequential(own, target, None)
    return _tree(_tree(sums, target), target)


def _of_products(
    x: Array,
    times: ArrayLike,
    target: FloatFormat,
    order: str,
    layout: tuple[int, int, int, int] | None,
    first: Array | None,
) -> Array:
    """Return the sum of products: as in `_of_lanes` and `_sequential`, with one ``fma`` for each addition within a
    lane.
    """
    (y,) = check_operands((times,), target)
    x, y = np.broadcast_arrays(x, y)
    if order == "sequential":
        return _chained(x, y, target, first)
    if layout is None:
        raise FormatError(f"a sum of products in order {order!r}: allowed: sequential, mma_lanes, lanes, trees")
    # A missing element has the product -0, which changes no sum.
    x, y = (in_lanes(v, *layout, empty=empty) for v, empty in ((x, -0.0), (y, 1.0)))
    # a lane adds its own product to the rounded product that the first shuffle brings
    if x.shape[-1] == 1 < x.shape[-2]:
        half = x.shape[-2] // 2
        x, y = (np.concatenate([v[..., :half, :], v[..., half:, :]], -1) for v in (x, y))
        sums = _chained(x, y, target, None)
    elif order.startswith(_TREES) and x.shape[-1] > 1:
        x, y = _filled(x, 2), _filled(y, 2, 1.0)
        pairs = fma(x[..., ::2], y[..., ::2], mul(x[..., 1::2], y[..., 1::2], target), target)
        sums = _tree(pairs, target, of_neighbours=True)
    else:
        sums = _chained(x, y, target, None)
    total = _tree(_tree(sums, target), target)
    return total if first is None else add(first, total, target)


def _chained(x: Array, y: Array, target: FloatFormat, first: Array | None) -> Array:
    """Sum products left to right in one accumulator, ``first`` or the product of the second element."""
    if first is None:
        first = mul(x[..., 0], y[..., 0], target)
        if x.shape[-1] > 1:
            first = fma(x[..., 0], y[..., 0], mul(x[..., 1], y[..., 1], target), target)
        x, y = x[..., 2:], y[..., 2:]
    for at in range(x.shape[-1]):
        first = fma(x[..., at], y[..., at], first, target)
    return np.asarray(first)


def _lanes(values: Array, target: FloatFormat, width: int) -> Array:
    """Reduce blocks of ``width`` lanes to one value each until one value is left."""
    while values.shape[-1] > 1:  # Model: a masked lane adds -0
        cut = _filled(values, width).reshape(*values.shape[:-1], -1, width)
        values = _tree(cut, target, of_neighbours=True)
    return np.ascontiguousarray(values[..., 0])


def reduce_max(
    x: ArrayLike, fmt: str | FloatFormat, *, start: ArrayLike | None = None, nan: MaxNan = "number"
) -> Array:
    """Return the maximum of ``x`` along its last axis; exact, so the order does not matter.

    ``x`` is ``(..., n)`` in the format's dtype, the result ``(...)``.  Numbers have precedence over NaN, and a row of
    NaN gives the canonical NaN; with ``nan="propagate"`` any NaN gives the canonical NaN. +0 is the larger of +0 and
    -0, as in :func:`npusim.formats.maximum`.

    Raises `FormatError` for an unknown format or rule, another dtype, or nothing to compare.
    """
    from npusim.formats import elementwise_kernels

    target = get_format(fmt)
    if nan not in MAX_NANS:
        raise FormatError(f"unknown NaN rule {nan!r} of max; known: {', '.join(MAX_NANS)}")
    (values,) = check_operands((x,), target)
    first = _start_of(values, target, start)
    if values.shape[-1] == 0:
        return np.array(first)
    signed = np.dtype(f"i{target.size_bytes}")
    rows = math.prod(values.shape[:-1])
    patterns = np.ascontiguousarray(values).reshape(rows, -1).view(signed)
    best = np.empty(patterns.shape[0], signed)
    elementwise_kernels.max_rows(patterns, best, pattern_limits(target))
    result = best.view(target.dtype).reshape(values.shape[:-1])
    if nan == "propagate":
        result = np.where(np.isnan(widen(values)).any(axis=-1), cast(np.float64(np.nan), target), result)
    return result if first is None else maximum(first, result, target, nan=nan)
