"""What pages say in words of their figures: orders and signs, held against the committed data."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="module")
def data(repository: Path) -> Callable[[str], Any]:
    return lambda name: json.loads((repository / f"reports/{name}/{name}.json").read_text())


def test_the_front_has_pasa_lose_on_usual_inputs_and_alone_be_finite_in_float16_on_resonant_ones(data: Any) -> None:
    usual, resonant = (
        {p["name"]: (p["latency_us"], p["error"]) for p in points} for points in data("front")["points"].values()
    )
    for pasa in ("pasa fp32_mean", "pasa fp16_mean"):
        assert all(own > other for own, other in zip(usual[pasa], usual["flash fa16"], strict=True))
    finite = {name for name, (_, error) in resonant.items() if error is not None}
    assert finite == {"flash fa2_fp32", "two_level fa2_fp32", "pasa fp32_mean", "pasa fp16_mean"}
    assert data("front")["text"]["finite"] == "`pasa fp32_mean` and `pasa fp16_mean`"


def test_a_field_gains_by_itself_what_the_page_on_exploring_says(data: Any) -> None:
    best = data("explore")["best"]
    for key, found in best.items():
        alone = found["gain of a field alone"]
        assert 1 <= alone["depth"] <= 1.03, key
    text = data("explore")["text"]
    assert text["alike"] == text["compared"], "two_level is flash with other declared fields"


def test_steps_of_a_model_are_little_changed_by_their_attention_and_overlapping_blocks_are_fastest(data: Any) -> None:
    steps = data("nodes")["table_6"]
    for batch in (1, 8, 16):
        of = {name.partition(" ")[2]: found for name, found in steps.items() if name.startswith(f"{batch} ")}
        assert min(of, key=lambda name: of[name]["step_ms"]) == "split_kv:pipeline=core"
        assert max(f["step_ms"] for f in of.values()) < 1.2 * min(f["step_ms"] for f in of.values())
        # One kernel wins at batch 1 alone: at more, its blocks load, multiply and drain in turn.
        assert (of["split_kv"]["attention_us"] < of["standard"]["attention_us"]) == (batch == 1)


def test_pasa_loses_to_our_own_float32_kernel(data: Any) -> None:
    pasa = data("ascend_timing")["pasa"]["fp16_mean"]
    assert pasa["over_best"] < 1 < pasa["over_cann"]


def test_no_scale_of_a_power_of_two_rounds_and_all_five_curves_meet(data: Any) -> None:
    scales, sweep = data("pcast_numerics")["proposition_5"], data("pcast_numerics")["gap_sweep"]
    assert scales["256"]["rounded"] == scales["256"]["lost"] == 0 < scales["448"]["rounded"]
    assert len(sweep["mse"]) == 5
    ends = {name: line[-1] for name, line in sweep["mse"].items()}
    worst = max(ends, key=lambda name: ends[name])
    assert worst == "forward, S=448", "only its rounding of the sinks remains"
    assert ends.pop(worst) < 1.15 * min(ends.values())
    assert max(ends.values()) < 1.01 * min(ends.values())
