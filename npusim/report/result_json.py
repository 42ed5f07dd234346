"""``result.json``: a run record as JSON with stable keys, and back."""

from __future__ import annotations

import json
import types
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from npusim.errors import SpecError
from npusim.foreign import json_safe
from npusim.report.record import RunRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RESULT_FILE", "SCHEMA_VERSION", "load_result", "result_document", "to_json"]

SCHEMA_VERSION = 1
RESULT_FILE = "result.json"
KIND = "npusim.run"

_RecordType = TypeVar("_RecordType")
_NAMES = types.MappingProxyType(
    {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
)


def result_document(record: RunRecord) -> dict[str, object]:
    """Return a record as JSON data; ``schema_version`` changes when a key changes its meaning."""
    return {"schema_version": SCHEMA_VERSION, "kind": KIND, **asdict(record)}


def to_json(document: Mapping[str, object]) -> str:
    """Return JSON text that ends in a newline; raises `ValueError` for NaN or infinity."""
    return json_safe(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)) + "\n"


def load_result(path: str | Path) -> RunRecord:
    """Return the record of a run folder or of a ``result.json``.

    Raises
    ------
    SpecError
        There is no such file, it is no result of npusim or of another schema version, or a key is
        missing or of the wrong kind (``file  key: ``).
    """
    file = Path(path)
    if file.is_dir():
        file = file / RESULT_FILE
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(
            f"{file}: cannot be read: {error.strerror}; a run folder or a {RESULT_FILE} is needed"
        ) from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{file}: not a JSON file: {error}") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise SpecError(f"{file}: not a result of `npusim run` (no key kind: {KIND!r})")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise SpecError(f"{file}: schema_version {version!r}; this npusim reads {SCHEMA_VERSION}")
    return _read(RunRecord, data, str(file), "")


def _read(kind: type[_RecordType], data: object, file: str, key: str) -> _RecordType:
    """Return ``data`` as the dataclass ``kind``; keys it does not know are left out."""
    if not isinstance(data, dict):
        raise SpecError(f"{file}  {key}: expected a mapping, got {data!r}")
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        place = f"{key}.{field.name}" if key else field.name
        if field.name not in data:
            if field.default is not MISSING:
                continue  # came after the first results were written
            raise SpecError(f"{file}  {place}: missing")
        values[field.name] = _value(hints[field.name], data[field.name], file, place)
    return kind(**values)


def _value(hint: Any, data: object, file: str, key: str) -> object:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        inner = next(a for a in args if a is not type(None))
        return None if data is None else _value(inner, data, file, key)
    if origin is tuple:
        if not isinstance(data, list):
            raise SpecError(f"{file}  {key}: expected a list, got {data!r}")
        return tuple(_value(args[0], item, file, f"{key}.{i}") for i, item in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            raise SpecError(f"{file}  {key}: expected a mapping, got {data!r}")
        return {name: _value(args[1], item, file, f"{key}.{name}") for name, item in data.items()}
    if hint is object:
        return data
    if is_dataclass(hint):
        return _read(hint, data, file, key)  # type: ignore[arg-type]
    accepted = (int, float) if hint is float else hint
    if not isinstance(data, accepted) or (isinstance(data, bool) and hint is not bool):
        raise SpecError(f"{file}  {key}: expected {_NAMES[hint]}, got {data!r}")
    return float(data) if hint is float else data
