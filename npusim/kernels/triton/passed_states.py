"""Loops that store each state, except the last one, after its update, as loops that store each state before its update.

A kernel that passes states on stores the first state before its loop, at the first place.  In the loop it stores each
computed state at the next place, except the last state, which it stores elsewhere.  The same TTIR stores each state
where an iteration begins, and the last one after the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from npusim.kernels.triton.results_apart import LOADS
from npusim.kernels.triton.ttir_text import Function, Op, every_of, makers

#: Conversions of a state on its way to memory.
_CASTS = ("arith.truncf", "arith.extf", "tt.fp_to_fp")


def with_states_passed(function: Function, arguments: Mapping[str, Any]) -> Function:
    """Return a kernel with such loops changed; the same kernel if there are no such loops, or if a loop has no
    iterations.
    """
    operations = function.operations
    for loop in [o for o in operations if o.name == "scf.for" and len(o.operands) > 4]:
        operations = _changed(operations, loop, arguments)
    return function._replace(operations=operations)


def _changed(operations: list[Op], loop: Op, arguments: Mapping[str, Any]) -> list[Op]:
    at = operations.index(loop)
    choices = [o for o in loop.body if o.name == "scf.if" and o.body and o.otherwise and not o.results]
    branches = [o for o in choices if all(_only_store(body) for body in (o.body, o.otherwise))]
    result = makers([*operations, *loop.body])
    if len(branches) != 1 or not _is_all_but_last(result.get(branches[0].operands[0]), loop, result, arguments):
        return operations
    (branch,), carried = branches, loop.operands[4:]
    passed, last = _only_store(branch.body), _only_store(branch.otherwise)
    assert passed is not None and last is not None
    names, starts, ends = carried[::2], carried[1::2], loop.body[-1].operands
    ends_of = dict(zip(ends, range(len(ends)), strict=True))
    cast = next((o for o in branch.body if o.results == passed.operands[1:2] and o.name in _CASTS), None)
    value = cast.operands[0] if cast is not None else passed.operands[1]
    state, pointer = ends_of.get(value), passed.operands[0]
    if state is None or last.operands[1] != value or pointer not in names:
        return operations
    moved = names.index(pointer)
    step, first = result.get(ends[moved]), result.get(starts[moved])
    is_next = step is not None and first is not None and step.name == first.name == "tt.addptr"
    if not is_next or step is None or first is None or step.operands != [pointer, first.operands[1]]:
        return operations
    before = [o for o in operations[:at] if o.name == "tt.store" and o.operands[0] == first.operands[0]]
    readers = [o for o in every_of(loop.body) if pointer in o.operands]
    addresses = [o for o in branch.otherwise if o.results]
    outer = {n for o in (*addresses, last) for n in o.operands} - {r for o in addresses for r in o.results}
    is_like = len(before) == 1 and before[0].operands[2:] == passed.operands[2:]
    is_like = is_like and _is_start(before[0].operands[1], starts[state], cast, result)
    inner = {r for o in loop.body for r in o.results} | {*names, loop.operands[0]}
    if not is_like or len(readers) != 2 or inner & (outer - {last.operands[1]}):
        return operations
    own = [] if cast is None else [replace(cast, operands=names[state : state + 1])]
    now = replace(
        passed, operands=[pointer, (own[0].results if own else names[state : state + 1])[0], *passed.operands[2:]]
    )
    body = [*own, now, *(o for o in loop.body if o is not branch)]
    given = [*loop.operands]
    given[5 + 2 * moved] = first.operands[0]
    behind = replace(last, operands=[last.operands[0], loop.results[state], *last.operands[2:]])
    rest = [o for o in operations[:at] if o is not before[0]]
    return [*rest, replace(loop, operands=given, body=body), *addresses, behind, *operations[at + 1 :]]


def _only_store(body: Sequence[Op]) -> Op | None:
    """Return the store that a branch consists of, after the operations that compute its address; None for another
    branch.
    """
    listed = [o for o in body if o.name != "scf.yield"]
    is_plain = all(o.results and not o.body and o.name not in LOADS for o in listed[:-1])
    return listed[-1] if listed and is_plain and listed[-1].name == "tt.store" else None


def _is_start(value: str, start: str, cast: Op | None, made: Mapping[str, Op]) -> bool:
    """Return whether a value is the start of a state after the same cast: it is cast too, or is a zero of the cast's
    format.
    """
    if cast is None or value == start:
        return value == start and cast is None
    one, other = made.get(value), made.get(start)
    if one is None or other is None:
        return False
    if one.name == cast.name:
        return one.operands == [start] and one.type == cast.type
    return one.name == other.name == "arith.constant" and all(_is_zero(o) for o in (one, other))


def _is_zero(constant: Op) -> bool:
    """Return whether a constant is +0 in all lanes."""
    return constant.text.partition(" : ")[0].removeprefix("arith.constant ") in ("dense<0.000000e+00>", "0.000000e+00")


def _is_all_but_last(condition: Op | None, loop: Op, made: Mapping[str, Op], arguments: Mapping[str, Any]) -> bool:
    """Return whether a condition is true in every iteration but the last; there must be at least one."""
    number, low, end, step = loop.operands[:4]
    if condition is None or condition.name != "arith.cmpi" or condition.text.split()[1].rstrip(",") != "slt":
        return False
    if condition.operands[0] != number or [_whole(n, made, arguments) for n in (low, step)] != [0, 1]:
        return False
    count, most = (_whole(n, made, arguments) for n in (end, condition.operands[1]))
    return count is not None and count >= 1 and most == count - 1


def _whole(name: str, made: Mapping[str, Op], arguments: Mapping[str, Any]) -> int | None:
    """Return an integer that is known before the launch: an argument, a constant, or sums of these."""
    op = made.get(name)
    if op is None:
        value = arguments.get(name)
        return value if isinstance(value, int) else None
    if op.name == "arith.constant" and ":" in op.text:
        text = op.text.removeprefix("arith.constant ").partition(" : ")[0]
        return int(text) if text.lstrip("-").isdigit() else None
    values = [_whole(n, made, arguments) for n in op.operands]
    if op.name not in ("arith.addi", "arith.subi") or None in values or len(values) != 2:
        return None
    one, other = (v for v in values if v is not None)
    return one + other if op.name == "arith.addi" else one - other
