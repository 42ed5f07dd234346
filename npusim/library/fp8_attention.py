"""FP8 attention: P cast to E4M3, with the choices of scale, key order and accumulator of real kernels.

The presets follow the kernels' sources (reports/pcast_numerics), except ``trtllm_xqa`` and ``sage2``, which follow the
P-Cast paper's Table 3.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from npusim.kernel import (
    AS_FAMILY,
    E4M3,
    E4M3_MAX,
    P_SCALE,
    Blocks,
    DeviceSpec,
    Dtype,
    Field,
    Fp8Precision,
    Hook,
    Phases,
    Problem,
    TilingError,
    Unseen,
    Value,
    attend,
    attention_cells,
    attention_phase,
    check_scale,
    divisor,
    kernel,
    mask_of,
    multiplies,
    on,
    registered,
    schedule,
    scored,
    sink_of,
    unchanged,
    with_sink,
)
from npusim.machine import Machine


@kernel(finite_starts=True, q="row head", k="key head", v="key value", mask="row key", sink="row")
def fp8(
    q: Value,
    k: Value,
    v: Value,
    mask: Value,
    p: Fp8Precision,
    scale: float,
    p_scale: float,
    factor: float,
    unscale: float,
    score: Hook = unchanged,
    sink: Value | None = None,
    unseen: Unseen | None = None,
) -> Value:
    """FlashAttention-2 with P cast to E4M3 after its row sum; the cast saturates as the conversion instructions do."""

    def narrow(e: Value) -> Value:
        scaled = e * p_scale if p_scale != 1 else e
        return scaled.to(E4M3, overflow="saturate").role("weight").to(p.operand)

    o, m, l = attend(q, k, v, mask, p, scale, score, narrow, factor, sink=sink, unseen=unseen)
    result = o / divisor(with_sink(l, m, sink, p, factor), unseen)
    return (result * unscale if unscale != 1 else result).to(p.output)


#: 8-bit formats of inputs; P is E4M3 with both (PTX wgmma: each operand has its own format).
FP8 = (E4M3, "float8_e5m2")


#: Number of elements in a vector core's slice: half of the usual number, because UB needs space for the cast P in
#: addition to P.
SLICE = 4096


#: Rows of such a slice.
ROWS = Field(
    default=None,
    ge=1,
    json_schema_extra={"none": "full", "elements": SLICE},
    description=f"rows of a softmax slice on an AIV; default: as many as give {SLICE} elements, if blocks are full",
)


class Fp8Tiling(Blocks):
    """A block of FP8 attention."""

    block_q: int = Field(
        default=128, ge=16, multiple_of=16, description="query rows of a block", json_schema_extra=on("gpu", 64)
    )
    block_kv: int = Field(
        default=256,
        ge=16,
        multiple_of=16,
        description="keys of a tile",
        json_schema_extra=on(
            "gpu", Field(default=64, ge=32, multiple_of=32, description="keys of a step (one FP8 product: 32)")
        ),
    )


_preset = partial(Fp8Precision, exp_variant=AS_FAMILY)


PRESETS = (
    _preset("hpc_ops_s1"),
    _preset("hpc_ops", scale=P_SCALE),
    _preset("fa3", scale=P_SCALE, fold=True, is_reverse=True, accumulate="chained"),
    _preset("flashinfer", scale=E4M3_MAX, is_reverse=True, accumulate="chained"),
    _preset("trtllm_xqa", scale=E4M3_MAX, accumulate="chained"),
    _preset("sage2", scale=E4M3_MAX),
)


PRECISIONS = MappingProxyType(
    {
        # The 910B cannot chain P V in its accumulator, and row sums are in its vector unit's order.
        "npu": tuple(replace(p, accumulate="fresh", sum_order="", output="float16") for p in PRESETS),
        "gpu": PRESETS,
    }
)


def _is_study(device: DeviceSpec) -> bool:
    """Return whether a device without FP8 products computes the cast of P as a study of its numerics."""
    return registered(device.family).processor == "npu"


def _checked(problem: Problem, p: Fp8Precision, device: DeviceSpec) -> tuple[str, ...]:
    """Return a note on the inputs and the scale; raise `TilingError` for a missing format."""
    check_scale(p.scale)
    notes = []
    if p.scale > E4M3_MAX:
        notes.append(f"saturation: P reaches {p.scale:g}, but E4M3 ends at {E4M3_MAX:g}; larger values saturate")
    if _is_study(device):
        if problem.dtype in FP8 and not multiplies(device, problem.dtype):
            held = f"float16 holds all values of {problem.dtype}"
            raise TilingError(f"dtype: {device.name} has no FP8 matrix unit; {held}")
        return tuple(notes)
    if device.is_timed and not multiplies(device, E4M3):
        raise TilingError(
            f"fp8_attention: {device.name} has neither an FP8 matrix unit nor one for float32 (which would isolate "
            "P's cast); use h200, which has FP8, or flash in float16 on this device"
        )
    if problem.dtype not in (*FP8, "float32"):
        raise TilingError(
            f"fp8_attention on {device.name} needs inputs of 8 bits, not {problem.dtype}; use {' or '.join(FP8)}, "
            "or float32 to isolate the cast of P"
        )
    if problem.dtype not in FP8:
        notes.append("inputs in float32 isolate the cast of P: no FP8 product is computed")
    return tuple(notes)


def phases(problem: Problem, tiling: Any, precision: Fp8Precision, machine: Machine) -> Phases:
    """Return the attention; on Ascend without FP8 products it is a study of P's cast, with a product in the inputs'
    format.

    Products of float32 are plain IEEE sums unless the precision names an arithmetic.
    """
    notes, sizes = _checked(problem, precision, machine.device), (tiling.block_q, tiling.block_kv)
    operand = E4M3 if problem.dtype in FP8 else problem.dtype
    if precision.operand not in (E4M3, operand):
        raise TilingError(
            f"operand: P in {precision.operand}, but the matrix unit reads P together with V in {problem.dtype}; "
            f"use operand={operand} or remove it"
        )
    p = replace(precision, operand=operand)  # the values are the same if the matrix unit has no FP8
    if problem.dtype == "float32" and not p.arithmetic:
        p = replace(p, arithmetic="ieee.f32")
    p_scale = 1.0 if p.fold else p.scale
    kernel, more = scored(fp8, problem, p, problem.score_scale)
    phase = attention_phase(
        kernel,
        problem,
        sizes,
        p,
        mask=mask_of(problem, sizes, machine.mask_kind(tiling)),
        cells=attention_cells(problem, *sizes, is_reverse=p.is_reverse),
        sink=sink_of(problem, p, p.softmax),
        **more,
        unseen=problem.unseen,
        p_scale=p_scale,
        factor=p.scale if p.fold else 1.0,
        unscale=problem.v_scale / p_scale,  # factor of the stored values of V
    )
    return [replace(phase, notes=(*phase.notes, *notes), slice_elements=SLICE)]


def study(problem: Problem, device: DeviceSpec) -> str:
    """Return why no real kernel has the predicted time on an Ascend device; empty if its products are FP8."""
    if not _is_study(device) or problem.dtype in FP8:
        return ""
    why = f"was given {problem.dtype}, not {E4M3}" if multiplies(device, E4M3) else "has no FP8 matrix unit"
    what = (
        f"P is cast to E4M3 and multiplied as {problem.dtype}, with a new cast for each tile; this is a study "
        "of numerics"
    )
    return f"{device.name} {why}: {what}, whose time is not that of a real kernel"


def inputs(device: DeviceSpec) -> Dtype | None:
    """Return the default format of Q, K and V: E4M3 if products are FP8."""
    return "float8_e4m3fn" if multiplies(device, E4M3) else None


SCHEDULES = schedule(
    "fp8_attention",
    phases,
    precisions=PRECISIONS,
    tiling=Fp8Tiling,
    kind="stages",
    usual={"vector_rows": ROWS},
    reads_scales=True,
    takes_lengths=True,
    takes_unseen=True,
    study=study,
    inputs=inputs,
    default_precision="hpc_ops",
    summary="P cast to E4M3 with a scale, forward or reverse key order",
)
