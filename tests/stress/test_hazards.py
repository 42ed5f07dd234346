"""Hazards in kernels of a few lines: each is found, the step named, and nothing is found once it is mended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npusim.studies.stress import Stress, stress, worst_search
from tests.turns import every

pytestmark = pytest.mark.usefixtures("declared_tiles")

KERNELS = f"{Path(__file__).parent / 'kernels.py'}:"
#: More than any case takes: what is found does not depend on the machine's speed.
BUDGET_S = 600.0


def call(queries: int, keys: int, dtype: str, *, causal: bool = True, **options: Any) -> dict[str, Any]:
    """Return options of one head's attention."""
    problem = {"heads": 1, "seq_q": queries, "seq_kv": keys, "head_dim": 128, "causal": causal, "dtype": dtype}
    return {"problem": problem, "tiling": {"block_q": 64, "block_kv": 64}, **options}


ASCEND, PART = call(64, 256, "float16"), call(64, 256, "float16", causal=False)
FA4 = call(64, 256, "float8_e4m3fn", causal=False)
SINK = call(64, 256, "float8_e4m3fn", hw="h200")
BLOCKS = call(64, 256, "float16", hw="ascend_950")

#: Hazard: the schedule and the mended one, each with its options; aspects; words of the step that is named.
HAZARDS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], list[str], str]] = {
    "stale maximum": (
        "fa4",
        {**FA4, "precision": "growth=4,operand=float8_e4m3fn"},
        "fa4",
        {**FA4, "precision": "growth=0.75,operand=float8_e4m3fn"},
        ["logit_std=0.25:2", "outliers"],
        "cast to float8_e4m3fn",
    ),
    "float16 scores before the factor": (
        f"{KERNELS}LATE_FACTOR",
        ASCEND,
        f"{KERNELS}WIDE_SCORES",
        ASCEND,
        ["logit_mean=0:6000"],
        "s_in (cast to float16)",
    ),
    "FP8 P in forward order with a sink": (
        "fp8_attention",
        {**SINK, "precision": "hpc_ops_s1"},
        "fp8_attention",
        {**SINK, "precision": "hpc_ops_s1,scale=256,is_reverse=true"},
        ["sinks=0:8"],
        "",
    ),
    "finite sentinel": (f"{KERNELS}SENTINEL", ASCEND, f"{KERNELS}HIDDEN", ASCEND, ["logit_mean=-256:0"], ""),
    "float16 row sum": (
        f"{KERNELS}HALF_SUM",
        ASCEND,
        f"{KERNELS}WIDE_SUM",
        ASCEND,
        ["equal", "logit_std"],
        "l (add to float16)",
    ),
    "resonance without a shift": (
        f"{KERNELS}RESONANCE",
        ASCEND,
        f"{KERNELS}SHIFTED",
        ASCEND,
        ["resonance=-64:64"],
        "s_in (cast to float16)",
    ),
    "scales that clip": (
        f"{KERNELS}CLIPPING_SCALES",
        BLOCKS,
        f"{KERNELS}WIDE_SCALES",
        BLOCKS,
        ["equal", "logit_std"],
        "",
    ),
    "merge without a maximum": (
        f"{KERNELS}PLAIN_MERGE",
        PART,
        f"{KERNELS}SAFE_MERGE",
        PART,
        ["logit_mean=-256:256"],
        "merge: update gain (exp to float32)",
    ),
}


def examined(schedule: str, options: dict[str, Any], over: list[str], **more: Any) -> Stress:
    result = stress(schedule, over, budget_s=BUDGET_S, **{**options, **more})
    assert result.is_whole
    return result


@pytest.mark.parametrize("hazard", every(2, HAZARDS, 1))  # those whose mended kernels are not examined by default
def test_a_hazard_is_found_and_its_step_named(hazard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What would hold takes most of the time, and has tests of its own.
    monkeypatch.setattr(worst_search, "_alternatives", lambda *_: iter(()))
    schedule, options, _, _, over, step = HAZARDS[hazard]
    found = examined(schedule, options, over)
    assert found.verdict != "holds"
    assert found.worst.badness > found.limit
    assert step in found.first


@pytest.mark.parametrize("hazard", every(2, HAZARDS))
def test_nothing_is_found_once_it_is_mended(hazard: str) -> None:
    _, _, schedule, options, over, _ = HAZARDS[hazard]
    mended = examined(schedule, options, over)
    assert mended.verdict == "holds", (mended.worst, mended.limit)
    assert not mended.first
    assert not mended.choices
