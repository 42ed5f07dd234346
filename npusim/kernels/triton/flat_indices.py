"""Kernels on flat indices, whose quotients and remainders address tensors, as the same TTIR on blocks of rows and
columns.

A block of B flat indices with ``i // n`` and ``i % n`` is B / n rows of n columns, on which both are linear.  If a
block exceeds the end of a further quotient's group, or if n does not divide it, it is read as several smaller blocks.
No value depends on this, because every operation is on single elements.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from typing import Any, NamedTuple

from npusim.kernels.triton.ttir_text import Function, Op, makers, shape_of

#: An operation that TTIR does not have: flat indices as rows and columns, for a part of each program's block.
FLAT = "npusim.flat_range"
#: Smallest number of indices of a part of a block: with smaller parts there would be too many blocks, so that the
#: kernel is refused.
LEAST = 16
_DIVISIONS = ("arith.divsi", "arith.divui", "arith.remsi", "arith.remui")
#: Operations whose results are flat indices of the same scale as their operands.
_SAME = ("arith.addi", "arith.extsi", "arith.extui", "arith.index_cast")
#: Operations that join elements of a block, or give it other axes.
_OF_BLOCKS = ("tt.expand_dims", "tt.reduce", "tt.scan", "tt.dot", "tt.reshape", "tt.trans", "tt.join", "tt.split")


class FlatBlock(NamedTuple):
    """The way in which a block of flat indices is read: rows, columns (0: only one axis), and parts of each program's
    block.
    """

    size: int
    rows: int
    columns: int
    parts: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The axes of a part."""
        return (self.rows, self.columns) if self.columns else (self.rows,)


def flat_blocks(function: Function, arguments: Mapping[str, Any]) -> tuple[FlatBlock, ...]:
    """Return the ways to read blocks of flat indices, the likeliest first; none if TTIR is read unchanged."""
    operations = function.operations
    ranges = [o for o in operations if o.name == "tt.make_range"]
    if len(ranges) != 1 or any(o.body or o.name in _OF_BLOCKS or o.name.startswith("cf.") for o in operations):
        return ()
    size, (extents, compared) = shape_of(ranges[0].type)[0][0], _extents(operations, ranges[0].results[0], arguments)
    if not extents or all(e % size == 0 for e in (*extents, *compared)):
        return ()
    first, ways = min(extents), list[FlatBlock]()
    if size % first == 0 and all(e % first == 0 for e in extents):
        rows = gcd(size // first, *(e // first for e in extents if e > first))
        ways.append(FlatBlock(size, rows, first, size // (rows * first)))
    for part in dict.fromkeys((gcd(size, *extents), gcd(size, *extents, *compared))):
        ways += [FlatBlock(size, part, 0, size // part)] if part >= LEAST else []
    return tuple(ways)


def on_rows_and_columns(function: Function, block: FlatBlock) -> Function:
    """Return a kernel on blocks of rows and columns."""
    axes = "x".join(map(str, block.shape))

    def typed(text: str) -> str:
        return re.sub(rf"tensor<{block.size}x", f"tensor<{axes}x", text)

    def changed(op: Op) -> Op:
        name = FLAT if op.name == "tt.make_range" else op.name
        return replace(op, name=name, text=typed(op.text), type=typed(op.type))

    return function._replace(operations=[changed(o) for o in function.operations])


def _extents(operations: list[Op], indices: str, arguments: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return the numbers of flat indices after which quotients increase by one and remainders restart, and those at
    which comparisons of quotients and remainders with constants change.
    """
    scales, extents, result = {indices: 1}, set[int](), makers(operations)
    parts, compared = set[str](), set[int]()
    for op in operations:
        known = [n for n in op.operands if n in scales]
        if not known or not op.results:
            continue
        if op.name in _DIVISIONS and op.operands[0] in scales:
            by = _number(result.get(op.operands[1]), arguments)
            if by is None or by <= 0:
                return [], []
            extents.add(extent := scales[op.operands[0]] * by)
            scales[op.results[0]] = extent if "div" in op.name else scales[op.operands[0]]
            parts.update(op.results)
        elif op.name in _SAME and len(known) == 1:
            scales[op.results[0]] = scales[known[0]]
            parts.update(op.results if known[0] in parts else ())
        elif op.name == "arith.cmpi" and len(known) == 1 and known[0] in parts:
            by = _number(result.get(next(n for n in op.operands if n != known[0])), arguments)
            compared.add(scales[known[0]] * (by or 0))
    return sorted(e for e in extents if e > 1), sorted(e for e in compared if e > 1)


def _number(op: Op | None, arguments: Mapping[str, Any]) -> int | None:
    """Return the integer that all elements of a block equal: a constant, or an argument."""
    if op is not None and op.name == "arith.constant":
        found = re.match(r"arith\.constant dense<(\d+)>", op.text)
        return int(found[1]) if found else None
    value = arguments.get(op.operands[0]) if op is not None and op.name == "tt.splat" else None
    return value if isinstance(value, int) else None
