"""Max-plus replay in program order: what ``des`` must give where no link is shared.

An operation starts when its engine is free, its flags are visible and its scalar unit has issued
it; a scalar unit issues operation n of a queue only after operation n - depth has left that queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.errors import DeadlockError
from npusim.program.ir.walk import required_count
from npusim.program.timing.stream import Streams
from npusim.program.timing.summary import NO_INSTRUCTION, OpCounts, summarise
from npusim.program.timing.timing_result import QueueUse, Span, TimingResult

if TYPE_CHECKING:
    from collections.abc import Collection

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import ProgramPhase, TileProgram


def simulate(
    program: TileProgram, device: DeviceSpec, *, trace_groups: Collection[int] = (), streams: Streams | None = None
) -> TimingResult:
    """Return the time of ``program`` as if every transfer had its links to itself."""
    streams = streams or Streams(program, device)
    streams.check_pipe_waits("replay")
    replay = _Replay(streams, frozenset(trace_groups))
    ends = []
    for phase in program.phases:
        replay.run(phase)
        ends.append(replay.cycles)
    uses = tuple(tuple(uses) for uses in replay.uses)
    return summarise(replay.streams, "replay", ends, uses, replay.link_bytes, replay.counts, tuple(replay.spans))


class _Replay:
    def __init__(self, streams: Streams, trace_groups: frozenset[int]) -> None:
        assert not streams.pipes, "queues with shared pipes have no replay"
        self.streams, self.trace_groups = streams, trace_groups
        program, device = streams.program, streams.device
        self.group_count = device.group_count.value
        self.uses = [[QueueUse(q.name, g) for q in program.queues] for g in range(self.group_count)]
        self.cursors = [[0] * len(streams.endpoints) for _ in range(self.group_count)]
        self.visible: list[list[list[int]]] = [[[0] for _ in streams.endpoints] for _ in range(self.group_count)]
        self.latencies = [streams.flag_latency(e.index) for e in streams.endpoints]
        self.link_bytes = dict.fromkeys(device.links, 0)
        self.counts: OpCounts = {}
        self.spans: list[Span] = []
        self.cycles = self.issued = 0
        self.depths = streams.queue_depths()

    def run(self, phase: ProgramPhase) -> None:
        """Replay one phase on every group; all of them start where the phase before it ended."""
        start = self.cycles
        for group in range(self.group_count):
            blocks = phase.blocks_of_group(group, self.group_count)
            if blocks:
                self._group(phase, group, blocks, start)
        # A phase is over when its last result is there; one without work still is dispatched.
        self.cycles = max(self.issued, *(u.end_cycles for uses in self.uses for u in uses))

    def _group(self, phase: ProgramPhase, group: int, blocks: object, start: int) -> None:
        streams, queues = self.streams, self.streams.program.queues
        uses, visible = self.uses[group], self.visible[group]
        spans = self.spans if group in self.trace_groups else None
        issued = dict.fromkeys(streams.issuers, start + streams.device.timed_launch().block_dispatch_cycles.value)
        free = [start] * len(queues)
        popped: list[list[int]] = [[] for _ in queues]
        for op, base in streams.stream(phase, blocks, self.cursors[group]):  # type: ignore[arg-type]
            index = op.queue
            use, history, issuer = uses[index], popped[index], queues[index].issuer
            at = issued[issuer] + op.issue_cycles
            if len(history) >= self.depths[index]:
                at = max(at, history[-self.depths[index]])
            issued[issuer] = at
            taken = max(at, free[index])
            history.append(taken)
            # Trim seldom: only the last ``depth`` entries are ever looked at.
            if len(history) > 2 * 2 * self.depths[index]:
                del history[: -2 * self.depths[index]]
            if taken > free[index]:
                use.stalls[NO_INSTRUCTION] = use.stalls.get(NO_INSTRUCTION, 0) + taken - free[index]
            begin = taken
            for own, peer, delta in op.waits:
                count = required_count(streams.endpoints[own], base[own] + delta)
                if count <= 0:
                    continue
                if count >= len(visible[peer]):
                    raise DeadlockError(
                        f"{op.label} on {use.queue} waits for {streams.endpoints[own]} number {count}, which no "
                        "earlier operation of the program sets"
                    )
                seen = visible[peer][count]
                if seen > begin:
                    cause = str(streams.endpoints[own])
                    use.stalls[cause] = use.stalls.get(cause, 0) + seen - begin
                    begin = seen
            end = begin + op.occupancy
            free[index] = end
            use.busy_cycles += op.occupancy
            use.operations += 1
            use.end_cycles = max(use.end_cycles, end + op.latency)
            for own in op.sets:
                visible[own].append(use.end_cycles + self.latencies[own])
            for name, size in op.flows:
                self.link_bytes[name] += size
            self.counts[op] = self.counts.get(op, 0) + 1
            if spans is not None:
                spans.append(Span(group, use.queue, op.label, begin, end))
        self.issued = max(self.issued, *issued.values())
