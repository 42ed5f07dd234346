"""Every key of a device file that is not kept under ``facts`` changes a prediction, or what is accepted."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from npusim.config.core_units import VectorEngine
from npusim.config.device import DeviceSpec
from npusim.config.load import load_device, reader_of
from npusim.config.problem import CopyProblem, GemmProblem, KernelProblem, Problem
from npusim.config.quantity import Quantity
from npusim.config.tiling import build_tiling
from npusim.errors import NpusimError
from npusim.kernels.declare.define import unread_keys
from npusim.library import find_schedule
from npusim.machines.ascend.ascend_pricing import vector_cycles
from npusim.machines.decisions import AscendDecisions
from npusim.program.ir.check import check
from npusim.program.ir.op import Opcode, Step
from npusim.program.ir.tile import Tile
from npusim.simulation.simulate import simulate_program
from tests.turns import every

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.program.ir.tile_program import TileProgram


def small(**fields: Any) -> Problem:
    return Problem(**{"heads": 2, "seq_q": 256, "head_dim": 64, **fields})


#: Programs by name: schedule, problem, tiling, precision.
PROGRAMS: dict[str, tuple[str, Any, dict[str, Any], str | None]] = {
    "flash": ("flash", small(heads=24, causal=True, seq_q=512, head_dim=128), {"block_kv": 128}, None),
    "pto": ("flash", small(heads=24, causal=True, seq_q=512, head_dim=128), {"block_kv": 128, "kernel": "pto"}, None),
    "chunks": ("gated_delta", KernelProblem(heads=2, tokens=256), {"kernel": "pto_chunks"}, None),
    "half": ("flash", small(), {"block_kv": 128, "block_q": 64}, "fa16"),
    "brain": ("flash", small(dtype="bfloat16"), {"block_kv": 128}, None),
    "single": ("flash", small(dtype="float32"), {"block_kv": 64, "block_q": 32}, "fa2_fp32,arithmetic=ieee.f32"),
    "odd": ("flash", small(head_dim=80, seq_q=100, layout="bsnd"), {"block_kv": 64}, None),
    "byte": ("gemm", GemmProblem(m=256, n=129, k=256), {}, None),
    "short": ("gemm", GemmProblem(m=16, n=9, k=256), {"block_m": 16, "block_n": 16}, None),
    "tall": (
        "gemm",
        GemmProblem(m=256, n=256, k=1024),
        {"block_m": 64, "block_n": 32, "block_k": 16, "load_k": 256},
        None,
    ),
    "ragged": (
        "flash",
        small(seq_q=700, causal=True, head_dim=48),
        {"block_kv": 48, "vector_rows": 5, "block_q": 48},
        "fa16",
    ),
    "fixed": (
        "pasa",
        small(heads=30, seq_q=300, seq_kv=2048, head_dim=16),
        {"block_q": 64, "block_kv": 256, "vector_rows": 8},
        None,
    ),
    "fed": (
        "pasa",
        small(heads=30, seq_q=1, seq_kv=2048, head_dim=16),
        {"block_q": 64, "depth": 1, "vector_rows": 2},
        None,
    ),
    "sliced": (
        "two_level",
        small(heads=30, seq_q=300, seq_kv=2048, head_dim=128),
        {"block_kv": 48, "depth": 4, "vector_rows": 16},
        None,
    ),
    "flood": ("copy", CopyProblem(bytes=1 << 28), {}, None),
    "split": ("split_kv", small(), {"splits": 2, "block_kv": 64, "barriers": "every"}, None),
    "eight": ("fp8_attention", small(dtype="float8_e4m3fn"), {}, None),
    "pasa": ("pasa", small(causal=True), {"block_kv": 128}, None),
    "unfused": ("standard", small(), {}, None),
    "gemm": ("gemm", GemmProblem(m=256, n=256, k=256), {}, None),
    "thin": ("gemm", GemmProblem(m=16, n=1920, k=256), {"block_m": 16, "block_n": 80}, None),
    "copy": ("copy", CopyProblem(bytes=1 << 20), {}, None),
    "volta": ("volta_flash", small(heads=100, seq_q=128, causal=True), {}, None),
    "volta32": ("volta_flash", small(), {}, "acc_fp32"),
    "narrow": (
        "volta_flash",
        small(heads=100, seq_q=300),
        {"access_bytes": 8, "padding": 4, "arrangement": "1x4", "block_q": 64},
        "acc_fp32",
    ),
    "plain": ("volta_flash", small(seq_q=130, head_dim=80), {"smem": "plain", "stages": 2}, "acc_fp32"),
    "swizzled": ("volta_flash", small(seq_q=512), {"smem": "swizzled", "stages": 3}, None),
    "fused": ("volta_flash", small(seq_q=128), {}, "acc_fp32,multiply_add=once"),
    "capped": ("volta_flash", small(causal=True, softcap=20.0, window=100, sinks=4), {}, None),
    "norm": (f"{Path(__file__).parents[1]}/plugins/norm_product.py:NORM_PRODUCT", small(seq_q=128), {}, None),
    "gelu": (f"{Path(__file__).parents[1]}/plugins/gelu_product.py:GELU_PRODUCT", small(seq_q=128), {}, None),
    "long": ("volta_flash", small(heads=8, seq_q=16384, head_dim=128), {}, None),
}
#: Which programs tell about a key, the first match counts; ``rebuild``: whether they are built anew.
WHERE = {
    "ascend": (
        ("*.log_float32.*", ("split",)),
        ("*.sqrt_float32.*", ("norm",)),
        ("*.fractals.bfloat16.*", ("brain",)),
        ("*.fractals.float32.*", ("single",)),
        ("*float8_e4m3fn*", ("eight",)),
        ("*.gm_l1.unaligned_factor", ("odd",)),
        ("*.gm_l1.unaligned_bytes_per_cycle", ("byte",)),
        ("*.gm_l1.unaligned_row_cycles", ("short",)),
        ("*.gm_l1.burst_overhead_cycles", ("tall",)),
        ("*.gm_l1.request_cycles", ("thin",)),
        ("*.row_cycles", ("tall",)),
        ("*.ub_gm.miss_*", ("flood",)),
        ("*.unaligned_factor", ("ragged",)),
        ("*.FIXP.issue_interval_cycles", ("ragged",)),
        ("*.MTE3.queue_depth_count", ("ragged",)),
        ("cores.aic.*.MTE2.queue_depth_count", ("fed",)),
        ("cores.aiv.*.MTE2.queue_depth_count", ("sliced",)),
        ("*.FIXP.queue_depth_count", ("fixed",)),
        ("*.VECTOR.queue_depth_count", ("ragged",)),
        ("*.CUBE.queue_depth_count", ("tall",)),
        ("*.row_interval_cycles", ("chunks",)),
        ("*", ("flash", "half", "pasa", "gemm", "copy", "unfused", "pto")),
    ),
    "nvidia": (
        ("*.MUFU.ops.log.*", ("split",)),
        ("*.MUFU.ops.rsqrt.*", ("norm",)),
        ("*.ops.erf.*", ("gelu",)),
        ("*.ops.tanh.*", ("capped",)),
        ("*.ops.compare.*", ("capped",)),
        ("*.ops.fma.*", ("fused",)),
        ("*.64.lanes_count", ("narrow",)),
        ("memory.l2.capacity_bytes", ("long",)),
        ("*LDG.issue_interval_cycles", ("plain",)),
        ("*", ("volta", "volta32", "plain", "swizzled", "narrow")),
    ),
}


@cache
def program_of(name: str, hw: str) -> TileProgram:
    return build(name, load_device(hw))


def build(name: str, device: DeviceSpec) -> TileProgram:
    schedule, problem, tiling, precision = PROGRAMS[name]
    chosen = find_schedule(schedule, device.family)
    fields = build_tiling(chosen.tiling, tiling)
    program = chosen.program(problem, fields, device, chosen.precision(precision), is_hinted=False)
    check(program, device.flags)
    return program


def predicted(program: TileProgram, device: DeviceSpec) -> object:
    result = simulate_program(program, device, "auto")
    busy = tuple(use.busy_cycles for group in result.queues for use in group)
    return result.times_s, result.link_bytes, busy, device.peak_flops_per_s("float16")


@cache
def unchanged(name: str, hw: str) -> object:
    return predicted(program_of(name, hw), load_device(hw))


def with_value(device: DeviceSpec, key: str, value: object) -> DeviceSpec:
    data: Any = device.model_dump(by_alias=True)
    node = data
    for step in key.split("."):
        node = node[int(step)] if isinstance(node, list | tuple) else node[step]
    node["value"] = value
    return DeviceSpec.model_validate(data)


def values(key: str, value: Any) -> Iterator[object]:
    """Yield other values of a key, those that tell most first."""
    if isinstance(value, str):
        yield {"pipe": "scalar", "back": "through", "idle": "always"}.get(value, "hopper.wgmma.k16.f16.f32")
        return
    less = value // 8 if isinstance(value, int) else value / 8
    if key.endswith("_per_cycle"):
        yield less
    if key.endswith(("_min_bytes", "_unit_count")):
        yield value * 64 + 1
    if key.endswith(("alignment_bytes", "memory_unit_bytes")):
        yield value << 20
        yield value + 1
    if key.endswith(("_depth_count", "_ids_count", "_max_count")):
        yield 1
    elif key.endswith(("_bytes", "_count")) and value > 1:
        yield max(1, value // 64)
        yield max(1, value // 2)
        yield 1024
    yield value * 64 + 1
    yield value * 4 if value else 7
    yield less


def changes(device: DeviceSpec, name: str, changed: DeviceSpec) -> bool:
    """Return whether a program takes another time, or another course, on a changed device."""
    try:
        if predicted(program_of(name, device.name), changed) != unchanged(name, device.name):
            return True
        return predicted(build(name, changed), changed) != unchanged(name, device.name)
    except NpusimError:
        return True  # not accepted any more


def is_read(device: DeviceSpec, key: str, value: object) -> bool:
    hints = WHERE[device.family]
    programs = next(names for pattern, names in hints if fnmatchcase(key, pattern))
    has_another = False
    for other in values(key, value):
        try:
            changed = with_value(device, key, other)
        except ValueError:
            continue
        has_another = True
        if any(changes(device, name, changed) for name in programs):
            return True
    return not has_another


#: What only the places of a step's operands decide, and what decides bits; tested below, with the
#: layouts (pairs of lanes) and with the arithmetics.
OF_ONE_STEP = (
    *("*.slope_read_write_conflict_cycles_per_repeat", "*.banks.*", "*.pair_masks.*"),
    "*.routes.l0c_l1.*",  # a path that no schedule takes; its moves: test_cost.py
    # Operations of Triton's kernels alone; each as its device file states: tests/timing/test_cost.py.
    *("*.ops.min.*", "*.ops.*_propagate.*", "*.ops.select_compared.*", "*.ops.logic.*"),
)
OF_BITS = ("*.arithmetic", "*.arithmetic.*")
#: What libraries' kernels take, as on the H200 and the T4, whose keys are not tried here: `test_predicted_gpus.py`,
#: `tests/schedules/test_standard_gpu.py`.
OF_LIBRARIES = ("*.WARPS.sharing.*", "*.WARPS.library.*", "*.TENSOR.mma.*", "power.*")
#: Named barriers are limited for warp groups that take turns, which no kernel of these devices has.
OF_TURNS = {"v100": ("flags.usable_event_ids_count",)}


@pytest.mark.parametrize("hw", ["ascend_910b2", "v100"])
@pytest.mark.parametrize("turn", every(4, range(4)))
def test_every_other_key_changes_a_prediction(turn: int, hw: str) -> None:
    """Of all keys one of four by default."""
    device = load_device(hw)
    unread = [
        key
        for key, fact in [*device.facts()][turn::4]
        if reader_of(device, key, unread_keys) is None
        and not any(
            fnmatchcase(key, pattern) for pattern in (*OF_ONE_STEP, *OF_BITS, *OF_LIBRARIES, *OF_TURNS.get(hw, ()))
        )
        and not is_read(device, key, fact.value)  # type: ignore[attr-defined]
    ]
    assert not unread


@pytest.mark.parametrize("key", ["group_count", "rows_count", "row_bytes"])
def test_banks_decide_what_a_step_takes(key: str) -> None:
    device = load_device("ascend_910b2")
    buffer = device.core("aiv").buffer("UB")
    unit = device.engine("aiv", "VECTOR")
    assert isinstance(unit, VectorEngine)
    assert buffer.banks is not None

    def cycles(banks: Any, place: int) -> int:
        # Two sources in different groups, so that only the target can meet one of them.
        near, far, target = (Tile("UB", at, 8, 64, 64, "float32") for at in (place, place + 32, 0))
        return vector_cycles((Step(Opcode.ADD, target, (near, far)),), unit, banks, "", AscendDecisions())[0]

    fewer = {"value": max(1, getattr(buffer.banks, key).value // 2), "basis": "assumed", "source": "a test"}
    changed = type(buffer.banks).model_validate({**buffer.banks.model_dump(), key: fewer})
    places = range(16, 1 << 17, 16)
    assert [cycles(buffer.banks, p) for p in places] != [cycles(changed, p) for p in places]


def test_facts_have_sources_and_units() -> None:
    for hw in ("ascend_910b2", "h200", "v100"):
        kept = {k: f for k, f in load_device(hw).facts() if k.startswith("facts.")}
        assert kept
        assert all(fact.source for fact in kept.values())
        assert any(isinstance(fact, Quantity) for fact in kept.values())
