"""What a search for the worst inputs says, as a table and as JSON."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

from npusim.report.text import Block, Cell, Column, Columns, Facts, Heading, Style, cells, document, percent, whole
from npusim.stress.inputs import words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from npusim.report.text import Fact
    from npusim.stress import Outcome, Stress

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


def _outcome(outcome: Outcome | None) -> dict[str, object] | None:
    return None if outcome is None else {"point": dict(outcome.point), "rmse": outcome.rmse}


def stress_document(stress: Stress, file: Path | None, require: str = "") -> dict[str, object]:
    """Return the result as JSON data; ``file``: where the worst input is."""
    return document(
        "stress",
        **{n: getattr(stress, n) for n in ("name", "schedule", "device", "precision", "seed", "verdict", "first")},
        **{n: getattr(stress, n) for n in ("limit", "lost_mass", "clipped_mass", "margin", "is_whole")},
        **{n: _outcome(getattr(stress, n)) for n in ("worst", "calm", "edge")},
        ledger=[asdict(entry) for entry in stress.ledger],
        choices=[asdict(choice) for choice in stress.choices],
        outcomes=[_outcome(outcome) for outcome in stress.outcomes],
        input=None if file is None else str(file),
        command=None if file is None else shlex.join((*stress.command, str(file))),
        required={require: stress.requirement_met(require)} if require else {},
    )


def stress_table(stress: Stress, file: Path | None) -> tuple[Block, ...]:
    """Return the table that ``npusim stress`` prints."""
    steps = stress.ledger[:SHOWN]
    return (
        Heading(f"{stress.schedule} on {stress.device}", f"precision {stress.precision}, seed {stress.seed}"),
        Facts(tuple(_facts(stress, file))),
        *([LEDGER.grid(steps)] if steps else []),
    )


def _facts(stress: Stress, file: Path | None) -> Iterator[Fact]:
    style: Style = "good" if stress.verdict == "holds" else "bad"
    yield "verdict", (Cell(stress.verdict, style),)
    yield "worst", cells(f"{stress.worst}", f"allowed {stress.limit:.2g}, twice that of calm inputs")
    tried = f"{len(stress.outcomes)} inputs"
    yield "tried", cells(tried if stress.is_whole else f"{tried}; the budget ended before all that were meant to be")
    if stress.verdict != "holds":
        at = stress.first or "no step by itself: the algorithm gives something else, or roundings add up"
        yield "first step", cells(at)
    if stress.edge is not None:
        yield "breaks from", cells(f"{words(stress.edge.point)} on")
    margin = "not even inputs a 16th as large hold"
    if stress.margin is not None:
        margin = "no larger inputs hold" if stress.margin == 1 else f"inputs may be {stress.margin:g} times as large"
    yield "margin", cells(margin)
    masses = ("became 0", stress.lost_mass), ("was cut by saturation", stress.clipped_mass)
    if any(share for _, share in masses):
        yield "mass of P", cells(*(f"{percent(share)} {what}" for what, share in masses if share))
    if stress.verdict != "holds":
        named = [f"{c.name}: error {c.rmse:.2g}" for c in stress.choices if c.rmse is not None]
        is_held = any(c.holds for c in stress.choices)
        none = "none of the choices that were tried"
        yield ("holds with" if is_held else "nearest"), cells(*(named[:SHOWN] or [none]))
    if file is not None:
        yield "input", (Cell(str(file)), Cell(shlex.join((*stress.command, str(file))), "dim", whole=True))
