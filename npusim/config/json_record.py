"""Records: dataclasses stored in JSON files, field by field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, PlainSerializer, TypeAdapter, ValidationError

from npusim.config.messages import explain
from npusim.errors import SpecError

RecordType = TypeVar("RecordType")

#: Converts seconds to the microseconds of a file, and back; the result has every bit of the file's number.
Microseconds = Annotated[float, AfterValidator(lambda us: us / 1e6), PlainSerializer(lambda s: s * 1e6, float)]


def key(name: str) -> Any:
    """Return the annotation of a field whose key in a file differs from its name."""
    return Field(alias=name)


def written_as(document: Any, kind: Any) -> Any:
    """Return the annotation of a field whose value, a ``kind``, a file stores as ``document(value)``."""
    return PlainSerializer(document, kind)


def record_document(kind: type[RecordType], record: RecordType) -> dict[str, Any]:
    """Return the fields of ``kind`` as JSON data, without the fields that a subclass adds."""
    document: dict[str, Any] = TypeAdapter(kind).dump_python(record, mode="json", by_alias=True)
    return document


def read_record(kind: type[RecordType], text: str, file: Path) -> RecordType:
    """Return JSON text as an instance of the dataclass ``kind``; unknown keys are ignored.

    Raises `SpecError` with one line, ``file  dotted.key: ``, for each key that is missing or of another type.
    """
    try:
        record: RecordType = TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        lines = [f"{file}  {dotted}: {fault}" for dotted, fault in explain(error, model=kind)]
        raise SpecError("\n".join(lines)) from None
    return record
