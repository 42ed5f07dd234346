"""Triton kernels as tile programs: compiled to TTIR, addresses evaluated, the rest written as a kernel of tiles."""

from hashlib import sha256

#: Suffix of a file of recorded calls; a call of the file is ``calls.npz::k``.
SUFFIX = ".npz"
#: Separator between a file and a launch of one of its kernels, or between a file and the number of a recorded call.
SIGN = "::"
#: The order of a sum whose layout has no known form.
UNKNOWN = "?"
#: In place of the addend of an addition: compiled code contracts no product with it.
ROUNDED = "-"
#: Number of letters of a kernel's name that the names of its files have; in these a longer name ends with a digest.
_MOST_LETTERS, _LETTERS = 80, 64


def launch_parts(schedule: str) -> tuple[str, str]:
    """Return the file and the launch of ``kernel.py::name[grid](arguments)``, or the number of ``calls.npz::k``.

    The second text is empty if the name has no such part.
    """
    path, _, launch = schedule.partition(SIGN)
    return path, launch


def is_recorded(schedule: str) -> bool:
    """Return whether the name of a schedule is that of a recorded call, or of a file of recorded calls."""
    return launch_parts(schedule)[0].endswith(SUFFIX)


def is_launch(schedule: str) -> bool:
    """Return whether the name of a schedule is that of a launch of a Triton kernel, recorded or written."""
    return SIGN in schedule or is_recorded(schedule)


def short_kernel_name(name: str) -> str:
    """Return the name of a kernel in the form for names of files, whose length systems limit.

    >>> short_kernel_name("softmax"), len(short_kernel_name("fused_" * 50))
    ('softmax', 73)
    """
    if len(name) <= _MOST_LETTERS:
        return name
    return f"{name[:_LETTERS]}_{sha256(name.encode()).hexdigest()[: 72 - _LETTERS]}"
