"""``npusim report``: the pages that hold the papers' numbers against ours."""

import os
from pathlib import Path
from typing import Annotated

import typer

from npusim.cli.console import say, working
from npusim.cli.help import Command, examples

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command(
        "report",
        cls=Command,
        epilog=examples(
            ("npusim report --all", "write every page anew, into reports/"),
            ("npusim report pcast_numerics --out /tmp/pages", "one page, elsewhere"),
        ),
    )(report)


def report(
    pages: Annotated[
        list[str] | None,
        typer.Argument(metavar="PAGE", help="Names of pages; without one, they are listed."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", show_default=False, help="All pages.")] = False,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of the pages.")
    ] = Path("reports"),
) -> None:
    """Write the report pages: what of the papers is reproduced, what is not, and why."""
    # Read when numpy loads.  The pages' products are small: threads would cost more than they save, and
    # the last bits of float64 references would depend on how many there are.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from npusim.report.pages import PAGES, write_pages

    names = list(PAGES) if every else list(pages or ())
    if not names:
        for name in PAGES:
            typer.echo(name)
        return
    for name in names:
        with working(f"writing {name}"):
            written = write_pages(out, [name])
        say(f"wrote {' '.join(str(path) for path in written)}")
