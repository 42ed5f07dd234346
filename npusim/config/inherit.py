"""``extends: <name>``: a file that says only what differs from another.

Mappings are merged key by key; a number or choice (a mapping with ``value``) is replaced whole, so
that a changed value always carries its own basis and source.  A key may be dotted; ``null`` takes
away what the other file has.

``extends: {file: <name>, basis: assumed}`` is for another chip: every number that is taken over says
so, and its basis is no longer that of the chip it was found on.  ``facts`` are not taken over then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.config.document import Document, read_document
from npusim.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TypeGuard


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
    name, is_assumed = document.data["extends"], False
    if isinstance(name, dict) and name.keys() == {"file", "basis"} and name["basis"] == "assumed":
        name, is_assumed = name["file"], True
    if not isinstance(name, str) or not name:
        wanted = "the name of another file, or {file: NAME, basis: assumed}"
        raise document.error("extends", f"expected {wanted}, got {name!r}")
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
        own = {key: value for key, value in base.data.items() if key != "facts"}
        base = Document(base.file, _assumed(own, name), base.places)
    return _Merge(base, document).merged()


def _assumed(data: dict[str, object], name: str) -> dict[str, object]:
    """Return mappings with every number or choice as an assumption taken over from ``name``."""
    if "value" in data:
        known = {key: value for key, value in data.items() if key != "fitted_on"}
        return {**known, "basis": "assumed", "source": f"as on the {name}: {data.get('source')}"}
    return {key: _assumed(value, name) if isinstance(value, dict) else value for key, value in data.items()}


class _Merge:
    """One file's keys written over another's, the places of keys along with them."""

    def __init__(self, base: Document, override: Document) -> None:
        self.override = override
        self.data = _copied(base.data)
        self.places = {**base.places, "": override.places[""]}

    def merged(self) -> Document:
        for key, value in self.override.data.items():
            if key == "extends":
                continue
            *parents, name = key.split(".")
            node = self.data
            for depth, parent in enumerate(parents):
                node = self._branch(node, parent, ".".join(parents[: depth + 1]), key)
            self._set(node, ".".join([*parents, name]), key, value)
        return Document(self.override.file, self.data, self.places)

    def _branch(self, node: dict[str, object], name: str, path: str, key: str) -> dict[str, object]:
        """Return the mapping ``name`` of ``node``, made if need be (validation judges it)."""
        child = node.get(name)
        if not isinstance(child, dict):
            child = node[name] = {}
            self.places[path] = self.override.place(key)
        return child

    def _set(self, node: dict[str, object], path: str, key: str, value: object) -> None:
        """Write ``value`` at ``path``; ``key`` is how the overriding file spells the path."""
        name = path.rpartition(".")[2]
        old = node.get(name)
        if _is_branch(old) and _is_branch(value):
            for child, child_value in value.items():
                self._set(old, f"{path}.{child}", f"{key}.{child}", child_value)
            return
        if value is None:
            if name not in node:
                there = ", ".join(map(str, node)) or "nothing"
                raise self.override.error(key, f"null takes away what the other file has; it has {there} here")
            del node[name]
        else:
            node[name] = _copied(value) if isinstance(value, dict) else value
        for stale in [known for known in self.places if known.startswith(f"{path}.")]:
            del self.places[stale]
        for given, place in self.override.places.items():
            if given == key or given.startswith(f"{key}."):
                self.places[path + given.removeprefix(key)] = place


def _is_branch(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict) and "value" not in value


def _copied(data: dict[str, object]) -> dict[str, object]:
    """Return mappings copied to any depth; anchors may share them, and merging writes to them."""
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in data.items()}
