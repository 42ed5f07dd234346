"""What each step costs on each engine: one table, Opcode x engine model -> :class:`Cost`.

Costs are pure functions of a step's shapes and formats and of the device file.  They are rounded
to whole cycles once, here.  A step without a row raises, it never costs 0.
"""

from __future__ import annotations

from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from npusim.errors import ProgramError, UnknownOpcodeError
from npusim.formats import get_format
from npusim.ir.op import Opcode, Step, TileOp
from npusim.ir.residency import residency
from npusim.ir.tile import GlobalTile, Operand, RingTile, Tile
from npusim.spec.engine import DmaEngine, FixpipeEngine, MatrixEngine, RouteSpec, VectorEngine
from npusim.units import ceil_div, round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npusim.ir.program import Queue
    from npusim.ir.walk import Templates
    from npusim.spec.device import DeviceSpec

Terms = tuple[tuple[str, float], ...]


class Cost(NamedTuple):
    """Cost of a step or of an entry of an instruction queue.

    ``occupancy_cycles`` the engine is busy; results are there ``latency_cycles`` after that.
    ``link_bytes`` cross shared links, which may stretch the occupancy.  ``terms`` names the
    constant behind each share of the cycles, by its key in the device file.
    """

    occupancy_cycles: int
    latency_cycles: int = 0
    link_bytes: tuple[tuple[str, int], ...] = ()
    terms: Terms = ()


class CostModel:
    """Costs of a program's operations on one device."""

    def __init__(self, templates: Templates, device: DeviceSpec) -> None:
        self.device = device
        program = templates.program
        self.residency = residency(
            program, device.group_count.value, device.memory.l2.capacity_bytes.value
        )
        self._queues: dict[str, Queue] = {q.name: q for q in program.queues}

    def of_op(self, op: TileOp) -> Cost:
        """Return the exact sum of the costs of an operation's steps; its latency is the last one's."""
        queue = self._queues[op.queue]
        occupancy = latency = 0
        links: dict[str, int] = {}
        terms: dict[str, float] = {}
        for step in op.steps:
            cost = self.of_step(step, queue.core, queue.engine)
            occupancy += cost.occupancy_cycles
            latency = cost.latency_cycles
            for link, size in cost.link_bytes:
                links[link] = links.get(link, 0) + size
            for key, cycles in cost.terms:
                terms[key] = terms.get(key, 0.0) + cycles
        return Cost(occupancy, latency, tuple(links.items()), tuple(terms.items()))

    def of_step(self, step: Step, core: str, engine: str) -> Cost:
        """Return the cost of one step on ``engine`` of ``core``."""
        spec = self.device.engine(core, engine)
        key = f"cores.{core}.engines.{engine}"
        match spec:
            case DmaEngine() | FixpipeEngine():
                return self._move(step, spec, key)
            case MatrixEngine():
                return _product(step, spec, key)
            case VectorEngine():
                return _vector(step, spec, key)
        raise UnknownOpcodeError(f"{step.opcode.name} has no cost on {core}.{engine}")

    def _move(self, step: Step, spec: DmaEngine | FixpipeEngine, key: str) -> Cost:
        is_cast = step.opcode is Opcode.CAST and isinstance(spec, FixpipeEngine)
        src = step.srcs[0]
        if not (step.opcode is Opcode.COPY or is_cast) or isinstance(src, float):
            raise UnknownOpcodeError(f"{step.opcode.name} has no cost on {key}: it only moves data")
        source, destination = memory_of(src), memory_of(step.dst)
        route = spec.route(source, destination)
        path = f"{key}.routes.{_route_name(spec, route)}"
        moved = max(_stored_bytes(src, source), _stored_bytes(step.dst, destination))
        if isinstance(spec, FixpipeEngine):
            moved = step.dst.payload_bytes
        port = moved / route.bytes_per_cycle.value
        terms = [(f"{path}.bytes_per_cycle", port)]
        if route.burst_overhead_cycles is not None:
            broken = _bursts(step) * route.burst_overhead_cycles.value
            port, terms = port + broken, [*terms, (f"{path}.burst_overhead_cycles", broken)]
        if isinstance(spec, FixpipeEngine):
            drain = src.rows * src.cols / spec.elements_per_cycle.value
            if drain > port:
                port, terms = drain, [(f"{key}.elements_per_cycle", drain)]
        interval = spec.issue_interval_cycles.value
        if interval > port:
            port, terms = interval, [(f"{key}.issue_interval_cycles", float(interval))]
        latency = route.latency_cycles.value
        if not route.links:
            # Within a core an instruction ends before the next of its pipe begins; through GM they overlap.
            return Cost(
                ceil(port) + latency, 0, (), (*terms, (f"{path}.latency_cycles", float(latency)))
            )
        return Cost(ceil(port), latency, self._links(step, route), tuple(terms))

    def _links(self, step: Step, route: RouteSpec) -> tuple[tuple[str, int], ...]:
        if not route.links:
            return ()
        size = step.dst.payload_bytes
        found = [("l2", size)]
        if isinstance(step.srcs[0], GlobalTile):
            source = step.srcs[0]
            share = self.residency.read_misses[source.tensor.name]
            found.append(("hbm", ceil(source.payload_bytes * share)))
        if isinstance(step.dst, GlobalTile):
            share = self.residency.write_misses[step.dst.tensor.name]
            found.append(("hbm", ceil(size * share)))
        return tuple((link, n) for link, n in found if n and link in route.links)


def bytes_per_cycle(device: DeviceSpec, link: str) -> float:
    """Return what a shared link carries in a cycle, for all cores together.

    Reads and writes mix on it: where the file states the rate of the mix, that is the rate.
    """
    spec = device.link(link)
    rate = spec.mixed_bytes_per_s or spec.bytes_per_s
    return float(rate.value) / float(device.clock_hz.value)


def memory_of(operand: Operand) -> str:
    """Return the device file's name of the memory an operand lies in: ``L1``, ``UB``, ``GM``."""
    if isinstance(operand, GlobalTile):
        return "GM"
    space = operand.space if isinstance(operand, Tile) else operand.ring.space
    return "GM" if space == "gm" else space.rpartition(".")[2]


def _route_name(spec: DmaEngine | FixpipeEngine, route: RouteSpec) -> str:
    return next(name for name, r in spec.routes.items() if r is route)


def _bursts(step: Step) -> int:
    """Return how often a move through GM jumps: between rows that do not follow one another."""
    jumps = 0
    for operand in step.operands():
        if isinstance(operand, GlobalTile):
            gapless = operand.cols == operand.tensor.cols
        elif memory_of(operand) == "GM":
            gapless = operand.cols == operand.stride
        else:
            continue
        jumps += 0 if gapless else operand.rows - 1
    return jumps


#: Rows and columns of a fractal: operands in L1 and L0 are padded to whole fractals (ascend.md 1.2).
FRACTAL = 16


def _stored_bytes(operand: Operand, memory: str) -> int:
    """Return an operand's bytes in ``memory``: padded to whole fractals in L1, L0A, L0B, L0C."""
    if memory in ("GM", "UB"):
        return operand.payload_bytes
    size = get_format(operand.fmt).size_bytes
    return round_up(operand.rows, FRACTAL) * round_up(operand.cols, FRACTAL) * size


def _product(step: Step, spec: MatrixEngine, key: str) -> Cost:
    if step.opcode is not Opcode.MATMUL:
        raise UnknownOpcodeError(f"{step.opcode.name} has no cost on {key}: it only multiplies")
    a = step.srcs[0]
    if isinstance(a, float):
        raise ProgramError("a matrix product needs tiles, not constants")
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


# ---------------------------------------------------------------- vector unit


def _vector(step: Step, spec: VectorEngine, key: str) -> Cost:
    row = VECTOR_COSTS.get(step.opcode)
    if row is None:
        raise UnknownOpcodeError(f"{step.opcode.name} has no cost on {key}")
    total, terms = 0.0, dict[str, float]()
    for name, repeats in row(step, spec):
        op = spec.op(name)
        slope = op.slope_cycles_per_repeat.value * repeats
        fixed = op.head_cycles.value + op.tail_cycles.value
        total += slope + fixed
        for part, cycles in (("slope_cycles_per_repeat", slope), ("head_cycles", fixed)):
            where = f"{key}.ops.{name}.{part}"
            terms[where] = terms.get(where, 0.0) + cycles
    return Cost(ceil(total), terms=tuple(terms.items()))


Instructions = list[tuple[str, int]]


def repeats(operand: Operand, spec: VectorEngine, fmt: str | None = None) -> int:
    """Return the repeats an instruction needs for a tile: whole ones for gapless rows, else per row."""
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
        if chosen in ("exp", "div"):
            chosen = f"{name}_{step.dst.fmt}"
        found = [(chosen, repeats(step.dst, spec))]
        # A column operand is first spread to one 32-byte block a row (brcb: 8 rows a repeat).
        for tile in tiles:
            if tile.cols == 1 and step.dst.cols > 1:
                blocks = spec.repeat_bytes.value // spec.block_bytes.value
                found.insert(0, ("broadcast", ceil_div(tile.rows, blocks)))
        return found

    return instructions


def _cast(step: Step, spec: VectorEngine) -> Instructions:
    src = step.srcs[0]
    wider = max(
        (o for o in (step.dst, src) if not isinstance(o, float)), key=lambda o: o.payload_bytes
    )
    return [("cast", repeats(wider, spec))]


def _reduction(step: Step, spec: VectorEngine) -> Instructions:
    """Return the passes of a row reduction: block reductions, or a tree of halves by vector adds."""
    src = step.srcs[0]
    if isinstance(src, float):
        raise ProgramError(f"{step.opcode.name} needs a tile")
    size = get_format(src.fmt).size_bytes
    found: Instructions = []
    cols = src.cols
    order = step.attributes.order or "vector_lanes"
    if order == "tree_halves":
        while cols > 1:
            half = cols // 2
            found.append(("binary", ceil_div(src.rows * half * size, spec.repeat_bytes.value)))
            cols -= half
        return found
    if order != "vector_lanes":
        raise UnknownOpcodeError(
            f"{step.opcode.name} in order {order!r} has no cost on this vector unit; "
            "it reduces by vector_lanes or tree_halves"
        )
    lanes = spec.block_bytes.value // size
    while cols > 1:
        found.append(("block_reduce", ceil_div(src.rows * cols * size, spec.repeat_bytes.value)))
        cols = ceil_div(cols, lanes)
    return found or [("copy", 1)]


#: Instructions of the vector unit behind each primitive operation, by name in the device file.
VECTOR_COSTS: Mapping[Opcode, Callable[[Step, VectorEngine], Instructions]] = MappingProxyType(
    {
        Opcode.COPY: _elementwise("copy"),
        Opcode.FILL: _elementwise("copy"),
        Opcode.CAST: _cast,
        Opcode.ADD: _elementwise("binary"),
        Opcode.SUB: _elementwise("binary"),
        Opcode.MUL: _elementwise("binary"),
        Opcode.MAX: _elementwise("binary"),
        Opcode.DIV: _elementwise("div"),
        Opcode.EXP: _elementwise("exp"),
        Opcode.SELECT: _elementwise("select"),
        Opcode.ROW_MAX: _reduction,
        Opcode.ROW_SUM: _reduction,
    }
)
