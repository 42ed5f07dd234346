"""Single blocks on which a matrix unit goes wrong if one constant, sign or check of it does."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from npusim.formats import cast, get_arithmetic, get_format, matmul
from npusim.formats.exact_rounding import round_fraction
from npusim.formats.jit import kernel
from npusim.formats.mma_arithmetic import ARITHMETICS
from npusim.formats.reduction_kernels import round_sum
from tests.formats.mma_reference import matmul_reference

CUBES = ("ascend.cube.k16.f16.f32", "ascend.cube.k16.bf16.f32")
#: Terms of a block: factors by their place in it.
Terms = dict[int, tuple[float, float]]
COLUMNS = 40


def block(name: str, terms: Terms, columns: int = 1) -> tuple[Any, Any]:
    """A (1, K) and B (K, columns) whose column 0 has these products; the others have none."""
    unit = get_arithmetic(name)
    a, b = np.zeros((1, unit.k)), np.zeros((unit.k, columns))
    for k, (x, y) in terms.items():
        a[0, k], b[k, 0] = x, y
    first, second = cast(a, unit.a), cast(b, unit.b)
    assert (first.astype(float) == a).all()
    assert (second.astype(float) == b).all()
    return first, second


def results(name: str, c: float, terms: Terms) -> set[float]:
    """The block alone in a row, a row full of it; and in integers."""
    unit = get_arithmetic(name)
    start = np.zeros((1, COLUMNS), unit.acc.dtype)
    start[0, 0] = c
    assert float(start[0, 0]) == c
    a, b = block(name, terms, COLUMNS)
    full, starts = np.repeat(b[:, :1], COLUMNS, axis=1), np.repeat(start[:, :1], COLUMNS, axis=1)
    out = set()
    alone = matmul(a, b, start, arithmetic=unit)
    assert (alone[0, 1:] == 0).all()
    many = matmul(a, full, starts, arithmetic=unit)
    out |= {float(alone[0, 0]), *many[0].astype(float).tolist()}
    return out | {matmul_reference(a, b[:, :1], start[:, :1], arithmetic=unit).item()}


#: c, products, and the float32 nearest to their exact sum.
EXACT: dict[str, tuple[float, Terms, float]] = {
    "the last product cancels the top": (2.0**-60, {14: (-1, 1), 15: (1, 1)}, 2.0**-60),
    "and two smaller parts remain": (2.0**-60, {0: (2.0**-12, 2.0**-12), 14: (-1, 1), 15: (1, 1)}, 2.0**-24),
    "the sum of all is zero": (-1.0, {0: (1, 2), 15: (-1, 1)}, 0.0),
    # 2**24 + 1 is a tie, which goes to the even 2**24; what is below decides.
    "a tie alone": (2.0**24, {3: (1, 1)}, 2.0**24),
    "a tie and a little more": (2.0**24, {3: (1, 1), 9: (2.0**-20, 2.0**-20)}, 2.0**24 + 2),
    "a tie and a little less": (2.0**24 + 2, {3: (1, 1), 9: (-(2.0**-20), 2.0**-20)}, 2.0**24 + 2),
    "a negative tie and a little more": (-(2.0**24), {3: (-1, 1), 9: (-(2.0**-20), 2.0**-20)}, -(2.0**24) - 2),
    "a negative tie and a little less": (-(2.0**24) - 2, {3: (-1, 1), 9: (2.0**-20, 2.0**-20)}, -(2.0**24) - 2),
    "an odd tie and a little less": (2.0**24 + 2, {3: (1, 1), 5: (-(2.0**-14), 2.0**-14)}, 2.0**24 + 2),
    # Fifteen times 2**-54 of c: every one is lost in float64, all together decide the tie.
    "losses that add up": (
        2.0**20,
        {0: (2.0**-2, 2.0**-2)} | dict.fromkeys(range(1, 16), (2.0**-17, 2.0**-17)),
        2.0**20 + 2.0**-3,
    ),
    # c = 2**53 units: one unit is half of what float64 keeps beside it.
    "one bit beyond float64": (2.0**13, {0: (2.0**-5, 2.0**-6), 1: (2.0**-20, 2.0**-20)}, 2.0**13 + 2.0**-10),
    # The products span 25 bits only; c has bits far below their unit.
    "c below the products' unit": (2.0**-40, {0: (4096, 4096), 1: (1, 1)}, 2.0**24 + 2),
    "c below, the other way": (-(2.0**-40), {0: (4096, 4096), 1: (3, 1)}, 2.0**24 + 2),
    "outliers that cancel around a tie": (
        2.0**-30,
        {0: (2.0**15, 2.0**15), 4: (4096, 4096), 9: (1, 1), 15: (-(2.0**15), 2.0**15)},
        2.0**24 + 2,
    ),
    "outliers around a tie, a little less": (
        -(2.0**-30),
        {0: (2.0**15, 2.0**15), 4: (4096, 4096), 9: (3, 1), 15: (-(2.0**15), 2.0**15)},
        2.0**24 + 2,
    ),
    "a tie and a bit just below two limbs": (2.0**-52, {0: (1, 1), 1: (2.0**-12, 2.0**-12)}, 1 + 2.0**-23),
    "the smallest subnormal of float32": (2.0**-149, {0: (1, 1), 1: (-1, 1)}, 2.0**-149),
    "a sum far above c": (2.0**-149, {0: (1, 1), 1: (2.0**-12, 2.0**-12)}, 1 + 2.0**-23),
    "a large c and small products": (2.0**127, {0: (2.0**-12, 2.0**-12)}, 2.0**127),
}


@pytest.mark.parametrize("name", CUBES)
@pytest.mark.parametrize("case", EXACT)
def test_exact_sums_of_single_blocks(case: str, name: str) -> None:
    c, terms, wanted = EXACT[case]
    total = sum((Fraction(x) * Fraction(y) for x, y in terms.values()), Fraction(c))
    assert abs(total - Fraction(wanted)) <= Fraction(float(np.spacing(np.float32(abs(wanted))))) / 2
    assert results(name, c, terms) == {wanted}


#: Only bfloat16 reaches so far: outliers at up to three scales, and what stays below them.
NESTED: dict[str, tuple[float, Terms, float]] = {
    "two scales": (
        2.0**-24,
        {
            1: (2.0**100, 2.0**100),
            2: (1, 1),
            3: (2.0**45, 2.0**45),
            7: (2.0**-24, 2.0**-40),
            9: (2.0**45, -(2.0**45)),
            15: (-(2.0**100), 2.0**100),
        },
        1 + 2.0**-23,
    ),
    "two scales, less": (
        2.0**-24,
        {
            1: (2.0**100, 2.0**100),
            2: (1, 1),
            3: (2.0**45, 2.0**45),
            7: (-(2.0**-24), 2.0**-40),
            9: (2.0**45, -(2.0**45)),
            15: (-(2.0**100), 2.0**100),
        },
        1.0,
    ),
    "two scales, negative": (
        -(2.0**-24),
        {
            1: (2.0**100, 2.0**100),
            2: (-1, 1),
            3: (2.0**45, 2.0**45),
            7: (-(2.0**-24), 2.0**-40),
            9: (2.0**45, -(2.0**45)),
            15: (-(2.0**100), 2.0**100),
        },
        -1 - 2.0**-23,
    ),
    "one bit beyond float64 beside outliers": (
        0.0,
        {
            0: (2.0**100, 2.0**100),
            1: (2.0**60, 2.0**60),
            2: (2.0**6, 2.0**7),
            3: (2.0**-5, 2.0**-6),
            4: (2.0**-20, 2.0**-20),
            14: (-(2.0**60), 2.0**60),
            15: (-(2.0**100), 2.0**100),
        },
        2.0**13 + 2.0**-10,
    ),
    "c below the products' unit beside outliers": (
        2.0**-40,
        {
            0: (2.0**100, 2.0**100),
            1: (2.0**60, 2.0**60),
            4: (4096, 4096),
            9: (1, 1),
            14: (-(2.0**60), 2.0**60),
            15: (-(2.0**100), 2.0**100),
        },
        2.0**24 + 2,
    ),
    "two scales beside whole numbers": (
        0.0,
        {
            0: (2.0**100, 2.0**100),
            1: (2.0**60, 2.0**60),
            2: (3, 1),
            3: (5, 1),
            14: (-(2.0**60), 2.0**60),
            15: (-(2.0**100), 2.0**100),
        },
        8.0,
    ),
    "three scales": (
        2.0**-24,
        {
            1: (2.0**100, 2.0**100),
            2: (1, 1),
            3: (2.0**60, 2.0**60),
            5: (2.0**30, 2.0**30),
            7: (2.0**-24, 2.0**-40),
            8: (2.0**30, -(2.0**30)),
            9: (2.0**60, -(2.0**60)),
            15: (-(2.0**100), 2.0**100),
        },
        1 + 2.0**-23,
    ),
    "a sum below float32": (0.0, {0: (2.0**-100, 2.0**-100)}, 0.0),
    "a tie below float32": (2.0**-149, {0: (-(2.0**-75), 2.0**-75)}, 0.0),
    "a tie below float32, and more": (2.0**-149, {0: (-(2.0**-75), 2.0**-75), 7: (2.0**-120, 2.0**-120)}, 2.0**-149),
    "beyond float32": (0.0, {0: (2.0**100, 2.0**100)}, float("inf")),
    "beyond float32, and back": (1.0, {0: (2.0**100, 2.0**100), 15: (-(2.0**100), 2.0**100)}, 1.0),
}


@pytest.mark.parametrize("case", NESTED)
def test_exact_sums_over_the_whole_range_of_bfloat16(case: str) -> None:
    c, terms, wanted = NESTED[case]
    assert results(CUBES[1], c, terms) == {wanted}


def nested_operands(name: str, columns: int, seed: int) -> tuple[Any, Any, Any]:
    """Blocks of outliers that cancel in any order at up to three scales, and few significant bits."""
    unit = get_arithmetic(name)
    rng = np.random.default_rng(seed)
    top = 14 if unit.a.exponent_bits == 5 else 110
    a = rng.choice([-1.0, 1.0], (1, 16)) * 2.0 ** rng.integers(-top // 2, top, (1, 16))
    b = np.zeros((16, columns))
    for j in range(columns):
        places = rng.permutation(16)
        for x, y in places[: 2 * rng.integers(2, 8)].reshape(-1, 2):
            # Equal and opposite products, now and then but for a bit of one of them.
            scale = 2.0 ** rng.integers(-top // 2, top // 4)
            b[x, j], b[y, j] = scale / a[0, x], -scale / a[0, y] * rng.choice([1, 1, 1 + 2.0**-7])
        for k in places[-3:]:
            b[k, j] = rng.integers(-9, 9) * 2.0 ** rng.integers(-12, 2)
    c = rng.integers(-5, 5, (1, columns)) * 2.0 ** rng.integers(-40, 3, (1, columns))
    return a, b, c


@pytest.mark.parametrize("name", CUBES)
def test_outliers_that_cancel_leave_the_exact_rest(name: str) -> None:
    unit = get_arithmetic(name)
    for seed in range(3):
        a, b, c = nested_operands(name, 120, seed)
        operands = cast(a, unit.a), cast(b, unit.b), cast(c, unit.acc)
        wanted = matmul_reference(*operands, arithmetic=unit).view(np.uint32)
        np.testing.assert_array_equal(matmul(*operands, arithmetic=unit).view(np.uint32), wanted)


TIE = 2.0**60 + 2.0**36
#: Three float64 numbers whose sum is a float32 tie, or next to one by any of them.
TRIPLES = [
    (x * sign, y * sign, z * sign)
    for sign in (1.0, -1.0)
    for x, y, z in (
        (TIE, 0.0, 0.0),
        (TIE, 2.0**-30, 0.0),
        (TIE, 0.0, 2.0**-30),
        (TIE, 0.0, -(2.0**-30)),
        (TIE, 2.0**-30, -(2.0**-30)),
        (TIE, 2.0**-30, -(2.0**-29)),
        (2.0**60, 2.0**36, 2.0**-30),
        (2.0**60, 2.0**36, -(2.0**-30)),
        # y + z carries into x, and leaves a bit of its own.
        (TIE - 256, 1.0, 255 + 2.0**-45),
        (TIE + 256, -1.0, -255 - 2.0**-45),
        # z takes back what x has.
        (TIE, 2.0**-30, -TIE),
        (-TIE, TIE, 2.0**-30),
        (2.0**60, -(2.0**60), TIE),
    )
]


@kernel
def rounded(parts: Any, out: Any) -> None:
    out[0] = round_sum(parts[0], parts[1], parts[2])


@pytest.mark.parametrize("triple", TRIPLES)
def test_three_parts_are_rounded_once(triple: tuple[float, float, float]) -> None:
    total = sum(map(Fraction, triple))
    code = round_fraction(total, get_format("float32"))
    out = np.empty(1, np.float32)
    rounded(np.array(triple), out)
    assert int(out.view(np.uint32)[0]) == code | (int(total < 0) << 31)


def test_a_part_says_that_python_cannot_call_it() -> None:
    with pytest.raises(TypeError, match="round_sum is compiled into the kernels that call it"):
        round_sum(1.0, 2.0, 3.0)


def test_exact_sums_of_float32_products_keep_all_48_bits() -> None:
    """No registered unit multiplies float32 exactly."""
    from dataclasses import replace

    unit = replace(get_arithmetic(CUBES[0]), a_format="float32", b_format="float32")
    rng = np.random.default_rng(8)
    a = rng.standard_normal((2, 16)).astype(np.float32)
    b = rng.standard_normal((16, 12)).astype(np.float32)
    a[:, 8:], b[8:] = a[:, :8], -b[:8]
    a[:, 3] = np.nextafter(a[:, 3], np.float32(9))
    b[12] *= np.float32(2.0**-90)
    wanted = matmul_reference(a, b, arithmetic=unit).view(np.uint32)
    np.testing.assert_array_equal(matmul(a, b, arithmetic=unit).view(np.uint32), wanted)


#: Units with a smallest alignment: MATLAB-tensor-core's 4 - F for float16 results, -(F + 108) for
#: float32 ones (which only products of 8-bit exponents reach).  Units that add neighbours along k in different
#: blocks have the alignment of the unit that they chain.
FLOORS = {
    name: (4 - unit.fraction_bits if name.endswith(".f16") else -(unit.fraction_bits + 108))
    for name, unit in ARITHMETICS.items()
    if unit.fraction_bits not in (None, 13)
    and unit.index_groups is None
    and unit.a_format in (("float16",) if name.endswith(".f16") else ("bfloat16", "tf32"))
}


@pytest.mark.parametrize("name", FLOORS)
def test_the_smallest_alignment_keeps_its_last_bit(name: str) -> None:
    """The last bit kept below the smallest alignment decides a rounding, the next one does not.

    float16: 2**-25 is half the smallest subnormal, a tie that the bit breaks upwards.  float32:
    the bit is taken from the smallest subnormal, of which rounding toward zero then leaves 0.
    """
    last = FLOORS[name] - (ARITHMETICS[name].fraction_bits or 0)
    for smallest, is_kept in ((last, True), (last - 1, False)):
        x, y = 2.0 ** (smallest // 2), 2.0 ** (smallest - smallest // 2)
        if name.endswith(".f16"):
            terms, wanted = {0: (2.0**-13, 2.0**-12), 1: (x, y)}, 2.0**-24 if is_kept else 0.0
        else:
            terms, wanted = {0: (2.0**-75, 2.0**-74), 1: (-x, y)}, 0.0 if is_kept else 2.0**-149
        assert results(name, 0.0, terms) == {wanted}


def test_hopper_separates_the_floors_of_21_and_20() -> None:
    """2**-13 2**-12 + 2**-23 2**-23: the second survives an alignment to 2**-21, not to 2**-20."""
    for name in ("hopper.mma.k16.f16.f16", "hopper.mma.k8.f16.f16", "hopper.wgmma.k16.f16.f16"):
        a, b = block(name, {0: (2.0**-13, 2.0**-12), 1: (2.0**-23, 2.0**-23)})
        assert matmul(a, b, arithmetic=name).item() == 2.0**-24
