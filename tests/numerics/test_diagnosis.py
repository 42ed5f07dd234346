"""Diagnosis: each figure against a direct computation on the same inputs, on both mappings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim.config.load import load_device
from npusim.config.problem import Problem, ResonanceData, SinkData, UniformData
from npusim.config.tiling import build_tiling
from npusim.library import find_schedule
from npusim.program.numerics.diagnosis import measure
from npusim.program.numerics.evaluate import evaluate
from npusim.program.numerics.input_tensors import array_source, recipe_source
from npusim.run import run

if TYPE_CHECKING:
    from npusim.program.numerics.bits_result import Diagnosis
    from npusim.program.numerics.executor import HeadSource

pytestmark = pytest.mark.usefixtures("declared_tiles")

#: Largest exponent s - m at which E4M3 becomes zero: S P <= 2^-10, the tie included (reports/pcast_numerics).
E4M3_ZERO = -10 * np.log(2)
#: The same for float16's smallest subnormal 2^-24: P <= 2^-25.
HALF_ZERO = -25 * np.log(2)


def diagnose(
    schedule: str, problem: Problem, source: HeadSource, precision: str, hw: str = "h200", **tiling: int
) -> Diagnosis:
    device = load_device(hw)
    chosen = find_schedule(schedule, device.family)
    fields = build_tiling(chosen.tiling, tiling)
    program = chosen.program(problem, fields, device, chosen.precision(precision))
    found = evaluate(program, problem, source, rows="all", diagnose=True).diagnosis
    assert found is not None
    return found


def scores_of(problem: Problem, source: HeadSource, head: int) -> np.ndarray[Any, Any]:
    """Return scaled, masked float64 scores of one head."""
    q = source("q", 0, head).astype(np.float64)
    k = source("k", 0, head // problem.group_size).astype(np.float64)
    scores = q @ k.T * problem.scale
    if problem.causal:
        scores[np.arange(len(k))[None, :] > np.arange(len(q))[:, None]] = -np.inf
    return scores


def expected_underflow(
    problem: Problem, source: HeadSource, block: int, threshold: float, *, is_reverse: bool
) -> tuple[float, float]:
    """Return percent of visible pairs below ``threshold`` when their tile is cast, and their mass."""
    zeroed = visible = mass = 0.0
    for head in range(problem.heads):
        scores = scores_of(problem, source, head)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        top = np.full((problem.seq_q, 1), -np.inf)
        starts = range(0, problem.seq_kv, block)
        for start in reversed(starts) if is_reverse else starts:
            tile = slice(start, start + block)
            top = np.maximum(top, scores[:, tile].max(axis=1, keepdims=True))
            seen = np.isfinite(scores[:, tile])
            gone = seen & (scores[:, tile] <= np.where(np.isfinite(top), top, 0.0) + threshold)
            zeroed, visible = zeroed + gone.sum(), visible + seen.sum()
            mass += weights[:, tile][gone].sum()
    return 100 * zeroed / visible, 100 * mass / (problem.heads * problem.seq_q)


def sink_problem(**fields: object) -> Problem:
    given: dict[str, object] = {"heads": 2, "seq_q": 128, "seq_kv": 320, "head_dim": 32, "dtype": "float32"}
    return Problem(**{**given, **fields}, data=SinkData(kind="sink", gap=7.0))


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("scale", [1, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_underflow_and_lost_mass_equal_a_direct_count(order: str, scale: int, causal: bool) -> None:
    problem = sink_problem(causal=causal, seq_q=320 if causal else 128)
    source = recipe_source(problem)
    precision = f"hpc_ops_s1,scale={scale},is_reverse={str(order == 'reverse').lower()}"
    found = diagnose("fp8_attention", problem, source, precision)
    zeroed, mass = expected_underflow(problem, source, 64, E4M3_ZERO - np.log(scale), is_reverse=order == "reverse")
    assert found.underflow_percent == pytest.approx(zeroed, abs=0.01)
    assert found.zeroed_mass_percent == pytest.approx(mass, rel=1e-3)


def test_a_scale_in_the_exponent_counts_as_one_outside() -> None:
    problem = sink_problem()
    source = recipe_source(problem)
    inside, outside = (
        diagnose("fp8_attention", problem, source, f"hpc_ops_s1,scale=16,fold={fold}") for fold in ("true", "false")
    )
    assert inside.underflow_percent == pytest.approx(outside.underflow_percent, abs=0.01)
    assert inside.zeroed_mass_percent == pytest.approx(outside.zeroed_mass_percent, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_slices_of_two_vector_cores_are_put_together(dtype: str) -> None:
    problem = sink_problem(dtype=dtype, seq_q=77)
    source = recipe_source(problem)
    found = diagnose(
        "fp8_attention", problem, source, "hpc_ops_s1", "ascend_910b2", block_q=64, block_kv=64, vector_rows=5
    )
    zeroed, mass = expected_underflow(problem, source, 64, E4M3_ZERO, is_reverse=False)
    assert found.underflow_percent == pytest.approx(zeroed, abs=0.01)
    assert found.zeroed_mass_percent == pytest.approx(mass, rel=1e-3)


def test_pasas_half_precision_probabilities_underflow_at_their_own_tile() -> None:
    data = UniformData(kind="uniform", x0=0.0, amplitude=6.0)
    problem = Problem(heads=1, seq_q=128, seq_kv=256, head_dim=64, data=data)
    source = recipe_source(problem)
    found = diagnose("pasa", problem, source, "fp32_mean", block_kv=128)
    # PASA takes each tile's own maximum: no tile sees another's.
    scores = scores_of(problem, source, 0)
    gone = np.concatenate([t <= t.max(axis=1, keepdims=True) + HALF_ZERO for t in np.split(scores, 2, axis=1)], axis=1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    mass = (weights * gone).sum(axis=1) / weights.sum(axis=1)
    # The shifted scores are rounded to float16: a pair near the threshold may fall on either side.
    assert found.underflow_percent == pytest.approx(100 * gone.mean(), abs=0.2)
    assert found.zeroed_mass_percent == pytest.approx(100 * mass.mean(), rel=0.1)


def product_of(problem: Problem, source: HeadSource, block: int, threshold: float) -> float:
    """Return P-Cast's fraction zeroed times mass (percent), both without the first key, forward."""
    zeroed = others = mass = 0.0
    for head in range(problem.heads):
        scores = scores_of(problem, source, head)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        mass += (1 - weights[:, 0] / weights.sum(axis=1)).sum()
        tops = np.maximum.accumulate(scores, axis=1)
        ends = [min(len(tops[0]), (j // block + 1) * block) - 1 for j in range(len(tops[0]))]
        seen = np.isfinite(scores[:, 1:])
        others += seen.sum()
        zeroed += (seen & (scores <= tops[:, ends] + threshold)[:, 1:]).sum()
    return float(100 * zeroed / others * mass / (problem.heads * problem.seq_q))


@pytest.mark.parametrize(
    ("hw", "fields"),
    [
        ("h200", {"block_kv": 64}),
        # Keys come in three pieces of 128 at most, rows in slices of two cores.
        ("ascend_910b2", {"block_q": 64, "block_kv": 320, "vector_rows": 5}),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_the_papers_product_of_fraction_and_mass_leaves_sinks_out(
    hw: str, fields: dict[str, int], causal: bool
) -> None:
    """Scores as wide as to zero most pairs, the first key's among them."""
    data = UniformData(kind="uniform", x0=0.0, amplitude=6.0)
    problem = Problem(
        heads=2, seq_q=320 if causal else 77, seq_kv=320, head_dim=32, dtype="float32", causal=causal, data=data
    )
    source = recipe_source(problem)
    found = diagnose("fp8_attention", problem, source, "hpc_ops_s1", hw, **fields)
    expected = product_of(problem, source, fields["block_kv"], E4M3_ZERO)
    assert 50 < expected < 99
    assert found.product_mass_percent == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("schedule", ["flash", "fp8_attention"])
def test_a_sink_that_is_zeroed_is_no_pair_of_the_product(schedule: str) -> None:
    """Two keys; the first, the sink, is zeroed: nothing else is, so that the product is 0."""
    q, k = np.full((16, 32), 8.0), np.array([[-8.0], [8.0]]) * np.ones((1, 32))
    tensors = {n: x[None, None].astype(np.float32) for n, x in (("q", q), ("k", k), ("v", k))}
    problem = Problem(heads=1, seq_q=16, seq_kv=2, head_dim=32, dtype="float32")
    precision = "fa2_fp32,arithmetic=ieee.f32" if schedule == "flash" else "hpc_ops_s1"
    found = diagnose(schedule, problem, array_source(tensors), precision)
    assert found.underflow_percent == 50.0
    assert found.product_mass_percent == 0.0


def test_saturation_counts_what_lies_above_the_largest_value() -> None:
    problem = sink_problem()
    source = recipe_source(problem)
    counts = {
        scale: diagnose("fp8_attention", problem, source, f"hpc_ops_s1,scale={scale}").saturated_count
        for scale in (448, 512)
    }
    # P = 1 at every new maximum: 448 is the largest value itself, 512 P lies above it for P > 7/8.
    expected = 0
    for head in range(problem.heads):
        scores, top = scores_of(problem, source, head), np.full((problem.seq_q, 1), -np.inf)
        for tile in np.split(scores, 5, axis=1):
            top = np.maximum(top, tile.max(axis=1, keepdims=True))
            expected += int((np.exp(tile - top) > 7 / 8).sum())
    assert counts == {448: 0, 512: expected}


def test_ranges_before_and_after_shifting() -> None:
    data = UniformData(kind="uniform", x0=20.0, amplitude=0.5)
    problem = Problem(heads=2, seq_q=128, seq_kv=256, head_dim=128, data=data)
    source = recipe_source(problem)
    found = diagnose("pasa", problem, source, "fp32_mean", "ascend_910b2", block_kv=128)
    keys = np.concatenate([source("k", 0, h) for h in range(2)]).astype(np.float64)
    raw = np.stack([scores_of(problem, source, h) for h in range(2)]) / problem.scale
    assert (found.key_min, found.key_max) == (keys.min(), keys.max())
    assert (found.raw_score_min, found.raw_score_max) == pytest.approx((raw.min(), raw.max()))
    # K' = (K - beta mean) / alpha; rounding M's entries to float16 moves it by 20 / alpha * 2^-12 at most,
    # and K' itself is rounded.
    shifted = (keys.reshape(2, 2, 128, 128) - 0.984497 * keys.reshape(2, 2, 128, 128).mean(2, keepdims=True)) / np.sqrt(
        128
    )
    assert (found.shifted_key_min, found.shifted_key_max) == pytest.approx((shifted.min(), shifted.max()), abs=7e-4)
    assert found.score_max is not None
    assert found.score_max < raw.max() / 50


def test_ranges_of_flash_are_those_of_unscaled_scores() -> None:
    problem = Problem(heads=1, seq_q=64, head_dim=64)
    found = diagnose("flash", problem, recipe_source(problem), "fa2_fp32")
    assert (found.score_min, found.score_max) == pytest.approx((found.raw_score_min, found.raw_score_max))
    assert found.shifted_key_min is None
    assert "shifted_key_min" not in found.figures()


def test_a_row_with_an_infinite_score_counts_as_nan_and_its_mass_as_nothing() -> None:
    rng = np.random.default_rng(0)
    tensors = {n: rng.standard_normal((1, 1, 64, 64)).astype(np.float16) for n in ("q", "k", "v")}
    tensors["q"][0, 0, 3] = 2000.0
    tensors["k"][0, 0, 5] = 2000.0
    problem = Problem(heads=1, seq_q=64, head_dim=64)
    found = diagnose("flash", problem, array_source(tensors), "fa16_32", "ascend_910b2", block_kv=64)
    assert found.nan_row_percent == pytest.approx(100 / 64)
    assert found.zeroed_mass_percent is not None
    assert np.isfinite(found.zeroed_mass_percent)


@pytest.mark.parametrize(
    ("schedule", "hw"),
    [
        ("flash", "h200"),
        ("flash", "ascend_910b2"),
        ("two_level", "ascend_910b2"),
        ("unified", "ascend_910b2"),
        ("standard", "ascend_910b2"),
        ("fp8_attention", "ascend_910b2"),
        ("volta_flash", "v100"),
    ],
)
def test_every_mapping_tells_what_its_matrix_unit_adds_up(schedule: str, hw: str) -> None:
    problem = Problem(heads=1, seq_q=128, seq_kv=256, head_dim=64)
    found = diagnose(schedule, problem, recipe_source(problem), "", hw)
    assert found.score_min is not None
    assert (found.score_min, found.score_max) == pytest.approx(
        (found.raw_score_min, found.raw_score_max), rel=1e-5 if hw != "v100" else 1e-3
    )


@pytest.mark.parametrize(("lag", "frequency"), [(0.0, 3), (90.0, 7), (180.0, 4), (150.0, 32), (180.0, 0)])
def test_resonance_finds_frequency_and_phase_of_a_shared_wave(lag: float, frequency: int) -> None:
    at = 2 * np.pi * frequency * np.arange(64) / 64
    q = np.cos(at)[None, :] * np.array([[1.0], [2.0], [5.0]])
    k = 3 * np.cos(at - np.deg2rad(lag))[None, :]
    found = measure(q, k)
    assert found.frequency == frequency
    # At the ends of the spectrum a wave is cos only: 90 and 150 degrees look like 90 +- 90.
    expected = lag if 0 < frequency < 32 else 180.0 * (np.cos(np.deg2rad(lag)) < 0)
    assert found.phase_degrees == pytest.approx(expected, abs=1e-6)
    assert found.mean_score == pytest.approx(float((q @ k.T).mean()), abs=1e-9)
    assert found.share == pytest.approx(1.0)


def test_resonance_looks_at_the_pairs_that_the_mask_leaves() -> None:
    """Every query is at right angles to the keys it sees, and opposite to half of those it does not."""
    d = np.eye(32)
    q, k = np.repeat(d[[0, 2]], 64, axis=0), np.repeat([d[1], -d[0]], 64, axis=0)
    tensors = {n: x[None, None].astype(np.float16) for n, x in (("q", q), ("k", k), ("v", k))}
    cosines = []
    for causal in (True, False):
        problem = Problem(heads=1, seq_q=128, head_dim=32, causal=causal)
        found = diagnose("flash", problem, array_source(tensors), "", "h200")
        cosines.append(found.resonance_cosine)
    assert cosines == [0.0, -0.25]


def test_resonance_behind_a_mask_equals_a_direct_mean_over_pairs() -> None:
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((40, 16)) + 0.5, rng.standard_normal((90, 16)) - 0.3
    pairs = np.arange(90)[None, :] < rng.integers(0, 91, 40)[:, None]
    pairs[:20] &= np.arange(90)[None, :] >= 7  # ranges that begin later, too
    found = measure(q, k, pairs)
    unit_q, unit_k = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, k))
    assert found.cosine == pytest.approx((unit_q @ unit_k.T)[pairs].mean())
    # The part of every score at one frequency: a product of the two waves there.
    waves = [np.zeros_like(x) for x in (q, k)]
    for wave, x in zip(waves, (q, k), strict=True):
        spectrum = np.fft.rfft(x)
        spectrum[:, np.arange(spectrum.shape[1]) != found.frequency] = 0
        wave[:] = np.fft.irfft(spectrum, n=16)
    assert found.mean_score == pytest.approx((waves[0] @ waves[1].T)[pairs].mean())
    assert measure(q, k, np.full((40, 90), True)) == measure(q, k)


def test_resonance_of_the_recipe_and_of_independent_rows() -> None:
    data = ResonanceData(kind="resonance", query_amplitude=8.0, key_amplitude=4.0, frequency=5, phase_degrees=170.0)
    problem = Problem(heads=1, seq_q=512, head_dim=64, data=data)
    found = measure(recipe_source(problem)("q", 0, 0), recipe_source(problem)("k", 0, 0))
    assert found.frequency == 5
    assert found.phase_degrees == pytest.approx(170.0, abs=1.0)
    assert found.cosine < -0.9
    rng = np.random.default_rng(1)
    noise = measure(rng.standard_normal((512, 64)), rng.standard_normal((512, 64)))
    assert abs(noise.cosine) < 0.02
    assert measure(np.zeros((2, 16)), np.ones((2, 16))).cosine == 0.0


def test_a_run_carries_a_diagnosis_only_on_request() -> None:
    plain = run("flash", hw="h200", seq=64, heads=[0])
    assert plain.numerics is not None
    assert plain.numerics.diagnosis is None
    asked = run("flash", hw="h200", seq=64, heads=[0], diagnose=True)
    assert asked.numerics is not None
    assert asked.numerics.diagnosis is not None
    assert (asked.output[:, 0] == plain.output[:, 0]).all()


def test_a_workload_of_amplified_tensors_brings_them_along() -> None:
    result = run(
        "flash", hw="h200", workload="smollm2_amplified", precision="fa2_fp32,scores=float16", rows="all", diagnose=True
    )
    assert result.numerics is not None
    found = result.numerics.diagnosis
    assert found is not None
    # Gain 800 is beyond the 724 at which the largest |Q K^T| reaches 65504 (shared/qkv/README.md).
    assert 65504 < max(-found.raw_score_min, found.raw_score_max) < 65504 * 800 / 724 * 1.01
    assert found.nan_row_percent > 0
    assert found.zeroed_mass_percent is not None
    assert 0 <= found.zeroed_mass_percent < 100  # rows whose sum is 0 have no share of it
    assert result.numerics.overflow_counts
