from __future__ import annotations

import multiprocessing
import os
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


def test_worker_that_dies_is_explained() -> None:
    with pytest.raises(NpusimError, match="a worker process ended unexpectedly"):
        list(ProcessExecutor(1).evaluate(_die, [3]))


def test_jobs_choose_the_executor() -> None:
    assert isinstance(executor(1), SerialExecutor)
    assert isinstance(executor(2), ProcessExecutor)
    with pytest.raises(NpusimError, match="jobs: 0 must be at least 1"):
        executor(0)
