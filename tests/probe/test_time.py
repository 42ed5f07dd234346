"""The design of `npusim help probe`: times of micro-kernels, as cases that calibrate reads, give constants back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from npusim.config.cases import MeasurementCase
from npusim.config.load import load_device
from npusim.studies.validate.measured_times import Predictor

pytest.importorskip("scipy", reason="npusim[calibrate]")
from npusim.studies.validate.calibrate import calibrate

if TYPE_CHECKING:
    from pathlib import Path

DEVICE = "ascend_910b2"
Shape = tuple[str, dict[str, int], dict[str, int], str]


def product(m: int, n: int, k: int, timing: str = "core") -> Shape:
    return "gemm", {"m": m, "n": n, "k": k}, {}, timing


def copy(size: int, timing: str = "core") -> Shape:
    return "copy", {"bytes": size}, {}, timing


def attention(heads: int, seq_q: int, seq_kv: int, block_kv: int) -> Shape:
    sizes = {"heads": heads, "seq_q": seq_q, "seq_kv": seq_kv, "head_dim": 128}
    return "flash", sizes, {"block_kv": block_kv}, "core"


#: By the number of the micro-kernel: a constant, and the cases at which it decides most of the time.
SETTLES: list[tuple[int, str, tuple[Shape, ...]]] = [
    (1, "launch.block_dispatch_cycles", (product(16, 16, 16), copy(1 << 14))),
    (2, "launch.gap_s", (product(2048, 2048, 2048, "back_to_back"), copy(1 << 24, "back_to_back"))),
    (3, "cores.aic.engines.MTE2.routes.gm_l1.bytes_per_cycle", (product(128, 128, 4096), product(128, 128, 128))),
    (
        3,
        "cores.aic.engines.MTE2.routes.gm_l1.burst_overhead_cycles",
        (product(128, 128, 4096), product(256, 128, 4096)),
    ),
    (4, "cores.aiv.engines.MTE2.routes.gm_ub.bytes_per_cycle", (copy(1 << 14), copy(1 << 18))),
    (5, "cores.aiv.engines.MTE3.routes.ub_gm.miss_bytes_per_cycle", (copy(1 << 18), copy(1 << 22))),
    (6, "cores.aic.engines.MTE2.routes.gm_l1.latency_cycles", (product(16, 16, 16), product(16, 128, 4096))),
    (6, "cores.aiv.engines.MTE3.routes.ub_gm.latency_cycles", (copy(1 << 14), copy(1 << 18))),
    (9, "cores.aic.engines.FIXP.routes.l0c_gm.bytes_per_cycle", (product(2048, 2048, 64), product(128, 128, 128))),
    (9, "cores.aic.engines.FIXP.routes.l0c_gm.latency_cycles", (product(16, 16, 16), product(2048, 2048, 64))),
    (10, "cores.aiv.engines.VECTOR.ops.exp_float32.slope_cycles_per_repeat", (attention(24, 512, 1024, 512),)),
    (11, "flags.cross_core_latency_cycles", (attention(1, 128, 256, 128), attention(24, 512, 1024, 512))),
    (11, "flags.tile_cycles", (attention(24, 512, 1024, 64), attention(24, 512, 1024, 512))),
]


def assert_recovered(tmp_path: Path, key: str, shapes: tuple[Shape, ...], factor: float) -> None:
    fact = dict(load_device(DEVICE).quantities())[key]
    truth = type(fact.value)(fact.value * factor)
    who, lines = Predictor(changes={key: truth}), []
    for at in range(4):  # calibrate holds each group against what the others give
        for n, (schedule, sizes, tiling, timing) in enumerate(shapes):
            row = {"name": f"c{at}_{n}", "group": f"g{at}", "device": DEVICE, "schedule": schedule, "workload": sizes}
            row |= {"tiling": tiling, "unnamed": "declared", "timing": timing, "measured": {"latency_us": 1.0}}
            latency_us = who.latency_us(MeasurementCase.model_validate(row))
            lines.append(f"  - {json.dumps({**row, 'measured': {'latency_us': latency_us}})}\n")
    file = tmp_path / "micro.yaml"
    file.write_text(f"schema: npusim.measurements/1\nsource: generated\ncases:\n{''.join(lines)}", encoding="utf-8")
    (found,) = calibrate(file, constants=(key,)).constants
    assert found.key == key
    assert found.after == pytest.approx(truth, rel=0.05)


def test_a_constant_comes_back_from_times_of_micro_kernels(tmp_path: Path) -> None:
    _, key, shapes = SETTLES[0]
    assert_recovered(tmp_path, key, shapes, 1.3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("factor", [0.8, 1.3])
@pytest.mark.parametrize(("number", "key", "shapes"), SETTLES, ids=[key for _, key, _ in SETTLES])
def test_each_constant_comes_back(
    tmp_path: Path, number: int, key: str, shapes: tuple[Shape, ...], factor: float
) -> None:
    assert_recovered(tmp_path, key, shapes, factor)
