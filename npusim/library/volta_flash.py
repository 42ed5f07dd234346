"""FlashAttention-2 in the lanes of Volta's m8n8k4 (FastAttention, section 4.3 and appendix C)."""

from __future__ import annotations

from dataclasses import dataclass

from npusim.kernel import DeviceSpec, FlashPrecision, NamedFormats, attention, flash, machine_of


@dataclass(frozen=True, slots=True)
class VoltaPrecision(NamedFormats):
    """Formats of the accumulators of Q Kᵀ and of P V, ``float16`` or ``float32``; P is float16, and everything else
    float32.

    ``exp_variant`` and ``sum_order`` are named choices, as in `FlashPrecision`.
    """

    name: str
    acc_qk: str
    acc_pv: str
    exp_variant: str = "exp2.correct"
    sum_order: str = "sequential"
    intermediates = ("acc_qk", "acc_pv")

    def whole(self, dtype: str) -> FlashPrecision:
        """Return the formats of every intermediate for products of ``dtype``."""
        return FlashPrecision(
            self.name,
            scores=self.acc_qk,
            operand=dtype,
            product=self.acc_pv,
            output=dtype,
            exp_variant=self.exp_variant,
            sum_order=self.sum_order,
            accumulate="chained",
        )


def _needs_lanes(device: DeviceSpec) -> str:
    return f"{device.name} has no m8n8k4; use `flash` there" if machine_of(device).has_groups else ""


# Q Kᵀ is TN and P V is TT (volta.md section 1.1): both operands are read in their memory order, row by row of the head.
# S and O are in the accumulators of the tensor cores; S is not scaled before it leaves its accumulator, so that float16
# accumulators overflow at 65504 as they do on the machine.  With float16 accumulators and quad pairs stacked 4x1, P is
# in the registers that P V reads; all other combinations move values across lanes (FastAttention section 4.3 and
# appendix C; `npusim.formats.layout.chain`).
VOLTA_FLASH = attention(
    "volta_flash",
    flash,
    families=["nvidia"],
    hw="v100",
    unsupported=_needs_lanes,
    precisions=[VoltaPrecision(f"acc_fp{n}", f"float{n}", f"float{n}") for n in (16, 32)],
    summary="FlashAttention-2 with m8n8k4, accumulators FP16 or FP32",
)
