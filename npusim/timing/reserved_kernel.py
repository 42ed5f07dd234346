"""Core groups one by one, each beside a mean of the others, from block to block in order of time.

Each block of a group meets what the blocks that the others are at keep in flight on average.
"""

from __future__ import annotations

from npusim.timing.block_jit import inline, kernel
from npusim.timing.block_machine import FRACTION_BITS, NEVER, EngineState, Ints, Program
from npusim.timing.reserved_block import OTHERS, PART_BITS, Groups, Known, ReservedBlocks, find, rounded, write_key
from npusim.timing.steady_kernel import ENGINE_TOTALS, Snapshots

#: Rounds over the links in which the groups' first blocks find each other's transfers.
ROUNDS = 2


@inline
def length_of(b: ReservedBlocks, k: Known, r: int, extra: int) -> int:
    """Return the cycles of the block of result ``r`` with ``extra`` more iterations."""
    return k.result[r].cycles + extra * k.result[r].part // b.span[0]


@inline
def grown(b: ReservedBlocks, k: Known, r: int, extra: int, at: int) -> int:
    """Return what a total grows by in the block of result ``r`` with ``extra`` more iterations."""
    return k.total[r, at] + extra * k.part[r, at] // b.span[0]


@inline
def extra_of(b: ReservedBlocks, groups: Groups, g: int) -> int:
    """Return how many iterations were cut out of the block that group ``g`` is at."""
    return b.extra[b.first[g] + groups.place[g].block]


@inline
def mean_flying(
    p: Program, m: EngineState, b: ReservedBlocks, k: Known, groups: Groups, g: int, r: int, link: int
) -> int:
    """Return how many transfers group ``g`` keeps in flight on average in the block of result ``r``.

    Others that make no operation later still make its transfers longer: each takes as long as all
    of them would one after the other.
    """
    first = len(m.engine) * ENGINE_TOTALS + 2 * (m.stack.size + len(m.counter))
    extra, cycles = extra_of(b, groups, g), length_of(b, k, r, extra_of(b, groups, g))
    if k.key[r, OTHERS + link]:
        return (grown(b, k, r, extra, first + 2 * link + 1) << PART_BITS) // max(1, cycles)
    alone = (grown(b, k, r, extra, first + 2 * link) << FRACTION_BITS) // p.link[link].rate
    return alone * ((groups.met[g, link] + (1 << PART_BITS)) << PART_BITS) // max(1, cycles)


@inline
def pass_block(p: Program, m: EngineState, b: ReservedBlocks, k: Known, groups: Groups, g: int, r: int) -> None:
    """Let group ``g`` run the block of result ``r``."""
    place, extra = groups.place[g], extra_of(b, groups, g)
    cycles = length_of(b, k, r, extra)
    for at in range(groups.total.shape[1]):
        groups.total[g, at] += grown(b, k, r, extra, at)
    for link in range(groups.flying.shape[1]):
        groups.flying[g, link] = mean_flying(p, m, b, k, groups, g, r, link)
    if k.result[r].state < 0:
        for e in range(groups.end.shape[1]):
            groups.end[g, e] = place.time + cycles - k.result[r].cycles + k.end[r, e]
    place.time += cycles
    place.state = k.result[r].state
    place.block += 1


@inline
def meet(
    p: Program, m: EngineState, memory: Ints, b: ReservedBlocks, k: Known, s: Snapshots, groups: Groups, window: int
) -> bool:
    """Find how many transfers the groups' first blocks keep in flight together."""
    most = len(groups.place) * len(m.engine) << PART_BITS
    for g in range(len(groups.place)):
        if b.first[g] == b.first[g + 1]:
            groups.place[g].time = NEVER
    if not expect(p, m, memory, b, k, s, groups, window):
        return False
    for _ in range(ROUNDS):
        for link in range(groups.flying.shape[1]):
            least, rest = 0, most
            others = all_flying(groups, link)
            if others <= groups.slack[link]:
                continue
            # More transfers of others make every transfer longer, and so more are in flight.
            while rounded(least) != rounded(rest):
                guess = (least + rest) // 2
                if rounded(guess) in (rounded(least), rounded(rest)):
                    break
                share_out(groups, link, guess)
                if not expect(p, m, memory, b, k, s, groups, window):
                    return False
                if all_flying(groups, link) > guess:
                    least = guess
                else:
                    rest = guess
    return True


@inline
def all_flying(groups: Groups, link: int) -> int:
    """Return how many transfers all groups keep in flight on a link, in parts."""
    found = 0
    for g in range(len(groups.place)):
        found += groups.flying[g, link]
    return found


@inline
def share_out(groups: Groups, link: int, parts: int) -> None:
    """Let every group with blocks have an equal share of the transfers in flight on a link."""
    count = 0
    for g in range(len(groups.place)):
        count += groups.place[g].time != NEVER
    for g in range(len(groups.place)):
        groups.flying[g, link] = parts // count if groups.place[g].time != NEVER else 0


@inline
def expect(
    p: Program, m: EngineState, memory: Ints, b: ReservedBlocks, k: Known, s: Snapshots, groups: Groups, window: int
) -> bool:
    """Find what each group's next block keeps in flight, beside what the others do by now."""
    for g in range(len(groups.place)):
        if groups.place[g].time == NEVER:
            continue
        write_key(b, k, groups, g, groups.place[g].state)
        r = find(p, m, memory, b, k, s, window)
        if r < 0:
            return False
        groups.place[g].result = r
    for g in range(len(groups.place)):
        for link in range(groups.flying.shape[1]):
            if groups.place[g].time != NEVER:
                groups.flying[g, link] = mean_flying(p, m, b, k, groups, g, groups.place[g].result, link)
    return True


@kernel
def run_groups(
    p: Program, m: EngineState, memory: Ints, b: ReservedBlocks, k: Known, s: Snapshots, groups: Groups, window: int
) -> bool:
    """Run every group's blocks; return False if a block cannot be simulated on its own."""
    if not meet(p, m, memory, b, k, s, groups, window):
        return False
    while True:
        g = 0
        for other in range(len(groups.place)):
            if groups.place[other].time < groups.place[g].time:
                g = other
        if groups.place[g].time == NEVER:
            return True
        if groups.place[g].state < 0:
            groups.place[g].time = NEVER
            for link in range(groups.flying.shape[1]):
                groups.flying[g, link] = 0
            continue
        write_key(b, k, groups, g, groups.place[g].state)
        r = find(p, m, memory, b, k, s, window)
        if r < 0:
            return False
        pass_block(p, m, b, k, groups, g, r)
