"""``npusim explore``: the fastest tiling of a grid."""

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from npusim.cli import options as o
from npusim.cli.console import progress, say, show, show_json
from npusim.cli.help import Command, examples
from npusim.errors import TilingError
from npusim.request import Request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npusim.explore.store import Outcome
    from npusim.report.text import Cell

__all__ = ["add_to"]

SCHEMA_VERSION = 1
#: Reasons of infeasible points that are shown, the commonest first.
_SHOWN_REASONS = 3

Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--field", "-f", metavar="FIELD=VALUES", rich_help_panel="How",
        help="Values to try: block_kv=128,256 or a range block_kv=128:1024:128; repeat for a grid.",
    ),
]  # fmt: skip
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", metavar="N", min=1, help="Processes.", show_default="all CPUs"),
]
CsvFile = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", metavar="FILE", show_default="runs/explore-<schedule>-<workload>-<keys>.csv",
        help="CSV file, one line as soon as each point is done.",
    ),
]  # fmt: skip
Studies = Annotated[
    bool, typer.Option("--studies", rich_help_panel="How", help="Rank times too that are those of no real kernel.")
]
Top = Annotated[int, typer.Option("--top", metavar="N", min=1, help="Points in the table.")]


def add_to(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command(
        "explore",
        cls=Command,
        epilog=examples(
            ("npusim explore flash --field block_kv=128,256,512", "three tiles"),
            (
                "npusim explore flash -f block_q=64,128 -f block_kv=128:1024:128 -j2",
                "a grid, two processes",
            ),
            ("npusim explore flash -f depth=1,2,3 -t block_kv=256 --seq 16384", "one field fixed"),
            ("npusim explore volta_flash -f acc_qk=float16,float32 -f block_kv=32,64", "a format, too"),
        ),
    )(explore)


@o.takes(
    "arithmetic", "tensors", "prefix", "layout", "rows", "heads", "seed", "numerics", "diagnose", "presets",
    "trace_groups", "window", own_first=True,
)  # fmt: skip
def explore(
    request: Request,
    *,
    fields: Fields = None,
    studies: Studies = False,
    jobs: Jobs = None,
    out: CsvFile = None,
    top: Top = 10,
    json: o.Json = False,
) -> None:
    """Run a schedule over a grid of tilings and rank them by time.

    Points that do not fit are kept, with the reason. Ctrl-C keeps what is done.
    """
    from npusim.explore.search import search
    from npusim.explore.space import parse_field

    name = request.schedule
    space = dict(parse_field(text) for text in fields or ())
    path = out or _default_csv(request)
    done: list[Outcome] = []
    interrupted, points = False, 0
    with progress(f"exploring {name}") as advance:

        def on_outcome(outcome: "Outcome", total: int) -> None:
            nonlocal points
            points = total
            done.append(outcome)
            advance(len(done), total)

        try:
            search(request, space, jobs or os.cpu_count() or 1, path, on_outcome, studies=studies)
        except KeyboardInterrupt:
            interrupted = True
    done.sort(key=lambda outcome: outcome.index)
    _print(name, list(space), done, points if not json else None, top, complete=not interrupted)
    say(f"wrote {path}")
    _fail(done, path, interrupted=interrupted)


def _print(
    name: str,
    fields: list[str],
    done: "list[Outcome]",
    total: int | None,
    top: int,
    *,
    complete: bool,
) -> None:
    """Print the ranking as a table, or as JSON where no total is given."""
    if total is None:
        show_json(_document(name, done, complete=complete))
    else:
        _show(name, fields, done, total=total, top=top)


def _fail(outcomes: "Sequence[Outcome]", path: Path, *, interrupted: bool) -> None:
    if interrupted:
        raise KeyboardInterrupt
    if not _ranked(outcomes):
        raise TilingError(f"no point fits; the reasons stand in {path}")


def _default_csv(request: Request) -> Path:
    load = request.load()
    keys = request.seq_kv or request.seq or load.seq_kv or load.seq
    return Path("runs") / "_".join(f"explore-{request.schedule}-{load.name}-{keys}.csv".split())


def _ranked(outcomes: "Sequence[Outcome]") -> "list[Outcome]":
    feasible = [outcome for outcome in outcomes if outcome.status == "ok"]
    return sorted(feasible, key=lambda outcome: (outcome.cycles or 0, outcome.index))


def _show(
    schedule: str, fields: list[str], outcomes: "Sequence[Outcome]", *, total: int, top: int
) -> None:
    from npusim.report.text import Block, Cell, Facts, Grid, Heading, cells, percent, whole

    ranked = _ranked(outcomes)
    misfits = len(outcomes) - len(ranked)
    count = f"{len(outcomes)} of {total} points" if len(outcomes) < total else f"{total} points"
    blocks: list[Block] = [
        Heading(f"{schedule}: {count}", f"{misfits} do not fit" if misfits else "")
    ]
    if ranked:
        best = ranked[0].cycles or 1
        rows = [
            (
                *cells(*(str(outcome.point[field]) for field in fields)),
                *cells(f"{outcome.latency_us:,.2f}", whole(outcome.cycles or 0)),
                Cell("best" if outcome.cycles == best else f"{_more(outcome, best):+.1f} %"),
                *cells(outcome.busiest, percent(outcome.busy_share or 0.0)),
                Cell(outcome.method + (f" ±{percent(outcome.band)}" if outcome.band else "")),
            )
            for outcome in ranked[:top]
        ]
        header = (*fields, "latency us", "cycles", "", "busiest", "busy", "method")
        blocks.append(Grid(header, ">" * len(fields) + ">>><><", tuple(rows)))
    ignored = next((outcome.ignored for outcome in ranked), "")
    if ignored:
        blocks.append(Facts((("ignored", (Cell(ignored, "warn"),)),)))
    if misfits:
        blocks.append(Facts((("do not fit", tuple(_reasons(outcomes))),)))
    show(blocks)


def _more(outcome: "Outcome", best: int) -> float:
    return ((outcome.cycles or 0) / best - 1) * 100


def _reasons(outcomes: "Sequence[Outcome]") -> "Iterator[Cell]":
    """Yield what stops points (text before the first colon), how often, and an example of each."""
    from npusim.report.text import Cell

    counts: Counter[str] = Counter()
    example: dict[str, Outcome] = {}
    for outcome in outcomes:
        if outcome.reason:
            what = outcome.reason.partition(":")[0]
            counts[what] += 1
            example.setdefault(what, outcome)
    for what, count in counts.most_common(_SHOWN_REASONS):
        first = example[what]
        at = " ".join(f"{field}={value}" for field, value in first.point.items())
        yield Cell(f"{count} x, first at {at}:", "warn")
        yield Cell(first.reason, "dim")
    if len(counts) > _SHOWN_REASONS:
        yield Cell(f"and {len(counts) - _SHOWN_REASONS} other causes, in the CSV file", "dim")


def _document(schedule: str, outcomes: "Sequence[Outcome]", *, complete: bool) -> dict[str, object]:
    ranked = _ranked(outcomes)

    def point(outcome: "Outcome") -> dict[str, object]:
        row = outcome.row()
        return {"tiling": outcome.point, **{k: v for k, v in row.items() if k not in outcome.point}}

    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "npusim.explore",
        "schedule": schedule,
        "complete": complete,
        "best": point(ranked[0]) if ranked else None,
        "points": [point(outcome) for outcome in outcomes],
    }
