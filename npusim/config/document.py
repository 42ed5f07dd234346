"""YAML files as plain data, with the file and line of every key, and with the files that each file ``extends``.

A file is parsed once; its data stay in the cache folder as long as its text is unchanged.

``extends: <name>``: the file states only its differences from another file.  Mappings are merged key by key; a number
or choice (a mapping with ``value``) is replaced completely, so that a changed value always has its basis and source. A
key of the file may be dotted; ``null`` removes a key of the other file, even if that file has already removed it.

``extends: {file: <name>, basis: assumed}`` is for another chip: every number from the other file is marked as an
assumption, because its basis does not apply to that chip.  ``facts`` are then not inherited. ``keys``: patterns of the
inherited keys (``flags.*``), which exclude costs of mechanisms that this chip lacks.
"""

from __future__ import annotations

import csv
import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeGuard

from npusim import cache
from npusim.errors import SpecError
from npusim.late_methods import dataclass
from npusim.sanitize import regular_file
from npusim.units import MIB, ascii_digits

#: Size of one file; a larger file cannot be a file of npusim, and would take long to read. Profilers' tables may be
#: larger.
MOST_BYTES, MOST_TABLE_BYTES = 16 * MIB, 256 * MIB
#: A number with commas between thousands.
_GROUPED = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")


class FilePosition(NamedTuple):
    """Place of a key: file and line."""

    file: str
    line: int

    def __str__(self) -> str:
        """Return ``file:line``, as compilers print it."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Document:
    """A parsed file: plain data, and the place of each dotted key (``""`` is the file itself).

    ``removed``: dotted keys that this file, or a file that it extends, removes from an extended file.
    """

    file: str
    data: dict[str, object]
    places: Mapping[str, FilePosition]
    removed: frozenset[str] = frozenset()

    @functools.cached_property
    def text(self) -> str:
        """The text of the data: equal for files with equal data."""
        return repr(self.data)

    def position_of(self, key: str) -> FilePosition:
        """Return the place of ``key``, or of its nearest parent that has a place."""
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return self.places[key]

    def error(self, key: str, text: str) -> SpecError:
        """Return a `SpecError` that starts with ``file:line  dotted.key: ``."""
        return SpecError(self.line(key, text))

    def line(self, key: str, text: str) -> str:
        """Return one line of such an error."""
        return f"{self.position_of(key)}  {key}: {text}" if key else f"{self.position_of(key)}  {text}"


def read_document(path: Path) -> Document:
    """Return the content of a YAML file.

    Raises `SpecError` if the file cannot be read, is larger than `MOST_BYTES` or than `MOST_VALUES` values, is not YAML
    1.2, is empty or not a mapping, or has a key twice.
    """
    text = read_text(path)
    name, stamp = f"{cache.digest(path.stem).hex()[:16]}.document", cache.digest(text, _parser())
    content = cache.load(name, stamp)
    if content is not None:
        return _document(str(path), *json.loads(content))
    document = parse_document(text, file=str(path))
    lines = {key: position.line for key, position in document.places.items()}
    cache.store(name, stamp, json.dumps([document.data, lines]).encode(), is_silent=True)
    return document


@functools.cache
def _parser() -> str:
    """Return the source code that parses documents; stored results are valid only while it is unchanged."""
    return Path(__file__).with_name("yaml_text.py").read_text(encoding="utf-8")


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return a file's UTF-8 text; raise `SpecError` if it is not a file, cannot be read, or exceeds ``most_bytes``."""
    try:
        return regular_file(path, most_bytes, SpecError).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SpecError(f"{path}: cannot be read: {reason}") from None


def read_csv(
    path: Path, *needed: str, start: str = "", renamed: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[str], list[dict[str, str]]]:
    """Return the names of the columns, without spaces around them, and the rows of a CSV file; missing cells are empty.

    Lines before the first line that begins with ``start`` are skipped: tools print messages there.  ``renamed`` columns
    get their new name, unless another column has it.

    Raises `SpecError`, with the file's columns, if the file cannot be read or lacks columns that are ``needed``.
    """
    lines = read_text(path, MOST_TABLE_BYTES).removeprefix("\ufeff").splitlines(keepends=True)
    first = next((n for n, line in enumerate(lines) if line.lstrip('"').startswith(start)), 0)
    try:
        names, *rows = list(csv.reader(lines[first:])) or [[]]
    except csv.Error as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None
    stripped = [name.strip() for name in names]
    columns = [name if renamed.get(name, name) in stripped else renamed[name] for name in stripped]
    if missing := [name for name in needed if name not in columns]:
        known = (
            f"its columns are {', '.join(columns[:12])}{', ...' if len(columns) > 12 else ''}"
            if columns
            else "it is empty"
        )
        raise SpecError(f"{path}: there is no column {', '.join(missing)}; {known}")
    return columns, [dict(zip(columns, [*row, *[""] * len(columns)], strict=False)) for row in rows if row]


def cell_number(row: Mapping[str, object], column: str, where: str) -> float | None:
    """Return the number of a table's cell, with or without commas between thousands; None where it is empty or NA.

    Raises `SpecError` for a text that is not a number of at least 0; NaN and infinity are refused too.
    """
    value = row.get(column)
    text = "" if value is None else str(value).strip()
    if text in ("", "NA", "N/A"):
        return None
    try:
        number = float(ascii_digits(text).replace(",", "") if _GROUPED.fullmatch(text) else text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise SpecError(f"{where}: {column}: {text!r} is not a number of at least 0")
    return number


def parse_document(text: str, *, file: str) -> Document:
    """Return the content of YAML text, which error messages call ``file``; raises as `read_document`."""
    from npusim.config.yaml_text import parse_mapping

    return _document(file, *parse_mapping(text, file=file))


def _document(file: str, data: dict[str, object], lines: Mapping[str, int]) -> Document:
    return Document(file, data, {key: FilePosition(file, line) for key, line in lines.items()})


def read_inherited(path: Path, find: Callable[[str, Path], Path]) -> Document:
    """Return a document merged with all files that it extends; ``find`` resolves a file's name.

    Raises `SpecError` if any file is faulty, a base is unknown, or files extend each other in a cycle.
    """
    return _read(path, find, chain=())


def _read(path: Path, find: Callable[[str, Path], Path], chain: tuple[Path, ...]) -> Document:
    document = read_document(path)
    if "extends" not in document.data:
        return document
    name, is_assumed, keys = document.data["extends"], False, ["*"]
    if isinstance(name, dict) and name.keys() - {"keys"} == {"file", "basis"} and name["basis"] == "assumed":
        name, is_assumed, keys = name["file"], True, name.get("keys", keys)
    if not isinstance(name, str) or not name or not _is_listed(keys):
        expected = "the name of another file, or {file: NAME, basis: assumed}, with keys: [PATTERN, ...]"
        raise document.error("extends", f"expected {expected}, got {document.data['extends']!r}")
    try:
        base_path = find(name, path)
    except SpecError as error:
        raise document.error("extends", str(error)) from None
    seen = (*chain, path.resolve())
    if base_path.resolve() in seen:
        circle = " -> ".join(step.stem for step in (*seen, base_path))
        raise document.error("extends", f"files extend each other in a circle: {circle}")
    base = _read(base_path, find, seen)
    if is_assumed:
        without_facts = {key: value for key, value in base.data.items() if key != "facts"}
        matched: set[str] = set()
        values = _matching(_assumed(without_facts, name), keys, matched)
        if unknown := [pattern for pattern in keys if pattern not in matched]:
            raise document.error("extends", f"keys: {name} has no key {unknown[0]}")
        base = Document(base.file, values, base.places, base.removed)
    return _Merge(base, document).merged()


def _is_listed(keys: object) -> TypeGuard[list[str]]:
    return isinstance(keys, list) and bool(keys) and all(isinstance(key, str) for key in keys)


def _matching(data: dict[str, object], patterns: list[str], matched: set[str], path: str = "") -> dict[str, object]:
    """Return the keys that ``patterns`` match, in their mappings; adds to ``matched`` the patterns that match any
    key.
    """
    values: dict[str, object] = {}
    for key, value in data.items():
        at = f"{path}.{key}" if path else key
        if _is_branch(value):
            if below := _matching(value, patterns, matched, at):
                values[key] = below
        elif by := {pattern for pattern in patterns if fnmatchcase(at, pattern)}:
            matched |= by
            values[key] = value
    return values


def _assumed(data: dict[str, object], name: str) -> dict[str, object]:
    """Return mappings with every number or choice marked as an assumption from ``name``."""
    if "value" in data:
        known = {key: value for key, value in data.items() if key != "fitted_on"}
        return {**known, "basis": "assumed", "source": f"assumed to be as on the {name}: {data.get('source')}"}
    return {key: _assumed(value, name) if isinstance(value, dict) else value for key, value in data.items()}


class _Merge:
    """The keys of one file merged over the keys of another, with the places of all keys."""

    def __init__(self, base: Document, override: Document) -> None:
        self.base = base
        self.override = override
        self.places = {**base.places, "": override.places[""]}
        self.removed = set(base.removed)

    def merged(self) -> Document:
        data = self.base.data
        for key, value in self.override.data.items():
            if key != "extends":
                data = self._with("", data, key.split("."), key, value)
        return Document(self.override.file, data, self.places, frozenset(self.removed))

    def _with(self, path: str, node: dict[str, object], steps: list[str], key: str, value: object) -> dict[str, object]:
        """Return ``node``, whose own key is ``path``, with ``value`` at the keys ``steps`` below it.

        ``key`` is the spelling in the overriding file.  No mapping is modified: anchors may share mappings.
        """
        name, *below = steps
        path = f"{path}.{name}" if path else name
        old = node.get(name)
        if below:
            if not isinstance(old, dict):  # created if it is missing; validation checks it
                old, self.places[path] = {}, self.override.position_of(key)
            return {**node, name: self._with(path, old, below, key, value)}
        if _is_branch(old) and _is_branch(value) and not _is_another(old, value):
            for child, child_value in value.items():
                old = self._with(path, old, [child], f"{key}.{child}", child_value)
            return {**node, name: old}
        if value is None and name not in node and path not in self.removed:
            keys = ", ".join(map(str, node)) or "nothing"
            raise self.override.error(key, f"null removes a key of the other file, which has {keys} here")
        for stale in [known for known in self.places if known.startswith(f"{path}.")]:
            del self.places[stale]
        for spelled, position in self.override.places.items():
            if spelled == key or spelled.startswith(f"{key}."):
                self.places[path + spelled.removeprefix(key)] = position
        if value is None:
            self.removed.add(path)
            return {other: entry for other, entry in node.items() if other != name}
        return {**node, name: value}


def _is_another(old: dict[str, object], value: dict[str, object]) -> bool:
    """Return whether a unit's mapping states a different model or style; its costs can then not be merged."""
    return any(key in value and value[key] != old.get(key) for key in ("model", "style"))


def _is_branch(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict) and "value" not in value
