"""What installed packages bring by entry points: schedules, core families, folders of devices."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points


def entries(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group, of all packages on the path."""
    return _entries(group, tuple(sys.path))


@cache
def _entries(group: str, _path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


def installed(group: str) -> dict[str, str]:
    """Return ``{name: "package.module:thing"}`` of a group."""
    return {entry.name: entry.value for entry in entries(group)}


def clash(group: str, name: str, *, is_ours: bool) -> str:
    """Return in words who bring a name together, npusim among them or not; empty where at most one does."""
    found = ["npusim itself"] if is_ours else []
    for entry in entries(group):
        if entry.name == name:
            package = f" ({entry.dist.name} {entry.dist.version})" if entry.dist else ""
            found.append(f"{entry.value}{package}")
    if len(found) < 2:
        return ""
    return f"{name!r} is brought by {' and by '.join(found)}; uninstall one, or rename its entry point of {group}"
