"""Attention without fusion, and kernels that prepare inputs: rows in, rows out, phase by phase.

Scores are stored in the inputs' format after each kernel, as frameworks do; softmax works in
float32 inside its kernel.  A list of operators (`OPERATORS`) runs between the two products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from npusim.algorithms.blocks import MASKED, AttentionTensors, attention_tensors, grid, with_columns
from npusim.algorithms.flash import NamedFormats, ScaleIn, divisor, hidden, narrow_overflow
from npusim.algorithms.gemm import copy
from npusim.algorithms.language import ONE, Value, exp, full, maximum, tiles, where
from npusim.algorithms.lowering import Kernel, kernel
from npusim.algorithms.phase import Phase, Stacked, TileRun
from npusim.algorithms.tiling_mask import TilingMask, mask_of
from npusim.errors import TilingError
from npusim.formats import BLOCK_FORMATS, cast, get_block_format, get_format, get_scale_rule
from npusim.ir.tile import GlobalTensor
from npusim.units import chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from npusim.algorithms.phase import Mask
    from npusim.config.problem import Problem, Unseen

WIDE = "float32"
LOWEST = -float(get_format(WIDE).max_finite)
#: Rows that are added up by one product, for a mean.
SUMMED = 256
#: Rows and columns that a kernel which prepares an input takes at a time: as a product's tile is high,
#: and a slice of scores wide.
PREPARED = (128, 8192)


@dataclass(frozen=True, slots=True)
class UnfusedPrecision(NamedFormats):
    """Formats that frameworks store between kernels; ``input`` stands for the format of Q, K and V.

    scores
        S after each kernel that writes it; softmax itself works in float32.
    operand
        P as softmax stores it.
    output
        The result.
    exp_variant, sum_order, arithmetic
        Named choices: an exponential to the base e, the order of row sums, the matrix arithmetic
        (both empty: the device's own).
    scale_in
        The place of the factor of scores, as in `FlashPrecision`.
    """

    name: str
    scores: str = "input"
    operand: str = "input"
    output: str = "input"
    exp_variant: str = "exp.correct"
    sum_order: str = ""
    arithmetic: str = ""
    scale_in: ScaleIn = "scores"
    softmax = "float32"
    intermediates = ("scores", "softmax", "operand", "output")


@kernel(x="row col", mask="row col")
def scaled(x: Value, mask: Value | None, scale: float, fill: float = -math.inf) -> Iterator[Value]:
    """S / sqrt(d), then filled where there is a mask, in the scores' own format."""
    for xj in tiles(x):
        yield where(mask, xj * scale if scale != 1 else xj, fill)


@kernel(x="row col", mask="row col")
def masked(x: Value, mask: Value | None, fill: float = -math.inf) -> Iterator[Value]:
    """Masked scores; without a mask a copy, which one then fills."""
    for xj in tiles(x):
        yield where(mask, xj, fill)


@kernel(x="row col")
def converted(
    x: Value, fmt: str, through: str = "", scale: float = 1.0, axis: str = "", rule: str = ""
) -> Iterator[Value]:
    """Another format, ``through`` a wider one where no instruction converts directly, times a scale.

    ``axis``, ``rule``: of a format in blocks.
    """
    for xj in tiles(x):
        y = (xj.to(through) if through else xj).to(fmt, overflow=narrow_overflow(fmt), axis=axis, rule=rule)
        yield y * scale if scale != 1 else y


@kernel(x="row col", mean="1 col")
def smoothed(x: Value, mean: Value, fmt: str, axis: str = "", rule: str = "") -> Iterator[Value]:
    """The tensor in another format after subtraction of each column's mean, in float32."""
    for xj, mj in tiles(x, mean):
        yield (xj.to(WIDE) - mj).to(fmt, overflow=narrow_overflow(fmt), axis=axis, rule=rule)


@kernel(results="sums", ones="1 key", x="key col")
def column_sums(ones: Value, x: Value) -> Value:
    """Sums of some rows, column by column: a product with ones."""
    return (ones @ x).to(WIDE)


@kernel(results="mean", sums="1 col")
def column_means(sums: Value, count: int) -> Value:
    """Means of columns of so many rows, whose sums are added up part after part."""
    total = full("1 col", 0.0, WIDE)
    for part in tiles(sums, axis="split"):
        total = total + part
    return total * (1 / count)


@kernel(s="row col")
def softmax_whole(s: Value, fmt: str, unseen: Unseen | None = None) -> Iterator[Value]:
    """Softmax of whole rows."""
    for sj in tiles(s):
        x = sj.to(WIDE)
        e = exp(x - (maximum(x.max(), LOWEST) if unseen == "zero" else x.max()))
        yield (e / divisor(e.sum(), unseen)).to(fmt)


@kernel(s="row col")
def softmax_chunked(s: Value, fmt: str, start: float, unseen: Unseen | None = None) -> Iterator[Value]:
    """Softmax of rows that do not fit: statistics chunk by chunk, then the probabilities; ``start``: of the maximum."""
    m, l = full("row", start, WIDE), full("row", 0.0, WIDE)
    for sj in tiles(s):
        x = sj.to(WIDE)
        m_new = maximum(m, x.max())
        l = l * exp(m - m_new) + exp(x - m_new).sum()
        m = m_new
    for sj in tiles(s):
        yield (exp(sj.to(WIDE) - m) / divisor(l, unseen)).to(fmt)


@dataclass(frozen=True, slots=True)
class Operator:
    """One kernel between the two products (none: softmax), the tensor it leaves and its format.

    ``is_masked``: it takes the mask.
    """

    label: str
    leaves: str
    kernel: Kernel | None = None
    fmt: Literal["scores", "operand", "float32"] = "scores"
    is_masked: bool = False


_SCALE = Operator("scale", "s_scaled", scaled)
#: ``masked_fill`` of PyTorch fills a copy of its input; neither it nor a cast is fused with anything.
_MASK = Operator("clone", "s_copied", masked), Operator("mask", "s_masked", masked, is_masked=True)
_SOFTMAX = Operator("softmax", "p", fmt="operand")
#: What runs between Q K^T and P V, by how a framework is used:
#:   fused          the fewest passes there can be
#:   added          as PyTorch runs them where a mask is a tensor that is added: mul, add, softmax
#:   eager          operators of PyTorch, a kernel each: mul, masked_fill, softmax.  A matmul reshapes to three axes, so
#:                  that what does not lie head by head is copied first, as are K and V that heads share.  A softmax of
#:                  float16 or bfloat16 is one kernel that widens inside, on an NPU (op-plugin hands it to aclnnSoftmax
#:                  as it is, that launches SoftmaxV2) as on a GPU; products take and leave plain rows on a 910B (CANN
#:                  ops-nn, batch_matmul_util.cpp: ND on all that have bfloat16)
#:   eager_float32  the same with softmax(..., dtype=float32) and a cast back, as Transformers' models have it
OPERATORS = MappingProxyType(
    {
        "fused": (Operator("scale_mask", "s_masked", scaled, is_masked=True), _SOFTMAX),
        "added": (_SCALE, _MASK[1], _SOFTMAX),
        "eager": (_SCALE, *_MASK, _SOFTMAX),
        "eager_float32": (
            _SCALE,
            *_MASK,
            Operator("widen", "s_wide", converted, "float32"),
            Operator("softmax", "p_wide", fmt="float32"),
            Operator("narrow", "p", converted, "operand"),
        ),
    }
)


def unfused(
    problem: Problem,
    operators: str,
    sizes: tuple[int, int],
    p: UnfusedPrecision,
    product: Callable[..., Sequence[Any]],
    *,
    reshapes: bool,
) -> list[Any]:
    """Return attention as products with a list of `OPERATORS` between them, each a phase over the whole matrix.

    ``product(label, a, b, c, ...)`` returns a machine's phases of C = A B; the kernels between take blocks of
    ``sizes`` = (rows, columns).  ``reshapes``: a product of a framework takes each head's rows together.
    """
    io, first, last = attention_tensors(problem, p.output), list[Phase](), list[Phase]()
    if operators != "fused" and reshapes:
        call, io = io, AttentionTensors(*(_reshaped(t, problem.heads) for t in (io.q, io.k, io.v, io.o)))
        inputs = (call.q, io.q), (call.k, io.k), (call.v, io.v)
        first = [copy(a, b, sizes[0], b.name) for a, b in inputs if a != b]
        last = [copy(io.o, call.o, sizes[0], io.o.name)] if io.o != call.o else []
    scale, of_queries = problem.scale, list[Phase]()
    if p.scale_in == "queries":
        of_queries, io = prepared(io, problem.dtype, scale)
        scale = 1.0
    source = raw = GlobalTensor("s", problem.batch, problem.heads, problem.seq_q, problem.seq_kv, p.scores, "workspace")
    is_cut, middle = problem.causal and problem.seen.is_plain, list[Phase]()
    mask = TilingMask(max(sizes[0], problem.seq_kv)) if is_cut else mask_of(problem, sizes, "loaded")
    masked_share = 1 - problem.attended_pairs() / (problem.seq_q * problem.seq_kv)
    fill = hidden(problem.unseen, p.scores)
    if mask is not None and math.isinf(fill) and not get_format(p.scores).has_infinity:
        raise TilingError(
            f"precision: scores of {p.scores} have no -Inf for hidden keys; give --precision framework,scores=float16"
        )
    for one in OPERATORS[operators]:
        if one.kernel is masked and mask is None:
            continue  # it masks, or prepares for that
        out = replace(raw, name=one.leaves, fmt={"scores": p.scores, "operand": p.operand}.get(one.fmt, one.fmt))
        if one.kernel is None:
            start = -math.inf if problem.seen.is_plain and not problem.unseen else LOWEST
            phase = softmax(source, out, sizes, p, start, problem.unseen)
        else:
            more: dict[str, Any] = {"scale": scale} if one.kernel is scaled else {}
            more |= {"fill": fill} if one.is_masked else {}
            seen, offset = mask if one.is_masked else None, problem.causal_offset
            phase = element_wise(one.label, one.kernel, source, out, sizes, mask=seen, offset=offset, **more)
        kind = {"mask": "add", "softmax": "softmax"}.get(one.label, "copy")
        middle.append(replace(phase, operator=(kind, masked_share)))
        source = out
    return [
        *first,
        *of_queries,
        *product("scores", io.q, io.k, raw, is_transposed=True, arithmetic=p.arithmetic, role="score"),
        *middle,
        *product("values", source, io.v, io.o, arithmetic=p.arithmetic),
        *last,
    ]


def _reshaped(tensor: GlobalTensor, heads: int) -> GlobalTensor:
    """Return the operand of a framework's batched product for a tensor: each head's rows together, a head for each."""
    if tensor.heads == heads and not tensor.is_interleaved:
        return tensor
    label = f"{tensor.name}_contiguous" if tensor.heads == heads else f"{tensor.name}_repeated"
    return replace(tensor, name=label, heads=heads, role="workspace", is_interleaved=False)


def element_wise(
    label: str,
    kernel: Kernel,
    source: GlobalTensor,
    out: GlobalTensor,
    sizes: tuple[int, int],
    *,
    mask: Mask | None = None,
    offset: int | None = None,
    **more: Any,
) -> Phase:
    """Return a kernel of x over all elements: ``sizes`` = (rows of a block, columns), ``more`` has its other arguments.

    ``offset``: the number of columns that a row sees past its own number on the mask's diagonal.
    """
    rows = tuple(replace(c, causal_offset=offset) for c in grid(source, ("row", sizes[0])))
    blocks = with_columns(rows, source.cols, sizes[1], MASKED if mask else frozenset())
    return kernel.phase(
        label, blocks, {"row": sizes[0], "col": sizes[1]}, [out], x=source, mask=mask, fmt=out.fmt, **more
    )


def workspace(like: GlobalTensor, name: str, fmt: str) -> GlobalTensor:
    """Return the tensor that one kernel leaves for another: the same matrices, head by head."""
    return replace(like, name=name, fmt=fmt, role="workspace", is_interleaved=False)


def means(x: GlobalTensor) -> tuple[list[Phase], GlobalTensor]:
    """Return the kernels that compute the mean of each column of a tensor's heads in float32, and their result.

    Raises `TilingError` for heads of various lengths.
    """
    if x.lengths:
        raise TilingError(f"smooth: the mean of {x.name} is over sequences of one length; these differ")
    mean = replace(workspace(x, f"{x.name}_mean", WIDE), rows=1, stretch_rows=0)
    parts, heads = list(chunks(x.rows, SUMMED)), grid(mean, (ONE, 1))
    sums = Stacked("split", len(parts), replace(mean, name=f"{x.name}_sums", batch=x.batch * len(parts)))
    spans = [(("key", at, n), ("split", i, 1)) for i, (at, n) in enumerate(parts)]
    summed = column_sums.phase(
        f"sum_{x.name}",
        tuple(replace(head, spans=(*head.spans, *part)) for head in heads for part in spans),
        {"key": SUMMED, "col": x.cols, "split": 1},
        [sums],
        ones=GlobalTensor("ones", 1, 1, 1, SUMMED, x.fmt, "constant"),
        x=x,
        values={"ones": lambda: cast(np.ones((1, 1, 1, SUMMED)), x.fmt)},
    )
    whole = tuple(replace(head, runs=(TileRun(0, 1, len(parts), 1),)) for head in heads)
    sizes = {"col": x.cols, "split": 1}
    averaged = column_means.phase(f"average_{x.name}", whole, sizes, [mean], sums=sums, count=x.rows)
    return [summed, averaged], mean


def prepared(
    inputs: AttentionTensors, fmt: str, scale: float | None = None, rule: str = "", smooth: str = "", values: str = ""
) -> tuple[list[Phase], AttentionTensors]:
    """Return the kernels that convert Q, K and V to ``fmt``, Q times a scale, and their results.

    ``values``: another format of V.  Blocks run along the axis that products contract: along the head for Q and K,
    along keys for V.  ``smooth``: tensors from which the mean of each column is subtracted first.
    """
    phases, changed, of_keys = list[Phase](), dict[str, GlobalTensor](), fmt
    if rule:
        get_scale_rule(rule, get_block_format(fmt))  # one for another format is refused before there is a kernel
    for n, factor in zip("qkv", (scale, None, None), strict=True):
        tensor: GlobalTensor = getattr(inputs, n)
        fmt = values if n == "v" and values else of_keys
        is_in_blocks = fmt in BLOCK_FORMATS
        if tensor.fmt == fmt and factor is None and n not in smooth:
            continue
        changed[n] = workspace(tensor, f"{n}_{fmt}" if is_in_blocks else f"{n}_prepared", fmt)
        more: dict[str, Any] = {"axis": "row" if n == "v" else "col", "rule": rule} if is_in_blocks else {}
        if n in smooth:
            averaged, more["mean"] = means(tensor)
            phases += averaged
        else:
            more |= {"scale": 1.0 if factor is None else factor, "through": WIDE}
        phases.append(
            element_wise(
                f"quantise_{n}" if is_in_blocks else f"prepare_{n}",
                smoothed if n in smooth else converted if tensor.fmt != fmt else scaled,
                tensor,
                changed[n],
                (PREPARED[0], min(tensor.cols, PREPARED[1])),
                **more,
            )
        )
    return phases, replace(inputs, **changed)


def softmax(
    source: GlobalTensor,
    out: GlobalTensor,
    sizes: tuple[int, int],
    p: UnfusedPrecision,
    start: float,
    unseen: Unseen | None = None,
) -> Phase:
    """Return the softmax of stored scores: rows of ``sizes[1]`` columns whole, longer ones in two passes.

    ``start``: the start of their maximum; finite where a mask may hide all first columns of a row.  ``unseen``: the
    result of a row that is completely hidden.
    """
    blocks = with_columns(grid(source, ("row", sizes[0])), source.cols, sizes[1])
    kernel = softmax_whole if source.cols <= sizes[1] else softmax_chunked
    spans = {"row": sizes[0], "col": sizes[1]}
    return kernel.phase("softmax", blocks, spans, [out], s=source, fmt=out.fmt, p=p, start=start, unseen=unseen)
