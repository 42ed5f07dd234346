"""FlashAttention-4: sums are rescaled when a maximum grows by 2^8, and polynomials compute powers of two."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from npusim.kernel import (
    ATTENTION_PRECISIONS,
    FlashPrecision,
    Hook,
    TilingError,
    Unseen,
    Value,
    attention,
    check_scale,
    compare,
    divisor,
    exp,
    exponent_factor,
    fma,
    full,
    get_format,
    hidden,
    kernel,
    maximum,
    narrowed,
    stored_format,
    tiles,
    unchanged,
    where,
)

#: Powers of two by which a row's maximum grows before sums are rescaled, for 16-bit inputs (FlashAttention-4).
FA4_GROWTH = 8.0


@dataclass(frozen=True, slots=True)
class Fa4Precision(FlashPrecision):
    """FlashAttention's formats, and the fractions, 0 to 1, of FlashAttention-4's steps that the predicted time
    includes; bits do not depend on them.

    rescaled
        Fraction of tiles in which O is rescaled: a run states the fraction of its sample in which a maximum changed.
    polynomial
        Fraction of the weights' powers of two that the polynomial computes; special-function units compute the rest.
    growth
        Growth of a row's maximum, in powers of two, from which the reference is set to the new maximum; 0: always; -1:
        FlashAttention-4's rule, `FA4_GROWTH` for 16-bit inputs and 0 for 8-bit inputs.
    """

    rescaled: float = 1.0
    polynomial: float = 1.0
    growth: float = -1.0


@kernel(finite_starts=True, q="row head", k="key head", v="key value", mask="row key")
def fa4(
    q: Value,
    k: Value,
    v: Value,
    mask: Value,
    p: Fa4Precision,
    scale: float,
    score: Hook = unchanged,
    before: float = 1.0,
    unseen: Unseen | None = None,
) -> Value:
    """FlashAttention-4: the reference is set to a new maximum only if the maximum has grown by more than ``growth``, so
    that P is at most 2^growth.

    For 8-bit inputs the reference is always the maximum, unless a growth is named, because P begins at 2^8
    (flash_fwd_sm100.py, "Low Precision Scaling"); a P of 8 bits saturates, as the conversion instruction does. Scores
    stay unscaled: the scale is in the multiply-add before the exponential (flash_attn/cute/softmax.py).  If the kernel
    changes scores, they are scaled ``before``, and only log2 e remains (compute_softmax_scale_log2).
    """
    check_scale(p.p_scale)
    more = math.log(p.p_scale) * exponent_factor(p.exp_variant)
    growth = p.growth if p.growth >= 0 else 0.0 if stored_format(q.fmt).bits <= 8 else FA4_GROWTH
    if p.polynomial != 1 and not p.exp_variant.startswith("exp2.fa4"):
        raise TilingError(
            f"polynomial: {p.exp_variant} is not a polynomial, all exponentials are special functions; remove it"
        )
    start = -float(get_format(p.softmax).max_finite) if unseen else -math.inf
    m, l = full("row", start, p.softmax), full("row", 0.0, p.running)
    o = full("row value", 0.0, p.product)
    for kj, vj in tiles(k, v):
        s = (q @ kj.T).to(p.scores).to(p.softmax)
        s = where(mask, score(s if before == 1 else s * before), hidden(unseen, p.softmax))
        m_tile = maximum(m, s.max())
        m_new = m_tile if growth == 0 else where(compare((m - m_tile) * -scale, growth, "ogt"), m_tile, m)
        alpha = exp((m - m_new) * scale)
        against = fma(m_new, -scale, more) if more else m_new * -scale
        e = exp(fma(s, scale, against), p.exp_variant).in_share(p.polynomial)
        m = m_new
        l = l * alpha + e.sum()
        o = (o * alpha).in_share(p.rescaled) + narrowed(e, p) @ vj
    return (o / divisor(l, unseen)).to(p.output)


#: FlashAttention-4's choices for 16-bit inputs, except the order of row sums. In its kernel the polynomial computes
#: some elements; here it computes all.  The time includes every polynomial and every rescaling, unless the precision
#: states fractions of them.
FA4 = attention(
    "fa4",
    fa4,
    families=["nvidia"],
    precisions=[
        Fa4Precision(**asdict(ATTENTION_PRECISIONS["gpu"][0]) | {"name": "fa4", "exp_variant": "exp2.fa4_degree3"})
    ],
    hw="h200",
    summary="FlashAttention-4: rescaled where the maximum grows by 2^8, powers of two by a polynomial",
)
