"""The language of kernels: a plain function on tiles, run once on symbols and recorded operation by operation.

Every operation makes a new `Value`.  A variable that holds a state where a loop over tiles begins is carried: what
it is bound to where the loop ends is the state's next value.  `npusim.algorithms.lowering` turns the record into the
tables that machines read.
"""

from __future__ import annotations

import dis
import operator
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from npusim.errors import ProgramError
from npusim.ir.op import PLAIN, Attributes, Opcode
from npusim.ir.opaque import varying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    from npusim.algorithms.phase import Visit

__all__ = [
    "Event", "Product", "TileNumber", "Trace", "Transposed", "Value", "exp", "fail", "full", "log", "maximum", "per_tile",
    "tiles", "where",
]

Kind = Literal["operand", "mask", "state", "product", "row"]
TRACE: ContextVar[Trace] = ContextVar("trace")
#: What stores or adds up a product; everything else refuses one.
PRODUCT_HINT = "a product is stored by (a @ b).to(format), or added to what there is by o + a @ b"


def kernel_frame() -> FrameType:
    """Return the innermost frame outside this module: the kernel's own, or that of a function it calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None
    return frame


def fail(why: str, frame: FrameType | None = None) -> NoReturn:
    """Raise `ProgramError` with the file and line of the kernel, and its name."""
    frame = frame or kernel_frame()
    raise ProgramError(f"{frame.f_code.co_filename}:{frame.f_lineno}: {frame.f_code.co_name}: {why}")


class TileNumber:
    """A number that differs between tiles (a tile's index, its size): known where the tile is bound to a core."""

    def __init__(self, of: Callable[[Visit], Any], text: str) -> None:
        self.of, self.text = of, text

    def _with(self, other: TileNumber | float, symbol: str, *, swapped: bool = False) -> TileNumber:
        functions = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
        a, b = (other, self) if swapped else (self, other)
        of = [x.of if isinstance(x, TileNumber) else lambda _tile, x=x: x for x in (a, b)]
        text = symbol.join(x.text if isinstance(x, TileNumber) else f"{x:g}" for x in (a, b))
        return TileNumber(lambda tile: varying(functions[symbol], of[0](tile), of[1](tile)), f"({text})")

    def __add__(self, other: TileNumber | float) -> TileNumber:
        return self._with(other, "+")

    def __sub__(self, other: TileNumber | float) -> TileNumber:
        return self._with(other, "-")

    def __mul__(self, other: TileNumber | float) -> TileNumber:
        return self._with(other, "*")

    def __rtruediv__(self, other: float) -> TileNumber:
        return self._with(other, "/", swapped=True)

    __radd__, __rmul__ = __add__, __mul__

    def __bool__(self) -> bool:
        fail(f"`if` on {self.text}, which differs between tiles; per_tile(function, {self.text}) computes a constant")

    def __lt__(self, _other: object) -> bool:
        return bool(self)

    __gt__ = __le__ = __ge__ = __lt__


def per_tile(function: Callable[..., float], *numbers: TileNumber) -> TileNumber:
    """Return ``function`` of numbers that differ between tiles, as a constant of each tile; it must be pure."""
    text = f"{getattr(function, '__name__', 'f')}({', '.join(n.text for n in numbers)})"
    return TileNumber(lambda tile: varying(function, *(n.of(tile) for n in numbers)), text)


@dataclass(eq=False, slots=True)
class Value:
    """A tile (two axes) or a vector of its rows (one), in a format.

    ``state``: the state whose next value it is.  ``onto``: the state in whose place it is written.
    """

    axes: tuple[str, ...]
    fmt: str
    kind: Kind = "row"
    name: str = ""
    start: float | None = None
    chosen_role: str = ""
    event: Event | None = None
    state: Value | None = None
    onto: Value | None = None

    def __repr__(self) -> str:
        return f"{self.name or 'a value'} ({' x '.join(self.axes)}, {self.fmt})"

    @property
    def home(self) -> Value:
        """The state whose next value it is; itself for any other."""
        return self if self.state is None else self.state

    @property
    def index(self) -> TileNumber:
        """The number of an operand's tile in its loop, from 0."""
        return TileNumber(lambda tile: varying(float, tile.index), "index")

    @property
    def size(self) -> TileNumber:
        """The size of an operand's tile along the loop's axis."""
        return TileNumber(lambda tile: tile.cols, "size")

    @property
    def T(self) -> Transposed:  # noqa: N802 - numpy's name
        """The operand with its axes exchanged, as the right factor of a product."""
        return Transposed(self)

    def __add__(self, other: Any) -> Value:
        return other.onto(self) if isinstance(other, Product) else _binary(Opcode.ADD, self, other)

    def __radd__(self, other: Any) -> Value:
        return _binary(Opcode.ADD, self, other)

    def __sub__(self, other: Any) -> Value:
        return _binary(Opcode.SUB, self, other)

    def __rsub__(self, other: Any) -> Value:
        return _binary(Opcode.SUB, other, self)

    def __mul__(self, other: Any) -> Value:
        return _binary(Opcode.MUL, self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Value:
        return _binary(Opcode.DIV, self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return _binary(Opcode.DIV, other, self)

    def __neg__(self) -> Value:
        return _binary(Opcode.MUL, self, -1.0)

    def __matmul__(self, other: Any) -> Product:
        return Product(self, other)

    def to(self, fmt: str, *, overflow: str = "") -> Value:
        """Return it rounded once to ``fmt``; no instruction where that is its format already."""
        return TRACE.get().record(Opcode.CAST, Value(self.axes, fmt), (self,), Attributes(overflow=overflow))

    def max(self) -> Value:
        """Return the maximum of each row."""
        return _rows(Opcode.ROW_MAX, self.axes[:1], self.fmt, (self,))

    def sum(self, order: str = "") -> Value:
        """Return the sum of each row, in a named order (the core's own by default)."""
        return _rows(Opcode.ROW_SUM, self.axes[:1], self.fmt, (self,), Attributes(order=order))

    def role(self, role: str) -> Value:
        """Return it with what it means in diagnosis, where its use does not say so."""
        self.chosen_role = role
        return self

    def __bool__(self) -> bool:
        fail(f"`if` on {self}: a kernel is traced before there are values; where(...) chooses element by element")

    def __lt__(self, _other: object) -> bool:
        return bool(self)

    __gt__ = __le__ = __ge__ = __lt__


Source = Value | TileNumber | float


@dataclass(frozen=True, slots=True)
class Transposed:
    """An operand as the right factor of a product, its axes exchanged."""

    operand: Value

    def __repr__(self) -> str:
        return f"{self.operand.name or 'a value'}.T ({' x '.join(self.operand.axes[::-1])}, {self.operand.fmt})"


class Product:
    """``a @ b`` until it is stored, or added to a state by the matrix unit."""

    def __init__(self, a: Value, b: Value | Transposed) -> None:
        right = b.operand if isinstance(b, Transposed) else b
        if not isinstance(right, Value):
            fail(f"{a} @ {b!r}: {PRODUCT_HINT}")
        if len(a.axes) < 2 or len(right.axes) < 2:
            fail(f"{a} @ {right}: a product needs two tiles; row vectors are multiplied by *")
        inner, outer = right.axes[::-1] if isinstance(b, Transposed) else right.axes
        if a.axes[1] != inner:
            other = f"; {right.name}.T has {a.axes[1]} there" if right is b and a.axes[1] == outer else ""
            fail(f"{a} @ {b}: {a.axes[1]} meets {inner}{other}")
        self.a, self.b, self.axes, self.line = a, right, (a.axes[0], outer), kernel_frame().f_lineno
        TRACE.get().unstored.append(self)

    def to(self, fmt: str) -> Value:
        """Return it stored in ``fmt``, rounded once."""
        return self._record(Value(self.axes, fmt, "product"), PLAIN, ())

    def onto(self, total: Value) -> Value:
        """Return ``total`` with it added by the matrix unit."""
        if total.axes != self.axes:
            fail(f"{total} + a product of {' x '.join(self.axes)}: their axes differ")
        return self._record(Value(self.axes, total.fmt), Attributes(accumulate=True), (total,))

    def _record(self, dst: Value, attributes: Attributes, more: tuple[Value, ...]) -> Value:
        TRACE.get().unstored.remove(self)
        return TRACE.get().record(Opcode.MATMUL, dst, (self.a, self.b, *more), attributes)

    def __add__(self, other: Any) -> Value:
        return self.onto(other) if isinstance(other, Value) else fail(PRODUCT_HINT)

    def _refuse(self, _other: object) -> NoReturn:
        fail(PRODUCT_HINT)

    __radd__ = __add__
    __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = _refuse


def _binary(opcode: Opcode, a: Any, b: Any) -> Value:
    tile = a if isinstance(a, Value) and not (isinstance(b, Value) and len(b.axes) > len(a.axes)) else b
    assert isinstance(tile, Value)
    if isinstance(a, Value) and isinstance(b, Value):
        if a.fmt != b.fmt:
            fail(f"{opcode.name} of {a} and {b}: say which is converted, x.to(format)")
        if a.axes[0] != b.axes[0] or (len(a.axes) == len(b.axes) and a.axes != b.axes):
            fail(f"{opcode.name} of {a} and {b}: their axes differ")
    return _rows(opcode, tile.axes, tile.fmt, (a, b))


def _rows(
    opcode: Opcode, axes: tuple[str, ...], fmt: str, srcs: tuple[Any, ...], attributes: Attributes = PLAIN, only: str = ""
) -> Value:
    """Record an operation of rows; what a product left is taken over by a cast before rows work on it."""
    taken = tuple(s.to(s.fmt) if isinstance(s, Value) and s.kind == "product" else s for s in srcs)
    return TRACE.get().record(opcode, Value(axes, fmt), taken, attributes, only)


def full(axes: str, start: float, fmt: str) -> Value:
    """Return a state that starts at a value: what a loop binds its variable to is its next value."""
    return Value(tuple(axes.split()), fmt, "state", start=start)


def exp(a: Value, variant: str = "") -> Value:
    """Return e^a, or another exponential (``exp2.correct``: 2^a); none named: the precision's."""
    return _rows(Opcode.EXP, a.axes, a.fmt, (a,), Attributes(variant=variant))


def log(a: Value, variant: str = "") -> Value:
    """Return ln a, or another logarithm named by ``variant``."""
    return _rows(Opcode.LOG, a.axes, a.fmt, (a,), Attributes(variant=variant))


def maximum(a: Value, b: Value | float, *, only: Value | tuple[Value, ...] | None | Literal["always"] = "always") -> Value:
    """Return the larger; ``only``: a mask, on whose tiles it is taken (elsewhere, and with None, it is ``a``)."""
    if only == "always":
        return _binary(Opcode.MAX, a, b)
    masks = only if isinstance(only, tuple) else (only,) if isinstance(only, Value) else ()
    for mask in masks:
        a = _rows(Opcode.MAX, a.axes, a.fmt, (a, b), only=mask.name)
    return a


def where(mask: Value | tuple[Value, ...] | None, kept: Source, other: Source) -> Value:
    """Return ``kept`` where the mask is 1, else ``other``; one of them is a number.

    Tiles that the mask does not cut stay as they are; so do all without a mask (None).  Of several masks each
    is applied.
    """
    tile = kept if isinstance(kept, Value) else other
    if not isinstance(tile, Value):
        fail(f"where: neither {kept} nor {other} is a tile")
    for one in mask if isinstance(mask, tuple) else () if mask is None else (mask,):
        if tile is other:
            number = kept
            kept = _rows(Opcode.FILL, tile.axes, tile.fmt, (number,), only=one.name)
            return _rows(Opcode.SELECT, tile.axes, tile.fmt, (one, kept, tile), only=one.name)
        tile = _rows(Opcode.SELECT, tile.axes, tile.fmt, (one, tile, other), only=one.name)
    return tile


def tiles(*operands: Value, axis: str = "") -> Iterator[Any]:
    """Walk operands tile by tile along the axis they share; the body is traced once, and stands for every tile.

    ``axis`` says which where they share several, or names the axis of a stack of matrices.
    """
    trace, frame = TRACE.get(), sys._getframe(1)
    shared = [a for a in operands[0].axes if a != trace.row_axis and all(a in x.axes for x in operands)]
    axis = axis or (shared[-1] if len(operands) == 1 or len(shared) == 1 else "")
    if trace.loop is not None:
        fail("a loop in a loop: one loop walks the tiles of a kernel at a time", frame)
    if not axis:
        fail(f"tiles of {operands}: axis=... says which of {shared} is walked", frame)
    trace.enter(axis, operands, frame)
    views = tuple(Value(x.axes, x.fmt, x.kind, x.name) for x in operands)
    yield views[0] if len(views) == 1 else views
    trace.leave(frame)  # not reached where the body breaks or returns: the kernel says so


@dataclass(eq=False, slots=True)
class Event:
    """One operation; ``loop``: the number of its loop, None outside of all."""

    opcode: Opcode
    dst: Value
    srcs: tuple[Source, ...]
    attributes: Attributes
    only: str
    loop: int | None
    line: int
    function: str  #: whose line it is: the kernel's own, or a function that it calls

    @property
    def read(self) -> list[Value]:
        """The values among its sources."""
        return [s for s in self.srcs if isinstance(s, Value)]


@dataclass(frozen=True, slots=True)
class Carried:
    """A state's variable across a loop: its value where a tile begins and ends, after which event it was bound, where."""

    old: Value
    new: Value
    loop: int
    bound_after: Event
    line: int


@dataclass
class Trace:
    """Everything a kernel did."""

    row_axis: str
    events: list[Event] = field(default_factory=list)
    axes: list[str] = field(default_factory=list)  #: of its loops
    unstored: list[Product] = field(default_factory=list)
    constants: dict[float, str] = field(default_factory=dict)  #: names of numbers among its variables
    carried: list[Carried] = field(default_factory=list)
    loop: int | None = None
    loop_frame: FrameType | None = None
    loop_functions: set[str] = field(default_factory=set)  #: that have a loop over tiles

    def __post_init__(self) -> None:
        self._walked: tuple[Value, ...] = ()
        self._held: dict[str, Value] = {}
        self._bound: dict[tuple[int, str], Value] = {}
        self._rebound: dict[tuple[Value, Value], tuple[Event, int]] = {}
        self._line = 0  # of the loop's function, at the last event

    def name_variables(self, frame: FrameType) -> None:
        """Name values after the variables that hold them; note when a variable went from one value to another."""
        for name, x in frame.f_locals.items():
            if isinstance(x, Value):
                if x.name in ("", "_"):
                    x.name = name
                key = id(frame), name
                before = self._bound.get(key)
                if before is not x:
                    self._bound[key] = x
                    if before is not None and self.events:
                        self._rebound.setdefault((before, x), (self.events[-1], _line_of_store(frame, name, self._line)))
            elif isinstance(x, float | int) and not isinstance(x, bool):
                self.constants.setdefault(float(x), name)

    def record(
        self, opcode: Opcode, dst: Value, srcs: tuple[Any, ...], attributes: Attributes = PLAIN, only: str = ""
    ) -> Value:
        """Note an operation and return what it makes."""
        frame = kernel_frame()
        self.name_variables(frame)
        self._line = self.loop_frame.f_lineno if self.loop_frame else 0
        for s in srcs:
            if isinstance(s, Product | Transposed):
                fail(f"{opcode.name}: {PRODUCT_HINT}")
            if isinstance(s, TileNumber) and self.loop is None:
                fail(f"{s.text} outside of a loop over tiles")
            if isinstance(s, Value):
                self._check_read(s)
            elif not isinstance(s, TileNumber | float | int):
                fail(f"{opcode.name} of {s!r}: neither a tile, a vector of rows nor a number")
        dst.event = Event(opcode, dst, srcs, attributes, only, self.loop, frame.f_lineno, frame.f_code.co_name)
        self.events.append(dst.event)
        return dst

    def _check_read(self, s: Value) -> None:
        if s in self._walked:
            fail(f"{s} is walked tile by tile here: use the loop's own variable")
        if s.event and s.event.loop not in (None, self.loop) and s.state is None:
            fail(f"{s} of line {s.event.line} is that of one tile: full(...) makes a state, kept between tiles")

    def enter(self, axis: str, operands: tuple[Value, ...], frame: FrameType) -> None:
        """Begin a loop over tiles of ``operands``."""
        self.name_variables(frame)
        self.loop, self.loop_frame, self._walked = len(self.axes), frame, operands
        self.axes.append(axis)
        self.loop_functions.add(frame.f_code.co_name)
        self._held = {
            n: x for n, x in frame.f_locals.items()
            if isinstance(x, Value) and (x.kind == "state" or x.state is not None)
        }
        held = set(self._held.values())
        if len({x.home for x in held}) < len(held):
            fail("two variables hold one state", frame)

    def leave(self, frame: FrameType) -> None:
        """End the loop: what variables of states are bound to now are their next values."""
        self.name_variables(frame)
        assert self.loop is not None
        for name, old in self._held.items():
            new = frame.f_locals.get(name)
            if new is old:
                continue
            if not isinstance(new, Value) or (new.axes, new.fmt) != (old.axes, old.fmt):
                fail(f"{name} is {old} where a tile begins, and {new} where it ends", frame)
            if new.event is None or new.event.loop != self.loop or new.state is not None:
                new = self.record(Opcode.COPY, Value(old.axes, old.fmt), (new,))
            new.state = old.home
            bound, line = self._rebound.get((old, new), (self.events[-1], 0))
            self.carried.append(Carried(old, new, self.loop, bound, line))
        self.loop, self._walked = None, ()


def _line_of_store(frame: FrameType, name: str, line: int) -> int:
    """Return the first line from ``line`` on where a function binds a variable; 0 where there is none."""
    return next((at for at in _stores(frame.f_code).get(name, ()) if at >= line), 0)


@cache
def _stores(code: CodeType) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    line = code.co_firstlineno
    for i in dis.get_instructions(code):
        line = (i.positions.lineno if i.positions else None) or line
        if i.opname.startswith("STORE_"):
            for n in i.argval if isinstance(i.argval, tuple) else (i.argval,):
                found.setdefault(n, []).append(line)
    return found
