"""One block of a core group beside a mean of the others: simulated once and remembered.

A block's result depends on the state in which the group enters it, on itself and its neighbours, and
on how many transfers of other groups share the links meanwhile; it is found in a table or simulated
and put there.
"""

from __future__ import annotations

from typing import NamedTuple

from npusim.timing.block_jit import inline
from npusim.timing.block_kernel import HALTED, NOTHING, advance
from npusim.timing.block_machine import (
    CALL,
    CROSSED,
    FETCHED,
    HALT,
    LEADER,
    MOMENT,
    NEVER,
    NOW,
    TARGET,
    EngineState,
    Ints,
    Program,
    Records,
)
from npusim.timing.steady_kernel import PRIME, Snapshots, digest_of, note_state, note_totals

#: Parts of a transfer in which means are counted, as a shift.
PART_BITS = 8
#: Calls written for a simulation: the block before, the block itself and those that scalar units may
#: be at already: small blocks fit into the instruction queues several at a time.
BEFORE, AFTER = 1, 30
WINDOW = BEFORE + 1 + AFTER
#: Where a result's key has the block itself, the next one, and the transfers of others.
BLOCK, NEXT, OTHERS = 1 + BEFORE, 2 + BEFORE, 1 + WINDOW
#: Significant bits of a number of others: results are shared by groups that agree in them.
SIGNIFICANT = 5
#: Upper half of a word, folded into the lower by the hash of keys.
FOLD_BITS = 32
#: How a simulation of one block ended.
ENTERED, FINISHED, FAILED = range(3)


class ReservedBlocks(NamedTuple):
    """ReservedBlocks by number, long loops cut short; and what each core group runs.

    ``kind`` has body and operand; how many operations the leading engine has in the block
    (``work``); and, where the block's loop was cut, after how many of them a span of its iterations
    begins and ends (``since``, ``until``).
    """

    kind: Records
    span: Ints  #: (1,): iterations between ``since`` and ``until``
    first: Ints  #: (groups + 1,): where each group's blocks begin in ``sequence``
    sequence: Ints
    extra: Ints  #: iterations cut out of each of them


class Known(NamedTuple):
    """States in which blocks are entered, results of blocks, and where to find them.

    A result's columns: the state after it (-1 at the end), its cycles, how many of them are those
    of the span of its loop, and which calls around it were fetched.
    """

    memory: Ints  #: (states, words): whole machines
    moment: Ints
    digest: Ints
    key: Ints  #: (results, OTHERS + links)
    place: Ints  #: hash table of results
    result: Records
    total: Ints  #: (results, totals), of the whole block
    part: Ints  #: (results, totals), of the span of its loop
    end: Ints  #: (results, engines): last results, where the group is through
    size: Ints  #: (2,): states, results


STATES, RESULTS = range(2)


class Groups(NamedTuple):
    """Where each core group is: its time, block, state; what it has booked."""

    place: Records
    flying: Ints  #: (groups, links): mean transfers in flight, in parts
    met: Ints  #: (groups, links): those of others that make nothing later, which a key leaves out
    total: Ints  #: (groups, totals)
    end: Ints  #: (groups, engines)
    slack: Ints  #: (links,): parts of other transfers that make no transfer of one's own later


# ---------------------------------------------------------------- one block


@inline
def write_window(p: Program, b: ReservedBlocks, key: Ints, window: int) -> None:
    """Write the calls around a block; ``key`` numbers them, -1 for none."""
    for i in range(WINDOW):
        number, at = key[1 + i], window + i
        p.code[at].kind = HALT if number < 0 else CALL
        if number >= 0:
            p.code[at].argument = b.kind[number].body
            p.code[at].operand = b.kind[number].operand


@inline
def begin_block(p: Program, m: EngineState, memory: Ints, b: ReservedBlocks, k: Known, key: Ints, window: int) -> None:
    """Put the machine where a block is entered, with others' transfers on the links."""
    for at in range(len(memory)):
        memory[at] = k.memory[key[0], at]
    write_window(p, b, key, window)
    for link in range(len(m.link)):
        others = key[OTHERS + link]
        p.link[link].others = others
        m.link[link].load += others
        if m.link[link].flows:
            m.link[link].due = m.size[NOW]
    m.size[FETCHED] = 0


@inline
def run_block(p: Program, m: EngineState, target: int) -> int:
    """Run until the leading engine has done ``target`` operations, or to the end."""
    m.size[TARGET] = target
    m.size[NOW] = advance(p, m, m.size[NOW])
    if m.size[CROSSED]:
        m.size[CROSSED] = 0
        return ENTERED
    for e in range(len(m.engine)):
        if m.engine[e].op != NOTHING or m.engine[e].length:
            return FAILED
    return FINISHED


@inline
def move_window(p: Program, m: EngineState, window: int) -> bool:
    """Let the calls move up by one; return False if a scalar unit is too far behind or ahead."""
    for d in range(len(m.dispatcher)):
        if m.dispatcher[d].pending == HALTED:
            if p.code[window + WINDOW - 1].kind != HALT:
                return False
        elif m.dispatcher[d].level == 0:
            m.dispatcher[d].pc -= 1
            if m.dispatcher[d].pc < window:
                return False
        else:
            m.stack[d, 0].pc -= 1
            if m.stack[d, 0].pc < window:
                return False
    return True


@inline
def cycles_since(m: EngineState, moment: int, status: int) -> int:
    """Return the cycles from ``moment`` to where the simulation of a block ended."""
    if status == ENTERED:
        return m.size[MOMENT] - moment
    last = moment
    for e in range(len(m.engine)):
        last = max(last, m.engine[e].end)
    return last - moment


@inline
def state_number(p: Program, m: EngineState, memory: Ints, k: Known, s: Snapshots) -> int:
    """Return the number of the machine's state, keeping it if it is new, or -1 without room."""
    moment = m.size[MOMENT]
    digest = digest_of(s.words[0], note_state(p, m, s, moment, s.words[0]))
    for d in range(len(m.dispatcher)):
        if m.dispatcher[d].pending != HALTED:
            for level in range(m.dispatcher[d].level):
                digest = (digest ^ m.stack[d, level].left) * PRIME
    states = k.size[STATES]
    for state in range(states):
        if k.digest[state] == digest:
            return state
    if states == len(k.digest):
        return -1
    k.digest[states], k.moment[states] = digest, moment
    for at in range(len(memory)):
        k.memory[states, at] = memory[at]
    k.size[STATES] += 1
    return states


@inline
def simulate_block(
    p: Program, m: EngineState, memory: Ints, b: ReservedBlocks, k: Known, s: Snapshots, window: int, r: int
) -> bool:
    """Find result ``r``, whose key is set; return False if the block cannot be simulated so."""
    key, moment, columns = k.key[r], k.moment[k.key[r, 0]], k.total.shape[1]
    result, kind = k.result[r], b.kind[key[BLOCK]]
    begin_block(p, m, memory, b, k, key, window)
    done = m.engine[m.size[LEADER]].done
    result.state, result.part = -1, 0
    note_totals(m, s.totals[0])
    for at in range(columns):
        k.part[r, at] = 0
    if kind.until:
        if run_block(p, m, done + kind.since) != ENTERED:
            return False
        note_totals(m, s.totals[1])
        result.part = -m.size[MOMENT]
        if run_block(p, m, done + kind.until) != ENTERED:
            return False
        note_totals(m, s.totals[2])
        result.part += m.size[MOMENT]
        for at in range(columns):
            k.part[r, at] = s.totals[2, at] - s.totals[1, at]
    is_last = key[NEXT] < 0
    status = run_block(p, m, NEVER if is_last else done + kind.work)
    result.cycles, result.fetched = cycles_since(m, moment, status), m.size[FETCHED]
    note_totals(m, s.totals[1])
    for at in range(columns):
        k.total[r, at] = s.totals[1, at] - s.totals[0, at]
    for link in range(len(m.link)):
        m.link[link].load -= key[OTHERS + link]
    if status == FINISHED and is_last:
        for e in range(len(m.engine)):
            k.end[r, e] = m.engine[e].end - moment
        return True
    if status != ENTERED or not move_window(p, m, window):
        return False
    result.state = state_number(p, m, memory, k, s)
    return result.state >= 0


# ---------------------------------------------------------------- the table of results


@inline
def find(p: Program, m: EngineState, memory: Ints, b: ReservedBlocks, k: Known, s: Snapshots, window: int) -> int:
    """Return the result whose key is written in the first free row, simulating it if it is new."""
    new, mask, at = k.size[RESULTS], len(k.place) - 1, 0
    for i in range(k.key.shape[1]):
        if i in (0, BLOCK, NEXT) or i >= OTHERS:
            word = k.key[new, i] >= 0 if i == NEXT else k.key[new, i]
            at = (at ^ word) * PRIME
            at ^= at >> FOLD_BITS
    at &= mask
    while k.place[at] >= 0:
        if is_alike(k, k.place[at], new):
            return k.place[at]
        at = (at + 1) & mask
    if new + 1 == len(k.key) or not simulate_block(p, m, memory, b, k, s, window, new):
        return -1
    k.place[at] = new
    k.size[RESULTS] = new + 1
    return new


@inline
def is_alike(k: Known, r: int, new: int) -> bool:
    """Return whether result ``r`` is that of key ``new``: what it does not depend on may differ."""
    if (k.key[r, NEXT] < 0) != (k.key[new, NEXT] < 0):
        return False
    for i in range(k.key.shape[1]):
        matters = i == 0 or i == BLOCK or i >= OTHERS  # noqa: PLR1714 - three compares, no set
        if not matters:
            matters = k.result[r].fetched >> (i - 1) & 1
        if matters and k.key[r, i] != k.key[new, i]:
            return False
    return True


@inline
def write_key(b: ReservedBlocks, k: Known, groups: Groups, g: int, state: int) -> None:
    """Write what the next block of group ``g`` depends on into the first free row of results."""
    key, first, last = k.key[k.size[RESULTS]], b.first[g], b.first[g + 1]
    key[0] = state
    for i in range(WINDOW):
        at = first + groups.place[g].block + i - BEFORE
        key[1 + i] = b.sequence[at] if first <= at < last else -1
    for link in range(groups.flying.shape[1]):
        others = -groups.flying[g, link]
        for other in range(len(groups.place)):
            others += groups.flying[other, link]
        is_harmless = others <= groups.slack[link]
        groups.met[g, link] = others if is_harmless else 0
        key[OTHERS + link] = 0 if is_harmless else rounded(others)


@inline
def rounded(parts: int) -> int:
    """Return a mean number of transfers, rounded to ``SIGNIFICANT`` bits."""
    unit = 1
    while parts >= unit << SIGNIFICANT:
        unit *= 2
    return (parts + unit // 2) // unit * unit
