"""Costs of transfers, on any core family: routes of the device file, requests, bursts, L2 and its misses.

Costs are pure functions of a step's shapes and formats and of the device file.  They are rounded to whole cycles once,
here.  A step without a cost raises an error; it never costs 0.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from math import ceil, inf
from typing import TYPE_CHECKING

from npusim.config.core_units import DmaEngine, FixpipeEngine, RouteSpec
from npusim.config.device import FOLLOWED
from npusim.errors import SpecError, UnknownOpcodeError
from npusim.formats import stored_format
from npusim.program.ir.op import Opcode, Step
from npusim.program.ir.residency import STAYING, Residency, residency
from npusim.program.ir.tile import GlobalTile, Operand, memory_of
from npusim.program.ir.tile_program import Cost
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import Queue, TileProgram, Touch


#: Alignment in global memory at which rows transfer fastest (Ascend C guide).
BLOCK_BYTES = 32
#: Number of bytes in one request for a row; one further request transfers the rest of the row (CANN's
#: cache_tiling_cycle_model.cc).
REQUEST_BYTES = 512, 256, 128


class Transfers:
    """Costs of a program's transfers on one device."""

    def __init__(self, program: TileProgram, device: DeviceSpec) -> None:
        self.device, self._program = device, program
        self.queues: dict[str, Queue] = {q.name: q for q in program.queues}
        #: Number of other core groups that work at the same time, by phase, where they cost time.
        self.crowds: dict[str, float] = {}
        self.is_placed = True

    @cached_property
    def _evicts_at_once(self) -> bool:
        """Whether reads wait for the lines that they evict.

        Programs of a stream that continue with further rows read in step, and then work: meanwhile, lines are written
        back.
        """
        return not (self._program.goes_on and self._program.l2 in FOLLOWED)

    @cached_property
    def residency(self) -> Residency:
        """Share of each tensor's bytes that is read from memory beyond L2, computed on first use; empty for bounds."""
        if not self.is_placed:
            return Residency.without_misses(self._program.tensors)
        l2, known = self.device.memory.l2, self._program.residencies
        is_followed = self._program.l2 in FOLLOWED
        writes_back = l2.writes is not None and l2.writes.value == "back"
        dirty_bytes = None if l2.dirty_factor is None else l2.dirty_bytes() if self._program.l2 == "dirty" else 0.0
        staying = STAYING if l2.stays is None else l2.stays.factors
        most = inf if l2.dirty_factor is None else l2.dirty_bytes()
        by = (
            self.device.group_count.value,
            l2.capacity_bytes.value,
            writes_back,
            dirty_bytes,
            is_followed,
            staying,
            most,
        )
        if by not in known:
            known[by] = residency(self._program, *by)
        return known[by]

    def move(self, step: Step, spec: DmaEngine | FixpipeEngine, key: str) -> Cost:
        """Return the cost of a transfer by the unit with this ``key`` in the device file, on one of the
        unit's routes.
        """
        is_cast = step.opcode is Opcode.CAST and isinstance(spec, FixpipeEngine)
        src = step.srcs[0]
        if not (step.opcode is Opcode.COPY or is_cast) or isinstance(src, float):
            raise UnknownOpcodeError(f"{step.opcode.name} has no cost on {key}, which only moves data")
        source, destination = memory_of(src), memory_of(step.dst)
        try:
            route = spec.route(source, destination)
        except SpecError as error:
            what = f"{step.opcode.name} of {step.dst.rows} x {step.dst.cols} {step.dst.fmt}"
            raise SpecError(f"{self.device.name}: {key}: {error}, but {what} needs it") from None
        path = f"{key}.routes.{next(name for name, r in spec.routes.items() if r is route)}"
        moved = max(self.stored_bytes(src, source), self.stored_bytes(step.dst, destination))
        if isinstance(spec, FixpipeEngine):
            _check_output(step, spec, route, path)
            moved = step.dst.payload_bytes
        port = moved / route.bytes_per_cycle.value
        terms = [(f"{path}.bytes_per_cycle", port)]
        if route.scale_bytes_per_cycle is not None and (scales := self.scale_bytes(src, source)):
            extra = scales / route.scale_bytes_per_cycle.value
            port = (moved - scales) / route.bytes_per_cycle.value + extra
            terms = [(f"{path}.bytes_per_cycle", port - extra), (f"{path}.scale_bytes_per_cycle", extra)]
        for name, extra in self._through_memory(step, route, port):
            port, terms = port + extra, [*terms, (f"{path}.{name}", extra)]
        if route.request_cycles is not None and any(self.crowds.values()):
            extra = max(0.0, _requests(step) * route.request_cycles.value - port)
            port, terms = port + extra, [*terms, (f"{path}.request_cycles", extra)]
        if isinstance(spec, FixpipeEngine):
            drain = src.rows * src.cols / spec.elements_per_cycle.value
            if drain > port:
                port, terms = drain, [(f"{key}.elements_per_cycle", drain)]
        interval = ceil(spec.issue_interval_cycles.value * _stretches(step))
        if interval > port:
            port, terms = interval, [(f"{key}.issue_interval_cycles", float(interval))]
        name, latency = self.latency(step, route)
        if not route.links:
            # Within a core, an instruction ends before the next one of its pipe begins; transfers through GM overlap.
            whole = Cost(ceil(port) + latency, 0, (), (*terms, (f"{path}.{name}", float(latency))))
            return whole.at_rate(spec.rate)
        if isinstance(src, GlobalTile):  # the share of its tensor that misses L2 takes longer
            latency += ceil(self._miss_share(src.tensor.name) * self.device.memory.l2.miss_extra_latency_cycles.value)
        idle = self._idle(step, route)
        links = tuple((link, n + dict(idle).get(link, 0)) for link, n in self._links(step, route))
        return Cost(ceil(port), latency, links, tuple(terms), idle_bytes=idle).at_rate(spec.rate)

    def latency(self, _step: Step, route: RouteSpec) -> tuple[str, int]:
        """Return the latency of a transfer: the name of its key in the device file, and the cycles."""
        return "latency_cycles", route.latency_cycles.value

    def stored_bytes(self, operand: Operand, _memory: str) -> int:
        """Return the bytes of an operand in a memory; a memory without padding stores the bytes of its elements."""
        return operand.payload_bytes

    def scale_bytes(self, operand: Operand, _memory: str) -> int:
        """Return the bytes of an operand's scales, which `stored_bytes` includes."""
        return stored_format(operand.fmt).scale_bytes(operand.rows * operand.cols)

    def _through_memory(self, step: Step, route: RouteSpec, port: float) -> Iterator[tuple[str, float]]:
        """Yield the costs of a move through GM that do not depend on its bytes: the constant's name, and cycles.

        The addresses of a tile are unknown here, because blocks of one shape have one cost: rows are assumed to be
        aligned if the pitch of their tensor is, and the average number of groups is assumed to share them.
        """
        rows, spent = _bursts(step), port
        if route.burst_overhead_cycles is not None:
            spent += rows * route.burst_overhead_cycles.value
            yield "burst_overhead_cycles", spent - port
        if route.row_cycles is not None:
            beyond = self._missed(step) * max(0.0, rows * route.row_cycles.value - spent)
            yield "row_cycles", beyond
            spent += beyond
        if route.unaligned_bytes_per_cycle is not None and _starts_inside_requests(step, BLOCK_BYTES):
            slow = max(0.0, step.dst.payload_bytes / route.unaligned_bytes_per_cycle.value - spent)
            yield "unaligned_bytes_per_cycle", slow
            if route.unaligned_row_cycles is not None and isinstance(source := step.srcs[0], GlobalTile):
                is_short = source.payload_bytes < source.rows * BLOCK_BYTES
                least = source.rows * route.unaligned_row_cycles.value if is_short else 0
                yield "unaligned_row_cycles", max(0.0, least - spent - slow)
            return
        if route.miss_bytes_per_cycle is not None:
            beyond = self._missed(step) * step.dst.payload_bytes / route.miss_bytes_per_cycle.value
            yield "miss_bytes_per_cycle", max(0.0, beyond - spent)
            spent = max(spent, beyond)
        request = self.device.memory.gm.request_min_bytes.value
        if route.unaligned_factor is not None and _starts_inside_requests(step, request):
            yield "unaligned_factor", spent * (route.unaligned_factor.value - 1)

    def _missed(self, step: Step) -> float:
        """Return the share of a move's bytes that L2 does not hold when it begins; slots of a core stay there."""
        source, target = step.srcs[0], step.dst
        if isinstance(source, GlobalTile):
            return self.residency.read_waits[source.tensor.name]
        return self.residency.new_writes[target.tensor.name] if isinstance(target, GlobalTile) else 0.0

    def _miss_share(self, tensor: str) -> float:
        return self.residency.read_misses[tensor]

    def _links(self, step: Step, route: RouteSpec) -> tuple[tuple[str, int], ...]:
        if not route.links:
            return ()
        sizes = [("l2", step.dst.payload_bytes), ("hbm", self._beyond(step))]
        return tuple((link, n) for link, n in sizes if n and link in route.links)

    def _is_walked(self, tile: GlobalTile) -> bool:
        """Return whether a block itself continues with the rest of the tile's rows in memory; otherwise other blocks
        read it at this time.
        """
        return any(
            touch.region.rows > tile.rows if tile.goes_down else touch.region.cols > tile.cols
            for touch in self._touches_of_one.get(tile.tensor.name, ())
        )

    @cached_property
    def _touches_of_one(self) -> Mapping[str, Sequence[Touch]]:
        """The regions that the first block of each phase accesses, by tensor."""
        result: dict[str, list[Touch]] = defaultdict(list)
        for phase in self._program.phases:
            for touch in phase.footprint(phase.blocks[:1]):
                result[touch.region.tensor.name].append(touch)
        return result

    def _idle(self, step: Step, route: RouteSpec) -> tuple[tuple[str, int], ...]:
        """Return the bytes that memory could transfer in the additional time that reads of parts of lines take; a
        negative number for writes of a phase that reads nothing, which memory transfers in less time.
        """
        source, parts = step.srcs[0], self.device.memory.gm.parts
        if isinstance(step.dst, GlobalTile) and step.dst.tensor.name in self._written_alone:
            factor = self.device.link("hbm").writes_factor
            less = 0 if factor is None else -int(self._beyond(step) * (1 - 1 / factor.value))
            return tuple((link, less) for link in ("hbm",) if less and link in route.links)
        if parts is None or not isinstance(source, GlobalTile):
            return ()
        if not source.is_part_of_lines(parts.line_bytes.value) or not self._is_walked(source):
            return ()
        missed = ceil(
            source.payload_bytes * self.residency.read_misses[source.tensor.name] * (parts.read_factor.value - 1)
        )
        return tuple((link, missed) for link in ("hbm",) if missed and link in route.links)

    @cached_property
    def _written_alone(self) -> frozenset[str]:
        """Names of the tensors that phases write which read nothing; none if memory writes at no other rate."""
        if "hbm" not in self.device.links or self.device.link("hbm").writes_factor is None:
            return frozenset()
        touched = [list(p.footprint(p.blocks[:1])) for p in self._program.phases]
        return frozenset(
            t.region.tensor.name for touches in touched if all(t.is_write for t in touches) for t in touches
        )

    def _beyond(self, step: Step) -> int:
        """Return the bytes of a transfer from or to memory beyond L2, from the share of its tensor that is there."""
        source, target = step.srcs[0], step.dst
        if isinstance(source, GlobalTile):
            name, held = source.tensor.name, self.residency
            pushed = held.read_pushes.get(name, 0.0) if self._evicts_at_once else 0.0
            return ceil(source.payload_bytes * (held.read_misses[name] + pushed))
        if isinstance(target, GlobalTile):
            name, held = target.tensor.name, self.residency
            evicted = held.write_misses[name] + held.write_pushes.get(name, 0.0)
            if self.is_placed and not self._evicts_at_once:
                evicted = 1.0
            return ceil(target.payload_bytes * evicted)
        return 0


def _check_output(step: Step, spec: FixpipeEngine, route: RouteSpec, path: str) -> None:
    allowed = route.output_formats or spec.casts
    if step.dst.fmt not in allowed:
        raise UnknownOpcodeError(
            f"{step.opcode.name} to {step.dst.fmt} has no cost on {path}, which can write {', '.join(allowed)}"
        )


def _stretches(step: Step) -> float:
    """Return the number of transfers of a move: one for each contiguous stretch of rows of a tensor."""
    return max((o.stretches for o in step.operands() if isinstance(o, GlobalTile)), default=1.0)


def _bursts(step: Step) -> float:
    """Return how often a move through GM jumps between rows, or stretches of rows, that do not follow one another."""
    jumps = 0.0
    for operand in step.operands():
        if isinstance(operand, GlobalTile):
            whole = operand.tensor
            if whole.column:
                jumps += 0 if operand.rows == whole.rows else ceil_div(operand.cols, whole.column) - 1
                continue
            gapless = operand.cols == whole.cols and (whole.heads == 1 or not whole.is_interleaved)
        elif memory_of(operand) == "GM":
            gapless = operand.cols == operand.stride
        else:
            continue
        between = operand.stretches - 1 if isinstance(operand, GlobalTile) else 0
        jumps += between if gapless else operand.rows - 1
    return jumps


def _requests(step: Step) -> float:
    """Return the number of requests for a load of a tensor's rows; it is 0 for contiguous rows and for fractals."""
    (source,) = step.srcs
    if not isinstance(source, GlobalTile) or source.tensor.column:
        return 0.0
    of_row, left = 0, stored_format(source.fmt).row_bytes(source.cols)
    for size in REQUEST_BYTES:
        count, left = divmod(left, size)
        of_row += count
    return _bursts(step) * (of_row + (left > 0))


def _starts_inside_requests(step: Step, request_bytes: int) -> bool:
    """Return whether rows of a move begin inside a request of global memory instead of at its start.

    Rows without gaps are one run of bytes on the way to or from UB; on the way to L1, each row is a run.
    """
    to_fractals = memory_of(step.dst) == "L1"
    for operand in step.operands():
        if memory_of(operand) != "GM" or operand.rows == 1:
            continue
        if isinstance(operand, GlobalTile) and operand.tensor.column:
            continue
        pitch = operand.tensor.cols if isinstance(operand, GlobalTile) else operand.stride
        is_run = pitch == operand.cols and not to_fractals
        if not is_run and stored_format(operand.fmt).row_bytes(pitch) % request_bytes:
            return True
    return False
