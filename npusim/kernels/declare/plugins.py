"""Schedules from outside the package: ``my_file.py:name``, ``module:name``, and entry points.

A file imports only from `npusim.kernel`.  Its errors name its file and line.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from npusim.config import outside
from npusim.config.messages import choices
from npusim.config.packaged import clash, installed
from npusim.errors import SpecError
from npusim.kernels.declare.registry import Schedule

if TYPE_CHECKING:
    from types import ModuleType

    from npusim.kernels.declare.registry import Builder
    from npusim.program.ir.tile_program import TileProgram


#: Entry points of installed packages: ``name = "package.module:schedule"``.
GROUP = "npusim.schedules"


def offered() -> dict[str, str]:
    """Return ``{name: place}`` of the schedules that installed packages offer."""
    return installed(GROUP)


def refuse_twice(name: str) -> None:
    """Raise `SpecError` if two installed packages offer a schedule with one name."""
    if twice := clash(GROUP, name, is_ours=False):
        raise SpecError(f"schedule {twice}")


def load(name: str) -> tuple[Schedule, ...]:
    """Return the schedules that ``file.py:name`` or ``module:name`` names, one for each core family.

    Raises `SpecError` if there is no such file, module or name, if it fails to import, or if it is not a schedule.
    """
    module, wanted = outside.load(name, "a schedule")
    source = name if name.endswith(".py") else name.rpartition(":")[0]
    return _schedules(module, wanted, source)


def _schedules(module: ModuleType, wanted: str, source: str) -> tuple[Schedule, ...]:
    offered = [n for n, v in vars(module).items() if _is_schedule(v)]
    wanted = wanted or (offered[0] if len(offered) == 1 else "")
    value: Any = getattr(module, wanted, None) if wanted else None
    if _is_schedule(value):
        return tuple(_placed(s, module) for s in (value if isinstance(value, tuple) else (value,)))
    if not wanted:
        if not offered:
            launch = f"a Triton kernel is named by its launch, {source}::NAME[grid](arguments) (npusim help triton)"
            raise SpecError(f"{source}: it has no schedule; {launch}")
        raise SpecError(f"{source}: add :NAME; its schedules are {', '.join(offered)}")
    if value is None:
        listed = choices(wanted, offered) if offered else "; the file has no schedule"
        raise SpecError(f"{source}: no {wanted!r}{listed}")
    raise SpecError(f"{source}: {wanted} is a {type(value).__name__}, not a result of attention() or schedule()")


def _placed(schedule: Schedule, module: ModuleType) -> Schedule:
    """Return a schedule whose errors, including those of its builder, name file and line."""
    origin = schedule.origin or outside.origin_of(schedule.build) or f"{module.__file__}:1"
    return schedule.changed(origin=origin, build=partial(_build, schedule.build, origin))


def _build(build: Builder, origin: str, *arguments: Any) -> TileProgram:
    with outside.with_origin(origin):
        return build(*arguments)


def _is_schedule(value: object) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(v, Schedule) for v in value)
    return isinstance(value, Schedule)
