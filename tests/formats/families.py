"""Seven families of operands, each aimed at one way a matrix unit can go wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats import cast

if TYPE_CHECKING:
    from npusim.formats import FloatFormat, MmaArithmetic

FAMILIES = ("normal", "uniform", "wide", "cancelling", "subnormal", "sparse", "patterns")


def operands(family: str, unit: MmaArithmetic, shape: tuple[int, int, int], seed: int) -> tuple[Any, Any, Any]:
    """Return A (M, K), B (K, N) and C (M, N) of one family."""
    rows, depth, columns = shape
    rng = np.random.default_rng([seed, FAMILIES.index(family)])
    a = _values(family, unit.a, (rows, depth), rng)
    b = _values(family, unit.b, (depth, columns), rng)
    c = _values(family, unit.acc, (rows, columns), rng)
    if family == "cancelling":
        # The second half of every instruction almost takes back the first.
        half = depth // 2
        a[:, half : 2 * half] = a[:, :half]
        flipped = b[:half].view(unit.b.bits_dtype) ^ unit.b.bits_dtype.type(
            1 << (unit.b.bits - 1) << unit.b.storage_shift
        )
        b[half : 2 * half] = flipped.view(unit.b.dtype)
    return a, b, c


def _values(family: str, fmt: FloatFormat, shape: tuple[int, int], rng: Any) -> Any:
    if family == "patterns":
        top = 1 << min(fmt.bits, 63)
        codes = rng.integers(0, top, shape).astype(np.uint64) << np.uint64(fmt.storage_shift)
        return codes.astype(fmt.bits_dtype).view(fmt.dtype)
    # float64 and float32 would leave the range of products; half of it is wide enough.
    low = max(fmt.min_exponent, -120) - fmt.mantissa_bits // 2
    high = max(min(fmt.bias, 120) // 2, 1)
    match family:
        case "normal":
            x = rng.standard_normal(shape)
        case "uniform":
            x = rng.random(shape)
        case "wide":
            x = rng.standard_normal(shape) * 2.0 ** rng.integers(low // 2, high, shape)
        case "cancelling":
            signs = rng.choice([-1.0, 1.0], shape)
            ulps = rng.integers(0, 2, shape) * 2.0**-fmt.mantissa_bits
            x = signs * 2.0 ** rng.integers(-3, 4, shape) * (1 + ulps)
        case "subnormal":
            limit = 1 << (min(fmt.mantissa_bits, 40) + 1)
            x = rng.integers(-limit, limit, shape) * fmt.min_subnormal
        case _:
            x = rng.standard_normal(shape) * (rng.random(shape) < 0.3)
            x[rng.random(shape) < 0.1] = -0.0
    return cast(x, fmt, overflow="saturate")
