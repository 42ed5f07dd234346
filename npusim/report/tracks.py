"""Names of cores and pipes as the vendor's simulator writes them: ``core0.cubecore0`` ``CUBE``."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Track", "track_of"]


class Track(NamedTuple):
    """One pipe of one core: ``core`` is a process of a timeline, ``pipe`` a thread of it."""

    core: str
    pipe: str

    def __str__(self) -> str:
        return f"{self.core} {self.pipe}"


def track_of(group: int, queue: str) -> Track:
    """Return the track of a queue of core group ``group``.

    ``aic.CUBE`` is ``core0.cubecore0 CUBE``, ``aiv1.VECTOR`` is ``core0.veccore1 VECTOR``; other
    cores keep their own name and the group's number: ``sm.TENSOR`` of group 3 is ``sm3 TENSOR``.
    """
    core, _, pipe = queue.rpartition(".")
    kind, number = core.rstrip("0123456789"), core[len(core.rstrip("0123456789")) :]
    match kind:
        case "aic":
            return Track(f"core{group}.cubecore{number or 0}", pipe)
        case "aiv":
            return Track(f"core{group}.veccore{number or 0}", pipe)
    return Track(f"{kind}{group}{f'.{number}' if number else ''}", pipe)
