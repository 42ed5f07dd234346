"""The core groups of a phase, from block to block in order of time, each with the mean traffic of the others.

The time of a block is known from `npusim.program.timing.mean_field_blocks`, or requested there; the rest is compiled.
"""

from __future__ import annotations

from npusim.formats.jit import inline, kernel
from npusim.program.timing import mean_field_arrays
from npusim.program.timing.link import FRACTION_BITS
from npusim.program.timing.mean_field_arrays import (
    ANY,
    BEFORE,
    NO_BLOCK,
    PART_BITS,
    SPAN,
    WINDOW,
    BlockResults,
    GroupStates,
)

#: Significant bits of a number of others' transfers: groups with equal bits share results.
SIGNIFICANT = 5

head_of = inline(mean_field_arrays.head_of)


@inline
def rounded(parts: int) -> int:
    """Return a mean number of transfers, rounded to ``SIGNIFICANT`` bits."""
    unit = 1
    while parts >= unit << SIGNIFICANT:
        unit *= 2
    return (parts + unit // 2) // unit * unit


@inline
def note_others(t: GroupStates, r: BlockResults, g: int) -> None:
    """Write, rounded and in parts, the number of others' transfers that a group notices on each link."""
    for link in range(len(r.link)):
        parts = t.total[link] - t.in_flight[g, link]
        is_noticed = parts > r.link[link].slack
        t.is_noticed[g, link] = is_noticed
        t.unnoticed[g, link] = 0 if is_noticed else parts
        t.others[link] = rounded(parts) if is_noticed else 0


@inline
def find(t: GroupStates, r: BlockResults, g: int) -> bool:
    """Find the result of a group's block, and the links on which it notices others; return whether there is a
    result.
    """
    note_others(t, r, g)
    at, state = t.group[g].at, t.group[g].state
    number, is_last = t.block[at].number, 1 if t.block[at + 1].number == NO_BLOCK else 0
    candidate = r.head[head_of(state, number, is_last)]
    while candidate >= 0:
        k = r.result[candidate]
        is_it = k.state == state and k.number == number and k.is_last == is_last
        for link in range(len(r.link)):
            is_it = is_it and t.others[link] == r.others[candidate, link]
        for place in range(WINDOW if is_it else 0):
            wanted = r.neighbour[candidate, place]
            is_it = is_it and (wanted == ANY or wanted == t.block[at + place - BEFORE].number)
        if is_it:
            t.group[g].result = candidate
            return True
        candidate = k.next
    return False


@inline
def put_in_flight(t: GroupStates, g: int, link: int, parts: int) -> None:
    """Let a group have this number of transfers in flight on a link."""
    t.total[link] += parts - t.in_flight[g, link]
    t.in_flight[g, link] = parts


@inline
def cycles_of(t: GroupStates, r: BlockResults, g: int) -> int:
    """Return the cycles of the current block, including the omitted iterations."""
    k = r.result[t.group[g].result]
    cycles: int = k.cycles + t.block[t.group[g].at].extra * k.span_cycles // SPAN
    return cycles


@inline
def booked_of(t: GroupStates, r: BlockResults, g: int, place: int) -> int:
    """Return a recorded number of the current block."""
    found = t.group[g].result
    booked: int = r.booked[found, place] + t.block[t.group[g].at].extra * r.span_booked[found, place] // SPAN
    return booked


@inline
def take_part(t: GroupStates, r: BlockResults, g: int) -> None:
    """Put as many transfers in flight as a group has on average in the current block.

    Others' transfers that delay no later operation still lengthen the group's transfers: each needs the time of all of
    them in sequence.
    """
    links, cycles = len(r.link), max(1, cycles_of(t, r, g))
    first = r.booked.shape[1] - 2 * links
    for link in range(links):
        if t.is_noticed[g, link]:
            parts = (booked_of(t, r, g, first + links + link) << PART_BITS) // cycles
        else:
            alone = (booked_of(t, r, g, first + link) << FRACTION_BITS) // r.link[link].rate
            parts = alone * ((t.unnoticed[g, link] + (1 << PART_BITS)) << PART_BITS) // cycles
        put_in_flight(t, g, link, parts)


@kernel
def run_groups(t: GroupStates, r: BlockResults) -> int:
    """Let every group run its blocks; return a group whose block has no result yet, or -1 when all have ended."""
    while True:
        first = -1
        for g in range(len(t.group)):
            if t.group[g].is_waiting and (first < 0 or t.group[g].time < t.group[first].time):
                first = g
        if first < 0:
            return -1
        if t.group[first].state < 0:
            t.group[first].is_waiting = 0
            for link in range(len(r.link)):
                put_in_flight(t, first, link, 0)
            continue
        if not find(t, r, first):
            return first
        for place in range(r.booked.shape[1]):
            t.booked[first, place] += booked_of(t, r, first, place)
        take_part(t, r, first)
        t.group[first].time += cycles_of(t, r, first)
        t.group[first].state = r.result[t.group[first].result].after
        t.group[first].at += 1
