"""Loops whose states begin with computed values, as two kernels: one stores these values, and the states of the other
begin as tensors.

The first kernel stores each value where the launch stores a result of the same shape, but in a separate tensor; the
second kernel loads it there.  The bits are those of the single kernel; the time includes the tensor's traffic and one
more launch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from npusim.kernels.triton.results_apart import LOADS, STORES, needed_by
from npusim.kernels.triton.tensor_axes import View
from npusim.kernels.triton.ttir_text import FORMATS, Function, Op, every_of, makers, shape_of

_POINTERS = ("tt.addptr", "tt.splat", "tt.broadcast")


class StartsApart(NamedTuple):
    """The kernel that stores the start values of states, the kernel that loads them, and the arguments of both."""

    before: Function
    after: Function
    arguments: dict[str, Any]


def starts_apart(function: Function, arguments: Mapping[str, Any]) -> StartsApart | None:
    """Return a kernel as two kernels if states of its loop begin with computed values; None for another kernel."""
    operations = function.operations
    loops = [o for o in operations if o.name == "scf.for" and len(o.operands) > 4]
    if not loops or any(o.name.startswith(("cf.", "tt.atomic")) for o in every_of(operations)):
        return None
    loop = loops[0]
    result = makers(operations)
    starts = [n for n in loop.operands[5::2] if _is_computed(n, result)]
    stores = [o for o in operations[operations.index(loop) :] if o.name in STORES]
    before, loads, kinds = list[Op](), list[Op](), dict[str, str]()
    given, renamed = dict(arguments), dict[str, str]()
    for start in starts:
        shape, fmt = shape_of(result[start].type.split(" to ")[-1].split(" -> ")[-1])
        like = next((s for s in stores if _shape(s.operands[0], result) == shape), None)
        root = _root(like.operands[0], result, function) if like is not None else ""
        view = arguments.get(root)
        if like is None or not isinstance(view, View) or fmt not in FORMATS:
            return None
        name = f"{re.sub(r'[^A-Za-z0-9]', '_', start)}_start"
        kinds[name] = f"!tt.ptr<{fmt}>"
        own = replace(view, name=name, fmt=FORMATS[fmt] if view.fmt != "float64" else "float64", is_workspace=True)
        given[name] = replace(own, storage=-1)
        chain, pointer = pointers_into(like.operands[0], root, name, fmt, result)
        mask = like.operands[2:3]
        before += [*chain, replace(like, operands=[pointer, start, *mask])]
        renamed[start] = f"{name}_value"
        type_ = f"tensor<{'x'.join(map(str, (*shape, fmt)))}>" if shape else fmt
        loads += [*chain, Op("tt.load", [renamed[start]], [pointer, *mask], "tt.load", type_, loop.line)]
    if not starts:
        return None
    at = operations.index(loop)
    addresses = needed_by([*operations, *loads], [o for o in loads if o.name == "tt.load"])
    early = [o for o in addresses if o in operations[at:] and o.results]
    if any(o.body or o.name in LOADS for o in early):
        return None
    changed = replace(loop, operands=[*loop.operands[:5], *(renamed.get(n, n) for n in loop.operands[5:])])
    rest = [o for o in operations[at + 1 :] if o not in early]
    after = [*operations[:at], *early, *loads, changed, *rest]
    ends = [o for o in after if o.name in STORES or any(i.name in STORES for i in o.within())]
    parameters = {**function.parameters, **kinds}
    first, second = (
        function._replace(parameters=parameters, operations=needed_by(every, of))
        for every, of in (([*operations, *before], [o for o in before if o.name in STORES]), (after, ends))
    )
    return StartsApart(first, second, given)


def _is_computed(name: str, made: Mapping[str, Op]) -> bool:
    """Return whether a float is computed from values that a kernel loads, and is neither loaded itself nor the result
    of a loop.
    """
    op = made.get(name)
    if op is None or op.name in ("tt.load", "scf.for") or "tt.ptr" in op.type:
        return False
    if shape_of(op.type.split(" to ")[-1].split(" -> ")[-1])[1] not in FORMATS:
        return False
    seen, waiting = list[Op](), [name]
    while waiting:
        one = made.get(waiting.pop())
        if one is not None and one not in seen:
            seen.append(one)
            if one.name in LOADS:
                return True
            waiting += one.operands
    return False


def _shape(pointer: str, made: Mapping[str, Op]) -> tuple[int, ...] | None:
    """Return the shape of a block of pointers; None if it is not known."""
    return shape_of(made[pointer].type)[0] if pointer in made else None


def _root(pointer: str, made: Mapping[str, Op], function: Function) -> str:
    """Return the parameter from which a pointer is computed; empty if it is not known."""
    while pointer in made and made[pointer].name in _POINTERS:
        pointer = made[pointer].operands[0]
    return pointer if pointer in function.parameters else ""


def pointers_into(pointer: str, root: str, name: str, fmt: str, made: Mapping[str, Op]) -> tuple[list[Op], str]:
    """Return the operations that compute a pointer's addresses in another tensor, and the pointer to that tensor."""
    if pointer == root:
        return [], name
    op = made[pointer]
    chain, base = pointers_into(op.operands[0], root, name, fmt, made)
    text, type_ = (re.sub(r"!tt\.ptr<\w+>", f"!tt.ptr<{fmt}>", x) for x in (op.text, op.type))
    own = f"{pointer}@{name}"
    return [*chain, replace(op, results=[own], operands=[base, *op.operands[1:]], text=text, type=type_)], own
