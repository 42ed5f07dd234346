"""Mutants of every schedule on every family of device: one that the check passes has no race, unrolled."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from algorithms.test_states import built, of_chunks, summed, transposed

from ir.oracle import Changed, find_race, unrolled
from npusim.config.load import apply_overrides, load_device
from npusim.config.problem import CopyProblem, GemmProblem, KernelProblem, OperatorProblem, Problem, RowsProblem
from npusim.config.tiling import build_tiling
from npusim.errors import NpusimError, RaceError
from npusim.library import SCHEDULES
from npusim.program.ir.check import check
from npusim.program.ir.op import TileOp
from npusim.program.ir.tile import GlobalTile, RingTile, Tile
from npusim.program.ir.tile_program import Loop, TileProgram
from tests.turns import every

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from npusim.program.ir.buffers import Ring
    from npusim.program.ir.tile_program import Item

DEVICES = ("ascend_910b2", "ascend_950", "h200", "a10", "t4", "v100", "xeon_avx512")
#: Few: so that each runs several blocks, of several shapes.
GROUPS = 2
PROBLEMS: dict[type, Any] = {
    Problem: Problem(heads=2, kv_heads=1, seq_q=40, seq_kv=70, head_dim=32, causal=True),
    GemmProblem: GemmProblem(m=150, n=70, k=100),
    CopyProblem: CopyProblem(bytes=512 * 7),
    RowsProblem: RowsProblem(what="norm", rows=40, cols=64),
    OperatorProblem: OperatorProblem(what="times", rows=40, cols=64),
    KernelProblem: KernelProblem(heads=2, tokens=100, key=32, value=48),
}
SMALL = {
    "block_q": 32,
    "block_kv": 32,
    "vector_rows": 16,
    "splits": 2,
    "block": 32,
    "block_m": 64,
    "block_n": 64,
    "block_k": 32,
    "block_rows": 16,
    "block_bytes": 512,
    "chunk": 32,
    "block_value": 32,
    "tile_q": 32,
    "tile_kv": 32,
}
#: Further programs of a schedule: sizes and fields.
MORE: dict[str, tuple[tuple[dict[str, int], dict[str, object]], ...]] = {
    "flash_backward": (
        ({"causal": 1}, {"block_q": 128}),
        ({"causal": 1}, {"method": "added"}),
        ({"causal": 1, "kv_heads": 1}, {"method": "deterministic"}),
    ),
    "gated_delta": (({}, {"kernel": "pto_chunks"}),),
}
#: Where the lanes of its warps need more rows, or shared memory has room for fewer blocks.
OWN = {"h200": {"block_q": 64}, "v100": {"block_q": 256, "warps": 8, "residents": 2, "tile_kv": 128}}


@cache
def programs() -> dict[str, TileProgram]:
    """Return each schedule of attention, products, copies and rows on each device that runs it."""
    found = {}
    for hw in DEVICES:
        device = apply_overrides(load_device(hw), {"group_count": str(GROUPS)})
        for (name, family), schedule in SCHEDULES.items():
            if family != device.family or schedule.unsupported(device):
                continue
            problem = PROBLEMS[schedule.problem]
            if schedule.inputs(device):
                problem = problem.model_copy(update={"dtype": schedule.inputs(device)})
            known = schedule.tiling.model_fields
            fields = {k: v for k, v in (SMALL | OWN.get(hw, {})).items() if k in known}
            for sizes, more in (({}, {}), *MORE.get(name, ())):
                called = " ".join((name, *sizes, *map(str, more.values()), "on", hw))
                try:
                    tiling = build_tiling(schedule.tiling, fields | more)
                    of = type(problem)(**{**problem.model_dump(exclude_defaults=True), **sizes}) if sizes else problem
                    found[called] = schedule.program(of, tiling, device, schedule.precision(None))
                except NpusimError:
                    continue  # not on this device
        for function, tokens in (*product((summed,), (96, 80)), (transposed, 64)):
            with suppress(NpusimError):
                found[f"states {function.__name__} {tokens} on {hw}"] = built(of_chunks(function, tokens), device)
    return found


# ---------------------------------------------------------------- one operand, wherever its operation stands

Operand = Any
Change = Any


def operands(op: TileOp) -> Iterator[tuple[tuple[int, int], Operand]]:
    """Yield what an operation passes on or touches, each with its place."""
    for number, tile in enumerate(op.handshake):
        yield (-1, number), tile
    for at, step in enumerate(op.steps):
        yield from (((at, n), o) for n, o in enumerate((step.dst, *step.srcs)))


def with_operand(op: TileOp, place: tuple[int, int], new: Operand) -> TileOp:
    """Return an operation with another operand at one place."""
    at, number = place
    if at < 0:
        listed = list(op.handshake)
        listed[number] = new
        return replace(op, handshake=tuple(listed))
    steps = list(op.steps)
    changed = [steps[at].dst, *steps[at].srcs]
    changed[number] = new
    steps[at] = replace(steps[at], dst=changed[0], srcs=tuple(changed[1:]))
    return replace(op, steps=tuple(steps))


@cache
def operations(key: str) -> list[TileOp]:
    """Return one operation of each label, queue and number of operands of a program."""
    program, found = programs()[key], dict[object, TileOp]()
    for phase in program.phases:
        for block in phase.blocks:
            for _, op in unrolled(phase.body(block)):
                found.setdefault((op.label, op.queue, len(list(operands(op)))), op)
    return list(found.values())


def one_operand(is_meant: Callable[[Operand], bool], change: Callable[[Random, Operand], Operand]) -> Change:
    """Return a mutation that changes one operand of operations of one label on one queue."""

    def mutate(rng: Random, key: str) -> TileProgram | None:
        places = [(o.label, o.queue, place) for o in operations(key) for place, x in operands(o) if is_meant(x)]
        if not places:
            return None
        label, queue, chosen = rng.choice(places)
        seed = rng.random()

        def changed(op: TileOp) -> TileOp:
            found = dict(operands(op)).get(chosen)
            if (op.label, op.queue) != (label, queue) or not is_meant(found):
                return op
            return with_operand(op, chosen, change(Random(seed), found))

        return Changed(changed).program(programs()[key])

    return mutate


def is_ring(**wanted: bool) -> Callable[[Operand], bool]:
    return lambda x: isinstance(x, RingTile) and all(getattr(x, k) == v for k, v in wanted.items())


def shifted(rng: Random, tile: Operand) -> Operand:
    """Return a tile, or a cut of a tensor, a little further on or before, or larger."""
    far = rng.choice([-2, -1, 1, 2, 16, -16])
    if isinstance(tile, GlobalTile):
        axis = rng.choice(["row", "col", "rows", "head"])
        return replace(tile, **{axis: getattr(tile, axis) + far})
    how = rng.choice(["offset_bytes", "rows", "stride"])
    return replace(tile, **{how: getattr(tile, how) + far * (32 if how == "offset_bytes" else 1)})


def seen_otherwise(rng: Random, cut: GlobalTile) -> GlobalTile:
    """Return the same elements under another role, or of the tensor with all heads below one another."""
    t = cut.tensor
    if t.heads == 1 or rng.random() < 0.5:
        return replace(cut, tensor=replace(t, role="input" if t.role != "input" else "output"))
    flat = replace(t, heads=1, rows=t.heads * t.rows)
    return replace(cut, tensor=flat, head=0, row=cut.head * t.rows + cut.row)


# ---------------------------------------------------------------- rings, order, queues, blocks


def other_ring(rng: Random, key: str) -> TileProgram | None:
    """Change a ring: a slot less, another period, or its place that of another one."""
    program = programs()[key]
    if not program.rings:
        return None
    ring = rng.choice(program.rings)
    space = [r for r in program.rings if r.space == ring.space and r is not ring]
    changes: list[dict[str, int]] = [{"offset_bytes": r.offset_bytes + rng.choice([0, 32])} for r in space]
    changes += [{"depth": ring.depth - 1, "period": 1}] * (ring.depth > 1)
    changes += [{"period": ring.period + 1}] * (ring.period < ring.depth)
    if not changes:
        return None
    new = replace(ring, **rng.choice(changes))  # type: ignore[arg-type]

    def moved(op: TileOp) -> TileOp:
        for place, x in operands(op):
            if isinstance(x, RingTile) and x.ring is ring:
                op = with_operand(op, place, replace(x, ring=new))
        return op

    rings: tuple[Ring, ...] = tuple(new if r is ring else r for r in program.rings)
    return replace(Changed(moved).program(program), rings=rings)


def swapped(rng: Random, key: str) -> TileProgram | None:
    """Let operations of one label go before those they follow."""
    label = rng.choice(operations(key)).label

    def order(items: Iterable[Item]) -> Iterator[Item]:
        held = None
        for item in items:
            if isinstance(item, TileOp) and item.label == label and held is not None:
                yield item
                continue
            if held is not None:
                yield held
            held = item
        if held is not None:
            yield held

    return Changed(lambda op: op, order).program(programs()[key])


def other_queue(rng: Random, key: str) -> TileProgram | None:
    """Let operations that work at no ring run on another queue."""
    free = [o for o in operations(key) if not o.ring_tiles()]
    if not free:
        return None
    chosen, program = rng.choice(free), programs()[key]
    queue = rng.choice(program.queues)

    def moved(op: TileOp) -> TileOp:
        is_one = (op.label, op.queue) == (chosen.label, chosen.queue) and not op.ring_tiles()
        return replace(op, queue=queue.name, engine=queue.engine) if is_one else op

    return Changed(moved).program(program)


def dealt_twice(rng: Random, key: str) -> TileProgram | None:
    """Deal a block to two core groups, or list it twice."""
    program = programs()[key]
    at = rng.randrange(len(program.phases))
    phase = program.phases[at]
    if phase.dealt and rng.random() < 0.5:
        dealt = (*phase.dealt[:-1], (*phase.dealt[-1], phase.dealt[0][0]))
        phase = replace(phase, dealt=dealt)
    else:
        number = len(phase.blocks)
        dealt = (*phase.dealt[:-1], (*phase.dealt[-1], number)) if phase.dealt else ()
        phase = replace(phase, blocks=(*phase.blocks, phase.blocks[0]), dealt=dealt)
    phases = (*program.phases[:at], phase, *program.phases[at + 1 :])
    return replace(program, phases=phases)


MUTATIONS: dict[str, Change] = {
    "lost wait": one_operand(is_ring(first=True), lambda _r, t: t.held(first=False, last=t.last)),
    "late wait": one_operand(is_ring(first=False), lambda _r, t: t.held(first=True, last=t.last)),
    "early hand-over": one_operand(is_ring(last=False), lambda _r, t: t.held(first=t.first, last=True)),
    "lost hand-over": one_operand(is_ring(last=True), lambda _r, t: t.held(first=t.first, last=False)),
    "shifted tile": one_operand(lambda x: isinstance(x, (Tile, RingTile)), shifted),
    "shifted cut": one_operand(lambda x: isinstance(x, GlobalTile), shifted),
    "seen otherwise": one_operand(lambda x: isinstance(x, GlobalTile), seen_otherwise),
    "other ring": other_ring,
    "swapped": swapped,
    "other queue": other_queue,
    "dealt twice": dealt_twice,
}


def named_block(items: Iterable[Item]) -> Iterator[Item]:
    """Call every loop what the graph of the check calls the end of a block."""
    for item in items:
        yield Loop("block", item.indices, item.body) if isinstance(item, Loop) else item


def examine(count: int, seed: int, of: str = "") -> Counter[str]:
    """Draw mutants, every program in turn; what passes has no race on ``GROUPS`` core groups, unrolled."""
    rng, counts = Random(seed), Counter[str]()
    keys = [key for key in programs() if key.startswith(of)]
    number = 0
    while counts["drawn"] < count:
        number += 1
        key, kind = keys[number % len(keys)], rng.choice(list(MUTATIONS))
        mutant = MUTATIONS[kind](rng, key)
        if mutant is None:
            continue
        if rng.random() < 0.2:
            mutant = Changed(lambda op: op, named_block).program(mutant)
        counts["drawn"] += 1
        try:
            check(mutant)
        except NpusimError as error:
            counts[f"{kind}: {type(error).__name__}"] += 1
            counts["refused"] += 1
            if isinstance(error, RaceError):
                counts["refused and met"] += find_race(mutant, GROUPS) is not None
            continue
        counts[f"{kind}: passed"] += 1
        counts["passed"] += 1
        assert find_race(mutant, GROUPS) is None, (key, kind, number)
    return counts


@pytest.mark.parametrize("turn", every(5, range(5)))
def test_the_programs_as_they_are_pass_and_have_no_race(turn: int) -> None:
    """Of each schedule's programs one of five by default, and the first one always."""
    families = {key.rpartition(" ")[2] for key in programs()}
    assert families == set(DEVICES)
    assert len(programs()) > 90
    of_schedule: dict[str, list[str]] = {}
    for key in programs():
        of_schedule.setdefault(key.split()[0], []).append(key)
    for key in (key for keys in of_schedule.values() for key in keys[turn::5]):
        check(programs()[key])
        assert find_race(programs()[key], GROUPS) is None, key


def test_mutants_that_pass_have_no_race_in_a_full_unrolling(record_property: Callable[[str, object], None]) -> None:
    counts = examine(24, seed=1)
    record_property("counts", dict(counts))
    assert counts["passed"] and counts["refused and met"]


def test_mutants_of_two_loops_and_of_sums_that_stay(record_property: Callable[[str, object], None]) -> None:
    assert len([key for key in programs() if key.startswith("flash_backward")]) >= 17
    counts = examine(24, seed=3, of="flash_backward")
    record_property("counts", dict(counts))
    assert counts["passed"] and counts["refused and met"]


@pytest.mark.parametrize("of, least, count", [("states", 10, 25), ("gated_delta", 7, 12), ("ssd", 6, 12)])
def test_mutants_of_states_that_are_factors(
    of: str, least: int, count: int, record_property: Callable[[str, object], None]
) -> None:
    assert len([key for key in programs() if key.startswith(of)]) >= least
    counts = examine(count, seed=4, of=of)
    record_property("counts", dict(counts))
    assert counts["passed"] and counts["refused and met"]


@pytest.mark.exhaustive
def test_a_thousand_mutants(record_property: Callable[[str, object], None]) -> None:
    counts = examine(1_000, seed=2)
    record_property("counts", dict(counts))
    assert counts["passed"] > 100 and counts["refused and met"] > 100
