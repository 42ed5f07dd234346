"""Costs of operations on an Ascend core, and on other cores with such units. Each unit has a table, which depends on
the unit's model in the file.

An instruction of a vector unit costs ``head + slope * repeats + tail``; the instructions between two barriers follow
one another in the pipe, so that only the first instruction has a head and only the last one has a tail.  The slope of
an instruction with two sources depends on the places of its operands: two operands that share a bank group are read one
after the other.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.config.core_units import (
    DmaEngine,
    FixpipeEngine,
    MatrixEngine,
    RegisterVectorEngine,
    VectorEngine,
    VectorUnit,
)
from npusim.config.model import entry
from npusim.errors import ProgramError, UnknownOpcodeError
from npusim.formats import get_format, stored_format
from npusim.identity import Itself
from npusim.machines.ascend import registers
from npusim.machines.ascend.group import VectorWork
from npusim.machines.decisions import VectorCode
from npusim.machines.transfers import Transfers
from npusim.program.ir.op import Opcode, Step, goes_down
from npusim.program.ir.tile import GlobalTile, Operand, RingTile, Tile, memory_of
from npusim.program.ir.tile_program import Cost
from npusim.units import ceil_div, round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from npusim.config.core_units import EngineSpec, RouteSpec, VectorOpSpec
    from npusim.config.device import BankSpec, DeviceSpec
    from npusim.config.quantity import Quantity
    from npusim.machines.decisions import AscendDecisions
    from npusim.program.ir.op import Source, TileOp
    from npusim.program.ir.tile_program import Terms, TileProgram


#: The work of an operation whose kernel makes no decisions.
ALONE = VectorWork()


@lru_cache(maxsize=16)  # one entry per unit of a device
def _known(_device: Itself, *_by: object) -> dict[Hashable, Cost]:
    return {}


@lru_cache(maxsize=16)  # one entry per engine of a device
def _banks_of(device: Itself, core: str, engine: str) -> BankSpec | None:
    spec: DeviceSpec = device.thing
    of_buffers = (b.banks for b in spec.core(core).buffers.values())
    has_registers = isinstance(spec.engine(core, engine), RegisterVectorEngine)
    return None if has_registers else next((b for b in of_buffers if b is not None), None)


def banks_of(device: DeviceSpec, core: str, engine: str) -> BankSpec | None:
    """Return the banks of the buffer that an engine works in; None if its costs do not depend on them."""
    return _banks_of(Itself(device), core, engine)


def crowd(blocks: int, groups: int) -> float:
    """Return the fraction of the other core groups that work at the same time, on average over ``blocks``: 0 to 1."""
    busy = blocks / max(1, ceil_div(blocks, groups))
    return (busy - 1) / (groups - 1) if blocks and groups > 1 else 0.0


class EnginePricing(Transfers):
    """Costs of operations on engines that the device file describes as pipes, matrix and vector units."""

    def __init__(self, program: TileProgram, device: DeviceSpec) -> None:
        super().__init__(program, device)
        self.crowds = {p.name: crowd(len(p.blocks), device.group_count.value) for p in program.phases}
        #: Costs of a vector unit's operations, by everything that they depend on, for all programs on the device.
        self._vector = _known(Itself(device), vector_cycles, registers.function_cycles)
        self._steps = _known(Itself(device), Itself(type(self)))
        #: Costs of moves through global memory, which depend on the data of this program that is in L2.
        self._moves: dict[Hashable, Cost] = {}
        self._units: dict[tuple[str, str], tuple[EngineSpec, str, BankSpec | None]] = {}
        #: Costs of operations of one step, by the identity of the step's cost, which the entry refers to.
        self._alone: dict[int, tuple[Cost, Cost]] = {}

    def of_op(self, op: TileOp) -> Cost:
        """Return the exact sum of the costs of an operation's steps; its latency ends with the last result."""
        queue = self.queues[op.queue]
        spec, key, banks = self._unit(queue.core, queue.engine)
        if isinstance(spec, VectorUnit):
            work = op.work if isinstance(op.work, VectorWork) else ALONE
            return self._with_tile(work, self._sequence(op.steps, spec, key, banks, work))
        costs = [self.of_step(step, queue.core, queue.engine) for step in op.steps]
        if len(costs) != 1:
            return _summed(costs)
        (cost,) = costs
        if id(cost) not in self._alone:
            self._alone[id(cost)] = cost, _summed(costs)
        return self._alone[id(cost)][1]

    def _sequence(
        self, steps: tuple[Step, ...], spec: VectorUnit, key: str, banks: BankSpec | None, work: VectorWork
    ) -> Cost:
        """Return the cost of steps that follow one another on a vector unit; each different sequence is priced once."""
        is_on_registers = isinstance(spec, RegisterVectorEngine)
        code = work.code or VectorCode()
        looked_at = registers.looked_at(steps, code) if is_on_registers else ()
        alike = key, work.decided, looked_at, signature(steps, None if is_on_registers else banks)
        if alike not in self._vector:
            if isinstance(spec, RegisterVectorEngine):
                cycles, terms = registers.function_cycles(steps, spec, key, code)
            else:
                cycles, terms = vector_cycles(steps, spec, banks, key, work.decided)
            self._vector[alike] = Cost(cycles, terms=terms).at_rate(spec.rate)
        return self._vector[alike]

    def _with_tile(self, work: VectorWork, cost: Cost) -> Cost:
        """Return a cost with the additional cost of a tile that is passed to other cores."""
        if not work.hands_on:
            return cost
        decided, flags, terms = work.decided, self.device.flags, list(cost.terms)
        share = self.crowds[work.hands_on] / decided.together
        for name in ("tile_cycles", *(("tile_extra_cycles",) if decided.extra else ())):
            spec = getattr(flags, name, None)
            if share and spec is not None:
                terms.append((f"flags.{name}", spec.value * share))
        more = sum(cycles for _, cycles in terms[len(cost.terms) :])
        return cost._replace(occupancy_cycles=cost.occupancy_cycles + ceil(more), terms=tuple(terms))

    def of_step(self, step: Step, core: str, engine: str) -> Cost:
        """Return the cost of one step on ``engine`` of ``core``.

        Transfers and products within a core depend only on shapes and formats: equal ones are priced once for all
        programs.  A move through global memory also depends on its tensor, but not on its place in the tensor: equal
        moves of a program are priced once.
        """
        operands, (spec, key, banks) = (step.dst, *step.srcs), self._unit(core, engine)
        if isinstance(spec, VectorUnit):
            return self._sequence((step,), spec, key, banks, ALONE)
        known = self._moves if GlobalTile in map(type, operands) else self._steps
        alike = core, engine, step.opcode, step.attributes.arithmetic, *map(_shape, operands)
        cost = known.get(alike)
        if cost is None:
            cost = known[alike] = self._of_step(step, core, engine)
        return cost

    def _of_step(self, step: Step, core: str, engine: str) -> Cost:
        spec, key, _ = self._unit(core, engine)
        match spec:
            case DmaEngine() | FixpipeEngine():
                return self.move(step, spec, key)
            case MatrixEngine():
                return _product(step, spec, key)
        raise UnknownOpcodeError(f"{step.opcode.name} has no cost on {core}.{engine}")

    def _miss_share(self, tensor: str) -> float:
        """Return the share of a tensor's reads that wait for memory; a miss of one core group is a miss of
        all groups.
        """
        return self.residency.read_waits[tensor]

    def _unit(self, core: str, engine: str) -> tuple[EngineSpec, str, BankSpec | None]:
        if (core, engine) not in self._units:
            spec = self.device.engine(core, engine)
            banks = banks_of(self.device, core, engine) if self.is_placed else None
            self._units[core, engine] = spec, f"cores.{core}.engines.{engine}", banks
        return self._units[core, engine]


class AscendPricing(EnginePricing):
    """Costs of a program's operations on one Ascend device."""

    def __init__(self, program: TileProgram, device: DeviceSpec) -> None:
        super().__init__(program, device)
        self._fractal = device.matrix_engine("aic").fractals["float16"].m_elements.value

    def of_op(self, op: TileOp) -> Cost:
        """Return the cost of an operation; halves of a tile that leave L0C in one instruction are
        transferred together.
        """
        queue = self.queues[op.queue]
        spec, _, _ = self._unit(queue.core, queue.engine)
        if len(op.steps) < 2 or not isinstance(spec, FixpipeEngine):
            return super().of_op(op)
        halves = [self.of_step(step, queue.core, queue.engine) for step in op.steps]
        slowest = max(halves, key=lambda cost: cost.occupancy_cycles)
        key, drain = f"cores.{queue.core}.engines.{queue.engine}.elements_per_cycle", slowest.occupancy_cycles
        start = sum(cycles for constant, cycles in slowest.terms if constant.endswith(".latency_cycles"))
        each = spec.elements_per_cycle.value * spec.rate
        elements = sum(step.dst.rows * step.dst.cols for step in op.steps) / each
        if (whole := ceil(elements + start)) <= drain:
            return slowest
        last = tuple(term for term in slowest.terms if term[0].endswith(".latency_cycles"))
        return Cost(whole, slowest.latency_cycles, slowest.link_bytes, ((key, elements), *last))

    def latency(self, step: Step, route: RouteSpec) -> tuple[str, int]:
        """Return the latency of a move: that of one instruction, or of one instruction for each row of a tile's
        fractals, whichever is smaller.
        """
        by_rows = route.row_latency_cycles
        rows = min(ceil_div(extent, self._fractal) for extent in (step.dst.rows, step.dst.cols))
        if by_rows is None or rows * by_rows.value >= route.latency_cycles.value:
            return super().latency(step, route)
        return "row_latency_cycles", rows * by_rows.value

    def stored_bytes(self, operand: Operand, memory: str) -> int:
        """Return an operand's bytes in ``memory``: padded to full fractals in L1, L0A, L0B, L0C (ascend.md 1.2)."""
        if memory in ("GM", "UB"):
            return operand.payload_bytes
        edge = self._fractal
        return stored_format(operand.fmt).bytes_of(round_up(operand.rows, edge) * round_up(operand.cols, edge))


def _summed(costs: Sequence[Cost]) -> Cost:
    """Return the cost of steps that follow one another: the latency ends with the last result."""
    occupancy = latency = 0
    links: dict[str, int] = {}
    terms: dict[str, float] = {}
    for cost in costs:
        occupancy += cost.occupancy_cycles
        latency = max(latency - cost.occupancy_cycles, cost.latency_cycles)
        for link, size in cost.link_bytes:
            links[link] = links.get(link, 0) + size
        for key, cycles in cost.terms:
            terms[key] = terms.get(key, 0.0) + cycles
    return Cost(occupancy, latency, tuple(links.items()), tuple(terms.items()))


def _shape(operand: Source) -> Hashable:
    if isinstance(operand, float):
        return operand
    if isinstance(operand, GlobalTile):
        return Itself(operand.tensor), operand.rows, operand.cols
    return memory_of(operand), operand.rows, operand.cols, operand.stride, operand.fmt


def _product(step: Step, spec: MatrixEngine, key: str) -> Cost:
    if step.opcode is Opcode.FILL:  # the first product of a sum starts from 0 (Ascend C, Mmad: cmatrixInitVal)
        return Cost(0)
    if step.opcode is not Opcode.MATMUL:
        raise UnknownOpcodeError(f"{step.opcode.name} has no cost on {key}, which only multiplies")
    depth, fmt = step.depth, step.srcs[0].fmt  # type: ignore[union-attr]
    if step.attributes.arithmetic and step.dst.fmt != (sums := step.attributes.accumulator_format):
        raise UnknownOpcodeError(
            f"MATMUL to {step.dst.fmt} has no cost on {key}, which accumulates in {sums}; CAST the result"
        )
    fractal = spec.fractal(fmt)
    count = (
        ceil_div(step.dst.rows, fractal.m_elements.value)
        * ceil_div(step.dst.cols, fractal.n_elements.value)
        * ceil_div(depth, fractal.k_elements.value)
    )
    work = count * spec.cycles_per_fractal.value
    start = spec.startup_cycles.value
    terms = ((f"{key}.cycles_per_fractal", float(work)), (f"{key}.startup_cycles", float(start)))
    return Cost(ceil(work + start), terms=terms).at_rate(spec.rate)


#: Number of repeats after which the results of an instruction are available to a second instruction that reads them in
#: the same order: PTO's kernels have a barrier between dependent instructions that are shorter.
PIPE_REPEATS = 8


def vector_cycles(
    steps: Sequence[Step], spec: VectorEngine, banks: BankSpec | None, key: str, decided: AscendDecisions
) -> tuple[int, Terms]:
    """Return the cycles of steps that follow one another, and the constants on which the cycles depend.

    ``key`` is the unit's key in its file.  Raises :class:`UnknownOpcodeError` for a step without an instruction. If
    there are barriers only where they are needed, the instructions between two barriers are a run. It costs the head of
    its first and the tail of its last instruction. Otherwise each instruction costs both.
    """
    is_joined = decided.barriers == "needed" and spec.head_exposed is not None and spec.head_exposed.value == "idle"
    terms: dict[str, float] = {}
    run = _Run(spec, key, terms)
    for step in steps:
        row = VECTOR_COSTS.get(step.opcode)
        if row is None:
            raise UnknownOpcodeError(f"{step.opcode.name} has no cost on {key}")
        registers.check_sum(step, key)
        if decided.expands:
            run.expand(step)
        is_by_rows = step.opcode is Opcode.CUMSUM and decided.sums == "rows"
        for name, count in _summed_rows(step, spec) if is_by_rows else row(step, spec):
            op = entry(spec.ops, name, f"{key}.ops: unknown vector op {name!r}; allowed: ")
            run.add(step, name, count, _slope(step, op, banks), joins=is_joined)
    run.end()
    return ceil(sum(terms.values())), tuple(terms.items())


class _Run:
    """Instructions since the last barrier, and the addresses that they wrote."""

    def __init__(self, spec: VectorEngine, key: str, terms: dict[str, float]) -> None:
        self.spec, self.key, self.terms = spec, key, terms
        self.last = ""
        self._repeats = 0
        # repeats at its start and end, whether a pass wrote it
        self._written: dict[object, tuple[int, int, bool]] = {}

    def add(self, step: Step, name: str, count: int, slope: tuple[str, Quantity], *, joins: bool) -> None:
        """Add an instruction, after a barrier if the instruction needs one."""
        is_broadcast, is_pass = name == "broadcast", step.opcode in (Opcode.ROW_MAX, Opcode.ROW_SUM)
        sources = [_where(s) for s in step.srcs if not isinstance(s, float)]
        columns = [_where(s) for s in step.srcs if not isinstance(s, float) and s.cols == 1]
        spread: list[object] = [("blocks", at) for at in columns]
        reads, writes = (columns, spread) if is_broadcast else ([*sources, *spread], [_where(step.dst)])
        if is_pass:
            reads = [*reads, ("passes", writes[0])]
            writes = [*writes, ("passes", writes[0])]
        if self.last and (not joins or self._waits(reads, count, is_pass=is_broadcast or is_pass)):
            self.end()
        op = self.spec.op(name)
        if not self.last:
            self._book(f"{name}.head_cycles", op.head_cycles.value)
        self._book(f"{name}.{slope[0]}", slope[1].value * count)
        floor = self.spec.count_mode_cycles
        if joins and floor is not None and step.dst.cols == 1 and not is_pass:
            self._book("count_mode_cycles", floor.value, is_op=False)
        self._repeats += count
        for at in writes:
            self._written[at] = self._repeats - count, self._repeats, is_broadcast or is_pass
        self.last = name

    def expand(self, step: Step) -> None:
        """Add the copies that expand an operand of one row or one column to a tile: one copy for each row of
        the tile.
        """
        slope, interval = self.spec.op("copy").slope_cycles_per_repeat, self.spec.row_interval_cycles
        for s in step.srcs:
            if not isinstance(s, float) and (s.rows < step.dst.rows or s.cols < step.dst.cols):
                self.end()
                copied = Step(Opcode.COPY, step.dst, (step.dst,))
                self.add(copied, "copy", repeats(step.dst, self.spec), ("slope_cycles_per_repeat", slope), joins=True)
                if interval is not None:
                    self._book("row_interval_cycles", interval.value * step.dst.rows, is_op=False)
                self.end()

    def _waits(self, reads: Sequence[object], count: int, *, is_pass: bool) -> bool:
        """Whether the run wrote a source whose values may not be complete yet."""
        for at in reads:
            if at in self._written:
                begun, ended, is_whole = self._written[at]
                # An instruction that reads a tile in order follows its writer; a short one may overtake it.
                since = self._repeats - (ended if count < PIPE_REPEATS else begun)
                if is_pass or is_whole or since < PIPE_REPEATS:
                    return True
        return False

    def end(self) -> None:
        """Wait for the running instructions: a barrier, or the end of the operation."""
        if self.last:
            self._book(f"{self.last}.tail_cycles", self.spec.op(self.last).tail_cycles.value)
        self.last, self._repeats = "", 0
        self._written.clear()

    def _book(self, name: str, cycles: float, *, is_op: bool = True) -> None:
        where = f"{self.key}.ops.{name}" if is_op else f"{self.key}.{name}"
        self.terms[where] = self.terms.get(where, 0.0) + cycles


def _where(operand: Operand) -> object:
    return _place(operand) if isinstance(operand, (Tile, RingTile)) else operand


def signature(steps: Sequence[Step], banks: BankSpec | None) -> tuple[Hashable, ...]:
    """Return the key of :func:`vector_cycles`; equal work of another core, or on another slice, has the same key.

    For addresses, the key states which addresses are equal, and the bank in which a tile with columns begins.
    """
    looked_at: list[Hashable] = []
    places: dict[int, int] = {}
    for step in steps:
        a = step.attributes
        looked_at += (step.opcode, a.order, a.every, a.comparisons, a.variant)
        for operand in (step.dst, *step.srcs):
            if isinstance(operand, (Tile, RingTile)):
                at, cols = _place(operand), operand.cols
                bank = bank_of(at, banks) if banks is not None and cols > 1 else None
                which = places.setdefault(at, len(places))
                looked_at.append((operand.rows, cols, operand.stride, operand.fmt, which, bank))
            else:
                looked_at.append(None if isinstance(operand, float) else operand)
    return tuple(looked_at)


def _slope(step: Step, op: VectorOpSpec, banks: BankSpec | None) -> tuple[str, Quantity]:
    """Return the slope for the places of a step's operands, and its name."""
    tiles = [s for s in step.srcs if isinstance(s, (Tile, RingTile))]
    dst = step.dst
    free = ("slope_cycles_per_repeat", op.slope_cycles_per_repeat)
    if banks is None or dst.cols == 1:
        return free
    full = [t for t in tiles if t.cols > 1]
    if len(full) < len(tiles) and op.slope_repeated_block_cycles_per_repeat is not None:
        return "slope_repeated_block_cycles_per_repeat", op.slope_repeated_block_cycles_per_repeat
    if len(full) > 1 and op.slope_conflict_cycles_per_repeat is not None:
        first, second = (_place(t) for t in full[:2])
        if first != second and _group(first, banks) == _group(second, banks):
            return "slope_conflict_cycles_per_repeat", op.slope_conflict_cycles_per_repeat
    if op.slope_read_write_conflict_cycles_per_repeat is not None and isinstance(dst, (Tile, RingTile)):
        target = _place(dst)
        for source in map(_place, full):
            if source != target and bank_of(source, banks) == bank_of(target, banks):
                return ("slope_read_write_conflict_cycles_per_repeat", op.slope_read_write_conflict_cycles_per_repeat)
    return free


def _place(tile: Tile | RingTile) -> int:
    """Return a tile's address; slots of a ring have equal banks, so that the first represents all."""
    return tile.offset_bytes + (tile.ring.offset_bytes if isinstance(tile, RingTile) else 0)


def _group(address: int, banks: BankSpec) -> int:
    return address // banks.row_bytes.value % banks.group_count.value


def bank_of(address: int, banks: BankSpec) -> tuple[int, int]:
    """Return the group and the bank within it: addresses run through the groups first, then through a bank's rows."""
    span = banks.row_bytes.value * banks.group_count.value * banks.rows_count.value
    return _group(address, banks), address // span


Instructions = list[tuple[str, int]]
#: Number of bits of a byte.
BITS = 8


def repeats(operand: Operand, spec: VectorEngine, fmt: str | None = None) -> int:
    """Return the number of repeats that an instruction needs for a tile: full repeats for rows without gaps, otherwise
    a number per row.
    """
    size = get_format(fmt or operand.fmt).size_bytes
    repeat = spec.repeat_bytes.value
    stride = operand.cols if isinstance(operand, GlobalTile) else operand.stride
    if stride == operand.cols:
        return ceil_div(operand.rows * operand.cols * size, repeat)
    return operand.rows * ceil_div(operand.cols * size, repeat)


def _elementwise(name: str) -> Callable[[Step, VectorEngine], Instructions]:
    def instructions(step: Step, spec: VectorEngine) -> Instructions:
        tiles = [s for s in step.srcs if isinstance(s, (Tile, RingTile, GlobalTile))]
        chosen = "scalar" if name == "binary" and len(tiles) < len(step.srcs) else name
        if chosen in ("exp", "log", "div"):
            chosen = f"{name}_{step.dst.fmt}"
        # An operand with gaps between its rows needs separate repeats for each row.
        whole = [step.dst, *(t for t in tiles if t.cols == step.dst.cols)]
        listed = [(chosen, max(repeats(t, spec, step.constant_format) for t in whole))]
        # A mask or bias that is computed from indices: each comparison and each step of its arithmetic is an
        # instruction.
        listed += [("scalar", listed[0][1])] * step.attributes.comparisons
        # A column operand is first expanded to one 32-byte block per row (brcb: 8 rows per repeat).
        for tile in tiles:
            if tile.cols == 1 and step.dst.cols > 1:
                blocks = spec.repeat_bytes.value // spec.block_bytes.value
                listed.insert(0, ("broadcast", ceil_div(tile.rows, blocks)))
        return listed

    return instructions


def _made_of(step: Step, spec: VectorEngine) -> Instructions:
    """Return the instructions of `registers.MADE_OF`: sums and products have a constant."""
    count = repeats(step.dst, spec, step.dst.fmt)
    names = registers.MADE_OF[step.opcode]
    return [(f"{n}_{step.dst.fmt}" if n in ("exp", "div", "sqrt") else "scalar", count) for n in names]


#: Instructions of a function of two masks: And, Or and Not are instructions (Ascend C API reference); an exclusive or
#: consists of them.
_LOGIC: Mapping[str, int] = MappingProxyType({"and": 1, "or": 1, "xor": 4})


def _compare(step: Step, spec: VectorEngine) -> Instructions:
    """Return the comparisons of a relation, each of which is as fast as an Add or Adds, and the instructions that
    combine their masks.

    64 elements of float32 and 128 of float16 per cycle (asc-devkit 0da921b9, appendix to docs/zh/api: Compare,
    Compares).
    """
    compares, joins = registers.COMPARISONS[step.attributes.variant]
    listed = _elementwise("binary")(step, spec)
    return [*listed, *listed[-1:] * (compares - 1), *[_of_bits(step, spec)] * joins]


def _logic(step: Step, spec: VectorEngine) -> Instructions:
    is_not = any(isinstance(s, float) for s in step.srcs)
    return [_of_bits(step, spec)] * (1 if is_not else _LOGIC[step.attributes.variant])


def _of_bits(step: Step, spec: VectorEngine) -> tuple[str, int]:
    """Return the instruction for an operation on masks, which Compare writes with one bit per element."""
    return "binary", ceil_div(step.dst.rows * step.dst.cols, BITS * spec.repeat_bytes.value)


def _cast(step: Step, spec: VectorEngine) -> Instructions:
    src = step.srcs[0]
    wider = max((o for o in (step.dst, src) if not isinstance(o, float)), key=lambda o: o.payload_bytes)
    name = f"cast_{step.dst.fmt}"
    return [(name if name in spec.ops else "cast", repeats(wider, spec))]


def _reduction(step: Step, spec: VectorEngine) -> Instructions:
    """Return the passes of a row reduction: block reductions, or a tree of halves by vector adds."""
    src = step.srcs[0]
    if isinstance(src, float):
        raise ProgramError(f"{step.opcode.name} needs a tile")
    size = get_format(src.fmt).size_bytes
    passes: Instructions = []
    cols = src.cols
    order = step.attributes.order or "vector_lanes"
    if goes_down(step.opcode, step.attributes):
        return _along(step, spec)
    if order == "tree_halves":
        while cols > 1:
            half = cols // 2
            passes.append(("binary", ceil_div(src.rows * half * size, spec.repeat_bytes.value)))
            cols -= half
        return passes
    if order != "vector_lanes":
        raise UnknownOpcodeError(
            f"{step.opcode.name} in order {order!r} has no cost on this vector unit; allowed: vector_lanes, tree_halves"
        )
    lanes = spec.block_bytes.value // size
    while cols > 1:
        passes.append(("block_reduce", ceil_div(src.rows * cols * size, spec.repeat_bytes.value)))
        cols = ceil_div(cols, lanes)
    return passes or [("copy", 1)]


def _along(step: Step, spec: VectorEngine) -> Instructions:
    """Return the instructions of passes along a tile: each pass of an inverse is a multiply-add with an expanded
    column.
    """
    registers.check_along(step, "this vector unit")
    size, passes = get_format(step.dst.fmt).size_bytes, registers.along_tile(step)
    # the tile is copied in both directions
    turns = [("copy", repeats(step.dst, spec))] * 2 if step.opcode is Opcode.CUMSUM else []
    listed: Instructions = []
    for _, rows, cols in passes:
        if cols == 1:
            listed.append(("binary", ceil_div(rows * size, spec.repeat_bytes.value)))
            continue
        count = rows * ceil_div(cols * size, spec.repeat_bytes.value)
        if step.opcode is not Opcode.INVERSE:
            listed.append(("binary", count))
            continue
        blocks = spec.repeat_bytes.value // spec.block_bytes.value
        listed += [("broadcast", ceil_div(rows, blocks)), ("binary", count)]
    return [*turns, *listed] or [("copy", 1)]


def _summed_rows(step: Step, spec: VectorEngine) -> Instructions:
    """Return the instructions of sums of rows that are stored one after the other in memory: each row is added to a row
    of sums, which is copied to the result.
    """
    registers.check_along(step, "this vector unit")
    rows = [count for name, count in _along(step, spec) if name == "binary"]
    first = [("copy", rows[0] if rows else 1)] * 2
    return [*first, *(each for count in rows for each in (("binary", count), ("copy", count)))]


#: Instructions of the vector unit for each primitive operation, by name in the device file.
VECTOR_COSTS: Mapping[Opcode, Callable[[Step, VectorEngine], Instructions]] = MappingProxyType(
    {
        Opcode.COPY: _elementwise("copy"),
        Opcode.FILL: _elementwise("copy"),
        Opcode.CAST: _cast,
        Opcode.ADD: _elementwise("binary"),
        Opcode.SUB: _elementwise("binary"),
        Opcode.MUL: _elementwise("binary"),
        Opcode.MAX: _elementwise("binary"),
        Opcode.MIN: _elementwise("binary"),
        Opcode.COMPARE: _compare,
        Opcode.LOGIC: _logic,
        Opcode.FMA: _elementwise("binary"),
        Opcode.DIV: _elementwise("div"),
        Opcode.EXP: _elementwise("exp"),
        Opcode.LOG: _elementwise("log"),
        **dict.fromkeys(registers.MADE_OF, _made_of),
        Opcode.INTEGER: _elementwise("binary"),
        Opcode.BITS: _elementwise("copy"),
        Opcode.SELECT: _elementwise("select"),
        Opcode.ROW_MAX: _reduction,
        Opcode.ROW_SUM: _reduction,
        **dict.fromkeys(registers.ALONG, _along),
    }
)
