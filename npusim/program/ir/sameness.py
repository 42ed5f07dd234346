"""The only definition of equal programs, for all kinds of core families.

Bodies of loops have a separate definition, within a program: ``Body.key`` (``ir.program``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from npusim.program.ir.walk import Templates

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.program.ir.tile_program import ProgramPhase, TileProgram
    from npusim.program.ir.walk import Template


class ProgramContent:
    """A program that compares equal to other programs for one device if they need the same time and pass the same
    checks.

    Equal programs have the same queues, rings, tensors, blocks and shares of core groups, access the same regions of
    global memory, and run the same operations on the same bytes with the same waits.  The name of a program, its notes,
    constants and roles are not compared.  Of the operations, those of one block of each form and of the first iteration
    of each loop are compared.  Blocks that overlap are compared without the overlap, and by the keys of the blocks that
    they overlap.  The hash needs no operation, so that bodies run only where two hashes are equal.
    """

    def __init__(self, program: TileProgram) -> None:
        self.program, phases = program, program.phases
        shares = tuple([(p.name, len(p.blocks), tuple(map(tuple, p.dealt)), p.serves, p.is_joined) for p in phases])
        memory = tuple(program.used_bytes.items()), tuple(program.occupied.items()), tuple(program.tensors.values())
        kind = program.has_own_rows, program.goes_on, program.is_in_step, program.is_attention
        counts = program.flops, program.consumers, program.clears, *kind
        self.outline = program.queues, program.rings, memory, shares, counts, program.l2, program.pricing
        self._hash = hash(self.outline)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProgramContent) or self.outline != other.outline:
            return False
        phases = zip(self.program.phases, other.program.phases, strict=True)
        return all(_has_same_blocks(*pair) for pair in phases) and self.operations == other.operations

    @cached_property
    def templates(self) -> Templates:
        """The templates of the program, which timing needs too."""
        return Templates(self.program)

    @cached_property
    def operations(self) -> list[Any]:
        """The operations of blocks of each form, phase by phase: operations and waits, with the body of each
        loop once.
        """
        listed, bodies = list[Any](), dict["Template", int]()
        for phase in self.program.phases:
            # the forms of the phase's blocks without overlap
            overlap = Templates(self.program) if phase.succession else None
            for form in (overlap or self.templates).forms(replace(phase, blocks=phase.alone) if overlap else phase):
                listed.append([a.tobytes() for a in (form.numbers, form.counts, form.which)])
                listed += _listed(form.template, bodies)
        return listed


def _has_same_blocks(one: ProgramPhase, other: ProgramPhase) -> bool:
    """Return whether two phases have equal blocks, which overlap in the same way and access the same regions."""
    mine, its = one.alone, other.alone
    overlaps = [phase.succession and phase.succession.meets for phase in (one, other)]
    is_same = (mine is its or tuple(mine) == tuple(its)) and overlaps[0] == overlaps[1]
    return is_same and (one.footprint == other.footprint or [*one.footprint(mine)] == [*other.footprint(its)])


def _listed(template: Template, bodies: dict[Template, int]) -> Iterator[Any]:
    for part in template.parts:
        if isinstance(part, tuple):
            yield [(op.op, op.waits, op.sets) for op in part]
            continue
        is_new, number = part.body not in bodies, bodies.setdefault(part.body, len(bodies))
        yield part.name, part.indices, part.start, number
        if is_new:
            yield from _listed(part.body, bodies)
    yield template.moves
