"""Recorded Triton launches on chips of compute capability 12: values, times, and 99 KB of shared memory a block."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.errors import TilingError
from npusim.simulation.request import Request
from npusim.studies.tune.configurations import configurations_of
from npusim.studies.tune.prediction import predict_all

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="npusim[triton] is not installed")
CHIPS = ("rtx_5090", "rtx_pro_6000", "gb10")
SIZE = 256


def operands() -> dict[str, Any]:
    """Return a product's A, B and C."""
    a, b = (np.random.default_rng(i).standard_normal((SIZE, SIZE)).astype(np.float16) for i in range(2))
    return {"A": a, "B": b, "C": np.zeros((SIZE, SIZE), np.float16)}


@pytest.fixture(scope="module")
def call() -> Any:
    """A product of two configurations, of which the second needs 192 KiB of shared memory with its three stages."""
    from ttir.tuned_kernels import whole_product

    with npusim.record(floats=True, hw="rtx_5090") as calls:
        whole_product[lambda c: (SIZE // c["BM"], SIZE // c["BN"])](*operands().values(), SIZE, SIZE, BK=128)
    return calls[0]


@pytest.mark.parametrize("hw", CHIPS)
def test_a_recorded_product_is_computed_and_timed(call: Any, hw: str) -> None:
    """GB10 is sm_121, whose machine code Triton's tools do not read: it is that of sm_120."""
    from ttir.stored import stored

    result, given = npusim.run(call, hw=hw, trace_groups=()), operands()
    exact = given["A"].astype(np.float64) @ given["B"].astype(np.float64)
    error = stored(result, given)["C"] - exact
    assert float(np.sqrt((error**2).mean() / (exact**2).mean())) < 4e-4
    assert 1 < result.latency_us < 20


def test_gb10_has_the_code_of_the_others(call: Any) -> None:
    first, second = (predict_all(configurations_of(Request(call, hw=hw), {})) for hw in ("rtx_pro_6000", "gb10"))
    assert [(p.registers, p.spilled, p.key) for p in first] == [(p.registers, p.spilled, p.key) for p in second]
    assert first[0].registers
    assert [p.us is None for p in first] == [False, True]


def test_a_configuration_beyond_99_kb_is_refused_with_the_stages_that_fit(call: Any) -> None:
    with pytest.raises(TilingError, match=r"196,608 bytes needed, 101,376 available.*that fit.*: stages=2"):
        npusim.run(call, hw="rtx_5090", tiling={"config": 1}, numerics=False)
    fits = npusim.run(call, hw="rtx_5090", tiling={"config": 1, "stages": 2}, numerics=False, trace_groups=())
    assert fits.tiling.stages == 2
