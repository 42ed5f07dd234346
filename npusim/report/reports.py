"""Reports of runs as pages: of one, or of several with what lies between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npusim.report.compare import compare, comparison_part
from npusim.report.figures import load_figures
from npusim.report.inputs import asked_text
from npusim.report.page import PagePart, page_html
from npusim.report.result_json import RESULT_FILE, load_result
from npusim.report.search import exploration_part, rows_of
from npusim.report.tables import run_figures, run_table, run_tiles
from npusim.report.text import Facts, Heading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.report.advice import Trial
    from npusim.report.compare import Comparison
    from npusim.report.record import RunRecord

REPORT_FILE = "report.html"
#: Endings of what a search writes.
TABLES = (".csv", ".sqlite")
#: Windows of a timeline that a page of several runs leaves out, to stay small.
LEFT_OUT = ("Prologue", "Epilogue")


def run_page(record: RunRecord, drawn: dict[str, Any] | None, trial: Trial | None = None) -> str:
    """Return the page of one run; ``drawn`` is what stands in ``figures.json``."""
    title = f"{record.schedule} on {record.device.name} · npusim"
    return page_html(title, [run_part(record, drawn, trial)])


def run_part(record: RunRecord, drawn: dict[str, Any] | None, trial: Trial | None = None, prefix: str = "") -> PagePart:
    """Return what a page says of one run; pipes and links are figures of their own."""
    table = run_table(record, trial)
    heading = next(b for b in table if isinstance(b, Heading))
    facts = [b for b in table if isinstance(b, Facts)]
    figures = tuple(run_figures(record, drawn, prefix))
    return PagePart(heading.left, f"{heading.right}; {asked_text(record)}", run_tiles(record), facts, figures)


def saved_page(runs: Sequence[Path]) -> str:
    """Return the page of run folders, of their ``result.json``, or of a search; raise `SpecError` for none of these."""
    if len(runs) == 1 and runs[0].suffix in TABLES:
        return page_html(f"{runs[0].stem} · npusim", [exploration_part(runs[0].stem, rows_of(runs[0]))])
    found = [(load_result(run), load_figures(_folder(run))) for run in runs]
    return run_page(*found[0]) if len(found) == 1 else comparison_page(compare(*runs), [drawn for _, drawn in found])


def comparison_page(comparison: Comparison, drawn: Sequence[dict[str, Any] | None] = ()) -> str:
    """Return the page of runs side by side, then of each; ``drawn`` are their ``figures.json``, where known."""
    parts = [comparison_part(comparison)]
    known = (*drawn, *(None for _ in comparison.sheets))
    for number, (sheet, figures) in enumerate(zip(comparison.sheets, known, strict=False), start=1):
        if sheet.record is not None:
            fewer = figures and {**figures, "windows": [w for w in figures["windows"] if w["name"] not in LEFT_OUT]}
            parts.append(replace(run_part(sheet.record, fewer, prefix=f"run{number}-"), title=sheet.label))
    return page_html(f"{' and '.join(comparison.labels)} · npusim", parts)


def place_of(runs: Sequence[Path]) -> Path:
    """Return where the page of runs goes unless the caller says otherwise."""
    if len(runs) == 1 and runs[0].suffix in TABLES:
        return runs[0].with_suffix(".html")
    return (_folder(runs[0]) if len(runs) == 1 else Path()) / REPORT_FILE


def _folder(run: Path) -> Path:
    return run.parent if run.name == RESULT_FILE else run
