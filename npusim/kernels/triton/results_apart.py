"""A kernel whose results have unlike shapes as several kernels, one for each tensor that it stores to.

A store needs no other store's result, so that each has the bits of the one kernel; times are those of several kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from npusim.kernels.triton.ttir_text import TYPES, Function, Op

STORES, LOADS = ("tt.store", "tt.descriptor_store"), ("tt.load", "tt.descriptor_load")
#: Operations that have to stay where an operation of theirs does, and those that store otherwise.
_CONTROL, _OTHERS = ("cf.", "block", "tt.return"), ("tt.atomic",)
_EFFECTS = (*STORES, *_OTHERS)


def results_apart(function: Function) -> list[Function]:
    """Return a kernel for each tensor that a kernel stores to, in the order of the stores; none where it has one.

    None too for kernels with loops or branches that store: what these leave out is not looked at.  An ``if`` around all
    stores, without another way, is an early return.
    """
    operations = function.operations
    guards = [o for o in operations if _is_return(o)]
    whole = [*(o for o in operations if o not in guards), *guards[0].body] if len(guards) == 1 else operations
    if any(o.name.startswith(_OTHERS) or o.name in STORES for o in inside(whole)):
        return []
    stores, sources = [o for o in whole if o.name in STORES], sources_of(operations)
    if guards and any(o in operations for o in stores):
        return []
    tensors = {n for n, t in function.parameters.items() if t.startswith(("!tt.ptr", "!tt.tensordesc"))}
    of_each = [roots_of(o.operands[0], sources) for o in stores]
    results = list(dict.fromkeys(min(roots) for roots in of_each))
    if len(results) < 2 or any(o.name.startswith(_OTHERS) for o in whole):
        return []
    parts = [
        needed_by(operations, [o for o, of in zip(stores, of_each, strict=True) if result in of]) for result in results
    ]
    for result, part in zip(results, parts, strict=True):
        loads = [o for o in (*part, *inside(part)) if o.name in LOADS]
        allowed = tensors - ({*results} - {result})
        if any(not roots_of(o.operands[0], sources) <= allowed for o in loads):
            return []  # a result that another one may be computed from, or a tensor that is not known
    if any(len(roots) > 1 or not roots <= tensors for roots in of_each):
        return []
    return [function._replace(operations=part) for part in parts]


def _is_return(op: Op) -> bool:
    """Return whether an operation is an ``if`` whose only way stores."""
    return op.name == "scf.if" and not op.results and not op.otherwise and any(o.name in STORES for o in op.body)


def inside(operations: Sequence[Op]) -> Iterator[Op]:
    """Return the operations within loops and branches of some."""
    for op in operations:
        for inner in (*op.body, *op.otherwise):
            yield inner
            yield from inside([inner])


def sources_of(operations: Sequence[Op]) -> dict[str, list[str]]:
    """Return the names that each name may be a pointer of: for a value that a loop carries its start and its end."""
    sources = dict[str, list[str]]()
    for op in (*operations, *inside(operations)):
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
    """Return what a pointer may belong to: parameters, and values whose sources are not known."""
    found, seen, rest = set[str](), set[str](), [name]
    while rest:
        if (one := rest.pop()) not in seen:
            seen.add(one)
            rest += sources.get(one, [])
            found |= set() if one in sources else {one}
    return found


def _with_states(loop: Op, needed: set[str], *, stores: bool) -> Op:
    """Return a loop with only the states from which its needed results, its ``stores`` or such states are computed."""
    names, starts = loop.operands[4::2], loop.operands[5::2]
    own = [o for o in loop.body if stores and any(i.name.startswith(_EFFECTS) for i in (o, *inside([o])))]
    if not names:  # it ends without a yield
        return replace(loop, body=needed_by(loop.body, own))
    ends, live = loop.body[-1].operands, [i for i, r in enumerate(loop.results) if r in needed]
    while True:
        end = replace(loop.body[-1], operands=[ends[i] for i in live])
        body = needed_by([*loop.body[:-1], end], [*own, end])
        read = {n for o in (*body, *inside(body)) for n in o.operands}
        more = [i for i, n in enumerate(names) if i not in live and n in read]
        if not more:
            break
        live = sorted({*live, *more})
    before, arrow, after = loop.text.partition("-> (")
    types = TYPES.findall(after)
    carried = [n for i in live for n in (names[i], starts[i])]
    text = f"{before}{arrow}{', '.join(types[i] for i in live)})" if live else before
    return replace(
        loop, results=[loop.results[i] for i in live], operands=[*loop.operands[:4], *carried], body=body, text=text
    )


def needed_by(operations: Sequence[Op], stores: Sequence[Op]) -> list[Op]:
    """Return the operations that some stores need, and those that return early."""
    kept, needed = list[Op](), set[str]()
    for op in reversed(operations):
        is_return = _is_return(op) and any(o in op.body for o in stores)
        if op in stores or op.name.startswith(_CONTROL) or is_return or needed.intersection(op.results):
            one = _with_states(op, needed, stores=op in stores) if op.name == "scf.for" else op
            one = replace(op, body=needed_by(op.body, stores)) if is_return else one
            kept.insert(0, one)
            needed |= {n for o in (one, *inside([one])) for n in o.operands}
    return kept
