"""Unfused attention: scores and probabilities through global memory.

S = Q K^T, then scale and mask, then softmax, then P V, each over the whole matrix; a causal mask
saves no work.  As four kernels, the fewest passes there can be; or eager, as frameworks run it: every
operator is a kernel (`npusim.algorithms.unfused.OPERATORS`).  The values are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from npusim.algorithms.unfused import UnfusedPrecision, unfused
from npusim.config.tiling import Field, Tiling, on
from npusim.errors import TilingError
from npusim.schedules.define import schedule
from npusim.schedules.gemm import needs_groups

if TYPE_CHECKING:
    from npusim.config.problem import Problem
    from npusim.schedules.define import Phases


class StandardTiling(Tiling):
    """What the kernels between the two products are."""

    operators: Literal["fused", "added", "eager", "eager_float32"] = Field(
        default="fused",
        description="four kernels of fused passes; eager (--eager): every operator a kernel; added: a mask is "
        "added, not filled into a copy; eager_float32: softmax in float32 too, between two casts",
        json_schema_extra=on(
            "gpu",
            (
                Literal["added", "eager", "eager_float32"],
                Field(
                    default="added",
                    description="between the products: a mask that is a tensor is added, or (--eager) one that fills a "
                    "copy; eager_float32: softmax in float32 too, between two casts",
                ),
            ),
        ),
    )


#: Scores of a block, at least those of a warp's row of softmax, and blocks of a multiprocessor: enough to be even.
LEAST_ELEMENTS, MOST_ELEMENTS, BLOCKS = 1024, 131072, 32


def phases(problem: Problem, tiling: Any, p: UnfusedPrecision, machine: Any) -> Phases:
    """Return unfused attention, a kernel an operator.

    A mask that is added is an operand that exists, the same for every head.
    """
    if not p.exp_variant.startswith("exp."):
        raise TilingError(f"exp_variant: unfused softmax takes exponentials to the base e, not {p.exp_variant}")
    if done := problem.score_changes:
        raise TilingError(f"{', '.join(done)}: unfused attention scales and masks scores; --ignore {','.join(done)}")
    if machine.slice_elements:
        sizes = tiling.block_rows, min(problem.seq_kv, machine.slice_elements)
    else:  # a softmax has whole rows; what works on elements takes the same blocks
        elements = tiling.block_elements or _block_elements(problem, machine.places)
        sizes = max(1, min(problem.seq_q, elements // problem.seq_kv)), problem.seq_kv

    def product(*operands: Any, **more: Any) -> Any:
        return machine.product(*operands, tiling, **more)

    return unfused(problem, tiling.operators, sizes, p, product, reshapes=machine.reshapes_operands)


def _block_elements(p: Problem, cores: int) -> int:
    """Return how many scores a block has by default: a power of two, 32 blocks a multiprocessor if there are."""
    few = p.batch * p.heads * p.seq_q * p.seq_kv // (BLOCKS * cores)
    return max(LEAST_ELEMENTS, min(MOST_ELEMENTS, 1 << max(0, few.bit_length() - 1)))


SCHEDULES = schedule(
    "standard",
    phases,
    precisions=[UnfusedPrecision("framework")],
    takes_unseen=True,
    tiling=StandardTiling,
    kind="operators",
    unsupported=needs_groups,
    summary="unfused: scores, scale and mask, softmax, values",
)
