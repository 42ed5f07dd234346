from __future__ import annotations

import importlib
import sqlite3
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import npusim
from npusim.errors import OutputError, SpecError
from npusim.explore import explore
from npusim.explore.store import Outcome, export, open_store, read_store

if TYPE_CHECKING:
    from pathlib import Path

ABOUT = {"version": npusim.__version__, "request": "a"}
ONE = Outcome(0, {"block_kv": 128}, "ok", cycles=5, latency_us=1.5, is_finite=True)


def fill(path: Path, outcomes: list[Outcome], *, resume: bool = False) -> None:
    with open_store(path, ABOUT, resume=resume) as store:
        store.add((str(o.index), {"point": o.point}, o) for o in outcomes)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    two = replace(ONE, index=1, status="pruned", cycles=None, latency_us=None, bound_us=3.25)
    fill(tmp_path / "s.sqlite", [two, ONE])
    about, rows = read_store(tmp_path / "s.sqlite")
    assert rows == (ONE, two)
    assert about["version"] == npusim.__version__
    fill(tmp_path / "s.sqlite", [replace(ONE, index=2)], resume=True)
    assert len(read_store(tmp_path / "s.sqlite")[1]) == 3
    fill(tmp_path / "s.sqlite", [ONE])
    assert len(read_store(tmp_path / "s.sqlite")[1]) == 1


def test_another_search_version_or_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    fill(path, [ONE])
    for name, what in (("version", "npusim"), ("request", "search")):
        other = {**ABOUT, name: "b"}
        with pytest.raises(SpecError, match=f"holds another {what}"), open_store(path, other, resume=True):
            pass
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE about SET value = '99' WHERE name = 'schema'")
    connection.close()
    with pytest.raises(SpecError, match="has schema 99, this npusim reads 1"):
        read_store(path)
    notes = tmp_path / "notes.txt"
    notes.write_text("not a store at all, " * 100)
    for resume in (False, True):
        with pytest.raises(SpecError, match="is no store of npusim explore"), open_store(notes, ABOUT, resume=resume):
            pass
    assert notes.read_text().startswith("not a store")


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with pytest.raises(OutputError, match="disk is full; what is in it stays"), open_store(path, ABOUT) as store:
        store.add([("0", {}, ONE)])
        (pages,) = store.connection.execute("PRAGMA page_count").fetchone()
        store.connection.execute(f"PRAGMA max_page_count = {pages}")
        store.add((str(n), {"text": "x" * 1000}, replace(ONE, index=n)) for n in range(1, 50))
    assert read_store(path)[1] == (ONE,)


def test_a_store_that_cannot_be_begun_is_not_left_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, storing = tmp_path / "s.sqlite", importlib.import_module("npusim.explore.store")

    def full(connection: sqlite3.Connection, _about: object) -> None:
        connection.execute("CREATE TABLE points (key)")
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched, pytest.raises(OutputError, match="disk is full"):
        patched.setattr(storing, "_begin", full)
        fill(path, [ONE])
    assert not path.exists()
    fill(path, [ONE], resume=True)


def test_a_search_is_not_done_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fields = tmp_path / "s.sqlite", {"block_kv": [64, 128, 256], "block_q": [32, 64]}
    first = explore("flash", fields, seq=256, out=path)
    searching = importlib.import_module("npusim.explore.search")
    monkeypatch.setattr(searching, "evaluate", lambda job: pytest.fail("evaluated again"))
    assert explore("flash", fields, seq=256, out=path, resume=True).outcomes == first.outcomes
    with pytest.raises(SpecError, match="holds another search"):
        explore("flash", fields, seq=512, out=path, resume=True)


def test_tables_are_written_by_their_ending(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [ONE, Outcome(1, {"block_kv": 64, "precision": "fa16"}, "infeasible", reason="UB: full")]
    export(tmp_path / "t.parquet", rows)
    table = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert [(r["block_kv"], r["precision"], r["cycles"], r["reason"]) for r in table] == [
        (128, None, 5, ""), (64, "fa16", None, "UB: full"),
    ]  # fmt: skip
