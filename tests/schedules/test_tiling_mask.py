"""FastAttention's tiling-mask against the mask it stands for, block by block (papers.md section 3.1)."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest

from npusim.algorithms.blocks import kv_runs
from npusim.algorithms.tiling_mask import TilingMask
from npusim.errors import TilingError

if TYPE_CHECKING:
    from npusim.algorithms.phase import TileRun, Visit


def cut_values(mask: TilingMask, row: int, rows: int, col: int, cols: int, offset: int) -> np.ndarray:
    tile = mask.cut(row, rows, col, cols, offset)
    matrix = mask.values()[0, 0]
    return matrix[tile.row : tile.row + tile.rows, tile.col : tile.col + tile.cols]


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8])
def test_every_cut_is_the_causal_mask_of_its_block(m: int) -> None:
    """All blocks that meet 1 <= rows + cols - 1 <= 2M - 1, at all corners, for several offsets."""
    mask = TilingMask(m)
    seen = 0
    for rows, cols in product(range(1, 2 * m), repeat=2):
        if rows + cols > 2 * m:
            continue
        for row, col, offset in product((0, 1, 5, 16), (0, 2, 7, 23), (0, 3, 11)):
            x = np.arange(row, row + rows)[:, None]
            y = np.arange(col, col + cols)[None, :]
            assert (cut_values(mask, row, rows, col, cols, offset) == (y <= x + offset)).all()
            seen += 1
    assert seen > 0


@pytest.mark.parametrize("m", [1, 3, 8])
def test_the_largest_block_allowed_is_exact_wherever_the_diagonal_crosses_it(m: int) -> None:
    mask = TilingMask(m)
    for rows in range(1, 2 * m + 1):
        cols = 2 * m + 1 - rows
        mask.check(rows, cols)
        for diagonal in range(-rows + 1, cols):
            # Row `x` keeps columns up to x + diagonal.
            row, col = (diagonal, 0) if diagonal >= 0 else (0, -diagonal)
            expected = np.arange(cols)[None, :] <= np.arange(rows)[:, None] + diagonal
            assert (cut_values(mask, row, rows, col, cols, 0) == expected).all()


def test_the_largest_block_allowed_has_no_cut_that_masks_all_of_it_and_says_so() -> None:
    # rows + cols - 1 = 2M: every cut that starts right of the diagonal ends past the matrix.
    mask = TilingMask(2)
    mask.check(3, 2)
    with pytest.raises(TilingError, match="a wholly masked block of 3x2 has no cut with M = 2"):
        mask.cut(0, 3, 8, 2, 0)


def test_a_block_too_large_for_the_mask_is_refused_with_the_values() -> None:
    with pytest.raises(TilingError) as caught:
        TilingMask(512).check(512, 514)
    assert str(caught.value) == (
        "tiling-mask: a block of 512x514 needs rows + cols - 1 = 1025 <= 2M = 1024 (M = 512); "
        "use smaller blocks or a larger M"
    )


def test_a_mask_of_512_takes_a_mebibyte() -> None:
    # papers.md 3.2: (2M)^2 with M = 512 in one byte an element.
    assert TilingMask(512).tensor().size_bytes == 1 << 20
    assert TilingMask(512).values().nbytes == 1 << 20


# ---------------------------------------------------------------- which tiles are visited


def visits(runs: tuple[TileRun, ...]) -> list[Visit]:
    firsts = [sum(r.count for r in runs[:i]) for i in range(len(runs))]
    return [r.visit(at + i, i) for at, r in zip(firsts, runs, strict=True) for i in range(r.count)]


@pytest.mark.parametrize("is_causal", [True, False])
def test_visited_tiles_cover_what_is_seen_and_mask_flags_are_right(is_causal: bool) -> None:
    """Brute force over small shapes: every seen key once, no tile wholly masked, none needlessly masked."""
    for seq_q, seq_kv, block_q, block_kv in product((1, 5, 9), (9, 12, 16), (2, 4), (3, 4, 16)):
        offset = seq_kv - seq_q if is_causal else None
        for row in range(0, seq_q, block_q):
            rows = min(block_q, seq_q - row)
            runs = kv_runs(row, rows, seq_kv, block_kv, offset)
            tiles = visits(runs)
            assert [t.index for t in tiles] == list(range(len(tiles)))
            keys = [k for t in tiles for k in range(t.col, t.col + t.cols)]
            last_seen = seq_kv if offset is None else min(seq_kv, row + rows + offset)
            assert keys == list(range(last_seen))
            for t in tiles:
                kept = [
                    y <= x + seq_kv if offset is None else y <= x + offset
                    for x in range(row, row + rows)
                    for y in range(t.col, t.col + t.cols)
                ]
                assert any(kept)
                assert bool(t.only) == (not all(kept))


def test_half_of_the_causal_blocks_are_skipped() -> None:
    # papers.md 3.1: S = 4096, b = 128: .4844 skipped, .4844 unmasked, .0312 masked of 32 x 32.
    visited = [tile for row in range(0, 4096, 128) for tile in visits(kv_runs(row, 128, 4096, 128, 0))]
    assert 1 - len(visited) / 1024 == pytest.approx(0.4844, abs=1e-4)
    assert sum(bool(t.only) for t in visited) / 1024 == pytest.approx(0.0312, abs=1e-4)
