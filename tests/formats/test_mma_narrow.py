"""The kernel of fused dot-adds in 32 bits has the bits of the one in 64, and hands over what leaves float32's range."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from npusim.formats import cast, mma_narrow
from npusim.formats.matmul import matmul
from npusim.formats.mma_arithmetic import ARITHMETICS

if TYPE_CHECKING:
    from npusim.formats.cast import Array

#: Blocks of 4, 8, 16 and 32, fractions of 13 to 25 bits, both results, operands with float32's exponents.
UNITS = (
    "volta.mma.k4.f16.f32",
    "volta.mma.k4.f16.f16",
    "ampere.mma.k8.f16.f32",
    "hopper.wgmma.k16.f16.f32",
    "hopper.mma.k16.f16.f16",
    "hopper.wgmma.k16.bf16.f32",
    "hopper.wgmma.k8.tf32.f32",
    "hopper.wgmma.k32.e4m3.f32",
    "ada.mma.k32.e5m2.f16",
)
#: Powers of two by which A, B and C are multiplied at most, below and above.
RANGES = {
    "ordinary": ((0, 1), (0, 1)),
    "wide": ((-30, 30), (-60, 60)),
    "subnormal results": ((-62, -58), (-130, -120)),
    "large results": ((50, 63), (100, 127)),
    "C alone": ((-24, -20), (0, 127)),
}


def _operands(name: str, kind: str) -> list[Array]:
    unit, generator = ARITHMETICS[name], np.random.default_rng(len(kind))
    (low, high), (c_low, c_high) = RANGES[kind]
    arrays: list[Array] = []
    for shape, fmt, (first, last) in (
        ((24, 64), unit.a, (low, high)),
        ((64, 40), unit.b, (low, high)),
        ((24, 40), unit.acc, (c_low, c_high)),
    ):
        values = np.ldexp(generator.standard_normal(shape), generator.integers(first, last, shape))
        values[generator.random(shape) < 0.2] = 0.0
        values[generator.random(shape) < 0.002] = np.inf
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
        arrays.append(values if fmt.name == "tf32" else cast(values, fmt))
    return arrays


@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("name", UNITS)
def test_sums_in_32_bits_have_the_bits_of_those_in_64(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = _operands(name, kind)
    result = matmul(a, b, c, arithmetic=name)
    monkeypatch.setattr(mma_narrow, "is_narrow", lambda block, fraction: False)
    assert result.tobytes() == matmul(a, b, c, arithmetic=name).tobytes()


def test_the_kernel_says_where_terms_left_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    least = []
    original = mma_narrow.narrow_kernel

    def watched(block: int, is_half: bool) -> object:
        kernel = original(block, is_half)

        def run(*args: object) -> int:
            least.append(kernel(*args))
            return least[-1]

        return run

    monkeypatch.setattr(mma_narrow, "narrow_kernel", watched)
    for kind in ("ordinary", "subnormal results"):
        matmul(*_operands("hopper.wgmma.k16.bf16.f32", kind), arithmetic="hopper.wgmma.k16.bf16.f32")
    assert least[0] >= mma_narrow.LEAST_EXPONENT > least[1]


def test_sums_of_more_than_32_bits_are_not_narrow() -> None:
    largest = {unit.block: unit.fraction_bits for unit in ARITHMETICS.values() if unit.method == "fused"}
    for block in largest:
        fraction = max(f for f in range(26) if mma_narrow.is_narrow(block, f))
        # All products as large as they can be, (2 - 2**-10)**2 units of 2**F, and C below 2 units.
        assert block * 4 * 2**fraction + 2 * 2**fraction <= 2**32
        assert fraction == 25 or block * 4 * 2 ** (fraction + 1) + 2 * 2 ** (fraction + 1) > 2**32
