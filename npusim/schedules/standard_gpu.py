"""Unfused attention on multiprocessors, as a framework launches it: an operator a kernel, a library's products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from npusim.algorithms.precision import for_inputs
from npusim.algorithms.tensors import attention_tensors
from npusim.algorithms.unfused import between_products
from npusim.config.tiling import Field, Tiling
from npusim.errors import SpecError
from npusim.ir.tile import GlobalTensor
from npusim.machines.sm import SmMachine
from npusim.machines.sm.core import works_beside
from npusim.machines.sm.library import operator_tiling
from npusim.schedules.gemm_gpu import GpuGemmFields, library_product

if TYPE_CHECKING:
    from npusim.algorithms.unfused import UnfusedPrecision
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem
    from npusim.ir.program import TileProgram

#: Scores of a block, at least those of a warp's row of softmax, and blocks of a multiprocessor: enough to be even.
LEAST_ELEMENTS, MOST_ELEMENTS, BLOCKS = 1024, 131072, 32


class GpuStandardFields(Tiling):
    """A block of the kernels between the products; these are a library's own choice."""

    block_elements: int | None = Field(
        default=None, ge=256, le=131072, multiple_of=256,
        description="scores of a block of the kernels between the products, a row at least; default: so many that all "
        "multiprocessors have blocks",
    )  # fmt: skip
    operators: Literal["added", "eager", "eager_float32"] = Field(
        default="added",
        description="between the products: a mask that is a tensor is added, or (--eager) one that fills a copy; "
        "eager_float32: softmax in float32 too, between two casts",
    )


def build_on_gpu(
    problem: Problem, tiling: GpuStandardFields, device: DeviceSpec, precision: UnfusedPrecision
) -> TileProgram:
    """Return unfused attention as a tile program for one GPU: scores, scale, mask, softmax, values, a kernel each.

    The mask is an operand that exists, added to every head's scores; softmax reads and writes the inputs' format.
    """
    if not works_beside(device):
        raise SpecError(f"standard: {device.name}'s file says nothing of warp groups beside one another; h200's does")
    p, choice = problem, for_inputs(precision, problem.dtype)
    io = attention_tensors(p, choice.output)

    raw = GlobalTensor("s", p.batch, p.heads, p.seq_q, p.seq_kv, choice.scores, "workspace")
    elements = tiling.block_elements or _block_elements(p, device.group_count.value)
    # A softmax has whole rows; what works on elements takes the same blocks.
    sizes = max(1, min(p.seq_q, elements // p.seq_kv)), p.seq_kv
    between, weights = between_products(p, tiling.operators, raw, sizes, choice)
    hidden = 1 - p.attended_pairs() / (p.seq_q * p.seq_kv)
    fields = GpuGemmFields()
    before, _ = library_product("scores", io.q, io.k, raw, fields, device, choice.arithmetic, is_transposed=True)
    after, _ = library_product("values", weights, io.v, io.o, fields, device, choice.arithmetic)
    kernels = {"mask": "add", "softmax": "softmax"}
    operators = [(ph, operator_tiling(device, kernels.get(ph.name, "copy"), p.seq_kv, hidden)) for ph in between]
    return SmMachine(device).build("standard", [*before, *operators, *after], p.flops())


def _block_elements(p: Problem, cores: int) -> int:
    """Return how many scores a block has by default: a power of two, 32 blocks a multiprocessor if there are."""
    few = p.batch * p.heads * p.seq_q * p.seq_kv // (BLOCKS * cores)
    return max(LEAST_ELEMENTS, min(MOST_ELEMENTS, 1 << max(0, few.bit_length() - 1)))

