"""GPUs that nobody measured: their files say what the vendor says, and the H200's machine runs them."""

from __future__ import annotations

import pytest

import npusim
from npusim.config.engine import GroupMatrixEngine
from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.explore.space import auto_axes
from npusim.simulation.request import Request

SIZES = {"batch": 1, "heads": 60, "kv_heads": 20, "seq_q": 256, "seq_kv": 288, "head_dim": 64, "causal": False}


@pytest.mark.parametrize(("hw", "tflops"), [("a10", 125), ("t4", 65)])
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
    for hw in ("a10", "t4"):
        device = load_device(hw)
        assert device.power is None
        assert not {fact.basis for _, fact in device.facts()} & {"measured", "fitted"}
        assert set(device.matrix_engine("sm").arithmetic) == {"float16"} | ({"bfloat16"} if hw == "a10" else set())


@pytest.mark.parametrize(
    ("hw", "tiling"),
    [
        ("t4", {"block_q": 64, "block_kv": 32, "stages": 1, "warps": 4}),
        ("t4", {}),
        ("a10", {"block_q": 128, "block_kv": 32, "stages": 3, "warps": 8}),
    ],
)
def test_all_methods_give_the_same_cycles(hw: str, tiling: dict[str, int]) -> None:
    problem = Problem(**SIZES, dtype="float16")
    found = {
        npusim.run("flash", hw=hw, problem=problem, tiling=tiling, numerics=False, method=m).cycles
        for m in ("des", "block", "steady")
    }
    assert len(found) == 1


def test_a_chip_without_asynchronous_copies_has_one_stage_by_itself() -> None:
    one, default = (
        npusim.run("pasa", hw="t4", problem=Problem(**SIZES, dtype="float16"), tiling=t, numerics=False)
        for t in ({"stages": 1}, {})
    )
    assert one.cycles == default.cycles
    assert any("1 stage, for want of asynchronous copies" in note for note in default.notes)


def test_a_space_of_its_own_holds_what_a_kernel_decides() -> None:
    axes = auto_axes(Request("flash", hw="a10"), ["flash"])
    assert set(axes) == {"warps", "stages", "block_q", "block_kv", "launch"}
    assert not {"registers", "residents", "q"} & set(auto_axes(Request("volta_flash", hw="v100"), ["volta_flash"]))
