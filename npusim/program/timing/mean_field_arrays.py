"""The flat integer records of a mean field: times of blocks, and the position of each core group."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from npusim.program.timing.engine_arrays import Ints, Records, record

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Parts of a transfer in which means are counted, as a shift.
PART_BITS = 8
#: Calls written for a simulation: the previous block, the block itself, and those that scalar units may already have
#: reached, since several small blocks fit into the instruction queues.
BEFORE, AFTER = 1, 30
WINDOW = BEFORE + 1 + AFTER
#: Number of stored results; with more, blocks have too little in common for this method.
RESULTS = 4095
#: Hash table of results by their inputs: its size, and the distance between states.
HEADS, STRIDE = 4096, 67
#: In place of a neighbour on which a result does not depend; no block.
ANY, NO_BLOCK = -2, -1
#: Number of iterations in which the rate of a long loop is measured.
SPAN = 4


class BlockResults(NamedTuple):
    """Times of blocks, by everything on which they depend; each array has ``known`` entries.

    Records are, in this order: cycles in which every queue was busy and idle, cycles that every endpoint waited, bytes
    on every link, and transfers in flight on every link, summed over cycles.
    """

    # ``after``: state in which the next block is entered, -1: none; ``next``: next entry with the same hash
    result: Records
    others: Ints  #: (results, links): concurrent transfers of other groups, in parts
    neighbour: Ints  #: (results, window): neighbouring blocks that scalar units fetched during the block, or `ANY`
    booked: Ints
    span_booked: Ints  #: totals in the span in which the rate is measured
    head: Ints
    known: Ints
    link: Records


class GroupStates(NamedTuple):
    """The position of each core group, and its records; ``in_flight`` are its transfers on average, in parts.

    ``unnoticed`` are transfers of others that do not delay any operation of their own group.
    """

    group: Records
    in_flight: Ints  #: (groups, links); the same for the next two
    unnoticed: Ints
    is_noticed: Ints
    booked: Ints
    block: Records  #: one group's blocks after another's, with `NO_BLOCK` around them
    total: Ints  #: (links,) transfers in flight of all groups, in parts
    others: Ints  #: (links,) transfers that the requesting group notices


RESULT = record("state number is_last after cycles span_cycles next")
LINK = record("rate slack")
GROUP = record("time state at is_waiting result")
BLOCK = record("number extra")


def build_results(link: Sequence[tuple[int, int]], width: int) -> BlockResults:
    """Return space for results with ``width`` recorded numbers; ``link``: the rate and slack of each link."""
    links = len(link)
    return BlockResults(
        result=np.zeros(RESULTS, RESULT),
        others=np.empty((RESULTS, links), np.int64),
        neighbour=np.empty((RESULTS, WINDOW), np.int64),
        booked=np.empty((RESULTS, width), np.int64),
        span_booked=np.empty((RESULTS, width), np.int64),
        head=np.full(HEADS, -1, np.int64),
        known=np.zeros(1, np.int64),
        link=np.array(link, LINK),
    )


def build_groups(blocks: Sequence[tuple[Ints, Ints]], results: BlockResults) -> GroupStates:
    """Return the state in which groups with these blocks begin; the blocks are given by numbers and
    further iterations.
    """
    links, width = results.others.shape[1], results.booked.shape[1]
    listed = np.full(sum(len(numbers) + BEFORE + AFTER for numbers, _ in blocks), NO_BLOCK, BLOCK)
    group, at = np.zeros(len(blocks), GROUP), 0
    for index, (numbers, extras) in enumerate(blocks):
        group[index]["at"], end = at + BEFORE, at + BEFORE + len(numbers)
        listed["number"][at + BEFORE : end], listed["extra"][at + BEFORE : end] = numbers, extras
        group[index]["is_waiting"] = len(numbers) > 0
        at = end + AFTER
    return GroupStates(
        group=group,
        in_flight=np.zeros((len(blocks), links), np.int64),
        unnoticed=np.zeros((len(blocks), links), np.int64),
        is_noticed=np.zeros((len(blocks), links), np.int64),
        booked=np.zeros((len(blocks), width), np.int64),
        block=listed,
        total=np.zeros(links, np.int64),
        others=np.zeros(links, np.int64),
    )


def head_of(state: int, number: int, is_last: int) -> int:
    """Return the start of the results of a block that is entered in a state."""
    return (state * STRIDE + 2 * number + is_last) % HEADS
