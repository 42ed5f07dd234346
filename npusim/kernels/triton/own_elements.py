"""Tensors that a kernel stores to and also accesses elsewhere, where its blocks are read lane by lane.

A program may load an element that it stores to later, and may store to an element twice (the last store counts), if
both accesses are in the same lane and thus in one thread, or if a barrier is between them. Elements that are loaded
after a store of the same program, or that several programs access, are refused by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import NamedTuple, cast

import numpy as np

from npusim.formats.scans import WARP
from npusim.kernels.triton.element_behind import BARRIERS
from npusim.kernels.triton.same_values import SameValues
from npusim.kernels.triton.tensor_axes import GatheredView, View
from npusim.kernels.triton.ttir_text import FORMATS, Op, shape_of
from npusim.kernels.triton.values import (
    Affine,
    Booleans,
    Floats,
    Integers,
    Known,
    Number,
    Pointers,
    ValueComparison,
    argument_of,
)


class _Access(NamedTuple):
    """A load or store of a tensor: the elements, ascending, with the program, the iteration and the lane of each.

    ``walk``: the number of its loop, 0 outside of loops; ``view``: the tensor of a store's lanes, empty for a number
    and for a load; ``is_known``: whether each iteration has elements of its own, so that its iteration is known.
    """

    op: Op
    is_store: bool
    walk: int
    elements: Integers
    programs: Integers
    times: Integers
    lanes: Integers
    view: str
    is_known: bool


class OwnElements(SameValues, ABC):
    """Accesses of one tensor by several loads and stores, element by element."""

    @cached_property
    def _accessed(self) -> dict[str, list[_Access]]:
        """By tensor, the accesses so far."""
        return {}

    @cached_property
    def _executed(self) -> set[int]:
        """The identities of the operations that some program executes."""
        return set()

    def _is_own(self, of: str) -> bool:
        """Return whether a tensor is stored to and also accessed elsewhere."""
        is_of = [of in self._made_of(o.operands[0]) for o in self._accesses()]
        return sum(is_of) > 1 and not self._is_read_alone(of)

    def _accesses(self) -> list[Op]:
        names = ("tt.load", "tt.store", "tt.descriptor", "tt.atomic")
        return [o for o in self._made if o.name.startswith(names)]

    def _note_access(self, op: Op, of: str, places: Integers, view: str, *, is_store: bool) -> None:
        """Note the elements of an access, (programs, iterations, lanes), -1: no element; refuse elements whose value
        would depend on the order of programs, or that the program itself stored before.
        """
        if not self._is_own(of):
            return
        flat = np.broadcast_to(places, (len(self.ids), *places.shape[1:])).reshape(len(self.ids), places.shape[1], -1)
        program, time, lane = np.nonzero(flat >= 0)
        at = flat[program, time, lane]
        order = np.argsort(at, kind="stable")
        walk, is_known = (self._loop, places.shape[1] > 1) if self._walk is not None else (0, True)
        new = _Access(op, is_store, walk, at[order], program[order], time[order], lane[order], view, is_known)
        known = self._accessed.setdefault(of, [])
        for x in known:
            if x.is_store or is_store:
                self._check_order(of, x, new)
        known.append(new)

    def _note_number(self, op: Op, pointer: Known, mask: Known | None) -> None:
        """Note an access of one element in each program; see `_note_access`."""
        of = argument_of(pointer) if isinstance(pointer, Pointers) else ""
        if isinstance(pointer, Pointers) and isinstance(self.arguments.get(of), View) and self._is_own(of):
            at, held = self._held_lanes(op, pointer, mask)
            self._note_access(op, of, np.where(held, at, -1), "", is_store=op.name == "tt.store")

    def _check_order(self, of: str, before: _Access, new: _Access) -> None:
        """Compare an access with an earlier one of the same tensor; one of the two is a store."""
        stored, other = (new, before) if new.is_store else (before, new)
        if not len(stored.elements):
            return
        found = np.minimum(np.searchsorted(stored.elements, other.elements), len(stored.elements) - 1)
        is_both = stored.elements[found] == other.elements
        found, programs, times = found[is_both], other.programs[is_both], other.times[is_both]
        if not len(found):
            return
        if np.any(stored.programs[found] != programs):
            does = "stores to" if other.is_store else "loads"
            why = f"a program {does} an element that another one stores to at {stored.op.line}, in an undefined order"
            raise other.op.fail(f"{of}: {why}; pass a copy to the kernel")
        is_one_loop = before.walk == new.walk > 0
        if is_one_loop and not (before.is_known and new.is_known):
            why = "a loop accesses elements again that it stores to in another iteration"
            raise new.op.fail(f"{of}: {why}; pass a copy to the kernel")
        is_one = np.array_equal(stored.lanes[found], other.lanes[is_both]) and self._are_of_one_thread(before, new)
        is_one |= not before.is_store and self._are_of_one_warp(before.op, new.op)
        if not is_one and (is_one_loop or not self._are_parted(before.op, new.op)):
            why = f"two threads access an element, at {before.op.line} and here, in an undefined order"
            raise new.op.fail(f"{of}: {why}; put tl.debug_barrier() between the two")
        if before.is_store and new.is_store:
            self._overwrite(of, before, new, is_one_loop=is_one_loop)
        elif before.is_store:
            is_behind = stored.times[found] <= times if is_one_loop else np.ones(times.shape, bool)
            if np.any(is_behind):
                why = f"a program loads an element that it stored to before, at {before.op.line}, as part of a block"
                raise new.op.fail(f"{of}: {why} unlike the stored one; use the stored value")
        elif is_one_loop and np.any(stored.times[found] < times):
            why = f"a program loads an element that it stored to in an earlier iteration, at {new.op.line}"
            raise before.op.fail(f"{of}: {why}; carry the value through the loop")

    def _are_of_one_thread(self, before: _Access, new: _Access) -> bool:
        """Return whether two accesses of one lane are in order.  They are if their blocks have the same shape and
        either both are stores by the same pointers, or the stored value is computed from the loaded one, or one warp
        has all lanes.

        Compiled code cuts each block into pieces of its threads: those of a store follow from its pointers, those of a
        load also from other pointers of the kernel.  Between a load and a store of other pieces, values cross threads.
        """
        shapes = [shape_of(x.op.type)[0] for x in (before, new)]
        if shapes[0] != shapes[1] or shapes[0] == ():
            return False
        if before.is_store and new.is_store:
            return before.op.operands[0] == new.op.operands[0]
        load, store = (new.op, before.op) if before.is_store else (before.op, new.op)
        is_of_one_warp = len(shapes[0]) == 1 and prod(shapes[0]) <= WARP  # a thread has one element at most
        return is_of_one_warp or self._is_computed_from(load, store)

    def _is_computed_from(self, load: Op, store: Op) -> bool:
        """Return whether what is stored, or the mask, is computed from what is loaded."""
        return any(r in self._made_of(n) for r in load.results for n in store.operands[1:])

    def _are_of_one_warp(self, load: Op, store: Op) -> bool:
        """Return whether a load is complete before a store, because one warp has all lanes of both and what is stored
        is computed from what is loaded.
        """
        most = max(prod(shape_of(x.type)[0]) for x in (load, store))
        return most <= WARP and self._is_computed_from(load, store)

    def _are_parted(self, one: Op, other: Op) -> bool:
        """Return whether a barrier of all threads is between two operations, outside of loops and branches."""
        first, last = self._positions(one)[-1], self._positions(other)[0]
        between = self._made[first + 1 : last]
        return any(o.name in BARRIERS and any(o is x for x in self.function.operations) for o in between)

    def _positions(self, op: Op) -> list[int]:
        """Return the places in the text where an access may be: that of the operation, or of those like it."""
        own = [i for i, o in enumerate(self._made) if o is op]
        return own or [i for i, o in enumerate(self._made) if (o.line, o.operands[:1]) == (op.line, op.operands[:1])]

    def _over_old(self, op: Op, pointer: Pointers, value: Known, mask: ValueComparison) -> tuple[Known, Known | None]:
        """Return the value of a store by a mask of compared values, with the elements that are there where the mask is
        false, and what the mask asks of indices.
        """
        fmt = self._element_of(pointer)
        if fmt not in FORMATS or not isinstance(value, Floats | Number):
            raise op.fail("a tl.store with a mask of compared values is supported for floats only")
        type_ = f"tensor<{'x'.join(map(str, pointer.shape))}x{fmt}>"
        one = replace(op, name="tt.load", results=[f"{op.operands[1]}@before"], type=type_)
        number = Number(0.0, "0.0", pointer.shape)
        self._load(one, self._lanes_of(one, pointer, mask.within, "loads", 0.0), None, number, fmt)
        before = self._named(one, replace(cast("Floats", self.values.pop(one.results[0])), pad=None))
        self._by_value(one, replace(mask, within=None), value, before)
        self.notes.append(
            f"{op.line}: npusim loads the elements that a mask of compared values in a tl.store hides, and stores "
            "them again; the time includes these loads"
        )
        return self.values.pop(one.results[0]), mask.within

    @abstractmethod
    def _lanes_of(self, op: Op, pointer: Pointers, mask: Known | None, does: str, hidden: float | None) -> Affine:
        """Return pointers into a tensor of the lanes of all iterations; ``hidden``: of those that a mask hides."""

    def _overwrite(self, of: str, before: _Access, new: _Access, *, is_one_loop: bool) -> None:
        """Take the elements that a later store has away from an earlier one."""
        if is_one_loop:
            why = f"two stores of a loop have an element in common, the other one at {before.op.line}"
            raise new.op.fail(f"{of}: {why}; store it once")
        is_gone: Booleans = np.isin(before.elements, new.elements)
        if not before.view and not is_gone.all():
            why = f"a block overwrites some of the numbers that are stored at {before.op.line}"
            raise new.op.fail(f"{of}: {why}; store each element once")
        if before.view:
            view = self.arguments[before.view]
            assert isinstance(view, GatheredView)
            listed = np.array(view.listed, np.int64)
            left = np.where(np.isin(listed, new.elements), -1, listed)
            self.arguments[before.view] = replace(view, listed=tuple(left.tolist()))
        if is_gone.all() and not before.walk:
            self.stored = [x for x in self.stored if x.pointer.of != (before.view or of) or x.line != before.op.line]
        why = "where the program stores an element twice, the later value remains; the time includes both stores"
        self.notes.append(f"{before.op.line}: {of}: {why}")

    def _check_accessed(self) -> None:
        """Raise `ProgramError` for a tensor that is accessed lane by lane and also, at unknown elements, in another
        way.

        Accesses in branches that no program takes do not count.
        """
        for of, known in self._accessed.items():
            every = [o for o in self._accesses() if of in self._made_of(o.operands[0])]
            seen = {id(x.op) for x in known}
            if other := next((o for o in every if id(o) in self._executed - seen), None):
                why = f"{of} is stored to and also accessed elsewhere; pass another tensor"
                raise other.fail(why)
