"""Schedules of plain tensors name their own sizes: a run, a case of cycles and a case of times take them by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import npusim
from npusim.config.cases import BaselineFile
from npusim.config.load import load_device
from npusim.config.problem import KernelProblem
from npusim.errors import SpecError, TilingError
from npusim.library import SCHEDULES, names_sizes, takes_sizes
from npusim.simulation.request import Request
from npusim.studies.baseline.cycles import request_of
from npusim.studies.validate.measured_times import validate_times
from reports.parts.kernel import declared_tiling
from tests.turns import in_turn

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
    own = declared_tiling("ssd", "h200")  # no other tile is tried, which takes a while
    result = npusim.run("ssd", hw="h200", tiling=own, numerics=False)
    assert {t.name: t.rows for t in result.program.tensors.values()}["o"] == 2048


def test_sizes_that_attention_has_too_are_the_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and a batch are sizes of attention: a mapping of these alone was once a problem of attention."""
    problem = Request("retention", problem={"heads": 2, "batch": 1}).problem
    assert isinstance(problem, KernelProblem)
    assert problem.sizes == {"heads": 2, "batch": 1}


def test_sizes_of_a_product_are_none_of_a_recurrences() -> None:
    with pytest.raises(SpecError, match="gla has no size m=4; allowed: whole numbers from 1 for batch, heads, tokens,"):
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
        "  - {name: own, device: h200, schedule: retention, unnamed: auto, measured: {latency_us: 10},\n"
        "     workload: {sizes: {heads: 2, tokens: 64, key: 32, value: 32}}}\n"
    )
    (residual,) = validate_times(file).residuals
    run = npusim.run("retention", hw="h200", problem=SMALL, numerics=False)
    assert abs(residual.relative_error - (run.latency_us / 10 - 1)) < 0.01


STATES = ("retention", "gla", "gated_delta", "ssd", "flash_backward")


PRODUCTS = ({"m": 512, "n": 512, "k": 256}, {"m": 1024, "n": 512, "k": 512}, {"m": 4096, "n": 4096, "k": 512})
FAMILIES = {hw: load_device(hw).family for hw in ("ascend_910b2", "ascend_950", "v100", "t4", "a10", "h200")}
#: Devices without a unit that a schedule needs.
WITHOUT = {"fp8_attention": ("v100", "t4", "a10"), "volta_flash": ("t4", "a10", "h200")}
#: Schedules of one device and the devices that run them; those of a layer and its parts have requests of their own.
MAPPED = [
    (name, hw)
    for name, family in sorted(SCHEDULES)
    for hw, its in FAMILIES.items()
    if its == family and name not in ("layer", "rows", "operator") and hw not in WITHOUT.get(name, ())
]
#: Each schedule on one of its devices, in turn; all with ``-m exhaustive``.
DEVICES_OF = {name: [hw for own, hw in MAPPED if own == name] for name, _ in MAPPED}
REPRODUCED = [
    pytest.param(name, hw, marks=[] if place == number % len(devices) else pytest.mark.exhaustive)
    for number, (name, devices) in enumerate(DEVICES_OF.items())
    for place, hw in enumerate(devices)
]


def requests_of(name: str) -> list[dict[str, Any]]:
    """Return small requests of a schedule."""
    if name in STATES:
        return [{"problem": SMALL}]
    if name == "gemm":
        return [{"problem": sizes} for sizes in PRODUCTS]
    return [{"problem": {"bytes": 1 << 20}} if name == "copy" else {"workload": "smollm2", "seq": 256}]


@pytest.mark.parametrize(("name", "hw"), REPRODUCED)
def test_a_tiling_that_a_run_prints_reproduces_the_run_when_it_is_named(name: str, hw: str) -> None:
    """V100 and T4 printed stages=2, which they refuse; products printed stages=1, which no run of theirs had."""
    for request in requests_of(name):
        bare = {"hw": hw, "numerics": False, "trace_groups": (), **request}
        run = npusim.run(name, **bare)
        printed = {n: value for n, value in run.tiling if value is not None}
        assert npusim.run(name, tiling=printed, **bare).cycles == run.cycles


@pytest.mark.parametrize(("name", "tokens"), in_turn(STATES, (1, 2, 33)))
def test_groups_of_warps_without_rows_hand_on_what_others_read(name: str, tokens: int) -> None:
    """With one token the second group has none: it released no slot, and the next load of decays came too early."""
    sizes = {"heads": 2, "tokens": tokens, "key": 16, "value": 32}
    fields: dict[str, object] = {"gradient": "dv"} if name == "flash_backward" else {"chunk": 32}
    tiling = declared_tiling(name, "h200", **fields, warps=8)
    run = npusim.run(name, hw="h200", problem=sizes, tiling=tiling, trace_groups=(), rows="all")
    assert run.cycles > 0
    assert run.numerics is not None
    assert run.numerics.error.rmse is not None
    assert run.numerics.error.rmse < 2**-7


@pytest.mark.parametrize(
    ("name", "problem", "tiling", "message"),
    [
        ("retention", {}, {"chunk": 48}, "chunk: 48 rows cannot be distributed to 4 warps; use a multiple of 32"),
        ("retention", {"key": 48}, {}, "key: 48 rows cannot be distributed"),
        ("retention", {}, {"block_key": 48}, "block_key: 48 rows cannot be distributed"),
        ("flash_backward", {}, {"tile_kv": 48}, "tile_kv: 48 rows cannot be distributed"),
        ("flash_backward", {}, {"block_q": 48}, "block_q: 48 rows cannot be distributed"),
    ],
)
def test_rows_that_warps_cannot_share_are_named_as_the_schedule_names_them(
    name: str, problem: dict[str, int], tiling: dict[str, int], message: str
) -> None:
    with pytest.raises(TilingError, match=message):
        npusim.run(name, hw="v100", problem={"heads": 1, **problem}, tiling=tiling, numerics=False)


def test_an_exact_gradient_of_0_is_said() -> None:
    """A query that sees its own key alone has the weight 1, whatever Q and K are: its error has no relative measure."""
    sizes = {"heads": 1, "tokens": 32, "key": 16, "value": 16, "causal": 1, "window": 1}
    result = npusim.run("flash_backward", hw="h200", problem=sizes)
    assert "relative RMSE - (the exact result is 0)   max |error| " in str(result)


@pytest.mark.parametrize(("name", "hw"), in_turn(STATES, ("ascend_910b2", "ascend_950", "h200")))
def test_few_tokens_and_narrow_heads_are_no_contradiction(name: str, hw: str) -> None:
    """A chunk with one token reads one row of a matrix of its own, and once counted as one that reads all 64."""
    for tokens in (1, 17):
        problem = KernelProblem(heads=1, tokens=tokens, key=16, value=16)
        tiling = declared_tiling(name, hw)
        timing = npusim.run(name, hw=hw, tiling=tiling, numerics=False, trace_groups=(), problem=problem).timing
        assert timing is not None
        assert 0 < timing.compulsory_bytes <= timing.link_bytes.get("hbm", timing.compulsory_bytes)
