"""Costs of the steps of a GPU's warps: cycles of every pipe that they use, and of the warps themselves.

All functions here are pure functions of shapes, formats, lane layouts and the device file.  One operation is executed
by a group of warps in step, distributed over the sub-cores; pipes belong to the multiprocessor; if each sub-core has
its own pipe, the cycles of one sub-core are counted.

The steps of an operation follow one another; each begins when the first results of the previous step exist
(``latency_cycles``), because a warp issues in order.  Within a product, loads of B from shared memory and matrix
instructions overlap; the longer of the two is the time of the warps.  This is the time of the warps alone; operations
of other blocks delay them if both need the same pipe, or issue slots, because a scheduler issues one instruction per
cycle.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import TYPE_CHECKING

from npusim.config.core_units import LanePipe, MmaStepsSpec, SharedMemoryPipe, WarpIssue, WarpMatrixEngine
from npusim.errors import ProgramError, UnknownOpcodeError
from npusim.formats import get_format
from npusim.formats.layout.fragment import WARP_LANES
from npusim.formats.layout.instruction import instruction
from npusim.formats.layout.wavefronts import BankModel, fragment_addresses, padded, return_cycles, swizzled, wavefronts
from npusim.formats.scans import BLOCK
from npusim.machines.sm.core import (
    FMA,
    LSU,
    MUFU,
    SM,
    SPECIAL,
    TENSOR,
    WARPS,
    Tally,
    engine_of,
    listed_as,
    priced_as,
    special,
)
from npusim.machines.sm.group_cost import ACCESS_BYTES, shared
from npusim.machines.sm.lanes import MMA, accumulator, arranged, chained, fragments, lane_values
from npusim.machines.sm.polynomials import POLYNOMIAL_COMPARISONS, polynomial_multiplies
from npusim.machines.sm.scans_in_tiles import ALONG, along_passes, applied
from npusim.program.ir.op import REDUCTIONS, Opcode
from npusim.program.ir.tile import GlobalTile, RingTile, Tile, memory_of
from npusim.program.ir.tile_program import Cost
from npusim.units import ceil_div, chunks, round_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from npusim.config.device import DeviceSpec
    from npusim.formats.layout.fragment import Fragment
    from npusim.program.ir.op import Accumulator, Step, TileOp, WarpPlan
    from npusim.program.ir.tile import Operand

    #: Function from (row, column) to an element.
    Addresses = Callable[[int, int], int]


#: Prefix of the costs of operations, and the pipe that executes them; here FMA executes comparisons.
_SHARED = ("compare", FMA), ("special", MUFU), ("tensor", TENSOR), ("memory", LSU)


class LaneModel:
    """The costs of operations whose tiles are in the lanes of warps."""

    def __init__(self, device: DeviceSpec) -> None:
        self.key = f"cores.{SM}.engines"
        issue = engine_of(device, WARPS, WarpIssue)
        self.subcores, self.sharing = issue.subcores_count.value, issue.sharing
        self.tensor = engine_of(device, TENSOR, WarpMatrixEngine)
        self.lanes = {name: engine_of(device, name, LanePipe) for name in (FMA, MUFU)}
        self.shared = engine_of(device, LSU, SharedMemoryPipe)
        self.banks = bank_model(self.shared)
        self.memory_bytes = self.shared.banks_count.value * self.shared.bank_bytes.value
        self.is_staged = issue.copies.value == "staged"

    def cost(self, op: TileOp) -> Cost:
        """Return the cost of an operation of warps; the results exist when its first pipe, which is the main one, ends.

        An operation without steps uses no pipe: warps without rows only stay in step.
        """
        tally = Tally()
        for step in op.steps:
            self.add(step, tally)
        if op.steps and not tally.pipes:
            raise UnknownOpcodeError(f"{op.label}: no step uses a pipe of {SM}")
        pipes = sorted(tally.pipe_cycles(), key=lambda pipe: pipe[0] != f"{SM}.{op.engine}")
        cycles, terms = max(1, ceil(tally.cycles)), tuple(tally.terms.items())
        if not op.steps:
            return Cost(cycles, terms=terms, pipe_cycles=tuple(pipes))
        busy = {what: tally.pipes.get(pipe, 0.0) for what, pipe in _SHARED}
        share = shared(cycles, is_product=op.steps[0].opcode is Opcode.MATMUL, issue=tally.issued, **busy)
        return Cost(0, terms=terms, pipe_cycles=tuple(pipes), share=share)

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
        flags = step.attributes.transpose_a, step.attributes.transpose_b
        orders = ["col" if is_transposed else "row" for is_transposed in flags]
        acc: Accumulator = "f16" if step.attributes.accumulator_format == "float16" else "f32"
        mma = instruction(MMA, acc=acc, a=orders[0], b=orders[1])
        down, across = fragments(plan, mma.c, step.dst.rows, step.dst.cols)
        depth = ceil_div(step.depth, mma.k)
        sharing = ceil_div(plan.warps, self.subcores)
        busy = down * across * depth * steps.pipe_cycles * sharing / self.tensor.rate
        tally.take(TENSOR, busy, f"{self.key}.{TENSOR}.steps.{step.attributes.accumulator_format}.step_cycles")
        tally.issued += down * across * depth * steps.steps_count.value * sharing
        cycles: float = product_cycles(steps, chains=down * across * sharing, depth=depth, rate=self.tensor.rate)
        loads = 0.0
        for source, held, count, is_transposed in zip(step.srcs, (mma.a, mma.b), (down, across), flags, strict=True):
            assert not isinstance(source, float)
            if memory_of(source) == "SMEM":
                each = load_cycles(held, tile_of(source), plan, self.banks, is_transposed=is_transposed)
                accesses = ceil_div(depth * count * held.values * BYTES_OF_HALF, plan.access_bytes)
                loads += accesses * each * plan.warps / self.shared.rate
                tally.issued += accesses * sharing
        if loads:
            tally.take(LSU, loads, self._phase(plan))
            cycles = max(cycles, loads) + self.shared.latency_cycles.value
        tally.cycles += cycles

    def _exchange(self, step: Step, plan: WarpPlan, tally: Tally) -> None:
        link = chained(plan)
        rows, columns = link.arrangement.tile(link.accumulator)
        count = ceil_div(step.dst.rows, rows * plan.warps) * ceil_div(step.dst.cols, columns * link.tiles)
        if link.cost.shuffles:
            self._shuffle(link.cost.shuffles * count, plan, tally)
        self._lane_op(FMA, "permute", (link.cost.selects + link.cost.permutes) * count, "", plan, tally)

    # ---------------------------------------------------------------- shared memory

    def _store(self, step: Step, plan: WarpPlan, tally: Tally) -> None:
        loads = store_cycles(tile_of(step.dst), plan, self.banks) / self.shared.rate
        tally.take(LSU, loads, self._phase(plan))
        if self.is_staged:
            # Stored data pass through the cache (one memory with shared memory), 16 bytes per thread at a time.
            size = step.dst.payload_bytes
            accesses = ceil_div(size, ACCESS_BYTES * WARP_LANES * plan.warps)
            tally.take(LSU, size / (self.memory_bytes * self.shared.rate), f"{self.key}.{LSU}.bank_bytes")
            tally.issued += (
                accesses * self.sharing.access_instructions_count.value * ceil_div(plan.warps, self.subcores)
            )
            tally.cycles += accesses * self.sharing.load_cycles["mma"].value
        tally.cycles += loads + self.shared.latency_cycles.value

    def _phase(self, plan: WarpPlan) -> str:
        bits = 8 * plan.access_bytes
        return f"{self.key}.{LSU}.phases.{bits}.lanes_count"

    def _shuffle(self, count: int, plan: WarpPlan, tally: Tally) -> None:
        busy = count * plan.warps * self.shared.shuffle_cycles.value / self.shared.rate
        tally.take(LSU, busy, f"{self.key}.{LSU}.shuffle_cycles")
        tally.issued += count * ceil_div(plan.warps, self.subcores)
        tally.cycles += busy + self.shared.shuffle_latency_cycles.value

    # ---------------------------------------------------------------- lanes

    def _element_wise(self, step: Step, plan: WarpPlan, tally: Tally) -> None:
        pipe = MUFU if step.opcode in SPECIAL else FMA
        name = listed_as(priced_as(step.opcode), step.attributes.variant, self.lanes[pipe])
        source = step.srcs[0]
        if step.opcode in ALONG:
            self._along(step, plan, tally)
            return
        if step.opcode not in REDUCTIONS or isinstance(source, float):
            formats = {o.fmt for o in step.operands() if o.fmt != "int8"}
            fmt = formats.pop() if len(formats) == 1 else ""
            share = step.attributes.share if pipe == FMA else 1.0
            values = ceil(lane_values(plan, step.dst.rows, step.dst.cols) * share)
            if multiplies := polynomial_multiplies(step.attributes.variant):
                some = ceil(values * step.attributes.share)
                self._lane_op(FMA, "mul", some * multiplies, "float32", plan, tally)
                self._lane_op(FMA, "compare", some * POLYNOMIAL_COMPARISONS, "", plan, tally)
                values -= some
            name, others = special(step) if pipe == MUFU else (name, {})
            self._lane_op(pipe, name, values, fmt, plan, tally)
            for other, each in others.items():
                self._lane_op(FMA, other, values * each, fmt, plan, tally)
            # the first comparison is part of the selection
            more = step.attributes.comparisons - (step.opcode is Opcode.SELECT)
            self._lane_op(FMA, "compare", values * max(0, more), "", plan, tally)
            return
        values = ceil(lane_values(plan, source.rows, source.cols) * applied(step))
        self._lane_op(pipe, name, values, source.fmt, plan, tally)
        # Butterflies are first within a quad pair, then between adjacent quad pairs.
        rounds = len(accumulator(plan).butterflies()) + (arranged(plan).n - 1).bit_length()
        rows = lane_values(plan, step.dst.rows, step.dst.cols)
        for _ in range(rounds):
            self._shuffle(rows, plan, tally)
            self._lane_op(pipe, name, rows, source.fmt, plan, tally)

    def _along(self, step: Step, plan: WarpPlan, tally: Tally) -> None:
        values = lane_values(plan, step.dst.rows, step.dst.cols)
        for passes in along_passes(step, values, self.key):
            for name, each in passes.instructions.items():
                self._lane_op(FMA, name, ceil(passes.times * each), step.dst.fmt, plan, tally)
            self._shuffle(ceil(passes.times * passes.shuffles), plan, tally)
            tally.cycles += passes.times * passes.rounds * self.shared.shuffle_latency_cycles.value
            # No tensor core multiplies float32, so that multiply-adds are distributed over a warp's lanes.
            products = passes.times * passes.products * BLOCK**3 // WARP_LANES
            self._lane_op(FMA, "fma", products, step.dst.fmt, plan, tally)

    def _lane_op(self, pipe: str, name: str, values: int, fmt: str, plan: WarpPlan, tally: Tally) -> None:
        if not values:
            return
        spec = self.lanes[pipe]
        count = ceil_div(values, spec.packed(name, fmt)) * spec.op(name).instructions_count.value
        warps = ceil_div(plan.warps, self.subcores)
        each = ceil_div(WARP_LANES, spec.lanes_count.value) * warps / spec.rate
        tally.issued += count * warps
        tally.take(pipe, count * each, f"{self.key}.{pipe}.ops.{name}.instructions_count")
        tally.cycles += count * each + spec.latency_cycles.value


#: Size in bytes of a value that m8n8k4 multiplies (PTX ISA: .f16).
BYTES_OF_HALF = 2


def product_cycles(steps: MmaStepsSpec, *, chains: int, depth: int, rate: float = 1.0) -> int:
    """Return the cycles from a warp's first matrix instruction to the last result.

    ``chains`` accumulators are independent of one another; each accumulates ``depth`` products one after the other.  A
    product waits for the previous product of its accumulator; products of different accumulators follow at the rate of
    the pipe.  One wmma of 16 x 16 x 16 is ``chains=1, depth=4``: 54 cycles with float32 accumulators, 64 with float16
    (Raihan et al. 2019).  ``rate``: the pipe's rate relative to the stated one.
    """
    each = steps.pipe_cycles / rate
    pace = max(chains * each, steps.chained_latency_cycles.value)
    last = (chains - 1) * each + sum(g.gap_cycles.value for g in steps.lone_gaps)
    return ceil((depth - 1) * pace + last + steps.result_latency_cycles.value)


# ---------------------------------------------------------------- banks


def bank_model(spec: SharedMemoryPipe) -> BankModel:
    """Return the banks of a device file as `npusim.formats.layout.wavefronts` reads them."""
    lanes = {int(bits) // 8: phase.lanes_count.value for bits, phase in spec.phases.items()}
    pairs = tuple(pair.distance_count.value for pair in spec.pair_masks)
    return BankModel(spec.banks_count.value, spec.bank_bytes.value, lanes, pairs)


def tile_of(operand: Operand) -> Tile:
    """Return a tile with the operand's shape and stride, at the start of its memory."""
    if isinstance(operand, GlobalTile):
        raise ProgramError("a tile of global memory has no place in shared memory")
    space = operand.ring.space if isinstance(operand, RingTile) else operand.space
    return Tile(space, 0, operand.rows, operand.cols, operand.stride, operand.fmt)


def addresses_of(tile: Tile, *, swizzle: bool) -> Addresses:
    """Return the addresses of a tile's elements in shared memory, and those of the part of the slot beyond the tile."""
    rows = round_up(tile.rows, WARP_LANES)
    if swizzle:
        return swizzled(rows, tile.stride, element_bytes=get_format(tile.fmt).size_bytes)
    return padded(rows, tile.cols, padding=tile.stride - tile.cols)


@cache
def load_cycles(fragment: Fragment, tile: Tile, plan: WarpPlan, banks: BankModel, *, is_transposed: bool) -> int:
    """Return the cycles of one load of a warp's part of A or B: the cycles of the banks, or of the return path if they
    are more.

    ``is_transposed``: the tile contains its columns as rows, as K does in Q Kᵀ.
    """
    at = addresses_of(tile, swizzle=plan.swizzle)
    addresses = fragment_addresses(
        fragment,
        arranged(plan),
        (lambda row, column: at(column, row)) if is_transposed else at,
        access_bytes=plan.access_bytes,
        element_bytes=get_format(tile.fmt).size_bytes,
    )
    width = plan.access_bytes
    return max(wavefronts(addresses, width, banks), return_cycles(addresses, width, banks))


@cache
def store_cycles(tile: Tile, plan: WarpPlan, banks: BankModel) -> int:
    """Return the cycles of storing a tile: neighbouring lanes store neighbouring pieces of a row."""
    size = get_format(tile.fmt).size_bytes
    each, at = plan.access_bytes // size, addresses_of(tile, swizzle=plan.swizzle)
    pieces = [(row, col) for row in range(tile.rows) for col in range(0, tile.cols, each)]
    total = 0
    for start, count in chunks(len(pieces), WARP_LANES):
        addresses = [at(*piece) * size for piece in pieces[start : start + count]]
        total += wavefronts(addresses, plan.access_bytes, banks)
    return total
