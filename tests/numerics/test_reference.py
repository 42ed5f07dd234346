"""Float64 attention and error measures, on arrays small enough to work out by hand."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npusim.config.problem import Problem
from npusim.program.numerics.reference import attention, summarise_errors

if TYPE_CHECKING:
    from pathlib import Path

Array = Any


def test_two_keys_of_equal_score_average_their_values() -> None:
    problem = Problem(heads=1, seq_q=1, seq_kv=2, head_dim=16, value_head_dim=16)
    q, k = np.zeros((1, 16)), np.ones((2, 16))
    v = np.stack([np.full(16, 2.0), np.full(16, 6.0)])
    assert attention(q, k, v, problem, 0) == pytest.approx(np.full((1, 16), 4.0))


def test_scores_are_scaled_and_weighted_exponentially() -> None:
    # q.k = 16 and 0, scale 1/16: weights e : 1.
    problem = Problem(heads=1, seq_q=1, seq_kv=2, head_dim=16, scale=1 / 16)
    q, k = np.ones((1, 16)), np.stack([np.ones(16), np.zeros(16)])
    v = np.stack([np.ones(16), np.zeros(16)])
    assert attention(q, k, v, problem, 0)[0, 0] == pytest.approx(math.e / (math.e + 1), rel=1e-15)


def test_a_causal_row_sees_keys_up_to_its_own_and_the_offset() -> None:
    problem = Problem(heads=1, seq_q=4, seq_kv=6, head_dim=16, causal=True, causal_offset=1)
    v = np.zeros((6, 16))
    v[:, 0] = np.arange(6)
    # Rows 2 and 3 of the problem: keys 0..3 and 0..4 of equal score.
    found = attention(np.zeros((2, 16)), np.zeros((6, 16)), v, problem, row=2)
    assert found[:, 0] == pytest.approx([1.5, 2.0])


def test_huge_scores_do_not_overflow_the_reference() -> None:
    problem = Problem(heads=1, seq_q=1, seq_kv=2, head_dim=16, scale=1.0)
    q, k = np.full((1, 16), 60000.0), np.stack([np.full(16, 60000.0), np.zeros(16)])
    v = np.stack([np.ones(16), np.zeros(16)])
    assert attention(q, k, v, problem, 0)[0, 0] == 1.0


# ---------------------------------------------------------------- errors


def test_rmse_is_the_norm_of_the_error_over_the_norm_of_the_reference() -> None:
    # Error (0.5, 0, 0, -1), reference (3, 4, 0, 12) of norm 13.
    output = np.array([[3.5, 4, 0, 11]], np.float16)
    found = summarise_errors([output], [np.array([[3.0, 4, 0, 12]])], "float16")
    assert found.rmse == pytest.approx(math.sqrt(1.25) / 13)
    assert found.max_abs_error == 1.0
    assert found.count == 4


def test_errors_of_several_blocks_are_pooled() -> None:
    outputs = [np.full((1, 2), 1.0, np.float16), np.full((2, 2), 2.0, np.float16)]
    references = [np.full((1, 2), 1.0), np.full((2, 2), 4.0)]
    found = summarise_errors(outputs, references, "float16")
    assert found.rmse == pytest.approx(math.sqrt(4 * 4 / (2 + 4 * 16)))
    assert found.count == 6


def test_ulps_are_counted_from_the_correctly_rounded_reference_into_bins() -> None:
    # One float16 ulp at 1 is 2^-10.  Steps up from 1, and one below it (half as wide).
    steps = [0, 1, 2, 3, 4, 5, 8, 9, 1000]
    output = np.array([[1 + s * 2.0**-10 for s in steps] + [1 - 2.0**-11]], np.float16)
    found = summarise_errors([output], [np.ones((1, 10))], "float16")
    assert found.ulp_histogram == {"0": 1, "1": 2, "2": 1, "3-4": 2, "5-8": 2, ">8": 2}
    assert found.max_ulp == 1000


def test_a_reference_between_two_numbers_counts_from_the_nearer() -> None:
    # 1 + 0.4 ulp rounds to 1.
    output = np.array([[1.0, 1 + 2.0**-10]], np.float16)
    found = summarise_errors([output], [np.full((1, 2), 1 + 0.4 * 2.0**-10)], "float16")
    assert found.ulp_histogram["0"] == 1
    assert found.ulp_histogram["1"] == 1


def test_ulps_count_across_zero_and_zeros_of_both_signs_are_one() -> None:
    tiny = 2.0**-24  # the smallest subnormal of float16
    output = np.array([[-0.0, tiny, -tiny]], np.float16)
    found = summarise_errors([output], [np.array([[0.0, -tiny, tiny]])], "float16")
    assert found.ulp_histogram["0"] == 1
    assert found.ulp_histogram["2"] == 2


@pytest.mark.parametrize(
    ("fmt", "dtype"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32)]
)
@given(st.floats(-1e4, 1e4), st.integers(-40, 40))
def test_ulps_are_steps_of_nextafter(fmt: str, dtype: Any, value: float, steps: int) -> None:
    start = np.array([[value]]).astype(dtype)
    moved = start.copy()
    for _ in range(abs(steps)):
        moved = np.nextafter(moved, np.array(np.inf if steps > 0 else -np.inf).astype(dtype))
    found = summarise_errors([moved], [start.astype(np.float64)], fmt)
    # nextafter visits -0 and +0 as one number, as the ULP count does.
    assert found.max_ulp == abs(steps)


@pytest.mark.parametrize("good", [1.0, 7.0])
def test_an_output_with_nan_or_inf_is_counted_and_has_no_error(good: float) -> None:
    output = np.array([[good, np.nan, np.inf], [1, 1, -np.inf], [1, 1, 1]], np.float16)
    found = summarise_errors([output], [np.ones((3, 3))], "float16")
    assert (found.nan_count, found.inf_count, found.is_finite) == (1, 2, False)
    assert found.nan_row_fraction == pytest.approx(1 / 3)
    assert found.rmse is None
    assert found.max_abs_error is None
    assert (found.max_ulp, found.ulp_histogram) == (None, {})
    assert summarise_errors([output[2:]], [np.ones((1, 3))], "float16").is_finite


def test_an_error_beside_a_reference_of_zero_is_infinite() -> None:
    found = summarise_errors([np.full((2, 2), 5.0, np.float16)], [np.zeros((2, 2))], "float16")
    assert found.rmse == math.inf


# ---------------------------------------------------------------- the same digits everywhere

#: CPUs as numpy and its BLAS may take this one: with all it has, and with as little as they run on.
LESSER = {
    "OPENBLAS_CORETYPE": "Prescott",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR AVX2 FMA3 AVX512F AVX512_SKX",
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the names of x86's features and cores")
@pytest.mark.parametrize(
    "words",
    [
        ["pasa", "--seq", "260", "--tp", "8", "--diagnose"],
        pytest.param(["flash", "-w", "deit_b"], marks=pytest.mark.exhaustive),
    ],
    ids=" ".join,
)
def test_result_json_is_the_same_to_the_byte_on_a_lesser_cpu(tmp_path: Path, words: list[str]) -> None:
    """Without AVX and with another core's BLAS, whose bits of the same product do differ."""
    code = (
        "import numpy as np; r = np.random.default_rng(0); q, k = r.standard_normal((2, 300, 300))\n"
        "np.savez('products.npz', (q @ k), np.exp(k))\n"
        "from npusim.cli import main; main()"
    )
    found, products = [], []
    for name, more in (("full", {}), ("lesser", LESSER)):
        own = {**{n: v for n, v in os.environ.items() if n not in LESSER}, **more}
        command = [sys.executable, "-W", "ignore", "-c", code, "run", *words, "--heads", "0", "-o", name]
        subprocess.run(command, env=own, check=True, capture_output=True, cwd=tmp_path)
        found.append((tmp_path / name / "result.json").read_bytes())
        with np.load(tmp_path / "products.npz") as arrays:
            products.append([arrays[n].tobytes() for n in arrays.files])
    assert products[0] != products[1]
    assert found[0] == found[1]
