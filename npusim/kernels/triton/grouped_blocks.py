"""Blocks of one axis that are reshaped into groups, and back: the same TTIR on blocks whose axes are the groups and the
elements of a group.

Every operation on such a block is on single elements, so that index ``i`` is ``group * size + element``, and a reshape
returns an existing block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from npusim.kernels.triton.ttir_text import TYPES, Function, Op, every_of, shape_of

#: Operations on single elements, and operations that give all elements one value.
_OF_ELEMENTS = (
    *("arith.", "math.", "tt.fp_to_fp", "tt.extern_elementwise", "tt.precise", "tt.clampf", "tt.splat", "tt.load"),
    *("tt.store", "tt.addptr", "tt.bitcast", "tt.make_range", "tt.reshape", "ttg.convert_layout"),
)
_LOOP = ("scf.for", "scf.yield")


def with_groups(function: Function) -> Function | None:
    """Return a kernel without reshapes of one axis into two, or back; None if it has no such reshapes, or if other
    operations need the single axis.
    """
    every = every_of(function.operations)
    found = {shapes for o in every if o.name == "tt.reshape" and (shapes := _grouped(o)) is not None}
    if len(found) != 1:
        return None
    ((size, shape),) = found
    blocks = _Blocks(every, size)
    for op in every:
        if op.name == "tt.reshape" and _grouped(op) is not None:
            blocks.join([*op.operands, *op.results])
    if not blocks.are_of_elements(every):
        return None
    return function._replace(operations=_changed(function.operations, blocks.grouped, size, shape))


def _grouped(op: Op) -> tuple[int, tuple[int, int]] | None:
    """Return the size of the one axis of a reshape, and the two axes on its other side; None for another reshape."""
    shapes = [shape_of(t)[0] for t in TYPES.findall(op.text.partition(" : ")[2]) if t.startswith("tensor")]
    one, two = sorted(shapes, key=len) if len(shapes) == 2 else ((), ())
    is_grouped = len(one) == 1 and len(two) == 2 and min(two) > 1 and two[0] * two[1] == one[0]
    return (one[0], (two[0], two[1])) if is_grouped else None


class _Blocks:
    """The blocks of one axis of some size that are grouped: those that operations join with a reshaped block."""

    def __init__(self, every: list[Op], size: int) -> None:
        self.grouped = set[str]()
        self.shapes = dict[str, tuple[int, ...]]()
        self.readers, self.size = dict[str, list[Op]](), size
        self.every = every
        for op in every:
            names, types = op.results, [op.type] * len(op.results)
            if op.name == "scf.for" and op.results:
                types = TYPES.findall(op.text.partition("-> (")[2])[: len(op.results)]
                self.shapes |= zip(op.operands[4::2], (shape_of(t)[0] for t in types), strict=True)
            self.shapes |= zip(names, (shape_of(t)[0] for t in types), strict=True)
            for name in (*op.operands, *op.results):
                self.readers.setdefault(name, []).append(op)
        self.loops = [o for o in every if o.name == "scf.for"]

    def join(self, names: list[str]) -> None:
        """Group blocks, and all blocks that operations join with them."""
        waiting = [n for n in names if self.shapes.get(n) == (self.size,)]
        while waiting:
            if (name := waiting.pop()) in self.grouped:
                continue
            self.grouped.add(name)
            for op in self.readers[name]:
                waiting += [n for n in self._like(op, name) if self.shapes.get(n) == (self.size,)]

    def _like(self, op: Op, name: str) -> Iterator[str]:
        """Yield the values of an operation that have the axes of one of them."""
        if op.name not in _LOOP:
            yield from (*op.operands, *op.results)
            return
        for loop in self.loops:
            carried = zip(loop.operands[4::2], loop.operands[5::2], loop.body[-1].operands, loop.results, strict=False)
            yield from (n for each in carried if name in each for n in each)

    def are_of_elements(self, every: list[Op]) -> bool:
        """Return whether all operations on grouped blocks are on single elements."""
        of = [o for o in every if self.grouped.intersection((*o.operands, *o.results)) and o.name not in _LOOP]
        return all(o.name.startswith(_OF_ELEMENTS) and not o.body for o in of) and all(
            _grouped(o) is not None for o in of if o.name == "tt.reshape"
        )


def _changed(operations: list[Op], grouped: set[str], size: int, shape: tuple[int, int]) -> list[Op]:
    axes, result = "x".join(map(str, shape)), list[Op]()

    def typed(text: str) -> str:
        return re.sub(rf"tensor<{size}x", f"tensor<{axes}x", text)

    for op in operations:
        if op.name == "scf.for":
            body = _changed(op.body, grouped, size, shape)
            head, arrow, rest = op.text.partition("-> (")
            types = TYPES.findall(rest)[: len(op.results)]
            listed = [typed(t) if n in grouped else t for n, t in zip(op.results, types, strict=True)]
            text = f"{head}{arrow}{', '.join(listed)})" if op.results else op.text
            result.append(replace(op, body=body, text=text))
        elif not grouped.intersection((*op.operands, *op.results)) or op.name == "scf.yield":
            result.append(op)
        elif op.name == "tt.reshape":
            result.append(replace(op, name="ttg.convert_layout"))
        elif op.name == "tt.make_range":
            result += _range(op, shape)
        else:
            result.append(replace(op, text=typed(op.text), type=typed(op.type)))
    return result


def _range(op: Op, shape: tuple[int, int]) -> list[Op]:
    """Return the operations that create a range of one axis along groups and their elements."""
    (name,), (groups, size), first = op.results, shape, op.number("start")
    whole, made = f"tensor<{groups}x{size}xi32>", list[Op]()

    def new(kind: str, result: str, operands: list[str], text: str, type_: str) -> str:
        made.append(Op(kind, [result], operands, f"{kind} {text}", type_, op.line, place=op.place))
        return result

    parts = list[str]()
    for axis, (n, start, thin) in enumerate(((groups, 0, f"{groups}x1"), (size, first, f"1x{size}"))):
        ends, kind = f"{{end = {start + n} : i32, start = {start} : i32}}", f"tensor<{n}xi32>"
        part = new("tt.make_range", f"{name}@{axis}", [], f"{ends} : {kind}", kind)
        kind = f"tensor<{thin}xi32>"
        part = new("tt.expand_dims", f"{name}@{axis}thin", [part], f"{{axis = {1 - axis} : i32}} -> {kind}", kind)
        parts.append(new("tt.broadcast", f"{name}@{axis}wide", [part], f"-> {whole}", whole))
    step = new("arith.constant", f"{name}@step", [], f"dense<{size}> : {whole}", whole)
    scaled = new("arith.muli", f"{name}@scaled", [parts[0], step], f": {whole}", whole)
    new("arith.addi", name, [scaled, parts[1]], f": {whole}", whole)
    return made
