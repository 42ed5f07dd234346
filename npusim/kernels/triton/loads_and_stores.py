"""Loads and stores of a kernel: the axes of a tensor that they follow, and the part of a block that masks leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count
from math import prod

import numpy as np

from npusim.errors import ProgramError
from npusim.formats.whole import WIDE, wrapped
from npusim.kernels.triton.arithmetic import MASK
from npusim.kernels.triton.calls import INTEGERS
from npusim.kernels.triton.exact_integers import ExactIntegers
from npusim.kernels.triton.integers import bits_of, restarts
from npusim.kernels.triton.kernel_draft import Load, LookedAt, Stored
from npusim.kernels.triton.listed import (
    alike_programs,
    as_list,
    by_one_list,
    elements_of,
    first_compared,
    first_ones,
    rows_of,
    table_of,
    where_held,
    without_hidden,
)
from npusim.kernels.triton.tensor_axes import NO_GROUPS, GatheredView, IntegerTensor, MaskView, View, run_of
from npusim.kernels.triton.ttir_text import FORMATS, WHOLE, Line, Op, shape_of
from npusim.kernels.triton.values import (
    AXES,
    COLUMNS,
    MOST_ELEMENTS,
    RELATIONS,
    ROWS,
    Affine,
    Booleans,
    Condition,
    Descriptor,
    Elements,
    Floats,
    Integers,
    Known,
    Listed,
    ListedMask,
    Number,
    Pointers,
    Tensor,
    ValueComparison,
    affine,
    answers,
    argument_of,
    bound_of,
    elements,
    known_elements,
    one_hot,
    repeats,
    reshaped,
    truth,
)

#: Operations that leave a block's elements in their order, or exchange its axes.
CONVERSIONS = ("arith.truncf", "arith.extf", "tt.fp_to_fp", "tt.trans", "ttg.convert_layout")


class Memory(ExactIntegers):
    """Operations that load and store blocks."""

    def _tt_load(self, op: Op, pointer: Known, mask: Known | None = None, other: Known | None = None) -> None:
        if not isinstance(pointer, Affine | Listed):
            raise op.fail("a tl.load from an address that is computed from floats is not supported")
        if self._is_turned_vector(op, mask, other):
            self._load_turned(op, pointer, mask, other)
            return
        of = pointer.rest.of if isinstance(pointer, Listed) else pointer.of
        if of in self.bytes_of and any(x.of.partition(".")[0] == of for x in self.stored):
            why = "the kernel both stores and loads these integers, which is not supported"
            raise op.fail(f"{of}: {why}; pass a copy to the kernel")
        if isinstance(tensor := self.arguments[of], IntegerTensor):
            if self._is_of_values(op):
                self._load_numbers(op, tensor, pointer, mask, other)
                return
            self.looked.setdefault(of, op.line)
            self._set(op, self._looked_up(op, tensor, pointer, mask, other))
            return
        if isinstance(mask, ListedMask) and self._is_scattered(op, mask):
            is_list = not mask.at.of and len(pointer.shape) == 1 and self.choices.way("hides_elements")
            load = self._load_elements if is_list else self._load_where_held
            load(op, pointer, mask, other)
            return
        if isinstance(mask, ValueComparison):
            self._load_by_values(op, pointer, mask, other)
            return
        pointer = self._as_listed(op, self._turned_round(op, pointer, mask), mask)
        if isinstance(pointer, Affine) and of in self.choices.way("listed_rows"):
            self._load_rows(op, pointer, mask, other)
            return
        self._load(op, self._in_rows(op, pointer, mask), mask, other, shape_of(op.type)[1])

    def _is_turned_vector(self, op: Op, *others: Known | None) -> bool:
        """Return whether a load is of a block with one row or column that is only read transposed."""
        shape, readers = shape_of(op.type)[0], self._uses.get(op.results[0], [])
        is_vector = len(shape) == 2 and 1 in shape and bool(readers) and all(o.name == "tt.trans" for o in readers)
        return is_vector and all(isinstance(x, Condition | Number | Affine | None) for x in others)

    def _load_turned(self, op: Op, pointer: Affine | Listed, mask: Known | None, other: Known | None) -> None:
        """Load a row in place of a column that is transposed, or a column in place of a row."""

        def turned(x: Known) -> Known:
            """Return addresses, a mask or a number with the axes exchanged."""
            return reshaped(x, (columns, rows), lambda s, _: s[::-1])

        rows, columns = shape_of(op.type)[0]
        name = f"{op.results[0]}@turned"
        type_ = op.type.replace(f"tensor<{rows}x{columns}x", f"tensor<{columns}x{rows}x")
        one = replace(op, results=[name], type=type_)
        self._uses[name] = [o for reader in self._uses[op.results[0]] for o in self._uses.get(reader.results[0], [])]
        self._tt_load(one, turned(pointer), mask and turned(mask), other and turned(other))
        loaded = self.values.pop(name)
        assert isinstance(loaded, Floats)
        self._set(op, replace(loaded, axes=loaded.axes[::-1], is_transposed=not loaded.is_transposed))

    def _load_rows(self, op: Op, pointer: Affine, mask: Known | None, other: Known | None) -> None:
        """Load a block whose rows are a list. If a mask leaves all or nothing of the block in each program, hidden rows
        are loaded as the first row, and the mask is applied after the load.
        """
        condition = Condition(()) if mask is None else self._condition(op, mask)
        whole = list[tuple[str, Affine]]()
        for rule in condition.of if isinstance(other, Number | None) else ():
            every, none = answers(Condition((rule,)))
            whole += [rule] if np.all(every | none) and not np.all(every) else []
        bounds = Condition(tuple(rule for rule in condition.of if rule not in whole), condition.either)
        left = bounds if bounds.every else None
        listed = self._with_rows_listed(op, pointer, left, Condition(tuple(whole)))
        self._load(op, self._in_rows(op, listed, left), left, other, shape_of(op.type)[1])
        loaded = self.values[op.results[0]]
        if isinstance(loaded, Floats) and whole:
            number = other if isinstance(other, Number) else Number(0.0, "0.0", pointer.shape)
            self._fixed_choice(op, Condition(tuple(whole)), self._named(op, loaded), number)

    def _load_elements(self, op: Op, pointer: Affine | Listed, mask: ListedMask, other: Known | None) -> None:
        """Load a row by a list of its elements; the elements that a mask of indices hides are a number."""
        number = Number(0.0, "0.0", pointer.shape) if other is None else other
        if not isinstance(number, Number):
            raise op.fail("a tl.load whose mask hides other elements than the last ones needs a number as other=")
        self.notes.append(f"{op.line}: elements that the mask hides are timed as loaded ones")
        of = pointer.rest.of if isinstance(pointer, Listed) else pointer.of
        if not isinstance(source := self.arguments[of], View):
            raise op.fail(f"{of}: a mask of indices hides elements of a row, so that npusim needs a call; record it")
        listed = without_hidden(op, as_list(pointer), mask, source)
        at = self._in_rows(op, listed, None, hidden=number.value)
        self._load(op, at, None, number, shape_of(op.type)[1])

    def _is_window(self, pointer: Affine, other: Known | None) -> bool:
        """Return whether a block in which a mask of indices hides any elements is read as a list of the
        other elements.
        """
        is_plain = type(self.arguments[pointer.of]) is View and isinstance(other, Number | None)
        return is_plain and self._walk is None and bool(pointer.shape) and bool(self.choices.way("hides_elements"))

    def _load_window(
        self, op: Op, pointer: Affine, bounds: Known | None, rest: Condition, other: Known | None, fmt: str
    ) -> None:
        """Load a block by a list of its elements; the elements that a mask of indices hides are a number."""
        self.hidden.windowed.add(pointer.of)
        self._check_visible(op, pointer, bounds, rest)
        number = Number(0.0, "0.0", pointer.shape) if other is None else other
        held = truth(op, rest if bounds is None else rest & self._condition(op, bounds))
        at, held = np.broadcast_arrays(elements(op, pointer), held)
        flat = (prod(pointer.shape),)
        values = np.where(held, at, -1).reshape(*at.shape[:2], *flat)
        listed = table_of(op, values, None, flat, WIDE, self._kinds_of_all)
        steps = tuple(prod(pointer.shape[i + 1 :]) for i in range(len(pointer.shape)))
        rest_of = Affine(np.zeros((1, 1), np.int64), tuple(0 for _ in steps), pointer.shape, pointer.of)
        of_block = Listed(rest_of, listed.table, replace(listed.at, steps=steps, shape=pointer.shape, left=()))
        assert isinstance(number, Number)
        self.notes.append(f"{op.line}: elements that the mask hides are timed as loaded ones")
        self._load(op, self._in_rows(op, of_block, None, hidden=number.value), None, number, fmt)

    def _is_scattered(self, op: Op, mask: ListedMask) -> bool:
        """Return whether a mask by loaded integers leaves other elements than the first ones of a block."""
        try:
            first_ones(op, mask, self.is_read(mask.at.base.shape[1]))
        except ProgramError:
            return True
        return False

    def _load_by_values(self, op: Op, pointer: Affine | Listed, mask: ValueComparison, other: Known | None) -> None:
        """Load also the elements that a mask of values hides, within its mask of indices, and choose after the load."""
        self._tt_load(op, pointer, mask.within, other if mask.within is not None else None)
        loaded = self.values[op.results[0]]
        if not isinstance(loaded, Floats) or not isinstance(other, Number | None):
            raise op.fail("a mask of compared values in a tl.load of integers, or with a block as other=")
        self.notes.append(
            f"{op.line}: npusim loads all elements and applies a mask of compared values afterwards; the time includes "
            "the masked elements"
        )
        named = self._named(op, loaded)
        self._by_value(op, replace(mask, within=None), named, Number(0.0, "0.0") if other is None else other)

    def _load_where_held(self, op: Op, pointer: Affine | Listed, mask: ListedMask, other: Known | None) -> None:
        """Load all elements, and replace those that a mask by loaded integers hides by a number."""
        number = Number(0.0, "0.0", pointer.shape) if other is None else other
        held = where_held(op, pointer, mask, self._kinds_of_all) if isinstance(pointer, Listed) else pointer
        if held is None or not isinstance(number, Number):
            why = "a mask of loaded integers may keep only the first elements of a block"
            raise op.fail(f"{why} along an axis other than the list's, or with a block as other=")
        chosen = self._of_table(op, replace(mask, within=None))
        self._load(op, self._in_rows(op, held, mask.within), mask.within, number, shape_of(op.type)[1])
        loaded = self.values[op.results[0]]
        why = (
            "npusim applies the mask of loaded integers after a load of the whole block, and the time is that of "
            "the whole load"
        )
        self.notes.append(f"{op.line}: {why}")
        if isinstance(loaded, Floats):
            self._by_value(op, chosen, self._named(op, loaded), number)

    def _turned_round(self, op: Op, pointer: Affine | Listed, mask: Known | None) -> Affine | Listed:
        """Return addresses that decrease along an axis of a block as a list of those that a mask leaves."""
        if not isinstance(pointer, Affine):
            return pointer
        axis = next(
            (i for i, (s, n) in enumerate(zip(pointer.steps, pointer.shape, strict=True)) if s < 0 < n - 1), None
        )
        if axis is None or not isinstance(self.arguments[pointer.of], View) or pointer.limits()[axis] is not None:
            return pointer
        if not self.choices.way("lists_elements"):
            return pointer
        step, count = -pointer.steps[axis], int(np.max(self._lanes(op, mask, pointer)[axis]))
        others = tuple(0 if i == axis else s for i, s in enumerate(pointer.steps))
        rest = replace(pointer, base=pointer.base - step * (count - 1), steps=others)
        at = Affine(np.zeros((1, 1), np.int64), one_hot(axis, pointer.shape), pointer.shape)
        return Listed(rest, step * np.arange(count)[::-1], at)

    def _as_listed(self, op: Op, pointer: Affine | Listed, mask: Known | None) -> Affine | Listed:
        """Return addresses by a loaded integer of each program and iteration as a list of all addresses; the same for
        single elements that a loop visits from the last to the first.

        For a block in a loop, the list moves along those axes of the tensor that the block does not have.
        """
        if not isinstance(pointer, Affine):
            return pointer
        goes_back = self._walk is not None and not pointer.shape and bool(np.any(np.diff(pointer.base) < 0))
        if not goes_back and not self.looked_up(op.operands[0]):
            return pointer
        view, is_one = self.arguments[pointer.of], not pointer.shape and self._walk is None
        own = {s for s, n in zip(pointer.steps, pointer.shape, strict=True) if n > 1}
        if not is_one and (self._walk is None or not isinstance(view, View) or own - set(view.by)):
            return pointer
        if not self.choices.way("lists_elements"):
            return pointer
        count, times = len(self.ids), pointer.base.shape[1]
        base = np.broadcast_to(pointer.base, (count, times))
        condition = Condition(()) if mask is None else self._condition(op, mask)
        is_hidden = np.broadcast_to(~answers(condition)[0] if is_one else answers(condition)[1], base.shape)
        outer = [i for i in range(len(view.by)) if view.by[i] not in own] if isinstance(view, View) else []
        table = base if is_one else np.asarray(sum((view.index((i,), base) * view.by[i] for i in outer), 0 * base))
        table = np.where(is_hidden, 0, table)
        rest = replace(pointer, base=np.zeros((1, 1), np.int64) if is_one else np.where(is_hidden, 0, base - table))
        kinds, of_each = self._kinds(table)
        at = of_each[:, None] * times + np.arange(times)[None]
        return Listed(rest, table[kinds].reshape(-1), Affine(at, (0,) * len(pointer.shape), pointer.shape))

    def _with_rows_listed(self, op: Op, pointer: Affine, mask: Condition | None, whole: Condition) -> Affine | Listed:
        """Return a block's addresses as a list of its rows in all programs; in a loop, return them as they are.

        ``whole``: the block is loaded in the programs for which it is true. If the tensor's rows are longer than the
        block's, they may also be listed, by the first element of each row of the block.
        """
        if pointer.base.shape[1] > 1 or not pointer.shape:
            return pointer
        *_, rows, columns = (1, *pointer.shape)
        *_, down, along = (0, *pointer.steps)
        view = self.arguments[pointer.of]
        lanes = self._lanes(op, self._bounds_and_rest(op, mask)[0], pointer)
        if not isinstance(view, View) or len(pointer.shape) > 2 or any(x is not None for x in pointer.limits()):
            return pointer
        own, inner = np.zeros((1, 1), np.int64), [i for i, by in enumerate(view.by) if by == along and columns > 1]
        for axis in inner:
            first = view.index((axis,), pointer.base)
            if f"{pointer.of}." not in self.choices.way("listed_rows"):
                own = first * along
            elif view.sizes[axis] > columns and not np.any(first % columns):
                view = view.halved(axis, columns) or view
        self.arguments[pointer.of] = view
        is_whole, _ = answers(whole)
        read = np.logical_and.reduce(np.broadcast_arrays(self.is_read(1), is_whole, *(left > 0 for left in lanes)))
        most = lanes[0] if len(pointer.shape) > 1 else np.ones((1, 1), np.int64)
        each = np.arange(rows)
        first = (pointer.base - own)[..., None]
        values = np.where(read[..., None] & (each < most[..., None]), first + down * each, 0)
        thin = (rows, 1) if len(pointer.shape) > 1 else (1,)
        values = np.broadcast_to(values, (len(self.ids), 1, rows)).reshape(len(self.ids), 1, *thin)
        rest = replace(pointer, base=own, steps=(*(0 for _ in thin[1:]), along))
        if rows == 1:
            kinds, of_each = self._kinds(values.reshape(len(self.ids), 1))
            at = Affine(of_each[:, None], (0,) * len(pointer.shape), pointer.shape)
            return Listed(rest, values.reshape(len(self.ids))[kinds], at)
        result = table_of(op, values, None, thin, 64, self._kinds_of_all)
        return Listed(rest, result.table, replace(result.at, shape=pointer.shape))

    def _kinds(self, table: Integers) -> tuple[Integers, Integers]:
        """Return programs that represent all programs, and for each program the number of its representative.

        Programs are of one kind if their numbers along an axis of the grid have no effect.
        """
        ids = self.ids.copy()
        for axis in range(ids.shape[1]):
            one = ids.copy()
            one[:, axis] = 0
            _, first, of_each = np.unique(one[:, ::-1], axis=0, return_index=True, return_inverse=True)
            if np.array_equal(table[first][of_each.reshape(-1)], table):
                ids = one
        _, first, of_each = np.unique(ids[:, ::-1], axis=0, return_index=True, return_inverse=True)
        of_each = of_each.reshape(-1)
        if not np.array_equal(table[first][of_each], table):  # parts of one program
            return np.arange(len(table)), np.arange(len(table))
        return first, of_each

    def _kinds_of_all(self, flat: Integers) -> tuple[Integers, Integers]:
        """Return which programs share entries of a table, by their integers, (programs, entries), or (1, entries)."""
        return self._kinds(np.broadcast_to(flat, (len(self.ids), flat.shape[1])))

    def _load(self, op: Op, pointer: Affine, mask: Known | None, other: Known | None, fmt: str) -> None:
        """Load a block of floats, or of a mask."""
        tensor = self.arguments[pointer.of]
        if not isinstance(tensor, View) and not pointer.shape:
            why = "pass its value as an argument, a constexpr or a table of pages (--page); or record the call"
            raise op.fail(f"a load of one element of {pointer.of}: {why} (npusim help triton)")
        mask, rest = self._bounds_and_rest(op, mask)
        if (rest is not None or pointer.of in self.hidden.windowed) and self._is_window(pointer, other):
            self._load_window(op, pointer, mask, rest or Condition(()), other, fmt)
            return
        if rest is not None:
            self._load_and_choose(op, pointer, mask, rest, other, fmt)
            return
        pointer, tensor = self._in_cut(op, pointer, mask) or self._in_part(pointer)
        lanes, shape = self._lanes(op, mask, pointer), pointer.shape
        if self._walk is None and isinstance(other, Number) and any(np.all(left <= 0) for left in lanes):
            self._set(op, replace(other, shape=shape))  # no program loads anything
            return
        if not any(pointer.steps) or not (all(pointer.steps) or self._is_factor(op)):  # some lanes share one element
            by_step = list(zip(pointer.steps, shape, pointer.limits(), strict=True))
            limits = tuple(most if step else None for step, _, most in by_step)
            pointer = replace(pointer, shape=tuple(n if step else 1 for step, n, _ in by_step), left=limits)
        assert isinstance(tensor, Tensor)
        is_walked, left = self._walk is not None and pointer.base.shape[1] > 1, _read_of(lanes, pointer)
        pointer = self._with_one_index(pointer, left)
        pointer, repeats = self._of_one_row(pointer, lanes)
        self._check_indices(op, pointer, left)
        dims = self._dims(op, pointer, self._viewed(op, pointer, left))
        is_transposed = dims == (COLUMNS, ROWS)
        pad = other.value if isinstance(other, Number) else 0.0 if other is None and mask is not None else None
        axes = self._axes(pointer.shape)
        begin_anew = zip(axes, self._begin_anew(op, mask, pointer, left), repeats, strict=True)
        self.anew |= {axis for axis, *is_anew in begin_anew if any(is_anew)}
        self._note_cuts(axes, pointer.shape, left)
        before = next((x for x in self.loads.values() if x.of == pointer.of and x.is_walked and is_walked), None)
        if before and len(self.walks) > 1 and before.pointer.steps == pointer.steps:  # the loop before reads it too
            self._note_cuts(before.axes, pointer.shape, left)
            self._join_loads(op, before, pointer, left)
            self.walks[-1].loads.append(before.name)
            self._in_lanes(op, Floats(before.name, before.axes, fmt, pad, is_transposed), shape, lanes, other)
            return
        name = self._name_of_operand(
            tensor.name.replace(".", "_") + ("j" if is_walked and self._walk and not self._walk.is_sum else "")
        )
        at = len(self.stored), self._loop
        if pad is not None:
            self.hidden.numbers[name] = pad
        self.loads[name] = Load(name, pointer.of, pointer, axes, left, is_walked, op.line, dims, *at)
        if is_walked:
            self.walks[-1].loads.append(name)
        self._in_lanes(op, Floats(name, axes, fmt, pad, is_transposed), shape, lanes, other)

    def _join_loads(self, op: Op, before: Load, pointer: Affine, left: list[Integers]) -> None:
        """Add the tiles that a loop loads to those that the loop before it loads; refuse other tiles."""
        if any(x.of == pointer.of for x in self.stored):
            raise op.fail(
                f"{pointer.of} is loaded after a store to it, which is not supported; pass a copy to the kernel"
            )
        if before.pointer.shape != pointer.shape:
            left = self._with_larger_tiles(op, before, pointer, left)
        if not self.choices.is_apart:
            if before.pointer.base.shape[1] not in (1, self.walks[-2].most):  # both loops then read one tensor
                raise op.fail(
                    f"the loop reads {pointer.of} more often than the loop before it; read the same tiles in both"
                )
            before.pointer = replace(before.pointer, base=self._both(before.pointer.base, pointer.base))
            before.left = list(map(self._both, before.left, left))
        elif not all(map(are_alike, (before.pointer.base, *before.left), (pointer.base, *left))):
            raise op.fail(
                f"the loop reads other tiles of {pointer.of} than the loop before it; read the same tiles in both"
            )

    def _with_larger_tiles(self, op: Op, before: Load, pointer: Affine, left: list[Integers]) -> list[Integers]:
        """Return the visible elements of a loop's tiles within the larger of two loops' tiles, which are those of the
        load of the loop before it; each loop visits as many elements as it loads.

        Raises `ProgramError` unless only the axis along which both loops move tile by tile has another size.
        """
        one, other = before.pointer.shape, pointer.shape
        apart = [i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
        is_walked = len(one) == len(other) and len(apart) == 1 and min(one[apart[0]], other[apart[0]]) > 1
        is_walked = is_walked and all(_moves_by_tiles(x, apart[0]) for x in (before.pointer, pointer))
        if not is_walked or self.choices.is_apart or any(w.is_sum for w in self.walks[-2:]):
            raise op.fail(
                f"the loop reads {pointer.of} in tiles of other sizes than the loop before it; use the same sizes"
            )
        (i,) = apart
        self.hidden.unlike.append((before.axes[i], op.line))
        before.left = [np.minimum(x, one[i]) if n == i else x for n, x in enumerate(before.left)]
        before.pointer = replace(before.pointer, shape=tuple(map(max, one, other)))
        return [np.minimum(x, other[i]) if n == i else x for n, x in enumerate(left)]

    def _check_unlike(self) -> None:
        """Refuse sums and maxima along an axis whose tiles have other sizes in another loop, as their order would be
        that of the larger tiles, and tiles along it that are stored or known at launch.
        """
        unlike = {self.root(a) for a, _ in self.hidden.unlike}
        reduced = [a for a, _ in (*self.reduced, *self.goes_down, *self.reduced_vectors)]
        stored = [a for x in self.stored if x.is_walked for a in x.value.axes]
        known = [a for x in self.seen.values() for a in x.value.axes]
        if found := unlike.intersection(map(self.root, (*reduced, *stored, *known))):
            line = next(line for a, line in self.hidden.unlike if self.root(a) in found)
            why = (
                "two loops have tiles of different sizes, and the kernel adds up, compares or stores elements along "
                "them, or knows them at launch"
            )
            raise ProgramError(f"{line}: {why}; use the same sizes")

    def _note_cuts(self, axes: Sequence[str | None], shape: Sequence[int], left: Sequence[Integers]) -> None:
        """Note axes along which a mask hides lanes, and axes along which it does so only in some iterations of
        a loop.
        """
        for axis, n, some in zip(axes, shape, left, strict=True):
            is_read, seen = np.broadcast_arrays(self.is_read(some.shape[1]), np.minimum(some, n))
            if np.any((seen < n) & is_read):
                self.cuts.add(axis)
                if self._walk and np.any(np.where(is_read, seen, n).min(1) < np.where(is_read, seen, 0).max(1)):
                    is_seen = bool(np.all(is_read[:, 0] & (seen[:, 0] >= n)))
                    self._walk.partial[axis] = is_seen and self._walk.partial.get(axis, True)

    def _bounds_and_rest(self, op: Op, mask: Known | None) -> tuple[Known | None, Condition | None]:
        """Return the bounds of a block's axes in a load's mask, and the other conditions on indices in it, if there are
        any.
        """
        if not isinstance(mask, Condition):
            return mask, None
        others = [
            (r, d)
            for r, d in mask.of
            if any(d.steps)
            and (bound_of(d, r) is None or self._hides_lanes_alike(r, d) or self._is_filled(op, d))
            and not any(np.all(each) for each in answers(Condition(((r, d),))))
        ]
        either = tuple(group for group in mask.either if not np.all(answers(Condition((), (group,)))[0]))
        if not others and not either:
            return mask, None
        return Condition(tuple(x for x in mask.of if x not in others)), Condition(tuple(others), either)

    def _is_filled(self, op: Op, d: Affine) -> bool:
        """Return whether the rows of a block that a comparison hides are numbers that the kernel stores."""
        along = [i for i, step in enumerate(d.steps) if step]
        is_of_rows = len(d.shape) == 2 and along == [0]
        return op.name == "tt.load" and self._walk is None and is_of_rows and bool(self.choices.way("fills_rows"))

    def _load_and_choose(
        self, op: Op, pointer: Affine, bounds: Known | None, rest: Condition, other: Known | None, fmt: str
    ) -> None:
        """Load the elements within bounds, and replace those that the rest of a mask hides by a number."""
        number = Number(0.0, "0.0", pointer.shape) if other is None else other
        why = "a mask of tl.load that is not an upper bound of its axes"
        if not isinstance(number, Number):
            raise op.fail(f"{why} is not supported with a block as other=")
        try:
            bounds = bounds if isinstance(bounds, Condition) and bounds.every else None
            at = self._in_visible_lanes(op, pointer, bounds, rest)
            is_beyond = self._is_beyond(pointer, self._left(op, bounds, pointer)).any()
            if at is pointer and (is_beyond or self.choices.way("lists_elements")):
                at = self._of_visible_lanes(op, pointer, bounds, rest)
            self._load(op, at, bounds, number, fmt)
        except ProgramError as error:
            how = f"{why} is read as a load of the whole block and a tl.where after it, which fails: {error}"
            every, none = answers(rest)
            is_whole = bool(np.all(every | none)) and not (np.all(every) or np.all(none))  # all or nothing, by program
            raise (self.unlike(op, how, every) if is_whole else op.fail(how)) from None
        self.notes.append(
            f"{op.line}: {why} is applied after a load of the whole block, and the time is that of the whole load"
        )
        loaded = self.values[op.results[0]]
        if isinstance(loaded, Floats):
            is_filled = any(self._is_filled(op, d) for _, d in rest.of)
            choose = self._fixed_choice if is_filled else self._selected
            choose(op, rest, self._named(op, loaded), number)

    def _in_visible_lanes(self, op: Op, pointer: Affine, bounds: Known | None, rest: Condition) -> Affine:
        """Return pointers with the address of a visible lane in place of lanes that a mask hides equally in all
        programs.
        """
        if not self.choices.way("chooses_lanes"):
            return pointer
        for axis, (step, n) in enumerate(zip(pointer.steps, pointer.shape, strict=True)):
            lanes = np.arange(min(n, int(self._lanes(op, bounds, pointer)[axis].max())))
            visible = np.ones(lanes.shape, bool)
            for relation, d in rest.of:
                if self._hides_lanes_alike(relation, d) and d.steps[axis]:
                    visible &= RELATIONS[relation](int(d.base.flat[0]) + d.steps[axis] * lanes, 0)
            if visible.all() or not visible.any() or not step or pointer.limits()[axis] is not None:
                continue
            first, last = (int(i) for i in np.flatnonzero(visible)[[0, -1]])
            at = Affine(np.zeros((1, 1), np.int64), one_hot(axis, pointer.shape), pointer.shape)
            steps = tuple(0 if i == axis else s for i, s in enumerate(pointer.steps))
            of_rest = replace(pointer, base=pointer.base + first * step, steps=steps)
            return self._in_rows(op, Listed(of_rest, (np.clip(lanes, first, last) - first) * step, at), bounds)
        return pointer

    def _of_visible_lanes(
        self, op: Op, pointer: Affine, bounds: Known | None, rest: Condition, *, drops: bool = False
    ) -> Affine:
        """Return pointers with the address of a visible lane, or no address if ``drops``, in place of lanes that a mask
        hides, program by program.

        If the mask is along no axis, or along several, the pointers are returned as they are.
        """
        along = {i for _, d in rest.every for i, s in enumerate(d.steps) if s}
        if rest.either or len(along) != 1 or any(x is not None for x in pointer.limits()):
            return pointer
        if drops and self._is_beyond(pointer, [np.full((1, 1), n, np.int64) for n in pointer.shape]).any():
            self._check_visible(op, pointer, bounds, rest)
        (axis,) = along
        lanes, step = np.arange(pointer.shape[axis]), pointer.steps[axis]
        rules: list[Booleans] = [RELATIONS[r](d.base[..., None] + d.steps[axis] * lanes, 0) for r, d in rest.of]
        is_read, base = np.asarray(self.is_read(pointer.base.shape[1]))[..., None], pointer.base[..., None]
        held: Booleans = np.logical_and.reduce(np.broadcast_arrays(is_read, *rules))
        visible, base = np.broadcast_arrays(held, base)
        chosen = np.where(visible, lanes, np.argmax(visible, 2)[..., None])
        own = tuple(n if i == axis else 1 for i, n in enumerate(pointer.shape))
        values = np.where(visible.any(2, keepdims=True), base + step * chosen, 0)
        values = np.where(visible, values, -1) if drops else values
        result = table_of(op, values.reshape(*values.shape[:2], *own), None, own, 64, self._kinds_of_all)
        others = tuple(0 if i == axis else s for i, s in enumerate(pointer.steps))
        of_rest = replace(pointer, base=np.zeros((1, 1), np.int64), steps=others)
        listed = Listed(of_rest, result.table, replace(result.at, shape=pointer.shape))
        return self._in_rows(op, listed, bounds, drops=drops)

    def _check_visible(self, op: Op, pointer: Affine, bounds: Known | None, rest: Condition) -> None:
        """Raise `ProgramError` if a lane that a mask leaves is beyond its tensor."""
        view = self.arguments[pointer.of]
        held = truth(op, rest if bounds is None else rest & self._condition(op, bounds))
        at, held = np.broadcast_arrays(elements(op, pointer), held)
        is_read = self.is_read(at.shape[1])
        if np.any(
            held & is_read.reshape(*is_read.shape, *(1 for _ in pointer.shape)) & ((at < 0) | (at >= view.extent))
        ):
            raise op.fail(f"{pointer.of}: a program accesses an element beyond the tensor, and no mask prevents it")

    def _in_lanes(self, op: Op, x: Floats, shape: tuple[int, ...], lanes: list[Integers], other: Known | None) -> None:
        """Set a loaded block; if a mask hides some of the lanes that share one element, each lane has a
        separate value.
        """
        sides = enumerate(zip(shape, lanes, strict=True))
        hidden = [i for i, (n, most) in sides if np.any((most < n) & self.is_read(most.shape[1]))]
        alike = [i for i in hidden if x.axes[i] is None and shape[i] > 1]
        if not alike:
            self._set(op, x)
            return
        x = self._spread(x, shape)
        for i in alike:
            self._note_cuts(x.axes[i : i + 1], shape[i : i + 1], lanes[i : i + 1])
            self.bounds.append((x.axes[i], lanes[i], op.line))
        self._set(op, self._named(op, x))

    def _is_factor(self, op: Op) -> bool:
        """Return whether a product reads the result of an operation, directly or after a conversion."""
        readers = self._uses.get(op.results[0], [])
        return any(o.name == "tt.dot" or (o.name in CONVERSIONS and self._is_factor(o)) for o in readers)

    @property
    def _loop(self) -> int:
        """The number of the loop that is read, from 1; 0 outside of loops."""
        return len(self.walks) if self._walk is not None else 0

    def _in_cut(self, op: Op, pointer: Affine, mask: Known | None) -> tuple[Affine, Tensor] | None:
        """Return a block's pointers in a tensor that has only the block's columns; None if these differ between
        programs, or are all columns.
        """
        view = self.arguments[pointer.of]
        steps = [(s, i) for i, (s, n) in enumerate(zip(pointer.steps, pointer.shape, strict=True)) if s and n > 1]
        if type(view) is not View or not steps or not self.choices.way("cuts"):
            return None
        (step, i), left = min(steps), self._left(op, mask, pointer)
        plain = replace(view, groups=NO_GROUPS, fixed=()).assigned()
        counts, first = np.broadcast_arrays(np.minimum(left[i], pointer.shape[i]), pointer.base)
        counts, first = counts[counts > 0], first[counts > 0]
        if not counts.size:
            return None

        def along(one: View) -> tuple[int | None, int, int, bool]:
            """Return the axis of the columns, the first column and their number, and whether these are the same in all
            programs.
            """
            axis = next((a for a, by in enumerate(one.by) if by == step), None)
            at = first if axis is None else one.index((axis,), first)
            is_one = not (np.ptp(counts) or np.ptp(at))
            return axis, int(at.min()), int((at + counts).max() - at.min()), is_one

        axis, start, width, is_one = along(plain)
        is_within = axis is not None and is_one and start + width <= plain.sizes[axis]
        if not is_within and len(steps) == len(pointer.shape) == step == pointer.base.shape[1] == 1:
            plain = plain.flat() or plain  # elements of one row
            axis, start, width, is_one = along(plain)
            is_one |= len(plain.sizes) == 1
        if axis is None or not is_one or view.groups[ROWS] == (axis,):
            return None
        if start < 0 or start + width > plain.sizes[axis] or width == plain.sizes[axis]:
            return None
        for name in (f"{pointer.of}.{k}" for k in count(2)):
            part = plain.part(name, axis, start, width)
            known = self.arguments.setdefault(name, part)
            if isinstance(known, View) and known.cut == part.cut:
                return replace(pointer, of=name), known
        return None

    def _in_part(self, pointer: Affine) -> tuple[Affine, Tensor]:
        """Return a block's pointers and tensor; for a part of a recorded view, a separate tensor.

        Equal blocks at a constant distance in all programs (the halves of a row) are parts of their tensor.
        """
        name, parts, is_walked = pointer.of, list[str](), self._walk is not None and pointer.base.shape[1] > 1
        if isinstance(self.arguments[name], GatheredView | MaskView):
            return pointer, self.arguments[name]
        for x in (*self.loads.values(), *self.stored):
            if x.of.partition(".")[0] != name or not isinstance(self.arguments[name], View):
                continue
            if isinstance(self.arguments[x.of], GatheredView):
                continue
            if (
                not (x.pointer.shape and pointer.shape)
                and x.pointer.shape != pointer.shape
                and self._is_read_alone(name)
            ):
                parts.append(x.of)  # a single element, separate from blocks
                continue
            if x.is_walked != is_walked and self._is_read_alone(name) and self.choices.way("parts_by_loops"):
                parts.append(x.of)  # the part that a loop visits is separate from the rest
                continue
            apart = x.pointer.base - pointer.base if x.walk == self._loop else np.zeros((1, 1), np.int64)
            is_like = (x.pointer.shape, x.pointer.steps) == (pointer.shape, pointer.steps)
            if not is_like or np.ptp(apart) or not apart.any():
                return replace(pointer, of=x.of), self.arguments[x.of]
            parts.append(x.of)
        if parts:
            part = f"{name}.{len(set(parts)) + 1}"
            self.arguments[part] = replace(self.arguments[name], name=part)
            pointer = replace(pointer, of=part)
        return pointer, self.arguments[pointer.of]

    def _of_table(self, op: Op, x: ListedMask) -> ValueComparison:
        """Return a mask by a table as a mask that is loaded; this is done only for tensors of integers."""
        tensor = self.arguments.get(x.at.of)
        if not isinstance(tensor, IntegerTensor):
            raise op.fail("a mask of a tile depends on integers from several loads or tensors, which is not supported")
        numbered = (f"{x.at.of}.{i}" for i in count(1))
        like = [
            n
            for n, t in self.arguments.items()
            if isinstance(t, MaskView) and t.holds is not None and np.array_equal(t.holds, x.holds)
        ]
        name = next(
            (n for n in like if n.startswith(f"{x.at.of}.")), next(n for n in numbered if n not in self.arguments)
        )
        ones = (1,) * len(AXES)
        view = MaskView(name, ones, "int8", ones, sizes=tensor.sizes, by=tensor.by, holds=x.holds)
        self.arguments.setdefault(name, view)
        if (size := INTEGERS[tensor.fmt]) > 1:
            self.notes.append(
                f"{op.line}: {x.at.of}: a mask with {size} bytes an element is timed as a mask with 1 byte an element"
            )
        limits = [(i, left) for i, left in enumerate(x.at.limits()) if left is not None]
        rules = tuple(
            ("slt", replace(x.at, base=-left, steps=one_hot(i, x.shape), of="", left=())) for i, left in limits
        )
        other = None if x.beyond is None else Number(float(x.beyond), "", x.shape)
        before = self.values.get(op.results[0])
        self._load(op, replace(x.at, of=name, left=()), Condition(rules) if rules else None, other, "i1")
        result = self.values.pop(op.results[0])
        if before is not None:
            self._set(op, before)
        assert isinstance(result, Floats)
        return ValueComparison(result, x.within)

    def _element_of(self, pointer: Pointers) -> str:
        """Return the element type of the tensor that a pointer is into, by TTIR's name."""
        of = argument_of(pointer).partition(".")[0]
        return shape_of(self.function.parameters[of])[1]

    def _in_rows(
        self, op: Op, pointer: Affine | Listed, mask: Known | None, *, drops: bool = False, hidden: float | None = None
    ) -> Affine:
        """Return pointers of a block whose rows are given by a table as pointers into a tensor of these rows; return
        other pointers as they are.

        ``drops``: for lanes that a mask hides, the table has entries that point to no row; ``hidden``: these are loaded
        as a number.
        """
        if isinstance(pointer, Affine):
            return pointer
        of = pointer.rest.of
        if not isinstance(source := self.arguments[of], View):
            raise op.fail(f"{of}: loaded integers select rows, so that npusim needs their values; record the call")
        pointer = self._without_hidden(op, by_one_list(op, pointer, self._kinds_of_all), mask)
        pointer = self._in_order(pointer, mask, op) if self.choices.way("lists_in_order") else pointer
        is_read_alone = self._is_read_first(op, of)
        for name in chain((f"{of}.rows",), (f"{of}.rows{i}" for i in count(2))):
            result, view = rows_of(op, pointer, source, name)
            view = replace(self._visited(result, view), hidden=hidden)
            known = self.arguments.get(name)
            if not isinstance(known, GatheredView) or known.is_like(view):
                break
            if not is_read_alone:
                raise op.fail(f"{of}: two accesses select rows by different loaded integers, which is not supported")
        others = [x for x in (*self.loads.values(), *self.stored) if x.of.partition(".")[0] == of and x.of != name]
        if others and not is_read_alone:
            raise op.fail(
                f"{of}: one access selects rows by loaded integers and another does not, which is not supported"
            )
        self._check_rows(op, result, view, self._lanes(op, mask, result), drops=drops or hidden is not None)
        if known is None:
            listed = f"{len(view.listed):,} rows, selected by loaded integers or by indices that are not linear"
            self.notes.append(f"{op.line}: {of}: {listed}: a row that is selected twice is read from memory twice")
            if not any(n > 1 and abs(s) < view.by_row for s, n in zip(result.steps, result.shape, strict=True)):
                view = replace(view, run=run_of(np.array(view.listed, np.int64)))
                why = "single elements that a list selects: memory is timed as if they were adjacent, not by sectors"
                self.notes.append(f"{op.line}: {of}: {why}")
            self.arguments[name] = view
        return result

    def _in_order(self, x: Listed, mask: Known | None, op: Op) -> Listed:
        """Return pointers by a table of each program's entries, in the order of the programs; equal programs share
        entries.
        """
        axis = next((i for i, (s, n) in enumerate(zip(x.at.steps, x.shape, strict=True)) if s and n > 1), None)
        if axis is None or x.at.base.shape[1] > 1:
            return x
        lanes, most = np.arange(n := x.shape[axis]), self._lanes(op, mask, x.at)[axis].min(1, keepdims=True)
        at, is_left = np.broadcast_arrays(x.at.base + x.at.steps[axis] * lanes, lanes < most)
        at = np.broadcast_to(np.where(is_left & (at >= 0) & (at < len(x.table)), at, -1), (len(self.ids), n))
        entries = np.where(at < 0, -1, x.table[at])
        _, first, of_each = np.unique(entries, axis=0, return_index=True, return_inverse=True)
        order = np.argsort(first, kind="stable")
        base = np.argsort(order)[of_each.reshape(-1)][:, None] * n
        steps = tuple(int(i == axis) for i in range(len(x.shape)))
        return replace(x, table=entries[first[order]].reshape(-1), at=replace(x.at, base=base, steps=steps))

    def _without_hidden(self, op: Op, x: Listed, mask: Known | None) -> Listed:
        """Return pointers by a table of indices without the lanes after the last lane that a mask leaves in any
        program.

        Other entries that it hides in all programs and iterations become 0.  Tables of loaded integers stay.
        """
        axis = next((i for i, (s, n) in enumerate(zip(x.at.steps, x.shape, strict=True)) if s and n > 1), None)
        if axis is None or mask is None or self.looked_up(op.operands[0]):
            return x
        most = self._lanes(op, mask, x.at)[axis]
        lanes = np.arange(x.shape[axis])
        at, is_left = np.broadcast_arrays(x.at.base[..., None] + x.at.steps[axis] * lanes, lanes < most[..., None])
        is_left = is_left & (at >= 0) & (at < len(x.table))
        is_used = np.zeros(len(x.table), bool)
        is_used[at[is_left]] = True
        n, most_left = x.shape[axis], int(np.max(most, initial=0))
        table, base = np.where(is_used, x.table, 0), x.at.base
        if 0 < most_left < n and x.at.steps[axis] == 1 and not (len(table) % n or np.any(base % n)):
            table, base = table.reshape(-1, n)[:, :most_left].reshape(-1), base // n * most_left
        return replace(x, table=table, at=replace(x.at, base=base))

    def _is_read_first(self, op: Op, of: str) -> bool:
        """Return whether no store to a tensor can precede an access: there is no store, or the access is a load before
        all loops and stores to the tensor.

        Whether another program stores there is examined when all accesses are known.
        """
        is_first = op in self.function.operations and not any(x.of.partition(".")[0] == of for x in self.stored)
        is_one = op.name == "tt.load" and not shape_of(op.type)[0]
        return self._is_read_alone(of) or (is_first and is_one and self._walk is None)

    def _visited(self, pointer: Affine, view: GatheredView) -> GatheredView:
        """Return rows by a table without the rows of iterations that no program has."""
        axis = next((i for i, s in enumerate(pointer.steps) if abs(s) >= view.by_row), None)
        if self._walk is None or pointer.base.shape[1] == 1:
            return view
        n, step = (1, 0) if axis is None else (pointer.shape[axis], pointer.steps[axis] // view.by_row)
        is_read, first = np.broadcast_arrays(self.is_read(pointer.base.shape[1]), pointer.base // view.by_row)
        places = (first[..., None] + step * np.arange(n))[is_read]
        visited = np.zeros(len(view.listed), bool)
        visited[places[(places >= 0) & (places < len(visited))]] = True
        return replace(view, listed=tuple(np.where(visited, view.listed, -1).tolist()))

    def _check_rows(
        self, op: Op, pointer: Affine, view: GatheredView, lanes: Sequence[Integers], *, drops: bool
    ) -> None:
        """Raise `ProgramError` for an accessed row that is not a row of the tensor, or that is stored to twice."""
        axis = next((i for i, s in enumerate(pointer.steps) if abs(s) >= view.by_row), None)
        n, step, most = 1, 0, np.ones((1, 1), np.int64)  # of one element
        if axis is not None:
            n, step, most = pointer.shape[axis], pointer.steps[axis] // view.by_row, lanes[axis]
        is_read = [left > 0 for i, left in enumerate(lanes) if i != axis]
        is_read = np.logical_and.reduce(np.broadcast_arrays(self.is_read(pointer.base.shape[1]), *is_read))
        first = pointer.base // view.by_row
        places = first[..., None] + step * np.arange(n)
        read = (np.arange(n) < most[..., None]) & is_read[..., None]
        places, read = np.broadcast_arrays(places, read)
        rows = np.array(view.listed, np.int64)
        if not drops and np.any((rows[np.clip(places, 0, len(rows) - 1)] < 0) & read):
            raise op.fail(f"{view.parameter}: loaded integers address elements beyond its end, and no mask prevents it")
        is_used = np.zeros(len(rows), bool)
        is_used[places[read]] = True
        used = rows[is_used & (rows >= 0)]
        if op.name.endswith("store") and repeats(used):
            raise op.fail(f"{view.parameter}: a store writes the same row at two indices, in an undefined order")

    def _looked_up(
        self, op: Op, tensor: IntegerTensor, pointer: Affine | Listed, mask: Known | None, other: Known | None
    ) -> Affine | Listed | Condition:
        """Return integers that are data of a recorded call; for a block, the elements that the mask leaves."""
        of, data = argument_of(pointer), self._data_of(op, tensor, pointer)
        condition, alike = self._kept_by(op, mask), None
        if isinstance(pointer, Listed) and self._walk is not None:
            number = other if isinstance(other, Affine) else None
            alike = alike_programs(pointer, condition, number, self.is_read(self._walk.most))
        if alike is not None and isinstance(pointer, Listed):
            pointer, condition = pointer.of_programs(alike[0]), condition and condition.at(alike[0])
            other = other.at(alike[0]) if isinstance(other, Affine) else other
        places = elements_of(op, pointer)
        limits = (pointer.at if isinstance(pointer, Listed) else pointer).limits()
        known = known_elements(op, limits, pointer.shape)
        if condition is not None:
            kept = truth(op, condition)
            self._refuse_restarted(op, known, kept)
            known = kept if known is None else known & kept
        else:
            self._refuse_restarted(op, known, np.ones((1, 1), bool))
        if not pointer.shape and known is not None and not np.all(known) and not isinstance(other, Affine):
            raise op.fail(f"{of}: a mask hides this integer; set its value with other=...")
        known = np.broadcast_to(True if known is None else known, np.broadcast_shapes(places.shape, np.shape(known)))
        is_read = self.is_read(known.shape[1])
        is_read = is_read if alike is None or len(is_read) == 1 else is_read[alike[0]]
        known = known & is_read.reshape(*is_read.shape, *(1 for _ in pointer.shape))
        places = np.broadcast_to(places, known.shape)
        self._check_looked(op, of, data, places, known, None if alike is None else alike[0])
        values = wrapped(data[np.where(known, places, 0)], bits := bits_of(op.type))
        is_whole = all(x is None for x in limits)
        if (
            is_whole
            and isinstance(other, Affine)
            and (result := affine(np.where(known, values, elements(op, other)))) is not None
        ):
            return replace(result if alike is None else result.at(alike[1]), bits=bits)
        if isinstance(pointer, Listed):
            listed = table_of(op, values, known, pointer.shape, bits)
            listed = listed if alike is None else listed.of_programs(alike[1])
            return replace(listed, beyond=_number_of(other))
        left = self._lanes(op, condition, pointer)
        ends = tuple(x if np.any(x < n) else None for x, n in zip(left, pointer.shape, strict=True))
        if (result := affine(values, known)) is None:
            rest = Affine(np.zeros((1, 1), np.int64), (0,) * len(pointer.shape), pointer.shape, bits=bits)
            is_used = np.zeros(len(data), bool)
            is_used[places[known]] = True
            table = np.where(is_used, wrapped(data, bits), 0)
            return Listed(rest, table, replace(pointer, left=ends), _number_of(other))
        return replace(result, left=ends, bits=bits, is_hidden=True)

    def _refuse_restarted(self, op: Op, known: Booleans | None, kept: Booleans) -> None:
        """Raise `ProgramError` for elements that the mask leaves beyond the point at which indices restart."""
        if known is not None and np.any(kept & ~known):
            raise restarts(op)

    def _kept_by(self, op: Op, mask: Known | None) -> Condition | None:
        """Return the elements of a block that a mask of loaded integers, or of indices, leaves; None for all."""
        if isinstance(mask, ListedMask):
            return first_compared(op, mask, self.is_read(mask.at.base.shape[1]))
        return None if mask is None else self._condition(op, mask)

    @staticmethod
    def _data_of(op: Op, tensor: IntegerTensor, pointer: Pointers) -> Integers:
        """Return the elements of a tensor of integers in the order of memory; refuse those that are not recorded."""
        if tensor.data is None:
            of = argument_of(pointer)
            raise op.fail(
                f"the integers of {of} are not recorded, because they are reinterpreted or loaded through a descriptor"
            )
        return np.asarray(tensor.data)

    def _check_looked(
        self, op: Op, of: str, data: Integers, places: Integers, known: Booleans, programs: Integers | None = None
    ) -> None:
        """Note which integers programs load, for places that are ``known``; refuse places beyond the tensor.

        ``programs``: the programs to which the places belong; None for all programs.
        """
        if np.any(is_beyond := known & ((places < 0) | (places >= len(data)))):
            program, at = int(np.argwhere(is_beyond)[0, 0]), int(places[is_beyond][0])
            program = int(programs[program]) if programs is not None else program if len(places) > 1 else 0
            why = f"{self.program(program)} reads element {at} of {len(data)}, and no mask prevents it"
            raise op.fail(f"{of}: {why}{self._looked(op, program, 0)}")
        self._note_looked(of, places, known, op.line)

    def _note_looked(self, of: str, places: Integers, known: Booleans, line: Line) -> None:
        """Note which integers of a tensor each program loads; in a loop over tiles, or for many integers, they are not
        known.
        """
        noted, count = self.looked_at.setdefault(of, []), places[0].size * len(self.ids)
        if noted is None or self._walk is not None or count > MOST_ELEMENTS:
            self.looked_at[of] = None
            return
        at = np.where(known, places, -1).reshape(len(places), -1)
        noted.append(LookedAt(self.ids, np.broadcast_to(at, (len(self.ids), at.shape[1])), line))

    def _check_indices(self, op: Op, pointer: Affine, left: Sequence[Integers]) -> None:
        """Raise `ProgramError` for an address beyond a recorded view, whose integers may be data."""
        tensor: Tensor = self.arguments[pointer.of]
        if not np.any(beyond := self._is_beyond(pointer, left)) or not isinstance(tensor, View):
            return
        ends = _ends_of(pointer, left)
        if tensor.cut is not None:
            lines = {str(x.line) for x in (*self.stored, *self.loads.values()) if x.of == pointer.of}
            why = f"{tensor.parameter} is stored to and also accessed elsewhere; pass another tensor"
            raise op.fail(f"{why}; it is accessed at {', '.join(sorted({*lines, str(op.line)}))}")
        beyond = np.broadcast_to(beyond, (len(self.ids), beyond.shape[1]))
        program, time = (int(i) for i in np.argwhere(beyond)[0])
        step, size = max(zip(tensor.by, tensor.sizes, strict=True))
        low, high = (int(np.broadcast_to(x, beyond.shape)[program, time]) for x in ends)
        index = (low if low < 0 else high) // step
        does = "stores to" if op.name.endswith("store") else "reads"
        axis = f"index {index} of an axis of {size} with stride {step} (allowed: 0 to {size - 1})"
        why = f"{self.program(program)} {does} {axis}, and no mask prevents it"
        raise op.fail(f"{pointer.of}: {why}{self._looked(op, program, time)}")

    def _is_beyond(self, pointer: Affine, left: Sequence[Integers]) -> Booleans:
        """Return the programs and iterations in which some address of a block is beyond its recorded view."""
        tensor: Tensor = self.arguments[pointer.of]
        if not isinstance(tensor, View) or not tensor.sizes:
            return np.zeros((1, 1), bool)
        low, high = (end - tensor.shift for end in _ends_of(pointer, left))
        is_read = np.logical_and.reduce(np.broadcast_arrays(np.ones((1, 1), bool), *(x > 0 for x in left)))
        beyond: Booleans = is_read & self.is_read(pointer.base.shape[1]) & ((low < 0) | (high >= tensor.extent))
        return beyond

    def _looked(self, op: Op, program: int, time: int) -> str:
        """Return the integers loaded by a kernel from which an address is computed, for one program and iteration."""
        said = ""
        for name, load in self.looked_up(op.operands[0]).items():
            x, of = self.values.get(name), self.values[load.operands[0]]
            if isinstance(x, Affine) and isinstance(of, Affine) and name != (op.results or [""])[0]:
                value = x.base[min(program, len(x.base) - 1), min(time, x.base.shape[1] - 1)]
                said += f"; the index comes from {of.of}, loaded at {load.line}, which has {value} there"
        return said

    def _begin_anew(self, op: Op, mask: Known | None, pointer: Affine, left: Sequence[Integers]) -> list[bool]:
        """Return, for each axis of a block, whether it has elements beyond its known elements that no mask hides."""
        if all(x is None for x in pointer.limits()):
            return [False] * len(left)
        every = self._left(op, mask, replace(pointer, left=()))
        is_read = self.is_read(max(x.shape[1] for x in (*left, *every)))
        return [bool(np.any((some < whole) & is_read)) for some, whole in zip(left, every, strict=True)]

    def _with_one_index(self, pointer: Affine, left: list[Integers]) -> Affine:
        """Return a block's pointers with strides for axes of one index, which have no strides in a recorded view."""
        tensor: Tensor = self.arguments[pointer.of]
        return tensor.with_one_index(pointer, left) if type(tensor) is View else pointer

    def _of_one_row(self, pointer: Affine, lanes: list[Integers]) -> tuple[Affine, list[bool]]:
        """Return the pointers of a product's factor, and for each axis whether lanes beyond its only index read that
        index again. An axis with only one index, which all lanes read (as in ``indices % 1``), has a stride here.
        """
        tensor: Tensor = self.arguments[pointer.of]
        is_one = [not step and n > 1 for step, n in zip(pointer.steps, pointer.shape, strict=True)]
        if type(tensor) is not View or sum(is_one) != 1 or len(tensor.sizes) != 1:
            return pointer, [False] * len(lanes)
        steps = tuple(tensor.extent if one else step for one, step in zip(is_one, pointer.steps, strict=True))
        repeats = [one and bool(np.any(some > 1)) for one, some in zip(is_one, lanes, strict=True)]
        return replace(pointer, steps=steps), repeats

    def _viewed(self, op: Op, pointer: Affine, left: list[Integers]) -> Tensor:
        """Return a tensor; for a recorded view, with the axes that all accesses so far agree on."""
        tensor: Tensor = self.arguments[pointer.of]
        if not isinstance(tensor, View):
            return tensor
        if not tensor.is_exchanged and self._is_exchanged(op, pointer):
            if all(np.any(some > 1) for some in left):
                why = f"{pointer.of}: a block across the rows of its tensor is timed as a block along the rows"
                self.notes.append(f"{op.line}: {why}")
            tensor = replace(tensor, is_exchanged=True)
        self._note_step(op, tensor, pointer)
        self.accesses.setdefault(pointer.of, []).append((pointer, left))
        view = tensor.fitted(self.accesses[pointer.of])
        if view is None:
            listed = [s for s, n in zip(pointer.steps, pointer.shape, strict=True) if n > 1]
            lies = f"{'x'.join(map(str, tensor.sizes))} with strides {list(tensor.by)}"
            raise op.fail(
                f"{pointer.of}, {lies}, is accessed with strides {listed}; a block must run along one or two axes"
            )
        self.arguments[pointer.of] = view
        return view

    def _note_step(self, op: Op, tensor: View, pointer: Affine) -> None:
        """Note a block that has every n-th element of an axis of its tensor."""
        steps = [s for s, n in zip(pointer.steps, pointer.shape, strict=True) if n > 1 and s]
        if steps and (step := min(steps)) > 1 and step not in tensor.by:
            why = (
                f"{tensor.parameter}: the block's elements are {step} apart, but the time is that of adjacent elements"
            )
            if not any(n.endswith(why) for n in self.notes):
                self.notes.append(f"{op.line}: {why}")

    def _is_exchanged(self, op: Op, pointer: Affine) -> bool:
        """Return whether a block's rows follow the smaller stride, and no product or transposition reads the block in
        this form.
        """
        steps = [s for s, n in zip(pointer.steps, pointer.shape, strict=True) if n > 1]
        return len(steps) == 2 and 0 < steps[0] < steps[1] and not self._is_turned(op)

    def _is_turned(self, op: Op) -> bool:
        """Return whether a product or a transposition reads the result of an operation, directly or after
        a conversion.
        """
        readers = self._uses.get(op.results[0], []) if op.results else []
        return any(o.name in ("tt.dot", "tt.trans") or (o.name in CONVERSIONS and self._is_turned(o)) for o in readers)

    def _tt_make_tensor_descriptor(self, op: Op, pointer: Affine, *numbers: Affine) -> None:
        half, block = len(numbers) // 2, shape_of("tensor<" + op.text.rpartition("<tensor<")[2])[0]
        self._set(op, Descriptor(pointer, numbers[:half], numbers[half:], block))

    def _described(self, op: Op, x: Known, indices: Sequence[Known]) -> tuple[Affine, Condition]:
        """Return the pointers of a descriptor's block at some indices, and the elements within the tensor."""
        if not isinstance(x, Descriptor) or any(not isinstance(i, Affine) for i in indices):
            raise op.fail(
                "a tensor descriptor that a branch chooses or a loop carries, or a descriptor with indices that "
                "are not integers, is not supported"
            )
        steps, base, rules = list[int](), x.pointer.base, list[tuple[str, Affine]]()
        for at, (i, size, stride) in enumerate(zip(indices, x.sizes, x.strides, strict=True)):
            assert isinstance(i, Affine)
            if np.ptp(stride.base):
                raise op.fail("a tensor descriptor whose strides differ between programs is not supported")
            steps.append(int(stride.base.flat[0]))
            base = base + i.base * steps[-1]
            rules.append(("slt", Affine(i.base - size.base, tuple(int(k == at) for k in range(len(x.block))), x.block)))
            if np.any(i.base < 0):
                raise op.fail("a tensor descriptor accesses a block that begins before the tensor")
        return Affine(base, tuple(steps), x.block, x.pointer.of), Condition(tuple(rules))

    def _tt_descriptor_load(self, op: Op, x: Known, *indices: Known) -> None:
        pointer, inside = self._described(op, x, indices)
        self._tt_load(op, pointer, inside, Number(0.0, "0.0", pointer.shape))

    def _tt_descriptor_store(self, op: Op, x: Known, *rest: Known) -> None:
        is_first = not isinstance(rest[0], Affine)  # the value comes before or after the indices
        value, indices = (rest[0], rest[1:]) if is_first else (rest[-1], rest[:-1])
        pointer, inside = self._described(op, x, indices)
        self._tt_store(op, pointer, value, inside)

    def _both(self, a: Integers, b: Integers) -> Integers:
        """Return the entries of one loop, followed by those of the next loop."""
        each = zip((a, b), self.walks[-2:], strict=True)
        return np.concatenate([np.broadcast_to(x, (len(self.ids), w.most)) for x, w in each], 1)

    def _dims(self, op: Op, pointer: Affine, tensor: Tensor) -> tuple[int, ...]:
        """Return the tensor's axis, rows or columns, for each axis of a block; refuse a block along other axes."""
        if (dims := self._dims_of(pointer, tensor)) is not None:
            return dims
        if (axes := len(pointer.shape)) > 2:
            raise op.fail(f"{pointer.of}: a block of {axes} axes is not supported here; allowed: one or two axes")
        steps = [s for s, n in zip(pointer.steps, pointer.shape, strict=True) if n > 1]
        rows = list(tensor.steps[ROWS:])
        raise op.fail(f"{pointer.of} is accessed with strides {steps}; its rows and columns have {rows}")

    @staticmethod
    def _dims_of(pointer: Affine, tensor: Tensor) -> tuple[int, ...] | None:
        """Return the tensor's axis, rows or columns, for each axis of a block; None for a block along other axes."""
        blocks = list(zip(pointer.steps, pointer.shape, strict=True))
        for dims in {0: ((),), 1: ((COLUMNS,), (ROWS,)), 2: ((ROWS, COLUMNS), (COLUMNS, ROWS))}.get(
            len(pointer.shape), ()
        ):
            sides = [(*block, tensor.steps[d], tensor.shape[d]) for block, d in zip(blocks, dims, strict=True)]
            if all(n == 1 or by == step or by == 0 == whole - 1 for by, n, step, whole in sides):
                return dims
        return None

    def _left(self, op: Op, mask: Known | None, pointer: Affine) -> list[Integers]:
        """Return the number of elements that a mask leaves along each axis, for each program and iteration."""
        return _read_of(self._lanes(op, mask, pointer), pointer)

    def _lanes(self, op: Op, mask: Known | None, pointer: Affine) -> list[Integers]:
        """Return the number of lanes of a block that a mask leaves along each axis, for each program and iteration."""
        known = zip(pointer.shape, pointer.limits(), strict=True)
        left = [np.full((1, 1), n, np.int64) if most is None else np.minimum(n, most) for n, most in known]
        if self._only is not None:
            left = [np.where(self._only, x, 0) for x in left]
        if isinstance(mask, ListedMask):
            axis, most = first_ones(op, mask, self.is_read(mask.at.base.shape[1]))
            left[axis], mask = np.minimum(left[axis], most), mask.within
        condition = Condition(()) if mask is None else self._condition(op, mask)
        if condition.either and not np.all(answers(Condition((), condition.either))[0]):
            raise op.fail(
                "a mask that joins comparisons by | or ~ is not supported here; join upper bounds of the axes by &"
            )
        for relation, d in condition.of:
            bound = bound_of(d, relation)
            if bound is None and not any(d.steps) and left:  # true for a whole tile or program
                self.cuts |= {None} if self._walk else set()
                left = [np.where(RELATIONS[relation](d.base, 0), x, 0) for x in left]
                continue
            every, none = answers(Condition(((relation, d),))) if bound is None else (np.zeros((1, 1), bool),) * 2
            if bound is None and np.all(every | none) and (left or np.all(every)):  # of complete blocks
                left = [np.where(every, x, 0) for x in left] if np.any(none) else left
                continue
            if bound is None:
                raise op.fail("a mask that is not an upper bound of its axes is not supported here")
            left[bound[0]] = np.minimum(left[bound[0]], bound[1])
        return left

    def _stored_at(self, op: Op, pointer: Pointers, mask: Known | None) -> tuple[Affine | Listed, Known | None]:
        """Return pointers and the mask of a store to a tensor that exists."""
        assert not isinstance(pointer, Elements), "pointers that are not linear along two axes"
        return self._of_held(op, pointer, mask) if isinstance(pointer, Affine) else (pointer, mask)

    def _of_held(self, op: Op, pointer: Affine, mask: Known | None) -> tuple[Affine, Known | None]:
        """Return pointers of a store and bounds of its mask, if the other conditions on indices in the mask are along
        one axis.

        Lanes that the mask hides point to no element of a recorded tensor.
        """
        bounds, rest = self._bounds_and_rest(op, mask)
        if rest is None or not isinstance(self.arguments[pointer.of], View):
            return pointer, mask
        if not self.choices.way("lists_elements"):
            return pointer, mask
        bounds = bounds if isinstance(bounds, Condition) and bounds.every else None
        result = self._of_visible_lanes(op, pointer, bounds, rest, drops=True)
        if result is pointer:
            return pointer, mask
        why = "the result also contains rows that the mask hides, whose values the tensor does not contain"
        self.notes.append(f"{op.line}: {pointer.of}: {why}")
        return result, bounds

    def _tt_store(self, op: Op, pointer: Known, value: Known, mask: Known | None = None) -> None:
        if isinstance(value, Affine | Listed | ListedMask | Elements | Condition) and isinstance(pointer, Pointers):
            value = self._stored_integers(op, value, argument_of(pointer))
        if isinstance(value, Number) and isinstance(pointer, Pointers):  # of all elements
            fmt = self._element_of(pointer)
            fmt = "i8" if fmt == MASK and value.value in (0.0, 1.0) else fmt  # one byte of 0 or 1, as Triton stores it
            if fmt not in FORMATS and fmt not in WHOLE:
                raise op.fail(f"a store of a number to a tensor of {fmt}; allowed: {', '.join((*FORMATS, *WHOLE))}")
            text = f"filled('@', {value.text}, {self.choices.fmt(fmt)!r})"
            value = self._named(op, Floats(text, (None,) * len(pointer.shape), fmt), "value")
        if not isinstance(pointer, Pointers) or not isinstance(value, Floats):
            raise op.fail("this tl.store can store only blocks of floats, not integers or masks")
        of = argument_of(pointer)
        value = self._without_sign(op, of, value)
        self._result_of(op, of, value.fmt)
        self.text(value)  # refuses a transposed one
        pointer, mask = self._stored_at(op, pointer, mask)
        if isinstance(mask, ListedMask) and not mask.at.of and len(pointer.shape) == 1 and self._is_scattered(op, mask):
            raise op.fail(
                "a tl.store has a mask that hides columns of a block that is summed along both of its axes, which is "
                "not supported; use a block with as many columns as the tensor, or sum the rows in a loop"
            )
        pointer = self._in_rows(op, pointer, mask)
        pointer, _ = self._in_cut(op, pointer, mask) or self._in_part(pointer)
        left = self._left(op, mask, pointer)
        value = self._spread(value, [n if step else 1 for n, step in zip(pointer.shape, pointer.steps, strict=True)])
        if any(self._begin_anew(op, mask, pointer, left)):
            raise op.fail(f"{pointer.of}: a store has indices that repeat within the block; mask the repeated ones")
        pointer = self._with_one_index(pointer, left)
        self._check_indices(op, pointer, left)
        if self._dims(op, pointer, self._viewed(op, pointer, left)) == (COLUMNS, ROWS):
            if any(n > 1 and not np.any(step) for n, step in zip(pointer.shape, pointer.steps, strict=True)):
                raise op.fail(
                    f"{pointer.of}: a tl.store writes several elements of a block to one element of the tensor"
                )
            raise op.fail(
                f"{pointer.of} is stored transposed, which is not supported; use tl.trans and pointers in the "
                "tensor's order"
            )
        if self._walk:
            self._emit(f"yield {self.text(value)}", op.line)
        self.stored.append(
            Stored(
                name="",
                of=pointer.of,
                pointer=pointer,
                axes=value.axes,
                left=left,
                is_walked=bool(self._walk),
                line=op.line,
                dims=(ROWS, COLUMNS),
                after=len(self.stored),
                walk=self._loop,
                value=value,
            )
        )


def _read_of(lanes: list[Integers], pointer: Affine) -> list[Integers]:
    """Return the number of elements that the lanes of a block read along each axis: one if all lanes have the same
    element.
    """
    return [x if step else np.minimum(x, 1) for x, step in zip(lanes, pointer.steps, strict=True)]


def _ends_of(pointer: Affine, left: Sequence[Integers]) -> tuple[Integers, Integers]:
    """Return the first and the last address of a block's elements that a mask leaves."""
    ends = [s * (np.minimum(n, x) - 1) for s, n, x in zip(pointer.steps, pointer.shape, left, strict=True)]
    low = pointer.base + sum(np.minimum(0, e) for e in ends)
    return low, pointer.base + sum(np.maximum(0, e) for e in ends)


def _number_of(x: Known | None) -> int | None:
    """Return the one integer of all elements in all programs; None for another value."""
    is_one = isinstance(x, Affine) and x.is_uniform
    return int(x.base.flat[0]) if is_one and isinstance(x, Affine) else None


def are_alike(a: Integers, b: Integers) -> bool:
    """Return whether two loops visit the same indices in each program (or the same ones in all)."""
    return a.shape[1:] == b.shape[1:] and bool(np.all(a == b))


def _moves_by_tiles(pointer: Affine, axis: int) -> bool:
    """Return whether a loop's pointer moves by one tile along an axis of its block in each iteration."""
    return bool(np.all(np.diff(pointer.base, axis=1) == pointer.steps[axis] * pointer.shape[axis]))
