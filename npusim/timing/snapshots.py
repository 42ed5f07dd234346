"""Room for what a simulation that skips remembers of its past."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from npusim.timing.block_machine import Ints


class Snapshots(NamedTuple):
    """The latest snapshots of each level of loops; slot ``level * kept + n``."""

    words: Ints  #: (slots, words)
    length: Ints
    digest: Ints
    moment: Ints
    totals: Ints  #: (slots, totals), as ``note_totals`` writes them
    taken: Ints  #: of each level, ever
    scratch: Ints  #: (history,)
    engine_floor: Ints
    issue_floor: Ints
    counts: Ints  #: (2,): jumps, cycles skipped
