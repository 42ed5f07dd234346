"""Tables of integers that are not made whole: programs that share entries, and comparisons of quotients with keys."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]


def prefill(tokens: int, how: str) -> tuple[dict[str, Any], Any]:
    """Return the words of a prefill of 2 x 4 heads by pages of 16 keys, and its output in float64."""
    rng, page = np.random.default_rng(0), 16
    pages = rng.permutation(-(-tokens // page)).astype(np.int32)
    q = rng.standard_normal((tokens, 8, 32)).astype(np.float16)
    k, v = (rng.standard_normal((len(pages), page, 2, 32)).astype(np.float16) for _ in "kv")
    keys, values = (x[pages].reshape(-1, 2, 32)[:tokens].astype(np.float64).repeat(4, 1) for x in (k, v))
    pos, key = np.arange(tokens)[:, None], np.arange(tokens)[None]
    seen = (pos >= key) & ((pos < key + 24) if how == "window" else True)
    scores = np.where(seen, np.einsum("qhd,khd->hqk", q.astype(np.float64), keys) * 0.2, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values)
    words = {"Q": q, "K": k, "V": v, "O": np.zeros_like(q), "Pages": pages, "n": tokens, "scale": 0.2}
    return words | {"D": 32, "G": 4, "BM": 32, "BN": 32, "PAGE": page, "HOW": how}, wanted


@pytest.mark.parametrize(
    ("how", "hw"), [("less", "ascend_910b2"), ("or equal", "h200"), ("rows first", "ascend_910b2"), ("window", "h200")]
)
def test_a_quotient_that_is_compared_with_keys_is_a_comparison_of_rows(
    how: str, hw: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No element of the mask is computed, and programs that visit fewer keys share the entries of those that visit
    more.
    """
    from ttir.stored import stored
    from ttir.table_kernels import paged_prefill

    words, wanted = prefill(60, how)
    with npusim.record(floats=True) as calls:
        paged_prefill[8, 2](**words)
    monkeypatch.setattr("npusim.kernels.triton.masks.MOST_ELEMENTS", 100)
    done = npusim.run(calls[0], hw=hw, rows="all")
    made = stored(done, words)["O"]
    assert np.sqrt(((made - wanted) ** 2).mean() / (wanted**2).mean()) < 6e-4
    assert any("K: 64 rows" in note for note in done.notes)


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_blocks_of_one_column_are_stored_tile_by_tile_as_rows_and_masks_are_weights(hw: str) -> None:
    from ttir.stored import stored
    from ttir.table_kernels import one_column

    x = np.random.default_rng(0).standard_normal((6, 100)).astype(np.float32)
    words = {"X": x, "Y": np.zeros_like(x), "C": 100, "D": 1, "BC": 32, "BD": 1}
    with npusim.record(floats=True) as calls:
        one_column[1, 6](**words)
    made = stored(npusim.run(calls[0], hw=hw, rows="all"), words)["Y"]
    wide = x.astype(np.float64)
    assert np.abs(made - (wide - (wide + 1).mean(1, keepdims=True))).max() < 1e-6


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_a_right_factor_whose_rows_are_columns_is_one_matrix_for_each_block_of_rows(hw: str) -> None:
    from ttir.stored import stored
    from ttir.table_kernels import states_as_rows

    def drawn(*shape: int) -> Any:
        return np.random.default_rng(shape[-1]).standard_normal(shape).astype(np.float16)

    q, h, a, x = drawn(64, 2, 32), drawn(4, 2, 64, 32), drawn(64, 2, 16), drawn(64, 2, 64)
    words = {"Q": q, "H": h, "O": np.zeros_like(x), "A": a, "X": x, "K": 32, "V": 64, "BT": 16, "BK": 16, "BV": 32}
    with npusim.record(floats=True) as calls:
        states_as_rows[2, 4, 2](**words)
    made = stored(npusim.run(calls[0], hw=hw, rows="all"), words)["O"]
    q, h, a, x = (
        x.astype(np.float64) for x in (q.reshape(4, 16, 2, 32), h, a.reshape(4, 16, 2, 16), x.reshape(4, 16, 2, 64))
    )
    seen = np.tril(np.ones((16, 16)))[:, None]
    wanted = np.einsum("cthk,chvk->cthv", q, h) + np.einsum("cths,cshv->cthv", a * seen, x)
    assert np.abs(made - wanted.reshape(64, 2, 64)).max() < 3e-2
