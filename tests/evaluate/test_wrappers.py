"""A wrapper, a function that launches kernels, is recorded at the sizes of every judged call."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from npusim.studies.evaluate import Evaluation, evaluate

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
#: Two launches: the second reads what the first stores in memory that the wrapper allocates.
WRAPPER = """
import numpy as np
import triton
import triton.language as tl

@triton.jit
def squares(X, S, n, B: tl.constexpr):
    r, c = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + r * n + c, mask=c < n, other=0.0).to(tl.float32)
    tl.store(S + r, tl.sum(x * x, 0))

@triton.jit
def scaled(X, S, O, n, eps, B: tl.constexpr):
    r, c = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + r * n + c, mask=c < n, other=0.0).to(tl.float32)
    tl.store(O + r * n + c, (x * tl.rsqrt(tl.load(S + r) / n + eps)).to(tl.float16), mask=c < n)

def norm(x, way=""):
    rows, n = x.shape
    o, s = np.empty_like(x), np.empty(rows, np.float32)
    B = triton.next_power_of_2(n)
    squares[(rows,)](x, s, n, B=B)
    if way == "from the host":
        s = s + 0.0
    eps = 1e-5 if way != "size looked up" or n == 96 else 1.0
    scaled[(rows - (way == "a row left"),)](x, s, o, n, eps, B=B)
    return o * 1.0 if way == "computed" else o

def stored(x, o):
    rows, n = x.shape
    s = np.empty(rows, np.float32)
    squares[(rows,)](x, s, n, B=triton.next_power_of_2(n))
    scaled[(rows,)](x, s, o, n, 1e-5, B=triton.next_power_of_2(n))
"""
REFERENCE = """
import numpy as np

def norm(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
"""
TILE = "tensor(R, N)"


def judged(folder: Path, *calls: str) -> list[Evaluation]:
    """Return the evaluations of calls of the wrapper's file."""
    for name, text in (("kernels.py", WRAPPER), ("reference.py", REFERENCE)):
        (folder / name).write_text(text, encoding="utf-8")
    options: dict[str, Any] = {"hw": "ascend_910b2", "problem": {"R": 32, "N": 96}}
    names = [f"{folder / 'kernels.py'}::{call}" for call in calls]
    return list(evaluate(names, reference=f"{folder / 'reference.py'}:norm", **options))


def test_a_wrapper_is_right_at_all_sizes_and_a_size_that_it_looks_up_is_wrong(tmp_path: Path) -> None:
    right, stored, peeked, left = judged(
        tmp_path,
        f"norm({TILE})",
        f"stored({TILE}, {TILE})",
        f"norm({TILE}, way='size looked up')",
        f"norm({TILE}, way='a row left')",
    )
    assert [e.verdict for e in (right, stored, peeked, left)] == ["right", "right", "wrong", "wrong"], right.reason
    assert "right on the given sizes, wrong on: N that does not divide" in peeked.looks_like
    assert left.looks_like.startswith("an uninitialised or unwritten part: 1 of 32 rows")
    assert right.us["ascend_910b2"].mid is not None
    assert right.trust == "measure"
    assert "2 launches one after another" in right.doubts[0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (f"norm({TILE}, way='computed')", "o: no launch stores it"),
        (f"norm({TILE}, way='from the host')", "the wrapper computes it from a kernel's result,"),
        (f"norm({TILE}, num_warps=4)", "num_warps is no parameter; its parameters are x, way"),
        (f"scaled({TILE})", "scaled: a kernel: its launch has a grid"),
        (f"normed({TILE})", "normed: not a function of the file"),
    ],
)
def test_what_a_wrapper_computes_of_results_or_does_not_have_is_refused(call: str, words: str, tmp_path: Path) -> None:
    (found,) = judged(tmp_path, call)
    assert found.verdict == "unproved"
    assert words in found.reason
