"""Schedules that live outside the package: ``my_file.py:name``, ``module:name``, and entry points.

A file imports from `npusim.kernel` alone.  Whatever goes wrong in it is told with its file and line.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npusim.errors import NpusimError, SpecError
from npusim.schedules.registry import Schedule
from npusim.spec.messages import suggest

if TYPE_CHECKING:
    from types import ModuleType

#: Entry points of installed packages: ``name = "package.module:schedule"``.
GROUP = "npusim.schedules"


def is_outside(name: str) -> bool:
    """Return whether ``name`` says where a schedule is to be found."""
    return ":" in name


def installed() -> dict[str, str]:
    """Return ``{name: where it is}`` of the schedules that installed packages offer."""
    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def load(name: str) -> tuple[Schedule, ...]:
    """Return the schedule that ``file.py:name`` or ``module:name`` stands for, one a core family.

    Raises `SpecError`: no such file, module or name; one that fails to import; no schedule under it.
    """
    place, _, wanted = name.rpartition(":")
    if not place.endswith(".py"):
        return _schedules(_module(place), wanted, place)
    path = Path(place)
    if not path.is_file():
        raise SpecError(f"{place}: no such file; a schedule of one's own is FILE.py:NAME")
    return _schedules(_file(str(path.resolve()), path.stat().st_mtime_ns), wanted, place)


@cache
def _file(path: str, _changed: int) -> ModuleType:
    """Return a file as a module, read again when it has changed."""
    spec = importlib.util.spec_from_file_location(f"npusim_plugin_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and pydantic look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SpecError(f"{place_of(error, path)}: {describe(error)}") from error
    return module


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise SpecError(f"module {name}: {describe(error)}") from error


def _schedules(module: ModuleType, wanted: str, place: str) -> tuple[Schedule, ...]:
    found: Any = getattr(module, wanted, None)
    if isinstance(found, Schedule):
        return (found,)
    if _is_schedule(found):
        return tuple(found)
    offered = [n for n, v in vars(module).items() if _is_schedule(v)]
    if found is None:
        there = f"it has {', '.join(offered)}{suggest(wanted, offered)}" if offered else "it has no schedule at all"
        raise SpecError(f"{place}: no {wanted!r}; {there}")
    raise SpecError(f"{place}: {wanted} is a {type(found).__name__}, not what npusim.kernel.schedule() returns")


def _is_schedule(value: object) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(v, Schedule) for v in value)
    return isinstance(value, Schedule)


def describe(error: BaseException) -> str:
    """Return an error in words; its kind too, where the words are not ours."""
    return str(error) if isinstance(error, NpusimError) else f"{type(error).__name__}: {error}"


def place_of(error: BaseException, path: str) -> str:
    """Return ``file:line`` of the last step in ``path`` on the way to an error; the file alone if there is none."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{path}:{error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return f"{path}:{lines[-1]}" if lines else path
