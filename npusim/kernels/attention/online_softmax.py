"""FlashAttention-2 on one tile (Dao 2023, Algorithm 1), with any formats of its intermediates, and with P in E4M3
(P-Cast).

``fresh``: P V of each tile starts at 0, is stored and added to O.  ``chained``: the matrix unit accumulates
onto O itself, which is rescaled first; O then has the format in which products are stored.

In FP8, P S is cast to E4M3 (saturating, as the conversion instructions do) and the row sum is computed before the cast.
With ``fold``, S is in the exponent instead: e^(s - m + ln S); the row sum then contains S, and S cancels in the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from npusim.errors import TilingError
from npusim.formats import BLOCK_FORMATS, get_format, stored_format
from npusim.kernels.attention.call_blocks import AttentionTensors, attention_cells, attention_tensors
from npusim.kernels.attention.kv_cache import cached_operands, reading_cache
from npusim.kernels.attention.score_functions import exponent_factor
from npusim.kernels.attention.tiling_mask import mask_of
from npusim.kernels.form.language import Value, exp, fma, full, maximum, tiles, where
from npusim.kernels.form.lowering import Kernel, kernel
from npusim.late_methods import dataclass

if TYPE_CHECKING:
    from npusim.config.problem import Problem, Unseen
    from npusim.kernels.form.phase import Mask, Phase, WorkTile

#: Where P V is accumulated: from 0 for each tile, or onto the running output.
Accumulate = Literal["fresh", "chained"]


#: Where a learned score that belongs to no key is added to the row sum: softmax either begins with it (m = s, l = 1:
#: vLLM's Triton kernels, Hugging Face's column), or adds it after the last tile (FlashAttention-4, FlashMLA).
Sink = Literal["start", "end"]


#: Operand that is multiplied by the factor of scores: the scores, or Q before the product.
ScaleIn = Literal["scores", "queries"]


E4M3 = "float8_e4m3fn"


#: 2^8, by which FlashAttention-3 and -4 and hpc-ops multiply a P of 8 bits (P-Cast, Table 3).
P_SCALE = 256.0


#: P Scale -> P-Cast's "saturation": the largest finite E4M3 value (reports/pcast_numerics, thresholds).
E4M3_MAX = 448.0


#: Beyond this exponent a scale or its inverse is not a normal float32 number (IEEE 754: exponents -126 to 127).
MAX_SCALE = 2.0**126


#: Finite numbers that replace hidden scores, in float16 and in wider formats: far below scores, and above the lowest
#: number, at which a maximum starts.
HIDDEN_EXPONENT = 14, 100


class NamedFormats:
    """Formats of a schedule's intermediates: the attributes that ``intermediates`` lists."""

    __slots__ = ()
    intermediates: ClassVar[tuple[str, ...]]

    def formats(self) -> dict[str, str]:
        """Return ``{intermediate: format}`` for reports, for those intermediates that have their own format."""
        return {n: fmt for n in self.intermediates if (fmt := getattr(self, n))}


@dataclass(frozen=True, slots=True)
class FlashPrecision(NamedFormats):
    """Format of every intermediate, and the named choices of the vector unit.

    ``input`` stands for the format of Q, K and V.

    operands
        Format in which products read Q, K and V, if an earlier kernel converts them.
    values
        Format of V, if the second product reads it in a format other than ``operands``; ``operand`` is the format of P.
    scores
        Format in which the matrix unit's output path stores S.
    softmax
        Format of S on the vector unit, of the row maximum m, and of S - m.
    exponential
        Format of P before its cast, and of the rescaling factor.
    operand
        Format in which the second product reads P.
    running
        Format of the row sum l and of the output O.
    product
        Format in which the matrix unit's output path stores P V.
    output
        Format of the result.
    exp_variant, div_variant, sum_order, rounding, multiply_add, accumulate, arithmetic
        Named choices: the exponential, the division by the row sum (empty: rounded once), the order of the row sum, the
        rounding of casts, the number of roundings of a multiplication followed only by an addition, the place where P V
        accumulates, and the matrix arithmetic (empty: the device's).  An exponential that computes powers of two reads
        scores times log2 e.
    exponent
        Rounding of s c - m c before the exponential: ``once``, by a multiply-add, or ``twice``, for product and
        difference, both with maxima of unscaled scores; or ``scaled``, with maxima of scores times c.  Empty: as in the
        kernel that the tiling names (FlashAttention-2 and -3: once); if it names none, ``scaled``.
    scale_rule, p_rule
        Rule for the scales of operands in block formats, and of P; empty: the format's rule for operands, and the
        operands' rule for P.
    smooth
        Operands whose column means over all rows are subtracted first: ``k``, which does not change the softmax.
    p_scale
        Factor of P before its cast, applied within the exponent: the row sum has the same factor.
    scale_in
        Where the problem's factor is applied: ``scores``: after the product; ``queries``: an earlier kernel multiplies
        Q by the factor, where Q, the factor and the product have the inputs' format.
    sink
        Where the sink, a learned score that belongs to no key, is added to the row sum, either in one block or in the
        merge of splits.
    kernel
        Published kernel that has these formats on Ascend and runs if the tiling names none; empty: CANN's.
    """

    name: str
    scores: str = "float32"
    softmax: str = "float32"
    exponential: str = "float32"
    operand: str = "input"
    running: str = "float32"
    product: str = "float32"
    output: str = "input"
    exp_variant: str = "exp.correct"
    sum_order: str = ""
    accumulate: Accumulate = "fresh"
    arithmetic: str = ""
    kernel: str = ""
    sink: Sink = "end"
    rounding: str = ""
    multiply_add: str = ""
    exponent: str = ""
    operands: str = ""
    scale_rule: str = ""
    p_rule: str = ""
    smooth: str = ""
    p_scale: float = 1.0
    values: str = ""
    scale_in: ScaleIn = "scores"
    div_variant: str = ""
    intermediates: ClassVar[tuple[str, ...]] = (
        "operands",
        "values",
        "scores",
        "softmax",
        "exponential",
        "operand",
        "running",
        "product",
        "output",
    )


@dataclass(frozen=True, slots=True)
class Fp8Precision(NamedFormats):
    """Formats and choices of FP8 attention; everything on the vector side is float32.

    scale
        S, by which P is multiplied before its cast (1 for none).
    fold
        Whether S is part of the exponent instead of a separate product.
    is_reverse
        Visit the keys from last to first.
    operand
        Format in which the second product reads the cast P: E4M3, or a wider format if the matrix unit has no FP8 (the
        values are the same).
    """

    name: str
    scale: float = 1.0
    fold: bool = False
    is_reverse: bool = False
    operand: str = E4M3
    output: str = "float32"
    exp_variant: str = "exp.correct"
    sum_order: str = "sequential"
    accumulate: Accumulate = "fresh"
    arithmetic: str = ""
    sink: Sink = "end"
    rounding: str = ""
    multiply_add: str = ""
    div_variant: str = ""
    exponent = "scaled"
    scores = softmax = exponential = running = product = "float32"
    cast = E4M3
    intermediates = ("scores", "softmax", "exponential", "cast", "operand", "running", "product", "output")


#: Functions that a schedule passes to a kernel: a transformation of scores, or the rounding of P.
Hook = Callable[[Value], Value]


def unchanged(s: Value) -> Value:
    """Return the scores unchanged: the hook of an attention that does not transform them further."""
    return s


def hidden(unseen: Unseen | None, fmt: str) -> float:
    """Return the value of hidden scores: -Inf, or a finite number if rows without keys have the mean of V as their
    result.

    The finite number is a power of two, so that its product with any factor is exact, and its difference to an equal
    maximum is 0.
    """
    return -(2.0 ** HIDDEN_EXPONENT[fmt != "float16"]) if unseen == "mean" else -math.inf


def divisor(l: Value, unseen: Unseen | None) -> Value:
    """Return the row sum by which O is divided. If the sum is 0 and the quotient must be 0, the result is a number
    other than 0.
    """
    return maximum(l, float(get_format(l.fmt).min_normal)) if unseen == "zero" else l


def check_scale(factor: float) -> None:
    """Raise `TilingError` for a factor of P that float32 cannot represent."""
    if not 1 / MAX_SCALE <= factor <= MAX_SCALE:
        raise TilingError(f"scale: {factor} of P must be positive and finite, 2^-126 to 2^126")


def below(m: Value, factor: float, p: FlashPrecision | Fp8Precision, unit: float = 1.0) -> Value:
    """Return the number that is subtracted from scores whose exponentials have a factor: the maximum minus the factor's
    logarithm.

    ``unit``: the unit of the scores, as in `attend`.  Raises `TilingError` as `check_scale` does.
    """
    check_scale(factor)
    less = math.log(factor) * exponent_factor(p.exp_variant)
    if unit == 1:
        return m if factor == 1 else m - less
    return in_unit(m, p, unit) if factor == 1 else in_unit(m, p, unit, less)


def in_unit(s: Value, p: FlashPrecision | Fp8Precision, unit: float, less: Value | float | None = None) -> Value:
    """Return scores times their ``unit``, minus a number: rounded once or twice, depending on the
    precision's exponent.
    """
    if less is not None and p.exponent == "once":
        return fma(s, unit, less, "minus")
    return s * unit if less is None else s * unit - less


def online_softmax(
    s: Value, m: Value, l: Value, p: FlashPrecision | Fp8Precision, narrow: Hook, factor: float = 1.0, unit: float = 1.0
) -> tuple[Value, Value, Value, Value]:
    """Return the new row maximum and row sum, the factor that rescales earlier sums, and P in the form that the product
    reads.

    ``narrow(e)`` rounds P for the product, after the row sum is computed; P and the row sum both include the
    ``factor``. With a ``unit`` other than 1, scores are multiplied by ``unit`` right before the exponential.
    """
    m_new = maximum(m, s.max())
    # Scaled scores get no new name: the address of a name decides bank conflicts.
    alpha = exp(((m - m_new) if unit == 1 else in_unit(m - m_new, p, unit)).to(p.exponential)).to(p.running)
    m = m_new
    against = below(m_new, factor, p, unit)
    e = exp((s - against if unit == 1 else in_unit(s, p, unit, against)).to(p.exponential))
    l_tile, P = e.sum(), narrow(e)
    return m, l * alpha + l_tile.to(p.running), alpha, P


def narrow_overflow(fmt: str) -> str:
    """Return the overflow of a cast: formats of 8 bits saturate, as the conversion instructions do (PTX cvt)."""
    return "saturate" if stored_format(fmt).bits <= 8 else ""


def narrowed(e: Value, p: Any) -> Value:
    """Return P in the format that the second product reads; in a block format, blocks run along the keys."""
    rule = getattr(p, "p_rule", "") or getattr(p, "scale_rule", "")
    return e.to(p.operand, overflow=narrow_overflow(p.operand), rule=rule if p.operand in BLOCK_FORMATS else "")


def attend(
    q: Value,
    k: Value,
    v: Value,
    mask: Value,
    p: FlashPrecision | Fp8Precision,
    scale: float,
    score: Hook,
    narrow: Hook | None = None,
    factor: float = 1.0,
    starts: tuple[float, float] = (-math.inf, 0.0),
    sink: Value | None = None,
    unit: float = 1.0,
    unseen: Unseen | None = None,
) -> tuple[Value, Value, Value]:
    """Return O before the division, the row maxima and the row sums (Dao 2023, Algorithm 1).

    Scores times ``scale``, and thus the row maxima, are in units of ``unit``, a factor that is applied right before the
    exponential.  O and the sums have the ``factor`` of P.  A ``sink`` counts as a score before the first tile: the
    maximum of the first tile includes it, and the initial sum, ``factor``, is rescaled from the sink to this maximum.
    ``unseen``: the result of a row whose scores are all hidden (`hidden`).
    """
    is_chained = p.accumulate == "chained"
    # Kernels scale and cast P in FP8 right before its product; a product that accumulates onto O waits until O is
    # rescaled.
    rounds, is_late = narrow or (lambda e: narrowed(e, p)), is_chained and narrow is not None
    first = sink if p.sink == "start" else None
    if first is not None and unit != 1:
        raise TilingError("sink: start needs scores that are scaled first: use exponent=scaled, or sink=end")
    if unseen:  # a row that sees no key has only this maximum
        starts = -float(get_format(p.softmax).max_finite), starts[1]
    # the lowest number times the unit is -Inf, relative to which a hidden score gives NaN
    if unit > 1 and mask is not None:
        starts = -float(get_format(p.softmax).max_finite) / (4 * unit), starts[1]
    m, l = full("row", starts[0], p.softmax), full("row", starts[1] if first is None else factor, p.running)
    o = full("row value", 0.0, p.product if is_chained else p.running)
    for kj, vj in tiles(k, v):
        s = (q @ kj.T).to(p.scores).to(p.softmax)
        s = where(mask, score(s if scale == 1 != unit else s * scale), hidden(unseen, p.softmax))
        m = m if first is None else maximum(m, first)
        m, l, alpha, P = online_softmax(s, m, l, p, unchanged if is_late else rounds, factor, unit)
        if is_late:
            o = o * alpha.to(o.fmt)
            o = o + rounds(P) @ vj
        else:
            PV = P @ vj if is_chained else (P @ vj).to(p.product)
            o = o * alpha.to(o.fmt) + (PV if is_chained else PV.to(p.running))
    return o, m, l


def with_sink(
    l: Value, m: Value, sink: Value | None, p: FlashPrecision | Fp8Precision, factor: float, unit: float = 1.0
) -> Value:
    """Return the row sum plus the additional score (a sink), unless the sum began with this score.

    The row sum has the factor of P.
    """
    if sink is None or p.sink == "start":
        return l
    return l + exp((sink - below(m, factor, p, unit)).to(p.exponential)).to(p.running)


@kernel(finite_starts=True, q="row head", k="key head", v="key value", mask="row key", sink="row")
def flash(
    q: Value,
    k: Value,
    v: Value,
    mask: Value,
    p: FlashPrecision,
    scale: float,
    score: Hook = unchanged,
    sink: Value | None = None,
    unit: float = 1.0,
    unseen: Unseen | None = None,
) -> Value:
    """FlashAttention-2."""
    o, m, l = attend(q, k, v, mask, p, scale, score, factor=p.p_scale, sink=sink, unit=unit, unseen=unseen)
    return (o.to(p.running) / divisor(with_sink(l, m, sink, p, p.p_scale, unit), unseen)).to(p.output)


def attention_phase(
    kernel: Kernel,
    problem: Problem,
    sizes: tuple[int, int],
    p: Any,
    *,
    mask: Mask | Literal["problem"] | None = "problem",
    cells: tuple[WorkTile, ...] = (),
    tensors: AttentionTensors | None = None,
    **more: Any,
) -> Phase:
    """Return the phase of a kernel of q, k, v and mask with blocks of ``sizes`` = (rows, keys); ``more`` has the
    kernel's other arguments.

    By default it has the problem's mask, visits its visible tiles in all blocks, and binds the call's tensors.
    """
    if mask == "problem":
        mask = mask_of(problem, sizes)  # misfits are reported before blocks are created
    cells = cells or attention_cells(problem, *sizes)
    tensors = tensors or attention_tensors(problem, p.output)
    spans = {"row": sizes[0], "key": sizes[1], "head": problem.head_dim, "value": problem.value_head_dim}
    operands = cached_operands(problem, {"q": tensors.q, "k": tensors.k, "v": tensors.v})
    kernel = reading_cache(kernel, operands)
    return kernel.phase("attention", cells, spans, [tensors.o], mask=mask, p=p, **operands, **more)
