"""From TTIR to a kernel of tiles: integers and pointers are evaluated, floats written in the language of kernels.

What comes out is source in that language with the user's own names, each statement at the line of the user's kernel, so
that what is wrong with it is said there.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, count, repeat
from types import MappingProxyType
from typing import Any

import numpy as np

from npusim.errors import ProgramError
from npusim.formats import cast
from npusim.ttir.rolled import REDUCTIONS, rolled
from npusim.ttir.text import FORMATS, Function, Line, Op, refusing, shape_of
from npusim.ttir.values import (
    COLUMNS,
    RELATIONS,
    ROWS,
    Affine,
    Condition,
    Floats,
    Integers,
    Known,
    Number,
    Tensor,
    bound_of,
    constant,
    float_of,
    integers,
    literal,
    reshaped,
)

_BINARY = MappingProxyType(
    {"addf": "+", "subf": "-", "mulf": "*", "divf": "/", "maxnumf": "maximum", "maximumf": "maximum"}
)
_NUMBERS: Mapping[str, Any] = MappingProxyType(
    {"+": operator.add, "-": operator.sub, "*": operator.mul, "maximum": max}
    | {"/": lambda a, b: a / b if b else math.nan}
)


def _root(x: float) -> float:
    return math.sqrt(x) if x >= 0 else math.nan


#: How functions are written, and what they make of a number; those of `Choices` by its fields.
_UNARY: Mapping[str, tuple[str, Callable[[float], float]]] = MappingProxyType(
    {
        "math.exp2": ("exp2", lambda x: 2.0**x),
        "math.exp": ("exp", math.exp),
        "math.log2": ("log({}, 'log2.correct')", lambda _: math.nan),
        "math.log": ("log({})", lambda _: math.nan),
        "math.rsqrt": ("rsqrt({})", lambda x: 1 / math.sqrt(x) if x > 0 else math.nan),
        "tt.precise_sqrt": ("sqrt({})", _root),
        "math.erf": ("erf", math.erf),
        "math.absf": ("maximum({0}, -{0})", abs),
        "arith.negf": ("(-{})", lambda x: -x),
    }
)
#: Operations that are refused, and what to do instead.
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "tt.atomic": "atomics: let each program store its part, and add the parts in a kernel of its own",
        "tt.elementwise_inline_asm": "inline assembly: write it in Triton's language",
        "tt.gather": "a gather by loaded indices: give tables of pages as data of the problem (--page)",
        "scf.while": "a loop whose end hangs on data: bound it by sizes",
        "arith.cmpf": "a comparison of values: tl.maximum takes the larger, tl.where a mask of indices",
    }
)
_IGNORED = ("llvm.intr.assume", "tt.assert", "gpu.barrier", "tt.return", "scf.yield")
_SAME = ("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "tt.bitcast")
#: Numbers of a row may be any: what two of them give alike is known.
_STAND_INS = (0.7, -3.1)
#: Iterations of a program, and of all programs together: the addresses of each are evaluated, 8 bytes each.
MOST_EACH, MOST_TIMES = 1 << 18, 1 << 24
#: Words of the language that a kernel of tiles is written in.
LANGUAGE = ("exp", "log", "rsqrt", "sqrt", "tanh", "erf", "maximum", "where", "tiles", "full", "fma")
#: Names that a kernel of tiles has already.
_WORDS = frozenset({*LANGUAGE, "inf", "mask", "lambda", "out"})


@dataclass(frozen=True)
class Choices:
    """What TTIR leaves open: fresh products in place of chained ones, contraction, how 2^x, e^x, erf and roots
    are written.

    ``orders``: in which each reduction adds, all empty where the precision says it.
    ``is_exact``: all is float64, as a reference.  ``is_apart``: each loop does what it does, on the same tiles.
    """

    is_fresh: bool
    fuses: bool
    exp2: str
    exp: str
    erf: str
    sqrt: str
    orders: tuple[str, ...] = ()
    is_exact: bool = False
    is_apart: bool = False

    def fmt(self, name: str) -> str:
        """Return the format that TTIR calls by a name."""
        return "float64" if self.is_exact else FORMATS[name]


class UnlikeLoopsError(ProgramError):
    """A loop does other than the one before it, or not alike: one contracts where the other has a mask between."""


@dataclass
class Load:
    """One tensor as the kernel reads it; ``left``: elements along each axis that its mask leaves.

    ``dims``: which of the tensor's axes each is, its rows or columns; of those of size 1 the other.
    """

    name: str
    of: str
    pointer: Affine
    axes: tuple[str | None, ...]
    left: list[Integers]
    is_walked: bool
    line: Line
    dims: tuple[int, ...]


@dataclass
class Walk:
    """A loop over tiles: iterations of each program, its statements, and comparisons that mask scores.

    ``at``: statements of the kernel before it; ``loads``, ``states``: what it walks, and what begins with it.
    ``is_sum``: it only adds up what a matrix unit begins anew for each block: one product of all tiles stands for it.
    """

    counts: Integers
    at: int
    loads: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    lines: list[tuple[str, Line]] = field(default_factory=list)
    masks: list[tuple[str, Affine]] = field(default_factory=list)
    is_sum: bool = False

    @property
    def most(self) -> int:
        """Iterations of the program that has most; 2 where no program has more than one: where a second would be."""
        return max(2, int(self.counts.max()))


@dataclass
class Stored(Load):
    """What is stored, and where; ``is_walked``: tile by tile, in a loop."""

    value: Floats


def read_launch(function: Function, arguments: Mapping[str, Any], grid: tuple[int, ...], choices: Choices) -> Reader:
    """Return a kernel at a launch; of loops that are alike but for a mask none contracts, others are apart."""
    ways: tuple[dict[str, Any], ...] = ({}, {"fuses": False}, {"is_apart": True})
    operations = function.operations
    function = function._replace(operations=rolled(operations))
    for how in ways:
        with suppress(UnlikeLoopsError):
            reader = Reader(function, arguments, grid, replace(choices, **how))
            break
    if "fuses" in how:
        why = "of two loops that without a mask contracts multiplications and additions; here neither does"
        reader.notes.append(f"{function.name}: {why}")
    if function.operations is not operations:
        reader.notes.append(f"{function.name}: sums over rows go from the first to the last; compiled ones may not")
    return reader


class Reader:
    """One kernel at one launch, read from its operations."""

    def __init__(
        self, function: Function, arguments: Mapping[str, Any], grid: tuple[int, ...], choices: Choices
    ) -> None:
        self.function, self.arguments, self.grid, self.choices = function, arguments, grid, choices
        ids = np.stack([x.ravel() for x in np.meshgrid(*map(np.arange, grid), indexing="ij")], 1)
        self.ids = ids[np.lexsort(ids.T)].astype(np.int64)  # the first runs fastest
        self.values: dict[str, Known] = {}
        self.lines: list[tuple[str, Line]] = []
        self.loads: dict[str, Load] = {}
        self.stored: list[Stored] = []
        self.numbers: dict[str, float] = {}
        self.states: dict[str, tuple[Number, tuple[str | None, ...], str]] = {}
        self.walks: list[Walk] = []
        self.cuts: set[str | None] = set()
        self.notes: list[str] = []
        self._roots: dict[str, str] = {}
        self._taken: set[str] = set()
        self._at_loop: frozenset[str] = frozenset()  # names taken where the first loop begins
        self._walk: Walk | None = None
        self._uses: dict[str, list[Op]] = {}
        self._reductions: list[Op] = []
        self._count(function.operations)
        known = choices.orders
        if len(known) != len(self._reductions):
            known = known[:1] and ("mma_lanes",)
        orders = chain(known, repeat(known[0] if known else ""))
        self._orders = dict(zip(map(id, self._reductions), orders, strict=False))
        for name, kind in function.parameters.items():
            self.values[name] = self._argument(name, kind)
        for op in function.operations:
            self._do(op)
        if not self.stored:
            raise ProgramError(f"{function.operations[-1].line}: {function.name} stores nothing")
        self.stored.sort(key=lambda x: (not x.is_walked, -len(x.pointer.shape)))  # tiles before vectors of rows
        accessed = [x.pointer.of for x in self.stored] + [x.of for x in self.loads.values()]
        for x in self.stored:
            if accessed.count(x.pointer.of) > 1:
                raise ProgramError(f"{x.line}: {x.pointer.of} is stored to and accessed elsewhere too: give it another")

    # ---------------------------------------------------------------- names, axes

    def _count(self, operations: Sequence[Op]) -> None:
        for op in operations:
            for name in op.operands:
                self._uses.setdefault(name, []).append(op)
            self._reductions += [op] if op.name == "tt.reduce" else []
            self._count(op.body)

    def _argument(self, name: str, kind: str) -> Known:
        value = self.arguments[name]
        if "ptr" in kind:
            return replace(constant(0), of=name)
        if kind.startswith(("f", "bf")):
            self.numbers[name.lower()] = number = float(np.float32(value))
            return Number(number, name.lower())
        return constant(int(value))

    def _axes(self, shape: Sequence[int]) -> tuple[str | None, ...]:
        """Return a new axis for each dimension, None for one of size 1."""
        axes = tuple(f"a{len(self._roots) + i}" if n > 1 else None for i, n in enumerate(shape))
        self._roots |= {a: a for a in axes if a is not None}
        return axes

    def root(self, axis: str | None) -> str | None:
        """Return the axis that stands for all that are the same."""
        while axis is not None and self._roots[axis] != axis:
            axis = self._roots[axis]
        return axis

    def _join(self, one: str | None, other: str | None) -> str | None:
        one, other = self.root(one), self.root(other)
        if one is not None and other is not None and one != other:
            self._roots[other] = one
        return one if one is not None else other

    def _joined(self, *values: Floats) -> tuple[str | None, ...]:
        axes = values[0].axes
        for other in values[1:]:
            axes = tuple(map(self._join, axes, other.axes))
        return axes

    def _unique(self, name: str) -> str:
        base = plain_name(name)
        base = f"{base}_" if base in _WORDS else base
        unique = next(n for n in chain([base], (f"{base}{i}" for i in count(2))) if n not in self._taken)
        self._taken.add(unique)
        return unique

    def _emit(self, text: str, line: Line) -> None:
        (self._walk.lines if self._walk else self.lines).append((text, line))

    def _set(self, op: Op, x: Known) -> None:
        self.values[op.results[0]] = x

    def _bind(self, op: Op, x: Floats, called: str = "") -> None:
        """Bind a value to a name, ``called`` or the user's; one step of an expression of theirs stays part of it."""
        readers, fused = self._uses.get(op.results[0], []), self._fused(op) if x.factors else []
        is_step = len(readers) == 1 and bool(readers[0].results) and readers[0].name not in ("scf.for", "tt.dot")
        is_step = is_step and plain_name(readers[0].results[0]) == plain_name(op.results[0]) and op.name != "tt.reduce"
        self._set(op, x if is_step or (fused and all(fused)) else self._named(op, x, called or op.results[0]))

    def _named(self, op: Op, x: Known, called: str = "") -> Any:
        """Return a value under a name of its own: several expressions may read it."""
        if not isinstance(x, Floats) or (self.text(x).isidentifier() and not called):
            return x
        name = self._unique(called or op.results[0])
        self._emit(f"{name} = {self.text(x)}", op.line)
        return replace(x, text=name, is_product=False)

    def text(self, x: Known) -> str:
        """Return a float as the kernel of tiles writes it."""
        assert isinstance(x, Floats | Number), x
        is_product = isinstance(x, Floats) and x.is_product
        return f"{x.text}.to({self.choices.fmt(x.fmt)!r})" if is_product and isinstance(x, Floats) else x.text

    # ---------------------------------------------------------------- integers

    def _do(self, op: Op) -> None:
        with refusing(op.line, op.name):
            self._operation(op)

    def _operation(self, op: Op) -> None:
        family, _, name = op.name.partition(".")
        if op.name in _IGNORED:
            return
        for refused, why in _REFUSED.items():
            if op.name.startswith(refused):
                raise op.fail(why)
        operands = [] if op.name == "scf.for" else [self.values[n] for n in op.operands]
        method = getattr(self, f"_{family}_{name}", None)
        if family == "arith" and name in _BINARY:
            self._binary(op, _BINARY[name])
        elif op.name in _UNARY:
            text, function = _UNARY[op.name]
            self._function(op, operands[0], getattr(self.choices, text, text), function)
        elif op.name in _SAME:
            self._set(op, operands[0])
        elif method is not None:
            method(op, *operands)
        elif family == "arith" and len(operands) == 2:
            self._integer(op, name, *operands)
        else:
            raise op.fail(f"{op.name} has no counterpart in the language of kernels: {op.text[:80]}")

    def _arith_constant(self, op: Op) -> None:
        text, _, type_ = op.text.removeprefix("arith.constant ").partition(" : ")
        text, (shape, fmt) = text.removeprefix("dense<").removesuffix(">"), shape_of(type_)
        words = {"true": 1, "false": 0}
        if fmt in FORMATS:
            self._set(op, Number(value := float_of(text, fmt), literal(value), shape))
        else:
            self._set(op, constant(words[text] if text in words else int(text), shape))

    def _tt_get_program_id(self, op: Op) -> None:
        self._set(op, Affine(self.ids[:, "xyz".index(op.text.split()[1])][:, None]))

    def _tt_get_num_programs(self, op: Op) -> None:
        self._set(op, constant(self.grid["xyz".index(op.text.split()[1])]))

    def _tt_make_range(self, op: Op) -> None:
        self._set(op, replace(constant(op.number("start"), shape_of(op.type)[0]), steps=(1,)))

    def _tt_splat(self, op: Op, x: Known) -> None:
        shape = shape_of(op.type)[0]
        self._set(op, reshaped(x, shape, lambda _, none: (none,) * len(shape)))

    def _tt_expand_dims(self, op: Op, x: Known) -> None:
        at = op.number("axis")
        self._set(op, reshaped(x, shape_of(op.type)[0], lambda s, none: (*s[:at], none, *s[at:])))

    def _tt_broadcast(self, op: Op, x: Known) -> None:
        self._set(op, reshaped(x, shape_of(op.type)[0], lambda s, _: s))

    def _tt_trans(self, op: Op, x: Known) -> None:
        if not isinstance(x, Floats):
            raise op.fail("a transposed block of integers")
        self._set(op, replace(x, axes=x.axes[::-1], is_transposed=not x.is_transposed))

    def _tt_addptr(self, op: Op, pointer: Affine, offset: Known) -> None:
        self._integer(op, "addi", pointer, offset)

    def _integer(self, op: Op, name: str, a: Known, b: Known) -> None:
        if isinstance(a, Condition) and isinstance(b, Condition) and name == "andi":
            self._set(op, Condition(a.of + b.of))
        elif isinstance(a, Affine) and isinstance(b, Affine):
            self._set(op, integers(op, name, a, b))
        else:
            raise op.fail(f"{op.name} of masks, or of what was loaded: masks are joined by & alone")

    def _arith_cmpi(self, op: Op, a: Affine, b: Affine) -> None:
        self._set(op, Condition(((op.text.split()[1].rstrip(","), integers(op, "subi", a, b)),)))

    # ---------------------------------------------------------------- floats

    def _binary(self, op: Op, how: str) -> None:
        a, b = (self.values[n] for n in op.operands[:2])
        if isinstance(a, Number) and isinstance(b, Number):
            value = _rounded(_NUMBERS[how](a.value, b.value), shape_of(op.type)[1])
            self._set(op, Number(value, f"({a.text} {how} {b.text})" if math.isnan(value) else literal(value), a.shape))
            return
        if how == "*" and self._fused(op):
            a, b = self._named(op, a), self._named(op, b)
        blocks = [x for x in (a, b) if isinstance(x, Floats)]
        if not blocks or not all(isinstance(x, Floats | Number) for x in (a, b)):
            raise op.fail(f"{op.name} of a float that integers make")
        pads = {_NUMBERS[how](_pad(a, other), _pad(b, other)) for other in _STAND_INS}
        pad = pads.pop() if len(pads) == 1 else math.nan
        text = f"maximum({self.text(a)}, {self.text(b)})" if how == "maximum" else self._combined(how, a, b)
        factors = (self.text(a), self.text(b)) if how == "*" else None
        made = Floats(text, self._joined(*blocks), blocks[0].fmt, None if math.isnan(pad) else pad, factors=factors)
        self._bind(op, made)

    def _fused(self, op: Op) -> list[bool]:
        """Return of each reader of a product whether it is an addition that takes it in; none if nothing is fused."""
        readers, fuses = list(self._uses.get(op.results[0], [])), list[bool]()
        while readers and self.choices.fuses:
            reader = readers.pop()
            if reader.name in ("tt.expand_dims", "tt.broadcast"):
                readers += self._uses.get(reader.results[0], [])
            else:
                fuses.append(reader.name in ("arith.addf", "arith.subf"))
        return fuses if any(fuses) else []

    def _combined(self, how: str, a: Known, b: Known) -> str:
        """Return the text of an operation; an addition takes in the first product, as LLVM's NVPTX does."""
        for one, other, form in ((a, b, ", 'minus'"), (b, a, ", 'from'")) if how in "+-" and self.choices.fuses else ():
            if isinstance(one, Floats) and one.factors and one.fmt in ("f32", "f16"):
                return f"fma({', '.join(one.factors)}, {self.text(other)}{form if how == '-' else ''})"
        return f"({self.text(a)} {how} {self.text(b)})"

    def _cast(self, op: Op, x: Known) -> None:
        fmt = shape_of(op.type)[1]
        if isinstance(x, Number):
            value = _rounded(x.value, fmt)
            self._set(op, Number(value, x.text if value == x.value or math.isnan(value) else literal(value), x.shape))
            return
        if not isinstance(x, Floats):
            raise op.fail(f"{op.name} of what is no float")
        how = ", overflow='saturate'" if fmt.startswith("f8") and not self.choices.is_exact else ""
        is_factor = any(o.name == "tt.dot" for o in self._uses.get(op.results[0], []))  # of a product: P of p
        called = x.text.upper() if is_factor and x.text.isidentifier() else ""
        self._bind(op, Floats(f"{self.text(x)}.to({self.choices.fmt(fmt)!r}{how})", x.axes, fmt, x.pad), called)

    def _math_sqrt(self, op: Op, x: Known) -> None:
        is_named = isinstance(x, Floats) and x.fmt == "f32"  # of float64 there is one instruction, IEEE's
        self._function(op, x, self.choices.sqrt if is_named else "sqrt({})", _root)

    _arith_truncf = _arith_extf = _tt_fp_to_fp = _cast

    def _function(self, op: Op, x: Known, text: str, of_pad: Callable[[float], float]) -> None:
        if not isinstance(x, Floats):
            raise op.fail(f"{op.name} of a number: compute it before the launch")
        pad = None if x.pad is None or (math.isinf(x.pad) and "exp" not in op.name) else of_pad(x.pad)
        self._bind(op, Floats(text.format(self.text(x)), x.axes, x.fmt, pad))

    def _tt_extern_elementwise(self, op: Op, *x: Known) -> None:
        known = {"__nv_tanhf": ("tanh({})", math.tanh), "__nv_erff": (self.choices.erf, math.erf)}
        if (symbol := re.findall(r'symbol = "(\w*)"', op.text)[0]) not in known:
            raise op.fail(f"a function of a library, {symbol}; there are {', '.join(known)}")
        self._function(op, x[0], *known[symbol])

    def _arith_sitofp(self, op: Op, x: Known) -> None:
        if not isinstance(x, Affine) or any(x.steps):
            raise op.fail("a float made of a block's indices")
        times = np.arange(x.base.shape[1])[None]
        if self._walk and x.base.shape[1] > 1 and np.array_equal(np.broadcast_to(times, x.base.shape), x.base):
            walked = next(n.name for n in self.loads.values() if n.is_walked)
            self._set(op, Number(math.nan, f"{walked}.index"))
            return
        if np.ptp(x.base):
            raise op.fail("a float of an index that differs between programs")
        value = _rounded(float(x.base.flat[0]), shape_of(op.type)[1])
        self._set(op, Number(value, literal(value)))

    def _tt_reduce(self, op: Op, x: Known) -> None:
        inner = [o.name for o in op.body]
        kind, neutral = REDUCTIONS.get(inner[0] if inner else "", ("", 0.0))
        if not kind or len(inner) != 2 or not isinstance(x, Floats):
            raise op.fail("a reduction other than a sum or a maximum of floats")
        if (axis := x.axes[at := op.number("axis")]) is not None and at != len(x.axes) - 1:
            raise op.fail("a reduction over rows: sums and maxima are along the last axis; transpose what is loaded")
        if self.root(axis) in self.cuts and x.pad != neutral:
            why = f"a {kind} along an axis that a mask cuts, where what is masked is {x.pad or 'not known'}"
            raise op.fail(f"{why}: tl.where(mask, x, {neutral}) before it, or other={neutral} where it is loaded")
        if axis is None:
            self._set(op, replace(x, axes=(*x.axes[:at], *x.axes[at + 1 :]), factors=None))
            return
        order = self._orders[id(op)] if kind == "sum" else ""
        self._bind(op, Floats(f"{self.text(x)}.{kind}({order and repr(order)})", x.axes[:-1], x.fmt))

    def _tt_dot(self, op: Op, a: Known, b: Known, c: Known) -> None:
        if not isinstance(a, Floats) or not isinstance(b, Floats):
            raise op.fail("a product of what is no block of floats")
        if self.root(self._join(a.axes[1], b.axes[0])) in self.cuts and 0.0 not in (a.pad, b.pad):
            raise op.fail("a product along an axis that a mask cuts: other=0.0 where one of its factors is loaded")
        fmt, text = shape_of(op.type)[1], " @ ".join(x.text + ".T" * x.is_transposed for x in (a, b))
        made = Floats(f"({text})", (a.axes[0], b.axes[1]), fmt, 0.0 if b.pad == 0.0 else None, is_product=True)
        if isinstance(c, Number) and not c.value:
            self._bind(op, made)
            return
        if not isinstance(c, Floats):
            raise op.fail("a product added to a number")
        is_sum = self._walk and self._walk.is_sum
        if self.choices.is_fresh and not is_sum:  # a matrix unit that cannot go on from what rows wrote
            text = self._named(op, made, f"{a.text}{b.text.removesuffix('j')}".upper()).text
        self._bind(op, Floats(f"({c.text} + {text})", self._joined(made, c), fmt))

    def _arith_select(self, op: Op, mask: Known, a: Known, b: Known) -> None:
        if not isinstance(mask, Condition) or not isinstance(b, Floats | Number):
            raise op.fail("tl.where of other than a mask of indices, a block and a number")
        relation, d = mask.of[0]
        is_first = len(mask.of) == 1 and relation == "eq" and not any(d.steps) and d.base.shape[1] > 1
        if is_first and isinstance(b, Floats) and not d.base[:, 0].any() and d.base[:, 1:].all():
            self.notes.append(f"{op.line}: what is chosen for the first tile is taken to be what start values give")
            self._bind(op, b)
            return
        if not isinstance(b, Number) or not isinstance(a, Floats):
            raise op.fail("tl.where of other than a mask of indices, a block and a number")
        bounds = [bound_of(d, relation) for relation, d in mask.of]
        for bound in filter(None, bounds):
            self.cuts.add(self.root(a.axes[bound[0]]))
            a = replace(a, pad=b.value) if bound[0] == len(a.axes) - 1 else a
        rest = [rule for rule, bound in zip(mask.of, bounds, strict=True) if bound is None]
        self._mask(op, a, b, rest) if rest else self._bind(op, a)

    def _mask(self, op: Op, a: Floats, b: Number, rules: list[tuple[str, Affine]]) -> None:
        if any(len(d.steps) != 2 or r not in RELATIONS for r, d in rules) or self._walk is None:
            raise op.fail("a mask that is no comparison of rows and columns of a tile in a loop")
        if b.value != -math.inf:
            raise op.fail(f"tl.where(mask, x, {b.value}): what a mask of indices hides is -inf")
        if a.text.isidentifier() and len(self._uses[op.operands[1]]) > 1:
            raise op.fail("scores are read after they are masked: read what tl.where returns")
        a = self._named(op, a)
        self._walk.masks += rules
        self._emit(f"{a.text} = where(mask, {a.text}, {b.text})", op.line)
        self._set(op, replace(a, factors=None))

    # ---------------------------------------------------------------- memory

    def _tt_load(self, op: Op, pointer: Known, mask: Known | None = None, other: Known | None = None) -> None:
        if not isinstance(pointer, Affine) or not pointer.shape:
            what = "an address that was loaded" if not isinstance(pointer, Affine) else f"one element of {pointer.of}"
            raise op.fail(f"a load of {what}: give it as an argument, a constexpr, or a table of pages (--page)")
        tensor, fmt = self.arguments[pointer.of], shape_of(op.type)[1]
        assert isinstance(tensor, Tensor)
        dims = self._dims(op, pointer, tensor)
        is_transposed = dims == (COLUMNS, ROWS)
        is_walked, left = self._walk is not None and pointer.base.shape[1] > 1, self._left(op, mask, pointer)
        pad = other.value if isinstance(other, Number) else None
        axes = self._axes(pointer.shape)
        self.cuts |= {a for a, n, some in zip(axes, pointer.shape, left, strict=True) if np.any(some < n)}
        before = next((x for x in self.loads.values() if x.of == pointer.of and x.is_walked and is_walked), None)
        if before and len(self.walks) > 1 and before.pointer.steps == pointer.steps:  # the same in the loop before
            if not self.choices.is_apart:
                before.pointer = replace(before.pointer, base=self._both(before.pointer.base, pointer.base))
                before.left = list(map(self._both, before.left, left))
            elif not all(map(np.array_equal, (before.pointer.base, *before.left), (pointer.base, *left))):
                raise op.fail(f"{pointer.of} is read in other tiles than in the loop before: let both walk the same")
            self.walks[-1].loads.append(before.name)
            self._set(op, Floats(before.name, before.axes, fmt, pad, is_transposed))
            return
        name = self._unique(tensor.name + ("j" if is_walked and self._walk and not self._walk.is_sum else ""))
        self.loads[name] = Load(name, pointer.of, pointer, axes, left, is_walked, op.line, dims)
        if is_walked:
            self.walks[-1].loads.append(name)
        self._set(op, Floats(name, axes, fmt, pad, is_transposed))

    def _both(self, a: Integers, b: Integers) -> Integers:
        """Return what is of one loop and then of the next."""
        each = zip((a, b), self.walks[-2:], strict=True)
        return np.concatenate([np.broadcast_to(x, (len(self.ids), w.most)) for x, w in each], 1)

    @staticmethod
    def _dims(op: Op, pointer: Affine, tensor: Tensor) -> tuple[int, ...]:
        """Return which of a tensor's axes, rows or columns, those of a block are."""
        blocks = list(zip(pointer.steps, pointer.shape, strict=True))
        for dims in {0: ((),), 1: ((COLUMNS,), (ROWS,)), 2: ((ROWS, COLUMNS), (COLUMNS, ROWS))}.get(
            len(pointer.shape), ()
        ):
            sides = [(*block, tensor.steps[d], tensor.shape[d]) for block, d in zip(blocks, dims, strict=True)]
            if all(n == 1 or by == step or by == 0 == whole - 1 for by, n, step, whole in sides):
                return dims
        steps, wanted = [s for s, n in blocks if n > 1], list(tensor.steps[ROWS:])
        raise op.fail(f"{pointer.of} is accessed with strides {steps}; its rows and columns have {wanted}")

    def _left(self, op: Op, mask: Known | None, pointer: Affine) -> list[Integers]:
        """Return how many elements a mask leaves along each axis, for each program and iteration."""
        known = zip(pointer.shape, pointer.limits(), strict=True)
        left = [np.full((1, 1), n, np.int64) if most is None else np.minimum(n, most) for n, most in known]
        left = [x if step else np.minimum(x, 1) for x, step in zip(left, pointer.steps, strict=True)]  # one for all
        for relation, d in mask.of if isinstance(mask, Condition) else ():
            bound = bound_of(d, relation)
            if bound is None and not any(d.steps) and self._walk:  # of a whole tile
                self.cuts.add(None)
                left = [np.where(RELATIONS[relation](d.base, 0), x, 0) for x in left]
                continue
            if bound is None:
                raise op.fail("the mask of a load or store that is no bound of its axes")
            left[bound[0]] = np.minimum(left[bound[0]], bound[1])
        return left

    def _tt_store(self, op: Op, pointer: Known, value: Known, mask: Known | None = None) -> None:
        if not isinstance(pointer, Affine) or not isinstance(value, Floats):
            raise op.fail("a store of what is no block of floats, or to an address that was loaded")
        tensor = self.arguments[pointer.of]
        if self._dims(op, pointer, tensor) == (COLUMNS, ROWS):
            raise op.fail(f"{pointer.of} is stored transposed: tl.trans of what is stored, and pointers as it lies")
        if self._walk:
            self._emit(f"yield {self.text(value)}", op.line)
        self.stored.append(
            Stored(
                name="",
                of=pointer.of,
                pointer=pointer,
                axes=value.axes,
                left=self._left(op, mask, pointer),
                is_walked=bool(self._walk),
                line=op.line,
                dims=(ROWS, COLUMNS),
                value=value,
            )
        )

    # ---------------------------------------------------------------- the loop

    def _scf_if(self, op: Op, condition: Known) -> None:
        rules = condition.of if isinstance(condition, Condition) else ()
        holds = [RELATIONS[r](d.base, 0) for r, d in rules]
        always, never = holds and all(map(np.all, holds)), any(not np.any(h) for h in holds)
        if op.results or not (always or never):
            raise op.fail("an if that not all programs answer alike: let the grid or tl.where decide")
        for inner in op.body if always else ():
            self._do(inner)

    def _scf_for(self, op: Op) -> None:
        if self._walk is not None:
            raise op.fail("a loop in a loop: one loop walks the tiles of a program; let the grid take the outer one")
        number, low, high, step, *carried = op.operands
        bounds = [self.values[n] for n in (low, high, step)]
        first, end, each = (x.base if isinstance(x, Affine) else np.zeros((1, 1), np.int64) for x in bounds)
        if not all(isinstance(x, Affine) for x in bounds):
            raise op.fail("a loop whose end hangs on data: bound it by sizes")
        inner, starts, ends = carried[::2], carried[1::2], op.body[-1].operands if carried else []
        walk = Walk(np.broadcast_to(np.maximum(0, -(-(end - first) // each)), (len(self.ids), 1)), len(self.lines))
        stores = any(o.name == "tt.store" for o in _within(op))
        if stores and self.walks and not self.choices.is_apart:
            raise UnlikeLoopsError
        if stores and not self.walks:
            self._go_through(op, walk.counts[:, 0], first, each)
            return
        zeros = (isinstance(x, Number) and not x.value for x in map(self.values.__getitem__, starts))
        walk.is_sum = self.choices.is_fresh and not self.walks and _is_sum(op, list(zeros))
        if not walk.counts.any():  # no program enters it
            self.values |= {r: self.values[s] for r, s in zip(op.results, starts, strict=True)}
            return
        self._refuse_many(op, walk.most, len(self.ids) * walk.most)
        times = np.arange(walk.most)[None]
        self.values[number] = Affine(first + times * each)
        self.walks.append(walk)
        names = [self._state(op, i, times) for i in range(len(inner))]
        taken, self._at_loop = self._taken, self._at_loop or frozenset(self._taken)
        if not self.choices.is_apart:
            self._taken = set(self._at_loop)  # of the same loop once more, with or without a mask, names are the same
        self._walk = walk
        for o in casts_last(op.body):
            self._do(o)
        new = {n: self.text(self.values[e]) for n, e in zip(names, ends, strict=True) if n}
        new = {n: text for n, text in new.items() if n != text}
        if new:
            self._emit(f"{', '.join(new)} = {', '.join(new.values())}", op.line)
        self._walk, self._taken = None, self._taken | taken
        for result, name, e in zip(op.results, names, ends, strict=True):
            value = self.values[e]
            if name and isinstance(value, Floats):
                _, axes, fmt = self.states[name]
                value = Floats(name, self._joined(Floats("", axes, fmt), value), fmt)
            self.values[result] = value
        if len(self.walks) > 1:
            self._compare(op)

    @staticmethod
    def _refuse_many(op: Op, each: int, times: int) -> None:
        if each > MOST_EACH or times > MOST_TIMES:
            allowed = f"allowed: at most {MOST_EACH:,} and {MOST_TIMES:,}"
            raise op.fail(f"a program goes through a loop {each:,} times, all programs {times:,} times; {allowed}")

    def _go_through(self, op: Op, counts: Integers, first: Integers, each: Integers) -> None:
        """Read a loop whose iterations each store their results: every one is a block, as a program's own would be."""
        self._refuse_many(op, int(counts.max()), int(counts.sum()))
        carried, ends = op.operands[4:], op.body[-1].operands if len(op.operands) > 4 else []
        program = np.repeat(np.arange(len(counts)), counts)
        time = np.concatenate([np.arange(n) for n in counts]) if len(program) else program
        order = np.argsort(time, kind="stable")
        program, time = program[order], time[order][:, None]
        if not len(program):
            raise op.fail("a loop that no program enters")
        moved = [self._moved(op, inner, end) for inner, end in zip(carried[::2], ends, strict=True)]
        self.ids = self.ids[program]
        for name, x in self.values.items():
            if isinstance(x, Affine):
                self.values[name] = x.at(program)
            elif isinstance(x, Condition):
                self.values[name] = Condition(tuple((r, d.at(program)) for r, d in x.of))
        for load in self.loads.values():
            load.pointer, load.left = load.pointer.at(program), [x[program] if len(x) > 1 else x for x in load.left]
        one = Affine(first).at(program).base + time * Affine(each).at(program).base
        self.values[op.operands[0]] = Affine(one)
        for inner, start, by in zip(carried[::2], carried[1::2], moved, strict=True):
            x = self.values[start]
            if not isinstance(x, Affine):
                raise op.fail(
                    f"{plain_name(inner)} goes from one block of a program to its next: make them independent"
                )
            self.values[inner] = replace(x, base=x.base + time * Affine(by).at(program).base)
        for o in op.body:
            self._do(o)
        self.values |= {r: self.values[s] for r, s in zip(op.results, carried[1::2], strict=True)}

    def _state(self, op: Op, at: int, times: Integers) -> str:
        """Bind what a loop carries; return its name, none for what is no block of floats."""
        inner, start = op.operands[4::2][at], op.operands[5::2][at]
        x = self.values[start]
        if isinstance(x, Affine):  # a pointer or number that moves by the same step every time
            self.values[inner] = replace(x, base=x.base + times * self._moved(op, inner, op.body[-1].operands[at]))
            return ""
        if isinstance(x, Floats) and x.text in self.states:  # it goes on from the loop before
            self.values[inner] = x
            return x.text
        if self.walks[-1].is_sum:  # one product of all tiles, which begins with 0 by itself
            self.values[inner] = x
            return ""
        if not isinstance(x, Number):
            raise op.fail(f"{plain_name(inner)} begins with a computed value: a state begins with a number")
        types = re.findall(r"tensor<[^<>]*(?:<[^<>]*>)?[^<>]*>|!tt\.ptr<\w+>|\w+", op.text.partition("-> (")[2])
        name, axes, fmt = self._unique(inner), self._axes(x.shape), shape_of(types[at])[1]
        self.walks[-1 if self.choices.is_apart else 0].states.append(name)
        self.states[name] = x, axes, fmt
        self.values[inner] = Floats(name, axes, fmt)
        return name

    def _moved(self, op: Op, inner: str, end: str) -> Integers:
        """Return by how much an integer or pointer moves in an iteration."""
        if inner == end:
            return np.zeros((1, 1), np.int64)
        for o in op.body:
            if end in o.results and o.name in ("tt.addptr", "arith.addi") and inner in o.operands:
                by = self._early(op, next(n for n in o.operands if n != inner))
                if isinstance(by, Affine) and not any(by.steps) and by.base.shape[1] == 1:
                    return by.base
        raise op.fail(f"{plain_name(inner)} moves by what the loop computes: let it move by one step every time")

    def _early(self, op: Op, name: str) -> Known | None:
        """Return a value that the loop computes of what is known before it."""
        made = next((o for o in op.body if name in o.results), None)
        if made is not None and all(self._early(op, n) is not None for n in made.operands):
            self._do(made)
        return self.values.get(name)

    def _compare(self, op: Op) -> None:
        """Make one loop of two that differ in their masks alone; others are apart, if they only go over rows."""
        first, second, *more = self.walks
        if self.choices.is_apart:
            if any(" @ " in text for w in self.walks for text, _ in w.lines):
                raise op.fail("a second loop over tiles that does other than the first: make it a kernel of its own")
            if not np.array_equal(self.walks[-1].counts, first.counts):
                raise op.fail("a second loop over more tiles than the first, or fewer: let both walk the same")
            return
        one, other = ([text for text, _ in w.lines if " = where(mask, " not in text] for w in (first, second))
        if one != other or more:
            raise UnlikeLoopsError
        first.lines = first.lines if first.masks else second.lines


def _within(op: Op) -> Iterator[Op]:
    for inner in op.body:
        yield inner
        yield from _within(inner)


def _is_sum(op: Op, zeros: Sequence[bool]) -> bool:
    """Return whether a loop does nothing with floats but load them and add their products to what begins with 0."""
    known = ("tt.load", "tt.trans", "arith.constant")
    floats = [o for o in op.body if o.results and "tt.ptr" not in o.type and shape_of(o.type)[1] in FORMATS]
    sums = {i: end for i, end, zero in zip(op.operands[4::2], op.body[-1].operands, zeros, strict=True) if zero}
    products = [o for o in floats if o.name not in known]
    return bool(products) and all(o.name == "tt.dot" and sums.get(o.operands[2]) == o.results[0] for o in products)


def plain_name(name: str) -> str:
    """Return the user's name of a value, without the number that TTIR adds."""
    base = re.sub(r"\W", "", re.sub(r"_\d+$", "", re.split("[#@]", name)[0])) or "t"
    return f"t{base}" if base[0].isdigit() else base


def _rounded(value: float, fmt: str) -> float:
    return float(np.asarray(cast(np.array([value]), FORMATS[fmt])).astype(np.float64)[0])


def _pad(x: Known, other: float) -> float:
    """Return what a value has where a mask hides a column; of numbers of a row anything finite; NaN: not known."""
    if isinstance(x, Number):
        return x.value
    assert isinstance(x, Floats)
    return other if x.pad is None and (not x.axes or x.axes[-1] is None) else math.nan if x.pad is None else x.pad


def casts_last(body: Sequence[Op]) -> list[Op]:
    """Return operations with casts of tiles behind the last other reader of what they read.

    The compiler's order is free; here an earlier cast would be written over its source, where a GPU keeps both.
    """
    moved = list(body)
    for op in [x for x in body if x.name in ("arith.truncf", "tt.fp_to_fp") and len(shape_of(x.type)[0]) > 1]:
        readers = [i for i, x in enumerate(moved) if op.operands[0] in (*x.results, *x.operands) and x is not op]
        if readers and moved[readers[0]].name not in ("tt.dot", "tt.load") and readers[-1] < moved.index(op):
            moved.remove(op)
            moved.insert(readers[-1] + 1, op)
    return moved
