from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npusim.errors import FormatError
from npusim.formats import add, cast, fma, get_format, mul, reduce_max, reduce_sum
from npusim.formats.reductions import normal_order
from tests.formats.reference import operation_reference

HERE = Path(__file__).parent
NAMES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "tf32", "float64")


def rows_of(name: str, shape: tuple[int, ...], seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return cast(rng.standard_normal(shape) * 3, name)


def _add(x: int, y: int, name: str) -> int:
    return operation_reference("add", x, y, get_format(name))


def _sequential(row: list[int], name: str) -> int:
    total = row[0]
    for item in row[1:]:
        total = _add(total, item, name)
    return total


def _halves(row: list[int], name: str) -> int:
    while len(row) > 1:
        half = (len(row) + 1) // 2
        row = [_add(row[i], row[i + half], name) if i + half < len(row) else row[i] for i in range(half)]
    return row[0]


def _lanes(row: list[int], name: str) -> int:
    width = 32 // get_format(name).size_bytes
    while len(row) > 1:
        row = [_block(row[i : i + width], width, name) for i in range(0, len(row), width)]
    return row[0]


def _block(row: list[int], width: int, name: str) -> int:
    """A tree of neighbours over the lanes of a block; lanes without data take no part."""
    lanes: list[int | None] = [*row, *[None] * (width - len(row))]
    while len(lanes) > 1:
        pairs = zip(lanes[::2], lanes[1::2], strict=True)
        lanes = [x if y is None else _add(x, y, name) for x, y in pairs]  # type: ignore[arg-type]
    return lanes[0]  # type: ignore[return-value]


@pytest.mark.parametrize("count", [1, 2, 7, 8, 16, 33, 128])
@pytest.mark.parametrize("name", NAMES)
def test_sums_equal_their_scalar_twins(name: str, count: int) -> None:
    fmt = get_format(name)
    x = rows_of(name, (3, count), count)
    rows = x.view(fmt.bits_dtype).tolist()
    for order, twin in (("sequential", _sequential), ("tree_halves", _halves), ("vector_lanes", _lanes)):
        got = reduce_sum(x, name, order).view(fmt.bits_dtype).tolist()  # type: ignore[arg-type]
        assert got == [twin(row, name) for row in rows], order


def test_tree_of_128_pairs_i_with_i_plus_64() -> None:
    # 2**11 at 0 and 64 halves of 1: only a tree that first adds i and i + 64 keeps the ones.
    x = np.zeros((1, 128), np.float16)
    x[0, 0] = 2048
    x[0, 1] = x[0, 65] = 1
    # (x1 + x65) = 2, then 2048 + 2 = 2050 exactly; left to right each 1 is lost.
    assert reduce_sum(x, "float16", "tree_halves").tolist() == [2050.0]
    assert reduce_sum(x, "float16").tolist() == [2048.0]


def test_the_vector_unit_adds_neighbours_first() -> None:
    """As Ascend C's reference of ReduceSum and BlockReduceSum has it: x0 + x1, x2 + x3, ..."""
    x = np.array([[2048, -2048, 1, 1]], np.float16)
    assert reduce_sum(x, "float16", "vector_lanes").tolist() == [2.0]
    # (2048 + 1) loses the 1, (-2048 + 1) keeps it.
    assert reduce_sum(x, "float16", "tree_halves").tolist() == [1.0]


def test_start_comes_first_in_a_sequence_and_last_in_a_tree() -> None:
    x = np.array([[1.0, 1.0]], np.float16)
    start = np.array([2048.0], np.float16)
    # (2048 + 1) + 1 = 2048 twice rounded; 2048 + (1 + 1) = 2050.
    assert reduce_sum(x, "float16", start=start).tolist() == [2048.0]
    assert reduce_sum(x, "float16", "tree_halves", start=start).tolist() == [2050.0]
    assert reduce_sum(x, "float16", "vector_lanes", start=2048.0).tolist() == [2050.0]


def test_sums_of_rows_and_of_these_sums() -> None:
    x, y = rows_of("float32", (3, 24), 0), rows_of("float32", (3, 24), 1)
    rows = reduce_sum(x.reshape(3, 4, 6), "float32", "tree_halves")
    assert np.array_equal(
        reduce_sum(x, "float32", "tree_halves/6+sequential"), reduce_sum(rows, "float32", "sequential")
    )
    rows = reduce_sum(x.reshape(3, 4, 6), "float32", times=y.reshape(3, 4, 6))
    assert np.array_equal(
        reduce_sum(x, "float32", "sequential/6+tree_halves", times=y), reduce_sum(rows, "float32", "tree_halves")
    )
    with pytest.raises(FormatError, match="rows of 7 elements"):
        reduce_sum(x, "float32", "sequential/7+sequential")


def test_sequential_sum_is_not_numpys() -> None:
    assert reduce_sum(np.ones(5000, np.float16), "float16").item() == 2048.0


def test_sums_keep_signed_zero_and_ieee_specials() -> None:
    x = np.array([[-0.0, -0.0], [np.inf, 1.0], [np.inf, -np.inf]], np.float16)
    for order in ("sequential", "tree_halves", "vector_lanes"):
        got = reduce_sum(x, "float16", order).view(np.uint16).tolist()  # type: ignore[arg-type]
        assert got == [0x8000, 0x7C00, 0x7FFF], order


def test_leading_axes_and_strided_input() -> None:
    x = rows_of("float32", (4, 5, 6), 1).transpose(1, 2, 0)
    got = reduce_sum(x, "float32")
    assert got.shape == (5, 6)
    np.testing.assert_array_equal(got, reduce_sum(np.ascontiguousarray(x), "float32"))
    assert reduce_max(x, "float32").shape == (5, 6)


@pytest.mark.parametrize("name", NAMES)
def test_max_is_the_largest_number(name: str) -> None:
    x = rows_of(name, (5, 37), 9)
    assert reduce_max(x, name).astype(float).tolist() == x.astype(float).max(axis=-1).tolist()


def test_max_ignores_nan_and_orders_zeros() -> None:
    x = np.array([[np.nan, -np.inf], [np.nan, np.nan], [-0.0, 0.0], [0.0, -0.0]], np.float32)
    assert reduce_max(x, "float32").view(np.uint32).tolist() == [0xFF800000, 0x7FFFFFFF, 0, 0]
    start = np.array([1.0, 2.0, -1.0, np.nan], np.float32)
    assert reduce_max(x, "float32", start=start).tolist() == [1.0, 2.0, 0.0, 0.0]


def test_nothing_to_reduce_needs_a_start() -> None:
    empty = np.empty((2, 0), np.float16)
    with pytest.raises(FormatError, match="needs a start value"):
        reduce_sum(empty, "float16")
    assert reduce_sum(empty, "float16", start=3.0).tolist() == [3.0, 3.0]
    assert reduce_max(empty, "float16", start=np.float16(-1)).tolist() == [-1.0, -1.0]


def test_bad_arguments_are_refused() -> None:
    x = np.ones((2, 4), np.float16)
    with pytest.raises(FormatError, match="unknown reduction order 'pairwise'"):
        reduce_sum(x, "float16", "pairwise")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="does not match results of shape"):
        reduce_sum(x, "float16", start=np.zeros(3, np.float16))
    with pytest.raises(FormatError, match="float32 needs float32"):
        reduce_sum(x, "float32")
    with pytest.raises(FormatError, match="at least one axis"):
        reduce_sum(np.float16(1), "float16")


@pytest.mark.parametrize(
    ("order", "neighbours", "lanes", "warps", "columns"),
    [
        ("mma_lanes", 2, 4, 1, 8),
        ("lanes_2x4x4", 2, 4, 4, 8),
        ("lanes_2x4x2_64", 2, 4, 2, 64),
        ("lanes_1x8x2_16", 1, 8, 2, 16),
        ("lanes_4x32x2", 4, 32, 2, 128),
    ],
)
@pytest.mark.parametrize("size", [16, 37, 64, 256])
def test_lanes_and_warps_add_their_columns_and_then_halves(
    order: str, neighbours: int, lanes: int, warps: int, columns: int, size: int
) -> None:
    rows = np.random.default_rng(size).standard_normal((9, size)).astype(np.float32)
    rows *= np.exp2(np.random.default_rng(1).integers(-9, 9, rows.shape)).astype(np.float32)
    own: dict[tuple[int, int], Any] = {}
    for at in range(size):
        place = at // columns % warps, at // neighbours % lanes
        own[place] = own[place] + rows[:, at] if place in own else rows[:, at]

    def halves(parts: list[Any]) -> Any:
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [a + b for a, b in zip(parts[:half], parts[half:], strict=True)]
        return parts[0]

    nothing = np.full(len(rows), -0.0, np.float32)
    total = halves([halves([own.get((w, lane), nothing) for lane in range(lanes)]) for w in range(warps)])
    assert reduce_sum(rows, "float32", order).tobytes() == total.tobytes()
    assert reduce_sum(rows, "float32", normal_order(order, size)).tobytes() == total.tobytes()


def test_an_order_of_lanes_has_powers_of_two_and_room_for_them() -> None:
    for order in ("lanes_3x4x1", "lanes_2x4x2_4", "lanes_2x4x0"):
        with pytest.raises(FormatError, match="unknown reduction order"):
            reduce_sum(np.ones(8, np.float32), "float32", order)


@pytest.mark.parametrize("fmt", ["float32", "float16"])
@pytest.mark.parametrize("n", [7, 32, 100, 256])
def test_lanes_may_add_their_own_as_trees(n: int, fmt: str) -> None:
    x = np.random.default_rng(n).standard_normal((3, n)).astype(fmt)
    neighbours, lanes, warps = 2, 4, 2
    filled = np.concatenate([x, np.zeros((3, -n % 16), fmt)], 1)
    own = filled.reshape(3, -1, warps, lanes, neighbours)  # repetition, warp, lane, neighbour
    sums = np.empty((3, warps, lanes), fmt)
    for row, warp, lane in np.ndindex(sums.shape):
        left = list(own[row, :, warp, lane].ravel())
        while len(left) > 1:
            left = [np.add(*left[i : i + 2]) if i + 1 < len(left) else left[i] for i in range(0, len(left), 2)]
        sums[row, warp, lane] = left[0]
    while sums.shape[2] > 1:
        sums = sums[..., : sums.shape[2] // 2] + sums[..., sums.shape[2] // 2 :]
    wanted = sums[:, 0, 0] + sums[:, 1, 0]
    assert np.array_equal(reduce_sum(x, fmt, "trees_2x4x2"), wanted)


def rounded(exact: Fraction) -> Fraction:
    """Return a number rounded once to float32 (normal numbers)."""
    if not exact:
        return exact
    exponent = math.frexp(float(exact))[1] - 24
    return round(exact / Fraction(2) ** exponent) * Fraction(2) ** exponent  # to the even one at a tie


def of_lane(x: list[Fraction], y: list[Fraction]) -> Fraction:
    """Return a lane's sum of products: ``mul`` of the second, ``fma`` of the first, then one ``fma`` a product."""
    total = rounded(x[0] * y[0] + rounded(x[1] * y[1]))
    for a, b in zip(x[2:], y[2:], strict=True):
        total = rounded(a * b + total)
    return total


def test_sums_of_products_have_the_bits_of_an_h200() -> None:
    """Triton 3.6.0, ``tl.sum(x * y)`` and ``tl.sum(1.7 * x)``; names: columns, order, format, second factor."""
    with np.load(HERE / "sums_h200.npz") as stored:
        assert len(stored.files) == 44
        for name in stored.files:
            size, order, fmt, scale = name.split("/")
            rng = np.random.default_rng(int(size))
            x, y = (cast(rng.standard_normal((64, int(size))).astype(np.float32), fmt)[:16] for _ in range(2))
            times = np.float32(scale) if float(scale) else y.astype(np.float32)
            made = reduce_sum(x.astype(np.float32), "float32", order, times=times)
            assert made.tobytes() == stored[name].tobytes(), name


@pytest.mark.parametrize(("order", "lanes"), [("sequential", 1), ("lanes_4x8x1", 8), ("lanes_2x16x1", 16)])
def test_a_sum_of_products_rounds_one_product_a_lane(order: str, lanes: int) -> None:
    rng = np.random.default_rng(5)
    x, y = (rng.standard_normal((30, 32)).astype(np.float32) for _ in range(2))
    wanted = []
    for a, b in zip(x, y, strict=True):
        each = 32 // lanes
        sums = [
            of_lane(*([Fraction(float(v)) for v in row[at : at + each]] for row in (a, b))) for at in range(0, 32, each)
        ]
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [rounded(one + other) for one, other in zip(sums[:half], sums[half:], strict=True)]
        wanted.append(float(sums[0]))
    made = reduce_sum(x, "float32", order, times=y)
    assert made.tolist() == wanted
    assert reduce_sum(mul(x, y, "float32"), "float32", order).tolist() != wanted


def test_trees_of_products_contract_pairs_alone() -> None:
    x = np.random.default_rng(6).standard_normal((5, 64)).astype(np.float32)
    pairs = fma(x[:, ::2], x[:, ::2], mul(x[:, 1::2], x[:, 1::2], "float32"), "float32")
    wanted = reduce_sum(pairs, "float32", "trees_2x8x1")
    assert reduce_sum(x, "float32", "trees_4x8x1", times=x).tolist() == wanted.tolist()


def test_rows_that_end_within_a_lane_have_the_products_of_zeros_added() -> None:
    x = np.random.default_rng(7).standard_normal((4, 37)).astype(np.float32)
    filled = np.concatenate([x, np.zeros((4, 27), np.float32)], axis=1)
    for order in ("lanes_2x4x1", "lanes_4x4x2", "trees_2x4x2", "trees_1x8x2", "mma_lanes"):
        made, wanted = (reduce_sum(v, "float32", order, times=v) for v in (x, filled))
        assert made.tolist() == wanted.tolist()
    assert reduce_sum(x, "float32", "mma_lanes", times=x, start=np.float32(2)).tolist() == [
        add(np.float32(2), s, "float32").item() for s in reduce_sum(x, "float32", "mma_lanes", times=x)
    ]
    with pytest.raises(FormatError, match="a sum of products in order 'vector_lanes'"):
        reduce_sum(x, "float32", "vector_lanes", times=x)
