"""The result of a search for the worst inputs, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from npusim.report.text import Block, Cell, Column, Columns, Facts, Heading, cells, document, percent, whole
from npusim.stress.search import FACTOR, STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.report.text import Fact
    from npusim.stress import Stress

LEDGER = Columns(
    Column("step", "step", style="label"),
    Column("format", "fmt"),
    Column("values", "values", whole, ">"),
    Column("saturated", "saturated", whole, ">"),
    Column("to 0", "flushed", whole, ">"),
    Column("to Inf or NaN", "overflowed", whole, ">"),
)
#: Choices that hold, and steps, that a table shows; JSON has them all.
SHOWN = 8


def stress_document(stress: Stress, command: str, required: dict[str, bool]) -> dict[str, object]:
    """Return the result as JSON data; ``command`` runs the worst input."""
    parts = {f.name: getattr(stress, f.name) for f in fields(stress) if f.name != "inputs"}
    for name in ("worst", "calm"):
        parts[name] = asdict(parts[name])
    for name in ("ledger", "outcomes"):
        parts[name] = [asdict(one) for one in parts[name]]
    return document("stress", **parts, command=command, required=required)


def stress_table(stress: Stress, command: str) -> tuple[Block, ...]:
    """Return the table that ``npusim stress`` prints."""
    steps = stress.ledger[:SHOWN]
    return (
        Heading(f"{stress.schedule} on {stress.device}", f"precision {stress.precision}, seed {stress.seed}"),
        Facts((*_facts(stress), ("run it", (Cell(command, "dim", whole=True),)))),
        *([LEDGER.grid(steps)] if steps else []),
    )


def _facts(stress: Stress) -> Iterator[Fact]:
    is_held = stress.verdict == "holds"
    if stress.reading:
        yield "inputs", cells(stress.reading, style="warn")
    yield "verdict", cells(stress.verdict, style="good" if is_held else "bad")
    is_twice = stress.limit == FACTOR * stress.calm.badness
    of = "twice that of calm inputs" if is_twice else f"{STEPS:g} steps of the coarsest format"
    yield "worst", cells(f"{stress.worst}", f"allowed {stress.limit:.2g}, {of}")
    cut = "" if stress.is_whole else "; the budget ended the search"
    yield "tried", cells(f"{len(stress.outcomes)} inputs{cut}")
    if not is_held:
        none = "no single step: the algorithm computes another function, or roundings accumulate"
        yield "first step", cells(stress.first or none)
    masses = ("became 0", stress.lost_mass), ("saturated", stress.clipped_mass)
    if any(share for _, share in masses):
        yield "mass of P", cells(*(f"{percent(share)} {what}" for what, share in masses if share))
    larger = (
        f"inputs may be {stress.margin:g} times as large" if stress.margin else "not even inputs divided by 16 hold"
    )
    known = "no larger inputs hold" if stress.margin == 1 else larger
    yield "margin", cells("not known within --budget" if stress.margin is None else known)
    if not is_held:
        named = [f"{name}: error {error:.2g}" for name, error in stress.choices.items()]
        does = any(error <= stress.limit for error in stress.choices.values())
        yield "holds with" if does else "nearest", cells(*(named[:SHOWN] or ["none of the choices that were tried"]))
