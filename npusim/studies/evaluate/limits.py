"""Limits of a process that runs foreign code: processor time, memory, files, processes and the network."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Number of bytes that a candidate may write to a file.
FILE_BYTES = 1 << 28
#: Those arguments of a Python event that are paths that the event changes.
CHANGES: Mapping[str, slice] = MappingProxyType(
    {
        **dict.fromkeys(
            ("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime"), slice(1)
        ),
        **dict.fromkeys(("os.rename", "os.link"), slice(2)),  # a link to a file makes its content writable
        "os.symlink": slice(1, 2),
    }
)
#: A filter of system calls (Linux, seccomp): its mode, and prctl's numbers.
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_LOAD, _EQUAL, _ANY_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
#: A new process without this flag is not a thread.
_THREAD = 0x10000


#: System calls of Landlock, the same for all processors: they create a set of rules, add a rule, and restrict the
#: process to the rules.
_CREATE_RULES, _ADD_RULE, _OBEY_RULES = 444, 445, 446
_VERSION, _BENEATH, _PATH_ONLY = 1, 1, 0o10000000
#: Landlock's rights to change files and folders, by the first version that has them; those of them that apply to files.
_CHANGING: Mapping[int, int] = MappingProxyType({1: 0x1FF2, 2: 1 << 13, 3: 1 << 14})
_OF_FILE = 1 << 1 | 1 << 14


@dataclass(frozen=True)
class Numbers:
    """System calls of a kind of processor: the refused calls, and the two calls that start threads and processes."""

    audit: int
    refused: tuple[int, ...]
    clone: int
    clone3: int


#: Refused: socket, connect, bind, kill, tkill, tgkill, setsid, setpgid, ptrace, and on x86-64 fork and vfork.
_NUMBERS = MappingProxyType(
    {
        "x86_64": Numbers(0xC000003E, (41, 42, 49, 62, 200, 234, 112, 109, 101, 57, 58), 56, 435),
        "aarch64": Numbers(0xC00000B7, (198, 203, 200, 129, 130, 131, 157, 154, 117), 220, 435),
    }
)


@dataclass(frozen=True)
class Limits:
    """Limits of one candidate: seconds of an answer, and bytes of memory."""

    seconds: float = 120.0
    memory_bytes: int = 8 << 30


def confine(limits: Limits, *, may_start: bool) -> None:
    """Limit this process and those that it starts; ``may_start``: whether it may start other processes, as compilers
    do.

    All limits need Linux; on other systems only the limits of time, memory and files are effective.
    """
    whole = int(limits.seconds) + 1
    for kind, most in (
        (resource.RLIMIT_CPU, whole * 2),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 256),
    ):
        hard = resource.getrlimit(kind)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (bound, bound))
    if sys.platform == "linux" and platform.machine() in _NUMBERS:
        _filter(_NUMBERS[platform.machine()], may_start=may_start)


def guard(folders: tuple[Path, ...]) -> None:
    """Refuse to open files for writing, to remove or to rename them outside of some folders.

    Python code gets an error with the file's name.  An operating system with Landlock also refuses such changes to all
    other code.
    """
    _restrict(folders)
    inside = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders)

    def check(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            is_written = bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            is_written |= isinstance(mode, str) and any(letter in mode for letter in "wax+")
            changed: tuple[object, ...] = (path,) if is_written else ()
        else:
            changed = arguments[CHANGES.get(event, slice(0))]
        for path in changed:
            named = os.fsdecode(path) if isinstance(path, str | bytes) else os.devnull
            if named != os.devnull and not f"{os.path.realpath(named)}{os.sep}".startswith(inside):
                raise PermissionError(f"a candidate must not change {named}")

    sys.addaudithook(check)


def landlock_version() -> int:
    """Return the version of Landlock in the operating system's kernel; 0 if there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(ctypes.CDLL(None).syscall(_CREATE_RULES, None, ctypes.c_size_t(0), _VERSION)))


def _restrict(folders: tuple[Path, ...]) -> None:
    """Let the operating system refuse changes of files outside some folders, for this process and those that
    it starts.
    """
    version = landlock_version()
    if not version:
        return
    library = ctypes.CDLL(None, use_errno=True)

    def checked(*words: object) -> int:
        done = int(library.syscall(*words))
        if done < 0:
            raise OSError(ctypes.get_errno(), "Landlock")
        return done

    rights = sum(of for first, of in _CHANGING.items() if first <= version)
    handled = ctypes.create_string_buffer(struct.pack("Q", rights))
    rules = checked(_CREATE_RULES, handled, ctypes.c_size_t(8), 0)
    for path in (*folders, Path(os.devnull)):
        if path != Path(os.devnull):
            path.mkdir(parents=True, exist_ok=True)
        file = os.open(path, _PATH_ONLY | os.O_CLOEXEC)
        allowed = rights if path.is_dir() else rights & _OF_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, file))
        checked(_ADD_RULE, rules, _BENEATH, rule, 0)
        os.close(file)
    library.prctl(_NO_NEW_PRIVILEGES, *(ctypes.c_ulong(word) for word in (1, 0, 0, 0)))
    checked(_OBEY_RULES, rules, 0)
    os.close(rules)


def _filter(numbers: Numbers, *, may_start: bool) -> None:
    """Install the filter of system calls; a call that it refuses fails with EPERM."""
    refused = numbers.refused[:-2] if may_start and numbers.clone == _NUMBERS["x86_64"].clone else numbers.refused
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, numbers.audit), (_RETURN, 0, 0, _ERRNO | _EPERM), (_LOAD, 0, 0, 0)]
    for number in refused:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    if not may_start:  # clone3 has its flags in memory, which a filter cannot read: the C library then uses clone
        program += [(_EQUAL, 0, 1, numbers.clone3), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
        program += [(_EQUAL, 0, 3, numbers.clone), (_LOAD, 0, 0, 16), (_ANY_SET, 1, 0, _THREAD)]
        program += [(_RETURN, 0, 0, _ERRNO | _EPERM)]
    program += [(_RETURN, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    head = ctypes.create_string_buffer(
        struct.pack("HL" if sys.maxsize < 1 << 32 else "H6xQ", len(program), ctypes.addressof(code))
    )
    library = ctypes.CDLL(None, use_errno=True)
    for words in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, ctypes.addressof(head), 0, 0)):
        if library.prctl(words[0], *(ctypes.c_ulong(word) for word in words[1:])):
            raise OSError(ctypes.get_errno(), "the filter of system calls")
