"""Costs of operations where warp groups run concurrently: their time alone, and their demand on the core.

All functions here are pure functions of shapes, formats, warps and the device file.  Counts are instructions of one
warp; the number of warps on a sub-core is that of a group divided by the number of sub-cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from math import ceil
from typing import TYPE_CHECKING, Any

from npusim.config.core_units import GroupMatrixEngine, LanePipe, RatedUnit, SharedMemoryPipe, SpecialisedSpec
from npusim.config.quantity import Quantity
from npusim.errors import SpecError
from npusim.formats import get_arithmetic, get_format, stored_format
from npusim.formats.layout.fragment import WARP_LANES
from npusim.formats.scans import BLOCK
from npusim.late_methods import dataclass
from npusim.machines.sm.core import (
    ALU,
    FMA,
    INSTRUCTION,
    LSU,
    MUFU,
    SM,
    SPECIAL,
    SPILL,
    STEP,
    TENSOR,
    WARPS,
    Tally,
    listed_as,
    priced_as,
    special,
    warp_issue,
)
from npusim.machines.sm.polynomials import POLYNOMIAL_COMPARISONS, polynomial_multiplies
from npusim.machines.sm.scans_in_tiles import ALONG, along_passes, applied
from npusim.program.ir.op import REDUCTIONS, Opcode
from npusim.program.ir.tile import Tile, memory_of
from npusim.program.ir.tile_program import Cost, Share
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.machines.decisions import Charge, CodeWork, LoopWork
    from npusim.machines.sm.group_work import GroupWork
    from npusim.program.ir.op import Step, TileOp
    from npusim.program.ir.tile import Operand

#: The capacity of one pipe in the units of shares.
WHOLE = 1 << 20
#: Rows and columns of a product's accumulator that a warp holds, and the number of its rows in a lane.
FRAGMENT_ROWS, FRAGMENT_COLUMNS, LANE_ROWS = 16, 8, 2
#: Rows of a warp group's product (PTX ISA, wgmma), and its warps.
GROUP_ROWS, GROUP_WARPS = 64, 4
#: Columns, in bytes, that one load of matrices (LDSM.x4) reads into a warp's registers, and that one product of a warp
#: group uses of its operands.
MATRIX_BYTES = 32
#: Number of columns of a left operand in registers for each of which a part of the product's drain is hidden: compilers
#: compute the operand's rows during a product for which warps wait separately.
GAP_COLUMNS = 16
#: Number of bytes that a lane copies or loads at once.
ACCESS_BYTES = 16
#: Size in bytes of a lane's spilled register.
LANE_BYTES = 4
#: Number of accesses to shared memory of a reduction across warps, and number of its steps for the rows of a lane
#: (hopper.md sections 2, 3).
CROSS_ACCESSES = 13
#: Number of barriers of such a reduction; its warps use the path of accesses (9 BAR per iteration, hopper.md section
#: 2).
CROSS_BARRIERS = 3
#: Cost of the steps of such a reduction, and cost for each row.
CROSS_STEPS, CROSS_ROW_STEPS = 2.0, 0.5
#: Bytes that a warp loads at once.
WARP_BYTES = WARP_LANES * ACCESS_BYTES
#: Number of butterfly steps between the lanes that share a row of an accumulator, and number of these lanes.
ROUNDS, ROW_LANES = 2, 4


def shared(cycles: int, *, is_product: bool = False, **busy: float) -> Share:
    """Return work that takes ``cycles`` without other work, with the share of this time in which it uses each part of
    the core; ``busy``: cycles by part.
    """
    return Share(is_product, cycles, **{part: round(taken / cycles * WHOLE) for part, taken in busy.items()})


#: Charges per element, which decide how long an operation itself takes.
BY_ELEMENT = frozenset({"element", "output", "score", "multiply_add"})


def find_constant(device: DeviceSpec, key: str) -> Quantity | None:
    """Return the number that the device file has under a key below the core's engines; None if there is none."""
    node: Any = device.core(SM).engines
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else getattr(node, part, None)
    return node if isinstance(node, Quantity) else None


def _constant(device: DeviceSpec, key: str) -> Quantity:
    if (constant := find_constant(device, key)) is None:
        raise SpecError(f"{device.name}: cores.{SM}.engines.{key}: missing; a kernel has this charge")
    return constant


@dataclass
class Count:
    """Instructions of a warp, cycles of a sub-core's narrow pipes, and waits for results.

    ``multiply``: cycles of multiply-adds, where their pipe is narrower than a warp.
    """

    issued: float = 0.0
    multiply: float = 0.0
    compare: float = 0.0
    special: float = 0.0
    shared: float = 0.0
    latency: float = 0.0


class GroupModel:
    """The costs of concurrent warp groups."""

    def __init__(self, device: DeviceSpec) -> None:
        self.device, self.key, engines = device, f"cores.{SM}.engines", device.core(SM).engines
        issue, tensor, shared = warp_issue(device), engines[TENSOR], engines[LSU]
        if not isinstance(tensor, GroupMatrixEngine) or not isinstance(shared, SharedMemoryPipe):
            raise SpecError(f"{device.name}: {SM}.{TENSOR}: it must be `model: group_matrix` where warps share pipes")
        self.subcores, self.sharing = issue.subcores_count.value, issue.sharing
        self.tensor, self.shared = tensor, shared
        self.lanes = {name: e for name in (FMA, ALU, MUFU) if isinstance(e := engines.get(name), LanePipe)}
        #: Factors of the rates of units in a what-if; latencies and issue slots do not change.
        self.rates = {name: unit.rate for name, unit in engines.items() if isinstance(unit, RatedUnit)}
        self.memory_bytes = shared.banks_count.value * shared.bank_bytes.value * shared.rate
        self.shuffle_cycles = shared.shuffle_cycles.value / shared.rate
        #: Instructions that warps issue for arithmetic charges in addition to loads and copies.
        self.issued = {STEP.key: issue.sharing.step_instructions_count.value, INSTRUCTION: 1}
        self.constant = cache(partial(_constant, device))

    def cost(self, op: TileOp, work: GroupWork) -> Cost:
        """Return the cost of an operation of warps."""
        if work.loop is not None:
            return self._looped(work.loop, work)
        charges = work.charges
        steps = [s for s in op.steps if s.opcode is not Opcode.COPY or memory_of(s.dst) != "SMEM"]
        tally, is_product = self._besides(work, charges, bool(steps)), bool(steps) and steps[0].opcode is Opcode.MATMUL
        whole = tuple(c for c in charges if c.due in (("multiply_add",) if is_product else ("element", "output")))
        share: Share | None = None
        if steps and work.code is not None:
            share = self._coded(work.code, work, tally)
        elif steps and whole:
            share = self._whole(steps, whole, tally)
        elif is_product:
            share = self._product(steps[0], work, tally)
        elif steps:
            share = self._arithmetic(steps, work, charges, tally)
        elif SPILL in tally.pipes:
            share = self._spilled(tally)
        elif "warps" in work.pays:  # a sub-core issues nothing while a warp begins
            share, tally.cycles = shared(ceil(tally.cycles), issue=tally.cycles), 0.0
        else:
            share = self._control(work, charges, tally)
        drain = self.tensor.wgmma.drain_cycles.value if self.tensor.wgmma is not None else 0
        latency = drain if is_product and work.decided.consumers and not work.is_awaited else 0
        terms, pipes = tuple(tally.terms.items()), tally.pipe_cycles()
        links = tuple((c.key, int(c.times)) for c in charges if c.key in self.device.links)
        return Cost(ceil(tally.cycles), latency, links, terms, pipes, share)

    def _looped(self, loop: LoopWork, work: GroupWork) -> Cost:
        """Return the cost of a part of an iteration by its machine code; each group of the block executes a share of
        it.

        The use of a core that blocks share is counted in issue slots, because these are the one resource that all
        instructions need.
        """
        groups, terms = work.decided.groups, ((f"{self.key}.{INSTRUCTION}", loop.before),)
        cycles = max(1, ceil(loop.before))
        busy = self._by_pipe(loop.issued, loop.narrow) | {MUFU: loop.special, TENSOR: loop.product}
        busy[LSU] = loop.memory + loop.local
        pipes = Tally(pipes={name: taken / groups for name, taken in busy.items()}).pipe_cycles()
        return Cost(0, 0, (), terms, pipes, shared(cycles, issue=min(cycles, loop.held / groups)))

    # ---------------------------------------------------------------- costs that no step states

    def _besides(self, work: GroupWork, charges: tuple[Charge, ...], has_steps: bool) -> Tally:
        """Return a tally of the operation's charges, without instructions that only accompany loads and copies."""
        tally, consumers = Tally(), work.decided.consumers
        for charge in charges:
            if charge.key in self.device.links or charge.due in BY_ELEMENT:
                continue
            if has_steps or consumers or charge.key not in self.issued:
                constant, engine = self.constant(charge.key).value, charge.key.partition(".")[0]
                taken = charge.times / constant if charge.key.endswith("_per_cycle") else charge.times * constant
                taken /= self.rates.get(engine, 1.0)
                tally.add(f"{self.key}.{charge.key}", taken)
                if taken and engine != WARPS:
                    tally.pipes[engine] = tally.pipes.get(engine, 0.0) + taken
        tally.cycles = sum(tally.terms.values())
        return tally

    def _spilled(self, tally: Tally) -> Share:
        """Account for spilled registers among instructions that wait for them, so that nothing overlaps."""
        tally.cycles -= (cycles := tally.pipes[SPILL])
        return shared(ceil(cycles), issue=cycles)

    def _control(self, work: GroupWork, charges: tuple[Charge, ...], tally: Tally) -> Share | None:
        """Account for an iteration's end, or for loads through registers: addresses, control, accesses."""
        s, at, decided = self.sharing, f"{WARPS}.sharing", work.decided
        if decided.consumers:
            return None
        due = [c for c in charges if c.key in self.issued]
        parts = {c.key: c.times * self.constant(c.key).value for c in due}
        for name, count, costs in (("copy", work.copies, s.copy_cycles), ("load", work.loads, s.load_cycles)):
            by = decided.generation
            if count and by not in costs:
                raise SpecError(f"{self.device.name}: {self.key}.{at}.{name}_cycles has no value for {by}")
            if count:
                parts[f"{at}.{name}_cycles.{by}"] = float(count * costs[by].value)
        for constant, taken in parts.items():
            tally.add(f"{self.key}.{constant}", taken)
        left, tensor, moved = self._left(work)
        memory, alone = self._copied(work) + moved, sum(parts.values())
        if not (cycles := ceil(max(alone, left, memory))):
            return None
        if left > max(alone, memory):
            tally.terms[f"{self.key}.{TENSOR}.wgmma.elements_per_cycle"] = left - alone
        count, warps = work.copies + work.loads, ceil_div(decided.warps, self.subcores)
        issued = sum(c.times * self.issued[c.key] for c in due) + count * s.access_instructions_count.value
        tally.pipes[LSU] = memory
        if tensor:
            tally.pipes[TENSOR] = tensor
        is_product = left > max(alone, memory)
        return shared(cycles, is_product=is_product, issue=issued * warps, memory=memory, tensor=tensor)

    def _left(self, work: GroupWork) -> tuple[float, float, float]:
        """Return the cycles of a product that continues during other work, and the cycles in which it uses tensor cores
        and shared memory.
        """
        if not work.behind or (spec := self.tensor.wgmma) is None:
            return 0.0, 0.0, 0.0
        count, busy, memory = self._instructions(work.behind, work)
        each = max(busy, memory)
        left = max(0.0, count * each - count / (work.decided.warps // self.subcores) * spec.issue_cycles.value)
        return left, left * busy / each, left * memory / each

    # ---------------------------------------------------------------- products

    def _product(self, step: Step, work: GroupWork, tally: Tally) -> Share:
        a, b = step.srcs
        assert not isinstance(a, float)
        assert not isinstance(b, float)
        unit = get_arithmetic(step.attributes.arithmetic)
        multiplied = unit.converts_to or ("tf32" if unit.a.name == "tf32" else a.fmt)
        form = self.tensor.fractals.get(multiplied)
        if form is None:
            return self._without_tensor(step, step.depth, work, tally)
        depth = ceil_div(max(work.depth, step.depth), form.k_elements.value)
        by, constant = work.decided.generation, "elements_per_cycle"
        if by == "wgmma" and self.tensor.wgmma is not None:
            busy, memory, lone, end = self._of_groups(step, a, work)
            issued = 0.0
        else:
            constant, cycles = self.tensor.mma.rate(multiplied, step.dst.fmt)
            busy, memory, lone, end, issued = self._of_warps(step, a, depth, cycles / self.tensor.rate, work)
        tally.cycles += end
        tally.terms[f"{self.key}.{TENSOR}.{by}.{constant}"] = lone + end
        tally.pipes |= {TENSOR: busy, LSU: memory}
        return shared(max(1, ceil(lone)), is_product=True, issue=issued, tensor=busy, memory=memory)

    def _instructions(self, size: tuple[int, ...], work: GroupWork) -> tuple[int, float, float]:
        """Return the number of instructions of a product of warp groups, and the cycles of tensor cores and of shared
        memory for each instruction.

        ``size``: rows and columns of the product's result, bytes of a row of its left operand, and whether the operand
        is in shared memory.
        """
        spec, (rows, columns, row_bytes, from_shared) = self.tensor.wgmma, size
        assert spec is not None
        groups, across, repeats = work.decided.warps // self.subcores, work.across, work.repeats
        down = max(1, groups // max(across, repeats))
        stacked = ceil_div(ceil_div(rows, spec.m_elements.value), down)
        width = ceil_div(columns, across * FRAGMENT_COLUMNS) * FRAGMENT_COLUMNS
        count = ceil_div(row_bytes, MATRIX_BYTES) * stacked * groups
        if repeats > 1:  # counted in instructions of half the width
            width, count = max(FRAGMENT_COLUMNS, width // repeats), count * repeats
        moved = MATRIX_BYTES * (width + (spec.m_elements.value if from_shared else 0))
        return count, width / (spec.elements_per_cycle.value * self.tensor.rate), moved / self.memory_bytes

    def _of_groups(self, step: Step, a: Operand, work: GroupWork) -> tuple[float, float, float, float]:
        """Return the cycles of tensor cores and of shared memory, the cycles of the product without other work, and the
        cycles after it.
        """
        spec, decided = self.tensor.wgmma, work.decided
        assert spec is not None
        row_bytes = stored_format(a.fmt).row_bytes(max(work.depth, step.depth))
        size = *whole_sizes(step.dst, work), row_bytes, memory_of(a) == "SMEM"
        count, busy, memory = self._instructions(size, work)
        each, drain, groups = max(busy, memory), float(spec.drain_cycles.value), decided.warps // self.subcores
        lone, share = count * each, 1.0
        # The drains of several warp groups overlap; rows that are computed at the same time hide a part.
        if decided.is_serial:
            lone = count / groups * max(groups * each, each + drain)
            if memory_of(a) != "SMEM":
                beside = spec.gap_cycles.value * ceil_div(max(work.depth, step.depth), GAP_COLUMNS)
                lone = max(each + drain, lone - beside)
        elif not work.is_awaited and decided.roles == "alike":  # the remaining part continues after the next operation
            lone = min(lone, count / groups * spec.issue_cycles.value)
            share = lone / (count * each)
        end = drain if work.is_awaited and not decided.is_serial else 0.0
        memory *= count * share
        if work.loads_left:  # each warp group that has a part of the columns loads the rows itself
            memory += size[0] * row_bytes * max(work.across, work.repeats) / self.memory_bytes
            lone = max(lone, memory)
        return count * busy * share, memory, lone, end

    def _of_warps(
        self, step: Step, a: Operand, depth: int, cycles: float, work: GroupWork
    ) -> tuple[float, float, float, float, float]:
        """Return the same for products of single warps, which load their operands first; also return their
        instructions.

        ``cycles``: cycles of the pipe for one instruction.
        """
        spec, decided, across = self.tensor.mma, work.decided, work.across
        down, (rows, columns) = max(1, decided.warps // across), whole_sizes(step.dst, work)
        rows, columns = ceil_div(rows, down * FRAGMENT_ROWS), ceil_div(columns, across * FRAGMENT_COLUMNS)
        each = spec.m_elements.value * spec.n_elements.value
        products = rows * columns * depth * FRAGMENT_ROWS * FRAGMENT_COLUMNS / each
        pieces = ceil_div(stored_format(a.fmt).row_bytes(step.depth), MATRIX_BYTES)
        is_loaded = memory_of(a) == "SMEM" or across > 1
        if decided.sums_in_products and not is_loaded:
            products *= 1 + 1 / columns  # number of columns of ones in an instruction
        loads = columns * pieces / 2 + (rows * pieces if is_loaded else 0)
        warps = self._warps(work)
        loads *= spec.lane_copies_count.value if spec.lane_copies_count else 1
        busy, memory = products * cycles * warps, loads * decided.warps * WARP_BYTES / self.memory_bytes
        lone = max(products * cycles * max(1.0, warps), memory, loads * spec.load_cycles.value)
        # each product adds to the result of the product one step earlier in the sum
        if spec.chain_cycles is not None:
            lone = max(lone, depth * spec.chain_cycles.value)
        issued = products * (spec.instructions_count.value if spec.instructions_count else 1) + loads
        return busy, memory, lone, float(spec.latency_cycles.value), issued * warps

    def _without_tensor(self, step: Step, depth: int, work: GroupWork, tally: Tally) -> Share:
        """Account for a product with formats that no tensor core supports: multiply-adds of the lanes."""
        warps = work.decided.warps
        count = step.dst.rows * step.dst.cols * depth / WARP_LANES / warps
        each = WARP_LANES / self._lanes_of(FMA) * ceil_div(warps, self.subcores)
        share = self._lanes_alone(count * each, tally)
        tally.add(f"{self.key}.{FMA}.ops.mul.instructions_count", tally.pipes[FMA])
        return share

    def _whole(self, steps: list[Step], charges: tuple[Charge, ...], tally: Tally) -> Share:
        """Account for a library's kernel, which keeps the core busy, independent of other work.

        A kernel of rows runs at the full clock, independent of the clock of the program's products.
        """
        count, is_product = max(s.dst.rows * s.dst.cols for s in steps), steps[0].opcode is Opcode.MATMUL
        count *= steps[0].depth if is_product else 1
        each = {c.key: c.times * self.constant(c.key).value for c in charges}
        taken = count * (sum(each.values()) * (1 if is_product else self.device.clock_share))
        share = self._lanes_alone(taken, tally)
        for key, cycles in each.items():
            tally.add(f"{self.key}.{key}", tally.pipes[FMA] * cycles / sum(each.values()))
        return share

    def _lanes_alone(self, taken: float, tally: Tally) -> Share:
        """Account for work that leaves no issue slots for other work."""
        cycles = max(1, ceil(taken))
        tally.pipes[FMA] = float(cycles)
        return shared(cycles, issue=cycles)

    # ---------------------------------------------------------------- arithmetic

    def _arithmetic(self, steps: list[Step], work: GroupWork, charges: tuple[Charge, ...], tally: Tally) -> Share:
        count = Count()
        for step in steps:
            self._add(step, work, count)
        if scores := [c for c in charges if c.due == "score"]:
            most = max(elements(o, work) for step in steps for o in step.operands())
            for charge in scores:
                self._issue(charge.key.rpartition(".")[2], charge.times * most, "", count)
        warps, s = self._warps(work), self.sharing.of(work.decided.consumers)
        plain = count.issued - count.compare / 2 - count.special / 8
        count.compare, count.special = count.compare / self.rates.get(ALU, 1.0), count.special / self.rates[MUFU]
        narrow = max(count.compare, count.multiply)
        waited = 0.0 if isinstance(s, SpecialisedSpec) else s.special_wait_factor.value * count.special
        alone = max(1.0, warps)  # a single warp has a sub-core for itself
        lone = max(s.warp_issue_cycles.value * count.issued + waited, narrow * alone, count.issued * alone, 1.0)
        slots, special, at = 1.0, count.special * warps, "sharing"
        # special functions are slower than other instructions only if this is requested
        if isinstance(s, SpecialisedSpec):
            slots, at = s.instruction_slots_factor.value, "sharing.specialised"
            special *= s.special_factor.value
        else:
            lone = max(lone, s.special_factor.value * special)
        tally.terms[f"{self.key}.{WARPS}.{at}.warp_issue_cycles"] = lone
        tally.cycles += count.latency
        left, tensor, read = self._left(work)
        moved = self._copied(work) + read
        if copies := work.copies if work.behind else 0:
            each = self.sharing.copy_cycles.get(work.decided.generation)
            lone = max(lone, copies * each.value if each is not None else 0.0)
            count.issued += copies * self.sharing.access_instructions_count.value
        is_product = left > max(lone, moved)
        lone = max(lone, moved, left)
        plain /= self.rates[FMA]
        busy = self._by_pipe(plain, count.compare)
        busy |= {MUFU: count.special, LSU: count.shared * self.subcores + moved / warps}
        tally.pipes |= {name: cycles * warps for name, cycles in busy.items()}
        if tensor:
            tally.pipes[TENSOR] = tensor
        return shared(
            ceil(lone),
            is_product=is_product,
            issue=slots * count.issued * warps,
            compare=narrow * warps,
            special=special,
            tensor=tensor,
            memory=count.shared * work.decided.warps + moved,
        )

    def _by_pipe(self, plain: float, narrow: float) -> dict[str, float]:
        """Return cycles of plain instructions and of narrow ones by pipe: a core without an ALU runs both on FMA."""
        return {FMA: plain, ALU: narrow} if ALU in self.lanes else {FMA: plain + narrow}

    def _warps(self, work: GroupWork) -> float:
        """Return the warps of a sub-core; if there are fewer warps than sub-cores, the average number."""
        warps = work.decided.warps
        is_shared = work.is_even or warps < self.subcores
        return warps / self.subcores if is_shared else ceil_div(warps, self.subcores)

    def _coded(self, code: CodeWork, work: GroupWork, tally: Tally) -> Share:
        """Account for a block of rows by its machine code, instructions on the sub-cores of its warps."""
        if not code.issued:
            return shared(1)
        in_all = work.decided.warps
        warps, wide = in_all / self.subcores, ceil_div(in_all, self.subcores)
        narrow = code.narrow * WARP_LANES / self._lanes_of(ALU if ALU in self.lanes else FMA)
        special = code.special * WARP_LANES / self._lanes_of(MUFU)
        multiply = (code.issued - code.narrow - code.special) / self.rates[FMA]
        narrow = max(narrow, multiply) if multiply > code.issued else narrow
        shared_cycles = code.shared * in_all / self.rates[LSU]
        lone, memory = max(code.alone_cycles, wide * max(code.issued, narrow, special)), shared_cycles
        if code.local and (local := find_constant(self.device, f"{SPILL}.bytes_per_cycle")):
            taken = code.local * LANE_BYTES * WARP_LANES * in_all / (local.value * self.rates[SPILL])
            memory, lone = memory + taken, lone + taken
        tally.terms[f"{self.key}.{INSTRUCTION}"] = lone
        # Where warps meet at barriers, the walk of the code has the cycles in which they issue nothing.
        spec = None if code.barriers else self.sharing.row_issue_factor
        slots = warps if spec is None else warps * spec.value
        issued, compare = code.issued * slots, narrow * slots
        tally.pipes |= self._by_pipe(issued, compare) | {MUFU: special * warps, LSU: memory}
        return shared(ceil(lone), issue=issued, compare=compare, special=special * warps, memory=memory)

    def _lanes_of(self, pipe: str) -> float:
        return self.lanes[pipe].lanes_count.value * self.rates[pipe]

    def _copied(self, work: GroupWork) -> float:
        return (work.copies + work.loads) * work.passes * work.decided.warps * WARP_BYTES / self.memory_bytes

    def _add(self, step: Step, work: GroupWork, count: Count) -> None:
        source = step.srcs[0]
        is_reduction = step.opcode in REDUCTIONS and not isinstance(source, float)
        tile = source if is_reduction else step.dst
        assert not isinstance(tile, float)
        if work.decided.sums_in_products and step.opcode is Opcode.ROW_SUM:
            return
        values = elements(tile, work)
        name = listed_as(priced_as(step.opcode), step.attributes.variant, *self.lanes.values())
        # the results that rows compute for a product, on their way through shared memory
        if memory_of(step.dst) == "SMEM":
            size = values * get_format(step.dst.fmt).size_bytes
            count.issued += size / ACCESS_BYTES
            count.shared += size * WARP_LANES / self.memory_bytes
        if step.opcode not in SPECIAL:
            values *= step.attributes.share
        if step.opcode in SPECIAL:
            self._special(step, values, count)
        elif step.opcode in (Opcode.COPY, Opcode.BITS):  # this is another name for the same registers
            pass
        elif step.opcode is Opcode.CAST:
            self._cast(step.dst.fmt, source.fmt if not isinstance(source, float) else "", values, count)
        elif step.opcode in ALONG:
            self._along(step, values, count)
        else:
            formats = {o.fmt for o in step.operands() if o.fmt != "int8"}
            self._issue(name, values * applied(step), formats.pop() if len(formats) == 1 else "", count)
            # the first comparison is part of the selection
            more = step.attributes.comparisons - (step.opcode is Opcode.SELECT)
            self._issue("compare", values * max(0, more), "", count)
            count.latency += step.attributes.lookups * self.sharing.lookup_cycles.value
        if is_reduction:
            joins = "max" if step.opcode is Opcode.ROW_MAX else "add"
            joins = listed_as(joins, step.attributes.variant, *self.lanes.values())
            self._reduce(joins, elements(step.dst, work), tile.fmt, work, count)

    def _issue(self, name: str, values: float, fmt: str, count: Count) -> None:
        """Count the instructions of an operation on this number of elements of a lane."""
        narrow = self.lanes.get(ALU)
        pipe = ALU if narrow is not None and (name in narrow.ops or narrow.packed(name, fmt) > 1) else FMA
        spec = self.lanes[pipe]
        per_element = spec.op(name).instructions_count.value if name in spec.ops else 1
        issued = values / spec.packed(name, fmt) * per_element
        count.issued += issued
        cycles = issued * WARP_LANES / spec.lanes_count.value
        if pipe == ALU:
            count.compare += cycles
        elif (cycles := cycles / self.rates[FMA]) > issued:
            count.multiply += cycles

    def _special(self, step: Step, values: float, count: Count) -> None:
        """Count special functions: in float32, with exponentials and logarithms to base 2."""
        source = step.srcs[0]
        if get_format(step.dst.fmt).size_bytes == 2:
            self._cast("float32", step.dst.fmt, values, count)
            self._cast(step.dst.fmt, "float32", values, count)
        based = step.opcode in (Opcode.EXP, Opcode.LOG)
        if based and not step.attributes.variant.startswith(("exp2.", "log2.")) and not isinstance(source, float):
            self._issue("mul", values, "float32", count)
        if multiplies := polynomial_multiplies(step.attributes.variant):
            some = step.attributes.share * values
            self._issue("mul", some * multiplies, "float32", count)
            self._issue("compare", some * POLYNOMIAL_COMPARISONS, "", count)
            values -= some
        name, others = special(step)
        for other, each in others.items():
            self._issue(other, values * each, "", count)
        each = self.lanes[MUFU].op(name).instructions_count.value
        count.issued += values * each
        count.special += values * each * WARP_LANES / self.lanes[MUFU].lanes_count.value

    def _cast(self, target: str, source: str, values: float, count: Count) -> None:
        """Count conversions: two elements per instruction if the result has a narrower format.

        For a block format, the largest element and the scale of each block are computed first, and every element is
        multiplied by the scale.
        """
        formats = [stored_format(f or "float32") for f in (target, source)]
        sizes, block = [f.size_bytes for f in formats], formats[0].scale_block
        if block:
            blocks = values * ROW_LANES / block  # counted in each of the lanes that share a row
            self._issue("max", values + ROUNDS * blocks, "float32", count)
            self._issue("mul", values + blocks, "float32", count)
            self._issue("cast", blocks, "", count)
            count.issued += ROUNDS * blocks
            count.shared += ROUNDS * blocks * self.shuffle_cycles
            count.latency += ROUNDS * self.shared.shuffle_latency_cycles.value
        # pairs are converted at half the speed, and then exchanged between lanes for the next product
        if sizes[0] == 1:
            self._issue("cast", values / 2, "", count)
            count.compare += values / 2 * 2
            # PRMT and SEL, then SHFL: each a quarter of an instruction per element (hopper.md section 2).
            quarter = values / 4
            self._issue("permute", 2 * quarter, "", count)
            count.issued += quarter
            count.latency += self.shared.shuffle_latency_cycles.value
        else:
            self._issue("cast", values / 2 if sizes[0] < sizes[1] else values, "", count)

    def _along(self, step: Step, values: float, count: Count) -> None:
        """Count operations along a tile whose steps wait for one another; every warp executes a complete inverse."""
        spec = self.tensor.mma
        for passes in along_passes(step, values, self.key):
            for name, each in passes.instructions.items():
                self._issue(name, passes.times * each, step.dst.fmt, count)
            count.issued += passes.times * passes.shuffles
            count.shared += passes.times * passes.shuffles * self.shuffle_cycles
            count.latency += passes.times * passes.rounds * self.shared.shuffle_latency_cycles.value
            # products of 16 x 16 x 16; for float32 operands, an instruction has half the depth of one of 16 bits
            if passes.products:
                each_product = 2 * BLOCK * BLOCK / (spec.m_elements.value * spec.n_elements.value)
                count.issued += passes.times * passes.products * each_product
                count.latency += passes.times * 2 * spec.latency_cycles.value

    def _reduce(self, joins: str, rows: float, fmt: str, work: GroupWork, count: Count) -> None:
        """Count the moves of a row's parts from lane to lane, and from warp to warp if several share a row.

        ``joins``: the instruction that joins two parts.
        """
        count.issued += ROUNDS * rows
        count.shared += ROUNDS * rows * self.shuffle_cycles
        self._issue(joins, ROUNDS * rows, fmt, count)
        count.latency += ROUNDS * self.shared.shuffle_latency_cycles.value
        if work.across > 1 and work.repeats == 1:
            crossing = CROSS_ACCESSES + CROSS_BARRIERS * self.sharing.barrier_warp_cycles.value
            count.shared += crossing / self.rates[LSU]
            count.issued += CROSS_ACCESSES
            count.latency += self.sharing.reduction_cycles.value * (CROSS_STEPS + CROSS_ROW_STEPS * rows)


def whole_sizes(tile: Operand, work: GroupWork) -> tuple[int, int]:
    """Return rows and columns of a group's result as matrix instructions compute them: at least a complete tile.

    A transposed result has the numbers of rows and columns of instructions that the work states, whatever the size of
    the tile.
    """
    if work.decided.is_transposed:
        return work.decided.rows, work.columns
    if work.sharers:
        rows, groups = work.sharers * tile.rows, work.decided.consumers
        # computed as its transpose, whose rows fill all groups (FlashAttention-3's dQ_swapAB)
        if groups and rows % GROUP_ROWS:
            return ceil_div(tile.cols, groups), groups * tile.rows
        return rows, ceil_div(tile.cols, work.sharers)
    return max(work.decided.rows, work.rows, tile.rows), max(work.columns, tile.cols)


def elements(tile: Operand, work: GroupWork) -> float:
    """Return the number of elements of a tile in a lane; for a row vector, the number of rows."""
    decided = work.decided
    if work.is_even:
        each = WARP_LANES if tile.cols > 1 else 1
        return tile.rows * tile.cols / (decided.warps * each)
    down, (rows, columns) = max(1, decided.warps // (decided.across * decided.repeats)), whole_sizes(tile, work)
    rows = ceil_div(rows, down * FRAGMENT_ROWS)
    if tile.cols == 1 and not (work.columns > 1 and isinstance(tile, Tile) and tile.stride > 1):
        return rows * LANE_ROWS
    columns = ceil_div(columns, work.across * FRAGMENT_COLUMNS)
    return rows * columns * FRAGMENT_ROWS * FRAGMENT_COLUMNS / WARP_LANES
