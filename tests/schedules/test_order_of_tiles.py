"""Products on Ascend: the order of a core's tiles and of blocks where B exceeds L2, loads of one row of fractals.

Times are computed, never bits: each call is one product of a few blocks.
"""

from __future__ import annotations

from typing import Any

import pytest

import npusim
from npusim.config.problem import GemmProblem

#: Of an L2 that holds less than B, of 6.3 MB in each call.
SMALL = {"memory.l2.capacity_bytes": "4194304"}
B_BYTES = 6144 * 512 * 2


def _from_memory(tiling: dict[str, Any], m: int, n: int, k: int) -> float:
    """Return the bytes from memory of one product on a 910B2 with a small L2."""
    problem = GemmProblem(m=m, n=n, k=k, dtype="float16")
    run = npusim.run("gemm", hw="ascend_910b2", problem=problem, tiling=tiling, numerics=False, overrides=SMALL)
    assert run.timing is not None
    return float(run.timing.link_bytes["hbm"])


def test_a_core_reads_a_large_b_once() -> None:
    """Three bands and two panels a core: A is read again for each panel, B not for each band."""
    tiling = {"block_m": 16, "block_n": 128, "block_k": 128, "single_m": 48, "single_n": 256, "load_k": 128}
    assert _from_memory(tiling, 48, 6144, 512) < 1.2 * B_BYTES


def test_blocks_of_a_column_follow_one_another_where_b_exceeds_l2() -> None:
    """Five rows of 12 tiles on 24 cores: along the rows B is read three times, down the columns once and a part."""
    tiling = {"block_m": 16, "block_n": 128, "block_k": 256}
    down, along = (_from_memory({**tiling, **more}, 80, 1536, 2048) for more in ({}, {"swizzle": 1}))
    assert along > 2.8 * B_BYTES
    assert down < 0.5 * along


@pytest.mark.parametrize(("block_k", "constant"), [(16, "row_latency_cycles"), (32, "latency_cycles")])
def test_one_row_of_fractals_is_one_instruction(block_k: int, constant: str) -> None:
    """B of 32 x 32 has two rows of fractals: one instruction of 50 cycles is faster than two of 28."""
    problem = GemmProblem(m=32, n=32, k=64, dtype="float16")
    tiling = {"block_m": 32, "block_n": 32, "block_k": block_k}
    run = npusim.run("gemm", hw="ascend_910b2", problem=problem, tiling=tiling, numerics=False)
    assert run.timing is not None
    names = {name for name in run.timing.term_cycles if ".MTE1." in name and name.endswith("latency_cycles")}
    assert {name.rpartition(".")[2] for name in names} == {constant}
