from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from npusim import __version__
from npusim.errors import SpecError
from npusim.program.timing.timing_result import OverlapRecord, Roofline
from npusim.report.result_json import load_result, record_of
from npusim.report.text import to_json
from npusim.simulation.run_result import FiniteChoice, PresetOutcome, Spread

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.report.result_json import RunRecord
    from npusim.simulation.run_result import RunData


def test_record_survives_json(tmp_path: Path, record: RunRecord, overflowed: RunData) -> None:
    for kept in (record, record_of(overflowed)):
        file = tmp_path / "result.json"
        file.write_text(to_json(kept.to_document()))
        assert load_result(file).to_document() == kept.to_document()
        assert load_result(tmp_path).to_document() == kept.to_document()


def test_every_part_of_a_record_survives_json(tmp_path: Path, record: RunRecord) -> None:
    spread = (Spread("ascend.cube.k8.f16.f32", 1e-5, 0.25), Spread("ascend.cube.k4.f16.f32", None, None))
    assert record.timing is not None
    overlap = OverlapRecord(
        attention_s=1.5,
        linear_s=2.5,
        allreduce_s=3.5,
        closed_form_s=4.5,
        exposed_s=5.5,
        overlap_efficiency=0.5,
        modes=("mesh by sdma (stream)",),
    )
    roofline = Roofline(1.0, 2.0, 3e12, 4e11, 5e11)
    kept = replace(
        record,
        spread=spread,
        orders=spread,
        notes=("a", "b"),
        ignored=("window",),
        finite=(FiniteChoice("pasa", "fp16_mean", 1e-3),),
        presets=(PresetOutcome("fp16", None, 2.0), PresetOutcome("fp32", 1e-4, None)),
        timing=replace(record.timing, overlap=overlap, roofline=roofline),
    )
    (tmp_path / "result.json").write_text(to_json(kept.to_document()))
    assert load_result(tmp_path).to_document() == kept.to_document()


def test_document_says_where_the_numbers_come_from(record: RunRecord, result: RunData) -> None:
    document: dict[str, Any] = record.to_document()
    assert document["schema_version"] == 1
    assert document["npusim_version"] == __version__
    assert document["device"]["digest"] == result.device.digest()
    assert document["problem"]["data"] == {"seed": 0, "kind": "normal", "mean": 0.0, "deviation": 1.0}
    assert document["tiling"]["block_kv"] == result.tiling.model_dump()["block_kv"]
    assert document["formats"] == result.formats
    assert document["timing"]["cycles"] == result.cycles
    assert isinstance(document["timing"]["cycles"], int)


def test_busy_cycles_rest_on_constants_with_a_known_basis(record: RunRecord) -> None:
    timing = record.timing
    assert timing is not None
    assert {c.basis for c in timing.constants} <= {"vendor", "measured", "derived", "fitted", "assumed"}
    # Costs are rounded up to whole cycles one by one: at most a cycle a step.
    busy = sum(q.busy_cycles for q in timing.uses)
    assert sum(c.cycles for c in timing.constants) == pytest.approx(busy)


def test_a_figure_that_is_not_finite_is_null(overflowed: RunData) -> None:
    document: dict[str, Any] = record_of(overflowed).to_document()
    assert document["numerics"]["max_abs_error"] is None
    json.loads(to_json(document), parse_constant=pytest.fail)


def test_keys_of_a_later_version_are_left_out(tmp_path: Path, record: RunRecord) -> None:
    document = {**record.to_document(), "more": 1}
    (tmp_path / "result.json").write_text(to_json(document))
    assert load_result(tmp_path).to_document() == record.to_document()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "other"}, "not a result of `npusim run`"),
        ({"schema_version": 2}, "schema_version 2; this npusim reads 1"),
        ({"timing": {"method": "des"}}, "timing.cycles: missing"),
        ({"name": 3}, "name: expected text, got 3"),
        ({"notes": "x"}, "notes: expected a list, got 'x'"),
        ({"device": []}, "device: expected a mapping, got []"),
        ({"formats": {"S": 1}}, "formats.S: expected text, got 1"),
    ],
)
def test_damaged_results_are_refused_with_file_and_key(
    tmp_path: Path, record: RunRecord, change: dict[str, object], message: str
) -> None:
    file = tmp_path / "result.json"
    file.write_text(to_json({**record.to_document(), **change}))
    with pytest.raises(SpecError) as caught:
        load_result(file)
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"result\.json: cannot be read: No such file"):
        load_result(tmp_path)
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(SpecError, match="not a JSON file"):
        load_result(tmp_path)
