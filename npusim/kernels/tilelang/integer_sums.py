"""Sums of int8 products over a loop as float32, which represents them exactly if there are not too many.

In the TTIR for Triton's reader, integers of a tile are floats; only within one product is a sum of products an integer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from npusim.kernels.tilelang.cores_joined import changed, with_buffers
from npusim.kernels.tilelang.statements import (
    Applied,
    BufferElement,
    Conditional,
    Elementwise,
    Expression,
    Literal,
    MatrixProduct,
    ParallelNest,
    SerialLoop,
    Statement,
    TileBuffer,
    TileKernel,
    TileReduction,
    Variable,
    expressions_in,
    number_of,
    parts_of,
    refused,
    walked,
    with_bodies,
)

#: Number of products of two int8 numbers, at most 2^14 each, for which float32 represents every sum exactly.
MOST_PRODUCTS = (1 << 24) >> 14


def with_float_sums(kernel: TileKernel) -> TileKernel:
    """Return a kernel with float32 tiles in place of the int32 tiles to which products of int8 are added.

    Raises `ProgramError` with a line for a sum of more than 1,024 products, whose bits float32 may not represent, and
    if a statement other than a product, zero, cast or copy reads or writes such a tile.
    """
    by = dict[TileBuffer, TileBuffer]()
    for x, loops in _products(kernel.body):
        if x.c.buffer.fmt == "int32" and x.a.buffer.fmt == x.b.buffer.fmt == "int8":
            _check_count(x, loops)
            by.setdefault(x.c.buffer, replace(x.c.buffer, fmt="float32"))
    if not by:
        return kernel
    for s in walked(kernel.body):
        _check_uses(s, by)
    return replace(kernel, body=_with_tiles(kernel.body, by))


def _products(
    body: Iterable[Statement], loops: tuple[SerialLoop, ...] = ()
) -> Iterator[tuple[MatrixProduct, tuple[SerialLoop, ...]]]:
    """Yield the products of statements with the loops around each."""
    for s in body:
        if isinstance(s, MatrixProduct):
            yield s, loops
        elif isinstance(s, SerialLoop):
            yield from _products(s.body, (*loops, s))
        elif isinstance(s, Conditional):
            yield from _products((*s.then, *s.otherwise), loops)


def _check_count(s: MatrixProduct, loops: tuple[SerialLoop, ...]) -> None:
    """Refuse a sum of more products than float32 represents exactly."""
    firsts = [Applied("eq", (Variable(loop.variable), loop.low)) for loop in loops]
    if isinstance(s.clears, Literal) and s.clears.value:
        loops = ()
    elif s.clears in firsts:
        loops = loops[firsts.index(s.clears) :]
    bounds = [(number_of(loop.low, {}), number_of(loop.high, {})) for loop in loops]
    known = [b - a for a, b in bounds if isinstance(a, int) and isinstance(b, int)]
    depth = math.prod(s.a.extent) // max(1, s.c.buffer.block[0])
    if len(known) < len(bounds) or depth * math.prod(known) > MOST_PRODUCTS:
        count = f"{depth * math.prod(known):,}" if len(known) == len(bounds) else "an unknown number of"
        raise refused(
            s.line, f"a sum of {count} products of int8; allowed: {MOST_PRODUCTS:,}, whose sum is exact in float32"
        )


def _check_uses(s: Statement, by: Mapping[TileBuffer, TileBuffer]) -> None:
    """Refuse a use of a sum other than a product, zero, cast or copy."""
    for x in s.body if isinstance(s, ParallelNest) else ():
        is_zero = isinstance(x.value, Literal) and not x.value.value
        if isinstance(x, Elementwise) and x.buffer in by and not (is_zero and x.condition is None):
            raise refused(x.line, f"{x.buffer.name}, a sum of products of int8, is set to other values than 0")
    if isinstance(s, TileReduction) and {s.source.buffer, s.target.buffer} & by.keys():
        raise refused(s.line, f"a reduction of {s.source.buffer.name}, a sum of products of int8, is not supported")
    if isinstance(s, MatrixProduct) and {s.a.buffer, s.b.buffer} & by.keys():
        raise refused(s.line, "a T.gemm of a sum of products of int8 is not supported")
    for e in expressions_in([s]) if not isinstance(s, SerialLoop | Conditional) else ():
        for part in parts_of(e):
            inside = part.operands if isinstance(part, Applied) and part.word != "cast" else ()
            if any(isinstance(x, BufferElement) and x.buffer in by for x in inside):
                raise refused(
                    s.line,
                    "integer arithmetic on a sum of products of int8 is not supported; convert it to float first",
                )


def _with_tiles(body: tuple[Statement, ...], by: Mapping[TileBuffer, TileBuffer]) -> tuple[Statement, ...]:
    """Return statements on other tiles."""

    def element(e: Expression) -> Expression:
        return with_buffers(e, by)

    def one(s: Statement) -> Statement:
        if isinstance(s, MatrixProduct):
            return replace(s, c=replace(s.c, buffer=by.get(s.c.buffer, s.c.buffer)))
        if isinstance(s, ParallelNest):
            own = (replace(x, buffer=by.get(x.buffer, x.buffer)) if isinstance(x, Elementwise) else x for x in s.body)
            return replace(s, body=tuple(own))
        return with_bodies(s, lambda inner: tuple(map(one, inner)))

    return changed(map(one, body), element)
