"""``npusim help``: the guides in ``npusim/docs``, on the terminal."""

import re
from importlib.resources import files
from typing import Annotated

import typer

from npusim.cli import options as o
from npusim.cli.help import Verbs
from npusim.errors import SpecError

app = Verbs()

#: What a guide says to its test: the name of a file that a block is.
_MARK = re.compile(r"^<!--.*?-->\n", re.MULTILINE)

Topic = Annotated[str | None, o.argument("[TOPIC]", "A guide; without one, all are listed.")]


def guides() -> dict[str, str]:
    """Return the guides' Markdown by topic."""
    folder = files("npusim") / "docs"
    found = sorted((p.name.removesuffix(".md"), p) for p in folder.iterdir() if p.name.endswith(".md"))
    return {name: path.read_text(encoding="utf-8") for name, path in found}


@app.verb("help", ("npusim help", "which guides there are"), ("npusim help tile", "how to choose a tile"))
def show_guide(topic: Topic = None) -> None:
    """Show a guide: choose a tile, compare schedules, guard cycles in CI, read a trace and more."""
    known = guides()
    if topic is None:
        width = max(map(len, known))
        titles = {name: text.splitlines()[0].lstrip("# ") for name, text in known.items()}
        lines = [f"  npusim help {name:<{width}}   {title}" for name, title in titles.items()]
        typer.echo("\n".join(["Guides:", *lines, "", "Options of a verb: npusim VERB --help"]))
        return
    if topic not in known:
        from npusim.config.messages import suggest

        raise SpecError(f"help {topic}: there are {', '.join(known)}{suggest(topic, tuple(known))}")
    typer.echo(_MARK.sub("", known[topic]), nl=False)
