"""Checks that a tile program is safe to execute in any order that its flags allow, for any length.

* bodies depend only on their shape: each is built once, with opaque indices (``ir.structure``); * program order is
legal: every wait is satisfied by an operation listed before it, and no slot is
  filled again before it was read (``ir.automaton``);
* flags: ids of each ordered pair of pipes, counters between cores, and their maximum;
* races: two operations on the same bytes are ordered by queues and flags (``ir.races``), and blocks
  of a phase do not access each other's regions of global memory (``ir.regions``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from npusim.errors import FlagError, NpusimError, ProgramError, RaceError
from npusim.program.ir.automaton import Automaton
from npusim.program.ir.content import uncollected
from npusim.program.ir.families import take_by_shape
from npusim.program.ir.opaque import OpaqueError
from npusim.program.ir.races import PlaceTable, check_races, ring_bytes
from npusim.program.ir.regions import check_regions
from npusim.program.ir.structure import Builder, condensed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npusim.config.device import FlagsSpec
    from npusim.program.ir.automaton import State
    from npusim.program.ir.buffers import Ring
    from npusim.program.ir.tile_program import ProgramPhase, TileProgram


@uncollected()
def check(program: TileProgram, flags: FlagsSpec | None = None) -> bool:
    """Return whether the blocks of each family differ only in what the family allows; raise the first fault.

    A fault is a `FlagError`, a `ProgramError` or a `RaceError`. If blocks differ in more than that, the check marks the
    phases of the program as without families (`take_all_by_shape`).

    A program that passes computes the same values in every order that queues and flags allow, for any number of
    iterations and any sequence of its block shapes on a core group (``npusim/README.md``).
    """
    try:
        # This check is fast but coarse. A fault may be an artefact of this check, and users need the exact bytes:
        # therefore the exact check follows it.
        _check(program, flags, Builder(program, condensed))
    except NpusimError:
        _check(program, flags, Builder(program))
        take_all_by_shape(program)
        return False
    return True


def take_all_by_shape(program: TileProgram) -> None:
    """Mark the phases of a program as without families."""
    for phase in program.phases:
        take_by_shape(phase)


def _check(program: TileProgram, flags: FlagsSpec | None, builder: Builder) -> None:
    states: tuple[State, ...] = ((0,) * len(builder.walker.endpoints),)
    held: list[Ring] = []
    for phase in program.phases:
        _check_dealt(program, phase)
        shapes = builder.shapes(phase)
        try:
            contested, ranges = check_regions(program, phase, shapes)
        except OpaqueError as error:
            if not any(error.symbols & s.coordinates.keys() for s in shapes):
                raise
            # A region that is not a sum of block coordinates is a number if each block is a separate shape.
            shapes = builder.shapes(phase, one_by_one=True)
            contested, ranges = check_regions(program, phase, shapes)
        if contested and phase.succession:  # blocks that overlap are distinguished by their positions
            shapes = builder.shapes(phase, one_by_one=True)
            contested, ranges = check_regions(program, phase, shapes)
        is_joined = builder.condense is condensed and not contested
        tables = (partial(PlaceTable, is_joined=True),) if is_joined else ()
        automaton = Automaton(program, builder.walker.endpoints, shapes, states, contested, *tables)
        automaton.ranges.update(ranges)
        outcome = automaton.outcome()
        rings = [program.rings[number] for number in outcome.rings]
        if flags:
            check_flags(rings, flags)
        _check_held(program, phase.name, held, rings)
        check_races(automaton)
        states = outcome.ends
        held += [program.rings[number] for number in outcome.held]


def _check_dealt(program: TileProgram, phase: ProgramPhase) -> None:
    """Raise `ProgramError` unless each block is assigned once: the proof distinguishes blocks, but not two executions
    of one block.
    """
    times, count = Counter(chain.from_iterable(phase.dealt)), len(phase.blocks)
    for number in {*range(count), *times} if phase.dealt else ():
        if times[number] != (0 <= number < count):
            raise ProgramError(
                f"{program.name}: phase {phase.name}: block number {number} is distributed {times[number]} times; "
                f"each of 0 to {count - 1} must be distributed once, and no other"
            )


def _check_held(program: TileProgram, phase: str, held: Iterable[Ring], rings: Iterable[Ring]) -> None:
    """Raise `RaceError` if a phase uses bytes of slots that an earlier phase filled and nothing has read."""
    for ring in rings:
        for other in held:
            if other is not ring and other.space == ring.space and ring_bytes(other).overlaps(ring_bytes(ring)):
                raise RaceError(
                    f"{program.name}: phase {phase} places ring {ring.name} over slots of ring {other.name} that "
                    "are not read yet; a phase must read every slot that it fills before another phase uses its "
                    "memory"
                )


def check_flags(rings: Iterable[Ring], flags: FlagsSpec) -> None:
    """Raise :class:`FlagError` if the rings of one phase need more flags than the device has.

    A binary ring uses one id per slot from each producer to each consumer, and the same number in the other direction;
    a counter ring uses one id in each direction, and its count is at most its depth. A ring with a scoreboard uses
    none.
    """
    event_ids, counter_ids = flags.usable_event_ids_count.value, flags.cross_core_ids_count.value
    pairs: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    counters: list[str] = []
    for ring in sorted(rings, key=lambda r: r.name):
        ends = [(p, c) for p in ring.producers for c in ring.consumers if p != c]
        if ring.flag == "scoreboard":
            continue
        if ring.flag == "counter":
            counters += [f"{ring.name} ready", f"{ring.name} free"]
            if ring.depth > flags.cross_core_counter_max_count.value:
                raise FlagError(
                    f"ring {ring.name}: {ring.depth} slots, but a cross-core flag counts at most to "
                    f"{flags.cross_core_counter_max_count.value}; use fewer slots (a smaller depth)"
                )
            continue
        for producer, consumer in ends:
            pairs[producer, consumer].append((f"{ring.name} ready", ring.depth))
            pairs[consumer, producer].append((f"{ring.name} free", ring.depth))
    for (source, target), uses in pairs.items():
        needed = sum(n for _, n in uses)
        if needed > event_ids:
            listed = ", ".join(f"{name} {n}" for name, n in uses)
            advice = "load fewer operands in a kernel: each has one slot"
            if len(uses) <= event_ids:
                advice = "fewer slots: buffers=1, slots=1, slots_l1a, slots_l1b or a smaller depth (--fields lists the"
                advice += " schedule's), or fewer operands"
            raise FlagError(
                f"flags {source} -> {target}: {needed} ids needed ({listed}), {event_ids} available; {advice}"
            )
    if len(counters) > counter_ids:
        raise FlagError(
            f"cross-core flags: {len(counters)} ids needed ({', '.join(counters)}), {counter_ids} available"
        )
