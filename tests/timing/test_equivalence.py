"""``des`` and ``replay`` agree to the tick where no link is shared."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from ir.toy import RANDOMS, RandomProgram, Toy, fill, front, phase

from npusim.program.ir.walk import Walker, required_count, walk
from npusim.program.timing import des
from npusim.program.timing.stream import Streams
from timing import replay
from timing.programs import ENDLESS_LINKS, booked, device_with, random_device, timeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.timing.timing_result import TimingResult


def assert_equal(program: TileProgram, device: DeviceSpec) -> TimingResult:
    groups = range(device.group_count.value)
    a = des.simulate(program, device, trace_groups=groups)
    b = replay.simulate(program, device, trace_groups=groups)
    assert booked(a) == booked(b)
    assert timeline(a) == timeline(b)
    assert (a.cycles, a.latency_s, a.operations, a.link_bytes) == (b.cycles, b.latency_s, b.operations, b.link_bytes)
    assert a.term_cycles == pytest.approx(b.term_cycles)
    return a


@settings(max_examples=80)
@given(RANDOMS)
def test_des_equals_replay_to_the_tick_on_random_programs(rng: Any) -> None:
    program = RandomProgram(rng).program()
    result = assert_equal(program, random_device(rng))
    for use in chain(*result.queues) if len(program.phases) == 1 else ():
        ends = [s.end for s in result.spans if (s.group, s.queue) == (use.group, use.queue)]
        assert use.busy_cycles + sum(use.stalls.values()) == max(ends, default=0)


#: Whole runs of flash whose transfers all have their links to themselves.
FLASH: dict[str, dict[str, Any]] = {
    "causal, two heads": {"heads": 2, "seq_q": 1024, "seq_kv": 1024, "head_dim": 128, "causal": True},
    "ragged, one block a core": {"heads": 5, "seq_q": 197, "seq_kv": 197, "head_dim": 64},
    "decode with shared keys": {"heads": 8, "kv_heads": 1, "seq_q": 1, "seq_kv": 1300, "head_dim": 128},
    "no lead": {
        "tiling": {"depth": 0, "block_kv": 128, "block_q": 96},
        "heads": 1,
        "seq_q": 512,
        "seq_kv": 512,
        "head_dim": 192,
    },
    "deep lead": {"tiling": {"depth": 7, "block_kv": 64}, "heads": 3, "seq_q": 300, "seq_kv": 900, "head_dim": 80},
}


@pytest.mark.parametrize("case", FLASH)
@pytest.mark.parametrize("queue_depth", [1, 2, 32])
def test_des_equals_replay_to_the_tick_on_flash_without_contention(
    case: str, queue_depth: int, build_flash: Callable[..., TileProgram]
) -> None:
    pipes = {"aic": ("MTE2", "MTE1", "CUBE", "FIXP"), "aiv": ("MTE2", "VECTOR", "MTE3")}
    depths = {
        f"cores__{core}__engines__{engine}__queue_depth_count": str(queue_depth)
        for core, engines in pipes.items()
        for engine in engines
    }
    assert_equal(build_flash(**FLASH[case]), device_with(**ENDLESS_LINKS, **depths))


def test_contention_makes_des_later_than_replay(build_flash: Callable[..., TileProgram], device: DeviceSpec) -> None:
    program = build_flash(heads=24, seq_q=128, seq_kv=2048, head_dim=128)
    assert des.simulate(program, device).cycles > replay.simulate(program, device).cycles


def test_a_phase_whose_blocks_do_nothing_takes_its_dispatch_in_both() -> None:
    toy = Toy()
    q = toy.queue("q")
    nothing = phase("nothing", [0], lambda _b: [], lambda b: b)
    work = phase("work", [0], lambda _b: [toy.op("x", q, repeats=1)], lambda b: b)
    assert_equal(toy.program((), phases=[nothing, work]), device_with(group_count="1"))


def test_rings_of_one_name_keep_their_own_depth() -> None:
    """A consumer eight slots behind still finds when its slot was filled (``P`` in L1 and in UB).

    All eight are filled before the flag of the first crosses to the other core 500 cycles later.
    """
    toy = Toy()
    p, c, other, far = (toy.queue(n) for n in ("p", "c", "other", "far"))
    deep, shallow = toy.ring("P", [p], [c], 8, flag="counter"), toy.ring("P", [other], [far], 1)
    late = toy.ring("late", [other], [c], 1)
    items = [toy.op("slow", other, fill(late), repeats=60)]
    items += [toy.op("w", p, fill(deep), repeats=1) for _ in range(8)]
    items += [toy.op("wait", c, front(late), repeats=1)]
    items += [toy.op("r", c, front(deep), repeats=1) for _ in range(8)]
    items += [toy.op("x", other, fill(shallow)), toy.op("y", far, front(shallow))]
    assert_equal(toy.program(items), device_with(flags__cross_core_issue_cycles="0"))


# ---------------------------------------------------------------- streams


@settings(max_examples=40)
@given(RANDOMS)
def test_streams_issue_the_operations_of_the_concrete_walk_with_its_waits_whoever_issues_them(rng: Any) -> None:
    program, device = RandomProgram(rng).program(), random_device(rng)
    streams = Streams(program, device)
    walker, cursors = Walker(program), [0] * len(streams.endpoints)
    for part in program.phases:
        start = list(cursors)
        issued = list(streams.stream(part, part.blocks, cursors))
        concrete = [
            (o.op.label, {(w.peer, w.count) for w in o.waits})
            for block in part.blocks
            for o in walk(walker, part.body(block))
        ]
        ends = streams.endpoints
        assert concrete == [
            (op.label, {(p, n) for e, p, d in op.waits if (n := required_count(ends[e], base[e] + d)) > 0})
            for op, base in issued
        ]
        assert sum(streams.templates.of(part, block).op_count() for block in part.blocks) == len(concrete)
        assert cursors == walker.cursors == streams.advanced(part, part.blocks, start)
        for issuer in streams.issuers:
            mine = [(op, tuple(base)) for op, base in issued if program.queues[op.queue].issuer == issuer]
            alone = streams.stream(part, part.blocks, list(start), issuer)
            assert mine == [(op, tuple(base)) for op, base in alone]
