"""Blocks of a large grid as columns of numbers; a launch may have a million blocks, of few kinds."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from npusim.identity import Itself
from npusim.kernels.form.phase import FAMILY, SHAPE, TileRun, WorkTile
from npusim.program.ir.columns import BlockColumns, distinct
from npusim.program.ir.content import kept_by_blocks
from npusim.program.ir.opaque import twin

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    Integers = npt.NDArray[np.int64]

#: Columns before the columns of the spans; each axis has two columns for its span, start and size.
BATCH, HEAD, PLACE, SPANS = range(4)


class Visits(NamedTuple):
    """The visits of blocks of one kind: runs of tiles, and the diagonal of their masks."""

    runs: tuple[TileRun, ...]
    causal_offset: int | None


class WorkTable(BlockColumns):
    """Blocks with the same axes, each a row of ``numbers`` (batch, head, place, then start and size of each span).

    ``kinds`` lists the different visits, and ``which`` has the kind of each block.  Tables are compared by content,
    like tuples of blocks; each block is created once.
    """

    def __init__(
        self,
        axes: tuple[str, ...],
        numbers: Integers,
        kinds: Sequence[Visits],
        which: Integers,
        sharing: Integers | None = None,
    ) -> None:
        """``sharing``: blocks with the same number share one object as their runs; by default, blocks of one kind
        do.
        """
        self.axes, self.numbers, self.kinds, self.which = axes, numbers, tuple(kinds), which
        self._sharing = sharing
        self._made: list[WorkTile | None] = [None] * len(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, number: int) -> WorkTile: ...

    @overload
    def __getitem__(self, number: slice) -> tuple[WorkTile, ...]: ...

    def __getitem__(self, number: int | slice) -> WorkTile | tuple[WorkTile, ...]:
        if isinstance(number, slice):
            return tuple([self[n] for n in range(len(self))[number]])
        block = self._made[number]
        if block is None:
            block = self._made[number] = self._block(self.numbers[number].tolist(), self.kinds[self.which[number]])
        return block

    def __iter__(self) -> Iterator[WorkTile]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WorkTable):
            return NotImplemented
        if (self.axes, self.kinds) != (other.axes, other.kinds):
            return len(self) == len(other) and [*self] == [*other]
        return np.array_equal(self.numbers, other.numbers) and np.array_equal(self.which, other.which)

    __hash__ = None  # type: ignore[assignment]

    def _block(self, numbers: Sequence[Any], visits: Visits) -> WorkTile:
        batch, head, place, *spans = numbers
        named = tuple([(axis, spans[2 * i], spans[2 * i + 1]) for i, axis in enumerate(self.axes)])
        return WorkTile(batch, head, named, visits.runs, visits.causal_offset, place)

    @cached_property
    def sharing(self) -> Integers:
        """A number for each block, equal for blocks that share one object as their runs."""
        if self._sharing is not None:
            return self._sharing
        numbers = {id(kind.runs): number for number, kind in enumerate(self.kinds)}
        return np.array([numbers[id(kind.runs)] for kind in self.kinds], np.int64)[self.which]

    @property
    def tile_counts(self) -> Integers:
        """Number of tiles that the loop of each block visits."""
        return np.array([sum(run.count for run in kind.runs) for kind in self.kinds], np.int64)[self.which]

    def at(self, places: Integers) -> WorkTable:
        """Return the blocks in these slots of their cores."""
        numbers = self.numbers.copy()
        numbers[:, PLACE] = places
        return WorkTable(self.axes, numbers, self.kinds, self.which)

    @cached_property
    def _alike(self) -> list[Integers]:
        """The numbers of blocks that differ only in coordinates, grouped; those of the first block come first."""
        return _parts(np.column_stack([self.numbers[:, PLACE], self.numbers[:, SPANS + 1 :: 2], self.which]))

    @cached_property
    def _sized(self) -> list[Integers]:
        """The same numbers, for blocks in any slot."""
        return _parts(np.column_stack([self.numbers[:, SPANS + 1 :: 2], self.which]))

    @property
    def place_count(self) -> int:
        """Slots of a core that blocks use."""
        return int(self.numbers[:, PLACE].max(initial=0)) + 1

    def counted(self) -> Iterator[tuple[WorkTile, int]]:
        """Yield the first of the blocks that differ only in coordinates, and their number."""
        return ((self[int(numbers[0])], len(numbers)) for numbers in self._alike)

    def in_columns(
        self, chosen: Integers | None = None, apart: Integers | None = None
    ) -> Iterator[tuple[Integers, WorkTile]]:
        """Yield the numbers of blocks that differ only in coordinates, and a block whose coordinates are arrays.

        The order of the numbers has no meaning.  ``chosen``: the numbers are indices of this list of blocks; ``apart``:
        blocks with different numbers in this array are separate.
        """
        listed = self._sized
        if chosen is not None and apart is not None:
            kinds = np.empty(len(self), np.int64)
            for kind, numbers in enumerate(listed):
                kinds[numbers] = kind
            listed = _parts(np.column_stack([kinds[chosen], apart]))
        for at in listed:
            numbers = at if chosen is None else chosen[at]
            rows = self.numbers[numbers]
            is_fixed = [False, False, True, *([False, True] * len(self.axes))]
            values = [int(rows[0, n]) if fixed else rows[:, n] for n, fixed in enumerate(is_fixed)]
            yield at, self._block(values, self.kinds[self.which[numbers[0]]])

    def grouped(self, key_of: Callable[[Any], Hashable]) -> Mapping[Hashable, Integers] | None:
        """Return the indices of the blocks of each key; None for keys that may depend on coordinates."""
        if key_of not in (SHAPE, FAMILY):
            return None
        groups: dict[Hashable, list[Integers]] = {}
        for numbers in self._alike:
            groups.setdefault(key_of(self[int(numbers[0])]), []).append(numbers)
        return {key: np.sort(np.concatenate(parts)) for key, parts in groups.items()}

    def twin(self, numbers: Integers, name: str, made: Callable[[str, Sequence[int]], Any]) -> WorkTile:
        """Return the common part of some blocks."""
        rows, which = self.numbers[numbers], self.which[numbers]
        kinds = [self.kinds[n] for n in (which[:1] if (which == which[0]).all() else which).tolist()]

        def common(column: int, called: str) -> Any:
            values = rows[:, column]
            return int(values[0]) if (values == values[0]).all() else made(f"{name}.{called}", values.tolist())

        batch, head = common(BATCH, "batch"), common(HEAD, "head")
        spans = [
            (axis, common(SPANS + 2 * i, f"spans[{i}][1]"), common(SPANS + 2 * i + 1, f"spans[{i}][2]"))
            for i, axis in enumerate(self.axes)
        ]
        runs = twin([kind.runs for kind in kinds], f"{name}.runs", made)
        offset = twin([kind.causal_offset for kind in kinds], f"{name}.causal_offset", made)
        return WorkTile(batch, head, tuple(spans), runs, offset, common(PLACE, "place"))


def _parts(rows: Integers) -> list[Integers]:
    """Return the numbers of equal rows, grouped; those of the first row come first."""
    _, which = distinct(rows)
    order = np.argsort(which, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(which[order])) + 1)
    return sorted((part for part in parts if len(part)), key=lambda part: int(part[0]))


def alike(blocks: Sequence[WorkTile]) -> Iterable[tuple[WorkTile, int]]:
    """Return blocks that represent all blocks, each with the number of those that differ from it only in
    coordinates.
    """
    return blocks.counted() if isinstance(blocks, WorkTable) else ((block, 1) for block in blocks)


def table_of(blocks: Sequence[WorkTile]) -> WorkTable | None:
    """Return blocks as a table; None if they have different axes, or overlap."""
    return blocks if isinstance(blocks, WorkTable) else _table_of(Itself(blocks))


@kept_by_blocks(lambda _table, blocks: len(blocks.thing))
def _table_of(of: Itself) -> WorkTable | None:
    blocks: Sequence[WorkTile] = of.thing
    axes = [axis for axis, _, _ in blocks[0].spans]
    if any([axis for axis, _, _ in b.spans] != axes or b.before or b.leaves_open for b in blocks):
        return None
    numbers = [[b.batch, b.head, b.place, *[n for _, *span in b.spans for n in span]] for b in blocks]
    kinds: dict[Visits, int] = {}
    shared: dict[int, int] = {}
    which = [kinds.setdefault(Visits(b.runs, b.causal_offset), len(kinds)) for b in blocks]
    sharing = [shared.setdefault(id(b.runs), len(shared)) for b in blocks]
    listed = np.array(which, np.int64), np.array(sharing, np.int64)
    return WorkTable(tuple(axes), np.array(numbers, np.int64), list(kinds), *listed)
