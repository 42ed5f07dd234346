"""Sums, maxima and scans down the rows of a block, as sums, maxima and scans along the rows of the block with exchanged
axes.

The result is the same TTIR on blocks with exchanged axes.  The exchanged blocks are those that elementwise operations
join with a block that is summed down its rows, or with a computed block whose transpose is the left factor of a
product.  The elements, and the computations on them, are the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from npusim.kernels.triton.third_axis import with_own_axes
from npusim.kernels.triton.ttir_text import TYPES, Function, Op, every_of, makers, shape_of

_TYPE = re.compile(r"tensor<(\d+)x(\d+)x((?:!tt\.ptr<\w+>|\w+))>")
_ALONG = ("tt.reduce", "tt.scan")
#: Operations on blocks with special rules of axes, which no block here has.
_OTHERS = ("tt.reshape", "tt.join", "tt.split", "tt.cat", "tt.gather", "tt.descriptor", "tt.make_tensor", "scf.while")
#: Operations that create a block that is not a result of arithmetic.
_GIVEN = ("tt.load", "tt.descriptor_load", "tt.trans", "tt.dot", "scf.", "arith.constant")
#: Operations that leave a block unchanged.
_SAME = "ttg.convert_layout"


#: The blocks that are turned: only blocks that are reduced down their rows and not along them; also blocks that are
#: reduced along both; or all blocks.  Except in the way ``""``, reductions down rows that remain are computed as they
#: are.
ALONE, DOWN, TOO, ALL = WAYS = ("", "down", "too", "all")


def with_turned_blocks(function: Function, way: str = ALONE) -> Function | None:
    """Return a kernel with exchanged axes of blocks that are summed down their rows, or whose transpose is a left
    factor.

    ``way``: one of `WAYS`; a reduction along the rows of a turned block becomes one down the rows of the result.  None
    if there is no such block.
    """
    every = every_of(function.operations)
    if not any(o.name in _ALONG and _is_down(o) for o in every) and not _left_factors(every):
        return None
    if way == ALL and any(o.name == "tt.dot" for o in every):
        return None
    operations = with_own_axes(function.operations)
    every = every_of(operations)
    ranks = {r: len(shape_of(t)[0]) for o in every for r, t in zip(o.results, _result_types(o), strict=False)}
    roots = _components(every, ranks)
    down = {roots(o.operands[0]) for o in every if o.name in _ALONG and _is_down(o)}
    down |= {roots(n) for n in _left_factors(every)}
    along = {roots(o.operands[0]) for o in every if o.name in _ALONG and not _is_down(o)}
    turned = {n for n, rank in ranks.items() if rank == 2 and (roots(n) in down or way == ALL)}
    if (
        (down & along and way in (ALONE, DOWN))
        or (way == TOO and not down & along)
        or any(o.name.startswith(_OTHERS) and turned & {*o.operands, *o.results} for o in every)
    ):
        return None
    return function._replace(operations=_changed(operations, turned))


def reduces_down(function: Function) -> bool:
    """Return whether a kernel reduces or scans a block down its rows."""
    return any(o.name in _ALONG and _is_down(o) for o in every_of(function.operations))


def _left_factors(operations: Sequence[Op]) -> set[str]:
    """Return the computed blocks whose transposes are left factors of products; loaded blocks may be such factors."""
    result = makers(operations)
    factors = [result.get(o.operands[0]) for o in operations if o.name == "tt.dot"]
    turned = [result.get(o.operands[0]) for o in factors if o is not None and o.name == "tt.trans"]
    return {o.results[0] for o in turned if o is not None and not o.name.startswith(_GIVEN)}


def _is_down(op: Op) -> bool:
    """Return whether a reduction or scan runs down the rows of a block."""
    types = _TYPE.findall(op.text.partition("(tensor")[2].join(("tensor", "")) if op.body else op.text)
    return bool(types) and op.number("axis") == 0


def _result_types(op: Op) -> list[str]:
    if op.name in ("scf.for", "scf.if"):
        return TYPES.findall(op.text.partition("-> (")[2])
    return [op.type.split(", ")[0]] * len(op.results)


class _Components:
    """Blocks, grouped by the elementwise operations that connect them."""

    def __init__(self) -> None:
        self._roots: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        while (root := self._roots.get(name, name)) != name:
            name = root
        return name

    def join(self, *names: str) -> None:
        first, *rest = map(self, names)
        self._roots |= dict.fromkeys((n for n in rest if n != first), first)


def _components(operations: Sequence[Op], ranks: dict[str, int]) -> _Components:
    roots = _Components()
    for op in operations:
        if op.name == "scf.for":
            names, starts = op.operands[4::2], op.operands[5::2]
            ends = op.body[-1].operands if starts else []
            ranks |= {n: ranks.get(s, 0) for n, s in zip(names, starts, strict=True)}
            for each in zip(names, starts, ends, op.results, strict=True):
                roots.join(*each)
        elif op.name == "scf.if":
            for each in zip(op.results, *(b[-1].operands for b in (op.body, op.otherwise) if b), strict=False):
                roots.join(*each)
    for op in operations:
        if op.name in ("tt.trans", "tt.expand_dims", "tt.reduce", "scf.for", "scf.if", "scf.yield"):
            continue  # a scan's result has the axes of its operand
        blocks = [n for n in (*op.operands, *op.results) if ranks.get(n) == 2]
        blocks = [n for n in blocks if n not in op.operands[:2]] if op.name == "tt.dot" else blocks
        if blocks:
            roots.join(*blocks)
    return roots


def _changed(operations: Sequence[Op], turned: set[str]) -> list[Op]:
    result = list[Op]()
    for given in operations:
        op = replace(given, body=_changed(given.body, turned), otherwise=_changed(given.otherwise, turned))
        result += _product(op, turned) if op.name == "tt.dot" else [_exchanged(op, turned)]
    return result


def _exchanged(op: Op, turned: set[str]) -> Op:
    """Return an operation on turned blocks."""
    if not turned & {*op.operands, *op.results} or op.name in ("scf.for", "scf.if", "scf.yield"):
        return op
    is_turned = [n in turned for n in (*op.operands[:1], *op.results[:1])]
    if op.name == "tt.trans":
        return op if all(is_turned) else replace(op, name=_SAME)
    op = with_axes_exchanged(op)
    if op.name in ("tt.expand_dims", *_ALONG) and is_turned[op.name == "tt.expand_dims"]:
        op = replace(op, text=re.sub(r"\baxis = \d+", f"axis = {1 - op.number('axis')}", op.text))
    return op


def with_axes_exchanged(op: Op) -> Op:
    """Return an operation whose blocks of two axes have these exchanged."""
    text, type_ = (_TYPE.sub(r"tensor<\2x\1x\3>", t) for t in (op.text, op.type))
    return replace(op, text=text, type=type_)


def _product(op: Op, turned: set[str]) -> list[Op]:
    """Return a product of turned blocks, or with a turned result, and the transpositions that the product needs."""
    is_turned = op.results[0] in turned
    result, factors = list[Op](), list[str]()
    for name in op.operands[:2]:
        if (name in turned) == is_turned:
            factors.append(name)
            continue
        factors.append(f"{name}@turned{op.results[0]}")
        result.append(Op("tt.trans", [factors[-1]], [name], "tt.trans", "", op.line))
    if not is_turned:
        return [*result, replace(op, operands=[*factors, *op.operands[2:]])]
    return [*result, replace(with_axes_exchanged(op), operands=[*factors[::-1], *op.operands[2:]])]
