"""Outputs that graders are known to pass are refused, and those of other correct kernels accepted.

The kernels here are numpy's, independent of npusim's schedules: softmax of tiles of keys in one order or the other, P
rounded once, sums in float32 or float64.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

import npusim
from npusim import formats
from npusim.cli.app import app
from npusim.config.problem import Problem
from npusim.errors import SpecError
from npusim.program.numerics.input_tensors import recipe_source
from npusim.simulation.request import Request
from npusim.studies.validate.judge import MEASURES, Judgement, judge

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("declared_tiles")

Doubles = np.ndarray[Any, np.dtype[np.float64]]


def claim(schedule: str, dtype: str, hw: str, **problem: Any) -> Request:
    sizes = {"heads": 1, "seq_q": 64, "seq_kv": 320, "head_dim": 64, "causal": True, "dtype": dtype, **problem}
    return Request(schedule, problem=sizes, hw=hw, rows="all")  # type: ignore[arg-type]  # made a problem by it


CLAIMS = {
    "float16": claim("flash", "float16", "ascend_910b2"),
    "bfloat16": claim("flash", "bfloat16", "h200"),
    "window": claim("flash", "float16", "h200", window=100),
    "fp8": claim("fp8_attention", "float8_e4m3fn", "h200"),
    "long": claim("flash", "bfloat16", "h200", seq_q=128, seq_kv=1024, causal=False),
    "peaked": claim("flash", "float16", "ascend_910b2", scale=0.5),
    "few": claim("flash", "bfloat16", "h200", seq_kv=16, causal=False),
}


@cache
def inputs(name: str, seed: int) -> tuple[Doubles, ...]:
    problem = CLAIMS[name].problem
    assert isinstance(problem, Problem)
    source = recipe_source(problem, seed)
    return tuple(source(n, 0, 0).astype(np.float64) for n in "qkv")


def output(
    name: str,
    *,
    seed: int = 0,
    scale: float | None = None,
    is_masked: bool = True,
    tile: int = 64,
    is_reverse: bool = False,
    p_format: str = "",
    rounding: str = "nearest_even",
    sums: Any = np.float32,
    sum_format: str = "",
    is_sum_rounded: bool = False,
    too_large: float = 0.0,
) -> np.ndarray[Any, Any]:
    """Return attention as a kernel of numpy computes it, (1, 1, rows, head size) in the claim's output format.

    ``sum_format``: of each partial sum; ``is_sum_rounded``: weights are rounded before they are summed; ``too_large``:
    the share by which their sum is.
    """
    problem = CLAIMS[name].problem
    assert isinstance(problem, Problem)
    q, k, v = inputs(name, seed)
    s = (q @ k.T * (problem.scale if scale is None else scale)).astype(np.float32)
    if is_masked:
        s = np.where(problem.seen.matrix(problem.causal_offset, len(q), 0, len(k)), s, -np.inf)
    m, l, o = np.full(len(q), -np.inf, np.float32), np.zeros(len(q), sums), np.zeros((len(q), v.shape[1]), sums)

    def kept(x: Any) -> Any:
        return formats.cast(x.astype(np.float64), sum_format).astype(sums) if sum_format else x

    def summed(p: Any) -> Any:
        return reduce(lambda total, x: kept(total + x), p.T) if sum_format else p.sum(axis=1, dtype=sums)

    fmt, factor = p_format or problem.dtype, 256 if name == "fp8" else 1
    starts = range(0, len(k), tile)
    for at in reversed(starts) if is_reverse else starts:
        part = s[:, at : at + tile]
        m_new = np.maximum(m, part.max(axis=1))
        lowest = np.where(np.isinf(m_new), 0, m_new)  # no key is seen so far
        decay, p = np.exp(m - lowest).astype(sums), np.exp(part - lowest[:, None])
        rounded = formats.cast(p * factor, fmt, rounding=rounding, overflow="saturate").astype(sums)
        l, m = kept(l * decay + summed(rounded / sums(factor) if is_sum_rounded else p)), m_new
        o = kept(o * decay[:, None] + rounded @ v[at : at + tile].astype(sums))
    out_format = "float32" if name == "fp8" else problem.dtype
    return formats.cast((o / (l * (1 + too_large))[:, None] / factor).astype(np.float64), out_format)[None, None]


WRONG: dict[str, dict[str, Any]] = {
    "zeros": {},
    "no scale": {"scale": 1.0},
    "no mask": {"is_masked": False},
    "lower precision": {"p_format": "float8_e5m2"},
    "other inputs": {"seed": 1},
}
#: Wrong by less than an output is rounded, in one direction; "scale" is relative to the problem's.
BIASED: dict[str, dict[str, Any]] = {
    "scale 1.001": {"scale": 1.001},
    "scale 0.999": {"scale": 0.999},
    "sum 0.1 % too large": {"too_large": 1e-3},
    "sum 0.1 % too small": {"too_large": -1e-3},
    "P cut": {"rounding": "toward_zero"},
    "P cut, other tiles": {"rounding": "toward_zero", "tile": 48, "is_reverse": True},
    "narrower sums": {"sum_format": "float16"},
}
#: Tiles, orders of keys, formats of sums, roundings of P, before or after the sum: 24 correct kernels.
RIGHT: list[dict[str, Any]] = [
    {"tile": tile, "is_reverse": is_reverse, "sums": sums, "rounding": rounding, "is_sum_rounded": is_sum_rounded}
    for is_sum_rounded in (False, True)
    for tile in (16, 48, 320)
    for is_reverse, sums, rounding in (
        (False, np.float32, "nearest_even"),
        (True, np.float32, "nearest_even"),
        (False, np.float64, "nearest_away"),
        (True, np.float64, "nearest_even"),
    )
]
#: And three of npusim's own for each claim.
OURS = {
    "float16": [{"tiling": {"block_kv": 32}}, {"precision": "sum_order=tree_halves"}, {"precision": "exponent=twice"}],
    "bfloat16": [{"tiling": {"block_kv": 32}}, {"precision": "accumulate=fresh"}, {"precision": "exponent=once"}],
    "window": [{"tiling": {"block_kv": 32}}, {"precision": "sum_order=tree_halves"}, {"hw": "ascend_910b2"}],
    "fp8": [
        {"tiling": {"block_kv": 32}},
        {"precision": "is_reverse=true"},
        {"precision": "accumulate=chained,fold=true"},
    ],
}


@cache
def decided(name: str) -> tuple[dict[str, Judgement], list[Judgement]]:
    """Return the judgements of a claim's wrong outputs by what is wrong, and of its right ones: npusim's are the last.

    One call judges all outputs of a claim: the legal kernels that it draws take longer than the judgements.
    """
    request = CLAIMS[name]
    problem = request.problem
    assert isinstance(problem, Problem)
    wrong = {kind: output(name, **how) for kind, how in WRONG.items()}
    wrong["zeros"] = np.zeros_like(wrong["zeros"])
    for kind, how in BIASED.items():
        factor = {"scale": problem.scale * how["scale"]} if "scale" in how else {}
        wrong[kind] = output(name, **{**how, **factor})
    right = [output(name, **how) for how in RIGHT]
    for how in OURS.get(name, ()):
        options: dict[str, Any] = {"hw": request.hw, "problem": problem, "rows": "all", **how}
        right.append(npusim.run(request.schedule, **options).output)
    judged = judge([*wrong.values(), *right], request)
    return dict(zip(wrong, judged, strict=False)), judged[len(wrong) :]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n == "window")) for n in OURS])
def test_wrong_outputs_are_refused_and_those_of_other_correct_kernels_accepted(name: str) -> None:
    """Of each claim 5 wrong outputs and 27 right ones."""
    judged, accepted = decided(name)
    refused = {kind: judged[kind] for kind in WRONG}
    assert not any(j.is_right for j in refused.values()), {kind: str(j) for kind, j in refused.items()}
    assert all(str(j).startswith("wrong: ") for j in refused.values())
    assert len(accepted) == len(RIGHT) + len(OURS[name])
    assert all(j.is_right for j in accepted), [str(j) for j in accepted if not j.is_right]
    assert sum(j.matched < j.total for j in accepted) >= len(RIGHT)  # none of numpy's has the very bits


@pytest.mark.parametrize(
    "name",
    ["float16", "bfloat16", "long", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("window", "peaked"))],
)
def test_biases_below_the_rounding_of_an_output_are_refused(name: str) -> None:
    """Of each claim 7 wrong outputs, whose errors are mostly as large as right ones', and 24 right ones."""
    judged, accepted = decided(name)
    refused = {kind: judged[kind] for kind in BIASED}
    assert not any(j.is_right for j in refused.values()), {kind: str(j) for kind, j in refused.items()}
    assert all(j.is_right for j in accepted), [str(j) for j in accepted if not j.is_right]


def test_what_the_guide_says_is_not_seen() -> None:
    """Rows too few for a standard error, 0.1 % beside the rounding of P in FP8, narrower sums of few keys."""
    few = claim("flash", "float16", "ascend_910b2", seq_q=8, causal=False)
    predicted = npusim.run("flash", problem=few.problem, hw="ascend_910b2", rows="all").output
    (judgement,) = judge([predicted * np.float16(1.001)], few)
    assert [m.name for m in judgement.measures] == list(MEASURES)
    biased, cut = judge([output("fp8", too_large=1e-3), output("fp8", rounding="toward_zero")], CLAIMS["fp8"])
    assert biased.is_right
    assert not cut.is_right
    assert judge([output("few", sum_format="float16")], CLAIMS["few"])[0].is_right


def test_a_bias_of_one_head_is_found_and_named() -> None:
    request = claim("flash", "float16", "h200", heads=8, kv_heads=8)
    out = npusim.run("flash", problem=request.problem, hw="h200", rows="all", heads="all").output.copy()
    out[0, 5] = (out[0, 5].astype(np.float32) * 1.001).astype(np.float16)
    (judgement,) = judge([out], replace(request, heads="all"))
    assert not judgement.is_right
    assert str(judgement).startswith("wrong: the slope of batch 0 head 5 is 0.00")


def test_the_predicted_bits_are_right_and_nan_is_not() -> None:
    request = CLAIMS["float16"]
    predicted = npusim.run("flash", problem=request.problem, rows="all").output
    broken = predicted.copy()
    broken[0, 0, 3, 5] = np.nan
    right, judgement = judge([predicted, broken], request)
    assert right == Judgement(predicted.size, predicted.size)
    assert judgement.lost == 1
    assert str(judgement).startswith("wrong: 1 of 4,096 outputs are NaN or Inf")


def test_the_command_line_decides_by_its_exit_code(tmp_path: Path) -> None:
    q, k, v = (np.random.default_rng(n).standard_normal((1, 1, 32, 16)).astype(np.float16) for n in range(3))
    np.savez(tmp_path / "qkv.npz", q=q, k=k, v=v)
    right = npusim.run("flash", tensors=str(tmp_path / "qkv.npz"), causal=False, rows="all", tiling={"block_kv": 16})
    np.savez(tmp_path / "right.npz", o=right.output)
    np.savez(tmp_path / "zeros.npz", o=np.zeros_like(right.output))
    words = ["flash", "--tensors", str(tmp_path / "qkv.npz"), "--no-causal", "--rows", "all", "--judge"]
    accepted = CliRunner().invoke(app, ["diff", str(tmp_path / "right.npz"), *words])
    assert accepted.exit_code == 0, accepted.output
    assert "right: " in accepted.stdout
    refused = CliRunner().invoke(app, ["diff", str(tmp_path / "zeros.npz"), *words, "--json"])
    assert refused.exit_code == 1
    document = json.loads(refused.stdout)
    assert document["kind"] == "npusim.judge"
    assert not document["is_right"]
    assert document["measures"][0]["value"] > document["measures"][0]["allowed"]


def test_outputs_on_which_correct_kernels_are_not_finite_are_refused_or_counted(tmp_path: Path) -> None:
    """Scores of 102,400 overflow float16, so that an output of zeros is no nearer to a correct one than any other."""
    large = np.full((1, 1, 64, 64), 40, np.float16)
    some = large.copy()
    some[0, 0, :16] = 0
    for name, q in (("all", large), ("some", some)):
        np.savez(tmp_path / f"{name}.npz", q=q, k=large, v=large)
    zeros = np.zeros_like(large)

    def decide(name: str) -> Judgement:
        return judge([zeros], Request("flash", precision="fa16_32", tensors=tmp_path / f"{name}.npz", rows="all"))[0]

    with pytest.raises(
        SpecError, match=r"--judge: there is no reference for the output: .* precision fa16_32 give NaN"
    ):
        decide("all")
    found = decide("some")
    assert found.unjudged == 48 * 64
    assert str(found).startswith("wrong: ")
    assert str(found).endswith("3,072 of 4,096 outputs are not judged: correct kernels too give NaN or Inf there")
