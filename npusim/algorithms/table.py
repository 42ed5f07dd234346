"""Tables: an algorithm on one tile, written once, bound to a core's tiles by its machine.

A table is a straight line of :class:`Instruction`, matrix products included; a :class:`Stage` is a named run
of them.  Names stand for tiles; a machine binds each to storage whose format the precision chose.
The same bound rows are computed and costed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from npusim.errors import ProgramError
from npusim.ir.op import PLAIN, Attributes, Opcode, Step

if TYPE_CHECKING:
    from npusim.ir.op import Source

Binding = Mapping[str, "Source"]


@dataclass(frozen=True, slots=True)
class Instruction:
    """``dst = opcode(srcs)`` on names; ``only`` is a condition without which the row is left out.

    A condition is a constant of the phase (the row is there if it is bound) or one of a run of tiles
    (``mask``: the tile needs a mask).  ``line``: of the kernel, for messages.
    """

    opcode: Opcode
    dst: str
    srcs: tuple[str, ...]
    attributes: Attributes = PLAIN
    only: str = ""
    line: int = field(default=0, compare=False)


Table = tuple[Instruction, ...]


def row(opcode: Opcode, dst: str, *srcs: str, only: str = "") -> Instruction:
    """Return a row; shorthand for tables."""
    return Instruction(opcode, dst, srcs, PLAIN, only)


def product(dst: str, left: str, right: str, *, accumulate: bool = False) -> Instruction:
    """Return ``dst = left right``, or ``dst += left right``: a row of a product stage."""
    return Instruction(Opcode.MATMUL, dst, (left, right), Attributes(accumulate=accumulate))


@dataclass(frozen=True, eq=False)
class Stage:
    """A named run of rows: one product (a *product stage*) or none (a *rows stage*); equal to itself alone."""

    name: str
    rows: Table

    def __post_init__(self) -> None:
        products = sum(r.opcode is Opcode.MATMUL for r in self.rows)
        if products and len(self.rows) > 1:
            raise ProgramError(
                f"stage {self.name}: a product is a stage of its own; cut it out of these {len(self.rows)} rows"
            )

    @cached_property
    def is_product(self) -> bool:
        """Whether it is a product stage."""
        return bool(self.rows) and self.rows[0].opcode is Opcode.MATMUL

    @cached_property
    def written(self) -> tuple[str, ...]:
        """Names it writes, each once, in order."""
        return tuple(dict.fromkeys(r.dst for r in self.rows))

    @cached_property
    def read(self) -> tuple[str, ...]:
        """Names and constants it reads, each once, in order."""
        return tuple(dict.fromkeys(s for r in self.rows for s in r.srcs))


def choose(table: Table, choices: Mapping[Opcode, Attributes]) -> Table:
    """Return the table with a precision's attributes for each opcode; a row's own attributes stay."""
    return tuple(replace(r, attributes=choices.get(r.opcode, PLAIN)) if r.attributes == PLAIN else r for r in table)


def bind(table: Table, tiles: Binding, stage: str = "", first: int = 1) -> tuple[Step, ...]:
    """Return the table's rows as steps on the bound tiles.

    A row that is left out makes its destination another name for its first source.  A cast between
    a tile and itself is left out: the precision gave both names one format, and the machine one
    place.  An unbound name raises :class:`ProgramError`, which names the ``stage`` and the row, counted from ``first``.
    """
    steps = []
    for at, r in enumerate(table, first):
        if r.only and r.only not in tiles:
            if r.dst not in r.srcs and r.srcs[0] in tiles:
                tiles = {**tiles, r.dst: tiles[r.srcs[0]]}
            continue
        try:
            dst, srcs = tiles[r.dst], tuple(tiles[s] for s in r.srcs)
        except KeyError as missing:
            raise ProgramError(
                f"stage {stage}, row {at}, {r.opcode.name} {r.dst} = {', '.join(r.srcs)}: {missing} is no name that is "
                "written before, and no constant"
            ) from None
        if isinstance(dst, float | int):
            raise ProgramError(f"stage {stage}, row {at}: {r.opcode.name} writes {r.dst}, which is a constant")
        if r.opcode is Opcode.CAST and dst == srcs[0]:
            continue
        steps.append(Step(r.opcode, dst, srcs, r.attributes, r.dst))
    return tuple(steps)
