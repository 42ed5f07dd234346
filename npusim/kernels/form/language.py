"""The language of kernels: a plain function on tiles, run once on symbols and recorded operation by operation.

Every operation returns a new `Value`.  A variable that holds a state where a loop over tiles begins is carried: its
binding at the end of the loop is the state's next value.  `npusim.kernels.form.lowering` turns the record into the
tables that machines read.
"""

from __future__ import annotations

import dis
import math
import operator
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import field, replace
from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from npusim.errors import FormatError, ProgramError
from npusim.formats import BLOCK_FORMATS, MAX_NANS, RELATIONS, combine_of, get_format, get_scale_rule, stored_format
from npusim.formats.scans import INVERSE_ORDERS, SCAN_ORDERS
from npusim.formats.whole import WHOLE_OPERATIONS
from npusim.late_methods import dataclass
from npusim.program.ir.op import COMPARED, DOWN, MASK, PLAIN, REVERSE, Attributes, Opcode
from npusim.program.ir.opaque import varying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import CodeType, FrameType

    from npusim.formats.elementwise import MaxNan
    from npusim.kernels.form.phase import Visit

#: The axis of the single row of a tensor that all rows of a tile read: ``mean="1 head"``.
ONE = "1"
Kind = Literal["operand", "mask", "state", "product", "row"]
TRACE: ContextVar[Trace] = ContextVar("trace")
EXCHANGED = ".T is supported only for a factor of a product, a @ b.T or a.T @ b"
NOT_YET = "a kernel is traced before its values exist"
WORDS = (
    "the operations of kernels are + - * /, divided, exp, log, rsqrt, sqrt, tanh, erf, fma, maximum, minimum, "
    "compare, where, inverse, folded, scanned, .to(format), .max(), .sum(), .cumsum() and @; of masks & | ^ ~"
)
#: Description in messages of the operation that computes a value without a name.
WRITTEN: Mapping[Opcode, str] = MappingProxyType(
    {
        Opcode.ROW_MAX: "{}.max()",
        Opcode.ROW_SUM: "{}.sum()",
        Opcode.CUMSUM: "{}.cumsum()",
        Opcode.INVERSE: "inverse({})",
        Opcode.FOLD: "folded({})",
        Opcode.SCAN: "scanned({})",
        Opcode.EXP: "exp({})",
        Opcode.LOG: "log({})",
        Opcode.RSQRT: "rsqrt({})",
        Opcode.SQRT: "sqrt({})",
        Opcode.TANH: "tanh({})",
        Opcode.ERF: "erf({})",
        Opcode.ADD: "{} + {}",
        Opcode.SUB: "{} - {}",
        Opcode.MUL: "{} * {}",
        Opcode.DIV: "{} / {}",
        Opcode.FMA: "fma({}, {}, {})",
        Opcode.MATMUL: "({} @ {})",
        Opcode.MAX: "maximum({}, {})",
        Opcode.MIN: "minimum({}, {})",
        Opcode.COMPARE: "compare({}, {}, {variant!r})",
        Opcode.LOGIC: "({} {variant} {})",
        Opcode.INTEGER: "integers({}, {}, {variant!r})",
        Opcode.BITS: "bits({}, {variant!r})",
        Opcode.SELECT: "where({}, {}, {})",
    }
)


def kernel_frame() -> FrameType:
    """Return the innermost frame outside this module: that of the kernel, or of a function that the kernel calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None
    return frame


def fail(why: str, frame: FrameType | None = None, line: int = 0) -> NoReturn:
    """Raise `ProgramError` with the file and line of the kernel, and its name."""
    frame = frame or kernel_frame()
    raise ProgramError(f"{frame.f_code.co_filename}:{line or frame.f_lineno}: {frame.f_code.co_name}: {why}")


def _checked(fmt: str) -> str:
    try:
        get_format(fmt)
    except FormatError as error:
        fail(str(error))
    return fmt


def _in_blocks(value: Value, fmt: str, axis: str, rule: str) -> Attributes:
    """Return the conversion of a tile to a format in blocks; refuse a value that cannot be converted, or that cannot be
    converted along this axis.
    """
    try:
        stored_format(fmt)
        chosen = get_scale_rule(rule or BLOCK_FORMATS[fmt].rule, BLOCK_FORMATS[fmt])
    except FormatError as error:
        fail(str(error))
    axis = axis or value.axes[-1]
    if len(value.axes) < 2 or axis not in value.axes:
        fail(f"{value}.to({fmt!r}, axis={axis!r}): axis must be one of the two axes of a tile")
    if chosen.reads_tensor:
        fail(
            f"rule {chosen.name} of {fmt} needs the largest magnitude of a whole tensor, which a kernel on tiles "
            "does not know"
        )
    return Attributes(variant=chosen.name, axis=value.axes.index(axis) - 2)


def _refused(what: str, why: str) -> Callable[..., Any]:
    """Return a method that refuses an operation of Python; ``{}`` stands for the value."""

    def method(self: Any, *_others: object) -> NoReturn:
        fail(f"{what.format(self)}: {why}")

    return method


def _number_operator(
    symbol: str, function: Callable[[Any, Any], Any], *, swapped: bool = False
) -> Callable[[TileNumber, Any], TileNumber]:
    """Return the method that combines a number of a tile with another such number or with a plain number; ``swapped``:
    the method of the right operand.
    """

    def method(self: TileNumber, other: TileNumber | float) -> TileNumber:
        if isinstance(other, Value):
            return NotImplemented  # the tile's operation uses the number
        a, b = (other, self) if swapped else (self, other)
        of = [x.of if isinstance(x, TileNumber) else lambda _tile, x=x: x for x in (a, b)]
        text = symbol.join(x.text if isinstance(x, TileNumber) else f"{x:g}" for x in (a, b))
        key = symbol, *(x.key if isinstance(x, TileNumber) else x for x in (a, b))
        return TileNumber(lambda tile: varying(function, of[0](tile), of[1](tile)), f"({text})", key)

    return method


class TileNumber:
    """A number that differs between tiles (a tile's index, its size); it becomes known when the tile is bound to a
    core.
    """

    def __init__(self, of: Callable[[Visit], Any], text: str, key: tuple[object, ...]) -> None:
        self.of, self.text, self.key = of, text, key  # numbers with the same key are equal in every tile

    __add__ = __radd__ = _number_operator("+", operator.add)
    __sub__ = _number_operator("-", operator.sub)
    __mul__ = __rmul__ = _number_operator("*", operator.mul)
    __rtruediv__ = _number_operator("/", operator.truediv, swapped=True)

    def __str__(self) -> str:
        return f"a tile's {self.text}"

    def __eq__(self, other: object) -> bool:
        return self is other if TRACE.get(None) is None else bool(self)

    __hash__ = object.__hash__
    __bool__ = __lt__ = __gt__ = __le__ = __ge__ = __float__ = __int__ = __index__ = _refused(
        "{} is used in a condition or as a plain number",
        "it differs between tiles, and the loop is traced once; per_tile(function, kj.index) gives each tile its "
        "constant",
    )


def per_tile(function: Callable[..., float], *numbers: TileNumber) -> TileNumber:
    """Return ``function`` of numbers that differ between tiles, as a constant of each tile. The function must
    be pure.
    """
    if wrong := [n for n in numbers if not isinstance(n, TileNumber)]:
        fail(
            f"per_tile of {wrong[0]}: its arguments are a function and numbers of a tile, such as kj.index and kj.size"
        )
    text = f"{getattr(function, '__name__', 'f')}({', '.join(n.text for n in numbers)})"
    key = function, *(n.key for n in numbers)
    known = lru_cache(typed=True)(function)
    return TileNumber(lambda tile: varying(known, *(n.of(tile) for n in numbers)), text, key)


def _mask_operator(function: str) -> Callable[[Value, Any], Value]:
    """Return the method that joins two masks of compared values."""
    return lambda self, other: _logic(function, self, other)


def _value_operator(opcode: Opcode, *, swapped: bool = False) -> Callable[[Value, Any], Value]:
    """Return the method that records an operation of a value and another value or a number; ``swapped``: from the
    right.
    """
    return lambda self, other: _binary(opcode, other, self) if swapped else _binary(opcode, self, other)


@dataclass(eq=False, slots=True)
class Value:
    """A tile (two axes) or a row vector (one axis), in a number format.

    state
        State whose next value this value is.
    onto
        State that this value overwrites.
    first
        Operand with which a state starts.
    prepared
        Value that products read in place of an operand; it is a function of the operand's tile.
    """

    axes: tuple[str, ...]
    fmt: str
    kind: Kind = "row"
    name: str = ""
    start: float | None = None
    variable: str = ""  #: the loop variable, for a walked operand
    chosen_role: str = ""
    event: Event | None = None
    state: Value | None = None
    onto: Value | None = None
    first: Value | None = None
    prepared: Callable[[Value], Value] | None = None

    def __repr__(self) -> str:
        return f"{self.written()} ({' x '.join(self.axes)}, {self.fmt})"

    def written(self) -> str:
        """Return the name of the value, or the operation that computes it, in the form of messages."""
        if trace := TRACE.get(None):
            trace.name_variables(kernel_frame())
        e = self.event
        if self.variable or self.name or e is None:
            return self.variable or self.name or "a state"
        srcs = [s.written() if isinstance(s, Value) else str(s) for s in e.srcs]
        if e.opcode in WRITTEN:
            return WRITTEN[e.opcode].format(*srcs, variant=e.attributes.variant)
        source = f"({srcs[0]})" if " " in srcs[0] and srcs[0][-1] != ")" else srcs[0]
        return srcs[0] if e.read and e.read[0].fmt == self.fmt else f"{source}.to({self.fmt!r})"

    @property
    def root(self) -> Value:
        """State whose next value this value is; for other values, the value itself."""
        return self if self.state is None else self.state

    @property
    def index(self) -> TileNumber:
        """The number of an operand's tile in its loop, from 0."""
        return TileNumber(lambda tile: varying(float, tile.index), "index", ("index",))

    @property
    def size(self) -> TileNumber:
        """The size of an operand's tile along the loop's axis."""
        return TileNumber(lambda tile: tile.cols, "size", ("size",))

    @property
    def T(self) -> Transposed:
        """The operand with its axes exchanged, as a factor of a product."""
        return Transposed(self)

    def __add__(self, other: Any) -> Value:
        return other.onto(self) if isinstance(other, Product) else _binary(Opcode.ADD, self, other)

    __radd__ = _value_operator(Opcode.ADD)
    __sub__, __rsub__ = _value_operator(Opcode.SUB), _value_operator(Opcode.SUB, swapped=True)
    __mul__ = __rmul__ = _value_operator(Opcode.MUL)
    __truediv__, __rtruediv__ = _value_operator(Opcode.DIV), _value_operator(Opcode.DIV, swapped=True)

    def __neg__(self) -> Value:
        return _binary(Opcode.MUL, self, -1.0)

    __and__, __or__, __xor__ = _mask_operator("and"), _mask_operator("or"), _mask_operator("xor")

    def __invert__(self) -> Value:
        return _logic("xor", self, 1.0)

    def __matmul__(self, other: Any) -> Product:
        return Product(self, other)

    def to(self, fmt: str, *, overflow: str = "", axis: str = "", rule: str = "") -> Value:
        """Return the value rounded once to ``fmt``; a value that has this format needs no instruction.

        For a block format, ``axis`` is the axis of the blocks (default: the columns), along which a product must sum;
        ``rule`` chooses the scales (default: the format's rule), and elements saturate.
        """
        if fmt in BLOCK_FORMATS:
            how = _in_blocks(self, fmt, axis, rule)
        elif axis or rule:
            fail(f"{self}.to({_checked(fmt)!r}, axis={axis!r}, rule={rule!r}): this format has no blocks")
        else:
            fmt, how = _checked(fmt), Attributes(overflow=overflow)
        return TRACE.get().record(Opcode.CAST, Value(self.axes, fmt), (self,), how)

    def max(self, nan: MaxNan = "number", *, down: bool = False) -> Value:
        """Return the maximum of each row; ``nan`` as in `maximum`; ``down`` as in `sum`."""
        return _rows(Opcode.ROW_MAX, _left(self.axes, down), self.fmt, (self,), _along(_by_nan(nan), down))

    def sum(self, order: str = "", *, times: Source | None = None, down: bool = False) -> Value:
        """Return the sum of each row, in a named order (default: the core's).

        ``down``: the sum of each column, from the first row to the last one: the result is one row with the tile's
        columns, or one number for a vector of rows.  One vector core, or one warp group, must have all rows of the
        tile.

        ``times``: a value of the same format, or a number. The result is then the sum of products: each lane adds a
        product without rounding it first (fma), except for one of its first two products (`npusim.formats.reduce_sum`).
        """
        if times is None:
            how = _along(Attributes(order=order), down)
            return _rows(Opcode.ROW_SUM, _left(self.axes, down), self.fmt, (self,), how)
        if isinstance(times, Value) and times.fmt != self.fmt:
            fail(
                f"{self}.sum(times={times}): {times.fmt} differs from {self.fmt}; convert one of them with .to(format)"
            )
        axes = _joined(f"{self}.sum(times={times})", [x for x in (self, times) if isinstance(x, Value)])
        how = _along(Attributes(order=order), down)
        return _rows(Opcode.ROW_SUM, _left(axes, down), self.fmt, (self, times), how)

    def cumsum(self, order: str = "", *, every: int = 0, reverse: bool = False) -> Value:
        """Return the cumulative sums of each row, in a named order (default: the core's).

        ``every``: number of columns after which the sums restart, because a row may contain several chunks; 0: they do
        not restart.  ``reverse``: from the last element of a row to the first.
        """
        if order and order not in SCAN_ORDERS:
            fail(f"{self}.cumsum({order!r}): unknown order; allowed: {', '.join(SCAN_ORDERS)}")
        if len(self.axes) < 2:
            fail(
                f"{self}.cumsum(): sums run along the columns of a row; bind the vector as one row, '1 {self.axes[0]}'"
            )
        if every < 0:
            fail(f"{self}.cumsum(every={every}): a number of columns is 0 or more")
        attributes = Attributes(order=order, every=every, variant=REVERSE if reverse else "")
        return _rows(Opcode.CUMSUM, self.axes, self.fmt, (self,), attributes)

    def in_share(self, share: float) -> Value:
        """Return the value with ``share``, 0 to 1, as the fraction of cases in which its operation costs time.

        The value is the same for every share. FlashAttention-4 uses it: a polynomial computes this share of the powers
        of two, and the unit for special functions computes the others.
        """
        if not 0 <= share <= 1:
            fail(f"{self}.in_share({share:g}): a share must be from 0 to 1")
        assert self.event is not None
        self.event.attributes = replace(self.event.attributes, share=share)
        return self

    def role(self, role: str) -> Value:
        """Return the value with a role for diagnosis, for values whose use does not determine a role."""
        self.chosen_role = role
        return self

    def __eq__(self, other: object) -> bool:
        return self is other if TRACE.get(None) is None else bool(self)

    __hash__ = object.__hash__
    __array_ufunc__ = None  # numpy leaves operations to this class
    __bool__ = __lt__ = __gt__ = __le__ = __ge__ = _refused(
        "{} is used in an `if` or in a comparison",
        f"{NOT_YET}; use maximum(a, b) for the larger one, or where(mask, a, b) to choose element by element, with "
        "compare(a, b, 'ogt') as a mask",
    )
    __float__ = __int__ = __index__ = _refused("{} is used as a plain number", NOT_YET)
    __iter__ = _refused("{} unpacked", "tiles(k, v) yields one tile for each of its operands")
    __getitem__ = __abs__ = __pow__ = _refused("{} is used in an operation that kernels do not have", WORDS)


Source = Value | TileNumber | float


@dataclass(frozen=True, slots=True)
class Transposed:
    """An operand as a factor of a product, with exchanged axes."""

    operand: Value

    @property
    def axes(self) -> tuple[str, ...]:
        """The operand's axes, exchanged."""
        return self.operand.axes[::-1]

    def written(self) -> str:
        """Return the factor in the form of messages."""
        return f"{self.operand.written()}.T"

    def __repr__(self) -> str:
        return f"{self.written()} ({' x '.join(self.axes)}, {self.operand.fmt})"

    def __matmul__(self, other: Any) -> Product:
        return Product(self, other)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refused("{}", EXCHANGED)


class Product:
    """``a @ b``, or a sum of such products, which is then either stored or added to a state by the matrix unit.

    ``terms``: the products that one accumulator adds, in this order.
    """

    terms: tuple[Product, ...]

    def __init__(self, a: Value | Transposed, b: Value | Transposed) -> None:
        left, right = (x.operand if isinstance(x, Transposed) else x for x in (a, b))
        if isinstance(right, Product):
            right.refuse()
        if isinstance(right, Value) and right.prepared is not None:
            name, right = right.name, right.prepared(right)
            right.name = f"{name}_read"
        if not isinstance(right, Value) or len(a.axes) < 2 or len(right.axes) < 2:
            fail(f"{a} @ {right}: a product needs two tiles; vectors of rows and numbers are multiplied by *")
        if len(a.axes) > 2 or len(right.axes) > 2:
            fail(f"{a} @ {right}: a product needs tiles with two axes, and here each row has a block of its own")
        inner, outer = right.axes[::-1] if isinstance(b, Transposed) else right.axes
        if a.axes[1] != inner:
            other = f"; write {a.written()} @ {right.written()}.T" if right is b and a.axes[1] == outer else ""
            fail(f"{a} @ {b}: the axis {a.axes[1]} of the left factor does not match {inner}{other}")
        for x in (left, right):
            if (e := x.event) and x.fmt in BLOCK_FORMATS and x.axes[e.attributes.axis] != inner:
                fail(
                    f"{a} @ {b}: the scaled blocks of {x} run along {x.axes[e.attributes.axis]}, but the product "
                    f"sums along {inner}"
                )
        if a.axes[0] == outer:
            fail(
                f"{a} @ {b}: both axes of the product are named {outer}; bind the operand twice, with different "
                "names of its axes"
            )
        self.a, self.b, self.axes = left, right, (a.axes[0], outer)
        self.how = Attributes(transpose_a=isinstance(a, Transposed), transpose_b=isinstance(b, Transposed))
        self.frame, self.line, self.terms = kernel_frame(), kernel_frame().f_lineno, (self,)
        TRACE.get().unstored.append(self)

    def to(self, fmt: str) -> Value:
        """Return the product in ``fmt``, rounded once; a sum of products accumulates in float32."""
        if len(self.terms) > 1 and fmt != "float32":
            fail(f"({self}).to({fmt!r}): a sum of products is stored in the accumulator's format: .to('float32')")
        total = self._record(Value(self.axes, _checked(fmt), "product"), self.how, ())
        for t in self.terms[1:]:
            value = Value(t.axes, fmt, "product", onto=total)
            total = t._record(value, replace(t.how, accumulate=True), (total,))
        return total

    def onto(self, total: Value) -> Value:
        """Return ``total`` plus the product; the matrix unit adds them."""
        if total.axes != self.axes:
            fail(f"{total} + a product of {' x '.join(self.axes)}: their axes differ")
        for t in self.terms:
            total = t._record(Value(self.axes, total.fmt), replace(t.how, accumulate=True), (total,))
        return total

    def _record(self, dst: Value, attributes: Attributes, more: tuple[Value, ...]) -> Value:
        TRACE.get().unstored.remove(self.terms[0])
        return TRACE.get().record(Opcode.MATMUL, dst, (self.a, self.b, *more), attributes)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Product):
            if other.axes != self.axes:
                fail(f"{self} + {other}: their axes differ")
            total = copy(self)
            total.terms = *self.terms, *other.terms
            return total
        return self.onto(other) if isinstance(other, Value) else self.refuse()

    def __str__(self) -> str:
        factors = [
            (t.a.written() + ".T" * t.how.transpose_a, t.b.written() + ".T" * t.how.transpose_b) for t in self.terms
        ]
        return " + ".join(f"{left} @ {right}" for left, right in factors)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else self.refuse()

    def refuse(self, *_others: object) -> NoReturn:
        """Raise an error for a matrix product that is neither stored nor added to a state."""
        fail(f"{self} is a product that is not stored yet: write ({self}).to(format), or add it to a state: o + {self}")

    __radd__ = __add__
    __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = __neg__ = refuse
    __bool__ = __lt__ = __gt__ = refuse


def _binary(opcode: Opcode, a: Any, b: Any, how: Attributes = PLAIN, fmt: str = "") -> Value:
    """Record an operation of two values; ``fmt``: the format of its result, if it differs from theirs."""
    values, what = [x for x in (a, b) if isinstance(x, Value)], f"{opcode.name} of {a} and {b}"
    if not values:
        fail(f"{what}: one of them must be a tile or a vector of rows")
    if len({x.fmt for x in values}) > 1:
        fail(f"{what}: their formats differ; convert one of them with x.to(format)")
    return _rows(opcode, _joined(what, values), fmt or values[0].fmt, (a, b), how)


def _joined(what: str, values: list[Value]) -> tuple[str, ...]:
    """Return the axes of a result of values; vectors are broadcast over a tile's columns, or its one row."""
    tile = max(values, key=lambda x: (len(x.axes), x.axes[0] != ONE))
    columns = [x.axes for x in values if len(x.axes) == 1]
    axes = (*columns[0], tile.axes[1]) if columns and tile.axes[:1] == (ONE,) != columns[0] else tile.axes
    if any(x.axes not in (axes, axes[:1], (ONE, *axes[1:]), (ONE,)) for x in values):
        fail(f"{what}: their axes differ")
    return axes


def _logic(function: str, a: Source, b: Source) -> Value:
    for x in (a, b):
        if isinstance(x, Value) and (x.kind == "mask" or x.fmt != MASK):
            what = f"{x.name}, a mask by position" if x.kind == "mask" else str(x)
            fail(
                f"{function} of {what}: only masks of compare(a, b, relation) can be joined; use a separate where "
                "for each mask by position"
            )
    return _binary(Opcode.LOGIC, a, b, Attributes(variant=function))


def _by_nan(nan: str) -> Attributes:
    if nan not in MAX_NANS:
        fail(f"nan={nan!r}; allowed: {', '.join(MAX_NANS)}")
    return Attributes(variant="" if nan == MAX_NANS[0] else nan)


def _left(axes: tuple[str, ...], down: bool) -> tuple[str, ...]:
    """Return the axes of a reduction of rows, or ``down`` of columns."""
    return (ONE, *axes[1:]) if down else axes[:1]


def _along(how: Attributes, down: bool) -> Attributes:
    return replace(how, axis=DOWN) if down else how


def _rows(
    opcode: Opcode, axes: tuple[str, ...], fmt: str, srcs: tuple[Any, ...], how: Attributes = PLAIN, only: str = ""
) -> Value:
    """Record an operation of rows; a product's result is cast before rows process it."""
    operands = tuple(s.to(s.fmt) if isinstance(s, Value) and s.kind == "product" else s for s in srcs)
    return TRACE.get().record(opcode, Value(axes, fmt), operands, how, only)


def full(axes: str, start: float, fmt: str) -> Value:
    """Return a state that starts at a value; the last binding of its variable in the loop is the state's next value."""
    if not isinstance(axes, str) or not isinstance(start, float | int):
        fail(f"full({axes!r}, {start!r}, {fmt!r}): its arguments are axes as text, a start value and a format")
    trace, state = TRACE.get(), Value(tuple(axes.split()), _checked(fmt), "state", start=start)
    if trace.loop is not None:
        fail(f"full({axes!r}, ...) in a loop over tiles: a state starts before the loop")
    trace.states.append(state)
    return state


def filled(axes: str, number: Source, fmt: str) -> Value:
    """Return a tile, or a row vector, whose elements all equal a number; its instruction reads no operand.

    If a vector is given instead of the number, it is broadcast, as in other operations.
    """
    result = tuple(axes.split())
    if isinstance(number, Value) and result != _joined(
        what := f"filled({axes!r}, {number})", [number, Value(result, fmt)]
    ):
        fail(f"{what}: their axes differ")
    return _rows(Opcode.FILL, result, _checked(fmt), (number,))


def initial(operand: Value) -> Value:
    """Return a state that starts as an operand; the last binding of its variable in the loop is the state's
    next value.
    """
    trace = TRACE.get()
    if not isinstance(operand, Value) or operand.kind != "operand":
        fail(f"initial({operand}): the argument must be an operand of the kernel; for a number use full(...)")
    if trace.loop is not None:
        fail(f"initial({operand}) in a loop over tiles: a state starts before the loop")
    state = Value(operand.axes, operand.fmt, "state", start=0.0, first=operand)
    trace.states.append(state)
    return state


def exp(a: Value, variant: str = "") -> Value:
    """Return e^a, or another exponential (``exp2.correct``: 2^a); without a name the precision's exponential."""
    factor = TRACE.get().exponent_factor
    return _unary(Opcode.EXP, a if variant or factor == 1 else a * factor, variant)


@contextmanager
def in_units_of(factor: float) -> Iterator[None]:
    """Multiply the arguments of exponentials by a factor: the factor's logarithm has base e if the precision's
    exponentials are powers of two.
    """
    trace = TRACE.get()
    trace.exponent_factor = factor
    yield
    trace.exponent_factor = 1.0


def log(a: Value, variant: str = "") -> Value:
    """Return ln a, or another logarithm named by ``variant``."""
    return _unary(Opcode.LOG, a, variant)


def rsqrt(a: Value, variant: str = "") -> Value:
    """Return 1 / sqrt(a), correctly rounded or as named by ``variant``: ±Inf for ±0, NaN for negative numbers."""
    return _unary(Opcode.RSQRT, a, variant)


def sqrt(a: Value, variant: str = "") -> Value:
    """Return the square root of a, correctly rounded or as named by ``variant``: ±0 for ±0, NaN for negatives."""
    return _unary(Opcode.SQRT, a, variant)


def tanh(a: Value, variant: str = "") -> Value:
    """Return the hyperbolic tangent of a, correctly rounded or as named by ``variant``."""
    return _unary(Opcode.TANH, a, variant)


def erf(a: Value, variant: str = "") -> Value:
    """Return the error function of a, correctly rounded or as named by ``variant``."""
    return _unary(Opcode.ERF, a, variant)


def divided(a: Source, b: Source, variant: str = "") -> Value:
    """Return a / b, rounded once or by ``variant`` (``div.hopper_full``: a GPU's ``div.full.f32``)."""
    return _binary(Opcode.DIV, a, b, Attributes(variant=variant))


def fma(a: Value, b: Source, c: Source, form: Literal["", "minus", "from"] = "") -> Value:
    """Return a b + c rounded once; variant ``minus``: a b - c, ``from``: c - a b.

    The operand with the most elements must be a value; the others may be numbers.
    """
    tiles_ = [x for x in (a, b, c) if isinstance(x, Value)]
    if not tiles_ or len({x.fmt for x in tiles_}) > 1:
        fail(f"fma of {a}, {b} and {c}: its operands must be values of one format, or numbers")
    axes = _joined(f"fma of {a}, {b} and {c}", tiles_)
    return _rows(Opcode.FMA, axes, tiles_[0].fmt, (a, b, c), Attributes(variant=form))


def inverse(a: Value, order: str = "") -> Value:
    """Return the inverse of I + L in a named order (default: the core's), where L is the part of a square tile below
    the diagonal.

    The elements on and above the diagonal are not read. One vector core, or one warp group, must have all rows of the
    tile.
    """
    if not isinstance(a, Value) or len(a.axes) < 2:
        fail(f"inverse of {a}: the tile must be square")
    if order and order not in INVERSE_ORDERS:
        fail(f"inverse({a.written()}, {order!r}): unknown order; allowed: {', '.join(INVERSE_ORDERS)}")
    if a.fmt != "float32":
        fail(f"inverse of {a}: an inverse is computed in float32; convert the tile with .to('float32')")
    return _rows(Opcode.INVERSE, a.axes, a.fmt, (a,), Attributes(order=order))


def folded(values: tuple[Source, ...], text: str, order: str = "sequential", *, down: bool = False) -> Value:
    """Return a result of a reduction of each row by a function of two elements, in a named order.

    ``values``: one to four values of one format, or numbers; an element consists of one number of each value. ``text``:
    the function in the form of `npusim.formats.combine_text`; ``order``: as in `npusim.formats.folded`; ``down``: as in
    `Value.sum`.
    """
    axes, fmt = _of_elements("folded", values, text)
    how = _along(Attributes(variant=text, order=order), down)
    return _rows(Opcode.FOLD, _left(axes, down), fmt, values, how)


def scanned(values: tuple[Source, ...], text: str, order: str = "sequential") -> Value:
    """Return, for each element of a row, a result of the reduction of all elements up to it; otherwise as `folded`."""
    axes, fmt = _of_elements("scanned", values, text)
    if len(axes) < 2:
        fail(f"scanned: a scan goes along the columns of a row; bind the vector as one row, '1 {axes[0]}'")
    return _rows(Opcode.SCAN, axes, fmt, values, Attributes(variant=text, order=order))


def _of_elements(word: str, values: tuple[Source, ...], text: str) -> tuple[tuple[str, ...], str]:
    """Return the axes and the format of the values of a function of two elements."""
    blocks = [x for x in values if isinstance(x, Value)]
    if not blocks or len({x.fmt for x in blocks}) > 1:
        fail(f"{word}: its operands must be values of one format, or numbers")
    try:
        combine_of(text)
    except FormatError as error:
        fail(f"{word}: {error}")
    return _joined(f"{word} of {', '.join(map(str, values))}", blocks), blocks[0].fmt


def _unary(opcode: Opcode, a: Any, variant: str) -> Value:
    if isinstance(a, Product):
        a.refuse()
    if not isinstance(a, Value):
        name = opcode.name.lower()
        fail(f"{name} of {a}: this is neither a tile nor a vector of rows; for numbers use math.{name}")
    return _rows(opcode, a.axes, a.fmt, (a,), Attributes(variant=variant))


def maximum(
    a: Value,
    b: Value | float,
    *,
    only: Value | tuple[Value, ...] | Literal["always"] | None = "always",
    nan: MaxNan = "number",
) -> Value:
    """Return the larger of two values; +0 is larger than -0.

    ``only``: a mask; the maximum is computed only on tiles that the mask cuts. On other tiles, and if ``only`` is None,
    the result is ``a``. ``nan``: the maximum of a number and NaN is the ``number`` (IEEE 754-2019 maximumNumber) or,
    with ``propagate``, NaN (maximum).
    """
    if isinstance(only, str):
        return _binary(Opcode.MAX, a, b, _by_nan(nan))
    masks = only if isinstance(only, tuple) else (only,) if isinstance(only, Value) else ()
    for mask in masks:
        a = _rows(Opcode.MAX, a.axes, a.fmt, (a, b), _by_nan(nan), only=mask.name)
    return a


def minimum(a: Value, b: Value | float, nan: MaxNan = "number") -> Value:
    """Return the smaller of two values; -0 is smaller than +0.

    ``nan`` as in `maximum`: the ``number`` (IEEE 754-2019 minimumNumber) or, with ``propagate``, NaN (minimum).
    """
    return _binary(Opcode.MIN, a, b, _by_nan(nan))


def compare(a: Source, b: Source, relation: str) -> Value:
    """Return the mask of the elements for which a relation of two values, or of a value and a number, is true; -0
    equals +0.

    ``relation``: ``oeq ogt oge olt ole one``, false if an operand is NaN; ``ueq ugt uge ult ule une``, true if an
    operand is NaN; ``ord``: no operand is NaN, ``uno``: at least one is.  ``where`` takes masks, and ``& | ^ ~`` join
    them.
    """
    if relation not in RELATIONS:
        fail(f"compare({a}, {b}, {relation!r}): unknown relation; allowed: {', '.join(RELATIONS)}")
    return _binary(Opcode.COMPARE, a, b, Attributes(variant=relation), MASK)


def integers(a: Source, b: Source, how: str) -> Value:
    """Return an operation of integers, or of whole numbers; ``how``: LLVM's name and the bits of the type in which it
    wraps, as ``addi.32``.
    """
    name, _, width = how.partition(".")
    if name not in WHOLE_OPERATIONS or not width.isdigit():
        fail(f"integers({a}, {b}, {how!r}): unknown operation; allowed: {', '.join(WHOLE_OPERATIONS)}, each with .BITS")
    return _binary(Opcode.INTEGER, a, b, Attributes(variant=how))


def bits(a: Value, how: str, fmt: str) -> Value:
    """Return the bits of floats of a format as integers (``bits.FORMAT``), or the floats of these bits
    (``floats.FORMAT``), in ``fmt``.
    """
    way, _, of = how.partition(".")
    if way not in ("bits", "floats") or not isinstance(a, Value):
        fail(f"bits({a}, {how!r}): a value is read by 'bits.FORMAT' or 'floats.FORMAT'")
    _checked(of)
    return _rows(Opcode.BITS, a.axes, _checked(fmt), (a,), Attributes(variant=how))


def where(mask: Value | tuple[Value, ...] | None, kept: Source, other: Source, fmt: str = "") -> Value:
    """Return ``kept`` where the mask is 1, else ``other``, bit for bit.

    For a mask of compared values (`compare`), ``kept`` and ``other`` are values or numbers; ``fmt`` is the format if
    both are numbers. For a mask of positions (an argument of the kernel), one of them is a number; tiles that the mask
    does not cut do not change, and no tile changes if the mask is None. Several masks of positions all apply.
    """
    if isinstance(mask, Value) and mask.kind != "mask" and mask.fmt == MASK:
        values, what = [x for x in (kept, other) if isinstance(x, Value)], f"where({mask}, {kept}, {other})"
        if len(formats := {x.fmt for x in values} | ({_checked(fmt)} if fmt else set())) != 1:
            fail(f"{what}: both must have one format; for two numbers set it with fmt=...")
        how = Attributes(variant=COMPARED)
        return _rows(Opcode.SELECT, _joined(what, [mask, *values]), formats.pop(), (mask, kept, other), how)
    tile = kept if isinstance(kept, Value) else other
    if not isinstance(tile, Value) or (isinstance(kept, Value) and isinstance(other, Value)):
        fail(f"where(mask, {kept}, {other}): one of the two must be a tile and the other a number")
    for one in mask if isinstance(mask, tuple) else () if mask is None else (mask,):
        if not isinstance(one, Value) or one.kind != "mask":
            why = "the mask must be an argument of the kernel or the result of compare(a, b, relation)"
            fail(f"where({one}, ...): {why}")
        if one.axes != tile.axes:
            fail(f"where({one.name}, ...) of {tile}: this mask is for tiles with axes {' x '.join(one.axes)}")
        number = kept if tile is other else other
        if isinstance(number, float) and math.isinf(number) and not stored_format(tile.fmt).has_infinity:
            why = f"{tile.fmt} has no infinity; give a finite number or widen {tile}"
            fail(f"where({one.name}, {kept}, {other}): {why}")
        if tile is other:
            kept = _rows(Opcode.FILL, tile.axes, tile.fmt, (number,), only=one.name)
            return _rows(Opcode.SELECT, tile.axes, tile.fmt, (one, kept, tile), only=one.name)
        tile = _rows(Opcode.SELECT, tile.axes, tile.fmt, (one, tile, other), only=one.name)
    return tile


def tiles(*operands: Value, axis: str = "") -> Iterator[Any]:
    """Loop over operands tile by tile along the axis that they have in common; the body is traced once for all tiles.

    ``axis`` names the axis if the operands share several, or the axis of a stack of matrices.
    """
    trace, frame = TRACE.get(), sys._getframe(1)
    if not operands or not all(isinstance(x, Value) and x.kind == "operand" for x in operands):
        fail(f"tiles of {operands or 'nothing'}: the arguments must be operands of the kernel", frame)
    if trace.walks:  # a tensor without these axes has one matrix for each tile
        is_along = any(a in trace.walks for x in operands for a in x.axes)
        axis = axis or (trace.walks[-1] if is_along else "")
    shared = [a for a in operands[0].axes if all(a in x.axes for x in operands)]
    shared = [a for a in shared if a != trace.row_axis] or shared
    axis = axis or (shared[-1] if len(operands) == 1 or len(shared) == 1 else "")
    if trace.loop is not None:
        fail("a loop over tiles cannot contain another one", frame)
    if not axis:
        which = f"name the axis of the loop with axis=...: {' or '.join(shared)}" if shared else "they share no axis"
        fail(f"tiles of {' and '.join(map(str, operands))}: {which}", frame)
    views = tuple(Value(x.axes, x.fmt, x.kind, x.name, prepared=x.prepared) for x in operands)
    trace.enter(axis, operands, views, frame)
    try:
        yield views[0] if len(views) == 1 else views
    except GeneratorExit:  # the body breaks or returns: the kernel reports it
        trace.left_line = frame.f_lineno
        raise
    trace.leave(frame)


@dataclass(eq=False, slots=True)
class Event:
    """One operation; ``loop``: the number of its loop; None outside all loops."""

    opcode: Opcode
    dst: Value
    srcs: tuple[Source, ...]
    attributes: Attributes
    only: str
    loop: int | None
    line: int
    file: str

    @property
    def read(self) -> list[Value]:
        """The values among its sources."""
        return [s for s in self.srcs if isinstance(s, Value)]


@dataclass(frozen=True, slots=True)
class Carried:
    """A state's variable in a loop: its values at the beginning and at the end of a tile, the event after which the
    latter is bound, and the place of the binding.
    """

    old: Value
    new: Value
    loop: int
    bound_after: Event
    line: int


@dataclass
class Trace:
    """All operations that a kernel recorded."""

    row_axis: str
    events: list[Event] = field(default_factory=list)
    axes: list[str] = field(default_factory=list)  #: axes of the kernel's loops
    unstored: list[Product] = field(default_factory=list)
    constants: dict[float, str] = field(default_factory=dict)  #: names of numbers among its variables
    carried: list[Carried] = field(default_factory=list)
    states: list[Value] = field(default_factory=list)
    loop: int | None = None
    loop_frame: FrameType | None = None
    exponent_factor: float = 1.0
    left_line: int = 0  #: line at which a loop ended early, if one did
    walks: tuple[str, ...] = ()  #: axes along which one loop advances together

    def __post_init__(self) -> None:
        self._walked: tuple[Value, ...] = ()
        self._views: set[Value] = set()
        self._gone: set[Value] = set()  # tiles of finished loops, and the values that states had before these loops
        # plain numbers among the variables of the loop's function, when the loop begins
        self._numbers: dict[str, object] = {}
        self.moved: dict[Value, Value] = {}  # the value of a state's variable after a loop, and its copy
        self._held: dict[str, Value] = {}
        self._bound: dict[tuple[int, str], Value] = {}
        self._rebound: dict[tuple[Value, Value], tuple[Event, int]] = {}
        self._line = 0  # line of the loop's function at the last event

    def name_variables(self, frame: FrameType) -> None:
        """Name values after the variables that hold them; record the event at which a variable changes from one value
        to another.
        """
        for name, x in frame.f_locals.items():
            if isinstance(x, Value):
                if x.name in ("", "_"):
                    x.name = name
                if x in self._views:
                    x.variable = name
                key = id(frame), name
                before = self._bound.get(key)
                if before is not x:
                    self._bound[key] = x
                    if before is not None and self.events:
                        line = next((at for at in _stores(frame.f_code).get(name, ()) if at >= self._line), 0)
                        self._rebound.setdefault((before, x), (self.events[-1], line))
            elif isinstance(x, float | int) and not isinstance(x, bool):
                self.constants.setdefault(float(x), name)

    def record(
        self, opcode: Opcode, dst: Value, srcs: tuple[Any, ...], attributes: Attributes = PLAIN, only: str = ""
    ) -> Value:
        """Record an operation and return its result."""
        frame = kernel_frame()
        self.name_variables(frame)
        srcs = tuple(self.moved.get(s, s) if isinstance(s, Value) else s for s in srcs)
        self._line = self.loop_frame.f_lineno if self.loop_frame else 0
        for s in srcs:
            if isinstance(s, Product):
                s.refuse()
            if isinstance(s, Transposed):
                fail(f"{opcode.name} of {s}: {EXCHANGED}")
            if isinstance(s, TileNumber) and self.loop is None:
                fail(f"{s.text} is used outside of a loop over tiles")
            if isinstance(s, Value):
                self._check_read(s)
                if s.fmt in BLOCK_FORMATS and opcode is not Opcode.MATMUL:
                    fail(f"{opcode.name} of {s}: a tile in a block-scaled format can only be a factor of a product")
            elif not isinstance(s, TileNumber | float | int):
                fail(f"{opcode.name} of {s!r}: this is not a tile, a vector of rows or a number")
        dst.event = Event(opcode, dst, srcs, attributes, only, self.loop, frame.f_lineno, frame.f_code.co_filename)
        self.events.append(dst.event)
        return dst

    def _check_read(self, s: Value) -> None:
        if any(s is x for x in self._walked):
            fail(f"the loop reads {s} tile by tile: use the loop's variable")
        is_of_tile = s.event is not None and s.event.loop not in (None, self.loop) and s.state is None
        if is_of_tile or s in self._gone:
            line = f", computed in line {s.event.line}," if s.event else ""
            fail(
                f"{s}{line} is read after its loop, where it has no value; start a state of the loop with "
                "full(...) instead"
            )

    def enter(self, axis: str, operands: tuple[Value, ...], views: tuple[Value, ...], frame: FrameType) -> None:
        """Begin a loop over tiles of ``operands``."""
        self.name_variables(frame)
        self.loop, self.loop_frame, self._walked, self._views = len(self.axes), frame, operands, set(views)
        self.axes.append(axis)
        self._numbers = {n: x for n, x in frame.f_locals.items() if isinstance(x, int | float)}
        self._held = {
            n: x
            for n, x in frame.f_locals.items()
            if isinstance(x, Value) and (x.kind == "state" or x.state is not None)
        }

    def leave(self, frame: FrameType) -> None:
        """End the loop: the current bindings of states' variables are their next values."""
        self.name_variables(frame)
        assert self.loop is not None
        for name, number in self._numbers.items():
            if (now := frame.f_locals.get(name)) is not number and now != number:
                fail(
                    f"{name} is {number} at the start of a tile and {now} at its end, but the body is traced once; "
                    "use kj.index for the number of the tile, or per_tile(function, kj.index) for a number that "
                    "depends on it",
                    frame,
                )
        copies: dict[Value, Value] = {}
        gone = set(self._views)
        for name, old in self._held.items():
            new = frame.f_locals.get(name)
            if new is old or any(c.old is old and c.new is new for c in self.carried):
                continue
            if other := [n for n, x in self._held.items() if x.root is old.root and frame.f_locals.get(n) is not new]:
                fail(f"{name} and {other[0]} share one state: start each with its own full(...)", frame)
            if not isinstance(new, Value) or (new.axes, new.fmt) != (old.axes, old.fmt):
                before, now = (
                    f"({' x '.join(x.axes)}, {x.fmt})" if isinstance(x, Value) else "no value" if x is None else x
                    for x in (old, new)
                )
                _, line = self._rebound.get((old, new), (None, 0)) if isinstance(new, Value) else (None, 0)
                fail(
                    f"{name} is {before} at the start of a tile and {now} at its end: the axes and format of a "
                    f"state cannot change; convert it with .to({old.fmt!r}), or use another variable",
                    frame,
                    line,
                )
            gone.add(old)
            if new.event is None or new.event.loop != self.loop or new.state is not None:
                held, new = new, self.record(Opcode.COPY, Value(old.axes, old.fmt), (new,))
                copies[held] = new
            new.state = old.root
            bound, line = self._rebound.get((old, new), (self.events[-1], 0))
            self.carried.append(Carried(old, new, self.loop, bound, line))
        self.moved |= copies
        self._gone = (self._gone | gone) - set(copies)
        self.loop, self._walked, self._views = None, (), set()


@cache
def _stores(code: CodeType) -> dict[str, list[int]]:
    """Return the lines where a function binds each variable."""
    lines: dict[str, list[int]] = {}
    line = code.co_firstlineno
    for i in dis.get_instructions(code):
        line = (i.positions.lineno if i.positions else None) or line
        if i.opname.startswith("STORE_"):
            for n in i.argval if isinstance(i.argval, tuple) else (i.argval,):
                lines.setdefault(n, []).append(line)
    return lines
