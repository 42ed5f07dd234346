"""Layouts as matrices over GF(2): one column of index bits for each bit of the place.

A layout whose extents are powers of two and whose index bits never carry, a swizzle, and any
chain of them are linear in that sense ("linear layouts"); rank and inverse then say exactly which
accesses collide and which lane holds a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npusim.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from npusim.formats.layout.algebra import Layout

__all__ = ["BitMatrix"]


@dataclass(frozen=True, slots=True)
class BitMatrix:
    """A linear map of bit vectors: ``columns[j]`` is where bit j goes; integers hold the bits.

    Examples
    --------
    >>> m = BitMatrix.of(lambda i: i ^ (i >> 1), in_bits=3)
    >>> m(6), m.inverse()(m(6)), m.rank
    (5, 6, 3)
    """

    columns: tuple[int, ...]
    out_bits: int

    @classmethod
    def of(cls, function: Callable[[int], int], *, in_bits: int, out_bits: int | None = None) -> BitMatrix:
        """Return the matrix of a function, after checking all ``2**in_bits`` arguments.

        Raises
        ------
        LayoutError
            The function is not linear over GF(2), or needs more than ``out_bits`` bits.
        """
        columns = tuple(function(1 << bit) for bit in range(in_bits))
        needed = max((column.bit_length() for column in columns), default=0)
        matrix = cls(columns, needed if out_bits is None else out_bits)
        if needed > matrix.out_bits:
            raise LayoutError(f"the function needs {needed} bits, not {out_bits}")
        for argument in range(1 << in_bits):
            if matrix(argument) != function(argument):
                raise LayoutError(
                    f"not linear over GF(2): {argument} goes to {function(argument)}, its bits to {matrix(argument)}"
                )
        return matrix

    @classmethod
    def of_layout(cls, layout: Layout, *, out_bits: int | None = None) -> BitMatrix:
        """Return the matrix of a layout, swizzled or not; `LayoutError` if it is not linear."""
        if layout.size & (layout.size - 1):
            raise LayoutError(f"{layout} is not linear over GF(2): {layout.size} coordinates")
        return cls.of(layout, in_bits=layout.size.bit_length() - 1, out_bits=out_bits)

    @property
    def in_bits(self) -> int:
        """How many bits it takes."""
        return len(self.columns)

    def __call__(self, bits: int) -> int:
        """Return the image of ``bits``."""
        image = 0
        for place, column in enumerate(self.columns):
            if bits >> place & 1:
                image ^= column
        return image

    def __matmul__(self, inner: BitMatrix) -> BitMatrix:
        """Return the matrix that applies ``inner``, then this one."""
        if inner.out_bits > self.in_bits:
            raise LayoutError(f"{inner.out_bits} bits do not fit a matrix that takes {self.in_bits}")
        return BitMatrix(tuple(self(column) for column in inner.columns), self.out_bits)

    @property
    def rank(self) -> int:
        """How many bits of the place the index tells apart."""
        pivots: list[int] = []
        for column in self.columns:
            for pivot in pivots:
                column = min(column, column ^ pivot)  # noqa: PLW2901
            if column:
                pivots.append(column)
        return len(pivots)

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The entries, row 0 the lowest bit of the index."""
        return tuple(tuple(column >> row & 1 for column in self.columns) for row in range(self.out_bits))

    def inverse(self) -> BitMatrix:
        """Return the inverse; `LayoutError` if the matrix is not square or not of full rank."""
        count = self.in_bits
        if self.out_bits != count or self.rank != count:
            raise LayoutError(f"no inverse: {self.out_bits} by {count} bits of rank {self.rank}; a bijection needs all")
        # Gauss-Jordan on columns; the second number collects the same steps from the identity.
        work = [(column, 1 << place) for place, column in enumerate(self.columns)]
        for bit in range(count):
            chosen = next(i for i in range(bit, count) if work[i][0] >> bit & 1)
            work[bit], work[chosen] = work[chosen], work[bit]
            pivot = work[bit]
            for other in range(count):
                if other != bit and work[other][0] >> bit & 1:
                    work[other] = (work[other][0] ^ pivot[0], work[other][1] ^ pivot[1])
        return BitMatrix(tuple(source for _, source in work), count)
