"""Runs with the declared tile where they name none, for tests whose claim is no choice of a tile."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def declare_tiles(patched: pytest.MonkeyPatch) -> None:
    """Let no run try other tiles, as long as ``patched`` lasts.

    Times of advice are neither read from the cache folder nor stored in it: there they are those of chosen tiles.
    """
    patched.setattr("npusim.simulation.chosen_tile._may_choose", lambda _plan: False)
    patched.setattr("npusim.report.advice.remembered", lambda *call: call[-1]())
