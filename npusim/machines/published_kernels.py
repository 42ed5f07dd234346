"""The published kernels: each is in a file of `npusim.library.published`, or in a user's file."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from npusim.config import outside
from npusim.errors import TilingError
from npusim.machines.published_kernel import RETURNS, GpuKernel, PublishedKernel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from npusim.machines.published_kernel import Computes

KernelType = TypeVar("KernelType", bound=PublishedKernel)
#: The package with a file for each kernel.
ROOM = "npusim.library.published"
#: A kernel that makes no decisions.
_BARE = GpuKernel(name="", whose="")


@cache
def _packaged() -> dict[str, PublishedKernel]:
    room = importlib.import_module(ROOM)
    modules = [importlib.import_module(f"{ROOM}.{module.name}") for module in pkgutil.iter_modules(room.__path__)]
    values = [value for module in modules for value in vars(module).values() if isinstance(value, PublishedKernel)]
    return {kernel.name: kernel for kernel in values}


def kernels(kind: type[KernelType], schedule: str = "") -> Mapping[str, KernelType]:
    """Return the packaged kernels of a kind by the names that ``kernel=`` accepts, or only those of a named
    ``schedule``.
    """
    of_kind = {name: kernel for name, kernel in _packaged().items() if isinstance(kernel, kind)}
    return {n: k for n, k in of_kind.items() if not (schedule and k.computes) or schedule in k.computes}


def listed() -> str:
    """Return the packaged kernels by schedule, in words: ``cann, pto of flash, ...``."""
    schedules = dict.fromkeys(s for kernel in _packaged().values() for s in kernel.computes)
    return "; ".join(f"{', '.join(kernels(PublishedKernel, s))} of {s}" for s in schedules)


def home(name: object) -> str:
    """Return where a packaged kernel runs, in words: ``ascend cores for flash, split_kv``; empty for another name."""
    if (kernel := _packaged().get(str(name))) is None:
        return ""
    return " for ".join(filter(None, (kernel.family and f"{kernel.family} cores", ", ".join(kernel.computes))))


def find_kernel(kind: type[KernelType], name: str | None, of: Computes | None = None) -> KernelType | None:
    """Return the kernel with the name ``NAME`` or ``FILE.py:NAME`` (field ``kernel=``), of the given kind; None without
    a name, and for the name of a kernel of another kind.

    Raises `SpecError` for a file that cannot be read or fails, `TilingError` if it has no such kernel.
    """
    if name is None or not outside.is_outside(name):
        return kernels(kind).get(name or "")
    kernel: KernelType = _of_file(cast("Any", kind), *outside.load(name, "a kernel"), name)
    if of not in (None, kernel.of):
        raise TilingError(f"kernel: {name} is a kernel of {kernel.of}; needed here: a kernel of {of}")
    return kernel


@cache
def _of_file(kind: Any, module: ModuleType, wanted: str, name: str) -> Any:
    """Return a kernel of a module by ``kernel=NAME``; errors in its functions name file and field."""
    value: Any = getattr(module, wanted, None)
    if not isinstance(value, kind):
        has = ", ".join(n for n, v in vars(module).items() if isinstance(v, kind)) or "none"
        what = f"{wanted} is not a {kind.__name__}" if wanted else f"add :NAME, the name of a {kind.__name__}"
        raise TilingError(f"kernel: {name}: {what}; the file has {has}")
    given = {f.name: getattr(value, f.name) for f in fields(value) if f.name in RETURNS}
    own = [n for n, function in given.items() if function is not None and function is not getattr(_BARE, n)]
    called = {n: partial(_called, given[n], n, name, f"{module.__file__}:1") for n in own}
    return replace(value, name=name, **called)


def _called(function: Callable[..., Any], field: str, name: str, origin: str, *arguments: Any) -> Any:
    """Return the result of a function of a user's kernel; its errors name file, line, kernel and field."""
    with outside.with_origin(outside.origin_of(function) or origin, f"kernel={name}: {field}: "):
        value = function(*arguments)
        value = tuple(value) if RETURNS[field] is tuple else value  # exceptions of the generator are raised here
        if not isinstance(value, RETURNS[field]):
            raise TilingError(f"returns {value!r}, not a {RETURNS[field].__name__}")
        return value
