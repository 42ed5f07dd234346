"""A search on a cluster of Dask gives the rows of one process; a worker that dies costs its tasks alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import npusim
from npusim.errors import NpusimError
from npusim.studies.workers import cluster as under_test
from npusim.studies.workers.cluster import ClusterExecutor, checked, installed
from npusim.studies.workers.executors import executor
from npusim.studies.workers.tasks import Lost

pytest.importorskip("distributed", reason="npusim[cluster] is not installed")

SPACE = {"block_q": [64, 128], "block_kv": [128, 256], "depth": [1, 3]}
CALL: dict[str, Any] = {"workload": "smollm2", "seq": 256, "fields": SPACE}
#: A crowded machine may stop a process for longer than Dask waits by default.
PATIENT = {f"distributed.comm.timeouts.{what}": "10 minutes" for what in ("connect", "tcp")} | {
    "distributed.scheduler.worker-ttl": "1 hour"
}
#: Less than any restart of a worker takes: as on a machine so crowded that restarts take longer than 15 s.
CROWDED = {"distributed.deploy.lost-worker-timeout": "10 ms"}


@pytest.fixture(scope="module")
def workers() -> Iterator[ClusterExecutor]:
    """Two processes of a cluster of our own."""
    import dask

    with pytest.MonkeyPatch.context() as patch, dask.config.set(PATIENT | CROWDED):
        patch.setattr(under_test, "CONNECT_S", 600)
        with executor(2, "local") as pool:
            assert isinstance(pool, ClusterExecutor)
            yield pool


def double(number: int) -> int:
    return 2 * number


def die_once(argument: tuple[str, int]) -> int:
    """Kill the worker of the third task, once."""
    folder, number = argument
    mark = Path(folder) / "died"
    if number == 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * number


def die(number: int) -> int:
    """Kill the worker of the third task, whenever it is tried."""
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * number


def test_a_worker_that_ends_while_it_starts_is_said() -> None:
    import dask

    ends = {"distributed.worker.preload": ["import os; os._exit(3)"]}
    said = pytest.raises(NpusimError, match="a worker process ended while it started")
    with dask.config.set(ends), said, executor(1, "local"):
        pass


def test_rows_are_those_of_one_process(workers: ClusterExecutor) -> None:
    address = workers._client.scheduler.address
    alone = npusim.explore("flash", **CALL)
    assert npusim.explore("flash", **CALL, cluster=address).outcomes == alone.outcomes
    assert len(alone.outcomes) == 8


def test_a_worker_that_dies_costs_its_tasks_alone(workers: ClusterExecutor, tmp_path: Path) -> None:
    done = dict(workers.run(die_once, [(str(tmp_path), n) for n in range(8)]))
    assert done == {n: 2 * n for n in range(8)}
    assert (tmp_path / "died").exists()


def test_a_task_that_kills_every_worker_is_lost(workers: ClusterExecutor) -> None:
    done = dict(workers.run(die, range(6)))
    assert isinstance(done.pop(3), Lost)
    assert done == {n: 2 * n for n in (0, 1, 2, 4, 5)}


def test_other_versions_are_refused(workers: ClusterExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = installed()
    assert checked(mine, double, 4) == 8
    other = mine.replace("numpy ", "numpy 0.")
    monkeypatch.setattr(under_test, "installed", lambda: other)
    with pytest.raises(NpusimError, match=r"other versions than this process: numpy \S+ there, numpy 0\.\S+ here"):
        dict(workers.run(double, [1, 2]))


def test_a_missing_scheduler_is_said() -> None:
    with pytest.raises(NpusimError, match="--cluster nowhere: no Dask scheduler answers there"), executor(2, "nowhere"):
        pass
