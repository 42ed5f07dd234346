"""Unfused attention on a GPU: operators as a framework launches them, their times, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

import npusim
from npusim.config.core_units import WarpIssue
from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.errors import SpecError
from npusim.program.timing import METHODS
from npusim.studies.validate.measured_times import validate_times

pytestmark = pytest.mark.usefixtures("declared_tiles")

HELD_OUT = Path(__file__).parents[2] / "reports" / "silicon" / "h200_heldout.yaml"
H200 = load_device("h200")


def run(seq: int, heads: int = 2, *, causal: bool = False, **options: object) -> npusim.RunResult:
    problem = Problem(heads=heads, seq_q=seq, seq_kv=seq, head_dim=64, causal=causal)
    return npusim.run("standard", hw=H200, problem=problem, numerics=False, trace_groups=(), **options)


def test_every_operator_is_a_kernel() -> None:
    result = run(256, causal=True)
    assert [p.name for p in result.program.phases] == ["scores", "scale", "mask", "softmax", "values"]
    assert [p.name for p in run(256).program.phases] == ["scores", "scale", "softmax", "values"]


@pytest.mark.parametrize("causal", [False, True])
def test_all_methods_agree_with_des(causal: bool) -> None:
    cycles = {m: run(300, causal=causal, method=m).cycles for m in ("des", "block", "fold", "steady")}
    assert set(cycles) <= set(METHODS)
    assert len(set(cycles.values())) == 1, cycles


def test_rows_that_are_no_multiple_of_16_bytes_cost_a_library_dearly() -> None:
    # Measured: 40 heads of 1,500 rows take longer for fewer scores than 48 heads of 1,536.
    assert run(1500, heads=48).cycles > run(1536, heads=48).cycles


@pytest.mark.parametrize("name", ["standard_h256s512d64", "standard_h16s2048d128_causal", "standard_h40s1500d128"])
def test_shapes_that_constants_were_not_taken_from_are_within_12_percent(name: str) -> None:
    assert abs(validate_times(HELD_OUT, only=name).residuals[0].relative_error) < 0.12


def test_cycles_of_softmax_lie_between_measured_lengths() -> None:
    issue = H200.engine("sm", "WARPS")
    assert isinstance(issue, WarpIssue)
    library = issue.library
    assert library is not None

    def element_cycles(columns: int) -> float:
        return sum(share * library.softmax[n].row_cycles.value for n, share in library.softmax_points(columns).items())

    low, high = (library.softmax[n].row_cycles.value / int(n) for n in ("3072", "4096"))
    assert high < element_cycles(3500) < low
    assert element_cycles(3500) == pytest.approx(low + (high - low) * (3500 - 3072) / (4096 - 3072))
    for asked, nearest in ((8, "64"), (10**6, "32768")):
        assert library.softmax_points(asked) == {nearest: 1 / int(nearest)}


def test_a_device_that_says_nothing_of_a_library_is_refused() -> None:
    issue = H200.engine("sm", "WARPS")
    core = H200.cores["sm"]
    engines = {**core.engines, "WARPS": issue.model_copy(update={"library": None})}
    bare = H200.model_copy(update={"cores": {"sm": core.model_copy(update={"engines": engines})}})
    with pytest.raises(SpecError, match=r"engines.WARPS.library: missing; softmax needs it"):
        npusim.run("standard", hw=bare, problem=Problem(heads=1, seq_q=64, seq_kv=64, head_dim=64), numerics=False)
