"""The TTIR that TileLang programs become: a stored text, and statements written here; needs no TileLang."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.errors import NpusimError, ProgramError
from npusim.kernels.tilelang.statements import (
    Applied,
    BoundValue,
    BufferElement,
    BufferPart,
    Conditional,
    Elementwise,
    Expression,
    Literal,
    MatrixProduct,
    ParallelNest,
    SerialLoop,
    Statement,
    TileBuffer,
    TileKernel,
    TileReduction,
    Variable,
    interval,
    linear,
)
from npusim.kernels.tilelang.ttir_writer import part_as_nest, written
from npusim.kernels.triton.calls import Argument, Call, CallConfiguration, Calls, read_calls
from npusim.kernels.triton.ttir_text import Line

HERE = Path(__file__).parent
LINE = Line("kernel.py", 7)
STORED = (HERE / "flash.ttir").read_text()
#: Relative RMSE of results in 16 bits.
CLOSE = 4e-4


def call_of(text: str, grid: tuple[int, ...], tensors: dict[str, Any]) -> Call:
    """Return the record of a launch of contiguous tensors."""
    arguments = {}
    for number, (name, x) in enumerate(tensors.items()):
        strides = tuple(s // x.itemsize for s in x.strides)
        arguments[name] = Argument(x.shape, strides, 0, str(x.dtype), number, x)
    options = {"num_warps": 4, "num_stages": 1}
    configuration = CallConfiguration(text, grid, options, {}, notes=("a note of the reader",))
    return Call("kernel", "kernel.py", 7, "kernel.py:20", arguments, (configuration,), language="tilelang 0.1.15")


def result_of(call: Call, hw: str, name: str) -> Any:
    from ttir.stored import stored

    result = npusim.run(call, hw=hw, rows="all")
    return stored(result, {n: x.data for n, x in call.tensors.items()})[name]


def difference(made: Any, wanted: Any) -> float:
    return float(np.sqrt(((made - wanted) ** 2).mean() / (wanted**2).mean()))


def normal(*shape: int, dtype: str = "float16") -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_a_stored_text_has_its_bits(hw: str, tmp_path: Path) -> None:
    q, k, v, o = normal(128, 2, 64), normal(128, 1, 64), normal(128, 1, 64), normal(128, 2, 64)
    path = Calls([call_of(STORED, (2, 2, 1), {"Q": q, "K": k, "V": v, "O": o})]).save(tmp_path / "calls.npz")
    (call,) = read_calls(path)
    assert call.language == "tilelang 0.1.15"
    s = np.einsum("ihd,jd->hij", q.astype(float), k[:, 0].astype(float)) / 8
    p = np.exp(np.where(np.tri(128, dtype=bool), s, -np.inf))
    wanted = np.einsum("hij,jd->ihd", p / p.sum(-1, keepdims=True), v[:, 0].astype(float))
    assert difference(result_of(call, hw, "O"), wanted) < CLOSE


def test_a_run_says_that_registers_are_an_estimate_and_asks_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from npusim.kernels.triton import recorded

    def asked(*_: object) -> None:
        raise AssertionError("Triton's compiler makes other code")

    monkeypatch.setattr(recorded, "compiled_text", asked)
    tensors = {"Q": normal(128, 2, 64), "K": normal(128, 1, 64), "V": normal(128, 1, 64), "O": normal(128, 2, 64)}
    notes = npusim.run(call_of(STORED, (2, 2, 1), tensors), hw="h200", numerics=False).notes
    assert any("tilelang 0.1.15: registers are an estimate" in n for n in notes)
    assert "a note of the reader" in notes


def test_a_tuner_has_configurations_as_tilelang_writes_them(tmp_path: Path) -> None:
    from npusim.simulation.request import Request
    from npusim.studies.tune.configurations import configurations_of

    text = written(kernel(copied(A, TILE), copied(TILE, Y)))
    a = normal(64, 32, dtype="float32")
    call = call_of(text, (4,), {"A": a, "Y": np.zeros_like(a)})
    (one,) = call.configurations
    both = tuple(one._replace(constants={"tile": n, "threads": 128}) for n in (16, 32))
    path = Calls([replace(call, configurations=both)]).save(tmp_path / "calls.npz")
    found = configurations_of(Request(schedule=f"{path}::0", hw="h200"), {})
    assert [c.decorator for c in found] == ["{'tile': 16, 'threads': 128}", "{'tile': 32, 'threads': 128}"]


@pytest.mark.skipif(find_spec("tilelang") is None, reason="TileLang is not installed: npusim[tilelang]")
def test_the_stored_text_is_what_the_reader_writes() -> None:
    from tests.tile_language.tile_kernels import drawn, flash

    with npusim.record() as calls:
        flash(2, 2, 128, 64, True)(*drawn((128, 2, 64), (128, 1, 64), (128, 1, 64)))
    assert calls[0].configurations[0].ttir.replace(f"{HERE}/", "") == STORED


# ---------------------------------------------------------------- statements

A = TileBuffer("A", (64, 32), "float32", (32, 1), is_global=True)
Y = TileBuffer("Y", (64, 32), "float32", (32, 1), is_global=True)
TILE, OTHER = TileBuffer("tile", (16, 32), "float32"), TileBuffer("other", (16, 32), "float32")
ONCE = TileBuffer("once", (16, 32), "float32")
BLOCK = Applied("*", (Variable("b"), Literal(16)))
ROWS = (("i", 16), ("j", 32))


def part(buffer: TileBuffer) -> BufferPart:
    return BufferPart(buffer, (BLOCK if buffer.is_global else Literal(0), Literal(0)), (16, 32))


def copied(source: TileBuffer, target: TileBuffer) -> ParallelNest:
    return part_as_nest(part(source), part(target), LINE)


def assigned(target: TileBuffer, value: Expression, condition: Expression | None = None) -> ParallelNest:
    """Return ``target[i, j] = value`` for all elements of a tile."""
    indices = (Variable("i"), Variable("j"))
    return ParallelNest(ROWS, (Elementwise(ROWS, target, indices, value, condition, LINE),), LINE)


def at(buffer: TileBuffer, *indices: Expression) -> BufferElement:
    return BufferElement(buffer, indices or (Variable("i"), Variable("j")))


def kernel(*body: Statement) -> TileKernel:
    options = {"num_warps": 4, "num_stages": 1}
    return TileKernel("kernel", (A, Y), (4,), ("b",), body, options, (), LINE)


def computed(*body: Statement, rows: int = 64) -> tuple[Any, Any]:
    """Return A, with fewer rows perhaps, and what a kernel stores to Y, each operation alone."""
    from ttir.interpreter import Open, interpret

    a = normal(rows, 32, dtype="float32")
    memory = {"A": a.reshape(-1), "Y": np.zeros(64 * 32, np.float32)}
    interpret(written(kernel(*body)), dict.fromkeys(memory), (4,), memory, Open("ieee.f64", "sequential", "", ""))
    return a, memory["Y"].reshape(64, 32)


def test_a_tile_read_before_it_is_written_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"kernel\.py:7: tile is read before it is written"):
        written(kernel(copied(TILE, Y)))


def test_a_tile_that_an_if_writes_on_one_way_is_refused_behind_it() -> None:
    rule = Applied("lt", (Variable("b"), Literal(2)))
    with pytest.raises(ProgramError, match="tile is read after the if"):
        written(kernel(Conditional(rule, (copied(A, TILE),), (), LINE), copied(TILE, Y)))


def test_a_tile_that_a_loop_may_not_write_is_refused_behind_it() -> None:
    body = (copied(A, TILE),)
    with pytest.raises(ProgramError, match="tile is read before it is written, in the loop or after it"):
        written(kernel(SerialLoop("k", Literal(0), Variable("b"), body, LINE), copied(TILE, Y)))
    assert "scf.for" in written(kernel(SerialLoop("k", Literal(0), Literal(2), body, LINE), copied(TILE, Y)))


def test_a_loop_carries_the_tiles_that_it_changes() -> None:
    doubled = assigned(TILE, Applied("+", (at(TILE), at(TILE))))
    a, y = computed(copied(A, TILE), SerialLoop("k", Literal(0), Literal(3), (doubled,), LINE), copied(TILE, Y))
    assert np.array_equal(y, 8 * a)


@pytest.mark.parametrize("name", ["p", "values", "label", "mask"])
def test_a_tensor_may_have_any_name(name: str) -> None:
    named = replace(A, name=name)
    text = written(replace(kernel(copied(named, TILE), copied(TILE, Y)), parameters=(named, Y)))
    a = normal(64, 32, dtype="float32")
    call = call_of(text, (4,), {name: a, "Y": np.zeros((64, 32), np.float32)})
    assert np.array_equal(result_of(call, "h200", "Y"), a)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_loop_that_reads_the_same_elements_is_done_as_often_as_it_says(count: int) -> None:
    doubled = assigned(TILE, Applied("+", (at(TILE), at(OTHER))))
    loop = SerialLoop("k", Literal(0), Literal(count), (copied(A, OTHER), doubled), LINE)
    text = written(kernel(copied(A, TILE), loop, copied(TILE, Y)))
    a = normal(64, 32, dtype="float32")
    made = result_of(call_of(text, (4,), {"A": a, "Y": np.zeros_like(a)}), "h200", "Y")
    assert difference(made, (count + 1) * a.astype(np.float64)) < 1e-6


def test_a_loop_that_reads_the_same_elements_often_is_refused() -> None:
    doubled = assigned(TILE, Applied("+", (at(TILE), at(OTHER))))
    loop = SerialLoop("k", Literal(0), Literal(50), (copied(A, OTHER), doubled), LINE)
    text = written(kernel(copied(A, TILE), loop, copied(TILE, Y)))
    a = normal(64, 32, dtype="float32")
    with pytest.raises(ProgramError, match=r"kernel\.py:7: a loop reads the same elements in each iteration"):
        result_of(call_of(text, (4,), {"A": a, "Y": np.zeros_like(a)}), "h200", "Y")


def test_a_kernel_that_reads_nothing_stores_its_number() -> None:
    text = written(kernel(assigned(TILE, Literal(1.5, "float32")), copied(TILE, Y)))
    call = call_of(text, (4,), {"A": normal(64, 32, dtype="float32"), "Y": np.zeros((64, 32), np.float32)})
    assert np.array_equal(np.asarray(result_of(call, "h200", "Y")).ravel(), np.full(64 * 32, 1.5))


def test_a_tile_that_each_iteration_clears_is_no_state() -> None:
    """As an accumulator of a few products that is added to another one and cleared."""
    zero = Literal(0.0, "float32")
    added = assigned(TILE, Applied("+", (at(TILE), at(ONCE))))
    total = assigned(OTHER, Applied("+", (at(OTHER), at(TILE))))
    loop = SerialLoop("k", Literal(0), Literal(3), (added, total, assigned(TILE, zero)), LINE)
    body = (copied(A, ONCE), assigned(TILE, zero), assigned(OTHER, zero), loop, copied(OTHER, Y))
    a, y = computed(*body)
    assert np.allclose(y, 3 * a, rtol=1e-6)
    assert "iter_args(%other_" in written(kernel(*body))
    assert "iter_args(%tile_" not in written(kernel(*body))


def test_a_part_of_a_copy_is_read_from_its_tensor() -> None:
    half = at(TILE, Variable("i"), Applied("//", (Variable("j"), Literal(2))))
    a, y = computed(copied(A, TILE), assigned(OTHER, half), copied(OTHER, Y))
    assert np.array_equal(y, a[:, np.arange(32) // 2])


def test_a_part_of_a_computed_tile_is_computed_from_its_tensors() -> None:
    half = at(TILE, Variable("i"), Applied("//", (Variable("j"), Literal(2))))
    changed = assigned(TILE, Applied("*", (at(TILE), Literal(2.0, "float32"))))
    a, y = computed(copied(A, TILE), changed, assigned(OTHER, half), copied(OTHER, Y))
    assert np.array_equal(y, 2 * a[:, np.arange(32) // 2])


def test_a_copy_of_a_tensor_that_is_stored_to_is_no_copy_any_more() -> None:
    half = at(TILE, Variable("i"), Applied("//", (Variable("j"), Literal(2))))
    with pytest.raises(ProgramError, match="from nothing but tensors"):
        written(kernel(copied(Y, TILE), copied(TILE, Y), assigned(OTHER, half), copied(OTHER, Y)))


def test_accesses_out_of_bounds_read_zero() -> None:
    short = TileBuffer("A", (60, 32), "float32", (32, 1), is_global=True)
    read = part_as_nest(BufferPart(short, (BLOCK, Literal(0)), (16, 32)), part(TILE), LINE)
    a, y = computed(read, copied(TILE, Y), rows=60)
    assert np.array_equal(y, np.pad(a, ((0, 4), (0, 0))))


def test_the_first_part_of_a_tile_is_copied_alone() -> None:
    first = BufferPart(TILE, (Literal(0), Literal(0)), (8, 32))
    small = TileBuffer("small", (8, 32), "float32")
    whole, target = (BufferPart(b, (x, Literal(0)), (8, 32)) for b, x in ((small, Literal(0)), (Y, BLOCK)))
    doubled = assigned(TILE, Applied("+", (at(TILE), at(TILE))))
    a, y = computed(copied(A, TILE), doubled, part_as_nest(first, whole, LINE), part_as_nest(whole, target, LINE))
    wanted = (2 * a).reshape(4, 16, 32)
    wanted[:, 8:] = 0
    assert np.array_equal(y, wanted.reshape(64, 32))


def test_the_first_part_of_a_tile_is_stored_alone_under_a_name_of_its_rows() -> None:
    axes, j = (("i", 8), ("j", 32)), Variable("j")
    row = BoundValue("row", Applied("+", (BLOCK, Variable("i"))), LINE)
    store = Elementwise(axes, Y, (Variable("row"), j), at(TILE), None, LINE)
    doubled = assigned(TILE, Applied("+", (at(TILE), at(TILE))))
    a, y = computed(copied(A, TILE), doubled, in_nest(axes, row, store))
    wanted = (2 * a).reshape(4, 16, 32)
    wanted[:, 8:] = 0
    assert np.array_equal(y, wanted.reshape(64, 32))


def test_an_if_that_copies_on_both_ways_chooses_the_elements() -> None:
    rule = Applied("lt", (Variable("b"), Literal(2)))
    last = part_as_nest(BufferPart(A, (Literal(48), Literal(0)), (16, 32)), part(TILE), LINE)
    a, y = computed(Conditional(rule, (copied(A, TILE),), (last,), LINE), copied(TILE, Y))
    assert np.array_equal(y, np.concatenate([a[:32], a[48:], a[48:]]))


def test_quotients_are_rounded_down() -> None:
    moved = Applied("//", (Applied("-", (Variable("b"), Literal(3))), Literal(2)))  # -2, -1, -1, 0
    rest = Applied("%", (Applied("-", (Variable("b"), Literal(3))), Literal(2)))  # 1, 0, 1, 0
    number = Applied("cast", (Applied("+", (moved, Applied("*", (rest, Literal(10))))),), "float32")
    _, y = computed(assigned(TILE, number), copied(TILE, Y))
    assert y[::16, 0].tolist() == [8, -1, 9, 0]


def test_a_remainder_that_is_rounded_to_zero_has_the_sign_of_its_first_number() -> None:
    rest = Applied("rem", (Applied("-", (Variable("b"), Literal(3))), Literal(2)))
    _, y = computed(assigned(TILE, Applied("cast", (rest,), "float32")), copied(TILE, Y))
    assert y[::16, 0].tolist() == [-1, 0, -1, 0]


@pytest.mark.parametrize("word", ["//", "%"])
@pytest.mark.parametrize("divisor", [Literal(-2), Variable("b"), Applied("-", (Variable("b"), Literal(9)))])
def test_a_quotient_by_a_number_that_may_be_below_1_is_refused(word: str, divisor: Expression) -> None:
    number = Applied("cast", (Applied(word, (Variable("b"), divisor)),), "float32")
    with pytest.raises(ProgramError, match=r"kernel\.py:7: the right side of \S+ may be below 1"):
        written(kernel(assigned(TILE, number), copied(TILE, Y)))


def test_bounds_of_a_quotient_of_an_unknown_number_are_infinite() -> None:
    for sign, wanted in ((1, (-np.inf, np.inf)), (-1, (-np.inf, 3))):
        x = {"x": (-np.inf, np.inf if sign > 0 else 6)}
        assert interval(Applied("//", (Variable("x"), Literal(2))), x) == wanted


@pytest.mark.parametrize("is_linear", [True, False])
def test_a_sum_has_columns_beyond_a_tensor_that_a_choice_gives_a_number(is_linear: bool) -> None:
    """A column beyond the tensor is 0 where the mask holds, and the number elsewhere."""
    short, row = TileBuffer("A", (64, 60), "float32", (60, 1), is_global=True), TileBuffer("row", (16,), "float32")
    y = TileBuffer("Y", (64,), "float32", (1,), is_global=True)
    j = Applied("+", (Applied("*", (Variable("k"), Literal(32))), Variable("j")))
    keys = j if is_linear else Applied("//", (j, Literal(4)))
    rows = Variable("i") if is_linear else Applied("//", (Variable("i"), Literal(4)))

    def text(number: float) -> str:
        read = BufferPart(short, (BLOCK, Applied("*", (Variable("k"), Literal(32)))), (16, 32))
        rule = Applied("ge", (rows, keys))
        chosen = Applied("select", (rule, at(TILE), Literal(number, "float32")))
        whole, sums = BufferPart(TILE, (Literal(0), Literal(0)), (16, 32)), BufferPart(row, (Literal(0),), (16,))
        body = (part_as_nest(read, whole, LINE), assigned(TILE, chosen))
        total = TileReduction(whole, sums, "sum", 1, False, LINE)
        start = Elementwise((("i", 16),), row, (Variable("i"),), Literal(0.0, "float32"), None, LINE)
        loop = SerialLoop("k", Literal(0), Literal(2), (*body, total), LINE)
        store = part_as_nest(sums, BufferPart(y, (BLOCK,), (16,)), LINE)
        statements = (in_nest((("i", 16),), start), loop, store)
        return written(replace(kernel(*statements), parameters=(short, y)))

    a, rows_of, keys_of = normal(64, 60, dtype="float32"), np.arange(64)[:, None] % 16, np.arange(60)[None]
    tensors = {"A": a, "Y": np.zeros(64, np.float32)}
    seen = rows_of >= keys_of if is_linear else rows_of // 4 >= keys_of // 4
    made = result_of(call_of(text(0.0), (4,), tensors), "h200", "Y")
    assert difference(made, np.where(seen, a.astype(np.float64), 0).sum(1)) < 1e-6
    wide, beyond = np.pad(a.astype(np.float64), ((0, 0), (0, 4))), np.arange(64)[None]
    seen = rows_of >= beyond if is_linear else rows_of // 4 >= beyond // 4
    made = result_of(call_of(text(2.5), (4,), tensors), "h200", "Y")
    assert difference(made, np.where(seen, wide, 2.5).sum(1)) < 1e-6


def test_two_loops_go_in_the_order_of_a_transposed_tile() -> None:
    square, turned = TileBuffer("square", (16, 16), "float32"), TileBuffer("turned", (16, 16), "float32")
    part_of = BufferPart(A, (BLOCK, Literal(0)), (16, 16))
    whole = BufferPart(square, (Literal(0), Literal(0)), (16, 16))
    column = TileBuffer("column", (16,), "float32")
    scale = part_as_nest(
        BufferPart(A, (Literal(0), Literal(0)), (1, 16)), BufferPart(column, (Literal(0),), (16,)), LINE
    )
    axes, (i, j) = (("i", 16), ("j", 16)), (Variable("i"), Variable("j"))
    product = Applied("*", (at(square, j, i), at(column, j)))
    changed = in_nest(axes, Elementwise(axes, turned, (i, j), product, None, LINE))
    store = part_as_nest(replace(whole, buffer=turned), BufferPart(Y, (BLOCK, Literal(0)), (16, 16)), LINE)
    body = (part_as_nest(part_of, whole, LINE), scale, changed, store)
    a, y = computed(*body)
    wanted = (a[:, :16].reshape(4, 16, 16) * a[0, :16, None]).transpose(0, 2, 1).reshape(64, 16)
    assert np.array_equal(y[:, :16], wanted)
    (trans,) = [line for line in written(kernel(*body)).splitlines() if "tt.trans" in line]
    assert "%t" in trans  # of the product, and not of what is read


def test_a_sum_has_the_format_of_its_target() -> None:
    half, row = TileBuffer("half", (16, 32), "float16"), TileBuffer("row", (16,), "float32")
    total = TileReduction(
        BufferPart(half, (Literal(0), Literal(0)), (16, 32)),
        BufferPart(row, (Literal(0),), (16,)),
        "sum",
        1,
        True,
        LINE,
    )
    spread = assigned(TILE, at(row, Variable("i")))
    a, y = computed(copied(A, half), total, spread, copied(TILE, Y))
    assert difference(y, a.astype(np.float16).astype(float).sum(1, keepdims=True) + 0 * y) < 1e-6


def test_a_part_of_a_copy_in_fewer_bits_has_these_bits() -> None:
    value: Expression = at(A, Applied("+", (BLOCK, Variable("i"))), Variable("j"))
    for fmt in ("float16", "float32"):
        value = Applied("cast", (value,), fmt)
    half = at(TILE, Variable("i"), Applied("//", (Variable("j"), Literal(2))))
    a, y = computed(assigned(TILE, value), assigned(OTHER, half), copied(OTHER, Y))
    narrow = a.astype(np.float16)
    assert np.any(narrow != a)
    assert np.array_equal(y, narrow[:, np.arange(32) // 2])


def test_a_result_has_no_name_of_a_parameter() -> None:
    text = written(kernel(copied(A, TILE), copied(TILE, Y)))
    (result,) = set(re.findall(r"%(\w+) = tt.load", text))
    named = replace(A, name=result)
    other = written(replace(kernel(copied(named, TILE), copied(TILE, Y)), parameters=(named, Y)))
    assert f"%{result}: !tt.ptr" in other
    assert f"%{result} = " not in other


def test_a_product_that_clears_a_tile_of_other_numbers_is_refused_where_the_loop_may_not_run() -> None:
    c = TileBuffer("c", (16, 16), "float32")
    whole = BufferPart(c, (Literal(0), Literal(0)), (16, 16))
    product = MatrixProduct(
        part(TILE), part(TILE), whole, (False, True), Applied("eq", (Variable("k"), Literal(0))), LINE
    )

    def text(start: float, high: Expression) -> str:
        loop = SerialLoop("k", Literal(0), high, (product,), LINE)
        return written(kernel(copied(A, TILE), *_filled(c, start), loop))

    with pytest.raises(ProgramError, match=r"kernel\.py:7: c is not cleared if the loop has no iteration"):
        text(1.0, Variable("b"))
    assert "tt.dot" in text(1.0, Applied("+", (Variable("b"), Literal(1))))
    assert "tt.dot" in text(0.0, Variable("b"))


def in_nest(axes: tuple[tuple[str, int], ...], *body: Elementwise | BoundValue) -> ParallelNest:
    return ParallelNest(axes, body, LINE)


def test_a_value_has_its_name_behind_an_assignment_of_it() -> None:
    bound = BoundValue("y", Applied("*", (at(ONCE), at(ONCE))), LINE)
    indices, y = (Variable("i"), Variable("j")), Variable("y")
    first = Elementwise(ROWS, TILE, indices, y, None, LINE)
    second = Elementwise(ROWS, OTHER, indices, Applied("+", (y, at(TILE))), None, LINE)
    a, made = computed(copied(A, ONCE), in_nest(ROWS, bound, first, second), copied(OTHER, Y))
    assert np.array_equal(made, 2 * a * a)


def test_a_tile_has_its_name_behind_a_copy_of_it() -> None:
    doubled = assigned(TILE, Applied("+", (at(TILE), at(TILE))))
    total = assigned(OTHER, Applied("+", (at(OTHER), at(TILE))))
    a, made = computed(copied(A, TILE), doubled, copied(TILE, OTHER), total, copied(OTHER, Y))
    assert np.array_equal(made, 4 * a)


@pytest.mark.parametrize("is_bound", [False, True])
def test_a_change_that_a_loop_without_an_axis_repeats_is_refused(is_bound: bool) -> None:
    axes, indices = (*ROWS, ("k", 4)), (Variable("i"), Variable("j"))
    value: Expression = Applied("+", (at(TILE), Literal(1.0, "float32")))
    before = [BoundValue("y", value, LINE)] if is_bound else []
    change = Elementwise(axes, TILE, indices, Variable("y") if is_bound else value, None, LINE)
    with pytest.raises(ProgramError, match=r"kernel\.py:7: tile has no axis for a loop of this nest"):
        written(kernel(copied(A, TILE), in_nest(axes, *before, change), copied(TILE, Y)))
    fill = Elementwise(axes, TILE, indices, Literal(3.0, "float32"), None, LINE)
    _, y = computed(copied(A, TILE), in_nest(axes, fill), copied(TILE, Y))
    assert np.all(y == 3)


def test_a_store_of_several_elements_to_one_place_is_refused() -> None:
    indices = (Applied("+", (BLOCK, Variable("i"))), Literal(0))
    store = Elementwise(ROWS, Y, indices, at(A, Applied("+", (BLOCK, Variable("i"))), Variable("j")), None, LINE)
    with pytest.raises(ProgramError, match=r"kernel\.py:7: a loop for which Y has no axis"):
        written(kernel(in_nest(ROWS, store)))


def test_sizes_are_sums_whose_terms_cancel() -> None:
    first = Applied("*", (Variable("b"), Literal(64)))
    last = Applied("+", (Variable("first"), Literal(64)))
    assert linear(Applied("-", (last, first)), {"first": first}) == {Literal(1): 64}
    assert linear(Applied("-", (last, Variable("x"))), {"first": first}).keys() > {Literal(1)}


def test_a_product_that_a_value_clears_is_refused() -> None:
    c = TileBuffer("c", (16, 16), "float32")
    whole = BufferPart(c, (Literal(0), Literal(0)), (16, 16))
    rule = Applied("eq", (Variable("k"), Literal(1)))
    product = MatrixProduct(part(TILE), part(TILE), whole, (False, True), rule, LINE)
    with pytest.raises(ProgramError, match="c is read before it is written"):
        written(kernel(copied(A, TILE), SerialLoop("k", Literal(0), Literal(2), (product,), LINE)))
    start = ParallelNest((), (), LINE)
    with pytest.raises(NpusimError, match="clear_accum depends on a value"):
        written(
            kernel(copied(A, TILE), start, *_filled(c, 0.0), SerialLoop("k", Literal(0), Literal(2), (product,), LINE))
        )


def _filled(c: TileBuffer, number: float) -> list[Statement]:
    axes = (("i", 16), ("j", 16))
    x = Elementwise(axes, c, (Variable("i"), Variable("j")), Literal(number, "float32"), None, LINE)
    return [ParallelNest(axes, (x,), LINE)]


@pytest.mark.parametrize("word", ["+", "-", "*", "//", "%", "min", "max"])
def test_bounds_of_an_expression_have_all_its_values(word: str) -> None:
    x, y = Variable("x"), Variable("y")
    rng = np.random.default_rng(ord(word[0]))
    for _ in range(200):
        (a, b), (c, d) = (sorted(map(int, rng.integers(-9, 9, 2))) for _ in range(2))
        c, d = (max(c, 1), max(d, 1)) if word in ("//", "%") else (c, d)
        low, high = interval(Applied(word, (x, y)), {"x": (a, b), "y": (c, d)})
        apply = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "//": int.__floordiv__, "%": int.__mod__}
        function = apply.get(word, {"min": min, "max": max}.get(word))
        assert function is not None
        made = [function(p, q) for p in range(a, b + 1) for q in range(c, d + 1)]
        assert low <= min(made)
        assert max(made) <= high


def _integer_product(count: int, *behind: Statement) -> TileKernel:
    """Return a kernel of int8: ``count`` parts of 32 of a sum, times 0.5, of 16 rows and 16 columns."""
    a = TileBuffer("A", (16, 32 * count), "int8", (32 * count, 1), is_global=True)
    b = TileBuffer("B", (16, 32 * count), "int8", (32 * count, 1), is_global=True)
    y = TileBuffer("Y", (16, 16), "float32", (16, 1), is_global=True)
    left, right = TileBuffer("left", (16, 32), "int8"), TileBuffer("right", (16, 32), "int8")
    total, again = TileBuffer("total", (16, 16), "int32"), TileBuffer("again", (16, 16), "int32")
    column = Applied("*", (Variable("k"), Literal(32)))
    zeros, whole = (Literal(0), Literal(0)), (16, 32)

    def read(tensor: TileBuffer, tile: TileBuffer) -> ParallelNest:
        return part_as_nest(BufferPart(tensor, (Literal(0), column), whole), BufferPart(tile, zeros, whole), LINE)

    product = MatrixProduct(
        BufferPart(left, zeros, whole),
        BufferPart(right, zeros, whole),
        BufferPart(total, zeros, (16, 16)),
        (False, True),
        Applied("eq", (Variable("k"), Literal(0))),
        LINE,
    )
    loop = SerialLoop("k", Literal(0), Literal(count), (read(a, left), read(b, right), product), LINE)
    square = BufferPart(total, zeros, (16, 16)), BufferPart(again, zeros, (16, 16))
    axes = (("i", 16), ("j", 16))
    value = Applied("*", (Applied("cast", (at(again),), "float32"), Literal(0.5, "float32")))
    half = Elementwise(axes, y, (Variable("i"), Variable("j")), value, None, LINE)
    body = (loop, *behind, part_as_nest(*square, LINE), ParallelNest(axes, (half,), LINE))
    return replace(kernel(*body), parameters=(a, b, y), grid=(1,))


@pytest.mark.parametrize("hw", ["h200", "ascend_910b2"])
def test_sums_of_int8_products_over_a_loop_are_exact(hw: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, (16, 96)).astype(np.int8) for _ in range(2))
    a[0], b[0] = -128, -128  # the largest sum
    tensors = {"A": a, "B": b, "Y": np.zeros((16, 16), np.float32)}
    made = result_of(call_of(written(_integer_product(3)), (1,), tensors), hw, "Y")
    assert np.array_equal(made, a.astype(np.int64) @ b.T.astype(np.int64) / 2)


def test_long_sums_of_int8_products_and_integers_of_them_are_refused() -> None:
    assert "tt.dot" in written(_integer_product(32))
    with pytest.raises(ProgramError, match=r"kernel\.py:7: a sum of 1,056 products of int8; allowed: 1,024"):
        written(_integer_product(33))
    total = TileBuffer("total", (16, 16), "int32")
    first = _integer_product(2)
    found = next(s.c.buffer for s in first.body[0].body if isinstance(s, MatrixProduct))  # type: ignore[union-attr]
    axes = (("i", 16), ("j", 16))
    more = Applied("+", (at(found), Literal(1)))
    added = ParallelNest(axes, (Elementwise(axes, total, (Variable("i"), Variable("j")), more, None, LINE),), LINE)
    with pytest.raises(ProgramError, match="integer arithmetic on a sum of products of int8"):
        written(replace(first, body=(*first.body, added)))
