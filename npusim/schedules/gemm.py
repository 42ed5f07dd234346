"""Kernels besides attention: a matrix product, a copy, and the operations between a layer's products."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from npusim.algorithms.flash import FlashPrecision
from npusim.algorithms.gemm import WHOLE_ROWS, pointwise
from npusim.algorithms.gemm import copy as copy_phase
from npusim.config.problem import CopyProblem, GemmProblem, RowsProblem
from npusim.config.tiling import Field, Tiling, on
from npusim.ir.tile import GlobalTensor
from npusim.schedules.define import check_multiplied, machine_of, schedule
from npusim.units import ceil_div, round_up

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.schedules.define import Phases

#: Columns that pieces of rows are multiples of: of 16 bits, 32 bytes.
COLUMNS = 16
STORED = FlashPrecision("stored", scores="input", product="input")


def needs_groups(device: DeviceSpec) -> str:
    """Return why a device cannot run a library's kernels, empty where it can."""
    if machine_of(device).has_library:
        return ""
    return f"{device.name}'s file describes no concurrent warp groups; h200's does"


def product(problem: GemmProblem, tiling: Any, p: FlashPrecision, machine: Any) -> Phases:
    """Return C = A B, as many as there are: heads of one tensor."""
    m, n, k, fmt = problem.m, problem.n, problem.k, problem.dtype
    check_multiplied(machine.device, fmt)
    column = machine.column(fmt) if problem.operands == "nz" else 0
    is_transposed = problem.operands == "nt"
    right = (n, k) if is_transposed else (k, n)
    a, b = (
        GlobalTensor(name, 1, problem.count, *sizes, fmt, "input", column=column)
        for name, sizes in (("a", (m, k)), ("b", right))
    )
    output = problem.output_dtype if p.output == fmt else p.output
    c = GlobalTensor("c", 1, problem.count, m, n, output, "output")
    return list(machine.product("gemm", a, b, c, tiling, arithmetic=p.arithmetic, is_transposed=is_transposed))


class CopyFields(Tiling):
    """Bytes of one transfer; from 16 KiB on Ascend's guide promises full bandwidth."""

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


def copy(problem: CopyProblem, tiling: Any, _precision: FlashPrecision, machine: Any) -> Phases:
    """Return a copy of ``problem.bytes``, rounded up to whole transfers."""
    rows = ceil_div(problem.bytes, tiling.block_bytes)
    source = GlobalTensor("source", 1, 1, rows, tiling.block_bytes, "int8", "input")
    target = replace(source, name="target", role="output")
    return [replace(copy_phase(source, target, machine.row_cores), slice_elements=tiling.block_bytes)]


def rows_of_layer(problem: RowsProblem, tiling: Any, _precision: FlashPrecision, machine: Any) -> Phases:
    """Return a norm, rotary embedding or activation between the products of a layer."""
    p = problem
    width = p.cols if p.what in WHOLE_ROWS else min(p.cols, tiling.elements)
    in_slices = bool(machine.slice_elements)
    if p.what == "norm" and in_slices and p.cols > tiling.piece:
        width = round_up(ceil_div(p.cols, ceil_div(p.cols, tiling.piece)), COLUMNS)
    rows = max(1, tiling.elements // width)
    most = ceil_div(p.rows * p.heads * ceil_div(p.cols, width), machine.places)  # few rows on all cores
    height = min(p.rows, max(1, min(rows * (tiling.slices if in_slices else 1) * machine.row_cores, most)))
    phase = pointwise(p.what, (p.heads, p.rows, p.cols), p.dtype, (height, width), p.parts)
    return [replace(phase, slice_elements=rows * width)]


SCHEDULES = (
    *schedule(
        "gemm",
        product,
        problem=GemmProblem,
        precisions=[STORED],
        tiling=None,
        kind="product",
        unsupported=needs_groups,
        summary="a matrix product, to validate the machine",
    ),
    *schedule(
        "copy",
        copy,
        problem=CopyProblem,
        precisions=[STORED],
        tiling=CopyFields,
        kind="plain",
        unsupported=needs_groups,
        summary="a copy through a core's memory, to validate the machine",
    ),
    *schedule(
        "rows",
        rows_of_layer,
        problem=RowsProblem,
        precisions=[STORED],
        tiling=None,
        kind="rows",
        unsupported=needs_groups,
        summary="norm, rotary embedding or activation of a layer",
    ),
)
