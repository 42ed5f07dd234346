"""Presets of FlashAttention-2's precisions, by kind of processor."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from npusim.config.family import AS_FAMILY
from npusim.kernels.attention.online_softmax import E4M3, E4M3_MAX, FlashPrecision

if TYPE_CHECKING:
    from npusim.kernels.attention.online_softmax import Accumulate

_preset = partial(FlashPrecision, exp_variant=AS_FAMILY, sum_order=AS_FAMILY, accumulate=cast("Accumulate", AS_FAMILY))
FA2_FP32 = _preset("fa2_fp32", kernel="pto")
ALL_HALF: Any = dict.fromkeys(FA2_FP32.formats(), "float16")
#: SageAttention3 without Q's means: P has two levels of scales: the first, in the exponent, scales up to 448 * 6, and
#: the second scales blocks up to 6.  The stored scale is the nearest E4M3 number, and elements are divided by the scale
#: before it is rounded (sageattn3, blackwell/softmax.h).
SAGE3 = replace(
    FA2_FP32,
    name="nvfp4",
    operands="nvfp4",
    operand="nvfp4",
    smooth="k",
    scale_rule="sage3",
    p_rule="sage3_p",
    p_scale=448 * 6.0,
)


def _narrow(base: FlashPrecision) -> tuple[FlashPrecision, ...]:
    """Return the preset with blocks of 32, each with a power of two as its scale: Q and K along the head, V and P along
    keys.

    SageAttention2 with E4M3: P up to 448 and K without its mean, but Q and K in E4M3 instead of INT8, and without
    scales of Q, K and V; casts saturate as SageAttention2's conversions do (cvt.rn.satfinite:
    csrc/numeric_conversion.cuh).
    """
    blocks = (replace(base, name=fmt, operands=fmt, operand=fmt) for fmt in ("mxfp8", "mxfp4"))
    return *blocks, replace(base, name="sage_fp8", operands=E4M3, operand=E4M3, smooth="k", p_scale=E4M3_MAX)


ATTENTION_PRECISIONS = MappingProxyType(
    {
        "npu": (
            FA2_FP32,
            # PASA figure 2: S is not scaled before it leaves the matrix unit in float16, and overflows in this store.
            replace(FA2_FP32, name="fa16_32", scores="float16", kernel="tilelang"),
            # PASA figure 3: everything is float16; S is stored unscaled, and then multiplied by a float16 scale.
            _preset("fa16", **ALL_HALF),
            *_narrow(_preset("")),
        ),
        "gpu": (FA2_FP32, *_narrow(FA2_FP32), SAGE3),
        # The host's cores: Q, K, V and O in float16, everything else in float32; sums over lanes by halves.
        "cpu": (replace(FA2_FP32, name="host_fp32", operand="float32"),),
    }
)
