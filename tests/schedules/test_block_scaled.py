"""Products of operands in blocks: bits are those of `formats.matmul` with scales, and time counts the scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from npusim import formats
from npusim.config.load import load_device
from npusim.config.problem import GemmProblem
from npusim.config.tiling import build_tiling
from npusim.errors import SpecError, TilingError
from npusim.ir.op import Opcode, Step
from npusim.ir.tile import Tile
from npusim.machines.ascend.pricing import AscendPricing
from npusim.numerics.executor import execute
from npusim.schedules import find_schedule

DEVICE = load_device("ascend_950")


def program_of(problem: GemmProblem, device: Any = DEVICE, **fields: Any) -> Any:
    chosen = find_schedule("gemm", device.family)
    tiling = build_tiling(chosen.tiling, fields)
    return chosen.program(problem, tiling, device, chosen.precision(None))


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp8_e5m2"])
@pytest.mark.parametrize(("m", "n", "k", "outlier"), [(40, 48, 320, 1.0), (33, 17, 100, np.nan)])
def test_a_product_in_blocks_is_that_of_its_quantised_operands(
    fmt: str, m: int, n: int, k: int, outlier: float
) -> None:
    rng = np.random.default_rng(m)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    a *= np.exp2(rng.integers(-20, 20, (m, 1))).astype(np.float32)  # scales differ
    b[5, 3] *= np.float32(outlier)
    stored = {"a": formats.quantize(a, fmt), "b": formats.quantize(b, fmt, axis=0)}
    program = program_of(GemmProblem(m=m, n=n, k=k, dtype=fmt), block_m=32, block_n=32, block_k=64)
    state = execute(program, lambda name, *_: stored[name].stored())
    written = state.tensors.head(program.tensors["c"], 0, 0)

    tail = -k % 64
    padded = [formats.quantize(np.pad(a, ((0, 0), (0, tail))), fmt)]
    padded.append(formats.quantize(np.pad(b, ((0, tail), (0, 0))), fmt, axis=0))
    expected = formats.matmul(
        *(p.elements for p in padded),
        arithmetic=DEVICE.matrix_engine("aic").arithmetic_of(fmt),
        a_scale=padded[0].scales,
        b_scale=padded[1].scales,
    )
    np.testing.assert_array_equal(written.view(np.uint16), formats.cast(expected, "bfloat16").view(np.uint16))
    assert bool(state.events.nan) is False  # a NaN in an operand is no event
    assert np.isnan(written.astype(np.float32)).any() == np.isnan(outlier)


def test_scales_are_bytes_that_move() -> None:
    program = program_of(GemmProblem(m=256, n=256, k=512, dtype="mxfp8"))
    assert program.tensors["a"].size_bytes == 256 * 512 * 33 // 32
    assert program.tensors["c"].fmt == "bfloat16"


def test_a_load_into_l0_pays_for_scales_at_their_rate() -> None:
    """asc-devkit: data / 256 + scales / 32 cycles, and 30."""
    costs = AscendPricing(program_of(GemmProblem(m=256, n=256, k=512, dtype="mxfp8")), DEVICE)

    def cycles(fmt: str) -> int:
        there, here = (Tile(f"aic.{memory}", 0, 128, 128, 128, fmt) for memory in ("L0A", "L1"))
        return costs.of_step(Step(Opcode.COPY, there, (here,)), "aic", "MTE1").occupancy_cycles

    assert cycles("float8_e4m3fn") == 128 * 128 // 256 + 30
    assert cycles("mxfp8") == 128 * 128 // 256 + 128 * 128 // 32 // 32 + 30


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_a_device_without_the_unit_names_those_that_have_it(hw: str) -> None:
    with pytest.raises(SpecError, match=rf"{hw}: .* mxfp8; of the packaged: ascend_950"):
        program_of(GemmProblem(m=64, n=64, k=64, dtype="mxfp8"), load_device(hw))


def test_pieces_of_k_are_whole_pairs_of_blocks() -> None:
    with pytest.raises(TilingError, match="block_k: 16 is no multiple of 64"):
        program_of(GemmProblem(m=64, n=64, k=64, dtype="mxfp8"), block_k=16)
