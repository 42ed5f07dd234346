"""Results of a search in a CSV file, one line as soon as each point is done."""

from __future__ import annotations

import csv
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from npusim.errors import OutputError, reason_of
from npusim.foreign import csv_cell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from npusim.explore.space import Point

__all__ = ["Outcome", "csv_store"]

_FIGURES = (
    *("status", "cycles", "latency_us", "method", "band", "busiest", "busy_share", "ignored", "reason"),
)


@dataclass(frozen=True)
class Outcome:
    """What one point gave: its time, or the reason why it is infeasible.

    ``method`` says how the time was found; the exact cycles lie within ``1 - band`` to ``1 + band``
    times ``cycles``.  ``busiest`` is the pipe with the largest ``busy_share`` of the kernel in any core group;
    ``ignored`` what of the workload's attention was left out.
    """

    index: int
    point: Point
    status: Literal["ok", "infeasible"]
    cycles: int | None = None
    latency_us: float | None = None
    method: str = ""
    band: float | None = None
    busiest: str = ""
    busy_share: float | None = None
    ignored: str = ""
    reason: str = ""

    def row(self) -> dict[str, object]:
        """Return the outcome as columns: the fields, then the figures; None where there is none."""
        return {**self.point, **{name: getattr(self, name) for name in _FIGURES}}


@contextmanager
def csv_store(path: Path, fields: Sequence[str]) -> Iterator[Callable[[Outcome], None]]:
    """Yield a function that adds an outcome to the file and flushes it.

    The file is begun anew; what was added stays when the work is interrupted.  Raises `OutputError`
    if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*fields, *_FIGURES], lineterminator="\n")
            writer.writeheader()
            file.flush()

            def add(outcome: Outcome) -> None:
                writer.writerow({name: csv_cell(value) for name, value in outcome.row().items()})
                file.flush()

            yield add
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {reason_of(error, path)}") from None
