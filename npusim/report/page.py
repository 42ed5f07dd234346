"""Pages on a run, on several runs and their differences, or on a search: each is one HTML file that needs neither a
network nor a server.

Charts are Vega-Lite specifications drawn in the browser by the library that vl-convert includes, in the colours of the
reader's theme; each has a table of its numbers.  Text from files (names, notes) is escaped by jinja2, and the page's
policy allows no scripts except its own two.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npusim import __version__, cache
from npusim.report.charts import PagePart, altair, with_starts
from npusim.report.comparison import Comparison, compare, comparison_part
from npusim.report.page_figures import load_figures
from npusim.report.result_json import REPORT_FILE, RESULT_FILE, RunRecord, load_result
from npusim.report.run_inputs import asked_text
from npusim.report.search_tables import about_of, exploration_part, rows_of
from npusim.report.tables import VERDICT, run_figures, run_table, run_tiles, verdict
from npusim.report.text import Facts, Heading
from npusim.sanitize import json_safe, visible

if TYPE_CHECKING:
    from npusim.report.advice import Trial

TEMPLATES = Path(__file__).with_name("template")
#: Suffixes of the files that a search writes.
TABLES = (".csv", ".sqlite")
#: Numbers within which a page must not break a line: ``4.00e-05``, and a number with its unit.
NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]\d+|(?:\.\.\d+)? (?:%|us|ms|GHz|[KMG]iB|TFLOP/s))")
#: Windows of a timeline that a page of several runs omits, to stay small.
LEFT_OUT = ("Prologue", "Epilogue")


def run_page(record: RunRecord, drawn: dict[str, Any] | None, trial: Trial | None = None) -> str:
    """Return the page of one run; ``drawn`` is the content of ``figures.json``."""
    title = f"{record.called} on {record.device.name} · npusim"
    return page_html(title, [run_part(record, drawn, trial)])


def run_part(record: RunRecord, drawn: dict[str, Any] | None, trial: Trial | None = None, prefix: str = "") -> PagePart:
    """Return the part of a page on one run; its pipes and links are separate figures."""
    table = run_table(record, trial, is_full=True)
    heading = next(b for b in table if isinstance(b, Heading))
    facts = [Facts(tuple(f for f in b.rows if f[0] != VERDICT)) for b in table if isinstance(b, Facts)]
    figures = tuple(run_figures(record, drawn, prefix))
    launch = (
        f"{record.schedule}; "
        if record.called not in record.schedule.split() and record.called != record.schedule
        else ""
    )
    subtitle = f"{launch}{heading.right}; {asked_text(record)}"
    return PagePart(
        f"{record.called} on {record.device.name}", subtitle, run_tiles(record), facts, figures, verdict(record).text
    )


def saved_page(runs: Sequence[Path]) -> str:
    """Return the page of run folders, of their ``result.json``, or of a search; raise `SpecError` for other files."""
    if len(runs) == 1 and runs[0].suffix in TABLES:
        part = exploration_part(runs[0].stem, rows_of(runs[0]), about_of(runs[0]))
        return page_html(f"{part.title} · npusim", [part])
    read = [(load_result(run), load_figures(_folder(run))) for run in runs]
    return run_page(*read[0]) if len(read) == 1 else comparison_page(compare(*runs), [drawn for _, drawn in read])


def comparison_page(comparison: Comparison, drawn: Sequence[dict[str, Any] | None] = ()) -> str:
    """Return the page of several runs: first their differences, then each run; ``drawn`` are their ``figures.json``, if
    known.
    """
    parts = [comparison_part(comparison)]
    figures_known = (*drawn, *(None for _ in comparison.sheets))
    for number, (sheet, figures) in enumerate(zip(comparison.sheets, figures_known, strict=False), start=1):
        if sheet.record is not None:
            fewer = figures and {**figures, "windows": [w for w in figures["windows"] if w["name"] not in LEFT_OUT]}
            part = run_part(sheet.record, fewer, prefix=f"run{number}-")
            parts.append(replace(part, title=sheet.label, is_folded=True))
    return page_html(f"{' and '.join(comparison.labels)} · npusim", parts)


def page_file(runs: Sequence[Path]) -> Path:
    """Return the default path of a page of runs."""
    if len(runs) == 1 and runs[0].suffix in TABLES:
        return runs[0].with_suffix(".html")
    return (_folder(runs[0]) if len(runs) == 1 else Path()) / REPORT_FILE


def _folder(run: Path) -> Path:
    return run.parent if run.name == RESULT_FILE else run


def theme(name: str) -> dict[str, Any]:
    """Return the look of charts, ``light`` or ``dark``, as Vega-Lite's ``config``."""
    looks = json.loads((TEMPLATES / "theme.json").read_text(encoding="utf-8"))
    look: dict[str, Any] = {
        key: dict(value) if isinstance(value, dict) else value for key, value in looks["common"].items()
    }
    for key, value in looks[name].items():
        look[key] = {**look.get(key, {}), **value}
    return look


def page_html(title: str, parts: Sequence[PagePart]) -> str:
    """Return a page as HTML; raise `NpusimError` if a library of the extra ``report`` is missing."""
    altair()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup, escape

    shown = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown.filters["visible"] = lambda text: visible(str(text))
    shown.filters["numbers"] = lambda text: Markup(NUMBER.sub(r'<span class="n">\g<0></span>', str(escape(text))))
    figures = [f for part in parts for f in part.figures if f.spec is not None]
    data = {
        "themes": {name: theme(name) for name in ("light", "dark")},
        "charts": {f.key: with_starts(f.spec) for f in figures},
    }
    draw = (TEMPLATES / "draw.js").read_text(encoding="utf-8")
    return shown.get_template("page.html").render(
        title=title,
        parts=parts,
        version=__version__,
        style=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        vega=_vega(),
        draw=draw,
        hashes=[_hash(_vega()), _hash(draw)],
        data=_inline(data),
        kind_of=lambda b: type(b).__name__,
    )


def _inline(data: object) -> str:
    """Return JSON that is safe inside HTML: it contains no beginning and no end of a tag."""
    return (
        json_safe(json.dumps(data, allow_nan=False))
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
    )


@functools.cache
def _vega() -> str:
    from importlib.metadata import version

    import vl_convert

    code = "window.vegaEmbed = vegaEmbed;"
    stamp = cache.digest(code, version("vl-convert-python"))
    if (library := cache.load("vega.js", stamp)) is None:
        # without the licence notices of its parts, which take seconds
        library = vl_convert.javascript_bundle(code).encode()
        cache.store("vega.js", stamp, library, is_silent=True)
    text = library.decode()
    notices = (TEMPLATES / "licences.txt").read_text(encoding="utf-8")
    return f"/*!\n{notices}*/\n{text}".replace("</script", "<\\/script")


def _hash(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
