"""Schedules of plain tensors name their own sizes: a run, a case of cycles and a case of times take them by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import npusim
from npusim.baseline.cycles import request_of
from npusim.config.cases import BaselineFile
from npusim.config.problem import KernelProblem
from npusim.errors import SpecError
from npusim.schedules import SCHEDULES, names_sizes, takes_sizes
from npusim.simulation.request import Request
from npusim.validate.times import validate_times

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {"heads": 2, "tokens": 64, "key": 32, "value": 32}


def test_packaged_schedules_of_plain_tensors_all_name_their_sizes() -> None:
    plain = {name for name, family in SCHEDULES if issubclass(SCHEDULES[name, family].problem, KernelProblem)}
    assert {n for n in plain if names_sizes(n)} >= {"retention", "gla", "gated_delta", "ssd"}
    assert all(names_sizes(n) and takes_sizes(n) for n in plain)
    assert not names_sizes("flash")
    assert not takes_sizes("gemm")


def test_a_run_without_sizes_has_the_schedules_own() -> None:
    problem = Request("gla").problem
    assert isinstance(problem, KernelProblem)
    assert problem.sizes == {}
    result = npusim.run("ssd", hw="h200", numerics=False)
    assert {t.name: t.rows for t in result.program.tensors.values()}["o"] == 2048


def test_sizes_that_attention_has_too_are_the_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and a batch are sizes of attention: a mapping of these alone was once a problem of attention."""
    problem = Request("retention", problem={"heads": 2, "batch": 1}).problem
    assert isinstance(problem, KernelProblem)
    assert problem.sizes == {"heads": 2, "batch": 1}


def test_sizes_of_a_product_are_none_of_a_recurrences() -> None:
    with pytest.raises(SpecError, match="gla has no size m=4; whole numbers from 1 on for batch, heads, tokens"):
        npusim.run("gla", hw="h200", problem={"m": 4, "n": 4, "k": 4}, numerics=False)


def test_a_case_of_cycles_takes_sizes_by_name(tmp_path: Path) -> None:
    case = BaselineFile(schema="npusim.baseline/1", hw="h200", schedule="retention", problem=SMALL)
    request = request_of(case, case, tmp_path)
    assert isinstance(request.problem, KernelProblem)
    assert request.problem.sizes == SMALL
    other = case.model_copy(update={"schedule": "gemm"})
    with pytest.raises(SpecError, match="write m, n and k"):
        request_of(other, other, tmp_path)


def test_a_case_of_times_takes_sizes_by_name(tmp_path: Path) -> None:
    file = tmp_path / "times.yaml"
    file.write_text(
        "schema: npusim.measurements/1\nsource: a profiler\ncases:\n"
        "  - {name: own, device: h200, schedule: retention, measured: {latency_us: 10},\n"
        "     workload: {sizes: {heads: 2, tokens: 64, key: 32, value: 32}}}\n"
    )
    (residual,) = validate_times(file).residuals
    run = npusim.run("retention", hw="h200", problem=SMALL, numerics=False)
    assert abs(residual.relative_error - (run.latency_us / 10 - 1)) < 0.01


STATES = ("retention", "gla", "gated_delta", "ssd", "flash_backward")


@pytest.mark.parametrize("hw", ["ascend_910b2", "ascend_950", "v100", "t4", "a10", "h200"])
@pytest.mark.parametrize("name", [*STATES, "flash", "pasa"])
def test_a_tiling_that_a_run_prints_is_accepted_when_it_is_named(name: str, hw: str) -> None:
    """V100 and T4 printed stages=2, which they refuse: their tiles go through registers."""
    sizes: dict[str, object] = {"problem": KernelProblem(**SMALL)} if name in STATES else {"workload": "smollm2"}
    if name not in STATES:
        sizes["seq"] = 256
    run = npusim.run(name, hw=hw, numerics=False, trace_groups=(), **sizes)  # type: ignore[arg-type]
    printed = {n: value for n, value in run.tiling if value is not None}
    again = npusim.run(name, hw=hw, numerics=False, trace_groups=(), tiling=printed, **sizes)  # type: ignore[arg-type]
    assert again.cycles == run.cycles


@pytest.mark.parametrize("hw", ["ascend_910b2", "ascend_950", "h200"])
@pytest.mark.parametrize("name", STATES)
def test_few_tokens_and_narrow_heads_are_no_contradiction(name: str, hw: str) -> None:
    """A chunk with one token reads one row of a matrix of its own, and once counted as one that reads all 64."""
    for tokens in (1, 17):
        sizes = {"heads": 1, "tokens": tokens, "key": 16, "value": 16}
        timing = npusim.run(name, hw=hw, numerics=False, trace_groups=(), problem=KernelProblem(**sizes)).timing
        assert timing is not None
        assert 0 < timing.compulsory_bytes <= timing.link_bytes.get("hbm", timing.compulsory_bytes)
