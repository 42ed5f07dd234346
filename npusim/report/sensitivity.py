"""Which doubtful constants a predicted latency hangs on, as a table and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.report.text import Block, Cell, Grid

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npusim.simulation.sensitivity import Sensitivity


def sensitivity_document(found: Iterable[Sensitivity]) -> list[dict[str, object]]:
    """Return one entry a constant, the strongest first."""
    return [
        {"key": s.key, "value": s.value, "basis": s.basis, "minus_20_percent": s.lower, "plus_20_percent": s.higher}
        for s in found
    ]


def sensitivity_table(found: Iterable[Sensitivity]) -> tuple[Block, ...]:
    """Return the change of latency with each constant a fifth lower and a fifth higher."""
    rows = tuple(
        (
            Cell(s.key),
            Cell(f"{s.value:g}"),
            Cell(s.basis),
            Cell(f"{s.lower * 100:+.1f} %"),
            Cell(f"{s.higher * 100:+.1f} %"),
        )
        for s in found
    )
    return (Grid(("constant", "value", "basis", "-20 %", "+20 %"), "<><>>", rows),)
