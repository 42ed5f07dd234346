"""Executors of a search's tasks: this process, or a pool of processes.

Both yield ``(number of the task, result)`` as tasks are done; a result may be a `Lost` worker.  Processes are forked
where this one has a single thread on Linux (those of OpenBLAS end before a fork and begin anew), so that they have
what it has imported and loaded; else they are spawned: another thread may hold a lock that a fork would keep.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TypeVar

from npusim.errors import NpusimError

Argument = TypeVar("Argument")
Done = TypeVar("Done")
#: How often a task may take its worker with it.
TRIES = 2
#: Objects that are made before anybody looks for garbage in cycles: a third of what searches make is, and looking
#: through the rest more often took an eighth of their time.
GARBAGE = 1_000_000


@dataclass(frozen=True, slots=True)
class Lost:
    """A task that took its worker with it whenever it was tried."""

    reason: str


class Executor:
    """Evaluates one task after the other in this process."""

    def run(self, function: Callable[[Argument], Done], tasks: Sequence[Argument]) -> Iterator[tuple[int, Done | Lost]]:
        """Yield the number and the result of each task as it is done, in any order; what a task raises is raised."""
        yield from enumerate(map(function, tasks))


@contextmanager
def executor(jobs: int) -> Iterator[Executor]:
    """Yield who works: ``jobs`` processes (1: this one alone).

    None of its processes is left after, and none looks for modules in the current folder unless this one does.
    Raises `NpusimError` where there are none.
    """
    if jobs < 1:
        raise NpusimError(f"jobs: {jobs} must be at least 1")
    if jobs == 1:
        before = gc.get_threshold()
        gc.set_threshold(max(before[0], GARBAGE), *before[1:])
        try:
            yield Executor()
        finally:
            gc.set_threshold(*before)
        return
    with _safe_path():
        pool = ProcessExecutor(jobs)
        try:
            yield pool
        finally:
            pool.close()


@contextmanager
def _safe_path() -> Iterator[None]:
    """Keep the current folder off the path of processes that begin meanwhile, for their first imports.

    A worker goes on with its parent's path; the tracker of shared resources has none but its own.
    """
    name = "PYTHONSAFEPATH"
    is_ours = not os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if is_ours:
            del os.environ[name]


class ProcessExecutor(Executor):
    """Evaluates tasks in ``workers`` processes, which last; function, tasks and results must pickle."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._before = set(multiprocessing.active_children())
        self._pool: ProcessPoolExecutor | None = None
        self._is_busy = False
        self._has_done = False
        self._method = "fork" if sys.platform == "linux" and threading.active_count() == 1 else "spawn"
        if self._method == "fork":  # now, before anybody begins a thread; all of them with the first task
            with _interrupts_blocked():
                self._started().submit(int)

    def run(self, function: Callable[[Argument], Done], tasks: Sequence[Argument]) -> Iterator[tuple[int, Done | Lost]]:
        """Yield the result of each task as it is done.

        Tasks of a pool that broke are repeated one by one, to identify the one that breaks it.
        """
        self._is_busy = True
        pending = dict.fromkeys(range(len(tasks)))
        yield from self._all(function, tasks, pending)
        if pending and not self._has_done:
            raise NpusimError(
                "a worker process ended unexpectedly (out of memory?); in a script of your own the "
                'call must stand under `if __name__ == "__main__":`, or use jobs=1'
            )
        for number in pending:
            one = {number: None}
            for _ in range(TRIES):
                if one:
                    yield from self._all(function, tasks, one)
            if one:
                yield number, Lost("its worker process ended unexpectedly, twice (out of memory?)")
        self._is_busy = False

    def _all(
        self, function: Callable[[Argument], Done], tasks: Sequence[Argument], pending: dict[int, None]
    ) -> Iterator[tuple[int, Done]]:
        """Yield results of the tasks that are ``left``, and take them out; some stay where the pool broke."""
        try:
            pool = self._started()
            with _interrupts_blocked():
                futures = {pool.submit(function, tasks[n]): n for n in list(pending)}
            for future in as_completed(futures):
                result = future.result()
                self._has_done = True
                del pending[futures[future]]
                yield futures[future], result
        except BrokenProcessPool:
            self._shut_down()

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context(self._method)
            self._pool = ProcessPoolExecutor(self.workers, mp_context=context, initializer=_worker)
            self._method = "spawn"  # one after it, where it breaks: threads have begun
        return self._pool

    def _shut_down(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None

    def close(self) -> None:
        """End the processes, at once where a caller stopped early (an error, Ctrl-C)."""
        if self._is_busy:
            for process in set(multiprocessing.active_children()) - self._before:
                process.terminate()
        self._shut_down()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Keep Ctrl-C from processes that begin meanwhile until they can end quietly."""
    if not hasattr(signal, "pthread_sigmask"):  # not on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _worker() -> None:
    """End a worker at Ctrl-C without a traceback (the parent tells the user), and when the parent is gone.

    A parent that is killed cannot end its workers; each waits for that itself.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    gc.freeze()
    gc.set_threshold(GARBAGE)
    atexit.register(os._exit, 0)  # results are sent: letting programs go one by one takes seconds
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    """End this process at once, whatever it computes, when the process of ``sentinel`` has ended."""
    wait([sentinel])
    os._exit(1)
