"""The folder of a run: written to a hidden folder beside it, then moved there whole, or not at all."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from npusim.errors import OutputError, SpecError, reason_of
from npusim.report.figures import FIGURES_FILE, figures_document
from npusim.report.pipes import pipes_csv
from npusim.report.record import MOST_BYTES, REPORT_FILE, RESULT_FILE, record_of
from npusim.report.text import to_json
from npusim.report.timeline import timeline_of
from npusim.report.trace import TRACE_FILE, trace_json
from npusim.sanitize import regular_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.simulation.result import RunData

PIPES_FILE = "pipes.csv"
TENSOR_FILE = "output.safetensors"

#: What a run folder may hold; a folder with anything else is not replaced.
_RUN_FILES = frozenset({RESULT_FILE, FIGURES_FILE, PIPES_FILE, TENSOR_FILE, REPORT_FILE, TRACE_FILE})

#: Where the header of a safetensors file begins, behind its length.
_HEADER_AT = 8
#: Of Linux's renameat2(): paths count from the current folder; two exchange their places.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


#: Where runs are written, unless the caller says otherwise.
RUNS = Path("runs")
_COUNTED = re.compile(r"([^@/]*)@([1-9]\d*)")


def kept_run(word: str) -> Path | None:
    """Return the folder that ``@1`` names, the last run in `RUNS`, or ``flash@2``, the last but one of flash.

    A kind is what the names of its folders begin with, up to a dash.  None for a word of another form.

    Raises `SpecError` if there are fewer runs (says how many).
    """
    match = _COUNTED.fullmatch(word)
    if match is None or Path(word).exists():
        return None
    kind, number = match[1], int(match[2])
    files = [f for f in RUNS.glob(f"*/{RESULT_FILE}") if not kind or f"{f.parent.name}-".startswith(f"{kind}-")]
    if number > len(files):
        of = f" of {kind}" if kind else ""
        raise SpecError(f"{word}: {RUNS.absolute()} holds {len(files)} runs{of}")
    return sorted(files, key=lambda file: file.stat().st_mtime_ns)[-number].parent


def check_writable(folder: Path, digest: str | None = None) -> None:
    """Raise `OutputError` if a run could not be written to ``folder``; leaves nothing behind.

    ``digest`` is the run's: a folder that holds another run is refused; None: whichever run is there is replaced.
    Meant to be called before minutes of simulation.
    """
    target = _check_target(folder)
    if target == Path.cwd():
        raise OutputError(f"{folder}: is the folder you are in, which is not replaced; choose one in it with --out")
    if not target.exists():
        return
    if not target.is_dir():
        raise OutputError(f"{folder}: is a file, not a folder; choose --out")
    names = {p.name for p in target.iterdir() if not p.name.startswith(_hidden_prefix(target))}
    if others := sorted(names - _RUN_FILES):
        raise OutputError(
            f"{folder}: holds {others[0]!r}, which is no file of a run, so it is not replaced; "
            "choose a folder of its own with --out"
        )
    if digest is not None and RESULT_FILE in names and digest != _digest_in(target / RESULT_FILE):
        raise OutputError(
            f"{folder}: holds another run, which is not replaced; choose a folder of its own with --out, or --force"
        )
    if target.is_mount() and RESULT_FILE in names:
        raise OutputError(
            f"{folder}: is a mount point, where the run that it holds cannot be replaced in one step; "
            "empty it, or choose a folder in it with --out"
        )


def _digest_in(file: Path) -> str | None:
    """Return the digest of the run that a ``result.json`` holds; None where it says none."""
    try:
        kept = json.loads(regular_file(file, MOST_BYTES, SpecError).read_text(encoding="utf-8"))
        return str(kept["digest"])
    except (OSError, ValueError, RecursionError, TypeError, KeyError, SpecError):
        return None


def check_file_writable(file: Path) -> None:
    """Raise `OutputError` if a file could not be written, as `write_whole` does; leaves nothing behind."""
    _check_target(file)
    if file.is_dir():
        raise OutputError(f"{file}: cannot be written: there is a folder of that name")
    if file.exists() and not file.is_file():
        raise OutputError(f"{file}: cannot be written: it is a pipe or a device, not a file")


def _check_target(path: Path) -> Path:
    """Return where a path leads, links followed; raise `OutputError` if nothing could be written there."""
    target = Path(os.path.realpath(path))
    above = next((p for p in path.parents if os.path.lexists(p)), Path())
    if target.is_symlink() or not above.is_dir():
        raise OutputError(f"{path}: cannot be written: {path if above.is_dir() else above} is not a folder")
    parent = target if target.is_mount() else target.parent
    existing = next(p for p in (parent, *parent.parents) if p.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: cannot be written: no permission in {existing}")
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
    """Write ``result.json``, ``figures.json``, ``pipes.csv``, a trace and, on request, more; return where.

    The trace shows ``window``, from and to in us; all of the timeline without one.  ``report`` adds
    ``report.html``, which needs the extra ``report`` (`NpusimError` without it).

    A run without a time has neither pipes nor trace, one without spans no trace.  The same run in ``folder``, made
    earlier, is replaced; another one (another `RunData.digest`) only if it ``is_forced``.  The output tensor needs
    numerics; rows that were not computed are NaN, and ``computed`` in the file says which rows were.

    Raises `OutputError` if the folder cannot be written, or holds another run, or files that are not a run's; nothing
    is changed then.
    """
    target = Path(folder) if folder is not None else RUNS / result.folder
    check_writable(target, None if is_forced else result.digest)
    record, timeline = record_of(result), timeline_of(result)
    drawn = figures_document(result, timeline)
    shown = timeline.windowed(window)
    page = ""
    if report:
        from npusim.report.advice import Trial
        from npusim.report.page import run_page

        page = run_page(record, drawn, Trial(result))
    with _replacing(target) as fresh:
        (fresh / RESULT_FILE).write_text(to_json(record.to_document()), encoding="utf-8")
        (fresh / FIGURES_FILE).write_text(to_json(drawn, indent=None), encoding="utf-8")
        if page:
            (fresh / REPORT_FILE).write_text(page, encoding="utf-8")
        if result.timing is not None:
            (fresh / PIPES_FILE).write_text(pipes_csv(record), encoding="utf-8")
        if result.timing is not None and result.timing.spans and trace:
            (fresh / TRACE_FILE).write_text(trace_json(shown), encoding="utf-8")
        if save_output and result.numerics is not None:
            _save_tensor(result, fresh / TENSOR_FILE)
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


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of ``target``, in one step, if all goes well.

    A mount point cannot be moved: it gets the files, that of the result last.
    """
    folder = Path(os.path.realpath(target))
    parent = folder if folder.is_mount() else folder.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with _hidden_folder(parent, _hidden_prefix(folder)) as fresh:
            yield fresh
            if parent != folder:
                _move(fresh, folder)
            else:
                for file in sorted(fresh.iterdir(), key=lambda f: f.name == RESULT_FILE):
                    file.replace(folder / file.name)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror or error}") from None


def _hidden_prefix(folder: Path) -> str:
    return f".{folder.name}.npusim-"


@contextmanager
def _hidden_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder, removed at the end with its content; so are those that killed processes left behind."""
    for leftover in parent.iterdir():
        # A new one may not be locked yet.
        if leftover.name.startswith(prefix) and time.time() - leftover.stat().st_mtime > 1:
            with _lock(leftover) as is_ours:
                if is_ours:
                    shutil.rmtree(leftover, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        fresh.chmod(0o777 & ~_umask())
        with _lock(fresh):
            yield fresh
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Yield whether this process holds a folder's lock, which ends with it; False on systems without such locks."""
    held, is_ours = None, False
    with suppress(ImportError, OSError):
        import fcntl

        held = os.open(folder, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = True
    try:
        yield is_ours
    finally:
        if held is not None:
            os.close(held)


def _move(fresh: Path, folder: Path) -> None:
    """Replace a folder by a new one in one step; if that fails, the old one stays.

    Where the system cannot exchange two folders it takes two renames: a kill between them leaves the old one hidden.
    """
    if folder.exists() and _exchanged(fresh, folder):
        return
    aside = fresh.with_name(f"{fresh.name}.old")
    if folder.exists():
        folder.rename(aside)
    try:
        fresh.rename(folder)
    except OSError:
        if aside.exists():
            aside.rename(folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, as Linux can; return whether that was done."""
    if sys.platform != "linux":
        return False
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    paths = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    return exchange is not None and exchange(*paths, _RENAME_EXCHANGE) == 0


def _save_tensor(result: RunData, file: Path) -> None:
    from safetensors.numpy import save_file

    numerics = result.numerics
    assert numerics is not None
    tensors = {"o": numerics.output, "computed": numerics.computed.astype("uint8")}
    about = {"run": result.name, "layout": "BNSD", "sample": numerics.sample}
    save_file(tensors, file, metadata=about)
    with file.open("r+b") as stream:  # the library writes the keys of a header in any order
        size = int.from_bytes(stream.read(_HEADER_AT), "little")
        header = json.loads(stream.read(size))
        stream.seek(_HEADER_AT)
        text = json.dumps(header, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        stream.write(text.encode().ljust(size))
    file.chmod(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
