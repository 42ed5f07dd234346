"""``npusim new``: files to start from."""

import ast
import keyword
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from npusim.cli import options as o
from npusim.cli.console import say, show_document
from npusim.cli.help import Verbs, examples
from npusim.errors import OutputError, SpecError, reason_of

app = Verbs(
    name="new",
    no_args_is_help=True,
    help="Files to start from: a schedule of your own.",
    epilog=examples(("npusim new schedule mine", "mine.py, which npusim run mine.py:mine takes as it is")),
)

Name = Annotated[str, o.argument("NAME", "What it is to be called; the file is NAME.py.")]


@app.callback()
def root() -> None:
    """Write a file to start from."""


@app.verb("schedule", ("npusim new schedule mine", "then: npusim run mine.py:mine --seq 1024"))
def schedule(name: Name, json: o.Json = False) -> None:
    """Write NAME.py: a schedule that runs as it is, its softmax written out to be changed."""
    text = (files("npusim.cli") / "new_schedule.txt").read_text(encoding="utf-8")
    _check_name(name, text)
    path = Path(f"{name}.py")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace("@NAME@", name))
    except FileExistsError:
        raise SpecError(f"{path}: is there already, and would be lost; choose another name or move it away") from None
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {reason_of(error, path)}") from None
    if json:
        show_document("new", file=str(path))
    else:
        say(f"wrote {path}; run it: npusim run {path}:{name} --seq 1024")


def _check_name(name: str, text: str) -> None:
    from npusim.schedules import SCHEDULES

    if not name.isidentifier() or keyword.iskeyword(name):
        raise SpecError(
            f"{name!r} is no name for a schedule; use letters, digits and _, not a digit first, no word of Python's own"
        )
    if any(known == name for known, _ in SCHEDULES):
        raise SpecError(f"{name!r} is a schedule of npusim's own; choose another name")
    if name in {n.id for n in ast.walk(ast.parse(text.replace("@NAME@", "_"))) if isinstance(n, ast.Name)} - {"_"}:
        raise SpecError(f"{name!r} means something else in the file; choose another name")
