"""What PASA needs before its loop over key blocks: shifting matrices, prepared inputs, shifted keys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol

from npusim.errors import TilingError
from npusim.ir.tile import GlobalTensor
from npusim.schedules.attention_tensors import attention_tensors
from npusim.schedules.prepare_inputs import Preparation
from npusim.schedules.shift_keys import ShiftedKeys
from npusim.schedules.steps.attention import for_inputs
from npusim.schedules.steps.pasa import ShiftingMatrix, optimal_beta, pasa_steps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npusim.ir.program import Phase, Serves, TileProgram
    from npusim.schedules.attention_program import Group
    from npusim.schedules.attention_tensors import AttentionTensors
    from npusim.schedules.steps.attention import AttentionSteps
    from npusim.schedules.steps.pasa import PasaPrecision
    from npusim.spec.problem import Problem


class PasaOptions(Protocol):
    """Fields of the tiling that matter here; `npusim.schedules.pasa` describes them."""

    @property
    def block_kv(self) -> int:
        """Keys of a block."""

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


class PasaPhases:
    """Steps, prepared inputs and shifted keys of one problem, for either mapping."""

    def __init__(self, problem: Problem, tiling: PasaOptions, precision: PasaPrecision) -> None:
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
        self.problem, self.tiling = problem, tiling
        n = min(tiling.block_kv, problem.seq_kv)
        beta = tiling.beta
        if tiling.optimise:
            # Equation 21 rounds to the inputs' format, bfloat16 too, whatever M is kept in.
            _check_rounded((ShiftingMatrix(n, beta, 1.0, problem.dtype),), beta)
            beta = optimal_beta(beta, n, problem.dtype)
        alpha = 1 / problem.scale if tiling.scale_in == "matrix" else 1.0
        fmt = HALF if problem.dtype == "bfloat16" else problem.dtype
        if precision.shifted != fmt:
            raise TilingError(
                f"shifted: M and K' in {precision.shifted}, but the matrix unit reads them beside inputs in {fmt}; "
                f"use shifted={fmt}"
                + (", or inputs in float64" if precision.shifted == "float64" else "")
            )
        self.steps: AttentionSteps = pasa_steps(
            for_inputs(precision, fmt), beta, alpha_in_matrix=alpha,
            scale=problem.scale if tiling.scale_in == "scores" else None,
            is_ideal=tiling.correction == "ideal",
        )  # fmt: skip
        lengths = {n, problem.seq_kv % n or n}
        matrices = {
            length: ShiftingMatrix(length, beta, alpha, precision.shifted)
            for length in sorted(lengths)
        }
        _check_rounded(matrices.values(), tiling.beta)
        moved = (
            f"beta: optimise moved it from {tiling.beta} to {beta}, the optimum where M is rounded to "
            f"{problem.dtype}, the inputs' format (equation 21)"
        )
        self.notes = (moved,) if tiling.optimise else ()
        self.constants = {f"M{length}": m.values for length, m in matrices.items()}
        self.prepared, inputs = self._prepare(fmt, precision.output)
        shifted = replace(
            inputs.k,
            name="k_shifted",
            fmt=precision.shifted,
            role="workspace",
            is_interleaved=False,
        )
        self.tensors = replace(inputs, k=shifted)
        self.keys = ShiftedKeys(
            inputs.k, shifted,
            {n: GlobalTensor(f"M{n}", 1, 1, n, n, fmt, "constant") for n in matrices},
        )  # fmt: skip

    def _prepare(self, fmt: str, output: str) -> tuple[tuple[Preparation, ...], AttentionTensors]:
        """Return what is done to the inputs first, and the tensors that the other phases read."""
        given = attention_tensors(self.problem, output)
        scale = self.problem.scale if self.tiling.scale_in == "queries" else None
        found = []
        serves: tuple[Serves, ...] = ("rows", "kv_head", "kv_head")
        for tensor, factor, who in zip(
            (given.q, given.k, given.v), (scale, None, None), serves, strict=True
        ):
            if tensor.fmt != fmt or factor is not None:
                out = replace(
                    tensor,
                    name=f"{tensor.name}_prepared",
                    fmt=fmt,
                    role="workspace",
                    is_interleaved=False,
                )
                found.append(Preparation(tensor, out, factor, who))
        changed = {p.source.name: p.out for p in found}
        return tuple(found), replace(given, **changed)

    def before(self, group: Group) -> tuple[Phase, ...]:
        """Return the phases that prepare inputs and shift the keys."""
        prepare = [p.phase(group) for p in self.prepared]
        group.allocator.start_phase()
        shift = self.keys.phase(self.problem, self.tiling.block_kv, group, self.steps.arithmetic)
        return (*prepare, shift)

    def complete(self, program: TileProgram) -> TileProgram:
        """Return the program with M and prepared inputs among its tensors."""
        own = (*self.keys.matrices.values(), *(p.out for p in self.prepared))
        tensors = {**program.tensors, **{t.name: t for t in own}}
        notes = program.notes + self.notes
        if self.problem.dtype == "bfloat16":
            notes += (
                "inputs in bfloat16 are cast to float16 first, as PASA does; values beyond 65504 overflow",
            )
        return replace(
            program, tensors=tensors, constants={**program.constants, **self.constants}, notes=notes
        )
