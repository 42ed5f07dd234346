"""What a second run in a process costs beside `for i in range(10**7): pass`, in CPU time; memory of a long one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from npusim.run import run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.bench
LONG = {"workload": "qwen2_7b", "seq": 131_072}
#: Peak memory of a process that runs a million causal tokens.
MOST_MB = 500


def least(function: Callable[[], object], times: int) -> float:
    """Return the least CPU time of some calls, in seconds."""
    seconds = []
    for _ in range(times):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return min(seconds)


def loop() -> None:
    for _ in range(10**7):
        pass


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"seq": 4096}, 0.15),
        ({**LONG, "causal": False}, 0.3),
        (LONG, 0.6),
        ({"workload": "qwen2_7b", "seq": 1_048_576}, 4.0),
    ],
    ids=["4k", "131k dense", "131k causal", "1M causal"],
)
def test_a_second_run_takes_so_many_loops(options: dict[str, Any], most: float, capsys: Any) -> None:
    def call() -> None:
        run("flash", numerics=False, trace_groups=(), **options)

    call()
    loops = least(call, 5) / least(loop, 3)
    with capsys.disabled():
        print(f"\n{options}: {loops:.2f} loops (limit {most})")
    assert loops <= most


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "compiled"])
def test_a_million_tokens_fit_into_half_a_gigabyte(is_kept: bool, tmp_path: Path, capsys: Any) -> None:
    call = "npusim.run('flash', workload='qwen2_7b', seq=1 << 20, numerics=False, trace_groups=())"
    # Linux counts the peak of who began a process as its own in `ru_maxrss`.
    peak = "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    env = os.environ if is_kept else {**os.environ, "NPUSIM_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", f"import npusim; {call}; {call}; {peak}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    used = int(done.stdout) // 1024
    with capsys.disabled():
        print(f"\n1M causal, kernels {'kept' if is_kept else 'compiled'}: {used} MB (limit {MOST_MB})")
    assert used <= MOST_MB
