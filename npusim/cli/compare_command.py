"""``npusim compare`` and ``npusim report``: runs side by side, why one takes longer, and runs as pages."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from npusim.cli import options as o
from npusim.cli.console import in_percent, progress, show_either, show_json, show_markdown, write
from npusim.cli.help import Verbs
from npusim.errors import SpecError
from npusim.kernels.triton import is_launch
from npusim.report.charts import altair
from npusim.report.text import document
from npusim.simulation.request import BitsOptions, Request, refuse

if TYPE_CHECKING:
    from npusim.simulation.run_result import RunData

app = Verbs()

#: What of a launch of a kernel is not its name.
_LAUNCH = re.compile(r"\[.*\)", re.DOTALL)
#: Names that are files, whether or not they are there.
_FILES = (".json", ".csv", ".yaml")


@app.verb(
    "compare",
    ("npusim compare @2 @1", "the last two runs: changes and causes (of one schedule: flash@2 flash@1)"),
    ("npusim compare pasa flash two_level --seq 8192", "schedules, run on the spot"),
    ('npusim compare flash "flash -t depth=3"', "one schedule, with options of its own"),
    ("npusim compare runs/flash-a PipeUtilization.csv", "a prediction and a measurement"),
    ("npusim compare pasa flash --html page.html", "and a page to look at"),
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
            "Two or more: run folders (@1: the last, @2: the one before), result.json, a profiler's "
            "PipeUtilization.csv, or schedules to be run.",
        ),
    ],
    html: Annotated[
        Path | None, o.option("--html FILE", "Write a page too. Needs npusim[report].", shown=False)
    ] = None,
    json: o.Json = False,
    markdown: Annotated[bool, o.option("--markdown", "Print Markdown instead of a table.")] = False,
) -> None:
    """Explain the difference in latency between runs by parts that add up to it.

    The first run is the one that others are compared with. Options apply to schedules that this command runs.
    """
    from npusim.report.comparison import compare as compare_runs
    from npusim.report.comparison import comparison_document, comparison_table
    from npusim.report.output import check_file_writable
    from npusim.report.page import comparison_page

    if len(runs) < 2:
        raise SpecError(f"compare {' '.join(runs)}: compare needs two runs or more")
    if html is not None:
        altair()  # refuses before the work, not after it
        check_file_writable(html)
    refuse({"--markdown": (json and markdown) or None}, "--json prints JSON; leave one of them out")
    sources = [_source(word) for word in runs]
    if all(isinstance(source, Path) for source in sources):
        refuse(request.changed(), "stored runs are not run again; leave these options out")
    base = replace(request, trace_groups=(), presets=False)
    comparison = compare_runs(*_runs(runs, [s if isinstance(s, Path) else s.on(base) for s in sources]))
    if html is not None:
        write(html, comparison_page(comparison))
    if markdown:
        show_markdown(comparison_table(comparison))
    else:
        show_either(json, lambda: comparison_document(comparison), lambda: comparison_table(comparison))


def _source(word: str) -> "Path | o.Worded":
    """Return a word's file, or the schedule with its options that it stands for."""
    from npusim.report.output import kept_run

    is_schedule = is_launch(word) or word.endswith(".py")
    file = None if is_schedule else kept_run(word) or (Path(word) if _is_file(word) else None)
    return file or o.Worded.of(word)


def _runs(words: "Sequence[str]", sources: "Sequence[Path | Request]") -> "list[Path | RunData]":
    """Return files as paths, all else as results of runs, each named by its word.

    Everything is read before anything is run.
    """
    from npusim.report.result_json import load_result
    from npusim.simulation.simulate import run_request

    for word, source in zip(words, sources, strict=True):
        if isinstance(source, Path):
            if source.suffix != ".csv":
                load_result(source)
            continue
        try:
            source.find_schedule()
        except SpecError as error:
            raise SpecError(f"{word}: no run folder or result of that name, and as a schedule: {error}") from None
    results: list[Path | RunData] = []
    short = [_LAUNCH.sub("", word) for word in words]
    for word, source in zip(short if len(set(short)) == len(words) else words, sources, strict=True):
        if isinstance(source, Path):
            results.append(source)
            continue
        with progress(f"simulating {word}") as advance:
            results.append(replace(run_request(replace(source, progress=in_percent(advance))), name=word))
    return results


def _is_file(word: str) -> bool:
    """Return whether a word is a file or folder, rather than a schedule with its options."""
    if Path(word).exists():
        return True
    first, *options = o.words(word)
    if not options and word.endswith(_FILES):
        return True
    return ("/" in first or "\\" in first) and ":" not in first


@app.verb(
    "report",
    ("npusim report @1", "the last run: report.html in its folder"),
    ("npusim report runs/explore-flash.sqlite", "a search: the fastest point, the points that fit, the sensitivity"),
    ("npusim report runs/a runs/b runs/c -o three.html", "several runs and their differences"),
)
def report(
    runs: Annotated[list[str], o.argument("RUN...", "Run folders (@1: the last), or one store of explore.")],
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
