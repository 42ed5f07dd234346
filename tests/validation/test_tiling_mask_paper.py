"""FastAttention's tiling-mask: exact mapping, skipped work and memory (reports/tiling_mask)."""

from __future__ import annotations

import pytest

from npusim.config.problem import Problem
from npusim.errors import TilingError
from npusim.kernels.attention.tiling_mask import DEFAULT_M, TilingMask
from reports.parts.values import program_of
from reports.tiling_mask.page import check_mapping, distinct_masks, visits


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(("length", "offset"), [(7, 0), (16, 3), (23, -2)])
def test_every_block_of_every_size_and_place_gets_its_mask(m: int, length: int, offset: int) -> None:
    checked, wrong = check_mapping(m, length, offset)
    # sum over r of (length - r + 1), squared: every place of every size up to M x M.
    places = sum(length - size + 1 for size in range(1, min(m, length) + 1))
    assert (checked, wrong) == (places**2, 0)


@pytest.mark.parametrize("block", [2, 3, 4, 8])
def test_square_blocks_have_twice_their_side_of_different_masks(block: int) -> None:
    """b = 3: the six of figure 3."""
    assert distinct_masks(block, block) == 2 * block


@pytest.mark.parametrize(("tokens", "block"), [(4096, 128), (4096, 256), (16384, 128), (65536, 128)])
def test_the_fraction_skipped_is_a_half_less_half_a_block(tokens: int, block: int) -> None:
    found = visits(tokens, block, block)
    assert found.skipped == pytest.approx(0.5 - block / (2 * tokens), abs=1e-12)
    assert found.unmasked == pytest.approx(found.skipped, abs=1e-12)
    assert found.masked == pytest.approx(block / tokens, abs=1e-12)


def test_wide_blocks_skip_less() -> None:
    """(128, 512) at 4096 tokens: .4375 / .4375 / .125 (reports/tiling_mask)."""
    assert visits(4096, 128, 512) == pytest.approx((0.4375, 0.4375, 0.125))


def test_memory_of_the_masks() -> None:
    """reports/tiling_mask: a full FP16 mask of 64K is 8 GiB; M = 512 in bytes is 1 MiB, 512 x 512 is 256 KiB."""
    assert 65536**2 * 2 == 8 << 30
    assert TilingMask(DEFAULT_M).tensor().size_bytes == 1 << 20
    assert TilingMask(256).tensor().size_bytes == 256 << 10


@pytest.mark.parametrize("schedule", ["flash", "two_level", "unified", "pasa", "fp8_attention"])
def test_programs_hold_the_small_matrix_and_no_other_mask(schedule: str) -> None:
    preset = {"pasa": "fp16_mean", "fp8_attention": "hpc_ops"}.get(schedule, "fa2_fp32")
    problem = Problem(heads=1, seq_q=16384, head_dim=128, causal=True)
    tensors = program_of(schedule, problem, preset).tensors
    assert tensors["mask"].size_bytes == 1 << 20
    square = [t.name for t in tensors.values() if t.rows == t.cols == problem.seq_q]
    assert not square


def test_blocks_too_large_for_the_matrix_are_refused() -> None:
    problem = Problem(heads=1, seq_q=4096, head_dim=128, causal=True)
    with pytest.raises(TilingError, match="rows \\+ cols - 1 = 1151 <= 2M = 1024"):
        program_of("flash", problem, "fa2_fp32", tiling={"block_q": 128, "block_kv": 1024})
