"""``tl.dot`` of float32: TF32 on devices that have it, and refusals of other precisions and devices."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.errors import NpusimError

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]")
M, N, K = 32, 64, 128
RANDOM = np.random.default_rng(0)
WORDS = {
    "A": RANDOM.standard_normal((M, K)).astype(np.float32),
    "B": RANDOM.standard_normal((K, N)).astype(np.float32),
    "C": np.zeros((M, N), np.float32),
}


def _call(precision: str) -> Any:
    from ttir import precision_kernels

    with npusim.record(floats=True) as calls:
        precision_kernels.product[(1,)](**WORDS, K=K, P=precision, M=M, N=N, BK=32)
    return calls[0]


def test_factors_are_truncated_to_tf32() -> None:
    """Bits of an H200: cases ``matmul_f32`` of test_silicon.py."""
    from ttir.stored import stored

    result = npusim.run(_call("tf32"), hw="h200", rows="all")
    a, b = ((WORDS[n].view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64) for n in "AB")
    made, exact = stored(result, WORDS)["C"], WORDS["A"].astype(np.float64) @ WORDS["B"].astype(np.float64)
    assert np.linalg.norm(made - a @ b) < 1e-6 * np.linalg.norm(exact) < np.linalg.norm(a @ b - exact)
    assert any("factors of float32 are multiplied as TF32" in note for note in result.notes)


@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
def test_other_precisions_are_refused_at_their_line(precision: str) -> None:
    with pytest.raises(NpusimError, match=rf"precision_kernels\.py:\d+: .*input_precision='{precision}'"):
        npusim.run(_call(precision), hw="h200", rows="all")


@pytest.mark.parametrize("device", ["ascend_910b2", "v100", "t4"])
def test_a_device_without_tf32_refuses(device: str) -> None:
    with pytest.raises(NpusimError, match="float32"):
        npusim.run(_call("tf32"), hw=device, rows="all")
