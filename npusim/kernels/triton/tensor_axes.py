"""Tensors of recorded calls, views of any strides: the assignment of their axes to columns, rows, heads and batch.

A kernel's accesses to a view identify its columns and rows: a block's index with the smaller stride runs along the
columns, the other one along the rows.  An axis is joined with the next outer one if there is no gap between them and a
block crosses its end.  All other axes belong to the launch: heads, batch, splits, distinguished by their index in each
program (`npusim.kernels.triton.launch_axes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim.errors import SpecError
from npusim.formats import get_format
from npusim.kernels.triton.values import AXES, COLUMNS, ROWS, Affine, Booleans, Integers, Tensor

if TYPE_CHECKING:
    from npusim.kernels.triton.calls import Argument

Array = np.ndarray[Any, Any]
#: Axes of a view by number, outermost first.
Group = tuple[int, ...]
#: A block's pointers, and the number of its elements that are read along each axis.
Access = tuple[Affine, Sequence[Integers]]
NO_GROUPS: tuple[Group, ...] = ((),) * len(AXES)


class Cut(NamedTuple):
    """The first of some neighbouring indices along an axis of a view with ``sizes`` and ``by``, and their number."""

    axis: int
    first: int
    width: int
    sizes: tuple[int, ...]
    by: tuple[int, ...]

    def has(self, offsets: Integers) -> Booleans:
        """Return which elements, by their offsets in the view, have such an index."""
        outer = min((b for b in self.by if b > self.by[self.axis]), default=0)
        at = (offsets % outer if outer else offsets) // self.by[self.axis]
        return (at >= self.first) & (at < self.first + self.width)

    def of(self, whole: Array) -> Array:
        """Return the part of a view's values."""
        before = (slice(None),) * self.axis
        return whole.reshape(self.sizes)[(*before, slice(self.first, self.first + self.width))]


class Ragged(NamedTuple):
    """An axis of a view with ``sizes`` and ``by`` that consists of groups of indices, the last of which is shorter.

    ``number``: the value that kernels load beyond its end.
    """

    axis: int
    sizes: tuple[int, ...]
    by: tuple[int, ...]
    inner: int
    number: float | None = None

    @property
    def size(self) -> int:
        """The number of indices that the axis has."""
        return self.sizes[self.axis]

    @property
    def whole(self) -> int:
        """Distance, in elements, from one index of the enclosing axis to the next; 0 if there is no enclosing axis."""
        return min((b for b in self.by if b > self.by[self.axis]), default=0)

    def ends(self, base: Integers, sides: Sequence[tuple[int, Integers]]) -> Integers:
        """Return the index after the last index of blocks, from their first elements and the step and number of each
        axis.
        """
        own, outer = self.by[self.axis], self.whole
        last = (base % outer if outer else base) // own
        for step, count in sides:
            if step % own == 0 and (not outer or step < outer):
                last = last + step // own * (count - 1)
        return np.asarray(last + 1)

    def filled(self, whole: Array) -> Array:
        """Return a view's values, with the shorter last group filled up: by the number, or by zeros that
        nothing reads.
        """
        lacks = [(0, -n % self.inner if i == self.axis else 0) for i, n in enumerate(self.sizes)]
        return np.pad(whole.reshape(self.sizes), lacks, constant_values=whole.dtype.type(self.number or 0.0))


@dataclass(frozen=True)
class View(Tensor):
    """A view: ``sizes`` and ``by`` (strides, in elements) of its axes, and the axes that form each of `AXES`.

    ``fixed``: axes along which every program accesses one index. Axes with one index, or with stride 0, belong to none
    of them; ``described``, ``described_by``: sizes and strides in a descriptor. ``is_exchanged``: the stride along its
    rows is the smaller one. ``storage``, ``offset``: the memory that contains it, and its first element there.
    ``parts``: for a tensor to which atomic additions add, the number of parts along its first axis, which share one
    place in memory; ``sums``: the same for the tensor of the sums. ``of``: the parameter, if the view has another name.
    ``cut``: the part of a view that has only some indices of an axis. ``ragged``: the view has an axis that consists of
    groups, the last of which is shorter; its size is that of complete groups. ``spans``: the first element of each
    tensor to which addresses belong, and the element after its last one; empty for one tensor.
    """

    sizes: tuple[int, ...] = ()
    by: tuple[int, ...] = ()
    groups: tuple[Group, ...] = NO_GROUPS
    fixed: tuple[tuple[int, int], ...] = ()
    described: tuple[int, ...] = ()
    described_by: tuple[int, ...] = ()
    is_exchanged: bool = False
    storage: int = field(default=-1, compare=False)
    offset: int = field(default=0, compare=False)
    parts: int = 0
    sums: int = 0
    of: str = ""
    cut: Cut | None = None
    ragged: Ragged | None = None
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def rest(self) -> Group:
        """Axes without an assignment, outermost first."""
        known = {i for group in self.groups for i in group} | {i for i, _ in self.fixed}
        return tuple(sorted((i for i in range(len(self.sizes)) if i not in known), key=lambda i: -self.by[i]))

    def assigned(self, **groups: Group) -> View:
        """Return the view with other groups, by their names in `AXES`."""
        result = tuple(groups.get(n, known) for n, known in zip(AXES, self.groups, strict=True))
        shape = tuple(prod(self.sizes[i] for i in group) for group in result)
        strides = tuple(self.by[group[-1]] if group else 1 for group in result)
        return replace(self, groups=result, shape=shape, strides=strides)

    def index(self, group: Group, offsets: Integers) -> Integers:
        """Return the index along a group of elements by their offsets; after an axis' end, or in gaps, it continues."""
        at = self._along(offsets, min(self.by[i] for i in group)) if group else {}
        return self._joined(group, at, offsets)

    def places(self, offsets: Integers) -> tuple[Integers, ...]:
        """Return the batch, head, split, row and column of the elements at some offsets."""
        at = self._along(offsets)
        return tuple(self._joined(group, at, offsets) for group in self.groups)

    def _along(self, offsets: Integers, least: int = 1) -> dict[int, Integers]:
        """Return the index along each axis of elements by their offsets; ``least``: the least stride of these axes."""
        at, rest = dict[int, Integers](), offsets - self.shift if self.cut else offsets
        for i in sorted((i for i, by in enumerate(self.by) if by >= least), key=lambda i: -self.by[i]):
            at[i], rest = (rest, np.zeros_like(rest)) if self.by[i] == 1 else np.divmod(rest, self.by[i])
        return at

    def _joined(self, group: Group, at: Mapping[int, Integers], offsets: Integers) -> Integers:
        """Return the index along a group by those along its axes."""
        if not group:
            return np.zeros_like(offsets)
        *outer, last = group
        result, inner = at[last], self.sizes[last]
        for i in reversed(outer):  # neighbours in a group may not be neighbours in memory: pages, and rows of one page
            result, inner = result + at[i] * inner, inner * self.sizes[i]
        return result

    def has(self, offsets: Integers) -> Any:
        """Return which elements, by their offsets, have the indices that all programs access."""
        own = (self.index((axis,), offsets) == at for axis, at in self.fixed)
        return np.logical_and.reduce(
            [np.ones(offsets.shape, bool) if self.cut is None else self.cut.has(offsets), *own]
        )

    @property
    def shift(self) -> int:
        """The offset of its first element."""
        return self.cut.first * self.cut.by[self.cut.axis] if self.cut else 0

    def part(self, name: str, axis: int, first: int, count: int) -> View:
        """Return the part of the view, with no axis assigned, that has only some indices of an axis."""
        sizes = (*self.sizes[:axis], count, *self.sizes[axis + 1 :])
        return replace(self, name=name, sizes=sizes, cut=Cut(axis, first, count, self.sizes, self.by))

    @property
    def is_interleaved(self) -> bool:
        """Whether heads are interleaved within a row."""
        return self.shape[1] > 1 and self.shape[ROWS] > 1 and self.strides[1] < self.strides[ROWS]

    @property
    def is_split(self) -> bool:
        """Whether it has an axis of splits."""
        return bool(self.groups[2])

    @property
    def as_rows(self) -> View:
        """The view with its columns as rows, one element each."""
        *_, rows, columns = self.groups
        return self if rows else self.assigned(rows=columns, columns=())

    def grown(self, group: Group) -> Group | None:
        """Return a group with the enclosing axis if it is unassigned and there is no gap between them; None if there is
        none.
        """
        wanted = self.by[group[0]] * self.sizes[group[0]]
        return next(((i, *group) for i in self.rest if i not in group and self.by[i] == wanted), None)

    def joined(self, axes: Sequence[int]) -> tuple[Group, ...]:
        """Return axes, outermost first, as groups: neighbours without a gap are one group."""
        result = list[Group]()
        for i in axes:
            if result and self.by[result[-1][-1]] == self.by[i] * self.sizes[i]:
                result[-1] = (*result[-1], i)
            else:
                result.append((i,))
        return tuple(result)

    def fitted(self, accesses: Sequence[Access]) -> View | None:
        """Return the view with columns and rows as some accesses imply; None if their blocks do not fit."""
        view, steps = self._with_axes_of_one(accesses), dict[str, int]()
        for pointer, _ in sorted(accesses, key=lambda a: -len(a[0].shape)):
            blocks = [s for s, n in zip(pointer.steps, pointer.shape, strict=True) if s and n > 1]
            if len(blocks) == 2 and "rows" not in steps:
                inner, outer = sorted(blocks, reverse=self.is_exchanged)
                steps = {"columns": inner, "rows": outer}
            elif len(blocks) == 1 and blocks[0] not in steps.values():
                is_column = len(pointer.shape) == 2 and pointer.shape[1] == 1
                steps.setdefault("rows" if is_column or "columns" in steps else "columns", blocks[0])
            if set(blocks) - set(steps.values()):
                return None
        view = replace(view, groups=NO_GROUPS, fixed=()).assigned()
        for step in steps.values():
            view = view._with_step(step)
        for name, step in sorted(steps.items()):  # columns before rows
            group: Group | None = next(((i,) for i in view.rest if view.by[i] == step), None)
            while group is not None and view._is_crossed(group, step, accesses):
                if (more := view.grown(group)) is None:
                    break
                group = more
            if group is None:
                return None
            view = view.assigned(**{name: group})
        return view

    @property
    def extent(self) -> int:
        """Number of elements in memory from the first element to the last one, both included."""
        return 1 + sum((n - 1) * step for n, step in zip(self.sizes, self.by, strict=True))

    def with_one_index(self, pointer: Affine, left: Sequence[Integers]) -> Affine:
        """Return a block's pointers; along axes of which at most one index is read, they have strides that no axis has.

        The view has no axis of one index, and its stride may be that of another axis: ``x[i, j]`` with strides
        ``[1, 1]`` in a tensor of one column.
        """
        sides = list(zip(pointer.steps, pointer.shape, left, strict=True))
        wide = [step for step, n, some in sides if n > 1 and np.any(some > 1)]
        steps, outer = list(pointer.steps), self.extent
        for i, (step, n, some) in reversed(list(enumerate(sides))):
            if n > 1 and step and not np.any(some > 1) and (step not in self.by or step in wide):
                steps[i], outer = outer, 2 * outer
        return replace(pointer, steps=tuple(steps))

    def _with_axes_of_one(self, accesses: Sequence[Access]) -> View:
        """Return the view with an axis for each stride of `with_one_index`."""
        ones = {
            step
            for pointer, left in accesses
            for step, n, some in zip(pointer.steps, pointer.shape, left, strict=True)
            if n > 1 and step >= self.extent and step not in self.by and not np.any(some > 1)
        }
        more = tuple(sorted(ones, reverse=True))
        return replace(self, sizes=(*(1 for _ in more), *self.sizes), by=(*more, *self.by)) if more else self

    def _with_step(self, step: int) -> View:
        """Return the view with an axis of some stride: every n-th index of an unassigned axis."""
        inner = [i for i in self.rest if self.by[i] < step < self.by[i] * self.sizes[i] and step % self.by[i] == 0]
        if step in {self.by[i] for i in self.rest} or not inner:
            return self
        return self.halved(inner[0], step // self.by[inner[0]]) or self

    def _is_crossed(self, group: Group, step: int, accesses: Sequence[Access]) -> bool:
        """Return whether a block exceeds the end of a group of axes."""
        size = prod(self.sizes[i] for i in group)
        for pointer, left in accesses:
            for s, n, some in zip(pointer.steps, pointer.shape, left, strict=True):
                count = np.minimum(some, n)
                if s == step and n > 1 and np.any((self.index(group, pointer.base) + count > size) & (count > 0)):
                    return True
        return False

    @property
    def parameter(self) -> str:
        """The parameter of the kernel whose tensor it is, or is a part of."""
        return self.of or self.name.partition(".")[0]

    @property
    def argument(self) -> tuple[int, ...]:
        """The shape of the parameter's argument."""
        return self.described or self.sizes

    def is_apart_from(self, other: View) -> bool:
        """Return whether this view and another view of the same tensor have no element in common, because an axis
        separates them.
        """
        own, others = dict(self.fixed), dict(other.fixed)
        is_like = (self.sizes, self.by, self.cut) == (other.sizes, other.by, other.cut)
        return is_like and any(own[i] != others[i] for i in own.keys() & others.keys())

    def split(self, inner: int, role: int = ROWS, *, is_ragged: bool = False) -> View | None:
        """Return the view with its rows (or columns), one axis, as groups of ``inner``; None if they are not groups.

        The outer axis is unassigned.  ``is_ragged``: the last group is shorter.
        """
        view = self._merged(self.groups[role])
        if view is None:
            return None
        return (view.in_ragged_groups if is_ragged else view.halved)(view.groups[role][0], inner)

    def in_ragged_groups(self, axis: int, inner: int) -> View | None:
        """Return the view with an axis as groups of ``inner``, as `halved` does; the last group is shorter."""
        size = self.sizes[axis]
        if self.ragged is not None or self.cut is not None or not 1 < inner < size or size % inner == 0:
            return None
        whole = (*self.sizes[:axis], size + -size % inner, *self.sizes[axis + 1 :])
        return replace(self, sizes=whole, ragged=Ragged(axis, self.sizes, self.by, inner)).halved(axis, inner)

    def with_axes_of(self, parts: View) -> View | None:
        """Return the view with the axes that its parts in an atomic addition have, except the axis of parts.

        None if an index of another axis does not occur in the parts.
        """
        gone = 1 if parts.parts > 1 else 0
        batch, heads, splits, rows, columns = ([i - gone for i in group if i >= gone] for group in parts.groups)
        if parts.fixed or splits or prod(parts.sizes[gone:]) != prod(self.sizes):
            return None
        view = replace(self, sizes=parts.sizes[gone:], by=parts.by[gone:], groups=NO_GROUPS, fixed=())
        return view.assigned(batch=tuple(batch), heads=tuple(heads), rows=tuple(rows), columns=tuple(columns))

    def has_places_of(self, other: View) -> bool:
        """Return whether, apart from an axis of parts, each index along batch, heads, rows and columns selects the same
        elements as in another view of the same tensor.
        """
        return all(
            np.array_equal(self._offsets(own), other._offsets(its))
            for own, its in zip(self._in_four, other._in_four, strict=True)
        )

    @property
    def _in_four(self) -> tuple[Group, ...]:
        """Axes of batch and splits, of heads, of rows and of columns, but for that of parts."""
        batch, heads, splits, rows, columns = (tuple(i for i in g if i or self.parts < 2) for g in self.groups)
        return (*batch, *splits), heads, rows, columns

    def _offsets(self, group: Group) -> Integers:
        result = np.zeros(1, np.int64)
        for i in group:
            result = (result[:, None] + np.arange(self.sizes[i]) * self.by[i]).reshape(-1)
        return result

    def flat(self) -> View | None:
        """Return the view, whose axes are all unassigned, with all of them joined into one; None if there are gaps
        between them.
        """
        return self._merged(tuple(range(len(self.sizes))))

    def _merged(self, group: Group) -> View | None:
        """Return the view with neighbouring axes of a group, without a gap, as one axis; None where they are others."""
        if not group or any(b != a + 1 or self.by[a] != self.by[b] * self.sizes[b] for a, b in pairwise(group)):
            return None
        first, last = group[0], group[-1]
        gone = last - first

        def one(values: Sequence[int], merged: int) -> tuple[int, ...]:
            return (*values[:first], merged, *values[last + 1 :])

        def number(axis: int) -> int:
            return axis if axis <= first else max(first, axis - gone)

        view = replace(
            self,
            sizes=one(self.sizes, prod(self.sizes[first : last + 1])),
            by=one(self.by, self.by[last]),
            groups=tuple(tuple(dict.fromkeys(map(number, of))) for of in self.groups),
            fixed=tuple((number(i), at) for i, at in self.fixed),
        )
        return view if gone else self

    def every(self, bases: Integers, *, is_part: bool = False) -> View:
        """Return the view with its unassigned axes divided if only every n-th index of them is accessed: the index
        within a group of n is then fixed.

        ``bases``: offsets of the accessed blocks; ``is_part``: also for a single index.
        """
        for i in self.rest:
            at = np.unique(self.index((i,), bases))
            step = int(np.gcd.reduce(np.diff(at), initial=0))
            if is_part and len(at) == 1:
                return replace(self, fixed=(*self.fixed, (i, int(at[0])))).every(bases, is_part=True)
            if step > 1 and (view := self.halved(i, step)) is not None:
                view = replace(view, fixed=(*view.fixed, (i + 1, int(at[0]) % step)))
                return view.every(bases, is_part=is_part)
        return self

    def halved(self, axis: int, inner: int) -> View | None:
        """Return the view with an axis split into groups of ``inner``, whose axis follows; None where this is
        impossible.

        The outer axis is unassigned.
        """
        if not 1 <= inner < self.sizes[axis] or self.sizes[axis] % inner:
            return None

        def two(values: Sequence[int], outer: int) -> tuple[int, ...]:
            return (*values[:axis], outer, *values[axis:])

        halves = (*self.sizes[:axis], inner, *self.sizes[axis + 1 :])
        view = replace(
            self,
            sizes=two(halves, self.sizes[axis] // inner),
            by=two(self.by, self.by[axis] * inner),
            groups=tuple(tuple(i + (i >= axis) for i in of) for of in self.groups),
            fixed=tuple((i + (i >= axis), at) for i, at in self.fixed),
        )
        return view.assigned()

    def laid_out(self, values: Array) -> Array:
        """Return values in the argument's shape along the axes of the view."""
        whole = np.asarray(values)
        if whole.shape == self.described:  # the values contain repeated elements once
            whole = whole[
                tuple(
                    slice(None) if step or n == 1 else 0
                    for n, step in zip(self.described, self.described_by, strict=True)
                )
            ]
        whole = self.cut.of(whole) if self.cut else whole
        return (self.ragged.filled(whole) if self.ragged else whole).reshape(self.sizes)

    def drawn(self, values: Array, head: tuple[int, int]) -> Array:
        """Return drawn values of a (batch, head), (rows, columns); rows at one place in memory are equal."""
        if self.ragged is None or self.ragged.number is None:
            return values
        return np.where(self.exists[head], values, values.dtype.type(self.ragged.number))

    def of_no_element(self, head: tuple[int, int]) -> Array | None:
        """Return which places of a (batch, head), as (rows, columns), belong to no element of the argument; None if
        there are no such places.
        """
        return None

    @property
    def exists(self) -> Array:
        """Which elements the argument has, (batch * splits, heads, rows, columns): all but those of a ragged axis."""
        if self.ragged is None:
            return self.by_heads(np.ones(self.sizes, bool))
        whole = self.ragged._replace(number=None).filled(np.ones(self.ragged.sizes, bool))
        return self.by_heads(whole.reshape(self.sizes))

    def array(self, values: Array) -> Array:
        """Return the values of the view as (batch * splits, heads, rows, columns), from values in its shape."""
        return self.by_heads(self.laid_out(values))

    def by_heads(self, whole: Array) -> Array:
        """Return values along the axes of the view as (batch * splits, heads, rows, columns)."""
        at = dict(self.fixed)
        whole = whole[tuple(at.get(i, slice(None)) for i in range(len(self.sizes)))]
        kept = [i for i in range(len(self.sizes)) if i not in at]
        batch, heads, splits, rows, columns = self.groups
        order = [kept.index(i) for i in (*batch, *splits, *heads, *rows, *columns)]
        b, h, s, r, c = self.shape
        return whole.transpose(order).reshape(b * s, h, r, c)

    def ways(self) -> Iterator[View]:
        """Yield the view with its rows unchanged, then joined with more and more of the axes around them."""
        view: View | None = self
        while view is not None:
            yield view
            group = view.groups[ROWS] or view.groups[-1]
            more = view.grown(group) if group else None
            view = None if more is None else view.assigned(**{"rows" if view.groups[ROWS] else "columns": more})


@dataclass(frozen=True)
class GatheredView(View):
    """Rows of a view that are accessed by a table, as the outermost axis of a separate view.

    ``source``: the view; ``along``: the axes of the source that the table indexes; ``listed``: for each row here, the
    offset of its first element in the source; -1 for an entry without such an element, which is loaded as the number
    ``hidden``. ``run``: for a list of single elements, the average number of entries that follow one another in memory;
    0 for other lists.
    """

    source: View | None = None
    along: Group = ()
    listed: tuple[int, ...] = ()
    hidden: float | None = None
    run: int = 0

    @cached_property
    def _entries(self) -> Integers:
        return np.array(self.listed, np.int64)

    @cached_property
    def _in_order(self) -> tuple[Integers, Integers]:
        """The different entries in ascending order, and the first place of each in the list."""
        return np.unique(self._entries, return_index=True)

    @property
    def by_row(self) -> int:
        """Distance from one row to the next in the offsets here; no row is longer than this."""
        assert self.source is not None
        return self.source.extent

    @property
    def argument(self) -> tuple[int, ...]:
        """The shape of the argument that the parameter has."""
        assert self.source is not None
        return self.source.argument

    def in_ragged_groups(self, axis: int, inner: int) -> View | None:
        """Return nothing, because a list of rows has only complete groups."""
        return None

    def laid_out(self, values: Array) -> Array:
        """Return values in the argument's shape with the rows in the table's order."""
        assert self.source is not None
        whole, rows = self.source.laid_out(values), np.maximum(self._entries, 0)
        rest = [i for i in range(whole.ndim) if i not in self.along]
        at = tuple(self.source.index((i,), rows) for i in self.along)
        listed = whole.transpose((*self.along, *rest))[at] if at else np.broadcast_to(whole, (len(rows), *whole.shape))
        result = listed.reshape(self.sizes)
        return result if self.hidden is None else np.where(self.leads_nowhere(), result.dtype.type(self.hidden), result)

    def is_like(self, other: GatheredView) -> bool:
        """Return whether another view has the same elements."""
        return (self.listed, self.along, self.hidden) == (other.listed, other.along, other.hidden)

    def leads_nowhere(self) -> Array:
        """Return which elements belong to entries that select no row."""
        is_none = self._entries < 0
        return np.repeat(is_none, prod(self.sizes) // len(is_none)).reshape(self.sizes)

    def piece(self, rows: int, cols: int) -> int:
        """Return how many elements of a part of a matrix follow one another in memory."""
        return min(self.run, rows * cols) if self.run else super().piece(rows, cols)

    def of_no_element(self, head: tuple[int, int]) -> Array | None:
        """Return which places of a (batch, head), as (rows, columns), belong to no row of the list; None if there are
        no such places.
        """
        nowhere = self.leads_nowhere()
        return self.by_heads(nowhere)[head] if nowhere.any() else None

    def drawn(self, values: Array, head: tuple[int, int]) -> Array:
        """Return drawn values of a (batch, head), (rows, columns); rows at one place in memory are equal."""
        for role, axis in ((ROWS, 0), (COLUMNS, 1)):
            if self.groups[role] == (0,) and values.shape[axis] == len(self.listed):
                _, first, of = np.unique(self._entries, return_index=True, return_inverse=True)
                values = np.take(values, first[of], axis)
        if prod(self.sizes) == len(self.listed) and len(self.sizes) > 1:  # each lane is an entry
            at = self.by_heads(self._entries.reshape(self.sizes))[head]
            _, first, of = np.unique(at, return_index=True, return_inverse=True)
            values = values.reshape(-1)[first[of.reshape(-1)]].reshape(values.shape)
        if self.hidden is not None:
            return np.where(self.by_heads(self.leads_nowhere())[head], values.dtype.type(self.hidden), values)
        return values

    def offsets(self, own: Integers) -> Integers:
        """Return the offsets in the argument of elements by their offsets here, -1 for elements that the list does not
        have.
        """
        row, rest = own // self.by_row, own % self.by_row
        known = self._entries
        row = np.where((row >= 0) & (row < len(known)), row, -1)
        first = np.where(row < 0, -1, known[row])
        return np.where(first < 0, -1, first + rest)

    def own(self, offsets: Integers) -> Integers:
        """Return the offsets in this view of elements of the argument; -1 for elements that the view does not have."""
        assert self.source is not None
        row, rest = np.zeros_like(offsets), np.zeros_like(offsets)
        for i in range(len(self.source.by)):
            part = self.source.index((i,), offsets) * self.source.by[i]
            row, rest = (row + part, rest) if i in self.along else (row, rest + part)
        known, first = self._in_order
        at = np.minimum(np.searchsorted(known, row), len(known) - 1)
        return np.where((known[at] == row) & (offsets >= 0), first[at] * self.by_row + rest, -1)


def run_of(listed: Integers) -> int:
    """Return the average number of elements of a list that follow one another in memory."""
    seen = listed[listed >= 0]
    return max(1, round(seen.size / (1 + int(np.sum(np.diff(seen) != 1))))) if seen.size else 1


def gathered(name: str, source: View, along: Group, listed: tuple[int, ...]) -> GatheredView:
    """Return the view of rows of another one by a table."""
    inner = [i for i in range(len(source.sizes)) if i not in along]
    ones = (1,) * len(AXES)
    view = GatheredView(name, ones, source.fmt, ones, source=source, along=along, listed=listed, of=source.of)
    sizes, by = tuple(source.sizes[i] for i in inner), tuple(source.by[i] for i in inner)
    return replace(view, sizes=(len(listed), *sizes), by=(view.by_row, *by))


@dataclass(frozen=True)
class MaskView(View):
    """A tensor of integers as a mask, or as numbers: ``holds`` for each element, in the order of memory."""

    holds: Booleans | Integers | None = field(default=None, compare=False, repr=False)

    def array(self, values: Array | None = None) -> Array:
        """Return the mask, or numbers, as (batch * splits, heads, rows, columns)."""
        sizes, by = (self.ragged.sizes, self.ragged.by) if self.ragged else (self.sizes, self.by)
        places = np.zeros((1,) * len(sizes), np.int64)
        for i, (n, step) in enumerate(zip(sizes, by, strict=True)):
            places = places + (np.arange(n) * step).reshape(n, *(1 for _ in sizes[i + 1 :]))
        assert self.holds is not None
        return super().array(self.holds[places].astype(get_format(self.fmt).dtype))


@dataclass(frozen=True)
class IntegerTensor(Tensor):
    """A tensor of integers with known values: ``data`` in the order of memory, from its first element on.

    ``sizes``, ``by``, ``storage``, ``offset``, ``spans``: as in `View`.
    """

    data: Any = field(default=None, compare=False, repr=False)
    sizes: tuple[int, ...] = ()
    by: tuple[int, ...] = ()
    storage: int = field(default=-1, compare=False)
    offset: int = field(default=0, compare=False)
    spans: tuple[tuple[int, int], ...] = ()


def tensor_of(name: str, x: Argument, *, is_exact: bool) -> Tensor:
    """Return a tensor of a recorded call; ``is_exact``: floats are float64.

    Raises `SpecError` for an unknown format, a negative stride, or elements that overlap.
    """
    ones = (1,) * len(AXES)
    if min(x.strides, default=0) < 0:
        raise SpecError(f"{name}: strides {list(x.strides)}; strides must be 0 or more")
    axes = [(n, s) for n, s in zip(x.shape, x.strides, strict=True) if n != 1 and s]
    if not all(n for n, _ in axes):
        axes = []  # a tensor without elements has no axis
    inner = sorted(((s, n) for n, s in axes), reverse=True)
    if not x.is_integer and any(s <= (m - 1) * t for (s, _), (t, m) in pairwise(inner)):
        raise SpecError(f"{name}: a view of {list(x.shape)} with strides {list(x.strides)}, whose elements overlap")
    sizes, by = tuple(n for n, _ in axes), tuple(s for _, s in axes)
    memory = x.storage, x.offset
    if x.is_integer:
        data = None if x.data is None else x.elements().astype(np.int64)
        whole = IntegerTensor(name, ones, x.fmt, data=data, sizes=sizes, by=by, storage=memory[0], offset=memory[1])
        return replace(whole, spans=x.spans)
    fmt = "float64" if is_exact else get_format(x.fmt).name
    view = View(name, ones, fmt, ones, sizes=sizes, by=by, described=x.shape, described_by=x.strides)
    return replace(view, storage=memory[0], offset=memory[1], spans=x.spans)
