"""PASA: online pseudo-average shifting attention, all in float16 (PASA, Algorithm 1).

Phase one multiplies every block of keys by the shifting matrix M; phase two is FlashAttention's
loop over the shifted keys, with steps that undo the shift exactly.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

from npusim.algorithms.blocks import attention_cells, attention_tensors
from npusim.algorithms.pasa import PasaPrecision, Shift, ShiftingMatrix, optimal_beta, pasa_attention, shift_keys
from npusim.algorithms.tiling_mask import mask_of
from npusim.algorithms.unfused import prepared, workspace
from npusim.config.tiling import Blocks, Field, model_validator, on
from npusim.errors import TilingError
from npusim.schedules.define import read_operands, schedule

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from npusim.config.problem import Problem
    from npusim.schedules.define import Phases


#: The paper's setting: Inva is beta / (1 - beta), and beta the optimum of equations 20 to 22.
PAPER: Mapping[str, Any] = MappingProxyType({"correction": "ideal", "optimise": True})


class PasaOptions(Blocks):
    """Options of PASA; ``block_kv`` is also the block whose mean is shifted away.

    Blocks are smaller on a GPU: every tile of a block is in one multiprocessor's registers.
    """

    block_q: int = Field(
        default=128, ge=16, multiple_of=16, description="query rows of a block", json_schema_extra=on("gpu", 64)
    )
    block_kv: int = Field(
        default=256,
        ge=16,
        le=256,
        multiple_of=16,
        description="keys of a block; PASA 2.1: 256 at most",
        json_schema_extra=on("gpu", 128),
    )
    # PASA Table 3: the optimum next to 0.984375 for blocks of 128.
    beta: float = Field(
        default=0.984497, ge=0, description="fraction of the block's mean that is subtracted from K; not 1"
    )
    optimise: bool = Field(
        default=False, description="move beta to the optimum next to it, M rounded as the inputs are (equations 20, 21)"
    )
    correction: Literal["rounded", "ideal"] = Field(
        default="rounded", description="Inva from the float16 entries of M, or beta / (1 - beta)"
    )
    scale_in: Literal["matrix", "queries", "scores"] = Field(
        default="matrix",
        description="where 1/sqrt(d) goes: into M, onto Q before the products, or onto S' after its store",
    )
    preset: Literal["paper"] | None = Field(
        default=None, description="paper: correction=ideal and optimise=True, as PASA's section 2.2 and tables have it"
    )

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return {**PAPER, **fields} if fields.get("preset") == "paper" else fields

    @model_validator(mode="after")
    def _agrees_with_preset(self) -> Self:
        for name, value in PAPER.items() if self.preset else ():
            if (named := getattr(self, name)) != value:
                raise ValueError(f"preset=paper means {name}={value}, but {name}={named} is given too")
        return self


ALL_WIDE: Any = dict.fromkeys(PasaPrecision("").formats(), "float64")
PRESETS = (
    PasaPrecision("fp16_mean"),
    PasaPrecision("fp32_mean", mean="float32"),
    PasaPrecision("fixed_reference", is_fixed_reference=True),
    PasaPrecision("mxfp8", operands="mxfp8", operand="mxfp8"),
    # For checking the algorithm only: nothing is rounded but by float64.
    replace(PasaPrecision("float64", **ALL_WIDE), arithmetic="ieee.f64"),
)
#: The golden kernel of an H200 adds up a row as a tree of halves (golden/README.md).
PRECISIONS = MappingProxyType({"npu": PRESETS, "gpu": tuple(replace(p, sum_order="tree_halves") for p in PRESETS)})


def _check_rounded(matrices: Iterable[ShiftingMatrix], beta: float) -> None:
    """Raise `TilingError` where the rounded entries of a matrix take the whole mean, as beta = 1 would."""
    for m in matrices:
        if m.mean_kept <= 0:
            raise TilingError(
                f"beta: {beta} is 1 or more once the entries of M{m.keys} are rounded to {m.fmt} (the correction "
                "is infinite or negative); use a smaller beta"
            )


#: What inputs are cast to, "to preserve accuracy" (PASA, section 2.3).
HALF = "float16"


def _checked(problem: Problem, tiling: PasaOptions, precision: PasaPrecision) -> str:
    """Return the format of the products' inputs; raise `TilingError` for formats that PASA cannot compute."""
    if tiling.beta >= 1:
        raise TilingError(f"beta: {tiling.beta} leaves no key; it must be below 1 (at 1 the correction is infinite)")
    if problem.dtype not in (HALF, "bfloat16", "float64"):
        raise TilingError(
            f"dtype: pasa reads float16, or bfloat16 which it casts to float16, not {problem.dtype}; "
            "--dtype float16 rounds inputs to it"
        )
    if precision.accumulate == "chained":
        raise TilingError(
            "accumulate=chained: PASA multiplies P V of each tile by a factor of its own before it is "
            "added to O; use accumulate=fresh"
        )
    if done := problem.score_changes:
        raise TilingError(f"{', '.join(done)}: PASA shifts scores by their block's mean; --ignore {','.join(done)}")
    fmt = HALF if problem.dtype == "bfloat16" else problem.dtype
    if precision.shifted != fmt:
        raise TilingError(
            f"shifted: M and K' in {precision.shifted}, but the matrix unit reads them together with inputs in {fmt}; "
            f"use shifted={fmt}" + (", or inputs in float64" if precision.shifted == "float64" else "")
        )
    return fmt


def phases(problem: Problem, tiling: PasaOptions, precision: PasaPrecision, machine: Any) -> Phases:
    """Return PASA phase by phase, the loop over key blocks last.

    Inputs are cast or scaled first where the products need it: the matrix unit reads global memory, so that neither is
    possible on the way to it.
    """
    fmt = _checked(problem, tiling, precision)
    n = min(tiling.block_kv, problem.seq_kv)
    beta = tiling.beta
    if tiling.optimise:
        # Equation 21 rounds to the inputs' format, bfloat16 too, whatever M is kept in.
        _check_rounded((ShiftingMatrix(n, beta, 1.0, problem.dtype),), beta)
        beta = optimal_beta(beta, n, problem.dtype)
    alpha = 1 / problem.scale if tiling.scale_in == "matrix" else 1.0
    matrices = {
        length: ShiftingMatrix(length, beta, alpha, precision.shifted)
        for length in sorted({n, problem.seq_kv % n or n})
    }
    _check_rounded(matrices.values(), tiling.beta)
    scale = problem.scale if tiling.scale_in == "queries" else None
    before, inputs = prepared(attention_tensors(problem, precision.output), fmt, scale)
    if before and not machine.has_rows_kernels:
        what = "scale_in=queries" if scale else f"dtype: {problem.dtype}"
        way = "take scale_in=matrix or scores" if scale else "--dtype float16 rounds inputs to it"
        raise TilingError(f"{what}: {machine.device.name} has no kernel that only scales or casts; {way}")
    shifted = workspace(inputs.k, "k_shifted", precision.shifted)
    shift = Shift(
        beta,
        alpha,
        problem.scale if tiling.scale_in == "scores" else None,
        is_ideal=tiling.correction == "ideal",
        fmt=precision.shifted,
    )
    sizes = tiling.block_q, tiling.block_kv
    blocks = attention_cells(problem, *sizes, is_trimmed=False)
    read, able = replace(inputs, k=shifted), machine.has_rows_kernels
    quantised, tensors = read_operands(read, precision, machine.device, prepares=able)
    mask = mask_of(problem, sizes, machine.mask_kind(tiling))
    attention = pasa_attention(problem, sizes, blocks, precision, tensors, mask, shift)
    # One that is named multiplies what attention reads.
    arithmetic = "" if precision.operands else precision.arithmetic
    keys = shift_keys(inputs.k, shifted, matrices, tiling.block_kv, arithmetic)
    notes = []
    if tiling.optimise:
        notes.append(
            f"beta: optimise moved it from {tiling.beta} to {beta}, the optimum where M is rounded to "
            f"{problem.dtype}, the inputs' format (equation 21)"
        )
    if problem.dtype == "bfloat16":
        notes.append("inputs in bfloat16 are cast to float16 first, as PASA does; values beyond 65504 overflow")
    return [*before, keys, *quantised, replace(attention, notes=(*attention.notes, *notes))]


SCHEDULES = schedule(
    "pasa",
    phases,
    precisions=PRECISIONS,
    tiling=PasaOptions,
    kind="stages",
    beside=tuple(p.name for p in PRESETS if p.name != "float64" and not p.operands),
    summary="PASA: keys shifted by their block's pseudo-average, all float16",
)
