"""One representative for each class of core groups that run the same blocks: exact.

Groups of one class do the same at the same tick, so that one of them tells all: its transfers weigh
as much on the links as those of the whole class (``npusim.timing.link``).  160 equal blocks on 24
groups are two classes: sixteen groups with seven blocks, eight with six.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from npusim.ir.content import uncollected
from npusim.timing.block_code import code_of
from npusim.timing.block_run import Run
from npusim.timing.stream import Streams

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from npusim.config.device import DeviceSpec
    from npusim.ir.program import ProgramPhase, TileProgram
    from npusim.timing.block_code import Code
    from npusim.timing.result import TimingResult


def simulate(
    program: TileProgram, device: DeviceSpec, *, trace_groups: Collection[int] = (), streams: Streams | None = None
) -> TimingResult:
    """Return the time of ``program``, simulating one core group of each class.

    Groups of one class share their :class:`~npusim.timing.result.QueueUse`, which carry the number
    of the class's first group.
    """
    code = code_of(streams or Streams(program, device))
    return Run(code, equal_groups(code), trace_groups).result("fold")


@dataclass(frozen=True, slots=True)
class Classes:
    """Core groups by class, and each phase's blocks of each class, as numbers of :class:`Code`.

    The class with the most blocks comes first.
    """

    groups: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[tuple[int, ...], ...], ...]

    def every_block(self) -> Iterator[int]:
        """Yield the blocks of one core group of each class."""
        for phase in self.blocks:
            yield from chain(*phase)

    def one_by_one(self) -> Classes:
        """Return the same core groups, each as a class of its own."""
        member = {g: i for i, groups in enumerate(self.groups) for g in groups}
        order = sorted(member)
        phases = (tuple(phase[member[g]] for g in order) for phase in self.blocks)
        return Classes(tuple((g,) for g in order), tuple(phases))


@uncollected()
def equal_groups(code: Code) -> Classes:
    """Return the core groups that run the same blocks in every phase, together."""
    if code.classes is None:
        phases = [blocks_by_group(code, phase) for phase in code.streams.program.phases]
        code.classes = fold_groups(list(zip(*phases, strict=True)))
    return code.classes


def fold_groups(groups: Sequence[tuple[tuple[int, ...], ...]]) -> Classes:
    """Return core groups by class; each is given by its blocks, phase by phase."""
    found: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for group, runs in enumerate(groups):
        found.setdefault(runs, []).append(group)
    ordered = sorted(found, key=lambda runs: -sum(len(r) for r in runs))
    return Classes(tuple(tuple(found[runs]) for runs in ordered), tuple(zip(*ordered, strict=True)))


def blocks_by_group(code: Code, phase: ProgramPhase, groups: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    """Return the blocks of a phase that each of these core groups has, by number; of all groups by default."""
    streams, known = code.streams, dict[Any, int]()
    count = streams.device.group_count.value

    def number(block: Any) -> int:
        shape = phase.shape(block)
        found = known.get(shape)
        if found is None:
            template = streams.templates.of(phase, block)
            found = known[shape] = code.block(streams.timed(template, None))
        return found

    chosen = range(count) if groups is None else groups
    return [tuple(map(number, phase.blocks_of_group(group, count))) for group in chosen]
