"""Wavefronts, exact for the table of volta.md §4.1."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from npusim.errors import LayoutError
from npusim.formats.layout.fragment import arrangement
from npusim.formats.layout.instruction import instruction
from npusim.formats.layout.wavefronts import (
    VOLTA_BANKS,
    fragment_addresses,
    padded,
    return_cycles,
    swizzled,
    wavefronts,
)

if TYPE_CHECKING:
    from collections.abc import Callable

LANES = range(32)
FOUR = arrangement("4x1")
A, B_COL, B_ROW = (instruction("m8n8k4").a, instruction("m8n8k4", b="col").b, instruction("m8n8k4", b="row").b)

#: volta.md §4.1: access -> wavefronts with padding 0, 4, 8 halves, and with the swizzle.
TABLE = {
    "K as B col, LDS.64": (8, 2, 2, 2),
    "K as B col, LDS.128": (16, 8, 4, 4),
    "V as B row, LDS.64": (8, 2, 2, 2),
    "V as B row, LDS.128": (16, 8, 4, 4),
    "Q as A row, QP rows, LDS.128": (32, 8, 8, 8),
    "Q as A row, row = lane, LDS.128": (32, 8, 4, 4),  # the table leaves the last cell open
}


def addresses(access: str, memory: Callable[[int, int], int]) -> tuple[int, ...]:
    """Byte addresses of one access; K lies [kv][d], so its B has (d, kv) as (row, column)."""
    width = int(access.rpartition(".")[2]) // 8
    order = "lane" if "row = lane" in access else "group"
    fragment = A if access[0] == "Q" else B_COL if access[0] == "K" else B_ROW
    seen = (lambda r, c: memory(c, r)) if access[0] == "K" else memory
    return fragment_addresses(fragment, arrangement("4x1", order), seen, access_bytes=width)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("access", TABLE)
def test_the_table_of_bank_conflicts_is_exact(access: str, head_dim: int) -> None:
    width = int(access.rpartition(".")[2]) // 8
    memories = [*(padded(32, head_dim, padding=p) for p in (0, 4, 8)), swizzled(32, head_dim)]
    found = tuple(wavefronts(addresses(access, m), width, VOLTA_BANKS, allow_misaligned=True) for m in memories)
    assert found == TABLE[access]


@pytest.mark.parametrize("access", [a for a in TABLE if a.endswith("128")])
def test_rows_padded_by_4_halves_cannot_be_read_128_bits_at_a_time(access: str) -> None:
    # Rows 136 bytes apart: the table's 8 is a count, the hardware reports a misaligned address.
    with pytest.raises(LayoutError, match="not a multiple of 16 bytes"):
        wavefronts(addresses(access, padded(32, 64, padding=4)), 16, VOLTA_BANKS)


@pytest.mark.parametrize(("width", "cycles"), [(4, 1), (8, 2), (16, 4)])
def test_neighbours_take_one_cycle_a_phase(width: int, cycles: int) -> None:
    assert wavefronts([width * lane for lane in LANES], width, VOLTA_BANKS) == cycles


def test_one_word_is_broadcast() -> None:
    assert wavefronts([64] * 32, 4, VOLTA_BANKS) == 1
    assert wavefronts([4 * (lane // 2) for lane in LANES], 4, VOLTA_BANKS) == 1


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 8, 16, 32])
def test_strided_words_conflict_as_often_as_stride_and_banks_share_factors(stride: int) -> None:
    from math import gcd

    assert wavefronts([4 * stride * lane for lane in LANES], 4, VOLTA_BANKS) == gcd(stride, 32)


def test_lanes_that_do_not_take_part_cost_nothing() -> None:
    assert wavefronts([None] * 16 + [8 * lane for lane in range(16)], 8, VOLTA_BANKS) == 1
    assert return_cycles([None] * 32, 8, VOLTA_BANKS) == 0


def test_returns_pack_where_neighbours_agree_and_only_there() -> None:
    assert return_cycles([16 * lane for lane in LANES], 16, VOLTA_BANKS) == 4
    assert return_cycles([16 * (lane // 2) for lane in LANES], 16, VOLTA_BANKS) == 2
    assert return_cycles([16 * (lane & ~2) for lane in LANES], 16, VOLTA_BANKS) == 2
    # B mirrored in the quad pairs repeats at lane distance 4, 8, 12 (volta.md §4.1).
    mirrored = addresses("K as B col, LDS.64", swizzled(32, 64))
    assert mirrored[0] == mirrored[4] == mirrored[8] == mirrored[12]
    assert return_cycles(mirrored, 8, VOLTA_BANKS) == 2
    # A lane without a partner does not pack.
    assert return_cycles([0, None], 8, VOLTA_BANKS) == 2


def test_a_swizzle_keeps_every_element_and_every_chunk_together() -> None:
    tile = swizzled(32, 64)
    elements = [tile(r, c) for r in range(32) for c in range(64)]
    assert sorted(elements) == list(range(32 * 64))
    for row in range(32):
        for chunk in range(8):
            start = tile(row, 8 * chunk)
            assert start == 64 * row + 8 * (chunk ^ row % 8)
            assert [tile(row, 8 * chunk + i) for i in range(8)] == list(range(start, start + 8))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: wavefronts([2], 2, VOLTA_BANKS), "access of 2 bytes per lane; allowed: 4, 8, 16"),
        (lambda: wavefronts([0] * 33, 4, VOLTA_BANKS), "33 addresses, but a warp has 32 lanes"),
        (lambda: wavefronts([0, 6], 4, VOLTA_BANKS), "lane 1: address 6 is not a multiple of 4 bytes,"),
        (lambda: wavefronts([-4], 4, VOLTA_BANKS), "lane 0: address -4"),
        (lambda: padded(4, 64, padding=-1), "padding of -1"),
        (lambda: swizzled(32, 32), "rows of 32 elements cannot be swizzled"),
        (lambda: swizzled(32, 80), "rows of 80 elements cannot be swizzled"),
        (lambda: fragment_addresses(A, FOUR, lambda r, c: r + 32 * c, access_bytes=8), "are not contiguous"),
        (lambda: fragment_addresses(A, FOUR, lambda r, c: 64 * r + c, access_bytes=12), "do not fit"),
    ],
)
def test_accesses_that_cannot_be_are_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        call()
