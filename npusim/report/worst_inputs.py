"""The result of a search for the worst inputs, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, fields
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.report import charts
from npusim.report.charts import Figure
from npusim.report.text import (
    Block,
    Cell,
    Column,
    Columns,
    Facts,
    Heading,
    cells,
    document,
    help_on,
    keyed,
    percent,
    whole,
)
from npusim.studies.stress.aspects import words
from npusim.studies.stress.scores import LOWEST
from npusim.studies.stress.worst_search import FACTOR, GROWN, SHRUNK, STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.report.text import Fact
    from npusim.studies.stress import Stress
    from npusim.studies.stress.worst_search import PointError

LEDGER = Columns(
    Column("step", "step", style="label", key="step"),
    Column("format", "fmt", key="fmt"),
    Column("values", "values", whole, ">", key="values"),
    Column("saturated", "saturated", whole, ">", key="saturated"),
    Column("to 0", "flushed", whole, ">", key="flushed"),
    Column("to Inf or NaN", "overflowed", whole, ">", key="overflowed"),
)
#: Numbers of sufficient choices and of steps that a table shows; JSON has them all.
SHOWN = 8
#: Number of inputs that a chart shows, and the smallest share of scores that a bar at an end of their histogram has.
DRAWN, LEAST_SHARE = 12, 5e-4


def error_columns(calm: PointError) -> Columns:
    """Return the columns of tested inputs: tables have their aspects in words, and mark calm inputs."""
    return Columns(
        Column(
            "input",
            lambda error: "calm inputs" if error is calm else words(error.point),
            key="point",
            json=attrgetter("point"),
        ),
        Column("relative RMSE", "rmse", ".2e", ">", key="rmse"),
        *keyed("is_beyond"),
    )


def stress_document(stress: Stress, command: str, required: dict[str, bool]) -> dict[str, object]:
    """Return the result as JSON data; ``command`` runs the worst input."""
    errors = error_columns(stress.calm)
    parts = {f.name: getattr(stress, f.name) for f in fields(stress) if f.name != "inputs"}
    for name in ("worst", "calm"):
        parts[name] = errors.record(parts[name])
    parts["scores"] = None if stress.scores is None else asdict(stress.scores)
    for name in ("outcomes", "beyond"):
        parts[name] = errors.records(parts[name])
    parts["ledger"] = LEDGER.records(stress.ledger)
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
    if stress.at_bound:
        names = ", ".join(stress.at_bound)
        yield "bound", cells(f"the worst input is at the bound of {names}", "--over NAME=LOW:HIGH sets other bounds")
    cut = "" if stress.is_whole else "; the budget ended the search"
    beyond = f", {len(stress.beyond)} more beyond the default bounds" if stress.beyond else ""
    yield "tried", cells(f"{len(stress.outcomes)} inputs{beyond}{cut}")
    if not is_held:
        adds_up = f"roundings accumulate, except with {stress.rounding}"
        cause = (
            adds_up
            if stress.rounding
            else ("either the algorithm computes a different function, or roundings accumulate")
        )
        yield "first step", cells(stress.first or f"no single step causes it: {cause}")
    masses = ("became 0", stress.lost_mass), ("saturated", stress.clipped_mass)
    if any(share for _, share in masses):
        yield "mass of P", cells(*(f"{percent(share)} {what}" for what, share in masses if share))
    yield "margin", cells(_margin(stress.margin))
    if not is_held:
        named = [f"{name}: error {error:.2g}" for name, error in stress.choices.items()]
        does = any(error <= stress.limit for error in stress.choices.values())
        yield "holds with" if does else "nearest", cells(*(named[:SHOWN] or ["none of the tested choices"]))
    yield "more", cells(help_on(stress.verdict), style="dim")


def _margin(times: float | None) -> str:
    """Return, in words, the factor by which the base's inputs may be larger."""
    if times is None:
        return "the search did not find it within --budget"
    if times > 1:
        return f"inputs may be {times:g} times as large{', the largest factor tried' if times == 2**GROWN else ''}"
    if times == 1:
        return "inputs of the base meet the limit, but inputs twice as large do not"
    smaller = (
        f"inputs divided by {1 / times:g} meet the limit"
        if times
        else (f"inputs divided by {2**SHRUNK} do not meet it either")
    )
    return f"inputs of the base do not meet the limit; {smaller}"


#: Sentences for the verdicts of a search.
SAID = MappingProxyType(
    {
        "holds": "The output is accurate on all tested inputs.",
        "loses": "The output is inaccurate on some inputs.",
        "not finite": "On some inputs the output is not finite.",
    }
)


def errors_figure(stress: Stress) -> Figure:
    """Return the errors of calm inputs and of the worst inputs that were tested, with the limit of the error."""
    ranked = sorted(stress.outcomes, key=lambda o: o.badness, reverse=True)
    drawn = [error for error in (stress.calm, *ranked) if error.rmse][:DRAWN]
    table = error_columns(stress.calm)
    rows = [{"name": table.texts(error)[0], "value": error.rmse} for error in drawn]
    lost = sum(o.rmse is None for o in stress.outcomes)
    text = f"{SAID[stress.verdict]} The dashed line is the limit of the error, {stress.limit:.2g}."
    text += f" {lost} of {len(stress.outcomes)} inputs gave an output that is not finite." if lost else ""
    title = f"{stress.schedule} on {stress.device}, {stress.precision}: the largest errors"
    return Figure("errors", title, text, charts.errors(rows, stress.limit) if rows else None, table.grid(drawn))


def scores_figure(stress: Stress) -> Figure | None:
    """Return the sizes of QK^T and of the stored scores on the worst input; None for a schedule without scores."""
    if (scores := stress.scores) is None:
        return None
    lost = f", {percent(scores.lost)} not finite" if scores.lost > 1e-9 else ""
    stored = f"as {stress.schedule} stores them in {scores.fmt}{lost}"
    shares = {"QK^T in float64": scores.exact, stored: scores.stored}
    filled = [at for each in shares.values() for at, share in enumerate(each) if share >= LEAST_SHARE] or [0]
    rows = [
        {"name": name, "low": 2.0 ** (LOWEST + at), "high": 2.0 ** (LOWEST + at + 1), "share": share}
        for name, each in shares.items()
        for at, share in enumerate(each)
        if min(filled) <= at <= max(filled)
    ]
    text = "Each bar counts the scores from one power of two to the next; "
    text += f"the dashed line is the largest number in {scores.fmt}."
    title = f"Scores of {stress.schedule} on the worst input ({words(stress.worst.point)})"
    spec = charts.sizes(rows, scores.largest, scores.fmt)
    table = Columns(
        Column("scores", "name"),
        Column("from", "low", "g", ">"),
        Column("to", "high", "g", ">"),
        Column("share", "share", percent, ">"),
    )
    return Figure("scores", title, text, spec, table.grid(rows))
