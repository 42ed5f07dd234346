"""Strict reading of hardware and workload files, by packaged name or by path; ``-C key=value`` changes single values.

Every fault of a file is a `SpecError` whose lines start with ``file:line  dotted.key: ``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import field
from fnmatch import fnmatchcase
from functools import lru_cache
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar, get_args

from pydantic import BaseModel, ValidationError

from npusim.config.device import DeviceSpec
from npusim.config.document import Document, read_inherited
from npusim.config.messages import choices, explain, suggest
from npusim.config.packaged import is_node_name, list_packaged, packaged_folder, resolve, yaml_files
from npusim.config.quantity import RANGES
from npusim.config.workload import Workload
from npusim.errors import SpecError
from npusim.late_methods import dataclass
from npusim.units import ascii_digits, format_value

#: Kinds of npusim's files: the part of their schema before its version.
KINDS = frozenset(
    f"npusim.{kind}" for kind in ("device", "node", "workload", "baseline", "decision", "measurements", "mapping")
)
ModelType = TypeVar("ModelType", bound=BaseModel)


def load_device(
    name_or_path: str | Path, overrides: Mapping[str, object] | None = None, unread: UnreadKeys | None = None
) -> DeviceSpec:
    """Return a device by packaged name (``ascend_910b2``) or path.

    ``overrides`` maps dotted keys to values: numbers, or text in the form of ``-C key=value``; keys that are
    ``unread`` are refused.

    Raises `SpecError` for an unknown name, a faulty file or a faulty override.
    """
    return apply_overrides(validated(DeviceSpec, read_spec("device", name_or_path)), overrides or {}, unread)


def load_workload(name_or_path: str | Path) -> Workload:
    """Return a workload by packaged name (``pangu_38b``) or path; raises as `load_device`."""
    return validated(Workload, read_spec("workload", name_or_path))


def list_devices() -> list[str]:
    """Return the names of the packaged hardware files of single devices."""
    return [name for name in list_packaged("hwconfigs") if not is_node_name(name)]


def list_workloads() -> list[str]:
    """Return the names of the packaged workloads."""
    return list_packaged("workloads")


def validated(model: type[ModelType], document: Document) -> ModelType:
    """Return ``document`` as ``model``; raise `SpecError` with a line for each fault.

    For a file of another kind only its schema is reported as wrong, not its keys.
    """
    field, schema = model.model_fields.get("schema_id"), document.data.get("schema")
    expected = str(get_args(field.annotation)[0]) if field is not None else ""
    if expected and isinstance(schema, str) and schema.partition("/")[0] in KINDS - {expected.partition("/")[0]}:
        raise document.error("schema", f"{schema!r} is another kind of file; needed here: {expected!r}")
    try:
        # The known families depend on the installed packages.
        instance = _model_of(model, _Content(document.text, tuple(sys.path), document))
    except ValidationError as error:
        lines = [document.line(key, text) for key, text in explain(error, document.data, model)]
        raise SpecError("\n".join(lines)) from None
    if "name" in document.data and document.position_of("name").file != document.file:
        raise document.error("", "name: missing; a file that extends another one needs its own name")
    return instance  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Content:
    """The data of a document; data of documents with the same text compare equal."""

    text: str
    path: tuple[str, ...]
    document: Document = field(compare=False)


@lru_cache(maxsize=128)
def _model_of(model: type[BaseModel], content: _Content) -> BaseModel:
    """Return one frozen model for all files with equal content: programs of one device share caches."""
    return model.model_validate(content.document.data)


def read_spec(what: str, name_or_path: str | Path) -> Document:
    """Return the content of a packaged file by name, or of a file by path, with the files that it extends.

    ``what``: the kind of file, a device, a node or a workload.
    """
    path = resolve(what, name_or_path)
    is_packaged = path.parent in (packaged_folder("hwconfigs"), packaged_folder("workloads"))
    return _read_packaged(what, path, _stamp(path.parent)) if is_packaged else _read(what, path)


@lru_cache(maxsize=64)
def _read_packaged(what: str, path: Path, _stamp: object) -> Document:
    """Return a packaged file; each process parses it once, as long as no file of its folder changes."""
    return _read(what, path)


def _read(what: str, path: Path) -> Document:
    def find(name: str, extending: Path) -> Path:
        return resolve(what, name, beside=extending.parent if name.endswith((".yaml", ".yml")) else None)

    return read_inherited(path, find)


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    stats = [(entry.name, entry.stat()) for entry in yaml_files(folder)]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


# ---------------------------------------------------------------- -C key=value

#: Keys that npusim reads if a device's file describes only its values.
_OF_VALUES = ("name", "group_count", "cores.*.buffers.*", "cores.*.engines.*.arithmetic.*")
#: Additional keys that npusim reads for such a device in a node whose file states the times of kernels.
_OF_A_NODE = ("clock_hz", "links.hbm.*", "cores.*.per_group_count")
#: Key that the memory plan of a node reads, for every family.
_OF_A_PLAN = "memory.gm.capacity_bytes"
#: Prefix of settings of one board.
_OF_ONE_DEVICE = "held_"
#: Options of the command line that set a key.
_OPTIONS = MappingProxyType({"held_clock_hz": "--clock ", "held_power_w": "--power-watts "})
_LABELS = ("schema", "description", "architecture")


#: Keys without effect on a core family, by its name, each with the feature that would read it: ``define.unread_keys``.
UnreadKeys = Callable[[str], Mapping[str, str]]


def reader_of(device: DeviceSpec, key: str, unread: UnreadKeys | None = None, *, in_node: bool = False) -> str | None:
    """Return what would read a key that has no effect on predictions for ``device``; None if the key has an effect.

    ``in_node``: the device belongs to a node.
    """
    if key.startswith("facts."):
        return "no model yet; put it under `facts` with its source"
    if key in _LABELS:
        return "people"
    if in_node and key == _OF_A_PLAN:
        return None
    if in_node and key.startswith(_OF_ONE_DEVICE):
        return "runs of one device only; for the devices of a node use clock_hz (-C)"
    if not device.is_timed:
        patterns = (*_OF_VALUES, *(_OF_A_NODE if in_node else ()))
        if any(fnmatchcase(key, pattern) for pattern in patterns):
            return None
        return "timing, but this device's file does not describe flags and launches, so that it has no times"
    readers = unread(device.family) if unread else {}
    return next((reader for pattern, reader in readers.items() if fnmatchcase(key, pattern)), None)


def apply_overrides(
    device: ModelType, overrides: Mapping[str, object], unread: UnreadKeys | None = None, *, in_node: bool = False
) -> ModelType:
    """Return the device or node with changed values; each changed value gets basis ``assumed`` and source ``command
    line``.

    Keys are dotted and name a number or a choice (``flags.cross_core_latency_cycles``), or plain
    text (``name``); a value is a number, or text in the form of ``-C``.

    Raises `SpecError` with ``-C key=value: `` and the fault: an unknown key (with the nearest name), a value of the
    wrong kind, or a key that changes nothing on this device (with the option that would read it).
    """
    if not overrides:
        return device
    data = device.model_dump(by_alias=True)
    texts = {key: _override_text(key, value) for key, value in overrides.items()}
    for key, text in texts.items():
        is_fact = _is_fact(data, key)
        if not is_fact:
            _set(data, key, text)
        if isinstance(device, DeviceSpec):
            reader = reader_of(device, f"facts.{key}" if is_fact else key, unread, in_node=in_node)
            if reader is not None:
                raise SpecError(f"{_setting(key, text)}: changes nothing on {device.name}; read by {reader}")
    try:
        changed = type(device).model_validate(data)
    except ValidationError as error:
        lines = [_override_fault(key, text, texts) for key, text in explain(error, data)]
        raise SpecError("\n".join(lines)) from None
    return (
        changed.changed_from(device) if isinstance(changed, DeviceSpec) and isinstance(device, DeviceSpec) else changed
    )


def scaled(device: DeviceSpec, scale: Mapping[str, object]) -> DeviceSpec:
    """Return the device with the rates of units and links multiplied by factors, ``{"VECTOR": 0.5}``; the same object
    if nothing changes.

    A unit that occurs in several kinds of core is changed in all of them.

    Raises `SpecError` with ``--scale unit=factor: `` and the fault: an unknown unit (with the device's units), a factor
    that is not a number above 0, or a factor that differs from the one in the device's file or ``-C``.
    """
    if not device.is_timed or device.family == "node":
        what = "a node, whose devices have the rates in their files" if device.family == "node" else "not timed"
        raise SpecError(f"--scale {' '.join(f'{n}={x}' for n, x in scale.items())}: {device.name} is {what}")
    keys, stated, changes = device.rate_keys, device.scale, dict[str, object]()
    for name, factor in scale.items():
        said = f"--scale {name}={factor}"
        if name not in keys:
            raise SpecError(f"{said}: {device.name} has no unit {name!r}{choices(str(name), list(keys))}")
        try:
            value = float(ascii_digits(factor)) if isinstance(factor, str) else factor
        except ValueError:
            value = None
        low, high = RANGES["_factor"]
        if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) <= high:
            raise SpecError(f"{said}: write a number from {low:g} to {high:,.0f}: 0.5 is half the rate, 2 is twice it")
        known = {name: stated[name]} if name in stated else {k: f for k, f in stated.items() if k.endswith(f".{name}")}
        if other := next((f for f in known.values() if f != value), None):
            raise SpecError(f"{said}: the device already has the factor {other:g}; set only one of them")
        if not known and value != 1:
            changes |= dict.fromkeys(keys[name], value)
    return apply_overrides(device, changes)


def _override_text(key: str, value: object) -> str:
    if not isinstance(key, str):
        raise SpecError(f"-C {key!r}={value!r}: a key is text: clock_hz, links.hbm.bytes_per_s")
    if isinstance(value, bool) or not isinstance(value, str | Real):
        raise SpecError(f"-C {key}={value!r}: expected a number, or text, not a {type(value).__name__}")
    return format_value(value)


def _is_fact(data: dict[str, object], key: str) -> bool:
    """Return whether a key is below ``facts``, where no model reads it."""
    node: object = data.get("facts")
    for step in key.split("."):
        node = node.get(step) if isinstance(node, dict) else None
    return isinstance(node, dict) and "value" in node


def _set(data: dict[str, object], key: str, text: str) -> None:
    node: dict[str, object] = data
    steps = key.split(".")
    for index, step in enumerate(steps):
        if step not in node:
            parent = ".".join(steps[:index])
            where = f" in {parent}" if parent else ""
            raise SpecError(f"{_setting(key, text)}: there is no key {step!r}{where}{suggest(step, list(node))}")
        child = node[step]
        if index == len(steps) - 1:
            node[step] = _replacement(child, key, text)
        elif isinstance(child, dict) and "value" not in child:
            node = child
        else:
            raise SpecError(f"{_setting(key, text)}: {'.'.join(steps[: index + 1])} has no keys below it")


def _replacement(old: object, key: str, text: str) -> object:
    from npusim.config.yaml_text import parse_scalar

    if isinstance(old, dict) or old is None:
        if old is not None and "value" not in old:
            below = ", ".join(f"{key}.{name}" for name in list(old)[:4])
            raise SpecError(f"{_setting(key, text)}: not a single value; its keys: {below}, ...")
        return {"value": parse_scalar(text), "basis": "assumed", "source": "command line"}
    if isinstance(old, str):
        return text
    raise SpecError(f"{_setting(key, text)}: a list cannot be changed here")


def _override_fault(key: str, text: str, overrides: Mapping[str, str]) -> str:
    for changed, value in overrides.items():
        if key == changed or key.startswith(f"{changed}."):
            return f"{_setting(changed, value)}: {text}"
    return f"-C {' '.join(f'{k}={v}' for k, v in overrides.items())}: {key}: {text}"


def _setting(key: str, text: str) -> str:
    """Return the command-line option that sets a key."""
    return f"{_OPTIONS.get(key, f'-C {key}=')}{text}"
