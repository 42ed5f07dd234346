"""A node with its device as one machine: what ``--hw``, ``-C``, searches and reports take."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING

import pytest

import npusim
from npusim.config.load import load_device, load_workload
from npusim.config.node_file import NodeDevice, NodeSpec, load_machine
from npusim.config.problem import CopyProblem, LayerProblem, Problem
from npusim.errors import SpecError, TilingError
from npusim.machines.node.node_program import KernelWork
from npusim.report.output import save_run
from npusim.report.result_json import load_result
from npusim.simulation.request import Request
from npusim.simulation.sensitivity import sensitivity
from tests.node.conftest import assumed, changed
from tests.node.test_simulate import US, node_time

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from npusim.simulation.run_result import RunData

    Run = Callable[..., RunData]

pytestmark = pytest.mark.usefixtures("declared_tiles")

LAYER = LayerProblem.around(Problem(heads=2, seq_q=512, head_dim=64), hidden=256, ranks=2)


def test_machine_is_a_device_or_a_node_with_its_device() -> None:
    assert not isinstance(load_machine("ascend_910b2"), NodeDevice)
    machine = load_machine("ascend_910b2_x8")
    assert isinstance(machine, NodeDevice)
    assert machine.family == "node"
    assert machine.each == load_device("ascend_910b2")
    keys = [key for key, _ in machine.facts()]
    assert {"clock_hz", "node.links.hccs.bytes_per_s"} < set(keys)
    assert len(keys) == len(set(keys))
    assert not any(key.startswith("each") for key in keys)


def test_overrides_reach_both_files() -> None:
    changes = {
        "links.hccs.bytes_per_s": "56e9",
        "node.drivers.sdma.engine_count": "14",
        "clock_hz": "1e9",
        "links.hbm.bytes_per_s": "1e12",
    }
    machine = load_machine("ascend_910b2_x8", changes)
    assert isinstance(machine, NodeDevice)
    assert machine.node.links["hccs"].bytes_per_s.value == 56e9
    assert machine.node.drivers["sdma"].engine_count.value == 14
    assert machine.each.clock_hz.value == 1e9
    assert machine.each.links["hbm"].bytes_per_s.value == 1e12
    again = load_machine(machine, {"links.hccs.bytes_per_s": "7e9"})
    assert isinstance(again, NodeDevice)
    assert again.each == machine.each
    assert again.links["hccs"].bytes_per_s.value == 7e9
    other = load_machine(machine, {"device": "ascend_910b4"})
    assert isinstance(other, NodeDevice)
    assert other.each.name == "ascend_910b4"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("links.hccs.bytes_per_s", "0", "greater than 0"),
        ("links.hcc.bytes_per_s", "1e9", "no key 'hcc'"),
        ("drivers.sdma.engines", "1", "no key 'engines'"),
    ],
)
def test_faulty_overrides_name_their_key(key: str, value: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_machine("ascend_910b2_x8", {key: value})


def test_request_of_a_search_on_a_node_pickles() -> None:
    request = Request("tiling_allreduce", hw=load_machine("h200_x2"), workload=load_workload("pangu_38b"))
    assert pickle.loads(pickle.dumps(request)) == request


def test_search_finds_what_a_run_finds_and_keeps_what_does_not_fit() -> None:
    fields = {"blocks": [1, 2, 2000], "first_share": [0.25]}
    found = npusim.explore("tiling_allreduce", fields, hw="h200_x2", problem=LAYER)
    assert [o.status for o in found.outcomes] == ["ok", "ok", "infeasible"]
    assert "2000 blocks, but there are only 512 rows" in found.outcomes[2].reason
    tiling = {"blocks": 2, "first_share": 0.25}
    alone = npusim.run("tiling_allreduce", hw="h200_x2", problem=LAYER, tiling=tiling)
    assert found.outcomes[1].latency_us == alone.latency_us


def test_sensitivity_changes_a_constant_of_either_file() -> None:
    problem = CopyProblem(bytes=1 << 24)
    result = npusim.run("allreduce", hw="h200_x2", problem=problem, numerics=False)
    moved = {s.key: s for s in sensitivity(result)}
    rate = moved["node.drivers.sm.modes.simple.local_bytes_per_s"]
    # 8 of 16 MiB are only copied, at 1 TB/s: 8.4 of 88 us; a fifth less bandwidth is a quarter more time for them.
    assert rate.lower == pytest.approx(0.25 * 8.4 / 88, rel=0.05)
    assert rate.higher < 0


@pytest.mark.parametrize("option", ["heads", "arithmetic", "diagnose"])
def test_options_of_one_devices_values_are_refused(option: str) -> None:
    with pytest.raises(
        SpecError, match=f"{option}: (a node's ranks run all heads|these options are for kernels on one device)"
    ):
        npusim.run("tiling_allreduce", hw="h200_x2", **{option: (1,)})  # type: ignore[arg-type]


def test_seed_is_refused_where_no_attention_is_computed() -> None:
    with pytest.raises(SpecError, match="seed: these options are for schedules of attention"):
        npusim.run("allreduce", problem=CopyProblem(bytes=8), seed=1)


def test_schedule_of_nodes_on_one_device_says_what_to_do() -> None:
    with pytest.raises(SpecError, match="a node is several devices: --hw ascend_910b2_x8"):
        npusim.run("tiling_allreduce", hw="ascend_910b2")


@pytest.mark.parametrize("schedule", ["tiling_allreduce", "gemm_allreduce", "allreduce"])
def test_schedule_of_nodes_is_for_a_node_unless_told_otherwise(schedule: str) -> None:
    result = npusim.run(schedule, seq=1024, trace_groups=(), numerics=False)
    assert result.device.name == "ascend_910b2_x8"


# ---------------------------------------------------------------- any ranks, any shape


@pytest.mark.parametrize("ranks", [2, 3, 7, 16, 64])
def test_layer_on_any_number_of_ranks(mesh: NodeSpec, run_node: Run, ranks: int) -> None:
    node = changed(mesh, device_count=assumed(ranks))
    layer = LayerProblem.around(Problem(heads=1, seq_q=256, head_dim=64), hidden=96, ranks=ranks)
    result = run_node("tiling_allreduce", node, layer, blocks=2)
    assert len(result.timing.queues) == ranks
    assert 0 < result.timing.exposed_s < result.timing.latency_s


@pytest.mark.parametrize(
    ("batch", "tokens", "dim", "hidden", "blocks"),
    [(1, 77, 48, 100, 3), (3, 130, 128, 40, 4), (2, 9, 16, 17, 18), (1, 1, 64, 64, 1)],
)
def test_layer_of_any_shape_with_ragged_blocks(
    run_node: Run, batch: int, tokens: int, dim: int, hidden: int, blocks: int
) -> None:
    problem = Problem(batch=batch, heads=2, seq_q=tokens, head_dim=dim, causal=True)
    layer = LayerProblem.around(problem, hidden=hidden, ranks=8)
    result = run_node("tiling_allreduce", "ascend_910b2_x8", layer, blocks=blocks)
    # The mesh carries an eighth of every block's sums over each link, twice; shards may be a byte apart.
    sums = batch * tokens * hidden * 2
    assert result.timing.link_bytes["hccs"] == pytest.approx(2 * sums / 8, abs=2 * blocks)
    with pytest.raises(TilingError, match="only"):
        run_node("tiling_allreduce", "ascend_910b2_x8", layer, blocks=batch * tokens + 1)


# ---------------------------------------------------------------- the result


def test_result_keeps_overlap_and_reads_older_ones(tmp_path: Path) -> None:
    result = npusim.run("tiling_allreduce", hw="h200_x2", problem=LAYER, trace_groups=(0, 1))
    folder = save_run(result, tmp_path / "run")
    kept = load_result(folder).timing
    assert kept is not None
    assert kept.overlap is not None
    assert kept.overlap.exposed_s * 1e6 == result.timing.exposed_s * 1e6
    assert kept.overlap.modes == ("ring by sm (ll)", "ring by sm (ll)")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    named = [e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")]
    assert named == ["npu0", "npu1", "COMPUTE", "COLLECTIVE", "COMPUTE", "COLLECTIVE"]
    document = json.loads((folder / "result.json").read_text())
    del document["timing"]["overlap"]
    (folder / "result.json").write_text(json.dumps(document))
    older = load_result(folder).timing
    assert older is not None
    assert older.overlap is None


def test_parts_of_a_change_add_up(mesh: NodeSpec) -> None:
    time = node_time(mesh, 4, KernelWork(1000 * US, 5 * US, 0), "sdma")
    assert time.alone_s == pytest.approx(4 * 1005e-6)
    assert time.running_s[0] == pytest.approx(time.alone_s)
    assert time.exposed_s == pytest.approx(time.latency_s - time.running_s[0], rel=1e-4)


def test_approximation_of_a_kernel_is_the_nodes(mesh: NodeSpec) -> None:
    rough = KernelWork(US, 0, 0, methods=("reserved",), band=0.01)
    time = node_time(mesh, 2, rough, "sdma")
    assert time.method == "node-des over reserved"
    assert time.band == 0.01


def test_methods_are_exact_alike(mesh: NodeSpec) -> None:
    layer = LayerProblem.around(Problem(heads=2, seq_q=256, head_dim=64), hidden=128, ranks=8)
    load = load_workload("pangu_38b")
    times = [
        npusim.run("tiling_allreduce", hw=mesh, workload=load, problem=layer, method=m, numerics=False).timing
        for m in ("des", "steady")
    ]
    assert len({t.latency_s for t in times if t is not None}) == 1
