"""FlashAttention-2 on Volta: m8n8k4 products chained from accumulators, as FastAttention runs it.

Q Kᵀ is TN and P V is TT (volta.md section 1.1): both operands are read as they lie, by rows of the
head.  S and O stay in the accumulators of the tensor cores, FP16 or FP32; everything between the two
products is float32.  S leaves its accumulator unscaled, so that float16 ones overflow at 65504 as they
do on the machine.  With float16 accumulators and quad pairs stacked 4x1 P lies where P V needs it;
everything else moves values across lanes (FastAttention section 4.3 and appendix C;
`npusim.layout.chain`).  It is `flash` with a precision of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.algorithms.flash import FlashPrecision
from npusim.errors import SpecError
from npusim.machines.sm.core import works_beside
from npusim.schedules import flash
from npusim.schedules.flash_gpu import build_with_warps

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem
    from npusim.ir.program import TileProgram
    from npusim.machines.sm.fields import SmFields


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

    def whole(self, dtype: str) -> FlashPrecision:
        """Return the formats of every intermediate for products of ``dtype``."""
        return FlashPrecision(
            self.name, scores=self.acc_qk, softmax="float32", exponential="float32", operand=dtype, running="float32",
            product=self.acc_pv, output=dtype, exp_variant=self.exp_variant, sum_order=self.sum_order,
            accumulate="chained",
        )  # fmt: skip


ACC_FP16 = VoltaPrecision("acc_fp16", acc_qk="float16", acc_pv="float16")
PRECISIONS = MappingProxyType(
    {
        "acc_fp16": ACC_FP16,
        "acc_fp32": VoltaPrecision("acc_fp32", acc_qk="float32", acc_pv="float32"),
    }
)


def build(
    problem: Problem, tiling: SmFields, device: DeviceSpec, precision: VoltaPrecision
) -> TileProgram:
    """Return FlashAttention-2 of ``problem`` as a tile program for a device with warps.

    Raises :class:`~npusim.errors.TilingError` (or its ``BufferOverflowError``) where tile, lanes,
    registers or shared memory do not fit.
    """
    if works_beside(device):
        raise SpecError(f"volta_flash: {device.name} has no m8n8k4 with lanes to follow; `flash` runs there")
    whole = precision.whole(problem.dtype)
    return build_with_warps(problem, tiling, device, whole, "volta_flash")


SCHEDULES = (
    replace(
        flash.GPU, name="volta_flash", summary="FlashAttention-2 with m8n8k4, accumulators FP16 or FP32",
        precisions=PRECISIONS, default_precision=ACC_FP16.name, build=build, hw="v100",
    ),
)  # fmt: skip
