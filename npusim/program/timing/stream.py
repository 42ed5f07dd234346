"""The instruction streams of a core group: the issues of each scalar unit, in program order.

Operations come from templates with their costs attached once; a stream only adds the current
cursors, so that a long program needs no more memory than its shapes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from npusim.config.core_units import ScalarEngine
from npusim.errors import ProgramError, SpecError
from npusim.identity import Itself
from npusim.late_methods import dataclass
from npusim.program.ir.residency import dirty_share
from npusim.program.ir.walk import OpTemplate, Templates, unrolled
from npusim.program.timing.gpu_pipes import shared_pipes, sharing_of, turn_cycles
from npusim.program.timing.link import NO_CATCH_UP, bytes_per_cycle, catch_up

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import ProgramPhase, Queue, Share, TileProgram
    from npusim.program.timing.engine_code import Code


@dataclass(slots=True, eq=False)
class TimedOp:
    """An operation template with its cost.

    ``issue_cycles`` is the time that its scalar unit needs; ``content``: operations of equal content take the same
    time.
    """

    content: Hashable
    queue: int
    label: str
    occupancy: int
    latency: int
    flows: tuple[tuple[str, int], ...]
    waits: tuple[tuple[int, int, int], ...]  #: the template's waits
    sets: tuple[int, ...]
    issue_cycles: int
    terms: tuple[tuple[str, float], ...]
    pipes: tuple[tuple[int, int], ...] = ()  #: shared pipes that it uses, each with its cycles
    share: Share | None = None  #: work that is shared with other warp groups and waits for no pipe
    idle_bytes: tuple[tuple[str, int], ...] = ()  #: bytes of the flows that are not transferred


def clocked(program: TileProgram, device: DeviceSpec) -> DeviceSpec:
    """Return the device at its clock for a program; all code that counts cycles of the program must use this device."""
    return _clocked(Itself(device), flops=bool(program.flops))


@lru_cache
def _clocked(device: Itself, *, flops: bool) -> DeviceSpec:
    """Return `DeviceSpec.clocked`, one object for all programs of a device: costs of operations are stored by it."""
    of_products: DeviceSpec = device.thing.clocked(flops)
    return of_products


#: An operation and every endpoint's cursor at the start of its template, to which its waits are relative.
Issued = tuple[TimedOp, Sequence[int]]


def has_loops(phase: ProgramPhase) -> bool:
    """Return whether blocks of a phase process several tiles."""
    return any(block.tile_count > 1 for block in phase.blocks[:1])


class Streams:
    """Builds the streams of a program on a device, sharing templates and costs between groups.

    ``templates``: those of the program, from another device on which it was timed.
    """

    def __init__(self, program: TileProgram, device: DeviceSpec, templates: Templates | None = None) -> None:
        self.program, self.device = program, (device := clocked(program, device))
        self.templates = templates or Templates(program)
        self.endpoints = self.templates.walker.endpoints
        #: Endpoints whose waits stop the scalar unit that issues them, not only their pipe.
        self.scalar_waits = frozenset(
            e.index
            for e in self.endpoints
            if e.is_cross_core and device.timed_flags().cross_core_wait_blocks.value == "scalar"
        )
        if program.pricing is None:
            raise ProgramError(
                f"{program.name}: its device file does not state the costs of its operations; it has values but no time"
            )
        self.costs = program.pricing(program, device)
        self.pipes, self.sharing = shared_pipes(program, device), sharing_of(program, device)
        self.issuers = tuple(dict.fromkeys(q.issuer for q in program.queues))
        self._crossing = frozenset(e.index for e in self.endpoints if e.is_cross_core)
        self._own_issue = [self._issue_of(queue) for queue in program.queues]
        self._flag_issue = device.timed_flags().cross_core_issue_cycles.value
        #: The arrays that the compiled methods derive from it (`npusim.program.timing.engine_code.code_of`).
        self.code: Code | None = None

    def starts(self, phase: ProgramPhase) -> tuple[int, ...]:
        """Return the start of each issuer in a phase: blocks that a core holds take turns in their loops."""
        begin = self.device.timed_launch().block_dispatch_cycles.value
        turns = {queue.issuer: queue.turn for queue in self.program.queues}
        takes_turns = any(turns.values()) and (has_loops(phase) or self._replaces_rows(phase))
        takes_turns = takes_turns and not self.program.is_in_step
        late = turn_cycles(self.program, self.device) if takes_turns else 0
        return tuple(begin + late * turns[issuer] for issuer in self.issuers)

    def _replaces_rows(self, phase: ProgramPhase) -> bool:
        """Return whether blocks read separate rows, and some of them begin after others end."""
        return self.program.has_own_rows and len(phase.blocks) > self._held(phase)

    def _held(self, phase: ProgramPhase) -> int:
        """Return the number of blocks of a phase that all cores hold at once."""
        return phase.place_count * self.device.group_count.value

    def catch_up(self, phase: ProgramPhase) -> list[tuple[int, int]]:
        """Return the idle cycles that each link recovers in a phase, and the multiple of its rate while it does.

        None if no block has a loop. Otherwise each block begins when another one ends, and all remain in step, unless
        each reads separate rows: then blocks that begin later wait as long as the link is busy.  Programs that continue
        with further rows stay in step; if a core holds one of them, the link writes back while all of them work.
        """
        known = {link: catch_up(self.device, link) for link in self.device.links}
        if self.program.is_in_step:
            return [NO_CATCH_UP] * len(known)
        if self.program.goes_on:
            is_alone = self._held(phase) == self.device.group_count.value and self._replaces_rows(phase)
            most = {link: self._evicted_cycles(phase, link) if is_alone else 0 for link in known}
            return [(min(most[link], idle), rate) for link, (idle, rate) in known.items()]
        falls_apart = any(most for most, _ in known.values()) and (has_loops(phase) or self._replaces_rows(phase))
        return list(known.values()) if falls_apart else [NO_CATCH_UP] * len(known)

    def _evicted_cycles(self, phase: ProgramPhase, link: str) -> int:
        """Return the time that a link needs for the data that the outputs of all blocks on the cores evict from L2."""
        written = sum(t.size_bytes for t in self.program.tensors.values() if t.role == "output")
        evicted = written * dirty_share(self.program) * self._held(phase) / len(phase.blocks)
        return round(evicted / bytes_per_cycle(self.device, link))

    def check_pipe_waits(self, method: str) -> None:
        """Raise :class:`SpecError` if waits stop scalar units, for a method that cannot simulate this."""
        if self.scalar_waits:
            raise SpecError(
                f"{self.device.name}: flags.cross_core_wait_blocks: method {method} supports only `pipe`, a wait "
                "that stops one pipe but not the scalar unit that feeds all pipes; use method des"
            )

    def stream(
        self, phase: ProgramPhase, blocks: Iterable[object], cursors: list[int], issuer: str | None = None
    ) -> Iterator[Issued]:
        """Yield the operations of ``blocks`` that ``issuer`` issues (all by default), with cursors.

        ``cursors`` is advanced as blocks end, for the next phase.
        """
        for block in blocks:
            template = self.templates.of(phase, block)
            for op, base, _ in unrolled(template, cursors):
                if issuer is None or self.program.queues[op.queue].issuer == issuer:
                    yield self.timed(op), base
            for i, advance in enumerate(template.advance):
                cursors[i] += advance

    def timed(self, op: OpTemplate) -> TimedOp:
        """Return an operation with its cost, which depends on the device and on the content of L2."""
        if op.timed is None or op.timed[0] is not self.costs:
            cost = self.costs.of_op(op.op)
            pipes = tuple([(self.pipes.index(name), cycles) for name, cycles in cost.pipe_cycles])
            issue = self._issue_cycles(op)
            ends = tuple([(own, peer) for own, peer, _ in op.waits])
            content = op.queue, op.op.label, cost, ends, op.sets, issue
            spans = cost.occupancy_cycles, cost.latency_cycles, cost.link_bytes
            op.timed = (
                self.costs,
                TimedOp(
                    content,
                    op.queue,
                    op.op.label,
                    *spans,
                    op.waits,
                    op.sets,
                    issue,
                    cost.terms,
                    pipes,
                    cost.share,
                    cost.idle_bytes,
                ),
            )
        timed: TimedOp = op.timed[1]
        return timed

    def advanced(self, phase: ProgramPhase, blocks: Sequence[object], cursors: Sequence[int]) -> list[int]:
        """Return the cursors after ``blocks``."""
        advanced_cursors = list(cursors)
        for block in blocks:
            for i, advance in enumerate(self.templates.of(phase, block).advance):
                advanced_cursors[i] += advance
        return advanced_cursors

    def queue_depths(self) -> tuple[int, ...]:
        """Return the number of instructions that each queue of the program holds."""
        return tuple(
            self.device.engine(q.core, q.engine).queue_depth_count.value  # type: ignore[union-attr]
            for q in self.program.queues
        )

    def _issue_cycles(self, op: OpTemplate) -> int:
        """Return the scalar unit's time: the time of the instruction, plus a time for each cross-core flag."""
        crossing = {e for e, _, _ in op.waits if e in self._crossing}
        sets = [e for e in op.sets if e in self._crossing]
        return self._own_issue[op.queue] + self._flag_issue * (len(crossing) + len(sets))

    def _issue_of(self, queue: Queue) -> int:
        engines = self.device.core(queue.core).engines.values()
        scalar_cycles = next((e.issue_cycles for e in engines if isinstance(e, ScalarEngine)), None)
        return int(scalar_cycles.value) if scalar_cycles else 0

    def flag_latency(self, endpoint: int) -> int:
        """Return the cycles from an endpoint's set to the earliest end of a wait for it."""
        flags = self.device.timed_flags()
        if self.endpoints[endpoint].is_cross_core:
            return flags.cross_core_latency_cycles.value
        return flags.intra_core_latency_cycles.value
