"""Hardware and workload files, by packaged name or by path, strictly.

Every fault is a `SpecError` whose lines start ``file:line  dotted.key: ``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeVar, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from npusim.config.inherit import read_inherited
from npusim.config.messages import explain
from npusim.config.packaged import is_node_name, list_packaged, packaged_folder, resolve
from npusim.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from npusim.config.device import DeviceSpec
    from npusim.config.document import Document
    from npusim.config.workload import Workload

#: What files of npusim are: the part of their schema before its version.
KINDS = frozenset(f"npusim.{kind}" for kind in ("device", "node", "workload", "baseline", "decision", "measurements"))
ModelType = TypeVar("ModelType", bound=BaseModel)
RecordType = TypeVar("RecordType")


def load_device(name_or_path: str | Path, overrides: Mapping[str, object] | None = None) -> DeviceSpec:
    """Return a device by packaged name (``ascend_910b2``) or path.

    ``overrides`` maps dotted keys to values: numbers, or text as ``-C key=value`` gives it.

    Raises
    ------
    SpecError
        Unknown name, faulty file or faulty override.
    """
    from npusim.config.device import DeviceSpec
    from npusim.config.overrides import apply_overrides

    device = validated(DeviceSpec, read_spec("hwconfigs", "device", name_or_path))
    return apply_overrides(device, overrides) if overrides else device


def load_workload(name_or_path: str | Path) -> Workload:
    """Return a workload by packaged name (``pangu_38b``) or path; raises as `load_device`."""
    from npusim.config.workload import Workload

    return validated(Workload, read_spec("workloads", "workload", name_or_path))


def list_devices() -> list[str]:
    """Return the names of the packaged hardware files of single devices."""
    return [name for name in list_packaged("hwconfigs") if not is_node_name(name)]


def list_workloads() -> list[str]:
    """Return the names of the packaged workloads."""
    return list_packaged("workloads")


def device_schema() -> dict[str, object]:
    """Return the JSON Schema of hardware files (of whole ones: without ``extends``)."""
    from npusim.config.device import DeviceSpec

    schema: dict[str, object] = DeviceSpec.model_json_schema(by_alias=True)
    return schema


def workload_schema() -> dict[str, object]:
    """Return the JSON Schema of workload files."""
    from npusim.config.workload import Workload

    schema: dict[str, object] = Workload.model_json_schema(by_alias=True)
    return schema


def validated(model: type[ModelType], document: Document) -> ModelType:
    """Return ``document`` as ``model``; raise `SpecError` with a line for each fault.

    A file of another kind of npusim's is told by its schema alone: its keys are no faults.
    """
    wanted, given = _schema_of(model), document.data.get("schema")
    if wanted and isinstance(given, str) and given.partition("/")[0] in KINDS - {wanted.partition("/")[0]}:
        raise document.error("schema", f"{given!r} is another kind of file; {wanted!r} is needed here")
    try:
        # Which families there are hangs on the packages that can be found.
        return _made(model, _Content(repr((document.data, sys.path)), document))  # type: ignore[return-value]
    except ValidationError as error:
        lines = [document.line(key, text) for key, text in explain(error, document.data, model)]
        raise SpecError("\n".join(lines)) from None


@dataclass(frozen=True, slots=True)
class _Content:
    """A document's data, told apart by what it says."""

    text: str
    document: Document = field(compare=False)


@lru_cache(maxsize=128)
def _made(model: type[BaseModel], content: _Content) -> BaseModel:
    """Return one frozen model for all files of one content: programs of one device share what they have alike."""
    return model.model_validate(content.document.data)


def read_record(kind: type[RecordType], text: str, file: Path) -> RecordType:
    """Return JSON text as the dataclass ``kind``; keys that it does not know are left out.

    Raises `SpecError`, a line for each key that is missing or of another type: ``file  dotted.key: ``.
    """
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        lines = [f"{file}  {key}: {fault}" for key, fault in explain(error, model=kind)]
        raise SpecError("\n".join(lines)) from None


def _schema_of(model: type[BaseModel]) -> str:
    field = model.model_fields.get("schema_id")
    return str(get_args(field.annotation)[0]) if field is not None else ""


def read_spec(kind: str, what: str, name_or_path: str | Path) -> Document:
    """Return the content of a packaged file by name, or of a file by path, with what it extends."""
    path = resolve(kind, name_or_path, what=what)
    if path.parent == packaged_folder(kind):
        return _read_packaged(kind, what, path, _stamp(path.parent))
    return read_inherited(path, partial(_find, kind, what))


@lru_cache(maxsize=64)
def _read_packaged(kind: str, what: str, path: Path, _stamp: object) -> Document:
    """Return a packaged file, parsed once a process as long as no file of its folder changes."""
    return read_inherited(path, partial(_find, kind, what))


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    stats = [(path.name, path.stat()) for path in sorted(folder.glob("*.yaml"))]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


def _find(kind: str, what: str, name: str, extending: Path) -> Path:
    is_path = name.endswith((".yaml", ".yml"))
    return resolve(kind, name, what=what, beside=extending.parent if is_path else None)
