"""TileLang-Ascend programs: read without the package, and held against float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.errors import NpusimError
from npusim.kernels.tilelang.ascend_recording import is_ascend_program, program_call
from npusim.kernels.tilelang.ascend_text import kernel_of
from npusim.kernels.tilelang.program import Language, load_program
from npusim.kernels.tilelang.statements import Literal, SerialLoop, TileBuffer, TileKernel
from npusim.kernels.tilelang.ttir_writer import written
from npusim.kernels.triton.calls import Argument, CallConfiguration

PROGRAMS = Path(__file__).with_name("developer_programs.py")
#: Relative RMSE of results in 16 bits, and in 32.
CLOSE, EXACT = 5e-4, 1e-5


def read(name: str, **arguments: object) -> TileKernel:
    language = Language()
    return kernel_of(load_program(PROGRAMS, name, arguments, language), language)


def computed(kernel: TileKernel, **tensors: Any) -> dict[str, Any]:
    """Return a kernel's tensors behind its run, each operation of its TTIR alone."""
    from ttir.interpreter import Open, interpret

    memory = {}
    for p in kernel.parameters:
        assert isinstance(p, TileBuffer)
        memory[p.name] = np.array(tensors.get(p.name, np.zeros(p.shape)), np.dtype(p.fmt)).reshape(-1)
    unit = Open("ascend.cube.k16.f16.f32", "vector_lanes", "correct", "")
    interpret(written(kernel), dict.fromkeys(memory), kernel.grid, memory, unit)
    return {p.name: memory[p.name].reshape(p.shape) for p in kernel.parameters if isinstance(p, TileBuffer)}


def drawn(*shape: int, seed: int = 0, fmt: str = "float16") -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(fmt)


def distance(made: Any, wanted: Any) -> float:
    made = made.astype(np.float64)
    return float(np.sqrt(((made - wanted) ** 2).mean() / (wanted**2).mean()))


@pytest.mark.parametrize("turned", [False, True])
def test_a_product_with_tail_blocks_is_that_of_float64(turned: bool) -> None:
    sizes = {"rows": 100, "columns": 90, "depth": 72, "part": 32}
    a, b = drawn(100, 72), drawn(*((90, 72) if turned else (72, 90)), seed=1)
    made = computed(read("product", **sizes, turned=turned), A=a, B=b)["C"]
    wanted = a.astype(np.float64) @ (b.T if turned else b).astype(np.float64)
    assert distance(made, wanted) < CLOSE


def test_blocks_that_cores_share_are_programs() -> None:
    a, b = drawn(128, 64), drawn(96, 64, seed=1)
    kernel = read("shared_blocks")
    assert kernel.grid == (12,)
    assert distance(computed(kernel, A=a, B=b)["C"], a.astype(np.float64) @ b.astype(np.float64).T) < CLOSE
    said = {
        "once": "statements before or after T.Persistent",
        "core": "the blocks that all cores share use cid, the number of one core",
    }
    for change, why in said.items():
        line = next(i for i, x in enumerate(PROGRAMS.read_text().splitlines(), 1) if x.endswith(f"# {change}"))
        with pytest.raises(NpusimError, match=f"developer_programs.py:{line}: {why}"):
            read("shared_blocks", change=change)


def test_a_tensor_may_be_overwritten() -> None:
    x = drawn(64, 32, fmt="float32")
    assert np.array_equal(computed(read("in_place"), X=x)["X"], x * np.float32(3))


def attended(q: Any, k: Any, v: Any, *, hides: bool) -> Any:
    scores = np.einsum("hid,hjd->hij", *(x.astype(np.float64) for x in (q, k))) / q.shape[-1] ** 0.5
    if hides:
        scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v.astype(np.float64)


@pytest.mark.parametrize("hides", [False, True])
def test_attention_is_that_of_float64(hides: bool) -> None:
    q, k, v = (drawn(2, 128, 64, seed=i) for i in range(3))
    made = computed(read("attention", hides=hides), Q=q, K=k, V=v)["O"]
    assert distance(made, attended(q, k, v, hides=hides)) < CLOSE


def test_attention_as_text_has_the_bits_of_the_packaged_kernel() -> None:
    from ttir.stored import stored

    q, k, v = (drawn(2, 128, 64, seed=i) for i in range(3))
    given = {"Q": q, "K": k, "V": v, "O": np.zeros_like(q)}
    (call,) = program_call(PROGRAMS, "attention", {"tile_rows": 64, "tile_columns": 64})
    call = replace(call, arguments={n: replace(x, data=given[n]) for n, x in call.tensors.items()})
    made = stored(npusim.run(call, hw="ascend_910b2", rows="all"), given)["O"]
    how: Any = {"tiling": {"block_q": 64, "block_kv": 64}, "causal": False, "rows": "all", "heads": "all"}
    packaged = npusim.run("flash", tensors={"q": q[None], "k": k[None], "v": v[None]}, hw="ascend_910b2", **how)
    assert packaged.output is not None
    assert np.array_equal(made, packaged.output[0])


def test_norms_are_those_of_float64() -> None:
    x, w = drawn(96, 64), drawn(64, seed=1)
    made = computed(read("rms_norm"), X=x, W=w)["Y"]
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * w.astype(np.float64)
    assert distance(made, wanted) < CLOSE
    x = drawn(40, 96, fmt="float32")
    made = computed(read("layer_norm"), X=x)["Y"]
    wide = x.astype(np.float64)
    wanted = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    assert distance(made, wanted) < EXACT


@pytest.mark.parametrize("columns", [128, 160])
@pytest.mark.parametrize("name", ["by_pairs", "by_slots"])
def test_loops_that_are_written_out_and_slots_of_two_loops_are_loops_over_tiles(name: str, columns: int) -> None:
    x = drawn(32, columns, fmt="float32")
    kernel = read(name, columns=columns)
    wide = x.astype(np.float64)
    wanted = wide / (1 + np.abs(wide).sum(-1, keepdims=True))
    assert distance(computed(kernel, X=x)["Y"], wanted) < EXACT
    loops = [s for s in kernel.body if isinstance(s, SerialLoop)]
    assert [s.high for s in loops] == [Literal(columns // 32)] * 2


def test_unlike_operations_are_no_iterations_of_one_loop() -> None:
    x, kernel = drawn(32, 160, fmt="float32"), read("by_pairs", change="other")
    assert [s.high for s in kernel.body if isinstance(s, SerialLoop)] == [Literal(5), Literal(2)]
    wide = x.astype(np.float64)
    sums = 1 + np.abs(wide).sum(-1, keepdims=True)
    is_odd = np.arange(160) // 32 % 2 == 1
    assert distance(computed(kernel, X=x)["Y"], np.where(is_odd, wide * sums, wide / sums)) < EXACT


@pytest.mark.parametrize("order", ["one loop", "two loops"])
def test_attention_to_chosen_keys_is_that_of_float64(order: str) -> None:
    """The rows of both vector cores are one tile, and the matrix core reads it behind their copies."""
    q, kv = drawn(4, 32, 64), drawn(128, 64, seed=1)
    rng = np.random.default_rng(2)
    chosen = np.stack([rng.choice(128, 96, replace=False) for _ in range(4)]).astype(np.int32)
    kernel = read("chosen_keys", order=order)
    assert any("each read of a workspace is assumed to come after its write" in n for n in kernel.notes)
    keys = kv.astype(np.float64)[chosen]
    powers = np.exp(q.astype(np.float64) @ keys.transpose(0, 2, 1) / 8)
    wanted = powers / powers.sum(-1, keepdims=True) @ keys
    assert distance(computed(kernel, Q=q, KV=kv, I=chosen)["O"], wanted) < CLOSE


@pytest.mark.parametrize(("how", "count"), [("two loops", 4), ("zeros", 3), ("zeros", 0)])
def test_a_product_that_first_iterations_clear_is_that_of_float64(how: str, count: int) -> None:
    a, b = drawn(32, 128), drawn(128, 32, seed=1)
    made = computed(read("cleared_once", how=how), A=a, B=b, N=np.array([count], np.int32))["C"]
    wanted = a.astype(np.float64)[:, : 32 * count] @ b.astype(np.float64)[: 32 * count]
    assert distance(made, wanted) < CLOSE if count else not made.any()


def test_a_result_that_an_if_may_not_clear_is_refused() -> None:
    with pytest.raises(NpusimError, match=r"developer_programs\.py:\d+: total is read before it is written"):
        written(read("cleared_once", how="if"))


def test_a_name_in_a_loop_begins_with_the_value_before_it() -> None:
    x, kernel = drawn(64, 32, fmt="float32"), read("shadowed")
    assert kernel.grid == (4,)
    assert any("cid has a value before this loop or if" in n for n in kernel.notes)
    assert np.array_equal(computed(kernel, X=x)["Y"], x + np.float32(1))


def test_a_longer_line_and_slots_in_an_if_have_their_values() -> None:
    x, w = drawn(4, 5, 64), drawn(4, 5, seed=1)
    wanted = x.astype(np.float64) * w.astype(np.float64)[..., None]
    assert distance(computed(read("padded_factors"), X=x, W=w)["Y"], wanted) < EXACT


def test_products_of_parts_are_added_up() -> None:
    from ttir.stored import stored

    (call,) = program_call(PROGRAMS, "split_product", {})
    given = {n: drawn(*x.shape, seed=i, fmt=x.fmt) for i, (n, x) in enumerate(call.tensors.items())}
    given["C"] = np.zeros_like(given["C"])
    arguments = {n: replace(x, data=given[n]) for n, x in call.tensors.items()}
    result = npusim.run(replace(call, arguments=arguments), hw="h200", rows="all")
    wanted = given["A"].astype(np.float64) @ given["B"].astype(np.float64)
    assert distance(stored(result, given)["C"], wanted) < CLOSE


def test_constants_beyond_a_format_wrap() -> None:
    x = drawn(16, 32, fmt="float32")
    assert np.array_equal(computed(read("wrapping"), X=x)["Y"], x - np.float32(112))


def test_a_number_of_a_tile_is_read_before_the_tile_is_filled() -> None:
    x, w = drawn(32, 32, fmt="float32"), drawn(32, seed=1, fmt="float32")
    assert np.array_equal(computed(read("first_of_all"), X=x, W=w)["Y"], x * w[0])


def test_a_softmax_is_that_of_float64() -> None:
    x = drawn(32, 48, fmt="float32")
    powers = np.exp(x.astype(np.float64))
    made = computed(read("softmax"), X=x)["Y"]
    assert distance(made, powers / powers.sum(-1, keepdims=True)) < EXACT


@pytest.mark.parametrize("kind", ["gelu", "silu", "leaky", "chosen", "elu"])
def test_activations_are_those_of_float64(kind: str) -> None:
    x = drawn(64, 72, fmt="float32")
    wide = x.astype(np.float64)
    wanted = {
        "gelu": wide / (1 + np.exp(-1.5957691216 * (wide + 0.044715 * wide**3))),
        "silu": wide / (1 + np.exp(-wide)),
        "leaky": np.where(wide >= 0, wide, wide / 4),
        "chosen": np.where(x > 0.5, 2 * wide, 1.0),
        "elu": np.where(wide > 0, wide, np.exp(wide) - 1),
    }
    assert distance(computed(read("activation", kind=kind), X=x)["Y"], wanted[kind]) < EXACT


def test_attention_on_both_cores_is_that_of_float64() -> None:
    q, k, v = (drawn(2, 128, 64, seed=i) for i in range(3))
    kernel = read("two_cores")
    assert [p.name for p in kernel.parameters if isinstance(p, TileBuffer)] == ["Q", "K", "V", "O"]
    assert distance(computed(kernel, Q=q, K=k, V=v)["O"], attended(q, k, v, hides=False)) < CLOSE


def test_an_output_that_the_other_core_reads_is_stored_once() -> None:
    a, b, d = drawn(128, 96), drawn(96, 128, seed=1), drawn(128, 128, seed=2)
    kernel = read("product_and_sum")
    assert written(kernel).count("tt.store") == 1
    wanted = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16).astype(np.float64) + d
    assert distance(computed(kernel, A=a, B=b, D=d)["C"], wanted) < CLOSE


CHANGES = {
    "unset": "wait_cross_flag 5: no set_cross_flag precedes it",
    "bounds": "a loop with flags between cores has different bounds from those of the loop in line ",
    "halves": "vid is not multiplied by the number of rows of a half",
    "same": "both vector cores access the same rows of scores_of in a nest that also accesses halves of tiles",
    "across": "T.reduce_max along the axis that is split between the vector cores",
    "places": "the kernel reads scores after weights has overwritten its bytes (T.annotate_address)",
}


@pytest.mark.parametrize("change", CHANGES)
def test_cores_that_do_not_join_are_refused_with_the_line(change: str) -> None:
    lines = PROGRAMS.read_text().splitlines()
    with pytest.raises(NpusimError) as caught:
        written(read("two_cores", change=change))
    assert CHANGES[change] in str(caught.value)
    place = str(caught.value).partition(": ")[0]
    line = int(place.rpartition(":")[2])
    assert lines[line - 1].endswith(f"# {change}")


KINDS = {
    "unwritten": "y is read before it is written",
    "sizes": "operands of several shapes: one has [8] elements, but the target has [8, 32]",
    "mode": "T.tile.cast from float32 to float32 with CAST_FLOOR; allowed: CAST_NONE, CAST_RINT",
    "count": "T.tile.cast has 8 elements, but its target has a different number",
    "word": "npusim has no rule for T.tile.sort",
    "pad": "T.copy has a pad_value= that is known only at run time",
    "bits": "the mask of a T.tile.select must come from a T.tile.compare with as many elements",
    "condition": "a condition that is known only at run time",
    "slice": "a slice of X is empty, or its length is known only at run time",
    "neighbour": "a part of the tile x (its index 0 is",
    "race": "an iteration of parallel loops reads an element of x that another iteration may write",
    "race of two": "an iteration of parallel loops reads an element of x that another iteration may write",
    "while": "a statement of the kind While",
    "real_shape": "T.reduce_sum has real_shape=, or a temporary buffer between its operands",
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_read_is_refused_with_its_line(kind: str) -> None:
    line = next(i for i, x in enumerate(PROGRAMS.read_text().splitlines(), 1) if x.endswith(f"# {kind}"))
    with pytest.raises(NpusimError) as caught:
        written(read("refused", kind=kind))
    assert str(caught.value).startswith(f"{PROGRAMS}:{line}: ")
    assert KINDS[kind] in str(caught.value)


def test_a_call_runs_on_a_device_with_the_lines_of_the_program() -> None:
    assert is_ascend_program(PROGRAMS)
    (call,) = program_call(PROGRAMS, "product", {})
    assert call.grid == (12,)
    assert f'"{PROGRAMS}":' in call.configurations[0].ttir
    result = npusim.run(call, hw="ascend_910b2")
    assert 2_000 < result.cycles < 100_000
    assert any("flags and barriers change no value" in n and "T.barrier_all" in n for n in result.notes)
    (other,) = program_call(PROGRAMS, "rms_norm", {})
    assert other.grid == (6, 2)
    assert any(
        "vid (the number of a vector core) is treated as one more axis" in n for n in other.configurations[0].notes
    )


@pytest.mark.parametrize(
    ("name", "output"), [("product", "C"), ("attention", "O"), ("two_cores", "O"), ("rms_norm", "Y")]
)
def test_a_run_on_a_device_has_the_values(name: str, output: str) -> None:
    from ttir.stored import stored

    (call,) = program_call(PROGRAMS, name, {})
    given = {n: drawn(*x.shape, seed=i) for i, (n, x) in enumerate(call.tensors.items())}
    arguments = {n: replace(x, data=given[n]) for n, x in call.tensors.items()}
    result = npusim.run(replace(call, arguments=arguments), hw="ascend_910b2", rows="all")
    wide = {n: x.astype(np.float64) for n, x in given.items()}
    if name == "product":
        wanted = wide["A"] @ wide["B"]
    elif name in ("attention", "two_cores"):
        wanted = attended(wide["Q"], wide["K"], wide["V"], hides=False)
    else:
        wanted = wide["X"] / np.sqrt((wide["X"] ** 2).mean(-1, keepdims=True) + 1e-5) * wide["W"]
    assert distance(stored(result, given)[output], wanted) < CLOSE


@pytest.mark.parametrize("name", ["by_pairs", "by_slots", "chosen_keys"])
def test_a_run_has_the_values_of_loops_written_out_and_of_gathered_rows(name: str) -> None:
    from ttir.stored import stored

    (call,), kernel = program_call(PROGRAMS, name, {}), read(name)
    places = np.stack([np.random.default_rng(i).choice(128, 96, replace=False) for i in range(4)]).astype(np.int32)
    tensors = [p for p in kernel.parameters if isinstance(p, TileBuffer)]
    given = {p.name: places if p.name == "I" else drawn(*p.shape, seed=i, fmt=p.fmt) for i, p in enumerate(tensors)}
    arguments = {p.name: Argument(p.shape, p.strides, 0, p.fmt, i, given[p.name]) for i, p in enumerate(tensors)}
    one = CallConfiguration(written(kernel), kernel.grid, dict(kernel.options), {}, "", ())
    result = npusim.run(replace(call, arguments=arguments, configurations=(one,)), hw="ascend_910b2", rows="all")
    wide = {n: x.astype(np.float64) for n, x in given.items()}
    if name == "chosen_keys":
        keys = wide["KV"][places]
        powers = np.exp(wide["Q"] @ keys.transpose(0, 2, 1) / 8)
        made, wanted = stored(result, given)["O"], powers / powers.sum(-1, keepdims=True) @ keys
        assert distance(made, wanted) < CLOSE
        return
    wanted = wide["X"] / (1 + np.abs(wide["X"]).sum(-1, keepdims=True))
    assert distance(stored(result, given)["Y"], wanted) < EXACT


def test_a_product_of_a_tile_by_itself_has_its_values() -> None:
    from ttir.stored import stored

    (call,) = program_call(PROGRAMS, "by_itself", {})
    given = {"X": drawn(64, 96), "Y": drawn(2, 32, 32)}
    arguments = {n: replace(x, data=given[n]) for n, x in call.tensors.items()}
    result = npusim.run(replace(call, arguments=arguments), hw="ascend_910b2", rows="all")
    x = given["X"].astype(np.float64).reshape(2, 32, 96)
    assert distance(stored(result, given)["Y"], x @ x.transpose(0, 2, 1)) < CLOSE


def test_both_cores_in_an_if_are_one_sequence() -> None:
    from ttir.stored import stored

    (call,) = program_call(PROGRAMS, "products_of_tasks", {})
    given = {n: drawn(*x.shape, seed=i, fmt=x.fmt) for i, (n, x) in enumerate(call.tensors.items())}
    arguments = {n: replace(x, data=given[n]) for n, x in call.tensors.items()}
    result = npusim.run(replace(call, arguments=arguments), hw="ascend_910b2", rows="all")
    a, b = (given[n].astype(np.float64) for n in "AB")
    assert distance(stored(result, given)["O"], 2 * a @ b.transpose(0, 2, 1)) < CLOSE
    line = next(i for i, x in enumerate(PROGRAMS.read_text().splitlines(), 1) if "if task < tasks:" in x)
    with pytest.raises(NpusimError, match=f"developer_programs.py:{line}: an if leaves a flag between cores set"):
        read("products_of_tasks", leaves_set=True)


@pytest.mark.parametrize(
    ("mode", "rounded"), [("CAST_RINT", np.rint), ("CAST_FLOOR", np.floor), ("CAST_CEIL", np.ceil)]
)
def test_numbers_of_16_bits_are_rounded_to_whole_ones(mode: str, rounded: Any) -> None:
    from ttir.stored import stored

    (call,) = program_call(PROGRAMS, "whole_numbers", {"mode": mode})
    given = {"X": drawn(64, 32), "Y": np.zeros((64, 32), np.int8)}
    arguments = {n: replace(x, data=given[n]) for n, x in call.tensors.items()}
    result = npusim.run(replace(call, arguments=arguments), hw="ascend_910b2", rows="all")
    assert np.array_equal(stored(result, given)["Y"], rounded(given["X"] * np.float16(7)))


SCRIPT = """
import torch
from developer_programs import product, rms_norm, refused

kernel = product(rows=64, columns=64, depth=64)
a, b = torch.randn(64, 64, dtype=torch.float16).npu(), torch.randn(64, 64, dtype=torch.float16).npu()
torch.testing.assert_close(kernel(a, b), a @ b)
rms_norm(rows=32)(X=torch.randn(32, 64, dtype=torch.float16), W=torch.ones(64, dtype=torch.float16))
refused(kind="word")(torch.randn(64, 32))
"""


def test_a_program_is_recorded_as_it_runs(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from npusim.cli.app import app
    from npusim.kernels.triton.calls import read_calls

    script, out = tmp_path / "bench.py", tmp_path / "calls.npz"
    script.write_text(SCRIPT)
    (tmp_path / PROGRAMS.name).write_text(PROGRAMS.read_text())
    made = CliRunner().invoke(app, ["record", str(script), "-o", str(out)])
    assert made.exit_code == 0, made.output
    first, second, third = read_calls(out)
    assert (first.grid, second.grid) == ((1,), (2, 2))
    assert first.where == f"{script}:7"
    assert list(second.tensors) == ["X", "W", "Y"]
    assert "npusim has no rule for T.tile.sort" in third.configurations[0].refused
    named = CliRunner().invoke(app, ["record", f"{PROGRAMS}::product", "-a", "rows=128", "-o", str(out)])
    assert named.exit_code == 0, named.output
    assert read_calls(out)[0].grid == (6,)
