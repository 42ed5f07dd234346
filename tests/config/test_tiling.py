from __future__ import annotations

from typing import Literal

import pytest

from npusim.config.tiling import Field, Tiling, build_tiling, tiling_fields
from npusim.errors import TilingError
from npusim.library import SCHEDULES


class FlashTiling(Tiling):
    """Stands for a schedule's own tiling."""

    block_q: int = Field(default=128, ge=16, le=512, multiple_of=16, description="rows of Q")
    depth: int = Field(default=2, ge=1)
    order: Literal["rows", "columns"] = "rows"


def test_defaults_hold_where_nothing_is_given() -> None:
    assert build_tiling(FlashTiling, {}) == FlashTiling(block_q=128, depth=2, order="rows")


def test_text_of_the_command_line_is_read_as_the_fields_type() -> None:
    tiling = build_tiling(FlashTiling, {"block_q": "256", "order": "columns"})
    assert (tiling.block_q, tiling.order) == (256, "columns")


def test_every_tiling_is_a_dictionary_of_its_fields() -> None:
    for schedule in SCHEDULES.values():
        tiling = build_tiling(schedule.tiling, {})
        assert dict(tiling) == tiling.model_dump()


def test_tilings_are_hashable() -> None:
    assert len({FlashTiling(), build_tiling(FlashTiling, {"depth": 2})}) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_q": 100}, "block_q: 100 must be a multiple of 16; nearest: 96 or 112"),
        ({"block_q": "40"}, "block_q: '40' must be a multiple of 16; nearest: 32 or 48"),
        ({"block_q": 0}, "block_q: 0 must be at least 16"),
        ({"block_q": 1024}, "block_q: 1024 must be at most 512"),
        ({"block_q": "wide"}, "block_q: expected a whole number, got 'wide'"),
        ({"block_q": 128.5}, "block_q: expected a whole number, got 128.5"),
        ({"order": "diagonal"}, "order: 'diagonal' is not one of: 'rows' or 'columns'"),
        ({"blok_q": 1}, "blok_q: unknown tiling field. Did you mean `block_q`?"),
        ({"zzz": 1}, "zzz: unknown tiling field; allowed: block_q, depth, order"),
        ({"block_q": 0, "depth": 0}, "block_q: 0 must be at least 16\ndepth: 0 must be at least 1"),
    ],
)
def test_bad_fields_are_named_with_value_and_what_is_allowed(values: dict[str, object], message: str) -> None:
    with pytest.raises(TilingError) as caught:
        build_tiling(FlashTiling, values)
    assert str(caught.value) == message


def test_fields_can_be_listed_for_help_and_search() -> None:
    block, depth, order = tiling_fields(FlashTiling)
    assert (block.name, block.default, block.description) == ("block_q", 128, "rows of Q")
    assert (block.minimum, block.maximum, block.multiple_of) == (16, 512, 16)
    assert (depth.minimum, depth.maximum, depth.choices) == (1, None, ())
    assert order.choices == ("rows", "columns")
