"""Which rows and heads are computed, and what is said about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim.config.problem import Problem
from npusim.program.numerics.evaluate import SAMPLE_ROWS, compared_rows, evaluate, needed_blocks, variant_rows
from npusim.program.numerics.executor import changed_attributes
from npusim.program.numerics.input_tensors import recipe_source
from npusim.simulation.evaluation import bits_of
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request
from npusim.simulation.robustness import standard_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.numerics.bits_result import NumericResult

SIZES: dict[str, Any] = {"heads": 3, "kv_heads": 1, "seq_q": 445, "seq_kv": 445, "head_dim": 64}
FIELDS: dict[str, Any] = {"batch": 2, "heads": 3, "seq_q": 75, "seq_kv": 90, "head_dim": 16, "causal": True}


@pytest.fixture(scope="module")
def evaluated(build_flash: Callable[..., TileProgram]) -> Callable[..., NumericResult]:
    problem = Problem(**FIELDS)
    program = build_flash({"block_q": 32, "block_kv": 32}, **FIELDS)

    def run(**choice: Any) -> NumericResult:
        return evaluate(program, problem, recipe_source(problem, 0), **choice)

    return run


def test_the_default_sample_is_the_last_block_of_every_head(evaluated: Callable[..., NumericResult]) -> None:
    found = evaluated()
    # Blocks of 32 rows: 0, 32, 64; the last has 11.
    assert set(found.rows) == {(b, h, 64) for b in range(2) for h in range(3)}
    assert found.sample == "rows 64..74 of 3 of 3 heads (66 of 450 rows)"
    assert found.computed.sum() == 66


@pytest.mark.parametrize(("rows", "sample"), [(135, "rows 108..134 "), (136, "rows 128..135 ")])
def test_a_last_block_of_few_rows_is_not_the_sample_alone(
    rows: int, sample: str, build_flash: Callable[..., TileProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npusim.program.numerics.evaluate.SAMPLE_ROWS", 20)
    fields = {**FIELDS, "batch": 1, "seq_q": rows, "seq_kv": rows}
    program = build_flash({"block_q": 32, "block_kv": 32}, **fields)
    found = evaluate(program, Problem(**fields), recipe_source(Problem(**fields), 0))
    assert found.sample.startswith(sample), "8 rows are enough, 7 are not"


@pytest.mark.parametrize(
    ("schedule", "hw", "fields"),
    [
        ("pasa", "ascend_910b2", {"block_q": 256, "block_kv": 128}),
        ("flash", "ascend_950", {"block_q": 256, "block_kv": 64}),
        ("split_kv", "ascend_910b2", {"block_q": 256, "block_kv": 32, "splits": 2}),
        ("flash", "v100", {"block_q": 256, "block_kv": 32}),
        ("flash", "h200", {"block_q": 256, "block_kv": 64}),
    ],
)
@pytest.mark.parametrize("seen", [{"causal": True}, {"causal": True, "window": 70}])
def test_the_sample_is_the_end_of_its_block_with_the_bits_of_the_whole(
    schedule: str, hw: str, fields: dict[str, Any], seen: dict[str, Any]
) -> None:
    plan = plan_of(Request(schedule, hw=hw, tiling=fields, problem=Problem(**SIZES, **seen)))
    program = plan.program()
    whole, part = bits_of(plan, program, rows=[SIZES["seq_q"] - 1]), bits_of(plan, program)
    lengths = ([len(rows) for rows in found.rows.values()] for found in (whole, part))
    assert next(lengths) == ([21] * 3 if schedule == "split_kv" else [189] * 3)  # its merge takes blocks of 56 rows
    assert next(lengths) == ([21] * 3 if schedule == "split_kv" else [SAMPLE_ROWS] * 3)
    assert part.output[part.computed].tobytes() == whole.output[part.computed].tobytes()


@pytest.mark.parametrize(
    ("preset", "change"), [("fa2_fp32", "arithmetic=ascend.cube_fma.k16.f16.f32"), ("fa16", "sum_order=tree_halves")]
)
def test_variants_beside_a_program_have_the_bits_that_they_have_alone(
    build_flash: Callable[..., TileProgram], preset: str, change: str
) -> None:
    problem, tiling = Problem(**FIELDS), {"block_q": 32, "block_kv": 32}
    program, other = (build_flash(tiling, name, **FIELDS) for name in (preset, f"{preset},{change}"))
    # Other tiles: it cannot run in step.
    unlike = build_flash({"block_q": 32, "block_kv": 16}, preset, **FIELDS)
    variants, inputs = {"other": other, "unlike": unlike}, recipe_source(problem, 0)
    blocks = needed_blocks(program, "sample", {0})
    changes = changed_attributes(program, variants, blocks)
    assert changes.keys() == {"other"}
    assert changes["other"]
    found, plain = (evaluate(program, problem, inputs, variants=some) for some in (variants, None))
    at, count = compared_rows({at: len(rows) for at, rows in found.rows.items()})
    assert (at, count) == ((0, 0, 64), 11)
    assert (found.output[found.computed].tobytes(), found.events) == (
        plain.output[plain.computed].tobytes(),
        plain.events,
    )
    apart = variant_rows(program, problem, inputs, variants, rows="sample", heads="sample")
    assert apart[:2] == (at, count)
    for name, variant in variants.items():
        assert apart[2][name].tobytes() == found.variants[name].tobytes()
        alone = evaluate(variant, problem, inputs, heads=[0]).rows[at]
        assert found.variants[name].tobytes() == alone.tobytes() != found.rows[at].tobytes()


def test_all_rows_of_all_heads(evaluated: Callable[..., NumericResult]) -> None:
    found = evaluated(rows="all", heads="all")
    assert found.computed.all()
    assert found.sample == "all 450 rows"
    assert found.error.count == 450 * 16


def test_chosen_rows_bring_their_whole_blocks(evaluated: Callable[..., NumericResult]) -> None:
    found = evaluated(rows=[33, 40, 0], heads=[1])
    assert set(found.rows) == {(b, 1, row) for b in range(2) for row in (0, 32)}


def test_a_sample_has_the_bits_of_the_whole(evaluated: Callable[..., NumericResult]) -> None:
    whole, part = evaluated(rows="all", heads="all"), evaluated(rows=[70], heads=[2])
    for key, rows in part.rows.items():
        assert (whole.rows[key].view(np.uint16) == rows.view(np.uint16)).all()


def test_rows_that_were_not_computed_are_nan_in_the_output(evaluated: Callable[..., NumericResult]) -> None:
    found = evaluated(rows=[0], heads=[0])
    assert found.output.shape == (2, 3, 75, 16)
    assert np.isnan(found.output[~found.computed]).all()
    assert np.isfinite(found.output[found.computed]).all()


def test_the_arithmetic_behind_the_bits_is_named_with_its_evidence(evaluated: Callable[..., NumericResult]) -> None:
    assert evaluated().arithmetic == {"ascend.cube.k16.f16.f32": "assumed"}


def test_plain_inputs_cause_no_event(evaluated: Callable[..., NumericResult]) -> None:
    found = evaluated(rows="all", heads="all")
    assert (found.overflow_counts, found.nan_counts, found.first_events) == ({}, {}, ())


def test_standard_errors_say_how_far_ratios_of_small_samples_lie_from_those_of_all_rows() -> None:
    rng = np.random.default_rng(0)
    own, change = rng.gamma(5.0, size=(2, 4000, 64))
    mine = own * 0.3 + change
    ratios = np.sqrt(mine.sum(axis=1) / own.sum(axis=1))
    stated = [standard_error(a, b) for a, b in zip(mine, own, strict=True)]
    assert np.mean(stated) == pytest.approx(ratios.std() / ratios.mean(), rel=0.05)
    assert standard_error(mine[0], mine[0]) == standard_error(np.zeros(64), own[0]) == 0.0
