"""Rules that any prediction of time must obey; breaking one is a bug and fails the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.errors import ProgramError

if TYPE_CHECKING:
    from npusim.timing.result import TimingResult


def check_sanity(result: TimingResult) -> None:
    """Raise :class:`ProgramError` for a unit busier than time allows, a time below its bound, or
    fewer bytes beyond L2 than inputs, and outputs that do not stay, have.
    """
    for uses in result.queues:
        for use in uses:
            if use.busy_cycles > result.cycles:
                raise ProgramError(
                    f"group {use.group} {use.queue}: busy {use.busy_cycles} of {result.cycles} cycles, over 100 %"
                )
    for unit, bound in result.bound_cycles.items():
        if result.cycles < bound:
            raise ProgramError(f"{result.cycles} cycles are below the bound of {unit}, {bound}")
    moved = result.link_bytes.get("hbm", result.compulsory_bytes)
    if moved < result.compulsory_bytes:
        raise ProgramError(
            f"{moved} bytes beyond L2, but inputs, and outputs that do not stay, alone have {result.compulsory_bytes}"
        )
