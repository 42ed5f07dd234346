"""Page: every table and figure of the three papers in one table; its figures are those of the studies' own pages."""

from __future__ import annotations

import json
from collections import Counter
from string import Formatter
from typing import TYPE_CHECKING

from reports.parts.document import STUDIES, save_page, template

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["STATUSES", "rows", "write"]

#: Words for the state of a row, and whether the row is met.
STATUSES = ("reproduced", "partly", "contradicted", "out of reach", "drawing", "open question")


def write(folder: Path) -> list[Path]:
    """Write ``papers.md`` and its data to ``folder``; figures are read from the pages in ``reports/``."""
    found = list(rows())
    counts = Counter(status for _, _, status in found)
    fields = {name: _told(name) for name in sorted(_named()) if "__" in name}
    for status in STATUSES:
        fields["n_" + status.replace(" ", "_")] = str(counts[status])
    fields["n_all"] = str(len(found))
    return save_page(folder, "papers", (dict(fields), {"rows": [list(row) for row in found]}))


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield paper, place and status of each row of the template's tables."""
    paper = ""
    for line in template("papers")[0].splitlines():
        paper = line.removeprefix("## ") if line.startswith("## ") else paper
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] not in ("where", "---"):
            yield paper, cells[0], cells[2]


def _named() -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template("papers")[0]) if name}


def _told(name: str) -> str:
    """Return what a study's page says: ``study__field``."""
    study, _, field = name.partition("__")
    data = json.loads((STUDIES / study / f"{study}.json").read_text(encoding="utf-8"))
    text: str = data["text"][field]
    return text
