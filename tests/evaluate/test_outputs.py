"""Every output of a kernel is judged: a wrong one beside a right result is wrong, one without a reference unproved."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from npusim.studies.evaluate import evaluate

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
#: A residual added, and the norm of the sum: both are stored, first the sum; ``o`` is the name of the second.
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def added(X, Y, W, H, o, n, B: tl.constexpr, FAULT: tl.constexpr):
    r, c = tl.program_id(0), tl.arange(0, B)
    ok = c < n
    x = tl.load(X + r * n + c, mask=ok, other=0.0).to(tl.float32)
    h = x + tl.load(Y + r * n + c, mask=ok, other=0.0).to(tl.float32)
    tl.store(H + r * n + c, (x if FAULT == "sum" else h).to(tl.float16), mask=ok)
    s = tl.rsqrt(tl.sum(h * h, 0) / (n - 1 if FAULT == "norm" else n) + 1e-5)
    tl.store(o + r * n + c, (h * s * tl.load(W + c, mask=ok, other=0.0).to(tl.float32)).to(tl.float16), mask=ok)

@triton.jit
def scaled(X, Q, S, n, B: tl.constexpr, FAULT: tl.constexpr):
    r, c = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + r * n + c, mask=c < n, other=0.0).to(tl.float32)
    s = tl.maximum(tl.max(tl.abs(x), 0), 1e-6) / 448.0
    tl.store(Q + r * n + c, (x / s).to(tl.float8e4nv), mask=c < n)
    tl.store(S + r, s * 2.0 if FAULT == "scale" else s)

@triton.jit
def rooted(X, Y, S, n, B: tl.constexpr, FAULT: tl.constexpr):
    r, c = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + r * n + c, mask=c < n, other=0.0)
    s = 1.0 / tl.sqrt(tl.sum(x * x, 0) / n + (1.001e-6 if FAULT == "epsilon" else 1e-6))
    tl.store(Y + r * n + c, x * s, mask=c < n)
    tl.store(S + r, s)
"""
REFERENCE = """
import numpy as np

def added(X, Y, W):
    h = X + Y
    return {"o": h / np.sqrt((h * h).mean(-1, keepdims=True) + 1e-5) * W, "H": h}

def scaled(X):
    s = np.maximum(np.abs(X).max(-1, keepdims=True), 1e-6) / 448
    return {"Q": X / s, "S": s}

def rooted(X):
    s = 1 / np.sqrt((X * X).mean(-1, keepdims=True) + 1e-6)
    return {"Y": X * s, "S": s}

def scaled_alone(X):
    return scaled(X)["Q"]

def scaled_otherwise(X):
    return {"Q": scaled(X)["Q"], "T": scaled(X)["S"]}
"""
ROWS, ROW = "tensor(R, N)", "n=N, B=next_power_of_2(N), num_warps=1"
LAUNCHES = {
    "added": f"added[R]({ROWS}, {ROWS}, tensor(N), {ROWS}, {ROWS}, {ROW}, FAULT='{{}}')",
    "rooted": f"rooted[R]({ROWS}.to('float32'), {ROWS}.to('float32'), tensor(R).to('float32'), {ROW}, FAULT='{{}}')",
    "scaled": f"scaled[R]({ROWS}, {ROWS}.to('float8_e4m3fn'), tensor(R).to('float32'), {ROW}, FAULT='{{}}')",
}


def judged(kernel: str, faults: tuple[str, ...], reference: str, folder: Path, hw: str = "ascend_910b2") -> list[Any]:
    for name, text in (("kernels.py", KERNEL), ("reference.py", REFERENCE)):
        (folder / name).write_text(text, encoding="utf-8")
    names = [f"{folder / 'kernels.py'}::{LAUNCHES[kernel].format(fault)}" for fault in faults]
    options: dict[str, Any] = {"hw": hw, "problem": {"R": 32, "N": 96}}
    return list(evaluate(names, reference=f"{folder / 'reference.py'}:{reference}", **options))


def test_each_output_is_judged_by_the_name_that_the_kernel_has_for_it(tmp_path: Path) -> None:
    right, no_sum, no_norm = judged("added", ("", "sum", "norm"), "added", tmp_path)
    assert [right.verdict, no_sum.verdict, no_norm.verdict] == ["right", "wrong", "wrong"], right.reason
    assert right.judged == 2 * 10
    assert ", H:" in no_sum.reason
    assert ", o:" in no_norm.reason


def test_an_output_of_another_shape_is_judged_too(tmp_path: Path) -> None:
    right, twice = judged("scaled", ("", "scale"), "scaled", tmp_path)
    assert (right.verdict, twice.verdict) == ("right", "wrong"), right.reason
    assert ", S:" in twice.reason


@pytest.mark.parametrize("hw", ["h200", "ascend_910b2"])
def test_a_root_that_is_off_by_a_last_place_is_right_and_another_epsilon_wrong(hw: str, tmp_path: Path) -> None:
    """On zeros float64 gives 1000 and a right kernel 999.99994; an epsilon that is off by a thousandth 999.5."""
    right, other = judged("rooted", ("", "epsilon"), "rooted", tmp_path, hw)
    assert (right.verdict, other.verdict) == ("right", "wrong"), right.reason
    assert ", S:" in other.reason


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("scaled_alone", "returned one array, but the kernel stores Q, S"),
        ("scaled_otherwise", "returned Q, T, but the kernel"),
    ],
)
def test_an_output_without_a_reference_is_no_right_kernel(reference: str, words: str, tmp_path: Path) -> None:
    (found,) = judged("scaled", ("",), reference, tmp_path)
    assert found.verdict == "unproved"
    assert words in found.reason
