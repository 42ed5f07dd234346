"""FlashAttention-2, as the vendor's kernels run it, and FastAttention's tilings and Volta kernel, which are flash.

On Ascend: Q block 128, KV block 512, scores and P and O_tmp through slots in global memory, pre-launch depth 2, rows
split over the two AIVs, softmax in slices of 16 rows (CATLASS, ascend.md section 2.1).

FastAttention's two-level tiling: Q in blocks of B_r rows, K and V in tiles of B_c keys for the matrix unit; the vector
cores take each B_r x B_c tile of scores in slices of B_b rows, both levels double buffered.  Unified tiling has one
block b for both units, so that cores hand over after every b x b tile.  (Section 4.1 and appendix B; without the
inverse printed in equation 12.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npusim.algorithms.flash import FlashPrecision, NamedFormats, flash
from npusim.config.tiling import Field, Tiling, lightest
from npusim.machines.ascend.plan import Barriers, KernelName
from npusim.machines.sm.core import SmFields, has_concurrent_warp_groups
from npusim.schedules.define import FlashTiling, attention

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec

FA2_FP32 = FlashPrecision("fa2_fp32", kernel="pto")
ALL_HALF: Any = dict.fromkeys(FA2_FP32.formats(), "float16")
PRECISIONS = MappingProxyType(
    {
        "ascend": (
            FA2_FP32,
            # PASA figure 2: S leaves the matrix unit unscaled in float16; that store is where it overflows.
            replace(FA2_FP32, name="fa16_32", scores="float16", kernel="tilelang"),
            # PASA figure 3: float16 throughout, unscaled float16 S, then a float16 scale.
            FlashPrecision("fa16", **ALL_HALF),
        ),
        # What the golden kernel of an H200 does: powers of two by a polynomial, P V chained on the tensor core, the
        # row sum left to right (golden/README.md).
        "nvidia": (replace(FA2_FP32, exp_variant="exp2.exp2p", sum_order="sequential", accumulate="chained"),),
        # The host's cores: Q, K, V and O in float16, all else float32; sums of lanes by halves.
        "cpu": (replace(FA2_FP32, name="host_fp32", operand="float32", sum_order="tree_halves"),),
    }
)


class TwoLevelTiling(FlashTiling):
    """B_r x B_c for the matrix unit, B_b rows for the vector cores."""

    # One tile of scores ahead: two slots between the cores, the paper's double buffering.
    depth: int = Field(
        default=1,
        ge=0,
        le=14,
        description="tiles that Q K^T and softmax run ahead of P V",
        json_schema_extra=lightest("least"),
    )
    kernel: KernelName | None = Field(default="cann", description="whose kernel: CANN's, PTO's or TileLang's")
    barriers: Barriers | None = Field(
        default="every", description="between vector instructions: every, as in CANN 8.0, or where needed"
    )


class UnifiedTiling(Tiling):
    """One block size for both units."""

    block: int = Field(default=128, ge=16, multiple_of=16, description="query rows and keys of a block")

    def whole(self) -> TwoLevelTiling:
        """Return it as two levels: a vector core takes its share of a block in one piece."""
        return TwoLevelTiling(block_q=self.block, block_kv=self.block, vector_rows=self.block)


@dataclass(frozen=True, slots=True)
class VoltaPrecision(NamedFormats):
    """Accumulators of Q Kᵀ and of P V: ``float16`` or ``float32``; the rest is float32, P float16.

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
    return (
        f"{device.name} has no m8n8k4 with lanes to follow; `flash` runs there"
        if has_concurrent_warp_groups(device)
        else ""
    )


FLASH = attention("flash", flash, precisions=PRECISIONS, summary="FlashAttention-2, online softmax")
FAST = attention(
    "two_level",
    flash,
    precisions=PRECISIONS,
    tiling=TwoLevelTiling,
    families=["ascend"],
    summary="FastAttention: large blocks for matrix units, slices for vector units",
) + attention(
    "unified",
    flash,
    precisions=PRECISIONS,
    tiling=UnifiedTiling,
    families=["ascend"],
    summary="FastAttention's single-level tiling: one block for both units",
)
# Q Kᵀ is TN and P V is TT (volta.md section 1.1): both operands are read as they lie, by rows of the head.  S and O
# stay in the accumulators of the tensor cores; S leaves its accumulator unscaled, so that float16 ones overflow at
# 65504 as they do on the machine.  With float16 accumulators and quad pairs stacked 4x1 P lies where P V needs it;
# everything else moves values across lanes (FastAttention section 4.3 and appendix C; `npusim.layout.chain`).
VOLTA_FLASH = attention(
    "volta_flash",
    flash,
    tiling=SmFields,
    families=["nvidia"],
    hw="v100",
    unsupported=_needs_lanes,
    precisions=[VoltaPrecision(f"acc_fp{n}", f"float{n}", f"float{n}") for n in (16, 32)],
    summary="FlashAttention-2 with m8n8k4, accumulators FP16 or FP32",
)

SCHEDULES = (*FLASH, *FAST, *VOLTA_FLASH)
