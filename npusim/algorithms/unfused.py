"""Attention without fusion, and kernels that prepare inputs: rows in, rows out, phase by phase.

Scores are stored in the inputs' format after each kernel, as frameworks do; softmax works in
float32 inside its kernel.  What runs between the two products is a list of operators (`OPERATORS`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from npusim.algorithms.cells import MASKED, grid, with_columns
from npusim.algorithms.flash import chosen
from npusim.algorithms.gemm import copy, gemm
from npusim.algorithms.phase import Loop, Phase, name
from npusim.algorithms.table import Stage, row
from npusim.algorithms.tensors import attention_tensors
from npusim.algorithms.tiling_mask import TilingMask
from npusim.ir.op import Opcode
from npusim.ir.tile import GlobalTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.algorithms.phase import Mask
    from npusim.algorithms.table import Table
    from npusim.config.problem import Problem
    from npusim.ir.program import Serves

O = Opcode  # noqa: E741 - tables read best with one letter


@dataclass(frozen=True, slots=True)
class UnfusedPrecision:
    """What frameworks store between kernels; ``input`` stands for the format of Q, K and V.

    scores
        S after each kernel that writes it; softmax itself works in float32.
    operand
        P as softmax stores it.
    output
        The result.
    exp_variant, sum_order, arithmetic
        Named choices: an exponential to the base e, the order of row sums, the matrix arithmetic
        (both empty: the device's own).
    """

    name: str
    scores: str = "input"
    operand: str = "input"
    output: str = "input"
    exp_variant: str = "exp.correct"
    sum_order: str = ""
    arithmetic: str = ""

    def formats(self) -> dict[str, str]:
        """Return ``{intermediate: format}`` for reports."""
        return {
            "scores": self.scores, "softmax": "float32", "operand": self.operand, "output": self.output
        }  # fmt: skip


#: S / sqrt(d), then masked, in the scores' own format.
SCALE_MASK = (
    row(O.MUL, "S", "S_in", "scale"),
    row(O.SELECT, "S", "mask", "S", "masked", only="mask"),
)
#: The same operator by operator, and casts around softmax.
SCALE = (row(O.MUL, "S", "S_in", "scale"),)
CLONE = (row(O.COPY, "S", "S_in"),)
MASK = (row(O.SELECT, "S", "mask", "S_in", "masked", only="mask"),)
WIDEN = (row(O.CAST, "S", "S_in"),)
NARROW = (row(O.CAST, "P", "P_in"),)
#: Inputs on their way to a narrower format; the vector unit goes through float32 (no instruction
#: turns bfloat16 into float16), and a scale is applied to what the kernel would have read.
CAST_INPUT = (
    row(O.CAST, "X_wide", "X_in"),
    row(O.CAST, "X", "X_wide"),
    row(O.MUL, "X", "X", "scale", only="scale"),
)
SCALE_INPUT = (row(O.MUL, "X", "X_in", "scale"),)
#: Softmax of whole rows.
SOFTMAX = (
    row(O.CAST, "X", "S_in"),
    row(O.ROW_MAX, "m", "X"),
    row(O.SUB, "X", "X", "m"),
    row(O.EXP, "X", "X"),
    row(O.ROW_SUM, "l", "X"),
    row(O.DIV, "X", "X", "l"),
    row(O.CAST, "P", "X"),
)
#: Softmax of rows that do not fit: statistics chunk by chunk ...
STATISTICS = (
    row(O.CAST, "X", "S_in"),
    row(O.ROW_MAX, "m_part", "X"),
    row(O.MAX, "m_new", "m", "m_part"),
    row(O.SUB, "m", "m", "m_new"),
    row(O.EXP, "m", "m"),
    row(O.MUL, "l", "l", "m"),
    row(O.SUB, "X", "X", "m_new"),
    row(O.EXP, "X", "X"),
    row(O.ROW_SUM, "l_part", "X"),
    row(O.ADD, "l", "l", "l_part"),
    row(O.COPY, "m", "m_new"),
)
#: ... then the probabilities.
NORMALISE = (
    row(O.CAST, "X", "S_in"),
    row(O.SUB, "X", "X", "m"),
    row(O.EXP, "X", "X"),
    row(O.DIV, "X", "X", "l"),
    row(O.CAST, "P", "X"),
)


@dataclass(frozen=True, slots=True)
class Operator:
    """One kernel between the two products: its rows (none: softmax), the tensor it leaves and its format."""

    label: str
    leaves: str
    table: Table = ()
    fmt: Literal["scores", "operand", "float32"] = "scores"

    @property
    def is_mask(self) -> bool:
        """Whether it runs only where there is a mask: its table, or what prepares for it."""
        return self.table in (MASK, CLONE)


_SCALE = Operator("scale", "s_scaled", SCALE)
#: ``masked_fill`` of PyTorch fills a copy of its input; neither it nor a cast is fused with anything.
_MASK = Operator("clone", "s_copied", CLONE), Operator("mask", "s_masked", MASK)
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
        "fused": (Operator("scale_mask", "s_masked", SCALE_MASK), _SOFTMAX),
        "added": (_SCALE, _MASK[1], _SOFTMAX),
        "eager": (_SCALE, *_MASK, _SOFTMAX),
        "eager_float32": (
            _SCALE, *_MASK, Operator("widen", "s_wide", WIDEN, "float32"),
            Operator("softmax", "p_wide", fmt="float32"), Operator("narrow", "p", NARROW, "operand"),
        ),
    }
)  # fmt: skip


def unfused(
    problem: Problem, operators: str, tile: tuple[int, int], block_rows: int, p: UnfusedPrecision, widest: int
) -> tuple[Phase, ...]:
    """Return attention as products with a list of `OPERATORS` between them, each a phase over the whole matrix.

    ``tile`` is that of the products; the kernels between them take ``block_rows`` rows a cell, at most ``widest``
    columns at a time.
    """
    io, first, last = attention_tensors(problem, p.output), list[Phase](), list[Phase]()
    if operators != "fused":
        own = {n: _own(tensor, problem.heads) for n, tensor in (("q", io.q), ("k", io.k), ("v", io.v), ("o", io.o))}
        given, io = io, replace(io, **own)
        inputs = (given.q, io.q), (given.k, io.k), (given.v, io.v)
        first = [copy(a, b, block_rows, b.name) for a, b in inputs if a != b]
        last = [copy(io.o, given.o, block_rows, io.o.name)] if io.o != given.o else []
    raw = GlobalTensor("s", problem.batch, problem.heads, problem.seq_q, problem.seq_kv, p.scores, "workspace")
    middle, source = between_products(problem, operators, raw, (block_rows, min(problem.seq_kv, widest)), p)
    return (
        *first,
        gemm(
            "scores", io.q, io.k, raw, tile, is_transposed=True, arithmetic=p.arithmetic, result="S_in", role="score"
        ),
        *middle,
        gemm("values", source, io.v, io.o, tile, arithmetic=p.arithmetic),
        *last,
    )  # fmt: skip


def between_products(
    problem: Problem, operators: str, raw: GlobalTensor, sizes: tuple[int, int], p: UnfusedPrecision
) -> tuple[tuple[Phase, ...], GlobalTensor]:
    """Return a list of `OPERATORS` on the scores ``raw`` as phases, and what the last one leaves.

    ``sizes`` are rows and columns of a cell.
    """
    mask = TilingMask(max(sizes[0], problem.seq_kv)) if problem.causal else None
    constants, source, phases = {"scale": problem.scale, "masked": -math.inf}, raw, list[Phase]()
    for one in OPERATORS[operators]:
        if one.is_mask and mask is None:
            continue
        out = replace(raw, name=one.leaves, fmt={"scores": p.scores, "operand": p.operand}.get(one.fmt, one.fmt))
        if one.table:
            seen = mask if any(r.only for r in one.table) else None
            offset = problem.causal_offset
            phases.append(element_wise(one.label, one.table, source, out, sizes, constants, mask=seen, offset=offset))
        else:
            phases.append(softmax(source, out, sizes, p))
        source = out
    return tuple(phases), source


def _own(tensor: GlobalTensor, heads: int) -> GlobalTensor:
    """Return what a batched product of a framework takes for a tensor: each head's rows together, a head for each."""
    if tensor.heads == heads and not tensor.is_interleaved:
        return tensor
    label = f"{tensor.name}_contiguous" if tensor.heads == heads else f"{tensor.name}_repeated"
    return replace(tensor, name=label, heads=heads, role="workspace", is_interleaved=False)


def element_wise(
    label: str, table: Table, source: GlobalTensor, out: GlobalTensor, sizes: tuple[int, int],
    constants: Mapping[str, float], *, work: Mapping[str, str] | None = None, mask: Mask | None = None,
    offset: int | None = None, serves: Serves = "rows",
) -> Phase:  # fmt: skip
    """Return one table over all elements, ``what`` from ``what_in``: ``sizes`` = (rows of a cell, columns).

    ``what`` is what the table writes last; ``work`` gives the formats of further tiles it names,
    ``offset`` how far right of its own number a row sees past the mask's diagonal.
    """
    axes, what = "row col", table[-1].dst
    names = {
        f"{what}_in": name("operand", axes, source.fmt, label=what),
        what: name("result", axes, out.fmt),
        **({"mask": name("mask", axes, "int8")} if mask else {}),
        **{n: name("work", axes, fmt) for n, fmt in (work or {}).items()},
    }
    rows = tuple(replace(c, causal_offset=offset) for c in grid(source, ("row", sizes[0])))
    return Phase(
        name=label, names=names,
        cells=with_columns(rows, source.cols, sizes[1], MASKED if mask else frozenset()),
        sizes={"row": sizes[0], "col": sizes[1]}, loops=(Loop((Stage(label, table),), "col"),),
        tensors={f"{what}_in": source, what: out}, constants=constants,
        masks={"mask": mask} if mask else {}, serves=serves,
    )  # fmt: skip


def softmax(
    source: GlobalTensor, out: GlobalTensor, sizes: tuple[int, int], p: UnfusedPrecision
) -> Phase:
    """Return the softmax of stored scores: rows of ``sizes[1]`` columns whole, longer ones in two passes."""
    is_whole = source.cols <= sizes[1]
    tile, vector, fmt = "row col", "row", "float32"
    names = {
        "S_in": name("operand", tile, source.fmt, label="S"),
        "P": name("result", tile, out.fmt),
        "X": name("work", tile, fmt),
        "m": name("max", vector, fmt, start=None if is_whole else -math.inf),
        "m_new": name("max", vector, fmt),
        "m_part": name("max", vector, fmt),
        "l": name("sum", vector, fmt, start=None if is_whole else 0.0),
        "l_part": name("sum", vector, fmt),
    }
    passes = (SOFTMAX,) if is_whole else (STATISTICS, NORMALISE)
    stages = chosen((Stage("softmax", t) for t in passes), p.exp_variant, p.sum_order)
    return Phase(
        name="softmax", names=names, cells=with_columns(grid(source, ("row", sizes[0])), source.cols, sizes[1]),
        sizes={"row": sizes[0], "col": sizes[1]}, loops=tuple(Loop((s,), "col") for s in stages),
        tensors={"S_in": source, "P": out},
    )  # fmt: skip
