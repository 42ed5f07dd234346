"""Warp groups that barriers of a program order: read in the order of the text, or refused; needs no TileLang."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from npusim.errors import ProgramError
from npusim.kernels.tilelang.statements import (
    Applied,
    BarrierStep,
    BufferPart,
    CoreScope,
    Expression,
    Literal,
    MatrixProduct,
    ParallelNest,
    SerialLoop,
    Statement,
    TileBuffer,
    Variable,
    with_bodies,
)
from npusim.kernels.tilelang.ttir_writer import part_as_nest
from npusim.kernels.tilelang.warp_groups import in_text_order
from npusim.kernels.triton.ttir_text import Line

if TYPE_CHECKING:
    from collections.abc import Iterator

K, LINE = Variable("k"), Line("kernel.py", 7)
TENSOR = TileBuffer("A", (64, 128), "float16", (128, 1), is_global=True)
TOTAL = TileBuffer("c", (16, 16), "float32")
WHOLE = BufferPart(TOTAL, (Literal(0), Literal(0)), (16, 16))
COUNTS = {"full": (128, 128), "free": (128, 128)}


def of_two(word: str, a: Expression, n: int) -> Expression:
    return Applied(word, (a, Literal(n)))


def program(slots: int = 1) -> tuple[Statement, ...]:
    """Copies of one group into one slot or two, and products of another, each of which waits for the other."""
    tile = TileBuffer("a", (slots, 16, 16), "float16")
    slot = of_two("%", K, slots) if slots > 1 else Literal(0)
    turn = of_two("//", K, slots) if slots > 1 else K
    part = BufferPart(tile, (slot, Literal(0), Literal(0)), (1, 16, 16))
    source = BufferPart(TENSOR, (Literal(0), of_two("*", K, 16)), (16, 16))
    copy = part_as_nest(source, part, LINE)
    before = of_two("%", of_two("+", turn, 1), 2)
    copies = (
        BarrierStep("free", slot, before, None, LINE),
        BarrierStep("full", slot, None, copy, LINE),
        BarrierStep("full", slot, None, None, LINE),
    )
    products = (
        BarrierStep("full", slot, of_two("%", turn, 2), None, LINE),
        MatrixProduct(part, part, WHOLE, (False, True), Literal(0, "bool"), LINE),
        BarrierStep("free", slot, None, None, LINE),
    )
    body = CoreScope("0:128", copies, LINE), CoreScope("128:256", products, LINE)
    return (SerialLoop("k", Literal(0), Literal(6), body, LINE),)


def order(body: tuple[Statement, ...], counts: Any = COUNTS, registers: Any = frozenset()) -> tuple[Statement, ...]:
    return in_text_order(body, counts, 256, registers)


def without(body: tuple[Statement, ...], number: int) -> tuple[Statement, ...]:
    """Return statements without one step of the groups; a copy is then one that no barrier waits for."""
    steps = itertools.count()

    def one(s: Statement) -> Iterator[Statement]:
        if isinstance(s, CoreScope):
            yield replace(s, body=tuple(x for y in s.body for x in one(y)))
        elif not isinstance(s, BarrierStep):
            yield with_bodies(s, lambda b: tuple(x for y in b for x in one(y)))
        elif next(steps) != number:
            yield s
        elif s.copy is not None:
            yield s.copy

    return tuple(x for s in body for x in one(s))


@pytest.mark.parametrize("slots", [1, 2])
def test_groups_that_wait_for_each_other_are_in_the_order_of_the_text(slots: int) -> None:
    (loop,) = order(program(slots))
    assert isinstance(loop, SerialLoop)
    assert [type(s) for s in loop.body] == [ParallelNest, MatrixProduct]


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("number", [0, 2, 3, 4])
def test_a_wait_or_arrival_less_is_refused(number: int, slots: int) -> None:
    with pytest.raises(ProgramError, match=r"kernel\.py:7: (no barrier orders|a wait for|an arrival at|a copy may)"):
        order(without(program(slots), number))


def test_a_copy_of_the_group_itself_is_ordered_by_its_arrival() -> None:
    assert len(order(without(program(), 1))) == 1


@pytest.mark.parametrize("counts", [{"full": (64,), "free": (128,)}, {"full": (256,), "free": (128,)}])
def test_phases_of_other_threads_are_refused(counts: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ProgramError, match=r"kernel\.py:7: (128 threads arrive|a wait for the parity)"):
        order(program(), counts)


def test_slots_that_share_a_barrier_of_one_are_refused() -> None:
    """Two slots of one tile, and the copies of both wait for barriers as those of one slot do, one iteration late."""
    (loop,) = program(2)
    assert isinstance(loop, SerialLoop)
    copies, products = loop.body
    assert isinstance(copies, CoreScope)
    wait = copies.body[0]
    assert isinstance(wait, BarrierStep)
    late = replace(copies, body=(replace(wait, parity=of_two("%", of_two("//", K, 2), 2)), *copies.body[1:]))
    with pytest.raises(ProgramError, match=r"kernel\.py:7: a wait for the parity 0 of free .* 0 phases"):
        order((replace(loop, body=(late, products)),))


def test_registers_of_two_groups_are_refused() -> None:
    after = CoreScope("0:128", (part_as_nest(WHOLE, WHOLE, LINE),), LINE)
    with pytest.raises(ProgramError, match=r"kernel\.py:7: c is in registers, which warp groups do not share"):
        order((*program(), after), registers={TOTAL})


def test_parts_that_two_groups_store_are_apart_or_refused() -> None:
    def store(column: int) -> ParallelNest:
        target = BufferPart(TENSOR, (of_two("*", Variable("bx"), 16), Literal(column)), (16, 16))
        return part_as_nest(WHOLE, target, LINE)

    def both(column: int) -> tuple[Statement, ...]:
        return CoreScope("0:128", (store(0),), LINE), CoreScope("128:256", (store(column),), LINE)

    assert len(order(both(16))) == 2
    with pytest.raises(
        ProgramError, match=r"kernel\.py:7: no barrier orders this access of A and the access in line 7"
    ):
        order(both(15))


def test_statements_of_all_threads_come_between_those_of_groups() -> None:
    copy = part_as_nest(WHOLE, WHOLE, LINE)
    groups = CoreScope("0:128", (copy,), LINE), CoreScope("128:256", (copy,), LINE)
    assert len(order((groups[0], copy, groups[1]))) == 3
    with pytest.raises(ProgramError, match="no barrier orders"):
        order(groups)
