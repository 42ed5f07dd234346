"""Tiles that were chosen are kept in the cache folder: another process does not try them again."""

from __future__ import annotations

from typing import NoReturn

import pytest

from npusim import cache
from npusim.errors import SpecError
from npusim.simulation import tile
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request


def test_a_choice_is_read_back_until_a_file_of_the_package_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise SpecError("tried anew")

    def chosen(**request: object) -> tile.TileChoice:
        tile._choice.cache_clear()
        return tile.choose_tile(plan_of(Request("flash", seq=640, **request)))  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "package_stamp", lambda: "one state of the files")
    first = chosen()
    monkeypatch.setattr(tile, "_tried_out", refuse)
    assert chosen() == first != tile.TileChoice()
    for other in ({"l2": "warm"}, {"overrides": {"flags.cross_core_latency_cycles": 12345}}, {"causal": False}):
        with pytest.raises(SpecError, match="tried anew"):
            chosen(**other)
    monkeypatch.setattr(cache, "package_stamp", lambda: "another")
    with pytest.raises(SpecError, match="tried anew"):
        chosen()
    tile._choice.cache_clear()
