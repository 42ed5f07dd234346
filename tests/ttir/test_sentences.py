"""Sentences of the reader where an internal one, or silence, was: refusals name the mechanism, the rest runs."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.errors import ProgramError, SpecError
from npusim.formats import mul, reduce_sum
from npusim.kernels.triton.compiler import MOST_WRITTEN_OUT
from npusim.kernels.triton.float64_walk import ExactLaunch
from npusim.simulation.request import Request
from npusim.simulation.simulate import run_request
from tests.turns import in_turn

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
DEVICES = ("ascend_910b2", "h200")
AT = r"sentence_kernels\.py:\d+: "


def drawn(*shape: int, fmt: str = "float32") -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(fmt)


def recorded(name: str, grid: tuple[int, ...], *tensors: Any, **words: Any) -> Any:
    from ttir import sentence_kernels

    with npusim.record(floats=True) as calls:
        getattr(sentence_kernels, name)[grid](*tensors, **words)
    (call,) = calls
    return call


def computed(call: Any, like: Any, hw: str) -> Any:
    return np.reshape(npusim.run(call, hw=hw, rows="all", heads="all").output, like.shape).astype(np.float64)


# ---------------------------------------------------------------- forms that ended in internal sentences


@pytest.mark.parametrize("hw", DEVICES)
def test_numbers_of_a_tensor_are_weights_of_normed_powers(hw: str) -> None:
    x, w = drawn(6, 50), drawn(2)
    wide = x.astype(np.float64)
    parts = [p / np.sqrt((p * p).sum(1, keepdims=True) / 50 + 1) for p in (wide, wide**3)]
    made = computed(recorded("polynomial", (6,), x, w, np.zeros_like(x), 50, BLOCK=64), x, hw)
    assert np.abs(made - w[0] * parts[0] - w[1] * parts[1]).max() < 1e-5


@pytest.mark.parametrize("hw", DEVICES)
def test_a_state_is_returned_behind_rows_before_its_loop(hw: str) -> None:
    q, k = drawn(64, 32, fmt="float16"), drawn(128, 32, fmt="float16")
    made = computed(recorded("prepared", (2,), q, k, np.zeros((64, 32), np.float32), 128, D=32, B=32), q, hw)
    wide = k.astype(np.float64)
    wanted = (q.astype(np.float64) * 0.5) @ wide.T @ wide
    assert np.abs(made - wanted).max() < 1e-2 * np.abs(wanted).max()


@pytest.mark.parametrize("hw", DEVICES)
def test_programs_may_return_early_for_several_reasons(hw: str) -> None:
    q, c, s = drawn(2, 8, 4, 128), drawn(8, 64), drawn(8, 64)
    call = recorded("rotated_pairs", (20, 5), q, c, s, 8, 2, 1.0, HALF=64, H=4, B=64)
    result = npusim.run(call, hw=hw, rows="all", heads="all")
    assert result.numerics.error.rmse < 1e-6
    assert [n.partition(": ")[2] for n in result.notes if n.endswith("return early")] == [
        "20 of 100 programs return early",
        "16 of 80 programs return early",
    ]


def test_operands_that_need_more_flags_than_there_are_have_one_slot_each() -> None:
    tensors = [drawn(4, 128 + i)[:, :128].copy() for i in range(5)]
    call = recorded("five_operands", (4,), *tensors, np.zeros(4, np.float32), 128, BLOCK=64)
    result = npusim.run(call, hw="ascend_910b2", rows="all")
    assert any("one slot each: two slots would need more flags than the device has" in n for n in result.notes)
    wanted = np.prod([t.astype(np.float64) for t in tensors], axis=0).sum(1)
    assert np.abs(np.ravel(result.output) - wanted).max() < 1e-5


@pytest.mark.parametrize("count", [9, 10, 19])
def test_operands_share_slots_if_there_are_more_than_flags(tmp_path: Path, count: int) -> None:
    names = [f"X{i}" for i in range(count)]
    loads = "\n".join(f"    x = x * 0.5 + tl.load({n} + r)" for n in names[1:])
    head = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef many({}, O, B: tl.constexpr):\n"
    body = "    r = tl.program_id(0) * B + tl.arange(0, B)\n    x = tl.load(X0 + r).to(tl.float32)\n"
    (tmp_path / "k.py").write_text(f"{head.format(', '.join(names))}{body}{loads}\n    tl.store(O + r, x)\n")
    given = [drawn(1024 + i)[:1024].astype(np.float16 if i % 3 else np.float32) for i in range(count)]
    given[0] = np.zeros(1024, np.float16)
    wanted = np.zeros(1024)
    for x in given[1:]:
        wanted = wanted * 0.5 + x
    spec = spec_from_file_location("k", tmp_path / "k.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    with npusim.record(floats=True) as calls:
        module.many[(8,)](*given, np.zeros(1024, np.float32), B=128)
    result = npusim.run(calls[0], hw="ascend_910b2", rows="all")
    assert np.abs(np.ravel(result.output) - wanted).max() < 1e-5
    assert any("slot each would need more flags than the device has" in n for n in result.notes)


IN_PLACE = drawn(64, 64, fmt="float16")
SQUARE = ("own_square", (1,), IN_PLACE, IN_PLACE)
KEYS = [drawn(128, 64, fmt="float16"), drawn(128, 64, fmt="float16"), drawn(128, fmt="float16"), drawn(64, 64), 128]


@pytest.mark.parametrize(
    ("why", "call", "words"),
    [("the rows and the columns of a tl.dot's result are the same axis; load its second", SQUARE, {"N": 64, "D": 64})],
)
def test_what_is_not_read_is_named_by_its_mechanism(why: str, call: Any, words: Any) -> None:
    with pytest.raises(ProgramError, match=AT + why):
        npusim.run(recorded(*call, **words), hw="h200")


def test_a_left_factor_that_each_tile_weighs_is_computed() -> None:
    keys, values, weights, *_ = KEYS
    done = npusim.run(recorded("weighted_keys", (1,), *KEYS, D=64, B=64), rows="all")
    weighed = (keys.T.astype(np.float32) * weights.astype(np.float32)).astype(np.float16)
    wanted = weighed.astype(np.float64) @ values.astype(np.float64)
    assert np.abs(np.reshape(done.output, wanted.shape) - wanted).max() < 1e-4


def test_functions_of_known_numbers_are_numbers() -> None:
    x = drawn(256)
    assert np.array_equal(
        computed(recorded("of_numbers", (4,), x, np.zeros_like(x), B=64), x, "h200").astype(np.float32),
        x + np.float32(2) + np.float32(3),
    )


# ---------------------------------------------------------------- what a launch leaves, and what takes long


def test_outputs_that_no_program_writes_are_said_by_name_and_count() -> None:
    x = drawn(8, 64)
    for programs, left in ((7, "writes 7 of 8 rows, 1 of them never, first row 7"), (8, "")):
        call = recorded("doubled", (programs,), x, np.zeros_like(x), np.zeros(8, np.float32), 8, B=64)
        result = npusim.run(call, hw="h200", rows="all")
        said = [n for n in result.notes if "of them never" in n]
        assert len(said) == bool(left)
        assert all(f": Y, Z: the grid of 7x1x1 programs {left}: npusim returns NaN there" in n for n in said)


def test_programs_that_begin_behind_the_end_of_a_tensor_leave_no_element_out() -> None:
    from ttir.plain_kernels import add

    x, out = drawn(10), np.zeros(10, np.float32)
    for n, left in ((10, []), (8, ["writes 8 of 10 elements, 2 of them never, first row 0, column 8"])):
        with npusim.record(floats=True) as calls:
            add[(3,)](x, x, out, n, BLOCK=16)
        notes = npusim.run(calls[0], hw="h200", rows="all").notes
        said = [note for note in notes if "of them never" in note]
        assert len(said) == len(left) and all(some in note for some, note in zip(left, said, strict=True))


def test_a_loop_that_is_written_out_without_end_is_refused_before_it_is_compiled() -> None:
    x, begun = drawn(256), monotonic()
    with pytest.raises(
        SpecError, match=AT + r"tl\.static_range: 1,000,000 iterations, .* a kernel may have at most 1,024"
    ):
        npusim.run(recorded("written_out", (4,), x, np.zeros_like(x), N=1_000_000, B=64), hw="h200")
    assert monotonic() - begun < 10
    call = recorded("written_out", (4,), x, np.zeros_like(x), N=20, B=64)
    assert MOST_WRITTEN_OUT > 20
    assert np.array_equal(computed(call, x, "ascend_910b2"), x.astype(np.float64) * 0.5**20)


def test_the_share_that_is_done_goes_on_while_results_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    shares, seen, rows = list[float](), list[float](), ExactLaunch.rows

    def looked(self: Any, *of: Any) -> Any:
        seen.append(shares[-1])
        return rows(self, *of)

    monkeypatch.setattr(ExactLaunch, "rows", looked)
    x = drawn(8, 64)
    call = recorded("doubled", (8,), x, np.zeros_like(x), np.zeros(8, np.float32), 8, B=64)
    run_request(replace(Request(call.schedule, hw="h200", rows="all"), progress=shares.append))
    assert len(set(seen)) > 4
    assert seen[0] == 0.5
    assert all(a <= b for a, b in pairwise(shares))


# ---------------------------------------------------------------- a kernel's file

OTHERS = """import triton
import triton.language as tl


def described(grid, kernel, args):
    return {"name": "scaled"}


@triton.jit(launch_metadata=described, repr=lambda of: "scaled")
def scaled(X, Y, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(Y + r, tl.load(X + r) * 2)


@triton.jit(do_not_specialize=listed_elsewhere)
def other(X, Y, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(Y + r, tl.load(X + r) * 2)
"""


def test_arguments_for_profilers_and_faults_of_other_kernels_refuse_nothing(tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text(OTHERS)
    launch = "{}/k.py::{}[n // B](tensor(n), tensor(n), B=64)"
    result = npusim.run(launch.format(tmp_path, "scaled"), hw="h200", problem={"n": 256})
    assert result.numerics.error.rmse == 0
    with pytest.raises(SpecError, match=r"k\.py:16: NameError: name 'listed_elsewhere' is not defined"):
        npusim.run(launch.format(tmp_path, "other"), hw="h200", problem={"n": 256})


# ---------------------------------------------------------------- blocks of one row


SIZES = [pytest.param(8, 64, True, id="full"), pytest.param(7, 50, False, id="cut")]


@pytest.mark.parametrize(("rows", "n", "is_full", "hw"), in_turn(SIZES, DEVICES))
def test_a_block_of_one_row_is_a_row(rows: int, n: int, is_full: bool, hw: str) -> None:
    x, w, made = drawn(rows, n), drawn(n), {}
    for each in (1, 4):
        call = recorded(
            "one_row", (-(-rows // each),), x, w, np.zeros_like(x), rows, n, XBLOCK=each, RBLOCK=64, FULL=is_full
        )
        made[each] = computed(call, x, hw)
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide * wide).mean(1, keepdims=True) + 1) * w
    assert all(np.abs(y - wanted).max() < 1e-5 for y in made.values())
    assert hw != "ascend_910b2" or np.array_equal(made[1], made[4])


@pytest.mark.parametrize("hw", DEVICES)
def test_a_number_of_one_row_is_a_number(hw: str) -> None:
    x = drawn(7, 50)
    made = computed(recorded("one_sum", (7,), x, np.zeros(7, np.float32), 7, 50, XBLOCK=1, RBLOCK=64), x[:, 0], hw)
    assert np.abs(made - x.astype(np.float64).sum(1)).max() < 1e-5


def test_a_mask_that_hides_a_block_of_one_row_hides_its_program() -> None:
    x = drawn(7, 50)
    for hw in DEVICES:
        call = recorded("one_copy", (9,), x, np.zeros_like(x), 7, 50, XBLOCK=1, RBLOCK=64)
        assert np.array_equal(computed(call, x, hw), x * np.float64(2))
        call = recorded("one_sum", (9,), x, np.zeros(7, np.float32), 7, 50, XBLOCK=1, RBLOCK=64)
        assert np.abs(computed(call, x[:, 0], hw) - x.astype(np.float64).sum(1)).max() < 1e-5


@pytest.mark.parametrize("fmt", ["float32", "float16"])
@pytest.mark.parametrize("n", [77, 1000, 1024])
@pytest.mark.parametrize("scale", [0.0, 1.7])
def test_a_sum_of_products_is_contracted_as_compiled_code_does(n: int, fmt: str, scale: float) -> None:
    x, y = drawn(24, n, fmt=fmt), drawn(24, n, fmt=fmt)[::-1].copy()
    call = recorded(
        "sum_of_products", (24,), x, y, np.zeros(24, np.float32), n, SCALE=scale, BLOCK=128 if n == 77 else 1024
    )
    a, b = x.astype(np.float32), np.float32(scale) if scale else y.astype(np.float32)
    made = list[Any]()
    for precision in (None, "unfused"):
        result = npusim.run(call, hw="h200", rows="all", heads="all", precision=precision)
        (order,) = result.numerics.row_sum_orders
        assert order.startswith("lanes_1x32x4" if n == 77 else "lanes_")
        values, times = (a, b) if precision is None else (mul(a, b, "float32"), None)
        made.append(np.ravel(result.output))
        assert np.array_equal(made[-1], reduce_sum(values, "float32", order, times=times))
        assert not any("contracts" in note for note in result.notes)
    is_exact = fmt == "float16" and not scale  # products of two float16 numbers are float32 numbers
    assert np.array_equal(*made) == is_exact
    on_npu = npusim.run(call, hw="ascend_910b2", rows="all", heads="all").output
    assert np.allclose(np.ravel(on_npu), made[0], atol=1e-4)


def test_a_kernel_may_have_a_name_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "fused_norm_" + "_of_this_and_that" * 30
    (tmp_path / "long.py").write_text(OTHERS.partition("@triton.jit(do_not")[0].replace("def scaled", f"def {name}"))
    monkeypatch.chdir(tmp_path)
    launch = f"{tmp_path}/long.py::{name}[n // B](tensor(n), tensor(n), B=64)"
    result = npusim.run(launch, hw="h200", problem={"n": 256})
    assert result.numerics.error.rmse == 0
    spec = spec_from_file_location("long", tmp_path / "long.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := module_from_spec(spec))
    x = drawn(256)
    with npusim.record() as calls:
        getattr(module, name)[(4,)](x, x.copy(), B=64)
    words = ["run", str(calls.save(tmp_path / "calls.npz")), "--hw", "h200"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert calls[0].name == name


@pytest.mark.parametrize("hw", DEVICES)
def test_numbers_that_a_choice_spreads_are_refused_in_words(hw: str) -> None:
    x, sums = drawn(3, 32), np.zeros(3, np.float32)
    with pytest.raises(ProgramError, match=AT + ".*broadcasts a number"):
        npusim.run(recorded("spread_numbers", (3,), x, sums, n=32, lo=5, KIND=0, B=16), hw=hw, rows="all")


@pytest.mark.parametrize("hw", DEVICES)
def test_a_choice_spreads_a_number_along_lanes_that_are_summed(hw: str) -> None:
    x, y = drawn(3, 32), np.zeros((3, 32), np.float32)
    made = computed(recorded("spread_sum", (3,), x, y, n=32, lo=5, B=32), y, hw)
    wide = x.astype(np.float64)
    assert np.abs(made - wide - 5 * wide.sum(1, keepdims=True)).max() < 1e-4


@pytest.mark.parametrize("hw", DEVICES)
def test_a_number_is_chosen_by_the_iteration(hw: str) -> None:
    x, sums = drawn(3, 32), np.zeros(3, np.float32)
    made = computed(recorded("spread_numbers", (3,), x, sums, n=32, lo=5, KIND=1, B=16), sums, hw)
    assert np.abs(made - x[:, :16].astype(np.float64).sum(1)).max() < 1e-5


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("kind", ["int8", "int16", "int32"])
def test_one_constant_is_stored_to_integers_of_each_width(hw: str, kind: str) -> None:
    y = np.zeros((3, 13), kind)
    assert np.all(computed(recorded("one_constant", (3,), y, n=13, B=16), y, hw) == 3)


@pytest.mark.parametrize("hw", DEVICES)
def test_one_constant_that_is_not_0_is_true_in_a_mask(hw: str) -> None:
    y = np.zeros((3, 13), bool)
    assert np.all(computed(recorded("one_constant", (3,), y, n=13, B=16), y, hw) == 1)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_loop_that_reads_more_often_than_the_one_before_is_read_iteration_by_iteration(hw: str) -> None:
    x, sums = drawn(3, 37), np.zeros(3, np.float32)
    call = recorded("read_twice", (3,), x, sums, n=37, B=8)
    tiles = np.pad(x.astype(np.float64), ((0, 0), (0, 3))).reshape(3, 5, 8).sum(2)
    made = computed(call, sums, hw)
    assert np.abs(made - tiles.sum(1) * (tiles @ [1, -1, 1, -1, 1])).max() < 1e-4


@pytest.mark.parametrize("hw", DEVICES)
def test_a_right_factor_that_rows_make_has_a_place_beside_what_it_is_made_of(hw: str) -> None:
    a, b, c = drawn(64, 32, fmt="float16"), drawn(32, 32, fmt="float16"), np.zeros((64, 32), np.float32)
    words = {"N": 32, "K": 32, "BM": 32, "BK": 16}
    call = recorded("changed_factor", (2,), a, b, c, KIND=0, **words)
    made = (b.astype(np.float32) + 1).astype(np.float16)
    assert np.abs(computed(call, c, hw) - a.astype(np.float64) @ made).max() < 1e-4
    call = recorded("changed_factor", (2,), a, b, c, KIND=1, **words)
    if hw == "h200":
        chosen = np.where(np.arange(32)[:, None] >= 3, b, 0).astype(np.float64)
        assert np.abs(computed(call, c, hw) - a.astype(np.float64) @ chosen).max() < 1e-4
        return
    with pytest.raises(ProgramError, match=AT):
        npusim.run(call, hw=hw)


def test_a_left_factor_that_a_mask_of_indices_chooses_is_read_on_gpus_and_refused_on_ascend() -> None:
    a, b, c = drawn(64, 32, fmt="float16"), drawn(32, 32, fmt="float16"), np.zeros((64, 32), np.float32)
    call = recorded("changed_factor", (2,), a, b, c, KIND=2, N=32, K=32, BM=32, BK=16)
    assert np.abs(computed(call, c, "h200") - np.tril(a).astype(np.float64) @ b).max() < 1e-4
    with pytest.raises(
        ProgramError, match=AT + "changed_factor: a tl.where with a mask of indices computes a factor of a product"
    ):
        npusim.run(call, hw="ascend_910b2", rows="all")


def test_a_v100_without_a_pipe_for_narrow_instructions_stores_8_bits() -> None:
    x, y = drawn(4, 32), np.zeros((4, 32), ml_dtypes.float8_e5m2)
    done = npusim.run(recorded("narrowed", (4,), x, y, n=32, B=32), hw="v100", rows="all")
    assert np.array_equal(np.reshape(done.output, x.shape).astype(np.float32), x.astype(y.dtype).astype(np.float32))
    assert done.cycles > 0
