"""What kernels do that tiles do not say: runs without barriers, tiles handed over, pieces of k, halves of L0C."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim.config.core_units import VectorEngine
from npusim.config.load import load_device
from npusim.config.problem import GemmProblem, Problem
from npusim.errors import SpecError, TilingError
from npusim.kernels.attention.products import gemm as product
from npusim.library import find_schedule
from npusim.machines.ascend import ascend_pricing
from npusim.machines.ascend.ascend_machine import AscendMachine
from npusim.machines.ascend.ascend_pricing import AscendPricing, vector_cycles
from npusim.machines.ascend.product_plan import FlashTiling, gemm_tiling
from npusim.machines.decisions import AscendDecisions
from npusim.program.ir.op import Opcode, Step
from npusim.program.ir.residency import residency
from npusim.program.ir.tile import GlobalTensor, Tile
from npusim.program.numerics.executor import execute
from npusim.program.timing import METHODS
from npusim.run import run
from npusim.studies.explore import explore
from npusim.studies.validate import validate

if TYPE_CHECKING:
    from npusim.simulation.run_result import RunData


def place(number: int, rows: int = 32, cols: int = 64) -> Tile:
    # 512 B apart and one row of banks further: no two share a group.
    return Tile("aiv0.UB", number * (16384 + 32), rows, cols, cols, "float32")


def cycles(*steps: Step, joins: bool, expands: bool = False) -> int:
    unit = load_device("ascend_910b2").engine("aiv", "VECTOR")
    assert isinstance(unit, VectorEngine)
    decided = AscendDecisions(barriers="needed" if joins else "every", expands=expands)
    return vector_cycles(steps, unit, None, "unit", decided)[0]


def muls(dst: Tile, src: Tile) -> Step:
    return Step(Opcode.MUL, dst, (src, 0.5))


def test_long_instructions_that_depend_on_one_another_are_one_run() -> None:
    # 32 repeats each, 1 a repeat; head 11 and tail 15 once, or each.
    steps = muls(place(1), place(0)), muls(place(2), place(1)), muls(place(3), place(2))
    assert cycles(*steps, joins=True) == 11 + 3 * 32 + 15
    assert cycles(*steps, joins=False) == 3 * (11 + 32 + 15)


def test_a_column_becomes_a_whole_tile_by_a_copy_a_row_where_a_kernel_expands() -> None:
    # 32 copies of one repeat each, 13 cycles apart; without them the column is spread to blocks, 8 rows a repeat.
    steps = [Step(Opcode.MUL, place(1), (place(0), place(2, cols=cols))) for cols in (1, 64)]
    column, whole = ([cycles(s, joins=True, expands=e) for e in (False, True)] for s in steps)
    assert column[1] - column[0] == 11 + 32 * (1 + 13) + 13
    assert whole[1] == whole[0]


def test_short_ones_that_depend_have_a_barrier_and_others_have_none() -> None:
    def short(number: int) -> Tile:
        return place(number, 4)

    # 4 repeats each: behind 4 of its own the first result need not be there yet.
    assert cycles(muls(short(1), short(0)), muls(short(2), short(1)), joins=True) == 2 * (11 + 4 + 15)
    assert cycles(muls(short(1), short(0)), muls(short(3), short(2)), joins=True) == 11 + 2 * 4 + 15
    # 32 others in between are enough.
    between = muls(short(1), short(0)), muls(place(4), place(3)), muls(short(2), short(1))
    assert cycles(*between, joins=True) == 11 + 4 + 32 + 4 + 15


def test_a_reduction_waits_for_what_it_reads_and_each_pass_for_the_one_before() -> None:
    column = Tile("aiv0.UB", 100000, 32, 1, 1, "float32")
    steps = muls(place(1), place(0)), Step(Opcode.ROW_SUM, column, (place(1),))
    # 64 columns: 32 repeats, then 8 values a row 4 repeats; head 14 and tail 20 each.
    assert cycles(*steps, joins=True) == 11 + 32 + 15 + 2 * (14 + 20) + 32 + 4


def test_a_vector_of_rows_costs_count_mode_only_where_barriers_are_as_needed() -> None:
    column, other = (Tile("aiv0.UB", at, 32, 1, 1, "float32") for at in (100000, 100512))
    assert cycles(muls(column, other), joins=True) - cycles(muls(column, other), joins=False) == 16


@pytest.mark.parametrize(("blocks", "crowd"), [(1, 0.0), (24, 1.0), (48, 1.0), (8, 7 / 23), (32, 15 / 23)])
def test_how_many_work_beside_one_is_an_average_over_rounds(blocks: int, crowd: float) -> None:
    # 32 blocks are a round of 24 and one of 8: 16 on average.
    assert ascend_pricing.crowd(blocks, 24) == pytest.approx(crowd)


def flash(**options: Any) -> RunData:
    problem = Problem(heads=24, seq_q=128, seq_kv=4096, head_dim=128)
    return run("flash", problem=problem, numerics=False, trace_groups=(), **options)


def test_a_tile_that_is_handed_over_costs_its_cycles() -> None:
    tiling = {"block_kv": 256, "vector_rows": 32, "kernel": "cann"}
    without = {"flags.tile_cycles": "0", "flags.tile_extra_cycles": "0"}
    free, filed = flash(tiling=tiling, overrides=without), flash(tiling=tiling)
    # CANN's kernel: 1,000 a tile on each of 16 tiles, and no more.
    assert filed.timing is not None and free.timing is not None
    busy = [t.queues[0] for t in (filed.timing, free.timing)]
    more = {u.queue: u.busy_cycles - v.busy_cycles for u, v in zip(*busy, strict=True)}
    assert more["aiv0.VECTOR"] == more["aiv1.VECTOR"] == 16 * 1000
    shared = flash(tiling={**tiling, "together": 2}).timing
    assert shared is not None
    vector = [i for i, u in enumerate(busy[0]) if u.queue == "aiv0.VECTOR"]
    assert [shared.queues[0][i].busy_cycles - busy[1][i].busy_cycles for i in vector] == [8 * 1000]
    terms = flash(tiling={"block_kv": 256, "kernel": "pto"}).timing.term_cycles  # type: ignore[union-attr]
    assert terms["flags.tile_extra_cycles"] == pytest.approx(0.85 * terms["flags.tile_cycles"])


def test_without_a_kernel_a_prefill_is_canns_whatever_tile_is_named_and_a_decode_is_the_presets() -> None:
    machine, presets = AscendMachine(load_device("ascend_910b2")), find_schedule("flash", "ascend").precisions

    def declared(
        precision: str = "fa2_fp32", seq_q: int = 128, seq_kv: int = 4096, head_dim: int = 128, **fields: Any
    ) -> Any:
        problem = Problem(heads=24, seq_q=seq_q, seq_kv=seq_kv, head_dim=head_dim)
        return machine.declared(FlashTiling(**fields), problem, presets[precision])

    cann = {"block_q": 128, "block_kv": 512, "vector_rows": 8, "kernel": "cann", "pipeline": "core", "deal": "balanced"}
    assert cann.items() <= dict(declared()).items()
    assert declared(vector_rows=16).vector_rows == 16
    assert declared(order="serial").pipeline is None
    assert cann.items() <= dict(declared(block_kv=512)).items()
    assert declared(block_kv=256).vector_rows == 16  # slices of as many elements
    assert declared(seq_kv=128).block_kv == 128
    assert [declared(seq_kv=128, head_dim=d).vector_rows for d in (256, 128, 64, 16)] == [32, 32, 64, 128]
    assert declared(block_kv=1024).vector_rows == 4
    for other in (declared(kernel="pto"), declared(seq_q=1), declared("fa16_32")):
        assert (other.kernel, other.vector_rows, other.pipeline) in {(None, None, None), ("pto", None, None)}


def test_the_task_of_canns_attention_is_longer_than_that_of_others() -> None:
    launch = load_device("ascend_910b2").timed_launch()
    assert launch.attention_s is not None
    assert launch.task_all_s is not None
    for kernel, task in (("cann", launch.attention_s), ("pto", launch.task_all_s)):
        timing = flash(tiling={"block_kv": 256, "kernel": kernel}).timing
        assert timing is not None
        of_task = timing.times_s["kernel"] - timing.times_s["core"]
        assert of_task == pytest.approx(float(task.value), rel=0.05)
        assert timing.times_s["call"] - timing.times_s["core"] == pytest.approx(float(launch.kernel_overhead_s.value))


def test_a_whole_depth_in_l1_is_loaded_once_for_all_tiles_of_a_core_that_share_it() -> None:
    share = {"block_m": 64, "block_n": 64, "block_k": 64, "single_n": 256}
    loaded, again = (gemm(k=512, load_a=depth, load_b=64, **share) for depth in (512, 256))
    held = gemm(k=512, full_load="a", load_b=64, slots_l1a=2, **share)
    assert loaded.cycles == held.cycles < again.cycles
    (one, two) = (r.timing.link_bytes["l2"] for r in (loaded, again))  # type: ignore[union-attr]
    assert two - one == 512 * 512 * 2 * (512 // 64 - 512 // 256)  # A's bytes, for each tile of n or for each share


def gemm(m: int = 512, n: int = 512, k: int = 1024, **tiling: Any) -> RunData:
    return run("gemm", problem=GemmProblem(m=m, n=n, k=k), tiling=tiling, numerics=False, trace_groups=())


def test_larger_pieces_of_k_make_fewer_and_longer_rows() -> None:
    small, large = gemm(load_k=64), gemm(load_k=256)
    keys = [f"cores.aic.engines.MTE2.routes.gm_l1.{part}" for part in ("row_cycles", "burst_overhead_cycles")]
    spent = [sum(r.timing.term_cycles.get(key, 0) for key in keys) for r in (small, large)]  # type: ignore[union-attr]
    assert spent[0] > 1.2 * spent[1]
    assert large.cycles < small.cycles


@pytest.mark.parametrize(("columns", "requests"), [(16, 1), (64, 1), (80, 2), (112, 2), (128, 1), (192, 2), (208, 3)])
def test_a_row_cut_into_fractals_goes_as_requests_of_512_256_and_128_bytes_and_the_rest(
    columns: int, requests: int
) -> None:
    # Rows of B, 256 of them, as each of 24 cores or one of them takes its columns.
    b = GlobalTensor("b", 1, 1, 256, 24 * columns, "float16", "input")
    a, c = replace(b, name="a", rows=16, cols=256), replace(b, name="c", rows=16, role="output")
    load = Step(Opcode.COPY, Tile("aic.L1", 0, 256, columns, columns, "float16"), (b.tile(0, 0, 0, 256, 0, columns),))
    spent = {}
    for count in ("1", "24"):
        device = load_device("ascend_910b2", {"group_count": count})
        machine, phase = AscendMachine(device), product("gemm", a, b, c, (16, columns))
        tiling = gemm_tiling(phase, {"block_m": 16, "block_n": columns, "block_k": 16}, machine.group)
        cost = AscendPricing(machine.build("gemm", [(phase, tiling)], 0), device).of_step(load, "aic", "MTE2")
        spent[count] = dict(cost.terms).get("cores.aic.engines.MTE2.routes.gm_l1.request_cycles", 0)
        if count == "24" and requests > 1:
            assert cost.occupancy_cycles == ceil(255 * 4 * requests)
    assert spent["1"] == 0
    assert (spent["24"] > 0) == (requests > 1)  # rows from HBM take 5.2 in any case


def test_a_piece_that_is_no_multiple_is_refused() -> None:
    with pytest.raises(TilingError, match="load_k: 96 is not a multiple of block_k=64"):
        gemm(load_k=96)


def test_halves_of_l0c_drain_while_the_other_adds_up() -> None:
    # Warm and of little depth: draining 128 x 256 counts.
    whole, halves = gemm(4096, 2048, 128), gemm(4096, 2048, 128, unit_flag="true")
    assert halves.cycles < whole.cycles
    assert gemm(200, 300, 100, unit_flag="true").cycles > 0  # ragged


def test_swizzled_blocks_touch_less_of_a_product_beyond_l2() -> None:
    # A and B of 256 MiB: a row of tiles at a time streams all of B again and again.
    plain, eight = gemm(16384, 16384, 8192), gemm(16384, 16384, 8192, swizzle=8)
    assert plain.timing is not None and eight.timing is not None
    assert eight.timing.link_bytes["hbm"] < 0.6 * plain.timing.link_bytes["hbm"]


@pytest.mark.parametrize("operators", ["added", "eager", "eager_float32"])
@pytest.mark.parametrize("causal", [True, False])
def test_eager_operators_give_the_same_values_and_take_longer(causal: bool, operators: str) -> None:
    problem = Problem(heads=2, kv_heads=1 if causal else 2, seq_q=197, head_dim=64, causal=causal)
    fused = run("standard", problem=problem, rows="all", heads="all", trace_groups=())
    asked: dict[str, Any] = {"eager": True} if operators == "eager" else {"tiling": {"operators": operators}}
    eager = run("standard", problem=problem, rows="all", heads="all", trace_groups=(), **asked)
    assert np.array_equal(fused.output, eager.output)
    softmax = ["widen", "softmax", "narrow"] if operators == "eager_float32" else ["softmax"]
    mask = ["mask"] if operators == "added" else ["clone", "mask"]
    assert [p.name for p in eager.program.phases] == [
        *(["k_repeated", "v_repeated"] if causal else []),
        "scores",
        "scale",
        *(mask if causal else []),
        *softmax,
        "values",
    ]
    is_more = len(eager.program.phases) > len(fused.program.phases)
    assert eager.latency_us > fused.latency_us if is_more else eager.latency_us == fused.latency_us


def test_eager_products_take_each_head_in_one_piece() -> None:
    problem = Problem(heads=2, seq_q=64, head_dim=64, layout="bsnd")
    fused, eager = (run("standard", problem=problem, eager=e, rows="all", trace_groups=()) for e in (False, True))
    assert np.array_equal(fused.output, eager.output)
    copies = [p.name for p in eager.program.phases if p.name.endswith("_contiguous")]
    assert copies == ["q_contiguous", "k_contiguous", "v_contiguous", "o_contiguous"]


def test_only_standard_is_eager() -> None:
    with pytest.raises(SpecError, match="--eager: schedule flash is one kernel; standard runs operator by operator"):
        flash(eager=True)


SHARES: dict[str, Any] = {"single_m": 256, "single_n": 512, "load_a": 64, "load_b": 128, "slots_l0c": 1}
WHOLE: dict[str, Any] = {"single_m": 256, "block_m": 64, "full_load": "a", "slots_l1a": 1, "slots_l1b": 1}


@pytest.mark.parametrize("tiling", [{"unit_flag": "true"}, {"load_k": 64, "swizzle": 2}, SHARES, WHOLE, {}])
def test_all_methods_agree_on_products_with_such_fields_and_bits_stay(tiling: dict[str, Any]) -> None:
    done, plain = gemm(300, 600, 300, **tiling).program, gemm(300, 600, 300, block_k=64).program  # rows off 256 bytes
    rng = np.random.default_rng(1)
    inputs = {
        n: rng.standard_normal(shape).astype(np.float16) for n, shape in {"a": (300, 300), "b": (300, 600)}.items()
    }
    c, expected = (execute(p, lambda n, *_: inputs[n]).tensors.head(p.tensors["c"], 0, 0) for p in (done, plain))
    assert np.array_equal(c, expected)
    device = load_device("ascend_910b2")
    found = {name: METHODS[name](done, device).cycles for name in ("des", "block", "fold", "steady")}
    assert len(set(found.values())) == 1, found


def test_a_share_is_a_core_s_and_what_it_keeps_is_loaded_once() -> None:
    def l2_bytes(**tiling: Any) -> int:
        timing = gemm(1024, 1024, 512, block_m=64, block_n=128, **tiling).timing
        assert timing is not None
        return timing.link_bytes["l2"]

    share = {"single_m": 256, "single_n": 256}
    assert len(gemm(1024, 1024, 512, **share).program.phases[0].blocks) == 16
    # 16 shares of 4 x 2 tiles: A once a panel of N, B once a band of M, C once.
    mib = 2**20
    assert l2_bytes(**share) == (8 + 16 + 2) * mib
    assert l2_bytes(**share, full_load="b", load_a=64) == (8 + 4 + 2) * mib
    assert l2_bytes(**share, full_load="both") == (4 + 4 + 2) * mib


@pytest.mark.parametrize(("k", "measured_us"), [(1024, 8.45), (768, 6.49), (512, 4.416)])
def test_short_rows_that_begin_inside_a_block_cost_the_loads_of_a_core(k: int, measured_us: float) -> None:
    """Products of CANN's tuning bank, on one core: 16 columns are stored, the true number is at most 15."""
    piece = 96 if k == 768 else 128  # the records' own
    tiling: dict[str, Any] = {"block_k": piece, "load_a": piece, "full_load": "b"}
    slots = {"block_m": 16, "block_n": 16, "slots_l1a": 1, "slots_l0a": 1}

    def core_us(columns: int) -> float:
        problem = GemmProblem(m=16, n=columns, k=k)
        timing = run("gemm", problem=problem, tiling=tiling | slots, numerics=False, trace_groups=(), l2="warm").timing
        assert timing is not None
        return timing.cycles / timing.clock_hz * 1e6

    assert core_us(15) == pytest.approx(measured_us, rel=0.07)
    assert core_us(16) < measured_us / 2


def test_what_a_share_reads_again_is_in_l2() -> None:
    """Of 4096^3 in 4 x 8 shares a core has 8 x 2 tiles: it waits for A once of twice, for B once of eight times."""
    problem = GemmProblem(m=4096, n=4096, k=4096, dtype="mxfp8_e5m2", operands="nt")
    tiling = {"block_m": 128, "block_n": 256, "block_k": 128, "single_m": 1024, "single_n": 512}
    program = run("gemm", hw="ascend_950", problem=problem, tiling=tiling, numerics=False, trace_groups=()).program
    held = residency(program, 32, 2**27, True)
    assert (held.read_waits["a"], held.read_waits["b"], held.write_misses["c"]) == (1 / 2, 1 / 8, 0.0)
    assert (held.read_misses["a"], held.read_misses["b"]) == (1 / 16, 1 / 32)
    # Where C does not fit beside A and B, more of it is written back before the end.
    pushed = [residency(program, 32, size, True).write_pushes["c"] for size in (2**25, 2**27)]
    assert 0.2 < pushed[0] < 1 and pushed[1] == 0
    whole = run(
        "gemm", problem=GemmProblem(m=1024, n=1024, k=512), tiling=WHOLE, numerics=False, trace_groups=()
    ).program
    assert residency(whole, 24, 2**27).read_waits["a"] == 1  # a share's rows of A are loaded once


def test_published_products_in_mxfp8_are_met() -> None:
    """pto-isa 3186c38: 2048^3 to 8192^3 on 32 cores; no constant was fitted on them."""
    file = Path(__file__).parents[2] / "reports" / "ascend_950" / "measured_cann.yaml"
    found = [r for r in validate(file, only="mxfp8*").residuals if r.quantity == "latency_us"]
    assert len(found) == 4
    assert all(abs(r.relative_error) < 0.1 and not r.is_fitted for r in found), found


@pytest.mark.parametrize(
    ("tiling", "message"),
    [
        ({"load_b": 96}, "load_b: 96 is not a multiple of block_k=64"),
        ({"load_a": 192, "load_b": 128}, "load_a: 192 must be a multiple of load_b=128, or the reverse"),
    ],
)
def test_pieces_that_do_not_nest_are_refused(tiling: dict[str, Any], message: str) -> None:
    with pytest.raises(TilingError, match=message):
        gemm(**tiling)


def test_operands_in_fractals_have_no_rows_and_rows_off_256_bytes_are_rearranged_by_vector_cores() -> None:
    def cycles_of(k: int, operands: str = "nd", **tiling: Any) -> int:
        problem = GemmProblem(m=1024, n=1024, k=k, operands=operands)
        return run("gemm", problem=problem, tiling=tiling, numerics=False, trace_groups=()).cycles

    assert cycles_of(1024, "nz") < cycles_of(1024)
    named = {"block_m": 128, "block_n": 256, "block_k": 64}
    # The kernel is CANN's whatever tile is named, and rearranges; else rows of 1365 float16 come as they lie.
    assert cycles_of(1365) < 0.7 * cycles_of(1365, nd2nz="mte2", **named)
    assert cycles_of(1365) == cycles_of(1365, **named) == cycles_of(1365, nd2nz="vector", **named)
    assert cycles_of(1024) == cycles_of(1024, nd2nz="vector")  # on 256 bytes
    launch_us = [
        run("gemm", problem=GemmProblem(m=1024, n=1024, k=k), numerics=False).timing.launch_us for k in (1024, 1365)
    ]
    assert launch_us[0] == pytest.approx(launch_us[1])  # in one launch
    # A search takes what nobody named as in a plain run, whichever tile it tries.
    problem = GemmProblem(m=1024, n=1024, k=1365)
    found = explore("gemm", {"block_m": [64, 128]}, problem=problem, exhaustive=True)
    assert [o.cycles for o in found.outcomes] == [cycles_of(1365, block_m=m, nd2nz="vector") for m in (64, 128)]
    assert found.outcomes[1].cycles == cycles_of(1365)
    problem = GemmProblem(m=64, n=64, k=64, operands="nz")
    with pytest.raises(TilingError, match="operands=nz: h200 has no fractals; allowed: nd"):
        run("gemm", hw="h200", problem=problem, numerics=False, trace_groups=())
