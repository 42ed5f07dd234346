"""Random programs, some with a fault: what ``check`` passes computes the same in every legal order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from ir.oracle import Changed, RandomOrder, find_race, group_operations, program_order, values_in, with_tiles
from ir.toy import UB, RandomProgram, flatten
from npusim.config.load import apply_overrides, load_device
from npusim.errors import ProgramError, RaceError
from npusim.program.ir.check import check
from npusim.program.ir.op import Opcode, Step, TileOp
from npusim.program.ir.tile import GlobalTensor, RingTile
from npusim.program.timing import METHODS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from npusim.program.ir.tile_program import Item, ProgramPhase, TileProgram
    from npusim.program.ir.walk import ResolvedOp

GROUPS = 3
OUT = GlobalTensor("out", 1, 1, 64, 64, "float32", "output")
#: Which rows a block stores: its own; those of its neighbour too; the same as another's.
OWN, OVERLAPPING, SHARED = (lambda n: n * 4), (lambda n: n * 3), (lambda n: n // 2 * 4)


def drawn(seed: int) -> tuple[RandomProgram, TileProgram]:
    """Return a legal program: rings through which operations pass data, in loops, blocks and phases."""
    random = RandomProgram(Random(seed), touching=True)
    program = random.program()
    return random, with_stores(random, program, OWN)


def with_stores(random: RandomProgram, program: TileProgram, row_of: Callable[[Any], Any]) -> TileProgram:
    """Return the program, each block of which ends in a store of 4 rows to a tensor."""
    queue = random.toy.queues[0].name

    def stored(phase: ProgramPhase) -> ProgramPhase:
        def body(block: Any) -> Iterator[Item]:
            yield from phase.body(block)
            target = OUT.tile(0, 0, row_of(block[1]), 4)
            source = random.toy.scratch[queue].part(0, 4)
            yield random.toy.op("store", queue, steps=[Step(Opcode.COPY, target, (source,))])

        return replace(phase, body=body)

    return replace(program, phases=tuple(map(stored, program.phases)), tensors={"out": OUT})


# ---------------------------------------------------------------- faults


def operations_of(program: TileProgram) -> list[TileOp]:
    return [o for p in program.phases for b in p.blocks for o in flatten(p.body(b))]


def drop_wait(random: RandomProgram, program: TileProgram, rng: Random) -> TileProgram:
    """Leave out the waits of one operation."""
    waiting = [o for o in operations_of(program) if any(t.first for t in o.ring_tiles())]
    if not waiting:
        return program
    label = rng.choice(waiting).label

    def without(op: TileOp) -> TileOp:
        return with_tiles(op, lambda t: t.held(first=False, last=t.last)) if op.label == label else op

    return Changed(without).program(program)


def drop_free_side(random: RandomProgram, program: TileProgram, rng: Random) -> TileProgram:
    """Leave out all waits of one ring for a free slot."""
    if not program.rings:
        return program
    name = rng.choice(program.rings).name

    def eager(tile: RingTile) -> RingTile:
        is_one = tile.is_producer and tile.ring.name == name
        return tile.held(first=False, last=tile.last) if is_one else tile

    return Changed(lambda op: with_tiles(op, eager)).program(program)


def share_tile(random: RandomProgram, program: TileProgram, rng: Random) -> TileProgram:
    """Let operations of two queues write one tile."""
    if len(program.queues) < 2:
        return program
    shared = random.toy.allocator.tile(UB, "shared", 1, 64, "float32")
    chosen = {q.name for q in rng.sample(program.queues, 2)}

    def writes(op: TileOp) -> TileOp:
        if op.queue not in chosen or not op.steps:
            return op
        source = random.toy.scratch[op.queue].part(0, 1)
        return replace(op, steps=(*op.steps, Step(Opcode.COPY, shared, (source,))))

    return Changed(writes).program(program)


def store_overlapping(random: RandomProgram, program: TileProgram, rng: Random) -> TileProgram:
    """Let blocks store to rows of one another."""
    return with_stores(random, program, rng.choice([OVERLAPPING, SHARED]))


FAULTS = (drop_wait, drop_free_side, share_tile, store_overlapping)


# ---------------------------------------------------------------- the property


def refusal(program: TileProgram) -> str:
    try:
        check(program)
    except (RaceError, ProgramError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def changes_values(program: TileProgram, rng: Random, orders: int) -> bool:
    phases, cells = group_operations(program, GROUPS), {}
    expected = values_in(phases, program_order, cells)
    return any(values_in(phases, RandomOrder(program, GROUPS, rng), cells) != expected for _ in range(orders))


def examine(seed: int, orders: int, counts: Counter[str], enough: int) -> None:
    """Hold the check against values in random orders, for a program and each of its faults.

    Whether a refused program does compute something else is told for ``enough`` of each fault.
    """
    rng = Random(seed)
    random, program = drawn(seed)
    variants = [("none", program)] + [(f.__name__, f(random, program, rng)) for f in FAULTS]
    for name, variant in variants:
        refused = refusal(variant)
        assert not refused or name != "none", (seed, refused)
        if refused.startswith("ProgramError"):
            counts["out of order"] += 1
            continue
        if refused and counts[f"{name}: changed"] >= enough:
            continue
        changed = changes_values(variant, rng, orders)
        counts[f"{name}: changed"] += changed
        counts[f"{name}: changed and refused"] += changed and bool(refused)
        counts[f"{name}: passed"] += not refused
        assert refused or not changed, (seed, name)
        assert refused or find_race(variant, GROUPS) is None, (seed, name)


def assert_told_something(counts: Counter[str]) -> None:
    assert counts["none: passed"]
    for fault in FAULTS:
        name = fault.__name__
        assert counts[f"{name}: changed"], name
        assert counts[f"{name}: changed"] == counts[f"{name}: changed and refused"], name


def test_what_the_check_passes_computes_the_same_in_random_legal_orders() -> None:
    counts: Counter[str] = Counter()
    for seed in range(15):
        examine(seed, 3, counts, enough=2)
    assert_told_something(counts)


@pytest.mark.exhaustive
def test_ten_thousand_programs_in_a_hundred_orders_each(record_property: Callable[[str, object], None]) -> None:
    """2,000 drawn programs, each as it is and with each of four faults: half an hour."""
    counts: Counter[str] = Counter()
    for seed in range(2_000):
        examine(seed, 100, counts, enough=500)
    record_property("counts", dict(counts))
    assert_told_something(counts)


@pytest.mark.parametrize("count", [30, pytest.param(60, marks=pytest.mark.exhaustive)])
def test_what_the_check_passes_computes_the_same_in_the_order_of_time(count: int) -> None:
    device = apply_overrides(load_device("ascend_910b2"), {"group_count": "1"})
    moved = 0
    for seed in range(count):
        program = drawn(seed)[1]
        if refusal(program):
            continue
        spans = sorted(METHODS["des"](program, device, trace_groups=(0,)).spans, key=lambda s: (s.start, s.end))
        left = iter(spans)

        def by_time(phase: Sequence[Sequence[ResolvedOp]], left: Any = left) -> list[tuple[int, int, ResolvedOp]]:
            """Return a phase's operations by when they started: a queue's n-th span is its n-th operation."""
            (listed,) = phase
            mine = [next(left) for _ in listed]
            starts: dict[str, list[tuple[int, int]]] = {}
            for span in sorted(mine, key=lambda s: (s.start, s.end)):
                starts.setdefault(span.queue, []).append((span.start, span.end))
            queues = {q: iter(s) for q, s in starts.items()}
            timed = [(next(queues[o.op.queue]), place, o) for place, o in enumerate(listed)]
            return [(0, place, o) for _, place, o in sorted(timed, key=lambda t: t[:2])]

        phases = group_operations(program, 1)
        assert values_in(phases, by_time) == values_in(phases, program_order), seed
        order = [place for _, place, _ in by_time(phases[0], iter(spans))]
        moved += order != sorted(order)
    assert moved > count // 6, "time kept program order: nothing was shown"
