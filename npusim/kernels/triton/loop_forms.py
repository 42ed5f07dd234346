"""Loops in the form that the reader supports.

``while i < n: ...; i += step`` becomes ``for i in range(i, n, step)``; with such a loop a fixed number of programs
processes a larger number of blocks.  ``m = m | (x > 0)`` in a loop becomes ``m = ((m != 0) | (x > 0)).to(int32)``;
``tl.reduce`` of masks by ``or`` becomes a maximum of these integers, and by ``and`` a minimum.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npusim.kernels.triton.ttir_text import Op

_MASKS = re.compile(r"tensor<(?:\d+x)+i1>")
#: The end of the names of integers in place of masks.
_STATE = "@state"
_JOINS = MappingProxyType({"arith.ori": "arith.maxsi", "arith.andi": "arith.minsi"})


def with_counted_loops(operations: Sequence[Op]) -> list[Op]:
    """Return operations in which each loop whose condition only counts iterations is a counted loop."""
    return _changed(operations, {n for op in operations for o in (op, *op.within()) for n in o.operands})


def _changed(operations: Sequence[Op], read: set[str]) -> list[Op]:
    result: list[Op] = []
    for op in operations:
        if op.body or op.otherwise:
            own = replace(op, body=_changed(op.body, read), otherwise=_changed(op.otherwise, read))
            result.append((_counted(own, read) if op.name == "scf.while" else None) or own)
        else:
            result.append(op)
    return result


def _counted(op: Op, read: set[str]) -> Op | None:
    """Return a loop with a condition as a counted loop; None if it does not count, or if its last count is read."""
    names, starts = op.operands[0::2], op.operands[1::2]
    if len(op.body) != len(("comparison", "condition")) or not op.otherwise or op.otherwise[-1].name != "scf.yield":
        return None
    compared, condition = op.body
    arguments, *body, end = op.otherwise
    inner = {*names, *arguments.results} | {r for o in (compared, *body) for i in (o, *o.within()) for r in i.results}
    if not compared.text.startswith("arith.cmpi slt,") or condition.operands != [*compared.results, *names]:
        return None
    number, bound = compared.operands
    if number not in names or bound in inner or len(end.operands) != len(names):
        return None
    at = names.index(number)
    add = next((o for o in body if end.operands[at] in o.results and o.name == "arith.addi"), None)
    counter = arguments.results[at]
    if add is None or counter not in add.operands or op.results[at] in read:
        return None
    step = add.operands[1 - add.operands.index(counter)]
    if step in inner:
        return None
    others = [i for i in range(len(names)) if i != at]
    carried = [n for i in others for n in (arguments.results[i], starts[i])]
    kinds = state_types(op.text)
    states = ", ".join(f"%{arguments.results[i]} = %{starts[i]}" for i in others)
    given = f" iter_args({states}) -> ({', '.join(kinds[i] for i in others)})" if others else ""
    text = f"scf.for %{counter} = %{starts[at]} to %{bound} step %{step}{given} : {kinds[at]} {{"
    ends = [replace(end, operands=[end.operands[i] for i in others])] if others else []
    operands, results = [counter, starts[at], bound, step, *carried], [op.results[i] for i in others]
    return replace(op, name="scf.for", results=results, operands=operands, text=text, body=[*body, *ends], otherwise=[])


def state_types(text: str) -> list[str]:
    """Return the types of a loop's states."""
    whole, depth, result = text.partition("-> ")[2].strip().removeprefix("("), 0, [""]
    for letter in whole:
        depth += (letter in "<([") - (letter in ">)]")
        if depth < 0:
            break
        if letter == "," and not depth:
            result.append("")
        else:
            result[-1] += letter
    return [x.strip() for x in result]


def with_mask_states(operations: Sequence[Op]) -> list[Op]:
    """Return operations whose loops carry integers in place of blocks of masks."""
    result: list[Op] = []
    for op in operations:
        own = replace(op, body=with_mask_states(op.body), otherwise=with_mask_states(op.otherwise)) if op.body else op
        kinds = state_types(op.text) if op.name == "scf.for" and op.results else []
        if op.name == "tt.reduce" and len(op.body) == 2 and op.body[0].name in _JOINS and "i1>" in op.place + op.text:
            result += _joined(op)
        elif any(map(_MASKS.fullmatch, kinds)):
            result += _as_integers(own, kinds)
        else:
            result.append(own)
    return result


def is_mask_state(name: str) -> bool:
    """Return whether a state of a loop is integers in place of a mask."""
    return name.endswith(_STATE)


def _op(like: Op, name: str, result: str, operands: Sequence[str], kinds: str, word: str = "") -> Op:
    """Return an operation at the line of ``like``, from its operands, the text before them (``word``) and its types."""
    text = f"{name} {word}{', '.join(f'%{n}' for n in operands)} : {kinds}"
    type_ = kinds.rpartition(" to ")[2]
    return replace(
        like,
        name=name,
        results=[result],
        operands=[*operands],
        text=text,
        type=type_,
        body=[],
        otherwise=[],
        arguments=[],
    )


def _wide(kind: str) -> str:
    return re.sub(r"i1>$", "i32>", kind)


def _widened(like: Op, mask: str, kind: str) -> Op:
    return _op(like, "arith.extui", f"{mask}@whole", [mask], f"{kind} to {_wide(kind)}")


def _narrowed(like: Op, mask: str, kind: str) -> list[Op]:
    """Return the operations that compute a mask from its integers."""
    text = f"arith.constant dense<0> : {_wide(kind)}"
    zero = replace(_op(like, "arith.constant", f"{mask}@zero", [], _wide(kind)), text=text)
    return [zero, _op(like, "arith.cmpi", mask, [f"{mask}{_STATE}", f"{mask}@zero"], _wide(kind), "ne, ")]


def _as_integers(op: Op, kinds: Sequence[str]) -> list[Op]:
    """Return a loop that carries integers in place of masks, with the operations before and after it."""
    before: list[Op] = []
    first: list[Op] = []
    after: list[Op] = []
    last: list[Op] = []
    *body, end = op.body
    operands, results, ends = [*op.operands], [*op.results], [*end.operands]
    for i, kind in enumerate(kinds):
        if _MASKS.fullmatch(kind):
            name, start = operands[4 + 2 * i : 6 + 2 * i]
            own = replace(_widened(op, start, kind), results=[f"{name}@start"])
            before.append(own)
            first += _narrowed(op, name, kind)
            last.append(replace(_widened(end, ends[i], kind), results=[f"{name}@end"]))
            after += _narrowed(op, results[i], kind)
            operands[4 + 2 * i : 6 + 2 * i] = [f"{name}{_STATE}", f"{name}@start"]
            ends[i], results[i] = f"{name}@end", f"{results[i]}{_STATE}"
    whole = ", ".join(map(_wide, kinds))
    text = re.sub(r"-> \(.*?\)\s+:", f"-> ({whole}) :", op.text)
    loop = replace(op, operands=operands, results=results, text=text)
    loop = replace(loop, body=[*first, *body, *last, replace(end, operands=ends)])
    return [*before, loop, *after]


def _joined(op: Op) -> list[Op]:
    """Return the union, or the intersection, of masks along an axis as a maximum, or a minimum, of integers."""
    shapes = re.findall(r"\((tensor<[^>]*i1>)\)", op.text)
    if not shapes:
        return [op]
    kind = shapes[0]
    result, inner = op.results[0], op.body[0]
    one = replace(inner, name=_JOINS[inner.name], text=inner.text.replace(inner.name, _JOINS[inner.name]), type="i32")
    text = op.text.replace("i1", "i32")
    reduced = replace(op, results=[f"{result}{_STATE}"], operands=[f"{op.operands[0]}@whole{result}"], text=text)
    reduced = replace(reduced, type=op.type.replace("i1", "i32"), body=[one, *op.body[1:]])
    wide = replace(_widened(op, op.operands[0], kind), results=[f"{op.operands[0]}@whole{result}"])
    if op.type.startswith("tensor"):
        return [wide, reduced, *_narrowed(op, result, op.type)]
    zero = replace(_op(op, "arith.constant", f"{result}@zero", [], "i32"), text="arith.constant 0 : i32")
    return [wide, reduced, zero, _op(op, "arith.cmpi", result, [f"{result}{_STATE}", f"{result}@zero"], "i32", "ne, ")]
