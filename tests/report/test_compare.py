from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from npusim.report.compare import Figure, compare, comparison_document
from npusim.report.output import save_run
from npusim.report.record import record_of

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.report.record import RunRecord
    from npusim.run_result import RunResult


def test_a_run_equals_itself_live_or_from_its_folder(
    tmp_path: Path, result: RunResult, record: RunRecord
) -> None:
    folder = save_run(result, tmp_path / "a", trace="none")
    for one, two in ((result, record), (folder, str(folder / "result.json")), (folder, result)):
        found = compare(one, two)
        assert found.differences == {}
        assert {figure.change for figure in found.figures} <= {"", "="}
        assert "the same" in str(found)


def test_inputs_and_figures_that_differ_are_listed(record: RunRecord) -> None:
    assert record.timing is not None
    faster = replace(record.timing, latency_us=record.timing.latency_us / 2)
    new = replace(record, tiling={**record.tiling, "block_kv": 256}, timing=faster)
    found = compare(record, new)
    assert found.differences == {"tiling.block_kv": (512, 256)}
    latency = next(f for f in found.figures if f.name == "latency us")
    assert latency.change == "-50.0 %"
    assert latency.relative_change == pytest.approx(-0.5)
    assert "tiling.block_kv  512 -> 256" in str(found)


def test_numerics_of_one_side_only_are_shown_without_a_change(
    record: RunRecord, overflowed: RunResult
) -> None:
    found = compare(record, overflowed)
    overflow = next(f for f in found.figures if f.name == "overflow")
    assert (overflow.old, overflow.new, overflow.change) == (None, 7, "")
    assert found.differences["sample"] == (None, "rows 128..131 of 1 of 5 heads")


def test_runs_without_a_time_compare_by_their_bits(overflowed: RunResult) -> None:
    bits_only = replace(record_of(overflowed), timing=None)
    names = [figure.name for figure in compare(bits_only, bits_only).figures]
    assert names[:2] == ["relative RMSE", "max |error|"]


@pytest.mark.parametrize(
    ("figure", "change"),
    [
        (Figure("a", "cycles", 100, 110), "+10.0 %"),
        (Figure("a", "cycles", 100, 100), "="),
        (Figure("a", "bytes", 10**6, 10**6 + 1), "~0 %"),
        (Figure("a", "share", 0.43, 0.61), "+18.0 pt"),
        (Figure("a", "count", 0, 1204), "+1,204"),
        (Figure("a", "error", 4e-6, 3.1e-3), "x775"),
        (Figure("a", "error", 4e-6, 4.2e-6), "+5.0 %"),
        (Figure("a", "error", 0.0, 1e-3), "new"),
        (Figure("a", "text", "CUBE", "VECTOR"), "changed"),
        (Figure("a", "time", 1.0, None), ""),
    ],
)
def test_changes_are_written_in_the_words_of_their_kind(figure: Figure, change: str) -> None:
    assert figure.change == change


def test_document_is_stable(record: RunRecord) -> None:
    document: dict[str, Any] = comparison_document(compare(record, record))
    assert document["schema_version"] == 1
    assert document["figures"][0].keys() == {
        "name", "kind", "old", "new", "change", "relative_change",
    }  # fmt: skip


def test_second_core_that_repeats_the_first_is_left_out_of_the_table(record: RunRecord) -> None:
    found = compare(record, record)
    assert "veccore1" not in str(found)
    assert any(figure.name == "veccore1 VECTOR busy" for figure in found.figures)
