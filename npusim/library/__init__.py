"""The library: kernels as files, each written only with the public interface; every file of the folder is a kernel.

``find_schedule(name, family)`` returns the entry of the registry; ``SCHEDULES`` lists all schedules; ``default_hw``
names the device for which a schedule is meant.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from npusim.config import outside
from npusim.config.family import MACHINES
from npusim.config.messages import choices
from npusim.config.packaged import installed
from npusim.config.tiling import of_schedule
from npusim.errors import SpecError
from npusim.kernels.declare import plugins
from npusim.kernels.declare.registry import Schedule
from npusim.kernels.triton import is_launch, is_recorded

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SCHEDULES", "Schedule", "default_hw", "find_schedule", "is_of_models", "names_sizes", "takes_sizes"]


class _Packaged(Mapping[tuple[str, str], Schedule]):
    """The packaged schedules by name and core family."""

    def __getitem__(self, key: tuple[str, str]) -> Schedule:
        return packaged(key[0])[key[1]]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((s.name, s.family) for file in _files() for s in _declared(file))

    def __len__(self) -> int:
        return sum(len(_declared(file)) for file in _files())


#: Files whose schedules come first in lists and suggestions.
_FIRST = ("flash", "pasa", "two_level")


@cache
def _files() -> tuple[str, ...]:
    """Return the names of the folder's files: `_FIRST`, then the others by name."""
    names = sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.ispkg)
    return (*_FIRST, *(name for name in names if name not in _FIRST))


@cache
def _declared(file: str) -> tuple[Schedule, ...]:
    """Return the schedules that a file declares: those of its tuples of schedules."""
    values = vars(importlib.import_module(f"{__name__}.{file}")).values()
    return tuple(s for value in values if isinstance(value, tuple) for s in value if isinstance(s, Schedule))


@cache
def packaged(name: str) -> Mapping[str, Schedule]:
    """Return the packaged schedules of a name by core family; empty for an unknown name.

    The file with this name is imported; if there is no such file, all files are.  The fields of a packaged schedule
    accept only the published kernels that compute it; a user's schedule may follow any published kernel.
    """
    files = () if not name.isidentifier() else (name,) if name in _files() else _files()
    schedules = {s.family: s for file in files for s in _declared(file) if s.name == name}
    return {family: _with_its_kernels(schedule) for family, schedule in schedules.items()}


def _with_its_kernels(schedule: Schedule) -> Schedule:
    return schedule.changed(tiling=lambda: of_schedule(schedule.tiling, schedule.name))


SCHEDULES: Mapping[tuple[str, str], Schedule] = _Packaged()


def schedules_called(name: str) -> dict[str, Schedule]:
    """Return the schedules of a name by core family: packaged ones, an installed package's, or a file's.

    A package may offer a schedule with a packaged name for its core family.  Raises :class:`SpecError` if a file or
    package offers no schedule, or uses a packaged name for one of npusim's families.
    """
    ours = packaged(name)
    plugins.refuse_twice(name)
    if is_recorded(name):
        return {s.family: s for s in importlib.import_module("npusim.kernels.triton.recorded").load(name)}
    if is_launch(name):
        return {s.family: s for s in importlib.import_module("npusim.kernels.triton.launch").load(name)}
    source = name if outside.is_outside(name) else plugins.offered().get(name, "")
    theirs = {s.family: s for s in plugins.load(source)} if source else {}
    shadowed = next((s for s in theirs.values() if (s.name, s.family) in SCHEDULES and outside.is_outside(name)), None)
    if shadowed:
        where = f"{shadowed.origin}: " if shadowed.origin else ""
        raise SpecError(f"{where}schedule {shadowed.name!r} is a packaged one; rename your schedule")
    if ours.keys() & theirs.keys():
        raise SpecError(f"{source}: {name!r} is a packaged schedule; rename the entry point")
    return {**ours, **theirs}


def is_of_models(name: str) -> bool:
    """Return whether a schedule runs models: on a node, or on a single device as a node of one."""
    return any("models" in s.problem.features for s in schedules_called(name).values())


def takes_sizes(name: str) -> bool:
    """Return whether a schedule names its sizes itself: a launch of a Triton kernel, or plain tensors."""
    return is_launch(name) or any("plain" in s.problem.features for s in schedules_called(name).values())


def names_sizes(name: str) -> bool:
    """Return whether a packaged schedule declares the names and the default values of its sizes."""
    return any(s.sizes for s in packaged(name).values())


def default_hw(name: str, usual: str) -> str:
    """Return the packaged device for which a schedule is meant: ``usual`` if the schedule names none."""
    devices = [s.hw for s in schedules_called(name).values()]
    return devices[0] if all(devices) and devices else usual


def find_schedule(name: str, family: str) -> Schedule:
    """Return the schedule called ``name`` for a core family.

    Raises :class:`SpecError` with the nearest names, or with the families that have the schedule.
    """
    families = schedules_called(name)
    if family in families:
        return families[family]
    if family in installed(MACHINES):
        elsewhere = next((s for s in families.values() if s.elsewhere), None)
        if elsewhere is not None and elsewhere.elsewhere and (there := elsewhere.elsewhere(family)):
            return elsewhere.changed(**there)
    if families:
        nodes = "; a node is several devices: --hw ascend_910b2_x8" if "node" in families else ""
        raise SpecError(f"schedule {name!r} has no mapping for {family} cores; it runs on {', '.join(families)}{nodes}")
    known = sorted({*(n for n, _ in SCHEDULES), *plugins.offered()})
    raise SpecError(f"unknown schedule {name!r}{choices(name, known)}")
