"""``npusim warm`` runs every kernel that usual runs need."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.program.timing import mean_field_kernel
from npusim.simulation import warm

if TYPE_CHECKING:
    import pytest


def test_warm_runs_the_kernel_of_long_causal_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, run_groups = [], mean_field_kernel.run_groups

    def counted(*arguments: Any) -> int:
        calls.append(arguments)
        return run_groups(*arguments)

    monkeypatch.setattr(mean_field_kernel, "run_groups", counted)
    monkeypatch.setattr(warm, "USUAL", ())
    result = CliRunner().invoke(app, ["warm", "--json"])
    assert json.loads(result.stdout)["runs"] == ["long causal calls"]
    assert calls
