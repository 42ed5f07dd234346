"""The table of the papers' rows: every table and figure has one, its words are explained, links lead somewhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from reports.papers.page import STATUSES, rows

if TYPE_CHECKING:
    from pathlib import Path

#: How many tables and figures each paper has.
PARTS = {"PASA": (4, 18), "P-Cast": (3, 3), "FastAttention": (9, 17)}


@pytest.mark.parametrize("paper", PARTS)
def test_every_table_and_figure_of_a_paper_has_a_row(paper: str) -> None:
    places = [place for name, place, _ in rows() if name == paper]
    for kind, count in zip(("Table", "Figure"), PARTS[paper], strict=True):
        cells = [re.search(rf"{kind}s?\s+([\d, ]+)", place) for place in places]
        named = {int(n) for cell in cells if cell for n in re.findall(r"\d+", cell[1])}
        assert named == set(range(1, count + 1))


def test_a_row_is_one_of_the_kinds_that_the_page_explains(repository: Path) -> None:
    found = list(rows())
    assert {status for _, _, status in found} == set(STATUSES)
    text = (repository / "reports/papers/template.md").read_text()
    assert all(f"*{status.capitalize()}*" in " ".join(text.split()) for status in STATUSES)
    for study in re.findall(r"\]\(\.\./(\w+)/\1\.md\)", text):
        assert (repository / "reports" / study / f"{study}.md").is_file()
