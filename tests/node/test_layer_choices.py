"""A layer's own choices: the attention that PyTorch takes, and L2 as a stream of kernels leaves it."""

from __future__ import annotations

from typing import Any

import pytest

import npusim
from npusim.config.family import registered
from npusim.config.layers import Experts, ModelProblem
from npusim.config.load import load_device
from npusim.config.problem import GemmProblem, Problem
from npusim.errors import TilingError
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


#: Microseconds of an H200's profile by part, a layer of Llama-3-8B that decodes 16 tokens, 2,048 keys each: eager
#: PyTorch 2.11 (measurements/h200_layer.csv; the residual sum by itself), and the wall of its graph.
DECODED = {"norm": 43.29, "rotary": 21.38, "cache": 4.54, "residual": 2.88, "attention": 35.42, "qkv": 15.84}
WALL = 260.61
LLAMA = ModelProblem(
    batch=16, heads=32, kv_heads=8, seq_q=1, seq_kv=2048, causal_offset=2047, head_dim=128, causal=True,
    dtype="bfloat16", ranks=1, hidden=4096, layers=1, intermediate=14336, gated=True,
)  # fmt: skip


def layer(overrides: Any = None, **tiling: Any) -> Any:
    how: dict[str, Any] = {"numerics": False, "trace_groups": (), "overrides": overrides}
    return npusim.run("layer", problem=LLAMA, hw="h200", tiling=tiling, **how).timing


def test_eager_operators_take_what_a_profile_says() -> None:
    timing = layer(framework="eager")
    assert timing.latency_s * 1e6 == pytest.approx(WALL, rel=0.05)
    for part, measured in DECODED.items():
        assert timing.parts_s[part] * 1e6 == pytest.approx(measured, rel=0.15), part
    assert sum(timing.parts_s.values()) == pytest.approx(timing.latency_s, rel=1e-9)


def test_a_host_that_issues_slower_than_kernels_end_limits_a_layer() -> None:
    graph, host = (layer(launches=how) for how in ("graph", "host"))
    slow = layer({"launch.host_issue_s": "40e-6"}, launches="host")
    assert graph.latency_s <= host.latency_s < 1.1 * graph.latency_s
    assert slow.latency_s > 10 * 40e-6


def test_kernels_and_collectives_of_a_graph_do_not_wait_for_the_host_of_a_node() -> None:
    """The node's file states what its host takes to issue an attention, a product and a collective one by one."""
    sizes = {"batch": 1, "seq_q": 128, "seq_kv": 128, "causal_offset": 0, "ranks": 2}
    prefill = LLAMA.model_copy(update=sizes)
    how: dict[str, Any] = {"problem": prefill, "hw": "h200_x2", "numerics": False, "trace_groups": ()}
    slow = {f"host.{name}_issue_s": "1e-3" for name in ("attention", "linear", "collective")}
    graph, slow_graph, host, slow_host = (
        npusim.run("layer", tiling={"launches": launches}, overrides=overrides, **how).timing.latency_s
        for launches in ("graph", "host")
        for overrides in (None, slow)
    )
    assert graph == slow_graph < host
    assert slow_host > 3e-3


@pytest.mark.parametrize(
    ("hw", "change", "message"),
    [
        (
            "ascend_910b2",
            {},
            "framework: eager; npusim knows the operators of eager PyTorch for GPUs, not for ascend_910b2",
        ),
        ("h200", {"experts": Experts(count=8, per_token=2, width=1024)}, "not for latent projections or experts"),
    ],
)
def test_operators_that_are_not_known_are_refused(hw: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(TilingError, match=message):
        npusim.run(
            "layer", problem=LLAMA.model_copy(update=change), hw=hw, tiling={"framework": "eager"}, numerics=False
        )


@pytest.mark.parametrize(("hw", "l2"), [("h200", "steady"), ("ascend_910b2", "clean")])
def test_kernels_of_a_layer_find_l2_as_kernels_before_them_leave_it(hw: str, l2: str) -> None:
    assert child_program(Child("gemm", GemmProblem(m=64, n=64, k=64)), load_device(hw)).l2 == l2
