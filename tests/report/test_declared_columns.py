"""Tables and their JSON documents have one declaration, which leaves no field of a row out."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from npusim.cli import check_commands
from npusim.config.tiling import TilingField
from npusim.program.ir.listing import ListedLoop, ListedOp, ListedPhase, ListedRing
from npusim.report import comparison, evaluated, findings, program_table, run_inputs, tuning, worst_inputs
from npusim.report.comparison import ComparedFigure
from npusim.report.sheet import Breakdown, Moved, Part
from npusim.report.text import document, to_json
from npusim.simulation.ranking import Prediction
from npusim.studies.baseline.cycles import CheckOutcome, Row
from npusim.studies.evaluate.evaluation import Evaluation, Microseconds, NotRead
from npusim.studies.evaluate.looks import WrongElement
from npusim.studies.evaluate.referee import CaseVerdict
from npusim.studies.invariance.examination import BitDifference
from npusim.studies.stress.worst_search import PointError
from npusim.studies.validate.calibrate import Calibration, ClassErrors, Constant
from npusim.studies.validate.nearest import MeasuredNeighbour

if TYPE_CHECKING:
    from npusim.report.text import Columns

_LATENCY = Breakdown((), (), ())
_CALM = PointError({}, 1e-3)


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
        (check_commands.ROWS, Row, ()),
        (findings.CLASSES, ClassErrors, ()),
        (findings.CONSTANTS, Constant, ()),
        (findings.DIFFERENCE, BitDifference, ()),
        (findings.NEIGHBOURS, MeasuredNeighbour, ()),
        (run_inputs.field_columns(()), TilingField, ("chosen",)),
        (worst_inputs.error_columns(_CALM), PointError, ()),
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


def test_a_case_has_the_first_of_its_comparisons_in_a_table_and_all_in_json() -> None:
    rows = (Row("cycles", 1000, 1100, 0.1, "more"), Row("aic", None, "left out", None, "it is new"))
    columns = check_commands._outcomes_table("cycles", "change", ">")
    of = [CheckOutcome("cycles", "a", Path("a.yaml"), "changed", given) for given in (rows, rows[1:], ())]
    assert [columns.texts(one)[1:4] for one in of] == [
        ("1,000", "1,100", "+10.00 %"),
        ("-", "left out", "it is new"),
        ("-", "-", ""),
    ]
    first, second = columns.record(of[0])["rows"]
    assert first == {"name": "cycles", "old": 1000, "new": 1100, "change": 0.1, "why": "more"}
    assert second == {"name": "aic", "old": None, "new": "left out", "change": None, "why": "it is new"}
    assert columns.keys.count("rows") == 1
    assert not {"old", "new", "change"} & set(columns.keys)


def test_a_value_that_json_has_not_is_null() -> None:
    assert findings.DIFFERENCE.record(BitDifference("O head 0", math.nan, 2.0)) == {
        "element": "O head 0",
        "value": None,
        "other": 2.0,
    }


def test_a_field_that_a_run_chooses_says_so_in_its_table_and_its_json() -> None:
    fields_ = [TilingField("block", default, "a block", 1, None, None, (2, 4)) for default in (4, None)]
    chosen, named = (run_inputs.field_columns(names) for names in (("block",), ()))
    assert [columns.texts(f)[1] for columns in (chosen, named) for f in fields_] == ["auto (4)", "auto", "4", "auto"]
    assert [(chosen.record(f)["default"], chosen.record(f)["chosen"]) for f in fields_] == [(4, True), (None, True)]
    assert named.record(fields_[0])["chosen"] is False


def test_calm_inputs_are_said_to_be_calm() -> None:
    columns = worst_inputs.error_columns(_CALM)
    assert columns.texts(_CALM) == ("calm inputs", "1.00e-03")
    assert columns.texts(PointError({"late": 16.0}, None)) == ("late=16", "-")
    assert columns.record(PointError({"late": 16.0}, 0.5)) == {"point": {"late": 16.0}, "rmse": 0.5, "is_beyond": False}


def test_the_document_of_a_calibration_has_every_field() -> None:
    total = ClassErrors("all", 3, 0.2, 0.1, 0.15)
    done = Calibration("h200", (Constant("links", 1.0, 2.0, 1.5, 2.5, ("hbm",)),), (total,), total, ("a",), "own")
    written = json.loads(to_json(findings.calibration_document(done)))
    assert written == json.loads(to_json(document("calibration", **asdict(done), helps=True)))
    assert list(written)[2:] == [*(f.name for f in fields(Calibration)), "helps"]


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
