"""What PASA needs before its loop over key blocks: shifting matrices, prepared inputs, shifted keys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol

from npusim.algorithms.cells import Deal, attention_cells, dealt
from npusim.algorithms.pasa import Shift, pasa_attention, shift_keys
from npusim.algorithms.precision import for_inputs
from npusim.algorithms.shifting_matrix import ShiftingMatrix, optimal_beta
from npusim.algorithms.tensors import attention_tensors
from npusim.algorithms.unfused import WIDE, converted, element_wise, scaled
from npusim.errors import TilingError
from npusim.schedules.attention import causal_mask

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npusim.algorithms.pasa import PasaPrecision
    from npusim.algorithms.phase import Phase
    from npusim.algorithms.tensors import AttentionTensors
    from npusim.config.problem import Problem
    from npusim.ir.program import Serves
    from npusim.ir.tile import GlobalTensor


class PasaOptions(Protocol):
    """Fields of the tiling that matter here; `npusim.schedules.pasa` describes them."""

    @property
    def block_q(self) -> int:
        """Query rows of a block."""

    @property
    def block_kv(self) -> int:
        """Keys of a block."""

    @property
    def deal(self) -> Deal:
        """Order of the blocks."""

    @property
    def beta(self) -> float:
        """Fraction of a block's mean that is taken from K."""

    @property
    def optimise(self) -> bool:
        """Whether beta moves to the optimum next to it."""

    @property
    def correction(self) -> Literal["rounded", "ideal"]:
        """What Inva is computed from."""

    @property
    def scale_in(self) -> Literal["matrix", "queries", "scores"]:
        """Where 1/sqrt(d) goes."""


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
#: Rows and columns that a kernel which prepares an input takes at a time: as a product's tile is high,
#: and a slice of scores wide.
PREPARED = (128, 8192)


def _checked(problem: Problem, tiling: PasaOptions, precision: PasaPrecision) -> str:
    """Return the format of the products' inputs; raise `TilingError` for what PASA cannot do."""
    if tiling.beta >= 1:
        raise TilingError(
            f"beta: {tiling.beta} leaves no key; it must be below 1 (at 1 the correction is infinite)"
        )
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
    fmt = HALF if problem.dtype == "bfloat16" else problem.dtype
    if precision.shifted != fmt:
        raise TilingError(
            f"shifted: M and K' in {precision.shifted}, but the matrix unit reads them beside inputs in {fmt}; "
            f"use shifted={fmt}"
            + (", or inputs in float64" if precision.shifted == "float64" else "")
        )
    return fmt


def pasa_phases(
    problem: Problem, tiling: PasaOptions, precision: PasaPrecision, group_count: int
) -> tuple[tuple[Phase, ...], tuple[str, ...]]:
    """Return PASA phase by phase, the loop over key blocks last, and notes.

    Inputs are cast or scaled first where the products need it: the matrix unit reads what lies in global
    memory, so that neither can be done on the way to it.
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
    before, inputs = _prepared(attention_tensors(problem, precision.output), fmt, scale)
    shifted = _workspace(inputs.k, "k_shifted", precision.shifted)
    shift = Shift(
        beta, alpha, problem.scale if tiling.scale_in == "scores" else None, is_ideal=tiling.correction == "ideal", fmt=precision.shifted
    )
    sizes = tiling.block_q, tiling.block_kv
    cells = dealt(attention_cells(problem, *sizes, is_trimmed=False), group_count, tiling.deal)
    tensors, mask = replace(inputs, k=shifted), causal_mask(problem, sizes)
    attention = pasa_attention(problem, sizes, cells, for_inputs(precision, fmt), tensors, mask, shift)
    keys = shift_keys(inputs.k, shifted, matrices, tiling.block_kv, precision.arithmetic)
    notes = []
    if tiling.optimise:
        notes.append(
            f"beta: optimise moved it from {tiling.beta} to {beta}, the optimum where M is rounded to "
            f"{problem.dtype}, the inputs' format (equation 21)"
        )
    if problem.dtype == "bfloat16":
        notes.append("inputs in bfloat16 are cast to float16 first, as PASA does; values beyond 65504 overflow")
    return (*before, keys, attention), tuple(notes)


def _prepared(
    given: AttentionTensors, fmt: str, scale: float | None
) -> tuple[list[Phase], AttentionTensors]:
    """Return what is done to the inputs first, and the tensors that the other phases read."""
    phases, changed = [], {}
    serves: tuple[Serves, ...] = ("rows", "kv_head", "kv_head")
    for n, factor, who in zip("qkv", (scale, None, None), serves, strict=True):
        tensor: GlobalTensor = getattr(given, n)
        if tensor.fmt == fmt and factor is None:
            continue
        changed[n] = _workspace(tensor, f"{tensor.name}_prepared", fmt)
        is_cast = tensor.fmt != fmt
        phases.append(
            element_wise(
                f"prepare_{tensor.name}", converted if is_cast else scaled, tensor, changed[n],
                (PREPARED[0], min(tensor.cols, PREPARED[1])), scale=1.0 if factor is None else factor, through=WIDE,
                serves=who,
            )
        )  # fmt: skip
    return phases, replace(given, **changed)


def _workspace(like: GlobalTensor, name: str, fmt: str) -> GlobalTensor:
    return replace(like, name=name, fmt=fmt, role="workspace", is_interleaved=False)
