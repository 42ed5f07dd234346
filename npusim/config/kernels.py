"""Problems other than attention, by which a machine can be validated apart from it."""

from __future__ import annotations

from typing import Literal

from npusim.config.model import PositiveInt
from npusim.config.problem import Dtype, Problem, Sizes, element_bytes


class GemmProblem(Sizes):
    """``C (m, n) = A (m, k) B (k, n)`` on one device."""

    m: PositiveInt
    n: PositiveInt
    k: PositiveInt
    dtype: Dtype = "float16"

    def flops(self) -> int:
        """Return operations, 2 a multiply-add."""
        return 2 * self.m * self.n * self.k

    def bytes_moved(self) -> int:
        """Return the bytes of A, B and C, each once."""
        elements = self.m * self.k + self.k * self.n + self.m * self.n
        return elements * element_bytes(self.dtype)


class CopyProblem(Sizes):
    """A copy of ``bytes`` from global memory to global memory."""

    bytes: PositiveInt

    def flops(self) -> int:
        """Return 0: nothing is computed."""
        return 0

    def bytes_moved(self) -> int:
        """Return the bytes read and written."""
        return 2 * self.bytes


class RowsProblem(Sizes):
    """What stands between the products of a layer, on ``heads`` matrices of (rows, cols).

    ``norm`` adds an update and normalises, ``rotary`` turns halves (cols columns each) of a head,
    ``gate`` is SiLU of one matrix times another, ``gelu`` of one alone.
    """

    what: Literal["norm", "rotary", "gate", "gelu"]
    heads: PositiveInt = 1
    rows: PositiveInt
    cols: PositiveInt
    dtype: Dtype = "float16"

    def flops(self) -> int:
        """Return 0: no products."""
        return 0

    def bytes_moved(self) -> int:
        """Return the bytes of inputs and results, each once."""
        matrices = {"norm": 4, "rotary": 4, "gate": 3, "gelu": 2}[self.what]
        shared = 2 * self.rows * self.cols if self.what == "rotary" else 0
        return (matrices * self.heads * self.rows * self.cols + shared) * element_bytes(self.dtype)


AnyProblem = Problem | GemmProblem | CopyProblem | RowsProblem
