"""A kernel whose results have unlike shapes as several kernels, one for each tensor that it stores to.

A store needs no other store's result, so that each has the bits of the one kernel; times are those of several kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from npusim.kernels.triton.ttir_text import TYPES, Function, Op

_STORES, _LOADS = ("tt.store", "tt.descriptor_store"), ("tt.load", "tt.descriptor_load")
#: Operations that have to stay where an operation of theirs does, and those that store otherwise.
_CONTROL, _OTHERS = ("cf.", "block", "tt.return"), ("tt.atomic",)


def results_apart(function: Function) -> list[Function]:
    """Return a kernel for each tensor that a kernel stores to, in the order of the stores; none where it has one.

    None too for kernels with loops or branches that store: what these leave out is not looked at.
    """
    operations = function.operations
    made = {r: o for o in operations for r in o.results}
    if any(o.name.startswith(_OTHERS) or o.name in _STORES for o in _inside(operations)):
        return []
    stores = [o for o in operations if o.name in _STORES]
    roots = list(dict.fromkeys(_root(o.operands[0], made) for o in stores))
    if len(roots) < 2 or any(o.name.startswith(_OTHERS) for o in operations):
        return []
    parts = [_needed(operations, [o for o in stores if _root(o.operands[0], made) == root]) for root in roots]
    for root, part in zip(roots, parts, strict=True):
        loads = [o for o in (*part, *_inside(part)) if o.name in _LOADS]
        if any(_root(o.operands[0], made) in {*roots} - {root} for o in loads):
            return []  # a result that another one may be computed from
    return [function._replace(operations=part) for part in parts]


def _inside(operations: Sequence[Op]) -> Iterator[Op]:
    for op in operations:
        for inner in (*op.body, *op.otherwise):
            yield inner
            yield from _inside([inner])


def _root(name: str, made: dict[str, Op]) -> str:
    """Return the parameter that a pointer belongs to; of one that a loop carries the value itself."""
    while name in made and made[name].operands:
        name = made[name].operands[0]
    return name


def _with_states(loop: Op, needed: set[str]) -> Op:
    """Return a loop with the states alone that its needed results, or other such states, are computed from."""
    names, starts, ends = loop.operands[4::2], loop.operands[5::2], loop.body[-1].operands
    live = [i for i, r in enumerate(loop.results) if r in needed]
    while True:
        end = replace(loop.body[-1], operands=[ends[i] for i in live])
        body = _needed([*loop.body[:-1], end], [end])
        read = {n for o in (*body, *_inside(body)) for n in o.operands}
        more = [i for i, n in enumerate(names) if i not in live and n in read]
        if not more:
            break
        live = sorted({*live, *more})
    before, arrow, after = loop.text.partition("-> (")
    types = TYPES.findall(after)
    carried = [n for i in live for n in (names[i], starts[i])]
    text = f"{before}{arrow}{', '.join(types[i] for i in live)})"
    return replace(
        loop, results=[loop.results[i] for i in live], operands=[*loop.operands[:4], *carried], body=body, text=text
    )


def _needed(operations: Sequence[Op], stores: Sequence[Op]) -> list[Op]:
    """Return the operations that some stores need, and those that return early."""
    kept, needed = list[Op](), set[str]()
    for op in reversed(operations):
        if op in stores or op.name.startswith(_CONTROL) or needed.intersection(op.results):
            one = _with_states(op, needed) if op.name == "scf.for" else op
            kept.insert(0, one)
            needed |= {n for o in (one, *_inside([one])) for n in o.operands}
    return kept
