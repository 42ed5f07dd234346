"""FlashAttention-2 on one tile (Dao 2023, Algorithm 1), for any allocation of formats.

``fresh``: P V of each tile starts at 0, is stored and added to O.  ``chained``: the matrix unit goes on
adding to O itself, which is rescaled before; O then has the format in which products are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.algorithms.phase import Loop, Name, Phase, name
from npusim.algorithms.table import Stage, choose, product, row
from npusim.formats.exponential import LOG2_E
from npusim.ir.op import Attributes, Opcode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from npusim.algorithms.phase import Cell, Mask
    from npusim.algorithms.precision import Accumulate
    from npusim.algorithms.tensors import AttentionTensors
    from npusim.config.problem import Problem

O = Opcode  # noqa: E741 - tables read best with one letter


@dataclass(frozen=True, slots=True)
class FlashPrecision:
    """Format of every intermediate, and the named choices of the vector unit.

    ``input`` stands for the format of Q, K and V.

    scores
        S as the matrix unit's output path stores it.
    softmax
        S on the vector unit, the row maximum m and S - m.
    exponential
        P before its cast, and the rescaling factor.
    operand
        P as the second product reads it.
    running
        The row sum l and the output O.
    product
        P V as the matrix unit's output path stores it.
    output
        The result.
    exp_variant, sum_order, accumulate, arithmetic
        Named choices: exponential, order of the row sum and the matrix arithmetic (both empty: the
        device's own), where P V adds up.  A power-of-two exponential takes scores times log2 e.
    """

    name: str
    scores: str
    softmax: str
    exponential: str
    operand: str
    running: str
    product: str
    output: str
    exp_variant: str = "exp.correct"
    sum_order: str = ""
    accumulate: Accumulate = "fresh"
    arithmetic: str = ""

    def formats(self) -> dict[str, str]:
        """Return ``{intermediate: format}`` for reports."""
        names = ("scores", "softmax", "exponential", "operand", "running", "product", "output")
        return {n: getattr(self, n) for n in names}


SCORES = Stage("S", (product("S_in", "q", "k"),))
#: Scores scaled and masked, the new maximum and how it rescales what came before.
MAXIMUM = (
    row(O.CAST, "S", "S_in"),
    row(O.MUL, "S", "S", "scale"),
    row(O.SELECT, "S", "mask", "S", "masked", only="mask"),
    row(O.ROW_MAX, "m_tile", "S"),
    row(O.MAX, "m_new", "m", "m_tile"),
    row(O.SUB, "m_shift", "m", "m_new"),
    row(O.CAST, "exponent", "m_shift"),
    row(O.EXP, "alpha", "exponent"),
    row(O.CAST, "rescale", "alpha"),
    row(O.COPY, "m", "m_new"),
)
PROBABILITIES = (
    row(O.SUB, "S", "S", "m_new"),
    row(O.CAST, "E", "S"),
    row(O.EXP, "P", "E"),
)
SUMS = (
    row(O.CAST, "l_add", "l_tile"),
    row(O.MUL, "l", "l", "rescale"),
    row(O.ADD, "l", "l", "l_add"),
)
#: P is added up before it is narrowed: it may then leave its registers.
SOFTMAX = Stage(
    "softmax",
    (
        *MAXIMUM,
        *PROBABILITIES,
        row(O.ROW_SUM, "l_tile", "P"),
        row(O.CAST, "P_out", "P"),
        *SUMS,
    ),
)
#: O in an accumulator of its own format is rescaled there.
RESCALE = (
    row(O.CAST, "rescale_O", "rescale"),
    row(O.MUL, "O", "O", "rescale_O"),
)
UPDATES: Mapping[Accumulate, tuple[Stage, ...]] = MappingProxyType(
    {
        "fresh": (
            Stage("PV", (product("T_in", "P_out", "v"),)),
            Stage("update", (*RESCALE, row(O.CAST, "T", "T_in"), row(O.ADD, "O", "O", "T"))),
        ),
        "chained": (
            Stage("rescale", RESCALE),
            Stage("PV", (product("O", "P_out", "v", accumulate=True),)),
        ),
    }
)
FINISH = Stage(
    "finish",
    (
        row(O.CAST, "O_wide", "O"),
        row(O.DIV, "O_normal", "O_wide", "l"),
        row(O.CAST, "out", "O_normal"),
    ),
)


def flash_names(p: FlashPrecision, dtype: str, *, is_masked: bool) -> dict[str, Name]:
    """Return the names of attention, inputs in ``dtype``."""
    tile, vector, out = "row key", "row", "row value"
    total = p.product if p.accumulate == "chained" else p.running
    partial = {
        "T_in": name("partial", out, p.product, label="O_tmp"),
        "T": name("partial", out, p.running),
    }
    return {
        "q": name("operand", "row head", dtype, label="Q"),
        "k": name("operand", "key head", dtype, label="K"),
        "v": name("operand", "key value", dtype, label="V"),
        **({"mask": name("mask", tile, "int8")} if is_masked else {}),
        "O": name("output", out, total, start=0.0),
        "S_in": name("score", tile, p.scores, label="S"),
        "S": name("work", tile, p.softmax),
        "E": name("work", tile, p.exponential),
        "P": name("weight", tile, p.exponential, over="E"),
        "P_out": name("weight", tile, p.operand, label="P"),
        **({} if p.accumulate == "chained" else partial),
        "O_wide": name("output", out, p.running),
        "O_normal": name("output", out, p.running, over="O_wide"),
        "out": name("result", out, p.output, label="O"),
        "m": name("max", vector, p.softmax, start=-math.inf),
        "m_tile": name("max", vector, p.softmax),
        "m_new": name("max", vector, p.softmax),
        "m_shift": name("work", vector, p.softmax),
        "exponent": name("work", vector, p.exponential),
        "alpha": name("decay", vector, p.exponential),
        "rescale": name("decay", vector, p.running),
        "rescale_O": name("decay", vector, total),
        "l": name("sum", vector, p.running, start=0.0),
        "l_tile": name("sum", vector, p.exponential),
        "l_add": name("sum", vector, p.running),
    }


def exponent_factor(variant: str) -> float:
    """Return what scores are multiplied by before this exponential: log2 e for powers of two."""
    return LOG2_E if variant.startswith("exp2.") else 1.0


def chosen(stages: Iterable[Stage], exp_variant: str, sum_order: str) -> tuple[Stage, ...]:
    """Return the stages with a precision's named choices."""
    choices = {O.EXP: Attributes(variant=exp_variant), O.ROW_SUM: Attributes(order=sum_order)}
    return tuple(s if s.is_product else replace(s, rows=choose(s.rows, choices)) for s in stages)


def attention_phase(
    problem: Problem, sizes: tuple[int, int], cells: tuple[Cell, ...], names: Mapping[str, Name],
    tensors: AttentionTensors, constants: Mapping[str, float], mask: Mask | None,
) -> Phase:  # fmt: skip
    """Return what attentions have in common, without stages: ``sizes`` are a block's rows and keys."""
    return Phase(
        name="attention", names=names, cells=cells,
        sizes={"row": sizes[0], "key": sizes[1], "head": problem.head_dim, "value": problem.value_head_dim},
        loops=(), tensors=tensors.bound(), constants=constants, masks={"mask": mask} if mask else {},
    )  # fmt: skip


def flash(
    problem: Problem, sizes: tuple[int, int], cells: tuple[Cell, ...], p: FlashPrecision,
    tensors: AttentionTensors, mask: Mask | None,
) -> Phase:  # fmt: skip
    """Return FlashAttention-2 of ``problem`` with blocks of ``sizes`` = (rows, keys)."""
    names = flash_names(p, problem.dtype, is_masked=mask is not None)
    factor = exponent_factor(p.exp_variant)
    constants = {"scale": problem.scale * factor, "masked": -math.inf}
    phase = attention_phase(problem, sizes, cells, names, tensors, constants, mask)
    body = chosen((SCORES, SOFTMAX, *UPDATES[p.accumulate]), p.exp_variant, p.sum_order)
    return replace(phase, loops=(Loop(body, "key"),), finish=(FINISH,), arithmetic=p.arithmetic)
