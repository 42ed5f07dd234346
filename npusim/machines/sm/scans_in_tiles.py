"""Operations along a tile on a GPU, step after step: cumulative sums and the inverse of a triangular tile.

Counts from the SASS into which Triton 3.6 compiles ``tl.cumsum`` and flash-linear-attention's ``solve_tril`` for sm_90.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.errors import UnknownOpcodeError
from npusim.formats import combine_of
from npusim.formats.scans import BLOCK, WARP
from npusim.late_methods import dataclass
from npusim.program.ir.op import Opcode
from npusim.units import ceil_div

if TYPE_CHECKING:
    from npusim.program.ir.op import Step

#: Operations along a tile, and the order in which warps do them.
ALONG: Mapping[Opcode, str] = MappingProxyType({Opcode.CUMSUM: "warps", Opcode.INVERSE: "blocks", Opcode.SCAN: ""})
#: Instructions of a row of the substitution in a block of 16, in which each lane has 8 elements: the additions of two
#: sums over rows and of the two results, 8 products (4 multiplications and 4 multiply-adds), the selections of the row
#: and by column, and comparisons.
ROW: Mapping[str, int] = MappingProxyType({"add": 32, "mul": 4, "fma": 4, "permute": 26, "compare": 14})
#: Number of exchanges between lanes for such a row, and the number for which a warp waits, since it issues in order.
#: Four columns of the row are summed over 8 lanes, one column after the other, and sent to other lanes; four products
#: of the row are exchanged at the same time.
ROW_SHUFFLES, ROW_ROUNDS = 4 * 3 + 4 + 4 * 3, 4 * 3 + 1 + 3
#: Number of rows that need no substitution.
FIRST_ROWS = 2
#: Number of doublings in a warp.
DOUBLINGS = WARP.bit_length() - 1
#: Cost of a block in a step that brings a state from lanes to a product: each lane exchanges 8 elements, for two
#: operands.
PRODUCT_SHUFFLES = 8


@dataclass(frozen=True, slots=True)
class Passes:
    """Steps that wait for one another: their number and, for each step, the instructions and shuffles of a warp, and
    the rounds that follow one another.

    ``products``: the products of blocks of 16 in each step.
    """

    times: int
    instructions: Mapping[str, float]
    shuffles: float
    rounds: int
    products: int = 0


def applied(step: Step) -> float:
    """Return the number of operations with which a function combines two elements of a reduction or scan; 1 for other
    steps.
    """
    return combine_of(step.attributes.variant).work if step.opcode in (Opcode.FOLD, Opcode.SCAN) else 1.0


def along_passes(step: Step, values: float, key: str) -> list[Passes]:
    """Return the passes of an operation along a tile; ``values``: number of the tile's values in a lane.

    Raises `UnknownOpcodeError` for an order that warps do not have.
    """
    if step.opcode is Opcode.SCAN:  # steps of cumulative sums, each with the operations of a function of two elements
        each, runs = values * applied(step), ceil_div(step.dst.cols, WARP)
        within = Passes(DOUBLINGS, {"add": each, "permute": values}, values, 1)
        return [within, *([Passes(1, {"add": (runs - 1) * each}, (runs - 1) * values, runs - 1)] if runs > 1 else [])]
    if (order := step.attributes.order) != ALONG[step.opcode]:
        raise UnknownOpcodeError(
            f"{step.opcode.name} in order {order!r} has no cost on {key}; allowed: {ALONG[step.opcode]}"
        )
    if step.opcode is Opcode.CUMSUM:
        runs = ceil_div(min(step.attributes.every or step.dst.cols, step.dst.cols), WARP)
        within = Passes(DOUBLINGS, {"add": values, "permute": values}, values, 1)
        return [within, *([Passes(1, {"add": (runs - 1) * values}, (runs - 1) * values, runs - 1)] if runs > 1 else [])]
    squares, count = ceil_div(step.dst.rows, step.dst.cols), ceil_div(step.dst.cols, BLOCK)
    listed = [Passes(squares * count * (BLOCK - FIRST_ROWS), ROW, ROW_SHUFFLES, ROW_ROUNDS)]
    for apart in range(1, count):  # blocks at this distance below the diagonal are computed after nearer blocks
        products = (count - apart) * (apart + 1)
        listed.append(Passes(squares, {"mul": 8 * (count - apart)}, PRODUCT_SHUFFLES * products, 2, products))
    return listed
