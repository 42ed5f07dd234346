"""A launch is read once for what is alike: results, notes and refusals are those of separate readings."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.kernels.triton import latest_readings, launch_ways
from npusim.kernels.triton.kernel_draft import Choices
from npusim.kernels.triton.tensor_axes import IntegerTensor

if find_spec("triton") is not None:
    from ttir import added_kernels, plain_kernels, value_kernels

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]


def _call(kernel: Any, **words: Any) -> Any:
    with npusim.record(floats=True) as calls:
        kernel[(6,)](**words)
    return calls[0]


def _case(name: str) -> Any:
    x = np.random.default_rng(7).standard_normal((6, 40)).astype(np.float32)
    if name == "choice":
        return _call(value_kernels.within, X=x, Z=np.zeros_like(x), N=40, B=64)
    words = {"W": np.ones(40, np.float32), "DW": np.zeros(40, np.float32)}
    return _call(added_kernels.column_sums, X=x, Y=np.zeros_like(x), **words, N=40, B=64, KIND=0)


@pytest.mark.parametrize("name", ["choice", "sums"])
def test_stored_readings_change_no_result_and_no_note(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, plain, done = [0], launch_ways.launched, dict[tuple[int, str, int], Any]()

    def counted(*of: Any) -> Any:
        count[0] += 1
        return plain(*of)

    monkeypatch.setattr(latest_readings, "launched", counted)
    counts = list[int]()
    for most in (0, 2**14):
        monkeypatch.setattr(latest_readings, "MOST_PROGRAMS", most)
        call, count[0] = _case(name), 0
        for hw in ("h200", "ascend_910b2"):
            for turn in range(2):
                done[most, hw, turn] = npusim.run(call, hw=hw, rows="all")
        counts.append(count[0])
    assert counts[1] < counts[0] / 2
    for (most, hw, _), one in done.items():
        other = done[0, hw, 0]
        assert np.array_equal(one.output, other.output), most
        assert (one.notes, one.latency_us, one.numerics.error) == (other.notes, other.latency_us, other.numerics.error)


def test_a_reading_that_asked_whether_code_fuses_is_not_used_for_code_that_does_otherwise() -> None:
    x, w, b = (np.random.default_rng(i).standard_normal(n).astype(np.float16) for i, n in enumerate(((6, 48), 48, 48)))
    words = {"Y": np.zeros_like(x), "Mean": np.zeros(6, np.float32), "Rstd": np.zeros(6, np.float32)}
    call = _call(plain_kernels.layer_norm, X=x, W=w, B=b, **words, N=48, eps=1e-5, BLOCK=64)
    fused, apart, again = (npusim.run(call, hw="h200", precision=p, rows="all") for p in (None, "unfused", None))
    assert np.array_equal(fused.output, again.output)
    assert fused.timing.cycles == again.timing.cycles < apart.timing.cycles  # one instruction for two


def test_integers_of_a_tensor_are_part_of_what_a_launch_is() -> None:
    tensor = IntegerTensor("I", (1,) * 5, "int32", data=np.arange(4), sizes=(4,), by=(1,))
    other = IntegerTensor("I", (1,) * 5, "int32", data=np.arange(4)[::-1].copy(), sizes=(4,), by=(1,))
    choices = Choices(is_fresh=False, fuses=True)
    keys = [
        latest_readings._key("text", {"I": x, "N": n}, (1, 1, 1), choices) for x in (tensor, other) for n in (1, 1.0)
    ]
    assert len(set(keys)) == 4
    assert keys[0] == latest_readings._key("text", {"I": tensor, "N": 1}, (1, 1, 1), choices)
