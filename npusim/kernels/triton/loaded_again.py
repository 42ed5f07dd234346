"""Blocks that are combined with themselves along their other axis, in a product or by rows and columns, as blocks of
two loads.

The rows and columns of a tile of values belong to different axes: in ``dot(a, trans(a))``, and in ``x[:, None] -
x[None]``, the second operand is loaded again, and all values that depend on it are computed again.  This does not
change values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from npusim.kernels.triton.results_apart import LOADS, STORES, roots_of, sources_of
from npusim.kernels.triton.tensor_axes import View
from npusim.kernels.triton.ttir_text import Function, Op, every_of, makers, shape_of

#: Operations that are not repeated: their results are shared.
_STAY = ("tt.dot", "tt.reduce", "tt.scan", "tt.atomic", "tt.descriptor", "scf.")
_VECTOR = 1


def with_loads_again(function: Function, arguments: Mapping[str, Any]) -> tuple[Function, dict[str, Any]] | None:
    """Return a kernel with second loads of such blocks, and its arguments; None if there are no such blocks.

    Vectors along rows and vectors along columns belong to one tensor, which has two names because each name has its own
    axes.  A tensor that the kernel also stores to is not loaded again, because the second load may have another value.
    """
    every = every_of(function.operations)
    views = {n: x for n, x in arguments.items() if isinstance(x, View) and n in function.parameters}
    again = _Again(every, {n: x.storage for n, x in views.items()})
    changed = again.all_of(function.operations)
    if not again.count or {*map(again.name_of, again.renamed)} & function.parameters.keys():
        return None
    kinds = {again.name_of(n): function.parameters[n] for n in again.renamed}
    own = {again.name_of(n): replace(views[n], name=again.name_of(n), of=views[n].parameter) for n in again.renamed}
    return function._replace(operations=changed, parameters={**function.parameters, **kinds}), {**arguments, **own}


class _Again:
    """Adds second loads to operations; ``count``: their number; ``storages``: those of the tensors, by name."""

    def __init__(self, every: Sequence[Op], storages: Mapping[str, int]) -> None:
        self.made, self.count = makers(every), 0
        self.renamed = dict[str, None]()
        self.sources = sources_of(every)
        effects = [o for o in every if o.name.startswith((*STORES, "tt.atomic"))]
        written = {r for o in effects for r in roots_of(o.operands[0], self.sources)}
        shared = {storages.get(n, -1) for n in written} - {-1}
        self.written = written | {n for n, storage in storages.items() if storage in shared}
        self.pointers = storages.keys() - self.written
        down = {o for o in every if o.name == "tt.expand_dims" and o.number("axis") == 1 and self._is_vector(o)}
        self.down = {of for o in down for of in self._tensors(self._loads(o.operands[0]))}

    def all_of(self, operations: Sequence[Op]) -> list[Op]:
        """Return the operations of a region, with each second load before its reader."""
        ordered = list[Op]()
        for op in operations:
            body, otherwise = self.all_of(op.body), self.all_of(op.otherwise)
            operands = list(op.operands)
            if op.name == "tt.dot" and {*self._loads(operands[0])} & {*self._loads(operands[1])}:
                operands[1] = self._again(operands[1], ordered)
            if op.name == "tt.expand_dims" and op.number("axis") == 0 and self._is_vector(op):
                is_down = bool(self.down & self._tensors(self._loads(operands[0])))
                second = {n: self.name_of(n) for n in self.pointers}
                operands[0] = self._again(operands[0], ordered, second) if is_down else operands[0]
            is_same = operands == op.operands and not body and not otherwise
            ordered.append(op if is_same else replace(op, operands=operands, body=body, otherwise=otherwise))
        return ordered

    def _is_vector(self, op: Op) -> bool:
        source = self.made.get(op.operands[0])
        return source is not None and not source.body and len(shape_of(source.type)[0]) == _VECTOR

    def _loads(self, name: str) -> Iterator[str]:
        """Yield the loads from which a block is computed; this stops at operations that are not repeated."""
        waiting, seen = [name], set[str]()
        while waiting:
            op = self.made.get(one := waiting.pop())
            if op is None or one in seen or op.name.startswith(_STAY):
                continue
            seen.add(one)
            if op.name in LOADS:
                yield one
                continue
            waiting += op.operands

    def _tensors(self, loads: Iterable[str]) -> set[str]:
        """Return the tensors of some loads."""
        return {of for n in loads for of in roots_of(self.made[n].operands[0], self.sources)}

    @staticmethod
    def name_of(tensor: str) -> str:
        """Return the second name of a tensor."""
        return f"{tensor}_again"

    def _again(self, name: str, ordered: list[Op], known: dict[str, str] | None = None) -> str:
        """Return a block that is computed again from separate loads; if this is impossible, the same block."""
        loads = [*self._loads(name)]
        if any(roots_of(self.made[n].operands[0], self.sources) & self.written for n in loads):
            return name
        self.count += 1
        return self._copy(name, ordered, known if known is not None else {}, f"@again{self.count}")

    def _copy(self, name: str, ordered: list[Op], known: dict[str, str], end: str) -> str:
        op = self.made.get(name)
        if name in known:
            self.renamed |= {name: None} if name in self.pointers else {}
            return known[name]
        if op is None or op.body or op.name.startswith(_STAY) or len(op.results) != 1 or not _is_copied(op):
            return name
        operands = [self._copy(n, ordered, known, end) for n in op.operands]
        known[name] = f"{name}{end}"
        ordered.append(replace(op, results=[known[name]], operands=operands))
        return known[name]


def _is_copied(op: Op) -> bool:
    """Return whether an operation computes a block, or an address; numbers are not repeated."""
    return "tensor<" in op.type or op.name == "tt.addptr"
