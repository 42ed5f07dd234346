"""Divides a kernel whose results have different shapes into several kernels, one for each tensor that it stores.

A store needs no other store's result, so that each result has the bits of the single kernel; the time is that of
several kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from npusim.kernels.triton.ttir_text import TYPES, Function, Op, every_of, reached

STORES, LOADS = ("tt.store", "tt.descriptor_store"), ("tt.load", "tt.descriptor_load")
#: Operations that remain if one of their inner operations remains, and operations with other kinds of stores.
_CONTROL, _OTHERS = ("cf.", "block", "tt.return"), ("tt.atomic",)
#: Operations that may have stores inside.
_REPEATED = ("scf.for", "scf.if")
_EFFECTS = (*STORES, *_OTHERS)


def results_apart(function: Function, *, by_store: bool = False) -> list[Function]:
    """Return a kernel for each tensor that a kernel stores to, in the order of the stores; an empty list if it stores
    only one tensor.

    ``by_store``: return a kernel for each store of a tensor that has several stores and is not loaded; an empty list if
    there is no such tensor.  Each kernel has those loops and branches that contain an operation that it needs.
    """
    operations = function.operations
    every = every_of(operations)
    stores, sources = [o for o in every if o.name in STORES], sources_of(operations)
    stores_within = (o for o in every if o.name not in _REPEATED and any(x.name in STORES for x in o.within()))
    if any(o.name.startswith(_OTHERS) for o in every) or next(stores_within, None):
        return []
    tensors = {n for n, t in function.parameters.items() if t.startswith(("!tt.ptr", "!tt.tensordesc"))}
    of_each = [roots_of(o.operands[0], sources) for o in stores]
    if any(len(roots) > 1 or not roots <= tensors for roots in of_each):
        return []
    results = list(dict.fromkeys(min(roots) for roots in of_each))
    loaded = [roots_of(o.operands[0], sources) for o in every if o.name in LOADS]
    groups = list[tuple[str, list[Op]]]()
    for result in results:
        own = [o for o, of in zip(stores, of_each, strict=True) if result in of]
        is_cut = by_store and not any(result in roots for roots in loaded)
        groups += [(result, [o]) for o in own] if is_cut else [(result, own)]
    if len(groups) < 2 or (by_store and len(groups) == len(results)):
        return []
    parts = [needed_by(operations, own) for _, own in groups]
    for (result, _), part in zip(groups, parts, strict=True):
        loads = [o for o in every_of(part) if o.name in LOADS]
        allowed = tensors - ({*results} - {result})
        if any(not roots_of(o.operands[0], sources) <= allowed for o in loads):
            return []  # another result may be computed from this one, or the tensor is not known
    return [function._replace(operations=part) for part in parts]


def sources_of(operations: Sequence[Op]) -> dict[str, list[str]]:
    """Return the parameters to which each name may point; for a value that a loop carries, those of its start and of
    its end.
    """
    sources = dict[str, list[str]]()
    for op in every_of(operations):
        if op.name == "scf.for":
            names, starts = op.operands[4::2], op.operands[5::2]
            ends = op.body[-1].operands if starts else []  # a loop that carries nothing ends without a yield
            carried = [[start, end] for start, end in zip(starts, ends, strict=True)]
            sources |= dict(zip(names, carried, strict=True)) | dict(zip(op.results, carried, strict=True))
        elif op.operands:
            of = op.operands[1:] if op.name == "arith.select" else op.operands[:1]
            sources |= dict.fromkeys(op.results, of)
    return sources


def roots_of(name: str, sources: dict[str, list[str]]) -> set[str]:
    """Return the possible owners of a pointer: parameters, and values whose sources are not known."""
    return {one for one in reached(name, sources) if one not in sources}


def _with_states(loop: Op, needed: set[str], stores: Sequence[Op]) -> Op:
    """Return a loop with some of its stores, and with only those states from which these stores, the loop's needed
    results, or other such states are computed.
    """
    if not loop.results:
        return replace(loop, body=needed_by(loop.body, stores))
    names, starts, ends = loop.operands[4::2], loop.operands[5::2], loop.body[-1].operands
    live = [i for i, r in enumerate(loop.results) if r in needed]
    while True:
        end = replace(loop.body[-1], operands=[ends[i] for i in live])
        body = needed_by([*loop.body[:-1], end], [end, *stores])
        read = {n for o in every_of(body) for n in o.operands}
        more = [i for i, n in enumerate(names) if i not in live and n in read]
        if not more:
            break
        live = sorted({*live, *more})
    carried = [n for i in live for n in (names[i], starts[i])]
    text = _with_types(loop.text, live)
    return replace(
        loop, results=[loop.results[i] for i in live], operands=[*loop.operands[:4], *carried], body=body, text=text
    )


def _with_types(text: str, live: Sequence[int]) -> str:
    """Return the text of a loop or branch with the types of some of its results."""
    before, arrow, after = text.partition("-> (")
    types = TYPES.findall(after)
    return f"{before}{arrow}{', '.join(types[i] for i in live)})" if live else before


def _within(op: Op, needed: set[str], stores: Sequence[Op]) -> Op:
    """Return a loop or branch with the operations from which its needed results and some stores are computed."""
    if op.name == "scf.for":
        return _with_states(op, needed, stores)
    if op.name != "scf.if":
        return op
    if not op.results:
        return replace(op, body=needed_by(op.body, stores), otherwise=needed_by(op.otherwise, stores))
    live = [i for i, r in enumerate(op.results) if r in needed]
    ways = list[list[Op]]()
    for way in (op.body, op.otherwise):
        *rest, end = way
        end = replace(end, operands=[end.operands[i] for i in live])
        ways.append(needed_by([*rest, end], [end, *stores]))
    text = _with_types(op.text, live)
    return replace(op, results=[op.results[i] for i in live], body=ways[0], otherwise=ways[1], text=text)


def needed_by(operations: Sequence[Op], stores: Sequence[Op]) -> list[Op]:
    """Return the operations that some stores need, and the operations that end a program early.

    If ``stores`` has a loop or branch, all stores and atomic additions inside it are included.
    """
    kept, needed = list[Op](), set[str]()
    for op in reversed(operations):
        is_around = any(o in stores for o in op.within())
        if op in stores or op.name.startswith(_CONTROL) or is_around or needed.intersection(op.results):
            own = [i for i in op.within() if i.name.startswith(_EFFECTS)] if op in stores else []
            one = _within(op, needed, [*stores, *own])
            kept.insert(0, one)
            needed |= {n for o in (one, *one.within()) for n in o.operands}
    return kept
