"""Processor sharing on one link: by hand, and the laws that folding equal cores rests on."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simpy import Environment

from npusim.program.timing.link import SharedLink


class Flow(NamedTuple):
    start: int
    size_bytes: int
    weight: int = 1


def ends(flows: list[Flow], bytes_per_tick: float, catch_up: tuple[int, int] = (0, 1)) -> tuple[list[int], SharedLink]:
    """Return the tick at which each flow ends, and the link."""
    env = Environment()
    link = SharedLink(env, "hbm", bytes_per_tick)
    link.begin_phase(*catch_up)
    found: dict[int, int] = {}

    def joining(index: int, flow: Flow):
        yield env.timeout(flow.start)
        link.join(flow.size_bytes, lambda: found.setdefault(index, int(env.now)), flow.weight)

    for index, flow in enumerate(flows):
        env.process(joining(index, flow))
    env.run()
    return [found[i] for i in range(len(flows))], link


BY_HAND = {
    "alone": (10, [Flow(0, 100)], [10]),
    "a rest of a tick counts as one": (10, [Flow(3, 101)], [14]),
    "less than a byte a tick": (0.25, [Flow(0, 10)], [40]),
    # Both at 5 a tick.
    "two together": (10, [Flow(0, 100), Flow(0, 100)], [20, 20]),
    # At 5 the first has 50 left, both at 5 a tick: it ends at 15; the second has 50 left at 10.
    "the second joins half-way": (10, [Flow(0, 100), Flow(5, 100)], [15, 20]),
    # Both at 5 a tick until 10, when the small one is through; the other has 50 left at 10.
    "a small one leaves": (10, [Flow(0, 100), Flow(0, 50)], [15, 10]),
    # 12 a tick: A 36 at 0; B at 2 (A 12 left, 6 each); C at 3 (A 6, B 30; 4 each): A ends at 4.5,
    # that is 5: B 22, C 4 left; 6 each: C ends at 5.67, that is 6: B 16 left, 12 a tick: 7.33.
    "three staggered": (12, [Flow(0, 36), Flow(2, 36), Flow(3, 12)], [5, 8, 6]),
    # 9 a tick shared by weight 1 + 2: 3 for each of three flows.
    "a weighted flow": (9, [Flow(0, 30), Flow(0, 60, 2)], [10, 17]),
    "one joins as another ends": (10, [Flow(0, 50), Flow(5, 50)], [5, 10]),
    "idle between": (10, [Flow(0, 10), Flow(7, 10)], [1, 8]),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_transfers_end_when_worked_out_by_hand(case: str) -> None:
    rate, flows, expected = BY_HAND[case]
    assert ends(flows, rate)[0] == expected


CATCHING_UP = {
    # Idle before the first transfer: nothing to make up for.
    "the first": ((100, 4), [Flow(50, 100)], [60]),
    # Idle for 90 ticks: 100 bytes at four times 10 a tick.
    "the next is served four times as fast": ((100, 4), [Flow(0, 100), Flow(100, 100)], [10, 103]),
    # Six ticks to make up for are spent in two, of four times 10 bytes; 20 more bytes take two.
    "until all is made up for": ((6, 4), [Flow(0, 100), Flow(100, 100)], [10, 104]),
    # As long as nothing but its rate is to be had on average, it has no more: 10 idle ticks, 200 bytes.
    "no more than it was idle": ((100, 4), [Flow(0, 100), Flow(20, 200)], [10, 30]),
    "two of them share it": ((100, 4), [Flow(0, 100), Flow(100, 100), Flow(100, 100)], [10, 105, 105]),
}


@pytest.mark.parametrize("case", CATCHING_UP)
def test_a_link_makes_up_for_what_it_was_idle(case: str) -> None:
    catch_up, flows, expected = CATCHING_UP[case]
    found, link = ends(flows, 10, catch_up)
    assert found == expected
    folded, _ = ends([Flow(f.start, f.size_bytes, 3 * f.weight) for f in flows], 30, catch_up)
    assert folded == expected  # three cores in step on a link three times as fast
    link.begin_phase(*catch_up)
    assert link._idle == -1


def test_who_ends_may_join_again_at_once() -> None:
    env = Environment()
    link = SharedLink(env, "hbm", 10)
    seen: list[int] = []

    def again() -> None:
        seen.append(int(env.now))
        if len(seen) < 3:
            link.join(100, again)

    link.join(100, again)
    env.run()
    assert seen == [10, 20, 30]


FLOWS = st.lists(st.builds(Flow, st.integers(0, 60), st.integers(1, 500), st.integers(1, 4)), min_size=1, max_size=8)
RATES = st.sampled_from([0.3, 1.0, 7.0, 10.0, 64.5, 805.55, 3888.9])


@given(FLOWS, RATES)
def test_a_weighted_flow_ends_with_as_many_equal_flows_to_the_tick(flows: list[Flow], rate: float) -> None:
    weighted, _ = ends(flows, rate)
    split = [f._replace(weight=1) for f in flows for _ in range(f.weight)]
    assert ends(split, rate)[0] == [end for f, end in zip(flows, weighted, strict=True) for _ in range(f.weight)]


@given(FLOWS, RATES)
def test_the_order_of_joining_within_a_tick_does_not_matter(flows: list[Flow], rate: float) -> None:
    forward, _ = ends(flows, rate)
    backward, _ = ends(flows[::-1], rate)
    assert forward == backward[::-1]


@given(FLOWS, RATES)
def test_all_bytes_cross_no_faster_than_the_link_and_lose_less_than_a_tick_an_end(
    flows: list[Flow], rate: float
) -> None:
    finished, link = ends(flows, rate)
    assert link.total_bytes == sum(f.size_bytes * f.weight for f in flows)
    # In any stretch from some start on, what ended by t and started since cannot exceed rate * t.
    for since in {f.start for f in flows}:
        for until in {end for end in finished if end > since}:
            moved = sum(
                f.size_bytes * f.weight
                for f, end in zip(flows, finished, strict=True)
                if f.start >= since and end <= until
            )
            # The rate is held in 2**-20 byte a tick.
            assert moved <= (until - since) * (rate + 2**-20) + 1e-3
    # Work conserving: while flows are there the link works, but for the rest of each end's tick.
    idle = 0
    busy_until = 0
    for flow in sorted(flows):
        idle += max(0, flow.start - busy_until)
        busy_until = max(busy_until, flow.start) + flow.size_bytes * flow.weight / rate
    assert max(finished) <= busy_until + len(set(finished)) + 1


@given(FLOWS, RATES)
def test_a_transfer_more_never_makes_another_end_earlier(flows: list[Flow], rate: float) -> None:
    alone, _ = ends(flows[1:], rate) if flows[1:] else ([], None)
    together, _ = ends(flows, rate)
    # Rounding an end up to its tick can shift the others by less than a tick each.
    assert all(a <= b + len(flows) for a, b in zip(alone, together[1:], strict=True))


@given(st.integers(1, 500), st.integers(1, 64), RATES)
def test_equal_transfers_that_start_together_end_together(size: int, count: int, rate: float) -> None:
    finished, _ = ends([Flow(0, size)] * count, rate)
    assert len(set(finished)) == 1
    exact = size * count / rate
    assert exact - 1e-3 <= finished[0] <= exact + 1 + 1e-3
