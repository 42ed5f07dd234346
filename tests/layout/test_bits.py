"""Fragments and swizzled tiles as matrices over GF(2)."""

from __future__ import annotations

import pytest

from npusim.errors import LayoutError
from npusim.formats.layout.algebra import Layout
from npusim.formats.layout.instruction import instruction
from npusim.formats.layout.wavefronts import swizzled
from tests.layout.gf2 import BitMatrix
from tests.layout.test_fragments import ALL


@pytest.mark.parametrize(
    "layout", [Layout((8, 4), (4, 1)), instruction("m8n8k4").c.layout, instruction("m16n8k16").a.layout], ids=str
)
def test_a_matrix_is_the_layout_and_its_inverse_undoes_it(layout: Layout) -> None:
    matrix = BitMatrix.of_layout(layout)
    inverse = matrix.inverse()
    for place in range(layout.size):
        assert matrix(place) == layout(place)
        assert inverse(layout(place)) == place
    assert matrix.rank == matrix.in_bits
    identity = tuple(1 << bit for bit in range(matrix.in_bits))
    assert (inverse @ matrix).columns == (matrix @ inverse).columns == identity


def test_every_fragment_is_linear_over_gf2() -> None:
    for mma in ALL:
        for fragment in (mma.a, mma.b, mma.c):
            matrix = BitMatrix.of_layout(fragment.layout)
            assert matrix.rank == matrix.in_bits


def test_a_swizzle_is_linear_and_loses_nothing() -> None:
    tile = swizzled(32, 64)
    assert BitMatrix.of(lambda place: tile(place // 64, place % 64), in_bits=11).rank == 11


def test_rank_counts_what_the_index_tells_apart() -> None:
    broadcast = BitMatrix.of_layout(Layout((4, 8), (1, 0)))
    assert (broadcast.in_bits, broadcast.rank) == (5, 2)
    assert BitMatrix((0b11, 0b01, 0b10), 2).rank == 2
    with pytest.raises(LayoutError, match="no inverse"):
        broadcast.inverse()


def test_matrices_agree_with_tensor_layouts() -> None:
    oracle = pytest.importorskip("tensor_layouts")
    analysis = pytest.importorskip("tensor_layouts.analysis")
    for mma in ALL[:8]:
        ours = mma.c.layout
        theirs = analysis.to_F2_matrix(oracle.Layout(ours.shape, ours.stride))
        assert [list(row) for row in BitMatrix.of_layout(ours).rows] == theirs


def test_what_carries_is_not_linear() -> None:
    with pytest.raises(LayoutError, match="not linear"):
        BitMatrix.of_layout(Layout((4, 2), (1, 3)))
    with pytest.raises(LayoutError, match="6 coordinates"):
        BitMatrix.of_layout(Layout((3, 2), (1, 3)))
    with pytest.raises(LayoutError, match="needs 3 bits, not 2"):
        BitMatrix.of(lambda i: 2 * i, in_bits=2, out_bits=2)
    with pytest.raises(LayoutError, match="do not fit"):
        BitMatrix((1, 2), 2) @ BitMatrix((1, 2, 4), 3)
