"""Work in a forked process: the same value, whatever becomes of the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from npusim.simulation.other_process import done_apart

#: In a process of its own: a worker of pytest has threads, and may not fork.
BEGINNING = "import os, signal\nos.cpu_count = lambda: 2\nfrom npusim.simulation.other_process import done_apart\n"


def told(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", BEGINNING + code], check=True, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout


def test_another_process_computes_it_once_and_says_nothing() -> None:
    code = """
def work():
    print("not shown", flush=True)
    return os.getpid(), bytes(1 << 20)
with done_apart(work) as result:
    (pid, data), same = result(), result()
print(pid != os.getpid(), len(data) == 1 << 20, same[0] == pid)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("ended")
"""
    assert told(code) == "True True True\nended\n"


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "raise KeyboardInterrupt"])
def test_what_it_does_not_give_is_computed_here(end: str) -> None:
    code = f"""
here = os.getpid()
def work():
    if os.getpid() != here:
        {end}
    return "here"
with done_apart(work) as result:
    print(result())
"""
    assert told(code) == "here\n"


def test_it_raises_what_the_work_raises_and_ends_with_its_context() -> None:
    code = """
import time
try:
    with done_apart(lambda: 1 // 0) as result:
        result()
except ZeroDivisionError:
    print("raised")
with done_apart(lambda: time.sleep(60)):
    pass
"""
    assert told(code) == "raised\n"


def test_beside_other_threads_nothing_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    with done_apart(os.getpid) as result:
        assert result is None
