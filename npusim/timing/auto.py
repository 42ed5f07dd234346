"""Chooses how to find the time of a program, and says in the result what it chose.

Few operations, or few classes of equal core groups: exact (``steady``: folded, repetitions
skipped).  Many long programs that all differ: ``reserved``, after its difference to the exact
methods has been measured on a part of the program; where that is too large, exact all the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from npusim.errors import ProgramError
from npusim.timing.block_code import Code
from npusim.timing.block_run import Run
from npusim.timing.fold import Classes, equal_groups
from npusim.timing.reserved import FEW_CLASSES, Reserved, shortened
from npusim.timing.result import Approximation
from npusim.timing.steady import Skipping
from npusim.timing.stream import Streams

if TYPE_CHECKING:
    from collections.abc import Collection

    from npusim.ir.program import TileProgram
    from npusim.spec.device import DeviceSpec
    from npusim.timing.result import TimingResult

#: Operations of all classes that are simulated one by one in a few milliseconds.
FEW_OPERATIONS = 60_000
#: Operations of the part on which ``reserved`` is held against an exact method.
SAMPLE_OPERATIONS = 25_000
#: Difference beyond which ``reserved`` is not used (issue 5: at most 2 % are asked).
TOLERANCE = 0.02
#: Operations up to which spans are kept; a longer timeline takes ``fold`` or ``des`` by name.
TRACED_OPERATIONS = 2_000_000


def simulate(
    program: TileProgram,
    device: DeviceSpec,
    *,
    trace_groups: Collection[int] = (),
    streams: Streams | None = None,
) -> TimingResult:
    """Return the time of ``program`` by the method that suits it; ``result.method`` names it.

    Spans of ``trace_groups`` are kept unless the program is so long that it is not simulated
    operation by operation.
    """
    code = Code(streams or Streams(program, device))
    classes = equal_groups(code)
    operations = operations_of(code, classes)
    if trace_groups and operations <= TRACED_OPERATIONS:
        return Run(code, classes, trace_groups).result("fold")
    if operations > FEW_OPERATIONS and len(classes.groups) > FEW_CLASSES:
        found = approximate(code, classes)
        if found is not None:
            return found
    run = Run(code, classes)
    return run.result("steady", Skipping(run))


def operations_of(code: Code, classes: Classes) -> int:
    """Return how many operations one core group of each class runs, all phases together."""
    count = {block: code.operation_count(block) for block in set(classes.every_block())}
    return sum(count[block] for block in classes.every_block())


def approximate(code: Code, classes: Classes) -> TimingResult | None:
    """Return the result of ``reserved`` with its measured difference, or None where it does not serve.

    Core groups that go in step meet on the links all at once, not by chance: few classes in the
    sample, in which equal loops stay equal, tell them.
    """
    sample = shortened(code, classes, SAMPLE_OPERATIONS)
    if len(sample.groups) <= FEW_CLASSES:
        return None
    try:
        expected = Run(code, sample).result("fold")
        found = Reserved(code, sample).result()
        error = found.cycles / expected.cycles - 1
        if abs(error) > TOLERANCE:
            return None
        result = Reserved(code, classes).result()
    except ProgramError:
        return None
    return replace(result, approximation=Approximation(error, expected.operations))
