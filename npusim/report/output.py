"""The folder of a run: written beside its place, then moved there whole, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from npusim.errors import OutputError, reason_of
from npusim.report.figures import FIGURES_FILE, figures_document
from npusim.report.pipes import pipes_csv
from npusim.report.record import record_of
from npusim.report.result_json import RESULT_FILE, result_document, to_json
from npusim.report.timeline import timeline_of
from npusim.report.trace import TRACE_FILES, TraceFormat, trace_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.report.record import RunRecord
    from npusim.run_result import RunResult

PIPES_FILE = "pipes.csv"
TENSOR_FILE = "output.safetensors"
REPORT_FILE = "report.html"

#: What a run folder may hold; a folder with anything else is not replaced.
_OWN_FILES = frozenset({RESULT_FILE, FIGURES_FILE, PIPES_FILE, TENSOR_FILE, REPORT_FILE, *TRACE_FILES.values()})


def default_folder(result_name: str) -> Path:
    """Return where a run is written unless the caller says otherwise: no spaces in its name."""
    return Path("runs") / "_".join(result_name.split())


def check_writable(folder: Path) -> None:
    """Raise `OutputError` if a run could not be written to ``folder``; leaves nothing behind.

    Meant to be called before minutes of simulation.
    """
    _refuse_foreign(folder)
    parent = folder.resolve().parent
    existing = next(p for p in (parent, *parent.parents) if p.exists())
    if not existing.is_dir():
        raise OutputError(f"{folder}: cannot be written: {existing} is not a folder; choose --out")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(f"{folder}: cannot be written: no permission in {existing}; choose --out")


def save_run(
    result: RunResult,
    folder: str | Path | None = None,
    *,
    trace: TraceFormat | Literal["none"] = "perfetto",
    save_output: bool = False,
    window: tuple[float, float] | None = None,
    report: bool = False,
) -> Path:
    """Write ``result.json``, ``figures.json``, ``pipes.csv``, a trace and, on request, more; return where.

    The trace shows ``window``, from and to in us; all of the timeline without one.  ``report`` adds
    ``report.html``, which needs the extra ``report`` (`NpusimError` without it).

    A run without a time has neither pipes nor trace, one without spans no trace.  An earlier run in
    ``folder`` is replaced.
    The output tensor needs numerics; rows that were not computed are NaN, and ``computed`` in the
    file says which rows were.

    Raises
    ------
    OutputError
        The folder cannot be written, or holds files that are not a run's; nothing is changed then.
    """
    target = Path(folder) if folder is not None else default_folder(result.name)
    check_writable(target)
    record, timeline = record_of(result), timeline_of(result)
    drawn = figures_document(result, timeline)
    shown = timeline.windowed(window)
    page = _page(result, record, drawn) if report else ""
    with _replacing(target) as fresh:
        (fresh / RESULT_FILE).write_text(to_json(result_document(record)), encoding="utf-8")
        (fresh / FIGURES_FILE).write_text(to_json(drawn, indent=None), encoding="utf-8")
        if page:
            (fresh / REPORT_FILE).write_text(page, encoding="utf-8")
        if result.timing is not None:
            (fresh / PIPES_FILE).write_text(pipes_csv(record), encoding="utf-8")
        if result.timing is not None and result.timing.spans and trace != "none":
            (fresh / TRACE_FILES[trace]).write_bytes(trace_bytes(shown, trace))
        if save_output and result.numerics is not None:
            _save_tensor(result, fresh / TENSOR_FILE)
    return target


def _page(result: RunResult, record: RunRecord, drawn: dict[str, object]) -> str:
    from npusim.report.reports import run_page
    from npusim.report.trial import Trial

    return run_page(record, drawn, Trial(result))


def save_trace(result: RunResult, path: str | Path, window: tuple[float, float] | None = None) -> Path:
    """Write the timeline, or a window of it (us): Chrome JSON to ``*.json``, Perfetto protobuf to any other name."""
    file = Path(path)
    form: TraceFormat = "chrome" if file.suffix == ".json" else "perfetto"
    write_whole(file, trace_bytes(timeline_of(result).windowed(window), form))
    return file


def write_whole(file: Path, content: bytes) -> None:
    """Write a file beside its place and move it there; raise `OutputError` if that fails."""
    fresh: Path | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        fresh = Path(name)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        fresh.chmod(0o666 & ~_umask())
        fresh.replace(file)
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {reason_of(error, file)}") from None
    finally:
        if fresh is not None:
            fresh.unlink(missing_ok=True)


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yield an empty sibling folder that takes the place of ``target`` if all goes well."""
    place = target.resolve()
    fresh: Path | None = None
    old: Path | None = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
        fresh.chmod(0o777 & ~_umask())
        yield fresh
        if place.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{place.name}.old.", dir=place.parent))
            place.rename(old / place.name)
        fresh.rename(place)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror or error}") from None
    finally:
        if old is not None and not place.exists():
            (old / place.name).rename(place)
        for left in (fresh, old):
            if left is not None:
                shutil.rmtree(left, ignore_errors=True)


def _refuse_foreign(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise OutputError(f"{folder}: is a file, not a folder; choose --out")
    foreign = sorted({p.name for p in folder.iterdir()} - _OWN_FILES)
    if foreign:
        raise OutputError(
            f"{folder}: holds {foreign[0]!r}, which is no file of a run, so it is not replaced; "
            "choose a folder of its own with --out"
        )


def _save_tensor(result: RunResult, file: Path) -> None:
    from safetensors.numpy import save_file

    numerics = result.numerics
    assert numerics is not None
    tensors = {"o": numerics.output, "computed": numerics.computed.astype("uint8")}
    about = {"run": result.name, "layout": "BNSD", "sample": numerics.sample}
    save_file(tensors, file, metadata=about)
    file.chmod(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
