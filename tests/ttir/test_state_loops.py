"""Loops that store a state in each iteration, and loads of columns, beside times of an H200.

Source: passes.json, strided.json and row_loops.json in reports/silicon.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import npusim
from npusim.program.timing import METHODS
from npusim.simulation.chosen_tile import program_of
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request
from ttir.test_loop_times import flat

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]")
PASSES = Path(__file__).parents[2] / "reports/silicon/passes.json"
COUNT = 32
#: Blocks and elements of a block: all in L2, and beyond it with few and with as many blocks as there is room for.
SIZES = [(132, 128), (528, 256), (528, 512), (2112, 128), (2112, 512)]


def measured(rows: int, block: int) -> float:
    cases = json.loads(PASSES.read_text("utf-8"))["rows"]
    own = (rows, block, 4)
    return next(float(c["us"]) for c in cases if c["kernel"] == "chain" and (c["rows"], c["block"], c["warps"]) == own)


def chained(rows: int, block: int) -> Any:
    from ttir.state_kernels import chain

    x, out = (np.empty((COUNT, rows * block), np.float32) for _ in range(2))
    with npusim.record() as calls:
        chain[(rows,)](x, out, COUNT, rows * block, block=block, num_warps=4)
    return calls[0]


def decayed(rows: int, block: int) -> Any:
    from ttir.state_kernels import decayed as kernel

    size = rows * block
    x, g, out = np.empty((COUNT, size), np.float32), np.empty(COUNT, np.float32), np.empty((COUNT, size), BFLOAT16)
    with npusim.record() as calls:
        kernel[(rows,)](x, g, out, COUNT, size, size, block=block, num_warps=4)
    return calls[0]


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(("rows", "block"), SIZES)
def test_a_state_loop_waits_for_memory_with_all_other_blocks(rows: int, block: int) -> None:
    timing = npusim.run(chained(rows, block), hw="h200", l2="repeated", numerics=False).timing
    assert timing.core_us + timing.stream_s * 1e6 == pytest.approx(measured(rows, block), rel=0.1)


def test_all_methods_agree() -> None:
    plan, program = program_of(plan_of(Request(chained(528, 512), hw="h200", numerics=False, l2="repeated")))
    assert program.is_in_step
    assert len({METHODS[name](program, plan.device).cycles for name in ("des", "block", "steady")}) == 1


def test_loads_that_wait_for_one_another_are_counted_in_the_code() -> None:
    """16 elements of a lane are loaded in parts, of which later ones have the registers of earlier ones."""
    works = {}
    for block in (512, 2048):
        _, program = program_of(plan_of(Request(decayed(264, block), hw="h200", numerics=False, l2="repeated")))
        (phase,) = program.phases
        listed = flat(phase.body(phase.blocks[0]))
        works[block] = max(step.attributes.memory_waits for op in listed for step in op.steps)
    assert works[512] == 1
    assert works[2048] > 1


#: Columns of a tensor, its rows, and columns of a program; the largest error of 20 such loads at other pitches is 15 %.
COLUMNS = [(80, 8192, 1), (64, 8192, 2), (48, 65536, 1), (48, 65536, 4)]


@pytest.mark.parametrize(("heads", "length", "columns"), COLUMNS)
def test_loads_of_columns_read_whole_sectors(heads: int, length: int, columns: int) -> None:
    from ttir.state_kernels import columns_as_rows

    x, out = np.empty((length, heads), BFLOAT16), np.empty((heads, length), np.float32)
    with npusim.record() as calls:
        columns_as_rows[(heads // columns, length // 256)](x, out, heads, rows=256, columns=columns, num_warps=4)
    cases = json.loads((PASSES.parent / "strided.json").read_text("utf-8"))["rows"]
    own = (heads, length, columns)
    measured_us = next(c["us"] for c in cases if (c["heads"], c["length"], c["columns"]) == own)
    timing = npusim.run(calls[0], hw="h200", l2="repeated", numerics=False).timing
    assert timing.core_us + timing.stream_s * 1e6 == pytest.approx(measured_us, rel=0.12)


def test_loops_whose_results_no_separate_queue_stores_have_a_time() -> None:
    from ttir import state_kernels as kernels

    x, out = np.empty((9, 4 * 64), np.float32), np.empty((9, 4 * 64), np.float32)
    with npusim.record() as calls:
        kernels.chain[(4,)](x, out, 9, 4 * 64, block=64, num_stages=1)
        kernels.last_sum[(4,)](np.empty((4, 29), np.float32), np.empty(4, np.float32), 29, 29, block=8)
    for call in calls:
        assert npusim.run(call, hw="h200", numerics=False).latency_us > 0


EVERY = json.loads((PASSES.parent / "row_loops.json").read_text("utf-8"))["rows"]
#: Loops that a compiler unrolls, and two with barriers, which it does not unroll.
ROW_LOOPS = [c for c in EVERY if not c["sums"] or c["rows"] == 2112]


@pytest.mark.parametrize("case", ROW_LOOPS, ids=lambda c: f"{c['rows']}x{c['columns']}-{c['programs']}-{c['sums']}")
def test_a_loop_over_rows_has_the_work_of_each_row(case: dict[str, Any]) -> None:
    from ttir.state_kernels import scaled_rows

    rows, columns, programs, sums = (case[n] for n in ("rows", "columns", "programs", "sums"))
    x, y = (np.empty((rows, columns), BFLOAT16) for _ in range(2))
    given = x, y, np.empty(columns, BFLOAT16), rows, columns, -(-rows // programs), columns, sums
    with npusim.record() as calls:
        scaled_rows[(programs,)](*given, num_warps=case["warps"])
    timing = npusim.run(calls[0], hw="h200", l2="repeated", numerics=False).timing
    us = timing.core_us + timing.stream_s * 1e6
    assert us == pytest.approx(case["us"], rel=0.36)  # 16 cases: median 11 %, worst 35 % (L2 sends more than its rate)
