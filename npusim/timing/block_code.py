"""Turns a tile program into the flat arrays of ``block_machine``: operations, bodies, block sequences.

A body is written once for each scalar unit, as code of operations, loops and calls; loops stay
loops.  A member's blocks become a sequence of calls, in which repetitions are loops too, so that
the arrays do not grow with the number of blocks of one shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from npusim.errors import ProgramError
from npusim.timing.block_machine import (
    CALL,
    END,
    FRACTION_BITS,
    HALT,
    LOOP,
    OP,
    OP_COLUMNS,
    RET,
    Program,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.timing.block_machine import Ints
    from npusim.timing.stream import Streams, TimedBody, TimedOp

#: Largest product of bytes in flight on a link and its clock's sub-units: int64 has 63 bits.
CLOCK_LIMIT = 1 << 62


@dataclass
class Code:
    """Code of all bodies of a program, written as they are asked for."""

    streams: Streams
    instructions: list[tuple[int, int]] = field(default_factory=list)
    entries: list[list[int]] = field(default_factory=list)
    operations: list[TimedOp] = field(default_factory=list)
    levels: int = 1
    _bodies: dict[int, int] = field(default_factory=dict)
    _depths: list[int] = field(default_factory=list)
    _counts: list[list[int]] = field(default_factory=list)  #: operations by body and issuer
    _places: dict[int, int] = field(default_factory=dict)
    _op_places: dict[int, int] = field(default_factory=dict)

    def body(self, body: TimedBody) -> int:
        """Return the number of a body's code, writing it if it is new."""
        known = self._bodies.get(id(body))
        if known is not None:
            return known
        calls = [
            (part.count, self.body(part.body)) if not isinstance(part, tuple) else part
            for part in body.parts
        ]
        issuers = self.streams.issuers
        queues = self.streams.program.queues
        entry, counts = [], []
        for index, issuer in enumerate(issuers):
            entry.append(len(self.instructions))
            counts.append(0)
            for part in calls:
                if isinstance(part[0], int):
                    self._repeat(part[0], [part[1]])
                    counts[-1] += part[0] * self._counts[part[1]][index]
                else:
                    own = [
                        (OP, self._operation(op))
                        for op in part
                        if queues[op.queue].issuer == issuer
                    ]
                    self.instructions += own
                    counts[-1] += len(own)
            self.instructions.append((RET, 0))
        self._counts.append(counts)
        inner = max((1 + self._depths[p[1]] for p in calls if isinstance(p[0], int)), default=0)
        self._bodies[id(body)] = len(self.entries)
        self.entries.append(entry)
        self._depths.append(1 + inner)
        return len(self.entries) - 1

    def _operation(self, op: TimedOp) -> int:
        place = self._op_places.get(id(op))
        if place is None:
            place = self._op_places[id(op)] = len(self.operations)
            self.operations.append(op)
        return place

    def _repeat(self, count: int, bodies: Sequence[int]) -> None:
        if count > 1:
            self.instructions.append((LOOP, count))
        self.instructions += [(CALL, body) for body in bodies]
        if count > 1:
            self.instructions.append((END, 0))

    def sequence(self, bodies: Sequence[int]) -> int:
        """Write a member's blocks, given as bodies, and return where its code begins."""
        start = len(self.instructions)
        period = shortest_period(bodies)
        times = len(bodies) // period
        if times > 1:
            self.instructions.append((LOOP, times))
        self._runs(bodies[:period])
        if times > 1:
            self.instructions.append((END, 0))
        self._runs(bodies[times * period :])
        self.instructions.append((HALT, 0))
        self.levels = max(self.levels, 2 + max((self._depths[b] for b in bodies), default=0))
        return start

    def _runs(self, bodies: Sequence[int]) -> None:
        at = 0
        while at < len(bodies):
            end = at + 1
            while end < len(bodies) and bodies[end] == bodies[at]:
                end += 1
            self._repeat(end - at, [bodies[at]])
            at = end

    def operation_count(self, bodies: Sequence[int]) -> int:
        """Return how many operations a sequence of bodies runs."""
        return sum(sum(self._counts[body]) for body in bodies)

    def busiest(self, members: Sequence[Sequence[int]]) -> int:
        """Return the dispatcher with the most operations: of the member with most, its busiest."""
        issuers = len(self.streams.issuers)
        totals = [
            [sum(self._counts[body][i] for body in own) for i in range(issuers)] for own in members
        ]
        longest = max(range(len(totals)), key=lambda member: sum(totals[member]))
        return longest * issuers + max(range(issuers), key=lambda i: totals[longest][i])

    def program(self, weights: Sequence[int], is_traced: Sequence[bool]) -> Program:
        """Return the arrays of everything written so far, for members of these weights."""
        streams = self.streams
        links = {name: index for index, name in enumerate(streams.device.links)}
        op, wait, sets, flow = [], [], [], []
        for o in self.operations:
            op.append(
                (o.queue, o.occupancy, o.latency, o.issue_cycles, len(wait), len(sets), len(flow))
            )
            wait += [(own, peer) for own, peer, _, _ in o.waits]
            sets += o.sets
            flow += [(links[name], size) for name, size in o.flows]
        op.append((0, 0, 0, 0, len(wait), len(sets), len(flow)))
        queues = streams.program.queues
        owners = {q.name: i for i, q in enumerate(queues)}
        check_range(max((size for _, size in flow), default=0), sum(weights) * len(queues))
        return Program(
            op=_table(op, OP_COLUMNS),
            wait=_table(wait, 2),
            set=np.array(sets, np.int64),
            flow=_table(flow, 2),
            code=_table(self.instructions, 2),
            entry=_table(self.entries, len(streams.issuers)),
            endpoint=_table(
                [
                    (e.lag, e.period, streams.flag_latency(e.index), owners[e.queue])
                    for e in streams.endpoints
                ],
                4,  # columns LAG to OWNER
            ),
            pair=_table([(e.index, peer) for e in streams.endpoints for peer in e.peers], 2),
            depth=np.array(streams.queue_depths(), np.int64),
            issuer=np.array([streams.issuers.index(q.issuer) for q in queues], np.int64),
            link=_table([(rate, 1, 0) for rate in link_rates(streams)], 3),  # RATE to BACKGROUND
            weight=np.array(weights, np.int64),
            is_traced=np.array(is_traced, np.int64),
        )


def _table(rows: Sequence[Sequence[int]], columns: int) -> Ints:
    return np.array(rows, np.int64).reshape(-1, columns)


def link_rates(streams: Streams) -> list[int]:
    """Return what each link serves in a cycle, in units of its clock, as ``SharedLink`` rounds it."""
    clock = streams.device.clock_hz.value
    return [
        max(1, round((x.mixed_bytes_per_s or x.bytes_per_s).value / clock * (1 << FRACTION_BITS)))
        for x in streams.device.links.values()
    ]


def check_range(largest_bytes: int, transfers: int) -> None:
    """Raise :class:`ProgramError` if a link's clock could leave the range of int64."""
    if (largest_bytes << FRACTION_BITS) * transfers >= CLOCK_LIMIT:
        raise ProgramError(
            f"{transfers} transfers of {largest_bytes} bytes at once leave the range of this engine's integers; "
            "use method des"
        )


def shortest_period(values: Sequence[int]) -> int:
    """Return the smallest p with ``values[i] == values[i + p]`` throughout (Knuth-Morris-Pratt)."""
    border = [0] * (len(values) + 1)
    matched = 0
    for i in range(1, len(values)):
        while matched and values[i] != values[matched]:
            matched = border[matched]
        if values[i] == values[matched]:
            matched += 1
        border[i + 1] = matched
    return max(1, len(values) - border[-1])
