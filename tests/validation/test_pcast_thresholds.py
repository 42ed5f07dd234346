"""P-Cast's exact statements: thresholds, sawtooth, closed forms (reports/pcast_numerics)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from npusim import formats
from npusim.config.problem import Problem, SinkData
from reports.parts.values import GPU, program_of
from reports.pcast_numerics import theory

E4M3 = "float8_e4m3fn"


def test_e4m3_has_126_positive_values_from_2_to_the_minus_9_to_448() -> None:
    found = theory.e4m3_values()
    assert (len(found), found[0], found[-1]) == (126, 2.0**-9, 448.0)
    # 7 subnormals, then 8 values a binade from 2^-6.
    assert found[6:8] == (7 * 2.0**-9, 2.0**-6)


def test_the_cast_zeroes_up_to_and_including_half_the_smallest_value() -> None:
    tie = np.float32(theory.largest_zero())
    assert tie == 2.0**-10
    above = np.nextafter(tie, np.float32(1))
    assert float(formats.cast(tie, E4M3, overflow="saturate")) == 0
    assert float(formats.cast(above, E4M3, overflow="saturate")) == 2.0**-9


@pytest.mark.parametrize(("scale", "exponent"), [(1, 6.9315), (256, 12.4766), (448, 13.0363)])
def test_underflow_thresholds(scale: float, exponent: float) -> None:
    assert theory.underflow_exponent(scale) == pytest.approx(exponent, abs=5e-5)


def test_p_is_zero_exactly_where_the_threshold_says() -> None:
    for scale in (1.0, 16.0, 256.0):
        limit = -theory.underflow_exponent(scale)
        exponents = np.array([limit - 1e-5, limit + 1e-5], np.float32)
        p = formats.exp(exponents, "float32") * np.float32(scale)
        below, above = formats.cast(p, E4M3, overflow="saturate").astype(float)
        assert below == 0
        assert above > 0


@pytest.mark.parametrize(
    ("sinks", "shift"), [(1, 0.0), (2, 0.5642), (3, 0.8463), (4, 1.0294), (8, 1.4236), (16, 1.7660)]
)
def test_expected_maximum_of_the_sinks(sinks: int, shift: float) -> None:
    assert theory.sink_shift(sinks) == pytest.approx(shift, abs=5e-5)


@pytest.mark.parametrize(("scale", "gap"), [(1, 5.902), (256, 11.447), (448, 12.007)])
def test_critical_gaps(scale: float, gap: float) -> None:
    assert theory.critical_gap(scale, 4) == pytest.approx(gap, abs=5e-4)


@pytest.mark.parametrize("power", range(9))
def test_the_worst_step_of_a_power_of_two_is_one_sixteenth(power: int) -> None:
    assert theory.worst_step(2.0**power) == 2.0**-4


@pytest.mark.parametrize(
    ("scale", "step"),
    # 2^(j-3) / S for 2^j < S <= 2^(j+1); saturation beyond 448.
    [(448, 1 / 14), (384, 1 / 12), (400, 0.08), (300, 32 / 300), (100, 0.08), (200, 0.08), (512, 0.25)],
)
def test_the_worst_step_of_other_scales_is_larger(scale: float, step: float) -> None:
    assert theory.worst_step(scale) == pytest.approx(step, rel=1e-12)
    assert theory.worst_step(scale) > 2.0**-4


def test_448_against_256() -> None:
    ratio = theory.worst_step(448) / theory.worst_step(256)
    assert ratio == pytest.approx(8 / 7)
    assert ratio**2 == pytest.approx(1.306, abs=5e-4)


def test_the_worst_step_is_what_the_cast_really_does_at_worst() -> None:
    """Half of d_p bounds the error of P, and some P in (0, 1] reaches it."""
    p = np.linspace(0, 1, 1 << 20, dtype=np.float64)
    for scale in (1.0, 100.0, 256.0, 384.0, 448.0, 512.0):
        quantised = formats.cast(p * scale, E4M3, overflow="saturate").astype(np.float64) / scale
        largest = float(np.abs(quantised - p).max())
        assert largest == pytest.approx(theory.worst_step(scale) / 2, rel=1e-3)


def test_the_closed_form_is_neither_bound_of_the_expected_fraction() -> None:
    """reports/pcast_numerics: 4.5 points below at a gap of 5, up to 4.8 above from 6 to 9."""
    errors = {
        gap: 100 * (theory.closed_form(gap, 1, 4) - theory.expectation(gap, 1, 4, 4096).zeroed)
        for gap in (5, 6, 7, 8, 9)
    }
    assert errors[5] == pytest.approx(-4.5, abs=0.1)
    assert errors[7] == pytest.approx(4.8, abs=0.1)
    assert all(errors[gap] > 0 for gap in (6, 7, 8, 9))


@pytest.mark.parametrize(
    ("gap", "zeroed", "mass", "lost"),
    # reports/pcast_numerics: expectation of the fraction, the normal keys' mass, the mass truly zeroed.
    [(5, 22.9, 87.8, 4.9), (6, 52.9, 73.6, 15.0), (7, 81.6, 52.2, 24.8), (8, 95.9, 30.0, 22.9), (9, 99.5, 14.2, 13.3)],
)
def test_expectations_over_the_sinks(gap: int, zeroed: float, mass: float, lost: float) -> None:
    found = theory.expectation(gap, 1, 4, 4096)
    measured = (found.zeroed, found.other_mass, found.zeroed_mass)
    assert [round(100 * x, 1) for x in measured] == [zeroed, mass, lost]


def test_a_scale_beyond_448_is_warned_of() -> None:
    problem = Problem(heads=1, seq_q=64, head_dim=32, dtype="float32", data=SinkData(kind="sink", gap=7.0))
    notes = program_of("fp8_attention", problem, "hpc_ops,scale=512", hw=GPU).notes
    assert any(note.startswith("saturation: P reaches 512") for note in notes)
    assert math.isclose(theory.worst_step(512), 0.25)
