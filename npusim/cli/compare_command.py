"""``npusim compare`` and ``npusim report``: the differences of runs and their causes, and pages of runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from npusim.cli import options as o
from npusim.cli.console import in_percent, progress, show_either, show_json, show_markdown, write
from npusim.cli.help import Verbs
from npusim.report.charts import altair
from npusim.report.text import document
from npusim.simulation.request import BitsOptions, Request, refuse

app = Verbs()


@app.verb(
    "compare",
    ("npusim compare @2 @1", "the last two runs, with causes (of one schedule: flash@2 flash@1)"),
    ("npusim compare pasa flash two_level --seq 8192", "schedules, which it runs"),
    ('npusim compare flash "flash -t depth=3"', "a schedule with its own options"),
    ("npusim compare runs/flash-a PipeUtilization.csv", "a prediction and a measurement"),
    ("npusim compare pasa flash --html page.html", "also a page to look at"),
    ("npusim compare a/result.json b/result.json --json", "the same for a script"),
    first="--workload --seq --hw --html --json",
)
@o.takes(BitsOptions, own_first=True, schedule=False)
def compare(
    request: Request,
    *,
    runs: Annotated[
        list[str],
        o.argument(
            "RUN...",
            "Two or more schedules or run folders (@1: the last run, @2: the run before it), result.json, or a "
            "profiler's PipeUtilization.csv.",
        ),
    ],
    html: Annotated[
        Path | None, o.option("--html FILE", "Also write a page. Needs npusim[report].", shown=False)
    ] = None,
    plot: o.Plot = None,
    json: o.Json = False,
    markdown: Annotated[bool, o.option("--markdown", "Print Markdown instead of a table.")] = False,
) -> None:
    """Explain the difference in latency between runs by parts that add up to it.

    The other runs are compared with the first. Options apply to schedules that this command runs.
    """
    from npusim.report.compared_runs import compared_runs
    from npusim.report.comparison import compare as compare_runs
    from npusim.report.comparison import comparison_document, comparison_part, comparison_table
    from npusim.report.output import check_file_writable
    from npusim.report.page import comparison_page
    from npusim.report.plot import picture

    if html is not None:
        altair()  # so that a refusal comes before the work
        check_file_writable(html)
    refuse({"--markdown": (json and markdown) or None}, "--json prints JSON; remove one of them")
    read = compared_runs(runs, lambda word: o.Worded.of(word).on(request), request.changed(), _watched)
    comparison = compare_runs(*read)
    if html is not None:
        write(html, comparison_page(comparison))
    if plot is not None:
        part = comparison_part(comparison)
        write(plot, picture(part.figures, plot.suffix, part.title, ("changes",)))
    if markdown:
        show_markdown(comparison_table(comparison))
    else:
        show_either(json, lambda: comparison_document(comparison), lambda: comparison_table(comparison))


@contextmanager
def _watched(word: str) -> Iterator[Callable[[float], None]]:
    """Yield the function that receives the progress of a word's run, which the terminal shows."""
    with progress(f"simulating {word}") as advance:
        yield in_percent(advance)


@app.verb(
    "report",
    ("npusim report @1", "the last run: report.html in its folder"),
    ("npusim report runs/explore-flash.sqlite", "a search: the fastest point, the points that fit, the sensitivity"),
    ("npusim report runs/a runs/b runs/c -o three.html", "several runs and their differences"),
)
def report(
    runs: Annotated[list[str], o.argument("RUN...", "Run folders (@1: the last run), or one result file of explore.")],
    out: Annotated[
        Path | None,
        o.option(
            "--out -o FILE",
            shown="report.html in the folder of the run, in the folder of a table, or in the current folder",
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Write runs as one HTML file: time, timeline, roofline, buffers, errors, and the basis of the numbers.

    It needs no network and no server; send it to anyone. Needs npusim[report].
    """
    from npusim.report.output import check_file_writable, kept_run
    from npusim.report.page import page_file, saved_page

    altair()
    if out is not None:
        check_file_writable(out)
    paths = [kept_run(word) or Path(word) for word in runs]
    with progress("drawing"):
        page = saved_page(paths)
    file = page_file(paths) if out is None else out
    write(file, page)
    if json:
        show_json(document("report", file=str(file), runs=[str(path) for path in paths]))
