"""isnan, isinf and finitef of libdevice: beside NumPy."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

import npusim
from tests.turns import in_turn

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code", "declared_tiles"),
]
if find_spec("triton") is not None:
    from ttir.number_class_kernels import absolute_integers, counted
    from ttir.stored import stored_by
CLASSES = (np.isnan, np.isinf, np.isfinite)


@pytest.mark.parametrize(("kind", "hw"), in_turn(range(3), ("ascend_910b2", "h200")))
def test_floats_of_a_kind_are_counted(kind: int, hw: str) -> None:
    draw = np.random.default_rng(0)
    x, which = draw.standard_normal((3, 100)).astype(np.float32), draw.random((3, 100))
    x[which < 0.4], x[which < 0.2], x[which < 0.1] = -np.inf, np.inf, np.nan
    with npusim.record(floats=True) as calls:
        counted[(3,)](x, np.zeros(3, np.int32), 100, KIND=kind, B=128)
    done = npusim.run(calls[0], hw=hw, rows="all")
    hidden = 28 * (kind == 2)  # lanes of zeros
    assert np.array_equal(np.ravel(done.output), CLASSES[kind](x).sum(1) + hidden)


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_integers_have_absolute_values(hw: str) -> None:
    draw = np.random.default_rng(0)
    x, f = draw.integers(-90, 90, (3, 40)).astype(np.int32), draw.standard_normal((3, 40)).astype(np.float32)
    given = {"X": x, "F": f, "Y": np.zeros_like(x), "Z": np.zeros_like(f)}
    made = stored_by(absolute_integers, (3,), hw, given, n=40, B=64)
    assert np.array_equal(made["Y"], abs(x - 3) + abs(np.arange(40) - 5))
    assert np.array_equal(made["Z"], abs(np.trunc(f * np.float32(100))) / 2)
