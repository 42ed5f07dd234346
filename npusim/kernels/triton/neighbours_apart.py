"""Blocks whose neighbouring elements are split or joined, as the same TTIR on the even and on the odd elements.

``tl.split`` of pairs of a loaded block is two loads of every second element; a store of ``tl.interleave`` or of a
joined and reshaped block is two such stores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from npusim.kernels.triton.blocks_as_rows import carried_by
from npusim.kernels.triton.region_rewriter import OtherBlocksError, RegionRewriter
from npusim.kernels.triton.ttir_text import TYPES, Function, Op, makers
from npusim.kernels.triton.values import Affine, Condition, Known, Number

#: An operation that TTIR does not have: every second element of integers or of a mask, along the last axis of a block.
HALF = "npusim.half"
_PAIR = 2
_TYPE = re.compile(r"tensor<((?:\d+x)+)((?:!tt\.ptr<\w+>|\w+))>")
#: Operations on single elements, and operations that give all elements one value.
_ELEMENTWISE = ("arith.", "math.", "tt.fp_to_fp", "tt.extern_elementwise", "tt.precise", "tt.clampf", "tt.splat")
_WITHOUT_RESULTS = ("tt.store", "tt.return", "block", "llvm.intr.assume", "cf.cond_br", "cf.br")


#: Operations whose inner operations are unchanged, and the operation whose inner operations are changed.
_WITH_BODIES, _LOOP = ("tt.reduce", "scf.if"), "scf.for"


def with_neighbours_apart(function: Function) -> Function | None:
    """Return a kernel without splits and joins of neighbours; None if there are no such splits and joins, or if there
    are others.
    """
    operations = list(_at_hand(function.operations))
    if not any(o.name in ("tt.split", "tt.join") for o in operations):
        return None
    if any((o.body and o.name not in (*_WITH_BODIES, _LOOP)) or _is_other(o) for o in operations):
        return None
    try:
        return function._replace(operations=_needed(_Halves(operations).changed(function.operations)))
    except OtherBlocksError:
        return None


def _at_hand(operations: Sequence[Op]) -> Iterator[Op]:
    """Yield operations, and those of loops."""
    for op in operations:
        yield op
        if op.name == _LOOP:
            yield from _at_hand(op.body)


def _needed(operations: Sequence[Op]) -> list[Op]:
    """Return the operations that those with effects need."""
    needed, kept = set[str](), list[Op]()
    for op in reversed(operations):
        if not op.results or op.name == _LOOP or needed.intersection(op.results):
            op = replace(op, body=_needed(op.body)) if op.name == _LOOP else op  # noqa: PLW2901
            needed |= {*op.operands, *(n for o in op.within() for n in o.operands)}
            kept.insert(0, op)
    return kept


def _is_other(op: Op) -> bool:
    """Return whether an operation may have effects that are not examined, or contains splits or joins."""
    if op.name in (_LOOP, "scf.yield"):
        return False
    inner = [o.name for o in op.within()]
    return (not op.results and op.name not in (*_WITHOUT_RESULTS, "scf.if")) or bool({*inner} & {"tt.split", "tt.join"})


class _Halves(RegionRewriter):
    """The operations of a kernel on halves of its blocks."""

    def __init__(self, operations: list[Op]) -> None:
        super().__init__(operations, makers(operations) | carried_by(operations))

    def rewrite(self, op: Op) -> None:
        """Add an operation, without splits and joins."""
        if op.name == _LOOP:
            self.ordered.append(replace(op, body=self.changed(op.body)))
        elif op.name == "tt.split":
            size = self._pairs(op.operands[0])
            halves = [self._half(op.operands[0], size, i) for i in range(_PAIR)]
            for result, source in zip(op.results, halves, strict=True):
                self.ordered.append(
                    replace(op, name="ttg.convert_layout", results=[result], operands=[source], body=[])
                )
        elif op.name == "tt.store" and self._is_joined(op.operands[1]):
            size = self.shape(op.operands[1])[-1]
            for i in range(_PAIR):
                self.ordered.append(replace(op, operands=[self._half(n, size, i) for n in op.operands]))
        else:
            self.ordered.append(op)

    def _pairs(self, name: str) -> int:
        """Return the number of elements along the last axis before the axis of pairs."""
        shape = self.shape(name)
        if len(shape) < _PAIR or shape[-1] != _PAIR:
            raise OtherBlocksError
        return _PAIR * shape[-2]

    def _is_joined(self, name: str) -> bool:
        op = self.made.get(name)
        if op is None or not op.name.startswith((*_ELEMENTWISE, "tt.join", "tt.reshape")):
            return False
        return op.name == "tt.join" or any(map(self._is_joined, op.operands))

    def _typed(self, text: str, size: int) -> str:
        """Return a text in which each block with ``size`` elements along the last axis, or with as many elements in
        pairs, is replaced by a half.
        """

        def half(match: re.Match[str]) -> str:
            sizes = [int(n) for n in match[1].split("x")[:-1]]
            if sizes[-1] == size:
                sizes[-1] = size // _PAIR
            elif sizes[-2:] == [size // _PAIR, _PAIR]:
                sizes.pop()
            elif sizes[-1] != 1:
                raise OtherBlocksError
            return f"tensor<{'x'.join(map(str, sizes))}x{match[2]}>"

        return _TYPE.sub(half, text)

    def _half(self, name: str, size: int, which: int) -> str:
        """Return every second element of a block, from the first or second on."""
        if not self.shape(name):
            return name
        if (key := (name, size, which)) not in self.known:
            self.known[key] = self._made_half(self.made[name], name, size, which)
        return self.known[key]

    def _made_half(self, op: Op, name: str, size: int, which: int) -> str:
        if op.name == "tt.join":
            if self.shape(name)[-2:] != (size // _PAIR, _PAIR):
                raise OtherBlocksError
            return op.operands[which]
        if op.name == "tt.reshape":
            before, after = self.shape(op.operands[0]), self.shape(name)
            pairs = (*after[:-1], size // _PAIR, _PAIR) if after[-1] == size else after
            if {before, after} != {pairs, (*pairs[:-2], size)} or "allow_reorder" in op.text:
                raise OtherBlocksError
            return self._half(op.operands[0], size, which)
        result = f"{name}@half{which}"
        is_integer = "tt.ptr" in op.type or re.search(r"x?i\d+>?$", TYPES.findall(op.type)[-1]) is not None
        if is_integer and op.name not in ("tt.load", "arith.cmpf"):
            is_pair = self.shape(name)[-_PAIR:] == (size // _PAIR, _PAIR)
            text = f"{HALF} half = {which}{', of pairs' if is_pair else ''}"
            self.ordered.append(Op(HALF, [result], [name], text, self._typed(op.type, size), op.line))
        elif op.name == "tt.load" or op.name.startswith(_ELEMENTWISE):
            operands = [self._half(n, size, which) for n in op.operands]
            text, type_ = (self._typed(t, size) for t in (op.text, op.type))
            self.ordered.append(replace(op, results=[result], operands=operands, text=text, type=type_))
        else:
            raise OtherBlocksError
        return result


def half_of(op: Op, x: Known) -> Known:
    """Return every second element of integers or of a mask, from the first or the second element on.

    Raises `ProgramError` for integers by a table.
    """
    which = op.number("half")
    if op.text.endswith("of pairs") and isinstance(x, Affine | Condition | Number):
        return _of_pairs(op, x, which)
    if isinstance(x, Affine):
        return _half(op, x, which)
    if isinstance(x, Condition):
        either = tuple(tuple(half_of(op, c) for c in group) for group in x.either)
        of = tuple(_rule(relation, _half(op, d, which)) for relation, d in x.of)
        return Condition(of, either)  # type: ignore[arg-type]
    if isinstance(x, Number):
        return replace(x, shape=(*x.shape[:-1], x.shape[-1] // _PAIR))
    raise op.fail(
        "tl.split or tl.join of a block with loaded integers is not supported; use pointers to the even elements"
    )


def _of_pairs(op: Op, x: Affine | Condition | Number, which: int) -> Known:
    """Return one of each pair along the last axis."""
    if isinstance(x, Number):
        return replace(x, shape=x.shape[:-1])
    if isinstance(x, Condition):
        return x.changed(lambda d: _of_pairs(op, d, which))  # type: ignore[arg-type, return-value]
    if x.limits()[-1] is not None:
        raise op.fail("tl.split of a block is not supported if a mask hides only one element of a pair")
    base = x.base + which * x.steps[-1]
    return replace(x, base=base, steps=x.steps[:-1], shape=x.shape[:-1], left=x.left[:-1])


def _half(op: Op, x: Affine, which: int) -> Affine:
    if x.limits()[-1] is not None:
        raise op.fail("tl.split or tl.join of a partly masked block is not supported")
    step, size = x.steps[-1], x.shape[-1]
    if size == 1:
        return x
    shape = (*x.shape[:-1], size // _PAIR)
    return replace(x, base=x.base + which * step, steps=(*x.steps[:-1], _PAIR * step), shape=shape)


def _rule(relation: str, d: Affine) -> tuple[str, Affine]:
    """Return a comparison that bounds only the last axis, in steps of one."""
    if relation not in ("slt", "sle") or d.steps[-1] != _PAIR or any(d.steps[:-1]):
        return relation, d
    left = -((d.base - (relation == "sle")) // _PAIR)  # elements 2 i with d.base + 2 i < 0
    return "slt", replace(d, base=-left, steps=(*d.steps[:-1], 1))
