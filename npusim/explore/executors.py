"""Who evaluates the points of a search: this process, or a pool of processes.

Both yield results as they are done.  Processes are spawned, not forked: threads of numeric
libraries do not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Protocol, TypeVar

from npusim.errors import NpusimError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Executor", "ProcessExecutor", "SerialExecutor", "executor"]

Task = TypeVar("Task")
Done = TypeVar("Done")


class Executor(Protocol):
    """Evaluates tasks in any order."""

    def evaluate(self, function: Callable[[Task], Done], tasks: Iterable[Task]) -> Iterator[Done]:
        """Yield ``function(task)`` of each task as it is done."""


def executor(jobs: int) -> Executor:
    """Return an executor for ``jobs`` processes; 1 is this process alone."""
    if jobs < 1:
        raise NpusimError(f"jobs: {jobs} must be at least 1")
    return SerialExecutor() if jobs == 1 else ProcessExecutor(jobs)


class SerialExecutor:
    """Evaluates one task after the other in this process."""

    def evaluate(self, function: Callable[[Task], Done], tasks: Iterable[Task]) -> Iterator[Done]:
        """Yield ``function(task)`` of each task, in order."""
        for task in tasks:
            yield function(task)


class ProcessExecutor:
    """Evaluates tasks in ``jobs`` processes; function, tasks and results must pickle."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def evaluate(self, function: Callable[[Task], Done], tasks: Iterable[Task]) -> Iterator[Done]:
        """Yield ``function(task)`` of each task as it is done.

        When the caller stops early (an error, Ctrl-C) tasks that wait are dropped and those that
        run are ended with their processes.
        """
        before = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(
            self.jobs,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_die_with_the_parent,
        )
        finished = False
        try:
            futures = [pool.submit(function, task) for task in tasks]
            for future in as_completed(futures):
                yield future.result()
            finished = True
        except BrokenProcessPool:
            raise NpusimError(
                "a worker process ended unexpectedly (out of memory?); in a script of your own the "
                'call must stand under `if __name__ == "__main__":`, or use jobs=1'
            ) from None
        finally:
            if not finished:
                for process in set(multiprocessing.active_children()) - before:
                    process.terminate()
            pool.shutdown(cancel_futures=True)


def _die_with_the_parent() -> None:
    """End a worker at Ctrl-C without a traceback (the parent tells the user), and when the parent is gone.

    A parent that is killed cannot end its workers; each waits for that itself.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    """End this process at once, whatever it computes, when the process of ``sentinel`` has ended."""
    wait([sentinel])
    os._exit(1)
