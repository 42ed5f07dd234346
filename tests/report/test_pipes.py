from __future__ import annotations

import csv
import io
from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.report.pipes import pipe_columns, pipes_csv

if TYPE_CHECKING:
    from npusim.report.result_json import RunRecord

# As in PipeUtilization.csv of msprof op, less what npusim has no queue for; and npusim's own two.
VENDOR_COLUMNS = {
    "block_id",
    "sub_block_id",
    "aic_time(us)",
    "aic_total_cycles",
    "aic_cube_time(us)",
    "aic_cube_ratio",
    "aic_mte1_time(us)",
    "aic_mte1_ratio",
    "aic_mte2_time(us)",
    "aic_mte2_ratio",
    "aic_fixpipe_time(us)",
    "aic_fixpipe_ratio",
    "aiv_time(us)",
    "aiv_total_cycles",
    "aiv_vec_time(us)",
    "aiv_vec_ratio",
    "aiv_mte2_time(us)",
    "aiv_mte2_ratio",
    "aiv_mte3_time(us)",
    "aiv_mte3_ratio",
    "method",
    "band",
}


def test_columns_have_the_vendors_names_and_a_row_for_each_core_at_work(record: RunRecord) -> None:
    columns = pipe_columns(record)
    assert set(columns) == VENDOR_COLUMNS
    # 20 blocks on 20 of 24 core groups, of three cores each.
    assert {len(values) for values in columns.values()} == {60}
    assert columns["sub_block_id"][:3] == ["cube0", "vector0", "vector1"]
    assert columns["block_id"][-1] == 19


def test_ratios_are_busy_over_the_cores_own_cycles(record: RunRecord) -> None:
    assert record.timing is not None
    columns = pipe_columns(record)
    cube = next(q for q in record.timing.uses if (q.group, q.queue) == (0, "aic.CUBE"))
    total = columns["aic_total_cycles"][0]
    assert isinstance(total, int)
    assert columns["aic_cube_ratio"][0] == round(cube.busy_cycles / total, 6)
    # 1.8 cycles a nanosecond.
    assert columns["aic_cube_time(us)"][0] == round(cube.busy_cycles / 1800, 6)
    assert columns["aiv_vec_ratio"][0] is None


def test_csv_marks_what_does_not_apply_as_the_profiler_does(record: RunRecord) -> None:
    rows = list(csv.DictReader(io.StringIO(pipes_csv(record))))
    assert rows[0]["aiv_vec_ratio"] == "NA"
    assert float(rows[1]["aiv_vec_ratio"]) > 0


def test_run_without_a_time_has_no_rows(record: RunRecord) -> None:
    assert not any(pipe_columns(replace(record, timing=None)).values())
