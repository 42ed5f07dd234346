"""What a kernel's values are before they are floats of a tile: addresses, masks and numbers, evaluated.

Integers and pointers are computed for all programs of the grid and all iterations of the loop at once: any function of
these is a base; along the axes of a block itself they are linear.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.errors import ProgramError
from npusim.formats import get_format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.ttir.text import Operation

Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a launch: (batch, heads, rows, columns), strides in elements; contiguous where none are given.

    ``is_transposed``: its matrices are those of the call, transposed.
    """

    name: str
    shape: tuple[int, int, int, int]
    fmt: str
    role: str = "input"
    strides: tuple[int, ...] = ()
    is_transposed: bool = False

    @property
    def steps(self) -> tuple[int, ...]:
        """Elements from one to the next along each axis."""
        return self.strides or tuple(prod(self.shape[i + 1 :]) for i in range(4))

    @property
    def T(self) -> Tensor:
        """The tensor whose matrices lie transposed in memory."""
        b, h, r, c = self.shape
        return replace(self, shape=(b, h, c, r), strides=(), is_transposed=not self.is_transposed)

    def to(self, fmt: str) -> Tensor:
        """Return the tensor in another format."""
        return replace(self, fmt=get_format(fmt).name)

    def stride(self, axis: int) -> int:
        """Return the elements from one to the next along an axis, as PyTorch has it."""
        return self.steps[axis]

    @property
    def is_interleaved(self) -> bool:
        """Whether heads lie within a row; raise `ProgramError` for strides that are neither."""
        _, h, s, d = self.shape
        wanted = ((h * s * d, s * d, d, 1), (h * s * d, d, h * d, 1))
        for i, steps in enumerate(wanted):
            if all(a == b or n == 1 for a, b, n in zip(self.steps, steps, self.shape, strict=True)):
                return bool(i)
        raise ProgramError(
            f"{self.name}: strides {self.steps} of {self.shape}: rows within heads {wanted[0]}, or heads within rows "
            f"{wanted[1]}"
        )

    def places(self, offsets: Integers) -> tuple[Integers, ...]:
        """Return batch, head, row and column of elements by their offsets."""
        places, rest = [np.zeros_like(offsets)] * 4, offsets
        for i in sorted(range(4), key=lambda i: (-self.steps[i], i)):
            if self.shape[i] > 1:
                places[i], rest = rest // self.steps[i], rest % self.steps[i]
        if np.any(rest):
            raise ProgramError(f"{self.name}: offset {int(offsets.flat[np.flatnonzero(rest)[0]])} is no element of it")
        return tuple(places)


@dataclass(frozen=True, eq=False)
class Affine:
    """Integers, or pointers into an argument: a base for each (program, iteration), a stride along each axis."""

    base: Integers
    strides: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    of: str = ""

    @property
    def steps(self) -> tuple[int, ...]:
        """Strides, none of which is missing."""
        return self.strides or (0,) * len(self.shape)


@dataclass(frozen=True, eq=False)
class Condition:
    """Integers compared with 0, all of them: (relation, difference)."""

    of: tuple[tuple[str, Affine], ...]
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Number:
    """A float that all elements share, and how the kernel of tiles writes it."""

    value: float
    text: str
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Floats:
    """A block of floats as the kernel of tiles writes it: its axes (None: of size 1) and format.

    ``pad``: what it has where a mask kept a load from reading, if that is known.  ``product``: it is not stored yet.
    ``scaled``: factors of a multiplication that nothing stands before.
    """

    text: str
    axes: tuple[str | None, ...]
    fmt: str
    pad: float | None = None
    is_transposed: bool = False
    product: bool = False
    scaled: tuple[str, str] | None = None


Any_ = Affine | Condition | Number | Floats


def constant(value: int, shape: tuple[int, ...] = ()) -> Affine:
    """Return one integer for all."""
    return Affine(np.full((1, 1), value, np.int64), (0,) * len(shape), shape)


def reshaped(x: Any_, shape: tuple[int, ...], how: Any) -> Any_:
    """Return a value whose axes are others: ``how(axes, none)`` of strides or axes."""
    if isinstance(x, Affine):
        return replace(x, shape=shape, strides=how(x.steps, 0))
    if isinstance(x, Condition):
        return Condition(tuple((r, replace(d, shape=shape, strides=how(d.steps, 0))) for r, d in x.of), shape)
    if isinstance(x, Number):
        return replace(x, shape=shape)
    return replace(x, axes=how(x.axes, None))


def _quotient(x: Any, y: Any) -> Any:
    return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))


_FUNCTIONS: Mapping[str, Any] = {
    "divsi": _quotient,
    "remsi": np.fmod,
    "minsi": np.minimum,
    "maxsi": np.maximum,
    "divui": np.floor_divide,
    "remui": np.mod,
    "minui": np.minimum,
    "maxui": np.maximum,
    "andi": np.bitwise_and,
    "ori": np.bitwise_or,
    "shli": np.left_shift,
    "shrsi": np.right_shift,
    "ceildivsi": lambda x, y: -_quotient(-x, y),
}


def integers(op: Operation, name: str, a: Affine, b: Affine) -> Affine:
    """Return an integer operation (``addi``, ``muli``, ...) of two; refuse one that is not linear in a block's axes."""
    shape = a.shape or b.shape
    ours, others = a.steps or (0,) * len(shape), b.steps or (0,) * len(shape)
    if name in ("addi", "subi"):
        sign = 1 if name == "addi" else -1
        return Affine(a.base + sign * b.base, tuple(x + sign * y for x, y in zip(ours, others, strict=True)), shape)
    if name == "muli" and not (any(ours) and any(others)):
        block, factor = (a, b) if any(ours) else (b, a)
        if any(block.steps) and np.ptp(factor.base):
            raise op.fail("a stride that differs between programs or iterations")
        each = int(factor.base.flat[0])
        return Affine(a.base * b.base, tuple(s * each for s in block.steps or (0,) * len(shape)), shape)
    if any(ours) or any(others):
        raise op.fail(f"{op.name} of a block's indices: addresses have to be linear along a block's axes")
    return Affine(_FUNCTIONS[name](a.base, b.base), (0,) * len(shape), shape)


#: Relations of comparisons, by how one holds between a difference and 0.
RELATIONS: dict[str, Any] = {
    "slt": lambda d: d < 0,
    "sle": lambda d: d <= 0,
    "sgt": lambda d: d > 0,
    "sge": lambda d: d >= 0,
    "eq": lambda d: d == 0,
    "ne": lambda d: d != 0,
}
RELATIONS |= {f"u{r[1:]}": f for r, f in RELATIONS.items() if r[0] == "s"}


def bound_of(op: Operation, d: Affine, relation: str) -> tuple[int, Integers] | None:
    """Return (axis, elements left along it) where a comparison bounds one axis of a block; None where it does not."""
    along = [i for i, s in enumerate(d.steps) if s]
    if len(along) != 1 or d.steps[along[0]] != 1 or relation not in ("slt", "ult", "sle", "ule"):
        return None
    return along[0], np.clip(-d.base + (relation[1:] == "le"), 0, d.shape[along[0]])


def float_of(text: str, fmt: str) -> float:
    """Return a constant as TTIR writes it: decimal, or the bits of infinities and NaN."""
    if not text.startswith("0x"):
        return float(text)
    kinds: dict[str, tuple[Any, Any]] = {
        "f64": (np.uint64, np.float64),
        "f32": (np.uint32, np.float32),
        "f16": (np.uint16, np.float16),
    }
    if fmt == "bf16":
        return float(np.array([int(text, 16) << 16], np.uint32).view(np.float32)[0])
    word, kind = kinds[fmt]
    return float(np.array([int(text, 16)], word).view(kind)[0])


def literal(value: float) -> str:
    """Return a number as Python writes it."""
    return repr(value) if abs(value) != float("inf") else "inf" if value > 0 else "-inf"


def plain_name(name: str) -> str:
    """Return the user's name of a value, without the number that TTIR adds."""
    base = re.sub(r"\W", "", re.sub(r"_\d+$", "", re.split("[#@]", name)[0])) or "t"
    return f"t{base}" if base[0].isdigit() else base
