"""Products of few rows beside cuBLAS's on an H200: their times, and where k is split."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import npusim
from npusim.config.load import load_device
from npusim.config.problem import CopyProblem, GemmProblem
from npusim.machines.sm.library_products import library_tile

MEASURED = Path(__file__).parents[2] / "reports/silicon/thin_products.json"


@lru_cache(maxsize=1)
def rows() -> list[Any]:
    return list(json.loads(MEASURED.read_text())["rows"])


@pytest.mark.parametrize(("m", "most"), [(16, 0.04), (128, 0.06)])  # m = 128 is left out of the fit
def test_one_wave_takes_its_bytes_time_and_that_of_a_kernel_with_products(m: int, most: float) -> None:
    found = [row for row in rows() if row[0] == m and row[1] == 8448]
    assert len(found) == 6
    for _, n, k, us, *_ in found:
        problem = GemmProblem(m=m, n=n, k=k, dtype="bfloat16", operands="nt")
        timing = npusim.run("gemm", problem=problem, hw="h200", numerics=False, l2="clean").timing
        assert timing.times_s["back_to_back"] * 1e6 == pytest.approx(us, rel=most), (m, n, k)


def test_a_kernel_with_products_takes_longer_in_a_stream_and_no_other_does() -> None:
    spec = load_device("h200").timed_launch()
    assert spec.products_s is not None
    assert spec.task_s is not None
    cases = ("gemm", GemmProblem(m=128, n=128, k=128)), ("copy", CopyProblem(bytes=2**20))
    for (schedule, problem), more in zip(cases, (spec.products_s.value, 0.0), strict=True):
        times = npusim.run(schedule, problem=problem, hw="h200", numerics=False).timing.times_s
        assert times["kernel"] - times["core"] == pytest.approx(spec.task_s.value + more)


SHAPES = [(4224, 4096), (4096, 4096), (4096, 8192), (2112, 4096), (8448, 4096), (2048, 2048)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_k_is_split_where_cublas_splits_it(n: int, k: int) -> None:
    (kernels,) = (row[5] for row in rows() if row[:3] == [16, n, k])
    *_, splits = library_tile(16, n, k, 132, (None, None, None), 1, 10**6, None)
    assert (splits > 1) == any("splitK" in name for name, _ in kernels)
    # Blocks of a tile's 64 columns and all rows, as many as there are cores or fewer.
    assert n // 64 * splits <= 2 * 132
