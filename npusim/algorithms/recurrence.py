"""Linear attention with a decay, chunk by chunk: the states before the chunks, then what each chunk reads of them.

S_t = decay_t S_(t-1) + k_t^T v_t and o_t = q_t S_t: within a chunk as scores with a decay, between chunks as a state.
Two kernels, as flash-linear-attention has them (``chunk_fwd_kernel_h``, ``chunk_fwd_kernel_o``): retention (Sun et al.
2023), where the decay is a head's, and gated linear attention (Yang et al. 2024), where a token and a channel of keys
has one of its own, which a kernel before brings into Q and K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from npusim.algorithms.flash import NamedFormats
from npusim.algorithms.language import exp, full, tiles
from npusim.algorithms.lowering import kernel
from npusim.algorithms.phase import Stacked, TileRun, WorkTile
from npusim.ir.tile import GlobalTensor
from npusim.units import ceil_div, chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npusim.algorithms.phase import Phase

F32 = "float32"


@dataclass(frozen=True, slots=True)
class StatePrecision(NamedFormats):
    """What lies between products; ``input`` stands for the format of Q, K and V.

    state
        S from chunk to chunk, and what is added to it.
    factor
        What rows make for products, S among them as the next kernel reads it.
    output
        The result.
    exp_variant, arithmetic
        Named choices: an exponential to the base e, the matrix arithmetic (empty: the device's own).
    """

    name: str
    state: str = F32
    factor: str = "input"
    output: str = "input"
    exp_variant: str = "exp.correct"
    arithmetic: str = ""
    intermediates = ("state", "factor", "output")


@kernel(results="qe ke kd", q="row key", k="row key", b="row key", rest="row key")
def gated(q: Any, k: Any, b: Any, rest: Any, p: StatePrecision) -> Any:
    """Q e^b, K e^-b and K e^(last - b): the sums b of a chunk's log gates on both sides of the scores."""
    wide = k.to(F32)
    return (q.to(F32) * exp(b)).to(p.factor), (wide * exp(-b)).to(p.factor), (wide * exp(rest)).to(p.factor)


@kernel(results="h", k="token key", v="token value", into="token", keep="key", walks="token", still="into")
def states(k: Any, v: Any, into: Any, keep: Any, p: StatePrecision) -> Any:
    """Return S before each chunk; ``into``: by what a token of a chunk has decayed at its end, where K does not say it.

    ``keep``: by what S decays in a chunk, by channel of keys.
    """
    s = full("key value", 0.0, p.state)
    for kj, vj, ej in tiles(k, v, keep):
        yield s.to(p.factor)
        fed = vj if into is None else (vj.to(F32) * into).to(p.factor)
        s = s * ej + (kj.T @ fed).to(p.state)


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
    a = ((q @ k.T).to(F32) * decay).to(p.factor)
    inter = (q @ h).to(F32)
    return ((a @ v).to(F32) + (inter if out is None else inter * out)).to(p.output)


def chunked(
    sizes: tuple[int, int, int, int, int],
    chunk: int,
    block_value: int,
    p: StatePrecision,
    tensors: Mapping[str, GlobalTensor],
    values: Mapping[str, Callable[[], Any]],
) -> list[Phase]:
    """Return both kernels of (batch, heads, tokens, channels of keys, of values), ``block_value`` columns of S a block.

    ``tensors``: q, k, v, o; k_h, which goes into S, where that is not k; keep, a vector for each chunk; decay; into and
    out where the decay is a head's.  ``values``: functions of those that are constants, by name.
    """
    batch, heads, tokens, key, value = sizes
    count, t = ceil_div(tokens, chunk), tensors
    whole, rest = divmod(tokens, chunk)
    runs = (TileRun(0, chunk, whole, chunk),) * (whole > 0) + (TileRun(whole * chunk, rest, 1, rest),) * (rest > 0)
    rows = ("key", 0, key)
    cells = tuple(
        WorkTile(b, head, (rows, ("value", c, n)), runs)
        for b in range(batch)
        for head in range(heads)
        for c, n in chunks(value, block_value)
    )
    h = Stacked("chunk", count, GlobalTensor("h", batch * count, heads, key, value, p.factor, "workspace"))
    spans = {"row": chunk, "token": chunk, "key": key, "value": min(value, block_value)}
    more: dict[str, Any] = {"p": p, "arithmetic": p.arithmetic}
    kept = Stacked("chunk", count, t["keep"])
    known = {n: f for n, f in values.items() if n in ("keep", "into")}
    fed: dict[str, Any] = {"k": t.get("k_h", t["k"]), "v": t["v"], "into": t.get("into"), "keep": kept}
    before = states.phase("states", cells, spans, [h], values=known, **fed, **more)
    of_chunks = tuple(
        WorkTile(b, head, (("row", at, n), ("token", at, n), ("chunk", at // chunk, 1), ("value", c, width)))
        for b in range(batch)
        for head in range(heads)
        for at, n in chunks(tokens, chunk)
        for c, width in chunks(value, block_value)
    )
    read: dict[str, Any] = {**{n: t[n] for n in ("q", "k", "v", "decay")}, "out": t.get("out"), "h": h}
    known = {n: f for n, f in values.items() if n in ("decay", "out")}
    return [before, outputs.phase("outputs", of_chunks, {**spans, "chunk": 1}, [t["o"]], values=known, **read, **more)]
