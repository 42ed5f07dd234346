"""``npusim report``: runs as one page to look at."""

from pathlib import Path
from typing import Annotated

from npusim.cli import options as o
from npusim.cli.console import say, working
from npusim.cli.help import Verbs

app = Verbs()

Runs = Annotated[list[Path], o.argument("RUN...", "Run folders, or one store of explore.")]
Out = Annotated[
    Path | None, o.option("--out -o FILE", shown="report.html in the folder of one run, beside a table, or here")
]


@app.verb(
    "report",
    ("npusim report runs/pasa-pangu_38b-4096", "one run: runs/pasa-pangu_38b-4096/report.html"),
    ("npusim report runs/explore-flash.sqlite", "a search: what is fastest, what fits, what moves it"),
    ("npusim report runs/a runs/b runs/c -o three.html", "several, and what lies between them"),
)
def report(runs: Runs, out: Out = None) -> None:
    """Write runs as one HTML file: time, timeline, roofline, buffers, errors, what the numbers rest on.

    It needs no network and no server; send it to anyone. Needs npusim[report].
    """
    check_reports()
    from npusim.report.output import check_file_writable, write_whole
    from npusim.report.reports import place_of, saved_page

    if out is not None:
        check_file_writable(out)
    with working("drawing"):
        page = saved_page(runs)
    file = place_of(runs) if out is None else out
    write_whole(file, page.encode())
    say(f"wrote {file}")


def check_reports() -> None:
    """Raise `NpusimError` before the work, not after it, where a library of reports is missing."""
    from npusim.report.charts import altair

    altair()
