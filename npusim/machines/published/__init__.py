"""Published kernels, a file each: what each decides by itself is one value, and nothing else knows its name."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from npusim.config import outside
from npusim.errors import TilingError
from npusim.machines.published.kernel import PublishedKernel

if TYPE_CHECKING:
    from collections.abc import Mapping

KernelType = TypeVar("KernelType", bound=PublishedKernel)


@cache
def _packaged() -> dict[str, PublishedKernel]:
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    values = [value for module in modules for value in vars(module).values() if isinstance(value, PublishedKernel)]
    return {kernel.name: kernel for kernel in values}


def kernels(kind: type[KernelType]) -> Mapping[str, KernelType]:
    """Return the packaged kernels of a kind by the name that ``kernel=`` takes."""
    return {name: kernel for name, kernel in _packaged().items() if isinstance(kernel, kind)}


def find_kernel(kind: type[KernelType], name: str | None) -> KernelType | None:
    """Return the kernel of a kind that ``kernel=NAME`` or ``kernel=FILE.py:NAME`` means; None for no name and others.

    Raises `SpecError` for a file that cannot be read or fails, `TilingError` where it has no such kernel.
    """
    if name is None or not outside.is_outside(name):
        return kernels(kind).get(name or "")
    module, wanted = outside.load(name, "a kernel")
    value = getattr(module, wanted, None)
    if not isinstance(value, kind):
        has = ", ".join(n for n, v in vars(module).items() if isinstance(v, kind)) or "none"
        what = f"{wanted} is no {kind.__name__}" if wanted else f"add :NAME of a {kind.__name__}"
        raise TilingError(f"kernel: {name}: {what}; the file has {has}")
    return value
