"""Triton kernels as tile programs: compiled to TTIR, addresses evaluated, the rest written as a kernel of tiles."""

#: What the file of recorded calls ends with; one of them is ``calls.npz::k``.
SUFFIX = ".npz"


def is_recorded(schedule: str) -> bool:
    """Return whether the name of a schedule is that of a recorded call."""
    return schedule.partition("::")[0].endswith(SUFFIX)
