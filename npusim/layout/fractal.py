"""Matrices in memory as the Ascend keeps them: plain rows (ND), or fractals (NZ, ZN, ZZ).

A fractal is a small block stored whole.  The format's first letter orders the fractals, its second
the elements of one: Z by rows, N by columns.  The Ascend's own texts often write the inner letter
small and first: zZ is ZZ here, nZ is ZN, zN is NZ.

Where each is used on the 910B: L0A zZ, L0B nZ, L0C zN, L1 zN or nZ (ascend.md §1.2).
"""

from __future__ import annotations

from npusim.errors import LayoutError
from npusim.layout.algebra import Layout, row_major

#: One fractal of 16-bit elements, 512 bytes (ascend.md §1.2).
FRACTAL = (16, 16)


def nd(rows: int, columns: int, *, row_stride: int | None = None) -> Layout:
    """Return (row, column) -> index of rows one after the other, ``row_stride`` elements apart."""
    if row_stride is None:
        return row_major((rows, columns))
    if row_stride < columns:
        raise LayoutError(f"rows of {columns} elements cannot lie {row_stride} apart")
    return Layout((rows, columns), (row_stride, 1))


def nz(rows: int, columns: int, *, fractal: tuple[int, int] = FRACTAL) -> Layout:
    """Return (row, column) -> index of FRACTAL_NZ (zN): fractals by columns, each by rows.

    Examples
    --------
    >>> str(nz(64, 32))
    '((16,4),(16,2)):((16,256),(1,1024))'
    """
    return _fractal("nz", rows, columns, fractal)


def zn(rows: int, columns: int, *, fractal: tuple[int, int] = FRACTAL) -> Layout:
    """Return (row, column) -> index of FRACTAL_ZN (nZ): fractals by rows, each by columns."""
    return _fractal("zn", rows, columns, fractal)


def zz(rows: int, columns: int, *, fractal: tuple[int, int] = FRACTAL) -> Layout:
    """Return (row, column) -> index of FRACTAL_ZZ (zZ): fractals by rows, each by rows."""
    return _fractal("zz", rows, columns, fractal)


def _fractal(order: str, rows: int, columns: int, fractal: tuple[int, int]) -> Layout:
    height, width = fractal
    if rows % height or columns % width:
        raise LayoutError(f"{order}: a tile of {rows} x {columns} is no whole number of {height} x {width} fractals")
    down, across = rows // height, columns // width
    block = height * width
    outer = (block, block * down) if order[0] == "n" else (block * across, block)
    inner = (1, height) if order[1] == "n" else (width, 1)
    return Layout(((height, down), (width, across)), ((inner[0], outer[0]), (inner[1], outer[1])))
