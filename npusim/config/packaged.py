"""Files of npusim (hardware files, workloads, tensors) and of other installed packages (by entry points).

In a checkout the folders are next to the package, in an installed wheel inside the package.
"""

from __future__ import annotations

import csv
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

from npusim.errors import SpecError, absent

_PACKAGE = Path(__file__).resolve().parent.parent
_NODE_NAME = re.compile(r"_x[0-9]+$")
_TENSOR_SUFFIXES = (".safetensors", ".npz")
#: Entry points of installed packages: ``name = "a.package"``, whose folder contains devices and nodes as YAML.
DEVICES = "npusim.devices"


def entries(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of one of npusim's groups, of all packages on the path."""
    return _entries(tuple(sys.path)).get(group, ())


@cache
def _entries(_path: tuple[str, ...]) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of npusim's groups, by group: to read those of one group takes as long."""
    every = entry_points()
    return {name: tuple(every.select(group=name)) for name in every.groups if name.startswith("npusim.")}


def installed(group: str) -> dict[str, str]:
    """Return the entries ``{name: "package.module:thing"}`` of a group."""
    return {entry.name: entry.value for entry in entries(group)}


def clash(group: str, name: str, *, is_ours: bool) -> str:
    """Return a text that names the packages that provide a name, npusim included; empty if at most one provides it."""
    sources = ["npusim itself"] if is_ours else []
    for entry in entries(group):
        if entry.name == name:
            package = f" ({entry.dist.name} {entry.dist.version})" if entry.dist else ""
            sources.append(f"{entry.value}{package}")
    if len(sources) < 2:
        return ""
    return (
        f"{name!r} is defined by {' and by '.join(sources)}; uninstall one of them, or rename its entry point "
        f"of {group}"
    )


def packaged_folder(kind: str) -> Path:
    """Return the folder ``hwconfigs`` or ``workloads``; raise `SpecError` if it is missing."""
    for parent in (_PACKAGE, _PACKAGE.parent):
        folder = parent / kind
        if folder.is_dir():
            return folder
    raise SpecError(f"the packaged folder {kind} is missing next to {_PACKAGE}")


def list_packaged(kind: str) -> list[str]:
    """Return the sorted names of the packaged files of a kind, and of installed packages' files."""
    return sorted(_files(kind))


def _files(kind: str) -> dict[str, list[str]]:
    """Return the paths of the files of a kind by name: several if packages provide the same name."""
    files: dict[str, list[str]] = {}
    for folder in (packaged_folder(kind), *(installed_folders() if kind == "hwconfigs" else ())):
        for entry in yaml_files(folder):
            files.setdefault(entry.name.removesuffix(".yaml").replace("-", "_"), []).append(entry.path)
    return files


def yaml_files(folder: Path) -> list[os.DirEntry[str]]:
    """Return the YAML files of a folder by name; creating and sorting the paths of all its files would take many times
    as long.
    """
    if not folder.is_dir():
        return []
    with os.scandir(folder) as found:
        return sorted((entry for entry in found if entry.name.endswith(".yaml")), key=lambda entry: entry.name)


def read_table(name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV table in the folder of the packaged hardware files, without comments; empty if there is
    no table.
    """
    path = packaged_folder("hwconfigs") / name
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


@cache
def installed_folders() -> tuple[Path, ...]:
    """Return the folders of devices that installed packages offer (entry points in `DEVICES`)."""
    return tuple(folder for entry in entries(DEVICES) for folder in _folders(entry.value))


def broken_entries() -> list[str]:
    """Return a description of each entry point in `DEVICES` that names no folder; none of their files is available."""
    return [
        f"entry point {entry.name} of {DEVICES}: {entry.value!r} is not a package with a folder"
        for entry in entries(DEVICES)
        if not _folders(entry.value)
    ]


def _folders(package: str) -> list[Path]:
    """Return the folders of a package, without importing the package."""
    top, *below = package.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return []
    locations = (spec and spec.submodule_search_locations) or ()
    return [folder for location in locations if (folder := Path(location, *below)).is_dir()]


def is_node_name(name: str) -> bool:
    """Return whether a hardware file of that name describes a node: ``<device>_x<count>``."""
    return bool(_NODE_NAME.search(name.replace("-", "_")))


def resolve(what: str, name_or_path: str | Path, *, beside: Path | None = None) -> Path:
    """Return the file of a name or a path: ``kind`` is a device, a node, a "device or node", or a workload.

    A string that ends in ``.yaml`` or ``.yml`` or contains a separator is a path (relative to
    ``beside`` if given), everything else a packaged name; ``-`` and ``_`` are the same in names.

    Raises `SpecError` if there is no such file or name (the message has the nearest name, or all names), or if two
    files have one name.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith((".yaml", ".yml")) or "/" in text:
        try:
            path = Path(text).expanduser()
        except RuntimeError:  # there is no such user
            path = Path(text)
        path = beside / path if beside is not None else path
        if not path.is_file():
            fault = absent(path, f"{what} file")
            raise SpecError(f"{path}: {fault}")
        return path
    kind = "workloads" if what == "workload" else "hwconfigs"
    files = _files(kind)
    names = [n for n in sorted(files) if what != "device" or not is_node_name(n)]
    name = text.replace("-", "_")
    if name in names:
        path, *others = map(Path, files[name])
        if others:
            duplicate = f"{path.stem!r} is already the name of {path}; rename one of the files"
            raise SpecError(f"{others[0]}: {duplicate}")
        return path
    from npusim.config.messages import suggest

    hint = suggest(name, names)
    known = f" Known: {', '.join(names)}" if "Did you mean" in hint else ""
    broken = "".join(f"; {entry}" for entry in (broken_entries() if kind == "hwconfigs" else ()))
    raise SpecError(f"no {what} named {text!r}{hint}{known}{broken}")


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
