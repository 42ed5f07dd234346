"""Blocks that overlap: the blocks in progress when a block begins, and the blocks with equal neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

from npusim.identity import Itself
from npusim.kernels.form.phase import TileRun, WorkTile
from npusim.program.ir.content import kept_by_blocks
from npusim.program.ir.tile_program import Succession

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator


class Successive(Sequence[WorkTile]):
    """Blocks, each with references to the blocks in progress when it begins; computed for a core group on first use.

    ``shares``: the indices of each core group's blocks, in order; or how many groups receive blocks in turn.
    """

    def __init__(self, blocks: Sequence[WorkTile], shares: Sequence[Sequence[int]] | int, lag: int) -> None:
        self._alone, self._lag = blocks, lag
        self._linked: list[WorkTile | None] = [None] * len(blocks)
        self._mates: list[Sequence[int]] = [()] * len(blocks)
        listed = [range(n, len(blocks), shares) for n in range(shares)] if isinstance(shares, int) else shares
        for numbers in listed:
            for number in numbers:
                self._mates[number] = numbers

    def __len__(self) -> int:
        return len(self._alone)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return tuple(self[n] for n in range(*at.indices(len(self))))
        if self._linked[at] is None:
            self._link(self._mates[at])
        return self._linked[at]

    def __iter__(self) -> Iterator[WorkTile]:
        return (self[n] for n in range(len(self)))

    def _link(self, numbers: Sequence[int]) -> None:
        before: tuple[WorkTile, ...] = ()
        for left, number in enumerate(numbers, 1 - len(numbers)):
            b = self._alone[number]
            self._linked[number] = WorkTile(
                b.batch, b.head, b.spans, b.runs, b.causal_offset, b.place, before, leaves_open=left < 0
            )
            before = _under_way((*before, b), self._lag)


def overlapping(
    blocks: Sequence[WorkTile], shares: Sequence[Sequence[int]] | int, lag: int
) -> tuple[Successive, dict[str, Any]]:
    """Return blocks that refer to one another, and the program's `Succession`; ``shares``: as in `Successive`.

    ``lag``: number of tiles of a block that are in progress when the next block begins.
    """
    meets, family = _linked(lag)
    said = {"succession": Succession(_by_itself, meets, blocks), "family": family}
    return _successive(Itself(blocks), shares, lag), said


@kept_by_blocks(lambda blocks, *_: len(blocks))
def _successive(blocks: Itself, shares: Sequence[Sequence[int]] | int, lag: int) -> Successive:
    """Return blocks that refer to one another; all tilings with these blocks share one object."""
    return Successive(blocks.thing, shares, lag)


def _under_way(blocks: tuple[WorkTile, ...], lag: int) -> tuple[WorkTile, ...]:
    """Return the last blocks of a core group: those with tiles that are less than ``lag`` back, and one more.

    This index distinguishes a block that has already begun from one that begins.
    """
    left, count = lag, 0
    while count < len(blocks) and left > 0:
        count += 1
        left -= blocks[-count].tile_count
    under_way = blocks[len(blocks) - count :]
    return (_cut_to(under_way[0], under_way[0].tile_count + left + 1), *under_way[1:]) if left < -1 else under_way


def _cut_to(block: WorkTile, count: int) -> WorkTile:
    return WorkTile(block.batch, block.head, block.spans, _last(block.runs, count), block.causal_offset, block.place)


@lru_cache(maxsize=1024)  # the blocks of several heads have the same runs, a few of these at a time
def _last(runs: tuple[TileRun, ...], count: int) -> tuple[TileRun, ...]:
    parts: list[TileRun] = []
    for run in reversed(runs):
        length = min(run.count, count)
        left = run.count - length
        parts += [TileRun(run.col + left * run.step, run.cols, length, run.step, run.only)] if length else []
        count -= length
    return tuple(reversed(parts))


def _by_itself(block: WorkTile) -> WorkTile:
    return replace(block, before=(), leaves_open=False)


def _meets(lag: int, block: WorkTile) -> tuple[Hashable, Hashable]:
    """Return keys of the blocks in progress when a block begins, and when it ends."""
    after = _under_way((*block.before, _by_itself(block)), lag) if block.leaves_open else ()
    return tuple(b.shape for b in block.before), tuple(b.shape for b in after)


def _family(lag: int, block: WorkTile) -> Hashable:
    """Return a key that blocks share if they differ only in the number of visited tiles: at their beginnings and ends
    the same blocks are in progress.
    """
    return block.family, block.leaves_open, *_meets(lag, block)


@cache
def _linked(lag: int) -> tuple[Callable[[WorkTile], tuple[Hashable, Hashable]], Callable[[WorkTile], Hashable]]:
    """Return the key of overlapping blocks: the blocks that are in progress at the same time, and their families."""
    return partial(_meets, lag), partial(_family, lag)
