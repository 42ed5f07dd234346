"""Elements that several programs store to: the same values in all of them, or a refusal."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from npusim.errors import ProgramError
from ttir.checked_launches import checked

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
DEVICES = ("ascend_910b2", "h200")


def _drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _of_groups(how: str, hw: str) -> Any:
    x, g = _drawn(3, 2, 37), _drawn(3, 4, seed=1)
    y, z = np.zeros_like(x), np.zeros((3, 4, 37), np.float32)
    wide = x.astype(np.float64)
    wanted = {"Y": wide - wide.sum(2, keepdims=True), "Z": np.repeat(wide, 2, 1) * np.arange(4)[:, None]}
    words = {"X": x, "Y": y, "Z": z, "G": g, "n": 37, "HOW": how, "B": 64}
    return checked("same_value_kernels", "of_groups", (3, 4), words, wanted, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_heads_of_a_group_store_the_group_s_row(hw: str) -> None:
    done = _of_groups("", hw)
    assert any("several programs store the same values" in note for note in done.notes)


@pytest.mark.parametrize("how", ["heads", "numbers", "masks", "branches", "lanes"])
def test_values_that_may_differ_are_refused(how: str) -> None:
    with pytest.raises(ProgramError, match=r"same_value_kernels\.py:\d+: "):
        _of_groups(how, "h200")


@pytest.mark.parametrize("hw", DEVICES)
def test_tiles_of_a_loop_that_both_heads_store(hw: str) -> None:
    x, p = _drawn(2, 40), _drawn(2, 16, seed=1)
    first = np.concatenate([p, np.zeros((2, 24), np.float32)], 1).astype(np.float64)
    wanted = {"Y": x + first, "Z": np.stack([2.0 * x[row] + first for row in range(2)])}
    words = {"X": x, "P": p, "Y": np.zeros_like(x), "Z": np.zeros((2, 2, 40), np.float32), "n": 40, "B": 16}
    checked("same_value_kernels", "of_loops", (2, 2), words, wanted, hw)


def test_each_result_is_read_in_its_own_way() -> None:
    block, width, starts = 16, 16, np.array([0, 40, 60], np.int32)
    q = _drawn(60, 4, width).astype(np.float16)
    k, v = (_drawn(60, 2, width, seed=s).astype(np.float16) for s in (1, 2))
    pages = np.array([[3, 0, 5], [1, 4, 2]], np.int32)
    output, caches = np.full(q.shape, np.nan), np.full((2, 6, 2, block, width), np.nan)
    for i, (first, end) in enumerate(pairwise(starts)):
        own, n = slice(first, end), int(end - first)
        wide = [np.repeat(x[own].astype(np.float64), 2, 1) for x in (k, v)]
        scores = np.einsum("qhd,khd->hqk", q[own].astype(np.float64), wide[0])
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(2, keepdims=True))
        output[own] = np.einsum("hqk,khd->qhd", weights / weights.sum(2, keepdims=True), wide[1])
        for page in range(-(-n // block)):
            for cache, x in zip(caches, (k, v), strict=True):
                rows = x[own][page * block : (page + 1) * block].transpose(1, 0, 2)
                cache[pages[i, page], :, : rows.shape[1]] = rows
    words = {"Q": q, "K": k, "V": v, "O": np.zeros_like(q)}
    words |= {n: np.zeros(caches.shape[1:], np.float16) for n in ("Keys", "Values")}
    words |= {"Pages": pages, "Starts": starts, "H": 4, "B": block, "D": width}
    wanted = {"O": output, "Keys": caches[0], "Values": caches[1]}
    done = checked("same_value_kernels", "attention_with_caches", (2, 4, 3), words, wanted, "h200", close=2e-3)
    assert any("each in its own way" in note for note in done.notes)
