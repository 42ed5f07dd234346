"""Files of accepted cycles, one case a file: ``schema: npusim.baseline/1``."""

import io
import os
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import Field

from npusim.config.document import read_document
from npusim.config.load import validated
from npusim.config.measurements import TilingValue
from npusim.config.model import NonNegativeInt, PositiveInt, SpecModel, StrictBool, Text
from npusim.errors import OutputError

__all__ = ["BaselineFile", "ExpectedCycles", "load_baseline", "write_expected"]


class ExpectedCycles(SpecModel):
    """What a case gave when it was accepted; whole numbers, compared exactly."""

    device_digest: Text = Field(description="hash of the device file's content at that time")
    cycles: NonNegativeInt = Field(description="of the kernel, without its launch")
    busy_cycles: dict[str, NonNegativeInt] = Field(description="by pipe, over all core groups")


class BaselineFile(SpecModel):
    """One case: what to run, in the words of `npusim.run`, and the cycles it should take."""

    schema_id: Literal["npusim.baseline/1"] = Field(alias="schema", description="of this file")
    description: Text | None = Field(default=None, description="why this case is here")
    schedule: Text
    hw: Text = Field(description="a device by name, or a path relative to this file")
    workload: Text = Field(description="a workload by name, or a path relative to this file")
    seq: PositiveInt | None = None
    seq_q: PositiveInt | None = None
    seq_kv: PositiveInt | None = None
    batch: PositiveInt | None = None
    tensor_parallel: PositiveInt | None = None
    causal: StrictBool | None = None
    ignore: tuple[Text, ...] = ()
    tiling: dict[str, TilingValue] = Field(default_factory=dict)
    precision: Text | None = None
    method: Text = "auto"
    overrides: dict[str, TilingValue] = Field(
        default_factory=dict, description="values of the device file by dotted key"
    )
    expect: ExpectedCycles | None = Field(
        default=None, description="absent: written by `npusim check --update`"
    )


def load_baseline(path: str | Path) -> BaselineFile:
    """Return a baseline; raise `SpecError` (``file:line  key: ``) if it is faulty."""
    return validated(BaselineFile, read_document(Path(path)))


def write_expected(path: Path, expected: ExpectedCycles) -> None:
    """Replace what a baseline file expects; its other lines and comments stay as they are.

    Raises `OutputError` if the file cannot be written; it is then unchanged.
    """
    from ruamel.yaml import YAML

    # Round trip: the default loader of ruamel keeps comments, order and quotes.
    yaml = YAML()
    yaml.preserve_quotes = True
    text = io.StringIO()
    fresh: Path | None = None
    try:
        content = yaml.load(path.read_text(encoding="utf-8"))
        content["expect"] = expected.model_dump()
        yaml.dump(content, text)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        fresh = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text.getvalue())
        fresh.chmod(path.stat().st_mode)
        fresh.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        if fresh is not None:
            fresh.unlink(missing_ok=True)
