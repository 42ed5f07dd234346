"""The folder of a run: each file is written either completely or not at all, and the result's file last."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npusim.errors import OutputError, SpecError, reason_of
from npusim.report.page_figures import FIGURES_FILE, figures_document
from npusim.report.pipes import pipes_csv
from npusim.report.result_json import REPORT_FILE, RESULT_FILE, read_json, record_of
from npusim.report.text import to_json
from npusim.report.timeline import timeline_of
from npusim.report.trace import TRACE_FILE, trace_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npusim.simulation.run_result import RunData

PIPES_FILE = "pipes.csv"
TENSOR_FILE = "output.safetensors"

#: Files of a run folder; a folder with any other file is not replaced.
_RUN_FILES = frozenset({RESULT_FILE, FIGURES_FILE, PIPES_FILE, TENSOR_FILE, REPORT_FILE, TRACE_FILE})

#: Offset of the header in a safetensors file, after its length.
_HEADER_AT = 8
#: Seconds after which an unfinished file is assumed to belong to a process that was killed.
_LEFT_S = 3600

#: Default folder of runs.
RUNS = Path("runs")
_COUNTED = re.compile(r"([^@/]*)@([1-9]\d*)")


def kept_run(word: str) -> Path | None:
    """Return the folder that ``@1`` names, the last run in `RUNS`, or ``flash@2``, the second-last run of flash.

    A kind is the beginning of its folders' names, up to a dash.  None for a word of another form.

    Raises `SpecError`, with the number of runs, if there are fewer.
    """
    match = _COUNTED.fullmatch(word)
    if match is None or Path(word).exists():
        return None
    kind, number = match[1], int(match[2])
    files = [f for f in RUNS.glob(f"*/{RESULT_FILE}") if not kind or f"{f.parent.name}-".startswith(f"{kind}-")]
    if number > len(files):
        ends = dict.fromkeys((f"{kind}@1", f"{kind}@{len(files)}"))
        there = " to ".join(ends) if files else f"no run{kind and f' of {kind}'}"
        raise SpecError(f"{word}: there is no such run; {RUNS.absolute()} has {there}")
    return sorted(files, key=lambda file: file.stat().st_mtime_ns)[-number].parent


def check_writable(folder: Path, digest: str | None = None) -> None:
    """Raise `OutputError` if a run cannot be written to ``folder``; the check creates no file.

    ``digest`` identifies the run: a folder with another run is refused; None: any run in the folder is replaced. Call
    this before a long simulation.
    """
    target = _check_target(folder)
    if not target.exists():
        return
    if not target.is_dir():
        raise OutputError(f"{folder}: is a file, not a folder; choose another folder with --out")
    names = {p.name for p in target.iterdir() if not _is_unfinished(p)}
    if others := sorted(names - _RUN_FILES):
        raise OutputError(
            f"{folder}: contains {others[0]!r}, which is not a file of a run, so that npusim does not replace it; "
            "choose another folder with --out"
        )
    if digest is not None and RESULT_FILE in names and digest != _digest_in(target / RESULT_FILE):
        raise OutputError(
            f"{folder} contains another run; choose another folder with --out, or replace the run with --force"
        )


def _is_unfinished(file: Path) -> bool:
    """Return whether a file is an unfinished one of `write_whole`."""
    return file.name.startswith(".") and file.name[1:].rpartition(".")[0] in _RUN_FILES


def _digest_in(file: Path) -> str | None:
    try:
        return str(read_json(file)[1]["digest"])
    except (TypeError, KeyError, SpecError):
        return None


def check_file_writable(file: Path) -> None:
    """Raise `OutputError` if `write_whole` cannot write a file; the check creates no file."""
    _check_target(file)
    if file.is_dir():
        raise OutputError(f"{file}: cannot be written: there is a folder of that name")
    if file.exists() and not file.is_file():
        raise OutputError(f"{file}: cannot be written: it is a pipe or a device, not a file")


def _check_target(path: Path) -> Path:
    """Return the path with its links resolved; raise `OutputError` if no file can be written there."""
    target = Path(os.path.realpath(path))
    above = next((p for p in path.parents if os.path.lexists(p)), Path())
    if target.is_symlink() or not above.is_dir():
        raise OutputError(f"{path}: cannot be written: {path if above.is_dir() else above} is not a folder")
    parent = target if target.is_dir() else target.parent
    existing = next(p for p in (parent, *parent.parents) if p.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: cannot be written: permission denied in {existing}")
    return target


def save_run(
    result: RunData,
    folder: str | Path | None = None,
    *,
    trace: bool = True,
    save_output: bool = False,
    window: tuple[float, float] | None = None,
    report: bool = False,
    is_forced: bool = False,
) -> Path:
    """Write ``result.json``, ``figures.json``, ``pipes.csv``, a trace and, on request, more; return the folder.

    The trace shows ``window``, its begin and end in us; without a window, the complete timeline.  ``report`` adds
    ``report.html``, which needs the extra ``report`` (`NpusimError` without it).

    A run without a time has neither pipes nor trace; a run without spans has no trace.  An earlier result of the same
    run in ``folder`` is replaced; a result of another run (another `RunData.digest`) is replaced only with
    ``is_forced``.  The output tensor needs numerics; rows that were not computed are NaN, and ``computed`` in the file
    marks the computed rows.

    Raises `OutputError` if the folder cannot be written, contains another run, or contains files that do not belong to
    a run; in these cases nothing is changed.  An interrupted write leaves no result, or the earlier result of the same
    run.
    """
    target = Path(folder) if folder is not None else RUNS / result.folder
    check_writable(target, None if is_forced else result.digest)
    record, timeline, timing = record_of(result), timeline_of(result), result.timing
    drawn, shown = figures_document(result, timeline), timeline.windowed(window)
    texts = {FIGURES_FILE: to_json(drawn, indent=None)}
    if report:
        from npusim.report.advice import Trial
        from npusim.report.page import run_page

        texts[REPORT_FILE] = run_page(record, drawn, Trial(result))
    if timing is not None:
        texts[PIPES_FILE] = pipes_csv(record)
        texts |= {TRACE_FILE: trace_json(shown)} if timing.spans and trace else {}
    contents = {name: text.encode() for name, text in texts.items()}
    if save_output and result.numerics is not None:
        contents[TENSOR_FILE] = _output_bytes(result)
    contents[RESULT_FILE] = to_json(record.to_document()).encode()
    _clear(target, contents.keys() if _digest_in(target / RESULT_FILE) == result.digest else ())
    for name, content in contents.items():
        write_whole(target / name, content)
    return target


def save_trace(result: RunData, path: str | Path, window: tuple[float, float] | None = None) -> Path:
    """Write the timeline, or a window of it (us), as Chrome's trace events, for Perfetto too."""
    file = Path(path)
    write_whole(file, trace_json(timeline_of(result).windowed(window)).encode())
    return file


def write_whole(file: Path, content: bytes) -> None:
    """Write a file under a temporary name, then rename it; raise `OutputError` if that fails."""
    check_file_writable(file)
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


def _clear(folder: Path, kept: Collection[str]) -> None:
    """Remove a run's files except ``kept``, and partial files of a killed process."""
    try:
        for file in folder.iterdir() if folder.is_dir() else ():
            is_left = _is_unfinished(file) and time.time() - file.stat().st_mtime > _LEFT_S
            if is_left or file.name in _RUN_FILES.difference(kept):
                file.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror or error}") from None


def _output_bytes(result: RunData) -> bytes:
    numerics = result.numerics
    assert numerics is not None
    tensors = {"o": numerics.output, "computed": numerics.computed.astype("uint8")}
    return tensor_bytes(tensors, {"run": result.name, "layout": "BNSD", "sample": numerics.sample})


def tensor_bytes(tensors: Mapping[str, NDArray[Any]], about: dict[str, str]) -> bytes:
    """Return the content of a safetensors file, which is the same for equal tensors and equal text ``about`` them."""
    from safetensors.numpy import save

    data = save(dict(tensors), metadata=about)
    # The library does not write the keys of a header in a fixed order.
    end = _HEADER_AT + int.from_bytes(data[:_HEADER_AT], "little")
    text = json.dumps(json.loads(data[_HEADER_AT:end]), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return data[:_HEADER_AT] + text.encode().ljust(end - _HEADER_AT) + data[end:]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
