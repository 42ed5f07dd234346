"""K and V that are stored in fewer bits, with a scale for each token and head, in the format that products read.

Matrix units read their right factor as it lies in memory: kernels before attention leave K and V there, so that what is
stored is read once, and what products read is written and read besides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.algorithms.blocks import attention_tensors, grid
from npusim.algorithms.lowering import kernel
from npusim.config.problem import SCALES, STORED

if TYPE_CHECKING:
    from npusim.algorithms.language import Value
    from npusim.algorithms.phase import Phase
    from npusim.config.problem import Problem

#: Keys of a block, as a tile of a product is high.
KEYS = 128


@kernel(x="key col", scale="key")
def dequantised(x: Value, scale: Value, fmt: str) -> Value:
    """Stored values times their token's scale; float16 on the way holds all of them, and every core converts it."""
    return (x.to("float16").to(scale.fmt) * scale).to(fmt)


def dequantised_inputs(problem: Problem) -> list[Phase]:
    """Return the kernels that leave K and V for attention, as `attention_tensors` has them; none without a cache."""
    if problem.cache is None:
        return []
    tensors = attention_tensors(problem, problem.dtype)
    phases = []
    for out in dict.fromkeys((tensors.k, tensors.v)):
        stored = replace(
            out,
            name=f"{out.name}{STORED}",
            fmt=problem.cache,
            role="input",
            is_interleaved=problem.layout != "bnsd",
            stretch_rows=problem.page,
        )
        phase = dequantised.phase(
            f"dequantise_{out.name}",
            grid(out, ("key", KEYS)),
            {"key": KEYS, "col": out.cols},
            [out],
            x=stored,
            scale=replace(stored, name=f"{out.name}{SCALES}", cols=1, fmt="float32"),
            fmt=out.fmt,
            serves="kv_head",
        )
        note = (
            f"cache={problem.cache}: kernels before attention bring K and V to {out.fmt}, in memory; they are not fused"
        )
        phases.append(replace(phase, notes=(note,)))
    return phases
