"""Strict YAML 1.2: a file as plain data, with the file and line of every key, and with what it ``extends``.

One pass composes the node graph, which carries line numbers and shows duplicate keys; plain values
are made from it here, so no second, slower round-trip parse is needed for error messages.

``extends: <name>``: a file that says only what differs from another.  Mappings are merged key by key; a number or
choice (a mapping with ``value``) is replaced whole, so that a changed value always carries its own basis and source.
A key of the file may be dotted; ``null`` takes away what the other file has.

``extends: {file: <name>, basis: assumed}`` is for another chip: every number that is taken over says
so, and its basis is no longer that of the chip it was found on.  ``facts`` are not taken over then.  ``keys``: patterns
of all that is taken over (``flags.*``), so that no cost of a mechanism that this chip lacks comes with the rest.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from npusim.errors import SpecError
from npusim.sanitize import regular_file
from npusim.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import TypeGuard

    from ruamel.yaml.constructor import SafeConstructor

_TAG = "tag:yaml.org,2002:"
#: Values of one file, those behind its aliases counted as often as they stand: the largest packaged
#: file has 1,500.
MOST_VALUES = 100_000
#: Characters of a number; Python writes no whole number of more than 4,300 digits, hexadecimal ones included.
MOST_DIGITS = 400
#: Size of one file; beyond it, it is none of ours and would only take long to read.
MOST_BYTES = 16 * MIB


class FilePosition(NamedTuple):
    """Where a key stands."""

    file: str
    line: int

    def __str__(self) -> str:
        """Return ``file:line``, as compilers print it."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Document:
    """A parsed file: plain data, and the place of each dotted key (``""`` is the file itself)."""

    file: str
    data: dict[str, object]
    places: Mapping[str, FilePosition]

    def position_of(self, key: str) -> FilePosition:
        """Return where ``key`` stands, or its nearest parent that stands somewhere."""
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return self.places[key]

    def error(self, key: str, text: str) -> SpecError:
        """Return a `SpecError` that starts ``file:line  dotted.key: ``."""
        return SpecError(self.line(key, text))

    def line(self, key: str, text: str) -> str:
        """Return one line of such an error."""
        return f"{self.position_of(key)}  {key}: {text}" if key else f"{self.position_of(key)}  {text}"


def read_document(path: Path) -> Document:
    """Return the content of a YAML file.

    Raises
    ------
    SpecError
        The file cannot be read, is larger than `MOST_BYTES` or than `MOST_VALUES` values, is not
        YAML 1.2, is empty or not a mapping, or has a key twice.
    """
    return parse_document(read_text(path), file=str(path))


def read_text(path: Path) -> str:
    """Return a file's UTF-8 text; raise `SpecError` if it is no file, cannot be read or exceeds `MOST_BYTES`."""
    try:
        return regular_file(path, MOST_BYTES, SpecError).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SpecError(f"{path}: cannot be read: {reason}") from None


def parse_document(text: str, *, file: str) -> Document:
    """Return the content of YAML text, which errors call ``file``; raises as `read_document`."""
    yaml = YAML(typ="safe", pure=True)
    root = _composed(yaml, text, file)
    if not isinstance(root, MappingNode):
        what = "is empty" if root is None else "is not a mapping of keys to values"
        raise SpecError(f"{file}:1  the file {what}")
    places = {"": FilePosition(file, 1)}
    try:
        data = _Builder(file, places, yaml.constructor).mapping("", root)
    except RecursionError:
        raise SpecError(f"{file}:1  an alias stands inside its own anchor") from None
    return Document(file, data, places)


def _composed(yaml: YAML, text: str, file: str) -> object:
    """Return the root node of YAML text, None if it is empty; raise `SpecError` if it is faulty."""
    try:
        with warnings.catch_warnings():
            # A second anchor of one name would silently change what later aliases mean.
            warnings.simplefilter("error", ReusedAnchorWarning)
            root: object = yaml.compose(text)
            return root
    except ReusedAnchorWarning as error:
        # Its text: "found duplicate anchor 'x' first occurrence ... second occurrence ... line 3".
        line = re.findall(r"line (\d+)", str(error))[-1]
        name = re.findall(r"anchor (\S+)", str(error))[0]
        raise SpecError(f"{file}:{line}  duplicate anchor {name}") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise SpecError(f"{file}:{line}  not valid YAML: {what}") from None
    except YAMLError as error:
        raise SpecError(f"{file}:1  not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise SpecError(f"{file}:1  nested too deeply") from None


def parse_scalar(text: str) -> object:
    """Return ``text`` as YAML 1.2 reads it as a value: number, true/false, or the text itself."""
    yaml = YAML(typ="safe", pure=True)
    try:
        root = yaml.compose(text)
        if isinstance(root, ScalarNode):
            return _Builder("", {}, yaml.constructor).scalar("", root)
    except (YAMLError, SpecError):
        pass
    return text


class _Builder:
    """Plain values from composed nodes; notes the place of each key, refuses a key given twice."""

    def __init__(self, file: str, places: dict[str, FilePosition], constructor: SafeConstructor) -> None:
        self.file = file
        self.places = places
        self.constructor = constructor
        self.count = 0

    def value(self, key: str, node: object) -> object:
        self.count += 1
        if self.count > MOST_VALUES:
            first = key.partition(".")[0]
            raise SpecError(
                f"{self.places[first]}  {first}: more than {MOST_VALUES:,} values here and before; do aliases multiply?"
            )
        match node:
            case MappingNode():
                return self.mapping(key, node)
            case SequenceNode():
                return self.sequence(key, node)
            case ScalarNode():
                return self.scalar(key, node)
        raise TypeError(f"not a YAML node: {node!r}")

    def mapping(self, key: str, node: MappingNode) -> dict[str, object]:
        result: dict[str, object] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, ScalarNode):
                raise SpecError(f"{self.file}:{line}  {key}: a key must be plain text")
            name = str(key_node.value)
            path = f"{key}.{name}" if key else name
            if name in result:
                first = self.places[path]
                raise SpecError(f"{self.file}:{line}  {path}: duplicate key; first given in line {first.line}")
            self.places[path] = FilePosition(self.file, line)
            result[name] = self.value(path, value_node)
        return result

    def sequence(self, key: str, node: SequenceNode) -> list[object]:
        items: list[object] = []
        for index, item in enumerate(node.value):
            path = f"{key}.{index}"
            self.places[path] = FilePosition(self.file, item.start_mark.line + 1)
            items.append(self.value(path, item))
        return items

    def scalar(self, key: str, node: ScalarNode) -> object:
        kind = str(node.tag).removeprefix(_TAG)
        # YAML 1.2 has no dates: what looks like one is text.
        if kind in ("str", "timestamp"):
            return str(node.value)
        line = node.start_mark.line + 1
        if kind not in ("null", "bool", "int", "float"):
            raise SpecError(f"{self.file}:{line}  {key}: tag {node.tag} is not supported")
        try:
            if len(node.value) > MOST_DIGITS:
                raise ValueError(kind)
            return self.constructor.construct_object(node)
        except (YAMLError, ValueError, LookupError):
            text = node.value[:MOST_DIGITS]
            raise SpecError(f"{self.file}:{line}  {key}: {text!r} cannot be read as {kind}") from None


def read_inherited(path: Path, find: Callable[[str, Path], Path]) -> Document:
    """Return a document with everything it extends merged in; ``find`` resolves a name.

    Raises
    ------
    SpecError
        Any file is faulty, a base is unknown, or files extend each other in a circle.
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
        taken = _matching(_assumed(without_facts, name), keys, matched)
        if unknown := [pattern for pattern in keys if pattern not in matched]:
            raise document.error("extends", f"keys: nothing of {name} is called {unknown[0]}")
        base = Document(base.file, taken, base.places)
    return _Merge(base, document).merged()


def _is_listed(keys: object) -> TypeGuard[list[str]]:
    return isinstance(keys, list) and bool(keys) and all(isinstance(key, str) for key in keys)


def _matching(data: dict[str, object], patterns: list[str], matched: set[str], path: str = "") -> dict[str, object]:
    """Return the keys that ``patterns`` match, in their mappings; ``matched`` gets the patterns that match any."""
    taken: dict[str, object] = {}
    for key, value in data.items():
        at = f"{path}.{key}" if path else key
        if _is_branch(value):
            if below := _matching(value, patterns, matched, at):
                taken[key] = below
        elif by := {pattern for pattern in patterns if fnmatchcase(at, pattern)}:
            matched |= by
            taken[key] = value
    return taken


def _assumed(data: dict[str, object], name: str) -> dict[str, object]:
    """Return mappings with every number or choice as an assumption taken over from ``name``."""
    if "value" in data:
        known = {key: value for key, value in data.items() if key != "fitted_on"}
        return {**known, "basis": "assumed", "source": f"as on the {name}: {data.get('source')}"}
    return {key: _assumed(value, name) if isinstance(value, dict) else value for key, value in data.items()}


class _Merge:
    """One file's keys written over another's, the places of keys along with them."""

    def __init__(self, base: Document, override: Document) -> None:
        self.base = base
        self.override = override
        self.places = {**base.places, "": override.places[""]}

    def merged(self) -> Document:
        data = self.base.data
        for key, value in self.override.data.items():
            if key != "extends":
                data = self._with("", data, key.split("."), key, value)
        return Document(self.override.file, data, self.places)

    def _with(self, path: str, node: dict[str, object], steps: list[str], key: str, value: object) -> dict[str, object]:
        """Return ``node``, which stands at ``path``, with ``value`` at ``steps`` below it.

        ``key`` is how the overriding file spells it.  Nothing is written to: anchors may share mappings.
        """
        name, *below = steps
        path = f"{path}.{name}" if path else name
        old = node.get(name)
        if below:
            if not isinstance(old, dict):  # made if need be; validation judges it
                old, self.places[path] = {}, self.override.position_of(key)
            return {**node, name: self._with(path, old, below, key, value)}
        if _is_branch(old) and _is_branch(value) and not _is_another(old, value):
            for child, child_value in value.items():
                old = self._with(path, old, [child], f"{key}.{child}", child_value)
            return {**node, name: old}
        if value is None and name not in node:
            keys = ", ".join(map(str, node)) or "nothing"
            raise self.override.error(key, f"null takes away what the other file has; it has {keys} here")
        for stale in [known for known in self.places if known.startswith(f"{path}.")]:
            del self.places[stale]
        for spelled, position in self.override.places.items():
            if spelled == key or spelled.startswith(f"{key}."):
                self.places[path + spelled.removeprefix(key)] = position
        if value is None:
            return {other: entry for other, entry in node.items() if other != name}
        return {**node, name: value}


def _is_another(old: dict[str, object], value: dict[str, object]) -> bool:
    """Return whether a unit's mapping is of another model or style: what prices the one says nothing of the other."""
    return any(key in value and value[key] != old.get(key) for key in ("model", "style"))


def _is_branch(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict) and "value" not in value
