"""How many keys a query sees, by what its problem says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npusim.config.problem import Problem


def visible_keys(problem: Problem, query: int) -> int:
    """Return how many keys query row ``query`` sees."""
    position = query + problem.causal_offset
    return sum(end - start for start, end in problem.seen.union(position, position))
