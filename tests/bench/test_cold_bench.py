"""The first run after installation beside the second: what compiling costs."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Cold over warm in CPU time, other processes included (4.6 on a busy machine); it was 8.
MOST = 6


@pytest.mark.bench
def test_first_run_is_not_much_longer_than_the_second(tmp_path: Path) -> None:
    no_code = shutil.ignore_patterns("__pycache__")
    for name in ("npusim", "hwconfigs", "workloads"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=no_code)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    env.pop("NUMBA_CACHE_DIR", None)

    def seconds(*verb: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        command = [sys.executable, "-c", "from npusim.cli import main; main()", *verb]
        done = subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
        assert re.search(r"cycles +\d", done.stdout)
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before

    subprocess.run([sys.executable, "-m", "compileall", "-q", str(tmp_path)], check=True)
    cold, warm = (seconds("run", "pasa") for _ in range(2))
    long = [seconds("run", "flash", "--seq", "65536", "--no-numerics") for _ in range(2)]
    print(f"\nrun pasa: {cold:.1f} s cold, {warm:.1f} s warm; reserved: {long[0]:.1f} and {long[1]:.1f} s")
    assert cold <= MOST * warm
