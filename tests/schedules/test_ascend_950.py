"""A core group whose parts meet without global memory: the same bits on other routes, timed and raced."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from ir.toy import flatten
from timing.test_keys import is_read

from npusim.config.device import DeviceSpec
from npusim.config.load import load_device, load_workload
from npusim.config.problem import Problem
from npusim.errors import SpecError, TilingError
from npusim.program.ir.check import check
from npusim.program.ir.op import TileOp
from npusim.run import run
from npusim.simulation.simulate import simulate_program
from npusim.studies.explore import explore
from schedules.test_split_kv import bits, program_of

if TYPE_CHECKING:
    from npusim.program.ir.tile_program import TileProgram

pytestmark = pytest.mark.usefixtures("declared_tiles")

HW = "ascend_950"
E4M3 = "float8_e4m3fn"
#: Ragged in rows and keys, with a mask, more rows than one vector core's, heads that share keys.
CAUSAL = Problem(heads=2, kv_heads=1, seq_q=81, seq_kv=205, head_dim=32, causal=True)
EIGHT = CAUSAL.model_copy(update={"dtype": E4M3})
SHAPES = {"flash": CAUSAL, "pasa": CAUSAL, "fp8_attention": EIGHT, "split_kv": CAUSAL}
FIELDS: dict[str, dict[str, Any]] = {
    "flash": {"block_q": 64, "block_kv": 96, "vector_rows": 9},
    "pasa": {"block_q": 32, "block_kv": 64},
    "fp8_attention": {"block_q": 160, "block_kv": 64},
    "split_kv": {"block_q": 48, "block_kv": 64, "splits": 3},
}


def traffic(program: TileProgram, device: DeviceSpec) -> Counter[str]:
    """Return the bytes that cross shared links, by the role of what moves."""
    prices, found = program.pricing(program, device), Counter[str]()
    for phase in program.phases:
        for op in (op for block in phase.blocks for op in flatten(phase.body(block))):
            bytes_ = sum(size for _, size in prices.of_op(op).link_bytes)
            if bytes_:
                (name,) = {step.name for step in op.steps}
                found[phase.roles.get(name, name)] += bytes_
    return found


@pytest.mark.parametrize("name", list(SHAPES))
def test_scores_and_weights_never_cross_l2_or_memory(name: str) -> None:
    device, before = load_device(HW), load_device("ascend_910b2")
    found = traffic(program_of(SHAPES[name], HW, name=name, **FIELDS[name]), device)
    assert found["score"] == found["weight"] == 0
    half = SHAPES[name].model_copy(update={"dtype": "float16"})
    there = traffic(program_of(half, "ascend_910b2", name=name, **FIELDS[name]), before)
    assert min(there["score"], there["weight"]) > 0
    assert min(found["operand"], there["operand"]) > 0


@pytest.mark.parametrize("name", list(SHAPES))
def test_programs_have_no_race_and_every_method_takes_the_same_time(name: str) -> None:
    device = load_device(HW)
    program = program_of(SHAPES[name], HW, name=name, **FIELDS[name])
    check(program, device.flags)
    found = {m: simulate_program(program, device, m).cycles for m in ("des", "block", "fold", "steady")}
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("name", ["flash", pytest.param("pasa", marks=pytest.mark.exhaustive), "split_kv"])
def test_routes_change_no_bit(name: str) -> None:
    programs = [program_of(CAUSAL, hw, name=name, **FIELDS[name]) for hw in (HW, "ascend_910b2")]
    assert (bits(CAUSAL, programs[0]) == bits(CAUSAL, programs[1])).all()


def test_halves_of_a_tile_go_to_both_vector_cores_in_one_instruction() -> None:
    device = load_device(HW)
    problem = Problem(heads=1, seq_q=131, seq_kv=128, head_dim=64)
    program = program_of(problem, HW, name="flash", block_kv=128, block_q=64)
    drains = [
        [op for op in flatten(program.phases[0].body(block)) if isinstance(op, TileOp) and op.label == "S.drain"]
        for block in program.phases[0].blocks
    ]
    # 64 x 128 scores: a half of 32 rows to each at 128 B a cycle, and 26 cycles; of three rows two and one apart.
    assert [[len(op.steps) for op in ops] for ops in drains] == [[2], [2], [1, 1]]
    prices = program.pricing(program, device)
    assert prices.of_op(drains[0][0]).occupancy_cycles == 32 * 128 * 4 // 128 + 26
    assert [prices.of_op(op).occupancy_cycles for op in drains[2]] == [2 * 128 * 4 // 128 + 26, 128 * 4 // 128 + 26]
    # Half precision leaves L0C no faster: 64 elements a cycle, whoever they are for.
    half = program_of(Problem(heads=1, seq_q=64, head_dim=64), HW, "scores=float16", name="flash", block_q=64)
    (drain,) = [op for op in flatten(half.phases[0].body(half.phases[0].blocks[0])) if op.label == "S.drain"]
    assert half.pricing(half, device).of_op(drain).occupancy_cycles == 64 * 64 // 64 + 26


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"l0c_ub", "l0c_gm"}, "S goes from aic to aiv, but ascend_950 has no route from L0C to UB; its routes"),
        ({"ub_l1", "ub_gm"}, "P goes from aiv to aic, but ascend_950 has no route from UB to L1; its routes"),
    ],
)
def test_a_hand_over_without_a_route_is_refused_with_those_there_are(missing: set[str], message: str) -> None:
    content = load_device(HW).model_dump(by_alias=True)
    for unit in (content["cores"]["aic"]["engines"]["FIXP"], content["cores"]["aiv"]["engines"]["MTE3"]):
        unit["routes"] = {name: route for name, route in unit["routes"].items() if name not in missing}
    device = DeviceSpec.model_validate(content)
    with pytest.raises(TilingError, match=message):
        run("flash", hw=device, problem=CAUSAL, numerics=False, trace_groups=())


def test_fp8_products_take_half_the_time_of_half_precision_and_no_study_is_left() -> None:
    def timed(dtype: str) -> Any:
        problem = Problem(heads=1, seq_q=64, seq_kv=512, head_dim=128, dtype=dtype)
        return run("fp8_attention", hw=HW, problem=problem, trace_groups=())

    half, eight = timed("float16"), timed(E4M3)
    busy = [sum(u.busy_cycles for g in r.timing.queues for u in g if u.queue == "aic.CUBE") for r in (half, eight)]
    assert 0.5 < busy[1] / busy[0] < 0.56  # and ten cycles to start each
    assert any("whose time is not that of a real kernel" in note for note in half.notes)
    assert not any("not that of a real kernel" in note for note in eight.notes)
    assert eight.numerics.arithmetic == {"ascend.cube.k32.e4m3.f32": "assumed"}


def test_searches_note_times_of_no_real_kernel_and_of_themselves_leave_them_out() -> None:
    fields, problem = {"block_kv": [64]}, Problem(heads=1, seq_q=64, head_dim=16)
    named = explore("fp8_attention", fields, problem=problem)
    assert named.best
    assert "fp8_attention is a study: ascend_910b2 has no FP8 matrix unit" in named.setting.notes[0]
    few = {**fields, "block_q": [16], "vector_rows": [16], "depth": [1]}
    with pytest.raises(SpecError, match=r"nothing to rank: .*omitted: ascend_910b2 has no FP8 matrix unit.*--studies"):
        explore("fp8_attention", few, problem=problem, auto=True)
    beside = explore(["flash", "fp8_attention"], few, problem=problem, auto=True, tiling={"deal": "round_robin"})
    assert "fp8_attention is omitted" in beside.setting.notes[0]
    assert beside.setting.schedules == ("flash",)
    eight = problem.model_copy(update={"dtype": E4M3})
    assert explore("fp8_attention", fields, problem=eight, hw=HW).best


@pytest.mark.exhaustive
def test_every_number_that_only_the_950_has_changes_a_prediction() -> None:
    device, older = load_device(HW), {key for key, _ in load_device("ascend_910b2").facts()}
    own = [(key, fact) for key, fact in device.facts() if key not in older and not key.startswith("facts.")]
    assert len(own) > 5
    assert not [key for key, fact in own if not is_read(device, key, fact.value)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("hw", [HW, "ascend_950_28"])
def test_no_prediction_rests_on_a_constant_of_a_mechanism_that_the_device_lacks(hw: str) -> None:
    device, before = load_device(hw), load_device("ascend_910b2")
    stated = {key for key, _ in device.facts()}
    gone = {key for key, _ in before.facts()} - stated
    mechanisms = "cores.aiv.engines.VECTOR.", "cores.aiv.buffers.UB.banks.", "flags.tile_"
    assert {m for m in mechanisms for key in gone if key.startswith(m)} == set(mechanisms)
    for name, problem in SHAPES.items():
        program = program_of(problem, hw, name=name, **FIELDS[name])
        terms = simulate_program(program, device, "auto").term_cycles
        assert terms.keys() <= stated
        assert any(".VECTOR.ops." in key for key in terms)


def test_grouped_decode_moves_little_but_keys_and_values() -> None:
    """llama2_70b, 8 query heads on one KV head, 8k keys: what crosses L2, against Q, K, V and O alone."""
    problem = load_workload("llama2_70b").problem(seq_q=1, seq_kv=8192)
    compulsory = 2 * problem.head_dim * (2 * problem.heads + 2 * problem.kv_heads * problem.seq_kv)
    result = run("split_kv", hw=HW, problem=problem, numerics=False, trace_groups=())
    assert result.timing is not None
    assert result.timing.link_bytes["l2"] < 1.05 * compulsory


def test_a_task_that_loads_a_mask_takes_more_however_it_is_timed() -> None:
    saved = {}
    for causal in (True, False):
        problem = Problem(heads=2, seq_q=128, head_dim=64, causal=causal)
        changes = ({}, {"launch.masked_s": "0"})
        more, less = (run("flash", hw=HW, problem=problem, numerics=False, overrides=c).timing for c in changes)
        assert more.cycles == less.cycles
        saved[causal] = {kind: round(1e6 * (us - less.times_s[kind]), 3) for kind, us in more.times_s.items()}
    assert saved[True] == {"core": 0.0, "kernel": 4.1, "back_to_back": 0.0, "call": 4.1}  # the host issues for 16.5 us
    assert not any(saved[False].values())
