"""Sums and maxima over the rows of a block, as loops over these rows: TTIR of the same kernel without the blocks.

Partial results follow one another along an axis that is neither the rows nor the columns of a tile, like the results of
split keys: a block of all results is read as one tile after another, and sums run from the first to the last.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from npusim.kernels.triton.ttir_text import Function, Line, Op, makers, shape_of

#: Reductions by the operation of their region: the word, the start value, and the rule of NaN of a maximum.
REDUCTIONS: Mapping[str, tuple[str, float, str]] = MappingProxyType(
    {
        "arith.addf": ("sum", 0.0, ""),
        "arith.maxnumf": ("max", -float("inf"), ""),
        "arith.maximumf": ("max", -float("inf"), "propagate"),
    }
)


def rolled(operations: list[Op]) -> list[Op]:
    """Return a kernel's operations, with loops for reductions over rows; unchanged if it has no such reductions, or
    already has loops.
    """
    ranges = [o.results[0] for o in operations if o.name == "tt.make_range"]
    dims = _dims(operations, [r for r in ranges if _is_over_rows(operations, _dims(operations, [r]))])
    stored = {n for o in operations if not o.results for n in o.operands}
    if not dims or stored & dims.keys() or any(o.body and o.name != "tt.reduce" for o in operations):
        return operations
    stages, ordered = dict[str, int](), list[Op]()

    def stage_of(op: Op) -> int:
        """Return the number of successive reductions after which an operation can be executed."""
        return max((stages.get(n, 0) for n in op.operands), default=0)

    for op in operations:
        stages |= dict.fromkeys(op.results, stage_of(op) + _reduces(op, dims))
    for stage in range(1 + max(stages.values())):
        now = [o for o in operations if stage_of(o) == stage]
        ordered += [o for o in now if not _reduces(o, dims) and not dims.keys() & o.results]
        if reductions := [o for o in now if _reduces(o, dims)]:
            ordered += _loop(reductions, operations, dims)
    return ordered


def _dims(operations: Sequence[Op], ranges: Collection[str]) -> dict[str, int]:
    """Return the dimension along which values depend on some ranges, the first one if there are two."""
    dims = dict.fromkeys(ranges, 0)
    for op in operations:
        known = next((dims[n] for n in op.operands if n in dims), None)
        if known is not None and op.results and not _reduces(op, dims):
            moves = {"tt.expand_dims": 1, "tt.reduce": -1}.get(op.name, 0)
            dims[op.results[0]] = known + (moves if moves and known >= op.number("axis") else 0)
    return dims


def _reduces(op: Op, dims: Mapping[str, int]) -> bool:
    return op.name == "tt.reduce" and dims.get(op.operands[0]) == op.number("axis")


def _is_over_rows(operations: Sequence[Op], dims: Mapping[str, int]) -> bool:
    """Return whether a dimension remains after a sum or maximum along these dimensions."""
    return any(
        _reduces(o, dims) and o.number("axis") < len(shape_of(o.type)[0]) and o.body[0].name in REDUCTIONS
        for o in operations
    )


def _loop(reductions: Sequence[Op], operations: Sequence[Op], dims: Mapping[str, int]) -> list[Op]:
    line, needed, body, bounds = reductions[0].line, {o.operands[0] for o in reductions}, list[Op](), (0, 0)
    for op in reversed(operations):
        if needed.intersection(op.results):
            needed |= {n for n in op.operands if n in dims}
            body.insert(0, replace(op, type=_thinner(op.type, dims[op.results[0]])))
            if op.name == "tt.make_range":
                bounds = op.number("start"), op.number("end")
                body[0].name, body[0].operands = "tt.splat", ["row@"]
    numbers = zip(("begin@", "end@", "step@"), (*bounds, 1), strict=True)
    before, carried, ends = [_constant(n, x, "i32", line) for n, x in numbers], list[str](), list[str]()
    for op in reductions:
        (name,), does = op.results, op.body[0].name
        before.append(_constant(f"{name}@start", REDUCTIONS[does][1], op.type, line))
        body.append(replace(op, results=[f"{name}@one"], text=_thinner(op.text, op.number("axis"))))
        body.append(Op(does, [f"{name}@next"], [f"{name}@", f"{name}@one"], does, op.type, op.line))
        carried += [f"{name}@", f"{name}@start"]
        ends.append(f"{name}@next")
    body.append(Op("scf.yield", [], ends, "", "", line))
    text, results = f"scf.for -> ({', '.join(o.type for o in reductions)})", [o.results[0] for o in reductions]
    return [*before, Op("scf.for", results, ["row@", "begin@", "end@", "step@", *carried], text, "", line, body)]


def _constant(name: str, value: float, type_: str, line: Line) -> Op:
    text = f"arith.constant {f'dense<{value}>' if shape_of(type_)[0] else value} : {type_}"
    return Op("arith.constant", [name], [], text, type_, line)


def _thinner(type_: str, at: int) -> str:
    return re.sub(rf"(tensor<(?:\d+x){{{at}}})\d+x", r"\g<1>1x", type_)


def with_scale_before_maximum(operations: list[Op]) -> list[Op]:
    """Return a kernel's operations in which maxima of scaled tiles replace scaled maxima of tiles if both have the same
    scale.

    Rounding is monotone, so that both have the same bits if the scale is above 0: `SCALE` requires that.
    """
    return [replace(o, body=_scaled_first(o.body, operations)) if o.name == "scf.for" else o for o in operations]


#: An operation that TTIR does not have: its operand must be above 0.
SCALE = "npusim.scale"


def _scaled_first(body: list[Op], outer: Sequence[Op]) -> list[Op]:
    result = makers([*outer, *body])

    def scale_of(op: Op) -> str:
        """Return the scalar to which all elements of the second factor are equal; empty if there is none."""
        known = result.get(op.operands[1]) if op.name == "arith.mulf" else None
        return known.operands[0] if known is not None and known.name == "tt.splat" else ""

    for largest in [o for o in body if o.name == "tt.reduce" and o.body and o.body[0].name in _MAXIMA]:
        readers = [o for o in body if largest.results[0] in o.operands]
        scaled = [o for o in body if o.operands[:1] == largest.operands and scale_of(o)]
        if len(readers) == len(scaled) == 1 and scale_of(readers[0]) == scale_of(scaled[0]):
            ((small,), (tile,)), gone = (readers, scaled), (readers[0], scaled[0], result[scaled[0].operands[1]])
            rest = [
                replace(o, operands=[largest.results[0] if n == small.results[0] else n for n in o.operands])
                for o in body
                if o not in gone and o is not largest
            ]
            at = 1 + max((i for i, o in enumerate(rest) if set(o.results) & set(largest.operands)), default=-1)
            scale = Op(SCALE, [], [scale_of(tile)], SCALE, "", tile.line)
            moved = replace(largest, operands=tile.results)
            return [*rest[:at], result[tile.operands[1]], scale, tile, moved, *rest[at:]]
    return body


_MAXIMA = tuple(name for name, (word, *_) in REDUCTIONS.items() if word == "max")


def with_scratch_kept(function: Function) -> tuple[list[Op], dict[str, Op]]:
    """Return operations without the values that each program stores and immediately loads again; also return the
    omitted stores by tensor.

    A load of the same pointers under the same mask gives the value of the previous store; a tensor that has only such
    accesses needs neither load nor store.
    """
    operations = function.operations
    every = [o for op in operations for o in (op, *op.within())]
    pointers = frozenset(n for n, kind in function.parameters.items() if "ptr" in kind)
    result = makers(every)
    kept: dict[str, str] = {}
    pairs, stores = list[Op](), list[Op]()
    for block in (operations, *(b for o in every for b in (o.body, o.otherwise))):
        last: Op | None = None
        for op in block:
            if op.name == "tt.store" or any(o.name == "tt.store" for o in op.within()):
                last = op if op.name == "tt.store" else None
            elif op.name == "tt.load" and last and op.operands == [*last.operands[:1], *last.operands[2:]]:
                kept[op.results[0]] = last.operands[1]
                pairs += [op, last]
                stores += [last] if last not in stores else []

    if not pairs:
        return operations, {}
    starts = {n: o for o in every if o.name == "scf.for" for n in o.operands[4::2]}

    def roots(name: str) -> frozenset[str]:
        """Return the tensors to which a pointer may belong; for a pointer that a loop carries, those of all
        its values.
        """
        seen, open_ = set[str](), [name]
        while open_:
            if (n := open_.pop()) in seen:
                continue
            seen.add(n)
            made_by = [o for o in (result.get(n), starts.get(n)) if o is not None and o.name != "tt.load"]
            open_ += [m for o in made_by for m in (*o.operands, *_ends(o))]
        return pointers & seen

    rest = [o for o in every if o.name in ("tt.load", "tt.store") and o not in pairs]
    others = frozenset[str]().union(*(roots(o.operands[0]) for o in rest))
    stores = [o for o in stores if not roots(o.operands[0]) & others]
    if not stores:
        return operations, {}
    gone = [o for o in pairs if any(o.operands[0] == s.operands[0] for s in stores)]

    def renamed(name: str) -> str:
        while name in kept:
            name = kept[name]
        return name

    def without(block: list[Op]) -> list[Op]:
        return [
            replace(o, operands=[renamed(n) for n in o.operands], body=without(o.body), otherwise=without(o.otherwise))
            for o in block
            if o not in gone
        ]

    kept = {o.results[0]: kept[o.results[0]] for o in gone if o.results}
    return without(operations), {n: o for o in stores for n in sorted(roots(o.operands[0]))}


def _ends(op: Op) -> list[str]:
    """Return the last operation of an operation's branches, or of its loop's body."""
    return [n for block in (op.body, op.otherwise) if block for n in block[-1].operands]
