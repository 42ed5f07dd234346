"""What the steps of a GPU's warps cost: cycles of every pipe they take, and of the warps themselves.

All pure functions of shapes, formats, lane layouts and the device file.  One operation is executed
by a group of warps in step, spread over the sub-cores; pipes are those of the whole multiprocessor,
so that a pipe of which each sub-core has its own counts the cycles of one sub-core.

The steps of an operation follow one another, each when the first results of the one before are
there (``latency_cycles``): a warp issues in order.  Within a product, loads of B from shared memory
and matrix instructions overlap; the longer of the two is what the warps take.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, TypeVar

from npusim.config.engine import LanePipe, MmaStepsSpec, SharedMemoryPipe, WarpIssue, WarpMatrixEngine
from npusim.errors import ProgramError, UnknownOpcodeError
from npusim.formats import get_format
from npusim.ir.op import Opcode
from npusim.ir.tile import GlobalTile, RingTile, Tile, memory_of
from npusim.layout.chain import chain
from npusim.layout.fragment import WARP_LANES, arrangement
from npusim.layout.instruction import instruction
from npusim.layout.memory import BankModel
from npusim.machines.sm.banks import load_cycles, store_cycles
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.ir.op import Step, TileOp, WarpPlan
    from npusim.ir.tile import Operand
    from npusim.layout.chain import ChainCost
    from npusim.layout.fragment import Arrangement
    from npusim.layout.instruction import MmaInstruction

EngineType = TypeVar("EngineType")
#: Names of the device file's pipes (design section 6).
ISSUE, TENSOR, FMA, MUFU, LSU = "WARPS", "TENSOR", "FMA", "MUFU", "LSU"
#: Steps on the pipe of special functions, whatever operation they stand in.
SPECIAL = frozenset({Opcode.EXP, Opcode.LOG})
REDUCTIONS = frozenset({Opcode.ROW_MAX, Opcode.ROW_SUM})

WarpCost = tuple[int, int, tuple[tuple[str, int], ...], tuple[tuple[str, float], ...], tuple[tuple[str, int], ...]]


@dataclass
class Tally:
    """What the steps so far have taken: of each pipe, of the warps, and by which constant."""

    pipes: dict[str, float] = field(default_factory=dict)
    terms: dict[str, float] = field(default_factory=dict)
    cycles: float = 0.0

    def take(self, pipe: str, cycles: float, constant: str) -> None:
        """Let a pipe be busy for ``cycles`` more."""
        self.pipes[pipe] = self.pipes.get(pipe, 0.0) + cycles
        self.terms[constant] = self.terms.get(constant, 0.0) + cycles


def warp_cost(op: TileOp, device: DeviceSpec, core: str) -> WarpCost:
    """Return occupancy, latency, link bytes, terms and pipe cycles of an operation of warps.

    The operation's own pipe comes first.  Its results are there when it ends.  One without steps
    takes no pipe: warps without rows only keep step.
    """
    tally, model = Tally(), WarpModel(device, core)
    for step in op.steps:
        model.add(step, tally)
    if op.steps and not tally.pipes:
        raise UnknownOpcodeError(f"{op.label}: no step takes a pipe of {core}")
    names = sorted(tally.pipes, key=lambda name: name != op.engine)
    pipes = tuple((f"{core}.{name}", ceil(tally.pipes[name])) for name in names)
    return max(1, ceil(tally.cycles)), 0, (), tuple(tally.terms.items()), pipes


class WarpModel:
    """The costs of steps on one kind of core."""

    def __init__(self, device: DeviceSpec, core: str) -> None:
        self.key = f"cores.{core}.engines"

        def part(name: str, kind: type[EngineType]) -> EngineType:
            engine = device.engine(core, name)
            if not isinstance(engine, kind):
                raise ProgramError(f"{device.name}: {core}.{name} is no {kind.__name__}")
            return engine

        self.subcores = part(ISSUE, WarpIssue).subcores_count.value
        self.tensor = part(TENSOR, WarpMatrixEngine)
        self.lanes = {FMA: part(FMA, LanePipe), MUFU: part(MUFU, LanePipe)}
        self.shared = part(LSU, SharedMemoryPipe)
        self.banks = bank_model(self.shared)

    def add(self, step: Step, tally: Tally) -> None:
        """Add the cost of one step."""
        plan = step.attributes.warp
        if plan is None:
            raise ProgramError(f"{step.opcode.name}: a step of warps needs a plan of its lanes")
        if step.opcode is Opcode.MATMUL:
            self._product(step, plan, tally)
        elif plan.exchange:
            self._exchange(step, plan, tally)
        elif step.opcode is Opcode.COPY and memory_of(step.dst) == "SMEM":
            self._store(step, plan, tally)
        else:
            self._element_wise(step, plan, tally)

    # ---------------------------------------------------------------- products

    def _product(self, step: Step, plan: WarpPlan, tally: Tally) -> None:
        steps = self.tensor.steps_of(get_format(step.attributes.accumulator_format).name)
        mma, where = product_of(step, plan), arranged(plan)
        down, across = fragments(mma.c.rows, mma.c.columns, where, step.dst, plan.warps)
        a = step.srcs[0]
        assert not isinstance(a, float)
        depth = ceil_div(a.cols, mma.k)
        sharing = ceil_div(plan.warps, self.subcores)
        busy = down * across * depth * steps.pipe_cycles * sharing
        tally.take(TENSOR, busy, f"{self.key}.{TENSOR}.steps.{step.attributes.accumulator_format}.step_cycles")
        cycles = product_cycles(steps, chains=down * across * sharing, depth=depth)
        loads = 0
        operands = ((a, mma.a, down, False), (step.srcs[1], mma.b, across, step.attributes.transpose_b))
        for source, held, count, is_transposed in operands:
            assert not isinstance(source, float)
            if memory_of(source) == "SMEM":
                each = load_cycles(held, where, tile_of(source), plan, self.banks, is_transposed=is_transposed)
                accesses = ceil_div(depth * count * held.values * BYTES_OF_HALF, plan.access_bytes)
                loads += accesses * each * plan.warps
        if loads:
            tally.take(LSU, loads, self._phase(plan))
            cycles = max(cycles, loads) + self.shared.latency_cycles.value
        tally.cycles += cycles

    def _exchange(self, step: Step, plan: WarpPlan, tally: Tally) -> None:
        cost, rows, depth = chain_cost(plan)
        count = ceil_div(step.dst.rows, rows * plan.warps) * ceil_div(step.dst.cols, depth)
        if cost.shuffles:
            self._shuffle(cost.shuffles * count, plan, tally)
        self._lane_op(FMA, "permute", (cost.selects + cost.permutes) * count, "", plan, tally)

    # ---------------------------------------------------------------- shared memory

    def _store(self, step: Step, plan: WarpPlan, tally: Tally) -> None:
        loads = store_cycles(tile_of(step.dst), plan, self.banks)
        tally.take(LSU, loads, self._phase(plan))
        tally.cycles += loads + self.shared.latency_cycles.value

    def _phase(self, plan: WarpPlan) -> str:
        bits = 8 * plan.access_bytes
        return f"{self.key}.{LSU}.phases.{bits}.lanes_count"

    def _shuffle(self, count: int, plan: WarpPlan, tally: Tally) -> None:
        busy = count * plan.warps * self.shared.shuffle_cycles.value
        tally.take(LSU, busy, f"{self.key}.{LSU}.shuffle_cycles")
        tally.cycles += busy + self.shared.shuffle_latency_cycles.value

    # ---------------------------------------------------------------- lanes

    def _element_wise(self, step: Step, plan: WarpPlan, tally: Tally) -> None:
        name = step.opcode.name.lower()
        pipe = MUFU if step.opcode in SPECIAL else FMA
        source = step.srcs[0]
        if step.opcode not in REDUCTIONS or isinstance(source, float):
            formats = {o.fmt for o in step.operands() if o.fmt != "int8"}
            fmt = formats.pop() if len(formats) == 1 else ""
            self._lane_op(pipe, name, lane_values(step.dst, plan), fmt, plan, tally)
            return
        self._lane_op(pipe, name, lane_values(source, plan), source.fmt, plan, tally)
        rounds, rows = row_shuffles(plan), lane_values(step.dst, plan)
        for _ in range(rounds):
            self._shuffle(rows, plan, tally)
            self._lane_op(pipe, name, rows, source.fmt, plan, tally)

    def _lane_op(self, pipe: str, name: str, values: int, fmt: str, plan: WarpPlan, tally: Tally) -> None:
        if not values:
            return
        spec = self.lanes[pipe]
        count = ceil_div(values, spec.packed(name, fmt)) * spec.op(name).instructions_count.value
        each = ceil_div(WARP_LANES, spec.lanes_count.value) * ceil_div(plan.warps, self.subcores)
        tally.take(pipe, count * each, f"{self.key}.{pipe}.ops.{name}.instructions_count")
        tally.cycles += count * each + spec.latency_cycles.value


#: Bytes of a value that m8n8k4 multiplies (PTX ISA: .f16).
BYTES_OF_HALF = 2


def product_cycles(steps: MmaStepsSpec, *, chains: int, depth: int) -> int:
    """Return the cycles from a warp's first matrix instruction to the last result.

    ``chains`` accumulators are independent of one another, each goes through ``depth`` products one
    after the other.  A product waits for the same accumulator's one before; those of different
    accumulators follow at the pace of the pipe.  One wmma of 16 x 16 x 16 is ``chains=1, depth=4``:
    54 cycles with float32 accumulators, 64 with float16 (Raihan et al. 2019).
    """
    pace = max(chains * steps.pipe_cycles, steps.chained_latency_cycles.value)
    last = (chains - 1) * steps.pipe_cycles + sum(g.gap_cycles.value for g in steps.lone_gaps)
    return (depth - 1) * pace + last + steps.result_latency_cycles.value


def product_of(step: Step, plan: WarpPlan) -> MmaInstruction:
    """Return the matrix instruction of a product: A by rows, B as it lies in memory."""
    order = "col" if step.attributes.transpose_b else "row"
    acc = "f16" if step.attributes.accumulator_format == "float16" else "f32"
    return instruction(MMA, acc=acc, a="row", b=order)


#: The only matrix instruction of Volta (PTX ISA).
MMA = "m8n8k4"


@cache
def arranged(plan: WarpPlan) -> Arrangement:
    """Return how the quad pairs of a warp share its tile."""
    return arrangement(plan.arrangement, plan.row_order)


def fragments(rows: int, columns: int, where: Arrangement, tile: Operand, warps: int) -> tuple[int, int]:
    """Return how many fragments of ``rows`` x ``columns`` a quad pair has down and across a tile."""
    return ceil_div(tile.rows, rows * where.m * warps), ceil_div(tile.cols, columns * where.n)


def lane_values(tile: Operand, plan: WarpPlan) -> int:
    """Return how many elements of a tile a lane holds; of a row vector, its rows once."""
    held = instruction(MMA, acc=plan.accumulator).c
    down, across = fragments(held.rows, held.columns, arranged(plan), tile, plan.warps)
    if tile.cols == 1:
        return down * len({held.coordinate(0, v)[0] for v in range(held.values)})
    return down * across * held.values


def row_shuffles(plan: WarpPlan) -> int:
    """Return the butterfly steps that a reduction of rows needs between lanes."""
    own = len(instruction(MMA, acc=plan.accumulator).c.butterflies())
    return own + (arranged(plan).n - 1).bit_length()


@cache
def chain_cost(plan: WarpPlan) -> tuple[ChainCost, int, int]:
    """Return what turns a warp's accumulators into the A operand, for one tile of rows x columns."""
    first, second = instruction(MMA, acc=plan.accumulator), instruction(MMA, b="row")
    found = chain(first.c, second.a, arrangement=arranged(plan))
    rows, columns = arranged(plan).tile(first.c)
    return found.cost, rows, columns * found.tiles


def bank_model(spec: SharedMemoryPipe) -> BankModel:
    """Return the banks of a device file as `npusim.layout.memory` reads them."""
    lanes = {int(bits) // 8: phase.lanes_count.value for bits, phase in spec.phases.items()}
    pairs = tuple(pair.distance_count.value for pair in spec.pair_masks)
    return BankModel(spec.banks_count.value, spec.bank_bytes.value, lanes, pairs)


def tile_of(operand: Operand) -> Tile:
    """Return a tile with the operand's shape and stride, at the start of its memory."""
    if isinstance(operand, GlobalTile):
        raise ProgramError("a tile of global memory has no place in shared memory")
    space = operand.ring.space if isinstance(operand, RingTile) else operand.space
    return Tile(space, 0, operand.rows, operand.cols, operand.stride, operand.fmt)
