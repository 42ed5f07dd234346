"""Comparisons of indices that a kernel converts to floats are masks of indices: beside NumPy."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from npusim.errors import ProgramError
from ttir.stored import stored_by

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code", "declared_tiles"),
]
if find_spec("triton") is not None:
    from ttir import compared_index_kernels as kernels
DEVICES = ("ascend_910b2", "h200")


def _stored(name: str, grid: tuple[int, ...], hw: str, given: dict[str, Any], **words: Any) -> Any:
    return stored_by(getattr(kernels, name), grid, hw, given, **words)["Y"]


@pytest.mark.parametrize("hw", DEVICES)
def test_indices_as_floats_are_the_rows_and_the_columns_of_a_triangle(hw: str) -> None:
    draw = np.random.default_rng(0)
    x, v = (draw.standard_normal(shape).astype(np.float16) for shape in ((2, 32, 32), (32, 16)))
    given = {"X": x, "V": v, "Y": np.zeros((2, 32, 16), np.float32)}
    expected = np.tril(x.astype(np.float64)) @ v.astype(np.float64)
    assert np.abs(_stored("triangle_of_floats", (2,), hw, given, N=32, D=16) - expected).max() < 1e-4


@pytest.mark.parametrize("limit", [21.0, 21.5, -0.5, 3e9, 1e20, -1e20, float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", range(6))
def test_an_index_is_compared_with_a_number_that_is_no_integer(kind: int, limit: float) -> None:
    x, i = np.random.default_rng(1).standard_normal(48).astype(np.float32), np.arange(48.0)
    holds = [i < limit, i <= limit, limit < i, limit <= i, i == limit, i != limit][kind]
    given = {"X": x, "Y": np.zeros_like(x)}
    made = _stored("thresholds", (3,), DEVICES[kind % 2], given, limit=limit, B=16, KIND=kind)
    assert np.array_equal(made, np.where(holds, x, -1.0))


def test_indices_that_a_format_rounds_are_compared_as_its_numbers() -> None:
    x, i = np.ones(4096, np.float32), np.arange(4096)
    given = {"X": x, "Y": np.zeros_like(x)}
    made = _stored("rounded_indices", (256,), "h200", given, B=16, KIND=0)
    assert np.array_equal(made, np.where(i.astype(np.float16) < (i + 1).astype(np.float16), x, -1.0))


def test_rounded_indices_beside_exact_ones_are_refused() -> None:
    x = np.ones(4096, np.float32)
    with pytest.raises(ProgramError, match=r"compared_index_kernels\.py:\d+: .*some of which the floats round"):
        _stored("rounded_indices", (256,), "ascend_910b2", {"X": x, "Y": np.zeros_like(x)}, B=16, KIND=1)
