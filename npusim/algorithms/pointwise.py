"""What stands between the products of a layer: norm with residual, rotary embedding, the FFN's activation.

Row by row, no product.  A norm's weights are part of the product that follows.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from npusim.algorithms.cells import grid
from npusim.algorithms.language import Value, exp, log
from npusim.algorithms.lowering import Kernel, kernel
from npusim.ir.tile import GlobalTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.algorithms.phase import Phase

WIDE = "float32"
EPSILON = 1e-5  # source: rms_norm_eps of Llama-2's config.json


@kernel(results="sum y", x="row col", update="row col")
def norm(x: Value, update: Value, fmt: str, mean: float) -> tuple[Value, Value]:
    """Root mean square norm (Zhang, Sennrich 2019) of the residual sum; 1 / sqrt is exp(-ln / 2)."""
    total = x + update
    wide = total.to(WIDE)
    square = (wide * wide).sum() * mean + EPSILON
    return total, (total.to(WIDE) * exp(log(square) * -0.5)).to(fmt)  # source: 1 / sqrt(x) = exp(-ln(x) / 2)


@kernel(results="sum y", x="row col", update="row col", cos="row col", sin="row col")
def rotary(x: Value, update: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    """Halves of a head turned by an angle a row and column (Su et al. 2021)."""
    a, b = x * cos, update * sin
    low = a - b
    a, b = update * cos, x * sin
    return low, a + b


def times_sigmoid(x: Value, slope: float, fmt: str) -> Value:
    """Return x / (1 + exp(-slope x)): x times the sigmoid of slope x."""
    wide = x.to(WIDE)
    return (wide / (exp(wide * -slope) + 1.0)).to(fmt)


@kernel(results="y", x="row col", update="row col")
def gate(x: Value, update: Value, fmt: str) -> Value:
    """SiLU of the gate times the other half (Shazeer 2020)."""
    return times_sigmoid(x, 1.0, fmt) * update


@kernel(results="y", x="row col")
def gelu(x: Value, fmt: str) -> Value:
    """GELU as x sigmoid(1.702 x)."""
    return times_sigmoid(x, 1.702, fmt)  # source: Hendrycks and Gimpel 2016, section 2


KERNELS: Mapping[str, Kernel] = MappingProxyType({"norm": norm, "rotary": rotary, "gate": gate, "gelu": gelu})
#: Operands that all heads share.
SHARED = ("cos", "sin")


def pointwise(what: str, shape: tuple[int, int, int], fmt: str, tile: tuple[int, int]) -> Phase:
    """Return ``what`` of ``shape`` (heads, rows, columns), a ``tile`` of rows and columns a cell."""
    (heads, rows, cols), one = shape, KERNELS[what]

    def tensor(n: str) -> GlobalTensor:
        role: Literal["input", "output"] = "output" if n in one.results else "input"
        return GlobalTensor(n, 1, 1 if n in SHARED else heads, rows, cols, fmt, role)

    out = [tensor(n) for n in one.results]
    return one.phase(
        what,
        grid(out[-1], ("row", tile[0]), ("col", tile[1])),
        {"row": tile[0], "col": min(tile[1], cols)},
        out,
        **dict[str, Any]((n, tensor(n)) for n in one.axes),
        fmt=fmt,
        mean=1.0 / cols,
    )
