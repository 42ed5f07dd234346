"""Kernels in further forms that public libraries have: results beside numpy's, on an NPU and a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npusim
from tests.turns import in_turn
from ttir.test_engines import CLOSE, normal

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
DEVICES = ("ascend_910b2", "h200")


def check(kernel: str, grid: tuple[int, ...], words: dict[str, Any], wanted: Mapping[str, Any], hw: str) -> Any:
    """Run a launch on a device; each tensor is near its values in float64, or equal where these are integers."""
    from ttir import form_kernels
    from ttir.stored import stored

    with npusim.record(floats=True) as calls:
        getattr(form_kernels, kernel)[grid](**words)
    done = npusim.run(calls[0], hw=hw, rows="all")
    made = stored(done, words)
    for name, values in wanted.items():
        right = np.asarray(values, np.float64)
        assert np.array_equal(np.isnan(made[name]), np.isnan(right)), name
        seen = ~np.isnan(right)
        if np.asarray(words[name]).dtype.kind in "iub":
            assert np.array_equal(made[name][seen], right[seen]), name
            continue
        error = np.sqrt(((made[name][seen] - right[seen]) ** 2).sum() / (right[seen] ** 2).sum())
        assert error < CLOSE[str(words[name].dtype)], (name, error)
    return done


@pytest.mark.parametrize("hw", in_turn(DEVICES))
def test_products_of_tiles_times_a_number_computed_in_the_loop(hw: str) -> None:
    # On a 910B2 each vector core needs the number, not the first core alone.
    m, n, k, group = 64, 64, 128, 64
    a, b = (normal(i, rows, k).astype(np.float16) for i, rows in ((1, m), (2, n)))
    row, one = np.abs(normal(3, 2, k // group)), np.abs(normal(4, k // group))
    parts = np.einsum("mgk,ngk->gmn", *(x.astype(np.float64).reshape(-1, k // group, group) for x in (a, b)))
    wanted = np.einsum("gmn,mg,g->mn", parts, row.repeat(m // 2, 0).astype(np.float64), one.astype(np.float64))
    words = {"A": a, "B": b, "C": np.zeros((m, n), np.float32), "ScaleA": row}
    words |= {"ScaleB": one, "K": k, "N": n, "GROUP": group, "M": m // 2, "W": n, "B_K": 32}
    check("scaled_tiles", (2, 1), words, {"C": wanted}, hw)
