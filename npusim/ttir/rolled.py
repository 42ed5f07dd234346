"""Sums and maxima over the rows of a block, as loops over these rows: TTIR of the same kernel that has no others.

Partial results lie one behind another along an axis that is neither rows nor columns of a tile, as those of split keys
do: a block of all is one tile after another, and sums go from the first to the last.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.ttir.text import Op, shape_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

#: What a reduction begins with, by what it does.
_STARTS: Mapping[str, str] = MappingProxyType({"arith.addf": "0.0", "arith.maxnumf": "-inf", "arith.maximumf": "-inf"})


def rolled(operations: list[Op]) -> list[Op]:
    """Return a kernel's operations, with loops for reductions over rows; as they are where it has none, or loops."""
    ranges, dims = [o.results[0] for o in operations if o.name == "tt.make_range"], dict[str, int]()
    ranges = [r for r in ranges if _is_over_rows(operations, _dims(operations, [r]))]
    dims = _dims(operations, ranges)
    stored = {n for o in operations if not o.results for n in o.operands}
    if not ranges or stored & dims.keys() or any(o.body and o.name != "tt.reduce" for o in operations):
        return operations
    stages, ordered = _stages(operations, dims), list[Op]()
    reductions = [o for o in operations if _reduces(o, dims)]
    plain = [o for o in operations if o not in reductions and not dims.keys() & o.results]
    for stage in range(1 + max(stages.values())):
        ordered += [o for o in plain if max([stages[n] for n in o.operands if n in stages], default=0) == stage]
        if now := [o for o in reductions if stages[o.operands[0]] == stage]:
            ordered += _loop(now, operations, dims)
    return ordered


def _dims(operations: Sequence[Op], ranges: Collection[str]) -> dict[str, int]:
    """Return along which dimension values go over some ranges; the first where they do along two."""
    dims = dict[str, int]()
    for op in operations:
        known = [dims[n] for n in op.operands if n in dims]
        if not op.results or not (known or op.results[0] in ranges):
            continue
        at = known[0] if known else 0
        if op.name in ("tt.expand_dims", "tt.reduce"):
            axis = op.number("axis")
            if op.name == "tt.reduce" and axis == at:
                continue
            at += (at >= axis) if op.name == "tt.expand_dims" else -(at > axis)
        dims[op.results[0]] = at
    return dims


def _reduces(op: Op, dims: Mapping[str, int]) -> bool:
    return op.name == "tt.reduce" and dims.get(op.operands[0]) == op.number("axis")


def _is_over_rows(operations: Sequence[Op], dims: Mapping[str, int]) -> bool:
    """Return whether a sum or maximum along these dimensions leaves another."""
    return any(_reduces(o, dims) and shape_of(o.type)[0] and o.body[0].name in _STARTS for o in operations)


def _stages(operations: Sequence[Op], dims: Mapping[str, int]) -> dict[str, int]:
    """Return how many reductions, one after another, each value hangs on."""
    stages = dict[str, int]()
    for op in operations:
        stage = max([stages.get(n, 0) for n in op.operands], default=0) + _reduces(op, dims)
        stages |= dict.fromkeys(op.results, stage)
    return stages


def _loop(reductions: Sequence[Op], operations: Sequence[Op], dims: Mapping[str, int]) -> list[Op]:
    """Return a loop for some reductions, and the constants that it begins with."""
    line, needed, body = reductions[0].line, {o.operands[0] for o in reductions}, list[Op]()
    for op in reversed(operations):
        if needed.intersection(op.results):
            needed |= {n for n in op.operands if n in dims}
            name = op.results[0]
            if op.name == "tt.make_range":
                begin, end = op.number("start"), op.number("end")
                body.insert(0, Op("tt.splat", [name], ["row@"], "", "tensor<1xi32>", op.line))
            else:
                body.insert(0, replace(op, type=_thinner(op.type, dims[name])))
    carried, ends, before = list[str](), list[str](), [_constant("begin@", str(begin), "i32", line)]
    before += [_constant("end@", str(end), "i32", line), _constant("step@", "1", "i32", line)]
    for op in reductions:
        (name,), does = op.results, op.body[0].name
        before.append(_constant(f"{name}@start", _STARTS[does], op.type, line))
        body.append(replace(op, results=[f"{name}@one"]))
        text = f"{does} %{name}"
        body.append(Op(does, [f"{name}@next"], [f"{name}@", f"{name}@one"], text, op.type, op.line))
        carried += [f"{name}@", f"{name}@start"]
        ends.append(f"{name}@next")
    body.append(Op("scf.yield", [], ends, "", "", line))
    text, results = f"scf.for -> ({', '.join(o.type for o in reductions)})", [o.results[0] for o in reductions]
    return [*before, Op("scf.for", results, ["row@", "begin@", "end@", "step@", *carried], text, "", line, body)]


def _constant(name: str, value: str, type_: str, line: object) -> Op:
    value = f"dense<{value}>" if shape_of(type_)[0] else value
    return Op("arith.constant", [name], [], f"arith.constant {value} : {type_}", type_, line)  # type: ignore[arg-type]


def _thinner(type_: str, at: int) -> str:
    """Return a type with one element along a dimension."""

    def thin(match: re.Match[str]) -> str:
        sizes = match[1].split("x")[:-1]
        return "tensor<" + "".join(f"{1 if i == at else n}x" for i, n in enumerate(sizes))

    return re.sub(r"tensor<((?:\d+x)+)", thin, type_)
