"""One product into the next: the counts of volta.md §1.1 and §2, and attention on registers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layout.execute import from_registers, gathered, to_registers
from layout.warp import shuffled, warp_product
from npusim.errors import LayoutError
from npusim.formats.layout.chain import ChainCost, chain
from npusim.formats.layout.fragment import Arrangement, arrangement
from npusim.formats.layout.instruction import instruction

ORDERS = 40320  # 8!


def volta(acc: str = "f32", a: str = "row", b: str = "col") -> Any:
    return instruction("m8n8k4", acc=acc, a=a, b=b)


# volta.md §1.1: accumulator, A of the next product -> in place, must move a lane.
TABLE = [("f16", "row", 64, 0), ("f16", "col", 16, 6), ("f32", "row", 32, 4), ("f32", "col", 32, 4)]


@pytest.mark.parametrize(("acc", "order", "in_place", "moved"), TABLE)
def test_values_in_place(acc: str, order: str, in_place: int, moved: int) -> None:
    found = chain(volta(acc).c, volta(a=order).a)
    assert (found.in_place, found.values, found.moved) == (in_place, 64, moved)


@pytest.mark.parametrize(
    ("where", "acc", "share"),
    [
        ("4x1", "f16", 1.0),
        ("4x1", "f32", 0.5),
        ("2x2", "f16", 0.5),
        ("2x2", "f32", 0.25),
        ("1x4", "f16", 0.25),
        ("1x4", "f32", 0.125),
    ],
)
def test_the_arrangement_of_quad_pairs_matters(where: str, acc: str, share: float) -> None:
    assert chain(volta(acc).c, volta().a, arrangement=arrangement(where)).share == share


def test_fp32_costs_two_butterflies_and_six_selects() -> None:
    # Send (V2,V3) or (V0,V1), and (V6,V7) or (V4,V5): 2 selects; place 4 registers: 4 (volta.md §1.1).
    found = chain(volta("f32").c, volta().a)
    assert [shuffle.mask for shuffle in found.shuffles] == [2, 2]
    assert found.cost == ChainCost(shuffles=2, selects=6, permutes=0, conversions=8)


def test_fp16_costs_nothing_and_renames_nothing() -> None:
    found = chain(volta("f16").c, volta().a)
    assert found.shuffles == ()
    assert found.cost == ChainCost(shuffles=0, selects=0, permutes=0, conversions=0)
    assert all(row == tuple((lane, v) for v in range(8)) for lane, row in enumerate(found.sources))


def test_lane_0_of_fp32_goes_where_volta_says() -> None:
    # volta.md §3 (c): lane 0 of the FP32 map goes to slots 0, 8, 2, 10, 32, 40, 34, 42 of 8 threads' values.
    wide, narrow = volta("f32").c, volta("f16").c
    held = [narrow.holder(*wide.coordinate(0, v)) for v in range(8)]
    assert [narrow.thread(lane) + 8 * value for lane, value in held] == [0, 8, 2, 10, 32, 40, 34, 42]
    sources = chain(wide, volta().a).sources
    assert all(sources[lane][value] == (0, v) for v, (lane, value) in enumerate(held))


@pytest.mark.parametrize("acc", ["f16", "f32"])
@pytest.mark.parametrize(("name", "tiles"), [("m16n8k8", 1), ("m16n8k16", 2)])
def test_ampere_moves_nothing(name: str, tiles: int, acc: str) -> None:
    found = chain(instruction(name, acc=acc).c, instruction(name).a)
    assert found.share == 1.0
    assert (found.tiles, found.steps) == (tiles, 1)
    assert [v for _, v in found.sources[13]] == list(range(4 * tiles))


# ---------------------------------------------------------------- on registers


@pytest.mark.parametrize("where", ["4x1", "2x2", "1x4"])
@pytest.mark.parametrize("a", ["row", "col"])
@pytest.mark.parametrize("acc", ["f16", "f32"])
def test_shuffles_bring_every_value_where_the_operand_wants_it(acc: str, a: str, where: str) -> None:
    spread = arrangement(where)
    found = chain(volta(acc).c, volta(a=a).a, arrangement=spread)
    height, width = spread.tile(volta(acc).c)
    tile = np.arange(height * width).reshape(height, width)
    held = to_registers(volta(acc).c, spread, tile)[0]
    assert np.array_equal(shuffled(found, held), gathered(found, held))
    assert np.array_equal(gathered(found, held), to_registers(volta(a=a).a, spread, tile)[0])


def test_shuffles_move_at_most_a_register_and_exactly_what_must_move() -> None:
    for where in ("4x1", "2x2", "1x4"):
        found = chain(volta("f32").c, volta(a="col").a, arrangement=arrangement(where))
        for lane in range(32):
            moved = [slot for s in found.shuffles for slot in s.slots[lane]]
            assert len(moved) == len(set(moved))
            assert all(len(s.slots[lane]) <= 2 for s in found.shuffles)
            assert set(moved) == {slot for slot, (source, _) in enumerate(found.sources[lane]) if source != lane}


@pytest.mark.parametrize("where", ["4x1", "2x2"])
@pytest.mark.parametrize("acc", ["f16", "f32"])
def test_a_chained_attention_tile_is_exact(acc: str, where: str) -> None:
    """S = Q·Kᵀ (TN), then O = S·V (TT): registers in, registers out (volta.md §1.1)."""
    spread, first, second = arrangement(where), volta(acc), volta(acc, b="row")
    rng = np.random.default_rng(1)
    rows, keys = 64, 32
    q, k, v = (rng.integers(-3, 4, s) for s in ((rows, 64), (keys, 64), (keys, 64)))
    zeros = np.zeros((rows, keys), q.dtype)
    s = warp_product(
        first,
        to_registers(first.a, spread, q),
        to_registers(first.b, spread, k.T),
        to_registers(first.c, spread, zeros),
    )
    link = chain(first.c, second.a, arrangement=spread)
    down, across = s.shape[:2]
    parts = s.reshape(down, across // link.tiles, link.tiles, 32, 8)
    p = shuffled(link, parts).reshape(down, -1, 32, second.a.values)
    o = warp_product(
        second, p, to_registers(second.b, spread, v), to_registers(second.c, spread, np.zeros((rows, 64), q.dtype))
    )
    assert np.array_equal(from_registers(second.c, spread, o), q @ k.T @ v)


# ---------------------------------------------------------------- bad input


def test_illegal_chains_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"m8n8k4 A \(row\) is not an accumulator"):
        chain(volta().a, volta().a)
    with pytest.raises(LayoutError, match="C is added, not multiplied"):
        chain(volta().c, volta().c)
    with pytest.raises(LayoutError, match="8 rows in 4 groups cannot feed 16 in 1"):
        chain(volta().c, instruction("m16n8k16").a)
    with pytest.raises(LayoutError, match="has 4 groups"):
        chain(volta().c, volta().a, arrangement=Arrangement(2, 1))


def test_an_exchange_that_is_not_allowed_is_refused_with_the_way_out() -> None:
    with pytest.raises(LayoutError, match=r"in 2x2: 64 of 128 .* not allowed; arranged 4x1 nothing"):
        chain(volta("f16").c, volta().a, arrangement=arrangement("2x2"), allow_exchange=False)
    with pytest.raises(LayoutError, match=r"32 of 64 .* 4 per lane would .* f16 accumulators in 4x1"):
        chain(volta("f32").c, volta().a, allow_exchange=False)
    assert chain(volta("f16").c, volta().a, allow_exchange=False).moved == 0
