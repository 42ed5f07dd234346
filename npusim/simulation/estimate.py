"""How long a run itself will take on this machine, estimated before it starts.

Rough (within a factor of three on the machine of 2026 they were taken on, one core): it tells a minute
from an hour, so that nobody waits for a night by a slip in a length.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.config.problem import Problem
from npusim.errors import SpecError
from npusim.numerics.evaluate import chosen, chosen_heads
from npusim.units import ceil_div, format_duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.config.problem import AnyProblem
    from npusim.config.tiling import Tiling
    from npusim.numerics.evaluate import Choice

__all__ = ["estimate", "refuse_beyond"]

#: Measured: seconds of bits for a pair of query and key with head sizes of 128 (0.1 to 0.65 us by schedule).
PAIR_S = 0.4e-6
#: Seconds to build, check and time a block by a method that folds what is equal.
BLOCK_S = 60e-6
#: Seconds of an operation by the methods that go through all of them one by one.
OPERATION_S = MappingProxyType({"des": 25e-6, "block": 1e-6})
#: Operations of a tile of queries by keys, both matrix products and what is between them.
TILE_OPERATIONS = 60
_TILE = 128


def estimate(
    problem: AnyProblem, tiling: Tiling, method: str, bits: tuple[Choice, Choice] | None
) -> Mapping[str, float]:
    """Return seconds by what they are spent on: ``program``, ``time``, ``bits``.

    ``bits`` are the rows and heads whose bits are computed, or None.  Products and copies take no time
    worth an estimate: nothing is returned.
    """
    if not isinstance(problem, Problem):
        return {}
    sizes = {name: getattr(tiling, name, None) for name in ("block_q", "block_kv", "block")}
    rows = int(sizes["block_q"] or sizes["block"] or _TILE)
    keys = int(sizes["block_kv"] or sizes["block"] or _TILE)
    heads = problem.batch * problem.heads
    blocks = heads * ceil_div(problem.seq_q, rows)
    tiles = heads * problem.attended_pairs() / (rows * keys)
    seconds = {"program": blocks * BLOCK_S}
    seconds["time"] = OPERATION_S.get(method, 0.0) * TILE_OPERATIONS * max(tiles, blocks)
    if bits is not None:
        seconds["bits"] = _pairs(problem, rows, *bits) * PAIR_S * (_sizes(problem) + 1) / 2
    return seconds


def refuse_beyond(limit_s: float | None, seconds: Mapping[str, float]) -> None:
    """Raise `SpecError` with the estimate and what would take less, if it is longer than ``limit_s``."""
    total = sum(seconds.values())
    if limit_s is None or total <= limit_s:
        return
    most = max(seconds, key=lambda part: seconds[part])
    less = {
        "program": "fewer or shorter sequences (--batch, --seq)",
        "time": "--method auto",
        "bits": "--rows sample, --heads, or --no-numerics",
    }[most]
    spent = {"program": "building the program", "time": "its time", "bits": "its bits"}[most]
    raise SpecError(
        f"this run would take about {format_duration(total)} (an estimate; {spent} "
        f"{seconds[most] / total * 100:.0f} % of it), more than {format_duration(limit_s)}; less: {less}; "
        "--force runs it all the same"
    )


def _sizes(problem: Problem) -> float:
    """Return the head sizes relative to twice 128."""
    return (problem.head_dim + problem.value_head_dim) / 256


def _pairs(problem: Problem, block: int, rows: Choice, heads: Choice) -> float:
    """Return how many pairs of query and key the chosen rows (their whole blocks) and heads have."""
    count = len(chosen_heads(problem, heads)) * problem.batch
    which = chosen("rows", rows, problem.seq_q)
    if which == "all":
        return count * problem.attended_pairs()
    blocks = {problem.seq_q - 1} if which == "sample" else {row // block for row in which}
    return count * len(blocks) * min(block, problem.seq_q) * problem.seq_kv
