"""The translation of kernels: the results of Python's own evaluation, and refusals with their line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim.formats.jit import bits_float64, float64_bits, inline, kernel
from npusim.formats.kernel_values import TranslationError

if TYPE_CHECKING:
    from collections.abc import Callable

WHOLE = [0, 1, -1, 7, -7, 64, 1 << 40, -(1 << 40), (1 << 62) + 3, -(1 << 62)]


@kernel
def of_whole_numbers(x: Any, y: Any, out: Any) -> int:
    count = 0
    for i in range(x.size):
        a, b = x[i], y[i]
        out[0, i], out[1, i], out[2, i] = a + b, a - b, a * b
        out[3, i], out[4, i] = a // b, a % b
        out[5, i], out[6, i], out[7, i] = a & b, a | b, a ^ b
        out[8, i], out[9, i] = min(a, b), max(a, b, 3)
        out[10, i] = a << (b & 15) if b > 0 else a >> 3
        out[11, i] = -a if a < b or a == 7 else abs(b)
        out[12, i] = 1 if a in (7, 64) and b != 1 else 0
        count += 1 if a <= b else 2
    return count


def test_whole_numbers_are_those_of_python_with_64_bits() -> None:
    x, y = (np.array(a, np.int64) for a in zip(*((a, b) for a in WHOLE for b in WHOLE if b), strict=True))
    out, same = np.zeros((13, x.size), np.int64), np.zeros((13, x.size), np.int64)
    with np.errstate(over="ignore"):
        expected = of_whole_numbers.function(x, y, same)  # type: ignore[attr-defined]
    assert of_whole_numbers(x, y, out) == expected
    np.testing.assert_array_equal(out, same)


def test_a_quotient_by_zero_is_zero() -> None:
    out = np.ones((13, 1), np.int64)
    of_whole_numbers(np.array([5]), np.array([0]), out)
    assert (out[3, 0], out[4, 0]) == (0, 0)


@inline
def halves(x: Any) -> Any:
    if x > 2.0:
        return x, 0.5 * x
    return -x, x


@kernel
def of_floats(x: Any, y: Any, out: Any, single: Any) -> None:
    for i in range(x.size):
        a, b = x[i], y[i]
        out[0, i], out[1, i], out[2, i], out[3, i] = a + b, a - b, a * b, a / b
        out[4, i], out[5, i] = min(a, b), max(a, b)
        out[6, i], out[7, i] = np.copysign(np.floor(abs(a)), b), np.rint(a)
        out[8, i] = 1.0 if np.isnan(a) and np.isnan(b) else a if a < b else -b
        single[i] = np.float32(a) * np.float32(b) + np.float32(1.0)


def test_floats_are_rounded_after_every_operation() -> None:
    values = [0.0, -0.0, 1.0, -1.5, 3.7, 1e300, 5e-324, np.inf, -np.inf, np.nan, 2.0**-126, 16777217.0]
    x, y = (np.array(a) for a in zip(*((a, b) for a in values for b in values), strict=True))
    out, same = np.zeros((9, x.size)), np.zeros((9, x.size))
    single, same_single = np.zeros(x.size, np.float32), np.zeros(x.size, np.float32)
    with np.errstate(all="ignore"):
        of_floats.function(x, y, same, same_single)  # type: ignore[attr-defined]
    of_floats(x, y, out, single)
    np.testing.assert_array_equal(out, same)
    np.testing.assert_array_equal(np.signbit(out[4:8]), np.signbit(same[4:8]))
    np.testing.assert_array_equal(single, same_single)


@kernel
def of_parts(x: Any, out: Any, marks: Any, step: Any) -> Any:
    """Loops, views, tuples, branches, truth values and results of several numbers."""
    n, last = 0, -1
    while True:
        row = x[n, 1:]
        for i in range(0, row.size, 2):
            if row[i] < 0.0:
                continue
            if row[i] > 8.0:
                break
            first, second = halves(row[i])
            out[n, i] += first
            out[n, i + 1] -= second
            last = i
        marks[n] = last >= 0
        if step is not None:
            marks[n] = marks[n] and last > step
        n += 1
        if n == x.shape[0]:
            break
    return last + (np.int64(float64_bits(bits_float64(np.uint64(last)))) << 8)


@pytest.mark.parametrize("step", [None, 1])
def test_loops_views_and_tuples(step: int | None) -> None:
    x = np.array([[9.0, 1.0, 2.0, 3.0, -4.0], [0.0, 5.0, 9.0, 7.0, 1.0], [0.0, -1.0, 0.0, 11.0, 0.0]])
    out, marks = np.zeros((3, 4)), np.zeros(3, np.bool_)
    assert of_parts(x, out, marks, step) == 2 + (2 << 8)
    np.testing.assert_array_equal(out, [[-1.0, -1.0, 3.0, -1.5], [5.0, -2.5, 7.0, -3.5], [0.0] * 4])
    assert marks.tolist() == [True] * 3


@kernel
def with_a_list(x: Any) -> None:
    x[0] = [1.0][0]


@kernel
def with_two_types(x: Any) -> None:
    total = np.float32(0.0)
    for i in range(x.size):
        total = total + x[i]
    x[0] = total


@kernel
def with_an_earlier_row(x: Any) -> None:
    row = x[0]
    for i in range(x.shape[0]):
        row[0] = 1.0
        row = x[i]


@kernel
def with_a_last_index(x: Any) -> None:
    x[-1] = 1.0


@kernel
def with_a_reverse_range(x: Any) -> None:
    for i in range(x.size, 0, -1):
        x[i - 1] = 1.0


@kernel
def with_mixed_signs(x: Any) -> None:
    x[0] = np.float64(np.uint64(x.size) + x.size)


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        (with_a_list, r"\[1\.0\]"),
        (with_two_types, "total is float and double"),
        (with_an_earlier_row, "row is assigned more than once"),
        (with_a_last_index, "the index -1"),
        (with_a_reverse_range, "a range whose step is not a known positive number"),
        (with_mixed_signs, "uint64 and a signed number"),
    ],
)
def test_what_is_no_part_of_the_language_is_refused(refused: Callable[..., None], text: str) -> None:
    x = np.zeros((2, 2)) if refused is with_an_earlier_row else np.zeros(4)
    with pytest.raises(TranslationError, match=text):
        refused(x)
