"""``-C key=value``: single values of a device changed on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from npusim.errors import SpecError
from npusim.spec.document import parse_scalar
from npusim.spec.messages import explain, suggest
from npusim.units import parse_count

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["apply_overrides"]

Machine = TypeVar("Machine", bound=BaseModel)


def apply_overrides(device: Machine, overrides: Mapping[str, str]) -> Machine:
    """Return the device or node with values changed; each gets basis ``assumed``, source ``command line``.

    Keys are dotted and name a number or a choice (``flags.cross_core_latency_cycles``), or plain
    text (``name``).

    Raises
    ------
    SpecError
        ``-C key=value: `` and what is wrong: no such key (with the nearest), or a value of the
        wrong kind.
    """
    data = device.model_dump(by_alias=True)
    for key, text in overrides.items():
        _set(data, key, text)
    try:
        return type(device).model_validate(data)
    except ValidationError as error:
        lines = [_line(key, text, overrides) for key, text in explain(error, data)]
        raise SpecError("\n".join(lines)) from None


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
