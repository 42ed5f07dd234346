"""Runs with the declared tile where they name none, and without alternatives: for tests that claim nothing of them."""

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


def leave_alternatives_out(patched: pytest.MonkeyPatch) -> None:
    """Let runs compute their own bits alone, as long as ``patched`` lasts: none of alternatives to assumed arithmetic
    (`RunData.spread`), which take up to a third of a run with bits.
    """
    patched.setattr("npusim.simulation.simulate.assumed_variants", lambda _program, _plan: {})
