"""``npusim help``: the guides in ``npusim/docs``, on the terminal."""

import re
from importlib.resources import files
from typing import Annotated

import typer

from npusim.cli.help import Command, examples
from npusim.errors import SpecError

#: What a guide says to its test: the name of a file that a block is.
_MARK = re.compile(r"^<!--.*?-->\n", re.MULTILINE)

Topic = Annotated[
    str | None,
    typer.Argument(metavar="[TOPIC]", show_default=False, help="A guide; without one, all are listed."),
]


def add_to(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command(
        "help",
        cls=Command,
        epilog=examples(("npusim help", "which guides there are"), ("npusim help tile", "how to choose a tile")),
    )(show_guide)


def guides() -> dict[str, str]:
    """Return the guides' Markdown by topic."""
    folder = files("npusim") / "docs"
    found = sorted((p.name.removesuffix(".md"), p) for p in folder.iterdir() if p.name.endswith(".md"))
    return {name: path.read_text(encoding="utf-8") for name, path in found}


def show_guide(topic: Topic = None) -> None:
    """Show a guide: choose a tile, compare schedules, guard cycles in CI, read a trace and more."""
    known = guides()
    if topic is None:
        width = max(map(len, known))
        lines = [f"  npusim help {name:<{width}}   {_title(text)}" for name, text in known.items()]
        typer.echo("\n".join(["Guides:", *lines, "", "Options of a verb: npusim VERB --help"]))
        return
    if topic not in known:
        from npusim.config.messages import suggest

        raise SpecError(f"help {topic}: there are {', '.join(known)}{suggest(topic, tuple(known))}")
    typer.echo(_MARK.sub("", known[topic]), nl=False)


def _title(text: str) -> str:
    return text.partition("\n")[0].lstrip("# ")
