"""Reductions and scans by a function of two elements, of one or several rows at once, in the order of lanes and warps.

The function is text: statements in the language of kernels on the first elements ``a0, a1, ...`` and the second
elements ``b0, b1, ...`` of one or several rows; the elements of the result follow the last semicolon.  The text begins
with the index of the requested result and the values that fill rows up:

>>> text = combine_text("c = (a1 * b0); (a0 * b0), (c + b1)", take=1, size=4, pads=(1.0, 0.0))
>>> x = np.array([[1, 2, 3, 4]], np.float32)
>>> scanned([np.full_like(x, 2), x], "float32", text, "sequential")
array([[ 1.,  4., 11., 26.]], dtype=float32)
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from npusim.errors import FormatError
from npusim.formats.cast import Array, cast
from npusim.formats.cuda_functions import div_full
from npusim.formats.elementwise import MaxNan, add, compare, div, fma, maximum, minimum, mul, sub
from npusim.formats.float_format import FloatFormat, get_format
from npusim.formats.reductions import MMA_LANES, in_lanes, lane_layout, normal_order
from npusim.formats.unary import DIVISIONS, erf, exp, exp2, log, log1p, log2, rsqrt, sqrt, tanh

Rows = list[Array]
_TEXT = re.compile(r"take=(\d+) size=(\d+) pads=(\S+)( reverse)?: (.*)")
_BINARY: Mapping[type, Callable[..., Array]] = MappingProxyType(
    {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: div}
)
_OF_MASKS: Mapping[type, Callable[..., Array]] = MappingProxyType(
    {ast.BitAnd: np.logical_and, ast.BitOr: np.logical_or}
)
_FUNCTIONS: Mapping[str, Callable[..., Array]] = MappingProxyType(
    {
        "exp": exp,
        "exp2": exp2,
        "log": log,
        "log2": log2,
        "log1p": log1p,
        "rsqrt": rsqrt,
        "sqrt": sqrt,
        "tanh": tanh,
        "erf": erf,
    }
)
_NUMBERS = MappingProxyType({"inf": math.inf, "nan": math.nan})


class Combine(NamedTuple):
    """A function of two elements, the number of the requested result, and the elements that fill rows up to a size."""

    statements: tuple[tuple[str, ast.expr], ...]
    results: tuple[ast.expr, ...]
    take: int
    size: int
    pads: tuple[float, ...]
    is_reversed: bool

    @property
    def work(self) -> float:
        """Number of operations of one application; each result has an equal share of their cost."""
        every = [n for _, one in self.statements for n in ast.walk(one)]
        every += [n for one in self.results for n in ast.walk(one)]
        return sum(isinstance(n, ast.BinOp | ast.UnaryOp | ast.Call) for n in every) / len(self.results)


def combine_text(body: str, *, take: int, size: int, pads: Sequence[float], is_reversed: bool = False) -> str:
    """Return the text of a function with the requested result."""
    numbers = ",".join(repr(float(x)) for x in pads)
    return f"take={take} size={size} pads={numbers}{' reverse' if is_reversed else ''}: {body}"


@lru_cache(maxsize=256)
def combine_of(text: str) -> Combine:
    """Return a function by its text; raise `FormatError` for a text that is not a function."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise FormatError(f"{text!r} is not a function of two elements: take=0 size=32 pads=0.0: a0 + b0")
    take, size, pads, reverse, body = match.groups()
    *lines, last = (x.strip() for x in body.split(";"))
    statements = [line.partition(" = ") for line in lines]
    results = ast.parse(f"({last},)", mode="eval").body
    assert isinstance(results, ast.Tuple)
    return Combine(
        tuple((name, ast.parse(x, mode="eval").body) for name, _, x in statements),
        tuple(results.elts),
        int(take),
        int(size),
        tuple(map(float, pads.split(","))),
        bool(reverse),
    )


def folded(values: Sequence[Array], fmt: str | FloatFormat, text: str, order: str) -> Array:
    """Return one of the results of a reduction along the last axis.

    Parameters
    ----------
    values
        Rows, ``(..., n)`` each, that broadcast; n is at most the function's ``size``; rows are filled up to this size.
    order
        As in `npusim.formats.reduce_sum`: ``sequential``, ``lanes_*``, ``trees_*`` or ``mma_lanes``.  Each lane
        combines its own elements.  Then a lane's result is combined with the result of the lane that is half the number
        of lanes further on; warps continue in the same way (Triton 3.6: shfl.bfly; H200: every bit).

    Returns
    -------
    ndarray
        ``(...)``.  NaN and Inf follow the function's operations.

    Raises `FormatError` for another order, or a text that is not a function.
    """
    how, target = combine_of(text), get_format(fmt)
    rows = _filled(values, how, target)
    normal = normal_order(order, how.size)
    layout = (*MMA_LANES, math.prod(MMA_LANES[:2])) if normal == "mma_lanes" else lane_layout(normal)
    if layout is None and order != "sequential":
        raise FormatError(f"a reduction by a function in order {order!r}: the orders are sequential, mma_lanes, lanes")
    if layout is None:
        return _chained(rows, how, target)[how.take]
    own = [in_lanes(x, *layout) for x in rows]  # (..., warps, lanes, elements)
    sums = _neighbours(own, how, target) if normal.startswith("trees_") else _chained(own, how, target)
    return _halves(_halves(sums, how, target), how, target)[how.take]


def scanned(values: Sequence[Array], fmt: str | FloatFormat, text: str, order: str) -> Array:
    """Return one of the results of a scan along the last axis: element i combines all elements up to i.

    ``values``, ``order``: as in `folded`. In lanes (Triton 3.6): each lane combines its neighbours from the first on.
    The lanes' last elements are combined with those 1, 2, 4, ... lanes before them, each with the value that it had
    before the step. Then the combined elements of all previous warps, from the first warp on, are combined with the
    last element of each lane. Finally a lane's other elements combine with the last one of the previous lane.

    Returns ``(..., n)``; raises `FormatError` for another order, or a text that is not a function.
    """
    how, target = combine_of(text), get_format(fmt)
    count = max(np.shape(x)[-1] for x in values)
    rows = _filled(values, how, target)
    rows = [x[..., ::-1] for x in rows] if how.is_reversed else rows
    layout = lane_layout(normal_order(order, how.size))
    if order == "sequential":
        result = _in_line(rows, how, target)
    elif layout is not None and layout[3] == layout[0] * layout[1]:
        result = _in_lanes_of_warps(rows, how, target, *layout[:3])
    else:
        raise FormatError(
            f"a scan by a function in order {order!r}: the orders are sequential, and lanes without repeats"
        )
    selected = result[how.take]
    return np.ascontiguousarray((selected[..., ::-1] if how.is_reversed else selected)[..., :count])


def _filled(values: Sequence[Array], how: Combine, target: FloatFormat) -> Rows:
    """Return rows of one shape, filled up to the function's size."""
    shape = np.broadcast_shapes(*(np.shape(x) for x in values))
    missing = how.size - shape[-1]
    if missing < 0 or len(how.pads) != len(values):
        raise FormatError(f"{shape[-1]} elements of {len(values)} rows; the function has {how.size} of {len(how.pads)}")
    rows = Rows()
    for x, pad in zip(values, how.pads, strict=True):
        whole = np.broadcast_to(np.asarray(x, target.dtype), shape)
        end = np.full((*shape[:-1], missing), cast(np.float64(pad), target), target.dtype)
        rows.append(np.ascontiguousarray(np.concatenate([whole, end], -1) if missing else whole))
    return rows


def _chained(rows: Rows, how: Combine, target: FloatFormat) -> Rows:
    """Combine the elements of the last axis from the first on."""
    each = ([x[..., i] for x in rows] for i in range(rows[0].shape[-1]))
    return reduce(lambda a, b: _combined(how, a, b, target), each)


def _neighbours(rows: Rows, how: Combine, target: FloatFormat) -> Rows:
    """Combine the elements of the last axis, a power of two, as a tree of neighbours."""
    while rows[0].shape[-1] > 1:
        rows = _combined(how, [x[..., ::2] for x in rows], [x[..., 1::2] for x in rows], target)
    return [x[..., 0] for x in rows]


def _halves(rows: Rows, how: Combine, target: FloatFormat) -> Rows:
    """Combine the first half of the last axis with the second one, until one element is left."""
    while (n := rows[0].shape[-1]) > 1:
        rows = _combined(how, [x[..., : n // 2] for x in rows], [x[..., n // 2 :] for x in rows], target)
    return [x[..., 0] for x in rows]


def _in_line(rows: Rows, how: Combine, target: FloatFormat) -> Rows:
    """Return the combined elements up to each along the last axis."""
    result = [[x[..., 0] for x in rows]]
    for i in range(1, rows[0].shape[-1]):
        result.append(_combined(how, result[-1], [x[..., i] for x in rows], target))
    return [np.stack(x, -1) for x in zip(*result, strict=True)]


def _in_lanes_of_warps(rows: Rows, how: Combine, target: FloatFormat, neighbours: int, lanes: int, warps: int) -> Rows:
    shape = rows[0].shape
    cut = [x.reshape(*shape[:-1], -1, lanes, neighbours) for x in rows]  # (..., runs of a warp, lanes, neighbours)
    cut = _in_line(cut, how, target)
    last, step = [x[..., -1] for x in cut], 1
    while step < lanes:
        later = _combined(how, [x[..., :-step] for x in last], [x[..., step:] for x in last], target)
        last = [np.concatenate([x[..., :step], y], -1) for x, y in zip(last, later, strict=True)]
        step *= 2
    ends = [x[..., -1] for x in last]
    before = _in_line(ends, how, target)
    first = [[x[..., :1, :] for x in last]]
    if ends[0].shape[-1] > 1:  # the elements before each run of a warp, in each of its lanes
        prefix = [np.repeat(x[..., :-1, None], lanes, -1) for x in before]
        first.append(_combined(how, prefix, [x[..., 1:, :] for x in last], target))
    last = [np.concatenate(x, -2) for x in zip(*first, strict=True)]
    starts = [x[..., :-1] for x in last]  # for each lane, the last element of the previous lane
    entry = [np.concatenate([x[..., :1, :1], y[..., :-1, None]], -2) for x, y in zip(last, before, strict=True)]
    starts = [np.concatenate([x, y], -1) for x, y in zip(entry, starts, strict=True)]
    result = list[Rows]()
    for at in range(neighbours - 1):
        own = [x[..., at] for x in cut]
        new = _combined(how, starts, own, target)
        for x, y in zip(new, own, strict=True):
            x[..., 0, 0] = y[..., 0, 0]  # no element comes before the first lane of the first warp
        result.append(new)
    result.append(last)
    return [np.stack(x, -1).reshape(shape) for x in zip(*result, strict=True)]


def _combined(how: Combine, first: Rows, second: Rows, target: FloatFormat) -> Rows:
    """Return the results of the function of two elements, for all rows at once."""
    shape = first[0].shape
    names: dict[str, Array] = {f"a{i}": x for i, x in enumerate(first)} | {f"b{i}": x for i, x in enumerate(second)}
    for name, expression in how.statements:
        names[name] = _value(expression, names, target, shape)
    return [np.array(_value(x, names, target, shape)) for x in how.results]


def _value(node: ast.expr, names: Mapping[str, Array], target: FloatFormat, shape: tuple[int, ...]) -> Array:
    """Return the value of an expression of the language of kernels; raise `FormatError` for another one."""

    def of(x: ast.expr) -> Array:
        return _value(x, names, target, shape)

    match node:
        case ast.Constant(value=int() | float() as number):
            return np.full(shape, cast(np.float64(number), target), target.dtype)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name) if name in _NUMBERS:
            return np.full(shape, cast(np.float64(_NUMBERS[name]), target), target.dtype)
        case ast.UnaryOp(op=ast.USub()):
            return mul(of(node.operand), np.full(shape, -1, target.dtype), target)
        case ast.UnaryOp(op=ast.Invert()):
            return np.logical_not(of(node.operand))
        case ast.BinOp() if type(node.op) in _BINARY:
            return _BINARY[type(node.op)](of(node.left), of(node.right), target)
        case ast.BinOp() if type(node.op) in _OF_MASKS:
            return _OF_MASKS[type(node.op)](of(node.left), of(node.right))
        case ast.Call(func=ast.Name(id=name)):
            words = [x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str)]
            args = [of(x) for x in node.args if not (isinstance(x, ast.Constant) and isinstance(x.value, str))]
            nan = next((x.value.value for x in node.keywords if isinstance(x.value, ast.Constant)), "number")
            return _called(name, args, words, str(nan), target)
    raise FormatError(f"{ast.unparse(node)}: is not an expression of a function of two elements")


def _called(name: str, args: list[Array], words: list[str], nan: str, target: FloatFormat) -> Array:
    """Return the result of a function of the language of kernels for some values."""
    form = words[0] if words else ""
    if name == "fma":
        a, b, c = args
        return fma(-a if form == "from" else a, b, -c if form == "minus" else c, target)
    if name == "divided":
        x, y = args
        return div_full(x, y) if form == DIVISIONS[1] and target.name == "float32" else div(x, y, target)
    if name in ("maximum", "minimum"):
        rule: MaxNan = "propagate" if nan == "propagate" else "number"
        x, y = args
        return (maximum if name == "maximum" else minimum)(x, y, target, nan=rule)
    if name == "compare":
        x, y = args
        return np.asarray(compare(x, y, form, target) != 0)
    if name == "where":
        mask, x, y = args
        return np.where(mask, x, y)
    function, _, variant = (form or f"{name}.correct").partition(".")
    if function not in _FUNCTIONS:
        raise FormatError(f"{name}: a function of two elements cannot call it")
    return _FUNCTIONS[function](args[0], target, variant=variant)
