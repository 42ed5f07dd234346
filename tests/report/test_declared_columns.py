"""Tables and their JSON documents have one declaration, which leaves no field of a row out."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import pytest

from npusim.program.ir.listing import ListedLoop, ListedOp, ListedPhase, ListedRing
from npusim.report import comparison, evaluated, program_table, tuning
from npusim.report.comparison import ComparedFigure
from npusim.report.sheet import Breakdown, Moved, Part
from npusim.simulation.ranking import Prediction
from npusim.studies.evaluate.evaluation import Evaluation, Microseconds, NotRead
from npusim.studies.evaluate.looks import WrongElement
from npusim.studies.evaluate.referee import CaseVerdict

if TYPE_CHECKING:
    from npusim.report.text import Columns

_LATENCY = Breakdown((), (), ())


@pytest.mark.parametrize(
    ("columns", "kind", "more"),
    [
        (evaluated.candidate_columns(()), Evaluation, ()),
        (evaluated.TIME, Microseconds, ()),
        (evaluated.WORST, CaseVerdict, ()),
        (evaluated.WRONG, WrongElement, ()),
        (evaluated.NOT_READ, NotRead, ()),
        (program_table.RINGS, ListedRing, ()),
        (program_table.OPERATIONS, ListedOp, ("kind",)),
        (program_table.LOOPS, ListedLoop, ("kind",)),
        (program_table.PHASES, ListedPhase, ()),
        (comparison.figure_columns("AB"), ComparedFigure, ("changes", "relative_changes")),
        (comparison.part_columns(_LATENCY, "AB"), Part, ("text", "us")),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_json_has_every_field_of_a_row(columns: Columns, kind: type, more: tuple[str, ...]) -> None:
    assert len(columns.keys) == len(set(columns.keys))
    assert set(columns.keys) == {*more, *(f.name for f in fields(kind))}


def test_json_of_a_change_has_the_fields_of_its_part_beside_its_own() -> None:
    moved = Moved("aiv0.VECTOR", Part("wait", "S ready", (3, 5), ("aiv0.MTE2",)), (2, 2))
    row = {"kind": "wait", "name": "S ready", "cycles": (3, 5), "givers": ("aiv0.MTE2",)}
    assert comparison.MOVED.record(moved) == {"unit": "aiv0.VECTOR", **row, "times": (2, 2)}
    assert comparison.STEP.record(moved) == {"unit": "aiv0.VECTOR", **row}


def test_a_configuration_of_a_ranking_is_declared_once() -> None:
    row = tuning.Ranked("warps=4", "A", Prediction(12.5, "key", None, 3))
    assert tuning.RANKED.record(row) == {
        "configuration": "warps=4",
        "us": 12.5,
        "error": None,
        "bits": "A",
        "registers": None,
        "spilled": 3,
        "limit": "",
        "limit_share": 0.0,
    }
    assert tuning.RANKED.texts(row)[:6] == ("warps=4", "12.50", "-", "A", "-", "-")
