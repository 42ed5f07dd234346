"""FlashAttention-2, as the vendor's kernels run it, and FastAttention's tilings and Volta kernel, which are flash.

On Ascend: Q block 128, KV block 512, scores and P and O_tmp through slots in global memory, pre-launch depth 2, rows
split over the two AIVs, softmax in slices of 16 rows (CATLASS, ascend.md section 2.1).

FastAttention's two-level tiling: Q in blocks of B_r rows, K and V in tiles of B_c keys for the matrix unit; the vector
cores take each B_r x B_c tile of scores in slices of B_b rows, both levels double buffered.  Unified tiling has one
block b for both units, so that cores hand over after every b x b tile.  (Section 4.1 and appendix B; without the
inverse printed in equation 12.)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npusim.algorithms.flash import Fa4Precision, FlashPrecision, NamedFormats, fa4, flash
from npusim.algorithms.split import SplitPrecision
from npusim.config.tiling import Field, Tiling, build_tiling, lightest
from npusim.machines.published import find_kernel
from npusim.machines.published.kernel import GpuKernel, PublishedKernel
from npusim.schedules.define import attention, machine_of
from npusim.schedules.presets import PRECISIONS

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem
    from npusim.schedules.define import Phases


#: B_r x B_c for the matrix unit, B_b rows for the vector cores: one tile of scores ahead, two slots between the cores,
#: is the paper's double buffering.
TWO_LEVEL = MappingProxyType(
    {
        "depth": Field(
            default=1,
            ge=0,
            le=14,
            description="tiles that Q K^T and softmax run ahead of P V",
            json_schema_extra=lightest("least"),
        ),
        "kernel": Field(default="cann", description="published kernel"),
        "barriers": Field(
            default="every", description="between vector instructions: every, as in CANN 8.0, or where needed"
        ),
    }
)


class UnifiedTiling(Tiling):
    """One block size for both units."""

    block: int = Field(default=128, ge=16, multiple_of=16, description="query rows and keys of a block")

    def whole(self) -> Tiling:
        """Return it as two levels: a vector core takes its share of a block in one piece."""
        return build_tiling(FAST[0].tiling, {"block_q": self.block, "block_kv": self.block, "vector_rows": self.block})


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
        f"{device.name} has no m8n8k4 with lanes to follow; `flash` runs there" if machine_of(device).has_groups else ""
    )


def _by_rule(problem: Problem, tiling: Any, p: FlashPrecision, machine: Any) -> Phases | None:
    """Return the phases of a kernel that cuts keys or packs heads by its own rule; None where it does neither."""
    kernel, tile = find_kernel(PublishedKernel, getattr(tiling, "kernel", None)), (tiling.block_q, tiling.block_kv)
    if not isinstance(kernel, GpuKernel) or kernel.split_rule is None:
        return None
    from npusim.schedules import split_kv

    is_packed = kernel.packs(problem, tiling.block_q) and split_kv.may_pack(problem, tiling.block_q)
    is_cut = kernel.cuts(problem, tile, machine.device)
    if not (is_packed or is_cut):
        return None
    pack = "on" if is_packed else "off"
    cutting = split_kv.Cutting(*tile, splits=kernel.split_rule if is_cut else 1, pack=pack)
    parts = SplitPrecision(**asdict(p))
    return split_kv.cut_phases(problem, cutting, parts, machine, machine.mask_kind(tiling), kernel.merge_rows)


FLASH = attention("flash", flash, precisions=PRECISIONS, by_rule=_by_rule, summary="FlashAttention-2, online softmax")
FAST = attention(
    "two_level",
    flash,
    precisions=PRECISIONS,
    usual=TWO_LEVEL,
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
    families=["nvidia"],
    hw="v100",
    unsupported=_needs_lanes,
    precisions=[VoltaPrecision(f"acc_fp{n}", f"float{n}", f"float{n}") for n in (16, 32)],
    summary="FlashAttention-2 with m8n8k4, accumulators FP16 or FP32",
)

#: Of FlashAttention-4 on inputs of 16 bits, but for the order of row sums; there the polynomial computes some elements,
#: here all.  Time counts every polynomial and every rescaling but for the shares that a precision says.
FA4 = attention(
    "fa4",
    fa4,
    families=["nvidia"],
    precisions=[Fa4Precision(**asdict(PRECISIONS["gpu"][0]) | {"name": "fa4", "exp_variant": "exp2.fa4_degree3"})],
    hw="h200",
    summary="FlashAttention-4: rescaled where the maximum grows by 2^8, powers of two by a polynomial",
)

SCHEDULES = (*FA4, *FLASH, *FAST, *VOLTA_FLASH)
