"""The paths through an expert program that are examined: those of the first two core groups and the last one, for all
answers to conditions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from npusim.kernels.tilelang.expert import Decisions, walk_program

if TYPE_CHECKING:
    from npusim.kernels.tilelang.expert import GroupWalk
    from npusim.kernels.tilelang.lengths import Growth
    from npusim.kernels.tilelang.program import Language, PrimFunc

#: Largest number of paths through conditions for a core group.
MOST_PATHS = 64


class PathWalk(NamedTuple):
    """A walk of a core group with the answers to conditions; ``number`` counts the walks of a group from 0.

    ``is_cut``: further paths of the group are not walked.
    """

    walk: GroupWalk
    answers: str
    number: int
    is_cut: bool

    @property
    def form(self) -> object:
        """Key that walks with the same instructions share; walks of another group may differ in the offsets
        of tensors.
        """
        return tuple((x.core, x.line, x.kind, x.flag, x.turn) for issued in self.walk.cores.values() for x in issued)


def walks_of(
    kernel: PrimFunc, language: Language, scalars: Mapping[str, object], growth: Growth | None = None
) -> Iterator[PathWalk]:
    """Yield the walks of a program; if the number of core groups grows, only the walks of groups 0 and 1."""
    groups = [0]
    for group in groups:  # this list grows once the first walk has shown how many groups there are
        decisions, is_more, number = Decisions(), True, 0
        while is_more and number < MOST_PATHS:
            walk = walk_program(kernel, language, group, decisions, scalars, growth=growth)
            answers, is_more = str(decisions), decisions.more()
            yield PathWalk(walk, answers, number, is_more and number + 1 == MOST_PATHS)
            number += 1
        if group == 0 and walk.groups > 1:
            groups += [1] if growth is not None and growth.has_grid else sorted({1, walk.groups - 1})
