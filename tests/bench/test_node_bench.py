"""Speed of a node's simulation: eight NPUs and 32k tokens within a second, kernels by `auto`."""

from __future__ import annotations

import time
from typing import Any

import pytest

import npusim
from npusim.config.load import load_workload
from npusim.config.node import load_node_device
from npusim.config.problem import GemmProblem
from npusim.node.machine import RunningCollective
from npusim.simulation.node import time_on_node
from tests.node.test_simulate import simulated_anew

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


@pytest.mark.bench
def test_collectives_in_step_are_repeated_several_times_faster_than_simulated(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    machine, seconds = load_node_device("ascend_910b2_x8"), []
    for is_repeated in (True, False):
        if not is_repeated:
            monkeypatch.setattr(RunningCollective, "_begin", simulated_anew)
        program = npusim.run(
            "gemm_allreduce",
            hw=machine,
            problem=GemmProblem(m=64000, n=4096, k=128),
            tiling={"blocks": 500},
            numerics=False,
            trace_groups=(),
        ).program
        start = time.process_time()
        time_on_node(program, machine, "auto")
        seconds.append(time.process_time() - start)
    with capsys.disabled():
        print(f"\n500 collectives: {seconds[0]:.2f} s repeated, {seconds[1]:.2f} s simulated")
    assert 2 * seconds[0] < seconds[1]
