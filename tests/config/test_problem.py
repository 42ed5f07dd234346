from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from npusim.config.problem import NormalData, Problem, UniformData
from tests.config.visible import visible_keys

if TYPE_CHECKING:
    from collections.abc import Callable


def test_defaults_follow_from_the_sizes_given() -> None:
    problem = Problem(heads=5, seq_q=4096, head_dim=128)
    assert (problem.batch, problem.kv_heads, problem.seq_kv) == (1, 5, 4096)
    assert (problem.value_head_dim, problem.causal_offset) == (128, 0)
    assert problem.scale == 1 / math.sqrt(128)
    assert problem.data == NormalData(seed=0)


def test_causal_offset_lines_up_the_last_query_with_the_last_key() -> None:
    problem = Problem(heads=1, seq_q=3, seq_kv=10, head_dim=64, causal=True)
    assert problem.causal_offset == 7
    assert [visible_keys(problem, query) for query in range(3)] == [8, 9, 10]


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 60), st.booleans())
def test_attended_pairs_are_the_sum_of_visible_keys(seq_q: int, more: int, offset: int, causal: bool) -> None:
    problem = Problem(heads=1, seq_q=seq_q, seq_kv=seq_q + more, head_dim=16, causal=causal, causal_offset=offset)
    pairs = sum(visible_keys(problem, query) for query in range(seq_q))
    assert problem.attended_pairs() == pairs


def test_flops_count_both_products() -> None:
    problem = Problem(batch=8, heads=32, seq_q=2048, head_dim=64, causal=True)
    # FastAttention paper, figure 8: 4 * B * S^2 * d * N, not halved for a causal mask.
    assert problem.dense_flops() == 4 * 8 * 2048**2 * 64 * 32
    assert problem.flops() == 4 * 8 * (2048 * 2049 // 2) * 64 * 32


def test_problems_are_frozen_and_hashable() -> None:
    problem = Problem(heads=1, seq_q=16, head_dim=16)
    assert hash(problem) == hash(Problem(heads=1, seq_q=16, head_dim=16))
    with pytest.raises(ValidationError, match="frozen"):
        problem.heads = 2  # type: ignore[misc]


def test_data_recipes_are_told_apart_by_kind() -> None:
    problem = Problem.model_validate(
        {"heads": 1, "seq_q": 16, "head_dim": 16, "data": {"kind": "uniform", "x0": 20, "amplitude": 0.5}}
    )
    assert problem.data == UniformData(kind="uniform", x0=20, amplitude=0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"head_dim": 100, "value_head_dim": 64, "values_in_keys": True},
            "head_dim: 100 is not a multiple of 16; nearest allowed: 96 or 112",
        ),
        ({"kv_heads": 5}, "kv_heads: 5 does not divide 12 query heads; possible: 1 2 3 4 6 12"),
        (
            {"causal": True, "seq_kv": 32},
            "seq_q: 64 causal queries but only 32 keys: the first 32 queries would see none; use a "
            "seq_kv of at least seq_q, or set their output with unseen: zero, nan, mean",
        ),
        (
            {"causal": True, "causal_offset": -1},
            "causal_offset: -1 leaves query 0 without a key; must be >= 0, or set unseen",
        ),
        ({"batch": 0}, "batch: 0 must be greater than 0"),
        ({"seq_q": -3}, "seq_q: -3 must be greater than 0"),
        ({"heads": 2.5}, "heads: expected a whole number, got 2.5"),
        ({"heads": True}, "heads: expected a whole number, got True"),
        (
            {"dtype": "int4"},
            "dtype: 'int4' is not one of: 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2', "
            "'float32' or 'float64'",
        ),
        ({"scale": 0.0}, "scale: 0 makes all keys equal; must not be 0"),
        ({"head_dimm": 64}, "head_dimm: unknown key. Did you mean `head_dim`?"),
        (
            {"data": {"kind": "unifrm"}},
            "data.kind: 'unifrm' is not one of: 'normal', 'uniform', 'hybrid', 'sink', 'resonance', 'amplified'",
        ),
        ({"data": {"kind": "sink", "gap": 7.0, "sinks": 0}}, "data.sinks: 0 must be greater than 0"),
        ({"data": {"kind": "uniform", "x0": 1.0}}, "data.amplitude: missing"),
    ],
)
def test_impossible_problems_are_refused_with_value_and_what_is_allowed(
    changes: dict[str, object], message: str, fault: Callable[..., str]
) -> None:
    given: dict[str, object] = {"heads": 12, "seq_q": 64, "head_dim": 64}
    assert fault(Problem, **{**given, **changes}) == message


def test_missing_sizes_are_named_once(fault: Callable[..., str]) -> None:
    assert fault(Problem, heads=1) == "seq_q: missing\nhead_dim: missing"


def test_a_sequence_of_many_is_read_without_going_through_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    many = Problem(heads=1, head_dim=64, causal=False, seq_q=1, lengths=tuple(range(1, 1001)))
    monkeypatch.setattr(Problem, "queries", property(lambda _: pytest.fail("the queries of all sequences are read")))
    assert many.pairs() == sum(range(1, 1001))
    assert (many.sequence(999).seq_kv, many.sequence(999).seq_q) == (1000, 1)
