"""Where compiled kernels are kept: numba's own places, or a private temporary folder.

numba keeps machine code beside the source, in the user's cache folder, or in ``NUMBA_CACHE_DIR``.  In
a read-only installation without a home none of them can be written; without another place every
process (and every worker of a search) would compile for half a minute.  Cached code is unpickled and
run, so a folder is used only if it is this user's alone, and a file only if its content is what was written.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import re
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
_DIGEST = hashlib.sha256
_DIGEST_BYTES = _DIGEST().digest_size


def compiled_on_disk(compiler: Callable[[Any], Any], function: Any) -> Any:
    """Return ``function`` compiled, its machine code kept on disk where there can be a safe place for it."""
    compiled = compiler(function)
    if hasattr(compiled, "_cache"):  # with NUMBA_DISABLE_JIT it is the function itself
        # Not numba's setting: that may come from a file in the current folder.
        for place in (lambda: os.environ.get("NUMBA_CACHE_DIR", ""), private_folder):
            if (folder := place()) is not None and (cache := _cache_in(str(folder), function)):
                compiled._cache = cache
                break
    return compiled


class _CheckedFiles(IndexDataCacheFile):
    """numba's index and its entries, each led by a digest, without which nothing in it is unpickled.

    A file begins with the digest of the rest, and then with that of what it was compiled from.
    """

    def load(self, key: object) -> Any:
        # Two processes that add to one index at once can give two kernels one file: it names its own.
        found = super().load(key)
        return found[1] if found is not None and found[0] == key else None

    def save(self, key: object, data: object) -> None:
        super().save(key, (key, data))

    def _load_index(self) -> Any:
        return self._read(Path(self._index_path)) or {}

    def _save_index(self, overloads: object) -> None:
        self._write(self._index_path, overloads)

    def _load_data(self, name: str) -> Any:
        return self._read(Path(self._data_path(name)))

    def _save_data(self, name: str, data: object) -> None:
        self._write(self._data_path(name), data)

    def _stamp(self) -> bytes:
        return _DIGEST(repr((self._version, self._source_stamp)).encode()).digest()

    def _read(self, path: Path) -> Any:
        """Return the content of a file; None where there is none, it is of other sources, or it is damaged."""
        try:
            content = path.read_bytes()
        except OSError:
            return None
        rest = content[_DIGEST_BYTES:]
        if _DIGEST(rest).digest() != content[:_DIGEST_BYTES]:
            _say(f"{path} is damaged: what it held is compiled anew")
            with suppress(OSError):
                path.unlink()
            return None
        return pickle.loads(rest[_DIGEST_BYTES:]) if rest.startswith(self._stamp()) else None

    def _write(self, path: str, data: object) -> None:
        rest = self._stamp() + self._dump(data)
        with self._open_for_write(path) as file:  # beside it, then moved there
            file.write(_DIGEST(rest).digest() + rest)


class _Cache(FunctionCache):
    """The machine code of one function on disk; where it cannot be kept, that is said, and the work goes on.

    numba looks at the time of the function's own file only; an edit of a function it calls from another
    file would leave stale machine code.  So the stamp is what all files say whose code a kernel can contain.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        # Files of numba's own form, which an earlier npusim left, have other names.
        base = f"{self._impl.filename_base}.checked"
        self._cache_file = _CheckedFiles(self._cache_path, base, sources_stamp(Path(function.__code__.co_filename)))

    def save_overload(self, sig: object, data: object) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _say_once(f"compiled kernels cannot be kept in {self._cache_path}: {error.strerror or error}")


def _cache_in(folder: str, function: Any) -> _Cache | None:
    """Return a cache in a folder, or in one of numba's own places where that is empty; None where there is none."""
    config: Any = numba.config
    before, config.CACHE_DIR = config.CACHE_DIR, folder
    try:
        return _Cache(function)
    except RuntimeError:  # numba: "no locator available": nowhere to write
        return None
    finally:
        config.CACHE_DIR = before


def is_missing(compiled: Any) -> bool:
    """Return whether machine code of a function could be kept on disk, but there is none yet, nor in this process."""
    file: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    return file is not None and not compiled.signatures and not file._load_index()


@functools.cache
def sources_stamp(path: Path) -> tuple[tuple[str, str], ...]:
    """Return the name and digest of a source file, and of those that it imports from its folder or this one."""
    found: dict[Path, str] = {}
    left = [path]
    while left:
        source = left.pop()
        text = source.read_text(encoding="utf-8")
        found[source] = hashlib.sha256(text.encode()).hexdigest()
        for module in re.findall(r"^from npusim\.(\S+) import", text, re.MULTILINE):
            other = HERE.parent.joinpath(*module.split(".")).with_suffix(".py")
            if other.parent in (path.parent, HERE) and other.exists() and other not in found:
                left.append(other)
    return tuple(sorted((source.name, digest) for source, digest in found.items()))


@functools.cache
def private_folder() -> Path | None:
    """Return this user's temporary cache folder, made (and said) if it is not there; None if unsafe.

    It is a folder, no link, owned by this user, and nobody else may enter it (mode 0700).
    """
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"npusim-cache-{user}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        is_own = user in (found.st_uid, "user") and not stat.S_IMODE(found.st_mode) & 0o077
        if not stat.S_ISDIR(found.st_mode) or not is_own:
            _say(
                f"{folder} is not this user's alone and is not used: kernels are compiled anew in every process; "
                "set NUMBA_CACHE_DIR to a folder of your own"
            )
            return None
    except OSError as error:
        _say(
            f"no folder for compiled kernels can be written ({folder}: {error.strerror}): they are compiled anew "
            "in every process; set NUMBA_CACHE_DIR"
        )
        return None
    else:
        _say(f"no cache folder can be written; compiled kernels are kept in {folder}")
    return folder


def _say(text: str) -> None:
    sys.stderr.write(f"npusim: {text}\n")


_say_once = functools.cache(_say)
