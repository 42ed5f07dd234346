"""Commands in loops: CPU time, that of other processes included, over the least of three of ``for i in range(10**7)``.

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
#: Most loops of a command, by what it is: measured ones and a third more.
MOST = {"first": 140, "other device": 15, "pasa": 24, "flash": 16, "time alone": 9}


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

    def seconds(*verb: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        command = [sys.executable, "-c", "from npusim.cli import main; main()", *verb]
        done = subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
        assert re.search(r"cycles", done.stdout)
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before

    loop = loop_seconds()
    took = {"first": seconds("run", "pasa"), "other device": seconds("run", "flash", "--hw", "h200")}
    took["pasa"] = min(seconds("run", "pasa") for _ in range(3))
    took["flash"] = min(seconds("run", "flash") for _ in range(3))
    took["time alone"] = min(seconds("run", "flash", "--no-numerics") for _ in range(3))
    took["other device"] -= min(seconds("run", "flash", "--hw", "h200") for _ in range(2))
    loops = {name: value / loop for name, value in took.items()}
    print("\n" + "   ".join(f"{name} {count:.1f}" for name, count in loops.items()))
    assert all(count <= MOST[name] for name, count in loops.items()), loops
