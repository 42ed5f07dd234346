"""PASA's steps on one tile of shifted scores (PASA, Algorithm 1), for any choice of formats.

K' = M K contains the keys minus the fraction beta of their block's mean, so that scores S' need no scale and stay
small.  The row mean of S' measures the shift of a block; all blocks are corrected to its running mean F.

Before the first block there is nothing to correct: F^1 is its own mean (equation 7), and Delta m'_0 is 0 (line 9).  m
starts at minus infinity.  The paper prints 0 instead, with which the first maximum is max(0, rowmax S'). The result is
the same as long as exp(rowmax S') is above 0, which is true down to -745 in float64, but only down to -17 in float16;
rows whose scores are all lower become 0/0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from npusim.kernel import (
    Accumulate,
    AttentionTensors,
    Blocks,
    BySize,
    Field,
    GlobalTensor,
    Mask,
    NamedFormats,
    Phase,
    Phases,
    Problem,
    TilingError,
    Value,
    WorkTile,
    attention_cells,
    attention_phase,
    attention_tensors,
    cast,
    exp,
    full,
    get_format,
    grid,
    kernel,
    mask_of,
    maximum,
    model_validator,
    narrowed,
    on,
    per_tile,
    prepared,
    read_operands,
    schedule,
    tiles,
    where,
    workspace,
)
from npusim.machine import Machine


@dataclass(frozen=True, slots=True)
class PasaPrecision(NamedFormats):
    """Format of every intermediate; ``input`` stands for the format of Q, K and V.

    vector
        Format of S', m, P, l, the rescaling factors and O: float16 in the paper.
    mean
        Format of the row mean of S', of its running mean F, and of the corrections Delta m'.
    shifted
        Format of the entries of M, and of K' as the matrix unit's output path stores it.
    is_fixed_reference
        Correct all blocks to the first block's mean, which is stored as small differences, and not to a running mean
        (reports/pasa_numerics).
    operands, exp_variant, sum_order, rounding, multiply_add, accumulate, arithmetic, scale_rule
        As in `FlashPrecision`; K', and not K, is converted to ``operands``.
    """

    name: str
    shifted: str = "float16"
    scores: str = "float16"
    vector: str = "float16"
    mean: str = "float16"
    operand: str = "float16"
    product: str = "float16"
    output: str = "float16"
    is_fixed_reference: bool = False
    exp_variant: str = "exp.correct"
    sum_order: str = ""
    accumulate: Accumulate = "fresh"
    arithmetic: str = ""
    rounding: str = ""
    multiply_add: str = ""
    operands: str = ""
    scale_rule: str = ""
    intermediates = ("operands", "shifted", "scores", "vector", "mean", "operand", "product", "output")


@dataclass(frozen=True, slots=True)
class ShiftingMatrix:
    """M = (I - (beta / n) J) / alpha with entries rounded to ``fmt``, and the correction that it requires.

    ``alpha`` is 1 if the scale 1/sqrt(d) is applied elsewhere.
    """

    keys: int
    beta: float
    alpha: float
    fmt: str = "float16"

    @property
    def diagonal(self) -> float:
        """Entry on the diagonal, rounded once."""
        return float(cast(np.float64((1 - self.beta / self.keys) / self.alpha), self.fmt))

    @property
    def off_diagonal(self) -> float:
        """Entry off the diagonal, rounded once."""
        return -float(cast(np.float64(self.beta / self.keys / self.alpha), self.fmt))

    @property
    def mean_kept(self) -> float:
        """The fraction of a block's mean that remains, times 1 / alpha: a - bn for the rounded entries.

        a is the diagonal plus b, and b the absolute value of an off-diagonal entry: the actual effect of M on a row
        (reports/pasa_numerics, table 3).  Zero or negative if rounding increases beta to 1 or more.
        """
        b = -self.off_diagonal
        return self.diagonal + b - b * self.keys

    def values(self) -> NDArray[Any]:
        """Return M, (1, 1, keys, keys) in the format's dtype."""
        shape = (1, 1, self.keys, self.keys)
        matrix = np.full(shape, self.off_diagonal, get_format(self.fmt).dtype)
        index = np.arange(self.keys)
        matrix[..., index, index] = self.diagonal
        return matrix

    def correction(self, *, is_ideal: bool) -> float:
        """Return Inva: bn / (a - bn) for the rounded entries, or beta / (1 - beta)."""
        if is_ideal:
            return self.beta / (1 - self.beta)
        return -self.off_diagonal * self.keys / self.mean_kept


def optimal_beta(beta: float, keys: int, fmt: str = "float16", *, rounds: int = 16) -> float:
    """Return the beta next to ``beta`` whose ideal correction equals the correction of the rounded matrix.

    Fixed point of beta = 1 - (a - b n) with the entries of M at alpha = 1 rounded to ``fmt``, in float64 (PASA,
    equations 20 to 22, simplified in reports/pasa_numerics, table 3).  One step finds it, unless its entries round to
    other values; then at most 16 steps are needed.  The result is 1 or more if the rounded entries remove the whole
    mean.
    """
    for _ in range(rounds):
        rounded = 1 - ShiftingMatrix(keys, beta, 1.0, fmt).mean_kept
        if rounded == beta:
            break
        beta = rounded
    return beta


@dataclass(frozen=True, slots=True)
class Shift:
    """How the keys were shifted: beta, the factor that M includes, the correction that undoes the shift, and M's
    format.

    ``alpha`` is 1 if the scale 1/sqrt(d) is applied elsewhere; ``scale`` is then a factor of S'.
    """

    beta: float
    alpha: float
    scale: float | None
    is_ideal: bool
    fmt: str

    def inva(self, keys: int) -> float:
        """Return the factor of the mean that undoes the shift of a block with this number of keys (Inva)."""
        return ShiftingMatrix(keys, self.beta, self.alpha, self.fmt).correction(is_ideal=self.is_ideal)

    def inva_before(self, index: float, keys: int) -> float:
        """Return the factor for the previous blocks: before the first block there is no F, and Delta m'_0 = 0."""
        return self.inva(keys) if index else 0.0


def is_first(index: float) -> float:
    """Return 1 for the first tile, 0 for all others."""
    return float(index == 0)


def shifted_scores(q: Value, kj: Value, p: PasaPrecision, shift: Shift) -> Value:
    """Return S' of a tile."""
    s = (q @ kj.T).to(p.scores).to(p.vector)
    return s if shift.scale is None else s * shift.scale


def tile_weights(s: Value, mask: Value, lowest: float, *, is_hidden: bool) -> tuple[Value, Value]:
    """Return the row maxima of a tile and e^(S' - m); ``is_hidden``: maxima are finite even for rows that see no
    key.
    """
    m_tile = s.max()
    m_seen = maximum(m_tile, lowest, only=mask)
    return (m_seen if is_hidden else m_tile), exp(s - m_seen)


@kernel(q="row head", k="key head", v="key value", mask="row key")
def pasa(
    q: Value, k: Value, v: Value, mask: Value, p: PasaPrecision, shift: Shift, lowest: float, is_hidden: bool
) -> Value:
    """PASA (Algorithm 1): scores shifted by their block's mean, corrected to a running mean F of all blocks.

    The mean is the sum of S' / n: a sum of n scores could exceed float16's range (reports/pasa_numerics).  A row that
    the mask hides completely has P = 0, and its m of minus infinity enters no maximum. If a mask may hide the first
    keys of a row, m starts at a finite number: it is so low that it contributes nothing to the sum, and that no
    correction overflows.
    """
    m, l = full("row", lowest if is_hidden else -math.inf, p.vector), full("row", 0.0, p.vector)
    o, f = full("row value", 0.0, p.vector), full("row", 0.0, p.mean)
    for kj, vj in tiles(k, v):
        s = shifted_scores(q, kj, p, shift)
        mean = (s.to(p.mean) * (1 / kj.size)).sum()
        s = where(mask, s, -math.inf)
        m_tile, e = tile_weights(s, mask, lowest, is_hidden=is_hidden)
        P, l_tile = narrowed(e, p), e.sum()
        f_new = (f * kj.index + mean) / (kj.index + 1)
        d_old = ((f - f_new) * per_tile(shift.inva_before, kj.index, kj.size)).to(p.vector)
        d_tile = ((mean - f_new) * per_tile(shift.inva, kj.size)).to(p.vector)
        candidate = m_tile + d_tile
        m_new = maximum(m + d_old, candidate)
        e_old = exp((m - m_new) + d_old)
        e_tile = exp((m_tile - m_new) + d_tile)
        l = e_old * l + e_tile * l_tile
        m, f = m_new, f_new
        PV = (P @ vj).to(p.product).to(p.vector)
        o = PV * e_tile + o * e_old
    return (o / l).to(p.output)


@kernel(q="row head", k="key head", v="key value", mask="row key")
def pasa_fixed(
    q: Value, k: Value, v: Value, mask: Value, p: PasaPrecision, shift: Shift, lowest: float, is_hidden: bool
) -> Value:
    """PASA corrected to the first block's mean F; later tiles add 0 to F and store small distances from it."""
    m, l = full("row", lowest if is_hidden else -math.inf, p.vector), full("row", 0.0, p.vector)
    o, f = full("row value", 0.0, p.vector), full("row", 0.0, p.mean)
    for kj, vj in tiles(k, v):
        s = shifted_scores(q, kj, p, shift)
        wide = s.to(p.mean)
        f = f + (wide * (1 / kj.size)).sum() * per_tile(is_first, kj.index)
        mean = ((wide - f) * (1 / kj.size)).sum()
        s = where(mask, s, -math.inf)
        m_tile, e = tile_weights(s, mask, lowest, is_hidden=is_hidden)
        P, l_tile = narrowed(e, p), e.sum()
        candidate = (m_tile - f.to(p.vector)) + (mean * per_tile(shift.inva, kj.size)).to(p.vector)
        m_new = maximum(m, candidate)
        e_old = exp(m - m_new)
        e_tile = exp(candidate - m_new)
        l = e_old * l + e_tile * l_tile
        m = m_new
        PV = (P @ vj).to(p.product).to(p.vector)
        o = PV * e_tile + o * e_old
    return (o / l).to(p.output)


@kernel(results="k_shifted", m="key other", k="other head")
def shifted_keys(m: Value, k: Value, fmt: str) -> Value:
    """K' = M K."""
    return (m @ k).to(fmt)


def pasa_attention(
    problem: Problem,
    sizes: tuple[int, int],
    cells: tuple[WorkTile, ...],
    p: PasaPrecision,
    tensors: AttentionTensors,
    mask: Mask | None,
    shift: Shift,
) -> Phase:
    """Return PASA's loop over shifted keys; ``problem`` and ``tensors`` describe the prepared inputs."""
    is_hidden = not problem.seen.is_plain
    return attention_phase(
        pasa_fixed if p.is_fixed_reference else pasa,
        problem,
        sizes,
        p,
        mask=mask,
        cells=cells,
        tensors=tensors,
        shift=shift,
        lowest=-float(get_format(p.vector).max_finite) / (2 if is_hidden else 1),
        is_hidden=is_hidden,
    )


def shift_keys(
    keys: GlobalTensor, shifted: GlobalTensor, matrices: Mapping[int, ShiftingMatrix], block: int, arithmetic: str
) -> Phase:
    """Return K' = M K for each block of keys, where M depends on the block's length; it is stored once in K's
    format.
    """
    cells = tuple(
        replace(c, spans=(("key", c.row, c.rows), ("other", c.row, c.rows))) for c in grid(keys, ("key", block))
    )
    bound = {n: GlobalTensor(f"M{n}", 1, 1, n, n, keys.fmt, "constant") for n in matrices}
    return shifted_keys.phase(
        "shift_keys",
        cells,
        {"key": block, "other": block, "head": keys.cols},
        [shifted],
        m=BySize("key", bound),
        k=keys,
        fmt=shifted.fmt,
        values={f"M{n}": m.values for n, m in matrices.items()},
        arithmetic=arithmetic,
    )


#: The paper's setting: Inva is beta / (1 - beta), and beta the optimum of equations 20 to 22.
PAPER: Mapping[str, Any] = MappingProxyType({"correction": "ideal", "optimise": True})


class PasaOptions(Blocks):
    """Options of PASA; ``block_kv`` is also the block whose mean is subtracted.

    Blocks are smaller on a GPU: the registers of one multiprocessor hold every tile of a block.
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
        default=False,
        description="move beta to the nearest optimum, with M rounded to the inputs' format (equations 20, 21)",
    )
    correction: Literal["rounded", "ideal"] = Field(
        default="rounded", description="Inva from the float16 entries of M, or beta / (1 - beta)"
    )
    scale_in: Literal["matrix", "queries", "scores"] = Field(
        default="matrix",
        description="where 1/sqrt(d) is applied: to M, to Q before the products, or to S' after its store",
    )
    preset: Literal["paper"] | None = Field(
        default=None,
        description=("paper: correction=ideal and optimise=True, as in section 2.2 and the tables of PASA's paper"),
    )

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return {**PAPER, **fields} if fields.get("preset") == "paper" else fields

    @model_validator(mode="after")
    def _agrees_with_preset(self) -> Self:
        for name, value in PAPER.items() if self.preset else ():
            if (named := getattr(self, name)) != value:
                raise ValueError(f"preset=paper means {name}={value}, but {name}={named} is set too")
        return self


ALL_WIDE: Any = dict.fromkeys(PasaPrecision("").formats(), "float64")


PRESETS = (
    PasaPrecision("fp16_mean"),
    PasaPrecision("fp32_mean", mean="float32"),
    PasaPrecision("fixed_reference", is_fixed_reference=True),
    PasaPrecision("mxfp8", operands="mxfp8", operand="mxfp8"),
    # Only for checks of the algorithm: everything is computed in float64.
    replace(PasaPrecision("float64", **ALL_WIDE), arithmetic="ieee.f64"),
)


#: The golden kernel of an H200 adds up a row as a tree of halves (golden/README.md).
PRECISIONS = MappingProxyType({"npu": PRESETS, "gpu": tuple(replace(p, sum_order="tree_halves") for p in PRESETS)})


def _check_rounded(matrices: Iterable[ShiftingMatrix], beta: float) -> None:
    """Raise `TilingError` if the rounded entries of a matrix remove the whole mean, as beta = 1 would."""
    for m in matrices:
        if m.mean_kept <= 0:
            raise TilingError(
                f"beta: {beta} is 1 or more once the entries of M{m.keys} are rounded to {m.fmt} (the correction "
                "is infinite or negative); use a smaller beta"
            )


#: Format to which inputs are cast, "to preserve accuracy" (PASA, section 2.3).
HALF = "float16"


def _checked(problem: Problem, tiling: PasaOptions, precision: PasaPrecision) -> str:
    """Return the format of the products' inputs; raise `TilingError` for formats that PASA cannot compute."""
    if tiling.beta >= 1:
        raise TilingError(f"beta: {tiling.beta} must be below 1 (at 1 the correction is infinite)")
    if problem.dtype not in (HALF, "bfloat16", "float64"):
        raise TilingError(
            f"dtype: pasa reads float16, or bfloat16 which it casts to float16, not {problem.dtype}; "
            "--dtype float16 rounds inputs to it"
        )
    if precision.accumulate == "chained":
        raise TilingError(
            "accumulate=chained: PASA multiplies P V of each tile by a separate factor before it is "
            "added to O; use accumulate=fresh"
        )
    if done := problem.score_changes:
        raise TilingError(
            f"{', '.join(done)}: PASA shifts scores by the mean of their block and does not support "
            f"this; use --ignore {','.join(done)}"
        )
    fmt = HALF if problem.dtype == "bfloat16" else problem.dtype
    if precision.shifted != fmt:
        raise TilingError(
            f"shifted: M and K' in {precision.shifted}, but the matrix unit reads them together with inputs in {fmt}; "
            f"use shifted={fmt}" + (", or inputs in float64" if precision.shifted == "float64" else "")
        )
    return fmt


def phases(problem: Problem, tiling: PasaOptions, precision: PasaPrecision, machine: Machine) -> Phases:
    """Return PASA phase by phase; the loop over key blocks is last.

    Inputs are first cast or scaled if the products need it: the matrix unit reads global memory, so neither is possible
    during the load.
    """
    fmt = _checked(problem, tiling, precision)
    n = min(tiling.block_kv, problem.seq_kv)
    beta = tiling.beta
    if tiling.optimise:
        # Equation 21 rounds to the inputs' format, also to bfloat16, for any format of M.
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
        way = "use scale_in=matrix or scores" if scale else "--dtype float16 rounds inputs to it"
        raise TilingError(f"{what}: {machine.device.name} has no separate kernel that scales or casts; {way}")
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
    # A named factor multiplies the inputs of attention.
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
