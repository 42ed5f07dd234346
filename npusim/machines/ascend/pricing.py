"""What operations cost on an Ascend core, and on others of such units: one table a unit, by its model in the file."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING

from npusim.config.engine import DmaEngine, FixpipeEngine, MatrixEngine, VectorEngine
from npusim.errors import ProgramError, UnknownOpcodeError
from npusim.formats import get_format
from npusim.ir.content import Itself, methods_of
from npusim.ir.op import Opcode, Step
from npusim.ir.program import Cost
from npusim.ir.tile import GlobalTile, memory_of
from npusim.machines.ascend.vector_cost import signature, vector_cycles
from npusim.machines.transfers import Transfers
from npusim.units import ceil_div, round_up

if TYPE_CHECKING:
    from collections.abc import Hashable

    from npusim.config.device import BankSpec, DeviceSpec
    from npusim.config.engine import EngineSpec
    from npusim.ir.op import Pace, Source, TileOp
    from npusim.ir.program import TileProgram
    from npusim.ir.tile import Operand


@lru_cache(maxsize=16)  # of devices and units
def _known(_device: Itself, *_by: object) -> dict[Hashable, Cost]:
    """Return what operations are known by now to cost on a device by those who say so, to be added to."""
    return {}


def crowd(blocks: int, groups: int) -> float:
    """Return how many of the other core groups work beside one, on average over ``blocks``: 0 to 1."""
    busy = blocks / max(1, ceil_div(blocks, groups))
    return (busy - 1) / (groups - 1) if blocks and groups > 1 else 0.0


class EnginePricing(Transfers):
    """Costs of a program's operations on engines that the device file gives as pipes, matrix and vector units."""

    def __init__(self, program: TileProgram, device: DeviceSpec) -> None:
        super().__init__(program, device)
        self.crowds = {p.name: crowd(len(p.blocks), device.group_count.value) for p in program.phases}
        #: By everything that the cost of a vector unit's operation depends on, for all programs on the device.
        self._vector = _known(Itself(device), vector_cycles)
        self._steps = _known(Itself(device), *methods_of(type(self)))
        self._units: dict[tuple[str, str], tuple[EngineSpec, str, BankSpec | None]] = {}

    def of_op(self, op: TileOp) -> Cost:
        """Return the exact sum of the costs of an operation's steps; its latency lasts until all results are there."""
        queue = self.queues[op.queue]
        spec, key, banks = self._unit(queue.core, queue.engine)
        if isinstance(spec, VectorEngine):
            joins = op.pace.joins and spec.head_exposed is not None and spec.head_exposed.value == "idle"
            return self._with_tile(op.pace, self._sequence(op.steps, spec, key, banks, joins=joins))
        occupancy = latency = 0
        links: dict[str, int] = {}
        terms: dict[str, float] = {}
        for step in op.steps:
            cost = self.of_step(step, queue.core, queue.engine)
            occupancy += cost.occupancy_cycles
            latency = max(latency - cost.occupancy_cycles, cost.latency_cycles)
            for link, size in cost.link_bytes:
                links[link] = links.get(link, 0) + size
            for key, cycles in cost.terms:
                terms[key] = terms.get(key, 0.0) + cycles
        return Cost(occupancy, latency, tuple(links.items()), tuple(terms.items()))

    def _sequence(
        self, steps: tuple[Step, ...], spec: VectorEngine, key: str, banks: BankSpec | None, *, joins: bool = False
    ) -> Cost:
        """Return the cost of steps that follow one another on a vector unit, alike ones looked at once."""
        alike = key, joins, signature(steps, banks)
        if alike not in self._vector:
            cycles, terms = vector_cycles(steps, spec, banks, key, joins=joins)
            self._vector[alike] = Cost(cycles, terms=terms)
        return self._vector[alike]

    def _with_tile(self, pace: Pace, cost: Cost) -> Cost:
        """Return a cost with what a tile that is handed over takes beside."""
        if not pace.tiles:
            return cost
        flags, terms, share = self.device.flags, list(cost.terms), self.crowds[pace.phase] / pace.tiles
        for name in ("tile_cycles", *(("tile_extra_cycles",) if pace.extra else ())):
            spec = getattr(flags, name, None)
            if share and spec is not None:
                terms.append((f"flags.{name}", spec.value * share))
        more = sum(cycles for _, cycles in terms[len(cost.terms) :])
        return cost._replace(occupancy_cycles=cost.occupancy_cycles + ceil(more), terms=tuple(terms))

    def of_step(self, step: Step, core: str, engine: str) -> Cost:
        """Return the cost of one step on ``engine`` of ``core``.

        Transfers and products within a core hang on shapes and formats alone: alike ones are looked at once.
        """
        operands, (spec, key, banks) = (step.dst, *step.srcs), self._unit(core, engine)
        if isinstance(spec, VectorEngine):
            return self._sequence((step,), spec, key, banks)
        if GlobalTile in map(type, operands):
            return self._of_step(step, core, engine)
        alike = core, engine, step.opcode, step.attributes.arithmetic, *map(_shape, operands)
        if alike not in self._steps:
            self._steps[alike] = self._of_step(step, core, engine)
        return self._steps[alike]

    def _of_step(self, step: Step, core: str, engine: str) -> Cost:
        spec, key, _ = self._unit(core, engine)
        match spec:
            case DmaEngine() | FixpipeEngine():
                return self.move(step, spec, key)
            case MatrixEngine():
                return _product(step, spec, key)
        raise UnknownOpcodeError(f"{step.opcode.name} has no cost on {core}.{engine}")

    def _miss_share(self, tensor: str) -> float:
        """Return the share of a tensor's reads that wait for memory: a miss of one group is everybody's in its step."""
        return self.residency.read_waits[tensor]

    def _unit(self, core: str, engine: str) -> tuple[EngineSpec, str, BankSpec | None]:
        """Return an engine, its key in the device file, and the banks of the buffer it works in."""
        if (core, engine) not in self._units:
            spec = self.device.engine(core, engine)
            of_buffers = (b.banks for b in self.device.core(core).buffers.values())
            banks = next((b for b in of_buffers if b is not None), None)
            self._units[core, engine] = spec, f"cores.{core}.engines.{engine}", banks
        return self._units[core, engine]


class AscendPricing(EnginePricing):
    """Costs of a program's operations on one Ascend device."""

    def __init__(self, program: TileProgram, device: DeviceSpec) -> None:
        super().__init__(program, device)
        self._fractal = device.matrix_engine("aic").fractals["float16"].m_elements.value

    def of_op(self, op: TileOp) -> Cost:
        """Return the cost of an operation; halves of a tile that leave L0C in one instruction go side by side."""
        queue = self.queues[op.queue]
        spec = self.device.engine(queue.core, queue.engine)
        if len(op.steps) < 2 or not isinstance(spec, FixpipeEngine):
            return super().of_op(op)
        halves = [self.of_step(step, queue.core, queue.engine) for step in op.steps]
        slowest = max(halves, key=lambda cost: cost.occupancy_cycles)
        key, drain = f"cores.{queue.core}.engines.{queue.engine}.elements_per_cycle", slowest.occupancy_cycles
        start = sum(cycles for constant, cycles in slowest.terms if constant.endswith(".latency_cycles"))
        elements = sum(step.dst.rows * step.dst.cols for step in op.steps) / spec.elements_per_cycle.value
        if (whole := ceil(elements + start)) <= drain:
            return slowest
        last = tuple(term for term in slowest.terms if term[0].endswith(".latency_cycles"))
        return Cost(whole, slowest.latency_cycles, slowest.link_bytes, ((key, elements), *last))

    def stored_bytes(self, operand: Operand, memory: str) -> int:
        """Return an operand's bytes in ``memory``: padded to whole fractals in L1, L0A, L0B, L0C (ascend.md 1.2)."""
        if memory in ("GM", "UB"):
            return operand.payload_bytes
        size, edge = get_format(operand.fmt).size_bytes, self._fractal
        return round_up(operand.rows, edge) * round_up(operand.cols, edge) * size


def _shape(operand: Source) -> Hashable:
    """Return what the cost of a step that is no vector unit's hangs on."""
    if isinstance(operand, float):
        return operand
    return memory_of(operand), operand.rows, operand.cols, operand.stride, operand.fmt  # type: ignore[union-attr]


def _product(step: Step, spec: MatrixEngine, key: str) -> Cost:
    if step.opcode is not Opcode.MATMUL:
        raise UnknownOpcodeError(f"{step.opcode.name} has no cost on {key}: it only multiplies")
    a = step.srcs[0]
    if isinstance(a, float):
        raise ProgramError("a matrix product needs tiles, not constants")
    if step.attributes.arithmetic and step.dst.fmt != (sums := step.attributes.accumulator_format):
        raise UnknownOpcodeError(f"MATMUL to {step.dst.fmt} has no cost on {key}: it adds up in {sums}; CAST it")
    fractal = spec.fractal(a.fmt)
    count = (
        ceil_div(step.dst.rows, fractal.m_elements.value)
        * ceil_div(step.dst.cols, fractal.n_elements.value)
        * ceil_div(a.cols, fractal.k_elements.value)
    )
    work = count * spec.cycles_per_fractal.value
    start = spec.startup_cycles.value
    terms = ((f"{key}.cycles_per_fractal", float(work)), (f"{key}.startup_cycles", float(start)))
    return Cost(ceil(work + start), terms=terms)
