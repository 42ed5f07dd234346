from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from npusim.config.core_units import DmaEngine, FixpipeEngine, MatrixEngine, VectorEngine
from npusim.config.load import load_device
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable

    from npusim.config.device import DeviceSpec


@pytest.fixture(scope="module")
def device() -> DeviceSpec:
    return load_device("ascend_910b2")


def _matrix(device: DeviceSpec) -> MatrixEngine:
    engine = device.engine("aic", "CUBE")
    assert isinstance(engine, MatrixEngine)
    return engine


def _vector(device: DeviceSpec) -> VectorEngine:
    engine = device.engine("aiv", "VECTOR")
    assert isinstance(engine, VectorEngine)
    return engine


def test_pipes_and_buffers_are_named_as_in_the_field(device: DeviceSpec) -> None:
    assert list(device.core("aic").engines) == ["MTE2", "MTE1", "CUBE", "FIXP", "SCALAR"]
    assert list(device.core("aiv").engines) == ["MTE2", "VECTOR", "MTE3", "SCALAR"]
    assert set(device.core("aic").buffers) == {"L0A", "L0B", "L0C", "L1"}
    assert set(device.core("aiv").buffers) == {"UB"}


def test_there_are_24_aic_and_48_aiv(device: DeviceSpec) -> None:
    assert (device.core_count("aic"), device.core_count("aiv")) == (24, 48)


def test_peaks_are_those_of_the_data_sheet(device: DeviceSpec) -> None:
    clock = device.clock_hz.value
    fractal = _matrix(device).fractal("float16")
    macs = fractal.m_elements.value * fractal.n_elements.value * fractal.k_elements.value
    # PASA paper, appendix M: 354 + 22 TFLOP/s.
    assert device.core_count("aic") * 2 * macs * clock == pytest.approx(353.9e12, rel=1e-3)
    lanes = _vector(device).repeat_bytes.value // 2
    assert device.core_count("aiv") * 2 * lanes * clock == pytest.approx(22.1e12, rel=2e-3)


def test_mmad_of_128_cubed_is_512_cycles_and_its_startup(device: DeviceSpec) -> None:
    engine = _matrix(device)
    fractal = engine.fractal("float16")
    sides = (fractal.m_elements, fractal.n_elements, fractal.k_elements)
    steps = [ceil_div(128, side.value) for side in sides]
    cycles = steps[0] * steps[1] * steps[2] * engine.cycles_per_fractal.value
    assert (cycles, engine.startup_cycles.value) == (512, 10)


def test_32_kib_from_l1_to_l0b_are_256_cycles_and_50(device: DeviceSpec) -> None:
    engine = device.engine("aic", "MTE1")
    assert isinstance(engine, DmaEngine)
    route = engine.route("L1", "L0B")
    assert (32 * 1024 / route.bytes_per_cycle.value, route.latency_cycles.value) == (256, 50)
    assert engine.route("L1", "L0A").bytes_per_cycle.value == 256


@pytest.mark.parametrize(
    ("op", "repeats", "cycles"),
    # (exp float32 of 128 repeats, Add of 64 repeats without a bank conflict)
    [("exp_float32", 128, 256 + 31), ("binary", 64, 86)],
)
def test_vector_anchors(device: DeviceSpec, op: str, repeats: int, cycles: int) -> None:
    cost = _vector(device).op(op)
    fixed = cost.head_cycles.value + cost.tail_cycles.value
    assert cost.slope_cycles_per_repeat.value * repeats + fixed == cycles


def test_every_vector_op_of_the_vocabulary_is_there(device: DeviceSpec) -> None:
    assert set(_vector(device).ops) == {
        *("binary", "scalar", "exp_float32", "exp_float16", "log_float32", "div_float32", "div_float16"),
        *("sqrt_float32", "cast", "block_reduce", "broadcast", "select", "copy"),
    }


def test_fixpipe_casts_on_the_way_to_gm_but_keeps_no_float32_for_l1(device: DeviceSpec) -> None:
    engine = device.engine("aic", "FIXP")
    assert isinstance(engine, FixpipeEngine)
    assert engine.casts == ("float32", "float16", "bfloat16", "int8")
    assert engine.route("L0C", "L1").output_formats == ("float16", "bfloat16", "int8")


def test_nothing_leads_from_ub_to_the_cube(device: DeviceSpec) -> None:
    store = device.engine("aiv", "MTE3")
    assert isinstance(store, DmaEngine)
    assert {r.destination for r in store.routes.values() if r.source == "UB"} == {"GM"}


def test_the_cube_has_no_fp8(device: DeviceSpec, fault: Callable[..., str]) -> None:
    engine = _matrix(device)
    assert tuple(engine.fractals) == ("float16", "bfloat16", "float32")
    assert fault(engine.fractal, "float8_e4m3fn") == (
        "the matrix unit does not multiply float8_e4m3fn; it has: float16, bfloat16, float32"
    )


def test_the_cubes_arithmetic_is_assumed_and_adds_up_in_its_format(
    device: DeviceSpec, fault: Callable[..., str]
) -> None:
    engine = _matrix(device)
    assert engine.arithmetic_of("float16") == "ascend.cube.k16.f16.f32"
    assert {choice.basis for choice in engine.arithmetic.values()} == {"assumed"}
    other = engine.model_copy(update={"accumulator_format": "float16"})
    assert fault(other.arithmetic_of, "float16").endswith("accumulates in float32, but accumulator_format is float16")


def test_look_ups_name_what_there_is(device: DeviceSpec, fault: Callable[..., str]) -> None:
    assert fault(device.engine, "aic", "CUB") == (
        "ascend_910b2: there is no engine 'CUB' in aic; its engines: MTE2, MTE1, CUBE, FIXP, SCALAR"
    )
    assert fault(device.core, "sm") == "ascend_910b2: there is no core 'sm'; its cores: aic, aiv"
    assert fault(device.link, "pcie") == "ascend_910b2: there is no link 'pcie'; its links: hbm, l2"
    assert fault(device.core("aiv").buffer, "L1") == "no buffer 'L1' in this core; its buffers: UB"
    assert fault(_matrix(device).arithmetic_of, "int8").startswith("no arithmetic is stated for int8")
    assert fault(_vector(device).op, "tanh").startswith("unknown vector op 'tanh'; allowed: binary, ")
    store = device.engine("aiv", "MTE3")
    assert isinstance(store, DmaEngine)
    assert fault(store.route, "UB", "L1") == "no route UB->L1; its routes: UB->GM"


def test_seconds_are_cycles_of_the_clock(device: DeviceSpec) -> None:
    assert device.seconds(1_800_000) == pytest.approx(1e-3)


def test_quantities_have_dotted_keys(device: DeviceSpec) -> None:
    quantities = dict(device.quantities())
    assert quantities["cores.aic.engines.CUBE.startup_cycles"].value == 10
    fit = "facts.cores.aiv.engines.VECTOR.row_reduce.float32.0.bias_cycles"
    assert quantities[fit].value == 48
    # Choices are facts but no quantities.
    assert "flags.cross_core_wait_blocks" in dict(device.facts())
    assert "flags.cross_core_wait_blocks" not in quantities


def test_equal_devices_have_equal_digests(device: DeviceSpec) -> None:
    assert device.digest() == load_device("ascend_910b2").digest()
    assert device.digest() != load_device("ascend_910b1").digest()


@pytest.mark.parametrize(
    ("name", "clock", "groups", "l2_mib", "hbm_gib"),
    [
        ("ascend_910b1", 1.85e9, 24, 192, 64),
        ("ascend_910b2", 1.80e9, 24, 192, 64),
        ("ascend_910b3", 1.80e9, 20, 192, 64),
        ("ascend_910b4", 1.50e9, 20, 96, 32),
    ],
)
def test_variants_differ_as_the_vendor_says(name: str, clock: float, groups: int, l2_mib: int, hbm_gib: int) -> None:
    variant = load_device(name)
    assert variant.clock_hz.value == clock
    assert variant.group_count.value == groups
    assert variant.memory.l2.capacity_bytes.value == l2_mib * 2**20
    assert variant.memory.gm.capacity_bytes.value == hbm_gib * 2**30


def test_variants_change_nothing_else() -> None:
    base = dict(load_device("ascend_910b2").quantities())
    changed = {
        name: {key for key, value in load_device(name).quantities() if base[key] != value}
        for name in ("ascend_910b1", "ascend_910b3", "ascend_910b4")
    }
    assert changed == {
        "ascend_910b1": {"clock_hz"},
        "ascend_910b3": {"group_count"},
        "ascend_910b4": {
            "clock_hz",
            "group_count",
            "memory.gm.capacity_bytes",
            "memory.l2.capacity_bytes",
            "links.hbm.bytes_per_s",
            "facts.links.hbm.nominal_bytes_per_s",
        },
    }
