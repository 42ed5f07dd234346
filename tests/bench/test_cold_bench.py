"""Commands in loops: time over the least of three of ``for i in range(10**7)``.

Both what people wait on two cores, and CPU time, that of other processes included.

Run it on an idle machine: beside other work the same instructions take longer, the loop less so.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Most loops of a command, CPU time and waited for, by what it is: measured ones and a third more.
MOST = {"first": (118, 67), "other device": (19, 20), "pasa": (22, 15.6), "flash": (14.2, 15.4), "time alone": (7, 8)}


def loop_seconds() -> float:
    """Return the least of three timings of an empty loop."""

    def once() -> float:
        start = time.process_time()
        for _ in range(10**7):
            pass
        return time.process_time() - start

    return min(once() for _ in range(3))


@pytest.mark.bench
def test_commands_take_so_many_loops(tmp_path: Path) -> None:
    """A fresh installation: its first run, another device's first, then each again."""
    no_code = shutil.ignore_patterns("__pycache__")
    for name in ("npusim", "hwconfigs", "workloads"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=no_code)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    env.pop("NPUSIM_CACHE", None)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(tmp_path)], check=True)

    def loops(*verb: str, times: int = 1) -> tuple[float, float]:
        return tuple(map(min, zip(*(timed(*verb) for _ in range(times)), strict=True)))  # type: ignore[return-value]

    def timed(*verb: str) -> tuple[float, float]:
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.monotonic()
        command = [sys.executable, "-c", "from npusim.cli import main; main()", *verb]
        done = subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
        assert re.search(r"cycles", done.stdout)
        waited = time.monotonic() - start
        return (resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before) / loop, waited / loop

    loop = loop_seconds()
    took = {"first": loops("run", "pasa"), "other device": loops("run", "flash", "--hw", "h200")}
    took["pasa"] = loops("run", "pasa", times=3)
    took["flash"] = loops("run", "flash", times=3)
    took["time alone"] = loops("run", "flash", "--no-numerics", times=3)
    print("\n" + "   ".join(f"{name} {cpu:.1f} CPU {wall:.1f} waited" for name, (cpu, wall) in took.items()))
    assert all(count <= most for name in took for count, most in zip(took[name], MOST[name], strict=True)), took
