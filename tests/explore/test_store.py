from __future__ import annotations

import importlib
import random
import sqlite3
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import npusim
from npusim.errors import OutputError, SpecError
from npusim.studies.explore import explore
from npusim.studies.explore.store import PointOutcome, open_store, read_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ABOUT = {"version": npusim.__version__, "request": "a"}
ONE = PointOutcome(0, {"block_kv": 128}, "ok", cycles=5, latency_us=1.5, is_finite=True)


def fill(path: Path, outcomes: list[PointOutcome], *, resume: bool = False) -> None:
    with open_store(path, ABOUT, resume=resume) as store:
        store.add((str(o.index), o) for o in outcomes)


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
        with (
            pytest.raises(SpecError, match=f"contains a search with another {what}"),
            open_store(path, other, resume=True),
        ):
            pass
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE about SET value = '99' WHERE name = 'schema'")
    connection.close()
    with pytest.raises(SpecError, match="has schema 99, but this npusim reads 2"):
        read_store(path)
    notes = tmp_path / "notes.txt"
    notes.write_text("not a store at all, " * 100)
    for resume in (False, True):
        with (
            pytest.raises(SpecError, match="is not a store of npusim explore"),
            open_store(notes, ABOUT, resume=resume),
        ):
            pass
    assert notes.read_text().startswith("not a store")


def _wrong(words: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        connection = sqlite3.connect(path)
        connection.executescript(words)
        connection.close()

    return change


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        lambda path: path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 4096 + path.read_bytes()[8192:]),
        lambda path: path.write_bytes(b"\0" * path.stat().st_size),
        _wrong("DROP TABLE points"),
        _wrong("DROP TABLE about"),
        _wrong("DELETE FROM about WHERE name = 'schema'"),
        _wrong("UPDATE about SET value = '{'"),
        _wrong("ALTER TABLE points RENAME COLUMN outcome TO result"),
        _wrong("UPDATE points SET outcome = '{\"status\": '"),
        _wrong("UPDATE points SET outcome = '[]'"),
        _wrong('UPDATE points SET outcome = \'{"status": "fine"}\''),
        _wrong('UPDATE points SET outcome = \'{"status": "ok"}\''),
        _wrong('UPDATE points SET outcome = \'{"status": "ok", "cycles": "5", "latency_us": 1}\''),
        _wrong("UPDATE points SET outcome = NULL"),
        _wrong("UPDATE points SET point = '7'"),
        _wrong("UPDATE points SET number = 'first'"),
    ],
)
def test_a_damaged_store_is_told_and_left_as_it_is(damage: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    fill(path, [replace(ONE, index=n) for n in range(60)])
    damage(path)
    before = path.read_bytes()
    words = r"s\.sqlite: is not a store of npusim explore, or is damaged \(.+\): choose another file"
    with pytest.raises(SpecError, match=words):
        read_store(path)
    with pytest.raises(SpecError, match=words), open_store(path, ABOUT, resume=True) as store:
        store.done()
    assert path.read_bytes() == before


def test_bytes_of_a_store_overwritten_anywhere_are_no_traceback(tmp_path: Path) -> None:
    path, rng, told = tmp_path / "s.sqlite", random.Random(5), 0
    fill(path, [replace(ONE, index=n) for n in range(60)])
    whole = path.read_bytes()
    for _ in range(60):
        at, size = rng.randrange(len(whole)), rng.choice([1, 16, 600])
        path.write_bytes(whole[:at] + rng.randbytes(size) + whole[at + size :])
        try:
            read_store(path)
        except SpecError:
            told += 1
        with suppress(SpecError, OutputError), open_store(path, ABOUT, resume=True) as store:
            store.done()
        with suppress(SpecError, OutputError):
            fill(path, [ONE])
    assert told > 10


def test_a_file_that_no_search_wrote_is_refused_before_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.csv").write_text("name,status\nmine,1\n")
    (tmp_path / "binary.csv").write_bytes(b"\x00\xff" * 100)
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.executescript("CREATE TABLE about (name TEXT, value TEXT); INSERT INTO about VALUES ('author', '\"me\"')")
    other.close()
    searching = importlib.import_module("npusim.studies.explore.search")
    monkeypatch.setattr(searching, "evaluate", lambda job: pytest.fail("searched"))
    for path in list(tmp_path.iterdir()):
        before = path.read_bytes()
        for resume in (False, True):
            with pytest.raises(SpecError, match=r"is not a store|not a table of npusim explore"):
                explore("flash", {"block_kv": [128]}, seq=256, out=path, resume=resume)
        assert path.read_bytes() == before


def test_a_search_replaces_its_own_table_and_an_empty_file_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    for _ in range(2):
        explore("flash", {"block_kv": [128, 256], "depth": [1]}, seq=256, out=tmp_path / "a.csv")
    with pytest.raises(
        SpecError, match=r"contains a search with another search: .*; search to another file \(--out\), or remove"
    ):
        explore("flash", {"block_kv": [128]}, seq=256, out=tmp_path / "a.csv")
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 3


def test_a_search_goes_on_with_a_file_that_is_there_alone(tmp_path: Path) -> None:
    for name in ("none.sqlite", "none.csv"):
        with pytest.raises(SpecError, match=r"is no such file; --resume continues an earlier search: remove"):
            explore("flash", {"block_kv": [128]}, seq=256, out=tmp_path / name, resume=True)
    assert not list(tmp_path.iterdir())


def test_two_searches_do_not_write_to_one_store(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with open_store(path, ABOUT) as store:
        store.add([("0", ONE)])
        for resume in (False, True):
            with pytest.raises(SpecError, match="another search is writing to it"):
                fill(path, [], resume=resume)
        store.add([("1", replace(ONE, index=1))])
    assert len(read_store(path)[1]) == 2
    fill(path, [replace(ONE, index=2)], resume=True)
    assert len(read_store(path)[1]) == 3


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with pytest.raises(OutputError, match="disk is full; its content is unchanged,"), open_store(path, ABOUT) as store:
        store.add([("0", ONE)])
        (pages,) = store.connection.execute("PRAGMA page_count").fetchone()
        store.connection.execute(f"PRAGMA max_page_count = {pages}")
        store.add((str(n), replace(ONE, index=n, reason="x" * 1000)) for n in range(1, 50))
    assert read_store(path)[1] == (ONE,)


def test_a_store_that_cannot_be_begun_is_not_left_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, storing = tmp_path / "s.sqlite", importlib.import_module("npusim.studies.explore.store")

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    def fails() -> None:
        with monkeypatch.context() as patched, pytest.raises(OutputError, match="disk is full"):
            patched.setattr(storing, "_write_about", full)
            fill(path, [ONE])

    fails()
    fill(path, [ONE], resume=True)  # as one that was killed before its first table
    fails()
    assert read_store(path)[1] == (ONE,)


def test_a_search_is_not_done_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fields = tmp_path / "s.sqlite", {"block_kv": [64, 128, 256], "block_q": [32, 64]}
    first = explore("flash", fields, seq=256, out=path)
    searching = importlib.import_module("npusim.studies.explore.search")
    monkeypatch.setattr(searching, "evaluate", lambda job: pytest.fail("evaluated again"))
    assert explore("flash", fields, seq=256, out=path, resume=True).outcomes == first.outcomes
    with pytest.raises(SpecError, match="contains a search with another search"):
        explore("flash", fields, seq=512, out=path, resume=True)
