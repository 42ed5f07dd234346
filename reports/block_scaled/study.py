"""Errors from quantising the operands of attention to blocks: all other steps are in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim.config.load import load_workload
from npusim.formats import BLOCK_FORMATS, cast, quantize
from npusim.formats.cast import widen
from npusim.program.numerics.input_tensors import recipe_source
from npusim.simulation.tensor_files import read_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["BETA", "INPUTS", "KEYS", "Head", "Inputs", "error", "head", "inputs", "sink_error"]

Array = np.ndarray[Any, Any]

#: PASA's fraction of a block's mean, and keys of a block, as the packaged schedule has them.
BETA, KEYS = 0.984497, 128
#: Queries that are computed, spread over the sequence.
QUERIES = 256


class Inputs(NamedTuple):
    """One head: Q (rows, d) at ``positions``, K and V (keys, d), float64 values of float16; the factor of scores."""

    q: Array
    k: Array
    v: Array
    positions: Array
    scale: float
    is_causal: bool


class Head(NamedTuple):
    """One head as it is stored: Q, K and V, (rows, d) of float16; the factor of scores."""

    tensors: tuple[Array, ...]
    scale: float
    is_causal: bool = False


def _normal(outliers: float) -> Head:
    """Return N(0, 1); a thousandth of the elements is N(0, 100) on request (FlashAttention-3, section 4.3)."""
    rng = np.random.default_rng(34)
    made = []
    for _ in range(3):
        x = rng.standard_normal((1024, 128))
        made.append(x + outliers * rng.standard_normal(x.shape) * 10 * (rng.random(x.shape) < 0.001))
    return Head(tuple(made), 128**-0.5)


def _channels() -> Head:
    """Return N(0, 1) with four channels of K around 20: a mean that is the same for all keys."""
    rng = np.random.default_rng(35)
    q, k, v = (rng.standard_normal((1024, 128)) for _ in range(3))
    k[:, [3, 40, 77, 110]] += 20.0
    return Head((q, k, v), 128**-0.5)


def _real(head: int) -> Head:
    tensors = read_tensors(Path("smollm2_layer18_group.safetensors"))
    raw = {name[-1]: np.asarray(x, np.float64)[0] for name, x in tensors.items()}
    return Head((raw["q"][head], raw["k"][0], raw["v"][0]), 0.125, is_causal=True)


def _resonance() -> Head:
    problem = load_workload("pasa_resonance").problem(seq=1024)
    source = recipe_source(problem)
    return Head(tuple(source(name, 0, 0) for name in "qkv"), problem.score_scale)


#: Name of the inputs on the page -> function that returns them.
INPUTS: Mapping[str, Callable[[], Head]] = {
    "normal": lambda: _normal(0.0),
    "outliers": lambda: _normal(1.0),
    "channels": _channels,
    "SmolLM2": lambda: _real(0),
    "resonance": _resonance,
}


@cache
def head(name: str) -> Head:
    """Return a whole head of the inputs of that name."""
    made = INPUTS[name]()
    return made._replace(tensors=tuple(x.astype(np.float16) for x in made.tensors))


@cache
def inputs(name: str) -> Inputs:
    """Return the inputs of that name, with the number of queries over which errors are computed."""
    (tensors, scale, is_causal) = head(name)
    q, k, v = (x.astype(np.float64) for x in tensors)
    positions = np.arange(len(q) // QUERIES - 1, len(q), len(q) // QUERIES)
    return Inputs(q[positions], k, v, positions, scale, is_causal)


def sink_error(fmt: str, rule: str | None, factor: float, keys: int = 4096, rows: int = 400) -> float:
    """Return the mean squared error of the output when P times a factor is stored in a format (P-Cast, table 2).

    Scores are N(0, 1), those of 4 sinks 7 more; V is N(0, 1), over which the error is an expectation, not a draw.
    """
    p = _sinks(keys, rows)
    made = p * factor
    if fmt == "float8_e4m3fn":
        stored = widen(cast(made.astype(np.float32), fmt, overflow="saturate")).astype(np.float64)
    else:
        stored = quantize(made, fmt, rule=rule).values()
    lost = (stored / factor - p) / p.sum(axis=1, keepdims=True)
    return float((lost * lost).sum(axis=1).mean())


@cache
def _sinks(keys: int, rows: int) -> Array:
    """Return P, its largest 1, of scores with sinks."""
    scores = np.random.default_rng(36).standard_normal((rows, keys))
    scores[:, :4] += 7.0
    p: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
    return p


def _stored(x: Array, fmt: str, rule: str | None, axis: int) -> Array:
    """Return values as a format stores them; formats of numbers with one scale, from the largest magnitude."""
    if fmt == "":
        return x
    if fmt in BLOCK_FORMATS:
        return quantize(x, fmt, rule=rule, axis=axis).values()
    factor = np.abs(x).max() / 448.0 if fmt == "float8_e4m3fn" else np.abs(x).max() / 16.0
    stored: Array = widen(cast(x / factor, fmt, overflow="saturate")).astype(np.float64) * factor
    return stored


def _blocks(keys: int) -> Array:
    return np.arange(keys) // KEYS


def _scores(given: Inputs, fmt: str, rule: str | None, shift: str, beta: float) -> Array:
    """Return scores from quantised Q and K; ``shift``: none, mean (of all keys), pasa (of a block, repaired)."""
    k, q = given.k, _stored(given.q, fmt, rule, -1)
    if shift == "mean":
        k = k - k.mean(axis=0)  # every score of a row moves alike: softmax does not see it
    if shift != "pasa":
        return q @ _stored(k, fmt, rule, -1).T
    means = k.reshape(-1, KEYS, k.shape[1]).mean(axis=1)[_blocks(len(k))]
    scores = q @ _stored(k - beta * means, fmt, rule, -1).T
    # The mean of what is left says what was taken.
    left = scores.reshape(len(q), -1, KEYS).mean(axis=2)[:, _blocks(len(k))]
    repaired: Array = scores + beta / (1 - beta) * left
    return repaired


def _output(given: Inputs, scores: Array, p_fmt: str, p_rule: str | None, v: Array) -> Array:
    scores = scores * given.scale
    if given.is_causal:
        scores = np.where(np.arange(len(given.k)) <= given.positions[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    sums = p.sum(axis=1, keepdims=True)
    if p_rule == "sage3_p":
        p = _stored(p * 2688, p_fmt, p_rule, -1) / 2688
    elif p_fmt:
        p = _stored(p, p_fmt, p_rule, -1)
    result: Array = p @ v / sums
    return result


@cache
def _exact(name: str) -> Array:
    """Return the output on the inputs of that name without any quantising."""
    given = inputs(name)
    return _output(given, given.q @ given.k.T, "", None, given.v)


def error(
    name: str,
    fmt: str,
    rule: str | None = None,
    *,
    where: str = "qkpv",
    shift: str = "none",
    p_rule: str | None = None,
    beta: float = BETA,
) -> float:
    """Return the relative RMSE of the output with the operands in ``where`` quantised: q and k, p, v."""
    given = inputs(name)
    exact = _exact(name)
    scores = _scores(given, fmt if "q" in where else "", rule, shift, beta)
    v = _stored(given.v, fmt, rule, 0) if "v" in where else given.v
    chosen = rule if p_rule is None else p_rule
    found = _output(given, scores, fmt if "p" in where else "", chosen, v)
    return float(np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)))
