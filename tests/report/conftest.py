"""One small run, its record, and the same run with bits made by hand that went wrong."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from npusim.program.ir.walk import Walker, walk
from npusim.program.numerics.bits_result import ErrorSummary, NumericEvent, NumericResult
from npusim.report.result_json import RunRecord, record_of
from npusim.run import run

if TYPE_CHECKING:
    from npusim.simulation.run_result import RunData


@pytest.fixture(scope="session")
def result() -> RunData:
    """Flash, 512 tokens: 20 blocks on 24 core groups, two groups on the timeline."""
    return run("flash", seq=512, tiling={"kernel": "pto", "block_kv": 256}, numerics=False, trace_groups=(0, 1))


@pytest.fixture(scope="session")
def record(result: RunData) -> RunRecord:
    return record_of(result)


@pytest.fixture(scope="session")
def overflowed(result: RunData) -> RunData:
    """The same run with bits: an overflow in the scores of core group 1's only block."""
    phase = result.program.phases[-1]
    block = str(phase.blocks[1])
    operations = walk(Walker(result.program), phase.body(phase.blocks[1]))
    position = next(i for i, r in enumerate(operations) if r.op.label == "S.drain")
    event = NumericEvent("overflow", "S.drain.cast", "aic.FIXP", "attention", block, {"key": 0}, 3, 5, 7, position)
    error = ErrorSummary(
        rmse=None,
        max_abs_error=None,
        max_ulp=None,
        ulp_histogram={},
        nan_count=2,
        inf_count=1,
        nan_row_fraction=0.25,
        count=4,
    )
    bits = NumericResult(
        **asdict(error),
        rows={(0, 0, 128): np.ones((4, 128), np.float16)},
        shape=(1, 5, 512, 128),
        sample="rows 128..131 of 1 of 5 heads",
        overflow_counts={"S.drain.cast": 7},
        nan_counts={"softmax.exp": 2},
        first_events=(event,),
        events=(event,),
        arithmetic={"ascend.cube.k16.f16.f32": "assumed"},
    )
    return replace(result, numerics=bits)
