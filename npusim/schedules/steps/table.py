"""Step tables: an algorithm on one tile, written once, bound to a core's tiles by its mapping.

A table is a straight line of :class:`Row`.  Names in it stand for tiles; a mapping binds each name
to storage whose format the precision chose.  The same bound rows are computed and costed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from npusim.errors import ProgramError
from npusim.ir.op import PLAIN, Attributes, Opcode, Step

if TYPE_CHECKING:
    from npusim.ir.op import Source

Binding = Mapping[str, "Source"]


@dataclass(frozen=True, slots=True)
class Row:
    """``dst = opcode(srcs)`` on names; ``only`` names a binding without which the row is left out."""

    opcode: Opcode
    dst: str
    srcs: tuple[str, ...]
    attributes: Attributes = PLAIN
    only: str = ""


Table = tuple[Row, ...]


def row(opcode: Opcode, dst: str, *srcs: str, only: str = "") -> Row:
    """Return a row; shorthand for tables."""
    return Row(opcode, dst, srcs, PLAIN, only)


def choose(table: Table, choices: Mapping[Opcode, Attributes]) -> Table:
    """Return the table with a precision's attributes for each opcode; a row's own attributes stay."""
    return tuple(
        replace(r, attributes=choices.get(r.opcode, PLAIN)) if r.attributes == PLAIN else r
        for r in table
    )


def bind(table: Table, tiles: Binding) -> tuple[Step, ...]:
    """Return the table's rows as steps on the bound tiles.

    A row that is left out makes its destination another name for its first source.  A cast between
    a tile and itself is left out: the precision gave both names one format, and the mapping one
    place.  An unbound name raises :class:`ProgramError`.
    """
    steps = []
    for r in table:
        if r.only and r.only not in tiles:
            if r.dst not in r.srcs and r.srcs[0] in tiles:
                tiles = {**tiles, r.dst: tiles[r.srcs[0]]}
            continue
        try:
            dst, srcs = tiles[r.dst], tuple(tiles[s] for s in r.srcs)
        except KeyError as missing:
            raise ProgramError(f"step {r.opcode} {r.dst}: name {missing} is not bound") from None
        if isinstance(dst, float | int):
            raise ProgramError(f"step {r.opcode}: {r.dst} is a constant, not a tile")
        if r.opcode is Opcode.CAST and dst == srcs[0]:
            continue
        steps.append(Step(r.opcode, dst, srcs, r.attributes, r.dst))
    return tuple(steps)
