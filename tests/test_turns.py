"""What of a sweep runs by default, and what declared tiles leave behind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import npusim
from npusim import cache
from npusim.report.advice import Trial, advise
from npusim.report.result_json import record_of
from tests.declared import declare_tiles
from tests.turns import every, in_turn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def by_default(cases: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [c.values for c in cases if all(mark.name != "exhaustive" for mark in c.marks)]


def test_each_value_of_every_axis_has_its_turn() -> None:
    cases = in_turn("abc", [pytest.param(1, 2, id="pair"), {"n": 3}, 4])
    assert len(cases) == 9
    assert [c.id for c in cases[:3]] == ["a-pair", "a-dict1", "a-4"]
    cases = in_turn("abcd", (1, 2))
    assert by_default(cases) == [("a", 1), ("b", 2), ("c", 1), ("d", 2)]


def test_one_of_so_many_cases_runs_and_exhaustive_ones_are_not_counted() -> None:
    left_out = pytest.param("b", marks=pytest.mark.exhaustive)
    assert by_default(every(2, ["a", left_out, "c", ("d", 1)])) == [("a",), ("d", 1)]
    assert by_default(every(2, "abcd", 1)) == [("b",), ("d",)]
    turns = [by_default(every(3, range(7), start)) for start in range(3)]
    assert sorted(case for turn in turns for case in turn) == [(n,) for n in range(7)]


def test_declared_tiles_store_neither_choices_nor_times_of_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later run of the same call would print the stored time, which is that of another tile."""
    monkeypatch.setenv(cache.VARIABLE, os.pathsep.join(map(str, (tmp_path, *cache.folders()))))
    with pytest.MonkeyPatch.context() as patched:
        declare_tiles(patched)
        result = npusim.run("flash", seq=256, tiling={"block_q": 128}, numerics=False, trace_groups=())
        assert not any("tile=auto" in note for note in result.notes)
        advice = advise(record_of(result), Trial(result))
    assert advice is not None
    assert advice.command
    assert not [file.name for file in tmp_path.iterdir() if file.suffix in (".tile", ".trial")]
