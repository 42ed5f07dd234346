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


@pytest.mark.parametrize("is_first", [True, False], ids=["compiled", "kept"])
def test_a_million_tokens_fit_into_half_a_gigabyte(tmp_path_factory: pytest.TempPathFactory, *, is_first: bool) -> None:
    """Also where machine code is made and a tile chosen; ``ru_maxrss`` would be this process's, if that is larger."""
    folder = tmp_path_factory.getbasetemp() / "kept"
    assert is_first != folder.exists()
    call = "npusim.run('flash', workload='qwen2_7b', seq=1 << 20, numerics=False, trace_groups=())"
    peak = "re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]"
    code = f"import npusim, re; {call}; {call}; print({peak})"
    env = {**os.environ, "NPUSIM_CACHE": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    print(f"\n{int(done.stdout) / 1024:.0f} MB")
    assert int(done.stdout) <= MOST_MB * 1024
