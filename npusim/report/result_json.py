"""``result.json``: a run record as JSON with stable keys, and back."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from npusim.config.load import read_record
from npusim.errors import SpecError
from npusim.report.record import RunRecord
from npusim.sanitize import json_safe, regular_file
from npusim.units import MIB

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA_VERSION = 1
RESULT_FILE = "result.json"
KIND = "npusim.run"
#: Size of a file of results, figures or a table: a result has some 100 KiB, a table a few hundred bytes a point.
MOST_BYTES = 256 * MIB


def result_document(record: RunRecord) -> dict[str, object]:
    """Return a record as JSON data; ``schema_version`` changes when a key changes its meaning."""
    return {"schema_version": SCHEMA_VERSION, "kind": KIND, **asdict(record)}


def to_json(document: Mapping[str, object], indent: int | None = 1) -> str:
    """Return JSON text that ends in a newline; raises `ValueError` for NaN or infinity."""
    return json_safe(json.dumps(document, indent=indent, ensure_ascii=False, allow_nan=False)) + "\n"


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
        text = regular_file(file, MOST_BYTES, SpecError).read_text(encoding="utf-8")
        data = json.loads(text)
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
    return read_record(RunRecord, text, file)
