"""A copy through a core's memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from npusim.kernel import (
    STORED,
    CopyProblem,
    Field,
    FlashPrecision,
    GlobalTensor,
    Phases,
    Tiling,
    ceil_div,
    needs_groups,
    on,
    schedule,
)
from npusim.kernel import copy as copy_phase
from npusim.machine import Machine


class CopyFields(Tiling):
    """Bytes of one transfer; according to Ascend's guide, transfers of 16 KiB or more reach full bandwidth."""

    block_bytes: int = Field(
        default=32768,
        ge=512,
        le=65536,
        multiple_of=512,
        description="bytes of one transfer of a core",
        json_schema_extra=on(
            "gpu", Field(default=32768, ge=512, le=262144, multiple_of=512, description="bytes of one block")
        ),
    )


def copy(problem: CopyProblem, tiling: Any, _precision: FlashPrecision, machine: Machine) -> Phases:
    """Return a copy of ``problem.bytes``, rounded up to a multiple of the size of a transfer."""
    rows = ceil_div(problem.bytes, tiling.block_bytes)
    source = GlobalTensor("source", 1, 1, rows, tiling.block_bytes, "int8", "input")
    target = replace(source, name="target", role="output")
    return [replace(copy_phase(source, target, machine.row_cores), slice_elements=tiling.block_bytes)]


SCHEDULES = schedule(
    "copy",
    copy,
    problem=CopyProblem,
    precisions=[STORED],
    tiling=CopyFields,
    kind="plain",
    unsupported=needs_groups,
    summary="a copy through a core's memory, to validate the machine",
)
