"""Whole models layer by layer: parts, folding, memory, where K and V are, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.config.layers import Experts, LatentAttention, ModelProblem, StoredWeights
from npusim.config.load import load_device, load_workload
from npusim.config.node_file import NodeDevice, load_node_device
from npusim.config.problem import Problem, RowsProblem
from npusim.errors import BufferOverflowError, SpecError, TilingError
from npusim.kernels.declare.layer_tasks import LayerTiling, layer_tasks, periods
from npusim.kernels.declare.node_define import PRECISIONS, communication
from npusim.kernels.declare.registry import SMALLER
from npusim.library import find_schedule
from npusim.machines.node.layers_in_memory import longest, memory_plan
from npusim.machines.node.node_program import COMPUTE, task_program
from npusim.machines.node.node_result import OVERHEAD
from npusim.machines.node.node_simulation import BETWEEN
from npusim.program.ir.check import check
from npusim.program.numerics.executor import execute
from npusim.simulation.node_run import time_on_node
from reports.nodes.models import paper_layers

pytestmark = pytest.mark.usefixtures("declared_tiles")

SMALL = ModelProblem.around(
    Problem(heads=2, seq_q=128, head_dim=64, causal=True),
    ranks=8,
    hidden=1024,
    layers=3,
    intermediate=2048,
    gated=True,
    vocab=1000,
)
TOKEN = SMALL.model_copy(update={"seq_q": 1, "seq_kv": 4096, "causal_offset": 4095})
NPUS, GPUS = "ascend_910b2_x8", "v100_x8"


def timed(problem: ModelProblem = SMALL, hw: Any = NPUS, **tiling: Any) -> Any:
    return npusim.run("layer", problem=problem, hw=hw, tiling=tiling, numerics=False, trace_groups=()).timing


def test_a_layer_has_all_its_parts_and_they_add_up() -> None:
    time = timed()
    assert set(time.parts_s) == {
        "norm",
        "qkv",
        "rotary",
        "cache",
        "attention",
        "projection",
        "allreduce",
        "between kernels",
        "up",
        "activation",
        "down",
        "vocabulary",
    }
    # Nothing overlaps in one block; a collective's AllReduce is joined at once by all.
    assert sum(time.parts_s.values()) == pytest.approx(time.latency_s, rel=1e-9)


def test_layers_are_folded_and_the_vocabulary_comes_once() -> None:
    none = SMALL.model_copy(update={"vocab": 0})
    three, one = timed(none), timed(none.model_copy(update={"layers": 1}))
    assert three.cycles == 3 * one.cycles
    assert set(three.times_s.values()) == {three.latency_s}
    assert three.operations == 3 * one.operations
    assert timed().latency_s - three.latency_s == pytest.approx(
        timed().parts_s["vocabulary"]
        + sum(timed(SMALL.model_copy(update={"layers": 1})).parts_s[n] - one.parts_s[n] for n in ("norm", BETWEEN))
    )


def test_each_kind_of_layer_counts_by_its_share() -> None:
    model = SMALL.model_copy(update={"vocab": 0, "seq_q": 4096, "seq_kv": 4096})
    window = {"window": 256}
    both = model.model_copy(update={"layers": 5, "local": model.attention.model_copy(update=window), "local_layers": 4})
    assert both.are_local == [False, True, True, True, True]
    one, local = (timed(m.model_copy(update={"layers": 1})).cycles for m in (model, model.model_copy(update=window)))
    assert local < one
    assert timed(both).cycles == one + 4 * local


@pytest.mark.parametrize(("asked", "kinds"), [({}, (21, None, 4096)), ({"kind": "local"}, (0, 4096, None))])
def test_a_workload_of_several_kinds_makes_a_model_of_them(asked: Any, kinds: Any) -> None:
    done = npusim.run("layer", workload="gemma2_9b", seq=8192, hw=NPUS, numerics=False, trace_groups=(), **asked)
    model = done.problem
    assert (model.local_layers, model.window, model.local and model.local.window) == kinds
    assert any("42 layers (21 of them local" in note for note in done.notes) == bool(model.local_layers)


@pytest.mark.parametrize(
    ("hw", "problem", "fields"),
    [(NPUS, SMALL, {}), (NPUS, SMALL, {"blocks": 2}), (GPUS, TOKEN, {"offload": "cooperative"})],
)
def test_two_layers_one_after_the_other_take_twice_as_long(hw: str, problem: ModelProblem, fields: Any) -> None:
    device, tiling = load_node_device(hw), LayerTiling(**fields)
    comm = communication(device.node, 8, tiling, problem.hidden, 2)
    one = layer_tasks(problem, tiling, device, comm, tiling.offload)
    shifted = [replace(t, after=tuple(a + len(one) for a in t.after)) for t in one]
    both = [*one, replace(shifted[0], after=(len(one) - 1,)), *shifted[1:]]
    times = [
        time_on_node(task_program("test", 8, tasks, 0, (COMPUTE, comm.queue)), device, "steady")
        for tasks in (one, both)
    ]
    assert times[1].latency_s == pytest.approx(2 * times[0].latency_s, rel=1e-9)
    assert times[1].operations == 2 * times[0].operations


def test_a_frameworks_overhead_is_a_line_of_its_own() -> None:
    plain, slow = timed(), timed(overhead_us=50.0)
    assert slow.latency_s - plain.latency_s == pytest.approx(3 * 50e-6)
    assert slow.parts_s == pytest.approx({**plain.parts_s, OVERHEAD: 3 * 50e-6})


def test_attention_that_is_named_is_simulated_with_its_fields_whatever_the_node_states() -> None:
    """h200_x2 states times of a library's flash attention: no time of scores that go through memory."""
    rows = SMALL.model_copy(update={"ranks": 2, "seq_q": 2048, "seq_kv": 2048})
    stated, flash, standard, eager = (
        timed(rows, "h200_x2", attention=a).parts_s["attention"]
        for a in ("auto", "flash", "standard", "standard:operators=eager")
    )
    assert standard > 1.2 * max(stated, flash)
    assert eager > standard
    tiles = "split_kv:block_kv=256", "split_kv:block_kv=128"
    assert len({timed(TOKEN, NPUS, attention=a).parts_s["attention"] for a in tiles}) == 2
    with pytest.raises(
        TilingError, match=r"standard on one h200: operator: unknown tiling field. Did you mean `operat"
    ):
        timed(rows, "h200_x2", attention="standard:operator=eager")


EXPERTS = Experts(count=16, per_token=2, width=256, dense_layers=1)
MIXED = SMALL.model_copy(update={"experts": EXPERTS, "ranks": 1})


def test_experts_take_the_place_of_the_ffn_where_they_are() -> None:
    time, plain = timed(MIXED, "ascend_910b2"), timed(MIXED.model_copy(update={"experts": None}), "ascend_910b2")
    new = {"router", "top-k", "dispatch", "experts' up", "experts' activation", "experts' down", "combine"}
    assert set(time.parts_s) == set(plain.parts_s) | new
    for part in ("up", "down", "activation"):  # of one dense layer of three
        assert time.parts_s[part] == pytest.approx(plain.parts_s[part] / 3)
    shared = MIXED.model_copy(update={"experts": EXPERTS.model_copy(update={"shared_width": 256})})
    assert set(timed(shared, "ascend_910b2").parts_s) - set(time.parts_s) == {
        "shared up",
        "shared activation",
        "shared down",
    }


def test_as_many_experts_are_read_as_independent_tokens_take() -> None:
    assert [EXPERTS.touched(tokens) for tokens in (1, 2, 8, 1000)] == [2, 4, 11, 16]
    drawn = np.random.default_rng(3)
    taken = [len({e for _ in range(8) for e in drawn.choice(16, 2, replace=False)}) for _ in range(2000)]
    assert np.mean(taken) == pytest.approx(16 * (1 - (1 - 2 / 16) ** 8), rel=0.01)
    # A decoding step reads what its tokens take: more tokens more weights, until all are read.
    wide = MIXED.model_copy(update={"experts": Experts(count=16, per_token=2, width=4096), "layers": 1, "vocab": 0})
    token = wide.model_copy(update={"seq_q": 1, "seq_kv": 128, "causal_offset": 127})
    times = [
        timed(token.model_copy(update={"batch": batch}), "ascend_910b2").parts_s["experts' up"]
        for batch in (1, 4, 64, 128)
    ]
    read = 2 * EXPERTS.count * 1024 * 2 * 4096 / load_device("ascend_910b2").link("hbm").bytes_per_s.value
    assert times[0] < times[1] / 2 < times[2] / 3
    assert times[3] < 1.1 * times[2]
    assert times[2] == pytest.approx(read, rel=0.4)


def test_a_latent_layer_has_its_products_of_low_rank() -> None:
    latent = LatentAttention(q_lora_rank=96, kv_lora_rank=64, nope_head_dim=48, rope_head_dim=16)
    model = MIXED.model_copy(update={"latent": latent, "experts": None})
    assert model.projections() == (("latent", 96 + 64 + 16, 1024), ("q", 128, 96), ("kv", 2 * (48 + 64), 64))
    products = (96 + 80) * 1024 + 128 * 96 + 224 * 64 + 128 * 1024
    assert model.weights().layers == 3 * (products + 3 * 1024 * 2048)
    assert {"latent", "q", "kv"} < set(timed(model, "ascend_910b2").parts_s)
    assert model.flops() == Problem.flops(model) + 2 * 128 * (products + 3 * 1024 * 2048)


def test_row_blocks_hide_the_collectives_of_a_layer() -> None:
    long = SMALL.model_copy(update={"seq_q": 8192, "seq_kv": 8192, "hidden": 4096})
    assert timed(long, blocks=2).latency_s < timed(long).latency_s


def test_one_device_is_a_node_without_collectives() -> None:
    alone = npusim.run("layer", hw="ascend_910b2", workload="llama2_7b", seq=512, phase="decode", numerics=False)
    assert "allreduce" not in alone.timing.parts_s  # type: ignore[union-attr]
    assert alone.problem.seq_q == 1  # type: ignore[union-attr]
    said = " ".join(alone.notes)
    assert "tokens a second, no framework overhead" in said
    assert "6.7 billion parameters" in said


@pytest.mark.parametrize("offload", ["classic", "cooperative"])
def test_offloaded_layers_take_what_each_kind_takes(offload: str) -> None:
    none = TOKEN.model_copy(update={"vocab": 0})
    away, here = timed(none, GPUS, offload=offload, cpu_layers=3), timed(none, GPUS)
    mixed = timed(none, GPUS, offload=offload, gpu_layers=1)
    assert mixed.latency_s == pytest.approx((2 * away.latency_s + here.latency_s) / 3)
    assert {"cooperative": "cpu", "classic": "upload"}[offload] in mixed.parts_s
    assert timed(none, GPUS, offload=offload).latency_s == here.latency_s  # all fit: none is offloaded


def test_in_prefill_offloading_costs_what_the_layer_does_not_hide() -> None:
    plain, fast = timed(hw=GPUS), load_node_device(GPUS, {"pcie.kv_start_s": "0"})
    hidden = timed(hw=fast, offload="cooperative", cpu_layers=3)
    assert hidden.latency_s == plain.latency_s
    assert hidden.parts_s["offload"] > 0
    slow = load_node_device(GPUS, {"pcie.bytes_per_s": "1e6"})
    assert timed(hw=slow, offload="cooperative", cpu_layers=3).latency_s > 2 * plain.latency_s


def test_the_printed_formula_and_the_corrected_one() -> None:
    opt = npusim.run("layer", hw=GPUS, workload="opt_30b", seq=2048, numerics=False).problem
    assert isinstance(opt, ModelProblem)
    machine, capacity = load_node_device(GPUS), 34359738368
    weights, kv = 48 * (8 * 7168**2 + 4 * 7168 * 28672), 4 * 7168 * 2048
    assert opt.weights().layers * 2 == weights
    printed = (8 * capacity - weights - 6 * 2048 * 7168 - 8 * 50272 * 7168) / kv
    assert paper_layers(opt, capacity) == pytest.approx(printed)
    assert printed > 48  # more layers than there are: it is not held between bounds
    found = memory_plan(opt, machine)
    assert found.gpu_layers == 48
    assert found.tenants["vocabulary"] == 2 * 50272 * 7168
    assert found.tenants["intermediates"] == 2 * 2048 * (2 * 7168 + max(4 * 896, 3584))
    assert found.tenants["weights"] == weights // 8
    assert found.kv_bytes == kv // 8
    # Grouped heads: LLaMA2-70B keeps an eighth of what equation 35 says.
    llama = npusim.run("layer", hw=GPUS, workload="llama2_70b", seq=2048, numerics=False).problem
    assert memory_plan(llama, machine).kv_bytes * 8 == 4 * 8192 * 2048 // 8  # type: ignore[arg-type]


def test_the_longest_prompt_just_fits() -> None:
    machine = load_node_device(GPUS)
    opt = npusim.run("layer", hw=GPUS, workload="opt_30b", seq=512, numerics=False).problem
    assert isinstance(opt, ModelProblem)
    for is_offloaded in (False, True):
        tokens = longest(opt, machine, is_offloaded=is_offloaded)
        for more, fits in ((0, True), (1, False)):
            found = memory_plan(opt.model_copy(update={"seq_q": tokens + more, "seq_kv": tokens + more}), machine)
            assert (found.fits if is_offloaded else found.cpu_layers == 0 and found.free_bytes >= 0) == fits


def test_bad_input_names_what_is_wrong_and_what_would_do() -> None:
    def refused(match: str, hw: Any = NPUS, workload: str = "llama2_7b", seq: int = 512, **tiling: Any) -> None:
        with pytest.raises((SpecError, TilingError), match=match):
            npusim.run("layer", hw=hw, workload=workload, seq=seq, tiling=tiling, numerics=False)

    refused(r"3 \+ 2 = 5, but the model has 32 layers", gpu_layers=3, cpu_layers=2)
    refused("gpu_layers: 33, but the model has only 32 layers", gpu_layers=33)
    refused("gpu_layers: K and V of 29 layers are on the host, but offload=none;", gpu_layers=3)
    refused("pcie: missing; offloading needs a link", offload="classic")
    refused("blocks: 17 blocks, but there are only 16 rows", seq=16, blocks=17)
    refused("workload pangu_71b: layers, intermediate: missing", workload="pangu_71b")
    refused(
        r"each device lacks 64.7 GiB; it has 64 GiB: weights 127.5 GiB, .*: 4 devices .*, or weights of 4 bits",
        "ascend_910b2",
        "llama2_70b",
    )
    refused(r"offload of \d+ of 80 layers .*44,436 tokens of one sequence", GPUS, "llama_65b", 65536)
    with pytest.raises(SpecError, match="one query for each sequence; remove it"):
        npusim.run("layer", phase="decode", seq_q=2)
    with pytest.raises(SpecError, match="layers; use it"):
        npusim.run("layer", problem=SMALL, numerics=False).sensitivity()


def largest(p: Any, count: int) -> Any:
    return np.where(p >= np.sort(p, -1)[..., -count, None], p, 0.0)


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200", "v100"])
@pytest.mark.parametrize("what", ["norm", "rotary", "gate", "gelu", "route", "sum", "norm by pieces"])
def test_what_stands_between_products_is_what_float64_says(what: Any, hw: str) -> None:
    is_cut, what = what == "norm by pieces", what.partition(" ")[0]
    heads, rows, cols = (1 if what == "norm" else 2), 20, 600 if is_cut else 48
    device = load_device(hw)
    schedule = find_schedule("rows", device.family)
    parts, fields = {"route": 3, "sum": 2}.get(what, 1), {}
    if is_cut and device.family == "ascend":
        fields = {"piece": 256, "buffers": 1}
    problem = RowsProblem(what=what, heads=heads, rows=rows, cols=cols, parts=parts)
    program = schedule.program(problem, schedule.tiling(**fields), device, schedule.precision())
    check(program)
    draw = np.random.default_rng(5)
    given = {n: draw.standard_normal((heads, rows, cols)).astype(np.float16) for n in ("x", "update", "cos", "sin")}
    added = given if what != "sum" else {"x": np.stack([given["x"], given["update"]])}
    done = execute(program, lambda name, batch, head: added[name][batch, head] if what == "sum" else given[name][head])
    written = {
        n: np.stack([h for _, h in sorted(done.tensors.written(program.tensors[n]).items())])
        for n in program.tensors
        if program.tensors[n].role == "output"
    }
    x, update, cos, sin = (a.astype(np.float64) for a in given.values())
    expected: dict[str, Any] = {
        "norm": lambda: {"y": (x + update) / np.sqrt(np.mean((x + update) ** 2, -1, keepdims=True) + 1e-5)},
        "rotary": lambda: {"sum": x * cos[:1] - update * sin[:1], "y": update * cos[:1] + x * sin[:1]},
        "gate": lambda: {"y": x / (1 + np.exp(-x)) * update},
        "gelu": lambda: {"y": x / (1 + np.exp(-1.702 * x))},
        "route": lambda: {"y": largest(np.exp(x) / np.exp(x).sum(-1, keepdims=True), 3)},
        "sum": lambda: {"y": x + update},
    }
    for name, values in expected[what]().items():
        np.testing.assert_allclose(written[name].reshape(values.shape).astype(float), values, rtol=4e-3, atol=4e-3)


LATENT = ModelProblem.around(
    Problem(heads=16, head_dim=192, value_head_dim=128, seq_q=1, seq_kv=4096, causal=True, causal_offset=4095),
    ranks=8,
    hidden=2048,
    layers=3,
    intermediate=4096,
    latent=LatentAttention(q_lora_rank=1536, kv_lora_rank=512, nope_head_dim=128, rope_head_dim=64),
)


def test_a_cache_of_latents_has_their_bytes_and_decoding_meets_them() -> None:
    """576 elements a token for all heads, where K and V of 16 heads have 5,120."""
    machine, size = load_node_device(NPUS), 4096 * 576 * 2
    prefill = LATENT.model_copy(update={"seq_q": 4096, "causal_offset": 0})
    assert memory_plan(LATENT, machine).kv_bytes == memory_plan(prefill, machine).kv_bytes == size
    assert LATENT.attention.kv_bytes() == size
    assert prefill.attention.kv_bytes() == 4096 * 16 * (192 + 128) * 2
    decoded, filled = timed(LATENT), timed(prefill)
    assert {"q to latents", "latents to v"} <= set(decoded.parts_s)
    assert "kv" not in decoded.parts_s
    assert "kv" in filled.parts_s
    # W_UK and W_UV are multiplied whole on either way: attention alone has more operations on latents.
    products = [p.layer_flops(is_dense=True) - p.attention.flops() for p in (LATENT, prefill)]
    assert products[0] * prefill.rows == products[1]
    assert LATENT.attention.flops() == 2 * 16 * (576 + 512) * 4096
    down = [
        task.op.call
        for task in layer_tasks(prefill, LayerTiling(), load_node_device(GPUS), None, "classic")
        if task.op.label.startswith("offload")
    ]
    assert [call.size_bytes for call in down] == [size]


def test_a_model_of_stored_weights_says_what_its_products_read() -> None:
    load = load_workload("deepseek_v3").model_copy(update={"stored": StoredWeights(bits=8.0)})
    small = load.model_copy(update={"layers": 6, "experts": load.experts.model_copy(update={"dense_layers": 3})})
    result: Any = npusim.run("layer", hw=NPUS, workload=small, phase="decode", seq=4096, numerics=False)
    text = "layers are stored in 8 bits; products use them as bfloat16 (the conversion is not modelled)"
    assert any(text in note for note in result.notes)
    assert not any("latent cache" in note for note in result.notes)
    whole = load_workload("deepseek_v3").model(load.problem(tensor_parallel=8), 8)
    machine = load_node_device(NPUS)
    tenants = memory_plan(load.model(load.problem(tensor_parallel=8), 8), machine).tenants
    assert tenants["weights"] * 2 == memory_plan(whole, machine).tenants["weights"]


def test_rows_that_do_not_fit_twice_have_one_slot_or_are_cut() -> None:
    """A norm of 8,192 columns has one slot a tensor, one beyond 12,288 is cut as well: notes name what is smaller."""
    schedule, device = find_schedule("rows", "ascend"), load_device("ascend_910b2")

    def notes(cols: int, pieces: int = 0, **fields: object) -> tuple[str, ...]:
        problem = RowsProblem(what="norm", rows=64, cols=cols)
        _, program = schedule.fitted(problem, schedule.tiling(**fields), device, schedule.precision())
        check(program)
        assert all(used <= program.spaces[s].capacity_bytes for s, used in program.used_bytes.items())
        assert {block.tile_count for block in program.phases[0].blocks} == {pieces}
        return program.notes

    assert notes(5120) == ()
    assert notes(8192) == (f"buffers=1: {SMALLER}",)
    assert notes(16384, 2) == (f"buffers=1: {SMALLER}",)
    assert notes(12288, 2) == (f"piece=6144: {SMALLER}",)
    assert notes(8192, 2, buffers=2) == (f"piece=6144: {SMALLER}",)
    with pytest.raises(BufferOverflowError, match="UB"):
        notes(8192, buffers=2, piece=12288)


def test_a_model_of_long_rows_runs_on_its_node_and_says_how() -> None:
    """LLaMA2-70B, rows of 8,192 elements: one slot, and with pieces that a user names another time."""
    call: dict[str, Any] = {"hw": NPUS, "workload": "llama2_70b", "seq": 4096, "numerics": False}
    result: Any = npusim.run("layer", **call)
    assert f"norm: buffers=1: {SMALLER}" in result.notes
    cut: Any = npusim.run("layer", tiling={"rows": "rows:piece=4096"}, **call)
    assert not any(SMALLER in note for note in cut.notes)
    assert cut.timing.parts_s["norm"] < result.timing.parts_s["norm"]
    assert cut.timing.parts_s["qkv"] == result.timing.parts_s["qkv"]
    with pytest.raises(SpecError, match="flash on one ascend_910b2: schedule flash needs sizes of attention"):
        npusim.run("layer", tiling={"rows": "flash"}, **call)


@pytest.mark.parametrize("hw", ["h200", "v100"])
def test_a_model_runs_on_one_gpu_and_its_rows_move_their_bytes(hw: str) -> None:
    """No kernel of rows takes less than its bytes take through L2, or more than twice what they take from memory."""
    result: Any = npusim.run("layer", hw=hw, workload="llama2_7b", seq=2048, numerics=False)
    device = load_device(hw)
    p = result.problem
    moved = {
        "norm": RowsProblem(what="norm", rows=p.rows, cols=p.hidden).bytes_moved() * (2 * p.layers),
        "activation": RowsProblem(what="gate", rows=p.rows, cols=p.intermediate).bytes_moved() * p.layers,
        "rotary": RowsProblem(what="rotary", heads=2 * p.heads, rows=p.rows, cols=p.head_dim // 2).bytes_moved()
        * p.layers,
    }
    for name, size in moved.items():
        seconds = result.timing.parts_s[name]
        assert size / device.link("l2").bytes_per_s.value < seconds < 2 * size / device.link("hbm").bytes_per_s.value


def test_a_changed_number_of_one_device_is_judged_for_all_layers_of_a_model() -> None:
    """`without_effect` times the unchanged device, which is a node of its own for a model too."""
    alone = SMALL.model_copy(update={"ranks": 1})
    done = npusim.run("layer", problem=alone, hw="h200", numerics=False, overrides={"clock_hz": 1.5e9})
    assert [n.split(":")[0] for n in done.notes if n.startswith("-C")] == ["-C clock_hz=1500000000.0"]
    assert done.latency_us > timed(alone, "h200").latency_s * 1e6
    listed = periods(alone, LayerTiling(), done.device, PRECISIONS["float16"])
    assert done.program.flops == sum(period.program.flops * period.count for period in listed)


def test_a_node_of_one_keeps_its_device() -> None:
    device = load_device("ascend_910b2")
    alone = NodeDevice.alone(device)
    assert alone.node.device_count.value == 1
    assert alone.each is device
    assert dict(alone.facts()).keys() >= dict(device.facts()).keys()


def test_stated_parameters_have_the_vocabulary_among_them() -> None:
    # Of a model whose parameters are stated all are one tenant or another, none is two.
    stated, machine = SMALL.model_copy(update={"parameters": SMALL.weights().total}), load_node_device(GPUS)
    assert stated.weights().vocabulary > 0
    assert memory_plan(stated, machine) == memory_plan(SMALL, machine)


@pytest.mark.parametrize(
    ("phase", "size", "measured_us"), [("prefill", (1, 4096), 2785.4), ("decode", (16, 2048), 174.5)]
)
def test_a_layer_takes_what_one_that_torch_compiled_takes_in_a_graph(
    phase: str, size: tuple[int, int], measured_us: float
) -> None:
    # Llama-3-8B on one H200, torch 2.11's compiled layer in a CUDA graph (measurements/h200_layer.csv).
    batch, tokens = size
    found = npusim.run("layer", workload="llama3_8b", phase=phase, hw="h200", batch=batch, seq=tokens, numerics=False)
    layer_s = (found.timing.latency_s - found.timing.parts_s["vocabulary"]) / 32
    assert layer_s * 1e6 == pytest.approx(measured_us, rel=0.05)
