"""Machine code that a package carries: it spares compilation, unless it is of other sources or processors."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from npusim import cache
from npusim.formats import shipped

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import json, pathlib, sys
from npusim.formats import jit, shipped
shipped.FOLDER = pathlib.Path(sys.argv[1])
import numpy as np, npusim.formats as formats
bits = formats.cast(np.array([1.0004, 65519.0, -3e-8], np.float32), "float16").view(np.uint16).tolist()
print(json.dumps([bits, "npusim.formats.kernel_code" in sys.modules]))
"""
CAST = np.array([1.0004, 65519.0, -3e-8], np.float32).astype(np.float16).view(np.uint16).tolist()

pytestmark = pytest.mark.skipif(shipped.baseline() is None, reason=f"no wheel has code for {platform.machine()}")


def ran(folder: Path, stored: Path, **environment: str) -> tuple[list[object], str]:
    """Return what a process prints that casts with the package's code in a folder, and what it says."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "NPUSIM_CACHE": str(stored), **environment}
    command = [sys.executable, "-c", CODE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=True, timeout=900)
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with code for the baseline, as a wheel's hook stores it."""
    folder = tmp_path_factory.mktemp("carried")
    assert ran(Path("/nowhere"), folder, **shipped.environment()) == ([CAST, True], COMPILES)
    return folder


COMPILES = "npusim: compiling numeric kernels for their first use; later calls load them\n"


def test_code_of_a_package_spares_compilation(carried: Path, tmp_path: Path) -> None:
    assert ran(carried, tmp_path) == ([CAST, False], "")
    assert not list(tmp_path.iterdir())


def test_code_of_other_sources_is_not_used(carried: Path, tmp_path: Path) -> None:
    stale = tmp_path / "stale"
    stale.mkdir()
    for file in carried.glob("*.code"):
        content = file.read_bytes()[cache._DIGEST_BYTES :]
        cache._write(stale / file.name, cache.digest("older sources") + content[cache._DIGEST_BYTES :])
    assert ran(stale, tmp_path / "cache") == ([CAST, True], COMPILES)


def test_a_native_compilation_is_asked_for(carried: Path, tmp_path: Path) -> None:
    assert ran(carried, tmp_path, **{shipped.VARIABLE: shipped.NATIVE}) == ([CAST, True], COMPILES)
    assert ran(carried, tmp_path) == ([CAST, False], "")


def test_a_lesser_processor_does_not_run_it(carried: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite.binding as llvm

    for name in (shipped.VARIABLE, "NUMBA_CPU_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shipped, "FOLDER", carried)
    known = shipped.baseline()
    assert known is not None
    features = dict.fromkeys(known.features, True)
    for have, is_used in ((features, True), ({**features, known.features[0]: False}, False)):
        monkeypatch.setattr(llvm, "get_host_cpu_features", lambda have=have: have)
        shipped._runs.cache_clear()
        assert shipped.is_used() is is_used
    shipped._runs.cache_clear()
