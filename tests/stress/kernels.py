"""Kernels with a hazard each and the same kernels mended, as users write them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any

from npusim.kernel import (
    FlashPrecision,
    FlashTiling,
    SplitPrecision,
    attention,
    attention_cells,
    attention_tensors,
    exp,
    flash,
    full,
    kernel,
    mask_of,
    maximum,
    schedule,
    split_kv,
    tiles,
    where,
)

FP32 = FlashPrecision("fp32")


@dataclass(frozen=True, slots=True)
class Plain(FlashPrecision):
    """FlashAttention's formats, and how a kernel differs from it."""

    sentinel: float = -inf
    sums: str = "float32"
    factor: float = 1.0
    cast: str = ""


@kernel(finite_starts=True, q="row head", k="key head", v="key value", mask="row key")
def plain(q: Any, k: Any, v: Any, mask: Any, p: Plain, scale: float) -> Any:
    """FlashAttention-2 with a number in place of -inf, and a row sum of its own format."""
    m, l, o = full("row", -inf, p.softmax), full("row", 0.0, p.sums), full("row value", 0.0, p.running)
    for kj, vj in tiles(k, v):
        s = where(mask, (q @ kj.T).to(p.scores).to(p.softmax) * scale, p.sentinel)
        m_new = maximum(m, s.max())
        alpha = exp(m - m_new)
        e = exp(s - m_new) * p.factor
        m = m_new
        l = l * alpha.to(p.sums) + e.sum().to(p.sums)
        e = e.to(p.cast) if p.cast else e
        o = o * alpha + (e.to(p.operand) @ vj).to(p.product)
    return (o / l.to(p.running)).to(p.output)


SENTINEL = attention("sentinel", plain, precisions=[Plain("minus_100", sentinel=-100.0)])
HIDDEN = attention("hidden", plain, precisions=[Plain("minus_inf")])
HALF_SUM = attention("half_sum", plain, precisions=[Plain("half", sums="float16", factor=256.0)])
WIDE_SUM = attention("wide_sum", plain, precisions=[Plain("wide", factor=256.0)])


HALF_SCORES = replace(FP32, name="half_scores", scores="float16")
LATE_FACTOR = attention("late_factor", flash, precisions=[HALF_SCORES])
WIDE_SCORES = attention("wide_scores", flash, precisions=[FP32])
#: P in E4M3, so that what float16 scores lose without overflow is little beside it.
RESONANT = Plain("resonant", scores="float16", cast="float8_e4m3fn")
RESONANCE = attention("resonance", plain, precisions=[RESONANT])
SHIFTED = attention("shifted", plain, precisions=[replace(RESONANT, name="shifted", smooth="k")])


def _blocks(name: str, rule: str) -> Any:
    p = replace(FP32, name=name, operands="mxfp8", operand="mxfp8", p_scale=511 / 256, p_rule=rule)
    return attention(name, flash, precisions=[p])


CLIPPING_SCALES, WIDE_SCALES = _blocks("clipping_scales", "floor"), _blocks("wide_scales", "rceil")


@kernel(parts="row value", lses="row")
def merge_plainly(parts: Any, lses: Any, fmt: str) -> Any:
    """Outputs of splits weighted by exp(lse), without their maximum."""
    total, o = full("row", 0.0, "float32"), full("row value", 0.0, "float32")
    for part, lse in tiles(parts, lses, axis="split"):
        gain = exp(lse)
        total = total + gain
        o = o + part.to("float32") * gain
    return (o / total).to(fmt)


def _split(called: str, *, is_plain: bool) -> Any:
    def phases(problem: Any, tiling: Any, p: Any, machine: Any) -> Any:
        sizes, tensors = (tiling.block_q, tiling.block_kv), attention_tensors(problem, p.output)
        mask = mask_of(problem, sizes, machine.mask_kind(tiling))
        size = {"row": sizes[0], "key": sizes[1], "head": problem.head_dim, "value": problem.value_head_dim}
        whole = flash.phase(
            "attention", attention_cells(problem, *sizes), size, [tensors.o],
            q=tensors.q, k=tensors.k, v=tensors.v, mask=mask, p=p, scale=problem.scale,
        )  # fmt: skip
        *first, last = split_kv(whole, 4, "sequential", p, machine.places)
        if not is_plain:
            return [*first, last]
        stacks, o = {n: last.tensors[n] for n in ("parts", "lses")}, last.tensors["out"]
        return [*first, merge_plainly.phase("merge", last.cells, last.sizes, [o], fmt=o.fmt, **stacks)]

    return schedule(called, phases, precisions=[SplitPrecision("fp32")], tiling=FlashTiling, families=["ascend"])


PLAIN_MERGE, SAFE_MERGE = _split("plain_merge", is_plain=True), _split("safe_merge", is_plain=False)
