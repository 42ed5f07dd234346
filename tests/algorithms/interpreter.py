"""Kernels computed as they are written: the words of `npusim.kernel` on values, tile after tile, nothing recorded.

The same source text as a kernel's runs line by line for every block of a program, in the order of its runs.  Masks
follow from row and column alone, products take one output at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim import formats
from npusim.formats import matmul

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem
    from npusim.kernels.form.phase import WorkTile

Array = np.ndarray[Any, Any]


class Machine:
    """What a device chooses where a kernel names nothing: how it multiplies, and in which order it adds up a row."""

    def __init__(self, device: DeviceSpec) -> None:
        self.engine = device.matrix_engine("aic" if device.family == "ascend" else "sm")
        self.row_sum = "sequential" if device.row_sum is None else device.row_sum.value

    def multiply(self, a: Array, b: Array, c: Array | None, operand: str, kept: str) -> tuple[Array, str]:
        """Return a b + c and the format in which it adds up; what is missing of an instruction's K is 0."""
        by_accumulator = hasattr(self.engine, "steps_of")
        name = self.engine.steps_of(kept).arithmetic.value if by_accumulator else self.engine.arithmetic_of(operand)
        unit = formats.get_arithmetic(name)
        c = None if c is None else formats.cast(c, unit.acc_format)
        tail = -a.shape[1] % unit.k
        a, b = np.pad(a, ((0, 0), (0, tail))), np.pad(b, ((0, tail), (0, 0)))
        return matmul(a, b, c, arithmetic=unit), unit.acc_format


@dataclass
class Numbers:
    """A tile (rows, columns), or a vector of its rows (rows, 1), of one format."""

    of: Array
    fmt: str
    run: Run
    index: int = 0

    def _with(self, operation: Callable[..., Array], other: Any, *, swapped: bool = False) -> Numbers:
        assert not isinstance(other, Numbers) or other.fmt == self.fmt
        x = other.of if isinstance(other, Numbers) else formats.cast(np.full((1, 1), other, np.float64), self.fmt)
        a, b = (x, self.of) if swapped else (self.of, x)
        return Numbers(operation(a, b, self.fmt), self.fmt, self.run)

    def __add__(self, other: Any) -> Numbers:
        if isinstance(other, Product):
            made, kept = other.compute(self)
            return Numbers(made, kept, self.run).to(self.fmt)
        return self._with(formats.add, other)

    def __sub__(self, other: Any) -> Numbers:
        return self._with(formats.sub, other)

    def __rsub__(self, other: Any) -> Numbers:
        return self._with(formats.sub, other, swapped=True)

    def __mul__(self, other: Any) -> Numbers:
        return self._with(formats.mul, other)

    def __truediv__(self, other: Any) -> Numbers:
        return self._with(formats.div, other)

    def __rtruediv__(self, other: Any) -> Numbers:
        return self._with(formats.div, other, swapped=True)

    def __neg__(self) -> Numbers:
        return self * -1.0

    __radd__, __rmul__ = __add__, __mul__

    def __matmul__(self, other: Any) -> Product:
        return Product(self, other)

    @property
    def T(self) -> Numbers:
        return Numbers(self.of.T, self.fmt, self.run)

    @property
    def size(self) -> int:
        return len(self.of)

    def to(self, fmt: str) -> Numbers:
        return Numbers(formats.cast(self.of, fmt), fmt, self.run)

    def max(self) -> Numbers:
        best = self.of[:, 0]
        for column in self.of.T[1:]:
            best = formats.maximum(best, column, self.fmt)
        return Numbers(best[:, None], self.fmt, self.run)

    def sum(self) -> Numbers:
        total = formats.reduce_sum(self.of, self.fmt, self.run.order)
        return Numbers(total[:, None], self.fmt, self.run)


@dataclass
class Product:
    """a b, or a sum of such, until a format or a total says where it adds up."""

    a: Numbers
    b: Numbers
    before: Product | None = None

    def compute(self, total: Numbers | None, kept: str = "") -> tuple[Array, str]:
        if self.before is not None:  # one accumulator: the next product goes onto what the last one left
            made, fmt = self.before.compute(total, kept)
            total = Numbers(made, fmt, self.a.run)
        c = None if total is None else total.of
        return self.a.run.machine.multiply(self.a.of, self.b.of, c, self.a.fmt, total.fmt if total else kept)

    def to(self, fmt: str) -> Numbers:
        made, kept = self.compute(None, fmt)
        return Numbers(made, kept, self.a.run).to(fmt)

    def __add__(self, other: Any) -> Any:
        return Product(other.a, other.b, self) if isinstance(other, Product) else other + self


class Run:
    """One block of attention: what the words of a kernel mean there."""

    def __init__(self, problem: Problem, cell: WorkTile, inputs: Any, machine: Machine, p: Any) -> None:
        self.problem, self.cell, self.machine, self.p = problem, cell, machine, p
        self.order = p.sum_order or machine.row_sum
        head = cell.head // (problem.heads // problem.kv_heads)
        q, k, v = inputs("q", cell.batch, cell.head), inputs("k", cell.batch, head), inputs("v", cell.batch, head)
        self.operands = [Numbers(x, problem.dtype, self) for x in (q[cell.row : cell.row + cell.rows], k, v)]

    def out(self, source: str, name: str, more: Mapping[str, Any]) -> Array:
        """Return the rows that a kernel's source makes."""
        words = {w: getattr(self, w) for w in ("full", "tiles", "exp", "log", "maximum", "where", "per_tile")}
        words |= {"kernel": lambda **_: lambda function: function, "inf": math.inf}
        exec(compile(source, "<kernel>", "exec"), words)
        mask = True if self.problem.causal else None
        return words[name](*self.operands, mask, **more).of

    def full(self, axes: str, start: float, fmt: str) -> Numbers:
        width = self.problem.value_head_dim if axes.endswith("value") else 1
        return Numbers(formats.cast(np.full((self.cell.rows, width), start), fmt), fmt, self)

    def tiles(self, *operands: Numbers) -> Iterator[tuple[Numbers, ...]]:
        index = 0
        for run in self.cell.runs:
            for i in range(run.count):
                first = run.col + i * run.step
                rows = np.arange(self.cell.row, self.cell.row + self.cell.rows)[:, None]
                self.seen = np.arange(first, first + run.cols) <= rows + (self.cell.causal_offset or 0)
                yield tuple(Numbers(x.of[first : first + run.cols], x.fmt, self, index) for x in operands)
                index += 1

    def exp(self, a: Numbers) -> Numbers:
        function, _, variant = self.p.exp_variant.partition(".")
        return Numbers(getattr(formats, function)(a.of, a.fmt, variant=variant), a.fmt, self)

    def log(self, a: Numbers) -> Numbers:
        return Numbers(formats.log(a.of, a.fmt), a.fmt, self)

    def maximum(self, a: Numbers, b: Any) -> Numbers:
        return a._with(formats.maximum, b)

    def where(self, mask: Any, kept: Any, other: Any) -> Numbers:
        if mask is None:
            return kept
        tile = kept if isinstance(kept, Numbers) else other
        a, b = (x.of if isinstance(x, Numbers) else formats.cast(np.full((1, 1), x), tile.fmt) for x in (kept, other))
        return Numbers(np.where(self.seen, a, b), tile.fmt, self)

    @staticmethod
    def per_tile(function: Callable[..., float], *numbers: float) -> float:
        return function(*numbers)
