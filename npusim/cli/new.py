"""``npusim new``: files of one's own to begin with."""

from pathlib import Path
from typing import Annotated

import typer

from npusim.cli import options as o
from npusim.cli.console import say, show_json
from npusim.cli.help import Command, Group, examples

__all__ = ["app"]

SCHEMA_VERSION = 1

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Write a file of your own to begin with.",
    epilog=examples(
        ("npusim new schedule mine", "mine.py: FlashAttention-2, to be changed"),
        ("npusim run mine.py:mine", "runs as it is"),
    ),
)


@app.callback()
def root() -> None:
    """Keep ``schedule`` a verb of its own, the only one so far."""


@app.command(
    "schedule", cls=Command, epilog=examples(("npusim new schedule mine", "then: npusim run mine.py:mine"))
)
def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the schedule: a Python name.")],
    json: o.Json = False,
) -> None:
    """Write NAME.py here: a schedule that runs as it is, its softmax written out to be changed."""
    from npusim.schedules.template import new_schedule

    path = new_schedule(name, Path())
    if json:
        show_json({"schema_version": SCHEMA_VERSION, "kind": "npusim.new", "file": str(path)})
    else:
        say(f"wrote {path}; next: npusim run {path}:{name}")
