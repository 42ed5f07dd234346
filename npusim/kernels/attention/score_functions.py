"""Functions of scaled scores before they are masked, as data of a problem (soft-cap and ALiBi); and learned sinks.

A kernel with the hook ``score`` applies these functions; a kernel without the hook does not compute such a problem.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.config.head_scores import alibi_slopes, sink_logits
from npusim.errors import TilingError
from npusim.formats import cast
from npusim.formats.exponential import LOG2_E
from npusim.kernels.attention.tiling_mask import ByIndices, PartByPart
from npusim.kernels.form.language import Value, in_units_of, tanh
from npusim.late_methods import dataclass
from npusim.program.ir.tile import GlobalTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from npusim.config.problem import Problem
    from npusim.kernels.form.lowering import Kernel


def exponent_factor(variant: str) -> float:
    """Return the factor of scores before this exponential: log2 e for powers of two, else 1."""
    return LOG2_E if variant.startswith("exp2.") else 1.0


@dataclass(frozen=True, slots=True)
class ProblemScore:
    """The hook of a problem: ``softcap tanh(s / softcap)``, a head's slope times the distance to a key, a bias.

    ``unit``: the unit of the kernel's scores, slopes and results; with a soft-cap, scores are multiples of the soft-cap
    before and after it.
    """

    softcap: float | None
    unit: float = 1.0

    def __call__(self, s: Value, alibi: Value | None = None, bias: Value | None = None) -> Value:
        """Return scaled scores after the problem's functions."""
        if self.softcap is not None:
            s = tanh(s) if self.softcap == self.unit else tanh(s / self.softcap) * self.softcap
        s = s if alibi is None else s + alibi
        if bias is None:
            return s
        return s + (bias.to(s.fmt) if self.unit == 1 else bias.to(s.fmt) * (1 / self.unit))


def scored(kernel: Kernel, problem: Problem, p: Any, scale: float, packed: int = 1) -> tuple[Kernel, dict[str, Any]]:
    """Return a kernel that applies the problem's functions to scores, and its arguments; ``scale``: the scale of
    scores.

    ``packed`` heads are stacked. If the precision's exponent does not use scaled scores, these stay in units of the
    scale, or of a soft-cap, as in FlashAttention-2 and -3. A kernel with ``before`` first multiplies scores by this
    factor. Raises `TilingError` for a kernel without such a hook.
    """
    factor, changes = exponent_factor(p.exp_variant), [name for name in problem.score_changes if name != "sink_logits"]
    is_scaled = getattr(p, "exponent", "scaled") in ("", "scaled") or "unit" not in kernel.parameters
    unit = 1.0 if is_scaled else problem.softcap or scale
    scaling: dict[str, Any] = {"scale": scale} if is_scaled else {"scale": scale / unit, "unit": unit * factor}
    if not changes:
        return kernel, {"scale": scale * factor} if is_scaled else scaling
    if "score" not in kernel.parameters:
        raise TilingError(
            f"{changes[0]}: {kernel.__name__} only scales and masks scores; use --ignore {changes[0]} to run without it"
        )
    is_before = "before" in kernel.parameters
    scaling = {"before": scale, "scale": factor} if is_before else scaling
    slopes, operands = tuple(x / unit for x in alibi_slopes(problem.heads)), dict[str, Any]()
    if problem.alibi:
        operands["alibi"] = head_values("alibi", slopes, problem, p.softmax, packed)
    if problem.bias:
        heads, each = problem.heads // packed if problem.bias == "head" else 1, _queries(problem, packed)
        sizes = len(each), heads, problem.seq_q * packed, problem.seq_kv
        operands["bias"] = GlobalTensor("bias", *sizes, problem.dtype, "input")
    hooked = _with_problem(kernel, ProblemScore(problem.softcap, unit), tuple(operands))
    values = {"values": {"bias": partial(_bias, problem, packed)}} if problem.bias else {}
    return hooked, {**scaling, "score_factor": factor if is_scaled and not is_before else 1.0, **operands, **values}


def _queries(problem: Problem, packed: int) -> tuple[int, ...]:
    """Return the number of rows of each of ``packed`` heads: one number for each sequence, or one for all."""
    return problem.queries if packed > 1 and len(set(problem.queries)) > 1 else (problem.seq_q,)


def _bias(problem: Problem, packed: int) -> PartByPart:
    """Return a bias in the form that a kernel reads, with ``packed`` heads stacked, in the problem's format."""
    each = _queries(problem, packed)

    def part(batch: int, head: int, rows: slice, cols: slice) -> Any:
        places = (divmod(row, each[batch]) for row in range(rows.start, rows.stop))
        heads = ((head * packed + within, query) for within, query in places)
        return cast(np.array([problem.bias_row(h, q, problem.seq_kv)[cols] for h, q in heads]), problem.dtype)

    return PartByPart((problem.seq_q * packed, problem.seq_kv), part)


def with_score(kernel: Kernel, score: Callable[..., Any], operands: Iterable[str]) -> Kernel:
    """Return a kernel whose hook ``score`` is a function of scores, which may take further operands by name."""
    names = tuple(operands)
    if "score" not in kernel.parameters:
        kernel.fail("it has no parameter `score`: add it to the function's parameters, and call it on scaled scores")

    def function(**arguments: Any) -> Any:
        more, factor = {n: arguments.pop(n) for n in names}, arguments.pop("score_factor")

        def hook(s: Any) -> Any:
            if factor == 1:
                return score(s, **more)
            with in_units_of(factor):  # the hook's exponentials are to the base e
                return score(s, **more) * factor

        return kernel.function(**arguments, score=hook)

    return kernel.wrapped(function, (*names, "score_factor"), dict.fromkeys(names, "row key"))


#: One kernel for each kernel and hook, because tables are stored by kernel.
_with_problem = lru_cache(maxsize=64)(with_score)


# ---------------------------------------------------------------- numbers of heads


@dataclass(frozen=True, slots=True)
class HeadValues(ByIndices):
    """The addend of each query head, computed from indices for every tile, so that no matrix is in memory.

    ``numbers``: one for each query head; ``packed``: number of heads that are stacked in a block.  Each row has its
    head's number or, if there are columns, this number, as a slope, times (key - query).
    """

    numbers: tuple[float, ...]
    packed: int
    is_loaded = False
    is_everywhere = True

    @property
    def index_work(self) -> tuple[int, int]:
        """Instructions per element: for a slope 3, the difference, its conversion and the product (PTX ISA)."""
        return 3 if self.cols > 1 else 0, 0

    def part(self, batch: int, head: int, rows: slice, cols: slice) -> Any:
        """Return a part of a head's matrix."""
        offset, row = np.divmod(np.arange(rows.start, rows.stop), self.rows)
        within, query = np.divmod(row, self.each[batch])
        numbers = np.array(self.numbers)[head * self.packed + within][:, None]
        distance = np.arange(cols.start, cols.stop)[None] - (offset + query)[:, None]
        return cast(numbers * (distance if self.cols > 1 else 1), self.fmt)


def head_values(name: str, numbers: tuple[float, ...], problem: Problem, fmt: str, packed: int = 1) -> HeadValues:
    """Return the numbers of the query heads as a kernel's addend in format ``fmt``: slopes (``alibi``), or one for each
    row.
    """
    cols = max(2, problem.seq_kv) if name == "alibi" else 1
    sizes = problem.last_offset, problem.seq_q * packed, cols, _queries(problem, packed)
    return HeadValues(name, fmt, len(numbers) // packed, *sizes, numbers, packed)


def sink_of(problem: Problem, p: Any, fmt: str, packed: int = 1) -> HeadValues | None:
    """Return the additional scores (sinks), one per query head, in the form of ``p``'s exponentials; None: no sinks."""
    if not problem.sink_logits:
        return None
    factor = exponent_factor(p.exp_variant)
    return head_values("sink", tuple(x * factor for x in sink_logits(problem.heads)), problem, fmt, packed)
