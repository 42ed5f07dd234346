"""Writes a kernel of tiles as TTIR, which the reader of Triton kernels reads: overwritten buffers become values.

A buffer is a name for its latest value; a loop carries the tiles that it reads before it writes them, or that are read
after it.  Accesses of tensors that may be out of bounds get masks, as in TileLang's compiler (other = 0).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

from npusim.kernels.tilelang.first_elements import refuse_reads_of_the_rest
from npusim.kernels.tilelang.integer_sums import with_float_sums
from npusim.kernels.tilelang.statements import (
    FLOATS,
    TYPES,
    Applied,
    BoundValue,
    BufferElement,
    BufferPart,
    Conditional,
    Elementwise,
    Exposed,
    Expression,
    Literal,
    MatrixProduct,
    ParallelNest,
    SerialLoop,
    Statement,
    TileBuffer,
    TileKernel,
    TileReduction,
    Variable,
    interval,
    linear,
    parts_of,
    refused,
    substituted,
    tiles_read,
    variables_of,
    with_inner,
    written_buffers,
    written_tiles,
)
from npusim.kernels.triton.ttir_text import Line

_OF_FLOATS = MappingProxyType({"+": "addf", "-": "subf", "*": "mulf", "max": "maxnumf", "min": "minnumf"})
#: CUDA's division, rounded once, which is not Triton's ``/``.
_DIVISION = "tt.precise_divf"
_OF_INTEGERS = MappingProxyType(
    {"+": "addi", "-": "subi", "*": "muli", "//": "divsi", "%": "remsi", "rem": "remsi", "max": "maxsi", "min": "minsi"}
    | {"and": "andi", "or": "ori", "xor": "xori", "<<": "shli", ">>": "shrsi", "/": "divsi"}
)
_RELATIONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
#: Functions of one number, by TileLang's name; expf is CUDA's function; Triton has a faster form of it.
FUNCTIONS: Mapping[str, str] = MappingProxyType(
    {"exp2": "math.exp2", "exp": "__nv_expf", "log2": "math.log2", "log": "math.log", "rsqrt": "math.rsqrt"}
    | {"sqrt": "tt.precise_sqrt", "fabs": "math.absf", "abs": "math.absf", "erf": "math.erf", "tanh": "math.tanh"}
    | {"rint": "math.roundeven", "floor": "math.floor", "ceil": "math.ceil"}
)
#: Note on a product of a tile with itself.
BY_ITSELF = "here a product of a tile with itself loads its tensor twice, and the time includes both loads"
#: Note on a part of a tile that is not read from the tile.
_AGAIN = "a part of the tile {} is loaded and computed again from tensors, and the time includes this"
#: Functions whose results are whole numbers.
_TO_WHOLE = frozenset({"rint", "floor", "ceil"})
#: An addition of floats to elements of a tensor.
_ATOMIC = "tt.atomic_rmw fadd"
#: Largest number of parts of an expression from which a tile is computed.
_MOST_PARTS = 64
_NEUTRAL = MappingProxyType({"sum": 0.0, "max": -math.inf, "min": math.inf})
#: Patterns of the result of an operation, and of the names in a line.
_RESULT, _NAME = re.compile(r" *%([\w]+)(?::\d+)? = "), re.compile(r"%(\w+)")
_SPECIAL = MappingProxyType(
    {("f32", 1): "0x7F800000", ("f32", -1): "0xFF800000", ("f16", 1): "0x7C00", ("f16", -1): "0xFC00"}
    | {("bf16", 1): "0x7F80", ("bf16", -1): "0xFF80"}
)


@dataclass(frozen=True, slots=True)
class TileValue:
    """A value of TTIR: its name, shape and format; ``number``: the value of a constant."""

    name: str
    shape: tuple[int, ...]
    fmt: str
    number: float | None = None

    @property
    def type(self) -> str:
        """The type in TTIR."""
        return type_of(self.shape, self.fmt)


@dataclass(frozen=True, slots=True)
class TileOrigin:
    """The sources of an element of a tile: elements of tensors that it copies or from which it is computed, and
    numbers.

    ``axes``: a variable for each axis of the tile.
    """

    axes: tuple[str, ...]
    value: Expression

    @property
    def is_copy(self) -> bool:
        """Whether the origin is an unchanged element of a tensor."""
        return isinstance(self.value, BufferElement)

    def at(self, indices: Sequence[Expression]) -> Expression:
        """Return the value for an element of the tile."""
        return substituted(self.value, dict(zip(self.axes, indices, strict=True)))

    def reads(self, buffers: set[TileBuffer]) -> bool:
        """Return whether the origin includes an element of one of these tensors."""
        return any(isinstance(e, BufferElement) and e.buffer in buffers for e in parts_of(self.value))


def type_of(shape: Sequence[int], fmt: str) -> str:
    """Return the type of a tensor in TTIR, or of a number if the shape is empty."""
    element = TYPES.get(fmt, fmt)
    return f"tensor<{''.join(f'{n}x' for n in shape)}{element}>" if shape else element


def folded(word: str, a: float, b: float) -> float | None:
    """Return the result of an operation on two numbers without rounding; None for another operation."""
    if word in ("//", "%"):
        return a // b if word == "//" else a % b
    if word in ("<<", ">>"):
        return int(a) << int(b) if word == "<<" else int(a) >> int(b)
    if word in ("min", "max"):
        return min(a, b) if word == "min" else max(a, b)
    result = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    return result[word](a, b) if word in result else None


def wrapped(x: float, fmt: str) -> int:
    """Return a whole number in an integer format of fewer bits, whose numbers wrap; 0 or 1 for ``bool``."""
    if fmt == "bool":
        return int(bool(x))
    span = 1 << int(TYPES[fmt][1:])
    result = int(x) % span
    return result - span if not fmt.startswith("u") and result >= span // 2 else result


def is_within(x: float, fmt: str) -> bool:
    """Return whether an integer format can represent a number, rounded towards 0."""
    return math.isfinite(x) and wrapped(x, fmt) == int(x)


def is_exact(fmt: str, other: str) -> bool:
    """Return whether a cast changes no number: to the same format, or to a wider one of floating-point numbers."""
    return TYPES[fmt] == TYPES[other] or (other in FLOATS and FLOATS.get(fmt, 8) < FLOATS[other])


def used_lines(lines: Sequence[str]) -> list[str]:
    """Return lines of TTIR without the operations whose results nothing reads."""
    used, last = set[str](), list[str]()
    for line in reversed(lines):
        result = _RESULT.match(line)
        if result is None or result[1] in used or line.endswith("{") or _ATOMIC in line:
            used.update(_NAME.findall(line if result is None else line[result.end() :]))
            last.append(line)
    return last[::-1]


def written(kernel: TileKernel) -> str:
    """Return the TTIR of a kernel; raise `ProgramError` at a line that has no counterpart."""
    return written_with_notes(kernel)[0]


def written_with_notes(kernel: TileKernel) -> tuple[str, tuple[str, ...]]:
    """Return the TTIR of a kernel, and its notes, including notes on parts that the TTIR computes differently;
    otherwise as `written`.
    """
    refuse_reads_of_the_rest(kernel.body)
    writer = _Writer(with_float_sums(kernel))
    return writer.text(), (*kernel.notes, *writer.notes)


class _Writer:
    """Writes the operations of one kernel in their order."""

    def __init__(self, kernel: TileKernel) -> None:
        self.kernel, self.line, self.depth = kernel, kernel.line, 2
        self.lines, self.places, self.count = list[str](), dict[Line, int](), 0
        self.notes = dict[str, None]()
        self.reserved = {p.name if isinstance(p, TileBuffer) else p[0] for p in kernel.parameters}
        self.tiles, self.values = dict[TileBuffer, TileValue](), dict[str, TileValue]()
        self.origins, self.numbers = dict[TileBuffer, TileOrigin](), dict[str, TileValue]()
        self.axes: tuple[tuple[str, int], ...] = ()
        self.limits, self.outside = dict[str, int](), set[str]()
        self.ranges, self.sources = dict[str, tuple[float, float]](), dict[str | TileBuffer, set[TileBuffer]]()
        for axis, (name, n) in zip("xyz", zip(kernel.numbers, kernel.grid, strict=True), strict=False):
            self.values[name] = self.op(f"tt.get_program_id {axis} : i32", (), "int32", name)
            self.ranges[name] = (0, n - 1)
        for p in kernel.parameters:
            if not isinstance(p, TileBuffer):
                self.values[p[0]] = TileValue(p[0], (), p[1])
        self.statements(kernel.body, set())

    def text(self) -> str:
        heads = [
            f"%{p.name}: !tt.ptr<{TYPES[p.fmt]}> {{tt.divisibility = 16 : i32}}"
            if isinstance(p, TileBuffer)
            else f"%{p[0]}: {TYPES[p[1]]}"
            for p in self.kernel.parameters
        ]
        head = f"  tt.func public @{self.kernel.name}({', '.join(heads)}) attributes {{noinline = false}} {{"
        self.lines = used_lines(self.lines)
        places = [f'#loc{i} = loc("{line.file}":{line.number}:1)' for line, i in self.places.items()]
        return "\n".join(["module {", head, *self.lines, "    tt.return", "  }", "}", *places, ""])

    # ------------------------------------------------------------ operations
    def put(self, text: str) -> None:
        """Write a line, with the place of the statement."""
        at = self.places.setdefault(self.line, len(self.places))
        self.lines.append(f"{'  ' * self.depth}{text} loc(#loc{at})")

    def open(self, text: str) -> None:
        """Write a line that begins a region; the end of the region has the statement's place."""
        self.lines.append(f"{'  ' * self.depth}{text}")

    def fresh(self, hint: str) -> str:
        self.count += 1
        while (name := f"{hint}_{self.count}") in self.reserved:
            self.count += 1
        return name

    def op(self, text: str, shape: Sequence[int], fmt: str, hint: str = "t", number: float | None = None) -> TileValue:
        """Write an operation with one result, and return the result."""
        made = TileValue(self.fresh(hint), tuple(shape), fmt, number)
        self.put(f"%{made.name} = {text}")
        return made

    def constant(self, x: float, shape: Sequence[int], fmt: str) -> TileValue:
        element = TYPES[fmt]
        if fmt in FLOATS:
            text = f"{float(x):.17e}"
            if math.isinf(x):
                if (element, int(math.copysign(1, x))) not in _SPECIAL:
                    raise refused(self.line, f"an infinity in {fmt} is not supported")
                text = _SPECIAL[element, int(math.copysign(1, x))]
        else:
            x = wrapped(x, fmt)
            text = ("true" if x else "false") if fmt == "bool" else str(x)
        written_as = f"dense<{text}>" if shape else text
        return self.op(f"arith.constant {written_as} : {type_of(shape, fmt)}", shape, fmt, "c", x)

    def widened(self, v: TileValue, shape: Sequence[int]) -> TileValue:
        """Return a value in a shape: a number, or a tensor of equal rank."""
        if v.shape == tuple(shape):
            return v
        if v.number is not None:
            return self.constant(v.number, shape, v.fmt)
        word = "broadcast" if v.shape else "splat"
        return self.op(f"tt.{word} %{v.name} : {v.type} -> {type_of(shape, v.fmt)}", shape, v.fmt, "w")

    def alike(self, *values: TileValue) -> list[TileValue]:
        """Return values in the smallest shape that contains them all."""
        shapes = [v.shape for v in values if v.shape]
        return [self.widened(v, tuple(map(max, zip(*shapes, strict=True)))) for v in values] if shapes else [*values]

    def cast(self, v: TileValue, fmt: str) -> TileValue:
        """Return a value in a format."""
        if TYPES[v.fmt] == TYPES[fmt]:
            return v if v.fmt == fmt else replace(v, fmt=fmt)
        if v.number is not None and not (fmt in FLOATS and v.fmt in FLOATS and FLOATS[fmt] < FLOATS[v.fmt]):
            if v.fmt in FLOATS and fmt not in FLOATS and fmt != "bool" and not is_within(v.number, fmt):
                raise refused(self.line, f"{v.number} is not representable in {fmt}")
            return self.constant(v.number, v.shape, fmt)
        to, rounding = type_of(v.shape, fmt), ""
        if v.fmt in FLOATS and fmt in FLOATS:
            word = "arith.extf" if FLOATS[fmt] > FLOATS[v.fmt] else "arith.truncf"
            if "float8" in v.fmt + fmt:
                word, rounding = "tt.fp_to_fp", ", rounding = rtne" if FLOATS[fmt] < FLOATS[v.fmt] else ""
        elif v.fmt in FLOATS:
            word = "arith.fptoui" if fmt.startswith("u") else "arith.fptosi"
        elif fmt in FLOATS:
            word = "arith.uitofp" if v.fmt.startswith("u") or v.fmt == "bool" else "arith.sitofp"
        elif fmt == "bool":
            zero = self.constant(0, v.shape, v.fmt)
            return self.op(f"arith.cmpi ne, %{v.name}, %{zero.name} : {v.type}", v.shape, "bool")
        else:
            bits = [int(TYPES[f][1:]) for f in (v.fmt, fmt)]
            word = "arith.extui" if v.fmt.startswith("u") or v.fmt == "bool" else "arith.extsi"
            word = word if bits[0] < bits[1] else "arith.trunci"
        hint = v.name.rpartition("_")[0] or "t"
        return self.op(f"{word} %{v.name}{rounding} : {v.type} to {to}", v.shape, fmt, hint)

    def of_bits(self, v: TileValue, fmt: str) -> TileValue:
        """Return floats as the integers with the same bits, or integers as such floats; or integers in another type
        with the same number of bits.
        """
        sizes = [FLOATS[f] if f in FLOATS else int(TYPES[f][1:]) // 8 for f in (v.fmt, fmt)]
        are_whole = [f not in FLOATS for f in (v.fmt, fmt)]
        if all(are_whole) and sizes[0] == sizes[1] and v.number is None:
            return replace(v, fmt=fmt)
        if sizes[0] != sizes[1] or sizes[0] not in (2, 4) or are_whole[0] is are_whole[1]:
            raise refused(self.line, f"T.reinterpret from {v.fmt} to {fmt} is not supported")
        return self.op(f"tt.bitcast %{v.name} : {v.type} -> {type_of(v.shape, fmt)}", v.shape, fmt)

    # ------------------------------------------------------------ expressions
    def value(self, e: Expression) -> TileValue:
        """Return an expression's value: of the rank of the parallel loops, or a number."""
        if isinstance(e, Literal):
            return self.constant(e.value, (), e.fmt)
        if isinstance(e, Variable):
            names = [name for name, _ in self.axes]
            if e.name in names:
                return self.index_of(names.index(e.name))
            if e.name in self.numbers:
                return self.numbers[e.name]
            if e.name not in self.values:
                raise refused(self.line, f"{e.name} is a thread's number; npusim models blocks, not threads")
            return self.values[e.name]
        if isinstance(e, BufferElement):
            return self.loaded(e) if e.buffer.is_global else self.element(e)
        return self.applied(e)

    def applied(self, e: Applied) -> TileValue:
        if e.word == "cast":
            return self.cast(self.value(e.operands[0]), e.fmt)
        if e.word == "reinterpret":
            return self.of_bits(self.value(e.operands[0]), e.fmt)
        if e.word == "select" and (known := self.decided(e.operands[0])) is not None:
            return self.value(e.operands[1 if known else 2])
        if e.word == "select":
            c, a, b = (self.value(x) for x in e.operands)
            c, a, b = self.alike(c, *self.promoted(a, b))
            text = f"arith.select %{c.name}, %{a.name}, %{b.name} : {c.type}, {a.type}"
            return self.op(text, a.shape, a.fmt)
        if e.word in FUNCTIONS:
            v = self.value(e.operands[0])
            if v.fmt not in FLOATS:
                raise refused(self.line, f"T.{e.word} of {v.fmt}")
            v = self.cast(v, "float32") if e.word in _TO_WHOLE and FLOATS[v.fmt] == 2 else v  # exact in both formats
            name = FUNCTIONS[e.word]
            if "." not in name:
                text = f'tt.extern_elementwise %{v.name} {{symbol = "{name}"}} : ({v.type}) -> {v.type}'
                return self.op(text, v.shape, v.fmt)
            return self.op(f"{name} %{v.name} : {v.type}", v.shape, v.fmt)
        if e.word == "not":
            v = self.value(e.operands[0])
            true = self.constant(1, v.shape, "bool")
            return self.op(f"arith.xori %{v.name}, %{true.name} : {v.type}", v.shape, "bool")
        if len(e.operands) != 2:
            raise refused(self.line, f"npusim has no rule for T.{e.word}")
        ranges = self.ranges | {name: (0, n - 1) for name, n in self.axes}
        if e.word in ("//", "%") and interval(e.operands[1], ranges)[0] < 1:
            raise refused(self.line, f"the right side of {e.word} may be below 1, which is not supported")
        result = self.of_two(e.word, *(self.value(x) for x in e.operands))
        if e.word in ("//", "%") and result.number is None and interval(e.operands[0], ranges)[0] < 0:
            return self.floored(e.word, result, *(self.value(x) for x in e.operands))
        return result

    def decided(self, e: Expression) -> bool | None:
        """Return the result of a comparison of whole numbers, if bounds decide it; None for another condition."""
        if isinstance(e, Applied) and e.word == "and":
            answers = [self.decided(x) for x in e.operands]
            return False if False in answers else None if None in answers else True
        if not isinstance(e, Applied) or e.word != "lt":
            return None
        ranges = self.ranges | {name: (0, self.limits.get(name, n) - 1) for name, n in self.axes}
        (low, high), (least, most) = (interval(x, ranges) for x in e.operands)
        return True if high < least else False if low >= most else None

    def floored(self, word: str, made: TileValue, a: TileValue, b: TileValue) -> TileValue:
        """Return a quotient that is rounded down, or its remainder, from those that are rounded toward 0; the divisor
        is positive.
        """
        rest = made if word == "%" else self.of_two("%", a, b)
        less = self.of_two("lt", rest, self.constant(0, (), rest.fmt))
        moved = self.of_two("+", made, b) if word == "%" else self.of_two("-", made, self.constant(1, (), made.fmt))
        less, moved, made = self.alike(less, moved, made)
        text = f"arith.select %{less.name}, %{moved.name}, %{made.name} : {less.type}, {made.type}"
        return self.op(text, made.shape, made.fmt)

    def promoted(self, a: TileValue, b: TileValue) -> tuple[TileValue, TileValue]:
        """Return two values in the wider of their formats; a constant has the format of the other value."""
        formats = [v.fmt for v in (a, b) if v.fmt in FLOATS] or [a.fmt, b.fmt]
        firm = [v.fmt for v in (a, b) if v.fmt in formats and v.number is None] or formats
        fmt = max(firm, key=lambda f: FLOATS.get(f, 0) or int(TYPES[f][1:]))
        return self.cast(a, fmt), self.cast(b, fmt)

    def of_two(self, word: str, a: TileValue, b: TileValue) -> TileValue:
        a, b = self.promoted(a, b)
        whole = a.fmt not in FLOATS
        if a.number is not None and b.number is not None and (whole or (word == "*" and abs(b.number) == 1)):
            result = folded(word, a.number, b.number)
            if result is not None:
                return self.constant(result, a.shape or b.shape, a.fmt)
        a, b = self.alike(a, b)
        if word in _RELATIONS:
            sign = ("" if word in ("eq", "ne") else "u" if a.fmt.startswith("u") else "s") if whole else "o"
            sign = "u" if word == "ne" and not whole else sign
            text = f"arith.cmp{'i' if whole else 'f'} {sign}{word}, %{a.name}, %{b.name} : {a.type}"
            return self.op(text, a.shape, "bool")
        if word == "/" and not whole:
            return self.op(f"{_DIVISION} %{a.name}, %{b.name} : {a.type}", a.shape, a.fmt)
        names = _OF_INTEGERS if whole else _OF_FLOATS
        if word not in names:
            raise refused(self.line, f"{word} of {a.fmt}")
        name = names[word]
        if a.fmt.startswith("u") and name in ("divsi", "remsi", "shrsi", "maxsi", "minsi"):
            name = name.replace("s", "u", 1) if name != "shrsi" else "shrui"
        return self.op(f"arith.{name} %{a.name}, %{b.name} : {a.type}", a.shape, a.fmt)

    def index_of(self, at: int) -> TileValue:
        """Return the numbers of a parallel loop, along its axis."""
        n = self.axes[at][1]
        v = self.op(f"tt.make_range {{end = {n} : i32, start = 0 : i32}} : tensor<{n}xi32>", (n,), "int32", "r")
        for i in range(len(self.axes)):
            v = v if i == at else self.expanded(v, i)
        return v

    def expanded(self, v: TileValue, at: int) -> TileValue:
        """Return a value with one more axis, of one element."""
        shape = (*v.shape[:at], 1, *v.shape[at:])
        if v.number is not None:
            return self.constant(v.number, shape, v.fmt)
        text = f"tt.expand_dims %{v.name} {{axis = {at} : i32}} : {v.type} -> {type_of(shape, v.fmt)}"
        return self.op(text, shape, v.fmt, v.name.rpartition("_")[0] or "t")

    def reshaped(self, v: TileValue, shape: tuple[int, ...]) -> TileValue:
        if v.shape == shape:
            return v
        if v.number is not None or not v.shape:
            return self.widened(v, shape)
        return self.op(f"tt.reshape %{v.name} : {v.type} -> {type_of(shape, v.fmt)}", shape, v.fmt, "w")

    def transposed(self, v: TileValue, order: Sequence[int] = (1, 0)) -> TileValue:
        shape = tuple(v.shape[i] for i in order)
        if v.number is not None:
            return self.constant(v.number, shape, v.fmt)
        listed = ", ".join(map(str, order))
        text = f"tt.trans %{v.name} {{order = array<i32: {listed}>}} : {v.type} -> {type_of(shape, v.fmt)}"
        return self.op(text, shape, v.fmt, v.name.rpartition("_")[0] or "t")

    # ------------------------------------------------------------ tensors
    def pointers(self, of: BufferElement, shape: tuple[int, ...]) -> TileValue:
        """Return pointers to elements of a tensor."""
        buffer, total = of.buffer, None
        is_long = sum((n - 1) * s for n, s in zip(buffer.shape, buffer.strides, strict=True)) >= 1 << 31
        for index, stride in zip(of.indices, buffer.strides, strict=True):
            if index == Literal(0):
                continue
            v = self.cast(self.value(index), "int64" if is_long else "int32")
            term = self.of_two("*", v, self.constant(stride, (), v.fmt)) if stride != 1 else v
            total = term if total is None else self.of_two("+", total, term)
        total = total if total is not None else self.constant(0, (), "int32")
        total = self.widened(total, shape)
        base = TileValue(buffer.name, (), f"!tt.ptr<{TYPES[buffer.fmt]}>")
        base = self.widened(base, shape)
        return self.op(f"tt.addptr %{base.name}, %{total.name} : {base.type}, {total.type}", shape, base.fmt, "p")

    def moved_by(self, indices: Sequence[Expression]) -> set[str]:
        """Return the parallel loops on which indices depend, also through names for values."""
        used = variables_of(indices)
        shapes = [self.values[n].shape for n in used & self.values.keys()]
        return {
            name
            for i, (name, _) in enumerate(self.axes)
            if name in used or any(shape and shape[i] > 1 for shape in shapes)
        }

    def mask(self, of: BufferElement, condition: Expression | None, shape: tuple[int, ...]) -> str:
        """Return the name of the mask of an access with a comma before it; empty if no mask is needed."""
        rules = [] if condition is None else [condition]
        used = self.moved_by(of.indices)
        longer = [(name, self.limits[name]) for name, n in self.axes if n > self.limits[name] and name in used]
        rules += [Applied("lt", (Variable(name), Literal(n))) for name, n in longer]
        ranges = self.ranges | {name: (0, self.limits[name] - 1) for name, _ in self.axes}
        for index, n in zip(of.indices, of.buffer.shape, strict=True):
            low, high = interval(index, ranges)
            if not self.kernel.is_guarded:
                continue
            rules += [Applied("lt", (index, Literal(n)))] if high >= n else []
            rules += [Applied("ge", (index, Literal(0)))] if low < 0 else []
        if not rules:
            return ""
        result = [self.widened(self.value(rule), shape) for rule in rules]
        whole = result[0]
        for rule in result[1:]:
            whole = self.op(f"arith.andi %{whole.name}, %{rule.name} : {whole.type}", shape, "bool")
        return f", %{whole.name}"

    def loaded(self, e: BufferElement) -> TileValue:
        used = variables_of(e.indices)
        bound = any(self.values[n].shape for n in used & self.values.keys())
        moving = [name in used or bound for name, _ in self.axes]
        shape = tuple(n if m else 1 for m, (_, n) in zip(moving, self.axes, strict=True)) if any(moving) else ()
        pointers, mask = self.pointers(e, shape), self.mask(e, None, shape)
        other = f", %{self.constant(0, shape, e.buffer.fmt).name}" if mask else ""
        return self.op(f"tt.load %{pointers.name}{mask}{other} : {pointers.type}", shape, e.buffer.fmt, e.buffer.name)

    # ------------------------------------------------------------ tiles
    def tile(self, buffer: TileBuffer) -> TileValue:
        """Return the value of a tile; refuse a tile that nothing has written."""
        if buffer not in self.tiles:
            raise refused(self.line, f"{buffer.name} is read before it is written")
        return self.tiles[buffer]

    def shape_of(self, buffer: TileBuffer) -> tuple[int, ...]:
        """Return the shape of a tile's value, which may have more elements than the tile."""
        return self.tiles[buffer].shape if buffer in self.tiles and buffer.block else buffer.block

    def axes_of(self, e: BufferElement, *, is_read: bool = True) -> list[int] | str:
        """Return the number of the parallel loop along each axis of a tile, or the part of the axis that is
        accessed.
        """
        names, numbers = [name for name, _ in self.axes], list[int]()
        for d in e.buffer.dims:
            index = e.indices[d]
            if not isinstance(index, Variable) or index.name not in names:
                return f"its index {d} is not the variable of a parallel loop"
            numbers.append(names.index(index.name))
            length, limit = self.axes[numbers[-1]][1], self.limits[index.name]
            have = self.shape_of(e.buffer)[e.buffer.dims.index(d)]
            if length != have and (limit != e.buffer.shape[d] or is_read):
                return f"{limit} of the {e.buffer.shape[d]} elements of axis {d}"
        return numbers if len(set(numbers)) == len(numbers) else "its diagonal"

    def element(self, e: BufferElement) -> TileValue:
        """Return elements of a tile; if the part is a copy of a tensor, return the elements of that tensor."""
        v, at = self.tile(e.buffer), self.axes_of(e)
        if isinstance(at, str) and v.number is not None:
            return self.constant(v.number, (), v.fmt)
        if isinstance(at, str) and e.buffer in self.origins:
            self.notes[f"{self.line}: {_AGAIN.format(e.buffer.name)}"] = None
            return self.cast(self.value(self.origins[e.buffer].at(e.indices)), e.buffer.fmt)
        if isinstance(at, str):
            raise refused(
                self.line,
                f"the kernel reads a part of the tile {e.buffer.name} ({at}), which is supported only if the tile "
                "is computed element by element, from nothing but tensors",
            )
        if at != sorted(at):
            v = self.transposed(v, [at.index(i) for i in sorted(at)])
        for i in range(len(self.axes)):
            v = self.expanded(v, i) if i not in at and v.shape else v
        return v

    def bind(self, buffer: TileBuffer, v: TileValue) -> None:
        """Use a value as that of a tile; it has the tile's name if the last operation computed it."""
        v = self.cast(v, buffer.fmt)
        v = self.reshaped(v, tuple(n for n in v.shape if n != 1) if v.shape else buffer.block)
        result = f"{'  ' * self.depth}%{v.name} = "
        is_named = v.name in {x.name for x in (*self.tiles.values(), *self.values.values())}
        if v.number is None and not is_named and self.lines and self.lines[-1].startswith(result):
            name = self.fresh(buffer.name)
            self.lines[-1] = self.lines[-1].replace(result, f"{'  ' * self.depth}%{name} = ", 1)
            v = replace(v, name=name)
        self.tiles[buffer] = v
        self.origins.pop(buffer, None)

    def origin(self, x: Elementwise) -> TileOrigin | None:
        """Return the sources of a tile: tensors, numbers, tiles of one element, or other tiles with such sources.

        Another computation of the tile from these sources has the same bits, because operations and formats are those
        of the assignments.
        """
        value, formats = x.value, [x.buffer.fmt]
        while isinstance(value, Applied) and value.word == "cast":
            formats.append(value.fmt)
            value = value.operands[0]
        names = {name for name, _ in self.axes} | {i for i, n in self.limits.items() if n == 1}
        axes = [i.name if isinstance(i, Variable) and i.name in names else f"none {d}" for d, i in enumerate(x.indices)]
        inside = names - set(axes) | (self.values.keys() - self.outside)
        result = self.of_tensors(value) if x.condition is None else None
        if result is None or variables_of([result]) & inside:
            return None
        if not isinstance(value, BufferElement):
            formats.append("")
        else:
            formats.append(value.buffer.fmt)
        if not isinstance(result, BufferElement) or not all(map(is_exact, formats[1:], formats)):
            for fmt in formats[-2::-1]:
                result = Applied("cast", (result,), fmt)
            if sum(1 for _ in parts_of(result)) > _MOST_PARTS:
                return None
        return TileOrigin(tuple(axes), result)

    def of_tensors(self, e: Expression) -> Expression | None:
        """Return an expression with the sources of tiles in place of the tiles; None if a tile has no such sources."""
        if isinstance(e, BufferElement) and not e.buffer.is_global:
            number = self.tiles[e.buffer].number if e.buffer in self.tiles else None
            if number is not None:
                return Literal(number, e.buffer.fmt)
            if e.buffer in self.tiles and not self.tiles[e.buffer].shape:
                v = self.tiles[e.buffer]
                self.numbers[name := f"%{v.name}"] = v
                return Variable(name)
            indices = [self.of_tensors(i) for i in e.indices]
            origin = self.origins.get(e.buffer)
            known = [i for i in indices if i is not None]
            return None if origin is None or len(known) < len(indices) else origin.at(known)
        inner = e.operands if isinstance(e, Applied) else e.indices if isinstance(e, BufferElement) else ()
        result = {x: self.of_tensors(x) for x in inner}
        return None if None in result.values() else with_inner(e, lambda x: result[x] or x)

    def forget(self, buffers: Sequence[TileBuffer]) -> None:
        """Remove the origins of tiles that are written, and those of copies of tensors that are written."""
        gone = set(buffers)
        self.origins = {b: o for b, o in self.origins.items() if b not in gone and not o.reads(gone)}

    # ------------------------------------------------------------ statements
    def statements(self, body: Sequence[Statement], live: set[TileBuffer]) -> None:
        """Write statements; ``live``: the tiles that are read after them."""
        for i, s in enumerate(body):
            rest = Exposed(body[i + 1 :])
            self.line, after = s.line, rest.reads | (live - rest.writes)
            if isinstance(s, SerialLoop):
                self.loop(s, after)
            elif isinstance(s, Conditional):
                self.conditional(s, after)
            elif isinstance(s, BoundValue):
                self.bound(s)
            elif isinstance(s, ParallelNest):
                self.nest(s)
            elif isinstance(s, MatrixProduct):
                self.product(s)
            elif isinstance(s, TileReduction):
                self.reduction(s)
            else:
                raise refused(
                    s.line,
                    "statements of one core, or a flag between cores, are not supported in a kernel that "
                    "describes whole tiles",
                )

    def bound(self, s: BoundValue) -> None:
        ranges = self.ranges | {name: (0, self.limits[name] - 1) for name, _ in self.axes}
        self.ranges[s.name] = interval(s.value, ranges)
        self.values[s.name] = self.value(s.value)

    def nest(self, s: ParallelNest) -> None:
        bound, self.sources = dict(self.values), {}
        self.outside = set(bound)
        for name, n in s.axes:
            if n == 1:
                self.values[name], self.ranges[name] = self.constant(0, (), "int32"), (0, 0)
        refuse_races(s)
        s = in_order_of_reads(s)
        self.axes, self.limits = self.padded(s), dict(s.axes)
        for x in s.body:
            self.line = x.line
            if isinstance(x, BoundValue):
                self.bound(x)
                self.sources[x.name] = self.sources_of(x.value)
            else:
                self.elementwise(x)
        self.axes, self.values = (), bound

    def padded(self, s: ParallelNest) -> tuple[tuple[str, int], ...]:
        """Return the loops of a nest; if these read only the first elements of tiles, the loops are as long as the
        tiles.
        """
        lengths = {name: n for name, n in s.axes if n != 1}
        every = [e for x in s.body for e in parts_of(x.value)]
        for e in every:
            if not isinstance(e, BufferElement) or e.buffer.is_global or e.buffer not in self.tiles:
                continue
            if e.buffer in self.origins and not self.origins[e.buffer].is_copy:
                continue  # the first elements of the tile are computed again
            shape = dict(zip(e.buffer.dims, self.tiles[e.buffer].shape, strict=False))
            for d, n in shape.items():
                index = e.indices[d]
                if isinstance(index, Variable) and index.name in lengths:
                    lengths[index.name] = max(lengths[index.name], n)
        targets = [x for x in s.body if isinstance(x, Elementwise)]
        if any(x.condition is not None and not x.buffer.is_global for x in targets):
            return tuple((name, n) for name, n in s.axes if n != 1)
        return tuple(lengths.items())

    def sources_of(self, *expressions: Expression) -> set[TileBuffer]:
        """Return the buffers that expressions of a nest read, also through names and tiles to which the nest assigns
        values.
        """
        parts = [p for e in expressions for p in parts_of(e)]
        read = {p.buffer for p in parts if isinstance(p, BufferElement)}
        known: list[str | TileBuffer] = [*(p.name for p in parts if isinstance(p, Variable)), *read]
        return read.union(*(self.sources[k] for k in known if k in self.sources))

    def once(self, x: Elementwise, v: TileValue) -> None:
        """Refuse an assignment that a loop repeats for the same elements, if the repetition may change them."""
        used = self.moved_by(x.indices)
        sources = self.sources_of(x.value, *(() if x.condition is None else (x.condition,)))
        self.sources[x.buffer] = sources | self.sources.get(x.buffer, set())
        for i, (name, _) in enumerate(self.axes):
            if name in used:
                continue
            if x.buffer in sources:
                raise refused(
                    self.line,
                    f"{x.buffer.name} has no axis for a loop of this nest, but changes in each of its iterations",
                )
            if x.buffer.is_global and v.shape and v.shape[i] > 1:
                raise refused(
                    self.line, f"a loop for which {x.buffer.name} has no axis writes all its elements to one place"
                )

    def elementwise(self, x: Elementwise) -> None:
        target, v = BufferElement(x.buffer, x.indices), self.value(x.value)
        self.once(x, v)
        if x.is_added and (not x.buffer.is_global or x.buffer.fmt not in FLOATS):
            raise refused(x.line, f"an atomic addition needs a tensor of floats, which {x.buffer.name} is not")
        if x.buffer.is_global:
            shape = tuple(n for _, n in self.axes)
            v, pointers = self.widened(self.cast(v, x.buffer.fmt), shape), self.pointers(target, shape)
            mask = self.mask(target, x.condition, shape)
            if x.is_added:
                kinds = ", ".join([pointers.type, v.type, *([type_of(shape, "bool")] if mask else [])])
                text = f"{_ATOMIC}, relaxed, gpu, %{pointers.name}, %{v.name}{mask} : ({kinds}) -> {v.type}"
                self.op(text, shape, x.buffer.fmt)
            else:
                self.put(f"tt.store %{pointers.name}, %{v.name}{mask} : {pointers.type}")
            self.forget([x.buffer])
            return
        at, origin = self.axes_of(target, is_read=False), self.origin(x)
        if isinstance(at, str):
            raise refused(
                self.line, f"the kernel writes only a part of the tile {x.buffer.name} ({at}); write all of it"
            )
        if x.condition is not None:
            condition, old = self.value(x.condition), self.element(target)
            condition, v, old = self.alike(condition, self.cast(v, x.buffer.fmt), old)
            text = f"arith.select %{condition.name}, %{v.name}, %{old.name} : {condition.type}, {v.type}"
            v = self.op(text, v.shape, v.fmt)
        full = tuple(n if i in at else 1 for i, (_, n) in enumerate(self.axes))
        if v.shape and any(have not in (1, n) for have, n in zip(v.shape, full, strict=True)):
            raise refused(
                self.line, f"a loop for which {x.buffer.name} has no axis writes all its elements to one place"
            )
        v = self.cast(v, x.buffer.fmt)
        v = self.widened(v, full) if v.shape or not x.buffer.block else v
        if at != sorted(at):
            v = self.transposed(self.reshaped(v, tuple(n for n in full if n != 1)), [sorted(at).index(i) for i in at])
        self.bind(x.buffer, v)
        self.forget([x.buffer])
        if origin is not None:
            self.origins[x.buffer] = origin

    def product(self, s: MatrixProduct) -> None:
        for x in (s.a, s.b, s.c):
            if not x.is_whole or self.shape_of(x.buffer) != x.buffer.block:
                raise refused(
                    s.line, f"T.gemm reads or writes only a part of the tile {x.buffer.name}; use the whole tile"
                )
        sources = self.tile(s.a.buffer), self.second(s.b.buffer) if s.b.buffer is s.a.buffer else self.tile(s.b.buffer)
        a, b = (self.transposed(v) if t else v for v, t in zip(sources, s.transposes, strict=True))
        shape = s.c.buffer.block
        if (len(a.shape), len(b.shape), len(shape)) != (2, 2, 2):
            raise refused(s.line, "T.gemm needs matrices")
        if not isinstance(s.clears, Literal):
            raise refused(
                s.line,
                "clear_accum depends on a value; write True, False, or a comparison of the loop's "
                "variable with its first value",
            )
        start = before = self.constant(0, shape, s.c.buffer.fmt) if s.clears.value else self.tile(s.c.buffer)
        is_of_integers = a.fmt not in FLOATS and start.fmt in FLOATS  # a sum over a loop, in float32
        if is_of_integers:
            start = self.constant(0, shape, "int32")
        text = (
            f"tt.dot %{a.name}, %{b.name}, %{start.name}, inputPrecision = tf32 : {a.type} * {b.type} -> {start.type}"
        )
        result = self.op(text, shape, start.fmt, s.c.buffer.name)
        if is_of_integers:
            result = self.cast(result, before.fmt)
            result = result if before.number == 0 else self.of_two("+", before, result)
        self.tiles[s.c.buffer] = result
        self.forget([s.c.buffer])

    def second(self, buffer: TileBuffer) -> TileValue:
        """Return a tile as the second factor of a product with itself: a copy of the tensor that is loaded by separate
        pointers.
        """
        origin = self.origins.get(buffer)
        if origin is None or not origin.is_copy:
            return self.tile(buffer)
        names = [self.fresh("second") for _ in buffer.shape]
        self.axes = tuple((name, n) for name, n in zip(names, buffer.shape, strict=True) if n != 1)
        self.limits = dict(self.axes)
        every = [Variable(name) if n != 1 else Literal(0) for name, n in zip(names, buffer.shape, strict=True)]
        v = self.cast(self.value(origin.at(every)), buffer.fmt)
        self.axes, self.limits = (), {}
        return self.reshaped(v, buffer.block)

    def reduction(self, s: TileReduction) -> None:
        if not s.source.is_whole or not s.target.is_whole or self.shape_of(s.source.buffer) != s.source.buffer.block:
            raise refused(
                s.line, f"a reduction reads only a part of the tile {s.source.buffer.name}; use the whole tile"
            )
        x, buffer, word = self.tile(s.source.buffer), s.source.buffer, s.word
        if s.axis not in buffer.dims:
            raise refused(s.line, f"a reduction runs along axis {s.axis} of {buffer.name}, which has one element")
        at = buffer.dims.index(s.axis)
        if word.removeprefix("abs") not in _NEUTRAL or x.fmt not in FLOATS or s.target.buffer.fmt not in FLOATS:
            raise refused(s.line, f"T.reduce_{s.word} from {x.fmt} to {s.target.buffer.fmt} is not supported")
        x = x if s.cumulates else self.cast(x, s.target.buffer.fmt)  # a sum has the format of its target
        if word.startswith("abs"):
            x, word = self.op(f"math.absf %{x.name} : {x.type}", x.shape, x.fmt), word.removeprefix("abs")
        x = self.constant(x.number, x.shape, x.fmt) if x.number is not None else x
        shape = x.shape if s.cumulates else (*x.shape[:at], *x.shape[at + 1 :])
        name = _OF_FLOATS["+" if word == "sum" else word]
        v = self.folded_over(s, x, at, shape, name)
        if not s.clears:
            before = self.cast(self.tile(s.target.buffer), v.fmt)
            if before.number != _NEUTRAL[word]:
                before = self.widened(before, shape)
                v = self.op(f"arith.{name} %{v.name}, %{before.name} : {v.type}", shape, v.fmt)
        self.bind(s.target.buffer, v)

    def folded_over(self, s: TileReduction, x: TileValue, at: int, shape: tuple[int, ...], name: str) -> TileValue:
        """Write the reduction or scan of a value by an operation of two numbers."""
        word, end = ("scan", ", reverse = false") if s.cumulates else ("reduce", "")
        v = TileValue(self.fresh(s.target.buffer.name), shape, x.fmt)
        first, second, made = (self.fresh("e") for _ in range(3))
        element = TYPES[x.fmt]
        self.open(f'%{v.name} = "tt.{word}"(%{x.name}) <{{axis = {at} : i32{end}}}> ({{')
        self.open(f"^bb0(%{first}: {element}, %{second}: {element}):")
        self.put(f"  %{made} = arith.{name} %{first}, %{second} : {element}")
        self.put(f"  tt.{word}.return %{made} : {element}")
        self.put(f"}}) : ({x.type}) -> {v.type}")
        return v

    # ------------------------------------------------------------ control flow
    def loop(self, s: SerialLoop, live: set[TileBuffer]) -> None:
        """Write a loop; a tile that has the same constant value at the beginning and the end of each iteration is not a
        state of the loop.
        """
        s, constant = self.with_cleared_starts(s), set[TileBuffer]()
        before = len(self.lines), self.count, dict(self.tiles), dict(self.values), dict(self.ranges), dict(self.origins)
        while unchanged := self.loop_with(s, live, constant):
            constant |= unchanged
            length, self.count, tiles, values, ranges, origins = before
            del self.lines[length:]
            self.tiles, self.values, self.ranges, self.origins = dict(tiles), dict(values), dict(ranges), dict(origins)

    def loop_with(self, s: SerialLoop, live: set[TileBuffer], constant: set[TileBuffer]) -> set[TileBuffer]:
        """Write a loop; return those states that are the same number at the beginning and at the end of an
        iteration.
        """
        (low, most), (least, high) = interval(s.low, self.ranges), interval(s.high, self.ranges)
        body, first, last = Exposed(s.body), self.value(s.low), self.value(s.high)
        carried = [b for b in written_tiles(s.body) if (b in body.reads or b in live) and b not in constant]
        runs = least > most
        starts = []
        for b in carried:
            if b not in self.tiles and (b in body.reads or not runs):
                raise refused(s.line, f"{b.name} is read before it is written, in the loop or after it")
            starts.append(self.tiles[b] if b in self.tiles else self.constant(0, b.block, b.fmt))
        one, name, made = self.constant(1, (), "int32"), self.fresh(s.variable), self.fresh("w")
        inner = [TileValue(self.fresh(b.name), v.shape, v.fmt) for b, v in zip(carried, starts, strict=True)]
        first, last = self.cast(first, "int32"), self.cast(last, "int32")
        kinds = ", ".join(v.type for v in starts)
        pairs = ", ".join(f"%{i.name} = %{v.name}" for i, v in zip(inner, starts, strict=True))
        head, state = (f"%{made}:{len(carried)} = ", f"iter_args({pairs}) -> ({kinds}) ") if carried else ("", "")
        self.open(f"{head}scf.for %{name} = %{first.name} to %{last.name} step %{one.name} {state} : i32 {{")
        before = dict(self.tiles)
        self.forget(written_buffers(s.body))
        origins = dict(self.origins)
        self.tiles |= dict(zip(carried, inner, strict=True))
        self.values[s.variable], self.ranges[s.variable] = TileValue(name, (), "int32"), (low, high - 1)
        with self.region(s.line, ""):
            self.statements(s.body, set(carried))
            self.yielded(carried, kinds)
        ends = [self.tiles[b].number for b in carried]
        results = {b: TileValue(f"{made}#{i}", b.block, b.fmt) for i, b in enumerate(carried)}
        self.tiles, self.origins = before | results, origins
        numbers = zip(carried, starts, ends, strict=True)
        return {b for b, v, end in numbers if end is not None and v.number == end}

    def with_cleared_starts(self, s: SerialLoop) -> SerialLoop:
        """Return a loop in which products that clear in the first iteration start from a tile of zeros instead."""
        body, runs = list(s.body), interval(s.high, self.ranges)[0] > interval(s.low, self.ranges)[1]
        for i, x in enumerate(body):
            is_first = isinstance(x, MatrixProduct) and x.clears == Applied("eq", (Variable(s.variable), s.low))
            if is_first and isinstance(x, MatrixProduct):
                earlier = Exposed(body[:i])
                if x.c.buffer in earlier.reads or x.c.buffer in written_tiles(body[:i]):
                    raise refused(x.line, f"{x.c.buffer.name} is used before the product that clears it")
                if not runs and x.c.buffer in self.tiles and self.tiles[x.c.buffer].number != 0:
                    raise refused(x.line, f"{x.c.buffer.name} is not cleared if the loop has no iteration")
                body[i] = replace(x, clears=Literal(0, "bool"))
                self.tiles[x.c.buffer] = self.constant(0, x.c.buffer.block, x.c.buffer.fmt)
        return replace(s, body=tuple(body))

    @contextmanager
    def region(self, line: Line, otherwise: str) -> Iterator[None]:
        """Write a region one level deeper, and its end."""
        self.depth += 1
        yield
        self.depth, self.line = self.depth - 1, line
        self.put(otherwise or "}")

    def yielded(self, buffers: Sequence[TileBuffer], kinds: str) -> None:
        values = [self.tile(b) for b in buffers]
        for b, v in zip(buffers, values, strict=True):
            if v.shape != b.block:
                raise refused(
                    self.line,
                    f"{b.name} is only the first part of a tile before the loop or if, and a whole tile after it",
                )
        self.put(f"scf.yield {', '.join(f'%{v.name}' for v in values)} : {kinds}" if values else "scf.yield")

    def conditional(self, s: Conditional, live: set[TileBuffer]) -> None:
        condition = self.value(s.condition)
        if condition.number is not None:
            self.statements(s.then if condition.number else s.otherwise, live)
            return
        if (chosen := as_choices(s)) is not None:
            self.statements(chosen, live)
            return
        both = [b for b in written_tiles((*s.then, *s.otherwise)) if b in live]
        known, before = dict(self.values), dict(self.tiles)
        surely = Exposed(s.then).writes & Exposed(s.otherwise).writes
        for b in both:
            if b not in before and b not in surely:
                raise refused(s.line, f"{b.name} is read after the if, but only one of its branches writes it")
        kinds, made = ", ".join(type_of(b.block, b.fmt) for b in both), self.fresh("w")
        self.open(
            (f"%{made}:{len(both)} = " if both else "")
            + f"scf.if %{condition.name} {f'-> ({kinds}) ' if both else ''}{{"
        )
        has_else = bool(both or s.otherwise)
        origins = dict(self.origins)
        for body, end in ((s.then, "} else {" if has_else else ""), *([(s.otherwise, "")] if has_else else [])):
            self.tiles, self.origins = dict(before), dict(origins)
            with self.region(s.line, end):
                self.statements(body, set(both))
                self.yielded(both, kinds) if both else None
            self.values = dict(known)
        self.tiles = before | {b: TileValue(f"{made}#{i}", b.block, b.fmt) for i, b in enumerate(both)}
        self.origins = origins
        self.forget(written_buffers((*s.then, *s.otherwise)))


def as_choices(s: Conditional) -> tuple[ParallelNest, ...] | None:
    """Return an if that assigns tiles as assignments that choose between its branches; None for another if.

    Both branches assign the same tiles in the same order, or only one branch assigns tiles, and computes them only from
    tiles.
    """
    if not s.otherwise:
        result = [_choice(s.condition, x, _unchanged(x), s.line) for x in s.then]
    elif len(s.then) == len(s.otherwise):
        result = [_choice(s.condition, x, y, s.line) for x, y in zip(s.then, s.otherwise, strict=True)]
    else:
        return None
    nests = tuple(x for x in result if x is not None)
    written, asked = written_tiles(nests[:-1]), tiles_read([s.condition])
    return nests if len(nests) == len(result) and not asked & set(written) else None


def _unchanged(s: Statement) -> ParallelNest | None:
    """Return the assignment of each element of a tile to itself; it replaces one that reads only tiles."""
    x = s.body[-1] if isinstance(s, ParallelNest) else None
    if not isinstance(s, ParallelNest) or not isinstance(x, Elementwise) or x.buffer not in tiles_read([x.value]):
        return None
    axes, values = {name for name, _ in x.axes}, [e for y in s.body for e in parts_of(y.value)]
    blocks = (
        e for e in values if isinstance(e, BufferElement) and e.buffer.is_global and variables_of(e.indices) & axes
    )
    if any(blocks):
        return None  # an access would be outside of its tensor if the condition does not hold
    return replace(s, body=(replace(x, value=BufferElement(x.buffer, x.indices)),))


def _choice(condition: Expression, s: Statement, other: Statement | None, line: Line) -> ParallelNest | None:
    """Return two assignments to one tile as one that chooses; None for other statements."""
    if not isinstance(s, ParallelNest) or not isinstance(other, ParallelNest):
        return None
    last = [x.body[-1] for x in (s, other)]
    a, b = (x if isinstance(x, Elementwise) else None for x in last)
    if a is None or b is None or any(isinstance(x, Elementwise) for n in (s, other) for x in n.body[:-1]):
        return None
    lengths = [[n for _, n in x.axes] for x in (a, b)]
    if a.buffer is not b.buffer or a.buffer.is_global or lengths[0] != lengths[1]:
        return None
    if a.condition is not None or b.condition is not None:
        return None
    by = {old: Variable(new) for (new, _), (old, _) in zip(a.axes, b.axes, strict=True)}
    bound = tuple(replace(x, value=substituted(x.value, by)) for x in other.body[:-1] if isinstance(x, BoundValue))
    if tuple(substituted(i, by) for i in b.indices) != a.indices:
        return None
    value = chosen_value(condition, a.value, substituted(b.value, by))
    return ParallelNest(a.axes, (*s.body[:-1], *bound, replace(a, value=value)), line)


def chosen_value(condition: Expression, a: Expression, b: Expression) -> Expression:
    """Return the choice of a if a condition is true, and of b otherwise.  For elements of one tensor, the result is one
    element with chosen indices; for masks, it is a mask.
    """
    if isinstance(a, BufferElement) and isinstance(b, BufferElement) and a.buffer is b.buffer and a.buffer.is_global:
        pairs = zip(a.indices, b.indices, strict=True)
        return replace(a, indices=tuple(x if x == y else Applied("select", (condition, x, y)) for x, y in pairs))
    if isinstance(a, Applied) and a.word == "select" and _are_alike(a.operands[1], b):
        rule = Applied("or", (Applied("not", (condition,)), a.operands[0]))
        return replace(a, operands=(rule, *a.operands[1:]))
    if isinstance(a, Applied) and a.word == "select" and _are_alike(a.operands[2], b):
        return replace(a, operands=(Applied("and", (condition, a.operands[0])), *a.operands[1:]))
    return Applied("select", (condition, a, b))


def refuse_races(s: ParallelNest) -> None:
    """Refuse parallel loops in which one iteration reads an element of a tile that another one may write."""
    written = {x.buffer: x.indices for x in s.body if isinstance(x, Elementwise) and not x.buffer.is_global}
    names = {name for name, _ in s.axes}
    for x in s.body:
        of_target = (*x.indices, *([] if x.condition is None else [x.condition])) if isinstance(x, Elementwise) else ()
        for e in (e for y in (x.value, *of_target) for e in parts_of(y)):
            if isinstance(e, BufferElement) and e.buffer in written:
                pairs = [(e.indices[d], written[e.buffer][d]) for d in e.buffer.dims]
                if not _are_alike_or_apart(pairs, names):
                    raise refused(
                        x.line,
                        f"an iteration of parallel loops reads an element of {e.buffer.name} that another "
                        "iteration may write, in an undefined order; write to another tile",
                    )


def _are_alike_or_apart(pairs: Sequence[tuple[Expression, Expression]], names: set[str]) -> bool:
    """Return whether indices are equal in each iteration, or differ in all iterations: by a constant, if no loop moves
    them.
    """
    distances = [linear(Applied("-", pair), {}) for pair in pairs]
    is_apart = any(
        set(n) == {Literal(1)} and not variables_of(p) & names for n, p in zip(distances, pairs, strict=True)
    )
    return is_apart or not any(distances)


def in_order_of_reads(s: ParallelNest) -> ParallelNest:
    """Return two parallel loops in the order of the tiles that they read, if all of these are read transposed.

    A value that is computed from these tiles, such as a factor of a product, is then transposed as a result.
    """
    targets = [x for x in s.body if isinstance(x, Elementwise)]
    reads = [e for x in s.body for e in parts_of(x.value) if isinstance(e, BufferElement)]
    wide = [e for e in reads if sum(isinstance(i, Variable) for i in e.indices) > 1]
    order = tuple(Variable(name) for name, _ in s.axes)
    if len(order) != 2 or not wide or any(x.buffer.is_global or x.condition is not None for x in targets):
        return s
    is_turned = all(e.indices == order[::-1] and not e.buffer.is_global for e in wide)
    return replace(s, axes=s.axes[::-1]) if is_turned and all(x.indices == order for x in targets) else s


def _are_alike(a: Expression, b: Expression) -> bool:
    """Return whether expressions are equal; numbers are compared independent of the format in which they are
    written.
    """
    if isinstance(a, Literal) and isinstance(b, Literal):
        return a.value == b.value and math.copysign(1, a.value) == math.copysign(1, b.value)
    return a == b


def part_as_nest(source: BufferPart, target: BufferPart, line: Line) -> ParallelNest:
    """Return a copy as a nest of parallel loops; the axes of more than one element correspond in their order."""
    extents = [[n for n in x.extent if n != 1] for x in (source, target)]
    if extents[0] != extents[1]:
        raise refused(
            line,
            f"T.copy reads {list(source.extent)} elements and writes {list(target.extent)}; both need the same sizes",
        )
    axes = tuple((f"#{i}", n) for i, n in enumerate(extents[0]))

    def indices(x: BufferPart) -> tuple[Expression, ...]:
        names, found = iter(axes), list[Expression]()
        for first, n in zip(x.start, x.extent, strict=True):
            moved = Variable(next(names)[0]) if n != 1 else Literal(0)
            found.append(moved if first == Literal(0) else first if n == 1 else Applied("+", (first, moved)))
        return tuple(found)

    value = BufferElement(source.buffer, indices(source))
    return ParallelNest(axes, (Elementwise(axes, target.buffer, indices(target), value, None, line),), line)
