from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from npusim.errors import NpusimError, TilingError
from npusim.studies.workers.executors import ProcessExecutor, executor, results
from npusim.studies.workers.tasks import Lost


def _square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def _refuse(number: int) -> int:
    raise TilingError(f"{number} is too large")


def _die(number: int) -> int:
    os._exit(number)


def _die_of_one(number: int) -> str:
    if number == 1:
        os._exit(number)
    time.sleep(0.3)  # the other worker ends before any task is done
    return str(number)


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_task_is_done_once(jobs: int) -> None:
    with executor(jobs) as workers:
        done = dict(workers.run(_square, range(5)))
    assert {number: square for number, (square, _) in done.items()} == {n: n * n for n in range(5)}


def test_processes_are_others() -> None:
    with executor(2) as workers:
        assert os.getpid() not in {pid for _, (_, pid) in workers.run(_square, range(4))}
    assert not multiprocessing.active_children()


def test_error_of_a_task_reaches_the_caller_and_ends_the_workers() -> None:
    with pytest.raises(TilingError, match="is too large"), executor(2) as workers:
        list(workers.run(_refuse, range(4)))
    assert not multiprocessing.active_children()


def test_caller_that_stops_early_leaves_no_worker() -> None:
    workers = ProcessExecutor(1)
    next(workers.run(_square, range(100)))
    workers.close()
    for process in multiprocessing.active_children():
        process.join(300)
    assert not multiprocessing.active_children()


def test_killed_search_leaves_no_worker(tmp_path: Path) -> None:
    script = tmp_path / "search.py"
    script.write_text(
        "import os, time\n"
        "from npusim.studies.workers.executors import ProcessExecutor\n"
        "def work(seconds):\n"
        "    os.write(1, f'{os.getpid()}\\n'.encode())\n"  # at once: lines of two workers stay apart
        "    time.sleep(seconds)\n"
        "if __name__ == '__main__':\n"
        "    list(ProcessExecutor(2).run(work, [60, 60]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
        # The pipe ends when nobody holds it any more: neither worker lives.
        assert parent.stdout.read() == ""
    deadline = time.monotonic() + 300  # a process lets go of its files a moment before it has ended
    while any(_is_alive(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.001)


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


def test_workers_run_no_code_of_the_current_folder(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("numpy", "signal", "random", "npusim", "multiprocessing"):
        (here / f"{name}.py").write_text("import pathlib\npathlib.Path('ran').write_text(__name__)\n")
    script = tmp_path / "script.py"
    script.write_text(
        "from npusim.studies.workers.executors import executor\n"
        "def folder(number):\n"
        "    import numpy, os\n"
        "    return os.getcwd()\n"
        "if __name__ == '__main__':\n"
        "    with executor(2) as workers:\n"
        "        print(sorted(found for _, found in workers.run(folder, [1, 2])))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=here, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{[str(here)] * 2}\n"), done.stderr
    assert not (here / "ran").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
@pytest.mark.parametrize("has_thread", [False, True])
def test_workers_are_forked_where_there_is_one_thread(tmp_path: Path, *, has_thread: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, threading\n"
        "from npusim.studies.workers.executors import executor\n"
        "loaded = []\n"
        "def known(number):\n"
        "    return len(loaded)\n"
        "if __name__ == '__main__':\n"
        "    loaded.append(1)\n"
        "    if len(sys.argv) > 1:\n"
        "        threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "    with executor(2) as workers:\n"
        "        print(sorted(found for _, found in workers.run(known, [1, 2])))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, str(script), *["thread"] * has_thread]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{[0 if has_thread else 1] * 2}\n"), done.stderr


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.usefixtures("terminals_sigint")
def test_a_worker_that_is_interrupted_while_it_starts_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        while not (begun := multiprocessing.active_children()):
            time.sleep(0.001)
        status = Path(f"/proc/{begun[0].pid}/status")
        # Python has its own handler, which makes tracebacks, until the worker is ready.
        while not int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & 1 << signal.SIGINT - 1:
            time.sleep(0.001)
        os.kill(begun[0].pid or 0, signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(NpusimError, match="ended unexpectedly"):
        list(ProcessExecutor(1).run(_square, [1]))
    sender.join()
    assert "Traceback" not in capfd.readouterr().err


def test_worker_that_dies_is_explained() -> None:
    with pytest.raises(NpusimError, match="a worker process ended unexpectedly"):
        list(ProcessExecutor(1).run(_die, [3]))


def _die_of_two(number: int) -> int:
    if number == 2:
        os._exit(3)
    return number


def test_a_task_that_takes_its_worker_with_it_is_found_and_the_others_are_done() -> None:
    with executor(2) as workers:
        assert dict(workers.run(_die_of_two, [0])) == {0: 0}
        done = dict(workers.run(_die_of_two, range(4)))
    assert {n: found for n, found in done.items() if n != 2} == {0: 0, 1: 1, 3: 3}
    assert isinstance(done[2], Lost)
    assert "ended unexpectedly" in done[2].reason


def test_jobs_choose_the_executor() -> None:
    with executor(1) as one, executor(2) as two:
        assert not isinstance(one, ProcessExecutor)
        assert isinstance(two, ProcessExecutor)
    with pytest.raises(NpusimError, match="jobs: 0 must be at least 1"), executor(0):
        pass


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_are_in_the_order_of_tasks_with_one_for_each_lost(jobs: int) -> None:
    done: list[tuple[int, int]] = []
    found = results(abs, [-3, -2, -1], lambda _: 0, jobs=jobs, advance=lambda *so_far: done.append(so_far))
    assert found == [3, 2, 1]
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert results(abs, [], lambda _: 0, jobs=jobs) == []


def test_a_task_that_takes_its_worker_with_it_has_the_result_of_a_lost_one() -> None:
    ended = results(_die_of_one, [0, 1], lambda reason: reason, jobs=2)
    assert ended[0] == "0"
    assert "twice" in ended[1]
