"""``npusim warm`` runs what is usual, and says what it ran."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.simulation import warm

if TYPE_CHECKING:
    import pytest


def test_warm_lists_what_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "USUAL", (("flash", "ascend_910b2", "float16"),))
    result = CliRunner().invoke(app, ["warm", "--json"])
    assert json.loads(result.stdout)["runs"] == ["flash on ascend_910b2, float16"]
