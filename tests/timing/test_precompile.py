"""The engine's kernel, compiled before anyone needs it: by the same types, and only where it is not there."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Any

from npusim.run import run
from npusim.timing.periodic import run_engine
from npusim.timing.precompile import compile_engine, compiled_meanwhile

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_what_is_compiled_ahead_is_what_a_run_takes() -> None:
    run("flash", numerics=False, seq=256)
    taken = list(run_engine._native)  # type: ignore[attr-defined]
    compile_engine()
    assert list(run_engine._native) == taken  # type: ignore[attr-defined]
    with compiled_meanwhile() as is_compiling:
        assert not is_compiling


def test_no_file_of_the_current_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As modules of these names would be, if the other process had the folder on its path."""
    for name in ("numpy", "signal", "numba", "npusim"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(run_engine, "is_missing", lambda: True)
    processes = list[subprocess.Popen[bytes]]()
    start = subprocess.Popen

    def noted(*args: Any, **how: Any) -> subprocess.Popen[bytes]:
        processes.append(start(*args, **how))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    with compiled_meanwhile(["ascend.cube.k16.f16.f32"]) as is_compiling:
        assert is_compiling
        assert processes[0].wait() == 0
    assert not (tmp_path / "ran").exists()
