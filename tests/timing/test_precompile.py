"""The engine's kernel, compiled before anyone needs it: by the same types, and only where it is not there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from npusim.run import run
from npusim.timing.periodic import run_engine
from npusim.timing.precompile import compile_engine, compiled_meanwhile

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_what_is_compiled_ahead_is_what_a_run_takes() -> None:
    run("flash", numerics=False, seq=256)
    compiled = run_engine.is_missing.args[0]  # type: ignore[attr-defined]
    taken = list(compiled.signatures)
    compile_engine()
    assert compiled.signatures == taken
    with compiled_meanwhile() as wait:
        assert wait is None


def test_no_file_of_the_current_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As modules of these names would be, if the other process had the folder on its path."""
    for name in ("numpy", "signal", "numba", "npusim"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(run_engine, "is_missing", lambda: True)
    with compiled_meanwhile() as wait:
        assert wait is not None
        assert wait() == 0
    assert not (tmp_path / "ran").exists()
