"""Time of node programs: collectives against their closed form, kernels under claims, overlap."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

import npusim
from npusim.config.load import load_device, load_workload
from npusim.config.node_file import NodeSpec, load_machine, load_node
from npusim.config.problem import CopyProblem, GemmProblem, LayerProblem, Problem
from npusim.errors import NpusimError, SpecError, TilingError
from npusim.kernels.declare.node_define import row_pieces
from npusim.machines.node.collective import CollectiveCall, plan_collective
from npusim.machines.node.node_machine import progress_rate
from npusim.machines.node.node_program import (
    Child,
    Communication,
    KernelWork,
    NodeKernel,
    RowBlock,
    Waves,
    cut_rows,
    node_program,
)
from npusim.machines.node.node_simulation import simulate
from npusim.machines.node.topology import Topology
from npusim.studies.explore import explore
from tests.node.conftest import assumed, changed

if TYPE_CHECKING:
    from collections.abc import Callable

    from npusim.machines.node.collective import Algorithm
    from npusim.machines.node.node_result import NodeTiming
    from npusim.simulation.run_result import RunData

    Run = Callable[..., RunData]

pytestmark = pytest.mark.usefixtures("declared_tiles")

US = 10**9  # femtoseconds a microsecond
MIB = 1 << 20
KERNEL = NodeKernel("linear", (Child("gemm", GemmProblem(m=16, n=16, k=16)),))


def node_time(
    node: NodeSpec, blocks: int, work: KernelWork, driver: str, size: int = 8 * MIB, ranks: int = 8
) -> NodeTiming:
    """Return the time of equal blocks of one kernel and one collective of ``size`` bytes in all."""
    algorithm: Algorithm = "mesh" if Topology(node).is_full_mesh else "ring"
    comm = Communication(driver, algorithm, size // blocks)
    rows = [RowBlock(i, 1, (KERNEL,)) for i in range(blocks)]
    program = node_program("test", ranks, rows, comm, 0)
    return simulate(program, node, load_device(node.device), lambda _: work, ranks=ranks, trace_groups=(0,))


# ---------------------------------------------------------------- collectives


@pytest.mark.parametrize("algorithm", ["mesh", "ring", "halving_doubling"])
@pytest.mark.parametrize("size", [8, 4096, 64 * MIB])
@pytest.mark.parametrize("driver", ["sdma", "aiv"])
def test_simulated_collective_equals_its_closed_form_where_nothing_else_runs(
    mesh: NodeSpec, run_node: Run, algorithm: str, size: int, driver: str
) -> None:
    result = run_node("allreduce", mesh, CopyProblem(bytes=size), collective=driver, algorithm=algorithm)
    assert result.timing.allreduce_s == pytest.approx(result.timing.closed_form_s, rel=1e-3)


def test_mesh_time_by_hand(mesh: NodeSpec, run_node: Run) -> None:
    # Two rounds of an eighth of the message by one stream of 19.6 GB/s, 2.6 us start and 0.5 us latency.
    seconds = 20e-6 + 2 * (2.6e-6 + 0.5e-6 + MIB / 8 / 19.6e9)
    result = run_node("allreduce", mesh, CopyProblem(bytes=MIB))
    assert result.latency_us == pytest.approx(seconds * 1e6, rel=1e-6)


def test_ring_uses_one_link_of_a_mesh_and_pays_seven_times_the_rounds(mesh: NodeSpec, run_node: Run) -> None:
    times = {
        a: run_node("allreduce", mesh, CopyProblem(bytes=64 * MIB), algorithm=a).latency_us for a in ("mesh", "ring")
    }
    assert 6 < times["ring"] / times["mesh"] < 8


def test_allreduce_is_a_reduce_scatter_and_an_all_gather(mesh: NodeSpec, run_node: Run) -> None:
    kinds = {
        k: run_node("allreduce", mesh, CopyProblem(bytes=8 * MIB), kind=k).latency_us
        for k in ("allreduce", "reduce_scatter", "all_gather")
    }
    # One start-up less than the two of them apart.
    both = kinds["reduce_scatter"] + kinds["all_gather"]
    assert kinds["allreduce"] == pytest.approx(both - 20.0, rel=1e-6)


def test_transfers_share_a_link_that_two_of_them_cross(run_node: Run) -> None:
    # Four devices in a chain of links: the ring's last transfer goes back over all of them.
    chain = {"model": "edges", "edges": [[0, 1], [1, 2], [2, 3]]}
    mesh = load_node("ascend_910b2_x8")
    link = mesh.links["hccs"].model_dump() | chain
    node = changed(mesh, device_count=assumed(4), links__hccs=link)
    call = CollectiveCall("allreduce", "mesh", "sdma", 8 * MIB)
    plan = plan_collective(node, Topology(node), call)
    result = run_node("allreduce", node, CopyProblem(bytes=8 * MIB), algorithm="mesh")
    # The middle link carries four shards a round: 0 and 1 to 2 and 3.
    assert result.timing.link_bytes["hccs"] == 2 * 4 * 2 * MIB
    assert result.timing.allreduce_s == pytest.approx(plan.closed_form.seconds(8 * MIB), rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 3, 5, 16, 64])
def test_any_number_of_ranks(mesh: NodeSpec, run_node: Run, ranks: int) -> None:
    node = changed(mesh, device_count=assumed(ranks))
    assert run_node("allreduce", node, CopyProblem(bytes=1000)).latency_us > 20


def test_cluster_of_4096_is_one_server_and_a_ring_between_servers(mesh: NodeSpec, run_node: Run) -> None:
    one = run_node("allreduce", mesh, CopyProblem(bytes=64 * MIB))
    all_of_them = run_node("allreduce", mesh, CopyProblem(bytes=64 * MIB), servers=512)
    # 2 (s - 1) rounds of 2.6 us start, 1.5 us latency and 1/512 of 8 MiB at 25 GB/s.
    between = 2 * 511 * (2.6e-6 + 1.5e-6 + 8 * MIB / 512 / 25e9) * 1e6
    assert all_of_them.latency_us == pytest.approx(one.latency_us + between, rel=1e-4)
    assert any("4096 devices: one server is simulated for 512" in note for note in all_of_them.notes)


# ---------------------------------------------------------------- kernels and claims


def test_rate_is_what_is_left_over_what_is_needed() -> None:
    assert progress_rate((("aiv", 0.4),), {"aiv": 0.5}) == 1.0
    assert progress_rate((("aiv", 0.8),), {"aiv": 0.5}) == 0.5 / 0.8
    assert progress_rate((("aiv", 0.8), ("hbm", 1.0)), {"aiv": 0.5, "hbm": 0.75}) == 0.25
    assert progress_rate((("aiv", 1.0),), {"aiv": 2.0}) == 0.01


def test_copy_engines_leave_compute_alone_and_cores_do_not(mesh: NodeSpec) -> None:
    work = KernelWork(2000 * US, 0, 0, (("aiv", 1.0),))
    sdma, aiv = (node_time(mesh, 2, work, d) for d in ("sdma", "aiv"))
    # The second block's 2000 us run beside the first collective; only half of the AIV are left.
    slower = aiv.queues[0][0].busy_cycles - sdma.queues[0][0].busy_cycles
    assert slower / 1800 == pytest.approx(aiv.queues[0][1].busy_cycles / 1800 / 2 / 2, rel=0.01)


def test_overlap_hides_all_but_the_last_block(mesh: NodeSpec) -> None:
    work = KernelWork(1000 * US, 0, 0)
    alone, tiled = (node_time(mesh, n, work, "sdma") for n in (1, 4))
    assert alone.exposed_s == pytest.approx(alone.allreduce_s, rel=1e-3)
    assert tiled.latency_s == pytest.approx(4e-3 + tiled.allreduce_s / 4, rel=1e-3)
    assert tiled.overlap_efficiency == pytest.approx(0.75, abs=0.01)
    assert alone.overlap_efficiency == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("blocks", "start"),
    # All cores have two blocks; 112 have one, and 20 are too few for 24; 92 of two, and 40 of one are left by then.
    [(264, 200), (112, 120), (224, 120), (80, 0)],
)
def test_collective_waits_for_cores_that_no_block_is_on(pair: NodeSpec, blocks: int, start: int) -> None:
    waves = Waves(blocks, 100 * US, 2, 132, 1.2)
    time = node_time(with_beside(pair, 1.0), 2, KernelWork(waves.whole_fs, 0, 0, (), (waves,)), "sm", ranks=2)
    first = next(s.end for s in time.spans if s.queue == "npu.COMPUTE")
    collective = next(s for s in time.spans if s.queue == "npu.COLLECTIVE")
    assert (collective.end - first) / 1980 == pytest.approx(start + time.closed_form_s / 2 * 1e6, abs=1)


def test_blocks_beside_a_collective_are_slower(pair: NodeSpec) -> None:
    waves = Waves(80, 1000 * US, 2, 132)
    work = KernelWork(waves.whole_fs, 0, 0, (), (waves,))
    slow, fast = (node_time(with_beside(pair, factor), 2, work, "sm", ranks=2) for factor in (1.5, 1.0))
    lost = slow.queues[0][0].busy_cycles - fast.queues[0][0].busy_cycles
    # What runs while a collective moves bytes, not while it starts, gets two thirds of its work done.
    start_s = pair.drivers["sm"].modes["simple"].start_s.value
    assert lost / 1.98e9 == pytest.approx((fast.closed_form_s / 2 - start_s) / 3, rel=0.02)


def test_a_collective_that_is_first_on_one_device_holds_its_cores_until_the_other_begins_it(pair: NodeSpec) -> None:
    # Ten waves of 132 blocks; on 108 of the cores they are 12.2, and the collective ends after the tenth.
    waves = Waves(1320, 100 * US, 1, 132)
    time = node_time(with_beside(pair, 1.0), 2, KernelWork(waves.whole_fs, 0, 0, (), (waves,)), "sm", ranks=2)
    first, last = (queues[0].busy_cycles / 1.98e9 * 1e6 for queues in time.queues)
    assert last == pytest.approx(2000, abs=1)
    assert first == pytest.approx(2200, abs=101)
    assert first > last + 99


def with_beside(node: NodeSpec, factor: float) -> NodeSpec:
    return changed(node, drivers__sm__beside_factor=assumed(factor))


def test_host_that_issues_slower_than_the_device_works_decides(pair: NodeSpec) -> None:
    time = node_time(pair, 8, KernelWork(1 * US, 0, 100 * US), "sm", ranks=2)
    # Eight kernels of 100 us and eight collectives of 20 + 14 us to issue, then the last collective.
    assert time.latency_s * 1e6 == pytest.approx(8 * 134 + 12, abs=4)
    assert "host" in time.queues[0][0].stalls


# ---------------------------------------------------------------- row blocks


@pytest.mark.parametrize(("total", "blocks", "share"), [(4096, 4, None), (5416, 3, 0.2), (7, 7, None), (1000, 2, 0.1)])
def test_blocks_cover_all_rows_once(total: int, blocks: int, share: float | None) -> None:
    cut = cut_rows(total, blocks, share)
    assert len(cut) == blocks
    assert cut[0][0] == 0
    assert all(a + n == b for (a, n), (b, _) in pairwise(cut))
    assert sum(n for _, n in cut) == total


def test_small_first_block_is_cut_finer_than_attention_blocks() -> None:
    # 5 % of 1024 rows are none of 128, so the cuts leave that grain; the others keep it where they can.
    assert cut_rows(1024, 3, 0.05) == [(0, 51), (51, 487), (538, 486)]
    assert cut_rows(1024, 3, 0.25) == [(0, 256), (256, 384), (640, 384)]


def test_more_blocks_than_rows_are_refused() -> None:
    with pytest.raises(TilingError, match="blocks: 9 blocks, but there are only 8 rows"):
        cut_rows(8, 9, None)


@pytest.mark.parametrize("causal", [True, False])
def test_pieces_of_rows_attend_the_same_pairs_as_the_whole(causal: bool) -> None:
    problem = Problem(batch=3, heads=2, seq_q=300, head_dim=16, causal=causal)
    pieces = [p for row, rows in cut_rows(900, 4, 0.1) for p in row_pieces(problem, row, rows)]
    assert sum(p.batch * p.seq_q for p in pieces) == 900
    assert sum(p.batch * p.attended_pairs() for p in pieces) == 3 * problem.attended_pairs()


def test_heads_that_ranks_do_not_divide_are_refused(run_node: Run) -> None:
    load = load_workload("pangu_38b")
    with pytest.raises(SpecError, match="tensor_parallel: 7 does not divide 40 query heads; possible:"):
        load.problem(tensor_parallel=7)
    layer = LayerProblem.around(Problem(heads=2, seq_q=128, head_dim=64), hidden=256, ranks=16)
    with pytest.raises(TilingError, match="tensor_parallel: 16 ranks, but ascend_910b2_x8 has 8 devices"):
        run_node("tiling_allreduce", "ascend_910b2_x8", layer)


def test_search_finds_that_tiling_pays_and_that_too_many_blocks_do_not(mesh: NodeSpec) -> None:
    # The shortest length that FastAttention's section 5.2.2 prints a gain of.
    layer = LayerProblem.around(Problem(heads=5, seq_q=2048, head_dim=128, causal=True), hidden=5120, ranks=8)
    found = explore("tiling_allreduce", {"blocks": [1, 2, 8]}, hw=load_machine(mesh), problem=layer)
    us: dict[Any, float] = {o.point["blocks"]: o.latency_us or 0 for o in found.feasible}
    assert us[2] < us[1]
    assert us[2] < us[8]


def test_one_block_has_no_first_share(mesh: NodeSpec) -> None:
    layer = LayerProblem.around(Problem(heads=5, seq_q=256, head_dim=128, causal=True), hidden=5120, ranks=8)
    fields = {"blocks": [1, 2], "first_share": [0.25, 0.5]}
    found = explore("tiling_allreduce", fields, hw=load_machine(mesh), problem=layer)
    us: dict[Any, float] = {tuple(o.point.values()): o.latency_us or 0 for o in found.feasible}
    assert us[1, 0.25] == us[1, 0.5]
    assert us[2, 0.25] != us[2, 0.5]


def test_timeline_has_both_tracks_of_every_traced_device(mesh: NodeSpec) -> None:
    layer = LayerProblem.around(Problem(heads=1, seq_q=512, head_dim=64), hidden=256, ranks=8)
    result = npusim.run(
        "tiling_allreduce",
        hw=mesh,
        workload=load_workload("pangu_38b"),
        problem=layer,
        trace_groups=(0, 7),
        numerics=False,
    )
    assert result.timing is not None
    tracks = {(s.group, s.queue): [] for s in result.timing.spans}  # type: ignore[var-annotated]
    for span in result.timing.spans:
        tracks[span.group, span.queue].append(span)
    assert set(tracks) == {(g, f"npu.{q}") for g in (0, 7) for q in ("COMPUTE", "SDMA")}
    for spans in tracks.values():
        assert all(a.end <= b.start for a, b in pairwise(spans))
    assert [s.label for s in tracks[0, "npu.SDMA"]] == ["allreduce 0", "allreduce 1"]


def test_every_busy_cycle_rests_on_a_named_constant(run_node: Run) -> None:
    layer = LayerProblem.around(Problem(heads=2, seq_q=512, head_dim=128), hidden=512, ranks=2)
    result = run_node("tiling_allreduce", "h200_x2", layer)
    facts = {key for key, _ in result.device.facts()}
    assert set(result.timing.term_cycles) <= facts
    busy = sum(u.busy_cycles for uses in result.timing.queues for u in uses)
    assert sum(result.timing.term_cycles.values()) == pytest.approx(busy, rel=1e-6)
    assert result.timing.method == "node-des over fitted kernels"


def test_node_schedules_take_their_part_of_a_workload_and_refuse_other_problems(run_node: Run) -> None:
    # 4096 tokens of 5120 float16, 5 of 40 heads of 128 on each of eight devices.
    assert run_node("allreduce", "ascend_910b2_x8").problem.bytes == 4096 * 5120 * 2
    layer = LayerProblem.around(Problem(heads=2, seq_q=128, head_dim=64), hidden=256, ranks=8)
    gemm = run_node("gemm_allreduce", "ascend_910b2_x8", layer, blocks=1).problem
    assert (gemm.m, gemm.n, gemm.k) == (128, 256, 128)
    with pytest.raises(SpecError, match="tiling_allreduce needs a layer of a workload, not a CopyProblem"):
        run_node("tiling_allreduce", "ascend_910b2_x8", CopyProblem(bytes=8))


def test_a_product_with_its_allreduce_is_canns_fused_kernel_where_the_node_has_it(run_node: Run) -> None:
    layer = LayerProblem.around(Problem(heads=2, seq_q=512, head_dim=64), hidden=1024, ranks=8)
    own, copies = (run_node("gemm_allreduce", "ascend_910b2_x8", layer, **t) for t in ({}, {"collective": "sdma"}))
    begun = own.device.node.driver("mc2").call_s.value
    assert own.timing.cycles == copies.timing.cycles
    assert own.timing.latency_s - copies.timing.latency_s == pytest.approx(begun)
    assert any("352.0 us for the call of the driver (call_s)" in note for note in own.notes)
    assert not any("call_s" in note for note in copies.notes)
    assert "mc2" not in str(run_node("allreduce", "ascend_910b2_x8").timing.modes)


def test_siblings_refuse_a_layer_for_fewer_devices_than_they_run_on(run_node: Run) -> None:
    layer = LayerProblem.around(Problem(heads=2, seq_q=128, head_dim=64), hidden=256, ranks=4)
    for name in ("allreduce", "gemm_allreduce"):
        with pytest.raises(SpecError, match=f"4 ranks, but {name} runs on all 8 devices"):
            run_node(name, "ascend_910b2_x8", layer)


def test_collective_carries_the_format_of_the_partial_sums(mesh: NodeSpec) -> None:
    layer = LayerProblem.around(Problem(heads=2, seq_q=128, head_dim=64, dtype="bfloat16"), hidden=256, ranks=8)
    load = load_workload("pangu_38b")
    for precision, size in ((None, 2), ("float32", 4)):
        result = npusim.run("allreduce", hw=mesh, workload=load, problem=layer, precision=precision, numerics=False)
        assert result.problem.bytes == 128 * 256 * size
        assert result.precision == (precision or "bfloat16")


def test_bound_covers_kernels_as_well_as_links(mesh: NodeSpec, run_node: Run) -> None:
    layer = LayerProblem.around(Problem(heads=2, seq_q=2048, head_dim=128), hidden=512, ranks=8)
    time = run_node("tiling_allreduce", mesh, layer).timing
    assert set(time.bound_cycles) == {"hccs", "kernels"}
    assert 0 < time.bound_cycles["kernels"] <= time.queues[0][0].busy_cycles
    # Equal blocks: the bound is what they take with every core busy to the end.
    table = run_node("tiling_allreduce", "h200_x2", layer.model_copy(update={"ranks": 2})).timing
    assert 0 < table.bound_cycles["kernels"] < table.queues[0][0].busy_cycles


def test_chunks_and_collectives_share_the_port_between_servers(mesh: NodeSpec, run_node: Run) -> None:
    """Two chunks in flight move no faster between servers than one message does."""
    piece = {"chunk_bytes": assumed(32 * MIB), "chunks_in_flight_count": assumed(4)}
    stream = mesh.drivers["sdma"].modes["stream"].model_dump() | piece
    slow = changed(mesh, between__bytes_per_s=assumed(2.5e9))
    chunked = changed(slow, drivers__sdma__modes__stream=stream)
    whole, pieces = (
        run_node("allreduce", node, CopyProblem(bytes=256 * MIB), servers=4).latency_us for node in (slow, chunked)
    )
    between = 2 * 3 / 4 * 32 * MIB / 2.5e9 * 1e6
    within = run_node("allreduce", mesh, CopyProblem(bytes=256 * MIB)).latency_us
    assert whole == pytest.approx(within + between, rel=0.01)
    assert pieces == pytest.approx(whole, rel=0.02)


def test_kernels_without_a_model_or_a_host_are_refused_by_name(mesh: NodeSpec, run_node: Run) -> None:
    layer = LayerProblem.around(Problem(heads=2, seq_q=128, head_dim=64), hidden=256, ranks=8)
    with pytest.raises(NpusimError, match="ascend_910b2_x8: foo on one ascend_910b2: unknown schedule"):
        run_node("tiling_allreduce", mesh, layer, attention="foo")
    alone = changed(load_node("h200_x2"), host=None)
    with pytest.raises(SpecError, match="h200_x2: host: missing"):
        run_node("tiling_allreduce", alone, layer.model_copy(update={"ranks": 2}))


def test_collective_that_takes_more_cores_than_there_are_is_refused(mesh: NodeSpec, run_node: Run) -> None:
    node = changed(mesh, drivers__aiv__engine_count=assumed(49))
    with pytest.raises(SpecError, match=r"drivers\.aiv\.engine_count: 49, but ascend_910b2 has 48 aiv"):
        run_node("allreduce", node, CopyProblem(bytes=8), collective="aiv")
