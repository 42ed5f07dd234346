"""Structure of traces: pairs balance, time rises on each track, nothing overlaps, bytes re-parse."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from npusim.config.load import load_workload
from npusim.config.problem import CopyProblem, GemmProblem
from npusim.errors import NpusimError, SpecError
from npusim.library import SCHEDULES
from npusim.machines.tracks import track_of
from npusim.report.timeline import Slice, Timeline, timeline_of
from npusim.report.trace import trace_json
from npusim.run import run

if TYPE_CHECKING:
    from npusim.simulation.run_result import RunData

Event = tuple[str, int, str, dict[str, Any]]  # phase, nanoseconds, name, arguments
WAIT = "wait: "
CORES = {f"core{g}.{core}" for g in (0, 1) for core in ("cubecore0", "veccore0", "veccore1")}


def _events(result: RunData) -> dict[tuple[str, str], list[Event]]:
    events = json.loads(trace_json(timeline_of(result)))["traceEvents"]
    cores, pipes = {}, {}
    tracks: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "M":
            if event["name"] == "process_name":
                cores[event["pid"]] = event["args"]["name"]
            if event["name"] == "thread_name":
                pipes[event["pid"], event["tid"]] = event["args"]["name"]
            continue
        if event["ph"] not in "BEi":
            continue
        track = cores[event["pid"]], pipes[event["pid"], event["tid"]]
        nanoseconds = event["ts"] * 1000
        assert nanoseconds == pytest.approx(round(nanoseconds), abs=1e-6)
        at = (event["ph"], round(nanoseconds), event["name"], event.get("args", {}))
        tracks[track].append(at)
    return tracks


def test_slices_balance_rise_and_do_not_overlap(result: RunData) -> None:
    tracks = _events(result)
    assert {core for core, _ in tracks} == CORES
    assert {pipe for core, pipe in tracks if core == "core0.cubecore0"} == {"MTE2", "MTE1", "CUBE", "FIXP"}
    assert result.timing is not None
    ran = [e for events in tracks.values() for e in events if e[0] == "B" and not e[2].startswith(WAIT)]
    assert len(ran) == len(result.timing.spans)
    for events in tracks.values():
        assert [phase for phase, *_ in events] == ["B", "E"] * (len(events) // 2)
        times = [at for _, at, *_ in events]
        assert times == sorted(times), "an end is not after the next start"


def test_cycles_are_kept_beside_nanoseconds(result: RunData) -> None:
    for events in _events(result).values():
        for phase, at, _, arguments in events:
            if phase == "B":
                # 1.8 GHz: five ninths of a nanosecond a cycle.
                assert at == arguments["start_cycle"] * 5 // 9
                assert arguments["cycles"] == arguments["end_cycle"] - arguments["start_cycle"]


def test_ends_repeat_their_begins_and_insight_finds_its_mark(result: RunData) -> None:
    text = trace_json(timeline_of(result))
    assert text.index('"profilingType": "op"') < text.index("[")
    for events in _events(result).values():
        for begin, end in zip(events[::2], events[1::2], strict=True):
            assert begin[2:] == end[2:]


def test_numeric_event_stands_at_the_end_of_its_operation(overflowed: RunData) -> None:
    found = [
        (track, index, events)
        for track, events in _events(overflowed).items()
        for index, event in enumerate(events)
        if event[0] == "i"
    ]
    assert len(found) == 1
    (core, pipe), index, events = found[0]
    # The block is the second of the program, so the first of core group 1.
    assert (core, pipe) == ("core1.cubecore0", "FIXP")
    assert events[index - 1][2] == "S.drain"
    assert "overflow in S.drain.cast" in events[index][2]
    assert events[index][1] == events[index + 1][1]


def test_event_of_a_group_without_a_timeline_is_left_out(overflowed: RunData) -> None:
    assert overflowed.timing is not None
    spans = tuple(span for span in overflowed.timing.spans if span.group == 0)
    only = replace(overflowed, timing=replace(overflowed.timing, spans=spans))
    assert not any(s.events for slices in timeline_of(only).tracks.values() for s in slices)


def _waits(slices: Any) -> Counter[str]:
    """Return the cycles of each wait on a track."""
    waits: Counter[str] = Counter()
    for piece in slices:
        if piece.kind == "wait":
            waits[piece.name] += piece.end - piece.start
    return waits


def test_waits_fill_the_time_between_operations_with_their_causes(result: RunData) -> None:
    """By cause what the simulation counted, but for instructions that came a little late."""
    assert result.timing is not None
    timeline = timeline_of(result)
    for use in result.timing.queues[0]:
        slices = timeline.tracks[track_of(0, use.queue)]
        assert slices[0].start == 0
        assert all(a.end == b.start for a, b in pairwise(slices)), "nothing is left open"
        waits = _waits(slices)
        assert sum(waits.values()) == sum(use.stalls.values())
        for cause, cycles in use.stalls.items():
            assert waits[cause] == pytest.approx(cycles, abs=500), use.queue


def test_a_flag_behind_a_late_copy_is_waited_for_as_long_as_the_copy_takes() -> None:
    """P is there soon, V, which misses L2, before it in the queue is not: MTE1 waits for P's flag, not for work."""
    result = run("flash", phase="decode", seq=4096, numerics=False, trace_groups=(0,))
    assert result.timing is not None
    use = next(u for u in result.timing.queues[0] if u.queue == "aic.MTE1")
    assert dict(_waits(timeline_of(result).tracks[track_of(0, use.queue)])) == use.stalls


def test_a_flow_leads_from_the_operation_that_made_a_tile_to_one_that_reads_it(result: RunData) -> None:
    flows = [(f.source[1], f.target[1]) for f in timeline_of(result).flows]
    assert all(made.end <= used.start for made, used in flows)
    pairs = {(made.name, used.name) for made, used in flows}
    assert {("K.load", "S.load_right"), ("rows of P", "P.store"), ("S.mmad", "S.drain")} <= pairs


def test_flows_are_paired(result: RunData) -> None:
    timeline = timeline_of(result)
    events = json.loads(trace_json(timeline))["traceEvents"]
    begun = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    ended = {e["id"]: e["ts"] for e in events if e["ph"] == "f"}
    assert begun.keys() == ended.keys() == set(range(1, len(timeline.flows) + 1))
    assert all(begun[n] <= ended[n] for n in begun)


def test_operations_say_their_block_and_the_iterations_of_its_loops(result: RunData) -> None:
    slices = timeline_of(result).tracks[track_of(0, "aic.CUBE")]
    scores = [s for s in slices if s.name == "S.mmad"]
    assert {s.block for s in scores} == {"batch 0 head 0 rows 0..127"}
    assert [dict(s.path)["key"] for s in scores] == sorted(dict(s.path)["key"] for s in scores)
    arguments = [e[3] for e in _events(result)["core0.cubecore0", "CUBE"] if e[2] == "S.mmad"]
    assert arguments[0]["block"] == "batch 0 head 0 rows 0..127"


def test_window_keeps_what_lies_in_it_and_says_where_the_timeline_ends(result: RunData) -> None:
    assert result.timing is not None
    whole, part = timeline_of(result), timeline_of(result).windowed((5.0, 10.0))
    edges = 9000, 18000  # 1.8 GHz
    for track, slices in part.tracks.items():
        assert slices == [s for s in whole.tracks[track] if s.start < edges[1] and s.end > edges[0]]
    assert 0 < len(part.flows) < len(whole.flows)
    with pytest.raises(SpecError, match=r"--timeline 1000:2000 us: the timeline ends at "):
        whole.windowed((1000.0, 2000.0))


def test_a_gpus_operations_stand_on_pipes_and_its_waits_on_queues() -> None:
    found = timeline_of(run("volta_flash", seq=512, numerics=False))
    assert found.flows
    kinds = {t.pipe: {s.kind for s in slices} for t, slices in found.tracks.items()}
    assert kinds["LDG"] == {"operation"} < kinds["B0W0"]
    assert {"wait"} in kinds.values()


def test_run_without_a_time_has_an_empty_timeline(result: RunData) -> None:
    timeline = timeline_of(replace(result, timing=None))
    assert timeline.tracks == {}
    assert json.loads(trace_json(timeline))["traceEvents"] == []


def test_every_operation_with_an_event_has_it_on_the_timeline() -> None:
    """Scores beyond float16 in every tile: one instant for each store, at its own iteration."""
    load = load_workload("pasa_uniform").model_copy(update={"heads": 1, "kv_heads": 1})
    overflowing = run(
        "flash",
        workload=load,
        seq=512,
        causal=False,
        precision="fa16_32",
        rows="all",
        tiling={"block_q": 128, "block_kv": 128},
        trace_groups=(0, 1),
    )
    assert overflowing.numerics is not None
    stores = [e for e in overflowing.numerics.events if e.operation == "S.drain.cast"]
    # 4 blocks of queries with 4 tiles of keys each, every score infinite.
    assert len(stores) == 16
    assert {e.count for e in stores} == {128 * 128}
    assert [e.path["key"] for e in stores if e.block == stores[0].block] == [0, 1, 2, 3]
    total = overflowing.numerics.overflow_counts["S.drain.cast"]
    assert sum(e.count for e in stores) == total == 512 * 512
    for track, slices in timeline_of(overflowing).tracks.items():
        marked = [s for s in slices if s.events]
        if track.pipe == "FIXP":
            # Two traced groups with a block each.
            assert [s.name for s in marked] == ["S.drain"] * 4
            assert [f"key={n} " in s.events[0] for n, s in enumerate(marked)] == [True] * 4
            assert all("16384 elements" in s.events[0] for s in marked)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("schedule", "family"), sorted(SCHEDULES))
def test_traces_of_every_schedule_balance_rise_and_pair_their_flows(schedule: str, family: str) -> None:
    hardware = {"ascend": "ascend_910b2", "node": "ascend_910b2_x8", "volta": "v100", "hopper": "h200"}
    given: dict[str, Any] = {"problem": GemmProblem(m=256, n=256, k=256)} if schedule == "gemm" else {"seq": 512}
    if schedule == "copy":
        given = {"problem": CopyProblem(bytes=1 << 20)}
    try:
        result = run(schedule, hw=hardware.get(family), numerics=False, **given)
    except NpusimError as error:
        pytest.skip(f"{schedule} on {family}: {error}")
    if result.timing is None:
        pytest.skip(f"{result.device.name} has values only")
    timeline = timeline_of(result)
    assert any(timeline.tracks.values())
    for events in _events(result).values():
        assert [at for _, at, *_ in events] == sorted(at for _, at, *_ in events)
        assert [e[0] for e in events if e[0] in "BE"] == ["B", "E"] * (sum(e[0] in "BE" for e in events) // 2)
    ends = Counter(e["ph"] for e in json.loads(trace_json(timeline))["traceEvents"])
    assert ends["s"] == ends["f"] == len(timeline.flows)


def test_operations_of_one_moment_stand_in_the_order_in_which_they_were_issued() -> None:
    # Between two blocks that overlap, a slot is released and the next taken in the same cycle, by one queue.
    result = run("flash", hw="ascend_950", seq=1024, numerics=False)
    assert result.timing is not None
    slices = [s for of_track in timeline_of(result).tracks.values() for s in of_track if s.kind == "operation"]
    assert len(slices) == len(result.timing.spans) > 0


def test_events_are_written_as_the_standard_library_writes_them(overflowed: RunData) -> None:
    text = trace_json(timeline_of(overflowed))
    assert text == f"{json.dumps(json.loads(text), ensure_ascii=False)}\n"


def test_names_with_special_characters_stay_as_they_are() -> None:
    path = (('i "%d"', 3), ("cycles", 7))
    piece = Slice('a "b"\\ é %(start)d', 2, 5, block="50 %\n", path=path, events=("100 % of\t1",))
    text = trace_json(Timeline("t", 10**9, 5, tracks={track_of(0, "aic.CUBE"): [piece]}))
    begin, instant, end = json.loads(text)["traceEvents"][-3:]
    assert text == f"{json.dumps(json.loads(text), ensure_ascii=False)}\n"
    assert begin["name"] == end["name"] == piece.name
    # a loop that has the name of another argument
    assert begin["args"] == {"start_cycle": 2, "end_cycle": 5, "cycles": 7, "block": piece.block, 'i "%d"': 3}
    assert instant["name"] == piece.events[0]
    assert (begin["ts"], instant["ts"]) == (0.002, 0.005)
