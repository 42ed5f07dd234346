"""Chooses how to find the time of a program, which is exact either way, and says in the result what it chose.

What is chosen depends on the program and the device alone, not on whether a timeline is wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.timing import des
from npusim.timing.engine import Run
from npusim.timing.engine_code import code_of, equal_groups, operations_of
from npusim.timing.stream import Streams

if TYPE_CHECKING:
    from collections.abc import Collection

    from npusim.config.device import DeviceSpec
    from npusim.ir.program import TileProgram
    from npusim.timing.result import TimingResult

#: Operations of all classes up to which spans are kept; a longer timeline takes ``fold`` or ``des`` by name.
FEW_OPERATIONS = 2_000_000
#: Operations of groups that all differ that take less time than looking for a state that they repeat: 0.05 s.
SHORT_OPERATIONS = 500_000
#: Classes of core groups whose joint state can be expected to repeat soon: blocks dealt evenly make two.
FEW_CLASSES = 3


def keeps_spans(streams: Streams) -> bool:
    """Return whether `simulate` keeps spans of a program: it is simulated operation by operation, and short."""
    if streams.scalar_waits:
        return True
    code = code_of(streams)
    return operations_of(code, equal_groups(code)) <= FEW_OPERATIONS


def simulate(
    program: TileProgram, device: DeviceSpec, *, trace_groups: Collection[int] = (), streams: Streams | None = None
) -> TimingResult:
    """Return the time of ``program`` by the method that suits it; ``result.method`` names it.

    Spans of ``trace_groups`` are kept unless the program is so long that it is not simulated operation by operation.
    """
    streams = streams or Streams(program, device)
    if streams.scalar_waits:
        return des.simulate(program, device, trace_groups=trace_groups, streams=streams)
    code = code_of(streams)
    classes = equal_groups(code)
    operations = operations_of(code, classes)
    traced = trace_groups if operations <= FEW_OPERATIONS else ()
    is_periodic = operations > SHORT_OPERATIONS or len(classes.groups) <= FEW_CLASSES
    return Run(code, classes, traced, periodic=is_periodic).result("steady")
