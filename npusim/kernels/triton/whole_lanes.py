"""Blocks with any masks: the lanes of all programs and iterations, as the elements of separate tensors.

A tile of such a tensor has every lane of its block: a lane that a mask hides has the number of ``other=``, and belongs
to no element when it is stored.  Masks that differ between lanes, lengths that differ between programs, and sums over
hidden lanes therefore need no rule: the kernel of tiles computes in each lane what the program computes.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import replace
from math import prod
from typing import cast

import numpy as np

from npusim.kernels.triton.element_wise import elements_in
from npusim.kernels.triton.kernel_draft import LaneReading
from npusim.kernels.triton.known_tiles import known_tiles
from npusim.kernels.triton.listed import MOST_LISTED
from npusim.kernels.triton.own_elements import OwnElements
from npusim.kernels.triton.tensor_axes import GatheredView, View, gathered, run_of
from npusim.kernels.triton.ttir_text import FORMATS, Op, shape_of
from npusim.kernels.triton.values import (
    Affine,
    Condition,
    Elements,
    Floats,
    Integers,
    Known,
    Listed,
    ListedMask,
    Number,
    Pointers,
    ValueComparison,
    answers,
    argument_of,
)

#: Number of axes before those of a block: programs and iterations.
_OUTER = 2
_OF_INDICES = Condition | ListedMask | Elements


class WholeLanes(OwnElements, ABC):
    """Loads, stores and choices of blocks, lane by lane, where the choices ask for it."""

    def _tt_load(self, op: Op, pointer: Known, mask: Known | None = None, other: Known | None = None) -> None:
        self._check_spans(op, pointer, mask)
        shape, fmt = shape_of(op.type)
        is_of_floats = fmt in FORMATS and isinstance(pointer, Pointers)
        if not is_of_floats or not self._is_by_lanes(shape):
            if is_of_floats and not shape and self.choices.way("lanes"):
                self._note_number(op, pointer, mask)
            super()._tt_load(op, pointer, mask, other)
            return
        assert isinstance(pointer, Pointers)
        within, by_value = mask, None
        if isinstance(mask, ValueComparison):
            within, by_value = mask.within, replace(mask, within=None)
        number = Number(0.0, "0.0", shape) if other is None else other
        if not isinstance(number, Number) or not number.is_known:
            raise op.fail("a mask of lanes with a block as other= in its tl.load is not supported")
        at = self._lanes_of(op, pointer, within, "loads", number.value)
        self._load(op, at, None, number, fmt)
        # Masks hide no lanes here: it is not known what another block's mask would hide along their axis.
        self._set(op, replace(cast("Floats", self.values[op.results[0]]), pad=None))
        if mask is not None and other is None:
            self.notes.append(
                f"{op.line}: a masked load without other=...: hidden elements are 0 here, as in compiled code for GPUs"
            )
        if by_value is not None:
            loaded = self._named(op, cast("Floats", self.values[op.results[0]]))
            self._by_value(op, by_value, loaded, number)

    def _tt_store(self, op: Op, pointer: Known, value: Known, mask: Known | None = None) -> None:
        self._check_spans(op, pointer, mask)
        if isinstance(pointer, Pointers) and self._is_by_lanes(pointer.shape):
            if self._stores_nothing(op, pointer, mask):
                return
            if isinstance(mask, ValueComparison):
                value, mask = self._over_old(op, pointer, value, mask)
        elif isinstance(pointer, Pointers) and not pointer.shape and self.choices.way("lanes"):
            self._note_number(op, pointer, mask)
        super()._tt_store(op, pointer, value, mask)

    def _stores_nothing(self, op: Op, pointer: Pointers, mask: Known | None) -> bool:
        """Return whether a mask hides all elements of a block in every program."""
        if isinstance(mask, ValueComparison) or not pointer.shape:
            return False
        _, held = self._held_lanes(op, pointer, mask)
        if not held.any():
            self.notes.append(f"{op.line}: the mask of a tl.store hides all elements in every program: none is stored")
        return not held.any()

    def _stored_at(self, op: Op, pointer: Pointers, mask: Known | None) -> tuple[Affine | Listed, Known | None]:
        if not self._is_by_lanes(pointer.shape):
            return super()._stored_at(op, pointer, mask)
        return self._lanes_of(op, pointer, mask, "stores", None), None

    def _lanes_of(self, op: Op, pointer: Pointers, mask: Known | None, does: str, hidden: float | None) -> Affine:
        """Return pointers into a tensor of the lanes of all iterations; ``hidden``: the value of lanes that a mask
        hides.
        """
        of = argument_of(pointer)
        source = self.arguments[of]
        if not isinstance(source, View) or isinstance(source, GatheredView) or of not in self.function.parameters:
            raise op.fail(f"{of}: npusim reads the lanes of blocks one by one in recorded calls only; record the call")
        if source.is_workspace or source.parts or source.sums:
            raise op.fail(f"{of}: lanes of the parts of an atomic addition, one by one, are not supported")
        places = self._places_of_lanes(op, pointer, mask, source)
        if does == "stores":
            places = self._stored_once(op, of, places, is_own=self._is_own(of))
        along, visited = self._goes_along(), 0
        if self._walk is not None and places.shape[1] > 1:
            visited = max(1, int(self._walk.counts.max()))
        is_one = places.ndim == _OUTER  # a number is a block of one lane
        blocks = places[..., None] if is_one else places
        tiles = known_tiles(of, self.ids, blocks, (None,), is_along=along, visited=visited, missing=-1)
        if tiles is None:
            raise op.fail("lanes of blocks along three axes are not supported")
        view = self._view_of_lanes(of, source, tiles.holds, hidden, is_new=does == "stores" and self._is_own(of))
        self._note_access(op, of, places, view.name if does == "stores" else "", is_store=does == "stores")
        by = tuple(step * view.by_row for step in tiles.by)
        known = replace(view, sizes=tiles.sizes, by=by)
        if view.name not in self.arguments:
            self.arguments[view.name] = known
            why = "npusim treats the lanes of the blocks as a tensor in memory, also those that a mask hides"
            self.notes.append(f"{op.line}: {of}: {why}; the time includes these")
            if does == "stores" and np.any(tiles.holds < 0):
                why = "the result also contains lanes that the mask hides, whose values the tensor does not contain"
                self.notes.append(f"{op.line}: {of}: {why}")
        base, steps = tiles.pointer.base * view.by_row, tuple(s * view.by_row for s in tiles.pointer.steps)
        shape = () if is_one else tiles.pointer.shape
        return replace(tiles.pointer, base=base, steps=steps[: len(shape)], shape=shape, of=view.name)

    def _with_numbers_as_rows(self) -> None:
        """Store a program's single numbers next to its first result, a column of rows, as columns of equal numbers.

        Their first row is the number's element; the other rows belong to no element.
        """
        first, *others = self.stored
        if len(first.axes) != 1 or first.axes[0] is None or first.is_walked:
            return
        (n,) = first.pointer.shape
        for x in (x for x in others if not x.axes and not x.is_walked):
            source = self.arguments[x.of]
            accessed = [y.of.partition(".")[0] for y in (*self.stored, *self.loads.values())].count(x.of)
            is_listed = isinstance(source, GatheredView)
            if not isinstance(source, View) or is_listed or (accessed > 1 and x.of not in self._accessed):
                continue
            places = np.full((len(self.ids), 1, n), -1, np.int64)
            places[:, 0, 0] = np.broadcast_to(x.pointer.base, (len(self.ids), 1))[:, 0]
            tiles = known_tiles(x.of, self.ids, places, (None,), is_along=True, missing=-1)
            if tiles is None or places.size > MOST_LISTED:
                continue
            view = self._view_of_lanes(x.of, source, tiles.holds, None, is_new=accessed > 1)
            self.arguments[view.name] = replace(view, sizes=tiles.sizes, by=tuple(b * view.by_row for b in tiles.by))
            base, steps = tiles.pointer.base * view.by_row, tuple(b * view.by_row for b in tiles.pointer.steps)
            x.of, x.axes, x.left = view.name, first.axes, [np.full((1, 1), n, np.int64)]
            x.pointer = replace(tiles.pointer, base=base, steps=steps, of=view.name)
            text = f"filled('@{first.axes[0]}', {self.text(x.value)}, {self.choices.fmt(x.value.fmt)!r})"
            x.value = Floats(text, first.axes, x.value.fmt)
            why = "a program stores a number and a column; npusim stores the number once per row of the column"
            self.notes.append(f"{x.line}: {x.of.partition('.')[0]}: {why}; the time includes these stores")

    def _places_of_lanes(self, op: Op, pointer: Pointers, mask: Known | None, source: View) -> Integers:
        """Return the offset of each lane in its tensor, (programs, iterations, lanes); -1 of a hidden one."""
        at, held = self._held_lanes(op, pointer, mask)
        if at.size > MOST_LISTED:
            raise op.fail(f"the blocks of the programs have {at.size:,} lanes; allowed: {MOST_LISTED:,}")
        if np.any(beyond := held & ((at < 0) | (at >= source.extent))):
            first = tuple(np.argwhere(beyond)[0].tolist())
            where = f"{self.program(first[0])} accesses element {int(at[first])}"
            raise op.fail(f"{source.parameter}: {where}, beyond the tensor, and no mask prevents it")
        gaps = np.zeros(at.shape, bool)
        if prod(source.sizes) != source.extent:  # elements between those of a view belong to no axis
            own = sum(source.index((i,), at) * step for i, step in enumerate(source.by))
            inside = [source.index((i,), at) < size for i, size in enumerate(source.sizes)]
            gaps = held & ((own != at) | ~np.logical_and.reduce(inside))
        if gaps.any():
            raise op.fail(f"{source.parameter}: a program accesses memory between the elements of its tensor")
        return np.where(held, at, -1)

    def _view_of_lanes(
        self, of: str, source: View, listed: Integers, hidden: float | None, *, is_new: bool = False
    ) -> GatheredView:
        """Return the tensor of lanes: an existing tensor if it has the same lanes; ``is_new``: always a new one."""
        along = tuple(range(len(source.sizes)))
        every = tuple(listed.tolist())
        number = 0
        while True:
            number += 1
            name = f"{of}.lanes{number}"
            view = replace(gathered(name, source, along, every), hidden=hidden, run=run_of(listed))
            known = self.arguments.get(name)
            is_like = isinstance(known, GatheredView) and known.is_like(view) and not is_new
            if known is None or is_like:
                return view

    def _arith_select(self, op: Op, mask: Known, a: Known, b: Known) -> None:
        is_known = isinstance(mask, _OF_INDICES) and all(isinstance(x, Floats | Number) for x in (a, b))
        if not is_known or not self._is_by_lanes(cast("Condition", mask).shape):
            super()._arith_select(op, mask, a, b)
            return
        a, b = (replace(x, factors=None, place="") if isinstance(x, Floats) else x for x in (a, b))
        if isinstance(mask, Condition):
            every, none = answers(mask)
            if np.all(every) or np.all(none):
                self._set(op, a if np.all(every) else b)
                return
        rules = mask if isinstance(mask, Condition | Elements) else elements_in(op, mask)
        self._fixed_choice(op, rules, a, b)

    def _goes_along(self) -> bool:
        lanes: LaneReading | None = self.choices.way("lanes")
        return super()._goes_along() if lanes is None else lanes.is_along

    def _left_like(self, size: int, *, is_walked: bool) -> Integers | None:
        return None if self.choices.way("lanes") else super()._left_like(size, is_walked=is_walked)
