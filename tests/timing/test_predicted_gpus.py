"""GPUs that nobody measured: their files say what the vendor says, and the H200's machine runs them."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import pytest

import npusim
from npusim.config.cases import load_measurements
from npusim.config.core_units import GroupMatrixEngine
from npusim.config.load import load_device
from npusim.config.problem import GemmProblem, Problem
from npusim.errors import SpecError
from npusim.simulation.request import Request
from npusim.studies.explore.space import SearchRequest
from npusim.studies.validate.measured_times import validate_times

#: 128 MiB of K and V.
DECODE = Problem(batch=1, heads=32, kv_heads=8, seq_q=1, seq_kv=32768, head_dim=128, causal=False, dtype="float16")
if TYPE_CHECKING:
    from pathlib import Path

SIZES = {"batch": 1, "heads": 60, "kv_heads": 20, "seq_q": 256, "seq_kv": 288, "head_dim": 64, "causal": False}


@pytest.mark.parametrize(("hw", "tflops"), [("a10", 125), ("t4", 65), ("a100", 312), ("l40s", 366)])
def test_peaks_are_the_vendors(hw: str, tflops: float) -> None:
    device = load_device(hw)
    engine = device.matrix_engine("sm")
    assert isinstance(engine, GroupMatrixEngine)
    assert engine.wgmma is None
    each = 2 * engine.mma.m_elements.value * engine.mma.n_elements.value * engine.fractal("float16").k_elements.value
    of_pipes = 4 * each / engine.mma.pipe_cycles.value
    assert of_pipes == each / engine.cycles_per_fractal.value
    assert of_pipes * device.clock_hz.value * device.group_count.value == pytest.approx(tflops * 1e12, rel=0.005)


def test_numbers_of_another_chip_are_assumptions() -> None:
    formats = {"t4": {"float16"}, "l40s": {"float16", "bfloat16", "tf32", "float8_e4m3fn", "float8_e5m2"}}
    for hw in ("a10", "t4", "a100", "l40s"):
        device = load_device(hw)
        assert (device.power is None) == (hw in ("a10", "t4"))
        assert not {fact.basis for _, fact in device.facts()} & {"measured", "fitted"}
        assert set(device.matrix_engine("sm").arithmetic) == formats.get(hw, {"float16", "bfloat16", "tf32"})


def test_the_clock_of_an_a100_falls_as_published() -> None:
    """Products of 8192 x 8192 x 8192, normal numbers: 257 TFLOP/s of 312, and 295 of zeros, which draw less power."""
    power = load_device("a100").power
    assert power is not None
    assert power.clock(295 / 312, 4e-3) == pytest.approx(257 / 295, rel=0.01)
    took = npusim.run("gemm", hw="a100", problem=GemmProblem(m=8192, n=8192, k=8192), numerics=False)
    assert took.tflops == pytest.approx(257, rel=0.05)


def test_times_of_the_h100_follow_from_public_numbers(shared_folder: Path) -> None:
    """Nothing in its file is measured on it, or fitted: one of twenty cases, within what the H200 is met by."""
    path = shared_folder / "measurements" / "h100.yaml"
    cases = [case.name for case in load_measurements(path).cases][::20]
    reports = [validate_times(path, only=name) for name in cases]
    errors = sorted(abs(row.relative_error) for report in reports for row in report.residuals)
    assert median(errors) <= 0.07
    assert errors[-1] <= 0.25
    h200 = dict(load_device("h200").facts())
    assert {fact.basis for key, fact in load_device("h100").facts() if fact != h200[key]} <= {"vendor", "derived"}


def test_registers_are_those_of_the_architecture_not_of_the_device() -> None:
    problem = Problem(**{**SIZES, "head_dim": 256}, dtype="float16")
    tiling = {"block_q": 128, "block_kv": 64, "stages": 2, "warps": 8}
    notes = [
        [n for n in npusim.run("flash", hw=hw, problem=problem, tiling=tiling, numerics=False).notes if "tiles of" in n]
        for hw in ("h200", "h100", "a100")
    ]
    assert notes[0] == notes[1] != notes[2]
    assert all("registers from the compiler's table" in note for (note,) in notes)


def test_others_lines_in_l2_cost_who_reads_much() -> None:
    """h200_flush.csv: reading 128 MiB takes 8.2 us longer where L2 is full of lines to be written back.

    Three stages keep memory busy; two leave it time to write them back meanwhile.
    """
    tiling = {"splits": 32, "block_kv": 128, "stages": 3, "warps": 4}
    dirty, clean, unsaid = (
        npusim.run("split_kv", hw="h200", problem=DECODE, numerics=False, tiling=tiling, l2=l2)
        for l2 in ("dirty", "clean", None)
    )
    assert dirty.latency_us - clean.latency_us == pytest.approx(8.2, rel=0.15)
    assert unsaid.cycles == dirty.cycles
    with pytest.raises(SpecError, match=r"l2: dirty: the device file does not state which share has .* clean, warm"):
        npusim.run("flash", seq=256, numerics=False, l2="dirty")


@pytest.mark.parametrize(
    ("hw", "tiling"),
    [
        ("t4", {"block_q": 64, "block_kv": 32, "stages": 1, "warps": 4}),
        pytest.param("t4", {}, marks=pytest.mark.exhaustive),
        ("a10", {"block_q": 128, "block_kv": 32, "stages": 3, "warps": 8}),
    ],
)
def test_all_methods_give_the_same_cycles(hw: str, tiling: dict[str, int]) -> None:
    problem = Problem(**SIZES, dtype="float16")
    found = {
        npusim.run("flash", hw=hw, problem=problem, tiling=tiling, numerics=False, method=m, trace_groups=()).cycles
        for m in ("des", "block", "steady")
    }
    assert len(found) == 1


def test_a_chip_without_asynchronous_copies_has_one_stage_by_itself() -> None:
    one, default = (
        npusim.run("pasa", hw="t4", problem=Problem(**SIZES, dtype="float16"), tiling=t, numerics=False)
        for t in ({"stages": 1}, {})
    )
    assert one.cycles == default.cycles
    assert default.tiling.stages == 1


def test_a_space_of_its_own_holds_what_a_kernel_decides() -> None:
    axes = SearchRequest(Request("flash", hw="a10"), ("flash",)).auto_axes()
    assert set(axes) == {"warps", "stages", "block_q", "block_kv", "launch"}
    axes = SearchRequest(Request("volta_flash", hw="v100"), ("volta_flash",)).auto_axes()
    assert not {"registers", "residents", "q"} & set(axes)


@pytest.mark.parametrize("launch", ["in_order", "longest_first"])
def test_slow_tensor_cores_are_never_busier_than_time_allows(launch: str) -> None:
    """An H20: the rest of a product, which goes on behind other work, shares tensor cores with other products."""
    tiling = {"block_q": 128, "block_kv": 32, "warps": 8, "stages": 3, "launch": launch}
    call = {"workload": "qwen2_7b", "seq": 2048, "batch": 2, "numerics": False, "trace_groups": ()}
    timing = npusim.run("flash", hw="h20", tiling=tiling, **call).timing
    assert timing is not None
    assert 0.7 * timing.cycles < timing.bound_cycles["sm.TENSOR"] <= timing.cycles
