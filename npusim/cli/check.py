"""``npusim check``: exact cycles against accepted baselines."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from npusim.cli import options as o
from npusim.cli.console import progress, show, show_json
from npusim.cli.help import Command, examples
from npusim.errors import CheckFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.baseline import CaseOutcome

__all__ = ["add_to"]

SCHEMA_VERSION = 1


def add_to(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command(
        "check",
        cls=Command,
        epilog="\n".join(
            (
                examples(
                    ("npusim check baselines/", "exit code 1 if any cycle moved"),
                    ("npusim check baselines/ --update", "accept the cycles of today"),
                ),
                "",
                "A new baseline is a file such as this one, and then --update:",
                "  schema: npusim.baseline/1",
                "  schedule: flash",
                "  hw: ascend_910b2",
                "  workload: pangu_38b",
                "  seq: 1024",
                "  tiling: {block_kv: 256}",
            )
        ),
    )(check)


def check(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of baselines (*.yaml), or one.")
    ],
    update: Annotated[
        bool,
        typer.Option("--update", show_default=False, help="Write today's cycles into the files."),
    ] = False,
    json: o.Json = False,
) -> None:
    """Hold cycles against accepted ones, exactly, by pipe.

    Exit code 1 if any differ. --update is refused where the environment variable CI is set.
    """
    from npusim.baseline import check_baselines

    done: list[CaseOutcome] = []
    with progress("checking") as advance:

        def on_case(outcome: "CaseOutcome", total: int) -> None:
            done.append(outcome)
            advance(len(done), total)

        outcomes = check_baselines(folder, update=update, on_case=on_case)
    if json:
        show_json(_document(outcomes))
    else:
        _show(outcomes)
    failed = sum(not outcome.passed for outcome in outcomes)
    if failed:
        hint = f"; accept with: npusim check {folder} --update" if _can_accept(outcomes) else ""
        raise CheckFailedError(f"{failed} of {len(outcomes)} baselines not met{hint}")


def _can_accept(outcomes: "Sequence[CaseOutcome]") -> bool:
    return any(outcome.status in ("changed", "new") for outcome in outcomes)


def _show(outcomes: "Sequence[CaseOutcome]") -> None:
    from npusim.report.text import Cell, Grid, percent, whole

    rows: list[tuple[Cell, ...]] = []
    for outcome in outcomes:
        old, new = outcome.old_cycles, outcome.new_cycles
        style = "good" if outcome.passed else "bad"
        change = (
            f"{(new - old) / old * 100:+.2f} %" if old and new is not None and new != old else ""
        )
        rows.append(
            (
                Cell(outcome.name),
                Cell("-" if old is None else whole(old)),
                Cell("-" if new is None else whole(new)),
                Cell(change),
                Cell(outcome.status, style),  # type: ignore[arg-type]
                Cell(outcome.method + (f" ±{percent(outcome.band)}" if outcome.band else "")),
                Cell(_why(outcome)),
            )
        )
    show(
        [
            Grid(
                ("baseline", "old cycles", "new cycles", "change", "", "method", "moved"),
                "<>>><<<",
                tuple(rows),
            )
        ]
    )


def _why(outcome: "CaseOutcome") -> str:
    if outcome.reason:
        return " ".join(outcome.reason.split())
    moved = sorted(outcome.moved.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    parts = [f"{pipe} {new - old:+,}" for pipe, (old, new) in moved]
    if outcome.status in ("changed", "updated") and outcome.old_cycles is not None and not parts:
        parts.append("waiting only, no pipe's busy cycles")
    if outcome.ignored:
        parts.append(f"(without {', '.join(outcome.ignored)})")
    if outcome.device_changed:
        parts.append("(the device file changed)")
    return ", ".join(parts)


def _document(outcomes: "Sequence[CaseOutcome]") -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "npusim.check",
        "cases": [
            {
                "name": outcome.name,
                "file": str(outcome.path),
                "status": outcome.status,
                "passed": outcome.passed,
                "old_cycles": outcome.old_cycles,
                "new_cycles": outcome.new_cycles,
                "moved": {p: {"old": a, "new": b} for p, (a, b) in outcome.moved.items()},
                "device_changed": outcome.device_changed,
                "method": outcome.method,
                "band": outcome.band,
                "ignored": list(outcome.ignored),
                "reason": outcome.reason,
            }
            for outcome in outcomes
        ],
        "passed": all(outcome.passed for outcome in outcomes),
    }
