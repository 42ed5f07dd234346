"""From TTIR to a kernel of tiles: integers and pointers are evaluated, floats written in the language of kernels.

What comes out is source in that language with the user's own names, each statement at the line of the user's kernel, so
that what is wrong with it is said there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.errors import ProgramError
from npusim.formats import cast
from npusim.ttir.text import FORMATS, Function, Line, Operation, shape_of
from npusim.ttir.values import (
    RELATIONS,
    Affine,
    Any_,
    Condition,
    Floats,
    Integers,
    Number,
    Tensor,
    bound_of,
    constant,
    float_of,
    integers,
    literal,
    plain_name,
    reshaped,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_BINARY = {"addf": "+", "subf": "-", "mulf": "*", "divf": "/", "maxnumf": "maximum", "maximumf": "maximum"}
_SAME = ("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "tt.bitcast")
_NUMBERS: Mapping[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else math.nan,
    "maximum": max,
}
#: Numbers of a row may be any: what two of them give alike is known.
_STAND_INS = (0.7, -3.1)
#: Operations that are refused, and what to do instead.
_REFUSED = {
    "tt.atomic_rmw": "atomics: let each program store its part, and add the parts in a kernel of its own",
    "tt.atomic_cas": "atomics: let each program store its part, and add the parts in a kernel of its own",
    "tt.elementwise_inline_asm": "inline assembly: write it in Triton's language",
    "tt.gather": "a gather by loaded indices: give tables of pages as data of the problem (--page)",
    "scf.while": "a loop whose end hangs on data: bound it by sizes",
    "tt.scan": "a scan along an axis: store the parts, and scan them in a kernel of its own",
    "tt.histogram": "a histogram",
    "tt.sort": "a sort",
    "arith.cmpf": "a comparison of values: tl.maximum takes the larger, tl.where a mask of indices",
    "arith.minnumf": "a minimum: write -tl.maximum(-a, -b)",
    "math.erf": "erf: write GELU with tanh or a sigmoid",
    "math.sin": "a sine",
    "math.cos": "a cosine",
}


@dataclass(frozen=True)
class Choices:
    """What TTIR leaves open: fresh products in place of chained ones, contraction, the machine's exponentials."""

    is_fresh: bool = False
    fuses: bool = False
    exp2: str = ""
    exp: str = ""
    log2: str = "log2.correct"


class UnlikeLoopsError(Exception):
    """Of two loops one contracts what the other, with a mask between, does not."""


@dataclass
class Load:
    """One tensor as the kernel reads it; ``left``: elements along each axis that its mask leaves."""

    name: str
    of: str
    pointer: Affine
    axes: tuple[str | None, ...]
    left: list[Integers]
    is_walked: bool
    line: Line


@dataclass
class Walk:
    """A loop over tiles: iterations of each program, and which tiles the mask is applied to."""

    counts: Integers
    number: str
    lines: list[tuple[str, Line]] = field(default_factory=list)
    is_masked: bool = False


@dataclass
class Store:
    """What is stored, where, and how much of it its mask leaves."""

    pointer: Affine
    value: Floats
    left: list[Integers]
    line: Line


def read_launch(
    function: Function, arguments: Mapping[str, Any], grid: tuple[int, int, int], choices: Choices
) -> Reader:
    """Return a kernel at a launch; two loops of which one has a mask are read without contractions."""
    try:
        return Reader(function, arguments, grid, choices)
    except UnlikeLoopsError:
        reader = Reader(function, arguments, grid, replace(choices, fuses=False))
    reader.notes.append(
        f"{function.name}: of two loops that without a mask contracts multiplications and additions; here neither does"
    )
    return reader


class Reader:
    """One kernel at one launch, read from its operations."""

    def __init__(
        self, function: Function, arguments: Mapping[str, Any], grid: tuple[int, int, int], choices: Choices
    ) -> None:
        self.function, self.arguments, self.grid, self.choices = function, arguments, grid, choices
        ids = np.stack([x.ravel() for x in np.meshgrid(*(np.arange(g) for g in grid), indexing="ij")], 1)
        self.ids = ids[np.lexsort(ids.T)].astype(np.int64)  # the first runs fastest
        self.values: dict[str, Any_] = {}
        self.lines: list[tuple[str, Line]] = []
        self.loads: dict[str, Load] = {}
        self.stores: list[Store] = []
        self.numbers: dict[str, float] = {}
        self.states: list[tuple[str, Number, tuple[str | None, ...], str]] = []
        self.walks: list[Walk] = []
        self.masks: list[tuple[Condition, Walk, Line]] = []
        self.cuts: dict[str, Integers] = {}
        self.notes: list[str] = []
        self.loop_at = 0  # lines before the loop
        self._roots: dict[str, str] = {}
        self._taken: set[str] = set()
        self._at_loop: frozenset[str] = frozenset()  # names taken where the first loop begins
        self._walk: Walk | None = None
        self._uses: dict[str, list[Operation]] = {}
        self._count(function.operations)
        #: Whether blocks are single rows: tensors of one axis lie along columns, and reductions leave one number a row.
        self.is_of_rows = self._has_rows_alone(function.operations)
        self._row = self._axis()
        for name, kind in function.parameters.items():
            self.values[name] = self._argument(name, kind)
        for op in function.operations:
            self._do(op)
        if not self.stores:
            raise ProgramError(f"{function.name}: it stores nothing")

    # ---------------------------------------------------------------- shapes, names, axes

    def _count(self, operations: Sequence[Operation]) -> None:
        for op in operations:
            for name in op.operands:
                self._uses.setdefault(name, []).append(op)
            self._count(op.body)

    def _has_rows_alone(self, operations: Sequence[Operation]) -> bool:
        every = [*operations, *(o for op in operations for o in op.body)]
        shapes = [shape_of(o.type)[0] for o in every if o.name in ("tt.load", "tt.make_range")]
        return all(len(shape) < 2 for shape in shapes) and not any(o.name == "tt.expand_dims" for o in every)

    def _shape(self, type_: str) -> tuple[tuple[int, ...], str]:
        shape, fmt = shape_of(type_)
        return ((1, *shape) if self.is_of_rows and shape else shape), fmt.removeprefix("!tt.ptr<").removesuffix(">")

    def _argument(self, name: str, kind: str) -> Any_:
        value = self.arguments[name]
        if "ptr" in kind:
            return Affine(np.zeros((1, 1), np.int64), of=name)
        if kind.startswith(("f", "bf")):
            self.numbers[name.lower()] = number = float(np.float32(value))
            return Number(number, name.lower())
        return constant(int(value))

    def _axis(self) -> str:
        name = f"a{len(self._roots)}"
        self._roots[name] = name
        return name

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

    def _unique(self, name: str) -> str:
        base = plain_name(name)
        base = f"{base}_" if base in _WORDS else base
        unique = next(n for n in chain([base], (f"{base}{i}" for i in count(2))) if n not in self._taken)
        self._taken.add(unique)
        return unique

    def _emit(self, text: str, line: Line) -> None:
        (self._walk.lines if self._walk else self.lines).append((text, line))

    def _bind(self, op: Operation, x: Floats) -> None:
        """Bind a value to a name; one step of an expression of the user's stays part of it."""
        readers = self._uses.get(op.results[0], [])
        if x.scaled and (fused := self._fused(op)) and all(fused):
            self.values[op.results[0]] = x
            return
        is_step = len(readers) == 1 and bool(readers[0].results) and readers[0].name not in ("scf.for", "tt.dot")
        if is_step and plain_name(readers[0].results[0]) == plain_name(op.results[0]) and op.name != "tt.reduce":
            self.values[op.results[0]] = x
            return
        text, name = self.text(x), self._unique(op.results[0])
        self._emit(f"{name} = {text}", op.line)
        self.values[op.results[0]] = replace(x, text=name, product=False)

    def text(self, x: Any_) -> str:
        """Return a float as the kernel of tiles writes it."""
        if isinstance(x, Floats):
            return f"{x.text}.to({FORMATS[x.fmt]!r})" if x.product else x.text
        assert isinstance(x, Number), x
        return x.text

    # ---------------------------------------------------------------- operations

    def _do(self, op: Operation) -> None:
        family, _, name = op.name.partition(".")
        if op.name in _REFUSED:
            raise op.fail(_REFUSED[op.name])
        if family == "arith" and name in _BINARY:
            self._binary(op, _BINARY[name])
        elif (
            family == "arith"
            and (name[-1] == "i" or name[:-1].endswith(("s", "u")))
            and len(op.operands) == 2
            and name != "cmpi"
        ):
            self._integer(op, name)
        elif op.name in _SAME:
            self.values[op.results[0]] = self.values[op.operands[0]]
        else:
            method = getattr(self, f"_{family}_{name}", None)
            if method is None:
                raise op.fail(f"{op.name} has no counterpart in the language of kernels: {op.text[:80]}")
            is_nested = op.name in ("scf.for", "scf.yield")
            method(op, *([] if is_nested else [self.values[n] for n in op.operands]))

    def _arith_constant(self, op: Operation) -> None:
        text, _, type_ = op.text.removeprefix("arith.constant ").partition(" : ")
        text = text.removeprefix("dense<").removesuffix(">")
        shape, fmt = self._shape(type_)
        if fmt in FORMATS:
            value = float_of(text, fmt)
            self.values[op.results[0]] = Number(value, literal(value), shape)
        else:
            words = {"true": 1, "false": 0}
            self.values[op.results[0]] = constant(words[text] if text in words else int(text), shape)

    def _tt_get_program_id(self, op: Operation) -> None:
        self.values[op.results[0]] = Affine(self.ids[:, "xyz".index(op.text.split()[1])][:, None])

    def _tt_get_num_programs(self, op: Operation) -> None:
        self.values[op.results[0]] = constant(self.grid["xyz".index(op.text.split()[1])])

    def _tt_make_range(self, op: Operation) -> None:
        shape = self._shape(op.type)[0]
        self.values[op.results[0]] = Affine(
            np.full((1, 1), op.number("start"), np.int64), (0,) * (len(shape) - 1) + (1,), shape
        )

    def _tt_splat(self, op: Operation, x: Any_) -> None:
        shape = self._shape(op.type)[0]
        rows = x.axes if isinstance(x, Floats) else ()
        self.values[op.results[0]] = reshaped(
            x,
            shape,
            lambda _, none: (*rows, *(none for _ in shape[len(rows) :])) if none is None else (none,) * len(shape),
        )

    def _tt_expand_dims(self, op: Operation, x: Any_) -> None:
        at = op.number("axis")
        self.values[op.results[0]] = reshaped(x, self._shape(op.type)[0], lambda s, none: (*s[:at], none, *s[at:]))

    def _tt_broadcast(self, op: Operation, x: Any_) -> None:
        self.values[op.results[0]] = reshaped(x, self._shape(op.type)[0], lambda s, _: s)

    def _tt_trans(self, op: Operation, x: Any_) -> None:
        if not isinstance(x, Floats):
            raise op.fail("a transposed block of integers")
        self.values[op.results[0]] = replace(x, axes=x.axes[::-1], is_transposed=not x.is_transposed)

    def _tt_return(self, op: Operation) -> None:
        pass

    def _tt_assert(self, op: Operation, *_: Any_) -> None:
        pass

    def _tt_addptr(self, op: Operation, pointer: Affine, offset: Affine) -> None:
        shape = self._shape(op.text.rpartition(" : ")[2].partition(", ")[0])[0]
        zero = (0,) * len(shape)
        steps = tuple(a + b for a, b in zip(pointer.steps or zero, offset.steps or zero, strict=True))
        self.values[op.results[0]] = Affine(pointer.base + offset.base, steps, shape, pointer.of)

    def _integer(self, op: Operation, name: str) -> None:
        a, b = (self.values[n] for n in op.operands)
        if isinstance(a, Condition) and isinstance(b, Condition) and name == "andi":
            self.values[op.results[0]] = Condition(a.of + b.of, a.shape)
            return
        if not isinstance(a, Affine) or not isinstance(b, Affine):
            raise op.fail(f"{op.name} of masks, or of what was loaded: masks may be joined by & alone")
        self.values[op.results[0]] = integers(op, name, a, b)

    def _arith_cmpi(self, op: Operation, a: Affine, b: Affine) -> None:
        relation = op.text.split()[1].rstrip(",")
        difference = integers(op, "subi", a, b)
        self.values[op.results[0]] = Condition(((relation, difference),), difference.shape)

    # ---------------------------------------------------------------- floats

    def _binary(self, op: Operation, how: str) -> None:
        a, b = (self.values[n] for n in op.operands[:2])
        if isinstance(a, Number) and isinstance(b, Number):
            value = _NUMBERS[how](a.value, b.value)
            text = f"maximum({a.text}, {b.text})" if how == "maximum" else f"({a.text} {how} {b.text})"
            fmt = self._shape(op.type)[1]
            if math.isfinite(value):  # numbers are rounded as the kernel's are
                value = float(np.asarray(cast(np.array([value]), FORMATS[fmt])).astype(np.float64)[0])
                text = literal(value) if how == "maximum" or a.text[:1].isdigit() or b.text[:1].isdigit() else text
            self.values[op.results[0]] = Number(value, text if math.isnan(value) else literal(value), a.shape)
            return
        blocks = [x for x in (a, b) if isinstance(x, Floats)]
        if not blocks or not all(isinstance(x, Floats | Number) for x in (a, b)):
            raise op.fail(f"{op.name} of a float that integers make")
        if how == "*" and self._fused(op):
            a, b = self._named(op, a), self._named(op, b)
        axes = (
            blocks[0].axes
            if len(blocks) == 1
            else tuple(self._join(x, y) for x, y in zip(blocks[0].axes, blocks[1].axes, strict=True))
        )
        pads = {_NUMBERS[how](_pad(a, other), _pad(b, other)) for other in _STAND_INS}
        pad = pads.pop() if len(pads) == 1 else None
        text, scaled = self._combined(op, how, a, b)
        self._bind(
            op, Floats(text, axes, blocks[0].fmt, None if pad is None or math.isnan(pad) else pad, scaled=scaled)
        )

    def _named(self, op: Operation, x: Any_) -> Any_:
        """Return a value that several expressions may read: under a name."""
        if not isinstance(x, Floats) or self.text(x).isidentifier():
            return x
        name = self._unique(op.results[0])
        self._emit(f"{name} = {self.text(x)}", op.line)
        return replace(x, text=name, product=False)

    def _fused(self, op: Operation) -> list[bool]:
        """Return of each reader of a product whether it is an addition that takes it in; none if nothing is fused."""
        readers, fuses = list(self._uses.get(op.results[0], [])), list[bool]()
        if not self.choices.fuses:
            return []
        while readers:
            reader = readers.pop()
            if reader.name in ("tt.expand_dims", "tt.broadcast"):
                readers += self._uses.get(reader.results[0], [])
            else:
                fuses.append(reader.name in ("arith.addf", "arith.subf"))
        return fuses if any(fuses) else []

    def _combined(self, op: Operation, how: str, a: Any_, b: Any_) -> tuple[str, tuple[str, str] | None]:
        """Return the text of an operation, and its factors where it multiplies."""
        x, y = self.text(a), self.text(b)
        if how == "*":
            return f"({x} * {y})", (x, y)
        if self.choices.fuses and how in "+-":  # as LLVM's NVPTX does: the first that is a multiplication
            for one, other, form in ((a, y, "minus"), (b, x, "from")):
                if isinstance(one, Floats) and one.scaled and one.fmt in ("f32", "f16"):
                    tail = f", {form!r}" if how == "-" else ""
                    return f"fma({one.scaled[0]}, {one.scaled[1]}, {other}{tail})", None
        return (f"maximum({x}, {y})" if how == "maximum" else f"({x} {how} {y})"), None

    def _cast(self, op: Operation, x: Any_) -> None:
        fmt = self._shape(op.type)[1]
        if isinstance(x, Number):
            value = float(np.asarray(cast(np.array([x.value]), FORMATS[fmt])).astype(np.float64)[0])
            self.values[op.results[0]] = Number(
                value, x.text if value == x.value or math.isnan(value) else literal(value), x.shape
            )
            return
        if not isinstance(x, Floats):
            raise op.fail(f"{op.name} of what is no float")
        how = ", overflow='saturate'" if fmt.startswith("f8") else ""
        self._bind(op, Floats(f"{self.text(x)}.to({FORMATS[fmt]!r}{how})", x.axes, fmt, x.pad))

    _arith_truncf = _arith_extf = _tt_fp_to_fp = _cast

    def _function(self, op: Operation, x: Any_, text: str, of_pad: Callable[[float], float]) -> None:
        if not isinstance(x, Floats):
            raise op.fail(f"{op.name} of a number: compute it before the launch")
        pad = None
        if x.pad is not None and x.pad != math.inf:
            pad = of_pad(x.pad) if x.pad != -math.inf or op.name.startswith("math.exp") else None
        self._bind(op, Floats(text.format(self.text(x)), x.axes, x.fmt, pad))

    def _math_exp2(self, op: Operation, x: Any_) -> None:
        if self.choices.exp2:
            self._function(op, x, f"exp({{}}, {self.choices.exp2!r})", lambda v: 2.0**v)
        else:  # no power of two on this machine: e^(x ln 2)
            self.numbers["ln2"] = math.log(2.0)
            self._function(op, x, "exp({} * ln2)", lambda v: 2.0**v)

    def _math_exp(self, op: Operation, x: Any_) -> None:
        if self.choices.exp2:  # as Triton compiles it for NVIDIA: ex2 of x log2 e
            self.numbers["log2e"] = float(np.float32(math.log2(math.e)))
            self._function(op, x, f"exp({{}} * log2e, {self.choices.exp2!r})", math.exp)
        else:
            self._function(op, x, f"exp({{}}, {self.choices.exp!r})", math.exp)

    def _math_log2(self, op: Operation, x: Any_) -> None:
        self._function(op, x, f"log({{}}, {self.choices.log2!r})", lambda _: math.nan)

    def _math_log(self, op: Operation, x: Any_) -> None:
        self._function(op, x, "log({})", lambda _: math.nan)

    def _math_absf(self, op: Operation, x: Any_) -> None:
        self._function(op, x, f"maximum({self.text(x)}, -{self.text(x)})", abs)

    def _math_sqrt(self, op: Operation, x: Any_) -> None:
        self._function(op, x, "exp(log({}) * 0.5)", lambda _: math.nan)
        self._root_note(op)

    def _math_rsqrt(self, op: Operation, x: Any_) -> None:
        self._function(op, x, "exp(log({}) * -0.5)", lambda _: math.nan)
        self._root_note(op)

    _tt_precise_sqrt = _math_sqrt

    def _root_note(self, op: Operation) -> None:
        self.notes.append(f"{op.line}: a square root is taken as exp(log(x) / 2): its last bits may differ")

    def _math_fma(self, op: Operation, a: Any_, b: Any_, c: Any_) -> None:
        blocks = [x for x in (a, b, c) if isinstance(x, Floats)]
        axes = blocks[0].axes
        for other in blocks[1:]:
            axes = tuple(self._join(x, y) for x, y in zip(axes, other.axes, strict=True))
        self._bind(op, Floats(f"fma({self.text(a)}, {self.text(b)}, {self.text(c)})", axes, blocks[0].fmt))

    def _arith_negf(self, op: Operation, x: Any_) -> None:
        self._function(op, x, "(-{})", lambda v: -v)

    def _tt_extern_elementwise(self, op: Operation, *x: Any_) -> None:
        if "__nv_tanhf" in op.text:
            self._function(op, x[0], "tanh({})", math.tanh)
        elif "__nv_rsqrtf" in op.text:
            self._math_rsqrt(op, x[0])
        else:
            raise op.fail(f"a function of a library: {op.text[:80]}; there are tanh and rsqrt")

    def _arith_sitofp(self, op: Operation, x: Any_) -> None:
        if not isinstance(x, Affine) or any(x.steps):
            raise op.fail("a float made of a block's indices")
        fmt, times = self._shape(op.type)[1], np.arange(x.base.shape[1])[None]
        if self._walk and x.base.shape[1] > 1 and np.array_equal(np.broadcast_to(times, x.base.shape), x.base):
            walked = next(n.name for n in self.loads.values() if n.is_walked)
            self.values[op.results[0]] = Number(math.nan, f"{walked}.index")
            return
        if np.ptp(x.base):
            raise op.fail("a float of an index that differs between programs")
        value = float(np.asarray(cast(np.array([float(x.base.flat[0])]), FORMATS[fmt])).astype(np.float64)[0])
        self.values[op.results[0]] = Number(value, literal(value))

    _arith_uitofp = _arith_sitofp

    def _tt_reduce(self, op: Operation, x: Any_) -> None:
        inner = [o.name for o in op.body]
        kind = {"arith.maxnumf": "max", "arith.maximumf": "max", "arith.addf": "sum"}.get(inner[0] if inner else "")
        if kind is None or len(inner) != 2 or not isinstance(x, Floats):
            raise op.fail("a reduction other than a sum or a maximum of floats")
        if op.number("axis") + self.is_of_rows != len(x.axes) - 1:
            raise op.fail("a reduction over rows: sums and maxima are along the last axis; transpose what is loaded")
        axis, neutral = self.root(x.axes[-1]), 0.0 if kind == "sum" else -math.inf
        if axis in self.cuts and x.pad != neutral:
            masked = "not known" if x.pad is None else x.pad
            raise op.fail(
                f"a {kind} along an axis that a mask cuts, where what is masked is {masked}: tl.where(mask, x, "
                f"{neutral}) before it, or other={neutral} where it is loaded"
            )
        self._bind(op, Floats(f"{self.text(x)}.{kind}()", x.axes[:-1], x.fmt, None))

    def _tt_dot(self, op: Operation, a: Any_, b: Any_, c: Any_) -> None:
        if not isinstance(a, Floats) or not isinstance(b, Floats):
            raise op.fail("a product of what is no block of floats")
        if a.is_transposed:
            raise op.fail("the left factor of a product is transposed: store it transposed, or exchange the factors")
        inner = self._join(a.axes[1], b.axes[0])
        if self.root(inner) in self.cuts and 0.0 not in (a.pad, b.pad):
            raise op.fail("a product along an axis that a mask cuts: other=0.0 where one of its factors is loaded")
        fmt = self._shape(op.type)[1]
        text = f"{a.text} @ {b.text}{'.T' if b.is_transposed else ''}"
        axes = a.axes[0], b.axes[1]
        pad = 0.0 if b.pad == 0.0 else None
        if isinstance(c, Number):
            if c.value:
                raise op.fail(f"a product added to {c.value}")
            self._bind(op, Floats(f"({text})", axes, fmt, pad, product=True))
            return
        assert isinstance(c, Floats)
        axes = self._join(axes[0], c.axes[0]), self._join(axes[1], c.axes[1])
        if self.choices.is_fresh:  # a matrix unit that cannot go on from what rows wrote; the product stands alone
            name = self._unique("product")
            self._emit(f"{name} = ({text}).to({FORMATS[fmt]!r})", op.line)
            text = name
        self._bind(op, Floats(f"({c.text} + {text})", axes, fmt))

    def _arith_select(self, op: Operation, mask: Any_, a: Any_, b: Any_) -> None:
        if isinstance(mask, Condition) and len(mask.of) == 1 and mask.of[0][0] == "eq" and not any(mask.of[0][1].steps):
            first = mask.of[0][1].base == 0
            if first.shape[1] > 1 and np.all(first[:, 0]) and not np.any(first[:, 1:]) and isinstance(b, Floats):
                self.notes.append(f"{op.line}: what is chosen for the first tile is taken to be what start values give")
                self._bind(op, b)
                return
        if not isinstance(mask, Condition) or not isinstance(b, Number) or not isinstance(a, Floats):
            raise op.fail("tl.where of other than a mask of indices, a block and a number")
        rest = []
        for relation, d in mask.of:
            bound = bound_of(op, d, relation)
            if bound is None:
                rest.append((relation, d))
                continue
            axis = self.root(a.axes[bound[0]])
            assert axis is not None
            self._cut(axis, bound[1])
            a = replace(a, pad=b.value) if bound[0] == len(a.axes) - 1 else a
        if not rest:
            self._bind(op, a)
            return
        if b.value != -math.inf:
            raise op.fail(f"tl.where(mask, x, {b.value}): what a mask of indices hides is -inf")
        self._mask(op, a, b, tuple(rest))

    def _mask(self, op: Operation, a: Floats, b: Number, of: tuple[tuple[str, Affine], ...]) -> None:
        """Mask a tile in its place."""
        if any(len(d.steps) != 2 or r not in RELATIONS for r, d in of) or self._walk is None:
            raise op.fail("a mask that is no comparison of rows and columns of a tile in a loop")
        name = self.text(a)
        if not name.isidentifier():
            name = self._unique(op.results[0])
            self._emit(f"{name} = {self.text(a)}", op.line)
        elif len(self._uses[op.operands[1]]) > 1:
            raise op.fail("scores are read after they are masked: read what tl.where returns")
        self._walk.is_masked = True
        self.masks.append((Condition(of), self._walk, op.line))
        self._emit(f"{name} = where(mask, {name}, {b.text})", op.line)
        self.values[op.results[0]] = Floats(name, a.axes, a.fmt, a.pad)

    # ---------------------------------------------------------------- memory

    def _tt_load(self, op: Operation, pointer: Any_, mask: Any_ | None = None, other: Any_ | None = None) -> None:
        if not isinstance(pointer, Affine) or not pointer.of:
            raise op.fail(
                "a load from an address that was loaded: give tables of pages as data of the problem (--page)"
            )
        tensor, shape = self.arguments[pointer.of], pointer.shape
        fmt = self._shape(op.type)[1]
        if not shape:
            raise op.fail(f"a number is loaded from {pointer.of}: give it as an argument, or as a constexpr")
        assert isinstance(tensor, Tensor)
        steps, sizes = pointer.steps, tensor.steps
        axes: tuple[str | None, ...] = tuple(
            self._row if self.is_of_rows and i == 0 else self._axis() if n > 1 else None for i, n in enumerate(shape)
        )
        used = [(s, n) for s, n in zip(steps, shape, strict=True) if n > 1]
        is_transposed = len(used) == 2 and used[0][0] == sizes[3] and used[1][0] == sizes[2] and sizes[2] != sizes[3]
        wanted = [sizes[2], sizes[3]] if len(used) == 2 else [sizes[3]]
        if not is_transposed and [s for s, _ in used] != wanted:
            listed = [s for s, _ in used]
            raise op.fail(f"{pointer.of} is read with strides {listed}; its rows and columns have {list(sizes[2:])}")
        is_walked = self._walk is not None and pointer.base.shape[1] > 1
        left, pad = self._left(op, mask, shape), other.value if isinstance(other, Number) else None
        for axis, n, some in zip(axes, shape, left, strict=True):
            if axis is not None and np.any(some < n):
                self._cut(axis, some)
        before = next((x for x in self.loads.values() if x.of == pointer.of and x.is_walked and is_walked), None)
        if before and len(self.walks) > 1 and before.pointer.steps == steps:  # the same in the loop before
            self._extend(before, pointer, left)
            self.values[op.results[0]] = Floats(before.name, before.axes, fmt, pad, is_transposed)
            return
        name = self._unique(tensor.name + ("j" if is_walked else ""))
        self.loads[name] = Load(name, pointer.of, pointer, axes, left, is_walked, op.line)
        self.values[op.results[0]] = Floats(name, axes, fmt, pad, is_transposed)

    def _extend(self, load: Load, pointer: Affine, left: list[Integers]) -> None:
        """Let a load of one loop go on in the next."""
        first, second = self.walks[-2:]
        rows = len(self.ids)

        def both(a: Integers, b: Integers) -> Integers:
            columns = [np.broadcast_to(x, (rows, int(w.counts.max()))) for x, w in ((a, first), (b, second))]
            return np.concatenate(columns, 1)

        load.pointer = replace(load.pointer, base=both(load.pointer.base, pointer.base))
        load.left = [both(a, b) for a, b in zip(load.left, left, strict=True)]

    def _cut(self, axis: str, count: Integers) -> None:
        known = self.cuts.get(axis)
        if known is not None and known.shape == count.shape and np.any(known != count):
            self.cuts[axis] = np.minimum(known, count)
        else:
            self.cuts[axis] = count

    def _left(self, op: Operation, mask: Any_ | None, shape: tuple[int, ...]) -> list[Integers]:
        """Return how many elements a mask leaves along each axis, for each program and iteration."""
        left = [np.full((1, 1), n, np.int64) for n in shape]
        for relation, d in mask.of if isinstance(mask, Condition) else ():
            bound = bound_of(op, d, relation)
            if bound is None:
                raise op.fail("the mask of a load or store that is no bound of its axes")
            left[bound[0]] = np.minimum(left[bound[0]], bound[1])
        return left

    def _tt_store(self, op: Operation, pointer: Any_, value: Any_, mask: Any_ | None = None) -> None:
        if self._walk:
            raise op.fail("a store in a loop: each program stores its result once, behind the loop")
        if not isinstance(pointer, Affine) or not pointer.of or not isinstance(value, Floats):
            raise op.fail("a store to an address that was loaded, or of what is no float")
        self.stores.append(Store(pointer, value, self._left(op, mask, pointer.shape), op.line))

    # ---------------------------------------------------------------- the loop

    def _scf_if(self, op: Operation, condition: Any_) -> None:
        always = isinstance(condition, Condition) and all(np.all(RELATIONS[r](d.base)) for r, d in condition.of)
        never = isinstance(condition, Condition) and any(not np.any(RELATIONS[r](d.base)) for r, d in condition.of)
        if op.results or not (always or never):
            raise op.fail("an if that not all programs answer alike: let the grid or tl.where decide")
        for inner in op.body if always else ():
            if inner.name != "scf.yield":
                self._do(inner)

    def _scf_yield(self, op: Operation) -> None:
        pass

    def _scf_for(self, op: Operation) -> None:
        if self._walk is not None:
            raise op.fail("a loop in a loop: one loop walks the tiles of a program; let the grid take the outer one")
        number, low, high, step, *carried = op.operands
        first, end, each = (self.values[n].base for n in (low, high, step))  # type: ignore[union-attr]
        counts = np.broadcast_to(np.maximum(0, -(-(end - first) // each)), (len(self.ids), 1))
        if not counts.max():
            self._skipped(op, carried)
            return
        times = np.arange(int(counts.max()))[None]
        self.values[number] = Affine(first + times * each)
        walk = Walk(counts, number)
        previous = self.walks[-1] if self.walks else None
        if previous is None:
            self.loop_at = len(self.lines)
        self.walks.append(walk)
        pairs, ends = list(zip(carried[::2], carried[1::2], strict=True)), op.body[-1].operands
        states = [self._state(op, inner, start, end_, times) for (inner, start), end_ in zip(pairs, ends, strict=True)]
        taken, self._at_loop = self._taken, self._at_loop or frozenset(self._taken)
        self._taken = set(self._at_loop)  # of the same loop once more, with or without a mask, names are the same
        self._walk = walk
        for inner_op in casts_last(op.body[:-1]):
            self._do(inner_op)
        bound = [(name, self.text(self.values[e]), e) for name, e in zip(states, ends, strict=True) if name]
        changed = [(n, t) for n, t, _ in bound if n != t]
        if changed:
            self._emit(f"{', '.join(n for n, _ in changed)} = {', '.join(t for _, t in changed)}", op.line)
        self._walk = None
        by_name = {s[0]: s for s in self.states}
        for name, _, e in bound:
            value = self.values[e]
            assert isinstance(value, Floats)
            for x, y in zip(by_name[name][2], value.axes, strict=True):
                self._join(x, y)
        for result, name, e in zip(op.results, states, ends, strict=True):
            self.values[result] = Floats(name, *by_name[name][2:]) if name else self.values[e]
        self._taken |= taken
        if previous is not None:
            self._merge(op, previous, walk)

    def _skipped(self, op: Operation, carried: list[str]) -> None:
        """A loop that no program enters leaves what it begins with."""
        for result, start in zip(op.results, carried[1::2], strict=True):
            self.values[result] = self.values[start]

    def _state(self, op: Operation, inner: str, start: str, end: str, times: Integers) -> str:
        """Bind what a loop carries; return its name, none for what is no block of floats."""
        x = self.values[start]
        if isinstance(x, Affine):  # a pointer or number that moves by the same step every time
            self.values[inner] = replace(x, base=x.base + times * self._moved(op, inner, end))
            return ""
        if isinstance(x, Floats) and any(x.text == s[0] for s in self.states):  # it goes on from the loop before
            self.values[inner] = x
            return x.text
        if not isinstance(x, Number):
            raise op.fail(f"{plain_name(inner)} begins with a computed value: a state begins with a number")
        shapes = op.text.partition("-> (")[2].rpartition(")")[0]
        kinds = [t.strip() for t in _types(shapes)]
        carried = op.operands[4::2]
        fmt = self._shape(kinds[carried.index(inner)])[1]
        name = self._unique(inner)
        axes = tuple(self._axis() if n > 1 else None for n in x.shape) or (self._row,)
        self.states.append((name, x, axes, fmt))
        self.values[inner] = Floats(name, axes, fmt)
        return name

    def _moved(self, op: Operation, inner: str, end: str) -> Integers:
        """Return by how much an integer or pointer moves in an iteration."""
        if inner == end:
            return np.zeros((1, 1), np.int64)
        for o in op.body:
            if end in o.results and o.name in ("tt.addptr", "arith.addi") and inner in o.operands:
                by = next(n for n in o.operands if n != inner)
                value = self.values.get(by) or self._early(op, by)
                if isinstance(value, Affine) and not any(value.steps) and value.base.shape[1] == 1:
                    return value.base
        raise op.fail(f"{plain_name(inner)} moves by what the loop computes: let it move by one step every time")

    def _early(self, op: Operation, name: str) -> Any_ | None:
        """Return a value that the loop computes of what is known before it."""
        made = next((o for o in op.body if name in o.results), None)
        if made is None or any(n not in self.values and self._early(op, n) is None for n in made.operands):
            return None
        self._do(made)
        return self.values[name]

    def _merge(self, op: Operation, first: Walk, second: Walk) -> None:
        """Make one loop of two that differ in their masks alone."""

        def plain(walk: Walk) -> list[str]:
            return [text for text, _ in walk.lines if " = where(mask, " not in text]

        if plain(first) != plain(second) and self.choices.fuses:
            raise UnlikeLoopsError
        if plain(first) != plain(second) or self.walks[:-2]:
            raise op.fail("a second loop over tiles that does other than the first: make it a kernel of its own")
        first.lines = first.lines if first.is_masked else second.lines


def _pad(x: Any_, other: float) -> float:
    """Return what a value has where a mask hides a column; of numbers of a row anything finite; NaN: not known."""
    if isinstance(x, Number):
        return x.value
    assert isinstance(x, Floats)
    return other if x.axes[-1] is None else math.nan if x.pad is None else x.pad


def _types(text: str) -> list[str]:
    """Return the types of a list, which may have commas of their own."""
    types, depth = [""], 0
    for c in text:
        depth += (c == "<") - (c == ">")
        if c == "," and not depth:
            types.append("")
        else:
            types[-1] += c
    return types


def casts_last(body: Sequence[Operation]) -> list[Operation]:
    """Return operations with casts of tiles behind the last other reader of what they read.

    The compiler's order is free; here an earlier cast would be written over its source, where a GPU keeps both.
    """
    moved = list(body)
    for op in [x for x in body if x.name in ("arith.truncf", "tt.fp_to_fp") and "x" in op_shape(x)]:
        readers = [i for i, x in enumerate(moved) if op.operands[0] in (*x.results, *x.operands) and x is not op]
        if readers and moved[readers[0]].name not in ("tt.dot", "tt.load") and readers[-1] < moved.index(op):
            moved.remove(op)
            moved.insert(readers[-1] + 1, op)
    return moved


def op_shape(op: Operation) -> str:
    """Return the shape in an operation's type, as text."""
    return "x".join(map(str, shape_of(op.type)[0]))


#: Names that a kernel of tiles has already.
_WORDS = frozenset(
    {"exp", "log", "tanh", "maximum", "where", "tiles", "full", "fma", "inf", "mask", "ln2", "log2e", "lambda"}
)
