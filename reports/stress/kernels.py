"""FlashAttention-2 with a number in place of -inf where the mask hides a key."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from npusim.kernel import FlashPrecision, attention, exp, full, kernel, maximum, tiles, where

if TYPE_CHECKING:
    from npusim.kernels.form.lowering import Kernel

FP32 = FlashPrecision("fp32")


def flash_with(hidden: float) -> Kernel:
    """Return FlashAttention-2 that writes a number where a key is hidden."""

    @kernel(q="row head", k="key head", v="key value", mask="row key")
    def flash(q: Any, k: Any, v: Any, mask: Any, p: FlashPrecision, scale: float) -> Any:
        m, l, o = full("row", -inf, p.softmax), full("row", 0.0, p.running), full("row value", 0.0, p.running)
        for kj, vj in tiles(k, v):
            s = where(mask, (q @ kj.T).to(p.scores) * scale, hidden)
            m_new = maximum(m, s.max())
            alpha = exp(m - m_new)
            e = exp(s - m_new)
            m = m_new
            l = l * alpha + e.sum()
            o = o * alpha + (e.to(p.operand) @ vj).to(p.product)
        return (o / l).to(p.output)

    return flash


SENTINEL = attention("sentinel", flash_with(-100.0), precisions=[FP32])
HIDDEN = attention("hidden", flash_with(-inf), precisions=[FP32])
