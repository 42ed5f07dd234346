"""Every error that npusim raises on purpose, in one tree.

A message names the thing, the value, the limit and the place.  ``cli`` turns any
:class:`NpusimError` into exit code 2 (1 for :class:`CheckFailedError`).
"""

from __future__ import annotations

from pathlib import Path


class NpusimError(Exception):
    """Base of all errors that a user's input or a program's description can cause."""


class SpecError(NpusimError):
    """A hardware, workload or measurement file (or an option) is wrong; names file and line."""


class TilingError(NpusimError):
    """Tiling fields contradict the problem, the schedule or the device."""


class BufferOverflowError(TilingError):
    """The contents of one on-chip buffer need more bytes than it has."""


class TensorError(NpusimError):
    """Input tensors have the wrong keys, shape, dtype or values, or their file is damaged."""


class FormatError(NpusimError):
    """Unknown number format, rounding mode or arithmetic, or operands that do not fit it."""


class LayoutError(NpusimError):
    """A layout, an instruction's operand or a memory access does not exist or does not fit."""


class FlagError(NpusimError):
    """A flag is set twice or never set, or the hardware has too few flag ids."""


class RaceError(NpusimError):
    """Two operations access the same bytes and no chain of flags orders them."""


class DeadlockError(NpusimError):
    """No engine can ever proceed; names each waiting engine, its operation and its flag."""


class ProgramError(NpusimError):
    """A tile program is malformed: impure loop body, illegal program order, missing route."""


class UnknownOpcodeError(ProgramError):
    """An operation has no semantics or no cost for this engine (never a silent 0)."""


class ContradictionError(ProgramError):
    """A result breaks a rule that every prediction obeys: a fault of npusim, or of a schedule from outside."""


class OutputError(NpusimError):
    """A result could not be written; no partly written file remains."""


class CheckFailedError(NpusimError):
    """A baseline, a measurement or a golden vector differs by more than allowed (exit 1)."""


def one_line(error: Exception) -> str:
    """Return an error's text on one line."""
    return " ".join(str(error).split())


def absent(file: Path, kind: str = "file") -> str:
    """Return why ``file`` cannot be read as a ``kind`` of file: the name is free, or what has it is something else."""
    if file.is_dir():
        return f"this is a folder, not a {kind}"
    if file.exists():
        return f"this is a device, a pipe or a socket, not a {kind}"
    if file.is_symlink():
        return f"no such {kind}: the link of that name leads nowhere"
    return f"no such {kind}"


def reason_of(error: OSError, file: Path) -> str:
    """Return the reason why a file could not be written, with the object in the way."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        existing = (p for p in file.parents if p.exists() or p.is_symlink())
        obstacle = next((p for p in existing if not p.is_dir()), file)
        return f"{obstacle} is not a folder"
    if isinstance(error, IsADirectoryError):
        return "there is a folder of that name"
    return error.strerror or str(error)
