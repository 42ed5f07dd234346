"""The data that comes with the package: hardware files, workloads and their tensors; devices of other packages.

In a checkout the folders stand beside the package, in an installed wheel inside it.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from npusim.config.installed import entries
from npusim.errors import SpecError

_PACKAGE = Path(__file__).resolve().parent.parent
_NODE_NAME = re.compile(r"_x[0-9]+$")
_TENSOR_SUFFIXES = (".safetensors", ".npz")
#: Entry points of installed packages: ``name = "a.package"``, whose folder holds devices and nodes as YAML.
DEVICES = "npusim.devices"


def packaged_folder(kind: str) -> Path:
    """Return the folder ``hwconfigs`` or ``workloads``; raise `SpecError` if it is missing."""
    for parent in (_PACKAGE, _PACKAGE.parent):
        folder = parent / kind
        if folder.is_dir():
            return folder
    raise SpecError(f"the packaged folder {kind} is missing beside {_PACKAGE}")


def list_packaged(kind: str) -> list[str]:
    """Return the names of the packaged files of a kind, those of installed packages among them, sorted."""
    return sorted(_files(kind))


def _files(kind: str) -> dict[str, Path]:
    """Return ``{name: file}``; raise `SpecError` where two files have one name."""
    found: dict[str, Path] = {}
    for folder in (packaged_folder(kind), *(installed_folders() if kind == "hwconfigs" else ())):
        for path in sorted(folder.glob("*.yaml")):
            taken = found.setdefault(path.stem.replace("-", "_"), path)
            if taken != path:
                raise SpecError(f"{path}: {taken.stem!r} is {taken} already; give one of the files another name")
    return found


@cache
def installed_folders() -> tuple[Path, ...]:
    """Return the folders of devices that installed packages offer (entry points in `DEVICES`).

    Raises `SpecError` for an entry point that names no package.
    """
    found = []
    for entry in entries(DEVICES):
        try:
            spec = find_spec(entry.value)
        except (ImportError, ValueError):
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise SpecError(f"entry point {entry.name} of {DEVICES}: {entry.value!r} is no package with a folder")
        found += [Path(place) for place in spec.submodule_search_locations]
    return tuple(found)


def is_node_name(name: str) -> bool:
    """Return whether a hardware file of that name describes a node: ``<device>_x<count>``."""
    return bool(_NODE_NAME.search(name.replace("-", "_")))


def resolve(kind: str, name_or_path: str | Path, *, what: str, beside: Path | None = None) -> Path:
    """Return the file that a name or a path stands for.

    A string that ends in ``.yaml`` or ``.yml`` or holds a separator is a path (relative to
    ``beside`` if given), everything else a packaged name; ``-`` and ``_`` are the same in names.

    Raises
    ------
    SpecError
        No such file, or no such name: names the nearest, or all there are.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith((".yaml", ".yml")) or "/" in text:
        try:
            path = Path(text).expanduser()
        except RuntimeError:  # no such user
            path = Path(text)
        path = beside / path if beside is not None else path
        if not path.is_file():
            raise SpecError(f"{path}: no such {what} file")
        return path
    files = _files(kind)
    names = [n for n in sorted(files) if what != "device" or not is_node_name(n)]
    name = text.replace("-", "_")
    if name in names:
        return files[name]
    from npusim.config.messages import suggest

    hint = suggest(name, names)
    known = f" Known: {', '.join(names)}" if "Did you mean" in hint else ""
    raise SpecError(f"no {what} named {text!r}{hint}{known}")


def list_tensors() -> list[str]:
    """Return the names of the packaged tensor files, sorted."""
    folder = packaged_folder("workloads") / "data"
    return sorted(path.name for path in folder.glob("*") if path.suffix in _TENSOR_SUFFIXES)


def packaged_tensors(name: str) -> Path | None:
    """Return the packaged tensor file of that name (with or without its suffix), else None."""
    for known in list_tensors():
        if name in (known, Path(known).stem):
            return packaged_folder("workloads") / "data" / known
    return None
