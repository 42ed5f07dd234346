"""Matrix multiplication as a named matrix unit computes it, every bit."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from npusim.errors import FormatError
from npusim.formats.cast import Array, cast, scale_values, widen, with_canonical_nan
from npusim.formats.float_format import FloatFormat, get_format
from npusim.formats.mma_arithmetic import E8M0, MmaArithmetic, get_arithmetic
from npusim.formats.mma_paths import MmaProblem, multiply

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

#: Environment variable that states the number of threads if ``threads`` is not given.
THREADS_VARIABLE = "NPUSIM_THREADS"


def _thread_count(threads: int | None) -> int:
    """Return ``threads``, else ``NPUSIM_THREADS``, else 1.

    Raises `FormatError` if the number is not a positive integer.
    """
    text = os.environ.get(THREADS_VARIABLE, "1") if threads is None else str(threads)
    if not text.isdecimal() or int(text) < 1:
        raise FormatError(f"threads ({THREADS_VARIABLE}) is {text!r}; must be a positive integer")
    return int(text)


def _check(values: ArrayLike, fmt: FloatFormat, role: str, name: str) -> Array:
    """Return an operand as an array of its format's dtype with at least two axes."""
    array = np.asarray(values)
    if array.dtype != fmt.dtype:
        raise FormatError(f"{name}: {role} is {fmt.name}, needs dtype {fmt.dtype}; got {array.dtype}")
    if array.ndim < 2:
        raise FormatError(f"{name}: {role} of shape {array.shape}; needs at least two axes")
    return array


def _check_shapes(a: Array, b: Array, c: Array | None, arithmetic: MmaArithmetic) -> tuple[int, ...]:
    """Return the shape of the result.

    Raises `FormatError` if the shapes do not fit one another, or do not fit the instruction.
    """
    name = arithmetic.name
    (rows, depth), (b_depth, columns) = a.shape[-2:], b.shape[-2:]
    if depth != b_depth:
        raise FormatError(f"{name}: A has K = {depth}, B has K = {b_depth}")
    if depth % arithmetic.k:
        raise FormatError(f"{name}: K = {depth} is not a multiple of the instruction's K = {arithmetic.k}")
    try:
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise FormatError(f"{name}: leading axes {a.shape[:-2]} and {b.shape[:-2]} do not broadcast") from None
    shape = (*lead, rows, columns)
    if c is not None:
        leading = zip(c.shape[-3::-1], shape[-3::-1], strict=False)
        if c.ndim > len(shape) or c.shape[-2:] != shape[-2:] or any(n not in (1, wanted) for n, wanted in leading):
            raise FormatError(f"{name}: C has shape {c.shape}; the result has {shape}")
    return shape


def checked_operands(
    a: ArrayLike, b: ArrayLike, c: ArrayLike | None, arithmetic: MmaArithmetic, *, is_shared: bool = False
) -> tuple[Array, Array, Array | None, tuple[int, ...]]:
    """Return A, B and C as arrays and the shape of the result; ``is_shared``: each A states the index of its B.

    Raises `FormatError` if a dtype or a shape does not fit.
    """
    first = _check(a, arithmetic.a, "A", arithmetic.name)
    second = _check(b, arithmetic.b, "B", arithmetic.name)
    third = None if c is None else _check(c, arithmetic.acc, "C", arithmetic.name)
    return first, second, third, _check_shapes(first, second[0] if is_shared else second, third, arithmetic)


def _check_scale(scale: ArrayLike | None, operand: Array, axis: int, unit: MmaArithmetic, role: str) -> Array | None:
    """Return the scales of an operand as float32 values (batch, rows, columns), None for none.

    Raises `FormatError` if the unit takes no such operand, or if its dtype or shape does not fit.
    """
    if scale is None:
        return None
    array, wanted = np.asarray(scale), list(operand.shape)
    if not unit.scale_block:
        raise FormatError(f"{unit.name}: does not support scales, but {role} has scales")
    wanted[axis] //= unit.scale_block
    dtype = np.dtype(ml_dtypes.float8_e8m0fnu) if unit.scale_format == E8M0 else get_format(unit.scale_format).dtype
    if array.dtype != dtype or list(array.shape) != wanted:
        raise FormatError(
            f"{unit.name}: scales of {role} are {array.shape} of {array.dtype}; must be {tuple(wanted)} of {dtype}"
        )
    return scale_values(array).reshape(-1, *wanted[-2:])


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike | None = None,
    *,
    arithmetic: str | MmaArithmetic,
    a_scale: ArrayLike | None = None,
    b_scale: ArrayLike | None = None,
    b_of: NDArray[np.int64] | None = None,
    threads: int | None = None,
) -> Array:
    """Return ``a @ b + c``, computed by chained instructions of one matrix unit.

    Parameters
    ----------
    a, b
        ``(..., M, K)`` and ``(..., K, N)`` in the arithmetic's input dtypes (tf32: float32, its
        low 13 bits are dropped); leading axes broadcast.
    c
        ``(..., M, N)`` in the accumulator's dtype, or None for zeros; part of the first block.
    arithmetic
        A name in ``ARITHMETICS`` or a value of that type.
    a_scale, b_scale
        ``(..., M, K / scale_block)`` and ``(..., K / scale_block, N)`` in the unit's scale format (E8M0:
        ``ml_dtypes.float8_e8m0fnu``; the sign of an E4M3 scale is ignored), leading axes as the operand's; None: 1.
        A scale of NaN makes its products NaN.
    b_of
        For ``a`` (A, M, K) and ``b`` (B, K, N), if several A share one B: the index of the B for each A.  None:
        leading axes broadcast.
    threads
        Threads to use; default ``NPUSIM_THREADS``, else 1.  Bits do not depend on it.

    Returns
    -------
    ndarray
        ``(..., M, N)`` in the accumulator's dtype.  NaN results are canonical; overflow gives
        Inf; an exact zero is +0.

    Raises `FormatError` for an unknown arithmetic, a dtype or shape that does not fit, or K that is no multiple of the
    instruction's.

    Notes
    -----
    Source of the algorithm: reference/numerics.md §1; checked against every vector of
    ``golden/mma_h200.npz`` and ``golden/mma_leeds.npz``.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.ones((1, 4), np.float16)
    >>> matmul(x, x.T, arithmetic="volta.mma.k4.f16.f32").item()
    4.0
    """
    unit, thread_count = get_arithmetic(arithmetic), _thread_count(threads)
    first, second, third, shape = checked_operands(a, b, c, unit, is_shared=b_of is not None)
    out = np.zeros(shape, np.float64 if unit.acc.name == "float64" else np.float32)
    if third is not None:
        out[...] = widen(third)
    if out.size and first.shape[-1]:
        problem = MmaProblem(
            arithmetic=unit,
            a=first.reshape(-1, *first.shape[-2:]),
            b=second.reshape(-1, *second.shape[-2:]),
            out=out.reshape(-1, *shape[-2:]),
            a_of=_batch_index(first.shape[:-2], shape[:-2]),
            b_of=_batch_index(second.shape[:-2], shape[:-2]) if b_of is None else b_of,
            a_scale=_check_scale(a_scale, first, -1, unit, "A"),
            b_scale=_check_scale(b_scale, second, -2, unit, "B"),
        )
        with np.errstate(all="ignore"):
            multiply(problem, thread_count)
    if unit.acc.bits < 32:
        return cast(out, unit.acc)
    return with_canonical_nan(out, unit.acc)


def _batch_index(lead: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """Return, for each matrix of the result, the number of the operand's matrix that it uses."""
    index = np.arange(math.prod(lead))
    if lead == shape:
        return index
    return np.ascontiguousarray(np.broadcast_to(index.reshape(lead), shape)).reshape(-1)
