"""Functions and divisions of float32 as an H200 computes them: every stored result of the chip, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npusim import formats
from npusim.errors import FormatError

HERE = Path(__file__).parent
CALLS = {
    "exp": lambda x: formats.exp2(x * np.float32(1.4426950408889634), "float32", variant="hopper_ex2_subnormal"),
    "exp2": lambda x: formats.exp2(x, "float32", variant="hopper_ex2"),
    "libdevice_exp": lambda x: formats.exp(x, "float32", variant="libdevice"),
    "log": lambda x: formats.log(x, "float32", variant="libdevice"),
    "log2": lambda x: formats.log2(x, "float32", variant="libdevice"),
    "tanh": lambda x: formats.tanh(x, "float32", variant="libdevice"),
    "erf": lambda x: formats.erf(x, "float32", variant="libdevice"),
    "rsqrt": lambda x: formats.rsqrt(x, "float32", variant="hopper_approx"),
    "sqrt": lambda x: formats.sqrt(x, "float32", variant="hopper_approx"),
    "third": lambda x: formats.div_full(x, 3.0),
}


def _unlike(got: Any, wanted: Any) -> Any:
    return got[(got.view(np.uint32) != wanted.view(np.uint32)) & ~(np.isnan(got) & np.isnan(wanted))]


@pytest.mark.parametrize("name", CALLS)
def test_a_function_is_as_triton_3_6_has_it_on_an_h200(name: str) -> None:
    """1,500 normal numbers times 4, and 1,500 patterns of any bits."""
    with np.load(HERE / "functions_h200.npz") as stored:
        x, wanted = (stored[key].view(np.float32) for key in ("x", name))
    with np.errstate(all="ignore"):
        assert not _unlike(CALLS[name](x), wanted).size


def test_a_division_is_div_full_on_an_h200() -> None:
    """2,000 pairs of normal numbers, and 2,000 of any bits."""
    with np.load(HERE / "functions_h200.npz") as stored:
        x, y, wanted = (stored[key].view(np.float32) for key in ("dividend", "divisor", "quotient"))
    assert not _unlike(formats.div_full(x, y), wanted).size
    assert _unlike(formats.div(x, y, "float32"), wanted).size > 300  # a correct division is another
    assert formats.div_full(np.ones((2, 1), np.float32), np.full(3, 3, np.float32)).shape == (2, 3)
    with pytest.raises(FormatError, match="operand 0 has dtype float16"):
        formats.div_full(np.float16([1.0]), 3.0)


@pytest.mark.parametrize(
    ("key", "call"),
    [
        ("EX2_F32", lambda x: formats.exp2(x, "float32", variant="hopper_ex2")),
        ("RCP_F32", lambda x: formats.rcp(x, "float32", variant="hopper_approx")),
        ("EXP_F32", lambda x: formats.exp(x, "float32", variant="libdevice")),
    ],
)
def test_sums_over_all_low_halves_are_the_chip_s(key: str, call: Any, golden: Any) -> None:
    """Of 40 high halves, drawn and at the ends: 65,536 results each, by their sum (golden/README.md)."""
    sums = np.load(golden("hashes.npz"))[key]
    low, ends = (
        np.arange(1 << 16, dtype=np.uint64),
        (0, 0x7F, 0x80, 0x3F80, 0xBF80, 0xC2A2, 0xC2FC, 0x7F7F, 0x7F80, 0x8000),
    )
    weights = (2 * low + 1) * np.uint64(0x9E3779B97F4A7C15)
    for high in (*ends, *np.random.default_rng(6).integers(0, 1 << 16, 30).tolist()):
        x = (np.uint32(high << 16) | low.astype(np.uint32)).view(np.float32)
        assert int(((call(x).view(np.uint32) + np.uint64(1)) * weights).sum(dtype=np.uint64)) == int(sums[high]), hex(
            high
        )
