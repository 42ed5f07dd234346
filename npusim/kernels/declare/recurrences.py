"""Recurrences whose state is a matrix, chunk by chunk: the states before the chunks, then the chunks' results.

S_t = decay_t S_(t-1) + k_t^T v_t and o_t = q_t S_t. Within a chunk these are scores with a decay; from chunk to chunk a
state is passed. There are two kernels, as in flash-linear-attention (``chunk_fwd_kernel_h``, ``chunk_fwd_kernel_o``):
retention (Sun et al. 2023), with one decay per head, and gated linear attention (Yang et al. 2024), with a decay for
each token and channel of keys; an earlier kernel multiplies Q and K by it.

If each token of a head has a decay, kernels read g, the sums of log decays up to each token of a chunk: a tensor with
one row per head, which is read as a column and as a row.  The gated delta rule (Yang et al. 2025) computes its WY form
before the states; Mamba-2 (Dao and Gu 2024) computes the addends of each chunk, and then the decayed states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from npusim.config.problem import KernelProblem
from npusim.config.tiling import Field, Tiling, on
from npusim.kernels.attention.online_softmax import NamedFormats
from npusim.kernels.declare.define import Phases, schedule
from npusim.kernels.declare.registry import Schedule
from npusim.kernels.form.language import ONE, Product, Value, exp, full, log, tiles
from npusim.kernels.form.lowering import Kernel, kernel
from npusim.kernels.form.phase import Phase, Stacked, TileRun, WorkTile
from npusim.late_methods import dataclass
from npusim.program.ir.tile import GlobalTensor, Role
from npusim.units import ceil_div, chunks

if TYPE_CHECKING:
    from numpy.typing import NDArray

F32 = "float32"


@dataclass(frozen=True, slots=True)
class StatePrecision(NamedFormats):
    """Formats of the values of a recurrence; ``input`` stands for the format of Q, K and V.

    state
        S between chunks, and the terms that are added to S.
    factor
        Operands of products that rows compute, and S as the next kernel reads it.
    product
        Results of products.
    output
        The result.
    exp_variant, arithmetic
        The exponential to the base e, and the matrix arithmetic (empty: the device's), by name.
    """

    name: str
    state: str = F32
    factor: str = "input"
    product: str = F32
    output: str = "input"
    exp_variant: str = "exp.correct"
    arithmetic: str = ""
    intermediates = ("state", "factor", "product", "output")

    def left(self, product: Product, fmt: str = F32) -> Value:
        """Return a product in ``fmt``, first rounded to the format in which rows read it."""
        return product.to(fmt) if self.product == F32 else self.wide(product.to(self.product), fmt)

    def wide(self, product: Value, fmt: str = F32) -> Value:
        """Return a stored product in ``fmt``."""
        return product if self.product == fmt else product.to(fmt)


@kernel(results="h", k="token key", v="token value", into="token", keep="key", walks="token", still="into")
def states(k: Value, v: Value, into: Value | None, keep: Value, p: StatePrecision) -> Any:
    """Return S before each chunk; ``into``: the decay of each token at the end of its chunk, for a K that does not
    include it.

    ``keep``: the decay of S in each chunk, by channel of keys.
    """
    s = full("key value", 0.0, p.state)
    for kj, vj, ej in tiles(k, v, keep):
        yield s.to(p.factor)
        fed = vj if into is None else (vj.to(F32) * into).to(p.factor)
        s = s * ej + p.left(kj.T @ fed, p.state)


@kernel(results="h", k="token key", v="token value", into="token", keep="key", walks="token", still="into")
def evenly_decayed(k: Value, v: Value, into: Value, keep: Value, p: StatePrecision) -> Any:
    """Return the next state if all chunks have the same decay: a block loads ``keep`` once."""
    s = full("key value", 0.0, p.state)
    for kj, vj in tiles(k, v):
        yield s.to(p.factor)
        fed = (vj.to(F32) * into).to(p.factor)
        s = s * keep + p.left(kj.T @ fed, p.state)


@kernel(
    results="o",
    q="row key",
    k="token key",
    v="token value",
    h="key value",
    decay="row token",
    out="row",
    walks="row token",
    still="decay out",
)
def outputs(q: Value, k: Value, v: Value, h: Value, decay: Value, out: Value | None, p: StatePrecision) -> Any:
    """Return a chunk's results: the contribution of its own keys, weighted by their decay, and the contribution of the
    state before the chunk.
    """
    a = (p.left(q @ k.T) * decay).to(p.factor)
    inter = (q @ h).to(p.product)
    return (p.left(a @ v) + (p.wide(inter) if out is None else p.wide(inter) * out)).to(p.output)


# ---------------------------------------------------------------- decays of a head and a token


@kernel(results="g", a="1 token")
def decays(a: Value, chunk: int) -> Any:
    """Return sums of log decays up to each token of a chunk."""
    return a.cumsum(every=chunk)


@kernel(results="g gd", dt="1 token", by="1")
def stepped(dt: Value, by: Value, chunk: int) -> Any:
    """Return the sums of log decays dt A, where A is one number per head, and these sums minus log dt: the addend of a
    token is multiplied by dt.
    """
    g = (dt * by).cumsum(every=chunk)
    return g, g - log(dt)


@kernel(
    results="o",
    q="row key",
    k="token key",
    v="token value",
    h="key value",
    below="row token",
    g="row",
    gt="1 token",
    x="row value",
    skip="1",
    walks="row token",
    still="below",
)
def gated_outputs(
    q: Value,
    k: Value,
    v: Value,
    h: Value,
    below: Value,
    g: Value,
    gt: Value,
    x: Value,
    skip: Value | None,
    p: StatePrecision,
    as_pto: bool = False,
) -> Value:
    """Return a chunk's results as `outputs` does, with decays computed from their sums: ``g`` for queries, ``gt`` for
    keys.

    ``skip``: the factor of the input ``x`` in its result, by head; None: 0. ``as_pto``: rows come before products whose
    results they do not need.
    """
    if as_pto:
        decay = exp(below + (g - gt))
        weights, inter = (p.left(q @ k.T) * decay).to(p.factor), p.left(q @ h) * exp(g)
        o = p.left(weights @ v) + inter
    else:
        weights = (p.left(q @ k.T) * exp(below + (g - gt))).to(p.factor)
        inter = (q @ h).to(p.product)
        o = p.left(weights @ v) + p.wide(inter) * exp(g)
    return (o if skip is None else o + x.to(F32) * skip).to(p.output)


# ---------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Chunks:
    """Tokens divided into chunks, and the channels of a state divided into panels.

    batch, heads, tokens, key, value
        Sequences, heads, tokens of a sequence, and channels of keys and of values.
    chunk
        Tokens of a chunk; the last chunk of a sequence may have fewer.
    each, high
        Columns (channels of values) and rows (channels of keys) of a panel.
    """

    batch: int
    heads: int
    tokens: int
    key: int
    value: int
    chunk: int
    each: int
    high: int

    @classmethod
    def of(cls, sizes: Sequence[int], tiling: ChunkFields) -> Chunks:
        """Return the chunks for ``sizes`` (batch, heads, tokens, channels of keys, of values) and a tiling's panels."""
        batch, heads, tokens, key, value = sizes
        high = min(key, getattr(tiling, "block_key", key))
        return cls(batch, heads, tokens, key, value, tiling.chunk, tiling.block_value, high)

    @property
    def count(self) -> int:
        """Number of chunks of a sequence."""
        return ceil_div(self.tokens, self.chunk)

    @property
    def of_all_heads(self) -> int:
        """Number of tokens of a head in a block. Such a block has as many sums as a chunk of all heads, so that a
        sequence has about as many blocks as chunks.
        """
        return ceil_div(self.count, max(1, round(self.count / self.heads))) * self.chunk

    @cached_property
    def runs(self) -> tuple[TileRun, ...]:
        """The walk over chunks."""
        whole, rest = divmod(self.tokens, self.chunk)
        ragged = TileRun(whole * self.chunk, rest, 1, rest)
        return (TileRun(0, self.chunk, whole, self.chunk),) * (whole > 0) + (ragged,) * (rest > 0)

    def spans(self, each: int = 0) -> dict[str, int]:
        """Return the largest span of each axis; a block has ``each`` columns of values, by default the columns of a
        panel.
        """
        width = min(each or self.each, self.value)
        return {"row": self.chunk, "token": self.chunk, "key": self.key, "value": width, "chunk": 1}

    def panels(self) -> tuple[WorkTile, ...]:
        """Return one block for each panel of a head's state; the loop of the block visits all chunks."""
        return tuple(
            WorkTile(b, head, (("key", r, rows), ("value", c, n)), self.runs)
            for b, head in product(range(self.batch), range(self.heads))
            for (r, rows), (c, n) in product(chunks(self.key, self.high), chunks(self.value, self.each))
        )

    def blocks(self, each: int = 0, *, is_walked: bool = False) -> tuple[WorkTile, ...]:
        """Return one block for each chunk and panel of columns.

        ``is_walked``: the rows of a block are rows of the state, and its loop visits the chunk as its only tile.
        """
        ends = product(range(self.batch), range(self.heads), chunks(self.tokens, self.chunk))
        panels = list(chunks(self.value, each or self.each))
        first = [("key", 0, self.key)] if is_walked else []
        return tuple(
            WorkTile(
                b,
                head,
                (*(first or (("row", at, n), ("token", at, n))), ("chunk", at // self.chunk, 1), ("value", c, width)),
                (TileRun(at, n, 1, n),) if is_walked else (),
            )
            for b, head, (at, n) in ends
            for c, width in panels
        )

    def tensor(self, n: str, rows: int, cols: int, fmt: str, role: Role = "workspace") -> GlobalTensor:
        """Return a tensor with one matrix for each head."""
        return GlobalTensor(n, self.batch, self.heads, rows, cols, fmt, role)

    def stack(self, n: str, rows: int, cols: int, fmt: str, role: Role = "workspace") -> Stacked:
        """Return a tensor with one matrix for each chunk of each head."""
        return Stacked("chunk", self.count, GlobalTensor(n, self.batch * self.count, self.heads, rows, cols, fmt, role))


def decay_sums(function: Kernel, of: Chunks, each: int, results: list[GlobalTensor], **read: GlobalTensor) -> Phase:
    """Return the kernel `decays` or `stepped`, which sums log decays; a block has complete chunks, about ``each``
    tokens.
    """
    width = max(of.chunk, each // of.chunk * of.chunk)
    cells = tuple(
        WorkTile(b, head, ((ONE, 0, 1), ("token", at, n)))
        for b, head, (at, n) in product(range(of.batch), range(of.heads), chunks(of.tokens, width))
    )
    bound = cast("dict[str, Any]", read)
    return function.phase("decays", cells, {"token": width}, results, chunk=of.chunk, **bound)


def chunked(
    of: Chunks,
    p: StatePrecision,
    tensors: Mapping[str, GlobalTensor],
    values: Mapping[str, Callable[[], Any]],
    *,
    is_even: bool = False,
) -> list[Phase]:
    """Return both kernels of a recurrence that is computed chunk by chunk.

    ``tensors``: q, k, v, o; k_h, the keys that update S, if they differ from k; keep, one vector per chunk, or one for
    all chunks with ``is_even``; decay; into and out for one decay per head. ``values``: functions that return the
    constant tensors, by name.
    """
    t, h = tensors, of.stack("h", of.key, of.value, p.factor)
    more: dict[str, Any] = {"p": p, "arithmetic": p.arithmetic}
    kept = t["keep"] if is_even else Stacked("chunk", of.count, t["keep"])
    known = {n: f for n, f in values.items() if n in ("keep", "into")}
    fed: dict[str, Any] = {"k": t.get("k_h", t["k"]), "v": t["v"], "into": t.get("into"), "keep": kept}
    before = (evenly_decayed if is_even else states).phase(
        "states", of.panels(), of.spans() | {"key": of.high}, [h], values=known, **fed, **more
    )
    # one name of K and of V for each kernel: the later one finds another share of them in L2
    of_outputs = {n: t[n].under(f"{n}_outputs") for n in "kv"}
    read: dict[str, Any] = {"q": t["q"], **of_outputs, "decay": t["decay"], "out": t.get("out"), "h": h}
    known = {n: f for n, f in values.items() if n in ("decay", "out")}
    return [before, outputs.phase("outputs", of.blocks(), of.spans(), [t["o"]], values=known, **read, **more)]


#: Default sizes of a problem: a layer of 2048 channels, as in flash-linear-attention's models.
STATE_SIZES: Mapping[str, int] = MappingProxyType({"batch": 1, "heads": 16, "tokens": 2048, "key": 128, "value": 128})


#: Divisor of log gates. source: Yang et al. 2024, section 4.4 (tau)
GATE_DIVISOR = 16


#: Number of elements in a vector core's slice: UB has space for an S of 128 x 128 with its product and its copy, but
#: not for more.
STATE_SLICE = 4096


#: Number of elements in a slice of the kernel that multiplies Q and K by the gates; this kernel loads and stores seven
#: tiles.
GATES_SLICE = 2048


class ChunkFields(Tiling):
    """Tokens of a chunk, and columns of the state in a block."""

    chunk: int = Field(default=64, ge=16, le=256, multiple_of=16, description="tokens of a chunk")
    block_value: int = Field(
        default=128,
        ge=16,
        multiple_of=16,
        description="columns of the state that a block computes",
        json_schema_extra=on("gpu", 64),
    )


class StateFields(ChunkFields):
    """Tiling fields of a kernel in which a block may have only some rows of the state, because it stores no factor."""

    block_key: int = Field(default=256, ge=16, multiple_of=16, description="rows of the state that a block computes")


class GatedFields(ChunkFields):
    """Tiling fields of a kernel that sums log decays: rows of several chunks on a vector core, rows of one chunk on a
    GPU.
    """

    block_sums: int = Field(
        default=2048, ge=16, multiple_of=16, description="tokens that one block sums", json_schema_extra=on("gpu", 64)
    )


def sizes_of(problem: KernelProblem, sizes: Mapping[str, int] = STATE_SIZES) -> tuple[int, ...]:
    """Return the numbers of a problem, by default batch, heads, tokens, channels of keys and of values."""
    return tuple(int({**sizes, **problem.sizes}[n]) for n in sizes)


def normal_entries(seed: int, name: str, batch: int, head: int, *shape: int) -> NDArray[np.float64]:
    """Return normally distributed entries of a head, (tokens, ...), independent of other batches, heads and later
    tokens.
    """
    return np.random.default_rng([seed, *name.encode(), batch, head]).standard_normal(shape)


def log_gate(seed: int, batch: int, head: int, tokens: int, key: int) -> NDArray[np.float64]:
    """Return drawn log gates of a head, (tokens, channels): log sigmoid of normal entries over `GATE_DIVISOR`."""
    return -np.logaddexp(0, -normal_entries(seed, "gates", batch, head, tokens, key)) / GATE_DIVISOR


@cache
def log_gates(seed: int, batch: int, heads: int, tokens: int, key: int) -> NDArray[np.float64]:
    """Return `log_gate` of all heads, (batch, heads, tokens, channels)."""
    return np.array([[log_gate(seed, b, h, tokens, key) for h in range(heads)] for b in range(batch)])


def below_diagonal(size: int, is_seen: bool) -> Callable[[], Any]:
    """Return a function of the matrix that is 0 below the diagonal (and on it with ``is_seen``) and -Inf elsewhere."""
    at = np.arange(size)
    return as_stored(lambda: np.where(at[:, None] >= at + (not is_seen), 0.0, -np.inf)[None, None])


def as_stored(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that returns the same numbers rounded to float32, as tensors store them, and computes them once
    for all heads.
    """
    return cache(lambda: np.ascontiguousarray(function(), np.float32))


def chunk_tensors(sizes: tuple[int, ...], chunk: int, fmt: str, output: str) -> dict[str, GlobalTensor]:
    """Return the tensors q, k, v and o (the result), and keep, which has one vector per chunk.

    The sizes are batch, heads, tokens, and channels of keys and of values.
    """
    batch, heads, tokens, key, value = sizes
    wide = {"q": key, "k": key, "v": value}
    result = {n: GlobalTensor(n, batch, heads, tokens, cols, fmt, "input") for n, cols in wide.items()}
    keep = GlobalTensor("keep", batch * ceil_div(tokens, chunk), heads, key, 1, F32, "input")
    return {**result, "o": GlobalTensor("o", batch, heads, tokens, value, output, "output"), "keep": keep}


def in_slices(phases: list[Phase]) -> list[Phase]:
    """Return the phases with slices of `STATE_SLICE` elements."""
    return [replace(phase, slice_elements=STATE_SLICE) for phase in phases]


def recurrence(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], log_gate: NDArray[Any]) -> NDArray[np.float64]:
    """Return o_t = q_t S_t, S_t = e^(log gate_t) S_(t-1) + k_t^T v_t, token by token, in float64.

    q, k and ``log_gate`` are (tokens, channels of keys), v and the result (tokens, channels of values).
    """
    state, rows = np.zeros((k.shape[1], v.shape[1])), []
    for at in range(len(q)):
        state = np.exp(log_gate[at])[:, None] * state + np.outer(k[at], v[at])
        rows.append(q[at] @ state)
    return np.array(rows)


def by_head(
    function: Callable[..., Any],
    problem: KernelProblem,
    output: Any,
    inputs: Callable[[str, int, int], NDArray[Any]],
    _tiling: object,
) -> NDArray[np.float64]:
    """Return the results of ``function(problem, batch, head, read)`` for each head; ``read(name)`` returns an input of
    the head.
    """
    of = {t.name: t for t in output.inputs}

    def read(b: int, h: int, n: str) -> Any:
        return inputs(n, b % of[n].batch, h * of[n].heads // output.heads)

    heads = [[function(problem, b, h, partial(read, b, h)) for h in range(output.heads)] for b in range(output.batch)]
    return np.array(heads)


def _as_compiled(called: str, phases: Callable[..., Any], problem: Any, tiling: Any, p: Any, machine: Any) -> Phases:
    """Return kernels whose warps a compiler distributes, on machines with groups of warps: the published kernels are
    Triton's.

    ``solve_warps``: warps of a kernel that inverts, if the tiling has them.
    """
    listed: list[Phase] = phases(problem, tiling, p, machine)
    if not machine.has_groups:
        return listed
    result: list[Any] = []
    for phase in listed:
        own = tiling
        if phase.row_grain > 1 and (warps := getattr(tiling, "solve_warps", 0)):
            own = tiling.model_copy(update={"warps": warps})
        fields, note = machine.compiled(called, machine.ordered(phase, own), own)
        result.append((replace(phase, notes=(*phase.notes, f"{phase.name}: {note}")), fields))
    return result


def recurrence_schedule(
    called: str,
    phases: Callable[..., Any],
    reference: Callable[..., Any],
    summary: str,
    sizes: Mapping[str, int] = STATE_SIZES,
    fields: type[Tiling] | Mapping[str, type[Tiling]] = StateFields,
    follows: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> tuple[Schedule, ...]:
    """Return the schedule of a recurrence, with its own ``fields``; ``reference``: as for `by_head`."""
    result, kernels = partial(by_head, reference), partial(_as_compiled, called, phases)
    setattr(kernels, "__module__", phases.__module__)  # noqa: B010 - by which a user's schedule is recognised
    setattr(result, "__name__", "recurrence")  # noqa: B010 - a partial has none, and results say it
    return schedule(
        called,
        kernels,
        problem=KernelProblem,
        sizes=sizes,
        precisions=[StatePrecision("stored")],
        tiling=fields,
        kind="chunks",
        reference=result,
        follows=follows,
        grows=lambda *_of: ("batch", "heads", "tokens"),
        summary=summary,
    )


def reference_with_gates(
    gates: Callable[[KernelProblem], Any], problem: KernelProblem, b: int, h: int, read: Callable[[str], NDArray[Any]]
) -> NDArray[np.float64]:
    """Return `recurrence` of a head with the log gates of ``gates(problem)``, (batch, heads, tokens, keys)."""
    return recurrence(read("q"), read("k"), read("v"), gates(problem)[b, h])


def first_state(sizes: Mapping[str, int], problem: KernelProblem, *_of: object) -> NDArray[np.float64]:
    """Return the state before the first token, (channels of keys, of values): 0."""
    _batch, _heads, _tokens, key, value, *_ = sizes_of(problem, sizes)
    return np.zeros((key, value))
