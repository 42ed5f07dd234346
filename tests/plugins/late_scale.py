"""FlashAttention with another softmax order: the scale joins the exponent, P is summed as it is stored."""

from math import inf

from npusim.kernel import FlashPrecision, attention, exp, full, kernel, maximum, tiles, where

FP32 = FlashPrecision("fp32", *["float32"] * 3, "input", "float32", "float32", "input", sum_order="tree_halves")


@kernel(q="row head", k="key head", v="key value", mask="row key")
def late_scale(q, k, v, mask, p, scale):
    m, l, o = full("row", -inf, p.softmax), full("row", 0.0, p.running), full("row value", 0.0, p.running)
    for kj, vj in tiles(k, v):
        s = where(mask, (q @ kj.T).to(p.scores).to(p.softmax), -inf)
        m_new = maximum(m, s.max())
        alpha = exp(((m - m_new) * scale).to(p.exponential)).to(p.running)
        m = m_new
        e = exp(((s - m_new) * scale).to(p.exponential))
        l = l * alpha + e.sum().to(p.running)
        o = o * alpha + (e.to(p.operand) @ vj).to(p.product).to(p.running)
    return (o / l).to(p.output)


LATE_SCALE = attention("late_scale", late_scale, precisions=[FP32], summary="softmax of unscaled scores")
