"""Cumulative sums along rows, and the inverse of a unit lower triangular tile, each with its order of sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.errors import FormatError
from npusim.formats.elementwise import add, check_operands, fma, mul
from npusim.formats.float_format import FloatFormat, get_format
from npusim.formats.matmul import matmul
from npusim.formats.mma_arithmetic import ARITHMETICS, get_arithmetic
from npusim.formats.reductions import reduce_sum

if TYPE_CHECKING:
    from npusim.formats.cast import Array

#: Orders of a cumulative sum; the first needs no lanes.
SCAN_ORDERS = ("sequential", "warps")
#: Orders of the inverse of a triangular tile.
INVERSE_ORDERS = ("rows", "blocks")
#: Number of lanes of a warp; a lane adds the value of the lane 1, 2, 4, ... places before it, step by step.
WARP = 32
#: Arithmetic of float32 products that are multiply-adds, rounded once, in the order of k.
IEEE = "ieee.f32"
#: Edge of the blocks whose inverses come first (flash-linear-attention, ``solve_tril``: BC).
BLOCK = 16
HALF = BLOCK // 2


def cumulative_sum(
    x: Any, fmt: str | FloatFormat, order: str = "sequential", *, every: int = 0, reverse: bool = False
) -> Array:
    """Return the cumulative sums of ``x`` along its last axis, each addition rounded to ``fmt``.

    Parameters
    ----------
    x
        ``(..., n)`` in the format's dtype, n >= 1.
    order
        ``sequential``: element i is the previous sum plus x_i (Ascend C's ``CumSum``: transposed, row after row).
        ``warps``: within every 32 columns, element i adds the sum at i - 1, then the sums at i - 2, i - 4, i - 8 and i
        - 16, each with its value before the step; then the last elements of the earlier groups of 32, added from left
        to right, are added (Triton's ``tl.cumsum``, one element per lane).
    every
        Columns after which sums restart; 0: never within a row.
    reverse
        Sums run from the last element to the first, in the mirrored order; groups of 32 are counted from the first
        element.

    Returns
    -------
    ndarray
        Shape of ``x``.  NaN and Inf follow IEEE additions, so that all elements after a NaN of a row are NaN.

    Raises `FormatError` for an unknown format or order, or another dtype.
    """
    target = get_format(fmt)
    if order not in SCAN_ORDERS:
        raise FormatError(f"unknown order of cumulative sums {order!r}; known: {', '.join(SCAN_ORDERS)}")
    (values,) = check_operands((x,), target)
    n = values.shape[-1]
    each = every or n
    if n > each:
        parts = [
            cumulative_sum(values[..., at : at + each], target, order, reverse=reverse) for at in range(0, n, each)
        ]
        return np.concatenate(parts, -1)
    if reverse:
        zeros = np.zeros((*values.shape[:-1], -n % WARP if n > WARP else 0), values.dtype)
        mirrored = np.concatenate([values, zeros], -1)[..., ::-1]
        return np.ascontiguousarray(cumulative_sum(mirrored, target, order)[..., ::-1][..., :n])
    if order == "sequential":
        return _left_to_right(values, target)
    runs = [_doubled(values[..., at : at + WARP], target) for at in range(0, n, WARP)]
    before = None
    for i, run in enumerate(runs):
        runs[i] = run if before is None else add(np.broadcast_to(before, run.shape), run, target)
        before = run[..., -1:] if before is None else add(before, run[..., -1:], target)
    return np.concatenate(runs, -1)


def _left_to_right(values: Array, target: FloatFormat) -> Array:
    sums = np.array(values)
    for at in range(1, values.shape[-1]):
        sums[..., at] = add(sums[..., at - 1], values[..., at], target)
    return sums


def _doubled(values: Array, target: FloatFormat) -> Array:
    step, sums = 1, np.array(values)
    while step < values.shape[-1]:
        sums[..., step:] = add(sums[..., :-step], sums[..., step:], target)
        step *= 2
    return sums


def inverse(x: Any, fmt: str | FloatFormat, order: str = "rows", *, arithmetic: str = IEEE) -> Array:
    """Return the inverse of I + L of each square of ``x``, where L is the part below its diagonal; the rest is not
    read.

    Parameters
    ----------
    x
        ``(..., m, n)`` in the format's dtype: squares of n columns, one below another; the last square may have fewer
        rows.
    order
        ``rows``: row i begins as row i of I; for j = 0, 1, ..., i - 1 the inverse's row j times L_ij is subtracted, by
        a multiply-add rounded once (forward substitution, as a vector unit does it). ``blocks``:
        flash-linear-attention's ``solve_tril`` as Triton 3.6 compiles it for sm_90.  Blocks of 16 on the diagonal, row
        by row: a = -L_i, then a + the sum over j of a_j times row j; for rows j and j + 8, the product of the later row
        is rounded, and the product of the earlier row is added to it by a multiply-add; then halves are added.  Below
        these blocks, one diagonal after another: block (i, j) is -(X_ii L_ij) X_jj next to the diagonal, else -X_ii
        times the sum of L_ik X_kj, k from j on; products by ``arithmetic``, a sum of them in one accumulator.
    arithmetic
        Arithmetic of the products of blocks, a name in `ARITHMETICS` whose operands and sums are float32 in memory.

    Returns
    -------
    ndarray
        ``(..., m, n)``: each square has 1 on its diagonal, 0 above it.  NaN and Inf follow IEEE operations.

    Raises `FormatError` for an unknown format or order, another dtype, and ``blocks`` in another format than float32.
    """
    target = get_format(fmt)
    (values,) = check_operands((x,), target)
    if order not in INVERSE_ORDERS:
        raise FormatError(f"unknown order of an inverse {order!r}; known: {', '.join(INVERSE_ORDERS)}")
    if order == "blocks" and target.name != "float32":
        raise FormatError(f"inverse in order 'blocks' of {target.name}: its products need float32")
    if values.ndim < 2:
        raise FormatError(f"inverse of an array of shape {values.shape}: it needs at least two axes")
    *lead, rows, n = values.shape
    filled = np.pad(values, [(0, 0)] * len(lead) + [(0, -rows % n), (0, 0)])
    squares = filled.reshape(*lead, -1, n, n)
    inverses = _substituted(squares, target) if order == "rows" else _by_blocks(squares, target, arithmetic)
    return np.ascontiguousarray(inverses.reshape(*lead, -1, n)[..., :rows, :])


def of_float32(unit: str) -> str:
    """Return the arithmetic of float32 operands on the tensor cores that have ``unit``: TF32, or `IEEE` if the unit has
    no TF32.

    >>> of_float32("hopper.mma.k16.f16.f32"), of_float32("volta.mma.k4.f16.f32")
    ('hopper.mma.k8.tf32.f32', 'ieee.f32')
    """
    name = f"{unit.partition('.')[0]}.mma.k8.tf32.f32"
    return name if name in ARITHMETICS else IEEE


def _identity(like: Array) -> Array:
    return np.broadcast_to(np.eye(like.shape[-1], dtype=like.dtype), like.shape).copy()


def _substituted(values: Array, target: FloatFormat) -> Array:
    found = _identity(values)
    # row j is subtracted from all rows below it at once; for each element, the order is still that of j
    for j in range(values.shape[-1] - 1):
        below, column, row = found[..., j + 1 :, :], values[..., j + 1 :, j : j + 1], found[..., j : j + 1, :]
        found[..., j + 1 :, : j + 1] = fma(-column, row[..., : j + 1], below[..., : j + 1], target)
    return found


def _by_blocks(values: Array, target: FloatFormat, arithmetic: str) -> Array:
    n = values.shape[-1]
    filled = -n % BLOCK
    padded = np.pad(values, [(0, 0)] * (values.ndim - 2) + [(0, filled)] * 2)
    count, unit = padded.shape[-1] // BLOCK, get_arithmetic(arithmetic)
    cut = [[padded[..., r : r + BLOCK, c : c + BLOCK] for c in range(0, n, BLOCK)] for r in range(0, n, BLOCK)]

    def times(a: Array, b: Array, total: Array | None = None) -> Array:
        return matmul(np.ascontiguousarray(a), np.ascontiguousarray(b), total, arithmetic=unit)

    found = {(i, i): _of_block(cut[i][i], target) for i in range(count)}
    for apart in range(1, count):
        for j in range(count - apart):
            i = j + apart
            if apart == 1:
                found[i, j] = -times(times(found[i, i], cut[i][j]), found[j, j])
                continue
            total = times(cut[i][j], found[j, j])
            for k in range(j + 1, i):
                total = times(cut[i][k], found[k, j], total)
            found[i, j] = -times(found[i, i], total)
    whole = _identity(padded)
    for (i, j), block in found.items():
        whole[..., i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] = block
    return np.ascontiguousarray(whole[..., :n, :n])


def _of_block(values: Array, target: FloatFormat) -> Array:
    found = -np.tril(values, -1)
    for i in range(2, BLOCK):
        row, turned = found[..., i, :].copy(), np.ascontiguousarray(found.swapaxes(-1, -2))
        repeated = np.broadcast_to(row[..., None, :], found.shape)
        late = mul(repeated[..., HALF:], turned[..., HALF:], target)
        both = fma(repeated[..., :HALF], turned[..., :HALF], late, target)
        found[..., i, :] = add(row, reduce_sum(both, target, "tree_halves"), target)
    return found + np.eye(BLOCK, dtype=found.dtype)
