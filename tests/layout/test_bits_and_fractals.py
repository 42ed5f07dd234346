"""Swizzles, matrices over GF(2), and the Ascend's fractal formats."""

from __future__ import annotations

import pytest

from npusim.errors import LayoutError
from npusim.layout import (
    Layout,
    Swizzle,
    SwizzledLayout,
    instruction,
    nd,
    nz,
    right_inverse,
    row_major,
    swizzled,
    variants,
    zn,
    zz,
)
from tests.layout.gf2 import BitMatrix

# ---------------------------------------------------------------- swizzle


@pytest.mark.parametrize("swizzle", [Swizzle(3, 3, 3), Swizzle(2, 0, 3), Swizzle(3, 4, 4), Swizzle(1, 2, -2)], ids=str)
def test_a_swizzle_undoes_itself_and_loses_nothing(swizzle: Swizzle) -> None:
    images = [swizzle(i) for i in range(4096)]
    assert [swizzle(i) for i in images] == list(range(4096))
    assert sorted(images) == list(range(4096))


def test_a_swizzle_moves_bits_where_it_says() -> None:
    # Bits 6 to 8 into bits 3 to 5.
    assert Swizzle(3, 3, 3)(0b101_000_111) == 0b101_101_111
    assert Swizzle(1, 2, -2)(0b00100) == 0b10100


def test_swizzles_agree_with_tensor_layouts() -> None:
    oracle = pytest.importorskip("tensor_layouts")
    for sizes in ((3, 3, 3), (2, 4, 3), (3, 0, 5)):
        ours, theirs = Swizzle(*sizes), oracle.Swizzle(*sizes)
        assert all(ours(i) == theirs(i) for i in range(4096))


def test_fields_that_overlap_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"\|shift\| >= bits"):
        Swizzle(3, 3, 2)


# ---------------------------------------------------------------- GF(2)


@pytest.mark.parametrize(
    "layout",
    [Layout((8, 4), (4, 1)), instruction("m8n8k4").c.layout, instruction("m16n8k16").a.layout, swizzled(32, 64)],
    ids=str,
)
def test_a_matrix_is_the_layout_and_its_inverse_undoes_it(layout: Layout | SwizzledLayout) -> None:
    matrix = BitMatrix.of_layout(layout)
    inverse = matrix.inverse()
    for place in range(layout.size):
        assert matrix(place) == layout(place)
        assert inverse(layout(place)) == place
    assert matrix.rank == matrix.in_bits
    identity = tuple(1 << bit for bit in range(matrix.in_bits))
    assert (inverse @ matrix).columns == (matrix @ inverse).columns == identity


def test_every_fragment_is_linear_over_gf2() -> None:
    for mma in (*variants(), instruction("m16n8k8"), instruction("m16n8k16")):
        for fragment in (mma.a, mma.b, mma.c):
            matrix = BitMatrix.of_layout(fragment.layout)
            place = right_inverse(fragment.layout)
            inverse = matrix.inverse()
            assert all(inverse(i) == place(i) for i in range(fragment.layout.size))


def test_a_matrix_of_a_chain_is_the_product_of_the_matrices() -> None:
    tile = row_major((8, 64))
    swizzle = Swizzle(3, 3, 3)
    chained = BitMatrix.of(swizzle, in_bits=9) @ BitMatrix.of_layout(tile)
    assert chained == BitMatrix.of_layout(SwizzledLayout(swizzle, tile))


def test_rank_counts_what_the_index_tells_apart() -> None:
    broadcast = BitMatrix.of_layout(Layout((4, 8), (1, 0)))
    assert (broadcast.in_bits, broadcast.rank) == (5, 2)
    assert BitMatrix((0b11, 0b01, 0b10), 2).rank == 2
    with pytest.raises(LayoutError, match="no inverse"):
        broadcast.inverse()


def test_matrices_agree_with_tensor_layouts() -> None:
    oracle = pytest.importorskip("tensor_layouts")
    analysis = pytest.importorskip("tensor_layouts.analysis")
    for mma in variants():
        ours = mma.c.layout
        theirs = analysis.to_F2_matrix(oracle.Layout(ours.shape, ours.stride))
        assert [list(row) for row in BitMatrix.of_layout(ours).rows] == theirs


def test_what_carries_is_not_linear() -> None:
    with pytest.raises(LayoutError, match="not linear"):
        BitMatrix.of_layout(Layout((4, 2), (1, 3)))
    with pytest.raises(LayoutError, match="6 coordinates"):
        BitMatrix.of_layout(Layout((3, 2)))
    with pytest.raises(LayoutError, match="needs 3 bits, not 2"):
        BitMatrix.of(lambda i: 2 * i, in_bits=2, out_bits=2)
    with pytest.raises(LayoutError, match="do not fit"):
        BitMatrix((1, 2), 2) @ BitMatrix((1, 2, 4), 3)


# ---------------------------------------------------------------- fractals

ROWS, COLUMNS = 48, 32  # 3 by 2 fractals


def test_fractal_formats_place_every_element_where_the_manual_says() -> None:
    # Outer letter orders the fractals, inner letter the elements of one (ascend.md §1.2).
    for row in range(ROWS):
        for column in range(COLUMNS):
            i, j, r, c = row // 16, column // 16, row % 16, column % 16
            assert nz(ROWS, COLUMNS)(row, column) == 256 * (3 * j + i) + 16 * r + c
            assert zn(ROWS, COLUMNS)(row, column) == 256 * (2 * i + j) + 16 * c + r
            assert zz(ROWS, COLUMNS)(row, column) == 256 * (2 * i + j) + 16 * r + c
            assert nd(ROWS, COLUMNS)(row, column) == 32 * row + column


@pytest.mark.parametrize("make", [nd, nz, zn, zz])
def test_formats_are_bijections(make: type[Layout]) -> None:
    assert make(ROWS, COLUMNS).is_bijective


def test_other_fractals_hold_other_element_sizes() -> None:
    # int8: 32 bytes make 32 columns of a 16-row fractal (ascend.md §1.4: int8 16x16x32).
    tile = zz(32, 64, fractal=(16, 32))
    assert tile.is_bijective
    assert (tile(0, 31), tile(1, 0), tile(0, 32), tile(16, 0)) == (31, 32, 512, 1024)


def test_a_format_of_rows_and_its_transpose_are_one() -> None:
    # zN of a matrix is nZ of its transpose: why L0B takes K as it lies for Q·Kᵀ.
    assert all(nz(48, 32)(r, c) == zn(32, 48)(c, r) for r in range(48) for c in range(32))


def test_ragged_tiles_are_refused() -> None:
    with pytest.raises(LayoutError, match="nz: a tile of 40 x 32 is no whole number of 16 x 16"):
        nz(40, 32)
    with pytest.raises(LayoutError, match="cannot lie 16 apart"):
        nd(4, 32, row_stride=16)
    assert nd(4, 32, row_stride=40)(2, 3) == 83
