"""Speed of a node's simulation: eight NPUs and 32k tokens within a second, kernels by `auto`."""

from __future__ import annotations

import time
from typing import Any

import pytest

import npusim
from npusim.config.load import load_workload
from npusim.config.node_file import load_node_device

LIMIT_S = 1.0
REPEATS = 3


@pytest.mark.bench
@pytest.mark.parametrize("blocks", [1, 2, 8])
def test_eight_npus_with_32k_tokens_take_a_second(blocks: int, capsys: Any) -> None:
    """Causal PanGu-38B; the best of three, the first of which compiles."""
    load, machine = load_workload("pangu_38b"), load_node_device("ascend_910b2_x8")
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = npusim.run(
            "tiling_allreduce", hw=machine, workload=load, seq=32768, tiling={"blocks": blocks}, numerics=False
        )
        seconds.append(time.perf_counter() - start)
    with capsys.disabled():
        print(f"\n{blocks} blocks: {min(seconds):.2f} s, {result.latency_us:,.0f} us")
    assert min(seconds) < LIMIT_S


@pytest.mark.bench
def test_eighty_layers_with_32k_tokens_take_two_seconds(capsys: Any) -> None:
    """LLaMA2-70B on eight 910B; the best of three, in processor time."""
    machine, seconds = load_node_device("ascend_910b2_x8"), []
    for _ in range(REPEATS):
        start = time.process_time()
        result = npusim.run("layer", hw=machine, workload="llama2_70b", seq=32768, numerics=False)
        seconds.append(time.process_time() - start)
    with capsys.disabled():
        print(f"\n80 layers: {min(seconds):.2f} s, {result.latency_us:,.0f} us")
    assert min(seconds) < 2 * LIMIT_S
