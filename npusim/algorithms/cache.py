"""K and V that are stored in fewer bits with scales: products read them in the format of Q, rows make that of them.

Attention does so tile by tile.  What else takes K or V gets them from a kernel before, which writes and reads them
besides.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from npusim.algorithms.blocks import grid
from npusim.algorithms.lowering import Kernel, kernel
from npusim.config.problem import SCALES, STORED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npusim.algorithms.language import Value
    from npusim.algorithms.phase import Phase
    from npusim.config.problem import Problem
    from npusim.ir.tile import GlobalTensor

#: Keys of a block, as a tile of a product is high.
KEYS = 128


@kernel(x="key col", scale="key")
def dequantised(x: Value, scale: Value, fmt: str) -> Value:
    """Stored values times their scale; float16 on the way holds all of them, and every core converts it."""
    return (x.to("float16").to(scale.fmt) * scale).to(fmt)


def _stored(tensor: GlobalTensor, problem: Problem) -> tuple[GlobalTensor, GlobalTensor]:
    """Return what a cache holds of K or V, and its scales."""
    assert problem.cache is not None
    stored = replace(
        tensor,
        name=f"{tensor.name}{STORED}",
        fmt=problem.cache,
        role="input",
        is_interleaved=problem.layout != "bnsd",
        stretch_rows=problem.page,
    )
    scale = replace(stored, name=f"{tensor.name}{SCALES}", cols=1, fmt="float32", shared_rows=problem.scaled_keys)
    return stored, scale


def cached_operands(problem: Problem, operands: Mapping[str, GlobalTensor]) -> dict[str, Any]:
    """Return operands of attention, of which a kernel reads K and V as they are stored, with their scales."""
    bound = dict(operands)
    for n, tensor in operands.items() if problem.cache is not None else ():
        if tensor.role == "workspace" and tensor.name in ("k", "v"):
            bound[n], bound[f"{n}{SCALES}"] = _stored(tensor, problem)
    return bound


@lru_cache(maxsize=64)  # of kernels: their tables are kept by kernel
def reading_cache(kernel: Kernel, operands: tuple[str, ...], fmt: str) -> Kernel:
    """Return a kernel whose products read, in the place of operands that have scales, their values in ``fmt``."""
    scales = tuple(n for n in operands if n.endswith(SCALES))
    if not scales:
        return kernel

    def function(**arguments: Any) -> Any:
        for n in scales:
            scale = arguments.pop(n)
            arguments[n.removesuffix(SCALES)].prepared = lambda x, scale=scale: dequantised.function(x, scale, fmt)
        return kernel.function(**arguments)

    return kernel.wrapped(function, (), dict.fromkeys(scales, "key"))


def dequantised_inputs(problem: Problem, phases: Sequence[Phase]) -> list[Phase]:
    """Return the kernels that leave K and V for phases which take them as they would be without a cache."""
    read = {t for phase in phases for t in phase.all_tensors() if t.role == "workspace" and t.name in ("k", "v")}
    before = []
    for out in sorted(read, key=lambda t: t.name) if problem.cache is not None else ():
        stored, scale = _stored(out, problem)
        phase = dequantised.phase(
            f"dequantise_{out.name}",
            grid(out, ("key", KEYS)),
            {"key": KEYS, "col": out.cols},
            [out],
            x=stored,
            scale=scale,
            fmt=out.fmt,
        )
        note = f"cache={problem.cache}: a kernel before brings {out.name.upper()} to {out.fmt}, in memory"
        before.append(replace(phase, notes=(note,)))
    return before
