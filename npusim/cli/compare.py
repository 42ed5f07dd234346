"""``npusim compare``: two runs side by side."""

from pathlib import Path
from typing import Annotated

import typer

from npusim.cli import options as o
from npusim.cli.console import show, show_json
from npusim.cli.help import Command, examples

__all__ = ["add_to"]

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or its result.json.")]


def add_to(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command(
        "compare",
        cls=Command,
        epilog=examples(
            ("npusim compare runs/flash-a runs/flash-b", "old, new, change"),
            ("npusim compare a/result.json b/result.json --json", "the same for a script"),
        ),
    )(compare)


def compare(old: Run, new: Run, json: o.Json = False) -> None:
    """Show two runs side by side: inputs, time, pipes, numerics."""
    from npusim.report.compare import compare as compare_runs
    from npusim.report.compare import comparison_document, comparison_table

    found = compare_runs(old, new)
    if json:
        show_json(comparison_document(found))
    else:
        show(comparison_table(found))
