"""A vector unit with registers: published cycles of vector functions, and FlashAttention Lite's versions (dav-3510)."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from ir.toy import flatten

import npusim
from npusim.config.core_units import RegisterVectorEngine
from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.errors import NpusimError
from npusim.formats import reduce_sum
from npusim.machines.ascend.registers import function_cycles
from npusim.machines.decisions import VectorCode
from npusim.program.ir.op import Attributes, Opcode, Step
from npusim.program.ir.tile import Tile

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.usefixtures("declared_tiles")

O = Opcode


class Bench:
    """Tiles that do not overlap, and steps on them."""

    def __init__(self) -> None:
        self.end = 0
        self.steps: list[Step] = []

    def tile(self, rows: int, cols: int, fmt: str = "float32") -> Tile:
        self.end += rows * cols * 4
        return Tile("aiv0.UB", self.end, rows, cols, cols, fmt)

    def step(self, name: str, opcode: Opcode, *srcs: Tile | float, fmt: str = "float32", order: str = "") -> Tile:
        tiles = [s for s in srcs if isinstance(s, Tile)]
        cols = 1 if opcode in (O.ROW_MAX, O.ROW_SUM) else max(t.cols for t in tiles)
        dst = self.tile(tiles[0].rows, cols, fmt)
        self.steps.append(Step(opcode, dst, srcs, Attributes(order=order), name))
        return dst


def cycles(bench: Bench, functions: str, layout: str, chains: int, leaves: Sequence[str]) -> int:
    spec = load_device("ascend_950").engine("aiv", "VECTOR")
    assert isinstance(spec, RegisterVectorEngine)
    code = VectorCode(functions, layout, chains, frozenset(leaves), blocks=True)  # type: ignore[arg-type]
    total, terms = function_cycles(tuple(bench.steps), spec, "VECTOR", code)
    assert total == pytest.approx(sum(c for _, c in terms), abs=1)
    return total


def axpy() -> int:
    b = Bench()
    x, y = b.tile(305, 64), b.tile(305, 64)
    b.step("z", O.ADD, b.step("t", O.MUL, x, 2.0), y)
    return cycles(b, "stages", "nd", 1, ["z"])


def columns(opcode: Opcode, *, at_once: bool) -> int:
    """78 rows of four registers, reduced along the rows: one register after the other, or all four side by side."""
    b = Bench()
    parts = [b.tile(256, 78)] if at_once else [b.tile(64, 78) for _ in range(4)]
    for i, part in enumerate(parts):
        b.step(f"m{i}", opcode, part, order="sequential" if opcode is O.ROW_SUM else "")
    return cycles(b, "fused", "dn", 1, [s.name for s in b.steps])


def row_maximum() -> int:
    b = Bench()
    b.step("m", O.ROW_MAX, b.tile(78, 256))
    return cycles(b, "stages", "nd", 1, ["m"])


def gelu() -> int:
    b = Bench()
    x = b.tile(128, 64)
    cube = b.step("c", O.MUL, b.step("b", O.MUL, b.step("a", O.MUL, x, x), 0.044715), x)
    e = b.step("f", O.EXP, b.step("e", O.MUL, b.step("d", O.ADD, cube, x), -1.6))
    b.step("o", O.DIV, x, b.step("g", O.ADD, e, 1.0))
    return cycles(b, "stages", "nd", 1, ["o"])


def additions() -> int:
    b = Bench()
    for i in range(20):
        b.step(f"c{i}", O.ADD, b.tile(64, 64), b.tile(64, 64))
    return cycles(b, "calls", "nd", 1, [s.name for s in b.steps]) // 20


# Sources: cann-samples a934ed9 (simd_vf_story; hardware_features/vector_function), asc-devkit 0da921b9
# (bank_conflict_3510, whose counter is read as tenths).  A row's maximum within a register: masks are not modelled.
@pytest.mark.parametrize(
    ("predicted", "published", "within"),
    [
        (axpy, 625, 0.10),
        (lambda: columns(O.ROW_MAX, at_once=False), 510, 0.10),
        (lambda: columns(O.ROW_MAX, at_once=True), 358, 0.10),
        (lambda: columns(O.ROW_SUM, at_once=False), 757, 0.10),
        (row_maximum, 699, 0.15),
        (gelu, 782, 0.10),
        (additions, 133, 0.10),
    ],
    ids=[
        "a x + y",
        "maximum, one chain",
        "maximum, four",
        "sum, one chain",
        "row maximum",
        "GELU",
        "add, back to back",
    ],
)
def test_vector_functions_take_the_published_cycles(predicted, published, within):
    assert predicted() == pytest.approx(published, rel=within)


@pytest.mark.parametrize("layout", ["dn", "nd"])
def test_a_tile_that_is_too_long_to_make_again_is_stored_and_loaded(layout):
    """A soft cap's tanh, whose maximum is needed before what is made of both, beside many other stores."""
    times = []
    others = [f"o{i}" for i in range(20)]
    for leaves in (["d", *others], ["t", "d", *others]):
        b = Bench()
        t = b.step("t", O.TANH, b.tile(64, 128))
        for name in others:
            b.step(name, O.ADD, t, 1.0)
        b.step("d", O.SUB, t, b.step("m", O.ROW_MAX, t))
        times.append(cycles(b, "fused", layout, 4, leaves))
    assert times[0] == times[1]


def test_a_mask_costs_most_along_columns_and_comparisons_cost_something():
    """Cycles of a causal call whose mask is made of indices, read row by row, or gathered."""
    took = {}
    for mask, layout in (("computed", "nd"), ("cut", "nd"), ("computed", "dn"), ("cut", "dn")):
        fields = {**TILE, "depth": 4, "deal": "balanced", "mask": mask, "layout": layout}
        shape = {"batch": 8, "seq": 512, "causal": True, "tiling": fields}
        took[mask, layout] = npusim.run("flash", hw="ascend_950", workload="pangu_38b", **shape, numerics=False).cycles
    assert took["computed", "dn"] < took["computed", "nd"] <= took["cut", "nd"] < took["cut", "dn"]


def test_tanh_takes_as_long_an_element_in_float16_as_in_float32():
    times = {}
    for fmt in ("float16", "float32"):
        b = Bench()
        b.step("t", O.TANH, b.tile(512, 128, fmt), fmt=fmt)
        times[fmt] = cycles(b, "fused", "nd", 4, ["t"])
    assert times["float16"] == pytest.approx(times["float32"], rel=0.15)


#: Milliseconds of 131,072 queries and keys, one head of 128, BF16, on 32 cores: cann-samples a934ed9,
#: Samples/2_Performance/flash_attn_lite_story, and the fields in which its versions differ.
LADDER = {
    "v1": ({"depth": 1, "order": "serial", "slots": 1, "route": "gm", "vector": "stages", "chains": 1}, 139.645),
    "v3": ({"depth": 2, "order": "groups", "slots": 1, "vector": "stages", "chains": 1}, 75.4138),
    "v5": ({"depth": 2, "order": "groups", "slots": 2, "vector": "stages", "chains": 1}, 46.97451),
    "v8 unfused": ({"depth": 4, "vector": "stages", "chains": 1}, 29.51072),
    "v8": ({"depth": 4}, 21.26384),
}
TILE = {"block_q": 128, "block_kv": 128, "vector_rows": 64}


def lite(tiling: dict[str, object], seq: int, **more: object) -> npusim.Result:
    """FlashAttention Lite's problem with ``seq`` queries and keys, five heads for one."""
    shape = {"batch": 1, "seq": seq, "causal": False, "dtype": "bfloat16"}
    return npusim.run("flash", hw="ascend_950", workload="pangu_38b", tiling={**TILE, **tiling}, **shape, **more)


def test_versions_of_flash_attention_lite_are_settings_of_one_schedule():
    measured = {name: ms for name, (_, ms) in LADDER.items()}
    # A block of n tiles takes n a + b cycles: two lengths give both, a core has five heads' blocks of each.
    times = {}
    for name, (tiling, _) in LADDER.items():
        short, long = (lite(tiling, n * 128 * 32, numerics=False).cycles / 5 / n for n in (1, 2))
        a = (long - short) / 32
        times[name] = 32 * (short + (1024 - 32) * a) / 1.65e9 * 1e3
    for name, ms in measured.items():
        assert times[name] == pytest.approx(ms, rel=0.05 if name == "v8" else 0.10), name
    names = list(LADDER)
    for before, after in pairwise(names):
        ratio = times[before] / times[after] / (measured[before] / measured[after])
        assert ratio == pytest.approx(1.0, abs=0.12), (before, after)


def test_orders_slots_and_routes_leave_bits_alone_and_chains_do_not():
    bits = {}
    for name, (tiling, _) in LADDER.items():
        result = lite(tiling, 512, rows=[0, 300], method="des")
        assert result.cycles == lite(tiling, 512, numerics=False, method="steady").cycles, name
        bits[name] = [block.tobytes() for block in result.numerics.rows.values()]
    assert bits["v1"] == bits["v3"] == bits["v5"] == bits["v8 unfused"] != bits["v8"]


def test_four_chains_are_every_fourth_element_and_then_two_by_two():
    x = np.random.default_rng(5).normal(size=(7, 131)).astype(np.float32)
    chains = np.zeros((7, 4), np.float32)
    for i in range(x.shape[1]):
        chains[:, i % 4] = x[:, i] if i < 4 else chains[:, i % 4] + x[:, i]
    expected = (chains[:, 0] + chains[:, 1]) + (chains[:, 2] + chains[:, 3])
    assert reduce_sum(x, "float32", "four_chains").tobytes() == expected.tobytes()
    assert reduce_sum(x[:, :1], "float32", "four_chains").tolist() == x[:, 0].tolist()


def test_no_cost_is_of_a_mechanism_that_the_device_lacks():
    device = load_device("ascend_950")
    known, older = {key for key, _ in device.facts()}, {key for key, _ in load_device("ascend_910b2").facts()}
    for vector in ("fused", "stages", "calls"):
        program = lite({"vector": vector}, 512, numerics=False).program
        prices = program.pricing(program, device)
        operations = [op for phase in program.phases for block in phase.blocks for op in flatten(phase.body(block))]
        read = {key for op in operations for key, _ in prices.of_op(op).terms}
        assert read <= known, read - known
        assert any("function.startup_cycles" in key for key in read)
    # Head, slope and tail of an instruction, banks of UB, tiles handed over in global memory.
    assert {"flags.tile_cycles", "flags.tile_extra_cycles"} <= older - known
    assert not {key for key in known if "VECTOR" in key} & older - {
        "cores.aiv.engines.VECTOR.queue_depth_count",
        "cores.aiv.engines.VECTOR.block_bytes",
        "cores.aiv.engines.VECTOR.row_sum",
    }


@pytest.mark.parametrize("schedule", ["flash", "two_level", "pasa"])
def test_a_pipeline_through_all_blocks_takes_less_time_and_leaves_bits_alone(schedule):
    shape = {"batch": 1, "heads": 3, "seq_q": 1300, "seq_kv": 1500, "head_dim": 64, "causal": True}
    tiling = {"block_q": 64, "block_kv": 128, "vector_rows": 32, "depth": 2, "deal": "balanced"}
    results = {}
    for pipeline, method in (("block", "des"), ("core", "des"), ("core", "steady")):
        bits = {"rows": [0, 700, 1299]} if method == "des" else {"numerics": False}
        fields = {**tiling, "pipeline": pipeline}
        more = {"overrides": {"group_count": 3}, "method": method, "trace_groups": (), **bits}
        result = npusim.run(schedule, hw="ascend_950", problem=Problem(**shape), tiling=fields, **more)
        results[pipeline, method] = result
    assert results["core", "des"].cycles == results["core", "steady"].cycles
    assert results["core", "des"].cycles < 0.93 * results["block", "des"].cycles
    alone, through = ([b.tobytes() for b in results[p, "des"].numerics.rows.values()] for p in ("block", "core"))
    assert alone == through


def test_cann_on_28_and_32_cores_is_as_fast_as_measured():
    """Microseconds of cann-bench d59d44c, whose board is not named: 28 cores fit better."""
    prefill = {
        112.4: {"batch": 4, "heads": 64, "kv_heads": 8, "seq_q": 512, "head_dim": 128},
        138.0: {"batch": 4, "heads": 32, "seq_q": 1024, "head_dim": 128, "causal": True},
    }
    for hw, most in (("ascend_950_28", 0.06), ("ascend_950", 0.09)):
        launch = load_device(hw).timed_launch().task_all_s.value
        for measured, shape in prefill.items():
            problem = Problem(**shape, dtype="bfloat16")
            fields = {**TILE, "depth": 4, "deal": "balanced"}  # as declared, not the fastest
            result = npusim.run("flash", hw=hw, problem=problem, tiling=fields, numerics=False, trace_groups=())
            assert result.cycles / 1650 + launch * 1e6 == pytest.approx(measured, rel=most), hw


@pytest.mark.parametrize(
    ("hw", "tiling", "fault"),
    [
        (
            "ascend_910b2",
            {"layout": "dn"},
            "layout=dn: the vector unit of ascend_910b2 reads and writes UB, without registers;",
        ),
        ("ascend_910b2", {"route": "chip"}, "no route from UB to L1;"),
        ("ascend_950", {"chains": 3}, "chains: 3; allowed: 1, 4"),
        ("ascend_950", {"kernel": "pto"}, "kernel=pto: the vector unit of ascend_950 works on registers"),
        ("ascend_950", {"barriers": "needed"}, "barriers=needed: .* for devices such as ascend_910b2"),
        ("ascend_950", {"together": 2}, "together=2: the vector unit of ascend_950"),
        (
            "ascend_950",
            {"pipeline": "core", "order": "serial"},
            "pipeline=core: with order=serial the pipeline ends with each block;",
        ),
    ],
)
def test_fields_that_a_device_lacks_are_refused(hw, tiling, fault):
    with pytest.raises(NpusimError, match=fault):
        npusim.run("flash", hw=hw, seq=512, tiling=tiling, numerics=False)


def test_a_run_says_which_tile_it_took_and_what_bounds_the_vector_unit():
    shape = {"batch": 1, "seq": 2048, "causal": False}
    text = str(npusim.run("flash", hw="ascend_950", workload="pangu_38b", **shape, numerics=False))
    assert "block_q=128 block_kv=128 vector_rows=64 depth=4 deal=balanced" in text
    one = {"vector": "stages", "chains": 1, "block_kv": 128}
    text = str(npusim.run("flash", hw="ascend_950", workload="pangu_38b", **shape, tiling=one, numerics=False))
    assert re.search(r"VECTOR .*bound by .*latency of max", text)
