"""Axes of recorded views, derived from the launch: heads, batch and splits, by their index in each program.

The axes of the result are read in several ways; the axes of every other view must follow from the result's in all
programs, so that a wrong reading is refused and not computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim.errors import ProgramError
from npusim.kernels.triton.values import COLUMNS, ROWS, SPLIT, Integers

if TYPE_CHECKING:
    from npusim.kernels.triton.tensor_axes import Group, View
    from npusim.kernels.triton.ttir_text import Line


#: The reading of views in which no axis along which a loop moves consists of pages of rows (`matched`).
NO_PAGES = 4


class UnplacedError(ProgramError):
    """Raised if the axes of a tensor, ``of``, do not follow from the place to which a program stores."""

    def __init__(self, message: str, of: str) -> None:
        super().__init__(message)
        self.of = of


class TensorUse(NamedTuple):
    """One access of a view: the first elements of its blocks, the places where these are read, and the kernel's line.

    ``is_of_rows``, ``is_of_columns``: whether the rows, or columns, of its blocks are those of the result.
    ``is_turned``: whether the rows of its blocks are the columns of the result.  ``sizes``: the sizes of its blocks.
    """

    base: Integers
    is_read: Any
    is_walked: bool
    is_of_rows: bool
    is_of_columns: bool
    is_turned: bool
    line: Line
    sizes: tuple[int, ...]


class Result(NamedTuple):
    """The place to which each program stores: the view, and the first index along each of its axes."""

    view: View
    batch: Integers
    head: Integers
    split: Integers
    row: Integers
    column: Integers
    is_row: bool  #: whether a program's blocks are one row, which has no axis


def readings(
    view: View, bases: Integers, *, is_row: bool, is_part: bool, rows: int, columns: int, is_ragged: bool = False
) -> Iterator[View]:
    """Yield the view of the result with all of its axes assigned, one assignment after another.

    ``bases``: the places to which programs store; ``rows``, ``columns``: the largest numbers that one program stores;
    ``is_part``: other stores write to other parts of the same tensor; ``is_ragged``: an axis may consist of groups, the
    last of which is shorter.
    """
    view = view if is_row or view.groups[ROWS] else view.as_rows
    # A row may continue along all axes around it, like flat indices of tensors with other axes.
    wholes = [view, *[*view.ways()][1:][-1:]] if is_row else [*view.ways(), view.split(rows)]
    ragged = (view.split(rows, is_ragged=True), view.split(columns, COLUMNS, is_ragged=True)) if is_ragged else ()
    every = (*wholes, view.split(columns, COLUMNS), *ragged)
    for one in [v.every(bases, is_part=is_part) for v in every if v is not None]:
        moved = tuple(i for i in one.rest if np.any(np.diff(one.index((i,), bases), axis=1)))
        rest = tuple(i for i in one.rest if i not in moved)
        groups = [*one.joined(rest)[-1:], *((i,) for i in rest[::-1]), ()]
        for group in dict.fromkeys(groups) if is_row else (one.groups[ROWS],):
            yield from _with_outer_axes(one.assigned(rows=group), moved)


def _with_outer_axes(view: View, moved: Group) -> Iterator[View]:
    """Yield a view with its further axes as batch, heads and splits; a loop advances along ``moved``: splits."""
    rest = tuple(i for i in view.rest if i not in moved)
    if view.parts > 1:  # parts of an atomic addition are splits
        split = view.assigned(splits=(0,))
        others = tuple(k for k in rest if k)
        yield from (split.assigned(batch=a, heads=b) for a, b in _in_two(split, others) if 0 in rest)
        return
    if moved:
        yield from (view.assigned(splits=moved, batch=a, heads=b) for a, b in _in_two(view, rest))
        return
    yield from (view.assigned(batch=a, heads=b) for a, b in _in_two(view, rest))
    for i in rest[::-1] if len(rest) > 1 else ():
        split = view.assigned(splits=(i,))
        yield from (split.assigned(batch=a, heads=b) for a, b in _in_two(split, tuple(k for k in rest if k != i)))


def _in_two(view: View, axes: Group) -> list[tuple[Group, Group]]:
    """Return axes as batch and heads, the likeliest first."""
    whole, joined = [(axes[:-1], axes[-1:])], view.joined(axes)
    if len(axes) > 2:  # neither group consists of one axis
        whole = [(joined[0], joined[1])] if len(joined) == 2 else []
        whole += [(axes[:i], axes[i:]) for i in range(len(axes) - 1, 0, -1)]
    if len(axes) == 2:
        whole += [((), axes), (axes[-1:], axes[:-1])]
    return whole


def matched(
    of: str,
    view: View,
    uses: Sequence[TensorUse],
    result: Result,
    *,
    is_part: bool,
    freedom: int,
    is_ragged: bool = False,
) -> View:
    """Return a view with the axes that follow from those of the result; raise `ProgramError` if none follow.

    ``is_part``: the kernel also accesses other parts of the tensor.  ``freedom`` states the allowed readings.  1: axes
    that do not follow are splits, and each program has its own place along them; 2: in addition, axes of blocks may be
    groups of these; 3: or groups of the indices that a program visits in its loop; 4: as 1, but no axis along which a
    loop moves consists of pages of rows.
    """
    first: ProgramError | None = None
    groups = _in_groups(view, uses, result, is_ragged=is_ragged)
    is_grouped = freedom == 2 or (freedom != 3 and is_part)
    by_loops = _by_loops(view, uses, is_ragged=is_ragged) if freedom == 3 else ()
    for one in chain(groups, view.ways()) if is_grouped else chain(by_loops, view.ways(), groups):
        try:
            return _followed(of, one, uses, result, is_strict=not freedom, has_pages=freedom < NO_PAGES)
        except ProgramError as error:
            first = first or error
    assert first is not None
    raise first


def _in_groups(view: View, uses: Sequence[TensorUse], result: Result, *, is_ragged: bool) -> Iterator[View]:
    """Yield a view with an axis in groups of the sizes of the result, of blocks, or of what a loop goes through."""
    *outer, rows, columns = result.view.shape
    inner = [(rows, ROWS), (columns, COLUMNS), *zip(uses[0].sizes, (ROWS, COLUMNS), strict=True)]

    def whole() -> Iterator[View | None]:
        yield from (view.split(*each) for each in dict.fromkeys(inner))
        for i in view.rest:
            times = [
                u.is_read.shape[1] for u in uses if u.is_walked and np.any(np.diff(view.index((i,), u.base), axis=1))
            ]
            yield from (view.halved(i, n) for n in dict.fromkeys((*times, rows, *outer)))

    def shorter() -> Iterator[View | None]:
        if is_ragged:
            yield from (view.split(n, role, is_ragged=True) for n, role in dict.fromkeys(inner))
            yield from (view.in_ragged_groups(i, n) for i in view.rest for n in dict.fromkeys((rows, columns)))

    ways = (shorter, whole) if result.view.ragged else (whole, shorter)  # as the result's are
    return (x for way in ways for x in way() if x is not None)


def _by_loops(view: View, uses: Sequence[TensorUse], *, is_ragged: bool) -> Iterator[View]:
    """Yield a view whose rows, or columns, are groups; the size of a group is the number that a program visits in its
    loop.
    """
    for u in uses:
        for role, size in zip((ROWS, COLUMNS), u.sizes, strict=True) if u.is_walked else ():
            at = view.index(view.groups[role], u.base)
            first = np.where(u.is_read, at, np.iinfo(np.int64).max).min(1)
            count = np.where(u.is_read, at + size, 0).max(1) - first
            most = int(count[u.is_read.any(1)].max(initial=0))
            result = view.split(most, role) or (view.split(most, role, is_ragged=True) if is_ragged else None)
            if result is not None:
                yield result


def _followed(
    of: str, view: View, uses: Sequence[TensorUse], result: Result, *, is_strict: bool, has_pages: bool
) -> View:
    def follows(group: Group, wanted: Integers) -> bool:
        return not any(np.any((view.index(group, u.base) != wanted) & u.is_read) for u in uses)

    batches, heads, splits, rows, _ = result.view.shape
    read = np.concatenate([np.broadcast_to(u.base, u.is_read.shape)[u.is_read] for u in uses])
    view = view.every(read) if len(read) else view
    for group in dict.fromkeys([*view.joined(view.rest), *((i,) for i in view.rest)]):
        size, taken = prod(view.sizes[i] for i in group), view.groups
        is_vector = not taken[ROWS] and (result.is_row or not taken[COLUMNS])
        if not set(group) <= set(view.rest):
            continue
        if not taken[0] and size == batches and follows(group, result.batch):
            view = view.assigned(batch=group)
        elif not taken[SPLIT] and size == splits and follows(group, result.split):
            view = view.assigned(splits=group)
        elif not taken[1] and heads % size == 0 and follows(group, result.head // (heads // size)):
            view = view.assigned(heads=group)
        elif is_vector and size == rows and follows(group, result.row):
            view = view.assigned(rows=group)
    view = _walked(view, uses, result, has_pages=has_pages)
    for u in uses:
        if u.is_of_rows and np.any((view.index(view.groups[ROWS], u.base) != result.row) & u.is_read):
            raise UnplacedError(f"{u.line}: {of}: the program loads rows other than those that it stores", of)
        columns = view.groups[COLUMNS if u.is_of_columns else ROWS]
        if (u.is_of_columns or u.is_turned) and np.any((view.index(columns, u.base) != result.column) & u.is_read):
            raise UnplacedError(f"{u.line}: {of}: the program loads columns other than those that it stores", of)
    return _with_fixed(of, view, uses, is_strict=is_strict)


def _walked(view: View, uses: Sequence[TensorUse], result: Result, *, has_pages: bool) -> View:
    """Return a view with axes along which its blocks move in the loop: splits, or pages of rows."""
    for i in view.rest if all(u.is_walked for u in uses) else ():
        indices = [np.where(u.is_read, view.index((i,), u.base), -1) for u in uses]
        if any(np.any(np.where(x < 0, x.max(1, keepdims=True), x) != x.max(1, keepdims=True)) for x in indices):
            own = view.groups[ROWS]
            is_page = has_pages and own and not result.is_row and not any(u.is_of_rows for u in uses)
            view = view.assigned(rows=(i, *own)) if is_page else view.assigned(splits=(i,))
    return view


def _with_fixed(of: str, view: View, uses: Sequence[TensorUse], *, is_strict: bool) -> View:
    """Return a view whose other axes have one index in all programs, or are places along splits."""
    fixed, places = list(view.fixed), list[int]()
    for i in view.rest:
        bases = [np.broadcast_to(u.base, u.is_read.shape)[u.is_read] for u in uses]
        firsts = {int(n) for base in bases for n in np.unique(view.index((i,), base))}
        if outside := sorted(n for n in firsts if not 0 <= n < view.sizes[i]):
            axis = f"index {outside[0]} of the axis that has size {view.sizes[i]} and stride {view.by[i]}"
            why = f"{of}: a program accesses {axis}, and no mask prevents it"
            raise ProgramError(f"{uses[0].line}: {why}")
        if len(firsts) > 1 and is_strict:
            axis = f"the index of the axis that has size {view.sizes[i]} and stride {view.by[i]}"
            why = f"{of}: {axis} does not depend on the place that a program stores to"
            why += "; its index is not a batch, head, row or tile of the result"
            raise UnplacedError(f"{uses[0].line}: {why}", of)
        if len(firsts) > 1:
            places.append(i)
        else:
            fixed.append((i, firsts.pop() if firsts else 0))
    view = replace(view, fixed=tuple(fixed))
    return view.assigned(splits=(*places, *view.groups[SPLIT])) if places else view
