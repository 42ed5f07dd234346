"""PASA where scores are extreme: masks, the first block's correction, and where m starts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.library import find_schedule
from npusim.library import pasa as schedules_pasa
from npusim.library.pasa import pasa_attention
from npusim.program.ir.op import Opcode
from npusim.program.numerics.executor import execute
from npusim.program.numerics.input_tensors import recipe_source
from npusim.run import run
from reports.parts.kernel import declared_tiling

if TYPE_CHECKING:
    from npusim.kernels.form.phase import Phase
    from npusim.program.numerics.executor import Moment
    from npusim.simulation.run_result import RunData

pytestmark = pytest.mark.usefixtures("declared_tiles")

D = 128
DEVICES = ("ascend_910b2", "h200")
HALF_PRESETS = ("fp16_mean", "fp32_mean", "fixed_reference")


def pasa(hw: str, precision: str, q: Any, k: Any, v: Any, *, causal: bool, keys: int) -> RunData:
    """Return PASA of float16 matrices (rows, d), every row, in blocks of 128 (GPU: 64) x ``keys``."""
    tensors = {n: np.asarray(x, np.float16)[None, None] for n, x in zip("qkv", (q, k, v), strict=True)}
    block_q = 128 if hw == "ascend_910b2" else 64
    return run(
        "pasa",
        hw=hw,
        tensors=tensors,
        precision=precision,
        causal=causal,
        rows="all",
        trace_groups=(),
        tiling=declared_tiling("pasa", hw, block_q=block_q, block_kv=keys),
        method="auto",
    )


def numbered(keys: int) -> Any:
    """Return V with the key's number in every column: an output says which keys have a part in it."""
    return np.broadcast_to(np.arange(keys)[:, None], (keys, D))


@pytest.mark.parametrize("keys", [128, 64])
@pytest.mark.parametrize("precision", HALF_PRESETS)
@pytest.mark.parametrize("hw", DEVICES)
def test_a_mask_does_not_win_over_the_lowest_scores(hw: str, precision: str, keys: int) -> None:
    """Row 0 sees key 0 alone, at a scaled score of -40,729; blocks of 64 mask whole rows of a tile."""
    k = np.zeros((128, D))
    k[0] = -60
    found = pasa(hw, precision, np.full((128, D), 60), k, numbered(128), causal=True, keys=keys)
    np.testing.assert_array_equal(found.output[0, 0, 0], 0)
    np.testing.assert_array_equal(found.output[0, 0, 1], 1)


@pytest.mark.parametrize("precision", HALF_PRESETS)
@pytest.mark.parametrize("scale", [1, -20, -100])
def test_no_row_hears_of_keys_behind_its_mask(precision: str, scale: int) -> None:
    """Whatever the scores, from small to beyond float16 unshifted: row i is a mean of V[0..i]."""
    rng = np.random.default_rng(5)
    q, k = 60 + rng.uniform(-0.5, 0.5, (128, D)), scale + rng.uniform(-0.5, 0.5, (128, D))
    found = pasa("h200", precision, q, k, numbered(128), causal=True, keys=64)
    output = found.output[0, 0].astype(np.float64)
    # float16 rounds P, l, O and the quotient: some 2^-11 each.
    assert (output <= np.arange(128)[:, None] * (1 + 2.0**-8)).all()
    np.testing.assert_array_equal(output[0], 0)


@pytest.mark.parametrize("precision", HALF_PRESETS)
@pytest.mark.parametrize("hw", DEVICES)
def test_the_first_block_is_corrected_to_its_own_mean(hw: str, precision: str) -> None:
    """Q 100, K -70: a mean of 0 before the first block would need a correction of 79,000."""
    rng = np.random.default_rng(0)
    v = rng.uniform(0, 1, (256, D))
    found = pasa(hw, precision, np.full((16, D), 100), np.full((256, D), -70), v, causal=False, keys=128)
    assert found.numerics is not None
    assert found.numerics.overflow_counts == {}
    assert found.numerics.nan_counts == {}
    # Two equal blocks of equal scores: a plain mean of V, to float16's sums of 128.
    assert found.numerics.error.rmse < 2e-3


def from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the running maximum start at 0, as lines 4 and 9 print it."""

    def printed(*args: Any) -> Phase:
        phase = pasa_attention(*args)
        return replace(phase, names={**phase.names, "m": replace(phase.names["m"], start=0.0)})

    monkeypatch.setattr(schedules_pasa, "pasa_attention", printed)


@pytest.mark.parametrize(("mean", "is_lost"), [(30, False), (-8, False), (-12, True), (-30, True)])
def test_a_maximum_that_starts_at_zero_loses_rows_only_where_the_exponential_underflows(
    monkeypatch: pytest.MonkeyPatch, mean: int, is_lost: bool
) -> None:
    """Line 9 with F^1 = S^1: m_1 = max(0, rowmax S').

    Exact in float64, where e^-150 is a number.  In float16 e^-17.4 is none: rows whose shifted
    scores stay below that (means of -12 x 12 x 11.3 = -1,629 and beyond, shifted by 1 - beta) are
    0/0; those at -8 x 8 x 11.3 = -724 are not.
    """
    rng = np.random.default_rng(7)
    q = mean + rng.uniform(-0.01, 0.01, (64, D))
    k = abs(mean) + rng.uniform(-0.01, 0.01, (256, D))
    v = rng.uniform(0, 0.5, (256, D))
    from_zero(monkeypatch)
    half = pasa("h200", "fp32_mean", q, k, v, causal=False, keys=128).numerics
    assert half is not None
    assert half.error.nan_row_fraction == (1.0 if is_lost else 0.0)
    wide = {n: np.asarray(x, np.float64)[None, None] for n, x in zip("qkv", (q, k, v), strict=True)}
    exact = run(
        "pasa",
        hw="h200",
        tensors=wide,
        precision="float64",
        causal=False,
        rows="all",
        tiling={"block_q": 16, "block_kv": 64},
    ).numerics
    assert exact is not None
    assert exact.error.nan_count == 0
    assert exact.error.max_abs_error < 1e-11


def test_a_maximum_that_starts_at_minus_infinity_loses_none() -> None:
    rng = np.random.default_rng(7)
    q, k = -30 + rng.uniform(-0.01, 0.01, (64, D)), 30 + rng.uniform(-0.01, 0.01, (256, D))
    v = rng.uniform(0, 0.5, (256, D))
    found = pasa("h200", "fp32_mean", q, k, v, causal=False, keys=128).numerics
    assert found is not None
    assert found.error.nan_count == 0


def test_a_fixed_reference_is_the_first_blocks_mean_to_the_bit() -> None:
    """F starts at 0 and takes the first block's mean; later blocks leave it."""
    problem = Problem(heads=1, seq_q=64, seq_kv=256, head_dim=64)
    schedule = find_schedule("pasa", "nvidia")
    program = schedule.program(
        problem,
        build_tiling(schedule.tiling, {"block_kv": 64}),
        load_device("h200"),
        schedule.precision("fixed_reference"),
    )
    means, references = [], []

    def look(moment: Moment) -> None:
        if moment.role == "mean" and moment.step.opcode is Opcode.ROW_SUM:
            means.append(np.array(moment.result))
        if moment.step.name == "f" and moment.step.opcode is Opcode.ADD:
            references.append(np.array(moment.result))

    execute(program, recipe_source(problem), observers=(look,))
    assert len(references) == 4
    for found in references:
        np.testing.assert_array_equal(found.view(np.uint16), means[0].view(np.uint16))
