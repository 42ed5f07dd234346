"""FlashAttention-2 whose maximum starts at -Inf: as it is written, and with the choice of a finite start."""

from __future__ import annotations

from math import inf
from typing import Any

from npusim.kernel import FlashPrecision, attention, exp, full, kernel, maximum, tiles, where


def plain(q: Any, k: Any, v: Any, mask: Any, p: Any, scale: float) -> Any:
    """Attention, tile by tile."""
    m, l, o = full("row", -inf, p.softmax), full("row", 0.0, p.running), full("row value", 0.0, p.running)
    for kj, vj in tiles(k, v):
        s = where(mask, (q @ kj.T).to(p.scores) * scale, -inf)
        m_new = maximum(m, s.max())
        alpha = exp(m - m_new)
        m = m_new
        e = exp(s - m)
        l = l * alpha + e.sum()
        o = o * alpha + (e.to(p.operand) @ vj).to(p.product)
    return (o / l).to(p.output)


AXES = {"q": "row head", "k": "key head", "v": "key value", "mask": "row key"}
PRECISIONS = [FlashPrecision("starts")]
WRITTEN = attention("written", kernel(**AXES)(plain), precisions=PRECISIONS)
FINITE = attention("finite", kernel(finite_starts=True, **AXES)(plain), precisions=PRECISIONS)
