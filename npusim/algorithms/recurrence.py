"""Recurrences whose state is a matrix, chunk by chunk: the states before the chunks, then the chunks' results.

S_t = decay_t S_(t-1) + k_t^T v_t and o_t = q_t S_t: within a chunk as scores with a decay, between chunks as a state.
Two kernels, as in flash-linear-attention (``chunk_fwd_kernel_h``, ``chunk_fwd_kernel_o``): retention (Sun et al. 2023),
with a decay a head, and gated linear attention (Yang et al. 2024), with a decay for each token and channel of keys,
which an earlier kernel multiplies into Q and K.

Where a head's token has a decay, kernels read g, the sums of log decays up to each token of a chunk: a tensor of one
row a head, which is read as a column and as a row.  The gated delta rule (Yang et al. 2025) computes its WY form before
the states; Mamba-2 (Dao and Gu 2024) computes the addends of each chunk, and then the decayed states.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from npusim.algorithms.flash import NamedFormats
from npusim.algorithms.language import ONE, exp, full, initial, inverse, log, rsqrt, tiles
from npusim.algorithms.lowering import kernel
from npusim.algorithms.phase import Stacked, TileRun, WorkTile
from npusim.ir.tile import GlobalTensor, Role
from npusim.units import ceil_div, chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from npusim.algorithms.phase import Phase

F32 = "float32"
#: Added to the square of a row's length before it is divided by.  source: flash-linear-attention, ``l2norm``: eps
LEAST_LENGTH = 1e-6


@dataclass(frozen=True, slots=True)
class StatePrecision(NamedFormats):
    """Formats of a recurrence's values; ``input`` stands for the format of Q, K and V.

    state
        S from chunk to chunk, and its addends.
    factor
        Operands of products that rows compute, and S as the next kernel reads it.
    product
        Results of products.
    output
        The result.
    exp_variant, arithmetic
        Named choices: an exponential to the base e, the matrix arithmetic (empty: the device's own).
    """

    name: str
    state: str = F32
    factor: str = "input"
    product: str = F32
    output: str = "input"
    exp_variant: str = "exp.correct"
    arithmetic: str = ""
    intermediates = ("state", "factor", "product", "output")

    def left(self, product: Any, fmt: str = F32) -> Any:
        """Return a product in ``fmt``, after rounding to the format in which rows read it."""
        return product.to(fmt) if self.product == F32 else self.wide(product.to(self.product), fmt)

    def wide(self, product: Any, fmt: str = F32) -> Any:
        """Return a stored product in ``fmt``."""
        return product if self.product == fmt else product.to(fmt)


@kernel(results="qe ke kd", q="row key", k="row key", b="row key", rest="row key")
def gated(q: Any, k: Any, b: Any, rest: Any, p: StatePrecision) -> Any:
    """Q e^b, K e^-b and K e^(last - b): the sums b of a chunk's log gates on both sides of the scores."""
    wide = k.to(F32)
    return (q.to(F32) * exp(b)).to(p.factor), (wide * exp(-b)).to(p.factor), (wide * exp(rest)).to(p.factor)


@kernel(results="h", k="token key", v="token value", into="token", keep="key", walks="token", still="into")
def states(k: Any, v: Any, into: Any, keep: Any, p: StatePrecision) -> Any:
    """Return S before each chunk; ``into``: the decay of each token at the end of its chunk, where K does not include
    it.

    ``keep``: the decay of S in a chunk, by channel of keys.
    """
    s = full("key value", 0.0, p.state)
    for kj, vj, ej in tiles(k, v, keep):
        yield s.to(p.factor)
        fed = vj if into is None else (vj.to(F32) * into).to(p.factor)
        s = s * ej + p.left(kj.T @ fed, p.state)


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
def outputs(q: Any, k: Any, v: Any, h: Any, decay: Any, out: Any, p: StatePrecision) -> Any:
    """Return a chunk's results: of its own keys, weighted by their decay, and of the state before it."""
    a = (p.left(q @ k.T) * decay).to(p.factor)
    inter = (q @ h).to(p.product)
    return (p.left(a @ v) + (p.wide(inter) if out is None else p.wide(inter) * out)).to(p.output)


# ---------------------------------------------------------------- decays of a head and a token


@kernel(results="g", a="1 token")
def decays(a: Any, chunk: int) -> Any:
    """Return sums of log decays up to each token of a chunk."""
    return a.cumsum(every=chunk)


@kernel(results="g gd", dt="1 token", by="1")
def stepped(dt: Any, by: Any, chunk: int) -> Any:
    """Return sums of log decays dt A, A a number by head, and the same less log dt: a token's addend is times dt."""
    g = (dt * by).cumsum(every=chunk)
    return g, g - log(dt)


@kernel(results="n", k="row key")
def normalised(k: Any, p: StatePrecision) -> Any:
    """Return K with rows of length 1."""
    wide = k.to(F32)
    return (wide * rsqrt((wide * wide).sum() + LEAST_LENGTH)).to(p.factor)


_of_a_chunk = kernel(
    results="t",
    ki="row key",
    kj="token key",
    beta="row",
    g="row",
    gt="1 token",
    below="row token",
    walks="row token",
    still="below",
)


def _kkt(ki: Any, kj: Any, beta: Any, g: Any, gt: Any, below: Any, p: StatePrecision) -> Any:
    return p.left(ki @ kj.T) * exp(below + (g - gt)) * beta


@_of_a_chunk
def kkt_inverse(ki: Any, kj: Any, beta: Any, g: Any, gt: Any, below: Any, p: StatePrecision) -> Any:
    """Return (I + A)^-1 of a chunk, A_ij = beta_i e^(g_i - g_j) k_i k_j where ``below`` is 0, not -Inf."""
    a = _kkt(ki, kj, beta, g, gt, below, p)
    return inverse(a).to(p.factor)


@_of_a_chunk
def kkt(ki: Any, kj: Any, beta: Any, g: Any, gt: Any, below: Any, p: StatePrecision, as_pto: bool = False) -> Any:
    """Return A of a chunk; a separate kernel inverts I + A; ``as_pto``: the logarithm of beta is added to g."""
    if as_pto:
        return (p.left(ki @ kj.T) * exp(below + ((g + log(beta)) - gt))).to(p.factor)
    return _kkt(ki, kj, beta, g, gt, below, p).to(p.factor)


@kernel(results="t", a="row token", walks="row token")
def solved(a: Any, p: StatePrecision) -> Any:
    """Return (I + A)^-1 of a chunk."""
    return inverse(a.to(F32)).to(p.factor)


@kernel(results="w u", t="row token", k="token key", v="token value", beta="1 token", g="1 token", walks="row token")
def wy(t: Any, k: Any, v: Any, beta: Any, g: Any, p: StatePrecision) -> Any:
    """Return W = T (beta e^g K) and U = T (beta V) of a chunk: columns of T are multiplied, not rows of K and V."""
    scaled = t.to(F32) * beta
    of_v, of_k = scaled.to(p.factor), (scaled * exp(g)).to(p.factor)
    return (of_k @ k).to(p.factor), (of_v @ v).to(p.factor)


@kernel(results="h x last", k="row key", w="row key", u="row value", g="row", end="1", first="key value", walks="row")
def delta_states(k: Any, w: Any, u: Any, g: Any, end: Any, first: Any, p: StatePrecision, as_pto: bool = False) -> Any:
    """Return S before each chunk, X = U - W S of its tokens, and S behind the last chunk.

    ``end``: g of a chunk's last token; ``first``: S before the first chunk; ``as_pto``: K has the decays, computed
    while W S is under way, not X.
    """
    s = initial(first)
    for kj, wj, uj, gj, ej in tiles(k, w, u, g, end):
        h, kept = s.to(p.factor), s.to(p.factor)
        keys = (kj.to(F32) * exp(ej - gj)).to(p.factor) if as_pto else kj
        x = uj.to(F32) - p.left(wj @ h)
        yield kept, x.to(p.factor)
        fed = (x if as_pto else x * exp(ej - gj)).to(p.factor)
        s = s * exp(ej) + p.left(keys.T @ fed, p.state)
    return s


@kernel(results="s", k="token key", v="token value", g="token", end="1")
def chunk_states(k: Any, v: Any, g: Any, end: Any, p: StatePrecision) -> Any:
    """Return the addend of a chunk to the state, each token decayed to the chunk's end."""
    s = full("key value", 0.0, p.state)
    for kj, vj, gj, ej in tiles(k, v, g, end, axis="token"):
        s = s + p.left(kj.T @ (vj.to(F32) * exp(ej - gj)).to(p.factor), p.state)
    return s


@kernel(results="h last", s="key value", end="1", first="key value")
def passed(s: Any, end: Any, first: Any, p: StatePrecision) -> Any:
    """Return the state before each chunk, and after the last, from the addends of chunks."""
    state = initial(first)
    for sj, ej in tiles(s, end, axis="token"):
        yield state.to(p.factor)
        state = state * exp(ej) + sj
    return state


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
    q: Any,
    k: Any,
    v: Any,
    h: Any,
    below: Any,
    g: Any,
    gt: Any,
    x: Any,
    skip: Any,
    p: StatePrecision,
    as_pto: bool = False,
) -> Any:
    """Return a chunk's results as `outputs`, with decays from their sums: ``g`` of queries, ``gt`` of keys.

    ``skip``: the factor of the input ``x`` in its result, by head; None: 0. ``as_pto``: rows precede products that they
    do not need.
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
    """Tokens cut into chunks, the last of which may be ragged, and a state into panels of ``each`` columns.

    ``high``: rows of a panel.
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
    def of(cls, sizes: Sequence[int], tiling: Any) -> Chunks:
        """Return chunks of batch, heads, tokens, channels of keys and of values; panels by a tiling's fields."""
        batch, heads, tokens, key, value = sizes
        high = min(key, getattr(tiling, "block_key", key))
        return cls(batch, heads, tokens, key, value, tiling.chunk, tiling.block_value, high)

    @property
    def count(self) -> int:
        """Chunks of a sequence."""
        return ceil_div(self.tokens, self.chunk)

    @cached_property
    def runs(self) -> tuple[TileRun, ...]:
        """The walk over chunks."""
        whole, rest = divmod(self.tokens, self.chunk)
        ragged = TileRun(whole * self.chunk, rest, 1, rest)
        return (TileRun(0, self.chunk, whole, self.chunk),) * (whole > 0) + (ragged,) * (rest > 0)

    def spans(self, each: int = 0) -> dict[str, int]:
        """Return the largest spans, ``each`` columns of values a block, else a panel's."""
        width = min(each or self.each, self.value)
        return {"row": self.chunk, "token": self.chunk, "key": self.key, "value": width, "chunk": 1}

    def panels(self) -> tuple[WorkTile, ...]:
        """Return a block for each panel of a head's state, which walks the chunks."""
        return tuple(
            WorkTile(b, head, (("key", r, rows), ("value", c, n)), self.runs)
            for b, head in product(range(self.batch), range(self.heads))
            for (r, rows), (c, n) in product(chunks(self.key, self.high), chunks(self.value, self.each))
        )

    def blocks(self, each: int = 0, *, is_walked: bool = False) -> tuple[WorkTile, ...]:
        """Return a block for each chunk and panel; ``is_walked``: of the state, with the chunk as its only tile."""
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
        """Return a tensor of a matrix a head."""
        return GlobalTensor(n, self.batch, self.heads, rows, cols, fmt, role)

    def stack(self, n: str, rows: int, cols: int, fmt: str, role: Role = "workspace") -> Stacked:
        """Return a tensor of a matrix a chunk."""
        return Stacked("chunk", self.count, GlobalTensor(n, self.batch * self.count, self.heads, rows, cols, fmt, role))


def decay_sums(function: Any, of: Chunks, each: int, results: list[GlobalTensor], **read: GlobalTensor) -> Phase:
    """Return the kernel, `decays` or `stepped`, of sums of log decays, whole chunks of some ``each`` tokens a block."""
    width = max(of.chunk, each // of.chunk * of.chunk)
    cells = tuple(
        WorkTile(b, head, ((ONE, 0, 1), ("token", at, n)))
        for b, head, (at, n) in product(range(of.batch), range(of.heads), chunks(of.tokens, width))
    )
    made: Phase = function.phase("decays", cells, {"token": width}, results, chunk=of.chunk, **read)
    return made


def chunked(
    of: Chunks, p: StatePrecision, tensors: Mapping[str, GlobalTensor], values: Mapping[str, Callable[[], Any]]
) -> list[Phase]:
    """Return both kernels.

    ``tensors``: q, k, v, o; k_h, the keys that update S, if not k; keep, a vector for each chunk; decay; into and out
    for a decay a head. ``values``: functions that return the constant ones, by name.
    """
    t, h = tensors, of.stack("h", of.key, of.value, p.factor)
    more: dict[str, Any] = {"p": p, "arithmetic": p.arithmetic}
    kept = Stacked("chunk", of.count, t["keep"])
    known = {n: f for n, f in values.items() if n in ("keep", "into")}
    fed: dict[str, Any] = {"k": t.get("k_h", t["k"]), "v": t["v"], "into": t.get("into"), "keep": kept}
    before = states.phase("states", of.panels(), of.spans() | {"key": of.high}, [h], values=known, **fed, **more)
    read: dict[str, Any] = {**{n: t[n] for n in ("q", "k", "v", "decay")}, "out": t.get("out"), "h": h}
    known = {n: f for n, f in values.items() if n in ("decay", "out")}
    return [before, outputs.phase("outputs", of.blocks(), of.spans(), [t["o"]], values=known, **read, **more)]
