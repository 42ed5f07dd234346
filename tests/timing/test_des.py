"""The discrete-event reference: pipelines timed by hand, books that balance, deadlocks, determinism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from ir.toy import FILL_CYCLES, RANDOMS, RandomProgram, Toy, crossed, fill, front, phase

from npusim.errors import DeadlockError
from npusim.program.ir.op import Opcode, Step, TileOp
from npusim.program.ir.tile import GlobalTensor, Tile
from npusim.program.ir.tile_program import Loop, Queue
from npusim.program.ir.walk import Walker, walk
from npusim.program.timing import des
from timing import replay
from timing.programs import ENDLESS_LINKS, booked, device_with, random_device, timeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import Item, TileProgram
    from npusim.program.timing.timing_result import TimingResult

#: One core group, nothing to issue or to dispatch: only what a test is about takes time.
BARE = {"group_count": "1", "launch__block_dispatch_cycles": "0", "cores__aiv__engines__SCALAR__issue_cycles": "0"}
BY_NAME = {"des": des, "replay": replay}
BOTH = pytest.mark.parametrize("method", ["des", "replay"])


def spans(result: TimingResult) -> dict[str, list[tuple[str, int, int]]]:
    """Return (label, start, end) of every operation, by queue."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    for s in result.spans:
        found.setdefault(s.queue, []).append((s.label, s.start, s.end))
    return found


def simulate(method: str, program: TileProgram, **overrides: str) -> TimingResult:
    return BY_NAME[method].simulate(program, device_with(**{**BARE, **overrides}), trace_groups=(0,))


def cycles(repeats: int) -> int:
    return FILL_CYCLES + repeats


# ---------------------------------------------------------------- by hand


@BOTH
def test_two_stages_with_two_slots_overlap_as_drawn_on_paper(method: str) -> None:
    """Fill takes 25, read 34; a flag is visible a cycle after it is set."""
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", [p], [c], depth=2)
    body: list[Item] = [toy.op("w", p, fill(ring), repeats=1), toy.op("r", c, front(ring), repeats=10)]
    result = simulate(method, toy.program([Loop("tile", range(4), lambda _i: body)]))
    # w0 0-25, w1 25-50; r0 from 26 to 60; w2 waits for r0's release: 61-86; r1 60-94; w3 95-120;
    # r2 94-128 (w2 is visible at 87); r3 128-162.
    assert spans(result) == {
        "p": [("w", 0, 25), ("w", 25, 50), ("w", 61, 86), ("w", 95, 120)],
        "c": [("r", 26, 60), ("r", 60, 94), ("r", 94, 128), ("r", 128, 162)],
    }
    assert result.cycles == 162
    producer, consumer = result.queues[0]
    assert producer.stalls == {"S free": (61 - 50) + (95 - 86)}
    assert consumer.stalls == {"S ready": 26}
    assert (producer.busy_cycles, consumer.busy_cycles) == (4 * 25, 4 * 34)


@BOTH
def test_one_slot_takes_turns(method: str) -> None:
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", [p], [c], depth=1)
    body: list[Item] = [toy.op("w", p, fill(ring), repeats=1), toy.op("r", c, front(ring), repeats=1)]
    result = simulate(method, toy.program([Loop("tile", range(3), lambda _i: body)]))
    # 25 + 1 + 25 + 1 a turn: w at 0, 52, 104.
    assert spans(result)["p"] == [("w", 0, 25), ("w", 52, 77), ("w", 104, 129)]
    assert result.cycles == 129 + 1 + 25


@BOTH
def test_results_are_there_a_latency_after_the_engine_is_free(method: str) -> None:
    """MTE2 issues every 20 cycles; what it moved is there 300 cycles later, and visible after one more."""
    toy = Toy()
    load, use = toy.queue("load", engine="MTE2"), toy.queue("use")
    ring = toy.ring("A", [load], [use], depth=2)
    body: list[Item] = [toy.op("w", load, fill(ring), repeats=1), toy.op("r", use, front(ring), repeats=1)]
    result = simulate(method, toy.program([Loop("tile", range(2), lambda _i: body)]), **ENDLESS_LINKS)
    assert spans(result)["load"] == [("w", 0, 20), ("w", 20, 40)]
    assert spans(result)["use"] == [("r", 321, 346), ("r", 346, 371)]
    assert result.queues[0][0].end_cycles == 40 + 300


@BOTH
def test_an_acknowledgement_period_delays_the_producer_to_the_second_release(method: str) -> None:
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", [p], [c], depth=2, period=2)
    body: list[Item] = [toy.op("w", p, fill(ring), repeats=1), toy.op("r", c, front(ring), repeats=1)]
    items = [*body, *body]
    result = simulate(method, toy.program([*items, toy.op("third", p, fill(ring), repeats=1), body[1]]))
    # r0 26-51, r1 51-76: only then are both slots acknowledged.
    assert spans(result)["p"][2] == ("third", 77, 102)


@BOTH
def test_a_flag_between_the_cores_takes_its_issue_on_both_sides_and_its_latency(method: str) -> None:
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S slots", [p], [c], depth=2, flag="counter")
    items = [toy.op("w", p, fill(ring), repeats=1), toy.op("r", c, front(ring), repeats=1)]
    result = simulate(
        method, toy.program(items), flags__cross_core_latency_cycles="500", flags__cross_core_issue_cycles="200"
    )
    # The producer's scalar unit issues its wait for a slot and its set: 2 x 200; so does the consumer's.
    assert spans(result) == {"p": [("w", 400, 425)], "c": [("r", 925, 950)]}
    assert result.queues[0][1].stalls == {"no instruction": 400, "S slots ready": 525}


@BOTH
def test_a_scalar_unit_issues_in_program_order_into_full_queues(method: str) -> None:
    """A queue of one instruction: the third of `a` is issued when the second is taken, at 25."""
    toy = Toy()
    a, b = (toy.queue(n, issuer="one") for n in "ab")
    items = [toy.op(f"a{i}", a, repeats=1) for i in range(3)] + [toy.op("b", b, repeats=1)]
    shallow = simulate(method, toy.program(items), cores__aiv__engines__VECTOR__queue_depth_count="1")
    assert spans(shallow)["b"] == [("b", 25, 50)]
    deep = simulate(method, toy.program(items), cores__aiv__engines__VECTOR__queue_depth_count="2")
    assert spans(deep)["b"] == [("b", 0, 25)]


@BOTH
def test_issuing_takes_the_scalar_units_time(method: str) -> None:
    toy = Toy()
    a, b = (toy.queue(n, issuer="one") for n in "ab")
    items = [toy.op("a", a, repeats=1), toy.op("b", b, repeats=1)]
    result = simulate(method, toy.program(items), cores__aiv__engines__SCALAR__issue_cycles="7")
    assert spans(result) == {"a": [("a", 7, 32)], "b": [("b", 14, 39)]}


@BOTH
def test_blocks_go_round_the_core_groups_and_the_slowest_decides(method: str) -> None:
    toy = Toy()
    q = toy.queue("q")
    program = toy.program(
        lambda block: [toy.op("x", q, repeats=int(str(block)))], blocks=[1, 2, 3, 4, 5], shape=lambda b: b
    )
    result = simulate(method, program, group_count="2")
    assert [group[0].busy_cycles for group in result.queues] == [sum(map(cycles, (1, 3, 5))), sum(map(cycles, (2, 4)))]
    assert result.cycles == sum(map(cycles, (1, 3, 5)))


@BOTH
def test_a_phase_begins_when_the_one_before_has_ended_on_every_core(method: str) -> None:
    toy = Toy()
    q = toy.queue("q")
    one = phase("one", [0, 1], lambda b: [toy.op("x", q, repeats=10 + 20 * b)], lambda b: b)
    two = phase("two", [0], lambda _b: [toy.op("y", q, repeats=1)], lambda b: b)
    result = simulate(method, toy.program((), phases=[one, two]), group_count="2", launch__block_dispatch_cycles="100")
    # Group 1 ends phase one at 100 + 54; phase two dispatches for another 100.
    assert spans(result)["q"] == [("x", 100, 134), ("y", 254, 279)]
    assert result.cycles == 279


def test_one_time_is_said_as_each_kind_of_measurement_has_it(device: DeviceSpec) -> None:
    launch = device.timed_launch()
    assert launch.task_s and launch.gap_s and launch.host_issue_s
    call, task, gap, issue = (
        float(part.value) for part in (launch.kernel_overhead_s, launch.task_s, launch.gap_s, launch.host_issue_s)
    )
    toy = Toy()
    q = toy.queue("q")
    one = phase("one", [0], lambda _b: [toy.op("x", q, repeats=1)], lambda b: b)
    for count in (1, 3):
        result = des.simulate(toy.program((), phases=[one] * count), device)
        core = count * (launch.block_dispatch_cycles.value + 25) / 1.8e9
        # The host issues kernels behind one another; here it is slower than the device.
        assert issue > core / count + task + gap
        assert result.times_s == {
            "core": pytest.approx(core),
            "kernel": pytest.approx(core + count * task),
            "back_to_back": pytest.approx(count * issue),
            "call": pytest.approx(call + max(core, (count - 1) * issue)),
        }
        assert result.latency_s == result.times_s["call"]
        assert result.launch_s == pytest.approx(result.latency_s - core)
        assert result.stream_s == pytest.approx(count * (task + gap))


def test_a_file_that_knows_one_cost_of_a_launch_pays_it_for_each_kernel(device: DeviceSpec) -> None:
    toy = Toy()
    q = toy.queue("q")
    one = phase("one", [0], lambda _b: [toy.op("x", q, repeats=1)], lambda b: b)
    short = device.timed_launch().model_copy(update=dict.fromkeys(("task_s", "task_all_s", "gap_s", "host_issue_s")))
    result = des.simulate(toy.program((), phases=[one] * 3), device.model_copy(update={"launch": short}))
    paid = 3 * float(short.kernel_overhead_s.value)
    assert set(result.times_s) == {"core", "call"}
    assert (result.launch_s, result.stream_s) == (pytest.approx(paid), pytest.approx(paid))


def test_cores_that_load_together_share_the_link() -> None:
    """Two groups load 8 KiB each through an L2 of 32 bytes a cycle: 512 cycles instead of 256."""
    k = GlobalTensor("k", 1, 2, 64, 64, "float16", "input")
    toy = Toy()
    queue = toy.queue("load")
    toy.queues[0] = Queue("load", "aic", "MTE2", "scalar")
    tile = Tile("aic.L1", 0, 64, 64, 64, "float16")

    def body(block: Any) -> list[TileOp]:
        return [TileOp("K.load", queue, queue, (Step(Opcode.COPY, tile, (k.tile(0, block, 0, 64),)),))]

    program = toy.program(body, blocks=[0, 1], tensors=[k])  # type: ignore[arg-type]
    slow = str(32 * 1.8e9)
    for groups, expected in (("2", 512), ("1", 256)):
        result = simulate(
            "des", program, group_count=groups, links__l2__bytes_per_s=slow, links__hbm__bytes_per_s="1e22"
        )
        label, start, end = spans(result)["load"][0]
        assert (label, start, end) == ("K.load", 0, expected)
        assert result.link_bytes == {"l2": 2 * 8192, "hbm": 2 * 8192}
        # On one core the second transfer follows the first, so the total is the same.  Both miss L2,
        # which takes 150 beyond a hit's 300.
        assert result.cycles == 512 + 300 + 150


# ---------------------------------------------------------------- laws


@settings(max_examples=30)
@given(RANDOMS)
def test_an_operation_starts_after_its_queues_last_and_after_every_flag_it_waits_for(rng: Any) -> None:
    """Checked on the concrete walk: all of the flag's queue so far is over, then the flag's latency.

    An operation is over at its end + 300 cycles of MTE2, if it moves anything.
    """
    program, device = RandomProgram(rng).program(), random_device(rng)
    groups = device.group_count.value
    result = des.simulate(program, device, trace_groups=range(groups))
    flags = device.flags
    for group in range(groups):
        unseen: dict[str, list[Any]] = {q.name: [] for q in program.queues}
        for span in result.spans:
            if span.group == group:
                unseen[span.queue].append(span)
        walker = Walker(program)
        visible: dict[tuple[int, int], int] = {}
        counts = [0] * len(walker.endpoints)
        free, over = dict.fromkeys(unseen, 0), dict.fromkeys(unseen, 0)
        for part in program.phases:
            for block in part.blocks_of_group(group, groups):
                for op in walk(walker, part.body(block)):
                    span = unseen[op.op.queue].pop(0)
                    assert span.label == op.op.label
                    assert span.start >= free[span.queue]
                    assert all(span.start >= visible[w.peer, w.count] for w in op.waits)
                    free[span.queue] = span.end
                    moves = program.queues[op.queue].engine == "MTE2" and op.op.steps
                    over[span.queue] = max(over[span.queue], span.end + (300 if moves else 0))
                    for end in op.sets:
                        crossing = walker.endpoints[end].is_cross_core
                        latency = flags.cross_core_latency_cycles if crossing else flags.intra_core_latency_cycles
                        counts[end] += 1
                        visible[end, counts[end]] = over[span.queue] + latency.value
        assert not any(unseen.values())


def test_busy_and_stalls_of_flash_add_up_under_contention(
    build_flash: Callable[..., TileProgram], device: DeviceSpec
) -> None:
    result = des.simulate(
        build_flash(heads=5, seq_q=1024, seq_kv=1024, head_dim=128, causal=True), device, trace_groups=range(24)
    )
    for group in result.queues:
        for use in group:
            ends = [s.end for s in result.spans if (s.group, s.queue) == (use.group, use.queue)]
            assert use.busy_cycles + sum(use.stalls.values()) == max(ends)


def test_two_runs_are_identical(build_flash: Callable[..., TileProgram], device: DeviceSpec) -> None:
    program = build_flash(heads=7, seq_q=400, seq_kv=700, head_dim=64)
    a, b = (des.simulate(program, device, trace_groups=range(24)) for _ in range(2))
    assert (a.cycles, booked(a), timeline(a), a.link_bytes) == (b.cycles, booked(b), timeline(b), b.link_bytes)


def test_keeping_a_trace_changes_no_time(build_flash: Callable[..., TileProgram], device: DeviceSpec) -> None:
    program = build_flash(heads=3, seq_q=256, seq_kv=256, head_dim=64)
    traced, plain = (des.simulate(program, device, trace_groups=(0, 1)), des.simulate(program, device))
    assert booked(traced) == booked(plain)
    assert {s.group for s in traced.spans} == {0, 1}
    assert not plain.spans


@BOTH
def test_bytes_on_links_are_those_of_the_operations(
    method: str, build_flash: Callable[..., TileProgram], device: DeviceSpec
) -> None:
    # One block of 128 x 256 keys in two tiles of 128, d = 64, float16; everything fits into L2.
    program = build_flash({"block_kv": 128}, heads=1, seq_q=128, seq_kv=256, head_dim=64)
    result = BY_NAME[method].simulate(program, device)
    q = o = 128 * 64 * 2
    k = v = 256 * 64 * 2
    s, p, t = 2 * 128 * 128 * 4, 2 * 128 * 128 * 2, 2 * 128 * 64 * 4
    assert result.link_bytes["hbm"] == q + k + v  # O stays in L2
    # S, P and P V go through their slots: written once, read once.
    assert result.link_bytes["l2"] == q + k + v + o + 2 * (s + p + t)


@BOTH
def test_terms_account_for_all_busy_cycles_without_contention(
    method: str, build_flash: Callable[..., TileProgram]
) -> None:
    program = build_flash(heads=1, seq_q=128, seq_kv=512, head_dim=64)
    result = BY_NAME[method].simulate(program, device_with(links__hbm__bytes_per_s="1e22"))
    busy = sum(u.busy_cycles for group in result.queues for u in group)
    # Each operation's cycles are rounded up, its terms are not.
    assert sum(result.term_cycles.values()) == pytest.approx(busy, abs=result.operations * 20)
    assert sum(result.term_cycles.values()) <= busy


# ---------------------------------------------------------------- deadlock


def test_a_deadlock_names_each_engine_its_operation_and_its_flag() -> None:
    with pytest.raises(DeadlockError) as caught:
        simulate("des", crossed())
    assert str(caught.value) == (
        "phase toy of toy is stuck at cycle 0: group 0 a: first waits for back ready; "
        "group 0 b: second waits for there ready"
    )


def test_replay_names_the_operation_whose_flag_nothing_before_it_sets() -> None:
    with pytest.raises(DeadlockError, match=r"first on a waits for back ready number 1, which no earlier operation"):
        simulate("replay", crossed())


def test_a_slot_that_is_never_given_back_is_a_deadlock() -> None:
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", [p], [c], depth=2)
    items = [toy.op("w", p, fill(ring), repeats=1), toy.op("r", c, front(ring, last=False), repeats=1)]
    items += [toy.op("w", p, fill(ring), repeats=1), toy.op("late", p, fill(ring), repeats=1)]
    with pytest.raises(DeadlockError, match=r"stuck at cycle 51: group 0 p: late waits for S free"):
        simulate("des", toy.program(items))


def test_a_full_queue_behind_a_stuck_engine_is_reported_with_it() -> None:
    """The scalar unit stands before the full queue of `a` and never issues what `a` waits for."""
    toy = Toy()
    a, b = (toy.queue(n, issuer="one") for n in "ab")
    ring = toy.ring("S", [b], [a])
    items = [toy.op("r", a, front(ring)), toy.op("a1", a), toy.op("a2", a), toy.op("w", b, fill(ring))]
    with pytest.raises(DeadlockError, match=r"group 0 a: r waits for S ready"):
        simulate("des", toy.program(items), cores__aiv__engines__VECTOR__queue_depth_count="1")
