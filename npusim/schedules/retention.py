"""Retention (Sun et al. 2023) and gated linear attention (Yang et al. 2024), chunk by chunk (`algorithms.recurrence`).

Sizes: ``--problem batch=..,heads=..,tokens=..,key=..,value=..``; missing ones are `SIZES`.  Errors are
against the recurrence, token after token in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.algorithms.blocks import grid
from npusim.algorithms.recurrence import F32, Chunks, StatePrecision, chunked, gated
from npusim.config.problem import KernelProblem
from npusim.config.tiling import Field, Tiling, on
from npusim.ir.tile import GlobalTensor
from npusim.schedules.define import schedule
from npusim.units import ceil_div

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npusim.algorithms.phase import Phase
    from npusim.schedules.define import Phases
    from npusim.schedules.registry import Schedule

#: Sizes that a problem leaves out: a layer of 2048 channels, as flash-linear-attention's models have it.
SIZES: Mapping[str, int] = MappingProxyType({"batch": 1, "heads": 16, "tokens": 2048, "key": 128, "value": 128})
#: What log gates are divided by.  source: Yang et al. 2024, section 4.4 (tau)
GATE_DIVISOR = 16
#: Elements of a slice of a vector core: beside S, its product and its copy UB holds no more of 128 x 128.
SLICE = 4096
#: The same of the kernel that brings gates into Q and K, which has seven tiles to load and store.
GATES_SLICE = 2048


class ChunkFields(Tiling):
    """Tokens of a chunk, and columns of the state that a block has."""

    chunk: int = Field(default=64, ge=16, le=256, multiple_of=16, description="tokens of a chunk")
    block_value: int = Field(
        default=128,
        ge=16,
        multiple_of=16,
        description="columns of the state of a block",
        json_schema_extra=on("gpu", 64),
    )


class StateFields(ChunkFields):
    """The same where a block may have some rows of the state: nothing that it holds is a factor."""

    block_key: int = Field(default=256, ge=16, multiple_of=16, description="rows of the state of a block")


class GatedFields(ChunkFields):
    """The same where a kernel sums log decays: a row of several chunks a vector core, on a GPU those of a chunk."""

    block_sums: int = Field(
        default=2048, ge=16, multiple_of=16, description="tokens that one block sums", json_schema_extra=on("gpu", 64)
    )


def sizes_of(problem: KernelProblem, sizes: Mapping[str, int] = SIZES) -> tuple[int, ...]:
    """Return the numbers of a problem, by default batch, heads, tokens, channels of keys and of values."""
    return tuple(int({**sizes, **problem.sizes}[n]) for n in sizes)


def log_decay(heads: int) -> NDArray[np.float64]:
    """Return the logarithm of each head's decay.  source: Sun et al. 2023, equation 8: 1 - 2^(-5 - head)."""
    decay: NDArray[np.float64] = np.log1p(-(2.0 ** (-5 - np.arange(heads))))
    return decay


def normal(seed: int, name: str, batch: int, head: int, *shape: int) -> NDArray[np.float64]:
    """Return normal entries of a head, (tokens, ...), which do not depend on other batches, heads, later tokens."""
    return np.random.default_rng([seed, *name.encode(), batch, head]).standard_normal(shape)


def log_gate(seed: int, batch: int, head: int, tokens: int, key: int) -> NDArray[np.float64]:
    """Return drawn log gates of a head, (tokens, channels): log sigmoid of normal entries, over `GATE_DIVISOR`."""
    return -np.logaddexp(0, -normal(seed, "gates", batch, head, tokens, key)) / GATE_DIVISOR


@cache
def log_gates(seed: int, batch: int, heads: int, tokens: int, key: int) -> NDArray[np.float64]:
    """Return `log_gate` of all heads, (batch, heads, tokens, channels)."""
    return np.array([[log_gate(seed, b, h, tokens, key) for h in range(heads)] for b in range(batch)])


def _sums(gates: NDArray[np.float64], chunk: int) -> NDArray[np.float64]:
    """Return sums of log gates from the first token of each chunk on."""
    return np.concatenate([gates[:, :, at : at + chunk].cumsum(2) for at in range(0, gates.shape[2], chunk)], 2)


def _lasts(sums: NDArray[np.float64], chunk: int) -> NDArray[np.float64]:
    """Return each chunk's last sums, (batch * chunks, heads, channels, 1)."""
    ends = [min(at + chunk, sums.shape[2]) - 1 for at in range(0, sums.shape[2], chunk)]
    batch, heads, _, key = sums.shape
    return sums[:, :, ends].swapaxes(1, 2).reshape(batch * len(ends), heads, key, 1)


def below_diagonal(size: int, is_seen: bool) -> Callable[[], Any]:
    """Return a function of the matrix that is 0 below the diagonal, on it too where ``is_seen``, and -Inf elsewhere."""
    at = np.arange(size)
    return as_stored(lambda: np.where(at[:, None] >= at + (not is_seen), 0.0, -np.inf)[None, None])


def as_stored(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function of the same numbers in float32, as tensors hold them: computed once for all heads."""
    return cache(lambda: np.ascontiguousarray(function(), np.float32))


def _tensors(sizes: tuple[int, ...], chunk: int, fmt: str, output: str) -> dict[str, GlobalTensor]:
    batch, heads, tokens, key, value = sizes
    wide = {"q": key, "k": key, "v": value}
    made = {n: GlobalTensor(n, batch, heads, tokens, cols, fmt, "input") for n, cols in wide.items()}
    keep = GlobalTensor("keep", batch * ceil_div(tokens, chunk), heads, key, 1, F32, "input")
    return {**made, "o": GlobalTensor("o", batch, heads, tokens, value, output, "output"), "keep": keep}


def _sliced(phases: list[Phase]) -> list[Phase]:
    return [replace(phase, slice_elements=SLICE) for phase in phases]


def retention(problem: KernelProblem, tiling: Any, p: StatePrecision, _machine: Any) -> Phases:
    """Return both kernels; the decay within a chunk is a matrix of each head, which is loaded."""
    sizes, chunk = sizes_of(problem), tiling.chunk
    (batch, heads, tokens, key, _), at = sizes, np.arange(chunk)
    gamma = log_decay(heads)[None, :, None, None]
    tensors = _tensors(sizes, chunk, problem.dtype, p.output)
    for n, cols in (("decay", chunk), ("out", 1), ("into", 1)):
        tensors[n] = GlobalTensor(n, 1, heads, chunk, cols, F32, "input")
    since = np.maximum(at[:, None] - at, 0)
    shape = batch * ceil_div(tokens, chunk), heads, key, 1
    values = {
        "decay": as_stored(lambda: np.exp(gamma * since) * (at[:, None] >= at)),
        "out": as_stored(lambda: np.exp(gamma * (at[:, None] + 1))),
        "into": as_stored(lambda: np.exp(gamma * (chunk - 1 - at[:, None]))),
        "keep": as_stored(lambda: np.broadcast_to(np.exp(gamma * chunk), shape)),
    }
    return _sliced(chunked(Chunks.of(sizes, tiling), p, tensors, values))


def gla(problem: KernelProblem, tiling: Any, p: StatePrecision, machine: Any) -> Phases:
    """Return the kernel that brings gates into Q and K, and both that follow; sums of a chunk's log gates are given."""
    sizes, chunk = sizes_of(problem), tiling.chunk
    (batch, heads, tokens, key, _), at = sizes, np.arange(chunk)
    tensors = _tensors(sizes, chunk, problem.dtype, p.output)
    like = tensors["q"]
    made = {n: replace(like, name=n, fmt=p.factor, role="workspace") for n in ("qe", "ke", "kd")}
    b, rest = (replace(like, name=n, fmt=F32) for n in ("b", "rest"))
    sums = cache(lambda: _sums(log_gates(problem.seed, batch, heads, tokens, key), chunk))
    spread = cache(lambda: _lasts(sums(), chunk).reshape(batch, -1, heads, key).swapaxes(1, 2))
    rows = min(tokens, max(1, GATES_SLICE // key) * machine.row_cores)
    before = gated.phase(
        "gates",
        grid(like, ("row", rows)),
        {"row": rows, "key": key},
        list(made.values()),
        q=like,
        k=tensors["k"],
        b=b,
        rest=rest,
        p=p,
        values={"b": as_stored(sums), "rest": as_stored(lambda: np.repeat(spread(), chunk, 2)[:, :, :tokens] - sums())},
    )
    tensors |= {"q": made["qe"], "k": made["ke"], "k_h": made["kd"]}
    tensors["decay"] = GlobalTensor("decay", 1, 1, chunk, chunk, F32, "constant")
    values = {
        "decay": as_stored(lambda: ((at[:, None] >= at) * 1.0)[None, None]),
        "keep": as_stored(lambda: np.exp(_lasts(sums(), chunk))),
    }
    of_chunks = chunked(Chunks.of(sizes, tiling), p, tensors, values)
    return [replace(before, slice_elements=GATES_SLICE), *_sliced(of_chunks)]


def recurrence(q: Any, k: Any, v: Any, log_gate: Any) -> NDArray[np.float64]:
    """Return o_t = q_t S_t, S_t = e^(log gate_t) S_(t-1) + k_t^T v_t, token after token, in float64.

    q, k and ``log_gate`` are (tokens, channels of keys), v and the result (tokens, channels of values).
    """
    state, rows = np.zeros((k.shape[1], v.shape[1])), []
    for at in range(len(q)):
        state = np.exp(log_gate[at])[:, None] * state + np.outer(k[at], v[at])
        rows.append(q[at] @ state)
    return np.array(rows)


def by_head(
    function: Callable[..., Any], problem: KernelProblem, output: Any, inputs: Any, _tiling: Any
) -> NDArray[np.float64]:
    """Return the results of ``function(problem, batch, head, read)``, ``read(name)`` an input; heads may share some."""
    of = {t.name: t for t in output.inputs}

    def read(b: int, h: int, n: str) -> Any:
        return inputs(n, b % of[n].batch, h * of[n].heads // output.heads)

    heads = [[function(problem, b, h, partial(read, b, h)) for h in range(output.heads)] for b in range(output.batch)]
    return np.array(heads)


def _constant_gates(problem: KernelProblem) -> NDArray[np.float64]:
    batch, heads, tokens, key, _ = sizes_of(problem)
    return np.broadcast_to(log_decay(heads)[None, :, None, None], (batch, heads, tokens, key))


def _drawn_gates(problem: KernelProblem) -> NDArray[np.float64]:
    batch, heads, tokens, key, _ = sizes_of(problem)
    return log_gates(problem.seed, batch, heads, tokens, key)


def _as_compiled(called: str, phases: Callable[..., Any], problem: Any, tiling: Any, p: Any, machine: Any) -> Phases:
    """Return kernels on warps as a compiler deals them out, where a machine has groups of them: published are Triton's.

    ``solve_warps``: of a kernel that inverts, if the tiling has them.
    """
    listed: list[Phase] = phases(problem, tiling, p, machine)
    if not machine.has_groups:
        return listed
    made: list[Any] = []
    for phase in listed:
        own = tiling
        if phase.row_grain > 1 and (warps := getattr(tiling, "solve_warps", 0)):
            own = tiling.model_copy(update={"warps": warps})
        fields, note = machine.compiled(called, machine.ordered(phase, own), own)
        made.append((replace(phase, notes=(*phase.notes, f"{phase.name}: {note}")), fields))
    return made


def declared(
    called: str,
    phases: Callable[..., Any],
    reference: Callable[..., Any],
    summary: str,
    sizes: Mapping[str, int] = SIZES,
    fields: type[Tiling] | Mapping[str, type[Tiling]] = StateFields,
    follows: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> tuple[Schedule, ...]:
    """Return the schedule of a recurrence, with its own ``fields``; ``reference``: as for `by_head`."""
    made, kernels = partial(by_head, reference), partial(_as_compiled, called, phases)
    setattr(kernels, "__module__", phases.__module__)  # noqa: B010 - by which a user's own is known
    setattr(made, "__name__", "recurrence")  # noqa: B010 - a partial has none, and results say it
    return schedule(
        called,
        kernels,
        problem=KernelProblem,
        sizes=sizes,
        precisions=[StatePrecision("stored")],
        tiling=fields,
        kind="chunks",
        reference=made,
        follows=follows,
        grows=lambda *_of: ("batch", "heads", "tokens"),
        summary=summary,
    )


def _of(gates: Callable[[KernelProblem], Any], problem: KernelProblem, b: int, h: int, read: Any) -> Any:
    return recurrence(read("q"), read("k"), read("v"), gates(problem)[b, h])


SCHEDULES = (
    *declared(
        "retention",
        retention,
        partial(_of, _constant_gates),
        "linear attention with a decay of each head, chunk by chunk",
    ),
    *declared(
        "gla",
        gla,
        partial(_of, _drawn_gates),
        "gated linear attention, a gate of each token and channel, chunk by chunk",
    ),
)
