"""Attention in paper form, right in ways of its own and wrong in ways that kernels are, for tests of verdicts."""

from dataclasses import replace
from math import inf, log

from npusim.kernel import FlashPrecision, attention, exp, full, kernel, maximum, tiles, where

FP32 = FlashPrecision(
    "fp32",
    scores="float32",
    softmax="float32",
    exponential="float32",
    operand="input",
    running="float32",
    product="float32",
    output="input",
)
AXES = {"finite_starts": True, "q": "row head", "k": "key head", "v": "key value", "mask": "row key"}


def one_pass(q, k, v, mask, p, scale, queries, fault="", way=""):
    m, l, o = full("row", -inf, "float32"), full("row", 0.0, "float32"), full("row value", 0.0, "float32")
    scale = {"scale left out": 1.0, "scale twice": scale * scale, "scale of 1.02": scale * 1.02}.get(fault, scale)
    scale *= log(2) if fault == "powers of two" else 1.0
    for kj, vj in tiles(k, v):
        s = (q @ kj.T).to("float32")
        s = s * (scale * 4.0) * 0.25 if way == "scaled twice" else s if way == "scaled late" else s * scale
        if fault != "mask left out":
            s = where(mask, s, -inf)
        m_new = maximum(m, s.max()) if fault != "maximum left out" else m * 0.0
        late = scale if way == "scaled late" else 1.0
        alpha = exp((m - m_new) * late)
        w = exp((s - m_new) * late)
        l_new = w.sum()
        l = (l if fault == "sum not rescaled" else l * alpha) + l_new
        part = (w.to(q.fmt) @ vj).to("float32")
        o = (o if fault == "output not rescaled" else o * alpha) + part
        m = m_new
        if fault == "last tile alone":
            o, l = part + o * 0.0, l_new + l * 0.0
    if fault == "one added to the sum":
        l = l + 1.0
    result = o * (1.0 / l) if way == "reciprocal" else o / l
    if fault == "not normalised":
        result = result * l
    if fault == "output halved":
        result = result * 0.5
    if fault == "zeros" or (fault == "sizes looked up" and queries != 128):
        result = result * 0.0
    if fault == "constant":
        result = result * 0.0 + 0.5
    return result.to(p.output)


def normalised_each_tile(q, k, v, mask, p, scale, queries):
    m, l, o = full("row", -inf, "float32"), full("row", 0.0, "float32"), full("row value", 0.0, "float32")
    for kj, vj in tiles(k, v):
        s = where(mask, (q @ kj.T).to("float32") * scale, -inf)
        m_new = maximum(m, s.max())
        w = exp(s - m_new)
        old = l * exp(m - m_new)
        l = old + w.sum()
        o = (o * old + (w.to(q.fmt) @ vj).to("float32")) / l
        m = m_new
    return o.to(p.output)


def made(name, function, precision=FP32):
    def given(problem, tiling, p):
        return {"queries": problem.seq_q}

    return attention(name, kernel(**AXES)(function), precisions=[precision], given=given)


def variant(name, **how):
    def function(q, k, v, mask, p, scale, queries):
        return one_pass(q, k, v, mask, p, scale, queries, **how)

    return made(name, function)


RIGHT = ("as_in_the_paper", "powers", "reciprocal", "each_tile", "scaled_late", "scaled_queries")
WRONG = {
    "no_scale": "scale left out",
    "scale_twice": "scale twice",
    "scale_off": "scale of 1.02",
    "no_mask": "mask left out",
    "no_maximum": "maximum left out",
    "sum_stale": "sum not rescaled",
    "output_stale": "output not rescaled",
    "halved": "output halved",
    "tile_alone": "last tile alone",
    "unnormalised": "not normalised",
    "sum_plus_one": "one added to the sum",
    "wrong_base": "powers of two",
    "nothing": "zeros",
    "half": "constant",
    "peeked": "sizes looked up",
}

as_in_the_paper = variant("as_in_the_paper")
powers = made("powers", normalised_each_tile, replace(FP32, exp_variant="exp2.correct"))
reciprocal = variant("reciprocal", way="reciprocal")
each_tile = made("each_tile", normalised_each_tile)
scaled_late = variant("scaled_late", way="scaled late")
scaled_queries = variant("scaled_queries", way="scaled twice")
globals().update({name: variant(name, fault=fault) for name, fault in WRONG.items()})
