"""Triton kernels of comparisons, selects and maxima, drawn as text; and a walk of that text in NumPy.

The walk executes the kernel's own source with `Lanes` in the place of blocks.  Nothing of npusim computes in it:
float16 and float32 are NumPy's, bfloat16 is that of ml_dtypes.
"""

from __future__ import annotations

import operator
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FORMATS: Mapping[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
RELATIONS = (">", ">=", "<", "<=", "==", "!=")
HEAD = """import triton
import triton.language as tl


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

"""


def specials(fmt: str) -> Any:
    """Return numbers at which comparisons and maxima go wrong, of a format."""
    dtype, info = FORMATS[fmt], ml_dtypes.finfo(FORMATS[fmt])
    ends = [float(x) for x in (info.max, info.tiny, info.smallest_subnormal, 3 * info.smallest_subnormal)]
    numbers = [np.nan, np.inf, 0.0, 1.0, 0.5, *ends]
    return np.array([s * x for x in numbers for s in (1, -1)]).astype(dtype)


class Drawn:
    """One kernel: its text, its launch, and its tensors."""

    def __init__(self, number: int) -> None:
        self.number, self.draw = number, random.Random(number)
        d = self.draw
        self.fmt, self.is_tile = d.choice(list(FORMATS)), d.random() < 0.4
        self.rows, self.columns, self.block = d.randint(2, 9), d.choice([7, 20, 32, 50, 64]), 64
        self.values: list[str] = []
        self.masks: list[str] = []
        self.lines = self._tile() if self.is_tile else self._row()
        for _ in range(d.randint(3, 9)):
            self._statement()
        result = d.choice(self.values[-2:])
        self.lines.append(
            f"tl.store(Out + {self.at}, tl.where({self._mask()}, {result}, {self._value()}), mask={self.inside})"
        )
        name = f"kernel{number}"
        self.name, body = name, "\n".join(f"    {x}" for x in self.lines)
        self.source = f"@triton.jit\ndef {name}(X, Y, S, W, Out, M, N, B: tl.constexpr, BM: tl.constexpr):\n{body}\n"

    @property
    def grid(self) -> int:
        return -(-self.rows // 4) if self.is_tile else self.rows

    def tensors(self) -> dict[str, Any]:
        """Return inputs, of which about a half are special numbers, and an empty result."""
        rng, dtype = np.random.default_rng(self.number), FORMATS[self.fmt]

        def mixed(*shape: int) -> Any:
            plain = (rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape)).astype(dtype)
            return np.where(rng.random(shape) < 0.5, rng.choice(specials(self.fmt), shape), plain)

        m, n = self.rows, self.columns
        made = {"X": mixed(m, n), "Y": mixed(m, n), "S": mixed(m), "W": mixed(n)}
        return {**made, "Out": np.zeros((m, n), dtype)}

    def words(self) -> dict[str, int]:
        return {"M": self.rows, "N": self.columns, "B": self.block, "BM": 4}

    def _row(self) -> list[str]:
        """A program a row; of S one element for all lanes, which the mask belongs to."""
        self.at, self.inside = "p * N + r", "r < N"
        other = self.draw.choice(["", ", other=0.0", ", other=2.0", ", other=float('nan')"])
        self.values += ["x", "y", "s", "w"]
        one = self.draw.choice(["S + p", f"S + p + r * 0, mask=r < N{other}", f"S + p + r * 0, mask=r < N{other}"])
        return [
            "p, r = tl.program_id(0), tl.arange(0, B)",
            "x = tl.load(X + p * N + r, mask=r < N, other=0.0)",
            "y = tl.load(Y + p * N + r, mask=r < N, other=0.0)",
            f"s = tl.load({one})",
            "w = tl.load(W + r, mask=r < N, other=0.0)",
        ]

    def _tile(self) -> list[str]:
        """A program some rows; of S one element a row, of W one a column."""
        self.at, self.inside = "rm[:, None] * N + r[None, :]", "(rm[:, None] < M) & (r[None, :] < N)"
        self.values += ["x", "y", "s", "w"]
        return [
            "rm, r = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, B)",
            f"x = tl.load(X + {self.at}, mask={self.inside}, other=0.0)",
            f"y = tl.load(Y + {self.at}, mask={self.inside}, other=0.0)",
            "s = tl.load(S + rm, mask=rm < M, other=0.0)[:, None]",
            "w = tl.load(W + r, mask=r < N, other=0.0)[None, :]",
        ]

    def _number(self) -> str:
        """Return a literal; Triton's front end makes 0.0 of -0.0, which inputs have."""
        return self.draw.choice(["0.0", "1.0", "-2.5", "float('inf')", "-float('inf')", "float('nan')", "3e-5"])

    def _value(self) -> str:
        """A block or, now and then, a number."""
        return self._number() if self.draw.random() < 0.25 else self.draw.choice(self.values)

    def _mask(self) -> str:
        d = self.draw
        if self.masks and d.random() < 0.3:
            return d.choice(self.masks)
        return f"({d.choice(self.values)} {d.choice(RELATIONS)} {self._value()})"

    def _statement(self) -> None:
        d, kind = self.draw, self.draw.random()
        if kind < 0.3:
            name = f"m{len(self.masks)}"
            text = d.choice([
                self._mask(), f"{self._mask()} & {self._mask()}", f"{self._mask()} | {self._mask()}",
                f"{self._mask()} ^ {self._mask()}", f"~{self._mask()}", f"{self._mask()} != {self._mask()}",
            ])  # fmt: skip
            self.masks.append(name)
        else:
            name, text = f"v{len(self.values)}", self._computed()
            self.values.append(name)
        self.lines.append(f"{name} = {text}")

    def _computed(self) -> str:
        d, a, b, to = self.draw, self.draw.choice(self.values), self._value(), f".to(tl.{self.fmt})"
        rule = d.choice(["", ", propagate_nan=tl.PropagateNan.ALL"])
        words = [
            f"tl.where({self._mask()}, {a}, {b})", f"tl.where({self._mask()}, {b}, {a})",
            f"tl.where({self._mask()}, {self._number()}, {self._number()}){to}",
            f"tl.maximum({a}, {b}{rule}){to}", f"tl.minimum({a}, {b}{rule}){to}",
            f"tl.clamp({a}, -1.0, 2.0{rule}){to}", f"{a} {d.choice('+-*')} {b}", f"-{a}", f"tl.abs({a})",
            f"({self._mask()}){to}",
        ]  # fmt: skip
        if not self.is_tile and d.random() < 0.25:
            row = f"tl.where({self.inside}, {d.choice('xy')}, -float('inf')).to(tl.float32)"
            words = [f"tl.max({row}, 0){to}", f"tl.reduce({row}, 0, larger){to}"]
        return d.choice(words)

    def walked(self) -> Any:
        """Return the result by the kernel's text, in NumPy."""
        tensors = self.tensors()
        body = "\n".join(self.lines)
        with np.errstate(all="ignore"):
            for program in range(self.grid):
                tl = SimpleNamespace(**vars(WORDS), program_id=lambda _axis, program=program: program)
                pointers = {n: Pointer(x.reshape(-1)) for n, x in tensors.items()}
                exec(body, {"tl": tl, "larger": None, **pointers, **self.words()})
        return tensors["Out"]


@dataclass(eq=False)
class Pointer:
    """Addresses of elements of a flat tensor."""

    of: Any
    at: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.of, self.at + offset)


def _operator(function: Callable[..., Any], *, is_mask: bool = False) -> Callable[..., Any]:
    def method(self: Lanes, other: Any) -> Any:
        a, b = self.of, self.like(other)
        if is_mask:
            return Mask(function(*(x.astype(np.float64) for x in (a, b))))
        return Lanes(np.asarray(function(a, b)).astype(a.dtype))

    return method


@dataclass(eq=False)
class Lanes:
    """The floats of a block, an operation at a time, each rounded to their format."""

    of: Any

    def like(self, other: Any) -> Any:
        """Return another block, or a number in this one's format."""
        return other.of if isinstance(other, Lanes) else np.asarray(other, np.float64).astype(self.of.dtype)

    def to(self, dtype: Any) -> Lanes:
        return Lanes(self.of.astype(dtype))

    __add__, __sub__, __mul__ = map(_operator, (operator.add, operator.sub, operator.mul))
    __gt__, __ge__ = _operator(operator.gt, is_mask=True), _operator(operator.ge, is_mask=True)
    __lt__, __le__ = _operator(operator.lt, is_mask=True), _operator(operator.le, is_mask=True)
    __eq__ = _operator(operator.eq, is_mask=True)  # type: ignore[assignment]
    __ne__ = _operator(operator.ne, is_mask=True)  # type: ignore[assignment]
    __hash__ = object.__hash__

    def __neg__(self) -> Lanes:
        return Lanes(self.like(0.0) - self.of)  # as Triton's front end has it

    def __getitem__(self, axes: Any) -> Lanes:
        return Lanes(self.of[axes])


@dataclass(eq=False)
class Mask:
    """A mask of compared values."""

    of: Any

    def __and__(self, other: Mask) -> Mask:
        return Mask(self.of & other.of)

    def __or__(self, other: Mask) -> Mask:
        return Mask(self.of | other.of)

    def __xor__(self, other: Mask) -> Mask:
        return Mask(self.of ^ other.of)

    __ne__ = __xor__  # type: ignore[assignment]
    __hash__ = object.__hash__

    def __invert__(self) -> Mask:
        return Mask(~self.of)

    def to(self, dtype: Any) -> Lanes:
        return Lanes(self.of.astype(dtype))


def _blocks(*values: Any) -> list[Any]:
    """Return values as arrays of the format of the blocks among them; numbers alone are float32."""
    block = next((x for x in values if isinstance(x, Lanes)), Lanes(np.float32(0)))
    return [block.like(x) for x in values]


def _extreme(a: Any, b: Any, *, is_largest: bool, is_nan: bool) -> Any:
    """Return the larger or smaller number as IEEE 754-2019 has maximum, maximumNumber and their opposites."""
    wide, other = a.astype(np.float64), b.astype(np.float64)
    sign = 1 if is_largest else -1
    is_first = (sign * wide > sign * other) | ((wide == other) & (np.signbit(wide) != is_largest))
    made = np.where(is_first, a, b)
    made = np.where(np.isnan(wide), b, np.where(np.isnan(other), a, made))
    return np.where(np.isnan(wide) | np.isnan(other), a.dtype.type(np.nan), made) if is_nan else made


def _maximum(a: Any, b: Any, propagate_nan: bool = False) -> Lanes:
    return Lanes(_extreme(*_blocks(a, b), is_largest=True, is_nan=propagate_nan))


def _minimum(a: Any, b: Any, propagate_nan: bool = False) -> Lanes:
    return Lanes(_extreme(*_blocks(a, b), is_largest=False, is_nan=propagate_nan))


def _clamp(x: Lanes, low: float, high: float, propagate_nan: bool = False) -> Lanes:
    return _minimum(_maximum(x, low, propagate_nan), high, propagate_nan)


def _where(mask: Any, a: Any, b: Any) -> Lanes:
    return Lanes(np.where(mask.of if isinstance(mask, Mask) else mask, *_blocks(a, b)))


def _reduced(x: Lanes, *, is_nan: bool) -> Lanes:
    best = x.of[..., 0]
    for column in np.moveaxis(x.of, -1, 0)[1:]:
        best = _extreme(best, column, is_largest=True, is_nan=is_nan)
    return Lanes(best)


def _load(pointer: Pointer, mask: Any = True, other: Any = 0.0) -> Lanes:
    at = np.where(mask, pointer.at, 0)
    return Lanes(np.where(mask, pointer.of[at], np.asarray(other).astype(pointer.of.dtype)))


def _store(pointer: Pointer, value: Lanes, mask: Any = True) -> None:
    mask, at, made = np.broadcast_arrays(mask, pointer.at, value.of)
    pointer.of[at[mask]] = made[mask]


#: Words of Triton's language that the kernels have.
WORDS = SimpleNamespace(
    arange=np.arange,
    load=_load,
    store=_store,
    where=_where,
    maximum=_maximum,
    minimum=_minimum,
    clamp=_clamp,
    abs=lambda x: Lanes(np.abs(x.of)),
    max=lambda x, _axis: _reduced(x, is_nan=False),
    reduce=lambda x, _axis, _function: _reduced(x, is_nan=True),
    PropagateNan=SimpleNamespace(ALL=True),
    **FORMATS,
)


def bits(x: Any) -> Any:
    """Return the bits of numbers, all NaN alike: payloads are the device's."""
    x = np.asarray(x)
    unsigned = np.ascontiguousarray(x).view(f"u{x.itemsize}")
    return np.where(np.isnan(x.astype(np.float64)), unsigned.dtype.type(np.iinfo(unsigned.dtype).max), unsigned)
