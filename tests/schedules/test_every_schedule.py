"""Every schedule on every model's shapes: it runs within the memories, or is refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.config.load import load_device, load_workload
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.errors import BufferOverflowError, SpecError, TilingError
from npusim.formats import get_format
from npusim.library import SCHEDULES
from npusim.program.ir.check import check
from npusim.program.numerics.evaluate import evaluate
from npusim.program.numerics.input_tensors import recipe_source
from npusim.run import run
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request
from npusim.simulation.simulate import run_plan
from reports.parts.kernel import declared_tiling
from tests.turns import every, in_turn

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.numerics.bits_result import NumericResult

ATTENTION = ("standard", "flash", "two_level", "unified", "pasa", "fp8_attention")
ON_A_GPU = ("standard", "flash", "pasa", "fp8_attention")


def model(name: str, **sizes: Any) -> Problem:
    return load_workload(name).problem(**sizes)


MODELS: dict[str, Problem] = {
    "PanGu-38B 1k": model("pangu_38b", seq=1024),
    "PanGu-38B 4k": model("pangu_38b", seq=4096),
    "PanGu-38B 16k": model("pangu_38b", seq=16384),
    "Qwen2-7B 5676": model("qwen2_7b", seq=5676),
    "SVD 9216": model("svd_img2vid", seq=9216),
    "LLaMA2-70B": model("llama2_70b", seq=4096),
    "ragged 197": model("deit_b"),
}
SHAPES: dict[str, dict[str, Any]] = {
    "decode": {"heads": 4, "kv_heads": 1, "seq_q": 1, "seq_kv": 1027, "head_dim": 64},
    "decode, causal": {"heads": 2, "seq_q": 1, "seq_kv": 300, "head_dim": 64, "causal": True},
    "causal, end aligned": {"heads": 2, "kv_heads": 1, "seq_q": 130, "seq_kv": 300, "head_dim": 64, "causal": True},
    "causal, own offset": {
        "heads": 1,
        "seq_q": 130,
        "seq_kv": 300,
        "head_dim": 64,
        "causal": True,
        "causal_offset": 33,
    },
    "more queries than keys": {"heads": 2, "seq_q": 333, "seq_kv": 77, "head_dim": 64},
    "one query, one key": {"heads": 1, "seq_q": 1, "seq_kv": 1, "head_dim": 16},
    "wide values": {"heads": 1, "seq_q": 70, "seq_kv": 90, "head_dim": 64, "value_head_dim": 128},
    "two sequences, shared keys": {
        "batch": 2,
        "heads": 4,
        "kv_heads": 2,
        "seq_q": 40,
        "seq_kv": 40,
        "head_dim": 32,
        "causal": True,
    },
}


@cache
def device_of(hw: str) -> DeviceSpec:
    return load_device(hw)


def build(schedule: str, problem: Problem, hw: str = "ascend_910b2", **fields: Any) -> TileProgram:
    device = device_of(hw)
    chosen = SCHEDULES[schedule, device.family]
    if schedule == "fp8_attention" and hw == "h200":
        problem = problem.model_copy(update={"dtype": "float32"})
    return chosen.program(problem, build_tiling(chosen.tiling, fields), device, chosen.precision(None))


@pytest.mark.parametrize(("schedule", "name"), every(2, product(ATTENTION, MODELS)))
def test_programs_of_models_pass_checks_and_stay_within_every_memory(schedule: str, name: str) -> None:
    program = build(schedule, MODELS[name])
    check(program, device_of("ascend_910b2").flags)
    for space, (used, there) in program.occupancy_bytes().items():
        assert used <= there, space


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("schedule", ATTENTION)
def test_models_run_for_bits_and_time(schedule: str, name: str) -> None:
    result = run(schedule, problem=MODELS[name], heads=[0], trace_groups=())
    assert result.numerics is not None
    assert result.numerics.error.nan_count == 0
    assert result.cycles > 0


#: RMSE on normal inputs: float16 stores 2^-11, P in E4M3 2^-4 a value.
LARGEST_ERROR = {"fp8_attention": 2**-4}


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize(
    ("schedule", "hw"),
    [(s, "ascend_910b2") for s in (*ATTENTION, "split_kv")] + [(s, "h200") for s in (*ON_A_GPU, "split_kv")],
)
def test_every_shape_gives_attention(schedule: str, hw: str, shape: str) -> None:
    problem = Problem(**SHAPES[shape])
    program = build(schedule, problem, hw)
    result = evaluate(program, problem, recipe_source(problem), rows="all", heads="all")
    assert result.computed.all()
    assert result.error.nan_count == result.error.inf_count == 0
    assert result.error.rmse < LARGEST_ERROR.get(schedule, 2**-7)


@pytest.mark.parametrize("schedule", ["flash", "standard", "pasa"])
def test_shapes_take_time_too(schedule: str) -> None:
    for shape in ("decode", "causal, own offset", "two sequences, shared keys"):
        result = run(schedule, problem=Problem(**SHAPES[shape]), numerics=False, trace_groups=())
        assert result.cycles > 0


def test_grouped_heads_share_their_keys() -> None:
    """Each query head attends to the keys of its group, as if they were repeated for it."""
    shared = Problem(heads=4, kv_heads=2, seq_q=40, seq_kv=70, head_dim=32)
    source = recipe_source(shared)
    repeated = Problem(heads=4, seq_q=40, seq_kv=70, head_dim=32)
    outputs = [
        evaluate(
            build("flash", p),
            p,
            lambda n, b, h, p=p: source(n, b, h if n == "q" or p is shared else h // 2),
            rows="all",
        ).output
        for p in (shared, repeated)
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])


@pytest.mark.parametrize(
    ("schedule", "hw", "precision"),
    [
        ("flash", "ascend_910b2", "exp_variant=exp2.exp2p"),
        ("standard", "ascend_910b2", "sum_order=sequential"),
        ("pasa", "ascend_910b2", "sum_order=sequential"),
        ("flash", "h200", "exp_variant=exp.correct"),
        ("flash", "h200", "accumulate=fresh"),
        ("flash", "h200", "arithmetic=volta.mma.k4.f16.f32"),
    ],
)
def test_named_choices_change_bits_and_stay_attention(schedule: str, hw: str, precision: str) -> None:
    """One schedule with another chip's exponential, order or matrix unit: other bits, the same values."""
    before, after = (with_precision(schedule, hw, text) for text in ("", precision))
    assert (before.output != after.output).any()
    assert after.error.rmse < 2**-7


@pytest.mark.parametrize(
    ("schedule", "hw", "preset"),
    [("flash", "ascend_910b2", "fa16"), ("pasa", "ascend_910b2", ""), ("pasa", "h200", "")],
)
def test_the_vendors_half_exponential_is_correctly_rounded(schedule: str, hw: str, preset: str) -> None:
    """Hopper's `hexp` over all 65,536 inputs (golden/unary.npz): the table changes no bit."""
    before, after = (with_precision(schedule, hw, f"{preset},exp_variant=exp.{v}") for v in ("correct", "hopper_hexp"))
    np.testing.assert_array_equal(before.output, after.output)


def with_precision(schedule: str, hw: str, text: str) -> NumericResult:
    problem = Problem(heads=1, seq_q=64, seq_kv=300, head_dim=64)
    chosen = SCHEDULES[schedule, device_of(hw).family]
    program = chosen.program(problem, build_tiling(chosen.tiling, {}), device_of(hw), chosen.precision(text))
    return evaluate(program, problem, recipe_source(problem), rows="all")


def test_unfused_softmax_takes_no_powers_of_two() -> None:
    with pytest.raises(TilingError, match="unfused softmax uses exponentials to the base e"):
        run("standard", seq=64, precision="exp_variant=exp2.exp2p")


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("schedule", ATTENTION)
def test_causal_with_fewer_keys_than_queries_is_refused(schedule: str) -> None:
    with pytest.raises(SpecError, match="64 causal queries but only 32 keys: the first 32 queries would"):
        run(schedule, seq_q=64, seq_kv=32, causal=True)


@pytest.mark.parametrize(("schedule", "field"), [("flash", "block_kv"), ("two_level", "block_kv")])
def test_keys_that_do_not_fit_are_refused_with_what_fits(schedule: str, field: str) -> None:
    problem = Problem(heads=1, seq_q=64, seq_kv=4096, head_dim=128)
    with pytest.raises(BufferOverflowError, match=f"largest values that fit, .*{field}=") as caught:
        build(schedule, problem, **{field: 1024, "vector_rows": 16})
    fitting = int(str(caught.value).split(f"{field}=")[1].split()[0])
    build(schedule, problem, **{field: fitting, "vector_rows": 16})


def test_pasa_blocks_beyond_256_keys_are_refused() -> None:
    with pytest.raises(TilingError, match=r"block_kv: .*512.* must be at most 256"):
        build("pasa", MODELS["PanGu-38B 1k"], block_kv=512)


@pytest.mark.parametrize("schedule", ["flash", "two_level", "unified", "pasa", "fp8_attention"])
def test_causal_blocks_beyond_the_mask_are_refused(schedule: str) -> None:
    fields: dict[str, Any] = {"block": 528} if schedule == "unified" else {"block_q": 784}
    problem = Problem(heads=1, seq_q=4096, head_dim=16, causal=True)
    if schedule not in ("unified",):
        fields["block_kv"] = 256
    with pytest.raises(TilingError, match=r"tiling-mask: a block of .* needs rows \+ cols - 1 = "):
        build(schedule, problem, **fields)


@pytest.mark.parametrize("schedule", ATTENTION)
def test_head_sizes_beyond_256_are_refused_or_warned_of(schedule: str) -> None:
    problem = Problem(heads=1, seq_q=64, head_dim=320)
    try:
        notes = build(schedule, problem).notes
    except BufferOverflowError:
        return
    assert any(n.startswith("head size: 320 is beyond 256") for n in notes)
    assert not any("head size" in n for n in build(schedule, Problem(heads=1, seq_q=64, head_dim=64)).notes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pasa", "-t", "beta=1"), "beta: 1.0 must be below 1"),
        (("pasa", "-t", "block_kv=512"), "block_kv: '512' must be at most 256"),
        (("flash", "-t", "block_kv=16384", "--no-causal"), "largest values that fit"),
        (("two_level", "-t", "block_kv=1024"), "tiling-mask: a block of 128x1024 needs rows + cols"),
        (("flash", "--seq-q", "64", "--seq-kv", "32"), "64 causal queries but only 32 keys"),
        (("fp8_attention", "--precision", "scale=0"), "must be positive and finite"),
        (
            ("flash", "--no-numerics", "--precision", "exp_variant=fast"),
            "exp_variant: 'fast' is not one of exp.correct, exp.hopper_hexp, exp.libdevice, exp2.correct",
        ),
        (
            ("pasa", "--no-numerics", "--precision", "sum_order=any"),
            "sum_order: 'any' is not one of sequential, tree_halves, vector_lanes",
        ),
        (("fp8_attention", "--precision", "hpc_ops,fa3"), "hpc_ops, fa3: name at most one preset"),
        (("fp8_attention", "--precision", "scale=2,scale=4"), "'scale' is given twice: 2 and 4"),
        (("pasa", "--seed", "-1"), "seed: -1 must be at least 0"),
        (("fp8_attention", "--hw", "h200", "--dtype", "float16"), "not float16; use float8_e4m3fn"),
        (("flash", "--precision", "accumulate=chained"), "no route from UB to L0C; its"),
    ],
)
def test_bad_input_on_the_command_line_exits_with_2_and_says_what(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


# ------------------------------------------------------------------ where schedules live


def test_operations_and_rings_are_made_by_machines_only() -> None:
    """No mapping elsewhere: `ir.check` cuts loops that exist, `timing.stream` repeats them."""
    root = Path(npusim.__file__).parent
    makers = {
        str(p.relative_to(root))
        for p in root.rglob("*.py")
        if any(call in p.read_text(encoding="utf-8") for call in ("TileOp(", "Loop(", "Ring("))
    }
    allowed = {
        "program/ir/check.py",
        "program/ir/buffers.py",
        "program/ir/tile_program.py",
        "program/timing/stream.py",
    } | {"program/ir/listing.py"}  # `ListedRing`
    # A `TileLoop` of algorithms is part of their form: stages over tiles; those that are imported have it too.
    outside = {
        m
        for m in makers
        if not m.startswith(
            ("machines/", "kernels/form/", "kernels/attention/", "kernels/triton/", "kernels/tilelang/", "library/")
        )
    } - allowed
    assert not outside


@pytest.mark.parametrize(
    ("schedule", "hw", "dtype"),
    in_turn(
        [
            pytest.param("flash", "ascend_910b2"),
            pytest.param("flash", "h200"),
            pytest.param("flash", "l40s"),
            pytest.param("split_kv", "a100"),
            pytest.param("pasa", "ascend_950"),
        ],
        ("float16", "bfloat16"),
    ),
)
def test_a_head_of_72_is_filled_up_with_zeros_which_change_no_bit(schedule: str, hw: str, dtype: str) -> None:
    """Columns of 80 given with zeros in the last 8, and the scale of 72, are the same products."""
    rng, fmt = np.random.default_rng(7), get_format(dtype).dtype
    sizes: dict[str, Any] = {"heads": 2, "kv_heads": 1, "seq_q": 50, "seq_kv": 90, "causal": True, "dtype": dtype}
    narrow, wide = Problem(**sizes, head_dim=72), Problem(**sizes, head_dim=80, scale=72**-0.5)
    shapes = {"q": (1, 2, 50, 72), "k": (1, 1, 90, 72), "v": (1, 1, 90, 72)}
    tensors = {n: rng.normal(size=shape).astype(fmt) for n, shape in shapes.items()}
    filled = {n: np.concatenate([x, np.zeros((*x.shape[:3], 8), fmt)], axis=3) for n, x in tensors.items()}
    runs = []
    for problem, given in ((narrow, tensors), (wide, filled)):
        tiling = declared_tiling(schedule, hw, block_kv=64)
        plan = plan_of(Request(schedule, problem=problem, hw=hw, tiling=tiling, rows="all", presets=False))
        runs.append(run_plan(replace(plan, tensors=given)))
    mine, theirs = runs
    assert mine.output.shape == (1, 2, 50, 72)
    assert np.array_equal(mine.output.view(np.uint16), theirs.output[..., :72].view(np.uint16))
    assert mine.timing.flops * 80 == theirs.timing.flops * 72
    assert mine.timing.cycles == theirs.timing.cycles
    assert any(n.startswith("head_dim 72 is padded to 80, ") for n in mine.notes)
    assert mine.numerics.error.rmse < (8e-3 if dtype == "bfloat16" else 2e-3)
