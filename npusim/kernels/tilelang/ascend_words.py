"""The words of TileLang-Ascend as statements on tiles: copies, products, vector instructions, reductions.

A vector instruction treats its operands as rows of numbers: parts of one size and shape correspond element by element.
Each word adds its statements to those read so far; flags and barriers do not affect values, and add no statement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.kernels.tilelang.ascend_values import (
    TracedBuffer,
    TracedCondition,
    TracedElement,
    TracedPart,
    TracedValue,
    axes_of,
    expression_of,
    indices_in,
    moved,
    size_of,
)
from npusim.kernels.tilelang.statements import (
    FLOATS,
    Applied,
    BoundValue,
    BufferElement,
    BufferPart,
    CrossFlag,
    Elementwise,
    Expression,
    Literal,
    MatrixProduct,
    ParallelNest,
    Statement,
    TileBuffer,
    TileReduction,
    Variable,
    written_tiles,
)
from npusim.kernels.tilelang.ttir_writer import BY_ITSELF, part_as_nest

if TYPE_CHECKING:
    from npusim.kernels.tilelang.ascend_text import AscendReader

#: Words that allocate a tile.
SPACES = frozenset({"alloc_shared", "alloc_fragment", "alloc_L1", "alloc_ub", "alloc_L0A", "alloc_L0B", "alloc_L0C"})
#: Words without an effect on values: flags, barriers, places of buffers, messages.
QUIET = frozenset(
    {"set_flag", "wait_flag", "barrier_all", "pipe_barrier", "annotate_layout"}
    | {"printf", "print", "dump_tensor", "device_assert"}
)
#: Vector instructions of two operands, and vector instructions of one operand.
_OF_TWO = MappingProxyType(
    {"add": "+", "sub": "-", "mul": "*", "div": "/", "max": "max", "min": "min"}
    | {"bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_lshift": "<<", "bitwise_rshift": ">>"}
)
_OF_ONE = MappingProxyType({"exp": "exp", "ln": "log", "abs": "fabs", "sqrt": "sqrt", "rsqrt": "rsqrt"})
_BY_ROWS = MappingProxyType(
    {
        f"row_expand_{word}{end}": sign
        for word, sign in (("mul", "*"), ("sub", "-"), ("div", "/"))
        for end in ("", "_experiment")
    }
)
#: Modes of a choice by one bit per element.
_SELECTS = ("VSEL_TENSOR_SCALAR_MODE", "VSEL_TENSOR_TENSOR_MODE")
_COMPARISONS = MappingProxyType({name.upper(): name for name in ("eq", "ne", "lt", "le", "gt", "ge")})
#: Modes of a cast to whole numbers, and the function that is applied before the cast.
_TO_INTEGERS = MappingProxyType(
    {"CAST_TRUNC": "", "CAST_RINT": "rint", "CAST_NONE": "rint", "CAST_FLOOR": "floor", "CAST_CEIL": "ceil"}
)
#: Words of a scalar expression.
_NUMBERS = MappingProxyType(
    {"exp": "exp", "exp2": "exp2", "log": "log", "log2": "log2", "sqrt": "sqrt", "rsqrt": "rsqrt"}
)
_ZERO, _ONE = Literal(0.0, "float32"), Literal(1.0, "float32")

Operand = TracedBuffer | TracedPart | TracedElement


class AscendWords:
    """The words that a kernel's text calls; a word that has no counterpart is refused at its line."""

    def __init__(self, reader: AscendReader) -> None:
        self.reader, self.tile = reader, TileWords(self)
        self._masks = dict[TileBuffer, tuple[TileBuffer, BufferPart]]()

    def word(self, name: str) -> object:
        """Return a word of the language."""
        if name in SPACES:
            return lambda shape, dtype="float32", *_, **__: self.reader.allocated(name, shape, str(dtype))
        if name in QUIET:
            return self.quiet(name)
        if name == "tile":
            return self.tile
        if name.startswith("reduce_"):
            return lambda *a, **k: self.reduction(name.removeprefix("reduce_"), *a, **k)
        if name in _NUMBERS:
            return lambda x: self.function(_NUMBERS[name], x)
        own = getattr(self, f"word_{name}", None)
        if own is None:
            raise self.reader.refuse(f"npusim has no rule for T.{name}")
        return own

    def quiet(self, name: str) -> Callable[..., None]:
        """Return a word that adds no statement; a note says that npusim does not model its time."""
        if name not in ("printf", "print", "dump_tensor", "device_assert"):
            self.reader.quiet[name] += 1
        return lambda *_, **__: None

    def function(self, word: str, x: object) -> object:
        """Return a function of a number of the kernel, or of the text."""
        if isinstance(x, TracedValue):
            return TracedValue(Applied(word, (x.expression,)), self.reader.refuse)
        return {"exp2": lambda v: 2.0**v, "rsqrt": lambda v: 1 / math.sqrt(v)}.get(word, getattr(math, word, None))(x)  # type: ignore[misc]

    # ------------------------------------------------------------ operands
    def part(self, x: object) -> BufferPart:
        """Return an operand as a part of a buffer."""
        if not isinstance(x, TracedBuffer | TracedPart | TracedElement):
            raise self.reader.refuse(f"the operand {x!r:.60} is neither a buffer nor a part of one")
        return x.part

    def add(self, *statements: Statement) -> None:
        """Add statements to those read so far; if a statement overwrites a buffer of bits, its bits are no longer the
        result of a comparison.
        """
        for tile in written_tiles(statements):
            self._masks.pop(tile, None)
        self.reader.add(*statements)

    def assign(self, target: object, value: Callable[[tuple[tuple[str, int], ...]], Expression]) -> None:
        """Add an assignment of each element of a part; ``value`` returns the expression under parallel loops."""
        part = self.part(target)
        axes, line = axes_of(part.extent), self.reader.line
        result = Elementwise(axes, part.buffer, indices_in(part, axes), value(axes), None, line)
        self.add(ParallelNest(axes, (result,), line))

    def operand(self, x: object, target: object) -> Callable[[tuple[tuple[str, int], ...]], Expression]:
        """Return an operand of a vector instruction under the parallel loops of its target."""
        if not isinstance(x, TracedBuffer | TracedPart | TracedElement):
            number = self.number(x)
            return lambda _axes: number
        part, shape = self.part(x), self.part(target).extent
        own, wanted = ([n for n in e if n != 1] for e in (part.extent, shape))
        if isinstance(x, TracedElement):
            element = self.read_before(x, target)
            return lambda _axes: element
        if own != wanted:
            said = f"{part.buffer.name} has {list(part.extent)} elements, but the target has {list(shape)}"
            raise self.reader.refuse(f"a vector instruction has operands of several shapes: {said}")
        return lambda axes: BufferElement(part.buffer, indices_in(part, axes))

    def read_before(self, x: TracedElement, target: object) -> Expression:
        """Return an element that an instruction reads as a number; it is read before the instruction writes its
        tile.
        """
        if x.buffer.tile is not self.part(target).buffer:
            return x.expression
        name = self.reader.fresh("number")
        self.reader.add(BoundValue(name, x.expression, self.reader.line))
        return Variable(name)

    def number(self, x: object) -> Expression:
        """Return an operand that is a number."""
        try:
            return expression_of(x)
        except TypeError as error:
            raise self.reader.refuse(str(error)) from None

    # ------------------------------------------------------------ words of the language
    def word_set_cross_flag(self, _pipe: object, number: object, mode: object = 2) -> None:
        """A flag for the cores of the other kind."""
        self.cross(number, mode, is_wait=False)

    def word_wait_cross_flag(self, number: object, _pipe: object = "") -> None:
        """A wait for the cores of the other kind."""
        self.cross(number, 2, is_wait=True)

    def cross(self, number: object, mode: object, *, is_wait: bool) -> None:
        """Add a flag between the cores of a group."""
        if not isinstance(number, int) or mode != 2:
            raise self.reader.refuse("a flag between cores needs mode=2, and a number that is known before the run")
        self.quiet("wait_cross_flag" if is_wait else "set_cross_flag")
        self.add(CrossFlag(number, is_wait, self.reader.line))

    def word_use_swizzle(self, panel: object, *more: object, **_: object) -> object:
        """Choose another order of the blocks; numbers, which the order may also permute, are unchanged."""
        if isinstance(panel, TracedValue):
            self.reader.notes[f"{self.reader.line}: npusim ignores T.use_swizzle, an order of the blocks"] = None
            return panel
        if more and not isinstance(more[0], str):
            raise self.reader.refuse("T.use_swizzle needs a constant")
        self.reader.notes[f"{self.reader.line}: T.use_swizzle({panel}) changes only the time; npusim ignores it"] = None
        return None

    def word_func_attr(self, attributes: Mapping[str, object]) -> None:
        """Attributes of the kernel; an attribute that may change values is refused."""
        if unknown := [n for n in attributes if n not in ("enable_auto_sync", "use_swizzle")]:
            raise self.reader.refuse(f"T.func_attr: npusim has no rule for {unknown[0]}")

    def condition(self, x: object) -> TracedCondition | bool:
        """Return an operand as a condition of the kernel, or of the text."""
        x = x != 0 if isinstance(x, TracedValue) else x
        return x if isinstance(x, TracedCondition) else bool(x)

    def joined(self, word: str, *operands: object) -> TracedCondition | bool:
        """Return conditions joined by ``and`` or ``or``."""
        result: TracedCondition | bool = word == "and"
        for x in map(self.condition, operands):
            if isinstance(result, bool):
                result = x if result is (word == "and") else result
            elif isinstance(x, bool):
                result = result if x is (word == "and") else x
            else:
                result = result.joined(word, x)
        return result

    def word_And(self, *operands: object) -> TracedCondition | bool:
        """Whether all conditions hold."""
        return self.joined("and", *operands)

    def word_Or(self, *operands: object) -> TracedCondition | bool:
        """Whether one of the conditions holds."""
        return self.joined("or", *operands)

    def word_Not(self, operand: object) -> TracedCondition | bool:
        """Whether a condition does not hold."""
        x = self.condition(operand)
        return x.negation() if isinstance(x, TracedCondition) else not x

    def word_annotate_address(self, addresses: Mapping[TracedBuffer, int]) -> None:
        """Bytes at which buffers begin."""
        self.reader.addresses |= addresses

    def word_copy(
        self,
        source: object,
        target: object,
        *more: object,
        enable_relu: object = False,
        transpose: object = False,
        pad_value: object = None,
        coalesced_width: object = None,
    ) -> None:
        """A copy; if an operand is one element, it represents the block that begins there and has the size of the other
        part.
        """
        if more or isinstance(pad_value, TracedValue):
            raise self.reader.refuse("T.copy has a pad_value= that is known only at run time")
        if transpose:
            self.tile.transpose(target, source)
            return
        a, b = self.sized(source, target), self.sized(target, source)
        if a.buffer.is_global and b.buffer.is_global:
            raise self.reader.refuse("a copy from one tensor to another is not supported")
        if (longer := self.lengthened(a, b, pad_value)) is not None:
            self.add(longer)
            return
        nest = part_as_nest(a, b, self.reader.line)
        if enable_relu:
            (x,) = nest.body
            assert isinstance(x, Elementwise)
            value: Expression = Applied("max", (x.value, _ZERO))
            nest = ParallelNest(nest.axes, (replace(x, value=value),), nest.line)
        if pad_value not in (None, 0, 0.0) and a.buffer.is_global:
            (x,) = nest.body
            assert isinstance(x, Elementwise)
            nest = ParallelNest(nest.axes, (replace(x, value=_padded(x.value, self.number(pad_value))),), nest.line)
        self.add(nest)

    def lengthened(self, a: BufferPart, b: BufferPart, pad: object) -> ParallelNest | None:
        """Return a copy of a row of a tensor to a longer row of a tile, whose other elements are equal numbers; None
        for other copies.
        """
        lines = [[n for n in x.extent if n != 1] for x in (a, b)]
        have, (wanted, *_) = math.prod(lines[0]), lines[1] or [1]
        if pad is None or not a.buffer.is_global or max(map(len, lines)) > 1 or have >= wanted:
            return None
        axes = axes_of(b.extent)
        last = max((i for i, n in enumerate(a.extent) if n != 1), default=len(a.extent) - 1)
        at = tuple(moved(x, Variable(axes[0][0])) if i == last else x for i, x in enumerate(a.start))
        is_inside = Applied("lt", (Variable(axes[0][0]), Literal(have)))
        value = Applied("select", (is_inside, BufferElement(a.buffer, at), self.number(pad)))
        result = Elementwise(axes, b.buffer, indices_in(b, axes), value, None, self.reader.line)
        return ParallelNest(axes, (result,), self.reader.line)

    def sized(self, x: object, other: object) -> BufferPart:
        """Return an operand of a copy as a part."""
        part = self.part(x)
        if not isinstance(x, TracedElement) or isinstance(other, TracedElement):
            return part
        extent = self.part(other).extent[-len(part.extent) :]
        return BufferPart(part.buffer, part.start, (1,) * (len(part.extent) - len(extent)) + extent)

    def word_gemm_v0(
        self,
        a: object,
        b: object,
        c: object,
        transpose_A: object = False,
        transpose_B: object = False,
        init: object = False,
    ) -> None:
        """``c += a @ b``; ``init``: c is 0 before."""
        parts = [self.part(x) for x in (a, b, c)]
        shapes = [p.extent[-2:] for p in parts]
        for p in parts:
            if len(p.extent) < 2 or any(n != 1 for n in p.extent[:-2]):
                raise self.reader.refuse(
                    f"a product reads {list(p.extent)} elements of {p.buffer.name}, which is not a matrix"
                )
        turned = bool(transpose_A), bool(transpose_B)
        (m, k), (l, n) = (s[::-1] if t else s for s, t in zip(shapes, turned, strict=False))
        if k != l or shapes[2] != (m, n):
            said = f"a product of {m} x {k} and {l} x {n} does not fit {shapes[2][0]} x {shapes[2][1]}"
            raise self.reader.refuse(f"a product of {said} is not supported")
        clears = self.number(bool(init) if isinstance(init, int) else init)
        if parts[0].buffer is parts[1].buffer:
            self.reader.notes[f"{self.reader.line}: {BY_ITSELF}"] = None
        self.add(MatrixProduct(parts[0], parts[1], parts[2], turned, clears, self.reader.line))

    word_gemm_v1 = word_gemm_v0

    def word_mma(self, a: object, b: object, c: object, init: object = False) -> None:
        """A product of tiles in the buffers of the matrix unit."""
        self.word_gemm_v0(a, b, c, init=init)

    def reduction(
        self,
        word: str,
        source: object,
        target: object,
        dim: object = -1,
        *more: object,
        clear: object = True,
        real_shape: object = None,
    ) -> None:
        """A reduction along an axis."""
        if word not in ("sum", "max", "min"):
            raise self.reader.refuse(
                f"npusim has no rule for T.reduce_{word}: it has rules for sums, maxima and minima"
            )
        if len(more) > 1 or real_shape is not None or not isinstance(dim, int):
            why = f"T.reduce_{word} has real_shape=, or a temporary buffer between its operands: "
            raise self.reader.refuse(f"{why}npusim supports T.reduce_{word}(source, target, dim, clear=)")
        a, b = self.part(source), self.part(target)
        if not -len(a.extent) <= dim < len(a.extent):
            raise self.reader.refuse(f"T.reduce_{word} runs along axis {dim} of a part with {len(a.extent)} axes")
        axis, clears = dim % len(a.extent), bool(more[0] if more else clear)
        left = [n for i, n in enumerate(a.extent) if i != axis and n != 1]
        if left != [n for n in b.extent if n != 1]:
            raise self.reader.refuse(
                f"T.reduce_{word} of {list(a.extent)} along axis {axis} does not have the shape {list(b.extent)} "
                "of its target"
            )
        self.add(TileReduction(a, b, word, axis, clears, self.reader.line))

    def word_clear(self, target: object) -> None:
        """A tile of zeros."""
        self.tile.word_fill(target, 0.0)

    def word_fill(self, target: object, value: object) -> None:
        """A tile of equal numbers."""
        self.tile.word_fill(target, value)

    def word_ceildiv(self, a: object, b: object) -> object:
        """A quotient rounded up."""
        if isinstance(a, TracedValue) or isinstance(b, TracedValue):
            return (a + b - 1) // b  # type: ignore[operator]
        return -(-a // b)  # type: ignore[operator]

    def word_if_then_else(self, condition: object, a: object, b: object) -> object:
        """Return one of two numbers, which the condition selects."""
        if not isinstance(condition, TracedCondition):
            return a if condition else b
        result = Applied("select", (condition.expression, self.number(a), self.number(b)))
        return TracedValue(result, self.reader.refuse)

    word_Select = word_if_then_else

    def word_infinity(self, _fmt: object) -> float:
        """Infinity."""
        return math.inf

    def extreme(self, word: str, a: object, b: object) -> object:
        """Return the smaller or larger of two numbers."""
        if isinstance(a, TracedValue) or isinstance(b, TracedValue):
            return TracedValue(Applied(word, (self.number(a), self.number(b))), self.reader.refuse)
        return {"min": min, "max": max}[word](a, b)  # type: ignore[call-overload]

    def word_min(self, a: object, b: object) -> object:
        """The smaller of two numbers."""
        return self.extreme("min", a, b)

    def word_max(self, a: object, b: object) -> object:
        """The larger of two numbers."""
        return self.extreme("max", a, b)

    def word_cast(self, x: object, fmt: object) -> TracedValue:
        """A number in another format."""
        return TracedValue(Applied("cast", (self.number(x),), self.reader.format(str(fmt))), self.reader.refuse)

    # ------------------------------------------------------------ masks of compared elements
    def masked(self, mask: TracedBuffer, of: BufferPart) -> TileBuffer:
        """Return the tile of conditions that a buffer of bits represents."""
        name = f"{mask.tile.name}_bits"
        result = TileBuffer(self.reader.fresh(name), tuple(n for n in of.extent if n != 1), "bool")
        known = self._masks.get(mask.tile)
        if known is not None and known[0].shape == result.shape:
            result = known[0]
        self._masks[mask.tile] = result, of
        return result

    def mask(self, x: object, of: BufferPart) -> TileBuffer:
        """Return the conditions of a buffer of bits, one for each element of a part."""
        found = self._masks.get(x.tile) if isinstance(x, TracedBuffer) else None
        if found is None or found[0].shape != tuple(n for n in of.extent if n != 1):
            raise self.reader.refuse(
                "the mask of a T.tile.select must come from a T.tile.compare with as many elements"
            )
        return found[0]


class TileWords:
    """``T.tile``: vector instructions."""

    def __init__(self, words: AscendWords) -> None:
        self._words = words

    def __getattr__(self, name: str) -> Callable[..., None]:
        words = self._words
        if name in _OF_TWO:
            return lambda target, a, b: self._computed(target, _OF_TWO[name], a, b)
        if name in _OF_ONE:
            return lambda target, a: self._computed(target, _OF_ONE[name], a)
        if name in _BY_ROWS:
            return lambda target, a, b, *_: self._by_rows(target, _BY_ROWS[name], a, b)
        raise words.reader.refuse(f"npusim has no rule for T.tile.{name}")

    def _computed(self, target: object, word: str, *sources: object) -> None:
        operands = [self._words.operand(x, target) for x in sources]
        self._words.assign(target, lambda axes: Applied(word, tuple(o(axes) for o in operands)))

    def _made(self, target: object, source: object, made: Callable[[Expression], Expression]) -> None:
        operand = self._words.operand(source, target)
        self._words.assign(target, lambda axes: made(operand(axes)))

    def _by_rows(self, target: object, word: str, a: object, b: object) -> None:
        """A number for each row."""
        words, wide = self._words, self._words.part(target)
        rows, operand = words.part(b), words.operand(a, target)
        if [n for n in rows.extent if n != 1] != [n for n in wide.extent if n != 1][:1] or len(
            axes_of(wide.extent)
        ) != 2:
            raise words.reader.refuse(
                f"{list(rows.extent)} numbers do not match the rows of {list(wide.extent)} elements"
            )
        words.assign(
            target, lambda axes: Applied(word, (operand(axes), BufferElement(rows.buffer, indices_in(rows, axes[:1]))))
        )

    def word_fill(self, target: object, value: object) -> None:
        """A part of equal numbers."""
        fmt = self._words.part(target).buffer.fmt
        if isinstance(value, TracedBuffer) and size_of(value.part) == 1:  # a number in a buffer
            value = value[(0,) * len(value.shape)]
        number = self._words.number(value)
        if isinstance(value, TracedElement):
            number = self._words.read_before(value, target)
        if isinstance(number, Literal):
            number = Literal(float(number.value) if fmt in FLOATS else number.value, fmt)
        self._words.assign(target, lambda _axes: number)

    fill = word_fill

    def clear(self, target: object) -> None:
        """A part of zeros."""
        self.word_fill(target, 0.0)

    def atomic_add(self, target: object, source: object) -> None:
        """An addition of a tile to elements of a tensor, to which other cores also add."""
        words = self._words
        a, b = words.sized(source, target), words.sized(target, source)
        nest = part_as_nest(a, b, words.reader.line)
        added = (replace(x, is_added=True) for x in nest.body if isinstance(x, Elementwise))
        words.add(replace(nest, body=tuple(added)))

    def reciprocal(self, target: object, source: object) -> None:
        """1 / x."""
        self._made(target, source, lambda x: Applied("/", (_ONE, x)))

    def relu(self, target: object, source: object) -> None:
        """The larger of x and 0."""
        self._made(target, source, lambda x: Applied("max", (x, _ZERO)))

    def leaky_relu(self, target: object, source: object, slope: object) -> None:
        """Each element, multiplied by a number if the element is negative."""
        by = self._words.number(slope)
        self._made(target, source, lambda x: Applied("select", (Applied("ge", (x, _ZERO)), x, Applied("*", (x, by)))))

    def sigmoid(self, target: object, source: object) -> None:
        """1 / (1 + exp(-x))."""
        self._made(target, source, _sigmoid)

    def silu(self, target: object, source: object) -> None:
        """X / (1 + exp(-x))."""
        self._made(target, source, lambda x: Applied("*", (x, _sigmoid(x))))

    def clamp(self, target: object, source: object, low: object, high: object, count: object) -> None:
        """X between two numbers."""
        words = self._words
        self._counted("clamp", target, count)
        a, b = words.number(low), words.number(high)
        self._made(target, source, lambda x: Applied("min", (Applied("max", (x, a)), b)))

    def axpy(self, target: object, source: object, by: object) -> None:
        """``target += source * by``."""
        own, factor = self._words.operand(target, target), self._words.number(by)
        x = self._words.operand(source, target)
        self._words.assign(target, lambda axes: Applied("+", (Applied("*", (x(axes), factor)), own(axes))))

    def mul_add_dst(self, target: object, a: object, b: object) -> None:
        """``target += a * b``."""
        own, x, y = (self._words.operand(z, target) for z in (target, a, b))
        self._words.assign(target, lambda axes: Applied("+", (Applied("*", (x(axes), y(axes))), own(axes))))

    def cast(self, target: object, source: object, mode: object, count: object) -> None:
        """A cast that rounds to the nearest number, or, for whole numbers, by its mode."""
        words = self._words
        fmt, old = words.part(target).buffer.fmt, words.part(source).buffer.fmt
        self._counted("cast", target, count)
        to_integer = fmt not in FLOATS and old in FLOATS
        allowed = _TO_INTEGERS if to_integer else {"CAST_NONE": "", "CAST_RINT": ""}
        if mode not in allowed:
            said = f"T.tile.cast from {old} to {fmt} with {mode}; allowed: {', '.join(sorted(allowed))}"
            raise words.reader.refuse(said)
        word = allowed[str(mode)]
        self._made(target, source, lambda x: Applied(word, (x,)) if word else x)

    def round(self, target: object, source: object, count: object = None) -> None:
        """The nearest whole number; halves round to even."""
        if count is not None:
            self._counted("round", target, count)
        self._made(target, source, lambda x: Applied("rint", (x,)))

    def _counted(self, name: str, target: object, count: object) -> None:
        if count != size_of(self._words.part(target)):
            raise self._words.reader.refuse(
                f"T.tile.{name} has {count!r} elements, but its target has a different number"
            )

    def broadcast(self, target: object, source: object, axis: int | None = None) -> None:
        """Equal rows or columns."""
        words = self._words
        wide, thin = words.part(target), words.part(source)
        if (shapes := [list(wide.extent[-2:]), list(thin.extent[-2:])])[0] == shapes[1]:
            self._made(target, source, lambda x: x)
            return
        if len(shapes[1]) == 1 and len(shapes[0]) == 2:
            is_row = axis == 0 or (axis is None and shapes[0][1] == shapes[1][0])
            shapes[1] = [1, *shapes[1]] if is_row else [*shapes[1], 1]
        at = [i for i, (a, b) in enumerate(zip(*shapes, strict=False)) if a != b]
        if len(shapes[0]) != len(shapes[1]) or len(at) != 1 or shapes[1][at[0]] != 1:
            raise words.reader.refuse(
                f"T.tile.broadcast from {list(thin.extent)} to {list(wide.extent)} is not supported"
            )
        if axis is not None and axis != at[0]:
            raise words.reader.refuse(
                f"T.tile.broadcast from {list(thin.extent)} to {list(wide.extent)} along axis {axis} is not supported"
            )

        def element(axes: tuple[tuple[str, int], ...]) -> Expression:
            remaining = [
                a for i, a in zip([i for i, n in enumerate(shapes[0]) if n != 1], axes, strict=True) if i != at[0]
            ]
            return BufferElement(thin.buffer, indices_in(thin, tuple(remaining)))

        words.assign(target, element)

    def transpose(self, target: object, source: object) -> None:
        """A transposed matrix."""
        words = self._words
        a, b = words.part(source), words.part(target)
        if len(axes_of(a.extent)) != 2 or [n for n in a.extent if n != 1] != [n for n in b.extent if n != 1][::-1]:
            raise words.reader.refuse(
                f"T.tile.transpose from {list(a.extent)} elements to {list(b.extent)} is not supported"
            )
        words.assign(target, lambda axes: BufferElement(a.buffer, indices_in(a, axes[::-1])))

    def arith_progression(self, target: object, first: object, step: object, count: object) -> None:
        """First, first + step, ..."""
        words = self._words
        self._counted("arith_progression", target, count)
        a, b = words.number(first), words.number(step)
        if len(axes := axes_of(words.part(target).extent)) != 1:
            raise words.reader.refuse("T.tile.arith_progression writes several rows; only one is supported")
        words.assign(target, lambda _axes: Applied("+", (a, Applied("*", (Variable(axes[0][0]), b)))))

    def createvecindex(self, target: object, first: object) -> None:
        """First, first + 1, ..."""
        self.arith_progression(target, first, 1, size_of(self._words.part(target)))

    def compare(self, target: object, a: object, b: object, mode: str) -> None:
        """Bits of a comparison."""
        words, part = self._words, self._words.part(a)
        if not isinstance(target, TracedBuffer) or mode not in _COMPARISONS:
            raise words.reader.refuse(
                f"T.tile.compare with mode {mode!r} that writes a part of a buffer is not supported"
            )
        result = TracedBuffer(words.masked(target, part), "bits", words.reader.refuse)
        self._computed(result, _COMPARISONS[mode], a, b)

    def select(self, target: object, mask: object, a: object, b: object, mode: str) -> None:
        """Elements of a if bits are set, else of b."""
        words = self._words
        if mode not in _SELECTS:
            why = f"T.tile.select has the mode {mode!r}, which does not have one bit for each element"
            raise words.reader.refuse(f"{why}; allowed: {', '.join(_SELECTS)}")
        bits = TracedBuffer(words.mask(mask, words.part(target)), "bits", words.reader.refuse)
        self._computed(target, "select", bits, a, b)


def _padded(value: Expression, pad: Expression) -> Expression:
    """Return an element of a tensor, or a number where its indices are outside of the tensor."""
    assert isinstance(value, BufferElement)
    rules = [
        Applied("lt", (index, Literal(n)))
        for index, n in zip(value.indices, value.buffer.shape, strict=True)
        if index != Literal(0)
    ]
    whole: Expression | None = None
    for rule in rules:
        whole = rule if whole is None else Applied("and", (whole, rule))
    return value if whole is None else Applied("select", (whole, value, pad))


def _sigmoid(x: Expression) -> Expression:
    return Applied("/", (_ONE, Applied("+", (_ONE, Applied("exp", (Applied("-", (_ZERO, x)),))))))
