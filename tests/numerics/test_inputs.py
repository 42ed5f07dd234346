"""Recipes give what their papers define: moments by law, scores by construction."""

from __future__ import annotations

import numpy as np
import pytest

from npusim.config.problem import (
    AmplifiedData,
    DataRecipe,
    HybridData,
    NormalData,
    Problem,
    ResonanceData,
    SinkData,
    UniformData,
)
from npusim.errors import TensorError
from npusim.program.numerics.input_tensors import amplify_mean, array_source, recipe_source

ROWS, DIM = 2048, 64


def problem(data: DataRecipe, **fields: object) -> Problem:
    given: dict[str, object] = {"heads": 2, "seq_q": ROWS, "head_dim": DIM, "dtype": "float32"}
    return Problem(**{**given, **fields}, data=data)


@pytest.mark.parametrize(
    ("data", "mean", "variance"),
    [
        (NormalData(mean=3.0, deviation=2.0), 3.0, 4.0),
        # Variance of U(-a, a) is a^2 / 3.
        (UniformData(kind="uniform", x0=20.0, amplitude=15.0), 20.0, 75.0),
        # 1 + p Am^2 = 1 + 0.001 * 100^2
        (HybridData(kind="hybrid", x0=20.0, amplitude=100.0), 20.0, 11.0),
    ],
    ids=["normal", "uniform", "hybrid"],
)
def test_moments_are_those_of_the_distribution(data: DataRecipe, mean: float, variance: float) -> None:
    values = recipe_source(problem(data))("k", 0, 1).astype(np.float64)
    count = values.size
    assert abs(values.mean() - mean) < 4 * np.sqrt(variance / count)
    # The hybrid's fourth moment is that of its rare outliers, 3 p Am^4: standard error of the variance.
    fourth = 3 * 0.001 * 100.0**4 if isinstance(data, HybridData) else 3 * variance**2
    assert abs(values.var() - variance) < 4 * np.sqrt(fourth / count)


def test_outliers_are_as_rare_as_said() -> None:
    data = HybridData(kind="hybrid", x0=0.0, amplitude=1000.0, probability=0.25)
    values = recipe_source(problem(data))("q", 0, 0)
    # An outlier of deviation 1000 is within 6 of the mean with probability 0.0048.
    share = float((np.abs(values) > 6).mean())
    expected = 0.25 * (1 - 0.0048)
    assert abs(share - expected) < 4 * np.sqrt(0.25 * 0.75 / values.size)


def test_uniform_without_amplitude_is_constant() -> None:
    values = recipe_source(problem(UniformData(kind="uniform", x0=2.5, amplitude=0.0)))("v", 0, 0)
    assert (values == 2.5).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sink_scores_are_standard_normal_with_a_gap_on_the_first_keys(dtype: str) -> None:
    data = SinkData(kind="sink", gap=7.0, sinks=4)
    made = problem(data, dtype=dtype, seq_q=512)
    source = recipe_source(made)
    q, k = (source(n, 0, 0).astype(np.float64) for n in ("q", "k"))
    scores = q @ k.T * made.scale
    others, sinks = scores[:, 4:], scores[:, :4]
    # Every query has length 1/scale: variance 1 over keys drawn anew, here over 2044 of them.
    assert abs(others.mean()) < 0.01
    assert abs(others.var() - 1) < 0.02
    # Scores of one key share its length: 4 keys, variance 2/d each around 1.
    assert abs(sinks.mean() - 7.0) < 4 * np.sqrt(1 / (4 * 63))
    # The construction leaves nothing of the gap to chance: without it the scores are as the others.
    rest = q[:, :-1] @ k[:4, :-1].T * made.scale
    tolerance = 2e-3 if dtype == "float16" else 1e-6
    np.testing.assert_allclose(sinks - rest, 7.0, atol=tolerance)


def test_queries_of_a_sink_have_one_length() -> None:
    made = problem(SinkData(kind="sink", gap=7.0))
    q = recipe_source(made)("q", 0, 0).astype(np.float64)
    np.testing.assert_allclose((q[:, :-1] ** 2).sum(axis=1), DIM, rtol=1e-5)


@pytest.mark.parametrize(("phase", "sign"), [(0.0, 1.0), (180.0, -1.0)])
def test_resonant_scores_are_the_waves_inner_product(phase: float, sign: float) -> None:
    data = ResonanceData(
        kind="resonance", query_amplitude=8.0, key_amplitude=4.0, frequency=5, phase_degrees=phase, deviation=0.0
    )
    source = recipe_source(problem(data, dtype="float64"))
    q, k = source("q", 0, 0), source("k", 0, 0)
    # sum of cos^2 over whole periods is d / 2.
    np.testing.assert_allclose(q @ k.T, sign * 8.0 * 4.0 * DIM / 2, rtol=1e-12)


def test_a_heads_values_do_not_depend_on_the_others_and_do_on_the_seed() -> None:
    made = problem(HybridData(kind="hybrid", x0=20.0, amplitude=10.0, seed=3))
    first, alone = recipe_source(made), recipe_source(made)
    first("k", 0, 0)
    np.testing.assert_array_equal(first("k", 0, 1), alone("k", 0, 1))
    assert (recipe_source(made, seed=4)("k", 0, 1) != alone("k", 0, 1)).any()
    assert (alone("q", 0, 0) != alone("k", 0, 0)).any()


def test_amplifying_scales_the_mean_and_keeps_the_rest() -> None:
    keys = np.array([[1.0, -2.0], [3.0, 4.0]], np.float16)
    # mean (2, 1): deviations (-1, -3) and (1, 3) around ten times the mean.
    np.testing.assert_array_equal(amplify_mean(keys, 10.0), [[19, 7], [21, 13]])
    assert amplify_mean(keys, 10.0).dtype == np.float16


def test_amplified_data_change_only_the_keys_of_given_tensors() -> None:
    rng = np.random.default_rng(0)
    tensors = {n: rng.standard_normal((1, 1, 8, 16)).astype(np.float16) for n in ("q", "k", "v")}
    source = array_source(tensors, AmplifiedData(kind="amplified", gain=100.0))
    np.testing.assert_array_equal(source("q", 0, 0), tensors["q"][0, 0])
    np.testing.assert_array_equal(source("v", 0, 0), tensors["v"][0, 0])
    np.testing.assert_array_equal(source("k", 0, 0), amplify_mean(tensors["k"][0, 0], 100.0))
    plain = array_source(tensors, NormalData())
    np.testing.assert_array_equal(plain("k", 0, 0), tensors["k"][0, 0])


def test_amplified_data_without_tensors_are_refused() -> None:
    with pytest.raises(TensorError, match="changes your tensors"):
        recipe_source(problem(AmplifiedData(kind="amplified", gain=2.0)))
