"""Compares the figures of stored pages with newly computed ones; continuous integration runs this file."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from npusim.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["differences"]

#: Two units of the last stored digit: figures between two roundings may be rounded differently.
RELATIVE = 2e-3


def differences(written: Path, fresh: Path, name: str) -> list[str]:
    """Return where the figures of page ``name`` in folder ``written`` differ from those in ``fresh``.

    A line is ``page: key.key: written against fresh``.  Raises :class:`OutputError` if a file is
    missing or no JSON.
    """
    old, new = (_load(folder / f"{name}.json") for folder in (written, fresh))
    return [f"{name}: {where}" for where in _differing(old, new, "")]


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: no figures of a page: {error}") from None


def _differing(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from _differing(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from _differing(*pair, f"{path}[{index}]")
    elif not _same(old, new):
        yield f"{path}: {old!r} against {new!r}"


def _same(old: object, new: object) -> bool:
    numbers = (int, float)
    if isinstance(old, numbers) and isinstance(new, numbers):
        return math.isclose(old, new, rel_tol=RELATIVE)
    return old == new
