"""A loop that stores tiles, followed by a store that replaces one element of a tile, as a loop that chooses this
element.

Losses store a row's gradient tile by tile, and then the gradient of the label, whose sum is rounded once.  With a
barrier between the two, the second store is the last one; without a barrier their order is free, and the kernel is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from npusim.kernels.triton.results_apart import LOADS, STORES, roots_of, sources_of
from npusim.kernels.triton.ttir_text import Function, Op, makers, shape_of

#: An operation that TTIR does not have: in every program, one of the tiles has the element of the first mask, and the
#: second mask does not hide this element.
MEETS = "npusim.meets"
BARRIERS = ("gpu.barrier", "ttg.barrier", "ttg.local_barrier")
#: Operations that lead to an element's store in only some programs.
_CONTROL = ("cf.", "block", "tt.return")
#: Operations that a compiler may move from after a loop to before it: only their operands decide their results.
_FREE = ("arith.", "math.", "tt.extern_elementwise", "tt.fp_to_fp")


def with_elements_chosen(function: Function) -> Function:
    """Return a kernel in which such elements are chosen in their loop; the same kernel if there are none."""
    operations = function.operations
    while (changed := _changed(function, operations)) is not None:
        operations = changed
    return function._replace(operations=operations)


def _changed(function: Function, operations: list[Op]) -> list[Op] | None:
    """Return operations with the first such element chosen in its loop; None if there is no such element."""
    result, sources = makers(operations), sources_of(operations)
    loops = [(i, o) for i, o in enumerate(operations) if o.name == "scf.for"]
    for at, loop in loops:
        stores = [o for o in loop.body if o.name == "tt.store" and len(o.operands) == len(("pointer", "value", "mask"))]
        for store in stores:
            roots = roots_of(store.operands[0], sources)
            behind = [o for o in operations[at + 1 :] if o.name in STORES and roots & roots_of(o.operands[0], sources)]
            is_one = len(behind) == 1 and len(behind[0].operands) == len(("pointer", "value"))
            if not is_one or shape_of(_type_of(behind[0].operands[1], result, function))[0]:
                continue
            (element,) = behind
            end = operations.index(element)
            between = operations[at + 1 : end]
            if not any(o.name in BARRIERS for o in between) or any(o.name.startswith(_CONTROL) for o in between):
                continue
            moved = _moved(element, between, loop)
            chosen = _chosen(function, loop, store, element, {**result, **makers(loop.body)})
            if moved is None or chosen is None:
                continue
            rest = [o for o in between if o not in moved]
            return [*operations[:at], *moved, chosen, *rest, *operations[end + 1 :]]
    return None


def _type_of(name: str, made: dict[str, Op], function: Function) -> str:
    return made[name].type if name in made else function.parameters.get(name, "")


def _moved(element: Op, between: Sequence[Op], loop: Op) -> list[Op] | None:
    """Return the operations after a loop that an element's address and value need; None if some cannot be moved."""
    needed, moved = set(element.operands), list[Op]()
    for op in reversed(between):
        if not needed.intersection(op.results):
            continue
        if op.body or not (op.name.startswith(_FREE) or op.name == "tt.addptr"):
            return None
        moved.insert(0, op)
        needed |= set(op.operands)
    return None if needed.intersection(loop.results) else moved


def _chosen(function: Function, loop: Op, store: Op, element: Op, made: dict[str, Op]) -> Op | None:
    """Return a loop whose store has an element's value at the element's address; None for other addresses.

    Both addresses are the same parameter plus sums of integers.
    """
    if any(o.name in LOADS and o in loop.body[loop.body.index(store) :] for o in loop.body):
        return None  # a later load in the loop may read a tile that is stored but not yet overwritten
    tile, place = (_terms(o.operands[0], made) for o in (store, element))
    if tile is None or place is None or tile[0] != place[0]:
        return None
    value = store.operands[1]
    kind, line = _type_of(value, made, function), element.line
    (shape, fmt), called = shape_of(kind), f"{element.operands[1]}@chosen{element.operands[0]}"
    block = "x".join(map(str, shape))
    wide = f"tensor<{block}xi64>"
    written = list[Op]()

    def write(name: str, operands: list[str], text: str, type_: str) -> str:
        result = f"{called}{len(written)}"
        written.append(Op(name, [result], operands, f"{name} {text}", type_, line))
        return result

    def added(terms: Sequence[str]) -> str | None:
        """Write the sum of integers as a block of 64 bits; None if a type is not known."""
        total = ""
        for term in terms:
            type_ = _type_of(term, made, function)
            sizes, bits = shape_of(type_)
            if bits not in ("i32", "i64") or sizes not in ((), shape):
                return None
            one = term
            if not sizes:
                one = write("tt.splat", [one], f": {bits} -> tensor<{block}x{bits}>", f"tensor<{block}x{bits}>")
            if bits == "i32":
                one = write("arith.extsi", [one], f": tensor<{block}xi32> to {wide}", wide)
            total = write("arith.addi", [total, one], f": {wide}", wide) if total else one
        return total or None

    sums = added([*tile[1], *tile[2]]), added([*place[1], *place[2]])
    if len(shape) != 1 or None in sums or not tile[2] or place[2]:
        return None
    one, other = (s for s in sums if s is not None)
    is_one = write("arith.cmpi", [one, other], f"eq, : {wide}", f"tensor<{block}xi1>")
    spread = write("tt.splat", [element.operands[1]], f": {fmt} -> {kind}", kind)
    chosen = write("arith.select", [is_one, spread, value], f": tensor<{block}xi1>, {kind}", kind)
    written.insert(-2, Op(MEETS, [], [is_one, store.operands[2]], MEETS, "", line))
    at = loop.body.index(store)
    new = replace(store, operands=[store.operands[0], chosen, store.operands[2]])
    return replace(loop, body=[*loop.body[:at], *written, new, *loop.body[at + 1 :]])


def _terms(name: str, made: dict[str, Op]) -> tuple[str, list[str], list[str]] | None:
    """Return the parameter to which an address belongs, and the integers and blocks that are added to it.

    None for an address that another operation computes.
    """
    numbers, blocks = list[str](), list[str]()
    while (op := made.get(name)) is not None:
        if op.name == "tt.splat":
            name = op.operands[0]
        elif op.name == "tt.addptr":
            name, by = op.operands
            (blocks if re.search(r"tensor<", op.type) else numbers).append(by)
        else:
            return None
    return name, numbers, blocks
