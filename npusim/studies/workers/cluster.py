"""Tasks of a search on many machines, by Dask: ``--cluster tcp://scheduler:8786``, or ``local`` for only this machine.

Every worker runs the same files of npusim with the same numpy and ml_dtypes: a task contains a digest of these, and a
worker with a different digest refuses the task.  If a worker dies, only its tasks are affected: Dask then gives them to
other workers, up to a few times.
"""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from logging import CRITICAL
from pathlib import Path
from types import MappingProxyType
from typing import Any

from npusim.errors import NpusimError
from npusim.studies.workers.tasks import TRIES, Argument, Done, Executor, Lost

#: Packages whose version is part of the digest: rows depend on them.
_PACKAGES = ("numpy", "ml_dtypes", "llvmlite")
#: Seconds to wait for a scheduler that a user names.
CONNECT_S = 10
#: Settings of a local cluster.  Dask restarts a worker that ended, but dismisses one that is missing for 15 s.  On a
#: loaded machine a restart takes longer, and a cluster without workers never finishes its tasks.
_LOCAL: Mapping[str, str] = MappingProxyType({"distributed.deploy.lost-worker-timeout": "1000 days"})


class ClusterExecutor(Executor):
    """Evaluates tasks on the workers of a Dask cluster; it must be possible to pickle function, tasks and results.

    ``address`` is that of a scheduler, or ``local``, which means ``jobs`` processes of this machine.  Files that tasks
    name (schedules and devices of a user) must be at the same path on every worker.  Raises `NpusimError` if Dask is
    missing or no scheduler answers.
    """

    def __init__(self, address: str, jobs: int) -> None:
        try:
            import dask
            import distributed
        except ImportError:
            raise NpusimError("--cluster needs Dask: python -m pip install 'npusim[cluster]'") from None
        local: Any = None
        with ExitStack() as opened:
            if address == "local":
                opened.enter_context(dask.config.set(_LOCAL))
                settings = {"distributed.scheduler.allowed-failures": TRIES - 1}
                how = {"threads_per_worker": 1, "processes": True, "dashboard_address": None, "silence_logs": CRITICAL}
                try:
                    with dask.config.set(settings):
                        local = distributed.LocalCluster(n_workers=jobs, **how)  # type: ignore[no-untyped-call]
                except (RuntimeError, OSError) as error:  # a timeout raises an OSError
                    raise NpusimError(
                        f"--cluster local: a worker process ended while it started ({error}): out of memory, or your "
                        'own script calls this without `if __name__ == "__main__":`'
                    ) from None
                opened.callback(local.close)
            try:
                self._client: Any = distributed.Client(local or address, timeout=CONNECT_S)  # type: ignore[no-untyped-call]
            except (OSError, ValueError) as error:
                raise NpusimError(
                    f"--cluster {address}: no Dask scheduler answers there ({error}); start one with dask "
                    "scheduler, or name local"
                ) from None
            opened.callback(self._client.close)
            self._opened = opened.pop_all()

    def run(
        self, function: Callable[[Argument], Done], tasks: Sequence[Argument], homes: Sequence[Sequence[Hashable]] = ()
    ) -> Iterator[tuple[int, Done | Lost]]:
        """Yield the result of each task as it is done.

        Dask counts the death of a worker for every task that waits on this worker.  A task with too many deaths
        therefore runs once more without other tasks, and is `Lost` only if its worker ends again.
        """
        from distributed import KilledWorker, as_completed

        del homes
        stamp = installed()
        suspects: list[int] = []

        def submit(number: int) -> Any:
            return self._client.submit(checked, stamp, function, tasks[number], pure=False)

        futures = {submit(number): number for number in range(len(tasks))}
        try:
            for future in as_completed(futures):  # type: ignore[no-untyped-call]
                try:
                    yield futures[future], future.result()
                except KilledWorker:
                    suspects.append(futures[future])
            for number in suspects:
                futures[future := submit(number)] = number
                try:
                    yield number, future.result()
                except KilledWorker as error:
                    yield number, Lost(f"its workers ended unexpectedly (the last one was {error.last_worker.address})")
        finally:
            self._client.cancel(list(futures))  # for callers that stop early

    def close(self) -> None:
        """Leave the cluster; a local cluster ends."""
        self._opened.close()


def checked(stamp: str, function: Callable[[Argument], Done], task: Argument) -> Done:
    """Return ``function(task)`` on a worker whose installation equals ``stamp``; raise `NpusimError` on any other."""
    if (here := installed()) != stamp:
        pairs = zip(stamp.splitlines(), here.splitlines(), strict=True)
        others = ", ".join(f"{theirs} there, {ours} here" for ours, theirs in pairs if ours != theirs)
        raise NpusimError(f"--cluster: a worker on {platform.node()} has other versions than this process: {others}")
    return function(task)


@functools.cache
def installed() -> str:
    """Return the versions that rows depend on, line by line: Python, packages, and a digest of npusim's files."""
    here = Path(__file__).parents[1]
    files = sorted(f for f in here.rglob("*") if f.suffix in (".py", ".yaml") and "__pycache__" not in f.parts)
    digest = hashlib.sha256(b"".join(str(f.relative_to(here)).encode() + f.read_bytes() for f in files))
    lines = [f"python {platform.python_version()}", *(f"{name} {_version(name)}" for name in _PACKAGES)]
    return "\n".join([*lines, f"npusim {digest.hexdigest()[:16]}"])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"
