"""Where compiled kernels are kept: numba's own places, or a private temporary folder.

numba keeps machine code beside the source, in the user's cache folder, or in ``NUMBA_CACHE_DIR``.  In
a read-only installation without a home none of them can be written; without another place every
process (and every worker of a search) would compile for half a minute.  Cached code is unpickled and
run, so a folder is used only if it is this user's alone.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.errors import NumbaWarning

HERE = Path(__file__).parent
#: Compiles a function; ``cache=True`` asks numba for a cache on disk.
Compile = Callable[..., Any]


def compiled_on_disk(compiler: Compile, function: Any) -> Any:
    """Return ``function`` compiled with a disk cache, or None if there can be no safe one.

    numba looks at the time of the function's own file only; an edit of a function it calls from another
    file would leave stale machine code.  So the stamp is what all files say whose code a kernel can contain.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaWarning)
        try:
            compiled = compiler(function, cache=True)
        except RuntimeError:  # numba: "no locator available": nowhere to write
            compiled = _in_private_folder(compiler, function)
    file: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if not hasattr(file, "_source_stamp"):
        return None
    file._source_stamp = sources_stamp(Path(function.__code__.co_filename))
    return compiled


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


def _in_private_folder(compiler: Compile, function: Any) -> Any:
    folder = private_folder()
    if folder is None:
        return None
    config: Any = numba.config
    before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
    try:
        return compiler(function, cache=True)
    except RuntimeError:
        return None
    finally:
        config.CACHE_DIR = before


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
