"""Results of a search in a SQLite file: a row a point, kept as soon as its task is done.

Columns say what was asked for in full (``config``, JSON), under which ``key`` (a digest of it, of the hardware
and workload it was asked on, and of the tool), and what came out.  A search that was interrupted, however, goes on
from its rows.  `open_store` writes, `read_store` reads: other tools need no more.
"""

from __future__ import annotations

import csv
import json
import sqlite3
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from npusim.errors import NpusimError, OutputError, SpecError, reason_of
from npusim.foreign import csv_cell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from npusim.explore.space import Point

__all__ = ["Outcome", "Store", "export", "open_store", "read_store"]

#: Version of the tables below.
SCHEMA = 1
Status = Literal["ok", "pruned", "infeasible", "merged", "rejected", "failed"]
FIGURES = (
    "status", "cycles", "latency_us", "method", "band", "busiest", "busy_share", "ignored", "reason", "bound_us",
    "relative_rmse", "is_finite", "hbm_bytes", "head_room", "tightest", "same_as",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What one point gave: its time, or why it has none.

    ``status``: ``ok`` simulated; ``pruned``: ``bound_us`` proves that it cannot win; ``infeasible``,
    ``rejected`` (its error), ``failed`` (its worker): see ``reason``; ``merged``: the same program as point
    ``same_as``.  ``method`` says how the time was found; the exact cycles lie within ``1 - band`` to ``1 + band``
    times ``cycles``.  ``busiest`` is the pipe with the largest ``busy_share`` of the kernel in any core group;
    ``ignored`` what of the workload's attention was left out; ``head_room`` the share of the ``tightest`` memory that
    is free; ``relative_rmse`` None where bits were not computed or are not finite.
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

    def row(self) -> dict[str, object]:
        """Return the outcome as columns: the axes, then the figures; None where there is none."""
        return {**self.point, **{name: getattr(self, name) for name in FIGURES}}


class Store:
    """One search's rows in an open file."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection, self.path = connection, path

    def done(self) -> dict[str, Outcome]:
        """Return what is there, by key."""
        rows = self.connection.execute("SELECT key, number, point, outcome FROM points")
        return {key: _outcome(number, point, outcome) for key, number, point, outcome in rows}

    def add(self, rows: Iterable[tuple[str, Mapping[str, object], Outcome]]) -> None:
        """Keep rows of ``(key, configuration, outcome)``, all or none; raise `OutputError` if that is impossible."""
        made = [
            (key, o.index, o.status, json.dumps(o.point), json.dumps(config, sort_keys=True, default=str), _figures(o))
            for key, config, o in rows
        ]
        with _told(self.path), self.connection:
            self.connection.executemany("INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?, ?, ?)", made)


def _figures(outcome: Outcome) -> str:
    figures = asdict(outcome)
    return json.dumps({k: v for k, v in figures.items() if k not in ("index", "point")}, sort_keys=True)


def _outcome(number: int, point: str, outcome: str) -> Outcome:
    known = {f.name for f in fields(Outcome)}
    return Outcome(number, json.loads(point), **{k: v for k, v in json.loads(outcome).items() if k in known})


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Raise `OutputError` for what SQLite says of a file."""
    try:
        yield
    except sqlite3.Error as error:
        raise OutputError(f"{path}: cannot be written: {error}; what is in it stays, and --resume goes on") from None


@contextmanager
def open_store(path: Path, about: Mapping[str, Any], *, resume: bool = False) -> Iterator[Store]:
    """Yield the store in a file, begun anew or, to ``resume``, as it is.

    ``about`` describes the search: ``version`` and ``request`` have to be those of the file that is resumed.
    Raises `OutputError` if the file cannot be written, `SpecError` if it is another search's, another
    version's, or none of ours.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not resume:
            _refuse_other(path)
            _remove(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {reason_of(error, path)}") from None
    is_new = not path.exists()
    with _told(path), closing(sqlite3.connect(path, timeout=10)) as connection:
        if is_new:
            try:
                _begin(connection, about)
            except sqlite3.Error:  # half of a store is none
                connection.close()
                _remove(path)
                raise
        else:
            _check_same(connection, path, about)
        yield Store(connection, path)


def _remove(path: Path) -> None:
    for name in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        name.unlink(missing_ok=True)


def _begin(connection: sqlite3.Connection, about: Mapping[str, Any]) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    with connection:
        connection.execute("CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT)")
        connection.execute(
            "CREATE TABLE points (key TEXT PRIMARY KEY, number INTEGER, status TEXT, point TEXT, config TEXT, "
            "outcome TEXT)"
        )
        values = {"schema": SCHEMA, **about}
        connection.executemany("INSERT INTO about VALUES (?, ?)", [(k, json.dumps(v)) for k, v in values.items()])


def _about(connection: sqlite3.Connection, path: Path) -> dict[str, Any]:
    try:
        found = {name: json.loads(value) for name, value in connection.execute("SELECT name, value FROM about")}
    except (sqlite3.DatabaseError, ValueError):
        raise SpecError(f"{path}: is no store of npusim explore; give another file with --out") from None
    if found.get("schema") != SCHEMA:
        raise SpecError(
            f"{path}: has schema {found.get('schema')}, this npusim reads {SCHEMA}; search anew, to another file (-o)"
        )
    return found


def _refuse_other(path: Path) -> None:
    """Raise `SpecError` for a file that is there and no store: it is not ours to replace."""
    with closing(sqlite3.connect(path, timeout=10)) as connection:
        try:
            connection.execute("SELECT name FROM about LIMIT 1").fetchone()
        except sqlite3.DatabaseError:
            raise SpecError(f"{path}: is no store of npusim explore; give another file with --out") from None


def _check_same(connection: sqlite3.Connection, path: Path, about: Mapping[str, Any]) -> None:
    found = _about(connection, path)
    for name, what in (("version", "npusim"), ("request", "search")):
        if name in about and found.get(name) != about[name]:
            raise SpecError(
                f"{path}: holds another {what}: {found.get(name)}, not {about[name]}; search anew (without --resume), "
                "or to another file (--out)"
            )


def read_store(path: Path) -> tuple[dict[str, Any], tuple[Outcome, ...]]:
    """Return what a store is about, and its rows in the order of their points.

    Raises `SpecError` where there is none, or of another version.
    """
    if not path.is_file():
        raise SpecError(f"{path}: no such file")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as connection:
        about = _about(connection, path)
        rows = connection.execute("SELECT number, point, outcome FROM points ORDER BY number").fetchall()
    return about, tuple(_outcome(*row) for row in rows)


def export(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write outcomes as CSV or, to a file ``*.parquet``, as Parquet; raise `OutputError` if it cannot be written."""
    names = list(dict.fromkeys(name for o in outcomes for name in o.point))
    rows = [{name: row.get(name) for name in (*names, *FIGURES)} for row in (o.row() for o in outcomes)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            _parquet(path, names, rows)
            return
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*names, *FIGURES], lineterminator="\n")
            writer.writeheader()
            writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {reason_of(error, path)}") from None


def _parquet(path: Path, names: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise NpusimError("Parquet needs pyarrow: python -m pip install 'npusim[df]'") from None
    table = pyarrow.table({name: _column([row[name] for row in rows]) for name in (*names, *FIGURES)})
    pyarrow.parquet.write_table(table, path)


def _column(values: list[object]) -> list[object]:
    """Return values of one type: text where an axis has numbers and words."""
    kinds = {type(v) for v in values if v is not None}
    return values if len(kinds) <= 1 else [None if v is None else str(v) for v in values]
