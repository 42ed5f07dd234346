"""Kernels whose masks, sums and scratch a reading may lose: computed as written, or refused by name."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.errors import ProgramError, SpecError

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]


def _recorded(kernel: str, grid: tuple[int, ...], **words: Any) -> Any:
    from ttir import recorded_kernels as kernels

    with npusim.record(floats=True) as calls:
        getattr(kernels, kernel)[grid](**words)
    (call,) = calls
    return call


def _drawn(*shape: int, seed: int = 0, fmt: str = "float32") -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(fmt)


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
@pytest.mark.parametrize("sums", [False, True])
def test_a_mask_that_only_the_result_or_a_choice_has_hides_no_element_of_a_sum(sums: bool, hw: str) -> None:
    from ttir.stored import stored

    x = _drawn(6, 32)
    words = {"X": x, "Y": np.zeros_like(x), "N": 32, "B": 32, "SUMS": sums}
    wanted = x - x.astype(np.float64).sum(1, keepdims=True) if sums else x
    done = npusim.run(_recorded("some_stored", (6,), K=32, **words), hw=hw, rows="all")
    assert np.abs(np.reshape(done.output, x.shape) - wanted).max() < 1e-5
    done = npusim.run(_recorded("some_stored", (6,), K=20, **words), hw=hw, rows="all")
    left = np.where(np.arange(32) < 20, wanted, np.nan if sums else 5.0)
    made = stored(done, words)["Y"]
    assert np.array_equal(np.isnan(made), np.isnan(left)) and np.nanmax(np.abs(made - left)) < 1e-5
    assert done.numerics is not None and done.numerics.nan_count == 0


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_keys_that_a_mask_hides_and_loads_do_not_have_no_weight(hw: str) -> None:
    q, k, v = (_drawn(64, 32, seed=s, fmt="float16") for s in range(3))
    words = {"Q": q, "K": k, "V": v, "O": np.zeros((64, 32), np.float32), "count": 57, "S": 64}
    done = npusim.run(_recorded("some_keys", (2,), **words, D=32, BM=32, BN=16), hw=hw, rows="all")
    scores = (q.astype(np.float64) @ k.astype(np.float64).T)[:, :57]
    weights = np.exp(scores - scores.max(1, keepdims=True))
    wanted = weights @ v[:57].astype(np.float64) / weights.sum(1, keepdims=True)
    assert np.abs(np.reshape(done.output, (64, 32)) - wanted).max() < 2e-3


def test_scratch_that_a_loop_reads_by_another_pointer_is_no_scratch() -> None:
    call = _recorded("walked_scratch", (4,), X=_drawn(64), Y=_drawn(3, 64), Z=np.zeros(64, np.float32), B=16, N=3)
    with pytest.raises(ProgramError, match="stored to and also accessed elsewhere"):
        npusim.run(call, rows="all")


def test_a_launch_that_reads_another_one_s_scratch_is_refused() -> None:
    from ttir import recorded_kernels as kernels

    x, y, z = _drawn(64), np.zeros(64, np.float32), np.zeros(64, np.float32)
    with npusim.record(floats=True) as calls:
        kernels.own_scratch[(4,)](x, y, z, B=16)
        kernels.some_programs[(4,)](y, np.zeros_like(y), 4, B=16)
    with pytest.raises(SpecError, match="has no such result"):
        npusim.run_calls(calls, rows="all")


def test_what_no_launch_wrote_of_a_storage_is_as_recorded() -> None:
    from ttir import recorded_kernels as kernels

    x, y = _drawn(64), np.full(64, 7.0, np.float32)
    with npusim.record(floats=True) as calls:
        kernels.some_programs[(2,)](x, y[:32], 2, B=16)
        kernels.some_programs[(4,)](y, np.zeros_like(y), 4, B=16)
    _, second = npusim.run_calls(calls, rows="all")
    assert np.array_equal(np.ravel(second.output), np.concatenate([4 * x[:32], np.full(32, 14.0)]))
