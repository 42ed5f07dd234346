"""The common interface of executors of a study's tasks: each yields ``(number of the task, result)`` as tasks end."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

from npusim.late_methods import dataclass

Argument = TypeVar("Argument")
Done = TypeVar("Done")
#: Number of workers that may end during one task before it is lost.
TRIES = 2


@dataclass(frozen=True, slots=True)
class Lost:
    """A task during which the worker ended each time."""

    reason: str


class Executor:
    """Evaluates one task after another in this process."""

    def run(
        self, function: Callable[[Argument], Done], tasks: Sequence[Argument], homes: Sequence[Sequence[Hashable]] = ()
    ) -> Iterator[tuple[int, Done | Lost]]:
        """Yield the number and the result of each task as it is done, in any order; errors of a task are raised.

        ``homes`` names, for each task, the groups of tasks with which it shares data, the narrowest first: a process
        reuses its data for the next task of a group.
        """
        del homes
        yield from enumerate(map(function, tasks))
