"""Loops with a condition that count: ``while i < n: ...; i += step`` as ``for i in range(i, n, step)``.

Programs of a fixed number go over more blocks than there are programs in this form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npusim.kernels.triton.ttir_text import Op


def with_counted_loops(operations: Sequence[Op]) -> list[Op]:
    """Return operations with a counted loop in place of each loop with a condition that only counts."""
    return _changed(operations, {n for o in _every(operations) for n in o.operands})


def _every(operations: Sequence[Op]) -> list[Op]:
    return [o for op in operations for o in (op, *_every([*op.body, *op.otherwise]))]


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
    inner = {*names, *arguments.results} | {r for o in _every([compared, *body]) for r in o.results}
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
    kinds = _kinds(op.text)
    states = ", ".join(f"%{arguments.results[i]} = %{starts[i]}" for i in others)
    given = f" iter_args({states}) -> ({', '.join(kinds[i] for i in others)})" if others else ""
    text = f"scf.for %{counter} = %{starts[at]} to %{bound} step %{step}{given} : {kinds[at]} {{"
    ends = [replace(end, operands=[end.operands[i] for i in others])] if others else []
    operands, results = [counter, starts[at], bound, step, *carried], [op.results[i] for i in others]
    return replace(op, name="scf.for", results=results, operands=operands, text=text, body=[*body, *ends], otherwise=[])


def _kinds(text: str) -> list[str]:
    """Return the types of a loop's states."""
    whole, depth, result = text.partition("-> ")[2].strip().removesuffix("{").strip(), 0, [""]
    whole = whole[1:-1] if whole.startswith("(") else whole
    for letter in whole:
        depth += (letter in "<([") - (letter in ">)]")
        if letter == "," and not depth:
            result.append("")
        else:
            result[-1] += letter
    return [x.strip() for x in result]
