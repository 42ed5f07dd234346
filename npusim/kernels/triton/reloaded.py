"""Loads of data that the program itself has stored, replaced by the stored value.

A later loop over the same tiles computes the value again, from the values of the tensors before the launch; if a tensor
is also loaded before its store, this load reads it under another name, with its values before the launch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from npusim.kernels.triton.results_apart import LOADS, STORES, roots_of, sources_of
from npusim.kernels.triton.rolled_rows import with_scratch_kept
from npusim.kernels.triton.tensor_axes import View
from npusim.kernels.triton.ttir_text import Function, Op, every_of, makers

#: Suffix of the name of a tensor that has the values before the launch.
BEFORE = "_before"
_NAMES = re.compile(r"%[\w#@-]+")
_PURE = (
    *("arith.", "math.", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.addptr", "tt.fp_to_fp", "tt.make_range"),
    *("tt.extern_elementwise", "tt.precise", "tt.clampf", "tt.get_program_id", "tt.load"),
)


def with_values_kept(
    function: Function, arguments: Mapping[str, Any]
) -> tuple[Function, dict[str, Any], dict[str, Op]]:
    """Return a kernel in which a load after a store of the same elements is the stored value; its arguments; and the
    first of these loads by tensor.  The kernel is unchanged if it has no such loads.
    """
    operations, given, kept = function.operations, dict(arguments), dict[str, Op]()
    parameters, scratch = dict(function.parameters), with_scratch_kept(function)[1]
    accesses = _Accesses(operations)
    for tensor in [n for n, kind in function.parameters.items() if "ptr" in kind and isinstance(given.get(n), View)]:
        result = _Reloads(accesses, tensor, function.parameters).changed()
        if result is None or tensor in scratch or (result[2] and tensor + BEFORE in parameters):
            continue
        operations, loads, is_before = result
        accesses = _Accesses(operations)
        kept[tensor] = loads[0]
        if is_before:
            parameters[tensor + BEFORE] = parameters[tensor]
            given[tensor + BEFORE] = replace(given[tensor], name=tensor + BEFORE, of=tensor)
    return function._replace(operations=operations, parameters=parameters), given, kept


class _Accesses:
    """The accesses of a kernel to all tensors; ``roots``: the tensors of each, by the identity of the operation."""

    def __init__(self, operations: list[Op]) -> None:
        self.operations = operations
        self.every = every_of(operations)
        self.made, sources = makers(self.every), sources_of(operations)
        self.roots = {id(o): roots_of(o.operands[0], sources) for o in self.every if o.name in (*LOADS, *STORES)}
        self.stored = {n for o in self.every if o.name in STORES for n in self.roots[id(o)]}
        self.has_others = any(o.name.startswith(("tt.atomic", "scf.if", "cf.", "scf.while")) for o in self.every)


class _Reloads:
    """The accesses of a kernel to one tensor."""

    def __init__(self, accesses: _Accesses, tensor: str, parameters: Mapping[str, str]) -> None:
        self.operations, self.tensor, self.parameters = accesses.operations, tensor, parameters
        self.made, self.roots = dict(accesses.made), dict(accesses.roots)  # new operations are added
        own = [o for o in accesses.every if tensor in self.roots.get(id(o), ())]
        self.stores, self.loads = ([o for o in own if o.name in names] for names in (STORES, LOADS))
        self.stored, self.has_others = accesses.stored, accesses.has_others

    def changed(self) -> tuple[list[Op], list[Op], bool] | None:
        """Return the operations without the loads after the only store, those loads, and whether other loads read the
        tensor before the launch; None if there are no such loads, or if some of them may read other elements.
        """
        if self.has_others or any(o.name != "tt.store" or self.roots[id(o)] != {self.tensor} for o in self.stores):
            return None
        if len(self.stores) != 1:
            return self._forwarded()
        (store,), ((first, block),) = self.stores, self._blocks(self.stores[0])
        new, kept, others = dict[int, list[Op]](), list[Op](), list[Op]()
        for load in self.loads:
            ((loop, own),) = self._blocks(load)
            if not own or not block:
                return None  # one of the two is in a loop inside another one
            is_behind = self.operations.index(loop or load) > self.operations.index(first or store)
            is_behind |= own is block and own.index(load) > own.index(store)
            renamed = {} if loop is None or first is None else {first.operands[0]: loop.operands[0]}
            if not self._is_alike(store.operands[0], load.operands[0], renamed):
                return None
            if not is_behind:
                others.append(load)
            elif self._are_masks_alike(store, load, renamed) and self._is_visited(first, loop, own is block):
                again = self._value(store.operands[1], renamed, first) if own is not block else (store.operands[1], [])
                if again is None:
                    return None
                value, before = again
                new[id(load)] = [*before, *self._chosen(load, value)]
                kept.append(load)
            else:
                return None
        if not kept:
            return None
        is_before = bool(others) and first is not None
        every = [self._replaced(o, new, is_before=is_before) for o in self.operations]
        return [o for result in every for o in result], kept, is_before

    def _forwarded(self) -> tuple[list[Op], list[Op], bool] | None:
        """Return the same as `changed` for a tensor with several stores: the last one before a load in its block must
        be of the same elements.
        """
        new, kept = dict[int, list[Op]](), list[Op]()
        for load in (o for o in self.loads if o.name == "tt.load"):
            ((_, block),) = self._blocks(load)
            if load not in block:
                continue
            before = block[: block.index(load)]
            last = next((o for o in reversed(before) if any(x in self.stores for x in (o, *o.within()))), None)
            if last not in self.stores or last is None or not self._is_alike(last.operands[0], load.operands[0]):
                continue
            if self._are_masks_alike(last, load, {}):
                new[id(load)] = self._chosen(load, last.operands[1])
                kept.append(load)
        every = [self._replaced(o, new, is_before=False) for o in self.operations]
        return ([o for result in every for o in result], kept, False) if kept else None

    def _blocks(self, op: Op) -> list[tuple[Op | None, list[Op]]]:
        """Return the loop that contains an operation (None if it is in no loop), and the operations around it; no
        operations if it is in a loop inside another one.
        """
        if op in self.operations:
            return [(None, self.operations)]
        return [(o, o.body) for o in self.operations if o.name == "scf.for" and op in o.body] or [(op, [])]

    def _is_visited(self, first: Op | None, loop: Op | None, is_one: bool) -> bool:
        """Return whether a load is after its store of the same iteration, or in a later loop over the same tiles."""
        if is_one or first is None or loop is None or first is loop:
            return is_one
        return all(map(self._is_alike, first.operands[1:4], loop.operands[1:4]))

    def _is_alike(self, one: str, other: str, renamed: Mapping[str, str] | None = None) -> bool:
        """Return whether two values have equal computations; ``renamed``: maps values of one loop to those of the
        other.
        """
        if renamed and one in renamed:
            return renamed[one] == other
        if one == other:
            return True
        a, b = self.made.get(one), self.made.get(other)
        if a is None or b is None or a.name != b.name or not a.name.startswith(_PURE) or a.name in LOADS:
            return False
        texts = [_NAMES.sub("%", o.text) for o in (a, b)]
        pairs = zip(a.operands, b.operands, strict=False)
        return texts[0] == texts[1] and all(self._is_alike(x, y, renamed) for x, y in pairs)

    def _are_masks_alike(self, store: Op, load: Op, renamed: Mapping[str, str]) -> bool:
        masks = store.operands[2:3], load.operands[1:2]
        is_one = len(masks[0]) == len(masks[1])
        return is_one and all(self._is_alike(a, b, renamed) for a, b in zip(*masks, strict=True))

    def _value(self, name: str, renamed: Mapping[str, str], loop: Op | None) -> tuple[str, list[Op]] | None:
        """Return a value of a loop as another loop computes it again, with its operations; None if that
        is impossible.
        """
        inner = [] if loop is None else loop.body
        names, before = dict(renamed), list[Op]()
        carried = set[str]() if loop is None else set(loop.operands[4::2])

        def again(name: str) -> str | None:
            if name in names or name in carried:
                return names.get(name)
            op = self.made.get(name)
            if op is None or op not in inner:
                return name
            if not op.name.startswith(_PURE) or op.body or len(op.results) != 1:
                return None
            if op.name == "tt.load" and self.roots[id(op)] & (self.stored - {self.tensor}):
                return None
            operands = [again(n) for n in op.operands]
            if any(n is None for n in operands):
                return None
            names[name] = f"{name}@{renamed[inner_number]}"
            before.append(replace(op, results=[names[name]], operands=[n for n in operands if n is not None]))
            self.made[names[name]] = before[-1]
            if op.name == "tt.load":
                self.roots[id(before[-1])] = self.roots[id(op)]
            return names[name]

        inner_number = "" if loop is None else loop.operands[0]
        result = again(name)
        return None if result is None else (result, before)

    @staticmethod
    def _chosen(load: Op, value: str) -> list[Op]:
        """Return the operation with a load's result: the value, or the number where its mask hides lanes."""
        if len(load.operands) < 3:
            return [replace(load, name="ttg.convert_layout", operands=[value])]
        type_ = re.sub(r"!tt\.ptr<(\w+)>", r"\1", load.type)
        operands = [load.operands[1], value, load.operands[2]]
        return [replace(load, name="arith.select", operands=operands, text=f"arith.select : {type_}", type=type_)]

    def _replaced(self, op: Op, new: Mapping[int, Sequence[Op]], *, is_before: bool) -> list[Op]:
        """Return the operations that replace one: other loads of the tensor read its values before the launch."""
        if id(op) in new:
            return [one for o in new[id(op)] for one in self._replaced(o, {}, is_before=is_before)]
        if is_before and op.name == "tt.load" and self.tensor in self.roots.get(id(op), ()):
            return self._of_before(op)
        if op.name == "scf.for":
            return [replace(op, body=[x for o in op.body for x in self._replaced(o, new, is_before=is_before)])]
        return [op]

    def _of_before(self, load: Op) -> list[Op]:
        """Return a load of the tensor's values before the launch, with the operations that compute its pointer."""
        result, names = list[Op](), {self.tensor: self.tensor + BEFORE}

        def moved(name: str) -> str:
            op = self.made.get(name)
            if name in names or op is None or "ptr" not in op.type:
                return names.get(name, name)
            names[name] = f"{name}{BEFORE}@{load.results[0]}"
            result.append(replace(op, results=[names[name]], operands=[moved(op.operands[0]), *op.operands[1:]]))
            return names[name]

        pointer = moved(load.operands[0])
        return [*result, replace(load, operands=[pointer, *load.operands[1:]])]
