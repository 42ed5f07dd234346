"""Executors of a study's tasks: this process, or a pool of processes (processes of a cluster:
`npusim.studies.workers.cluster`).

Processes are forked if this one has a single thread on Linux (threads of OpenBLAS end before a fork and restart), so
that they share its imported modules and loaded data. Otherwise they are spawned: another thread may hold a lock, which
a fork would never release.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from npusim.errors import NpusimError
from npusim.simulation.other_process import is_single
from npusim.studies.workers.tasks import TRIES, Argument, Done, Executor, Lost

#: Number of created objects before Python searches for garbage in cycles: a third of a search's objects are such
#: garbage, and more frequent collections took an eighth of the time of searches.
GARBAGE = 1_000_000


@contextmanager
def executor(jobs: int, cluster: str | None = None) -> Iterator[Executor]:
    """Yield the executor of tasks: ``jobs`` processes (1: this one alone), or the workers of a ``cluster`` of Dask.

    No process remains afterwards, and no process searches the current folder for modules unless this one does. Raises
    `NpusimError` if no process can be started.
    """
    if jobs < 1:
        raise NpusimError(f"jobs: {jobs} must be at least 1")
    if cluster is not None:
        from npusim.studies.workers.cluster import ClusterExecutor

        with _safe_path(), closing(ClusterExecutor(cluster, jobs)) as workers:
            yield workers
        return
    if jobs == 1:
        before = gc.get_threshold()
        gc.set_threshold(max(before[0], GARBAGE), *before[1:])
        try:
            yield Executor()
        finally:
            gc.set_threshold(*before)
        return
    with _safe_path(), closing(ProcessExecutor(jobs)) as pool:
        yield pool


def results(
    function: Callable[[Argument], Done],
    tasks: Sequence[Argument],
    lost: Callable[[str], Done],
    *,
    jobs: int = 1,
    cluster: str | None = None,
    advance: Callable[[int, int], object] | None = None,
) -> list[Done]:
    """Return the result of each task, in their order, computed by `executor`.

    ``lost`` returns, from the reason, the result of a task whose worker ended during the task; ``advance`` receives the
    number of finished tasks, and the number of all tasks.
    """
    outcomes: dict[int, Done] = {}
    with executor(min(jobs, max(1, len(tasks))), cluster) as workers:
        for number, result in workers.run(function, tasks):
            outcomes[number] = lost(result.reason) if isinstance(result, Lost) else result
            if advance:
                advance(len(outcomes), len(tasks))
    return [outcomes[number] for number in range(len(tasks))]


@contextmanager
def _safe_path() -> Iterator[None]:
    """Remove the current folder from the path of processes that begin in the meantime, for their first imports.

    A worker has the path of its parent; the tracker of shared resources has only the default path.
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
    """Evaluates tasks in ``workers`` long-lived processes; it must be possible to pickle function, tasks and
    results.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._running: list[_Worker] = []
        self._owners: dict[Hashable, _Worker] = {}
        self._has_done = False
        if is_single():  # this is done now, before any thread is started
            self._start()

    def run(
        self, function: Callable[[Argument], Done], tasks: Sequence[Argument], homes: Sequence[Sequence[Hashable]] = ()
    ) -> Iterator[tuple[int, Done | Lost]]:
        """Yield the result of each task as it is done.

        A task whose worker ended is tried once more in a new worker. `NpusimError` is raised if all workers have ended
        before any of them has finished a task.
        """
        waiting, tries = dict.fromkeys(range(len(tasks))), Counter[int]()
        try:
            while waiting or self._busy():
                if self._has_done or not tries:  # otherwise the remaining workers first show whether any can work
                    self._start()
                for worker in self._running:
                    if worker.task is None and waiting:
                        worker.task = number = self._next(worker, waiting, homes)
                        del waiting[number]
                        worker.send((function, tasks[number]))
                busy = {worker.pipe: worker for worker in self._busy()}
                for pipe in wait(list(busy)):
                    worker = busy[cast("Connection", pipe)]
                    number, answer = cast("int", worker.task), worker.answer()
                    if answer is None:
                        self._end([worker])
                        tries[number] += 1
                        if not self._has_done and not self._busy():
                            raise NpusimError(
                                "a worker process ended unexpectedly (out of memory?); in your own script the "
                                'call must be under `if __name__ == "__main__":`, or use jobs=1'
                            )
                        if tries[number] < TRIES:
                            waiting[number] = None
                        else:
                            yield number, Lost("its worker process ended unexpectedly, twice (out of memory?)")
                        continue
                    is_done, result = answer
                    if not is_done:
                        raise result
                    self._has_done = True
                    yield number, result
        finally:
            self._end(self._busy())  # if a caller stops early, their results are not read

    def _next(self, worker: _Worker, waiting: Mapping[int, None], homes: Sequence[Sequence[Hashable]]) -> int:
        """Return a worker's next task: one of its group, else one without a worker, else one of the largest
        backlog.
        """
        by_owner: dict[_Worker | None, list[int]] = defaultdict(list)
        for number in waiting:
            owners = (self._owners.get(home) for home in (homes[number] if homes else ()))
            by_owner[next((owner for owner in owners if owner), None)].append(number)
        mine = by_owner.get(worker) or by_owner.get(None)
        number = mine[0] if mine else max(by_owner.values(), key=len)[-1]
        for level, home in enumerate(homes[number] if homes else ()):
            if level == 0 or home not in self._owners:
                self._owners[home] = worker
        return number

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._running if worker.task is not None]

    def _start(self) -> None:
        while len(self._running) < self.workers:
            self._running.append(_Worker())

    def _end(self, workers: Sequence[_Worker]) -> None:
        """End processes immediately, and release their resources."""
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()
        self._running = [worker for worker in self._running if worker not in workers]
        self._owners = {home: owner for home, owner in self._owners.items() if owner not in workers}

    def close(self) -> None:
        """End all processes."""
        self._end(self._running)


class _Worker:
    """A process at the other end of a pipe, and the number of its current task."""

    def __init__(self) -> None:
        self.task: int | None = None
        self.pipe, theirs = multiprocessing.Pipe()
        kind = multiprocessing.get_context("fork") if is_single() else multiprocessing.get_context("spawn")
        if kind.get_start_method() == "spawn" and sys.platform != "win32":
            resource_tracker.ensure_running()  # the tracker allows interrupts again when it begins
        with _interrupts_blocked():
            self.process = kind.Process(target=_work, args=(theirs,), daemon=True)
            self.process.start()
        theirs.close()

    def send(self, what: object) -> None:
        """Send a function and its task; an ended process is noticed when its answer is due."""
        with suppress(OSError):
            self.pipe.send(what)

    def answer(self) -> tuple[bool, Any] | None:
        """Return whether the task is done, and its result or its error; None where the process has ended."""
        try:
            answer: tuple[bool, Any] = self.pipe.recv()
        except (EOFError, OSError):
            return None
        self.task = None
        return answer


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C in processes that begin in the meantime until they can end quietly."""
    if not hasattr(signal, "pthread_sigmask"):  # this is not available on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Connection) -> None:
    """Run the tasks that arrive through a pipe: a worker.

    A worker ends at Ctrl-C without a traceback (the parent informs the user), and when the parent has ended: a parent
    that is killed cannot end its workers, so that each worker watches its parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    gc.freeze()
    gc.set_threshold(GARBAGE)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()
    while True:
        function, task = pipe.recv()
        try:
            pipe.send((True, function(task)))
        except Exception as error:  # noqa: BLE001 - the parent raises it
            error.add_note(traceback.format_exc())
            pipe.send((False, error))


def _end_after(sentinel: int) -> None:
    """End this process immediately, whatever it computes, when the process of ``sentinel`` has ended."""
    wait([sentinel])
    os._exit(1)
