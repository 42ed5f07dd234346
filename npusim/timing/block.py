"""The run-to-block engine: every core group and shared link, as ``des``, compiled.

Cycle-identical to ``npusim.timing.des``: the same cycles, busy and waiting times by cause, and
bytes of every link, at millions of operations a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.timing.block_code import code_of
from npusim.timing.block_run import Run
from npusim.timing.fold import equal_groups
from npusim.timing.stream import Streams

if TYPE_CHECKING:
    from collections.abc import Collection

    from npusim.config.device import DeviceSpec
    from npusim.ir.program import TileProgram
    from npusim.timing.result import TimingResult


def simulate(
    program: TileProgram, device: DeviceSpec, *, trace_groups: Collection[int] = (), streams: Streams | None = None
) -> TimingResult:
    """Return the time of ``program`` on all core groups of ``device``.

    Raises :class:`~npusim.errors.DeadlockError` naming the waiting engines, and
    :class:`~npusim.errors.ProgramError` if transfers are too large for 64-bit clocks.
    """
    code = code_of(streams or Streams(program, device))
    return Run(code, equal_groups(code).one_by_one(), trace_groups).result("block")
