"""``npusim new``: files to start from."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from npusim.cli.console import say
from npusim.cli.help import Command, Group, examples
from npusim.errors import SpecError

__all__ = ["app"]

app = typer.Typer(
    cls=Group, no_args_is_help=True, help="Files to start from: a schedule of your own.",
    epilog=examples(("npusim new schedule mine", "mine.py, which npusim run mine.py:MINE takes as it is")),
)  # fmt: skip

Name = Annotated[str, typer.Argument(metavar="NAME", help="What it is to be called; the file is NAME.py.")]


@app.callback()
def root() -> None:
    """Write a file to start from."""


@app.command(
    cls=Command, epilog=examples(("npusim new schedule mine", "then: npusim run mine.py:MINE --seq 1024"))
)
def schedule(name: Name) -> None:
    """Write NAME.py: a schedule that runs as it is, to be changed."""
    from npusim.schedules import SCHEDULES

    if not name.isidentifier():
        raise SpecError(f"{name!r} is no name for a schedule; use letters, digits and _, not a digit first")
    if any(n == name for n, _ in SCHEDULES):
        raise SpecError(f"{name!r} is a schedule of npusim's own; choose another name")
    path = Path(f"{name}.py")
    if path.exists():
        raise SpecError(f"{path}: is there already, and would be lost; choose another name or move it away")
    text = (files("npusim.cli") / "new_schedule.txt").read_text(encoding="utf-8")
    for mark, value in (("@NAME@", name), ("@FILE@", str(path)), ("@CONSTANT@", name.upper())):
        text = text.replace(mark, value)
    path.write_text(text, encoding="utf-8")
    say(f"wrote {path}; run it: npusim run {path}:{name.upper()} --seq 1024")
