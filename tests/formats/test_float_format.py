from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from npusim.errors import FormatError
from npusim.formats import FORMATS, get_format


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float64", np.float64),
        ("float32", np.float32),
        ("bfloat16", ml_dtypes.bfloat16),
        ("float16", np.float16),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        ("float8_e5m2", ml_dtypes.float8_e5m2),
    ],
)
def test_limits_are_those_of_ml_dtypes(name: str, dtype: type) -> None:
    fmt, info = get_format(name), ml_dtypes.finfo(dtype)
    assert fmt.max_finite == float(info.max)
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.min_subnormal == float(info.smallest_subnormal)
    assert (fmt.bits, fmt.mantissa_bits) == (info.bits, info.nmant)
    assert fmt.dtype == np.dtype(dtype)


def test_tf32_has_the_range_of_float32_and_ten_mantissa_bits() -> None:
    tf32 = get_format("tf32")
    assert (tf32.bits, tf32.size_bytes, tf32.storage_shift) == (19, 4, 13)
    assert tf32.max_finite == (2 - 2.0**-10) * 2.0**127
    assert tf32.min_normal == 2.0**-126


def test_int8_is_data_too() -> None:
    int8 = get_format("int8")
    assert (int8.is_integer, int8.size_bytes, int8.max_finite) == (True, 1, 127.0)


def test_every_size_is_that_of_the_storage() -> None:
    assert {name: fmt.size_bytes for name, fmt in FORMATS.items()} == {
        "float64": 8,
        "float32": 4,
        "tf32": 4,
        "bfloat16": 2,
        "float16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
        "float6_e2m3fn": 1,
        "float6_e3m2fn": 1,
        "float4_e2m1fn": 1,
        "float4_e1m2": 1,
        "hifloat8": 1,
    }


def test_unknown_format_lists_near_names() -> None:
    with pytest.raises(FormatError, match="'float8_e4m3'; near names: float8_e4m3fn"):
        get_format("float8_e4m3")


def test_format_itself_is_returned() -> None:
    assert get_format(FORMATS["float16"]) is FORMATS["float16"]


def test_registry_is_frozen() -> None:
    with pytest.raises(TypeError):
        FORMATS["float16"] = FORMATS["float32"]  # type: ignore[index]
