"""The cache folder: machine code of kernels, parsed YAML files, chosen tiles, and proofs that programs have no race.

It is the folder that ``NPUSIM_CACHE`` names (if it names several, as ``PATH`` does, each is searched); otherwise the
package's ``__pycache__``, the user's cache folder, or a private temporary one: the first that can be written.  Its
files are used without further checks (machine code is run), so a file is used only if its content is the stored one,
and a temporary folder only if no other user may write to it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # a system other than Unix: no locks
    fcntl = None  # type: ignore[assignment]


VARIABLE = "NPUSIM_CACHE"
#: When this process began to load npusim, in nanoseconds since the epoch.
_BEGUN_NS = time.time_ns()
_DIGEST = hashlib.sha256
_DIGEST_BYTES = _DIGEST().digest_size


def digest(*parts: object) -> bytes:
    """Return a digest of the texts of ``parts``."""
    return _DIGEST(repr(parts).encode()).digest()


@functools.cache
def package_stamp() -> tuple[tuple[str, int, int], ...]:
    """Return the name, size and time of each of npusim's Python files: everything that affects a figure."""
    here = Path(__file__).parent
    files = ((f, f.stat()) for f in here.rglob("*.py"))
    return tuple(sorted((str(f.relative_to(here)), s.st_size, s.st_mtime_ns) for f, s in files))


def is_loaded_code() -> bool:
    """Return whether the files that `package_stamp` describes are unchanged since this process first imported npusim.

    A file that changed between that import and the stamp has a new state in the stamp, and its old code in the process.
    """
    return all(changed_ns <= _BEGUN_NS for _, _, changed_ns in package_stamp())


@functools.cache
def package_digest() -> bytes:
    """Return the digest of `package_stamp`: a stamp that contains it needs no text of hundreds of files."""
    return digest(package_stamp())


def load(name: str, stamp: bytes, at: Path | None = None) -> bytes | None:
    """Return the data stored under a name with a stamp (`digest`); None if there are no such data, or if they are
    damaged.

    ``at``: the only folder that is searched.
    """
    for place in folders() if at is None else (at,):
        content = _content(place / name)
        if content is not None and content.startswith(stamp):
            return content[_DIGEST_BYTES:]
    return None


def store(name: str, stamp: bytes, data: bytes, *, is_silent: bool = False) -> None:
    """Store ``data`` under a name, in place of earlier data; a failure is reported at most once."""
    faults = list[str]()
    for place in folders():
        try:
            _write(place / name, stamp + data)
        except OSError as error:
            faults.append(f"{place}: {error.strerror or error}")
        else:
            return
    if faults and not is_silent:
        say_once(f"compiled kernels cannot be stored in {faults[0]}; set {VARIABLE} to a folder that can be written")


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Wait while another process computes the data stored under a name; without locks, both compute them."""
    place = folder()
    with ExitStack() as held:
        if fcntl is not None and place is not None:
            lock = place / f".{name}.lock"
            with suppress(OSError):
                place.mkdir(parents=True, exist_ok=True)
                fcntl.flock(held.enter_context(lock.open("w")), fcntl.LOCK_EX)
                # stored before the lock is released, so that waiting processes find it
                held.callback(lock.unlink, missing_ok=True)
        yield


def is_kept(prefix: str, stamp: bytes, at: Path | None = None) -> bool:
    """Return whether any data are stored with a stamp under a name with this beginning; ``at``: as for `load`."""
    return any(
        (content := _content(file)) is not None and content.startswith(stamp)
        for place in (folders() if at is None else (at,))
        for file in (place.glob(f"{prefix}*") if place.is_dir() else ())
    )


def folder() -> Path | None:
    """Return the folder for stored data; None if no folder can be written."""
    return next(filter(_is_writable, folders()), None)


def folders() -> list[Path]:
    """Return the folders to search, and the folder to write to: the first one that can be written."""
    if named := os.environ.get(VARIABLE):
        return [Path(one) for one in named.split(os.pathsep)]
    users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - needs no home
    usual = [Path(__file__).parent / "__pycache__", Path(users) / "npusim"]
    if not any(map(_is_writable, usual)) and (private := private_folder()):
        usual.append(private)
    return usual


@functools.cache
def _is_writable(folder: Path) -> bool:
    existing = next((p for p in (folder, *folder.parents) if p.exists()), None)
    return existing is not None and existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _content(file: Path) -> bytes | None:
    try:
        content = file.read_bytes()
    except OSError:
        return None
    rest = content[_DIGEST_BYTES:]
    if _DIGEST(rest).digest() == content[:_DIGEST_BYTES]:
        return rest
    say_once(f"{file} is damaged: npusim rebuilds it")
    with suppress(OSError):
        file.unlink()
    return None


def _write(file: Path, rest: bytes) -> None:
    """Write a temporary file in the same folder, then rename it: no reader sees a partial file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as fresh:
            fresh.write(_DIGEST(rest).digest() + rest)
        Path(name).chmod(0o644)
        Path(name).replace(file)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


# ---------------------------------------------------------------- a folder that only this user can write


@functools.cache
def private_folder() -> Path | None:
    """Return this user's temporary cache folder, created (with a message) if missing; None if unsafe.

    The folder is not a link, belongs to this user, and no other user may enter it (mode 0700).
    """
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    private = Path(tempfile.gettempdir()) / f"npusim-cache-{user}"
    try:
        private.mkdir(mode=0o700)
    except FileExistsError:
        status = private.lstat()
        is_users = user in (status.st_uid, "user") and not stat.S_IMODE(status.st_mode) & 0o077
        if not stat.S_ISDIR(status.st_mode) or not is_users:
            say_once(
                f"{private} is not private to this user, so that npusim does not use it: every process compiles "
                f"its kernels; set {VARIABLE} to a folder of your own"
            )
            return None
    except OSError as error:
        say_once(
            f"no folder for compiled kernels can be written ({private}: {error.strerror}): every process compiles "
            f"its kernels; set {VARIABLE}"
        )
        return None
    else:
        say_once(f"no cache folder can be written; compiled kernels are stored in {private}")
    return private


@functools.cache
def say_once(text: str) -> None:
    """Write a line to the standard error, once per process."""
    sys.stderr.write(f"npusim: {text}\n")
