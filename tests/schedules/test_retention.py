"""Retention and gated linear attention: packaged schedules against the recurrence, token after token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import npusim
from npusim.config.problem import KernelProblem
from npusim.errors import SpecError
from npusim.library import find_schedule, gla, retention
from reports.parts.kernel import declared_tiling

#: Each with a chunk whose last is ragged, several heads, and a width of values that is another than that of keys.
PROBLEM = {"heads": 2, "tokens": 80, "key": 32, "value": 48}
TILING = {"chunk": 32, "block_value": 32}
DEVICES = ("ascend_910b2", "ascend_950", "h200", "a100", "v100")


def _run(name: str, hw: str, **more: Any) -> Any:
    tiling = declared_tiling(name, hw, **TILING)  # no other is tried, which takes longer than the bits
    return npusim.run(name, hw=hw, problem=PROBLEM, tiling=tiling, rows="all", heads="all", **more)


def _integers(draw: np.random.Generator) -> dict[str, Any]:
    """Return Q, K and V of -1, 0 and 1, few enough that every sum is exact."""
    shapes = {n: (1, PROBLEM["heads"], PROBLEM["tokens"], width) for n, width in (("q", 32), ("k", 32), ("v", 48))}
    return {n: (draw.integers(-1, 2, x) * (draw.random(x) < 0.2)).astype(np.float16) for n, x in shapes.items()}


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("name", ["retention", "gla"])
def test_results_are_those_of_the_recurrence(name: str, hw: str) -> None:
    result = _run(name, hw)
    assert result.timing.cycles > 0
    assert result.numerics.error.rmse < 1e-3


@pytest.mark.parametrize("hw", DEVICES)
def test_integers_are_exact_where_nothing_decays(hw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "log_decay", np.zeros)
    draw = np.random.default_rng(0)

    assert _run("retention", hw, tensors=_integers(draw)).numerics.error.max_abs_error == 0


@pytest.mark.parametrize("hw", DEVICES)
def test_integers_are_exact_where_gates_halve(hw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate of 1/2 at few tokens: e^b and e^-b are powers of two once they are float16, and every sum is exact."""
    draw = np.random.default_rng(1)
    halved = -np.log(2) * (draw.random((1, PROBLEM["heads"], PROBLEM["tokens"], 32)) < 0.03)
    monkeypatch.setattr(gla, "log_gates", lambda *_: halved)
    assert _run("gla", hw, tensors=_integers(draw)).numerics.error.max_abs_error == 0


def test_a_chunk_and_the_columns_of_a_block_change_no_sum_but_their_order() -> None:
    tilings = [declared_tiling("gla", "h200", chunk=c, block_value=16) for c in (16, 64)]
    small, large = (npusim.run("gla", hw="h200", problem=PROBLEM, tiling=t).numerics.error for t in tilings)
    assert 0 < small.rmse < 1e-3
    assert 0 < large.rmse < 1e-3


def test_other_sizes_are_refused() -> None:
    with pytest.raises(SpecError, match="retention has no size tokenz=80"):
        npusim.run("retention", hw="h200", problem={"heads": 2, "tokenz": 80})
    with pytest.raises(SpecError, match="gla has no size key=0; allowed: whole numbers from 1"):
        npusim.run("gla", hw="h200", problem={"key": 0})


def test_decays_are_the_papers() -> None:
    assert np.allclose(np.exp(retention.log_decay(3)), [1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128])
    gates = gla.log_gates(0, 1, 2, 4096, 8)
    assert gates.max() < 0
    assert abs(16 * gates.mean() + 0.806) < 0.02  # the mean of log sigmoid(x), x normal


def test_both_are_listed_for_both_families() -> None:
    for name in ("retention", "gla"):
        for family in ("ascend", "nvidia"):
            assert find_schedule(name, family).has_bits


def test_a_run_is_called_by_its_sizes() -> None:
    tiling = declared_tiling("retention", "h200", **TILING)
    result = npusim.run("retention", hw="h200", problem=PROBLEM, tiling=tiling, numerics=False)
    assert result.name == "retention-heads2tokens80key32value48"


def _states_us(stages: int, tokens: int = 2048) -> float:
    """Return the time of retention's states on an H100: 16 heads of 128, blocks of 32 x 32, 4 warps."""
    sizes = {"batch": 1, "heads": 16, "tokens": tokens, "key": 128, "value": 128, "dtype": "bfloat16"}
    tiling = {"chunk": 64, "warps": 4, "stages": stages, "block_key": 32, "block_value": 32}
    run = npusim.run("retention", hw="h100", problem=KernelProblem.of(sizes), tiling=tiling, numerics=False, l2="clean")
    assert run.timing is not None
    assert run.timing.account is not None
    states = run.timing.account.phases[0]
    return float(run.timing.core_us * states.cycles / run.timing.cycles)


def test_states_wait_for_each_chunk_where_one_tile_is_under_way() -> None:
    """FLA's chunk_fwd_kernel_h on an H100: 30.0 us of 32 chunks with two stages, 19.1 with four; 127 of 128 chunks."""
    two, four = _states_us(2), _states_us(4)
    assert 24 < two < 36
    assert 14 < four < 22
    assert 100 < _states_us(2, 8192) < 140  # blocks stay in step: later chunks wait too


def test_registers_are_the_compilers_where_they_are_listed() -> None:
    sizes = {"batch": 1, "heads": 2, "tokens": 128, "key": 64, "value": 64, "dtype": "bfloat16"}
    fields = {"chunk": 64, "warps": 4, "stages": 2, "block_key": 64, "block_value": 64}
    for more, words in ({}, "80 registers per thread, 32 KiB"), ({"block_value": 48}, "registers estimated"):
        tiling = {**fields, **more}
        run = npusim.run("retention", hw="h100", problem=KernelProblem.of(sizes), tiling=tiling, numerics=False)
        assert any(words in note for note in run.notes if note.startswith("states:"))
