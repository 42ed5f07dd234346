"""Counting overflow and NaN, and saying where they came up first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.program.ir.op import Opcode
from npusim.program.numerics.evaluate import execute_rows, rows_alone
from npusim.program.numerics.executor import EventLog, execute
from npusim.simulation.evaluation import source_of, subject_of
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request
from npusim.simulation.variants import Variant, Variants

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from npusim.program.ir.tile_program import TileProgram
from numerics.toy_values import Straight

Array = Any
BIG = np.float16(60000)


def doubling(values: Array, heads: int = 1, loop: range = range(0)) -> Any:
    """Return the events of x + x on float16."""
    s = Straight(*values.shape[-2:], "float16", heads=heads)
    x, y = s.tile("x"), s.tile("y")
    s.load(x)
    s.step("double", Opcode.ADD, y, x, x)
    s.store(y)
    _, done = s.run(*(values if heads > 1 else [values]), loop=loop)
    return done.events


def test_overflow_is_counted_and_its_first_place_named() -> None:
    values = np.ones((4, 8), np.float16)
    values[1, 5] = values[2, 0] = values[2, 1] = BIG
    events = doubling(values)
    assert dict(events.overflow) == {"double.add": 3}
    assert not events.nan
    first = events.first["overflow"]
    assert (first.operation, first.queue, first.row, first.col) == ("double.add", "q", 1, 5)
    assert (first.phase, first.block, first.path) == ("toy", "0", {})
    assert str(first) == "overflow in double.add (0 row 1 col 5)"


def test_the_largest_finite_result_is_no_overflow() -> None:
    # 32752 + 32752 = 65504 is float16's largest number; 65520 and above round to Inf.
    assert not doubling(np.full((1, 2), 32752, np.float16)).overflow
    assert doubling(np.full((1, 2), 32768, np.float16)).overflow == {"double.add": 2}


def test_the_first_place_names_the_lane_and_counts_cover_all_lanes() -> None:
    values = np.ones((3, 2, 4), np.float16)
    values[1, 1, 2] = values[2, 0, 0] = BIG
    events = doubling(values, heads=3)
    assert dict(events.overflow) == {"double.add": 2}
    assert (events.first["overflow"].block, events.first["overflow"].row) == ("1", 1)


def test_the_first_place_names_the_iteration_and_all_iterations_count() -> None:
    values = np.full((1, 4), BIG)
    events = doubling(values, loop=range(5, 8))
    assert dict(events.overflow) == {"double.add": 12}
    assert events.first["overflow"].path == {"kv": 5}
    assert "kv=5" in str(events.first["overflow"])


def test_rows_alone_have_the_same_bits_and_no_event_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(Request("flash", seq=64, tiling={"block_q": 32, "block_kv": 32}, numerics=True), is_bare=True)
    built = Variants(plan.request).build(Variant())
    source = source_of(plan, subject_of(plan, built.program))
    counted = execute_rows(built.program, source, [63], range(2))[1]
    monkeypatch.setattr(EventLog, "look", None)  # a call would raise
    rows = rows_alone(built.program, source, [63], range(2))
    assert rows.keys() == counted.keys()
    assert all(rows[at].tobytes() == counted[at].tobytes() for at in rows)


def test_an_inf_that_was_put_there_and_what_follows_from_it_is_no_event() -> None:
    s = Straight(2, 4, "float16")
    x, y = s.tile("x"), s.tile("y")
    s.load(x)
    s.step("mask", Opcode.FILL, y, -np.inf)
    s.step("shift", Opcode.ADD, y, y, x)
    s.step("max", Opcode.MAX, x, x, y)
    s.store(y)
    _, done = s.run(np.ones((2, 4), np.float16))
    assert not done.events.nan
    assert not done.events.overflow


def test_a_nan_from_numbers_is_counted_and_one_that_is_passed_on_is_not() -> None:
    """Inf - Inf is the first NaN; NaN + 1 is no new one."""
    s = Straight(2, 4, "float16")
    x, y, z = s.tile("x"), s.tile("y"), s.tile("z")
    s.load(x)
    s.step("infinite", Opcode.ADD, y, x, x)
    s.step("difference", Opcode.SUB, z, y, y)
    s.step("after", Opcode.ADD, z, z, x)
    s.store(z)
    values = np.ones((2, 4), np.float16)
    values[1, 3] = BIG
    _, done = s.run(values)
    assert dict(done.events.overflow) == {"infinite.add": 1}
    assert dict(done.events.nan) == {"difference.sub": 1}
    assert (done.events.first["nan"].row, done.events.first["nan"].col) == (1, 3)


def test_a_cast_that_overflows_is_counted() -> None:
    s = Straight(2, 4, "float32", out_fmt="float16")
    x, y = s.tile("x"), s.tile("y", "float16")
    s.load(x)
    s.step("drain", Opcode.CAST, y, x)
    s.store(y)
    values = np.array([[65519, 65520, -1e9, 1], [0, 1, 2, 3]], np.float32)
    (y_out,), done = s.run(values)
    # 65519 still rounds to 65504; 65520 is the first that does not.
    assert dict(done.events.overflow) == {"drain.cast": 2}
    assert list(y_out[0]) == [65504, np.inf, -np.inf, 1]


def test_a_saturating_cast_overflows_nothing() -> None:
    s = Straight(1, 2, "float32", out_fmt="float16")
    x, y = s.tile("x"), s.tile("y", "float16")
    s.load(x)
    s.step("drain", Opcode.CAST, y, x, overflow="saturate")
    s.store(y)
    (y_out,), done = s.run(np.array([[1e9, -1e9]], np.float32))
    assert not done.events.overflow
    assert list(y_out[0]) == [65504, -65504]


def test_an_overflow_by_a_column_operand_is_counted_an_element() -> None:
    s = Straight(4, 8, "float16")
    x, column = s.tile("x"), s.tile("column", cols=1)
    s.load(x)
    s.step("start", Opcode.FILL, column, 60000.0)
    s.step("shift", Opcode.ADD, x, x, column)
    s.store(x)
    values = np.zeros((4, 8), np.float16)
    values[2] = BIG
    _, done = s.run(values)
    assert dict(done.events.overflow) == {"shift.add": 8}
    assert done.events.first["overflow"].row == 2


def test_a_row_sum_that_overflows_is_counted_once_a_row() -> None:
    s = Straight(4, 8, "float16")
    x, total = s.tile("x"), s.tile("total", cols=1)
    s.load(x)
    s.step("sum", Opcode.ROW_SUM, total, x, order="vector_lanes")
    s.store(x)
    values = np.ones((4, 8), np.float16)
    values[3] = BIG
    _, done = s.run(values)
    assert dict(done.events.overflow) == {"sum.row_sum": 1}
    assert (done.events.first["overflow"].row, done.events.first["overflow"].col) == (3, 0)


def test_scores_that_overflow_their_float16_store_are_counted_where_they_do(
    build_flash: Callable[..., TileProgram],
) -> None:
    """PASA's FA16-32: S leaves the matrix unit unscaled in float16.

    Query 70 meets keys 33 and 50 at 16 * 64 * 65 = 66560 > 65519, key 40 at 16 * 64 * 63 = 64512,
    and -66560 at key 7.  Tiles of 32 keys: the first overflow is in tile 0.
    """
    fields: dict[str, Any] = {"heads": 1, "seq_q": 80, "seq_kv": 96, "head_dim": 16}
    tiling = {"block_q": 80, "block_kv": 32, "depth": 0}
    program = build_flash(tiling, "fa16_32", **fields)
    q, k = np.zeros((80, 16), np.float16), np.zeros((96, 16), np.float16)
    q[70], k[33], k[50], k[40], k[7] = 64, 65, 65, 63, -65
    tensors = {"q": q, "k": k, "v": np.ones((96, 16), np.float16)}
    done = execute(program, lambda name, _batch, _head: tensors[name])
    counts = {label: n for label, n in done.events.overflow.items() if label.endswith(".cast")}
    assert counts == {"S.drain.cast": 3}
    first = done.events.first["overflow"]
    assert (first.operation, first.queue) == ("S.drain.cast", "aic.FIXP")
    assert (first.row, first.col, first.path) == (70, 7, {"key": 0})
    # Inf - Inf follows in the softmax of that row alone, and its output is NaN.
    output = np.isnan(done.tensors.head(program.tensors["o"], 0, 0)).any(axis=1)
    assert list(np.nonzero(output)[0]) == [70]
    assert done.events.nan


def test_what_a_product_adds_to_an_infinite_accumulator_is_no_event() -> None:
    s = Straight(16, 16, "float16", out_fmt="float32")
    x, total = s.tile("x"), s.tile("total", "float32")
    s.load(x)
    s.step("start", Opcode.FILL, total, np.inf)
    s.step("mmad", Opcode.MATMUL, total, x, x, accumulate=True, arithmetic="ascend.cube.k16.f16.f32")
    s.store(total)
    _, done = s.run(np.ones((16, 16), np.float16))
    assert not done.events.overflow
