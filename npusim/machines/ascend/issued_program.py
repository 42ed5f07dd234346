"""The time of the instructions that an expert program of TileLang-Ascend issues to the pipes of a core group, with
flags.

Each instruction has the cost that the device file states for its unit, bytes and elements.  A core issues its
instructions in order; pipes execute them in order; waits, barriers and the scalar unit stop the units that the
program's text states.  Therefore the program itself determines the number of tiles in progress, the interval of flags
between cores, and the buffers that several values share.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from heapq import heappop, heappush
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from npusim.config.core_units import VectorUnit
from npusim.errors import NpusimError, SpecError, one_line
from npusim.late_methods import dataclass
from npusim.machines.ascend.ascend_pricing import AscendPricing
from npusim.machines.ascend.group import AIC, AIV, PING_PONG, AscendGroup, VectorWork
from npusim.machines.decisions import AscendDecisions
from npusim.program.ir.op import Attributes, Opcode, Step, TileOp
from npusim.program.ir.residency import Residency
from npusim.program.ir.tile import GlobalTensor, GlobalTile, Operand, Tile
from npusim.program.ir.tile_program import Cost, TileProgram
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec

_ENGINES = MappingProxyType({"MTE1": "MTE1", "MTE2": "MTE2", "MTE3": "MTE3", "M": "CUBE", "FIX": "FIXP", "V": "VECTOR"})
#: Operations by the words of vector instructions.
_OPCODES = MappingProxyType(
    {"add": Opcode.ADD, "sub": Opcode.SUB, "mul": Opcode.MUL, "div": Opcode.DIV, "max": Opcode.MAX, "min": Opcode.MIN}
    | {"exp": Opcode.EXP, "ln": Opcode.LOG, "sqrt": Opcode.SQRT, "rsqrt": Opcode.RSQRT, "cast": Opcode.CAST}
    | {"axpy": Opcode.FMA, "mul_add_dst": Opcode.FMA, "reduce_max": Opcode.ROW_MAX, "reduce_sum": Opcode.ROW_SUM}
    | {"reduce_min": Opcode.ROW_MAX, "abs": Opcode.MAX, "relu": Opcode.MAX, "fill": Opcode.FILL, "clear": Opcode.FILL}
    | {"bitwise_and": Opcode.MAX, "bitwise_or": Opcode.MAX, "bitwise_not": Opcode.MAX, "reciprocal": Opcode.DIV}
    | {"clamp_max": Opcode.MIN, "clamp_min": Opcode.MAX, "broadcast": Opcode.COPY, "select": Opcode.SELECT}
    | {"leaky_relu": Opcode.FMA, "row_expand_mul": Opcode.MUL, "row_expand_sub": Opcode.SUB}
    | {"row_expand_div": Opcode.DIV}
)
#: Number of operands of operations that do not have exactly one.
_OPERANDS = MappingProxyType({Opcode.FMA: 3, Opcode.SELECT: 3}) | dict.fromkeys(
    (Opcode.ADD, Opcode.SUB, Opcode.MUL, Opcode.DIV, Opcode.MAX, Opcode.MIN), 2
)


#: (from, to, id) of a flag in a core; ("cross", id) of a flag between cores.
Flag = tuple[object, ...]


class AccessedPart(Protocol):
    """The part of a buffer that an instruction accesses: half-open ranges of its axes, in a memory."""

    @property
    def buffer(self) -> str:
        """The buffer's name."""

    @property
    def space(self) -> str:
        """The memory; all cores share ``GM``."""

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of the buffer's axes."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours of each axis of the buffer."""

    @property
    def fmt(self) -> str:
        """The format of an element."""

    @property
    def is_exact(self) -> bool:
        """Whether the ranges are exactly the accessed ones; otherwise they cover all bytes that may be accessed."""

    @property
    def width(self) -> int:
        """Bytes of an element."""


class IssuedInstruction(Protocol):
    """An instruction that a core issues: ``pipe`` executes it; ``ALL`` stops every pipe, ``S`` is the scalar unit."""

    @property
    def core(self) -> str:
        """The core: ``C``, ``V0``, ``V1``."""

    @property
    def pipe(self) -> str:
        """The pipe that executes the instruction."""

    @property
    def kind(self) -> str:
        """An access, a set, a wait, a barrier, or a set or wait between cores."""

    @property
    def name(self) -> str:
        """The name of the instruction in the program."""

    @property
    def line(self) -> int:
        """The line of the program."""

    @property
    def reads(self) -> Sequence[AccessedPart]:
        """The parts that the instruction reads."""

    @property
    def writes(self) -> Sequence[AccessedPart]:
        """The parts that the instruction writes."""

    @property
    def flag(self) -> Flag:
        """The flag that the instruction sets or waits for."""

    @property
    def product(self) -> tuple[int, int, int] | None:
        """Rows, columns and depth of the product that the instruction computes, or for which it loads."""


class IssuedByCores(Protocol):
    """The instructions of a core group in the order in which each core issues them."""

    @property
    def cores(self) -> Mapping[str, Sequence[IssuedInstruction]]:
        """Instructions by core."""


class IssuedProgram:
    """Times walks of one program on an Ascend device; each core group has an equal share of L2.

    ``vector_in_order``: whether the vector pipe has barriers only where an instruction needs another's results; False:
    there are barriers between all its instructions.
    """

    def __init__(self, path: str, device: DeviceSpec, *, vector_in_order: bool) -> None:
        self._costs = _Costs(path, device, AscendDecisions(barriers="needed" if vector_in_order else "every"))

    def time(self, walk: IssuedByCores) -> tuple[float, Mapping[tuple[str, str], float]]:
        """Return the cycles of a core group, and the cycles in which each pipe executes, by core and pipe.

        Raises `SpecError` with a line if an instruction has no cost, or if it waits forever.
        """
        run = _CoreGroupRun(walk, self._costs)
        return run.end(), run.busy


# ---------------------------------------------------------------- costs


class _Costs:
    """Costs of a program's instructions on a device."""

    def __init__(self, path: str, device: DeviceSpec, decided: AscendDecisions) -> None:
        self.path, self.device = path, device
        group = AscendGroup(device)
        self._tensors = dict[str, GlobalTensor]()
        program = TileProgram("", group.queues(), (), {}, {}, self._tensors, (), 0)
        self._pricing = AscendPricing(program, device)
        self._work = VectorWork(decided)
        self._room = group.capacity_bytes("L1")  # more bytes than any buffer has
        self._places, self._known = dict[str, int](), dict[object, Cost]()
        clock, share = device.clock_hz.value, device.group_count.value
        #: Bytes per cycle of each link for one core group.
        self.links = {name: link.bytes_per_s.value / clock / share for name, link in device.links.items()}
        self._slices, self._factors = dict[tuple[str, Flag], int](), dict[tuple[str, Flag], str]()
        self._half = group.capacity_bytes("L0A") // PING_PONG
        flags = device.timed_flags()
        self.flag, self.cross = flags.intra_core_latency_cycles.value, flags.cross_core_latency_cycles.value
        self.cross_issue = flags.cross_core_issue_cycles.value
        self.depths = {
            (core[0], pipe): int(device.engine(AIC if core == "C" else AIV, engine).queue_depth_count.value)  # type: ignore[union-attr]
            for core in ("C", "V")
            for pipe, engine in _ENGINES.items()
            if engine in device.core(AIC if core == "C" else AIV).engines
        }

    def of(self, issued: Sequence[IssuedInstruction]) -> Cost:
        """Return the cost of consecutive instructions of a pipe that have no flag between them."""
        if issued[0].name == "product loads":
            self._factors[issued[0].core, issued[0].flag] = _format(issued[0].reads[0].fmt)
        key = tuple((x.pipe, x.name, x.product, tuple(map(_form, (*x.writes, *x.reads)))) for x in issued)
        if key not in self._known:
            try:
                self._known[key] = self._priced(issued)
            except NpusimError as error:
                raise SpecError(f"{self.path}:{issued[0].line}: {issued[0].name}: {one_line(error)}") from None
        return self._known[key]

    def slices(self, x: IssuedInstruction) -> int:
        """Return the slices into which the depth of a product of tiles in L1 is divided; a slice fits in half of L0."""
        if x.pipe == "MTE1":
            m, n, k = _sizes(x)
            self._slices[x.core, x.flag] = max(1, ceil_div(max(m, n) * k * x.reads[0].width, self._half))
            return self._slices[x.core, x.flag]
        return self._slices.pop((x.core, x.flag))

    def _priced(self, issued: Sequence[IssuedInstruction]) -> Cost:
        core, engine = AIC if issued[0].core == "C" else AIV, _ENGINES[issued[0].pipe]
        steps = [s for x in issued for s in self._steps(x)]
        spec = self.device.engine(core, engine)
        if isinstance(spec, VectorUnit):
            queue = f"{AIV}0.{engine}"
            return self._pricing.of_op(TileOp("", queue, queue, tuple(steps), work=self._work))
        costs = [self._pricing.of_step(s, core, engine) for s in steps]
        links = defaultdict[str, int](int)
        for c in costs:
            for link, n in c.link_bytes:
                links[link] += n
        return Cost(
            sum(c.occupancy_cycles for c in costs), max(c.latency_cycles for c in costs), tuple(sorted(links.items()))
        )

    def _steps(self, x: IssuedInstruction) -> Iterator[Step]:
        """Yield the steps of an instruction."""
        if x.name in ("product", "mma"):
            yield self._product(x)
        elif x.name == "product loads":
            m, n, k = _sizes(x)
            for rows, cols, space, box in ((m, k, "L0A", x.reads[0]), (k, n, "L0B", x.reads[1])):
                fmt = self._factors[x.core, x.flag] = _format(box.fmt)
                yield Step(
                    Opcode.COPY,
                    Tile(f"{AIC}.{space}", 0, rows, cols, cols, fmt),
                    (Tile(f"{AIC}.L1", 0, rows, cols, cols, fmt),),
                )
        elif x.name == "copy" and x.pipe != "V":
            (source,), (target,) = x.reads, x.writes
            a, b = self._operand(source, x.core, target), self._operand(target, x.core, source)
            yield Step(Opcode.COPY if a.fmt == b.fmt else Opcode.CAST, b, (a,))
        else:
            yield self._vector(x)

    def _product(self, x: IssuedInstruction) -> Step:
        m, n, k = _sizes(x)
        fmt = _format(x.reads[0].fmt) if x.name == "mma" else self._factors[x.core, x.flag]
        arithmetic = self.device.matrix_engine(AIC).arithmetic_of(fmt)
        a, b = Tile(f"{AIC}.L0A", 0, m, k, k, fmt), Tile(f"{AIC}.L0B", 0, k, n, n, fmt)
        target = Tile(f"{AIC}.L0C", 0, m, n, n, _format(x.writes[0].fmt))
        return Step(Opcode.MATMUL, target, (a, b), Attributes(arithmetic=arithmetic))

    def _vector(self, x: IssuedInstruction) -> Step:
        """Return a vector instruction as a step."""
        sources = [b for b in x.reads if b.space == "UB"]
        name = "cast" if x.name == "copy" and sources[0].fmt != x.writes[0].fmt else x.name
        opcode = Opcode.COPY if name == "copy" else _OPCODES.get(name)
        if opcode is None:
            raise SpecError(f"T.tile.{name} has no cost here; instructions with a cost: {', '.join(sorted(_OPCODES))}")
        boxes = [x.writes[0], *sources]
        widths = {_matrix(b)[1] for b in boxes}
        is_flat = widths == {1}  # a single column is a row of numbers
        target, *operands = (self._tile(b, is_flat=is_flat) for b in boxes)
        if opcode in (Opcode.ROW_MAX, Opcode.ROW_SUM):
            return Step(opcode, target, (operands[0],))
        wanted = _OPERANDS.get(opcode, 1)
        listed: list[Tile | float] = [*operands[:wanted]]
        if opcode is Opcode.FILL:
            listed = [0.0]
        while len(listed) < wanted:
            listed.append(1.0)
        return Step(opcode, target, tuple(listed))

    def _tile(self, box: AccessedPart, *, is_flat: bool) -> Tile:
        rows, cols, pitch = _matrix(box)
        if is_flat:
            rows, cols, pitch = 1, rows, rows
        at = self._places.setdefault(box.buffer, len(self._places) * self._room)
        first = sum(a * s for (a, _), s in zip(box.ranges, box.strides, strict=True)) * box.width
        return Tile(f"{AIV}0.UB", at + first, rows, cols, pitch, _format(box.fmt))

    def _operand(self, box: AccessedPart, core: str, other: AccessedPart) -> Operand:
        """Return an operand of a transfer; if its place is known only at run time, its size is that of the other
        operand.
        """
        rows, cols, pitch = _matrix(box if box.is_exact else other)
        fmt = _format(box.fmt)
        if box.space != "GM":
            where = AIC if core == "C" else f"{AIV}0"
            return Tile(f"{where}.{box.space}", 0, rows, cols, pitch, fmt)
        if box.buffer not in self._tensors:
            width = box.strides[-2] if len(box.strides) > 1 else cols
            whole = math.prod(b for _, b in box.ranges) // max(1, width)
            self._tensors[box.buffer] = GlobalTensor(box.buffer, 1, 1, max(whole, rows), width, fmt, "input")
            self._pricing.__dict__["residency"] = Residency.without_misses(self._tensors)
        tensor = self._tensors[box.buffer]
        return GlobalTile(tensor, 0, 0, 0, rows, 0, cols)


#: Formats for which costs are known, by their short names; and by integers, whose transfers and instructions cost the
#: same as those of floats of equal size.
_FORMATS = MappingProxyType(
    {"float": "float32", "uint8": "int8", "bool": "int8"}
    | dict.fromkeys(("int", "uint", "int32", "uint32"), "float32")
    | dict.fromkeys(("int16", "uint16"), "float16")
)


def _format(name: str) -> str:
    return _FORMATS.get(name, name)


def _matrix(box: AccessedPart) -> tuple[int, int, int]:
    """Return rows, columns and the elements between rows of a box: its last axis has the columns."""
    lengths = [b - a for a, b in box.ranges]
    rows = math.prod(lengths[:-1])
    moving = [s for n, s in zip(lengths[:-1], box.strides, strict=False) if n > 1]
    return rows, lengths[-1], moving[-1] if moving else lengths[-1]


def _sizes(x: IssuedInstruction) -> tuple[int, int, int]:
    assert x.product is not None  # rows, columns and depth of a product, also for its loads
    return x.product


def _form(box: AccessedPart) -> object:
    """Return the properties of a box on which the cost of an instruction depends."""
    place = tuple(a for a, _ in box.ranges) if box.space == "UB" else ()
    return box.buffer, place, tuple(b - a for a, b in box.ranges)


# ---------------------------------------------------------------- a core group


@dataclass(slots=True)
class _Pipe:
    """A pipe of a core: its entries, each with the time of its issue; the time at which the pipe is free; and the time
    at which all entries have ended.
    """

    core: str
    name: str
    entries: deque[tuple[float, IssuedInstruction, Cost | None]] = field(default_factory=deque)
    free: float = 0.0
    ended: float = 0.0


@dataclass(slots=True)
class _Core:
    """A core: the remaining instructions of its scalar unit, and its time."""

    name: str
    issued: Sequence[tuple[IssuedInstruction, Cost | None]]
    at: int = 0
    time: float = 0.0


class _CoreGroupRun:
    """One run of a core group's instructions: events in the order of their times."""

    def __init__(self, walk: IssuedByCores, costs: _Costs) -> None:
        self.walk, self.costs = walk, costs
        self.cores = {name: _Core(name, _with_costs(issued, costs)) for name, issued in walk.cores.items()}
        self.pipes = {(c, p): _Pipe(c, p) for c in walk.cores for p in _ENGINES}
        self.flags = defaultdict[tuple[str, Flag], deque[float]](deque)
        self.links = dict.fromkeys(costs.links, 0.0)
        self.busy = defaultdict[tuple[str, str], float](float)
        self.slices = dict[tuple[str, Flag], tuple[float, float]]()
        self.slice_free = defaultdict[str, float](float)
        self.waiting = defaultdict[object, list[_Core | _Pipe]](list)
        self._ready = list[tuple[float, int, _Core | _Pipe]]()
        self._number = 0

    def end(self) -> float:
        """Return the cycles until all instructions have ended; raise `SpecError` if some never end."""
        for core in self.cores.values():
            self._wake(core, 0.0)
        while self._ready:
            _, _, agent = heappop(self._ready)
            if isinstance(agent, _Core):
                self._issue(agent)
            else:
                self._execute(agent)
        left = [c.issued[c.at][0] for c in self.cores.values() if c.at < len(c.issued)]
        left += [p.entries[0][1] for p in self.pipes.values() if p.entries]
        if left:
            raise SpecError(
                f"{self.costs.path}:{left[0].line}: {left[0]} waits forever; `npusim check` shows the reason"
            )
        return max([p.ended for p in self.pipes.values()] + [c.time for c in self.cores.values()])

    def _wake(self, agent: _Core | _Pipe, time: float) -> None:
        self._number += 1
        heappush(self._ready, (time, self._number, agent))

    def _happened(self, key: object, time: float) -> None:
        for agent in self.waiting.pop(key, ()):
            self._wake(agent, time)

    # ------------------------------------------------------------ the scalar unit
    def _issue(self, core: _Core) -> None:
        """Issue one instruction, or wait."""
        if core.at == len(core.issued):
            return
        x, cost = core.issued[core.at]
        own = [p for p in self.pipes.values() if p.core == core.name]
        if x.pipe == "ALL":
            if busy := next((p for p in own if p.entries), None):
                self.waiting["emptied", busy.core, busy.name].append(core)
                return
            core.time = max([core.time, *(p.ended for p in own)])
        elif x.pipe == "S":
            if not self._scalar(core, x):
                return
        else:
            pipe = self.pipes[core.name, x.pipe]
            if len(pipe.entries) >= self.costs.depths[core.name[0], x.pipe]:
                self.waiting["begun", pipe.core, pipe.name].append(core)
                return
            if x.kind in ("cross set", "cross wait"):
                core.time += self.costs.cross_issue
            pipe.entries.append((core.time, x, cost))
            if len(pipe.entries) == 1:
                self._wake(pipe, max(core.time, pipe.free))
        core.at += 1
        self._wake(core, core.time)

    def _scalar(self, core: _Core, x: IssuedInstruction) -> bool:
        """Execute an instruction of the scalar unit; return False if it waits."""
        if x.kind in ("wait", "cross wait"):
            time = self._flag(core.name, x.flag, core)
            if time is None:
                return False
            core.time = max(core.time, time)
        if "cross" in x.kind:
            core.time += self.costs.cross_issue
        if x.kind == "set":
            self._set(core.name, x.flag, core.time + self.costs.flag)
        elif x.kind == "cross set":
            self._cross_set(core.name, x.flag, core.time)
        return True

    # ------------------------------------------------------------ pipes
    def _execute(self, pipe: _Pipe) -> None:
        """Execute the first entry of a pipe, or wait."""
        if not pipe.entries:
            return
        issued, x, cost = pipe.entries[0]
        start = max(issued, pipe.free)
        if x.kind in ("wait", "cross wait"):
            time = self._flag(pipe.core, x.flag, pipe)
            if time is None:
                return
            pipe.free = max(start, time)
        elif x.kind == "set":
            self._set(pipe.core, x.flag, max(start, pipe.ended) + self.costs.flag)
        elif x.kind == "cross set":
            self._cross_set(pipe.core, x.flag, max(start, pipe.ended))
        elif x.kind == "barrier":
            pipe.free = max(start, pipe.ended)
        elif cost is not None:
            if x.flag[:1] == ("product",):
                begin = self._product_start(pipe, x, start)
                if begin is None:
                    return
                start = begin
            end = start + cost.occupancy_cycles
            for link, size in cost.link_bytes:
                self.links[link] = max(self.links[link], start) + size / self.costs.links[link]
                end = max(end, self.links[link])
            if x.flag[:1] == ("product",):
                end = self._product_end(x, start, end)
            self.busy[pipe.core, pipe.name] += end - start
            pipe.free, pipe.ended = end, max(pipe.ended, end + cost.latency_cycles)
        pipe.entries.popleft()
        self._happened(("begun", pipe.core, pipe.name), start)
        if pipe.entries:
            self._wake(pipe, pipe.free)
        else:
            self._happened(("emptied", pipe.core, pipe.name), pipe.free)

    def _product_start(self, pipe: _Pipe, x: IssuedInstruction, start: float) -> float | None:
        """Return the time at which, for the first slice, the loads of a product begin (when L0 has space for them), or
        the product itself.

        None: nothing has been loaded yet.
        """
        if x.pipe == "MTE1":
            return max(start, self.slice_free[pipe.core])
        if (x.core, x.flag) not in self.slices:
            self.waiting[x.core, x.flag].append(pipe)
            return None
        return max(start, self.slices[x.core, x.flag][0])

    def _product_end(self, x: IssuedInstruction, start: float, end: float) -> float:
        """Return the time at which the loads of a product, or the product itself, end; the product's last slice follows
        its loads.
        """
        count = self.costs.slices(x)
        if x.pipe == "MTE1":
            self.slices[x.core, x.flag] = start + (end - start) / count, end
            self._happened((x.core, x.flag), start + (end - start) / count)
            return end
        _, loaded = self.slices.pop((x.core, x.flag))
        end = max(end, loaded + (end - start) / count)
        self.slice_free[x.core] = end - (end - start) / count
        return end

    def _flag(self, core: str, flag: Flag, agent: _Core | _Pipe) -> float | None:
        """Clear a flag and return the time at which it was set; None if the agent must wait for it."""
        sources = self._sources(core) if flag[:1] == ("cross",) else [core]
        keys = [(f"{s} to {core}", flag) for s in sources]
        for key in keys:
            if not self.flags[key]:
                self.waiting[key].append(agent)
                return None
        return max(self.flags[key].popleft() for key in keys)

    def _sources(self, core: str) -> list[str]:
        return [c for c in self.cores if c[0] != core[0]]

    def _set(self, core: str, flag: Flag, time: float) -> None:
        key = (f"{core} to {core}", flag)
        self.flags[key].append(time)
        self._happened(key, time)

    def _cross_set(self, core: str, flag: Flag, time: float) -> None:
        for other in self._sources(core):
            key = (f"{core} to {other}", flag)
            self.flags[key].append(time + self.costs.cross)
            self._happened(key, time + self.costs.cross)


def _with_costs(issued: Sequence[IssuedInstruction], costs: _Costs) -> list[tuple[IssuedInstruction, Cost | None]]:
    """Return instructions with their costs; vector instructions without a flag or barrier between them are combined."""
    result, run = list[tuple[IssuedInstruction, Cost | None]](), list[IssuedInstruction]()

    def ended() -> None:
        if run:
            result.append((run[0], costs.of(run)))
            run.clear()

    for x in issued:
        if x.pipe == "V" and x.kind == "access":
            run.append(x)
            continue
        if x.pipe in ("V", "ALL", "S"):
            ended()
        result.append((x, costs.of([x]) if x.kind == "access" and x.pipe != "S" else None))
    ended()
    return result
