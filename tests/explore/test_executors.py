from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from npusim.errors import NpusimError, TilingError
from npusim.explore.executors import ProcessExecutor, SerialExecutor, executor

if TYPE_CHECKING:
    from npusim.explore.executors import Executor


def _square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def _refuse(number: int) -> int:
    raise TilingError(f"{number} is too large")


def _die(number: int) -> int:
    os._exit(number)


@pytest.mark.parametrize("chosen", [SerialExecutor(), ProcessExecutor(2)])
def test_every_task_is_done_once(chosen: Executor) -> None:
    done = list(chosen.evaluate(_square, range(5)))
    assert sorted(square for square, _ in done) == [0, 1, 4, 9, 16]


def test_processes_are_others() -> None:
    pids = {pid for _, pid in ProcessExecutor(2).evaluate(_square, range(4))}
    assert os.getpid() not in pids


def test_error_of_a_task_reaches_the_caller_and_ends_the_workers() -> None:
    with pytest.raises(TilingError, match="is too large"):
        list(ProcessExecutor(2).evaluate(_refuse, range(4)))
    assert not multiprocessing.active_children()


def test_caller_that_stops_early_leaves_no_worker() -> None:
    tasks = ProcessExecutor(1).evaluate(_square, range(100))
    next(tasks)
    tasks.close()  # type: ignore[attr-defined]
    for process in multiprocessing.active_children():
        process.join(10)
    assert not multiprocessing.active_children()


def test_killed_search_leaves_no_worker(tmp_path: Path) -> None:
    script = tmp_path / "search.py"
    script.write_text(
        "import os, time\n"
        "from npusim.explore.executors import ProcessExecutor\n"
        "def work(seconds):\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(seconds)\n"
        "if __name__ == '__main__':\n"
        "    list(ProcessExecutor(2).evaluate(work, [60, 60]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
        # The pipe ends when nobody holds it any more: neither worker lives.
        assert parent.stdout.read() == ""
    assert not any(_is_alive(pid) for pid in workers)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state != "Z"  # ended; nobody has asked for its exit code yet


def test_worker_that_dies_is_explained() -> None:
    with pytest.raises(NpusimError, match="a worker process ended unexpectedly"):
        list(ProcessExecutor(1).evaluate(_die, [3]))


def test_jobs_choose_the_executor() -> None:
    assert isinstance(executor(1), SerialExecutor)
    assert isinstance(executor(2), ProcessExecutor)
    with pytest.raises(NpusimError, match="jobs: 0 must be at least 1"):
        executor(0)
