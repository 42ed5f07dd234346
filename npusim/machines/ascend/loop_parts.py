"""The parts into which a loop's stages are divided, so that matrix and vector units work at the same time.

`Parts` decides

- the points at which the loop is cut, which are before each product that reads results of rows (`cuts`);
- the distance of each part from the first part, in tiles (``lags``), and whether the next block begins before the
  last part ends;
- the number of tiles of a name that exist at a time (`generations`), and the states that outlive their tiles
  (`lasting`).

Reads of a part from another tile are refused.  `slots` assigns slots to the tiles.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from npusim.errors import TilingError

if TYPE_CHECKING:
    from npusim.kernels.form.phase import Instruction, Stage
    from npusim.machines.ascend.product_plan import AscendTiling
    from npusim.machines.frame import Frame


class Parts:
    """The parts of one phase's pipeline; there are none without products or without a loop."""

    def __init__(self, frame: Frame, tiling: AscendTiling) -> None:
        self.frame, self.ahead = frame, tiling.ahead
        self.has_products = any(s.is_product for s in frame.stages)
        self.is_loopless = self.has_products and not frame.loop_axis
        self.cuts = self._cut() if self.has_products and frame.loop_axis else []
        self.lags = [self.ahead * i for i in range(len(self.cuts))]
        #: Number of tiles by which the last part is later than the first.
        self.lag = self.lags[-1] if self.lags else 0
        is_visited = self.lag > 0 and all(b.runs for b in frame.phase.cells)
        #: Whether the next block begins while the last tiles of this block are in progress.
        self.is_continuous = tiling.decided.pipeline == "core" and is_visited and self._holds_for_one_part()

    def _cut(self) -> list[tuple[Stage, ...]]:
        parts: list[list[Stage]] = [[]]
        for s in self.frame.phase.loops[0].stages:
            result = {n for before in parts[-1] for n in before.written if self.frame.places[n] == "up"}
            if s.is_product and result.intersection(s.read):
                parts.append([])
            parts[-1].append(s)
        return [tuple(part) for part in parts]

    def part_of(self, stage: Stage) -> int:
        """Return the part of the pipeline that contains a stage; for a stage that is in no part, return the
        last part.
        """
        return next((i for i, cut in enumerate(self.cuts) if stage in cut), len(self.cuts) - 1)

    def between(self, n: str) -> int:
        """Return the number of parts of the pipeline from a name's writer to its last reader."""
        stages = self.frame.stages
        written = self.part_of(next(s for s in stages if n in s.written))
        return max((self.part_of(s) for s in stages if n in s.read), default=0) - written

    def generations(self, n: str) -> int:
        """Return the number of a name's tiles that exist at a time, from its writer to its last reader."""
        return max(1, self.between(n)) * self.ahead + 1

    def _holds_for_one_part(self) -> bool:
        """Return whether values that stay for a block are read in only one part of the pipeline; otherwise the parts of
        a block end together.
        """
        products = [s for s in self.frame.stages if s.is_product]
        readers = ({self.part_of(s) for s in products if n in s.rows[0].srcs} for n in self.frame.held)
        return all(len(parts) < 2 for parts in readers)

    # ---------------------------------------------------------------- states

    @cached_property
    def of_states(self) -> dict[str, int]:
        """The part of the pipeline that uses each state; the first part for a state that no part uses."""
        states = [n for n, what in self.frame.phase.names.items() if what.start is not None]
        stages = [(i, (*s.read, *s.written)) for i, cut in enumerate(self.cuts) for s in cut]
        return {n: next((i for i, names in stages if self._is_used(n, *names)), 0) for n in states}

    @cached_property
    def lasting(self) -> dict[str, int]:
        """The states that end before their block does, with their numbers of copies, which limit the number of blocks
        in progress.
        """
        early = [n for n, part in self.of_states.items() if self.is_continuous and part < len(self.cuts) - 1]
        finish = self.frame.phase.finish
        return {n: self.lag + 2 for n in early if any(self._is_used(n, *s.read, *s.written) for s in finish)}

    def _is_used(self, state: str, *names: Any) -> bool:
        storage = self.frame.storage
        return storage[state] in {storage.get(n) for n in names}

    # ---------------------------------------------------------------- checks

    def check(self) -> None:
        """Raise `TilingError` if a part reads a value of another tile, or if a unit reads a value that another unit has
        already read.

        This also applies to stages outside the only loop with products.
        """
        phase = self.frame.phase
        if self.has_products and len(phase.loops) > 1:
            first, other = (_named(loop.stages[0].rows[0]) for loop in phase.loops[:2])
            raise TilingError(
                f"{phase.name}: {first} and {other} are not in one loop; on cores with separate matrix and vector "
                "units a kernel may have one loop over tiles, followed by rows; put each loop, and rows before "
                "it, into a separate kernel"
            )
        self._check_states()
        self._check_handed()

    def _check_states(self) -> None:
        """Raise `TilingError` for a state that two parts use: one part would read the value of another tile."""
        frame = self.frame
        for state in self.of_states if self.ahead else ():
            used = [
                (i, r)
                for i, cut in enumerate(self.cuts)
                for s in cut
                for r in s.rows
                if self._is_used(state, r.dst, *r.srcs)
            ]
            if used and used[0][0] != used[-1][0]:
                (_, first), (at, last) = used[0], used[-1]
                raise TilingError(
                    f"{frame.phase.name}: {frame.label(state)} is used by {_named(first)} and by {_named(last)}, "
                    f"but the stages before product {self.cuts[at][0].name} run {self.ahead} tiles ahead of the "
                    "stages after it; use the state only before or only after the product, or depth=0"
                )

    def _check_handed(self) -> None:
        """Raise `TilingError` for results that several stages read, and for tiles that are stored across a product."""
        frame = self.frame
        for n, place in frame.places.items():
            readers = [s for s in frame.stages if n in s.read and n not in s.written]
            parts = {self.part_of(s) for s in readers}
            if place == "carried" and self.has_products and len(frame.axes(n)) > 1 and self.ahead:
                raise TilingError(
                    f"{frame.phase.name}: {frame.label(n)} is a tile that {readers[-1].name} reads after a "
                    "product, but only row vectors stay stored across a product; compute the tile after the "
                    "product, from its result or a state"
                )
            is_read_twice = place in ("up", "down", "carried") and len(parts) > 1 and self.ahead
            is_read_by_both = place == "up" and len({s.is_product for s in readers}) > 1
            is_recurrent = place == "up" and len(readers) > 1 and frame.phase.is_recurrent
            if is_read_by_both or is_recurrent or is_read_twice:
                what = " and ".join(s.name for s in readers)
                raise TilingError(
                    f"{frame.phase.name}: {frame.label(n)} is read by {what}, but a tile that is passed between "
                    "units can be read only once; compute it twice under two names"
                    + ("" if place == "up" else ", or depth=0")
                )


def _named(row: Instruction) -> str:
    return f"{row.opcode.name} {row.dst}" + (f" (line {row.line})" if row.line else "")
