"""FastAttention's tiling-mask against the mask it stands for, block by block (reports/tiling_mask)."""

from __future__ import annotations

from itertools import accumulate, product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim.config.problem import Problem
from npusim.config.seen import KeyFunction, KeyRanges
from npusim.errors import SpecError, TilingError
from npusim.kernels.attention.call_blocks import kv_runs
from npusim.kernels.attention.tiling_mask import TilingMask, mask_of
from tests.config.visible import visible_keys

if TYPE_CHECKING:
    from npusim.kernels.form.phase import TileRun, Visit


def cut_values(mask: Any, row: int, rows: int, col: int, cols: int, offset: int) -> np.ndarray:
    tile = mask.cut(row, rows, col, cols, offset)
    matrix = mask.values()[tile.batch, tile.head]
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
    with pytest.raises(TilingError, match="a fully masked block of 3x2 has no cut with M = 2"):
        mask.cut(0, 3, 8, 2, 0)


def test_a_block_too_large_for_the_mask_is_refused_with_the_values() -> None:
    with pytest.raises(TilingError) as caught:
        TilingMask(512).check(512, 514)
    assert str(caught.value) == (
        "tiling-mask: a block of 512x514 needs rows + cols - 1 = 1025 <= 2M = 1024 (M = 512); "
        "use smaller blocks, at most 513 keys with 512 rows"
    )


def test_a_mask_of_512_takes_a_mebibyte() -> None:
    # reports/tiling_mask: (2M)^2 with M = 512 in one byte an element.
    assert TilingMask(512).tensor().size_bytes == 1 << 20
    assert TilingMask(512).values().nbytes == 1 << 20


# ---------------------------------------------------------------- which tiles are visited


def visits(runs: tuple[TileRun, ...]) -> list[Visit]:
    firsts = [sum(r.count for r in runs[:i]) for i in range(len(runs))]
    return [r.visit(at + i, i) for at, r in zip(firsts, runs, strict=True) for i in range(r.count)]


#: Which keys a query sees, as fields of a problem of 24 keys.
SEEN: dict[str, dict[str, Any]] = {
    "all": {"causal": False},
    "causal": {},
    "window": {"window": 5},
    "wide window": {"window": 17},
    "sinks": {"window": 3, "sinks": 2},
    "prefix": {"prefix": 7},
    "prefix and window": {"prefix": 4, "window": 3},
    "documents": {"documents": (9, 1, 6, 8)},
    "documents, both ways": {"documents": (9, 1, 6, 8), "causal": False},
    "windows in documents": {"documents": (11, 13), "window": 3, "sinks": 1},
    "chunks": {"chunk": 5},
    "chunks of documents": {"documents": (11, 13), "chunk": 4, "prefix": 2},
}


def sees(q: int, k: int, fields: dict[str, Any]) -> bool:
    """Return whether the query on key q sees key k, straight from the fields' descriptions."""
    ends = list(accumulate(fields.get("documents") or (24,)))
    start = next(e - n for e, n in zip(ends, fields.get("documents") or (24,), strict=True) if q < e)
    end = next(e for e in ends if q < e)
    if "chunk" in fields:
        start += (q - start) // fields["chunk"] * fields["chunk"]
        end = min(end, start + fields["chunk"])
    is_before = k <= q or not fields.get("causal", True)
    near = "window" not in fields or q - k < fields["window"] or k - start < fields.get("sinks", 0)
    return start <= k < end and ((is_before and near) or k - start < fields.get("prefix", 0))


@pytest.mark.parametrize("kind", SEEN)
def test_visited_tiles_cover_what_is_seen_and_masks_say_what_is_not(kind: str) -> None:
    """Brute force over small shapes: every seen key once, no tile wholly masked, none needlessly masked."""
    fields = {"causal": True, **SEEN[kind]}
    for seq_q, block_q, block_kv in product((1, 5, 24), (2, 4), (3, 4, 16)):
        problem = Problem(heads=1, seq_q=seq_q, seq_kv=24, head_dim=16, **fields)
        offset, seen = problem.causal_offset, problem.seen
        masks = [mask_of(problem, (block_q, block_kv), how) for how in (None, "computed")]
        kept = np.array([[sees(x + offset, y, fields) for y in range(24)] for x in range(seq_q)])
        assert problem.attended_pairs() == kept.sum()
        assert [visible_keys(problem, x) for x in range(seq_q)] == list(kept.sum(axis=1))
        for row in range(0, seq_q, block_q):
            rows = min(block_q, seq_q - row)
            tiles = visits(kv_runs(seen, row + offset, rows, 24, block_kv))
            assert [t.index for t in tiles] == list(range(len(tiles)))
            inside = np.zeros(24, bool)
            for t in tiles:
                part = kept[row : row + rows, t.col : t.col + t.cols]
                assert part.any()
                assert bool(t.only) == (not part.all())
                assert not inside[t.col : t.col + t.cols].any()
                inside[t.col : t.col + t.cols] = True
                for mask in masks if t.only else ():
                    assert (cut_values(mask, row, rows, t.col, t.cols, offset) == part).all()
            assert not kept[row : row + rows, ~inside].any()


def test_a_function_of_ones_own_is_any_set_of_keys_and_says_so_for_each_pair() -> None:
    dilated = KeyFunction(lambda q, k: (k <= q) & ((q - k) % 3 == 0), 24)
    assert dilated.union(7, 7) == ((1, 2), (4, 5), (7, 8))
    assert dilated.common(7, 8) == ()
    with pytest.raises(SpecError, match=r"it returned int64 \(1, 24\)"):
        KeyFunction(lambda q, k: k, 24).union(0, 0)


def test_half_of_the_causal_blocks_are_skipped() -> None:
    # reports/tiling_mask: S = 4096, b = 128: .4844 skipped, .4844 unmasked, .0312 masked of 32 x 32.
    visited = [
        tile for row in range(0, 4096, 128) for tile in visits(kv_runs(KeyRanges(4096, after=0), row, 128, 4096, 128))
    ]
    assert 1 - len(visited) / 1024 == pytest.approx(0.4844, abs=1e-4)
    assert sum(bool(t.only) for t in visited) / 1024 == pytest.approx(0.0312, abs=1e-4)
