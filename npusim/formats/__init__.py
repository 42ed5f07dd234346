"""Numbers: formats as data, casts, elementwise arithmetic, reductions and matrix units, bit by bit.

Importing this package imports numpy but not numba; the first call of a kernel does.
"""

from npusim.formats.block_formats import (
    BLOCK_FORMATS,
    SCALE_RULES,
    BlockArray,
    BlockFormat,
    ScaleRule,
    get_block_format,
    get_scale_rule,
    quantize,
    scales_of,
)
from npusim.formats.cast import ROUNDINGS, cast, is_all_finite
from npusim.formats.combines import combine_of, combine_text, folded, scanned
from npusim.formats.cuda_functions import div_full
from npusim.formats.elementwise import MAX_NANS, RELATIONS, add, compare, div, fma, maximum, minimum, mul, sub
from npusim.formats.float_format import FORMATS, FloatFormat, get_format, stored_format
from npusim.formats.matmul import matmul
from npusim.formats.mma_arithmetic import ARITHMETICS, MmaArithmetic, get_arithmetic
from npusim.formats.reductions import reduce_max, reduce_sum
from npusim.formats.scans import IEEE, cumulative_sum, inverse
from npusim.formats.unary import (
    DIVISIONS,
    LIBRARIES,
    VARIANTS,
    erf,
    exp,
    exp2,
    log,
    log1p,
    log2,
    rcp,
    rsqrt,
    sqrt,
    tanh,
)

__all__ = [
    "ARITHMETICS",
    "BLOCK_FORMATS",
    "DIVISIONS",
    "FORMATS",
    "IEEE",
    "LIBRARIES",
    "MAX_NANS",
    "RELATIONS",
    "ROUNDINGS",
    "SCALE_RULES",
    "VARIANTS",
    "BlockArray",
    "BlockFormat",
    "FloatFormat",
    "MmaArithmetic",
    "ScaleRule",
    "add",
    "cast",
    "combine_of",
    "combine_text",
    "compare",
    "cumulative_sum",
    "div",
    "div_full",
    "erf",
    "exp",
    "exp2",
    "fma",
    "folded",
    "get_arithmetic",
    "get_block_format",
    "get_format",
    "get_scale_rule",
    "inverse",
    "is_all_finite",
    "log",
    "log1p",
    "log2",
    "matmul",
    "maximum",
    "minimum",
    "mul",
    "quantize",
    "rcp",
    "reduce_max",
    "reduce_sum",
    "rsqrt",
    "scales_of",
    "scanned",
    "sqrt",
    "stored_format",
    "sub",
    "tanh",
]
