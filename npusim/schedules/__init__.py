"""Attention algorithms as tile programs: steps x mapping, one file per algorithm.

``find_schedule(name, family)`` returns the entry of the registry; ``SCHEDULES`` lists all;
``default_hw`` names the device that a schedule is for.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.config.device import MACHINES
from npusim.config.layers import ModelProblem
from npusim.config.messages import choices
from npusim.config.packaged import installed
from npusim.errors import SpecError
from npusim.schedules import allreduce, flash, fp8, gemm, layer, pasa, plugins, split_kv, standard
from npusim.schedules.define import unread_keys
from npusim.schedules.registry import Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SCHEDULES", "Schedule", "default_hw", "find_schedule", "is_of_models", "unread_keys"]

SCHEDULES: Mapping[tuple[str, str], Schedule] = MappingProxyType(
    {
        (s.name, s.family): s
        for s in chain(
            *(flash.FLASH, pasa.SCHEDULES, flash.FAST, *(m.SCHEDULES for m in (fp8, split_kv, standard, gemm))),
            *(m.SCHEDULES for m in (allreduce, layer)),
            flash.VOLTA_FLASH,
        )
    }
)


def schedules_called(name: str) -> dict[str, Schedule]:
    """Return what is called ``name``, by core family: ours, an installed package's, or a file's own.

    A package may offer one of our names for a core family of its own.  Raises :class:`SpecError` where a file or
    package offers no schedule, or takes one of our names for one of our families.
    """
    ours = {family: s for (n, family), s in SCHEDULES.items() if n == name}
    plugins.refuse_twice(name)
    outside = name if plugins.is_outside(name) else plugins.offered().get(name, "")
    theirs = {s.family: s for s in plugins.load(outside)} if outside else {}
    taken = next((s for s in theirs.values() if (s.name, s.family) in SCHEDULES and plugins.is_outside(name)), None)
    if taken:
        where = f"{taken.origin}: " if taken.origin else ""
        raise SpecError(f"{where}schedule {taken.name!r} is one of npusim's own; call it otherwise where it is made")
    if ours.keys() & theirs.keys():
        raise SpecError(f"{outside}: {name!r} is a schedule of npusim's own; give the entry point another name")
    return {**ours, **theirs}


def is_of_models(name: str) -> bool:
    """Return whether a schedule runs whole models: on a node, or on a device alone as a node of one."""
    return any(issubclass(s.problem, ModelProblem) for s in schedules_called(name).values())


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
    outside = next((s for s in families.values() if s.elsewhere and family in installed(MACHINES)), None)
    if outside is not None and outside.elsewhere:
        return replace(outside, family=family, tiling=outside.elsewhere)
    if families:
        nodes = "; a node is several devices: --hw ascend_910b2_x8" if "node" in families else ""
        raise SpecError(f"schedule {name!r} has no mapping for {family} cores; it runs on {', '.join(families)}{nodes}")
    known = sorted({*(n for n, _ in SCHEDULES), *plugins.offered()})
    raise SpecError(f"unknown schedule {name!r}{choices(name, known)}")
