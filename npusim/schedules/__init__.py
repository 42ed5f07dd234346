"""Attention algorithms as tile programs: steps x mapping, one file per algorithm.

``find_schedule(name, family)`` returns the entry of the registry; ``SCHEDULES`` lists all;
``default_hw`` names the device that a schedule is for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.config import outside
from npusim.config.family import MACHINES, NODE_FAMILY, Kind, running
from npusim.config.messages import choices
from npusim.config.packaged import installed
from npusim.config.tiling import of_schedule
from npusim.errors import SpecError
from npusim.schedules import plugins
from npusim.schedules.registry import Schedule
from npusim.ttir import is_launch, is_recorded

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SCHEDULES", "Schedule", "default_hw", "find_schedule", "is_of_models", "names_sizes", "takes_sizes"]

#: Files of the packaged schedules by name, the kind of each kernel (None: it runs on nodes), and the family
#: that it is for (empty: any): a file is imported when one of its own is asked for.
_PACKAGED: Mapping[str, tuple[str, Kind | None, str]] = MappingProxyType(
    {
        "flash": ("flash", "attention", ""),
        "pasa": ("pasa", "stages", ""),
        "two_level": ("flash", "attention", "ascend"),
        "unified": ("flash", "attention", "ascend"),
        "fp8_attention": ("fp8", "stages", ""),
        "split_kv": ("split_kv", "splits", ""),
        "standard": ("standard", "operators", ""),
        "gemm": ("gemm", "product", ""),
        "copy": ("gemm", "plain", ""),
        "rows": ("gemm", "rows", ""),
        "tiling_allreduce": ("allreduce", None, ""),
        "gemm_allreduce": ("allreduce", None, ""),
        "allreduce": ("allreduce", None, ""),
        "offload_classic": ("layer", None, ""),
        "offload_cooperative": ("layer", None, ""),
        "layer": ("layer", None, ""),
        "volta_flash": ("flash", "attention", "nvidia"),
        "fa4": ("flash", "attention", "nvidia"),
        "retention": ("retention", "chunks", ""),
        "gla": ("retention", "chunks", ""),
        "gated_delta": ("gated_delta", "chunks", ""),
        "ssd": ("ssd", "chunks", ""),
        "flash_backward": ("flash_backward", "stages", ""),
    }
)


def _families(name: str) -> tuple[str, ...]:
    """Return the families of the package that run a packaged schedule; none for another name."""
    if name not in _PACKAGED:
        return ()
    _, kind, family = _PACKAGED[name]
    return (NODE_FAMILY,) if kind is None else (family,) if family else running(kind)


class _Packaged(Mapping[tuple[str, str], Schedule]):
    """The packaged schedules by name and core family."""

    def __getitem__(self, key: tuple[str, str]) -> Schedule:
        if key[1] not in _families(key[0]):
            raise KeyError(key)
        return _packaged(*key)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((name, family) for name in _PACKAGED for family in _families(name))

    def __len__(self) -> int:
        return sum(len(_families(name)) for name in _PACKAGED)


@cache
def _packaged(name: str, family: str) -> Schedule:
    """Return a packaged schedule, whose fields take the published kernels that compute it alone.

    One of a user's may be written as any published kernel.
    """
    listed: tuple[Schedule, ...] = importlib.import_module(f"{__name__}.{_PACKAGED[name][0]}").SCHEDULES
    found = next(s for s in listed if (s.name, s.family) == (name, family))
    return found.changed(tiling=lambda: of_schedule(found.tiling, name))


SCHEDULES: Mapping[tuple[str, str], Schedule] = _Packaged()


def schedules_called(name: str) -> dict[str, Schedule]:
    """Return the schedules of a name, by core family: ours, an installed package's, or a file's own.

    A package may offer one of our names for a core family of its own.  Raises :class:`SpecError` where a file or
    package offers no schedule, or uses one of our names for one of our families.
    """
    ours = {family: SCHEDULES[name, family] for family in _families(name)}
    plugins.refuse_twice(name)
    if is_recorded(name):
        return {s.family: s for s in importlib.import_module(f"{__name__}.recorded").load(name)}
    if is_launch(name):
        return {s.family: s for s in importlib.import_module(f"{__name__}.triton").load(name)}
    source = name if outside.is_outside(name) else plugins.offered().get(name, "")
    theirs = {s.family: s for s in plugins.load(source)} if source else {}
    taken = next((s for s in theirs.values() if (s.name, s.family) in SCHEDULES and outside.is_outside(name)), None)
    if taken:
        where = f"{taken.origin}: " if taken.origin else ""
        raise SpecError(f"{where}schedule {taken.name!r} is one of npusim's own; give your schedule another name")
    if ours.keys() & theirs.keys():
        raise SpecError(f"{source}: {name!r} is a schedule of npusim's own; give the entry point another name")
    return {**ours, **theirs}


def is_of_models(name: str) -> bool:
    """Return whether a schedule runs whole models: on a node, or on a device alone as a node of one."""
    return any("models" in s.problem.features for s in schedules_called(name).values())


def takes_sizes(name: str) -> bool:
    """Return whether a schedule has sizes with names of its own: a launch of a Triton kernel, or plain tensors."""
    return is_launch(name) or any("plain" in s.problem.features for s in schedules_called(name).values())


def names_sizes(name: str) -> bool:
    """Return whether a packaged schedule declares the names and the default values of its sizes."""
    return name in _PACKAGED and any(s.sizes for s in schedules_called(name).values())


def default_hw(name: str, usual: str) -> str:
    """Return the packaged device that a schedule is for: ``usual``, if not one of its own."""
    devices = [s.hw for s in schedules_called(name).values()]
    return devices[0] if all(devices) and devices else usual


def find_schedule(name: str, family: str) -> Schedule:
    """Return the schedule called ``name`` for a core family.

    Raises :class:`SpecError` naming the near names, or the families that have it.
    """
    families = schedules_called(name)
    if family in families:
        return families[family]
    if family in installed(MACHINES):
        found = next((s for s in families.values() if s.elsewhere), None)
        if found is not None and found.elsewhere and (there := found.elsewhere(family)):
            return found.changed(**there)
    if families:
        nodes = "; a node is several devices: --hw ascend_910b2_x8" if "node" in families else ""
        raise SpecError(f"schedule {name!r} has no mapping for {family} cores; it runs on {', '.join(families)}{nodes}")
    known = sorted({*(n for n, _ in SCHEDULES), *plugins.offered()})
    raise SpecError(f"unknown schedule {name!r}{choices(name, known)}")
