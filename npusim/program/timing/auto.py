"""The choice of the method that simulates the time of a program; the result names the method.

Programs with few operations, or few classes of equal core groups, are exact (``steady``: folded, repetitions skipped).
Many long programs that all differ use ``reserved``, with a band that it measures on a part of the program; if the band
is wide, the method is nevertheless exact unless it is very slow.  The choice depends only on the program and the
device, not on a request for a timeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.errors import ProgramError
from npusim.program.timing import des, mean_field
from npusim.program.timing.engine import Run
from npusim.program.timing.engine_code import code_of, equal_groups
from npusim.program.timing.mean_field import FEW_CLASSES, operations_of
from npusim.program.timing.stream import Streams

if TYPE_CHECKING:
    from collections.abc import Collection

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.timing.timing_result import TimingResult

#: Up to this number of operations of all classes, each operation is simulated (about 0.2 s) and spans are stored. For a
#: longer timeline name ``fold`` or ``des``.
FEW_OPERATIONS = 2_000_000
#: If all core groups differ: number of operations up to which simulation is faster (0.05 s) than a search for a
#: repeated state.
SHORT_OPERATIONS = 500_000
#: Largest number of operations that are simulated individually, which takes about 2 s; for larger numbers the time is
#: stated with a band.
MANY_OPERATIONS = 20_000_000
#: A band above 2 % is wide.
WIDE = 0.02


def keeps_spans(streams: Streams) -> bool:
    """Return whether `simulate` stores spans of a program: this is so for a short program that is simulated operation
    by operation.
    """
    if streams.scalar_waits:
        return True
    code = code_of(streams)
    return operations_of(code, equal_groups(code)) <= FEW_OPERATIONS


def simulate(
    program: TileProgram, device: DeviceSpec, *, trace_groups: Collection[int] = (), streams: Streams | None = None
) -> TimingResult:
    """Return the time of ``program`` by the appropriate method; ``result.method`` names it.

    Spans of ``trace_groups`` are stored unless the program is so long that it is not simulated operation by operation.
    """
    streams = streams or Streams(program, device)
    if streams.scalar_waits:
        return des.simulate(program, device, trace_groups=trace_groups, streams=streams)
    code = code_of(streams)
    classes = equal_groups(code)
    operations = operations_of(code, classes)
    if operations > FEW_OPERATIONS and len(classes.groups) > FEW_CLASSES:
        widest = WIDE if operations <= MANY_OPERATIONS else 1.0
        try:
            return mean_field.approximate(code, classes, widest)
        except ProgramError:
            pass  # blocks of the program cannot be distinguished or timed in part, or the band is too wide
    traced = trace_groups if operations <= FEW_OPERATIONS else ()
    is_periodic = operations > SHORT_OPERATIONS or len(classes.groups) <= FEW_CLASSES
    return Run(code, classes, traced, periodic=is_periodic).result("steady")
