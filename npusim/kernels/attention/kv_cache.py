"""K and V that are stored in fewer bits with scales: rows convert them to the format of Q, in which products read them.

Attention converts tile by tile.  For other kernels that read K or V, an earlier kernel converts them and thus reads and
writes them once more.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from npusim.config.problem import SCALES, STORED
from npusim.kernels.attention.call_blocks import grid
from npusim.kernels.form.language import ONE
from npusim.kernels.form.lowering import Kernel, kernel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npusim.config.problem import Problem
    from npusim.kernels.form.language import Value
    from npusim.kernels.form.phase import Phase
    from npusim.program.ir.tile import GlobalTensor

#: Number of keys of a block, the height of a product's tile.
KEYS = 128


@kernel(x="key col", scale="key")
def dequantised(x: Value, scale: Value, fmt: str) -> Value:
    """Stored values, converted via float16 and multiplied by their scale; float16 represents all of them, and every
    core can convert to it.
    """
    return (x.to("float16").to(scale.fmt) * scale).to(fmt)


#: Dequantisation with one scale for each column.
dequantised_columns = dequantised.wrapped(dequantised.function, (), {"scale": f"{ONE} col"})


def _stored(tensor: GlobalTensor, problem: Problem) -> tuple[GlobalTensor, GlobalTensor]:
    """Return the stored form of K or V in a cache, and its scales."""
    assert problem.cache is not None
    stored = replace(
        tensor,
        name=f"{tensor.name}{STORED}",
        fmt=problem.cache,
        role="input",
        is_interleaved=problem.layout != "bnsd",
        stretch_rows=problem.page,
    )
    scale = replace(stored, name=f"{tensor.name}{SCALES}", fmt="float32")
    if problem.cache_scale == "channel":
        return stored, replace(scale, rows=1, lengths=(), stretch_rows=0, is_interleaved=False)
    return stored, replace(scale, cols=1, shared_rows=problem.scaled_keys)


def cached_operands(problem: Problem, operands: Mapping[str, GlobalTensor]) -> dict[str, Any]:
    """Return the operands of attention for a kernel that reads K and V in stored form, with their scales."""
    bound = dict(operands)
    for n, tensor in operands.items() if problem.cache is not None else ():
        if tensor.role == "workspace" and tensor.name in ("k", "v"):
            bound[n], bound[f"{n}{SCALES}"] = _stored(tensor, problem)
    return bound


def reading_cache(kernel: Kernel, operands: Mapping[str, GlobalTensor]) -> Kernel:
    """Return a kernel whose products read the values of scaled operands in Q's format."""
    scales = {n: t.cols > 1 for n, t in operands.items() if n.endswith(SCALES)}
    return _reading_cache(kernel, tuple(scales.items()), operands["q"].fmt) if scales else kernel


@lru_cache(maxsize=64)  # one new kernel for each kernel, because tables are stored by kernel
def _reading_cache(kernel: Kernel, scales: tuple[tuple[str, bool], ...], fmt: str) -> Kernel:
    """Return the kernel for scales with this name, and whether each channel has its own scale."""

    def function(**arguments: Any) -> Any:
        for n, _ in scales:
            scale = arguments.pop(n)
            arguments[n.removesuffix(SCALES)].prepared = lambda x, scale=scale: dequantised.function(x, scale, fmt)
        return kernel.function(**arguments)

    columns = {n: kernel.axes[n.removesuffix(SCALES)].split()[1] for n, _ in scales}
    axes = {n: f"{ONE} {columns[n]}" if by_channel else "key" for n, by_channel in scales}
    return kernel.wrapped(function, (), axes)


def dequantised_inputs(problem: Problem, phases: Sequence[Phase]) -> list[Phase]:
    """Return the kernels that write converted K and V for phases that read them as if there were no cache."""
    read = {t for phase in phases for t in phase.all_tensors() if t.role == "workspace" and t.name in ("k", "v")}
    before = []
    for out in sorted(read, key=lambda t: t.name) if problem.cache is not None else ():
        stored, scale = _stored(out, problem)
        kernel = dequantised_columns if problem.cache_scale == "channel" else dequantised
        phase = kernel.phase(
            f"dequantise_{out.name}",
            grid(out, ("key", KEYS)),
            {"key": KEYS, "col": out.cols},
            [out],
            x=stored,
            scale=scale,
            fmt=out.fmt,
        )
        note = f"cache={problem.cache}: a separate kernel first converts {out.name.upper()} to {out.fmt} in memory"
        before.append(replace(phase, notes=(note,)))
    return before
