"""Calls that Triton does not inline, in functions of reductions: those of functions with branches that return.

Where a branch chooses between two results of operations without rounding, both are computed and one is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from npusim.kernels.triton.ttir_text import Op

#: Operations that a function which is inlined may have: both sides of a branch may be computed.
CHOICES = (
    *(
        "arith.constant",
        "arith.cmpf",
        "arith.select",
        "arith.andi",
        "arith.ori",
        "arith.negf",
        "arith.extf",
        "math.absf",
    ),
    *("arith.maximumf", "arith.minimumf", "arith.maxnumf", "arith.minnumf"),
)
#: Largest number of successive branches: a loop of blocks has no end.
MOST_BRANCHES = 8


class Called(NamedTuple):
    """A function that another one calls: the names of its parameters, and its operations with labels of its blocks."""

    parameters: tuple[str, ...]
    operations: Sequence[Op]


class _Block(NamedTuple):
    """A basic block: the names of its arguments, and its operations."""

    parameters: Sequence[str]
    operations: list[Op]


def with_calls_inlined(operations: Sequence[Op], functions: Mapping[str, Called]) -> list[Op]:
    """Return operations in which the operations of called functions replace the calls within reductions and scans.

    A call remains if its function has an operation of another kind than `CHOICES`, or a loop of blocks.
    """
    result: list[Op] = []
    for op in operations:
        body, otherwise = (with_calls_inlined(x, functions) for x in (op.body, op.otherwise))
        if op.name in ("tt.reduce", "tt.scan"):
            body = [x for each in body for x in _inlined(each, functions)]
        result.append(replace(op, body=body, otherwise=otherwise) if op.body or op.otherwise else op)
    return result


def _inlined(op: Op, functions: Mapping[str, Called]) -> list[Op]:
    """Return the operations of a called function, whose last one has the call's result; the call itself if unknown."""
    name = re.match(r"tt\.call @([\w.$-]+)", op.text)
    function = functions.get(name[1]) if name else None
    if function is None or len(op.results) != 1 or len(function.parameters) != len(op.operands):
        return [op]
    blocks = {"": _Block([], [])}
    for each in function.operations:
        if each.name == "block":
            blocks[each.text.removeprefix("^").partition("(")[0]] = _Block(each.results, [])
        else:
            blocks[next(reversed(blocks))].operations.append(each)
    made = _from(op, blocks, "", dict(zip(function.parameters, op.operands, strict=True)), op.results[0])
    if made is None:
        return [op]
    operations, result = made
    return [replace(o, results=[op.results[0] if r == result else r for r in o.results]) for o in operations]


def _from(
    call: Op, blocks: Mapping[str, _Block], label: str, names: dict[str, str], path: str
) -> tuple[list[Op], str] | None:
    """Return the operations from a block on, and the name of what they return; None for operations of other kinds.

    ``names``: those of the function's values in the caller; ``path``: what begins the names of new ones.
    """
    *operations, last = blocks[label].operations
    if path.count("@") > MOST_BRANCHES or any(o.name not in CHOICES or o.body for o in operations):
        return None
    result: list[Op] = []
    for o in operations:
        operands = [names[n] for n in o.operands]
        names |= {r: f"{path}@{r}" for r in o.results}
        result.append(replace(o, results=[names[r] for r in o.results], operands=operands))
    ends = [names[n] for n in last.operands]
    if last.name == "tt.return" and len(ends) == 1:
        return result, ends[0]
    if last.name not in ("cf.br", "cf.cond_br"):
        return None
    condition, given = (ends[:1], ends[1:]) if last.name == "cf.cond_br" else ([], ends)
    results = list[str]()
    for i, target in enumerate(re.findall(r"\^(\w+)", last.text)):
        own, given = given[: len(blocks[target].parameters)], given[len(blocks[target].parameters) :]
        inner = names | dict(zip(blocks[target].parameters, own, strict=True))
        if (way := _from(call, blocks, target, inner, f"{path}@{i}")) is None:
            return None
        result += way[0]
        results.append(way[1])
    if not condition:
        return result, results[0]
    operands, name = [*condition, *results], f"{path}@chosen"
    text = f"arith.select {', '.join(f'%{n}' for n in operands)} : {call.type}"
    choice = replace(last, name="arith.select", results=[name], operands=operands, text=text, type=call.type)
    return [*result, choice], name
