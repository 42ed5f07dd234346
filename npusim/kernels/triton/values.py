"""Values of a kernel that are not yet floats of a tile: addresses, masks and numbers, evaluated.

Integers and pointers are computed for all programs of the grid and all iterations of the loop at once.  Any function of
program and iteration is a base; along the axes of a block, integers are linear.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim.formats import get_format
from npusim.kernels.triton.ttir_text import FORMATS, shape_of
from npusim.program.ir.tile import in_a_row

if TYPE_CHECKING:
    from npusim.kernels.triton.ttir_text import Op

Integers = np.ndarray[Any, np.dtype[np.int64]]
Booleans = np.ndarray[Any, np.dtype[np.bool_]]
#: Axes of a tensor; the axis of splits exists if the call's tensor has five axes.
AXES = ("batch", "heads", "splits", "rows", "columns")
SPLIT, ROWS, COLUMNS = 2, 3, 4


@dataclass(frozen=True)
class Tensor:
    """A tensor of a launch: (batch, heads, splits, rows, columns), contiguous if no strides (in elements) are given.

    ``is_transposed``: the matrices are the transposes of the call's matrices.  ``rank``: number of axes of the call's
    tensor, which are the last axes here; with fewer than five there are no splits.  ``is_workspace``: one launch writes
    the tensor for the next launch.
    """

    name: str
    shape: tuple[int, ...]
    fmt: str
    strides: tuple[int, ...] = ()
    is_transposed: bool = False
    rank: int = 4
    is_workspace: bool = False

    @property
    def steps(self) -> tuple[int, ...]:
        """Distance in elements from one index to the next along each axis."""
        return self.strides or tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    def piece(self, rows: int, cols: int) -> int:
        """Return how many elements of a part of a matrix follow one another in memory."""
        *_, down, across = self.steps
        if self.is_transposed and not self.strides:
            down, across = 1, self.shape[-2]
        if across == 1:
            return in_a_row(cols, rows, down)
        return in_a_row(rows, cols, across) if down == 1 else 1

    @property
    def is_interleaved(self) -> bool:
        """Whether heads are interleaved within a row."""
        return bool(self.strides)

    @property
    def T(self) -> Tensor:
        """The tensor whose matrices are transposed in memory."""
        *outer, r, c = self.shape
        return replace(self, shape=(*outer, c, r), strides=(), is_transposed=not self.is_transposed)

    def to(self, fmt: str) -> Tensor:
        """Return the tensor in another format."""
        return replace(self, fmt=get_format(fmt).name)

    @property
    def is_split(self) -> bool:
        """Whether the call's tensor has an axis of splits."""
        return self.rank == len(AXES)

    @property
    def called(self) -> tuple[int, ...]:
        """The tensor's shape in the call."""
        return _of_call(self.shape, self.rank)

    def stride(self, axis: int) -> int:
        """Return the distance in elements from one index to the next along an axis, as PyTorch defines it."""
        return _of_call(self.steps, self.rank)[axis]

    @property
    def as_rows(self) -> Tensor:
        """The tensor with its last axis as rows: one element each."""
        return replace(self, shape=shaped((*self.called, 1)), strides=(), rank=self.rank + 1)

    def places(self, offsets: Integers) -> tuple[Integers, ...]:
        """Return batch, head, split, row and column of elements by their offsets."""
        places, rest = [np.zeros_like(offsets)] * len(self.shape), offsets
        for i in sorted(range(len(self.shape)), key=lambda i: (-self.steps[i], i)):
            if self.shape[i] > 1:
                places[i], rest = rest // self.steps[i], rest % self.steps[i]
        return tuple(places)

    def has(self, offsets: Integers) -> Any:
        """Return which elements, given by their offsets, belong to this tensor; some do not if the tensor is a part of
        another one.
        """
        return np.ones(offsets.shape, bool)

    def own(self, offsets: Integers) -> Integers:
        """Return the offsets here of elements of the argument: they differ in a tensor of gathered rows."""
        return offsets


def shaped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the five axes of a tensor: the axes of the call are the last ones; a tensor of five axes has splits."""
    if len(shape) < len(AXES):
        shape = (*(1,) * (len(AXES) - 1 - len(shape)), *shape)
        shape = (*shape[:SPLIT], 1, *shape[SPLIT:])
    return shape


def _of_call(values: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return values if rank == len(AXES) else (*values[:SPLIT], *values[ROWS:])[-rank:]


@dataclass(frozen=True, eq=False)
class Affine:
    """Integers, or pointers into an argument: a base for each (program, iteration), a stride along each axis.

    ``left``: along some axes, the number of elements before the index wraps (``% size``); further elements are not
    known. ``bits``: number of bits of the type, 64 for a pointer.  ``overflow``: where and how an integer exceeded its
    type, if it did.  ``is_hidden``: a mask of their load hides the elements after ``left``; no index restarts there.
    """

    base: Integers
    steps: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    of: str = ""
    left: tuple[Integers | None, ...] = ()
    bits: int = 64
    overflow: str = ""
    is_hidden: bool = False

    @property
    def is_uniform(self) -> bool:
        """Whether all elements are one integer, the same in all programs and iterations."""
        return not any(self.steps) and not np.ptp(self.base)

    def limits(self) -> tuple[Integers | None, ...]:
        """Return ``left`` for every axis."""
        return self.left or (None,) * len(self.steps)

    def at(self, programs: Integers) -> Affine:
        """Return the integers of some programs, in that order."""

        def chosen(x: Any) -> Any:
            return x[programs] if x is not None and len(x) > 1 else x

        return replace(self, base=chosen(self.base), left=tuple(map(chosen, self.left)))


@dataclass(frozen=True, eq=False)
class Condition:
    """Integers compared with 0: all comparisons are true, and in each group of ``either`` at least one is.  A
    comparison is (relation, difference).
    """

    of: tuple[tuple[str, Affine], ...]
    either: tuple[tuple[Condition, ...], ...] = ()

    def at(self, programs: Integers) -> Condition:
        """Return the condition in some programs, in that order."""
        return self.changed(lambda d: d.at(programs))

    def changed(self, how: Callable[[Affine], Affine]) -> Condition:
        """Return the condition of other differences."""
        either = tuple(tuple(c.changed(how) for c in group) for group in self.either)
        return Condition(tuple((r, how(d)) for r, d in self.of), either)

    @property
    def every(self) -> tuple[tuple[str, Affine], ...]:
        """All comparisons of the condition."""
        return (*self.of, *(rule for group in self.either for c in group for rule in c.every))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block."""
        return self.every[0][1].shape

    def __and__(self, other: Condition) -> Condition:
        return Condition(self.of + other.of, self.either + other.either)

    def __or__(self, other: Condition) -> Condition:
        return Condition((), ((self, other),))

    def __invert__(self) -> Condition:
        single = [Condition(((OPPOSITE[r], d),)) for r, d in self.of]
        groups = [reduce(operator.and_, (~c for c in group)) for group in self.either]
        result = (*single, *groups)
        return result[0] if len(result) == 1 else Condition((), (result,))


@dataclass(frozen=True, eq=False)
class Listed:
    """Integers, or pointers, that are partly in a table: ``rest`` plus the entry of ``table`` at the places ``at``.

    ``at``: along the axes of the block; ``beyond``: the value of entries beyond the ends (`Affine.left`), if known.
    """

    rest: Affine
    table: Integers
    at: Affine
    beyond: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block."""
        return self.rest.shape

    def of_programs(self, programs: Integers) -> Listed:
        """Return the integers of some programs, in that order."""
        return replace(self, rest=self.rest.at(programs), at=self.at.at(programs))


@dataclass(frozen=True, eq=False)
class ListedMask:
    """A mask by the entries of a table, ``holds``, at the places ``at`` along a block's axes; within a mask of indices.

    ``beyond``: in place of entries beyond the ends of ``at``, if known.
    """

    holds: Booleans
    at: Affine
    within: Condition | None = None
    beyond: bool | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block."""
        return self.at.shape

    def of_programs(self, programs: Integers) -> ListedMask:
        """Return the mask in some programs, in that order."""
        return replace(self, at=self.at.at(programs), within=self.within and self.within.at(programs))


@dataclass(frozen=True, eq=False)
class Elements:
    """Integers, or a mask (of one bit), along two axes of a block: a value for each element, (program, iteration,
    *axes).

    ``work``: number of operations for an element; ``why``: why they are not linear; ``of``: the argument that they are
    pointers into.
    """

    values: Integers
    bits: int
    work: int
    why: str = ""
    of: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block."""
        _, _, *block = self.values.shape
        return tuple(block)

    def at(self, programs: Integers) -> Elements:
        """Return the elements in some programs, in that order."""
        return replace(self, values=self.values[programs] if len(self.values) > 1 else self.values)


@dataclass(frozen=True, eq=False)
class Masking:
    """A block that is 0 where a mask is true and a low number elsewhere: it masks the block to which it is added."""

    of: Condition | Elements
    value: float


@dataclass(frozen=True, eq=False)
class Descriptor:
    """A tensor's descriptor: its first element, sizes and strides, and the block that it loads or stores."""

    pointer: Affine
    sizes: tuple[Affine, ...]
    strides: tuple[Affine, ...]
    block: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Number:
    """A float that all elements share, and its text in the kernel of tiles.

    Not ``is_known``: it differs between tiles, as its text shows.
    """

    value: float
    text: str
    shape: tuple[int, ...] = ()
    is_known: bool = True


class HeldState(NamedTuple):
    """A state of a loop, by its name within the loop, and its value at the start if that is a number.

    ``is_seen``: its lanes have other numbers where a mask hides them, which no mask does in the first iteration.
    """

    name: str
    start: float | None
    is_seen: bool = False


@dataclass(frozen=True, eq=False)
class Floats:
    """A block of floats as text in the kernel of tiles: its axes (None: of size 1) and format.

    ``pad``: the value of elements that a mask did not load, if known (for columns; none if columns are equal).
    ``held``: the state of a loop whose unknown value these elements have. ``is_product``: the block is a product that
    is not stored yet. ``factors``: the factors of a multiplication, which an addition may fuse; ``place``: the place of
    the multiplication. ``narrow``: a block of a narrower format with equal values. ``wide``: integers whose low bits
    are in the block, and which operations in the kernel read. ``most``: the largest magnitude of integers, 0 if it is
    not known.
    ``is_low``: no element is below the value of the columns that a mask hides. ``is_seen``: the block comes after a
    loop, and no mask hid only a part of the loop's first tile. ``is_even``: the hidden elements of a row have one
    finite value, which is not known.
    """

    text: str
    axes: tuple[str | None, ...]
    fmt: str
    pad: float | None = None
    is_transposed: bool = False
    is_product: bool = False
    factors: tuple[str, str] | None = None
    place: str = ""
    narrow: Floats | None = None
    wide: Floats | None = None
    most: int = 0
    is_low: bool = False
    held: HeldState | None = None
    is_seen: bool = False
    is_even: bool = False


@dataclass(frozen=True, eq=False)
class ValueComparison:
    """A mask of compared values, ``of``; within a mask of indices both masks are joined by &."""

    of: Floats
    within: Condition | None = None


@dataclass(frozen=True, eq=False)
class Identity:
    """A square block with 1 on the diagonal and 0 elsewhere."""

    shape: tuple[int, ...]


_OfIndices = Affine | Listed | Condition | ListedMask | Elements | Masking | Descriptor
Known = _OfIndices | Number | Floats | ValueComparison | Identity
#: Pointers of a block into one argument.
Pointers = Affine | Listed | Elements
#: Largest number of elements of integers that are examined one by one; each has 8 bytes.
MOST_ELEMENTS = 1 << 26


def argument_of(pointer: Pointers) -> str:
    """Return the name of the argument that pointers are into."""
    return pointer.rest.of if isinstance(pointer, Listed) else pointer.of


def constant(value: int, shape: tuple[int, ...] = (), bits: int = 64) -> Affine:
    """Return one integer for all elements."""
    return Affine(np.full((1, 1), value, np.int64), (0,) * len(shape), shape, bits=bits)


def reshaped(x: Known, shape: tuple[int, ...], how: Any) -> Known:
    """Return a value with other axes: ``how(axes, none)`` for strides or axes."""
    if isinstance(x, Affine):
        return replace(x, shape=shape, steps=how(x.steps, 0), left=how(x.limits(), None))
    if isinstance(x, Condition):
        return x.changed(lambda d: reshaped(d, shape, how))  # type: ignore[arg-type, return-value]
    if isinstance(x, Elements):
        return replace(x, values=_with_axes(x.values, shape, how))
    if isinstance(x, Masking):
        return replace(x, of=reshaped(x.of, shape, how))  # type: ignore[arg-type]
    if isinstance(x, ValueComparison):
        within = x.within and reshaped(x.within, shape, how)
        return ValueComparison(reshaped(x.of, shape, how), within)  # type: ignore[arg-type]
    if isinstance(x, Listed):
        return replace(x, rest=reshaped(x.rest, shape, how), at=reshaped(x.at, shape, how))  # type: ignore[arg-type]
    if isinstance(x, ListedMask):
        within = x.within and reshaped(x.within, shape, how)
        return replace(x, at=reshaped(x.at, shape, how), within=within)  # type: ignore[arg-type]
    assert not isinstance(x, Descriptor | Identity), "axes of an identity or a descriptor"
    if isinstance(x, Number):
        return replace(x, shape=shape)
    wide = x.wide and replace(x.wide, axes=how(x.wide.axes, None))
    return replace(x, axes=how(x.axes, None), wide=wide)


def _with_axes(values: Integers, shape: tuple[int, ...], how: Callable[..., Any]) -> Integers:
    """Return elements with other axes in the same order: axes of one element are added, removed or extended."""
    sizes = (1 if i is None else values.shape[i] for i in how(tuple(range(2, values.ndim)), None))
    return np.broadcast_to(values.reshape(*values.shape[:2], *sizes), (*values.shape[:2], *shape))


def lesser(x: Integers | None, y: Integers | None) -> Integers | None:
    """Return the smaller of two numbers of known elements, None if all are known."""
    return np.minimum(x, y) if x is not None and y is not None else y if x is None else x


#: For each relation, the relation that is true where the first one is false.
OPPOSITE: Mapping[str, str] = MappingProxyType(
    {"slt": "sge", "sge": "slt", "sgt": "sle", "sle": "sgt", "eq": "ne", "ne": "eq"}
)
#: Relations of comparisons, between a difference and 0.
RELATIONS: Mapping[str, Any] = MappingProxyType(
    {"slt": np.less, "sle": np.less_equal, "sgt": np.greater, "sge": np.greater_equal}
    | {"eq": np.equal, "ne": np.not_equal}
)


def bound_of(d: Affine, relation: str) -> tuple[int, Integers] | None:
    """Return (axis, visible elements along it) if a comparison bounds one axis of a block; None if it does not."""
    along = [i for i, s in enumerate(d.steps) if s]
    if len(along) == 2 and relation in ("slt", "sle"):  # flat indices: complete rows of indices
        (rows, row), (columns, column) = ((i, d.steps[i]) for i in along)
        left = -d.base + (relation == "sle")
        if column == 1 and row == d.shape[columns] and not np.any(left % row):
            return rows, np.clip(left // row, 0, d.shape[rows])
    if len(along) != 1 or d.steps[along[0]] != 1 or relation not in ("slt", "sle"):
        return None
    return along[0], np.clip(-d.base + (relation == "sle"), 0, d.shape[along[0]])


def refuse_many(op: Op, size: int) -> None:
    """Raise `ProgramError` for more than `MOST_ELEMENTS` integers of all programs."""
    if size > MOST_ELEMENTS:
        count = f"{size:,}"
        raise op.fail(
            f"npusim would have to evaluate {count} integers, those of all programs, one by one; allowed: "
            f"{MOST_ELEMENTS:,}"
        )


def repeats(values: Integers) -> bool:
    """Return whether a number occurs twice; ``numpy.unique`` takes ten times as long for millions of numbers."""
    ordered = np.sort(values, axis=None)
    return bool(np.any(ordered[1:] == ordered[:-1]))


def elements(op: Op, x: Affine) -> Integers:
    """Return every element, (program, iteration, *axes); refuse more than `MOST_ELEMENTS`."""
    refuse_many(op, x.base.size * prod(n for n, step in zip(x.shape, x.steps, strict=True) if step))
    result = x.base.reshape(*x.base.shape, *(1 for _ in x.shape))
    for i, (step, n) in enumerate(zip(x.steps, x.shape, strict=True)):
        if step:
            result = result + (step * np.arange(n)).reshape(n, *(1 for _ in x.shape[i + 1 :]))
    return np.broadcast_to(result, (*x.base.shape, *x.shape))


def known_elements(op: Op, left: tuple[Integers | None, ...], shape: tuple[int, ...]) -> Any:
    """Return which elements of a block are known: those before the ends along its axes; None if all are known."""
    if all(x is None for x in left):
        return None
    return truth(op, Condition(tuple(("slt", _along(i, -x, shape)) for i, x in enumerate(left) if x is not None)))


def _along(axis: int, base: Integers, shape: tuple[int, ...]) -> Affine:
    return Affine(base, one_hot(axis, shape), shape)


def one_hot(axis: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides of 1 along one axis of a block, and 0 along the others."""
    return tuple(int(i == axis) for i in range(len(shape)))


def truth(op: Op, x: Condition) -> Any:
    """Return, for every element, (program, iteration, *axes), whether a condition is true."""
    held = [RELATIONS[r](elements(op, d), 0) for r, d in x.of]
    groups = [np.broadcast_arrays(*(truth(op, c) for c in group)) for group in x.either]
    return np.logical_and.reduce(np.broadcast_arrays(*held, *map(np.logical_or.reduce, groups)))


def answers(x: Condition) -> tuple[Any, Any]:
    """Return, for each (program, iteration), whether a condition is true for all elements of a block, and whether it is
    true for none.
    """
    every, none = np.ones((1, 1), bool), np.zeros((1, 1), bool)
    for relation, d in x.of:
        ends = [s * (n - 1) for s, n in zip(d.steps, d.shape, strict=True)]
        low, high = d.base + sum(min(0, e) for e in ends), d.base + sum(max(0, e) for e in ends)
        if relation in ("eq", "ne"):
            equal, never = (low == 0) & (high == 0), (low > 0) | (high < 0)
            holds, fails = (equal, never) if relation == "eq" else (never, equal)
        else:
            does = RELATIONS[relation]
            holds, fails = does(low, 0) & does(high, 0), ~does(low, 0) & ~does(high, 0)
        every, none = every & holds, none | fails
    for group in x.either:
        of_each = [np.broadcast_arrays(*each) for each in zip(*map(answers, group), strict=True)]
        every, none = every & np.logical_or.reduce(of_each[0]), none | np.logical_and.reduce(of_each[1])
    return every, none


def affine(values: Integers, known: Any = None) -> Affine | None:
    """Return integers by their elements, (program, iteration, *axes), as a base and steps; None if they have no such
    form.

    ``known``: which elements have to be affine; no program accesses the others.
    """
    shape = values.shape[2:]
    known = np.broadcast_to(True if known is None else known, np.broadcast_shapes(values.shape, np.shape(known)))
    values, steps = np.broadcast_to(values, known.shape), list[int]()
    for axis in range(2, values.ndim):
        n = values.shape[axis]
        both = np.take(known, range(1, n), axis) & np.take(known, range(n - 1), axis)
        each = np.unique(np.diff(values, axis=axis)[both])
        if len(each) > 1:
            return None
        steps.append(int(each[0]) if len(each) else 0)
    for i, (step, n) in enumerate(zip(steps, shape, strict=True)):
        values = values - (step * np.arange(n)).reshape(n, *(1 for _ in shape[i + 1 :]))
    flat, mask = (x.reshape(*x.shape[:2], -1) for x in (values, known))
    base = np.take_along_axis(flat, np.argmax(mask, axis=2)[..., None], 2)
    if np.any((flat != base) & mask):
        return None
    return Affine(np.where(mask.any(2), base[..., 0], 0), tuple(steps), shape)


def float_of(text: str, fmt: str) -> float:
    """Return a constant in TTIR's form: decimal, or the bits of infinities and NaN."""
    if not text.startswith("0x"):
        return float(text)
    bits, size = (int(text, 16) << 16, 4) if fmt == "bf16" else (int(text, 16), int(fmt[1:]) // 8)
    return float(np.array(bits, f"u{size}").view(f"f{size}"))


def number_of(op: Op) -> tuple[float | int, tuple[int, ...], str]:
    """Return the value, shape and element type of a constant; for a bare ``true`` or ``false`` the type is i1."""
    text, _, type_ = op.text.removeprefix("arith.constant ").partition(" : ")
    text, (shape, fmt) = text.removeprefix("dense<").removesuffix(">"), shape_of(type_ or "i1")
    words = {"true": 1, "false": 0}
    return float_of(text, fmt) if fmt in FORMATS else words[text] if text in words else int(text), shape, fmt


def literal(value: float) -> str:
    """Return a number in the form of the kernel of tiles, in which ``inf`` and ``nan`` are names."""
    return repr(value)


#: Magnitudes of divisors that `div.full.f32` does not scale (PTX ISA, div).
UNSCALED = 2.0**-126, 2.0**126


def folded_inverse(divisor: float) -> float:
    """Return the inverse, rounded once, by which ptxas multiplies in place of a division by a constant of float32.

    0 if the inverse needs a scale: the division remains a division.
    """
    if not UNSCALED[0] <= abs(divisor) <= UNSCALED[1]:
        return 0.0
    return float(np.float32(1.0) / np.float32(divisor))
