"""A layer's own choices: the attention that PyTorch takes, and L2 as a stream of kernels leaves it."""

from __future__ import annotations

from typing import Any

import pytest

from npusim.config.family import registered
from npusim.config.load import load_device
from npusim.config.problem import GemmProblem, Problem
from npusim.machines.node.node_program import Child
from npusim.simulation.node_run import child_program


@pytest.mark.parametrize(
    ("hw", "sizes", "attention"),
    [
        ("h200", {}, "flash:kernel=cudnn"),
        ("h100", {"dtype": "bfloat16", "causal": True}, "flash:kernel=cudnn"),
        ("h200", {"head_dim": 256}, "flash"),
        ("h200", {"causal": True, "window": 64}, "flash"),
        ("h200", {"dtype": "float8_e4m3fn"}, "flash"),
        ("a100", {}, "flash"),
        ("v100", {}, "flash"),
        ("ascend_910b2", {}, "two_level"),
    ],
)
def test_a_prefill_runs_the_attention_of_its_framework(hw: str, sizes: dict[str, Any], attention: str) -> None:
    device = load_device(hw)
    problem = Problem(**{"heads": 4, "seq_q": 512, "seq_kv": 512, "head_dim": 128} | sizes)
    assert registered(device.family).attention_of(problem, device) == attention


@pytest.mark.parametrize(("hw", "l2"), [("h200", "steady"), ("ascend_910b2", "clean")])
def test_kernels_of_a_layer_find_l2_as_kernels_before_them_leave_it(hw: str, l2: str) -> None:
    assert child_program(Child("gemm", GemmProblem(m=64, n=64, k=64)), load_device(hw)).l2 == l2
