"""Checks files before they are read, and escapes text from outside where it is shown.

A terminal obeys control sequences, and a spreadsheet runs cells that look like formulas: both are escaped.
"""

from __future__ import annotations

import csv
import io
import re
import stat
import unicodedata
from collections.abc import Iterable
from pathlib import Path

#: Unicode categories that are not text: control characters, writing directions, surrogate halves, line ends.
_NO_TEXT = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
#: Characters that a spreadsheet interprets as the beginning of a formula.
_FORMULA = tuple("=+-@\t\r")
#: The beginning of a pointer of Git LFS, and its largest number of bytes (git-lfs, docs/spec.md).
_LFS, _LFS_BYTES = b"version https://git-lfs.github.com/spec/", 1024
_JSON_CONTROLS = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def regular_file(path: Path, most_bytes: int, error: type[Exception]) -> Path:
    """Return the path of a file that can be read completely; raise ``error`` for an endless or too large one.

    It also raises for a pointer of Git LFS, which replaces a file that was not fetched.  Every reader of files that a
    user names calls this first.  It raises `OSError` if there is no such file.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        what = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise error(f"{path}: cannot be read: it is {what}, not a file")
    if status.st_size > most_bytes:
        raise error(
            f"{path}: has {status.st_size >> 20:,} MiB; files of this kind have {most_bytes >> 20:,} MiB at most"
        )
    if status.st_size < _LFS_BYTES:
        with path.open("rb") as file:
            if file.read(len(_LFS)) == _LFS:
                raise error(f"{path}: this is a pointer of Git LFS, not the file; git lfs pull fetches the file")
    return path


def visible(text: str) -> str:
    r"""Return ``text`` with control characters escaped, except line ends: ``\x1b[31m`` then colours nothing.

    Examples
    --------
    >>> visible("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(c if c == "\n" or unicodedata.category(c) not in _NO_TEXT else _written_out(c) for c in text)


def _written_out(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def csv_cell(value: object) -> object:
    """Return a CSV cell that no spreadsheet runs: text that begins like a formula gets a quote in front.

    Numbers, and text that is a number (``-1``), are unchanged.
    """
    if not isinstance(value, str):
        return value
    text = visible(value)
    if not text.startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def csv_text(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as CSV, with cells written by `csv_cell`; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([map(csv_cell, row) for row in (columns, *rows)])
    return text.getvalue()


def json_safe(text: str) -> str:
    """Return JSON text in which control characters and surrogate halves that JSON itself allows are escaped; its
    meaning is the same.
    """
    return _JSON_CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
