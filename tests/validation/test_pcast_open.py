"""What P-Cast states without a table or leaves open: proposition 3, coverage, dynamic scales, sinks, E4M3 inputs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim import formats
from npusim.program.numerics.input_tensors import recipe_source
from reports.pcast_numerics import beyond, sections, study, theory

if TYPE_CHECKING:
    from pathlib import Path

KEYS, SINKS, HEADS = 4096, 4, 4


@pytest.fixture(scope="module")
def page(repository: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((repository / "reports/pcast_numerics/pcast_numerics.json").read_text())
    return found


# ---------------------------------------------------------------- expectations against plain sampling


def test_expectations_are_those_of_drawn_scores() -> None:
    """Proposition 3, coverage and the fraction zeroed by drawing the model's scores, no schedule."""
    rng = np.random.default_rng(11)
    gap, scale, rows = 7.0, 1.0, 600
    sinks = gap + rng.standard_normal((rows, SINKS))
    normal = rng.standard_normal((rows, KEYS - SINKS))
    top = sinks.max(axis=1, keepdims=True)
    below = top - normal
    total = np.exp(sinks - top).sum(axis=1) + np.exp(-below).sum(axis=1)
    is_zero = below >= theory.underflow_exponent(scale)
    squares = (np.exp(-2 * below) * is_zero).sum(axis=1) / total**2
    for drawn, expected in (
        (squares, theory.collapse_error(gap, scale, SINKS, KEYS)),
        (is_zero.mean(axis=1), theory.zeroed_fraction(gap, scale, SINKS)),
        ((below <= theory.normal_exponent(64.0)).mean(axis=1), theory.coverage(gap, 64.0, SINKS)),
    ):
        error = drawn.std(ddof=1) / np.sqrt(rows)
        # The closed expectation puts the normal keys' sum at its mean: 0.5 % at 4096 keys.
        assert drawn.mean() == pytest.approx(expected, rel=5e-3, abs=4 * error)


def test_no_key_is_zeroed_before_a_sink() -> None:
    assert theory.zeroed_fraction(7.0, 1.0, 0) == 0
    assert theory.zeroed_fraction(7.0, 1.0, 1) == pytest.approx(0.5193, abs=5e-4)


# ---------------------------------------------------------------- the schedule


def test_proposition_3_is_what_the_zeroed_keys_cost_and_about_half_of_the_error() -> None:
    problem = study.sink_problem(7.0, KEYS, HEADS, seed=1)
    found = beyond.collapse(problem, "hpc_ops_s1")
    expected = theory.collapse_error(7.0, 1.0, SINKS, KEYS)
    assert found.proposition.mean() == pytest.approx(expected, rel=0.15)
    np.testing.assert_allclose(found.error, study.error_by_head(problem, "hpc_ops_s1"))
    assert (found.proposition < 0.65 * found.error).all()


def test_real_values_make_lost_mass_an_order_dearer_than_uncorrelated_ones() -> None:
    assert beyond.real_collapse("hpc_ops_s1") > 10


def test_a_recast_by_the_static_scale_is_the_schedules_own_cast() -> None:
    problem = study.sink_problem(7.0, 256, 2)
    kept: list[np.ndarray[Any, Any]] = []

    def keep(where: Any, weights: np.ndarray[Any, Any]) -> tuple[float, ...]:
        kept.append(weights.copy())
        return (0.0,)

    def by_256(p: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        cast = formats.cast(p * np.float32(256), "float8_e4m3fn", overflow="saturate")
        return cast.astype(np.float64) / 256

    source = recipe_source(problem)
    study.by_head(problem, "hpc_ops", keep, source=source)
    study.by_head(problem, "hpc_ops_s1", keep, source=source, recast=by_256)
    own, recast = kept[:2], kept[2:]
    # O is divided by 256 in the one, P in the other: a last bit of float64.
    np.testing.assert_allclose(recast, own, rtol=1e-14)


def test_dynamic_scales_are_powers_of_two_that_fill_e4m3() -> None:
    p = np.array([[[1.0, 0.3, 0.001], [0.01, 0.002, 0.0]]], np.float32)
    for cast in beyond.DYNAMIC.values():
        found = cast(p)
        np.testing.assert_allclose(found, p, rtol=2.0**-4)
        assert found[0, 0, 0] == 1
    # 0.01 x 2^15 = 327.68 becomes 320; with the block's 2^8 it is 2.56, which becomes 2.5.
    by_row, by_block = (cast(p)[0, 1, 0] for cast in beyond.DYNAMIC.values())
    assert (by_row, by_block) == (320 / 2**15, 2.5 / 256)


def test_a_dynamic_scale_gains_next_to_nothing() -> None:
    problem = study.sink_problem(9.0, 1024, 2)
    for is_reverse in (False, True):
        static, *dynamic = beyond.dynamic_errors(problem, is_reverse=is_reverse).values()
        for found in dynamic:
            assert 1 - 1e-3 < found.mean() / static.mean() <= 1


@pytest.mark.parametrize(("scale", "index"), [(1.0, 0), (256.0, 1)])
def test_counted_casts_are_those_of_the_schedule(scale: float, index: int) -> None:
    problem = study.sink_problem(7.0, KEYS, 2, seed=3)
    found = beyond.casts(problem, (1.0, 256.0))[index]
    precision = f"hpc_ops_s1,scale={scale:g}"
    diagnosed = study.diagnose(problem, precision).underflow_percent
    assert diagnosed is not None
    assert 100 * found.zero == pytest.approx(diagnosed * KEYS / (KEYS - SINKS), rel=1e-9)
    assert sum(found) == pytest.approx(1)


def test_reverse_order_protects_only_keys_behind_the_last_sink() -> None:
    problem = study.sink_problem(7.0, KEYS, HEADS, seed=4)
    for where, places in sections.PLACES.items():
        for name in ("forward, S=1", "reverse, S=1"):
            found = beyond.placed(problem, places, study.PRECISIONS[name]).zeroed.mean()
            # Rows of one head share keys: some points of scatter with four heads.
            assert found == pytest.approx(sections._expected(places, name), abs=0.04), (where, name)


def test_rounded_inputs_cost_more_than_the_cast_of_p() -> None:
    chosen = {n: study.PRECISIONS[n] for n in ("forward, S=1", "reverse, S=256")}
    plain, best = beyond.eight_bit(7.0, 1024, 2, chosen, seed=5).values()
    assert best.inputs.mean() > 3 * best.cast.mean()
    assert plain.cast.mean() > 1.5 * best.cast.mean()
    assert plain.total.mean() / best.total.mean() < plain.cast.mean() / best.cast.mean()


# ---------------------------------------------------------------- the committed page


def test_committed_measurements_lie_within_four_standard_errors_of_their_expectations(page: dict[str, Any]) -> None:
    pairs = [(r["proposition"], r["expected"]) for r in page["proposition_3"].values()]
    pairs += [(r["zeroed"], r["expected"]) for r in page["sinks"].values()]
    assert len(pairs) == len(sections.GAPS) + len(sections.COUNTS)
    for found, expected in pairs:
        assert abs(found["value"] - expected) <= 4 * found["error"]
