"""FlashAttention's backward pass: dQ, dK and dV of softmax(scale Q K^T) V, given dO (`algorithms.backward`).

Sizes: ``--problem batch=..,heads=..,tokens=..,key=..,value=..,causal=1``, and ``kv_heads=..``,
``window=..``, ``softcap=..`` as in `Problem`; missing ones are `SIZES`, 0 for none.  O and LSE of the forward pass are
inputs, as in the paper; where they are not given they follow from Q, K and V.  Errors are against the gradient of
softmax in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from npusim.algorithms.backward import BackwardPrecision, BackwardTile, Method, backward, backward_tensors
from npusim.config.family import AS_FAMILY
from npusim.config.problem import FRACTAL, KernelProblem, Problem
from npusim.config.tiling import Field, Tiling, lightest, on, part_of
from npusim.errors import SpecError
from npusim.schedules.define import schedule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npusim.schedules.define import Phases

#: Sizes that a problem leaves out: a layer of 2048 channels, and tokens whose bits take a few seconds.
SIZES: Mapping[str, float] = MappingProxyType(
    {"batch": 1, "heads": 16, "tokens": 1024, "key": 128, "value": 128, "causal": False}
    | {"kv_heads": 0, "window": 0, "softcap": 0.0}
)
#: Elements of a slice of a vector core: UB holds two tiles of scores and two of what products read of them.
SLICE = 4096
#: Elements of dO, and of O, of a block that sums their products.
DELTA_ELEMENTS = 8192


class BackwardFields(Tiling):
    """Tiles of both kernels; which gradient a run's bits and errors are of.

    On a GPU the tile that is fastest of 11 in Triton on an H100 (reports/recurrences).
    """

    block_q: int = Field(
        default=128, ge=16, multiple_of=16, description="query rows of a block of dQ", json_schema_extra=on("gpu", 64)
    )
    block_kv: int = Field(
        default=128, ge=16, multiple_of=16, description="keys of a tile of dQ", json_schema_extra=on("gpu", 64)
    )
    tile_q: int = Field(
        default=128,
        ge=16,
        multiple_of=16,
        description="query rows of a tile of dK and dV",
        json_schema_extra=on("gpu", 64),
    )
    tile_kv: int = Field(default=64, ge=16, multiple_of=16, description="keys of a block of dK and dV")
    method: Method = Field(
        default="apart",
        description="who adds up dQ: a kernel of blocks of queries, or blocks of keys, in memory",
        json_schema_extra=part_of("source"),
    )
    gradient: Literal["dq", "dk", "dv"] = Field(
        default="dq",
        description="gradient with the bits and errors that a run shows; all are computed",
        json_schema_extra=part_of("model"),
    )


#: Tiles ahead: L0C of an NPU holds dK and dV of a block of keys together with scores.
DEPTH = Field(
    default=1,
    ge=0,
    le=14,
    description="tiles that scores and their rows run ahead of the products that read these",
    json_schema_extra=lightest("least"),
)


def problem_of(problem: KernelProblem) -> Problem:
    """Return the attention whose gradients are asked for; raise `SpecError` for other sizes."""
    sizes = {**SIZES, **problem.sizes}
    for name in ("key", "value"):
        if sizes[name] % FRACTAL:
            raise SpecError(
                f"problem: flash_backward {name}={sizes[name]} is no multiple of {FRACTAL}; tensors are not padded"
            )
    known: dict[str, Any] = {name: sizes[name] for name in ("batch", "heads")}
    known |= {name: size for name in ("kv_heads", "window", "softcap") if (size := sizes[name])}
    known |= {"seq_q": sizes["tokens"], "head_dim": sizes["key"], "value_head_dim": sizes["value"]}
    return Problem(**known, causal=bool(sizes["causal"]), dtype=problem.dtype)


def flash_backward(problem: KernelProblem, tiling: Any, p: BackwardPrecision, machine: Any) -> Phases:
    """Return the kernels."""
    call = problem_of(problem)
    rows = min(call.seq_q, max(1, DELTA_ELEMENTS // call.value_head_dim) * machine.row_cores)
    tile = BackwardTile(tiling.block_q, tiling.block_kv, tiling.tile_q, tiling.tile_kv, rows)
    tensors = backward_tensors(call, p.output, tiling.gradient)
    kernels = backward(call, tile, p, tensors, machine.mask_kind(tiling), tiling.method, machine.places)
    whole = ("clear", "delta") if tiling.method != "added" else ()  # what also writes 0 has a tile more in UB
    return [k if k.name in whole else replace(k, slice_elements=SLICE) for k in kernels]


def _scores(call: Problem, inputs: Any, batch: int, head: int) -> NDArray[np.float64]:
    """Return a query head's scores in float64, capped, hidden ones -Inf."""
    scores = call.scale * inputs("q", batch, head) @ inputs("k", batch, head // call.group_size).T
    scores = scores if call.softcap is None else call.softcap * np.tanh(scores / call.softcap)
    seen = call.seen.matrix(call.causal_offset, call.seq_q, 0, call.seq_kv)
    return np.where(seen, scores, -np.inf)


def log_sums(problem: KernelProblem, inputs: Any, batch: int, head: int) -> NDArray[np.float64]:
    """Return LSE of the query heads of a KV head, (1, queries of one head after the other), in float64."""
    call = problem_of(problem)
    heads = range(head * call.group_size, (head + 1) * call.group_size)
    return np.concatenate([np.logaddexp.reduce(_scores(call, inputs, batch, h), 1) for h in heads])[None]


def forward(problem: KernelProblem, inputs: Any, batch: int, head: int) -> NDArray[np.float64]:
    """Return O of a query head, (queries, columns of values), in float64."""
    call = problem_of(problem)
    scores = _scores(call, inputs, batch, head)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    made: NDArray[np.float64] = weights @ inputs("v", batch, head // call.group_size) / weights.sum(1, keepdims=True)
    return made


def gradients(call: Problem, inputs: Any, batch: int, head: int) -> dict[str, NDArray[np.float64]]:
    """Return dQ of a query head and its parts of dK and dV, in float64: of softmax of its scores times V, with dO."""
    q, do = (inputs(n, batch, head) for n in ("q", "do"))
    k, v = (inputs(n, batch, head // call.group_size) for n in "kv")
    scores = _scores(call, inputs, batch, head)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    slopes = weights * (do @ v.T - (do * (weights @ v)).sum(1, keepdims=True))
    if call.softcap:
        slopes *= 1 - np.where(weights > 0, scores / call.softcap, 0) ** 2
    return {"dq": call.scale * slopes @ k, "dk": call.scale * slopes.T @ q, "dv": weights.T @ do}


def gradient(problem: KernelProblem, output: Any, inputs: Any, tiling: Any) -> NDArray[np.float64]:
    """Return the gradient that is asked for, (batch, heads, rows, columns), in float64; dK and dV of whole groups."""
    call = problem_of(problem)
    heads = [[gradients(call, inputs, b, h)[tiling.gradient] for h in range(call.heads)] for b in range(call.batch)]
    each = np.array(heads)
    whole: NDArray[np.float64] = each.reshape(output.batch, output.heads, -1, *each.shape[2:]).sum(2)
    return whole


def grows(problem: KernelProblem, tiling: Any) -> tuple[str, ...]:
    """Return the sizes by which a call may grow without another gradient of its queries: later ones see earlier keys.

    Keys have a part of their gradients from every later query; without ``causal`` every query has one from every key.
    """
    is_prefix = tiling.gradient == "dq" and bool({**SIZES, **problem.sizes}["causal"])
    return "batch", "heads", *(("tokens",) if is_prefix else ())


SCHEDULES = schedule(
    "flash_backward",
    flash_backward,
    problem=KernelProblem,
    sizes=SIZES,
    precisions=[BackwardPrecision("fp32", exp_variant=AS_FAMILY, accumulate="chained")],
    tiling=BackwardFields,
    kind="stages",
    usual={"depth": DEPTH},
    reference=gradient,
    follows={"lse": log_sums, "forward": forward},
    grows=grows,
    summary="FlashAttention's backward pass: dQ, dK and dV",
)
