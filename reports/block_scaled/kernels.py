"""Whole kernels with narrow operands, as the packaged presets have them: bits on two devices, time on one."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

import npusim
from reports.block_scaled.study import head

__all__ = ["KERNELS", "Kernel", "absolute_error", "kernel_error", "latency_us"]

#: The shape whose times are compared: PanGu-38B's attention.
WORKLOAD, SEQ = "pangu_38b", 8192


class Kernel(NamedTuple):
    """A schedule with a precision on a device."""

    hw: str
    schedule: str
    precision: str

    def __str__(self) -> str:
        return f"{self.schedule} {self.precision}"


#: Those of the 950, then those that only Blackwell's matrix unit has: two levels of P, and one.
KERNELS = (
    *(
        Kernel("ascend_950", *words)
        for words in (
            ("flash", "fa2_fp32"),
            ("flash", "sage_fp8"),
            ("flash", "sage_fp8,smooth="),
            ("flash", "mxfp8"),
            ("flash", "mxfp8,scale_rule=rceil"),
            ("flash", "mxfp8,scale_rule=rceil,smooth=k"),
            ("flash", "mxfp4"),
            ("flash", "mxfp4,scale_rule=even"),
            ("flash", "mxfp4,scale_rule=even,smooth=k"),
            ("pasa", "fp16_mean"),
            ("pasa", "mxfp8"),
        )
    ),
    *(Kernel("rtx_5090", "flash", f"nvfp4{fields}") for fields in ("", ",p_scale=1,p_rule=sage3", ",smooth=")),
)


@cache
def kernel_error(kernel: Kernel, name: str) -> float:
    """Return the relative RMSE of a kernel's output on the inputs of that name, over all rows."""
    return _run(kernel, name)[0]


def absolute_error(kernel: Kernel, name: str) -> float:
    """Return the RMSE of a kernel's output on the inputs of that name, over all rows."""
    relative, scale = _run(kernel, name)
    return relative * scale


@cache
def _run(kernel: Kernel, name: str) -> tuple[float, float]:
    """Return a relative error, and the root mean square of the output."""
    (q, k, v), _, is_causal = head(name)
    tensors = {n: x[None, None] for n, x in (("q", q), ("k", k), ("v", v))}
    result = npusim.run(**kernel._asdict(), tensors=tensors, causal=is_causal, rows="all", trace_groups=())
    assert result.numerics is not None
    assert result.numerics.rmse is not None
    return result.numerics.rmse, float(np.sqrt(np.mean(result.output.astype(np.float64) ** 2)))


@cache
def latency_us(kernel: Kernel) -> float:
    """Return the predicted latency of a call of `WORKLOAD`, kernels that quantise or shift counted."""
    result = npusim.run(**kernel._asdict(), workload=WORKLOAD, seq=SEQ, numerics=False, trace_groups=())
    assert result.latency_us is not None
    return result.latency_us
