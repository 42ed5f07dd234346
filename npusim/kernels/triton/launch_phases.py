"""From the reading of a kernel to a phase: its kernel of tiles, blocks of the grid, tensors and masks."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import chain, combinations, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim.config.seen import KeyFunction, KeyRanges, Seen
from npusim.errors import ProgramError
from npusim.formats import get_format
from npusim.kernels.attention.call_blocks import MASKED
from npusim.kernels.attention.tiling_mask import MaskKind, mask_of
from npusim.kernels.form import language
from npusim.kernels.form.lowering import Kernel
from npusim.kernels.form.phase import Phase, Stacked, TileLoop, TileRun, tensor_of
from npusim.kernels.form.work_table import Visits, WorkTable, alike
from npusim.kernels.triton.factors_before_loop import Prelude, phase_before, prelude_of
from npusim.kernels.triton.kernel_draft import (
    AXES_IN_TEXT,
    LANGUAGE,
    NUMBERS,
    KnownBlock,
    Load,
    Stored,
    UnlikeProgramsError,
    Walk,
)
from npusim.kernels.triton.launch_axes import NO_PAGES, Result, TensorUse, UnplacedError, matched, readings
from npusim.kernels.triton.masks import Rule, mask_of_plain
from npusim.kernels.triton.results_apart import STORES
from npusim.kernels.triton.tensor_axes import GatheredView, MaskView, Ragged, View
from npusim.kernels.triton.ttir_text import every_of, makers, refusing
from npusim.kernels.triton.values import (
    COLUMNS,
    MOST_ELEMENTS,
    RELATIONS,
    ROWS,
    SPLIT,
    Affine,
    Booleans,
    Elements,
    Integers,
    Number,
    Tensor,
)
from npusim.kernels.triton.zero_rows import ZeroRows
from npusim.program.ir.tile import GlobalTensor, Role
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.config.problem import AnyProblem, Problem
    from npusim.kernels.triton.reader import Reader
    from npusim.kernels.triton.ttir_text import Function, Line, Op

#: Words for a place along each axis of a tensor, for messages.
SIDES = ("batch", "head", "split", "row", "column")
#: The freest reading of views (`npusim.kernels.triton.launch_axes.matched`).
MOST_FREEDOM = NO_PAGES


class Written(NamedTuple):
    """A kernel of tiles as text: axes of its operands, and, for each of its lines, the line of the user's kernel.

    ``keeps_factors``: as in `Kernel`.
    """

    name: str
    file: str
    source: str
    axes: tuple[tuple[str, str], ...]
    lines: tuple[int, ...]
    results: str
    keeps_factors: bool = False


@lru_cache(maxsize=256)
def kernel_of(written: Written) -> Kernel:
    """Return the kernel of a text; its faults are reported at the lines of the user's kernel."""
    tree = ast.parse(written.source)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr | ast.arg):
            node.lineno = node.end_lineno = written.lines[min(node.lineno, len(written.lines)) - 1]
    names: dict[str, Any] = {**NUMBERS, **{n: getattr(language, n) for n in LANGUAGE}}
    # a kernel may have the name of a word of the language
    name = f"{written.name}_" if written.name in names else written.name
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            node.name = name
    exec(compile(tree, written.file, "exec"), names)
    axes, keeps = dict(written.axes), written.keeps_factors
    return Kernel(names[name], written.results, axes, keeps_factors=keeps, computes_factors=True)


def is_part(reader: Reader, view: View) -> bool:
    """Return whether a kernel accesses a view's tensor elsewhere too, as another part."""
    accessed = {x.pointer.of for x in (*reader.loads.values(), *reader.stored)}
    views = [x for n, x in reader.arguments.items() if n in accessed and isinstance(x, View)]
    return sum((x.parameter, x.of) == (view.parameter, view.of) for x in views) > 1


def placed(reader: Reader, *, like: View | None = None) -> LaunchGrid:
    """Return the blocks of a launch; the readings of a recorded result's axes are tried until all views agree.

    ``like``: the parts whose sum is the result; the result has their batch, heads and rows.  Raises `ProgramError` with
    the message of the first reading if none fits.
    """
    stored = reader.stored[0]
    view = reader.arguments[stored.pointer.of]
    if not isinstance(view, View):
        return LaunchGrid(reader)
    most, faults = [int(n.max()) for n in stored.left], list[ProgramError]()
    rows, columns = (0, 0, *most)[-2:]
    how: Any = {"is_row": reader.is_of_one_row, "is_part": is_part(reader, view), "rows": rows, "columns": columns}
    how |= {"is_ragged": bool(reader.choices.way("ragged"))}
    given = list(readings(view, stored.pointer.base, **how)) if like is None else [view.with_axes_of(like)]
    ways = [x for x in given if x is not None]
    if not ways:
        raise ProgramError(f"{stored.line}: {stored.pointer.of} cannot have the axes of its parts")
    for freedom, result in product(range(MOST_FREEDOM + 1), ways):
        try:
            return LaunchGrid(reader, result, freedom=freedom)
        except ProgramError as error:
            faults.append(error)
    if unlike := [x for x in faults if isinstance(x, UnlikeProgramsError)]:
        raise unlike[0]
    if (hidden := _hidden(reader)) is not None:
        raise UnlikeProgramsError(str(faults[0]), reader.ids[hidden])
    if len(ways) == 1:
        raise faults[0]
    why = f"{faults[0]} (npusim also tried {len(ways) - 1} other assignments of the axes of {stored.pointer.of})"
    raise UnplacedError(why, faults[0].of) if isinstance(faults[0], UnplacedError) else ProgramError(why)


def _hidden(reader: Reader) -> Booleans | None:
    """Return the programs for which a mask hides a complete load that other programs read; None if there are none."""
    for x in reader.loads.values():
        none = np.logical_or.reduce(np.broadcast_arrays(np.zeros((1, 1), bool), *(left <= 0 for left in x.left)))
        if not x.is_walked and none.shape[1] == 1 and np.any(none) and not np.all(none):
            return np.asarray(none[:, 0])
    return None


class LaunchGrid:
    """The blocks of a launch, derived from the reads and writes of its programs."""

    #: If one kernel is read as one for each result, the share of its code that computes this one's result.
    code_share = 1.0

    def __init__(self, reader: Reader, result: View | None = None, *, freedom: int = 0) -> None:
        """``freedom``: as in `npusim.kernels.triton.launch_axes.matched`; 0: everything follows from the place to which
        a program stores.
        """
        self.freedom = freedom
        #: If one kernel is read as several, the number of this one among them: 2 or more for all except the first,
        #: whose tensors have the plain names.
        self.number = 0
        #: The kernel, with its arguments and grid, whose results in float64 these are; None: the launch's.
        self.known: tuple[Function, dict[str, Any], tuple[int, ...]] | None = None
        self.reader, self.stored, ids = reader, reader.stored[0], reader.ids
        #: Recorded views with all of their axes; the result's view is given.
        self._views: dict[str, View] = {} if result is None else {self.stored.pointer.of: result}
        #: The programs that store anything; other programs do not determine axes of tensors.
        self.stores = _stores(reader)
        self.is_visited = _visited(reader, self.stores)
        self.is_summed = any(w.is_sum for w in reader.walks)
        self.is_row = reader.is_of_one_row
        self.out = self._tensor(self.stored.pointer.of)
        places = self.out.places(
            np.broadcast_to(self.stored.pointer.base, (len(ids), self.stored.pointer.base.shape[1]))
        )
        #: The place to which each program stores; for a row that is stored tile by tile, the place at which the row
        #: begins.
        self.batch, self.head, self.split, self.row, self.col = (x[:, :1] for x in places)
        self.names = self._names()
        self.sizes, self.shared, self.constant = dict[str, int](), set[str](), set[str]()
        #: The start and the size of each program's part of an axis other than the stored rows and columns.
        self.parts: dict[str, tuple[Integers, Integers]] = {}
        #: Places of loads along separate splits, in each program, and the number of tiles after which they advance by
        #: one; 0: they do not advance.
        self.stacks: dict[str, tuple[Integers, int]] = {}
        self.walk: tuple[Integers, Integers] | None = None
        self.walked, self.is_partial = "key", False
        (_, height, rows), (_, width, cols) = self._sides(self.stored.pointer, self.stored.value.axes, self.stored.left)
        #: The splits to which each program stores, iteration by iteration; a single one if its loop stores no tile.
        self.splits = self.split
        self.is_stacked = self.stored.is_walked and self._along(self.stored) == SPLIT
        if self.is_stacked:
            self.splits, rows, cols = self._stacked(places, rows, cols)
        elif self.stored.is_walked:
            rows, cols = self._walked_sides(rows, cols)
            self.col = _least(places[-1], self.is_visited)  # also if tiles are visited from the last to the first
        for each in reader.stored:
            self._check_stored(each)
        self.rows, self.cols = (
            np.broadcast_to(np.minimum(n, whole - at), (len(ids), 1))
            for n, whole, at in zip((rows, cols), self.out.shape[ROWS:], (self.row, self.col), strict=True)
        )
        self.is_cut = bool(np.any(self.col) or np.any(self.cols < self.out.shape[COLUMNS]))
        self.sizes["row"] = min(height, self.out.shape[ROWS])
        self.sizes["value"] = min(width, self.out.shape[COLUMNS])
        for load in reader.loads.values():
            with refusing(load.line, load.of):
                self._place(load)
        if self.stored.is_walked:
            self._place(self.stored)
        self._check_walk()
        for other in reader.stored[1:]:
            self._check_second(other)
        self._check_added_rows()
        self._check_parts()
        self._check_bounds()

    def _check_walk(self) -> None:
        """Raise `ProgramError` for tiles of a loop that are added up element by element, or for a sum over a part."""
        self.sizes = {self.names[axis]: size for axis, size in self._axes_of_masks()} | self.sizes
        if self.walk and not self.stored.is_walked and self.walked in self.called(self.stored.value.axes).split():
            why = (
                "a result is the sum of the loop's tiles, element by element, which is not supported; sum each "
                "tile over its columns, or multiply it"
            )
            raise self._fault(self.stored.line, why)
        is_idle = ~self.is_visited.any(1) & ((self.rows > 0) & (self.cols > 0))[:, 0]
        if self.walk and not self.is_summed and np.any(is_idle):
            first = self.reader.program(int(np.argmax(is_idle)))
            why = f"{self.stored.line}: the loop has no iteration in {first}; return early from such a program"
            raise UnlikeProgramsError(why, self.reader.ids[is_idle])
        once = self.reader.walks and self.reader.walks[0].most_once and self.reader.walks[0].loads
        if once and self.walked not in self.sizes and not self.is_stacked:
            why = "a loop of one iteration does not show along which axis its loads move, which is not supported here"
            raise self._fault(self.stored.line, why)
        if self.walk and self.is_summed:
            if self.walked not in self.sizes:
                why = "a sum of products along iterations that no factor has an axis for is not supported"
                raise self._fault(self.stored.line, why)
            visited = np.where(self.is_visited, self.walk[1], 0).sum(1)
            first = np.where(self.is_visited, self.walk[0], 0).min(1)
            if np.any(((visited != self.sizes[self.walked]) | (first != 0)) & self.stores[:, 0]):
                raise self._fault(
                    self.stored.line, f"a program adds up {int(visited.min())} of {self.sizes[self.walked]}"
                )

    def _walked_sides(self, rows: Integers, cols: Integers) -> tuple[Integers, Integers]:
        """Return the rows and columns of all tiles together that a loop stores next to one another."""
        rows = np.broadcast_to(rows, self.is_visited.shape)
        if np.any((rows != rows[:, :1]) & self.is_visited):
            why = "a loop stores tiles with more rows in some iterations than in others"
            raise self._fault(self.stored.line, f"{self.stored.pointer.of}: {why}")
        return rows[:, :1], np.where(self.is_visited, cols, 0).sum(1, keepdims=True)

    def _stacked(
        self, places: Sequence[Integers], rows: Integers, cols: Integers
    ) -> tuple[Integers, Integers, Integers]:
        """Return the splits of a loop that stores its tiles one split after another, and rows and columns of a tile."""
        shape = self.is_visited.shape
        batch, head, splits, *corner = (np.broadcast_to(x, shape) for x in places)
        sizes = [np.broadcast_to(n, shape) for n in (rows, cols)]
        for x in (batch, head, *corner, *sizes):
            if np.any((x != x[:, :1]) & self.is_visited) or np.any(self.stores[:, 0] > self.is_visited[:, 0]):
                why = "a loop must store tiles of one size, one split after another"
                raise self._fault(self.stored.line, f"{self.stored.pointer.of}: {why}")
        return np.where(self.is_visited, splits, -1), sizes[0][:, :1], sizes[1][:, :1]

    def _tensor(self, of: str) -> Tensor:
        """Return an argument; if its only axis is that of the rows, this axis is the rows of the argument."""
        tensor: Tensor = self._placed(of)
        vectors = [x.axes for x in self.reader.loads.values() if x.of == of]
        vectors += [x.value.axes for x in self.reader.stored if x.pointer.of == of]
        return tensor.as_rows if vectors and len(vectors[0]) < 2 and self._is_of_rows(vectors[0]) else tensor

    def _placed(self, of: str) -> Tensor:
        """Return an argument, a recorded view with all of its axes."""
        tensor: Tensor = self.reader.arguments[of]
        if not isinstance(tensor, View):
            return tensor
        if of not in self._views:
            result, uses = self._views[self.stored.pointer.of], list[TensorUse]()
            for x in (*self.reader.loads.values(), *self.reader.stored):
                if x.pointer.of == of:
                    is_read = np.logical_and.reduce(
                        np.broadcast_arrays(np.ones((1, 1), bool), *(n > 0 for n in x.left))
                    )
                    is_read = is_read & self.is_visited if x.is_walked else is_read[:, :1] & self.stores
                    base = x.pointer.base if x.is_walked else x.pointer.base[:, :1]
                    is_read = np.broadcast_to(is_read, (len(self.reader.ids), is_read.shape[1]))
                    base = np.broadcast_to(base, (len(self.reader.ids), base.shape[1]))
                    sides = [size for _, size, _ in self._sides(x.pointer, x.axes, x.left, x.dims)]
                    own = self._has_rows(x), self._has_columns(x), self._has_columns(x, ROWS)
                    uses.append(TensorUse(base, is_read, x.is_walked, *own, x.line, tuple(sides)))
            is_vector = not tensor.groups[ROWS] and all(u.is_of_rows for u in uses)
            where = Result(result, self.batch, self.head, self.split, self.row, self.col, self.is_row)
            tensor = tensor.as_rows if is_vector else tensor
            known = is_part(self.reader, tensor)
            ragged = bool(self.reader.choices.way("ragged"))
            self._views[of] = matched(of, tensor, uses, where, is_part=known, freedom=self.freedom, is_ragged=ragged)
        return self._views[of]

    def _has_rows(self, x: Load) -> bool:
        """Return whether the rows of a load's blocks are those of the result."""
        root, dims = self.reader.root, x.dims[-len(x.axes) :] if x.axes else ()
        if self.is_row or not any(x.axes):
            return False
        if len(x.axes) == 1:
            return self._is_of_rows(x.axes)
        return ROWS in dims and root(x.axes[dims.index(ROWS)]) == root(self.stored.value.axes[0])

    def _has_columns(self, x: Load, along: int = COLUMNS) -> bool:
        """Return whether the columns of a load's blocks (or ``along`` rows: the rows) are those of the result, without
        a loop along them.
        """
        stored, root = self.stored, self.reader.root
        if (
            stored.is_walked
            or not stored.value.axes
            or not any(x.axes)
            or (len(stored.value.axes) < 2 and not self.is_row)
        ):
            return False
        dims = x.dims[-len(x.axes) :]
        if along == ROWS and len(dims) == 1:
            return False  # a vector of columns, each of which is a row
        return along in dims and root(x.axes[dims.index(along)]) == root(stored.value.axes[-1]) is not None

    def _is_of_rows(self, axes: tuple[str | None, ...]) -> bool:
        root = self.reader.root
        return not any(axes) or (not self.is_row and root(axes[0]) == root(self.stored.value.axes[0]))

    @staticmethod
    def _fault(line: Line, why: str) -> ProgramError:
        return ProgramError(f"{line}: {why}")

    def _sides(
        self,
        pointer: Affine,
        axes: tuple[str | None, ...],
        left: Sequence[Integers],
        dims: tuple[int, ...] = (ROWS, COLUMNS),
    ) -> list[tuple[str | None, int, Any]]:
        """Return axis, size and visible elements of a block along its tensor's rows and columns."""
        of = dict(zip(dims[-len(axes) :], zip(axes, pointer.shape, left, strict=True), strict=False))
        if COLUMNS in of and len(axes) == 1 and not self.is_row and self._is_of_rows(axes):
            of = {ROWS: of[COLUMNS]}
        return [of.get(d, (None, 1, 1)) for d in (ROWS, COLUMNS)]

    def _names(self) -> dict[str | None, str]:
        """Return the names of axes: those of the row, of the loop, of operands."""
        root, loads = self.reader.root, self.reader.loads.values()
        axes = self.stored.value.axes
        names: dict[str | None, str] = {} if self.is_row else {root(axes[0]): "row"}
        for load in loads:
            if load.is_walked and (along := self._along(load)) != SPLIT:
                names.setdefault(root(load.axes[load.dims.index(along)]), "key")
        for axis in map(root, axes):
            names.setdefault(axis, "value")
        own = [root(a) for x in loads for a in x.axes if a is not None]
        own += [axis for axis, _ in self._axes_of_masks() if axis not in own]
        free = chain(("head", "depth", "width"), (f"axis{i}" for i in range(len(own))))
        for axis in own:
            names[axis] = names.get(axis) or next(free)
        return names

    def _axes_of_masks(self) -> Iterator[tuple[str, int]]:
        """Yield the axes of masks that are read, and their sizes: no load may have such an axis."""
        for known in self.reader.seen.values():
            axes = known.value.axes
            for axis, size in zip(axes, known.elements.shape[-len(axes) :], strict=True) if axes else ():
                if axis is not None:
                    yield self.reader.root(axis) or axis, int(size)

    def called(self, axes: tuple[str | None, ...]) -> str:
        """Return the names of axes, none for axes of size 1."""
        return " ".join(["row"] * self.is_row + [self._name_of(a) for a in axes if a is not None])

    def _name_of(self, axis: str) -> str:
        """Return the name of an axis; raise `ProgramError` for an axis that neither a load nor a store has."""
        name = self.names.get(self.reader.root(axis))
        if name is None:
            why = "tl.where broadcasts a number along an axis that no load and no store has"
            raise ProgramError(f"{self.stored.line}: {why}: compute it with numbers, or choose from a loaded block")
        return name

    def _with_axes(self, text: str) -> str:
        """Return a statement with the names of the axes that it has."""

        def named(match: re.Match[str]) -> str:
            axes = match[1].split()
            if any(self.reader.root(a) not in self.names for a in axes):
                raise self._fault(
                    self.stored.line,
                    "a block has one value along an axis that no stored block has, which is not supported",
                )
            return repr(self.called(tuple(axes)) or "row")

        return AXES_IN_TEXT.sub(named, text)

    def _axes(self, load: Load) -> str:
        """Return the names of a load's axes, rows first; a load without the row's axis is the same for every row."""
        sides = self._sides(load.pointer, load.axes, load.left, load.dims)
        listed = [self.names[self.reader.root(a)] for a, *_ in sides if a is not None]
        if len(set(listed)) < len(listed):
            why = "its rows and columns are one axis of the kernel, as where a product is added to one of its factors"
            raise self._fault(load.line, f"{load.of}: {why}; load the other block through a separate pointer")
        if not listed and not self.is_row:
            return language.ONE
        if load.name in self.shared or (self.is_row and "row" not in listed):
            return " ".join(["row", *listed])
        return " ".join(listed)

    def _along(self, load: Load) -> int:
        """Return the axis of its tensor along which a walked block moves."""
        tensor = self._tensor(load.of)
        base = np.broadcast_to(load.pointer.base, (len(load.pointer.base), self.is_visited.shape[1]))
        places = tensor.places(base)
        follows = self.is_visited[:, 1:] & self.is_visited[:, :-1]
        moves = [d for d in (SPLIT, ROWS, COLUMNS) if np.any(np.diff(places[d]) * follows)]
        if not follows.any():  # a second tile would begin at the end of the first
            by, sides = np.abs(base[:, 1] - base[:, 0]), zip(load.pointer.steps, load.pointer.shape, strict=True)
            dims = load.dims[-len(load.pointer.shape) :]  # only the last piece of a row
            moves = [d for d, (step, size) in zip(dims, sides, strict=True) if np.all(by == step * size)]
            moves = [SPLIT] if tensor.is_split and np.all(by == tensor.steps[SPLIT]) else moves
            if not moves and isinstance(tensor, View) and sum(n > 1 for n in load.pointer.shape) < 2:
                return SPLIT  # an axis with one index needs no check
        elif not moves and isinstance(tensor, View) and ROWS in load.dims[-len(load.axes) :]:
            return ROWS  # for a table that names the same page repeatedly
        if len(moves) != 1:
            which = "both" if moves else "neither"
            raise self._fault(
                load.line, f"{load.of}: its tile moves along {which} of its axes in the loop; it must move along one"
            )
        if moves[0] not in (SPLIT, *load.dims):
            why = "moves from row to row in the loop, but its block has only columns"
            raise self._fault(load.line, f"{load.of} {why}")
        return moves[0]

    def _place(self, load: Load) -> None:
        """Check a block against the tensor from which it is read, against the grid, and against the other operands."""
        tensor = self._tensor(load.of)
        shape = self.is_visited.shape if load.is_walked else (len(self.reader.ids), 1)
        is_visited = self.is_visited if load.is_walked else self.stores
        batch, head, split, *corner = (np.broadcast_to(x, shape) for x in tensor.places(load.pointer.base))
        is_read = is_visited & np.logical_and.reduce([np.broadcast_to(n, shape) > 0 for n in load.left])
        self._check_ragged(load, tensor, is_read)
        for called, index, whole in zip(SIDES, (batch, head, split), tensor.shape, strict=False):
            self._check_inside(load, called, (index, 1, whole), is_read)
        group = self.out.shape[1] // tensor.shape[1]
        is_other = (batch != self.batch) & (tensor.shape[0] > 1 or not isinstance(tensor, View))
        if np.any((is_other | (head != self.head // max(1, group)))[is_visited]) and tensor.shape[:2] != (1, 1):
            raise self._fault(
                load.line, f"{load.of}: a program must read head // {group} of its own head, and it reads another one"
            )
        if load.is_walked and self._along(load) == SPLIT:
            if "key" not in self.names.values() and not tensor.is_split:
                raise self._fault(load.line, f"{load.of}: its tile moves along neither rows nor columns in the loop")
            if "key" in self.names.values():
                self._stack(load, split, is_visited, is_by_tile=True)
            else:
                self.walked = "split"
                self._place_axis(load, "split", split, np.ones_like(split), (tensor.shape[SPLIT], 1), is_visited)
        elif tensor.shape[SPLIT] > 1:
            is_own, is_free = not np.any((split != self.split)[is_visited]), self.freedom and isinstance(tensor, View)
            if not is_own and not is_free:
                raise self._fault(load.line, f"{load.of}: a program reads a split other than its own")
            # if the result has no splits, the first split is a place
            if is_free and not (is_own and self.out.is_split):
                self._stack(load, split, is_visited, is_by_tile=False)
        sides = self._sides(load.pointer, load.axes, load.left, load.dims)
        if self.is_row and sides[0][0] is not None and sides[1][0] is None:
            why = "a block is loaded along a column, in a kernel whose programs each store one row or one number"
            raise self._fault(load.line, f"{load.of}: {why}; load it along a row of the tensor")
        if sides[0][0] is None and tensor.shape[ROWS] == 1 and self._is_shared(load):
            self.shared.add(load.name)
        for at, whole, (axis, size, left) in zip(corner, tensor.shape[ROWS:], sides, strict=True):
            count = np.minimum(np.broadcast_to(left, shape), size)
            called = self.names[self.reader.root(axis)] if axis is not None else ""
            self._check_inside(load, called or "element", (at, count, whole), is_read & (count > 0))
            is_needed = is_visited & (self.rows > 0) & (self.cols > 0)  # in a program that stores
            if called != self.walked or not load.is_walked:
                wanted = {"row": self.rows, "value": self.cols}.get(called, np.full_like(count, min(size, whole)))
                count = self._with_filled(load, axis, count, size, wanted)
            self._place_axis(load, called, at, count, (whole, size), is_needed)

    def _stack(self, load: Load, place: Integers, is_visited: Any, *, is_by_tile: bool) -> None:
        """Record the place along splits at which each program begins; refuse a program that moves in another way.

        By tile: to the next place for each tile, or for every group of this number of tiles.
        """
        first = np.take_along_axis(place, np.argmax(is_visited, 1)[:, None], 1)
        moved, count = place - first, np.cumsum(is_visited, 1) - 1
        places = int(moved[is_visited].max(initial=0)) + 1
        tiles = max(1, ceil_div(int(is_visited.sum(1).max()), max(1, places))) if is_by_tile else 0
        if np.any((moved != (count // tiles if tiles else 0))[is_visited]):
            raise self._fault(
                load.line,
                f"{load.of}: its position must advance by one in each iteration, or by one after a fixed number of "
                "iterations",
            )
        key = self._stack_of(load.of, load.name)
        self.stacks[key], self.sizes[f"{key} place"] = (first, tiles), 1

    @staticmethod
    def _stack_of(of: str, load: str) -> str:
        """Return the name, for messages, of the place along splits of a load, or of a stored result."""
        return load or f"{of} stored"

    def _place_axis(
        self, load: Load, called: str, at: Integers, count: Integers, sizes: tuple[int, int], is_visited: Any
    ) -> None:
        """Check one axis of a block against the grid and the loop."""
        whole, size = sizes
        if called == self.walked and load.is_walked:
            known, self.walk = self.walk or (at, count), (at, count)
            self.sizes[called] = whole if self.is_summed else size
            is_apart = any(np.any((a != b)[is_visited]) for a, b in zip(known, self.walk, strict=True))
            if is_apart and load.of.partition(".")[0] not in self.reader.function.parameters:
                why = (
                    "the loop's indices are used as values, but its tiles begin after the first element or skip "
                    "some elements"
                )
                raise self._fault(load.line, f"{why}; let the loop cover the whole row, with a mask")
            if is_apart:
                raise self._fault(load.line, f"the loop reads {load.of} at other positions than the operand before it")
        elif called == self.walked and self.walk:
            raise self._fault(
                load.line,
                f"the loop reads {load.of} along its axis, but the position does not move with the loop's tiles",
            )
        elif called == "row":
            is_alone = prod(self._tensor(load.of).shape) == prod(load.pointer.shape)
            if is_alone and np.ptp(self.row) and not at.any() and not np.any(self.rows != size):
                self.constant.add(load.name)  # one matrix for all blocks
                return
            if self.out.is_workspace and not load.is_walked:  # rows that no program loads are not stored either
                self.is_partial |= bool(np.any(count < self.rows))
                self.rows = np.minimum(self.rows, count)
                self.sizes["row"] = int(self.rows.max())
            if np.any(((at != self.row) | (count < self.rows))[is_visited]):
                raise UnplacedError(
                    f"{load.line}: {load.of}: the program must load all rows that it stores, and no others", load.of
                )
        elif called == "value" and (self.is_cut or np.any(at[is_visited]) or min(size, whole) != self.sizes["value"]):
            # columns that no program stores are not loaded either
            self.is_cut |= min(size, whole) > self.sizes["value"]
            if np.any(((at != self.col) | (count < self.cols))[is_visited]):
                raise self._fault(load.line, f"{load.of}: the program loads columns other than those that it stores")
        elif called:
            self.sizes[called] = min(size, whole)
            first = (at, count) if load.name in self.constant else self.parts.setdefault(called, (at, count))
            is_less = (count < min(size, whole)) & (not self._is_of_pieces(load, at))
            if np.any(((at != first[0]) | (count != first[1]) | is_less) & is_visited):
                why = (
                    f"a program loads {int(count.max())} of the {whole} elements of an axis that is neither the "
                    "result's nor a loop's"
                )
                raise self._fault(load.line, f"{load.of}: {why}; every program must load all of them")
        elif np.any((at != (self.row if self.is_row and whole > 1 else 0))[is_visited]):
            raise self._fault(load.line, f"{load.of}: the program loads rows other than those that it stores")

    def _is_of_pieces(self, load: Load, at: Integers) -> bool:
        """Return whether programs read pieces of an axis without a loop along it; the last piece may be smaller."""
        return not load.is_walked and at.shape[1] == 1 and len(np.unique(at)) > 1

    def _is_shared(self, load: Load) -> bool:
        """Return whether all rows share the data of a load: a row of columns, or one element."""
        own = self.called(load.axes).split()
        if not own or self._is_down(load):
            return False
        return prod(load.pointer.shape) == 1 if not any(load.axes) else "row" not in own

    def _is_down(self, load: Load) -> bool:
        """Return whether a vector has a value for each row of an operand that is not a row of the result."""
        root, axes = self.reader.root, [a for a in load.axes if a is not None]
        return len(load.axes) == 1 == len(axes) and root(axes[0]) in map(root, self.reader.down)

    def _check_second(self, other: Stored) -> None:
        """Raise `ProgramError` for a second result that is neither a tile of the same shape nor a number for each
        row.
        """
        of, axes = other.pointer.of, self.called(other.value.axes)
        *at, row, column = self._tensor(of).places(other.pointer.base)
        is_of_loop = self.stored.is_walked and not self.is_stacked
        is_tile = axes == self.called(self.stored.value.axes) and other.is_walked is is_of_loop
        if self.is_stacked and other.is_walked:  # for tiles of the loop: at the places of the tiles that it loads
            self._place(other)
            return
        if self._is_state(other, row, column):
            is_tile = False
        elif not is_tile and (axes != "row" or np.any(row != self.row)):
            why = "a second result must be a tile with the shape of the first, or one number for each stored row"
            raise self._fault(other.line, f"{of}: {why}")
        if is_tile and other.is_walked:  # the tiles of a row are stored one by one, as the first result's loop does
            self._place(other)
            at, row, column = [x[:, :1] for x in at], row[:, :1], _least(column, self.is_visited)
        matrix = list(zip(SIDES, at, (self.batch, self.head, self.split), strict=False))
        if self.is_stacked and self._tensor(of).is_split:  # a result after the loop has one place
            matrix = matrix[:SPLIT]
            self._stack(other, np.broadcast_to(at[SPLIT], (len(self.batch), 1)), self.rows > 0, is_by_tile=False)
        if apart := [side for side, x, y in matrix if np.any(x != y)]:
            why = f"a program stores its second result to a different {apart[0]} than its first"
            raise self._fault(other.line, f"{of}: {why}")
        if not is_tile:
            self._check_numbers(other)
        if is_tile:
            sides = self._sides(other.pointer, other.value.axes, other.left)
            if other.is_walked:
                down, (axis, width, left) = sides
                left = np.where(self.is_visited, np.minimum(left, width), 0).sum(1, keepdims=True)
                sides = [down, (axis, int(left.max()), left)]
            is_like = bool(np.all(row == self.row) and np.all(column == self.col))
            wholes = self._tensor(of).shape[ROWS:]
            for whole, x, (_, size, left), count in zip(
                wholes, (row, column), sides, (self.rows, self.cols), strict=True
            ):
                is_like &= bool(np.all(np.minimum(np.minimum(left, size), whole - x) == count))
            if not is_like:
                raise self._fault(
                    other.line, f"{of}: the program stores the second tile to other rows and columns than the first"
                )

    def _check_numbers(self, other: Stored) -> None:
        """Raise `ProgramError` if numbers belong to rows other than those of the program's stored tile.

        After a loop over tiles, numbers for additional rows of a stored block are omitted, with a note: such rows of
        queries only fill up a block.
        """
        of, stored = other.pointer.of, np.where(self.cols > 0, self.rows, 0).max(1, keepdims=True)
        count = np.minimum(other.left[0], other.pointer.shape[0]) if other.left else np.ones_like(stored)
        is_of_tile = not self.is_stacked and not self.out.is_workspace
        if is_of_tile and np.any(count < stored):
            why = "this store covers fewer rows than the tile's; use the same mask of rows for both"
            raise self._fault(other.line, f"{of}: {why}")
        is_more = count > stored
        if is_of_tile and np.any(is_more & ((stored == 0) | (not self.reader.walks))):
            why = "this store covers rows that the tile's does not; use the same mask of rows for both"
            raise self._fault(other.line, f"{of}: {why}")
        if is_of_tile and self._has_rows_in_common:
            why = "programs that store different columns of a row store one number for the row, each of them"
            raise self._fault(other.line, f"{of}: {why}; let only one of them store it")
        if np.any(is_more):
            self.reader.notes.append(
                f"{other.line}: {of}: the numbers for rows that no program stores are not computed"
            )

    @cached_property
    def _has_rows_in_common(self) -> bool:
        """Whether several programs store to one row of the result."""
        is_stored = ((self.rows > 0) & (self.cols > 0))[:, 0]
        columns = (self.batch, self.head, self.split, self.row, self.row + self.rows)
        *place, first, end = (x[is_stored, 0] for x in columns)
        order = np.lexsort((first, *place))
        is_one = np.logical_and.reduce([x[order][1:] == x[order][:-1] for x in place])
        return bool(np.any(is_one & (first[order][1:] < end[order][:-1])))

    def _is_state(self, other: Stored, row: Integers, column: Integers) -> bool:
        """Return whether a result is a tile with the rows of the first result, and with a complete axis that the first
        does not have.
        """
        if not self.is_stacked or other.is_walked or len(other.axes) < 2 or len(self.stored.value.axes) > 1:
            return False
        (down, height, above), (along, width, left) = self._sides(other.pointer, other.value.axes, other.left)
        called, whole = self.names.get(self.reader.root(along), ""), self._tensor(other.pointer.of).shape[COLUMNS]
        first, count = self.parts.get(
            called, (np.zeros_like(self.row), np.full_like(self.row, self.sizes.get(called, 0)))
        )
        return bool(
            self.names.get(self.reader.root(down)) == "row"
            and called not in ("", "row", "value")
            and np.all(row == self.row)
            and np.all(np.minimum(above, height) == self.rows)
            and np.all((column == first) & (np.minimum(np.minimum(left, width), whole) == count))
        )

    def _check_added_rows(self) -> None:
        """Raise `ProgramError` if a part of an atomic addition may have numbers other than 0 in hidden rows."""
        if not self.is_partial or not isinstance(self.out, View) or not self.out.parts:
            return
        r, least = self.reader, self.rows
        every = every_of(r.function.operations)

        def hides(op: Op) -> bool:
            of = [x for x in r.loads.values() if x.line == op.line]
            sides = [self._sides(x.pointer, x.axes, x.left, x.dims)[0] for x in of]
            is_hidden = (a is not None and bool(np.all(np.minimum(left, n) <= least)) for a, n, left in sides)
            return bool(of) and all(is_hidden)

        zeros = ZeroRows(makers(every), hides)
        stores = [o for o in every if o.name in STORES and o.line == self.stored.line]
        if not stores or not all(zeros.has(o.operands[1]) for o in stores):
            why = "the program adds numbers for rows that the mask of a load hides; use one mask for both"
            raise self._fault(self.stored.line, f"{self.stored.pointer.of.removesuffix('_parts')}: {why}")
        r.notes.append(f"{self.stored.line}: sums of hidden rows are products with 0: nothing is added there")

    def _check_parts(self) -> None:
        """Raise `ProgramError` for blocks at a constant distance in one tensor that have elements in common.

        Elements that are addressed by a list, in a tensor to which the kernel stores, are examined where they are read.
        """
        uses = [*self.reader.loads.values(), *self.reader.stored]
        views = [(v, x) for x in uses if isinstance(v := self._tensor(x.of), View) and not isinstance(v, GatheredView)]
        for (a, _), (b, x) in combinations(views, 2):
            is_stored = a.parameter in {y.pointer.of.partition(".")[0] for y in self.reader.stored}
            is_one = (a.parameter, a.of) == (b.parameter, b.of)  # before its store, the tensor has other values
            if a.name != b.name and is_stored and is_one and not a.is_apart_from(b):
                raise self._fault(
                    x.line, f"{a.parameter}: two accesses differ by a constant offset, and their blocks overlap"
                )

    def _check_bounds(self) -> None:
        """Raise `ProgramError` for a mask that hides part of a stored tile, or a sum over more columns than are
        stored.
        """
        r, stored = self.reader, {"row": self.rows, "value": self.cols}
        is_stored = (self.rows > 0) & (self.cols > 0)
        of_walks = [(r.hides_loaded(w, axis, most), axis, most, line) for w in r.walks for axis, most, line in w.bounds]
        for hides, axis, most, line in (*((None, *each) for each in r.bounds), *of_walks):
            called = self.names.get(r.root(axis), "")
            is_stored_so = (stored.get(called, self.sizes.get(called, 0)) > most) & is_stored
            if np.any(is_stored_so) if hides is None else hides:
                why = "a mask hides elements that are stored; load and store them with the same mask"
                if r.root(axis) not in map(r.root, self.stored.value.axes):
                    why = "a mask hides elements that are loaded; load them with this mask, and with other=..."
                raise self._fault(line, why)
        for axis, line in () if self.is_row else r.reduced_vectors:
            if self.names.get(r.root(axis)) == "row":  # each row would have a separate number, which would be its sum
                why = "a vector with a number for each stored row is reduced, which is not supported"
                raise self._fault(line, f"{why}; store the sum or maximum in a separate kernel")
        for axis, line in () if self.stored.is_walked else (*r.reduced, *r.goes_down):
            called = self.names.get(r.root(axis), "")
            for x in r.loads.values() if called in stored else ():
                for a, n, left in zip(x.axes, x.pointer.shape, x.left, strict=True):
                    if r.root(a) == r.root(axis) and np.any((np.minimum(n, left) > stored[called]) & is_stored):
                        raise self._fault(
                            line,
                            f"a sum or maximum runs over more {called}s than the program stores; store all of them",
                        )

    def _check_stored(self, stored: Stored) -> None:
        """Raise `ProgramError` for a program that stores beyond an axis of a tensor."""
        tensor = self._tensor(stored.pointer.of)
        counts = [1, 1, 1, *(left for *_, left in self._sides(stored.pointer, stored.value.axes, stored.left))]
        is_stored: Any = np.logical_and.reduce(np.broadcast_arrays(*(np.greater(n, 0) for n in counts)))
        is_stored = is_stored & self.is_visited if stored.is_walked else is_stored
        sides = zip(SIDES, tensor.places(stored.pointer.base), counts, tensor.shape, strict=True)
        self._check_ragged(stored, tensor, is_stored)
        for called, at, count, whole in sides:
            self._check_inside(stored, called, (at, count, whole), is_stored)

    @staticmethod
    def _ends(load: Load, ragged: Ragged) -> Integers:
        """Return the index after the last one that a load or store has along a ragged axis."""
        pointer = load.pointer
        each = zip(pointer.steps, pointer.shape, load.left, strict=True)
        return ragged.ends(pointer.base, [(s, np.minimum(left, n)) for s, n, left in each])

    def _with_filled(self, load: Load, axis: str | None, count: Integers, size: int, needed: Integers) -> Integers:
        """Return the number of elements of a load along an axis, including those that its mask hides beyond the end of
        a ragged axis.

        There the tensor has the load's number for hidden elements.  The number of elements is unchanged if the axis has
        enough, or if the mask hides others.
        """
        tensor, number = self._tensor(load.of), self.reader.hidden.numbers.get(load.name)
        if not isinstance(tensor, View) or tensor.ragged is None or number is None or axis is None:
            return count
        known = tensor.ragged.number
        is_less, at_end = np.broadcast_arrays(count < size, self._ends(load, tensor.ragged) == tensor.ragged.size)
        step = load.pointer.steps[load.axes.index(axis)]
        is_along = step == tensor.ragged.by[tensor.ragged.axis]
        if not np.any(count < needed) or not is_along or np.any(is_less & ~at_end) or known not in (None, number):
            return count
        self._views[load.of] = replace(tensor, ragged=tensor.ragged._replace(number=number))
        self.reader.notes.append(f"{load.line}: {load.of}: masked elements beyond its end are timed as loaded")
        return np.full_like(count, size)

    def _check_ragged(self, load: Load, tensor: Tensor, is_read: Any) -> None:
        """Raise `ProgramError` for a program that reads or stores beyond the last, shorter group of an axis."""
        if not isinstance(tensor, View) or tensor.ragged is None:
            return
        beyond = self._ends(load, tensor.ragged) > tensor.ragged.size
        if np.any(beyond := np.broadcast_to(beyond, np.broadcast_shapes(beyond.shape, is_read.shape)) & is_read):
            program = self.reader.program(int(np.flatnonzero(beyond.any(axis=1))[0]))
            size = f"an axis of {tensor.ragged.size}"
            why = f"{program} accesses an element beyond the end of {size}, and no mask prevents it"
            raise self._fault(load.line, f"{load.of}: {why}; add mask=...")

    def _check_inside(self, load: Load, called: str, side: tuple[Integers, Any, int], is_read: Any) -> None:
        """Raise `ProgramError` for a program that reads or stores beyond the end of a tensor.

        ``side``: for an axis, the start and the number of each program's elements, and the number of elements of the
        tensor.
        """
        at, count, whole = side
        end, does = np.where(is_read, at + count, 0), "stores" if isinstance(load, Stored) else "reads"
        if np.any(end > whole):
            program = int(np.flatnonzero((end > whole).any(axis=1))[0])
            last = f"{called} {int(end[program].max()) - 1} of {whole}"
            why = f"{self.reader.program(program)} {does} up to {last}, and no mask prevents it"
            raise self._fault(
                load.line, f"{load.of}: {why}; add mask=..., or use sizes that are multiples of the block"
            )
        first = np.where(is_read, at, 0)
        if np.any(first < 0):
            program = int(np.flatnonzero((first < 0).any(axis=1))[0])
            why = f"{self.reader.program(program)} {does} {called} {int(first[program].min())}, before the first"
            raise self._fault(load.line, f"{load.of}: {why}, and no mask prevents it")

    # ---------------------------------------------------------------- places of elements

    @property
    def placed_inputs(self) -> dict[str, list[tuple[GlobalTensor, Tensor]]]:
        """The tensors of the phase that are read, each with its arrangement, by parameter of the kernel."""
        placed = dict[str, list[tuple[GlobalTensor, Tensor]]]()
        for x in self.reader.loads.values():
            bound = self._global(x.of, x.name)
            tensor = bound.tensor if isinstance(bound, Stacked) else bound
            arranged = self._tensor(x.of)
            parameter = arranged.parameter if isinstance(arranged, View) else x.of.partition(".")[0]
            placed.setdefault(parameter, []).append((tensor, arranged))
        return placed

    @property
    def placed_result(self) -> tuple[str, Tensor]:
        """The parameter of the first result, and its arrangement."""
        return self.stored.pointer.of.partition(".")[0], self.out

    @property
    def placed_results(self) -> dict[str, tuple[str, Tensor]]:
        """The parameter and arrangement of each result, the first result first, by the name of the phase's tensor."""
        placed = dict[str, tuple[str, Tensor]]()
        for of in dict.fromkeys(x.pointer.of for x in self.reader.stored):
            bound = self._global(of)
            tensor = bound.tensor if isinstance(bound, Stacked) else bound
            placed[tensor.name] = of.partition(".")[0], self._tensor(of)
        return placed

    def programs_of(self, batch: int, head: int, row: int, rows: int) -> tuple[list[list[int]], tuple[int, int]]:
        """Return the programs that store some of the rows of a head, with their first row and number of rows.

        ``batch`` counts splits too.
        """
        is_split = (self.splits >= 0) & (self.batch * self.out.shape[SPLIT] + self.splits == batch)
        is_of = is_split.any(1, keepdims=True) & (self.head == head)
        is_of = is_of & (self.row < row + rows) & (self.row + self.rows > row)
        listed: list[list[int]] = np.unique(self.reader.ids[is_of[:, 0]], axis=0).tolist()
        if not listed:
            return [], (row, rows)
        first, end = int(self.row[is_of].min()), int((self.row + self.rows)[is_of].max())
        return listed, (first, end - first)

    # ---------------------------------------------------------------- results of the reading

    @property
    def piece(self) -> int:
        """Number of elements of a sum that a program loads at once; 0 if the program does more than add up products."""
        return int(self.walk[1].max()) if self.walk and self.is_summed else 0

    @property
    def at_once(self) -> int:
        """Number of tiles in one block of the kernel; 0 if each tile is a block."""
        return self.reader.walks[0].most if self.walked == "split" else 0

    def written(self, prelude: Prelude | None = None) -> Written:
        """Return the kernel of tiles as text; the result of a prelude is an operand in place of its sources."""
        r, lines = self.reader, list[tuple[str, int]]()
        names = {n: self._of_all(n) if x.is_walked and not self.is_summed else n for n, x in r.loads.items()}
        if prelude:
            names[prelude.load] = prelude.name
        axes = {names[x.name]: self._axes(x) for x in r.loads.values()}
        axes |= {"mask": "row key"} if any(w.mask for w in r.walks) else {}
        axes |= {n: self._axes_of_mask(x) for n, x in r.seen.items()}
        lines.append((f"def {r.function.name}({', '.join([*axes, *r.numbers])}):", self.stored.line.number))
        done = 0
        for walk in r.walks if r.choices.is_apart else r.walks[:1]:
            lines += [(f"    {text}", line.number) for text, line in r.lines[done : walk.at]]
            lines += self._loop(walk, names)
            done = walk.at
        lines += [(f"    {text}", line.number) for text, line in r.lines[done:]]
        if returned := ", ".join(r.text(x.value) for x in r.stored if not x.is_walked):
            lines.append((f"    return {returned}", self.stored.line.number))
        gone = {f"    {text}" for text, _ in prelude.lines} if prelude else set[str]()
        lines = lines if r.walks else [lines[0], *sunk(lines[1:])]
        lines = [(self._with_axes(text), number) for text, number in lines if text not in gone]
        source, numbers = "\n".join(text for text, _ in lines), tuple(n for _, n in lines)
        results = ["out", *(f"out_{i}" for i in range(1, len(r.stored)))]
        return Written(r.function.name, self.stored.line.file, source, tuple(axes.items()), numbers, " ".join(results))

    def _of_all(self, name: str) -> str:
        """Return a unique name for all tiles of a walked operand."""
        whole = name.removesuffix("j")
        while whole in self.reader.loads:
            whole += "_"
        return whole

    def _loop(self, walk: Walk, names: dict[str, str]) -> Iterator[tuple[str, int]]:
        if not walk.lines:
            why = f"{self.reader.function.name}: the loop changes none of the values that it carries; remove it"
            raise ProgramError(f"{self.stored.line}: {why}")
        indent, (first, *_) = "    ", [line for _, line in walk.lines]
        if walk.loads and not self.is_summed:
            for name in walk.states:
                start, of, fmt = self.reader.states[name]
                if not self.called(of) and not self.reader.goes_down:
                    raise self._fault(
                        first,
                        f"{name}: a loop carries a single number together with blocks of several rows, "
                        "which is not supported",
                    )
                how = f"full({self.called(of) or language.ONE!r}, {start.text}, {self.reader.choices.fmt(fmt)!r})"
                yield (f"    {name} = {how if isinstance(start, Number) else f'initial({start.text})'}", first.number)
            walked = list(dict.fromkeys(walk.loads))
            of_all = ", ".join(names[n] for n in walked)
            yield f"    for {', '.join(walked)} in tiles({of_all}, axis={self.walked!r}):", first.number
            indent = "        "
        yield from ((indent + text, line.number) for text, line in walk.lines)

    def phases(
        self, problem: AnyProblem, kind: MaskKind | None, p: object, *, keeps_factors: bool = True
    ) -> tuple[Phase, ...]:
        """Return the phase; it follows a phase that computes a left factor of an operand, if cores do not store such
        factors.

        ``kind``: how tiles get their masks; ``p``: a precision, with the order of row sums.
        """
        prelude = None if keeps_factors else prelude_of(self.reader)
        r, written = self.reader, self.written(prelude)._replace(keeps_factors=keeps_factors)
        attention = problem.attention
        if attention is not None:
            self._refuse_exchanged()
        loads = zip(written.axes, r.loads.values(), strict=False)
        bound: dict[str, Any] = {n: self._global(x.of, x.name) for (n, _), x in loads}
        is_masked, offsets = any(w.mask is not None for w in r.walks), list[int | None]()
        if is_masked and attention is None:
            bound["mask"], offsets = mask_of_plain(self, kind)
        elif attention is not None:
            seen = self._seen(attention) if is_masked else KeyRanges(attention.seq_kv)
            if is_masked:
                bound["mask"] = mask_of(attention, (self.sizes["row"], self.sizes["key"]), kind, seen=seen)
                offsets = [attention.causal_offset] * len(r.ids)
        if attention is not None and seen != attention.seen:
            r.notes.append(
                f"{r.function.name}: the kernel's masks decide which keys a query sees, not the problem; errors are "
                "against the problem (--causal, --window)"
            )
        values = dict[str, Any]()
        for n, x in r.seen.items():
            known, shared = self._matrix(x), 1
            known = known.astype(get_format(fmt := r.choices.fmt(x.value.fmt)).dtype)
            if known.shape[2] == 1 and not x.is_by_program:  # all rows share the mask
                shared = self.out.shape[ROWS]
                known = np.broadcast_to(known, (1, 1, shared, known.shape[-1]))
            role: Role = "input" if x.is_by_program else "constant"
            batch, heads, rows, columns = known.shape
            called = f"{n}_{self.number}" if self.number else n  # each of several kernels has its own name
            bound[n] = GlobalTensor(called, batch, heads, rows, columns, fmt, role, shared_rows=shared)
            values[called] = partial(np.asarray, known)
        for (n, _), load in zip(written.axes, r.loads.values(), strict=False):
            if isinstance(t := self._tensor(load.of), MaskView):
                of = tensor_of(bound[n])
                values[of.name] = partial(_spread, t, of.rows)
        cells = self._cells(offsets or [None] * len(r.ids))
        out = [self._global(x.pointer.of) for x in r.stored]
        bound |= {"p": p, **r.numbers}
        if prelude:
            own = {prelude.load: bound[prelude.name], "p": p, **r.numbers}
            axes = dict(written.axes)[prelude.name]
            named = prelude._replace(lines=tuple((self._with_axes(text), line) for text, line in prelude.lines))
            before, bound[prelude.name] = phase_before(named, written, kernel_of, axes, cells, self.sizes, **own)
            why = (
                f"the kernel computes {prelude.name} from {prelude.load} before the loop; here the products load "
                "it from memory"
            )
            r.notes.append(f"{r.function.name}: {why}; a separate kernel computes it")
        phase = kernel_of(written).phase(r.function.name, cells, self.sizes, out, values=values, **bound)
        flops = _flops(phase) if attention is None else None
        placed = r.placed_by_loads
        looked_up = frozenset(n for (n, _), x in zip(written.axes, r.loads.values(), strict=False) if x.line in placed)
        phase = replace(phase, notes=tuple(dict.fromkeys(r.notes)), flops=flops, looked_up=looked_up, is_compiled=True)
        return (before, phase) if prelude else (phase,)

    def _axes_of_mask(self, known: KnownBlock) -> str:
        """Return the names of the axes of a mask that is read; a mask of columns also has an axis of rows, which share
        it.
        """
        x = known.value
        last = x.axes[-1] if x.axes else None
        if known.is_by_program:
            called = self.called(x.axes).split()
            return " ".join(["row", *(n for n in called if n != "row")])
        is_of_columns = self._matrix(known).shape[2] == 1
        columns = [self._name_of(last)] if is_of_columns and last is not None else []
        return " ".join(["row", *columns]) if is_of_columns else self.called(x.axes)

    def _matrix(self, known: KnownBlock) -> np.ndarray[Any, Any]:
        """Return a mask that is read, (batch, heads, rows, columns); for a mask that all programs share (1, 1, ...)."""
        x, matrix = known.value, known.elements
        if known.is_by_program:
            return self._matrix_of_programs(known)
        is_of_rows = matrix.ndim == 1 and self._is_of_rows(x.axes)
        rows, columns = matrix.shape if matrix.ndim == 2 else (-1, 1) if is_of_rows else (1, -1)
        return matrix.reshape(1, 1, rows, columns)

    def _refuse_exchanged(self) -> None:
        """Raise `ProgramError` for a kernel of attention that stores to an input, or reads the result."""
        loads = [x for x in self.reader.loads.values() if self._tensor(x.of).name == "o"]
        stores = [x for x in self.reader.stored if self._tensor(x.pointer.of).name in ("q", "k", "v")]
        for x in (*stores, *loads):
            does = "stores to" if isinstance(x, Stored) else "reads"
            what = f"{x.pointer.of}: the kernel {does} {self._tensor(x.pointer.of).name}"
            raise self._fault(x.line, f"{what}; in an attention, q, k and v are inputs and o is the result")

    def _matrix_of_programs(self, known: KnownBlock) -> np.ndarray[Any, Any]:
        """Return a mask that differs between programs, in the rows that each program stores."""
        called = self.called(known.value.axes).split()
        across = [n for n in called if n != "row"]
        why = "masks or indices outside of a loop that differ between programs are not supported"
        if len(across) > 1 or self.is_stacked or self.walked in across or called[1:] == ["row"] != called:
            raise self._fault(known.line, f"{why} along axes other than the result's rows and one more")
        first, count = np.zeros_like(self.row), np.ones_like(self.row)
        if across == ["value"]:
            first, count = self.col, self.cols
        elif across:
            whole = np.full_like(self.row, self.sizes[across[0]])
            first, count = self.parts.get(across[0], (first, whole))
        b, h, splits, rows, _ = self.out.shape
        shape = (b * splits, h, rows, int((first + count).max()))
        if prod(shape) > MOST_ELEMENTS:
            raise self._fault(known.line, f"{why}: {prod(shape):,} elements; allowed: {MOST_ELEMENTS:,}")
        result, is_set = np.zeros(shape, known.elements.dtype), np.zeros(shape, bool)
        is_down = "row" in called and not self.is_row
        form = (1, -1) if not is_down else known.elements.shape[1:] if across else (-1, 1)
        for i in np.flatnonzero((self.rows[:, 0] > 0) & (self.cols[:, 0] > 0)).tolist():
            n, most = int(self.rows[i, 0]), int(count[i, 0])
            block = known.elements[i].reshape(form)
            here = (
                int(self.batch[i, 0]) * splits + int(self.split[i, 0]),
                int(self.head[i, 0]),
                slice(row := int(self.row[i, 0]), row + n),
                slice(column := int(first[i, 0]), column + most),
            )
            block = np.broadcast_to(block[:n, :most], (n, most))
            if np.any((result[here] != block) & is_set[here]):
                raise self._fault(known.line, f"{why} where two programs store the same rows")
            result[here], is_set[here] = block, True
        return result

    def _global(self, of: str, load: str = "") -> GlobalTensor | Stacked:
        t, is_stored = self._tensor(of), not load and any(of == x.pointer.of for x in self.reader.stored)
        b, h, splits, rows, cols = t.shape
        is_result = of == self.stored.pointer.of and not t.is_workspace and not load and not self.number
        # a kernel in place has two tensors here
        is_changed = is_stored and any(of == x.of for x in self.reader.loads.values())
        is_other_o = t.name == "o" or (is_stored and t.name == "O")  # rings have names without case
        name = "o" if is_result else f"{t.name}_" if is_changed or is_other_o else t.name
        name = f"{name}_{self.number}" if self.number and not t.is_workspace else name
        rows, shared = (self.out.shape[ROWS],) * 2 if load in self.shared else (rows, 1)
        more: Any = {"is_transposed": t.is_transposed, "shared_rows": shared}
        more["parameter"] = t.parameter if isinstance(t, View) else of
        role: Role = "workspace" if t.is_workspace else "output" if is_stored else "input"
        role = "constant" if load in self.constant else role
        more["view"] = t if isinstance(t, View) else None
        more["stretch_rows"] = int(isinstance(t, GatheredView) and t.groups[ROWS] == (0,))
        more |= _in_parts(t, b * splits, h, rows, cols)
        tensor = GlobalTensor(name, b * splits, h, rows, cols, t.fmt, role, t.is_interleaved, **more)
        if (key := self._stack_of(of, load)) in self.stacks:
            tiles = self.stacks[key][1]
            return Stacked(f"{key} place", splits, tensor, is_by_tile=tiles > 0, tiles=max(1, tiles))
        has_places = t.is_split and (splits > 1 or self.out.is_split)  # an axis with one index has one place
        return Stacked("split", splits, tensor) if has_places else tensor

    def _seen(self, problem: Problem) -> Seen:
        assert self.walk is not None
        at, masks = 0, list[set[Rule]]()
        for walk in self.reader.walks:
            here = slice(at, at := at + walk.most)
            rules = set[Rule]()
            if isinstance(walk.mask, Elements) or (walk.mask is not None and walk.mask.either):
                why = (
                    "a mask that joins comparisons by | or ~, or is not linear, is not supported on tensors of the "
                    "problem; record the"
                )
                why += " call instead"
                raise self._fault(self.stored.line, why)
            for relation, d in walk.mask.of if walk.mask else ():
                base = d.base - d.steps[0] * self.row - d.steps[1] * self.walk[0][:, here]
                if len(every := np.unique(base[self.is_visited[:, here]])) > 1:
                    raise self._fault(
                        self.stored.line, "a mask whose diagonal moves between tiles or programs is not supported"
                    )
                rules.add((relation, int(every[0]), d.steps[0], d.steps[1]))
            masks += [rules] if rules else []
        if any(other != masks[0] for other in masks):
            raise self._fault(self.stored.line, "loops with different masks in one kernel are not supported")
        return seen_of(tuple(sorted(masks[0])), problem)

    def _cells(self, offsets: Sequence[int | None]) -> WorkTable:
        """Return the blocks; raise `ProgramError` if programs write a row twice, or do not write all rows."""
        chosen = np.flatnonzero((self.rows[:, 0] > 0) & (self.cols[:, 0] > 0))
        kinds, which = self._kinds(chosen, offsets)
        one = np.ones_like(self.split)
        parts = [(n, at, count) for n, (at, count) in self.parts.items() if np.any(at)]
        in_splits = any(self._tensor(x.of).is_split and n not in self.stacks for n, x in self.reader.loads.items())
        parts += [("split", self.split, one)] if self.out.is_split and (in_splits or not self.is_stacked) else []
        parts += [(f"{load} place", at, one) for load, (at, _) in self.stacks.items()]
        stored = [(n, at, count) for n, (_, at, count) in zip(("row", "value"), self._spans(), strict=True)]
        spans = [*stored[: 1 + self.is_cut], *parts]
        columns = [self.batch, self.head, np.zeros_like(self.split), *chain(*((at, count) for _, at, count in spans))]
        numbers = np.column_stack([x[chosen, 0] for x in columns])
        self.check_written()
        times, edges = self._times
        if isinstance(self.out, View) and self.out.ragged is not None and not self.out.is_workspace:
            why = f"`output` has whole groups of {self.out.ragged.inner} along an axis of {self.out.ragged.size}"
            self.reader.notes.append(f"{self.stored.line}: {self.out.parameter}: {why}, with NaN beyond its end")
        if self.is_partial:  # rows that no program stores belong to no program
            times = times[..., times.any(axis=(0, 1, 2, 4)), :]
        if np.any(times != 1):
            results, why = self._said(times, edges)
            if not isinstance(self.out, View) or not np.any(times):
                advice = "; if the last block is partial, use cdiv(size, block) and masks"
                raise self._fault(self.stored.line, f"{results[0]}: {why}: correct the grid or the offsets{advice}")
            # Rows that another launch writes, or programs of another kind.
            nothing = "-1, as integers have no NaN," if self.out.fmt.startswith("int") else "NaN"
            left = "by programs of this kind" if self.reader.choices.programs else f"npusim returns {nothing} there"
            self.reader.notes.append(f"{self.stored.line}: {', '.join(results)}: {why}: {left}")
        return WorkTable(tuple(n for n, _, _ in spans), numbers, kinds, which)

    def _kinds(self, chosen: Integers, offsets: Sequence[int | None]) -> tuple[list[Visits], Integers]:
        """Return the different visits of programs, and the visit of each of the ``chosen`` programs."""
        walks = () if self.is_summed else (*(self.walk or ()), self.is_visited)
        numbers = {offset: n for n, offset in enumerate(dict.fromkeys(offsets))}
        of_offsets = np.array([numbers[offset] for offset in offsets] if len(numbers) > 1 else [0] * len(offsets))
        firsts, which = _grouped(np.column_stack([of_offsets[chosen], *(x[chosen] for x in walks)]))
        kinds = dict[Visits, int]()
        renamed = list[int]()
        for i in chosen[firsts].tolist():
            renamed.append(kinds.setdefault(Visits(self._runs(i), offsets[i]), len(kinds)))
        return list(kinds), np.array(renamed, np.int64)[which]

    def check_known(self) -> None:
        """Raise `ProgramError` for integers or masks, different ones of each program, that rows of the result cannot
        have.
        """
        for known in self.reader.seen.values():
            if known.is_by_program:
                self._matrix_of_programs(known)

    def check_written(self) -> None:
        """Raise `ProgramError` for an element of the result that several programs store to."""
        times, edges = self._times
        if np.any(times > 1):
            results, why = self._said(times, edges)
            raise self._fault(self.stored.line, f"{results[0]}: {why}: correct the grid or the offsets")

    def _said(self, times: Integers, edges: list[Integers]) -> tuple[list[str], str]:
        """Return the names of the results, and which elements are not written once."""
        results = dict.fromkeys(x.pointer.of.partition(".")[0] for x in self.reader.stored)
        grid = "x".join(map(str, self.reader.grid))
        return list(results), f"the grid of {grid} programs writes {self._written(times, edges)}"

    @cached_property
    def _times(self) -> tuple[Integers, list[Integers]]:
        """The number of stores of each element of the result, 1 beyond its end, and the edges between which elements
        are equal.

        In order: batch, head, split, stretch of rows, stretch of columns.
        """
        chosen = np.flatnonzero((self.rows[:, 0] > 0) & (self.cols[:, 0] > 0))
        spans = [(n, at[chosen, 0], count[chosen, 0]) for n, at, count in self._spans()]
        edges = [_sorted(np.concatenate([[0, n], at, at + count])) for n, at, count in spans]
        (a, b), (c, d) = (
            (np.searchsorted(e, at), np.searchsorted(e, at + n)) for e, (_, at, n) in zip(edges, spans, strict=True)
        )
        program, at_split = np.nonzero(self.splits[chosen] >= 0)
        place = self.batch[chosen, 0][program], self.head[chosen, 0][program], self.splits[chosen][program, at_split]
        steps = np.zeros((*self.out.shape[:ROWS], *(len(e) for e in edges)), np.int64)
        for row, column, sign in ((a, c, 1), (b, c, -1), (a, d, -1), (b, d, 1)):
            np.add.at(steps, (*place, row[program], column[program]), sign)
        times = steps.cumsum(ROWS).cumsum(COLUMNS)[..., :-1, :-1]
        return np.where(self._exists(edges), times, 1), edges

    def _exists(self, edges: list[Integers]) -> Any:
        """Return the stretches of a result, in the form of `_times`, in which its tensor has elements."""
        if not isinstance(self.out, View) or self.out.ragged is None:
            return True
        exists = self.out.exists.reshape(*np.take(self.out.shape, (0, 2, 1)), *self.out.shape[ROWS:]).swapaxes(1, 2)
        for axis, first in zip((ROWS, COLUMNS), edges, strict=True):
            inside = np.minimum(first[:-1], exists.shape[axis] - 1)
            seen = np.take(exists, inside, axis)
            exists = seen & (inside == first[:-1]).reshape(-1, *(1 for _ in range(COLUMNS - axis)))
        return exists

    def _written(self, times: Integers, edges: list[Integers]) -> str:
        """Return the number of elements that are not written exactly once, and the first of them; ``times``: the number
        of writes between ``edges``.
        """
        areas = np.multiply.outer(*map(np.diff, edges))[: times.shape[ROWS]]
        missing, is_twice = int((areas * (times == 0)).sum()), bool((times > 1).any())
        whole = areas * np.ones_like(times)
        each, scale = ("elements", 1) if self.is_cut else ("rows", self.out.shape[COLUMNS])
        every, twice = int(whole.sum()) // scale, int((areas * (times > 1)).sum()) // scale
        counted = f"{int((areas * times).sum()) // scale} of {every} {each}, {missing // scale} of them never"
        counted = f"{twice} of {every} {each} more than once" if is_twice else counted
        *at, row, column = (int(i) for i in np.argwhere(times != 1)[0])
        named = zip(("batch", "head", "split"), at, self.out.shape, strict=False)
        first = [f"{n} {i}" for n, i, size in named if size > 1]
        first += [f"row {edges[0][row]}", *([f"column {edges[1][column]}"] * self.is_cut)]
        return f"{counted}, first {', '.join(first)}"

    def _spans(self) -> tuple[tuple[int, Integers, Integers], ...]:
        """Return the numbers of rows and columns and, for each program, the first row and column and their numbers."""
        return (self.out.shape[ROWS], self.row, self.rows), (self.out.shape[COLUMNS], self.col, self.cols)

    @cached_property
    def _is_scattered(self) -> bool:
        """Whether the distances of tiles differ, as for pages; programs then share only the runs of neighbours."""
        assert self.walk is not None
        starts = np.broadcast_to(self.walk[0], self.is_visited.shape)
        follows = self.is_visited[:, 1:] & self.is_visited[:, :-1]
        return len(np.unique(np.diff(starts, axis=1)[follows])) > 1

    def _runs(self, i: int) -> tuple[TileRun, ...]:
        """Return the tiles that a program visits, grouped by shape and equal spacing."""
        runs = list[TileRun]()
        only = [MASKED if w.mask else frozenset() for w in self.reader.walks for _ in range(w.most)]
        for j in np.flatnonzero(self.is_visited[i]) if self.walk and not self.is_summed else ():
            assert self.walk is not None
            col, cols = int(self.walk[0][i, j]), int(self.walk[1][i, j])
            last = runs[-1] if runs else None
            apart = col - last.col - (last.count - 1) * last.step if last else 0
            is_like = last is not None and apart != 0 and (last.cols, last.only) == (cols, only[j])
            is_regular = not self._is_scattered or apart == cols
            if last and is_like and is_regular and (last.count == 1 or last.step == apart):
                runs[-1] = replace(last, count=last.count + 1, step=apart)
            else:
                runs.append(TileRun(col, cols, 1, max(cols, 1), only[j]))
        return tuple(runs)


#: Raises `ProgramError` for blocks that cannot be executed although they were read.
Check = Callable[[Sequence[LaunchGrid]], None]


def _in_parts(t: Tensor, batch: int, heads: int, rows: int, cols: int) -> dict[str, Any]:
    """Return the arrangement in memory of a tensor to which atomic additions add parts, or of the tensor of the
    sums.
    """
    if not isinstance(t, View) or not (t.parts or t.sums):
        return {}
    if t.parts:
        return {"view": None, "added": t.parts}
    name, shape = f"{t.parameter.removesuffix('_sum')}_parts", (batch * t.sums, heads, rows, cols)
    return {"view": None, "of": GlobalTensor(name, *shape, t.fmt, "workspace", added=t.sums)}


def _sorted(values: Integers) -> Integers:
    """Return the different values, ascending; many times faster than `numpy.unique` if most are in order."""
    values = np.sort(values, kind="stable")
    is_first = np.concatenate([[True], values[1:] != values[:-1]])
    return np.asarray(values[is_first], np.int64)


def _grouped(rows: Integers) -> tuple[list[int], Integers]:
    """Return the first of each kind of equal rows, in order, and the kind of each row."""
    varying = np.ascontiguousarray(rows[:, (rows != rows[:1]).any(0)])
    if not varying.size:
        return [0] * min(1, len(rows)), np.zeros(len(rows), np.int64)
    keys: list[bytes] = varying.view(np.dtype((np.void, varying.strides[0])))[:, 0].tolist()
    numbers = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    which = np.array([numbers[key] for key in keys], np.int64)
    return np.unique(which, return_index=True)[1].tolist(), which


def _visited(reader: Reader, stores: Booleans) -> Booleans:
    """Return, loop by loop, the iterations in which each program that stores reads anything.

    Raises `ProgramError` if a mask hides one tensor's tile completely while another tensor's is read.
    """
    walks = reader.walks[:1] if reader.choices.is_apart else reader.walks
    counts = [(np.arange(w.most)[None] < w.counts) & (True if w.done is None else w.done) for w in walks]
    counts = counts or [np.ones((len(reader.ids), 1), bool)]
    done = np.concatenate(counts, 1) & stores
    visited, before = done, ""
    for load in (x for x in reader.loads.values() if x.is_walked):
        is_read = np.logical_and.reduce(np.broadcast_arrays(done, *(left > 0 for left in load.left)))
        if before and np.any(is_read != visited):
            why = f"a mask skips tiles of {load.of} for which the loop reads tiles of {before}, or the other way round"
            raise ProgramError(f"{load.line}: {why}; a loop must skip a tile for all of its tensors")
        visited, before = is_read, load.of
    return visited


def _least(at: Integers, is_visited: Booleans) -> Integers:
    """Return the smallest place of a program's visited iterations; for a program without such iterations, the place of
    its first iteration.
    """
    at = np.broadcast_to(at, is_visited.shape)
    least = np.where(is_visited, at, np.iinfo(np.int64).max).min(1, keepdims=True)
    return np.where(is_visited.any(1, keepdims=True), least, at[:, :1])


def _stores(reader: Reader) -> Booleans:
    """Return, for each program, whether it stores any element, (programs, 1)."""
    one, count = np.ones((1, 1), bool), len(reader.ids)
    left = [np.logical_and.reduce(np.broadcast_arrays(one, *(n > 0 for n in x.left))) for x in reader.stored]
    result: Booleans = np.logical_or.reduce([np.broadcast_to(x.any(-1, keepdims=True), (count, 1)) for x in left])
    return result


def sunk(lines: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return statements; each statement that binds a new name is moved to directly before the first statement that
    reads the name.

    A product that is independent of a chain of others thus follows the rows of that chain, at a point where nothing
    waits for it.
    """
    result = list[tuple[str, int]]()
    for text, number in reversed(lines):
        name = text.split()[0]
        at = next((i for i, (other, _) in enumerate(result) if re.search(rf"\b{name}\b", other)), 0)
        result.insert(at, (text, number))
    return result


def _spread(view: MaskView, rows: int) -> Any:
    """Return a mask, (batch, heads, rows, columns): repeated for the rows that share it."""
    mask = view.array()
    return np.broadcast_to(mask, (*mask.shape[:2], rows, mask.shape[3]))


def _flops(phase: Phase) -> int:
    products = [
        (s.rows[0], bool(loop.axis))
        for loop in (*phase.loops, TileLoop(phase.finish))
        for s in loop.stages
        if s.is_product
    ]
    total = 0
    for block, count in alike(phase.cells):
        keys = sum(run.count * run.cols for run in block.runs) * count
        for row, is_walked in products:
            axes = {*phase.names[row.srcs[0]].axes, *phase.names[row.dst].axes}
            others = axes - {phase.loop_axis} if is_walked else axes
            elements = prod((block.span(a) or (0, phase.sizes[a]))[1] for a in others)
            total += 2 * elements * (keys if is_walked else count)
    return total


@lru_cache(maxsize=64)
def seen_of(rules: tuple[Rule, ...], problem: Problem) -> Seen:
    """Return which keys a query sees by comparisons ``base + a row + b key`` with 0."""
    offset, ranges = problem.causal_offset, dict[str, int]()
    for relation, base, a, b in rules:
        if (a, b) == (1, -1) and relation in ("sge", "sgt") and base - (relation == "sgt") == offset:
            ranges["after"] = 0
        elif (a, b) == (1, -1) and relation in ("slt", "sle"):
            ranges["window"] = offset - base + (relation == "sle")
    if len(ranges) == len(rules) and "after" in ranges:
        window = ranges.get("window")
        return KeyRanges(problem.seq_kv, 0, None if window is None or window >= problem.seq_kv else window)

    def sees(q: Any, k: Any) -> Any:
        return np.logical_and.reduce([RELATIONS[r](base + a * (q - offset) + b * k, 0) for r, base, a, b in rules])

    return KeyFunction(sees, problem.seq_kv)
