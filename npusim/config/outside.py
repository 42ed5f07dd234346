"""Values from outside the package: ``my_file.py:name`` and ``module:name``; errors name file and line."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import time
import traceback
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from npusim.config.messages import suggest
from npusim.errors import BufferOverflowError, NpusimError, SpecError, absent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import ModuleType

#: Exceptions that are not faults of foreign code; all other exceptions are, including `SystemExit`.
PASSED_ON = (KeyboardInterrupt, GeneratorExit)


#: Time at which npusim was imported, and the folders of Python, of installed packages and of npusim.
_BEGUN = time.time()
_INSTALLED = (*(sysconfig.get_path(n) for n in ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[1]))


def is_outside(name: str) -> bool:
    """Return whether ``name`` states the place of a value (``FILE.py:NAME`` or ``module:name``)."""
    return ":" in name or name.endswith(".py")


def load(name: str, what: str) -> tuple[ModuleType, str]:
    """Return the module of ``file.py:name`` or ``module:name``, and the name, which is empty if none is stated.

    Raises `SpecError` for a missing file or module, or one that fails to import; ``what``: the kind of object for
    messages, such as a schedule.
    """
    called, _, wanted = (name, "", "") if name.endswith(".py") else name.rpartition(":")
    if not called.endswith(".py"):
        return module(called), wanted
    path = Path(called)
    if not path.is_file():
        raise SpecError(f"{path.absolute()}: {absent(path)}; {what} of your own is FILE.py:NAME")
    return _file(str(path.resolve()), path.stat().st_mtime_ns), wanted


@cache
def _file(path: str, _changed: int) -> ModuleType:
    """Return a file as a module; it is loaded again when it has changed."""
    spec = importlib.util.spec_from_file_location(f"npusim_plugin_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and pydantic look up their module
    if (folder := str(Path(path).parent)) not in sys.path:
        sys.path.append(folder)  # may import files of the same folder, as a script may
    try:
        spec.loader.exec_module(module)
    except PASSED_ON:
        raise
    except BaseException as error:
        raise SpecError(f"{place_of(error, path)}: {describe(error)}") from error
    return module


def module(name: str) -> ModuleType:
    """Return a module by its name; raise `SpecError` where it fails to import."""
    try:
        return importlib.import_module(name)
    except PASSED_ON:
        raise
    except BaseException as error:
        raise SpecError(f"module {name}: {describe(error)}") from error


def sources(files: Iterable[str]) -> dict[str, str] | None:
    """Return, by path, a digest of each of ``files`` and of each file from outside that Python has loaded.

    An installed package is included if one of ``files`` belongs to it.  None if a file cannot be read, or if it has
    changed since npusim was imported, so that the loaded code may differ.
    """
    modules = [(n.partition(".")[0], str(getattr(m, "__file__", None))) for n, m in list(sys.modules.items())]
    names = {name for name, file in modules if file in files}
    loaded = {f for n, f in modules if f.endswith(".py") and (n in names or not f.startswith(_INSTALLED))}
    digests = dict[str, str]()
    for file in sorted({*files, *loaded}):
        try:
            if Path(file).stat().st_mtime >= _BEGUN:
                return None
            digests[file] = digest_of(file)
        except OSError:
            return None
    return digests


def digest_of(file: str) -> str:
    """Return a digest of a file's content; empty where it cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


def describe(error: BaseException) -> str:
    """Return an error in words, with its kind if npusim did not write the words."""
    near = ""
    if isinstance(error, AttributeError) and error.name and error.obj is not None:
        near = suggest(error.name, [name for name in dir(error.obj) if not name.startswith("_")]).partition("; ")[0]
    return str(error) if isinstance(error, NpusimError) else f"{type(error).__name__}: {error}{near}"


def place_of(error: BaseException, path: str) -> str:
    """Return ``file:line`` of an error's last traceback entry in the file ``path``; only the file if there is no such
    entry.
    """
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{path}:{error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return f"{path}:{lines[-1]}" if lines else path


def origin_of(function: object) -> str:
    """Return file and line of a function; empty for an object without code."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


@contextmanager
def with_origin(origin: str, called: str = "") -> Iterator[None]:
    """Prefix errors inside with the file and line of the fault, or those of ``origin`` if no line of that file is
    involved.

    ``called``: a description of the owner of the fault, after the line.

    The error that a program does not fit is not prefixed, because smaller tiles are tried after it.  Neither is any
    error without an origin.
    """
    try:
        yield
    except (BufferOverflowError, *PASSED_ON):
        raise
    except BaseException as error:
        path = origin.rpartition(":")[0]
        if not origin or str(error).startswith(path):
            raise
        kind = type(error) if isinstance(error, NpusimError) else SpecError
        line = place_of(error, path)
        raise kind(f"{origin if line == path else line}: {called}{describe(error)}") from error
