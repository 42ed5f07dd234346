"""Programs that store the same values to the same elements, as those of a group's heads store the keys of the group.

They compute the values alike: from the same elements of tensors, by the same integers, in as many iterations.  So it
does not matter which of them stores last.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from npusim.kernels.triton.lane_elements import LaneElements
from npusim.kernels.triton.listed import unlike_rows
from npusim.kernels.triton.ttir_text import Op, reached
from npusim.kernels.triton.values import (
    Affine,
    Condition,
    Descriptor,
    Elements,
    Integers,
    Known,
    Listed,
    ListedMask,
    Masking,
)

_OF_INDICES = Affine | Listed | Condition | ListedMask | Elements | Masking | Descriptor


class SameValues(LaneElements, ABC):
    """Stores of several programs to one element."""

    def _stored_once(self, op: Op, of: str, places: Integers, *, is_own: bool) -> Integers:
        """Return the elements of a store, (programs, iterations, *axes), -1 of no element, each one once: of programs
        that store the same value to an element, the first one's.

        ``is_own``: whether the kernel accesses the tensor elsewhere, too.  Raises `ProgramError` for an element of
        which programs, iterations or lanes may store different values.
        """
        flat = places.reshape(*places.shape[:2], -1)
        program, time, lane = np.nonzero(flat >= 0)
        at = flat[program, time, lane]
        order = np.argsort(at, kind="stable")
        is_again = np.concatenate([[False], at[order][1:] == at[order][:-1]])
        if not is_again.any():
            return places
        why = f"{of}: a tl.store writes an element twice; let only one lane of one program store it"
        kinds = None if is_own else self._kinds_of_values(op)
        if kinds is None or len(np.unique(self.ids, axis=0)) < len(self.ids):
            raise op.fail(why)
        of_each = np.stack([kinds[program], time, lane], 1)[order]
        if np.any((of_each[1:] != of_each[:-1]).any(1) & is_again[1:]):
            raise op.fail(why)
        same = "several programs store the same values to these elements; the time includes all of them"
        self.notes.append(f"{op.line}: {of}: {same}")
        result, again = flat.copy(), order[is_again]
        result[program[again], time[again], lane[again]] = -1
        return result.reshape(places.shape)

    def _kinds_of_values(self, op: Op) -> Integers | None:
        """Return a number for each program, equal for those in which a store has the same value; None if unknown."""
        kinds = np.zeros(len(self.ids), np.int64)
        for x in self._integers_of(op.operands[1]):
            for values in _values_of(x):
                if values.shape[0] not in (1, len(kinds)):
                    return None
                if values.shape[0] > 1:
                    rows = np.column_stack([kinds, values.reshape(len(kinds), -1)])
                    kinds = unlike_rows(rows)[1]
        return kinds

    @cached_property
    def _computed_from(self) -> dict[str, list[str]]:
        """What each value is computed from, result by result of loops and branches."""
        made = dict[str, list[str]]()
        for op in self._made:
            if op.name == "scf.if" and op.results:
                ends = zip(op.body[-1].operands, op.otherwise[-1].operands, strict=True)
                made |= {r: [*op.operands, *of] for r, of in zip(op.results, ends, strict=True)}
            elif op.name == "scf.for":
                bounds = op.operands[1:4]
                names, starts = op.operands[4::2], op.operands[5::2]
                ends_of = op.body[-1].operands if starts else []
                made |= {op.operands[0]: bounds}
                for name, result, *of in zip(names, op.results, starts, ends_of, strict=True):
                    made |= {name: [*of, *bounds], result: [*of, *bounds]}
            else:
                inner = [n for o in (*op.body, *op.otherwise) for n in o.operands]
                made |= {r: [*op.operands, *inner] for r in op.results}
        return made

    def _integers_of(self, value: str) -> Iterator[Known]:
        """Yield the integers, addresses and masks that decide a value: those that its floats are computed from."""
        names = set(reached(value, self._computed_from))
        if isinstance(x := self.values.get(value), _OF_INDICES):
            yield x
        for op in self._made:
            if not names.intersection(op.results) and not (op.name == "scf.for" and names.intersection(_inner(op))):
                continue
            is_of_integers = op.results and all(isinstance(self.values.get(r), _OF_INDICES) for r in op.results)
            if is_of_integers and not op.body and not op.name.startswith("tt.load"):
                continue  # the operations that read these integers decide
            for name in op.operands[1:4] if op.name == "scf.for" else op.operands:
                if isinstance(x := self.values.get(name), _OF_INDICES):
                    yield x


def _inner(op: Op) -> list[str]:
    """Return the names of a loop's counter and states inside of it."""
    return [op.operands[0], *op.operands[4::2]]


def _values_of(x: Known | None) -> Iterator[Integers]:
    """Yield the numbers that programs may have different ones of, (programs, ...) each."""
    if isinstance(x, Affine):
        yield x.base
        yield from (n for n in x.left if n is not None)
    elif isinstance(x, Listed | ListedMask):
        yield from _values_of(x.rest if isinstance(x, Listed) else x.within)
        yield from _values_of(x.at)
    elif isinstance(x, Condition):
        for _, d in x.every:
            yield from _values_of(d)
    elif isinstance(x, Elements):
        yield x.values
    elif isinstance(x, Masking):
        yield from _values_of(x.of)
    elif isinstance(x, Descriptor):
        for each in (x.pointer, *x.sizes, *x.strides):
            yield from _values_of(each)
