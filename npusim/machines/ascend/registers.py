"""The time of a rows stage on a vector unit with registers: vector functions of a few hardware loops.

The interval of a loop is the largest demand of its instructions on the unit: on issue, single issue, registers written,
accesses to UB, or long units; or the latency of values that the loop carries; or the minimum of an outer loop.  A
function starts and ends once; values that its loops hold in registers are neither stored nor loaded again.  The rules
are those of the vendor, and the latencies are those of its cost models.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field, replace
from math import ceil, log2
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from npusim.errors import UnknownOpcodeError
from npusim.formats import BLOCK_FORMATS, combine_of, stored_format
from npusim.formats.reductions import CHAINS
from npusim.late_methods import dataclass
from npusim.program.ir.op import MASK, PLAIN, Opcode, goes_down
from npusim.program.ir.tile import GlobalTile, RingTile, Tile
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from npusim.config.core_units import RegisterOpSpec, RegisterVectorEngine
    from npusim.machines.decisions import VectorCode
    from npusim.program.ir.op import Step
    from npusim.program.ir.tile import Operand
    from npusim.program.ir.tile_program import Terms

#: Instruction of an operation on registers; for a reduction, the instruction that joins two values.
INSTRUCTIONS: Mapping[Opcode, str] = MappingProxyType(
    {
        Opcode.COPY: "",
        Opcode.FILL: "dup",
        Opcode.CAST: "cast",
        Opcode.ADD: "add",
        Opcode.SUB: "sub",
        Opcode.MUL: "mul",
        Opcode.MAX: "max",
        Opcode.MIN: "max",
        Opcode.COMPARE: "compare",
        Opcode.LOGIC: "and",
        Opcode.DIV: "div",
        Opcode.FMA: "multiply_add",
        Opcode.EXP: "exp",
        Opcode.LOG: "log",
        Opcode.RSQRT: "rsqrt",
        Opcode.SQRT: "sqrt",
        Opcode.TANH: "tanh",
        Opcode.ERF: "erf",
        Opcode.INTEGER: "add",
        Opcode.BITS: "",
        Opcode.SELECT: "select",
        Opcode.ROW_MAX: "max",
        Opcode.ROW_SUM: "add",
    }
)
#: Instructions of functions.  Ascend C's Tanh limits x to the range where the result is below 1, and computes (e^2x -
#: 1) / (e^2x + 1).  Its Rsqrt is one instruction of the 910B, with an error of more than 1e-4 in float32: the manual
#: recommends Sqrt and Div instead, which are used here. Its Erf limits x to 3.92 and divides x times a polynomial of
#: x**2 by another polynomial (`formats.unary.ASCEND_ERF`).
MADE_OF: Mapping[Opcode, tuple[str, ...]] = MappingProxyType(
    {
        Opcode.TANH: ("max", "max", "mul", "exp", "add", "add", "div"),
        Opcode.RSQRT: ("sqrt", "div"),
        Opcode.SQRT: ("sqrt",),
        Opcode.ERF: ("max", "max", "mul", *("mul", "add") * 5, "mul", "add", *("mul", "add") * 4, "div"),
    }
)
#: Instructions of a relation: comparisons, and operations on their masks.  Units compare by eq, ne, lt, gt, le and ge;
#: of these only ne is true for NaN (asc-devkit 0da921b9, asc_ge_scalar and asc_ne_scalar); other relations consist of
#: these.
COMPARISONS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        **dict.fromkeys(("oeq", "une", "olt", "ogt", "ole", "oge"), (1, 0)),
        **dict.fromkeys(("ult", "ugt", "ule", "uge"), (1, 1)),
        **dict.fromkeys(("one", "ord", "uno"), (2, 1)),
        "ueq": (2, 2),
    }
)
#: Operations along a tile, pass after pass, and the order in which vector units compute them.
ALONG: Mapping[Opcode, str] = MappingProxyType(
    {Opcode.CUMSUM: "sequential", Opcode.INVERSE: "rows", Opcode.FOLD: "sequential", Opcode.SCAN: "sequential"}
)
#: Instruction that reads a register of a mask stored row by row along a column.
GATHER = "gather"


def along_tile(step: Step) -> list[tuple[str, int, int]]:
    """Return the passes of an operation along a tile, each an instruction with rows and columns of its result.

    Cumulative sums run row after row of the transposed tile; sums that restart are side by side (Ascend C API
    reference, ``CumSum``); an inverse subtracts a row times a column of numbers from all rows below, row after row.
    Columns are reduced by operations on whole rows.
    """
    rows, cols = step.dst.rows, step.dst.cols
    if step.opcode is Opcode.INVERSE:
        squares = [*[cols] * (rows // cols), rows % cols]
        return [("multiply_add", n - 1 - j, cols) for n in squares for j in range(n - 1)]
    if step.opcode in (Opcode.FOLD, Opcode.SCAN, *WITHIN):  # for each element in turn, every operation of the function
        is_down, tiles = goes_down(step.opcode, step.attributes), [s for s in step.srcs if not isinstance(s, float)]
        longest = max(s.rows if is_down else s.cols for s in tiles)
        work = 1.0 if step.opcode in WITHIN else combine_of(step.attributes.variant).work
        name = "max" if step.opcode is Opcode.ROW_MAX else "add"
        return [(name, 1, cols) if is_down else (name, rows, 1)] * ceil((longest - 1) * work)
    each = min(step.attributes.every or cols, cols)
    return [("add", rows * ceil_div(cols, each), 1)] * (each - 1)


#: Instruction that reduces one register to one value.
WITHIN: Mapping[Opcode, str] = MappingProxyType({Opcode.ROW_MAX: "row_max", Opcode.ROW_SUM: "row_sum"})
#: Pairs of instructions that one instruction replaces: the second reads the result of the first as its first source.
PAIRS = MappingProxyType({("sub", "exp"): "exp_difference", ("mul", "add"): "multiply_add"})
#: Accumulators of a row sum by its order.
ACCUMULATORS = MappingProxyType({"sequential": 1, "four_chains": CHAINS})
#: Largest number of plain instructions that are repeated with reloaded sources instead of storing the result.
MOST_REPEATED = 2


@dataclass(eq=False, slots=True)
class RegisterValue:
    """The result of one instruction for a tile, and its sources: other values of the stage, or places of operands."""

    name: str
    sources: tuple[RegisterValue | Hashable, ...]
    rows: int
    cols: int  #: columns of the tile that the operation processes; 1 for a vector of rows
    size: int  #: bytes of the widest element of the result and the sources
    reduction: Opcode | None = None
    chains: int = 1
    is_kept: bool = False  #: the value is stored in UB when its function ends
    is_narrowed: bool = False  #: a cast to fewer bytes
    # the lanes that a reduction joins: those of a row, or of each register
    crosses: Literal["row", "register", ""] = "row"
    loop: int = 0

    @property
    def is_vector(self) -> bool:
        """Whether the result has one value for each row."""
        return self.cols == 1 or self.reduction is not None


class LatencyPath(NamedTuple):
    """Instructions that wait for one another, from the point at which a loop may begin."""

    cycles: float = 0.0
    names: tuple[str, ...] = ()


@dataclass(slots=True)
class HardwareLoop:
    """A hardware loop over tiles of one shape: its values, and how often each instruction runs in an iteration."""

    rows: int
    cols: int
    values: list[RegisterValue] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    trips: float = 1.0
    each: int = 1  #: registers of a tile that an iteration processes
    is_nested: bool = False
    stored: int = 0  #: registers that are stored when the loop ends
    follows: bool = False  #: whether the loop reads results of an earlier loop of its function


def function_cycles(steps: Sequence[Step], spec: RegisterVectorEngine, key: str, code: VectorCode) -> tuple[int, Terms]:
    """Return the cycles of a stage's steps, and the constants that determine them.

    ``key`` is the unit's key in its file.  Raises :class:`UnknownOpcodeError` for a step without an instruction.
    """
    terms: dict[str, float] = {}
    parts = list(functions(_values(steps, spec, key, code), code))
    for function, after in zip(parts, [*parts[1:], []], strict=False):
        # The start of the next function hides late results of a function, if the next one does not read them.
        left = {id(v) for v in function}
        is_waited_for = not after or any(id(s) in left for v in after for s in v.sources)
        for name, cycles in _VectorFunction(function, spec, key, code).terms(is_waited_for=is_waited_for):
            terms[name] = terms.get(name, 0.0) + cycles
    return ceil(sum(terms.values())), tuple(terms.items())


def check_along(step: Step, key: str) -> None:
    """Raise `UnknownOpcodeError` for an order along a tile that vector units do not have."""
    allowed = ALONG.get(step.opcode, "sequential")
    if (order := step.attributes.order) != allowed and step.opcode is not Opcode.ROW_MAX:
        raise UnknownOpcodeError(f"{step.opcode.name} in order {order!r} has no cost on {key}; allowed: {allowed}")
    check_sum(step, key)


def check_sum(step: Step, key: str) -> None:
    """Raise `UnknownOpcodeError` for a sum of products, for which vector units have no single instruction."""
    if step.opcode is Opcode.ROW_SUM and len(step.srcs) > 1:
        raise UnknownOpcodeError(f"ROW_SUM of products has no cost on {key}: multiply first: (a * b).sum()")


def _values(steps: Sequence[Step], spec: RegisterVectorEngine, key: str, code: VectorCode) -> list[RegisterValue]:
    """Return the results of steps; pairs that one instruction replaces are joined."""
    latest: dict[Hashable, RegisterValue] = {}
    values: list[RegisterValue] = []

    def named(name: str, fmt: str) -> str:
        return spelled if (spelled := f"{name}_{fmt}") in spec.ops else name

    for step in steps:
        if step.opcode in ALONG or goes_down(step.opcode, step.attributes):
            check_along(step, key)
            at: RegisterValue | Hashable = latest.get(place(step.srcs[0]), place(step.srcs[0]))  # type: ignore[arg-type]
            size = stored_format(step.dst.fmt).size_bytes
            for pass_name, rows, cols in along_tile(step):
                at = RegisterValue(named(pass_name, step.dst.fmt), (at,), rows, cols, size, chains=code.chains)
                values.append(at)
            if isinstance(at, RegisterValue):
                at.is_kept, latest[place(step.dst)] = step.name in code.leaves, at
            continue
        name, order = INSTRUCTIONS.get(step.opcode), step.attributes.order or "vector_lanes"
        if name is None:
            raise UnknownOpcodeError(f"{step.opcode.name} has no cost on {key}")
        if step.opcode is Opcode.ROW_SUM and order != "vector_lanes" and order not in ACCUMULATORS:
            known = ", ".join((*ACCUMULATORS, "vector_lanes"))
            raise UnknownOpcodeError(f"ROW_SUM in order {order!r} has no cost on {key}; allowed: {known}")
        check_sum(step, key)
        # A mask that is not in memory is computed by comparisons of indices.
        tiles = [s for s in step.srcs if not isinstance(s, float | GlobalTile)]
        widest = max((step.dst, *tiles), key=lambda t: t.cols)
        value = RegisterValue(
            "",
            tuple(latest.get(place(t), place(t)) for t in tiles),
            widest.rows,
            widest.cols,
            # One mask register serves tiles of any format.
            max((stored_format(t.fmt).size_bytes for t in (step.dst, *tiles) if t.fmt != MASK), default=1),
            reduction=step.opcode if step.opcode in WITHIN else None,
            chains=ACCUMULATORS.get(order, code.chains) if step.opcode is Opcode.ROW_SUM else code.chains,
            is_kept=step.name in code.leaves,
            is_narrowed=step.opcode is Opcode.CAST and step.dst.payload_bytes < tiles[0].payload_bytes,
        )
        parts = MADE_OF.get(step.opcode, (*["compare"] * step.attributes.comparisons, name))
        if step.opcode is Opcode.COMPARE:
            compares, joins = COMPARISONS[step.attributes.variant]
            parts = ("compare",) * compares + ("and",) * joins
        fmt = step.dst.fmt
        if step.opcode is Opcode.CAST and fmt in BLOCK_FORMATS:
            is_along = (step.attributes.axis == PLAIN.axis) == (code.layout == "nd")
            values += _scales(value, BLOCK_FORMATS[fmt].block, "register" if is_along else "")
            fmt = BLOCK_FORMATS[fmt].element
        *others, value.name = (named(n, fmt) for n in parts)
        for other in others:
            values.append(replace(value, name=other, is_kept=False, reduction=None))
            value.sources = (values[-1],) if step.opcode in MADE_OF else (*value.sources, values[-1])
        if (earlier := latest.get(place(step.dst))) is not None:
            earlier.is_kept = False  # written over
        latest[place(step.dst)] = value
        values.append(value)
    return values if code.functions == "calls" else _joined(values, spec, is_fused=code.functions == "fused")


def _scales(cast: RegisterValue, block: int, crosses: Literal["register", ""]) -> list[RegisterValue]:
    """Return the instructions before a cast to a block format: they compute exponents, the largest exponent of a block,
    its scale, and quotients.

    Exponents are extracted by a mask.  Their maximum, limited to the smallest exponent, is that of the scale except for
    a constant; elements are multiplied by the inverse of the scale.  ``crosses``: whether a block exceeds a register.
    """
    part = replace(cast, is_kept=False, is_narrowed=False)
    exponents = replace(part, name="and")
    largest = replace(part, name="max", sources=(exponents,), reduction=Opcode.ROW_MAX, crosses=crosses)
    scales, count = [largest], ceil_div(cast.rows * cast.cols, block)
    for name in ("sub", "max", "sub"):
        is_kept = cast.is_kept and name == "max"
        scales.append(replace(part, name=name, sources=(scales[-1],), rows=count, cols=1, is_kept=is_kept))
    quotients = replace(part, name="mul", sources=(*cast.sources, scales[-1]))
    cast.sources = (quotients,)
    return [exponents, *scales, quotients]


def _joined(values: list[RegisterValue], spec: RegisterVectorEngine, *, is_fused: bool) -> list[RegisterValue]:
    """Return the values, with one value for each pair that one instruction replaces; only fused code
    has multiply-adds.
    """
    readers = Counter(id(s) for v in values for s in v.sources)
    gone: set[int] = set()
    for value in values:
        for source in value.sources:
            if not isinstance(source, RegisterValue):
                continue
            is_alike = source.cols == value.cols and source.is_vector == value.is_vector
            base, in_format, fmt = value.name.partition("_")
            pair = PAIRS.get((source.name.partition("_")[0], base), "") + in_format + fmt
            is_free = is_alike and readers[id(source)] == 1 and not source.is_kept and id(source) not in gone
            if pair in spec.ops and is_free and (is_fused or pair != "multiply_add") and value.cols > 1 - is_fused:
                value.name = pair
                value.sources = (*source.sources, *(s for s in value.sources if s is not source))
                gone.add(id(source))
                break
    return [v for v in values if id(v) not in gone]


def functions(values: list[RegisterValue], code: VectorCode) -> Iterator[list[RegisterValue]]:
    """Yield the content of each vector function: all instructions together, casts of results in separate functions, or
    one instruction per function.
    """
    if code.functions == "fused" and values:
        yield values
    elif code.functions == "calls":
        yield from ([v] for v in values)
    else:
        casts = [v for v in values if v.is_narrowed and v.is_kept and v.cols > 1]
        others = [v for v in values if v not in casts]
        for v in casts:
            for source in v.sources:
                if isinstance(source, RegisterValue):
                    source.is_kept = True
        yield from (f for f in (others, casts) if f)


class _VectorFunction:
    """One vector function: its loops, and the constants that determine their time."""

    def __init__(self, values: list[RegisterValue], spec: RegisterVectorEngine, key: str, code: VectorCode) -> None:
        self.values, self.spec, self.key, self.code = values, spec, key, code
        self.loops: list[HardwareLoop] = []
        self.within = {id(v) for v in values}
        for value in values:
            self._place(value)
        for loop in self.loops:
            self._count(loop)

    def _is_made_here(self, source: object) -> bool:
        return isinstance(source, RegisterValue) and id(source) in self.within

    def _place(self, value: RegisterValue) -> None:
        """Add a value to the first loop over its shape in which its sources exist."""
        first = 0
        for source in value.sources:
            if isinstance(source, RegisterValue) and self._is_made_here(source):
                is_there_at_once = source.reduction is None and (source.cols > 1) == (value.cols > 1)
                first = max(first, source.loop if is_there_at_once else source.loop + 1)
        value.loop = next(
            (at for at in range(first, len(self.loops)) if self._fits(value, self.loops[at])), len(self.loops)
        )
        if value.loop == len(self.loops):
            self.loops.append(HardwareLoop(value.rows, value.cols))
        self.loops[value.loop].values.append(value)

    def _fits(self, value: RegisterValue, loop: HardwareLoop) -> bool:
        """Return whether a loop can compute a value: a loop over its shape that has one of its sources."""
        had = {*map(id, loop.values), *(id(s) for v in loop.values for s in v.sources)}
        return (loop.rows, loop.cols) == (value.rows, value.cols) and not had.isdisjoint(map(id, value.sources))

    # ---------------------------------------------------------------- instructions of an iteration

    def _lanes(self, loop: HardwareLoop) -> int:
        return self.spec.register_bytes.value // max(v.size for v in loop.values)

    def _count(self, loop: HardwareLoop) -> None:
        """Count an iteration's instructions: work, loads of values outside registers, stores of results."""
        is_down = self.code.layout == "dn" and loop.cols > 1
        across = loop.rows if is_down or loop.cols == 1 else loop.cols
        wide = ceil_div(across, self._lanes(loop))
        chains = max((v.chains for v in loop.values if v.reduction), default=1) if is_down else 1
        if loop.cols == 1:
            loop.trips = 1.0
        elif is_down:
            loop.trips = loop.cols / chains
        elif any(v.reduction for v in loop.values) or any(self._is_spread(s, loop) for s in self._read(loop)):
            loop.trips = float(loop.rows)
            loop.is_nested = wide > 1 and self.code.functions != "fused"
        else:  # the tile has no gaps: one register follows another
            loop.trips, wide = float(ceil_div(loop.rows * loop.cols, self._lanes(loop))), 1
        each, counts = wide * chains, loop.counts
        loop.each = each
        result = {id(v) for v in loop.values}
        for value in loop.values:
            if value.name:
                counts[value.name] += each
            if value.reduction and value.crosses == "register":
                counts[WITHIN[value.reduction]] += each
            elif value.reduction and value.crosses and not is_down:
                counts[WITHIN[value.reduction]] += 1
                counts["dup"] += 1
        for source in self._read(loop):
            if isinstance(source, RegisterValue) and self._is_made_here(source):
                self._reread(source, loop, is_down=is_down)
            elif not (self._is_spread(source, loop) and is_down):
                how = GATHER if is_down and is_mask(source) else "load"
                counts[how] += 1 if self._is_spread(source, loop) else each
        for value in loop.values:
            if self._is_stored(value):
                if value.reduction and is_down:  # the store comes after the last iteration
                    loop.stored += wide
                    continue
                rows_of_fractals = self.code.blocks and value.is_narrowed and is_down
                if value.is_narrowed and value.cols > 1:
                    counts["pack"] += each
                counts["store_blocks" if rows_of_fractals else "store"] += 1 if value.reduction else each
        loop.follows = any(self._is_made_here(s) and id(s) not in result for s in self._read(loop))

    def _read(self, loop: HardwareLoop) -> list[RegisterValue | Hashable]:
        result = {id(v) for v in loop.values}
        return list(dict.fromkeys(s for v in loop.values for s in v.sources if id(s) not in result))

    def _is_spread(self, source: RegisterValue | Hashable, loop: HardwareLoop) -> bool:
        """Return whether a source has one value for each row, and the loop runs over columns of tiles."""
        if loop.cols == 1:
            return False
        return source.is_vector if isinstance(source, RegisterValue) else source[1] == 1  # type: ignore[index]

    def _reread(self, source: RegisterValue, loop: HardwareLoop, *, is_down: bool) -> None:
        """Count values of an earlier loop: vectors stay in registers, tiles are computed again or stored and loaded."""
        if source.is_vector:
            if loop.cols > 1 and not is_down:
                # the operand has blocks, so that each register needs a load
                loop.counts["load"] += 1 if source.rows == loop.rows else loop.each
            return
        again = list(_chain(source))
        if len(again) <= MOST_REPEATED and all(self._op(v.name).kind == "plain" for v in again if v.name):
            for v in again:
                if v.name:
                    loop.counts[v.name] += loop.each
            outside = {s for v in again for s in v.sources if not isinstance(s, RegisterValue)}
            loop.counts["load"] += loop.each * len(outside)
            return
        loop.counts["load"] += loop.each
        if not self._is_stored(source):
            source.is_kept = True
            self.loops[source.loop].counts["store"] += self.loops[source.loop].each

    def _is_stored(self, value: RegisterValue) -> bool:
        return value.is_kept or self.code.functions == "calls"

    # ---------------------------------------------------------------- time

    def _op(self, name: str) -> RegisterOpSpec:
        return self.spec.op(name)

    def bounds(self, loop: HardwareLoop) -> dict[str, float]:
        """Return lower bounds of the cycles of an iteration of a loop, by the constant of each bound."""
        ops, spec = {name: self._op(name) for name in loop.counts}, self.spec

        def total(*kinds: str) -> float:
            return sum(n * ops[o].register_cycles.value for o, n in loop.counts.items() if ops[o].kind in kinds)

        def number(*kinds: str) -> int:
            return sum(n for o, n in loop.counts.items() if ops[o].kind in kinds)

        longs = [n for o, n in loop.counts.items() if ops[o].kind == "long" and n]
        switches = spec.long_switch_cycles.value * min(longs) if len(longs) > 1 else 0.0
        compute = ("plain", "single", "long")
        carried = [INSTRUCTIONS[v.reduction] for v in loop.values if v.reduction and self.code.layout == "dn"]
        written = number("load", *compute)
        return {
            "issued_per_cycle_count": (total("plain", "single") + number("long")) / spec.issued_per_cycle_count.value,
            "singly_issued_per_cycle_count": total("single") / spec.singly_issued_per_cycle_count.value,
            "registers_written_per_cycle_count": written / spec.registers_written_per_cycle_count.value,
            "accesses_per_cycle_count": (number("load") + total("store")) / spec.accesses_per_cycle_count.value,
            "writes_per_cycle_count": total("store") / spec.writes_per_cycle_count.value,
            "long_units_count": (total("long") + switches) / spec.long_units_count.value,
            "ops.{}.latency_cycles".format(carried[0] if carried else ""): max(
                (self._op(name).latency_cycles.value for name in carried), default=0.0
            ),
            "function.nested_cycles": float(spec.function.nested_cycles.value) if loop.is_nested else 1.0,
        }

    def terms(self, *, is_waited_for: bool = True) -> Iterator[tuple[str, float]]:
        """Yield the parts of the function's time by the constants on which they depend; ``is_waited_for``: whether
        later work waits for its last loop.
        """
        spec, key = self.spec, self.key
        yield f"{key}.function.startup_cycles", float(spec.function.startup_cycles.value)
        for at, loop in enumerate(self.loops):
            bounds = self.bounds(loop)
            name = max(bounds, key=lambda b: bounds[b])
            trips = loop.trips
            if at and not loop.follows:
                # The window lets an independent loop begin while the previous one waits for its last results.
                trips -= min(trips, spec.function.window_count.value // max(1, loop.counts.total()))
            yield f"{key}.{name}", trips * bounds[name]
            if loop.stored:
                yield f"{key}.writes_per_cycle_count", loop.stored / spec.writes_per_cycle_count.value
            is_exposed = is_waited_for or at < len(self.loops) - 1
            for step in self._exposed(at).names if is_exposed else ():
                yield f"{key}.ops.{step}.latency_cycles", float(self._op(step).latency_cycles.value)
        yield f"{key}.function.drain_cycles", float(spec.function.drain_cycles.value)

    def _exposed(self, at: int) -> LatencyPath:
        """Return the longest chain of instructions after the last iteration, if later work waits for it."""
        loop, paths = self.loops[at], dict[int, LatencyPath | None]()
        is_last = at == len(self.loops) - 1
        latency = {name: op.latency_cycles.value for name, op in self.spec.ops.items()}
        used = {id(s) for later in self.loops[at + 1 :] for v in later.values for s in v.sources}
        longest = LatencyPath()
        for value in loop.values:
            starts = [self._start(s, loop, paths) for s in value.sources]
            path = max((p for p in starts if p is not None), default=None)
            if path is None and not loop.follows:
                path = LatencyPath()
            if path is not None:
                path = self._longer(path, value, latency)
            paths[id(value)] = path
            if path is None:
                continue
            if is_last and self._is_stored(value):
                store = "store_blocks" if loop.counts["store_blocks"] and value.is_narrowed else "store"
                path = LatencyPath(path.cycles + latency[store], (*path.names, store))
            if is_last or id(value) in used:
                longest = max(longest, path)
        return longest

    def _start(
        self, source: RegisterValue | Hashable, loop: HardwareLoop, paths: Mapping[int, LatencyPath | None]
    ) -> LatencyPath | None:
        """Return the latency of a source, counted from the start of the loop; None if the value already exists then."""
        if isinstance(source, RegisterValue) and self._is_made_here(source):
            return paths[id(source)] if id(source) in paths else LatencyPath()
        if loop.follows or not loop.counts["load"]:
            return None
        return LatencyPath(self._op("load").latency_cycles.value, ("load",))

    def _longer(self, path: LatencyPath, value: RegisterValue, latency: Mapping[str, float]) -> LatencyPath:
        """Return a path extended by a value's instruction and by the instructions that join its accumulators."""
        names = [value.name] if value.name else []
        if value.reduction and self.code.layout == "dn":
            names += [value.name] * ceil(log2(value.chains))
        elif value.reduction:
            names += [WITHIN[value.reduction]]
        elif value.is_narrowed and value.cols > 1:
            names.append("pack")
        return LatencyPath(path.cycles + sum(latency[n] for n in names), (*path.names, *names))


def _chain(value: RegisterValue) -> Iterator[RegisterValue]:
    yield value
    for source in value.sources:
        if isinstance(source, RegisterValue):
            yield from _chain(source)


def looked_at(steps: Sequence[Step], code: VectorCode) -> tuple[Hashable, ...]:
    """Return a part of the key under which results of :func:`function_cycles` are stored; the rest are shapes, formats
    and the equality of operands.
    """
    return code, tuple(step.name in code.leaves for step in steps)


def place(operand: Operand) -> tuple[Hashable, int, bool]:
    """Return an operand's place, its columns, and whether it is a mask."""
    if isinstance(operand, RingTile):
        at: Hashable = operand.ring.space, operand.ring.offset_bytes, operand.offset_bytes
    else:
        at = (operand.space, operand.offset_bytes) if isinstance(operand, Tile) else operand
    return at, operand.cols, operand.fmt == MASK


def is_mask(source: RegisterValue | Hashable) -> bool:
    """Return whether a source is a mask in the buffer."""
    return not isinstance(source, RegisterValue) and bool(source[2])  # type: ignore[index]
