"""What every attention schedule's steps declare, so that one mapping serves them all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

from npusim.errors import ProgramError
from npusim.ir.op import Opcode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npusim.schedules.steps.table import Table

Accumulate = Literal["fresh", "chained"]


def nothing_per_tile(_index: int, _keys: int) -> Mapping[str, float]:
    """Return no constants: every tile has the same."""
    return {}


PrecisionType = TypeVar("PrecisionType", bound="HasFormats")


class HasFormats(Protocol):
    """A precision: a dataclass that names the format of each intermediate."""

    def formats(self) -> dict[str, str]:
        """Return ``{intermediate: format}``."""


def for_inputs(precision: PrecisionType, fmt: str) -> PrecisionType:
    """Return the same allocation with ``input`` replaced by the inputs' format."""
    chosen: Any = {n: fmt for n, f in precision.formats().items() if f == "input"}
    return cast("PrecisionType", replace(cast("Any", precision), **chosen))


@dataclass(frozen=True, slots=True)
class AttentionSteps:
    """An attention algorithm on one tile of scores, as tables over named tiles.

    ``S_in`` holds the scores as stored, ``P_out`` the operand of the second product, ``T_in`` P V as
    stored, ``O`` the running output, ``out`` the result.  ``score_tiles`` and ``output_tiles`` list
    the names of tile size; every further name is a row vector, one value a query row.

    formats
        ``{name: format}`` of every name.
    state
        ``{name: start value}`` of row vectors that live as long as a block; so does ``O``, from 0.
    carried
        Row vectors that ``softmax`` leaves for the same tile's ``update``, some tiles later.
    overlays
        ``{name: earlier name}`` whose storage it may take over if the formats agree.
    constants
        Values bound by name; ``per_tile(index, keys)`` gives those that differ between tiles.
    accumulate
        ``fresh``: P V of a tile starts at 0, is stored and added to O; ``chained``: the matrix
        unit goes on adding to O itself, and ``update`` only rescales it.
    arithmetic
        Registry name of the matrix arithmetic; empty for the device's own.
    """

    softmax: Table
    update: Table
    finish: Table
    formats: Mapping[str, str]
    state: Mapping[str, float]
    carried: tuple[str, ...]
    overlays: Mapping[str, str]
    score_tiles: tuple[str, ...] = ("S_in", "S", "E", "P", "P_out")
    output_tiles: tuple[str, ...] = ("T_in", "T", "O", "O_normal", "out")
    constants: Mapping[str, float] = field(default_factory=dict)
    per_tile: Callable[[int, int], Mapping[str, float]] = nothing_per_tile
    accumulate: Accumulate = "fresh"
    arithmetic: str = ""

    def storage(self) -> dict[str, str]:
        """Return ``{name: name whose storage it shares}``.

        Names that a cast between equal formats joins are one place, called after the member that
        lives longest: what a ring or the block holds goes before work tiles.
        """
        chosen = {name: name for name in self.formats}
        fixed = {"S_in", "P_out", "T_in", "O", "out", *self.state, *self.carried}
        for row in (*self.softmax, *self.update, *self.finish):
            if row.opcode is not Opcode.CAST or self.formats[row.dst] != self.formats[row.srcs[0]]:
                continue
            dst, src = chosen[row.dst], chosen[row.srcs[0]]
            if dst in fixed and src in fixed:
                raise ProgramError(f"cast {row.dst} <- {row.srcs[0]} joins two fixed places")
            keep, drop = (dst, src) if dst in fixed else (src, dst)
            chosen = {n: keep if c == drop else c for n, c in chosen.items()}
        for name, earlier in self.overlays.items():
            if chosen[name] == name and self.formats[name] == self.formats[earlier]:
                chosen = {n: chosen[earlier] if c == name else c for n, c in chosen.items()}
        return chosen

    def row_vectors(self) -> tuple[str, ...]:
        """Return the names that hold one value a query row."""
        return tuple(n for n in self.formats if n not in (*self.score_tiles, *self.output_tiles))
