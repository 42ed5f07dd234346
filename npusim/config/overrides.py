"""``-C key=value``: single values of a device changed on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from npusim.config.document import parse_scalar
from npusim.config.messages import explain, suggest
from npusim.errors import SpecError
from npusim.units import parse_count

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec

_ASCEND = "schedules of ascend devices"
#: Keys that change nothing on a device of a family, and what would read them.
_UNREAD: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "nvidia": MappingProxyType(
            {
                "flags.cross_core_*": f"{_ASCEND}, whose cores meet through flags",
                "memory.gm.request_min_bytes": f"routes with an unaligned_factor: {_ASCEND}",
                "memory.gm.alignment_bytes": f"{_ASCEND}, which keep rings in global memory",
                "memory.gm.capacity_bytes": f"{_ASCEND}, which keep rings in global memory",
                "cores.sm.engines.WARPS.queue_depth_count": f"{_ASCEND}: warps wait in order anyway",
                "cores.sm.engines.TENSOR.queue_depth_count": f"{_ASCEND}: warps issue products",
                "cores.sm.engines.TENSOR.startup_cycles": f"{_ASCEND}: a product of warps has steps",
                "cores.sm.engines.TENSOR.arithmetic.*": "devices without steps of a product",
                "cores.sm.engines.LDG.queue_depth_count": f"{_ASCEND}: a block's stages bound its loads",
                "cores.sm.engines.LSU.phases.32.*": "accesses of 32 bits, which no schedule makes",
            }
        )
    }
)
#: What a device that is described for its values only is read for.
_OF_VALUES = ("name", "group_count", "cores.*.buffers.*", "cores.*.engines.*.arithmetic.*")
#: And as one of a node, whose file has the times of its kernels.
_OF_A_NODE = ("clock_hz", "links.hbm.*", "cores.*.per_group_count")
#: What a node's plan of memory reads, whatever its device's family.
_OF_A_PLAN = "memory.gm.capacity_bytes"
_LABELS = ("schema", "description", "architecture")


def reader_of(device: DeviceSpec, key: str, *, in_node: bool = False) -> str | None:
    """Return what would read a key that changes no prediction on ``device``; None if it changes one.

    ``in_node``: the device is one of a node.
    """
    if key.startswith("facts."):
        return "no model yet; `facts` keeps it with its source"
    if key in _LABELS:
        return "people"
    if in_node and key == _OF_A_PLAN:
        return None
    if not device.is_timed:
        patterns = (*_OF_VALUES, *(_OF_A_NODE if in_node else ()))
        if any(fnmatchcase(key, pattern) for pattern in patterns):
            return None
        return "timing, and this device's file has no flags and no launch: it is not timed"
    unread = _UNREAD.get(device.family, {})
    return next((reader for pattern, reader in unread.items() if fnmatchcase(key, pattern)), None)


Machine = TypeVar("Machine", bound=BaseModel)


def apply_overrides(device: Machine, overrides: Mapping[str, object], *, in_node: bool = False) -> Machine:
    """Return the device or node with values changed; each gets basis ``assumed``, source ``command line``.

    Keys are dotted and name a number or a choice (``flags.cross_core_latency_cycles``), or plain
    text (``name``); a value is a number, or text as ``-C`` gives it.

    Raises
    ------
    SpecError
        ``-C key=value: `` and what is wrong: no such key (with the nearest), a value of the wrong
        kind, or a key that changes nothing on this device (with what would read it).
    """
    from npusim.config.device import DeviceSpec

    data = device.model_dump(by_alias=True)
    said = {key: _said(key, value) for key, value in overrides.items()}
    for key, text in said.items():
        is_fact = _is_fact(data, key)
        if not is_fact:
            _set(data, key, text)
        if isinstance(device, DeviceSpec):
            reader = reader_of(device, f"facts.{key}" if is_fact else key, in_node=in_node)
            if reader is not None:
                raise SpecError(f"-C {key}={text}: changes nothing on {device.name}; read by {reader}")
    try:
        return type(device).model_validate(data)
    except ValidationError as error:
        lines = [_line(key, text, said) for key, text in explain(error, data)]
        raise SpecError("\n".join(lines)) from None


def _said(key: str, value: object) -> str:
    """Return a value as a command line has it."""
    if not isinstance(key, str):
        raise SpecError(f"-C {key!r}={value!r}: a key is text: clock_hz, links.hbm.bytes_per_s")
    if isinstance(value, bool) or not isinstance(value, str | Real):
        raise SpecError(f"-C {key}={value!r}: expected a number, or text, not a {type(value).__name__}")
    return str(value)


def _is_fact(data: dict[str, object], key: str) -> bool:
    """Return whether a key names what a file keeps under ``facts``, where no model reads it."""
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
            raise SpecError(f"-C {key}={text}: no key {step!r}{where}{suggest(step, list(node))}")
        child = node[step]
        if index == len(steps) - 1:
            node[step] = _replacement(child, key, text)
        elif isinstance(child, dict) and "value" not in child:
            node = child
        else:
            raise SpecError(f"-C {key}={text}: {'.'.join(steps[: index + 1])} has no keys below it")


def _replacement(old: object, key: str, text: str) -> object:
    if isinstance(old, dict) or old is None:
        if old is not None and "value" not in old:
            below = ", ".join(f"{key}.{name}" for name in list(old)[:4])
            raise SpecError(f"-C {key}={text}: not a single value; its keys: {below}, ...")
        return {"value": _number(key, text), "basis": "assumed", "source": "command line"}
    if isinstance(old, str):
        return text
    raise SpecError(f"-C {key}={text}: a list cannot be changed here")


def _number(key: str, text: str) -> object:
    """Return the value that ``text`` says; of bytes also as people write them: ``64MiB``."""
    value = parse_scalar(text)
    if isinstance(value, str) and key.endswith("_bytes"):
        try:
            return parse_count(text, is_bytes=True)
        except ValueError:
            return value
    return value


def _line(key: str, text: str, overrides: Mapping[str, str]) -> str:
    for given, value in overrides.items():
        if key == given or key.startswith(f"{given}."):
            return f"-C {given}={value}: {text}"
    return f"-C {' '.join(f'{k}={v}' for k, v in overrides.items())}: {key}: {text}"
