"""The verb: what it tries, what it says, and that the worst input is the one that it writes."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from npusim import formats
from npusim.cli.app import app
from npusim.config.problem import Problem
from npusim.errors import SpecError
from npusim.formats.cast import widen
from npusim.program.numerics.input_tensors import recipe_source
from npusim.report.text import plain
from npusim.report.worst_inputs import stress_table
from npusim.simulation.evaluation import AttentionSubject
from npusim.simulation.request import Request
from npusim.studies.stress import stress, worst_search
from npusim.studies.stress.aspects import aspects_of, bounded, stressed, words
from npusim.studies.stress.worst_search import StressedRun
from reports.parts.kernel import declared_tiling
from reports.stress import inputs, page

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("declared_tiles")

SMALL: dict[str, Any] = {
    "problem": {"heads": 1, "seq_q": 64, "seq_kv": 128, "head_dim": 32},
    "tiling": {"block_q": 64, "block_kv": 64},
    "budget_s": 600.0,
}


@pytest.fixture
def no_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave choices that hold out, which take most of the time, in tests that claim nothing of them."""
    monkeypatch.setattr(worst_search, "_alternatives", lambda *_: iter(()))


def test_the_same_seed_gives_the_same_result_and_another_one_other_inputs() -> None:
    one, two, other = (stress("flash", ["logits", "late"], seed=seed, **SMALL) for seed in (0, 0, 1))
    assert one == two
    assert all(np.array_equal(one.inputs[n], two.inputs[n]) for n in "qkv")
    assert one.is_whole
    assert [o.point for o in one.outcomes[:8]] == [o.point for o in other.outcomes[:8]]
    assert one.outcomes != other.outcomes
    assert one.verdict == other.verdict == "holds"
    assert one.worst == max(one.outcomes, key=lambda o: o.badness)


def test_several_processes_find_what_one_does() -> None:
    one, two = (stress("flash", ["sinks=0,8", "equal"], jobs=jobs, **SMALL) for jobs in (1, 2))
    assert one == two


def test_a_budget_that_is_spent_cuts_the_points_short_and_says_so() -> None:
    cut = stress("flash", **{**SMALL, "budget_s": 1e-6})
    assert not cut.is_whole
    assert len(cut.outcomes) == 1  # the base
    assert cut.margin is None  # not known, where no larger input was tried
    with pytest.raises(SpecError, match="--budget 0"):
        stress("flash", **{**SMALL, "budget_s": 0.0})


def test_the_worst_input_is_written_and_a_run_of_it_has_its_error(tmp_path: Path) -> None:
    np.savez(tmp_path / "qkv.npz", **recipe(64, 128))
    asked = ["stress", "flash", "--tensors", str(tmp_path / "qkv.npz"), "--no-causal", "-t", "block_kv=64"]
    asked += ["--precision", "fa16_32", "--over", "resonance=64", "--over", "logit_std=2,equal"]
    out = tmp_path / "worst.safetensors"
    done = CliRunner().invoke(app, [*asked, "--require", "finite", "--json", "--out", str(out)])
    assert done.exit_code == 1
    assert "npusim: finite: not finite at" in done.stderr
    result = json.loads(done.stdout)
    assert result["verdict"] == "not finite"
    assert "(cast to float16)" in result["first"]
    assert result["required"] == {"finite": False}
    assert sum(entry["overflowed"] for entry in result["ledger"]) > 0
    assert result["choices"]["scores=float32"] <= result["limit"]
    again = CliRunner().invoke(app, [*shlex.split(result["command"])[1:], "--json", "--no-save"])
    assert again.exit_code == 0, again.stderr
    numerics = json.loads(again.stdout)["numerics"]
    assert numerics["nan_count"] + numerics["inf_count"] > 0
    assert shlex.split(result["command"])[-2:] == ["--tensors", str(out)]


NARROW = {**SMALL, "precision": "fa16_32"}


@pytest.mark.usefixtures("no_choices")
def test_where_finite_outputs_are_required_amplitudes_grow_beyond_the_default_bounds() -> None:
    """Scores in float16 overflow at an amplitude of 64, beyond the default bound of 16."""
    usual = stress("flash", ["logits"], **NARROW)
    assert usual.verdict != "not finite"
    assert not usual.beyond
    found = stress("flash", ["logits"], is_finite=True, **NARROW)
    assert found.verdict == "not finite"
    assert found.worst.point == {"resonance": 64.0}
    assert found.worst in found.beyond
    assert "s_in (cast to float16)" in found.first
    bounded = stress("flash", ["logit_mean=-64:64", "resonance=-16:16"], is_finite=True, **NARROW)
    assert bounded.verdict != "not finite"
    assert not bounded.beyond


@pytest.mark.parametrize(("dtype", "end"), [("float16", 2.0**16), ("bfloat16", 2.0**63)])
def test_amplitudes_end_with_the_format_of_the_inputs_and_errors_beyond_the_bounds_do_not_count(
    dtype: str, end: float
) -> None:
    problem = {**SMALL["problem"], "dtype": dtype}
    found = stress("flash", ["values", "late"], is_finite=True, hw="h200", problem=problem, budget_s=600.0)
    assert found.verdict == "holds"
    assert found.is_whole
    largest = {n: max(o.point.get(n, 0.0) for o in found.beyond) for n in ("values", "late")}
    assert 2.0**16 <= largest["values"] <= 32 * end
    assert all(o.rmse is not None for o in found.beyond)
    assert found.worst in found.outcomes


@pytest.mark.usefixtures("no_choices")
def test_a_worst_input_at_the_end_of_a_range_is_said() -> None:
    table = plain(stress_table(stress("flash", ["resonance=1:8"], **NARROW), ""))
    assert "the worst input is at the bound of resonance" in table
    values = stress("flash", ["resonance=1,8"], **NARROW)
    assert values.worst.point == {"resonance": 8.0}
    assert not values.at_bound
    assert "at the bound" not in plain(stress_table(values, ""))


def test_roundings_are_the_cause_where_a_precision_holds_and_the_margin_is_that_of_the_base() -> None:
    found = stress("flash", ["resonance=12,16"], **NARROW)
    assert found.verdict == "loses"
    assert not found.first
    assert found.choices[found.rounding] <= found.limit
    table = plain(stress_table(found, ""))
    assert f"no single step causes it: roundings accumulate, except with {found.rounding}" in table
    assert "another function" not in table
    margins = {t: plain(stress_table(replace(found, margin=t), "")) for t in (None, 0.0, 0.25, 1.0, 8.0, 64.0)}
    said = {
        None: "not find it within --budget",
        0.0: "inputs of the base do not meet the limit; inputs divided by 16 do not meet it either",
        0.25: "inputs of the base do not meet the limit; inputs divided by 4 meet the limit",
        1.0: "the base meet the limit, but inputs twice as large do not",
        8.0: "inputs may be 8 times as large",
        64.0: "inputs may be 64 times as large, the largest factor tried",
    }
    assert all(said[t] in text for t, text in margins.items())


@pytest.mark.usefixtures("no_choices")
def test_each_point_of_plain_tensors_is_compared_with_its_own_reference() -> None:
    """The reference of the base was compared with outputs of all points: an error of 8 for inputs times 2."""
    sizes = {"heads": 1, "tokens": 32, "key": 16, "value": 16}
    tiling = declared_tiling("flash_backward", "h200")
    found = stress("flash_backward", ["scale=1.25,2"], hw="h200", problem=sizes, tiling=tiling, budget_s=600.0)
    assert len(found.outcomes) == 3
    assert all(o.badness < 1e-2 for o in found.outcomes)


@pytest.mark.usefixtures("no_choices")
def test_an_exact_output_beyond_its_format_is_no_fault_of_the_schedule() -> None:
    given = {n: np.full((1, 1, 64, 16), 300.0, np.float16) for n in ("q", "k", "v")}
    sizes = {"heads": 1, "tokens": 64, "key": 16, "value": 16}
    more: dict[str, Any] = {"tensors": given, "tiling": declared_tiling("retention", "h200")}
    found = stress("retention", ["scale=1,2"], hw="h200", problem=sizes, budget_s=600.0, **more)
    assert found.worst.is_beyond
    assert found.verdict == "holds"
    assert "exact outputs beyond their format" in str(found.worst)


def recipe(queries: int, keys: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    sizes = {"q": queries, "k": keys, "v": keys}
    return {n: rng.standard_normal((1, 1, rows, 32)).astype(np.float16) for n, rows in sizes.items()}


def test_the_table_names_verdict_step_and_what_holds(tmp_path: Path) -> None:
    words = ["stress", "fp8_attention", "--hw", "h200", "--seq", "128", "--precision", "hpc_ops,scale=4096"]
    done = CliRunner().invoke(app, [*words, "--over", "zero", "-o", str(tmp_path / "worst.safetensors")])
    assert done.exit_code == 0, done.stderr
    for text in ("verdict", "loses", "first step", "(cast to float8_e4m3fn)", "saturated", "hpc_ops: error"):
        assert text in done.stdout
    assert f"wrote {tmp_path / 'worst.safetensors'}" in done.stderr


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ("logitstd", "unknown aspect. Did you mean `logit_std`"),
        ("logit_std=1", ""),
        ("logit_std=4:1", "LOW below HIGH and above 0"),
        ("logit_std=0:1", "LOW below HIGH and above 0"),
        ("late=a:b", "write late=LOW:HIGH"),
        ("outliers=1:2", "outliers is several aspects, channels, tokens, sinks, late"),
        ("tail=1.5", "keys are whole numbers"),
    ],
)
def test_bounds_are_read_or_refused_by_name(over: str, message: str) -> None:
    if not message:
        assert bounded(over)[0].values == (1.0,)
        return
    with pytest.raises(SpecError, match=message):
        bounded(over)


def test_an_aspect_that_a_call_does_not_have_is_refused() -> None:
    with pytest.raises(SpecError, match="tail: the inputs of this call do not have this aspect"):
        stress("flash", ["tail"], tensors=recipe(16, 16), causal=False)
    with pytest.raises(SpecError, match="an aspect occurs twice"):
        stress("flash", ["late", "outliers"], **SMALL)
    for require in ("small", "max-rmse=-1", "max-rmse=x"):
        refused = CliRunner().invoke(app, ["stress", "flash", "--require", require])
        assert refused.exit_code == 2
        assert "--require" in refused.stderr
    plain = aspects_of((), "plain", has_tail=False)
    assert [a.name for a in plain] == ["channels", "tokens", "zero", "scale"]


PROBLEM = Problem(heads=1, seq_q=256, seq_kv=512, head_dim=64, dtype="float32")


def scores(**point: float) -> np.ndarray[Any, Any]:
    """Return scaled scores at a point, in float64."""
    source = stressed(recipe_source(PROBLEM, 0), AttentionSubject(PROBLEM), point, 0)
    q, k = (widen(source(n, 0, 0)).astype(np.float64) for n in "qk")
    result: np.ndarray[Any, Any] = q @ k.T * PROBLEM.scale
    return result


def test_aspects_move_scores_as_they_say() -> None:
    base = scores()
    assert scores(logit_std=3).std() == pytest.approx(3 * base.std(), rel=1e-5)
    assert scores(logit_mean=-40).mean() == pytest.approx(-40, rel=0.03)
    # A wave of amplitude a in phase adds a^2 d / 2 to each product.
    assert scores(resonance=-8).mean() == pytest.approx(-(8**2) * 64 / 2 * PROBLEM.scale, rel=0.03)
    raised = scores(sinks=12)
    assert raised[:, :4].mean() - raised[:, 4:].mean() == pytest.approx(12, abs=0.5)
    late = scores(late=9)
    assert (late.argmax(axis=1) == 448).mean() > 0.95
    assert np.ptp(scores(equal=1), axis=1).max() < 1e-5
    assert not scores(zero=1).any()
    assert words({"late": 9.0, "equal": 1.0}) == "late=9 equal=1"


def test_sinks_have_no_values_and_inputs_are_finite_in_their_format() -> None:
    narrow = PROBLEM.model_copy(update={"dtype": "float8_e4m3fn"})
    source = stressed(recipe_source(narrow, 0), AttentionSubject(narrow), {"values": 1000.0, "sinks": 8.0}, 0)
    values = widen(source("v", 0, 0))
    assert not values[:4].any()
    assert np.abs(values).max() == formats.get_format("float8_e4m3fn").max_finite


@pytest.mark.usefixtures("no_choices")
def test_padding_of_hidden_keys_reaches_outputs_and_a_tail_of_keys_is_left_out() -> None:
    windowed = {**SMALL, "problem": {**SMALL["problem"], "causal": True, "window": 40}}
    found = stress("flash", ["padding"], **windowed)
    assert found.verdict == "not finite"
    tail = stress("flash", ["tail=17"], **SMALL)
    assert tail.verdict == "holds"
    assert tail.outcomes[1].point == {"tail": 17.0}
    assert tail.outcomes[1].rmse != tail.outcomes[0].rmse


def test_the_published_table_comes_out_within_a_fifth() -> None:
    """flash-attention#2694 on a B300; here 64 of its queries, on an H200's unit."""
    given = inputs.clamped()
    given["q"] = given["q"][:, :, :64]
    for offset, published in page.PUBLISHED.items():
        precision = f"growth=4,p_scale={2**offset},operand=float8_e4m3fn"
        how: dict[str, Any] = {"tensors": given, "causal": False, "rows": "all", "tiling": {"block_kv": 128}}
        trial = StressedRun(Request("fa4", precision=precision, **how))
        assert [trial({"logit_std": s}).rmse for s in page.SPREADS] == [pytest.approx(x, rel=0.2) for x in published]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("schedule", "options", "verdict"),
    [
        ("flash", {"seq": 1024}, "holds"),
        ("pasa", {"seq": 1024}, "loses"),
        ("fp8_attention", {"seq": 1024, "hw": "h200"}, "holds"),
    ],
)
def test_two_seeds_give_one_verdict_in_30_seconds_each(schedule: str, options: dict[str, Any], verdict: str) -> None:
    results = [stress(schedule, seed=seed, budget_s=30, **options) for seed in (0, 1)]
    assert [r.verdict for r in results] == [verdict, verdict]
    assert all(math.isfinite(r.limit) for r in results)


def test_what_follows_from_inputs_follows_from_those_of_a_point() -> None:
    """LSE and O drawn beside Q, K and V were of no call: gradients overflowed on calm inputs, at any scale."""
    sizes = {"heads": 1, "tokens": 32, "key": 16, "value": 16}
    found = stress("flash_backward", hw="h200", problem=sizes, over=["scale"], budget_s=5)
    assert found.calm.rmse is not None
    assert found.calm.rmse < 1e-3
