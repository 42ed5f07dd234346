"""Recorded launches in sequence, programs that return early, an H100's bits, and the page of tutorials' times."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.errors import ProgramError, SpecError
from ttir.checked_launches import checked
from ttir.marks import as_measured

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]")
GOLDEN = Path(__file__).parents[3] / "shared/golden/triton_h100.npz"


def calls_of(launch: Callable[[], object], *, floats: bool = True) -> Any:
    with npusim.record(floats=floats) as calls:
        launch()
    return calls


def three(x: Any, y: Any, z: Any) -> None:
    """Twice x into y, rows of y less their maximum into z, of which pairs of columns are turned in their place."""
    from ttir import recorded_kernels as k

    k.some_programs[(4,)](x, y, 4, B=64)
    k.softmax_rows[(2,)](z, y.reshape(8, 32), 32, 32, 8, 32, B=32, num_stages=1)
    one = np.ones((1, 16), np.float32)
    k.turned[(8, 1)](z, one, one, 32, 32, 1, 1, D=16, PER=1)


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_a_launch_reads_what_those_before_it_leave(hw: str) -> None:
    x = np.random.default_rng(0).standard_normal(256).astype(np.float32)
    calls = calls_of(lambda: three(x, np.full(256, 7.0, np.float32), np.zeros((8, 32), np.float32)))
    first, second, third = npusim.run_calls(calls, hw=hw, rows="all")
    rows = 2 * x.astype(np.float64).reshape(8, 32)
    weights = np.exp(rows - rows.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    assert np.array_equal(np.ravel(first.output), 2 * x)
    assert np.abs(np.reshape(second.output, (8, 32)) - weights).max() < 1e-6
    turned = weights[:, :16] - weights[:, 16:]
    assert np.abs(np.reshape(third.output, (8, 16)) - turned).max() < 1e-6
    assert "X: the values that launch 0 (some_programs) stored" in second.notes
    assert "Q: the values that launch 1 (softmax_rows) stored" in third.notes
    assert not any("leaves it" in note for note in first.notes)


def test_storages_without_values_are_drawn_once_for_all_launches() -> None:
    x, y = np.zeros((8, 32), np.float32), np.zeros((8, 32), np.float32)

    def launch() -> None:
        from ttir import recorded_kernels as k

        k.some_programs[(4,)](x, y, 4, B=64)
        k.some_programs[(4,)](x, np.zeros_like(y), 4, B=64)

    calls = calls_of(launch, floats=False)
    a, b = npusim.run_calls(calls, rows="all")
    assert np.array_equal(a.output, b.output)
    assert np.std(a.output) > 0.5
    assert not np.array_equal(npusim.run_calls(calls, rows="all", seed=1)[0].output, a.output)


def test_run_lists_the_launches_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls = calls_of(lambda: three(*(np.zeros(256, np.float32) for _ in "xy"), np.zeros((8, 32), np.float32)))
    calls.save("calls.npz")
    done = CliRunner().invoke(app, ["run", "calls.npz", "--hw", "h200"])
    assert done.exit_code == 0, done.output
    assert "3 launches" in done.stdout
    assert "X of 0" in done.stdout
    listed = json.loads(CliRunner().invoke(app, ["run", "calls.npz", "--json", "--no-numerics"]).stdout)
    assert [each["reads"] for each in listed["launches"]] == [{}, {"X": 0}, {"Q": 1}]
    assert all(each["latency_us"] > 20 for each in listed["launches"])
    refused = CliRunner().invoke(app, ["run", "calls.npz", "--report"])
    assert refused.exit_code == 2
    assert "calls.npz::0" in refused.stderr


def test_a_sequence_takes_no_tensors_and_run_no_list() -> None:
    calls = calls_of(lambda: three(*(np.zeros(256, np.float32) for _ in "xy"), np.zeros((8, 32), np.float32)))
    with pytest.raises(SpecError, match="values of their tensors;"):
        npusim.run_calls(calls, tensors={"X": np.zeros(256, np.float32)})
    with pytest.raises(SpecError, match=r"npusim\.run_calls"):
        npusim.run(calls)


# ---------------------------------------------------------------- programs that return early


MEASURED = Path(__file__).parents[2] / "reports/silicon/early.json"


def time_of(grid: int, hw: str) -> Any:
    from ttir import recorded_kernels as k

    x = np.zeros(1 << 16, np.float32)
    (call,) = calls_of(lambda: k.some_programs[(grid,)](x, x.copy(), 256, B=256), floats=False)
    return npusim.run(call, hw=hw, numerics=False)


def predicted(case: str) -> float:
    """Return the time of a case of the measurements, on an H100."""
    from ttir import recorded_kernels as k

    name, *numbers = case.replace(" of ", " ").split()
    x, count = np.zeros(1 << 18, np.float32), np.array([256], np.int32)
    a, b, c = (np.zeros(shape, np.float16) for shape in ((264 * 64, 1024), (1024, 64), (264 * 64, 64)))
    launches: dict[str, Callable[[], object]] = {
        "some": lambda: k.some_programs[(int(numbers[0]),)](x, x.copy(), 256, B=256),
        "some_loaded": lambda: k.some_loaded[(int(numbers[0]),)](x, x.copy(), count, B=256),
        "product": lambda: k.some_products[(int(numbers[1]),)](a, b, c, int(numbers[0]), 1024, 64, 64, 64),
    }
    (call,) = calls_of(launches[name], floats=False)
    time = npusim.run(call, hw="h100", numerics=False).latency_us
    assert time is not None
    return time


def test_programs_that_return_early_take_what_an_h100_takes_for_them() -> None:
    """Of rows the turnover of a block each; beside products nothing: 22 launches, 256 to 65,536 programs."""
    measured = json.loads(MEASURED.read_text())
    assert measured.pop("device") == "NVIDIA H100 80GB HBM3"
    times = {case: predicted(case) for case in measured}
    off = {case: time / measured[case] - 1 for case, time in times.items()}
    assert len(off) == 22
    assert max(map(abs, off.values())) < 0.18, off
    for kernel in ("some", "some_loaded"):
        for grid in (16384, 65536):
            more = times[f"{kernel} {grid}"] - times[f"{kernel} 256"]
            assert more == pytest.approx(measured[f"{kernel} {grid}"] - measured[f"{kernel} 256"], rel=0.22)


def test_where_nothing_says_how_long_a_return_takes_a_note_does() -> None:
    result = time_of(512, "ascend_910b2")
    assert result.latency_us == time_of(256, "ascend_910b2").latency_us
    assert any("the time leaves out programs that return early" in note for note in result.notes)
    assert any("256 of 512 programs return early" in note for note in result.notes)


# ---------------------------------------------------------------- what is refused, not read as something else


def test_a_sum_of_one_value_over_and_over_is_refused() -> None:
    from ttir import recorded_kernels as k

    x = np.zeros(32, np.float32)
    (call,) = calls_of(lambda: k.repeated_sum[(2,)](x, x.copy(), B=16, N=8))
    with pytest.raises(ProgramError, match="elements are all equal"):
        npusim.run(call, numerics=False)


def test_blocks_that_overlap_a_constant_apart_are_read_lane_by_lane() -> None:
    x = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    words = {"X": x, "Y": np.zeros_like(x), "n": 100, "B": 16}
    checked("recorded_kernels", "neighbours", (7,), words, {"Y": x + np.append(x[1:], 0)}, "h200")


def attended(launch: Callable[..., object], hw: str) -> tuple[Any, Any, Any]:
    """Return the run of an attention of 128 rows and keys, its scores in float64, and V."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((128, 32)).astype(np.float16) for _ in "qkv")
    (call,) = calls_of(lambda: launch(q, k, v, np.zeros_like(q)))
    return npusim.run(call, hw=hw, rows="all"), q.astype(np.float64) @ k.astype(np.float64).T, v.astype(np.float64)


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_two_masks_of_scores_and_one_of_weights_beside_one_of_scores(hw: str) -> None:
    from ttir import recorded_kernels as k

    how = {"S": 128, "D": 32, "BM": 32, "BN": 32}
    result, scores, v = attended(lambda *of: k.masked_weights[(4,)](*of, **how, BOTH=True), hw)
    row, key = np.arange(128)[:, None], np.arange(128)[None]
    scores[(row < key - 40) | (row - key >= 100)] = -np.inf
    weights = np.exp(scores - scores.max(1, keepdims=True))
    wanted = weights @ v / weights.sum(1, keepdims=True)
    assert np.abs(np.reshape(result.output, (128, 32)) - wanted).max() < 2e-3
    result, scores, v = attended(lambda *of: k.masked_weights[(4,)](*of, **how, BOTH=False), hw)
    scores[row < key - 40] = -np.inf
    weights = np.where(row - key < 20, np.exp(scores - scores.max(1, keepdims=True)), 0.0)
    wanted = weights @ v / weights.sum(1, keepdims=True)
    assert np.abs(np.reshape(result.output, (128, 32)) - wanted).max() < 4e-3


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_what_is_stored_and_loaded_at_once_stays_with_a_program(hw: str) -> None:
    from ttir import recorded_kernels as k

    scratch = np.zeros(128, np.float32)
    result, scores, v = attended(lambda *of: k.with_scratch[(4,)](*of, scratch, 128, D=32, BM=32, BN=32), hw)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    assert np.abs(np.reshape(result.output, (128, 32)) - weights @ v / weights.sum(1, keepdims=True)).max() < 2e-3
    assert "T" not in result.program.tensors
    assert any("stores and immediately loads again" in note for note in result.notes)


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_a_state_on_both_sides_of_a_product_runs_tile_after_tile_on_ascend(hw: str) -> None:
    from ttir import recorded_kernels as k

    result, scores, v = attended(lambda *of: k.carried_logarithm[(4,)](*of, 128, D=32, BM=32, BN=32), hw)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    assert np.abs(np.reshape(result.output, (128, 32)) - weights @ v / weights.sum(1, keepdims=True)).max() < 2e-3
    assert any(note.startswith("depth=0: ") for note in result.notes) == (hw == "ascend_910b2")


# ---------------------------------------------------------------- an H100's bits


def ulps(a: Any, b: Any) -> Any:
    """Return how many codes lie between values of one format."""
    codes = [x.view(f"i{x.dtype.itemsize}").astype(np.int64) for x in (a, b)]
    smallest = -(1 << (8 * a.dtype.itemsize - 1))
    one, other = (np.where(c < 0, smallest - c, c) for c in codes)
    return np.abs(one - other)


def on_h100(launch: Callable[[], object]) -> dict[str, Any]:
    """Return what a launch stores, as an H100 computes it, each result in its own format."""
    from ttir.stored import stored

    (call,) = calls_of(launch)
    result = npusim.run(call, hw="h100", rows="all")
    formats = {n: x.data.dtype for n, x in call.tensors.items()}
    return {n: x.astype(formats[n]) for n, x in stored(result, call.floats()).items()}


@as_measured
@pytest.mark.skipif(not GOLDEN.is_file(), reason="../shared is not here")
def test_recorded_calls_have_an_h100s_bits() -> None:
    """Forms of three kernels whose results an H100 gave: sums and additions to the bit, roots within one code."""
    from ttir import recorded_kernels as k

    chip = np.load(GOLDEN)

    def case(name: str, parameters: str, fmt: str) -> list[Any]:
        return [chip[f"{name}/{p}"].view(fmt) for p in parameters.split()]

    x, y, z = case("tut01_add/add_kernel", "x_ptr y_ptr output_ptr", "float32")
    made = on_h100(lambda: k.add.fn[(8,)](x, y, np.zeros_like(z), len(x), B=1024))
    assert np.array_equal(made["Z"], z)

    x, y, w, b = case("tut05_layernorm/_layer_norm_fwd_fused", "X Y W B", "float16")
    mean, rstd = case("tut05_layernorm/_layer_norm_fwd_fused", "Mean Rstd", "float32")
    empty = [np.zeros_like(a) for a in (y, mean, rstd)]
    warps = {"num_warps": min(max(x.shape[1] // 256, 1), 8)}  # as the tutorial chooses
    made = on_h100(lambda: k.layer_norm[(64,)](x, empty[0], w, b, *empty[1:], 1024, 1024, 1e-5, BLOCK=1024, **warps))
    assert np.array_equal(made["Mean"], mean)
    assert ulps(made["Rstd"], rstd).max() <= 1  # 1 / sqrt.approx
    assert (ulps(made["Y"], y) > 0).sum() <= 8
    assert ulps(made["Y"], y).max() <= 1

    x, y, w = case("unsloth_rms/_rms_layernorm_forward", "X Y W", "float16")
    (r,) = case("unsloth_rms/_rms_layernorm_forward", "r", "float32")
    made = on_h100(lambda: k.norm_rows[(64,)](x, np.zeros_like(y), w, np.zeros_like(r), 1024, 1024, 1e-6, B=1024))
    assert ulps(made["R"], r).max() <= 1  # rsqrt.approx
    assert (ulps(made["Y"], y) > 0).sum() <= 8
    assert ulps(made["Y"], y).max() <= 1


# ---------------------------------------------------------------- the page of tutorials' times


def test_the_page_has_the_times_that_recorded_calls_give() -> None:
    from reports.record.page import rows
    from reports.record.record import launches, recorded

    known = {r["tutorial"]: r for r in rows()}
    made = {tutorial: launch for tutorial, _, launch in launches()}
    assert known.keys() == made.keys()
    for tutorial in ("01", "03", "05", "09 descriptors"):
        call, _ = recorded(made[tutorial])
        for hw in ("h200", "ascend_910b2"):
            time = npusim.run(call, hw=hw, numerics=False).latency_us
            assert time == pytest.approx(float(known[tutorial][f"{hw}_us"]), rel=1e-3), (tutorial, hw)
