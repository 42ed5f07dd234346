"""The first operations of a long program one by one, for its timeline.

Each core group runs only its first blocks of the last phase, and all blocks of the earlier phases.  This is exact until
the first queue that would continue has no operation left: a missing operation could not begin earlier, nor share a link
with the simulated ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from npusim.errors import SpecError
from npusim.program.timing.engine import Run
from npusim.program.timing.engine_arrays import SPANS
from npusim.program.timing.engine_code import Classes, code_of, equal_groups
from npusim.program.timing.mean_field import operations_of
from npusim.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from npusim.program.timing.stream import Streams
    from npusim.program.timing.timing_result import Span

__all__ = ["first_spans"]

#: Number of operations that are simulated for a timeline, in about 2 s.
MOST_OPERATIONS = 20_000_000
#: Number of operations of a core group on a timeline of unspecified length.
ENOUGH_SPANS = 2_000


def first_spans(
    streams: Streams, trace_groups: Collection[int], until: int | None = None
) -> tuple[tuple[Span, ...], int]:
    """Return the operations of some core groups at least up to cycle ``until``, and the cycle up to which they are
    complete.

    Without ``until`` it returns about two thousand operations, fewer or none if that would take too long; with
    ``until`` it raises `SpecError` in this case.
    """
    code, busy, run, known = code_of(streams), -1, None, 0
    for part, is_cut in _parts(equal_groups(code)):
        if operations_of(code, part) > MOST_OPERATIONS:
            if until is None:
                return run.spans(known) if run else (), known
            raise SpecError(
                f"window up to {format_duration(streams.device.seconds(until))}: more than {MOST_OPERATIONS:,} "
                "operations would be simulated one by one; choose an earlier window"
            )
        run = Run(code, part, trace_groups)
        result = run.result("fold", has_spans=False)
        known = _known(run, is_cut) if any(is_cut) else result.cycles
        # Blocks that are resident with the first one have separate queues, which may not have had work yet.
        busy, before = int((run.state.engine["done"] > run.done_before).sum()), busy
        ends = np.sort(run.state.span[: run.state.size[SPANS]]["end"])
        ends = ends[ends <= known]
        is_enough = len(ends) >= ENOUGH_SPANS if until is None else known >= until
        if until is None and is_enough:
            known = int(ends[ENOUGH_SPANS - 1])
        if (is_enough and busy == before) or not any(is_cut):
            return run.spans(known), known
    raise AssertionError("the last part is the whole")


def _parts(whole: Classes) -> Iterator[tuple[Classes, list[bool]]]:
    """Yield longer and longer beginnings of all core groups, last the complete run, and the groups that
    are shortened.
    """
    for phase, runs in enumerate(whole.blocks):
        longest = max(map(len, runs))
        for count in (*(1 << n for n in range((longest - 1).bit_length())), longest):
            is_cut = [len(blocks) > count for blocks in runs]
            if any(is_cut) or phase + 1 == len(whole.blocks):
                cut = tuple(blocks[:count] for blocks in runs)
                yield Classes(whole.groups, (*whole.blocks[:phase], cut)), is_cut


def _known(run: Run, is_cut: list[bool]) -> int:
    """Return the first cycle at which a queue of the groups that are shortened in the last phase has no
    operation left.
    """
    engine = run.state.engine
    worked = (engine["done"] > run.done_before).reshape(len(is_cut), -1)
    free = engine["free"].reshape(len(is_cut), -1)
    return min(int(free[m][worked[m]].min()) for m, cut in enumerate(is_cut) if cut)
