"""Operators of PyTorch between products, each as the kernel that eager PyTorch launches on a GPU: only their times.

The kind of memory access of a kernel decides its time.  Contiguous tensors of one format use vectors of 16 bytes, and
all vectors of a thread are in flight at once (vectorized_elementwise_kernel).  Parts of tensors and broadcast operands
need an index for each element, computed by divisions before its access, and a thread processes its elements one after
another (elementwise_kernel, unrolled_elementwise_kernel, CatArrayBatchedCopy); so does a sum of rows (reduce_kernel).
Data that rows or heads share are read once and then come from a cache; those reads are omitted.

Source: pytorch/pytorch, aten/src/ATen/native/cuda: CUDALoops.cuh, Reduce.cuh, Shape.cu; grids and blocks of torch 2.11
on an H200 (measurements/h200_layer.csv).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from types import MappingProxyType
from typing import Any, Literal

from npusim.kernel import (
    STORED,
    WIDE,
    DeviceSpec,
    FlashPrecision,
    GlobalTensor,
    OperatorProblem,
    Phases,
    Value,
    ceil_div,
    exp,
    full,
    grid,
    kernel,
    needs_groups,
    registered,
    schedule,
    tiles,
    with_columns,
)
from npusim.machine import Machine


@kernel(results="y", x="row col")
def one(x: Value, fmt: str, does: str) -> Iterator[Value]:
    """An operator that processes one element of one operand at a time."""
    for xj in tiles(x):
        if does == "square":
            yield (xj * xj).to(fmt)
        elif does in ("silu", "gelu"):  # memory decides the time of a GELU
            yield (xj.to(WIDE) / (exp(xj.to(WIDE) * -1.0) + 1.0)).to(fmt)
        elif does in ("negate", "scale", "rescale", "column"):
            yield (xj * -1.0).to(fmt)
        else:
            yield xj.to(fmt)


@kernel(results="y", x="row col", other="row col")
def two(x: Value, other: Value, fmt: str, does: str) -> Iterator[Value]:
    """An operator that processes one element of each of two operands at a time."""
    for xj, oj in tiles(x, other):
        yield (xj * oj if does == "times" else xj + oj).to(fmt)


@kernel(results="y", x="row col")
def mean(x: Value, fmt: str, share: float) -> Value:
    """The mean of each row."""
    total = full("row", 0.0, WIDE)
    for xj in tiles(x):
        total = total + xj.sum()
    return total * share


Access = Literal["vectors", "indexed", "pairs", "joined", "rows"]


@dataclass(frozen=True, slots=True)
class EagerOperator:
    """An operator: its kind of memory access, its operands of full size, and whether its inputs or its results are
    float32.
    """

    access: Access
    operands: int = 1
    reads_wide: bool = False
    writes_wide: bool = False


OPERATORS: Mapping[str, EagerOperator] = MappingProxyType(
    {
        "widen": EagerOperator("indexed", writes_wide=True),
        "square": EagerOperator("vectors", reads_wide=True, writes_wide=True),
        "mean": EagerOperator("rows", reads_wide=True, writes_wide=True),
        "column": EagerOperator("vectors", reads_wide=True, writes_wide=True),
        "rescale": EagerOperator("pairs", reads_wide=True, writes_wide=True),
        "narrow": EagerOperator("vectors", reads_wide=True),
        "scale": EagerOperator("indexed"),
        "negate": EagerOperator("indexed"),
        "join": EagerOperator("joined"),
        "plus": EagerOperator("indexed", 2),
        "store": EagerOperator("indexed"),
        "add": EagerOperator("vectors", 2),
        "silu": EagerOperator("indexed"),
        "times": EagerOperator("indexed", 2),
        "gelu": EagerOperator("vectors"),
    }
)
#: Number of elements that a block processes at a time, and number of repetitions. source: CUDALoops.cuh, as above
TILES: Mapping[str, tuple[int, int]] = MappingProxyType({"vectors": (1024, 1), "indexed": (128, 4), "pairs": (128, 2)})
#: Largest number of blocks per multiprocessor for which each block is simulated separately.
ROUNDS = 64
#: CatArrayBatchedCopy: threads of a block, blocks per multiprocessor for each operand, and the number of operands.
#: source: Shape.cu
JOINED, JOINED_BLOCKS, JOINED_OPERANDS = 512, 2, 2
#: reduce_kernel: threads of a block, largest number of rows of a block, elements of a vector.  source: Reduce.cuh
SUMMED, SUMMED_ROWS, SUMMED_VECTOR = 512, 16, 4


def operator(problem: OperatorProblem, _tiling: object, _precision: FlashPrecision, machine: Machine) -> Phases:
    """Return the kernel of an operator."""
    p, of = problem, OPERATORS[problem.what]
    if p.rows == 1 and of.access == "indexed":  # a row is contiguous
        of = replace(of, access="vectors")
    read, written = (WIDE if wide else p.dtype for wide in (of.reads_wide, of.writes_wide))
    if of.access == "rows":
        rows = min(SUMMED_ROWS, 1 << (p.rows.bit_length() - 1))
        x = GlobalTensor("x", 1, 1, p.rows, p.cols, read, "input")
        y = GlobalTensor("y", 1, 1, p.rows, 1, written, "output")
        width = min(p.cols, SUMMED_VECTOR * SUMMED // rows)
        blocks = with_columns(grid(x, ("row", rows)), p.cols, width)
        phase = mean.phase(
            p.what, blocks, {"row": rows, "col": width, "one": 1}, [y], x=x, fmt=written, share=1 / p.cols
        )
        return [replace(phase, operator=(of.access, 0.0))]
    count = p.rows * p.cols
    if of.access == "joined":
        width = JOINED
        most = machine.device.group_count.value * JOINED_BLOCKS * JOINED_OPERANDS
        steps = ceil_div(count, width * most)
    else:
        width, steps = TILES[of.access]
        # Successive blocks in one slot are combined into one block here.
        steps *= max(1, count // (width * steps * machine.device.group_count.value * ROUNDS))
    width = min(width, count)
    total = width * min(steps, ceil_div(count, width))
    x = GlobalTensor("x", 1, 1, ceil(count / total), total, read, "input")
    operands: dict[str, Any] = {"x": x} | ({"other": replace(x, name="other")} if of.operands > 1 else {})
    y = replace(x, name="y", fmt=written, role="output")
    blocks = with_columns(grid(y, ("row", 1)), total, width)
    of_kernel = two if of.operands > 1 else one
    phase = of_kernel.phase(p.what, blocks, {"row": 1, "col": width}, [y], fmt=written, does=p.what, **operands)
    return [replace(phase, operator=(of.access, 0.0))]


def _unsupported(device: DeviceSpec) -> str:
    is_gpu = registered(device.family).processor == "gpu"
    return needs_groups(device) if is_gpu else f"{device.name} is not a GPU; these are operators of PyTorch on GPUs"


SCHEDULES = schedule(
    "operator",
    operator,
    problem=OperatorProblem,
    precisions=[STORED],
    tiling=None,
    kind="plain",
    unsupported=_unsupported,
    summary="one operator of eager PyTorch between products",
)
