"""Waits within a body: the least time from a queue's first operation to the end of its last one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from npusim.config.load import load_device
from npusim.program.timing import METHODS
from npusim.program.timing.stream import clocked
from npusim.studies.explore.bounds import work_bound
from npusim.studies.explore.spans import QueueEntry, spans, waited_for

if TYPE_CHECKING:
    from tests.conftest import FlashBuilder

LOAD, WORK = range(2)


def load(cycles: int, latency: int = 0, *, first: bool = True, last: bool = True) -> QueueEntry:
    return QueueEntry(LOAD, cycles, latency, ((("in", True), first, last),))


def work(cycles: int, *, first: bool = True, last: bool = True) -> QueueEntry:
    return QueueEntry(WORK, cycles, 0, ((("in", False), first, last),))


@pytest.mark.parametrize(("depth", "span"), [(1, 4 * 5 + 3 * (10 + 2)), (2, 5 + 12 + 5), (3, 20)])
def test_a_slot_is_filled_again_only_after_it_was_read(depth: int, span: int) -> None:
    # Of two slots one may have been full before: the last piece of work reads the third load at the latest.
    entries = [load(10, 2), work(5)] * 4
    assert spans(entries, {"in": depth}, 2)[WORK] == span


def test_slots_that_were_full_before_a_body_are_not_waited_for() -> None:
    # One slot, and it is read first: an earlier body filled it.
    entries = [work(5), load(10), work(5), load(10)]
    assert spans(entries, {"in": 1}, 2).tolist() == [10 + 5 + 10, 5 + 10 + 5]
    assert spans(entries, {"in": 2}, 2).tolist() == [10 + 10, 5 + 5]


def test_a_slot_of_several_operations_is_waited_for_once_and_handed_on_once() -> None:
    entries = [load(10, first=True, last=False), load(10, first=False), work(5, last=False), work(5, first=False)] * 2
    assert spans(entries, {"in": 1}, 2)[WORK] == 4 * 5 + 20


def test_a_ring_whose_slots_are_not_handed_on_in_the_body_is_left_out() -> None:
    entries = [load(10), work(5, last=False), load(10), work(5)]
    assert spans(entries, {"in": 1}, 2).tolist() == [20, 10]


def test_queues_wait_for_each_other_through_several_rings() -> None:
    def store(cycles: int) -> QueueEntry:
        return QueueEntry(2, cycles, 0, ((("out", False), True, True),))

    busy = work(5)
    entries = [load(1), busy._replace(sides=(*busy.sides, (("out", True), True, True))), store(20)] * 3
    assert spans(entries, {"in": 1, "out": 1}, 3).tolist() == [32, 55, 70]


def test_waits_raise_the_bound_of_a_kernel_with_one_slot(build_flash: FlashBuilder) -> None:
    device = load_device("ascend_910b2")
    program = build_flash(
        {"block_q": 128, "block_kv": 384, "vector_rows": 16, "depth": 3}, heads=5, seq_q=2048, head_dim=128, causal=True
    )
    depths = waited_for(program.rings)
    assert depths["PV"] == 1  # of vector core 0, as of the other
    assert "PV slots" not in depths  # which is between cores
    plain, bound = (work_bound(program, device, waits=waits).cycles for waits in (False, True))
    assert 1.05 * plain < bound <= METHODS["fold"](program, clocked(program, device)).cycles
