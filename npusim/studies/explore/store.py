"""Results of a search in a SQLite file: one row per point, stored as soon as its task ends.

A table contains the request once (``about``: ``config``, JSON); rows contain their point, under a ``key`` (a digest of
both, of the hardware and of the workload), and their outcome.  An interrupted search resumes from its rows.
`open_store` writes and `read_store` reads; other tools need no other functions.
"""

from __future__ import annotations

import csv
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from npusim.errors import OutputError, SpecError, absent, reason_of
from npusim.late_methods import dataclass
from npusim.sanitize import csv_text
from npusim.units import format_value

if TYPE_CHECKING:
    from npusim.studies.explore.space import Point

    Row = tuple[str, "PointOutcome"]


#: Version of the tables below.
SCHEMA = 2
_READ = "key, number, point, outcome"
Status = Literal["ok", "pruned", "infeasible", "merged", "rejected", "failed"]


def text_of(value: object) -> str:
    """Return an axis's value in the form of a command line: ``auto`` for a field that its schedule's rule sets."""
    return "auto" if value is None else format_value(value)


@dataclass(frozen=True)
class PointOutcome:
    """The outcome of one point: its time, or the reason why it has no time.

    ``status``: ``ok``: simulated; ``pruned``: ``bound_us`` proves that the point cannot win; ``infeasible``,
    ``rejected`` (because of its error) and ``failed`` (its worker ended), with the ``reason``; ``merged``: the same
    program as point ``same_as``.  ``method`` names the method of the time; the exact cycles are within ``1 - band`` to
    ``1 + band`` times ``cycles``.  ``busiest`` is the pipe with the largest ``busy_share`` of the cores' time in any
    core group; ``ignored`` lists omitted features of the workload's attention; ``head_room`` is the free share of the
    ``tightest`` memory; ``relative_rmse`` is None where bits were not computed or are not finite; for a sample of rows
    ``sampling_error`` is its standard error.
    """

    index: int
    point: Point
    status: Status
    cycles: int | None = None
    latency_us: float | None = None
    method: str = ""
    band: float | None = None
    busiest: str = ""
    busy_share: float | None = None
    ignored: str = ""
    reason: str = ""
    bound_us: float | None = None
    relative_rmse: float | None = None
    is_finite: bool | None = None
    hbm_bytes: int | None = None
    head_room: float | None = None
    tightest: str = ""
    same_as: int | None = None
    sampling_error: float | None = None

    def label(self) -> str:
        """Return its changed fields in words: ``block_q=64 depth=2``."""
        return " ".join(f"{name}={text_of(value)}" for name, value in self.point.items())

    def row(self) -> dict[str, object]:
        """Return the axes and the figures of the outcome by name; a figure that the outcome does not have is None."""
        return {**self.point, **{name: getattr(self, name) for name in FIGURES}}


#: Names of the figures of an outcome, in the order of columns.
FIGURES = tuple(f.name for f in fields(PointOutcome) if f.name not in ("index", "point"))


class Store:
    """One search's rows in an open file, and the subject ``about`` of the file when it was opened."""

    def __init__(self, connection: sqlite3.Connection, path: Path, about: Mapping[str, Any]) -> None:
        self.connection, self.path, self.about = connection, path, about

    def done(self) -> dict[str, PointOutcome]:
        """Return the stored rows, by key; raise `SpecError` for a damaged file."""
        return dict(_rows(self.connection, self.path))

    def add(self, rows: Iterable[Row]) -> None:
        """Store all rows of ``(key, outcome)``, or no row; raise `OutputError` if this is impossible."""
        with _sqlite_errors(self.path), self.connection:
            self._insert(rows)

    def replace(self, about: Mapping[str, Any], rows: Iterable[Row]) -> None:
        """Remove all rows, and store these rows with a new subject, in the way of `add`."""
        with _sqlite_errors(self.path), self.connection:
            self.connection.execute("DELETE FROM points")
            _write_about(self.connection, about)
            self._insert(rows)

    def _insert(self, rows: Iterable[Row]) -> None:
        figures = sorted(FIGURES)
        values = [
            (key, o.index, o.status, json.dumps(o.point), json.dumps({n: getattr(o, n) for n in figures}))
            for key, o in rows
        ]
        self.connection.executemany("INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?, ?)", values)


def _rows(connection: sqlite3.Connection, path: Path) -> list[tuple[str, PointOutcome]]:
    """Return keys and outcomes in the order of their points; raise `SpecError` for a damaged file."""
    try:
        rows = connection.execute(f"SELECT {_READ} FROM points ORDER BY number").fetchall()
        return [(key, _outcome(*row)) for key, *row in rows]
    except (sqlite3.DatabaseError, ValueError, TypeError, AttributeError) as error:
        raise SpecError(_damaged(path, error)) from None


def _damaged(path: Path, error: Exception) -> str:
    return (
        f"{path}: is not a store of npusim explore, or is damaged ({error}): choose another file with --out, or "
        "remove it"
    )


def _outcome(number: int, point: str, outcome: str) -> PointOutcome:
    """Return a stored row; raise `ValueError` where a value is not of the kind that npusim stores."""
    figures = json.loads(outcome)
    row = PointOutcome(number, json.loads(point), **{name: figures[name] for name in FIGURES if name in figures})
    is_right = isinstance(number, int) and isinstance(row.point, dict) and row.status in get_args(Status)
    for figure in fields(PointOutcome)[3:]:
        kind = str if figure.default == "" else int | float | None
        is_right &= isinstance(getattr(row, figure.name), kind)
    if not is_right or (row.status == "ok" and (row.cycles is None or row.latency_us is None)):
        raise ValueError(f"row {number} has a wrong value")
    return row


@contextmanager
def _sqlite_errors(path: Path) -> Iterator[None]:
    """Raise `SpecError` if SQLite reports that a file is damaged, and `OutputError` for its other errors."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise SpecError(_damaged(path, error)) from None
        raise OutputError(
            f"{path}: cannot be written: {error}; its content is unchanged, and --resume continues the search"
        ) from None


@contextmanager
def open_store(path: Path, about: Mapping[str, Any], *, resume: bool = False) -> Iterator[Store]:
    """Yield the store in a file, empty or, to ``resume``, with its rows: then the file must exist.

    ``about`` describes the search: ``request`` must equal the file's, and if the search is resumed, ``version`` too.
    Raises `OutputError` if the file cannot be written, `SpecError` if the file belongs to another search or version, is
    damaged or not a store, or if another search is writing to it.
    """
    if resume and not path.exists():
        raise SpecError(f"{path}: there is no such file; --resume continues an earlier search: remove it to start one")
    with _locked(path), _sqlite_errors(path), closing(sqlite3.connect(path, timeout=10)) as connection:
        # If a search was killed before it began, its file is empty.
        is_blank = connection.execute("SELECT name FROM sqlite_master").fetchone() is None
        if not is_blank:
            _check_same(connection, path, about, is_begun_anew=not resume)
        if is_blank or not resume:
            _begin(connection, about)
        yield Store(connection, path, _about(connection, path))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file, which is created if missing, against writing by other searches."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_kind(path)
        file = path.open("ab")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {reason_of(error, path)}") from None
    with file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SpecError(f"{path}: another search is writing to it; choose another file with --out") from None
        except (ImportError, OSError):  # this is Windows, or a file system without locks
            pass
        yield


def _check_kind(path: Path) -> None:
    """Raise `SpecError` for a folder, a pipe or a device: a store is a file."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "no regular file"
        raise SpecError(f"{path}: is {kind}; choose another file with --out")


def _begin(connection: sqlite3.Connection, about: Mapping[str, Any]) -> None:
    """Restart the store: replace all rows in one transaction."""
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    with connection:
        # without a transaction tables are created one by one, and if the process is killed, only some of them exist
        connection.execute("BEGIN")
        for table in ("about", "points"):
            connection.execute(f"DROP TABLE IF EXISTS {table}")
        connection.execute("CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT)")
        connection.execute(
            "CREATE TABLE points (key TEXT PRIMARY KEY, number INTEGER, status TEXT, point TEXT, outcome TEXT)"
        )
        _write_about(connection, about)


def _write_about(connection: sqlite3.Connection, about: Mapping[str, Any]) -> None:
    values = [(name, json.dumps(value, default=str)) for name, value in {"schema": SCHEMA, **about}.items()]
    connection.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", values)


def _about(connection: sqlite3.Connection, path: Path, *, any_schema: bool = False) -> dict[str, Any]:
    """Return the subject of a store; raise `SpecError` if there is no store, or if it has another schema."""
    try:
        about = {name: json.loads(value) for name, value in connection.execute("SELECT name, value FROM about")}
        schema = about["schema"]
        connection.execute(f"SELECT {_READ} FROM points LIMIT 0")
    except (sqlite3.DatabaseError, KeyError, ValueError, TypeError) as error:
        raise SpecError(_damaged(path, error)) from None
    if schema != SCHEMA and not any_schema:
        raise SpecError(
            f"{path}: has schema {schema}, but this npusim reads {SCHEMA}; start a new search with another file (-o)"
        )
    return about


def _check_same(connection: sqlite3.Connection, path: Path, about: Mapping[str, Any], *, is_begun_anew: bool) -> None:
    """Raise `SpecError` for the store of another search, or, to resume, of another version of npusim."""
    stored = _about(connection, path, any_schema=is_begun_anew)
    for name, what in (("request", "search"), *(() if is_begun_anew else (("version", "npusim"),))):
        if name in about and stored.get(name) != about[name]:
            how = "to another file (--out)" + (", or without --resume" if name == "version" else ", or remove this one")
            raise SpecError(
                f"{path}: contains a search with another {what}: {stored.get(name)}, not {about[name]}; search {how}"
            )


def read_store(path: Path) -> tuple[dict[str, Any], tuple[PointOutcome, ...]]:
    """Return the subject of a store, and its rows in the order of their points.

    Raises `SpecError` if there is no store, or if it is of another version.
    """
    if not path.is_file():
        raise SpecError(f"{path}: {absent(path)}")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as connection:
        return _about(connection, path), tuple(outcome for _, outcome in _rows(connection, path))


def check_table(path: Path) -> None:
    """Raise, before a search, the errors that :func:`export` would raise after it, and the errors of a file that is no
    table.
    """
    _check_kind(path)
    if not path.exists() or not path.stat().st_size:
        return
    if not os.access(path, os.R_OK | os.W_OK):
        raise OutputError(f"{path}: cannot be written: no permission")
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            names = next(csv.reader([file.readline(1 << 16)]))
    except (csv.Error, StopIteration):
        names = []
    if tuple(names[-len(FIGURES) :]) != FIGURES:
        raise SpecError(f"{path}: is not a table of npusim explore: choose another file with --out, or remove it")


def export(path: Path, outcomes: Sequence[PointOutcome]) -> None:
    """Write outcomes as CSV; raise `OutputError` if it cannot be written."""
    names = list(dict.fromkeys(name for o in outcomes for name in o.point))
    columns = (*names, *FIGURES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(csv_text(columns, (map(o.row().get, columns) for o in outcomes)), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {reason_of(error, path)}") from None
