"""Unfused attention: scores and probabilities pass through global memory.

S = Q K^T, then scale and mask, then softmax, then P V, each over the complete matrix; a causal mask saves no work.  It
runs either as four kernels, with the smallest possible number of passes, or eagerly, as in frameworks, where every
operator is a kernel (`OPERATORS`).  The values are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from npusim.kernel import (
    WIDE,
    AttentionTensors,
    Field,
    GlobalTensor,
    Kernel,
    NamedFormats,
    Phase,
    Phases,
    Problem,
    ScaleIn,
    Tiling,
    TilingError,
    TilingMask,
    Unseen,
    Value,
    attention_tensors,
    converted,
    copy,
    divisor,
    element_wise,
    exp,
    full,
    get_format,
    grid,
    hidden,
    kernel,
    mask_of,
    maximum,
    needs_groups,
    on,
    prepared,
    scaled,
    schedule,
    tiles,
    where,
    with_columns,
)
from npusim.machine import Machine

LOWEST = -float(get_format(WIDE).max_finite)


@dataclass(frozen=True, slots=True)
class UnfusedPrecision(NamedFormats):
    """Formats that frameworks store between kernels; ``input`` stands for the format of Q, K and V.

    scores
        Format of S after each kernel that writes it; softmax itself computes in float32.
    operand
        Format in which softmax stores P.
    output
        Format of the result.
    exp_variant, sum_order, arithmetic
        Named choices: an exponential to the base e, the order of row sums, the matrix arithmetic
        (both empty: the device's).
    scale_in
        The place where the factor of scores is applied, as in `FlashPrecision`.
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
def masked(x: Value, mask: Value | None, fill: float = -math.inf) -> Iterator[Value]:
    """Masked scores; without a mask a copy of the scores, which is then filled."""
    for xj in tiles(x):
        yield where(mask, xj, fill)


@kernel(s="row col")
def softmax_whole(s: Value, fmt: str, unseen: Unseen | None = None) -> Iterator[Value]:
    """Softmax of complete rows."""
    for sj in tiles(s):
        x = sj.to(WIDE)
        e = exp(x - (maximum(x.max(), LOWEST) if unseen == "zero" else x.max()))
        yield (e / divisor(e.sum(), unseen)).to(fmt)


@kernel(s="row col")
def softmax_chunked(s: Value, fmt: str, start: float, unseen: Unseen | None = None) -> Iterator[Value]:
    """Softmax of rows that do not fit: first the statistics chunk by chunk, then the probabilities; ``start``: the
    value with which the maximum begins.
    """
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
    """A kernel between the two products (None: softmax), the tensor that it writes, and the format of this tensor.

    ``is_masked``: the kernel reads the mask.
    """

    label: str
    leaves: str
    kernel: Kernel | None = None
    fmt: Literal["scores", "operand", "float32"] = "scores"
    is_masked: bool = False


_SCALE = Operator("scale", "s_scaled", scaled)


#: PyTorch's ``masked_fill`` fills a copy of its input; neither it nor a cast is fused with another operator.
_MASK = Operator("clone", "s_copied", masked), Operator("mask", "s_masked", masked, is_masked=True)


_SOFTMAX = Operator("softmax", "p", fmt="operand")


#: The operators between Q K^T and P V, by how a framework is used:
#:   fused          as few passes as possible
#:   added          as PyTorch runs them if a mask is a tensor that is added: mul, add, softmax
#:   eager          operators of PyTorch, one kernel each: mul, masked_fill, softmax.  A matmul reshapes to three axes,
#:                  so that a tensor whose heads are not contiguous is copied first, as are K and V that heads share.
#:                  A softmax of float16 or bfloat16 is one kernel that computes in float32, on an NPU (op-plugin passes
#:                  it unchanged to aclnnSoftmax, which launches SoftmaxV2) as on a GPU; products read and write plain
#:                  rows on a 910B (CANN ops-nn, batch_matmul_util.cpp: ND on all chips that have bfloat16)
#:   eager_float32  the same with softmax(..., dtype=float32) and a cast back, as in Transformers' models
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
    """Return attention as products with a list of `OPERATORS` between them, each a phase over the complete matrix.

    ``product(label, a, b, c, ...)`` returns a machine's phases of C = A B; the kernels between them process blocks of
    ``sizes`` = (rows, columns).  ``reshapes``: a framework's product reads the rows of each head contiguously.
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
            f"precision: scores of {p.scores} have no -Inf for hidden keys; use --precision framework,scores=float16"
        )
    for one in OPERATORS[operators]:
        if one.kernel is masked and mask is None:
            continue  # the step masks, or prepares the mask
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
    """Return the operand of a framework's batched product for a tensor: contiguous rows of each head, one head per
    product.
    """
    if tensor.heads == heads and not tensor.is_interleaved:
        return tensor
    label = f"{tensor.name}_contiguous" if tensor.heads == heads else f"{tensor.name}_repeated"
    return replace(tensor, name=label, heads=heads, role="workspace", is_interleaved=False)


def softmax(
    source: GlobalTensor,
    out: GlobalTensor,
    sizes: tuple[int, int],
    p: UnfusedPrecision,
    start: float,
    unseen: Unseen | None = None,
) -> Phase:
    """Return the softmax of stored scores: rows of up to ``sizes[1]`` columns in one pass, longer rows in two.

    ``start``: the value with which their maximum begins; it is finite if a mask may hide all first columns of a row.
    ``unseen``: the result of a row that is completely hidden.
    """
    blocks = with_columns(grid(source, ("row", sizes[0])), source.cols, sizes[1])
    kernel = softmax_whole if source.cols <= sizes[1] else softmax_chunked
    spans = {"row": sizes[0], "col": sizes[1]}
    return kernel.phase("softmax", blocks, spans, [out], s=source, fmt=out.fmt, p=p, start=start, unseen=unseen)


class StandardTiling(Tiling):
    """The kernels between the two products."""

    operators: Literal["fused", "added", "eager", "eager_float32"] = Field(
        default="fused",
        description=(
            "fused: four kernels; eager (--eager): one kernel for each operator; added: as eager, but the "
            "mask is added instead of filled into a copy; eager_float32: as eager, with softmax in "
            "float32 between two casts"
        ),
        json_schema_extra=on(
            "gpu",
            (
                Literal["added", "eager", "eager_float32"],
                Field(
                    default="added",
                    description=(
                        "operators between the products. added: adds the mask as a tensor; eager (--eager): fills "
                        "a copy of the scores by the mask; eager_float32: computes softmax in float32, between "
                        "two casts"
                    ),
                ),
            ),
        ),
    )


#: Number of scores of a block, at least one softmax row of a warp; number of blocks per multiprocessor that distributes
#: the work evenly.
LEAST_ELEMENTS, MOST_ELEMENTS, BLOCKS = 1024, 131072, 32


def phases(problem: Problem, tiling: Any, p: UnfusedPrecision, machine: Machine) -> Phases:
    """Return unfused attention with one kernel per operator.

    A mask that is added is an operand in memory, the same for every head.
    """
    if not p.exp_variant.startswith("exp."):
        raise TilingError(f"exp_variant: unfused softmax uses exponentials to the base e, not {p.exp_variant}")
    if done := problem.score_changes:
        raise TilingError(
            f"{', '.join(done)}: unfused attention only scales and masks scores; use --ignore "
            f"{','.join(done)} to run without it"
        )
    if machine.slice_elements:
        sizes = tiling.block_rows, min(problem.seq_kv, machine.slice_elements)
    else:  # a softmax needs complete rows; elementwise kernels have the same blocks
        elements = tiling.block_elements or _block_elements(problem, machine.places)
        sizes = max(1, min(problem.seq_q, elements // problem.seq_kv)), problem.seq_kv

    def product(
        label: str, a: GlobalTensor, b: GlobalTensor, c: GlobalTensor, **more: Any
    ) -> Sequence[Phase | tuple[Phase, Any]]:
        return machine.product(label, a, b, c, tiling, **more)

    return unfused(problem, tiling.operators, sizes, p, product, reshapes=machine.reshapes_operands)


def _block_elements(p: Problem, cores: int) -> int:
    """Return the default number of scores of a block: a power of two that gives 32 blocks per multiprocessor, if
    possible.
    """
    few = p.batch * p.heads * p.seq_q * p.seq_kv // (BLOCKS * cores)
    return max(LEAST_ELEMENTS, min(MOST_ELEMENTS, 1 << max(0, few.bit_length() - 1)))


SCHEDULES = schedule(
    "standard",
    phases,
    precisions=[UnfusedPrecision("framework")],
    takes_unseen=True,
    tiling=StandardTiling,
    kind="operators",
    unsupported=needs_groups,
    summary="unfused: scores, scale and mask, softmax, values",
)
