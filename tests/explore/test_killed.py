"""Searches that are killed at any moment lose nothing, do nothing twice, and leave no process."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from npusim.errors import SpecError
from npusim.studies.explore import explore
from npusim.studies.explore.store import read_store

pytestmark = pytest.mark.exhaustive
FIELDS = {
    "block_kv": [64, 128, 192, 256, 384, 512],
    "block_q": [32, 64, 128],
    "depth": [1, 2, 3],
    "vector_rows": [8, 16],
}
WORDS = [f"--field={name}={','.join(map(str, values))}" for name, values in FIELDS.items()]
KILLS = 20


def _of_group(group: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def _rows(store: Path) -> dict[int, object]:
    try:
        return {o.index: o for o in read_store(store)[1]}
    except (SpecError, sqlite3.OperationalError):  # not begun yet
        return {}


def test_kill_9_at_any_moment_and_resume(tmp_path: Path) -> None:
    store, rng = tmp_path / "s.sqlite", random.Random(9)
    code = "from npusim.cli import main; main()"
    command = [sys.executable, "-c", code, "explore", "flash", *WORDS, "--seq", "512", "-j2", "-o", str(store)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    kept: dict[int, object] = {}
    grown = 0
    for number in range(KILLS):
        more = ["--resume"] if number else []
        process = subprocess.Popen(
            [*command, *more],
            env=environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not (store.exists() and len(_rows(store)) > len(kept)) and process.poll() is None:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.1))  # there are more rows, or all
        is_done = process.poll() is not None
        if is_done:
            pass
        elif number % 2:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
        deadline = time.monotonic() + 300
        while _of_group(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not _of_group(process.pid)
        rows = _rows(store)
        assert all(rows[i] == o for i, o in kept.items())  # what was there is there, as it was
        grown += len(rows) > len(kept)
        kept = rows
        if is_done:
            break
    assert grown > 3
    assert subprocess.run([*command, "--resume"], env=environment, check=False, capture_output=True).returncode == 0
    whole = explore("flash", FIELDS, seq=512)
    _, rows = read_store(store)
    assert [o.index for o in rows] == list(range(len(whole.outcomes)))
    best = min((o for o in rows if o.status == "ok"), key=lambda o: (o.latency_us, o.index))
    assert whole.best is not None
    assert (best.point, best.cycles) == (whole.best.point, whole.best.cycles)


@pytest.mark.parametrize("limits", [{}, {"pareto": True, "max_rmse": 1e-2}])
def test_one_process_and_several_give_one_store(tmp_path: Path, limits: dict[str, Any]) -> None:
    fields: dict[str, list[Any]] = {name: values[:2] for name, values in FIELDS.items()}
    if limits:
        fields = {**fields, "precision": ["fa2_fp32", "fa16"]}
    found = []
    for name, jobs in (("a", 1), ("b", 2)):
        explore("flash", fields, seq=256, out=tmp_path / f"{name}.sqlite", jobs=jobs, **limits)
        found.append(read_store(tmp_path / f"{name}.sqlite"))
    assert found[0] == found[1]
