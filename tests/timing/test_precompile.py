"""What another process compiles before anyone needs it: what a run takes, and only where it is not kept."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Any

from npusim.formats.jit import CompiledKernel
from npusim.program.timing.periodic import run_engine
from npusim.program.timing.precompile import compiled_meanwhile
from npusim.run import run
from npusim.simulation.warm import run_bits

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

WARM = ("npusim.simulation.warm", "flash", "ascend_910b2", "fa16", "float16")


def test_what_is_compiled_ahead_is_what_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, call = set[str](), CompiledKernel.__call__

    def noted(self: CompiledKernel, *args: Any) -> Any:
        kinds = [(x.dtype, x.ndim) if hasattr(x, "dtype") else type(x) for x in args]
        taken.add(f"{self.name} {kinds}")
        return call(self, *args)

    monkeypatch.setattr(CompiledKernel, "__call__", noted)
    run_bits("pasa", "ascend_910b2", "fp16_mean", "float16")
    ahead = set(taken)
    run("pasa", seq=700, presets=True, trace_groups=())
    assert {name.partition(" ")[0] for name in taken - ahead} <= {"periodic.run_engine"}
    with compiled_meanwhile(*WARM) as is_compiling:
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
    with compiled_meanwhile(*WARM) as is_compiling:
        assert is_compiling
        assert processes[0].wait() == 0
    assert not (tmp_path / "ran").exists()
