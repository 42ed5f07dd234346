"""What operations cost where warp groups work beside one another: their time alone, and what they ask of the core.

All pure functions of shapes, formats, warps and the device file.  Counts are of one warp's instructions;
a sub-core has as many warps of a group as the group has over the core's sub-cores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from npusim.config.engine import GroupMatrixEngine, LanePipe, LocalMemoryPipe, SharedMemoryPipe, WarpIssue
from npusim.errors import SpecError
from npusim.formats import get_format
from npusim.ir.op import Opcode
from npusim.ir.program import Cost, Share
from npusim.ir.tile import memory_of
from npusim.layout.fragment import WARP_LANES
from npusim.machines.sm.plan import ALU, FMA, LSU, MUFU, SPILL, TENSOR, WARPS
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.ir.op import GroupWork, Step, TileOp
    from npusim.ir.tile import Operand

#: One whole pipe, as shares count it.
WHOLE = 1 << 20
#: Rows and columns of the accumulator that a warp holds of a product, and rows of it in a lane.
FRAGMENT_ROWS, FRAGMENT_COLUMNS, LANE_ROWS = 16, 8, 2
#: Columns that one load of matrices (LDSM.x4) brings into a warp's registers, and one product of a warp group takes
#: of its operands, in bytes.
MATRIX_BYTES = 32
#: Bytes that a lane copies or loads at once.
ACCESS_BYTES = 16
#: Accesses to shared memory of a reduction across warps, and its steps for rows of a lane (hopper.md sections 2, 3).
CROSS_ACCESSES = 13
#: Barriers of such a reduction: their warps pass by the way of accesses (9 BAR an iteration, hopper.md section 2).
CROSS_BARRIERS = 3
#: As above: steps of a reduction, and for each row.
CROSS_STEPS, CROSS_ROW_STEPS = 2.0, 0.5
#: Bytes that a warp loads at once.
WARP_BYTES = WARP_LANES * ACCESS_BYTES
REDUCTIONS = frozenset({Opcode.ROW_MAX, Opcode.ROW_SUM})
SPECIAL = frozenset({Opcode.EXP, Opcode.LOG})
#: Butterfly steps between the four lanes that share a row of an accumulator.
ROUNDS = 2


@dataclass
class Count:
    """Instructions of a warp, cycles of a sub-core's narrow pipes, and what waits for results."""

    issued: float = 0.0
    compare: float = 0.0
    special: float = 0.0
    shared: float = 0.0
    gaps: float = 0.0
    latency: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)


class GroupModel:
    """The costs of what warp groups do on one kind of core."""

    def __init__(self, device: DeviceSpec, core: str) -> None:
        self.device, self.core, self.key = device, core, f"cores.{core}.engines"
        engines = device.core(core).engines
        issue, tensor, shared = engines[WARPS], engines[TENSOR], engines[LSU]
        assert isinstance(issue, WarpIssue)
        assert issue.sharing is not None
        if not isinstance(tensor, GroupMatrixEngine) or not isinstance(shared, SharedMemoryPipe):
            raise SpecError(f"{device.name}: {core}.{TENSOR}: where warps share pipes it is `model: group_matrix`")
        self.subcores, self.sharing, self.library = issue.subcores_count.value, issue.sharing, issue.library
        self.tensor, self.shared = tensor, shared
        self.lanes = {name: e for name in (FMA, ALU, MUFU) if isinstance(e := engines.get(name), LanePipe)}
        local = engines.get(SPILL)
        self.local = local if isinstance(local, LocalMemoryPipe) else None
        self.memory_bytes = shared.banks_count.value * shared.bank_bytes.value

    def cost(self, op: TileOp) -> Cost:
        """Return the cost of an operation of warps."""
        work = op.group
        assert work is not None
        steps = [s for s in op.steps if s.opcode is not Opcode.COPY or memory_of(s.dst) != "SMEM"]
        tail, terms = self._besides(work)
        is_product = bool(steps) and steps[0].opcode is Opcode.MATMUL
        if steps and (work.product_cycles if is_product else work.element_cycles):
            return self._whole(steps, work, tail, terms)
        if is_product:
            return self._product(steps[0], work, tail, terms)
        if steps:
            return self._arithmetic(steps, work, tail, terms)
        if work.spilled_bytes or work.far_bytes:
            return self._spill(work, tail, terms)
        return self._control(work, tail, terms)

    # ---------------------------------------------------------------- what no step says

    def _besides(self, work: GroupWork) -> tuple[float, dict[str, float]]:
        """Return the cycles of barriers, fences and starts, by the constant behind each."""
        s, at = self.sharing, f"{self.key}.{WARPS}.sharing"
        terms = {
            f"{at}.barrier_cycles": work.barriers * (s.barrier_cycles.value + work.warps * s.barrier_warp_cycles.value),
            f"{at}.fence_cycles": float(work.fences * s.fence_cycles.value),
        }
        if work.cell_bytes and work.is_specialised and self.library is not None:
            terms[f"{self.key}.{WARPS}.library.tile_cycles"] = float(self.library.tile_cycles.value)
        elif work.cell_bytes:
            terms[f"{at}.block_start_cycles"] = float(s.block_start_cycles.value)
        terms = {name: cycles for name, cycles in terms.items() if cycles}
        return sum(terms.values()), terms

    def _spill(self, work: GroupWork, tail: float, terms: dict[str, float]) -> Cost:
        """Return the cost of registers on their way to local memory and back: one group's after another's."""
        if self.local is None:
            raise SpecError(f"{self.device.name}: {self.key}: no {SPILL}, where spilled registers would go")
        near, far = self.local.bytes_per_cycle.value, self.local.far_bytes_per_cycle.value
        taken = work.spilled_bytes / near + work.far_bytes / far
        terms[f"{self.key}.{SPILL}.bytes_per_cycle"] = taken
        return Cost(ceil(taken + tail), 0, (), tuple(terms.items()), ((f"{self.core}.{SPILL}", ceil(taken)),))

    def _control(self, work: GroupWork, tail: float, terms: dict[str, float]) -> Cost:
        """Return the cost of an iteration's end, or of loads through registers: addresses, control, accesses."""
        s, kind, at = self.sharing, work.generation, f"{self.key}.{WARPS}.sharing"
        count = work.copies + work.loads
        parts = {
            f"{at}.step_cycles": float(work.is_step * s.step_cycles.value),
            f"{at}.copy_cycles.{kind}": float(work.copies * self._of(kind, "copy")) if work.copies else 0.0,
            f"{at}.load_cycles.{kind}": float(work.loads * self._of(kind, "load")) if work.loads else 0.0,
        }
        terms |= {name: cycles for name, cycles in parts.items() if cycles}
        cycles, warps = ceil(sum(parts.values())), ceil_div(work.warps, self.subcores)
        if not cycles:
            return Cost(ceil(tail), 0, (), tuple(terms.items()))
        issued = work.is_step * s.step_instructions_count.value + count * s.access_instructions_count.value
        memory = count * work.warps * WARP_LANES * ACCESS_BYTES / self.memory_bytes
        pipes = ((f"{self.core}.{LSU}", ceil(memory)),) if memory else ()
        share = Share(False, cycles, _part(issued * warps, cycles), memory=_part(memory, cycles))
        return Cost(ceil(tail), 0, (), tuple(terms.items()), pipes, share)

    def _of(self, kind: str, what: str) -> int:
        costs = self.sharing.copy_cycles if what == "copy" else self.sharing.load_cycles
        if kind not in costs:
            raise SpecError(f"{self.device.name}: {self.key}.{WARPS}.sharing.{what}_cycles says nothing of {kind}")
        return costs[kind].value

    # ---------------------------------------------------------------- products

    def _product(self, step: Step, work: GroupWork, tail: float, terms: dict[str, float]) -> Cost:
        a, b = step.srcs
        assert not isinstance(a, float)
        assert not isinstance(b, float)
        form = next((f for n, f in self.tensor.fractals.items() if n == a.fmt), None)
        if form is None:
            return self._without_tensor(step, a.cols, work, tail, terms)
        depth = ceil_div(a.cols, form.k_elements.value)
        if work.generation == "wgmma" and self.tensor.wgmma is not None:
            busy, memory, lone, end = self._of_groups(step, a, depth, work)
            issued = 0.0
        else:
            busy, memory, lone, end, issued = self._of_warps(step, a, b, depth, work)
        tail += end
        cycles = max(1, ceil(lone))
        constant = "elements_per_cycle" if work.generation == "wgmma" else "pipe_cycles"
        terms[f"{self.key}.{TENSOR}.{work.generation}.{constant}"] = lone + end
        share = Share(True, cycles, _part(issued, cycles), tensor=_part(busy, cycles), memory=_part(memory, cycles))
        pipes = ((f"{self.core}.{TENSOR}", ceil(busy)), (f"{self.core}.{LSU}", ceil(memory)))
        return Cost(ceil(tail), 0, (), tuple(terms.items()), tuple(p for p in pipes if p[1]), share)

    def _of_groups(self, step: Step, a: Operand, depth: int, work: GroupWork) -> tuple[float, float, float, float]:
        """Return cycles of the tensor cores and of shared memory, of the product alone, and after it."""
        spec = self.tensor.wgmma
        assert spec is not None
        groups = work.warps // self.subcores
        down = max(1, groups // max(work.across, work.repeats))
        stacked = ceil_div(ceil_div(step.dst.rows, spec.m_elements.value), down)
        width = ceil_div(step.dst.cols, work.across * FRAGMENT_COLUMNS) * FRAGMENT_COLUMNS
        instructions, pieces = depth * stacked * groups, 1
        if work.repeats > 1:  # in instructions of half the width
            width, pieces = max(FRAGMENT_COLUMNS, width // work.repeats), work.repeats
        instructions *= pieces
        from_shared = memory_of(a) == "SMEM"
        row_bytes = MATRIX_BYTES * (width + (spec.m_elements.value if from_shared else 0))
        busy, memory = width / spec.elements_per_cycle.value, row_bytes / self.memory_bytes
        each, drain = max(busy, memory), float(spec.drain_cycles.value)
        lone = instructions * each
        if work.is_serial:  # the drains of several warp groups overlap
            lone = instructions / groups * max(groups * each, each + drain)
        end = drain if work.is_awaited and not work.is_serial else 0.0
        # The warps go on when the last product starts.
        if not (work.is_awaited or work.is_serial or work.is_specialised):
            lone -= each * stacked * groups * pieces
            busy, memory = busy * (1 - 1 / depth), memory * (1 - 1 / depth)
        return instructions * busy, instructions * memory, lone, end

    def _of_warps(
        self, step: Step, a: Operand, b: Operand, depth: int, work: GroupWork
    ) -> tuple[float, float, float, float, float]:
        """Return the same of products of single warps, which load their operands first, and their instructions."""
        spec, size = self.tensor.mma, get_format(a.fmt).size_bytes
        down = max(1, work.warps // work.across)
        rows = ceil_div(step.dst.rows, down * FRAGMENT_ROWS)
        columns = ceil_div(step.dst.cols, work.across * FRAGMENT_COLUMNS)
        each = spec.m_elements.value * spec.n_elements.value
        products = rows * columns * depth * FRAGMENT_ROWS * FRAGMENT_COLUMNS / each
        pieces = ceil_div(a.cols * size, MATRIX_BYTES)
        is_loaded = memory_of(a) == "SMEM" or work.across > 1
        loads = columns * pieces / 2 + (rows * pieces if is_loaded else 0)
        warps = ceil_div(work.warps, self.subcores)
        busy, memory = products * spec.pipe_cycles.value * warps, loads * work.warps * WARP_BYTES / self.memory_bytes
        lone = max(busy, memory, loads * spec.load_cycles.value)
        return busy, memory, lone, float(spec.latency_cycles.value), (products + loads) * warps

    def _without_tensor(self, step: Step, depth: int, work: GroupWork, tail: float, terms: dict[str, float]) -> Cost:
        """Return the cost of a product whose formats no tensor core has: multiply-adds of the lanes."""
        pipe = self.lanes[FMA]
        count = step.dst.rows * step.dst.cols * depth / WARP_LANES / work.warps
        each = WARP_LANES / pipe.lanes_count.value * ceil_div(work.warps, self.subcores)
        cycles = max(1, ceil(count * each))
        terms[f"{self.key}.{FMA}.ops.mul.instructions_count"] = float(cycles)
        return Cost(
            ceil(tail), 0, (), tuple(terms.items()), ((f"{self.core}.{FMA}", cycles),), Share(False, cycles, WHOLE)
        )

    # ---------------------------------------------------------------- arithmetic

    def _arithmetic(self, steps: list[Step], work: GroupWork, tail: float, terms: dict[str, float]) -> Cost:
        count = Count()
        for step in steps:
            self._add(step, work, count)
        warps, s = ceil_div(work.warps, self.subcores), self.sharing
        if work.is_serial and any(step.opcode in REDUCTIONS for step in steps):
            count.gaps = self._gaps(steps)
        lone = max(
            s.warp_issue_cycles.value * count.issued,
            s.special_factor.value * count.special * warps,
            count.compare * warps,
            count.issued * warps,
            1.0,
        )
        cycles = ceil(max(lone / 2, lone - count.gaps))
        terms[f"{self.key}.{WARPS}.sharing.warp_issue_cycles"] = lone
        for name, taken in count.terms.items():
            terms[name] = terms.get(name, 0.0) + taken
        share = Share(
            False,
            cycles,
            _part(count.issued * warps, cycles),
            _part(count.compare * warps, cycles),
            _part(count.special * warps, cycles),
            memory=_part(count.shared * work.warps, cycles),
        )
        plain = count.issued - count.compare / 2 - count.special / 8
        busy = ((FMA, plain), (ALU, count.compare), (MUFU, count.special), (LSU, count.shared * self.subcores))
        pipes = tuple((f"{self.core}.{n}", ceil(c * warps)) for n, c in busy if c > 0)
        return Cost(ceil(tail + count.latency), 0, (), tuple(terms.items()), pipes, share)

    def _whole(self, steps: list[Step], work: GroupWork, tail: float, terms: dict[str, float]) -> Cost:
        """Return the cost of a library's kernel, which keeps the core busy whatever else there is."""
        first, elements = steps[0], max(s.dst.rows * s.dst.cols for s in steps)
        is_product = first.opcode is Opcode.MATMUL
        depth = first.srcs[0].cols if is_product and not isinstance(first.srcs[0], float) else 1
        cycles = max(1, ceil(elements * depth * (work.product_cycles if is_product else work.element_cycles)))
        constant = "unaligned_product_cycles" if is_product else work.constant
        terms[f"{self.key}.{WARPS}.library.{constant}"] = float(cycles)
        share = Share(False, cycles, WHOLE)
        return Cost(ceil(tail), 0, (), tuple(terms.items()), ((f"{self.core}.{FMA}", cycles),), share)

    def _gaps(self, steps: list[Step]) -> float:
        """Return the cycles of arithmetic that the compiler moves between products that are waited for one by one."""
        spec = self.tensor.wgmma
        wide = [s.dst for s in steps if s.dst.cols > 1]
        sizes = [get_format(dst.fmt).size_bytes for dst in wide]
        if spec is None or min(sizes) == 1:  # lanes exchange P in FP8: no product begins before all of it is there
            return 0.0
        row_bytes = min(size * dst.cols for size, dst in zip(sizes, wide, strict=True))
        return spec.gap_cycles.value * ceil_div(row_bytes, MATRIX_BYTES)

    def _add(self, step: Step, work: GroupWork, count: Count) -> None:
        source = step.srcs[0]
        is_reduction = step.opcode in REDUCTIONS and not isinstance(source, float)
        tile = source if is_reduction else step.dst
        assert not isinstance(tile, float)
        values = elements(tile, work)
        name = step.opcode.name.lower()
        if step.opcode in SPECIAL:
            self._special(step, values, count)
        elif step.opcode is Opcode.COPY:  # another name for the same registers
            pass
        elif step.opcode is Opcode.CAST:
            self._cast(step.dst.fmt, source.fmt if not isinstance(source, float) else "", values, count)
        else:
            formats = {o.fmt for o in step.operands() if o.fmt != "int8"}
            self._issue(name, values, formats.pop() if len(formats) == 1 else "", count)
        if is_reduction:
            self._reduce(name, elements(step.dst, work), tile.fmt, work, count)

    def _issue(self, name: str, values: float, fmt: str, count: Count) -> None:
        """Count the instructions of an operation on so many elements of a lane."""
        narrow = self.lanes.get(ALU)
        pipe = ALU if narrow is not None and (name in narrow.ops or narrow.packed(name, fmt) > 1) else FMA
        spec = self.lanes[pipe]
        per_element = spec.op(name).instructions_count.value if name in spec.ops else 1
        issued = values / spec.packed(name, fmt) * per_element
        count.issued += issued
        if pipe == ALU:
            count.compare += issued * WARP_LANES / spec.lanes_count.value

    def _special(self, step: Step, values: float, count: Count) -> None:
        """Count exponentials and logarithms: float32 inside, to the base 2."""
        source = step.srcs[0]
        if get_format(step.dst.fmt).size_bytes == 2:
            self._cast("float32", step.dst.fmt, values, count)
            self._cast(step.dst.fmt, "float32", values, count)
        if not step.attributes.variant.startswith(("exp2.", "log2.")) and not isinstance(source, float):
            self._issue("mul", values, "float32", count)
        count.issued += values
        count.special += values * WARP_LANES / self.lanes[MUFU].lanes_count.value

    def _cast(self, target: str, source: str, values: float, count: Count) -> None:
        """Count conversions: two elements an instruction towards a narrower format."""
        sizes = [get_format(f or "float32").size_bytes for f in (target, source)]
        if sizes[0] == 1:  # pairs, at half the speed, then exchanged between lanes for the next product
            self._issue("cast", values / 2, "", count)
            count.compare += values / 2 * 2
            # PRMT and SEL, then SHFL: each a quarter of an instruction an element (hopper.md section 2).
            quarter = values / 4
            self._issue("permute", 2 * quarter, "", count)
            count.issued += quarter
            count.latency += self.shared.shuffle_latency_cycles.value
        else:
            self._issue("cast", values / 2 if sizes[0] < sizes[1] else values, "", count)

    def _reduce(self, name: str, rows: float, fmt: str, work: GroupWork, count: Count) -> None:
        """Count the way of a row's parts from lane to lane, and from warp to warp where several share a row."""
        count.issued += ROUNDS * rows
        count.shared += ROUNDS * rows * self.shared.shuffle_cycles.value
        self._issue("max" if name == "row_max" else "add", ROUNDS * rows, fmt, count)
        count.latency += ROUNDS * self.shared.shuffle_latency_cycles.value
        if work.across > 1 and work.repeats == 1:
            count.shared += CROSS_ACCESSES + CROSS_BARRIERS * self.sharing.barrier_warp_cycles.value
            count.issued += CROSS_ACCESSES
            count.latency += self.sharing.reduction_cycles.value * (CROSS_STEPS + CROSS_ROW_STEPS * rows)


def elements(tile: Operand, work: GroupWork) -> float:
    """Return how many elements of a tile a lane holds; of a row vector, its rows once."""
    if work.is_even:
        each = WARP_LANES if tile.cols > 1 else 1
        return tile.rows * tile.cols / (work.warps * each)
    down = max(1, work.warps // (work.across * work.repeats))
    rows = ceil_div(tile.rows, down * FRAGMENT_ROWS)
    if tile.cols == 1:
        return rows * LANE_ROWS
    columns = ceil_div(tile.cols, work.across * FRAGMENT_COLUMNS)
    return rows * columns * FRAGMENT_ROWS * FRAGMENT_COLUMNS / WARP_LANES


def _part(busy: float, cycles: int) -> int:
    return round(busy / cycles * WHOLE)
