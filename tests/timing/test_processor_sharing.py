"""Warp groups beside one another: every method's cycles, values that no tiling of time moves, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from simpy.core import Environment

import npusim
from npusim.config.load import load_device
from npusim.config.problem import CopyProblem, GemmProblem, Problem
from npusim.errors import TilingError
from npusim.machines.sm.sm_pricing import cold_reads
from npusim.program.ir.tile_program import Share
from npusim.program.numerics.executor import execute
from npusim.program.timing.gpu_pipes import ONE, ProcessorSharing, Rules
from npusim.program.timing.stream import Streams

METHODS = ("des", "block", "fold", "steady", "auto")
EXHAUSTIVE = pytest.mark.exhaustive
SILICON = Path(__file__).parents[2] / "reports" / "silicon"
#: One wave and a bit of few heads: some cores with two blocks, some with one.
SIZES = {"batch": 1, "heads": 40, "kv_heads": 20, "seq_q": 256, "seq_kv": 288, "head_dim": 64}


def cycles(schedule: str, method: str, dtype: str, causal: bool, **tiling: int) -> int:
    problem = Problem(**SIZES, causal=causal, dtype=dtype)
    how = {"hw": "h200", "problem": problem, "tiling": tiling, "method": method}
    return npusim.run(schedule, numerics=False, trace_groups=(), **how).cycles


@pytest.mark.parametrize(
    ("schedule", "causal", "tiling"),
    [
        ("flash", False, {"block_q": 64, "block_kv": 32, "stages": 1, "warps": 4}),
        ("flash", True, {"block_q": 64, "block_kv": 64, "stages": 2, "warps": 8}),
        ("flash", False, {"block_q": 128, "block_kv": 32, "stages": 3, "warps": 8}),
        pytest.param("flash", True, {"block_q": 32, "block_kv": 32, "stages": 2, "warps": 4}, marks=EXHAUSTIVE),
        pytest.param("flash", False, {}, marks=EXHAUSTIVE),
        pytest.param("pasa", False, {"block_q": 64, "block_kv": 32, "stages": 2, "warps": 4}, marks=EXHAUSTIVE),
        ("fp8_attention", False, {"block_q": 64, "block_kv": 32, "stages": 3, "warps": 8}),
        ("split_kv", False, {"splits": 3, "block_kv": 32, "stages": 2, "warps": 4}),  # memory catches up
    ],
)
def test_all_methods_give_the_same_cycles(schedule: str, causal: bool, tiling: dict[str, int]) -> None:
    dtype = "float8_e4m3fn" if schedule == "fp8_attention" else "float16"
    found = {cycles(schedule, method, dtype, causal, **tiling) for method in METHODS}
    assert len(found) == 1


def test_stages_warps_and_registers_change_time_and_no_bit() -> None:
    problem = Problem(batch=1, heads=2, kv_heads=1, seq_q=150, seq_kv=200, head_dim=64, causal=True, dtype="float16")
    tilings = [
        {"stages": 1},
        {"stages": 2},
        {"stages": 3, "warps": 8},
        {},
        {"stages": 2, "registers": 255, "spilled_registers": 90},
    ]
    runs = [
        npusim.run("flash", hw="h200", problem=problem, tiling={"block_q": 64, "block_kv": 64, **t}, rows="all", seed=3)
        for t in tilings
    ]
    assert len({r.output.tobytes() for r in runs}) == 1
    assert len({r.cycles for r in runs}) == len(runs)


def test_work_beside_other_work_goes_as_fast_as_what_all_ask_for_allows() -> None:
    ends: dict[str, int] = {}
    env = Environment()
    room = ProcessorSharing(env, Rules(ONE, ONE // 2, ONE, 0))

    def begin(name: str, share: Share) -> None:
        room.join(share, lambda: ends.__setitem__(name, int(env.now)))

    begin("lone", Share(False, 100, issue=ONE // 2))
    env.run()
    assert ends.pop("lone") == 100
    # Three half slots are one and a half: two thirds of the speed.
    for name in "abc":
        begin(name, Share(False, 100, issue=ONE // 2))
    env.run()
    assert ends == pytest.approx({"a": 250, "b": 250, "c": 250}, abs=1)
    # Two products that each fill the tensor cores take turns.
    ends.clear()
    for name in "ab":
        begin(name, Share(True, 100, tensor=ONE))
    env.run()
    assert ends == pytest.approx({"a": 450, "b": 450}, abs=2)
    # A product of 100 cycles beside arithmetic of half a slot: both at two thirds until it ends, 150 later.
    ends.clear()
    begin("product", Share(True, 100, tensor=ONE))
    begin("arithmetic", Share(False, 200, issue=ONE // 2))
    env.run()
    assert ends == pytest.approx({"product": 600, "arithmetic": 700}, abs=3)


def test_products_slow_arithmetic_of_one_or_several_groups_down_by_the_same_share() -> None:
    # Without products one softmax takes 100 cycles, two that share the special functions 140; beside them 1.61 of that.
    rules = Rules(0, 0, 0, round(0.61 * ONE))
    for count, alone in ((1, 100), (2, 140)):
        ends: dict[str, int] = {}
        env = Environment()
        room = ProcessorSharing(env, rules)
        room.join(Share(True, 400, tensor=ONE), lambda env=env, ends=ends: ends.__setitem__("product", int(env.now)))
        for name in "ab"[:count]:
            share = Share(False, 100, issue=ONE // 2, special=round(0.7 * ONE))
            room.join(share, lambda name=name, env=env, ends=ends: ends.__setitem__(name, int(env.now)))
        env.run()
        assert ends["product"] == 400  # which keeps its speed
        assert ends["a"] == pytest.approx(1.61 * alone, abs=2)


def test_what_does_not_fit_says_how_much_and_what_would() -> None:
    def fault(**tiling: int) -> str:
        problem = Problem(batch=1, heads=1, kv_heads=1, seq_q=512, seq_kv=512, head_dim=128, causal=False)
        with pytest.raises(TilingError) as error:
            npusim.run("flash", hw="h200", problem=problem, tiling=tiling, numerics=False)
        return str(error.value)

    said = fault(block_q=128, block_kv=256, stages=4)
    assert "shared memory: tiles 544 KiB = 544 KiB > 227 KiB of a block" in said
    assert "largest values that fit" in said
    assert "stages: 5 must be at most 4" in fault(stages=5)
    assert "or 2040 with spilled ones" in fault(block_q=512, block_kv=512, stages=1)
    assert "residents: 9 blocks, but" in fault(block_q=64, block_kv=64, stages=2, residents=9)


def test_fields_of_lanes_have_no_effect_there_and_are_refused() -> None:
    with pytest.raises(TilingError, match="padding: no effect on h200"):
        npusim.run("flash", hw="h200", problem=Problem(**SIZES, causal=False), tiling={"padding": 4}, numerics=False)


@pytest.mark.parametrize("tiling", [{}, {"block_m": 64, "block_n": 64, "splits": 3}, {"block_k": 32, "stages": 2}])
def test_a_product_of_a_library_is_the_product_and_its_time_that_of_every_method(tiling: dict[str, int]) -> None:
    problem = GemmProblem(m=200, n=136, k=300)
    runs = [npusim.run("gemm", hw="h200", problem=problem, tiling=tiling, numerics=False, method=m) for m in METHODS]
    assert len({r.cycles for r in runs}) == 1
    rng = np.random.default_rng(5)
    given = {"a": rng.normal(size=(200, 300)), "b": rng.normal(size=(300, 136))}
    given = {name: values.astype(np.float16) for name, values in given.items()}
    done = execute(runs[0].program, lambda name, _batch, _head: given[name])
    exact = given["a"].astype(float) @ given["b"].astype(float)
    (found,) = (x for _, x in sorted(done.tensors.written(runs[0].program.tensors["c"]).items()))
    assert np.abs(found.astype(float) - exact).max() < 0.04


def test_a_copy_takes_what_memory_takes_and_is_a_copy() -> None:
    small = npusim.run("copy", hw="h200", problem=CopyProblem(bytes=1 << 16), tiling={"block_bytes": 4096})
    bytes_of = np.random.default_rng(7).integers(-128, 128, size=(16, 4096)).astype(np.int8)
    done = execute(small.program, lambda *_: bytes_of)
    ((_, copied),) = done.tensors.written(small.program.tensors["target"]).items()
    assert (copied == bytes_of).all()
    device, size = load_device("h200"), 2 << 30
    large = npusim.run("copy", hw="h200", problem=CopyProblem(bytes=size), numerics=False)
    assert large.latency_us == pytest.approx(2 * size / float(device.link("hbm").bytes_per_s.value) * 1e6, rel=0.05)
    problem = CopyProblem(bytes=1 << 20)
    runs = [npusim.run("copy", hw="h200", problem=problem, numerics=False, method=m) for m in METHODS]
    assert len({r.cycles for r in runs}) == 1


def test_products_of_8_bits_draw_the_power_of_their_cycles() -> None:
    """Twice the operations in as many cycles: the clock falls as for float16, not as for twice the load."""
    clocks = {}
    for fmt in ("float16", "float8_e4m3fn"):
        problem = GemmProblem(m=8192, n=8192, k=8192, dtype=fmt)  # type: ignore[arg-type]
        took = npusim.run("gemm", hw="h200", problem=problem, numerics=False, trace_groups=())
        clocks[fmt] = took.timing.clock_hz / 1e9
    assert clocks["float8_e4m3fn"] == pytest.approx(clocks["float16"], rel=0.03)
    assert clocks["float8_e4m3fn"] > 1.5  # 1.183 GHz where its load was taken for 1.7 of the peak


def test_products_that_load_the_tensor_cores_lower_the_clock() -> None:
    device = load_device("h200").clocked(1)
    assert device.sustained(0, 1.0, {}) == 1.0
    assert device.sustained(10**12, 1.0, {}) == 1.0
    assert 0.7 < device.sustained(900 * 10**12, 1.0, {}) < device.sustained(700 * 10**12, 1.0, {}) < 1.0
    short = 20e-6  # however short a call is, and whatever its cores that have no block would have done
    paces = [
        device.sustained(10**9, short, {"sm.TENSOR": round(load * short * device.clock_hz.value)})
        for load in (0.6, 0.68, 0.86, 0.92)
    ]
    assert paces == pytest.approx([1, 1 / 1.05, 1 / 1.1, 1 / 1.15], abs=0.025)  # as normal numbers and zeros measure it


def test_the_clock_falls_while_products_run_and_only_then() -> None:
    measured = json.loads((SILICON / "clocks.json").read_text())["kernels"]
    device = load_device("h200")
    running = device.clocked(1)
    for name in ("products of zeros", "products on one multiprocessor", "products on 33 multiprocessors"):
        assert running.clock_hz.value / 1e6 == pytest.approx(measured[name]["second"], rel=0.01)
    assert device.clock_hz.value / 1e6 == pytest.approx(measured["products"]["before"], rel=0.01)
    assert device.clocked(0).clock_hz is device.clock_hz
    assert load_device("a100").clocked(1).clock_share == 1.0  # nobody measured its clock
    problem, copies = Problem(**SIZES), CopyProblem(bytes=1 << 20)
    product = npusim.run("flash", hw="h200", problem=problem, numerics=False)
    copy = npusim.run("copy", hw="h200", problem=copies, numerics=False)
    assert product.timing.clock_hz == running.clock_hz.value
    assert copy.timing.clock_hz == device.clock_hz.value
    quick = load_device("h200", {"products_clock_hz": device.clock_hz.value})
    faster = npusim.run("flash", hw=quick, problem=problem, tiling=product.tiling, numerics=False)
    assert 1.0 < product.latency_us / faster.latency_us < 1.98 / 1.805


def test_blocks_of_a_multiprocessor_take_turns_where_their_loops_multiply_in_warp_groups() -> None:
    def starts(schedule: str, **tiling: int) -> list[set[int]]:
        problem = Problem(**{**SIZES, "heads": 160, "kv_heads": 160}, dtype="float16")
        made = npusim.run(schedule, hw="h200", problem=problem, numerics=False, tiling=tiling, trace_groups=())
        streams = Streams(made.program, made.device)
        return [set(streams.starts(phase)) for phase in made.program.phases]

    device = load_device("h200")
    begin, late = (
        device.timed_launch().block_dispatch_cycles.value,
        device.core("sm").engines["TENSOR"].wgmma.turn_cycles,
    )
    of_four = {begin + late.value * turn for turn in range(4)}
    assert starts("flash", block_q=64, block_kv=64, stages=2, warps=4) == [of_four]
    # What is multiplied once has no turns; nor have products of single warps, and merges.
    first, second = starts("pasa", block_q=64, block_kv=64, stages=2, warps=4)
    assert first == {begin}
    assert second >= of_four
    assert starts("split_kv", splits=2, block_kv=64, stages=2, warps=4) == [{begin}, {begin}]


def test_blocks_on_keys_of_their_own_wait_for_memory_and_those_on_a_heads_keys_for_a_while() -> None:
    def missed(schedule: str, **sizes: int) -> dict[str, float]:
        problem = Problem(**{**SIZES, "kv_heads": sizes.get("heads", 40), **sizes}, dtype="float16")
        tiling = {"block_q": 64, "block_kv": 64, "stages": 2, "warps": 4} if schedule != "split_kv" else {"splits": 4}
        made = npusim.run(schedule, hw="h200", problem=problem, numerics=False, tiling=tiling, trace_groups=())
        return cold_reads(made.program, load_device("h200").core("sm").engines["WARPS"].sharing.in_step_count.value)

    def attention(heads: int, seq_q: int, keys: int) -> float:
        return missed("flash", heads=heads, seq_q=seq_q, seq_kv=keys)["k"]

    assert attention(2, 4096, 4096) == 1  # one wave of 64 tiles
    assert attention(2, 4096, 8192) == 0.5  # the first 64 of 128
    assert 0 < attention(64, 4096, 4096) < 0.15  # sixteen waves: later ones find it, or are out of step
    assert missed("split_kv", seq_q=1, seq_kv=4096)["k"] == 1  # nobody else reads it
    assert set(missed("pasa", seq_q=256, seq_kv=256)) == {"M64", "k", "q", "v"}  # K' has just been written


def test_a_tile_arrives_as_measured() -> None:
    """Of an H200, in cycles at the full clock: the first copy until the first of two tiles is there (arrival.py)."""
    found = json.loads((SILICON / "arrival_h200.json").read_text())
    rows = [dict(zip(found["about"]["names"], row, strict=True)) for row in found["rows"]]
    device = load_device("h200")
    route, sharing = device.core("sm").engines["LDG"].routes["stage"], device.core("sm").engines["WARPS"].sharing
    barrier = sharing.barrier_cycles.value + 4 * sharing.barrier_warp_cycles.value
    for row in (row for row in rows if row["blocks"] == 1 and row["work"]):
        arrived = row["tile_bytes"] / route.bytes_per_cycle.value + route.latency_cycles.value + barrier
        missed = device.memory.l2.miss_extra_latency_cycles.value * ("memory" in row["way"])
        assert arrived + missed == pytest.approx(row["first"], rel=0.12), row
