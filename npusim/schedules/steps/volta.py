"""FlashAttention-2's steps where S and O stay in the accumulators of tensor cores, FP16 or FP32.

Everything between the two products is float32; S leaves the accumulator as it is, unscaled, so that
float16 accumulators overflow at 65504 as they do on the machine.  O is rescaled in its accumulator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from npusim.ir.op import Attributes, Opcode
from npusim.schedules.steps.attention import AttentionSteps
from npusim.schedules.steps.flash import (
    PROBABILITIES,
    SCORES,
    SUMS,
    FlashPrecision,
    flash_steps,
)
from npusim.schedules.steps.table import choose, row

O = Opcode  # noqa: E741 - tables read best with one letter

#: As in `flash`, but P is added up before it is narrowed: it may then leave its registers.
SOFTMAX = (
    *SCORES,
    *PROBABILITIES,
    row(O.ROW_SUM, "l_tile", "P"),
    row(O.CAST, "P_out", "P"),
    *SUMS,
)
UPDATE = (
    row(O.CAST, "rescale_O", "rescale"),
    row(O.MUL, "O", "O", "rescale_O"),
)
FINISH = (
    row(O.CAST, "O_wide", "O"),
    row(O.DIV, "O_normal", "O_wide", "l"),
    row(O.CAST, "out", "O_normal"),
)


@dataclass(frozen=True, slots=True)
class VoltaPrecision:
    """Accumulators of Q Kᵀ and of P V: ``float16`` or ``float32``; the rest is float32, P float16.

    ``exp_variant`` and ``sum_order`` are named choices, as in `FlashPrecision`.
    """

    name: str
    acc_qk: str
    acc_pv: str
    exp_variant: str = "exp2.correct"
    sum_order: str = "sequential"

    def formats(self) -> dict[str, str]:
        """Return ``{intermediate: format}`` for reports."""
        return {"acc_qk": self.acc_qk, "acc_pv": self.acc_pv}


def volta_steps(precision: VoltaPrecision, scale: float, dtype: str) -> AttentionSteps:
    """Return the tables for products of ``dtype`` with the accumulators of ``precision``."""
    p = precision
    whole = FlashPrecision(
        p.name, scores=p.acc_qk, softmax="float32", exponential="float32", operand=dtype, running="float32",
        product=p.acc_pv, output=dtype, exp_variant=p.exp_variant, sum_order=p.sum_order,
        accumulate="chained",
    )  # fmt: skip
    steps = flash_steps(whole, scale)
    choices = {O.EXP: Attributes(variant=p.exp_variant), O.ROW_SUM: Attributes(order=p.sum_order)}
    formats = {**steps.formats, "O": p.acc_pv, "rescale_O": p.acc_pv, "O_wide": "float32"}
    return replace(
        steps, softmax=choose(SOFTMAX, choices), update=UPDATE, finish=FINISH, formats=formats,
        overlays={**steps.overlays, "O_normal": "O_wide"}, output_tiles=(*steps.output_tiles, "O_wide"),
    )  # fmt: skip
