"""Faults that calm inputs hide, and tensors that a kernel reads or stores in parts: each verdict is right."""

from __future__ import annotations

import importlib.util
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npusim
from npusim.studies.evaluate import evaluate

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
KERNELS = """
import triton
import triton.language as tl

@triton.jit
def normed(X, O, n, eps, B: tl.constexpr, FAULT: tl.constexpr):
    r, c = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + r * n + c, mask=c < n, other=0.0).to(tl.float32)
    ms = tl.sum(x * x, 0) / n
    s = 1.0 / (tl.sqrt(ms) + eps) if FAULT == "outside" else 1.0 / tl.sqrt(ms + eps)
    tl.store(O + r * n + c, (x * s).to(tl.float16), mask=c < n)

@triton.jit
def added(X, BIAS, O, m, n, BM: tl.constexpr, B: tl.constexpr, FAULT: tl.constexpr):
    r, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, B)
    ok = (r[:, None] < m) & (c[None] < n)
    x = tl.load(X + r[:, None] * n + c[None], mask=ok, other=0.0).to(tl.float32)
    b = tl.load(BIAS + c, mask=c < n, other=0.0).to(tl.float32)[None]
    o = (x + b) * 0.75 + (b if FAULT == "twice" else 0.0)
    tl.store(O + r[:, None] * n + c[None], o.to(tl.float16), mask=ok)

@triton.jit
def largest(X, V, I, n, B: tl.constexpr, FAULT: tl.constexpr):
    r, c = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + r * n + c, mask=c < n, other=0.0 if FAULT == "zero" else float("-inf")).to(tl.float32)
    tl.store(V + r, tl.max(x, 0))
    tl.store(I + r, tl.argmax(x, 0))

@triton.jit
def lost(X, T, L, n, B: tl.constexpr, FAULT: tl.constexpr):
    r, c = tl.program_id(0), tl.arange(0, B)
    x = tl.load(X + r * n + c, mask=c < n, other=float("-inf")).to(tl.float32)
    m = tl.max(x, 0)
    s = tl.log(tl.sum(tl.exp(x - m), 0)) - tl.load(X + r * n + tl.load(T + r)).to(tl.float32)
    tl.store(L + r, s if FAULT == "maximum" else m + s)

@triton.jit
def softened(X, O, m, n, BM: tl.constexpr, B: tl.constexpr, FAULT: tl.constexpr):
    r, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, B)
    ok = (r[:, None] < m) & ((c <= n) if FAULT == "beyond" else (c < n))[None]
    x = tl.load(X + r[:, None] * n + c[None], mask=ok, other=float("-inf")).to(tl.float32)
    e = tl.exp(x - (tl.maximum(tl.max(x, 1), 0.0) if FAULT == "from zero" else tl.max(x, 1))[:, None])
    o = e / tl.sum(e, 1)[:, None]
    o = o.to(tl.float16).to(tl.float32) if FAULT == "half" else o
    tl.store(O + r[:, None] * n + c[None], o, mask=(r[:, None] < m) & (c < n)[None])

@triton.jit
def rotated(X, C, S, O, n, H: tl.constexpr, FAULT: tl.constexpr):
    r, i = tl.program_id(0), tl.arange(0, H)
    ok = i < n // 2
    a = tl.load(X + r * n + 2 * i, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(X + r * n + 2 * i + 1, mask=ok, other=0.0).to(tl.float32)
    c = tl.load(C + r * (n // 2) + i, mask=ok, other=0.0).to(tl.float32)
    s = tl.load(S + r * (n // 2) + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(O + r * n + 2 * i, (a * c - b * s).to(tl.float16), mask=ok)
    second = b * c - a * s if FAULT == "sign" else b * c + a * s
    tl.store(O + r * n + 2 * i + 1, second.to(tl.float16), mask=ok)
"""
REFERENCES = """
import numpy as np

def normed(X):
    return X / np.sqrt((X * X).mean(-1, keepdims=True) + 1e-5)

def added(X, BIAS):
    assert BIAS.shape[-1] == X.shape[-1] and BIAS.size == X.shape[-1]
    return (X + BIAS) * 0.75

def softened(X):
    e = np.exp(X - X.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)

def largest(X):
    return {"V": X.max(-1), "I": X.argmax(-1)}

def lost(X, T):
    m = X.max(-1)
    score = np.take_along_axis(X, T.reshape(*m.shape, 1), -1)[..., 0]
    return m + np.log(np.exp(X - m[..., None]).sum(-1)) - score

def rotated(X, C, S):
    o, a, b = np.empty_like(X), X[..., ::2], X[..., 1::2]
    o[..., ::2], o[..., 1::2] = a * C - b * S, b * C + a * S
    return o
"""
TILE = "tensor(R, N)"
SOFTENED = f"{TILE}, {TILE}.to('float32'), R, N, BM=4, B=next_power_of_2(N), FAULT='{{}}')"
LAUNCHES = {
    "normed": f"normed[R]({TILE}, {TILE}, N, 1e-5, B=next_power_of_2(N), FAULT='{{}}')",
    "added": f"added[cdiv(R, 16)]({TILE}, tensor(N), {TILE}, R, N, BM=16, B=next_power_of_2(N), FAULT='{{}}')",
    "softened": f"softened[cdiv(R, 4)]({SOFTENED}",
    "softened, floor": f"softened[R // 5]({SOFTENED}",
}
ROWS, COLUMNS = 32, 96
#: The judge's inputs and cases are those of every device; for an NPU nothing is compiled, at up to ten sizes each.
HW = "ascend_910b2"


def written(folder: Path) -> tuple[Path, str]:
    kernels, references = folder / "kernels.py", folder / "references.py"
    kernels.write_text(KERNELS, encoding="utf-8")
    references.write_text(REFERENCES, encoding="utf-8")
    return kernels, str(references)


def judged(kernel: str, faults: tuple[str, ...], folder: Path, columns: int = 96) -> list[Any]:
    """Return the evaluations of a launch that is written by hand."""
    kernels, references = written(folder)
    names = [f"{kernels}::{LAUNCHES[kernel].format(fault)}" for fault in faults]
    options: dict[str, Any] = {"hw": HW, "problem": {"R": ROWS, "N": columns}}
    return list(evaluate(names, reference=f"{references}:{kernel.partition(',')[0]}", **options))


def loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorded(kernel: str, faults: tuple[str, ...], folder: Path) -> list[Any]:
    """Return the evaluations of a recorded launch, whose tensors are described by the call."""
    file, references = written(folder)
    x, o, half = (np.empty((ROWS, n), np.float16) for n in (COLUMNS, COLUMNS, COLUMNS // 2))
    arguments: dict[str, tuple[Any, ...]] = {
        "largest": (x, np.empty(ROWS, np.float32), np.empty(ROWS, np.int32), COLUMNS, 128),
        "lost": (x, np.arange(ROWS, dtype=np.int32), np.empty(ROWS, np.float32), COLUMNS, 128),
        "rotated": (x, half, half.copy(), o, COLUMNS, 64),
    }
    with npusim.record() as calls:
        for fault in faults:
            getattr(loaded(file), kernel)[(ROWS,)](*arguments[kernel], fault)
    calls.save(stored := folder / "calls.npz")
    return list(evaluate([f"{stored}::{i}" for i in range(len(faults))], reference=f"{references}:{kernel}", hw=HW))


def test_an_epsilon_behind_the_root_is_wrong_on_small_inputs(tmp_path: Path) -> None:
    right, outside = judged("normed", ("", "outside"), tmp_path)
    assert (right.verdict, outside.verdict) == ("right", "wrong"), right.reason
    assert "small inputs" in outside.looks_like


def test_a_vector_that_all_rows_share_is_one_row_for_the_reference(tmp_path: Path) -> None:
    right, twice = judged("added", ("", "twice"), tmp_path)
    assert (right.verdict, twice.verdict) == ("right", "wrong"), right.reason


def test_a_zero_beyond_a_row_is_no_maximum(tmp_path: Path) -> None:
    right, zero = recorded("largest", ("", "zero"), tmp_path)
    assert "right on the given sizes" in right.reason, right.reason
    assert zero.verdict == "wrong"
    assert "negative inputs" in zero.looks_like


def test_a_tensor_in_parts_is_the_argument_of_the_call(tmp_path: Path) -> None:
    right, sign = recorded("rotated", ("", "sign"), tmp_path)
    assert "right on the given sizes" in right.reason, right.reason
    assert sign.verdict == "wrong"
    assert sign.worst.first.at[3] % 2


def test_a_reference_has_the_integers_of_a_recorded_call(tmp_path: Path) -> None:
    right, fault = recorded("lost", ("", "maximum"), tmp_path)
    assert "right on the given sizes" in right.reason, right.reason
    assert fault.verdict == "wrong"


def test_a_maximum_that_begins_with_zero_and_a_mask_of_one_more_are_not_right(tmp_path: Path) -> None:
    right, half, zero, beyond = judged("softened", ("", "half", "from zero", "beyond"), tmp_path, columns=128)
    assert (right.verdict, half.verdict) == ("right", "right"), (right.reason, half.reason)
    assert zero.verdict == "wrong"
    assert "inputs moved far below 0" in zero.looks_like
    assert beyond.verdict == "unproved"  # on the given 128 columns nothing is beyond
    assert "it refuses N that does not divide: " in beyond.reason


def test_rows_that_no_program_of_the_given_call_stores_are_wrong(tmp_path: Path) -> None:
    (floor,) = judged("softened, floor", ("",), tmp_path)
    assert floor.verdict == "wrong"
    assert floor.looks_like.startswith("an unwritten part: ")
