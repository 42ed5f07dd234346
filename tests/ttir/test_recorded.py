"""Recorded launches: forms of Triton's tutorials and drawn kernels against Triton's interpreter, on NPU and GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npusim
from tests.turns import in_turn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ttir.drawn import Case

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]")
HERE = Path(__file__).parent
#: Relative RMSE of results by format: rounding, of sums in another order.
CLOSE = {"float32": 1e-6, "float16": 4e-4}
#: Drawn kernels of the usual run, and of all.
FEW, ALL = 20, 300


def interpreted(words: Iterable[str], folder: Path) -> dict[str, Any]:
    """Return what launches store by Triton's interpreter, in a process of its own."""
    file = folder / "interpreted.npz"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(HERE / "drawn.py"), str(file), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(np.load(file))


def recorded(case: Case) -> Any:
    """Return the call of a launch, with the values of its tensors."""
    from ttir.drawn import launched

    with npusim.record(floats=True) as calls:
        launched(case, lambda x: x)
    (call,) = calls
    return call


def difference(result: Any, case: Case, known: dict[str, Any], word: str) -> tuple[float, int]:
    """Return the largest relative RMSE of the results of a case, and how many elements programs store."""
    from ttir.stored import stored

    made, errors, count = stored(result, case.arguments), list[float](), 0
    for name in case.result.split():
        before, got, wanted = case.arguments[name].astype(np.float64), made[name], known[f"{word}/{name}"]
        is_left, is_stored = np.isnan(got) & (wanted == before), np.isfinite(got)
        assert np.array_equal(is_left, ~is_stored), "what one stores the other leaves, or is NaN of one alone"
        d, w = (got - wanted)[is_stored], wanted[is_stored]
        errors.append(float(np.sqrt((d**2).mean() / (w**2).mean())))
        count += int(is_stored.sum())
    return max(errors), count


@pytest.fixture(scope="module")
def tutorials(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from ttir.tutorials import TUTORIALS

    return interpreted(TUTORIALS, tmp_path_factory.mktemp("tutorials"))


NAMES = ("01", "02", "03", "05", "06", "06 causal", "09", "09 descriptors")


@pytest.mark.parametrize(("name", "hw"), in_turn(NAMES, ("ascend_910b2", "h200")))
def test_forms_of_the_tutorials_have_their_bits(name: str, hw: str, tutorials: dict[str, Any]) -> None:
    from ttir.tutorials import TUTORIALS

    case = TUTORIALS[name]()
    result = npusim.run(recorded(case), hw=hw, rows="all")
    error, count = difference(result, case, tutorials, name)
    assert error < CLOSE[str(case.arguments[case.result].dtype)]
    assert count == case.arguments[case.result].size
    assert result.latency_us > 0


def computed(case: Case, hw: str) -> Any:
    result = npusim.run(recorded(case), hw=hw, rows="all")
    return np.asarray(result.output, np.float64).reshape(case.arguments[case.result].shape)


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_one_element_of_a_tensor_is_there_for_all_rows(hw: str) -> None:
    from ttir.drawn import Case

    rng = np.random.default_rng(0)
    x, s = rng.standard_normal((3, 64, 32)).astype(np.float32), rng.standard_normal(3).astype(np.float32)
    words = {"X": x, "Y": np.zeros_like(x), "S": s, "M": 64, "N": 32, "BM": 32}
    assert np.array_equal(computed(Case("scaled_heads", (2, 3), words, {}, "Y"), hw), x * s[:, None, None])


def test_what_is_loaded_and_stored_at_one_place_is_read() -> None:
    from ttir.drawn import Case

    x = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    assert np.array_equal(computed(Case("in_place", (7,), {"X": x, "n": 100, "B": 16}, {}, "X"), "ascend_910b2"), x * 2)


def test_a_launch_on_a_format_that_is_not_read_is_listed_and_the_others_recorded(tmp_path: Path) -> None:
    from npusim.kernels.triton.calls import read_calls
    from ttir.recorded_kernels import in_place

    fine = np.ones(100, np.float32)
    with npusim.record() as calls:
        in_place[(7,)](fine.astype(np.complex64), 100, B=16)
        in_place[(7,)](fine, 100, B=16)
    odd, read = read_calls(calls.save(tmp_path / "calls.npz"))
    assert "a tensor of complex64; integers and real numbers" in odd.configurations[0].refused
    assert not read.configurations[0].refused


def test_a_maximum_of_a_cut_row_and_what_is_alike_in_it_is_read() -> None:
    from ttir.drawn import Case

    x = np.random.default_rng(0).standard_normal((5, 100)).astype(np.float32)
    case = Case("running_maximum", (5,), {"X": x, "Y": np.zeros_like(x), "n": 100, "B": 64}, {}, "Y")
    wanted = x - np.log(np.exp(x.astype(np.float64)).sum(1, keepdims=True))
    assert np.abs(computed(case, "ascend_910b2") - wanted).max() < 1e-5


def test_tiles_that_data_leaves_out_are_not_visited() -> None:
    from ttir.drawn import Case

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 32)).astype(np.float16) for n in (64, 128, 128))
    kept = np.array([1, 0, 1, 1], np.int32)
    words = {"Q": q, "K": k, "V": v, "O": np.zeros_like(q), "T": kept, "S": 128, "D": 32, "BM": 32, "BN": 32}
    case = Case("some_tiles", (2,), words, {}, "O")
    scores = q.astype(np.float64) @ k.astype(np.float64).T
    scores[:, ~np.repeat(kept, 32).astype(bool)] = -np.inf
    weights = np.exp2(scores - scores.max(1, keepdims=True))
    wanted = weights @ v.astype(np.float64) / weights.sum(1, keepdims=True)
    assert np.abs(computed(case, "ascend_910b2") - wanted).max() < 2e-3
    every = case._replace(arguments={**words, "T": np.ones(4, np.int32)})
    times = [npusim.run(recorded(c), numerics=False).cycles for c in (case, every)]
    assert times[0] < times[1]


def hold(numbers: Iterable[int], folder: Path) -> None:
    from ttir.drawn import drawn

    numbers = list(numbers)
    known = interpreted(map(str, numbers), folder)
    faults = []
    for n in numbers:
        case = drawn(n)
        result = npusim.run(recorded(case), hw="ascend_910b2", rows="all")
        error, count = difference(result, case, known, str(n))
        if error > CLOSE[str(case.arguments[case.result.split()[0]].dtype)] or not count:
            faults.append((n, case.kernel, error, count))
    assert not faults


def test_drawn_kernels_have_the_bits_of_the_interpreter(tmp_path: Path) -> None:
    hold(range(FEW), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", range(FEW, ALL, 24))
def test_all_drawn_kernels_have_the_bits_of_the_interpreter(start: int, tmp_path: Path) -> None:
    hold(range(start, min(ALL, start + 24)), tmp_path)
