"""Blocks of three axes as blocks of two axes: separate programs have the same TTIR for each index along one of the
axes.

No operation may join elements along that axis, so that no value depends on the division; times are those of this number
of programs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from npusim.kernels.triton.ttir_text import Function, Op, every_of, makers, shape_of

#: An operation that TTIR does not have: the index along the omitted axis, for each part of a program.
PART = "npusim.program_part"
#: Operations whose operands and results have equally many axes, but different ones; and operations that join elements
#: of a block.
_OTHERS = ("tt.dot", "tt.reshape", "tt.trans", "tt.join", "tt.split", "tt.cat", "tt.scan", "tt.gather", "tt.atomic")
#: Operations that each reader may execute separately.
_COPIED = ("arith.constant", "tt.expand_dims", "tt.splat", "tt.broadcast")
_TYPE = re.compile(r"tensor<((?:\d+x)+)((?:!tt\.ptr<\w+>|\w+))>")
#: The axes of a block with three axes.
THREE = 3


def without_third_axis(function: Function) -> Iterator[tuple[Function, int]]:
    """Yield a kernel without one of the axes of its blocks of three, and the number of indices of that axis; nothing if
    there are no such blocks.

    The likeliest axis comes first: the one with the fewest indices that is not the last.
    """
    every = every_of(function.operations)
    if not any(len(shape) >= THREE for o in every for shape, _ in _types(o.text)):
        return
    every = with_own_axes(function.operations)
    function = function._replace(operations=every)
    shapes = [shape for o in every for shape, _ in _types(o.text) if len(shape) >= THREE]
    if any(len(shape) > THREE for shape in shapes) or any(o.body and o.name != "tt.reduce" for o in every):
        return
    sizes = [max(shape[i] for shape in shapes) for i in range(THREE)]
    for axis in sorted(range(THREE), key=lambda i: (i == THREE - 1, sizes[i])):
        known = _axes(every, axis)
        if sizes[axis] > 1 and known is not None:
            yield _without(function, known, sizes[axis]), sizes[axis]


def without_axis_of_one(function: Function) -> Function:
    """Return a kernel whose blocks of three axes lose an axis with one index; unchanged if there are no such axes, or
    if an operation runs along the axis or exchanges axes.
    """
    every = every_of(function.operations)
    shapes = [shape for o in every for shape, _ in _types(o.text) if len(shape) >= THREE]
    axes = [i for i in range(THREE) if shapes and all(len(shape) == THREE and shape[i] == 1 for shape in shapes)]
    if not axes:
        return function
    of_three = [o for o in every if any(len(shape) == THREE for shape, _ in _types(o.text))]
    if any(o.name.startswith((*_OTHERS, "tt.reduce", "scf.for", "scf.while")) for o in of_three):
        return function

    def thinner(match: re.Match[str]) -> str:
        sizes = match[1].split("x")[:-1]
        sizes = [n for i, n in enumerate(sizes) if len(sizes) < THREE or i != axes[0]]
        return f"tensor<{'x'.join(sizes)}x{match[2]}>"

    def changed(op: Op) -> Op:
        op = replace(op, body=[*map(changed, op.body)], otherwise=[*map(changed, op.otherwise)])
        if op.name == "tt.expand_dims" and len(_types(op.text)[-1][0]) == THREE:
            text = re.sub(r"\{[^}]*\}", "", op.text).replace("tt.expand_dims", "tt.reshape")
            op = replace(op, name="tt.reshape", text=text)
        return replace(op, text=_TYPE.sub(thinner, op.text), type=_TYPE.sub(thinner, op.type))

    return function._replace(operations=[*map(changed, function.operations)])


def with_own_axes(operations: Sequence[Op]) -> list[Op]:
    """Return operations in which each reader of a block of constants, or with an axis of one index, has a separate
    block.

    One block may be used as ``[1, n]``, a block of two axes, and also in a block with a third axis.
    """
    result, count = makers(every_of(operations)), 0

    def own(name: str, ordered: list[Op]) -> str:
        nonlocal count
        source = result.get(name)
        if source is None or source.name not in _COPIED or not shape_of(source.type)[0]:
            return name
        count += 1
        operands = [own(n, ordered) for n in source.operands]
        ordered.append(replace(source, results=[f"{name}@own{count}"], operands=operands))
        return ordered[-1].results[0]

    def all_of(given: Sequence[Op]) -> list[Op]:
        ordered = list[Op]()
        for op in given:
            if op.name not in _COPIED or not shape_of(op.type)[0]:
                operands = [own(n, ordered) for n in op.operands]
                ordered.append(replace(op, operands=operands, body=all_of(op.body), otherwise=all_of(op.otherwise)))
        return ordered

    return all_of(operations)


def _types(text: str) -> list[tuple[tuple[int, ...], str]]:
    """Return shape and element type of each block that a text names."""
    return [(shape_of(m[0])[0], m[2]) for m in _TYPE.finditer(text)]


def _axes(operations: list[Op], axis: int) -> dict[str, int | None] | None:
    """Return the position of the axis in each block (None: the block does not have it); None if operations join
    elements along the axis.
    """
    ranks, known = dict[str, int](), dict[str, int | None]()
    for op in operations:
        ranks |= {r: len(shape_of(op.type.split(", ")[0])[0]) for r in op.results if not op.otherwise}
    if any(o.name.startswith(_OTHERS) for o in operations):
        return None

    def note(name: str, at: int | None) -> bool:
        """Return whether a block has an axis at the position that was determined before."""
        return known.setdefault(name, at) == at

    known |= {n: axis for n, rank in ranks.items() if rank == THREE}
    before = -1
    while before < len(known):
        before = len(known)
        for op in operations:
            if not all(note(*each) for each in _like(op, ranks, known)):
                return None
    starts = [o for o in operations if o.name == "tt.make_range" and known.get(o.results[0]) is not None]
    reduces = [o for o in operations if o.name == "tt.reduce" and known.get(o.operands[0]) == o.number("axis")]
    return None if reduces or any(o.number("start") for o in starts) or not starts else known


def _like(op: Op, ranks: Mapping[str, int], known: Mapping[str, int | None]) -> Iterator[tuple[str, int | None]]:
    """Yield the positions of the axis in blocks of an operation, derived from the operation's other blocks."""
    blocks = [n for n in (*op.operands, *op.results) if ranks.get(n)]
    larger, smaller = (op.operands, op.results) if op.name == "tt.reduce" else (op.results, op.operands)
    smaller = [n for n in smaller if ranks.get(n)]
    if op.name in ("tt.expand_dims", "tt.reduce") and smaller:
        new, large, small = op.number("axis"), *(next((n for n in of if n in known), "") for of in (larger, smaller))
        if large:
            at = known[large]
            yield from ((n, at) for n in larger)
            yield from ((n, None if at is None or at == new else at - (at > new)) for n in smaller)
        elif (at := known.get(small)) is not None:
            yield from ((n, at + (at >= new)) for n in larger)
        return
    of = next((n for n in blocks if n in known), None)
    if of is not None:
        yield from ((n, known[of]) for n in blocks if ranks[n] == ranks[of])


def _without(function: Function, known: Mapping[str, int | None], size: int) -> Function:
    return function._replace(operations=[_changed(o, known, size) for o in function.operations])


def _changed(op: Op, known: Mapping[str, int | None], size: int) -> Op:
    places = {n: known.get(n) for n in (*op.operands, *op.results)}
    result = places[op.results[0]] if op.results else None
    if op.name == "tt.make_range" and result is not None:
        text = f"{PART} {{parts = {size} : i32}} : i32"
        return replace(op, name=PART, text=text, type="i32")
    name, text = op.name, op.text
    if op.name == "tt.expand_dims" and result is not None:
        new = op.number("axis")
        name = "ttg.convert_layout" if new == result else name
        text = re.sub(r"axis = \d+", f"axis = {new - (result < new)}", text)
    at = places[op.operands[0]] if op.name == "tt.reduce" else None
    if at is not None:
        text = re.sub(r"axis = \d+", f"axis = {op.number('axis') - (at < op.number('axis'))}", text)
    axes = {n: at for n, at in places.items() if at is not None}
    if not axes:
        return op

    def thinner(match: re.Match[str]) -> str:
        sizes = match[1].split("x")[:-1]
        at = _of_rank(op, len(sizes), known)
        left = sizes if at is None else [*sizes[:at], *sizes[at + 1 :]]
        return f"tensor<{'x'.join(left)}x{match[2]}>" if left else match[2]

    return replace(op, name=name, text=_TYPE.sub(thinner, text), type=_TYPE.sub(thinner, op.type))


def _of_rank(op: Op, rank: int, known: Mapping[str, int | None]) -> int | None:
    """Return the position of the axis in those blocks of an operation that have some rank."""
    if op.name in ("tt.expand_dims", "tt.reduce"):
        operand, result = known.get(op.operands[0]), known.get(op.results[0])
        types = _types(op.text)
        return operand if types and len(types[0][0]) == rank else result
    if op.name in ("tt.splat", "arith.constant"):
        return known.get(op.results[0])
    return next((at for n in (*op.operands, *op.results) if (at := known.get(n)) is not None), None)
