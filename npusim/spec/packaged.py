"""The data that comes with the package: hardware files, workloads and their tensors.

In a checkout the folders stand beside the package, in an installed wheel inside it.
"""

from __future__ import annotations

import re
from pathlib import Path

from npusim.errors import SpecError

__all__ = [
    "is_node_name",
    "list_packaged",
    "list_tensors",
    "packaged_folder",
    "packaged_tensors",
    "resolve",
]

_PACKAGE = Path(__file__).resolve().parent.parent
_NODE_NAME = re.compile(r"_x[0-9]+$")
_TENSOR_SUFFIXES = (".safetensors", ".npz")


def packaged_folder(kind: str) -> Path:
    """Return the folder ``hwconfigs`` or ``workloads``; raise `SpecError` if it is missing."""
    for parent in (_PACKAGE, _PACKAGE.parent):
        folder = parent / kind
        if folder.is_dir():
            return folder
    raise SpecError(f"the packaged folder {kind} is missing beside {_PACKAGE}")


def list_packaged(kind: str) -> list[str]:
    """Return the names of the packaged files of a kind, sorted."""
    return sorted(path.stem for path in packaged_folder(kind).glob("*.yaml"))


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
        path = Path(text).expanduser()
        path = beside / path if beside is not None else path
        if not path.is_file():
            raise SpecError(f"{path}: no such {what} file")
        return path
    names = [n for n in list_packaged(kind) if what != "device" or not is_node_name(n)]
    name = text.replace("-", "_")
    if name in names:
        return packaged_folder(kind) / f"{name}.yaml"
    from npusim.spec.messages import suggest

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
