"""What P-Cast states without a table (proposition 3, section 5.3) or leaves open (section 7.4).

As in `study`, errors are exact expectations over V ~ N(0, 1) unless V is named, and heads are
independent samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from npusim import formats
from npusim.config.problem import Problem, SinkData
from npusim.formats import get_format
from npusim.program.ir.op import Opcode
from npusim.program.ir.tile import GlobalTile
from npusim.program.numerics.input_tensors import recipe_source
from reports.parts.values import GPU, observe, values
from reports.pcast_numerics import study
from reports.pcast_numerics.theory import largest_zero

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npusim.program.numerics.executor import HeadSource, Moment

__all__ = [
    "DYNAMIC",
    "Cast",
    "Collapse",
    "Noise",
    "Placed",
    "casts",
    "collapse",
    "dynamic_errors",
    "eight_bit",
    "placed",
    "real_collapse",
]

Doubles = NDArray[np.float64]
Singles = NDArray[np.float32]
E4M3 = get_format("float8_e4m3fn")
#: The cast of P with nothing before it: what is recast starts from it.
PLAIN = "hpc_ops_s1"


class Collapse(NamedTuple):
    """Proposition 3 and measured values, one for each head."""

    proposition: Doubles  #: the sum of p^2 over the keys that were zeroed (equation 9)
    error: Doubles  #: mean squared error of the output


def collapse(problem: Problem, precision: str) -> Collapse:
    """Return the error that equation 9 gives for the keys zeroed, and the error there is."""
    inputs = recipe_source(problem)
    exact = study.exact_weights(problem, inputs)

    def measure(where: Any, weights: Doubles) -> tuple[float, float]:
        p = exact(where)
        lost = np.where(weights == 0, p, np.float32(0))
        weights -= p
        return float(np.vdot(lost, lost)), float(np.vdot(weights, weights))

    return Collapse(*study.by_head(problem, precision, measure, source=inputs).T)


def real_collapse(precision: str) -> float:
    """Return the error from SmolLM2's lost mass with its own V, relative to the error by equation 9.

    The loss is the sum of p_j v_j over the zeroed keys; equation 9 assumes that the v_j are uncorrelated and have the
    same mean square.
    """
    problem, source = study.real_tensors()
    exact = study.exact_weights(problem, source)

    def measure(where: Any, weights: Doubles) -> tuple[float, float]:
        v = np.asarray(source("v", where.batch, where.head // problem.group_size), np.float64)
        lost = np.where(weights == 0, exact(where), np.float32(0)).astype(np.float64)
        missing = lost @ v
        return float(np.vdot(missing, missing)) / v.shape[1], float(np.vdot(lost, lost)) * float((v**2).mean())

    real, proposed = study.by_head(problem, precision, measure, source=source).mean(axis=0)
    return float(real / proposed)


# ---------------------------------------------------------------- section 5.3


class Cast(NamedTuple):
    """What becomes of normal keys' P at one scale, as fractions of them."""

    normal: float
    subnormal: float
    zero: float


class _Casts:
    """Counts what every P of a normal key would be cast to at several scales, powers of two or not."""

    def __init__(self, scales: tuple[float, ...], sinks: int) -> None:
        self.sinks = sinks
        self.scales = np.array(scales, np.float32)
        self.counts = np.zeros((len(scales), 2))
        self.total = 0
        self._first_key = 0

    def __call__(self, moment: Moment) -> None:
        step = moment.step
        if step.name == "k" and isinstance(step.srcs[0], GlobalTile):
            self._first_key = step.srcs[0].row
        if (moment.role, step.opcode) != ("weight", Opcode.EXP):
            return
        p = moment.result[..., max(0, self.sinks - self._first_key) :]
        self.total += p.size
        for index, scale in enumerate(self.scales):
            scaled = p * scale
            self.counts[index] += (scaled >= E4M3.min_normal).sum(), (scaled <= largest_zero()).sum()


def casts(problem: Problem, scales: tuple[float, ...]) -> list[Cast]:
    """Return what P of the normal keys becomes in forward order, for each scale."""
    assert isinstance(problem.data, SinkData)
    counter = _Casts(scales, problem.data.sinks)
    observe("fp8_attention", problem, PLAIN, counter)
    fractions = counter.counts / counter.total
    return [Cast(float(n), float(1 - n - z), float(z)) for n, z in fractions]


# ---------------------------------------------------------------- section 7.4


def _dynamic(axes: tuple[int, ...]) -> Callable[[Singles], Doubles]:
    """Return a cast of P with the largest power of two that keeps S P below 448, anew over ``axes``."""

    def recast(p: Singles) -> Doubles:
        top = p.max(axis=axes, keepdims=True)
        room = np.divide(E4M3.max_finite, top, out=np.ones_like(top), where=top > 0)
        scale = np.exp2(np.floor(np.log2(room)))
        quantised = formats.cast(p * scale, E4M3.name, overflow="saturate")
        found: Doubles = quantised.astype(np.float64) / scale
        return found

    return recast


#: Dynamic scales: one for each row of a tile, or one for the tile (64 queries x 64 keys).
DYNAMIC: Mapping[str, Callable[[Singles], Doubles]] = {
    "each row of a block": _dynamic((2,)),
    "each block": _dynamic((1, 2)),
}


def dynamic_errors(problem: Problem, *, is_reverse: bool) -> dict[str, Doubles]:
    """Return each head's error with P cast by a static 256 and by the dynamic scales.

    The dynamic cast stands for the schedule's own, on the P that the schedule computes; a kernel would
    undo it in the float32 accumulator of the block.
    """
    inputs = recipe_source(problem)
    squared = study.squared_against(study.exact_weights(problem, inputs))
    order = f",is_reverse={str(is_reverse).lower()}"
    static = study.by_head(problem, f"hpc_ops{order}", squared, source=inputs)
    return {"static 256": static[:, 0]} | {
        name: study.by_head(problem, PLAIN + order, squared, source=inputs, recast=cast)[:, 0]
        for name, cast in DYNAMIC.items()
    }


class Placed(NamedTuple):
    """Sinks at given places: normal keys zeroed, and the error, a value a head."""

    zeroed: Doubles
    error: Doubles


def placed(problem: Problem, places: tuple[int, ...], precision: str) -> Placed:
    """Return what forward or reverse order makes of sinks at ``places``, one sink at each."""
    drawn = recipe_source(problem)
    order = np.arange(problem.seq_kv)
    for sink, place in enumerate(places):
        order[[sink, place]] = order[[place, sink]]

    def inputs(name: str, batch: int, head: int) -> NDArray[Any]:
        found = drawn(name, batch, head)
        return found if name == "q" else found[order]

    exact = study.exact_weights(problem, inputs)
    is_normal = np.ones(problem.seq_kv, bool)
    is_normal[list(places)] = False

    def measure(where: Any, weights: Doubles) -> tuple[float, float]:
        zeroed = float((weights[:, is_normal] == 0).mean(axis=1).sum())
        weights -= exact(where)
        return zeroed, float(np.vdot(weights, weights))

    return Placed(*study.by_head(problem, precision, measure, source=inputs).T)


class Noise(NamedTuple):
    """Squared errors with E4M3 inputs, a value a head.

    cast
        Of the kernel's output against exact attention on the same rounded inputs.
    inputs
        Of exact attention on rounded inputs against that on the inputs before they were rounded.
    total
        Of the kernel's output against exact attention on the inputs before they were rounded.
    """

    cast: Doubles
    inputs: Doubles
    total: Doubles


#: Of the problems with E4M3 inputs: with a head size of 64 every gap of table 1 is an E4M3 number, and
#: as many columns of V are drawn to average over.
EIGHT_BIT_DIM = 64


def eight_bit(gap: float, keys: int, heads: int, precisions: Mapping[str, str], *, seed: int) -> dict[str, Noise]:
    """Return the errors with Q, K and V rounded to E4M3, products on the tensor cores, V as drawn."""
    problem = Problem(
        heads=heads,
        seq_q=study.QUERIES,
        seq_kv=keys,
        head_dim=EIGHT_BIT_DIM,
        dtype=E4M3.name,
        data=SinkData(kind="sink", gap=gap, seed=seed),
    )
    rounded = recipe_source(problem)
    drawn = recipe_source(problem.model_copy(update={"dtype": "float32"}))
    exact, original = (_attention(problem, source) for source in (rounded, drawn))
    found = {}
    for name, precision in precisions.items():
        kernel = values("fp8_attention", problem, precision, hw=GPU).output[0].astype(np.float64)
        found[name] = Noise(_squared(kernel - exact), _squared(exact - original), _squared(kernel - original))
    return found


def _attention(problem: Problem, source: HeadSource) -> Doubles:
    """Return float64 attention, (heads, rows, columns of V)."""
    heads = []
    for head in range(problem.heads):
        q, k, v = (np.asarray(source(n, 0, head), np.float64) for n in ("q", "k", "v"))
        heads.append(study.softmax(problem, q, k) @ v)
    return np.array(heads)


def _squared(difference: Doubles) -> Doubles:
    found: Doubles = (difference**2).mean(axis=(1, 2))
    return found
