"""The table of the papers' rows: every table and figure has one, its words are explained, links lead somewhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reports.papers.page import STATUSES, rows
from reports.pcast_numerics.theory import worst_step

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


def test_the_shifting_matrix_has_no_inverse_where_lambda_s_is_one_not_lambda() -> None:
    """PASA, theorem 1, as the page has it; P-Cast, theorem 7: which powers of two have the least step."""
    size = 8
    shifts = {times: np.eye(size) - times * np.ones((size, size)) for times in (1.0, 1 / size, 0.3)}
    assert {times: np.linalg.matrix_rank(m) for times, m in shifts.items()} == {
        1.0: size,
        1 / size: size - 1,
        0.3: size,
    }
    assert np.allclose(np.linalg.inv(shifts[0.3]), np.eye(size) + 0.3 / (1 - 0.3 * size))
    steps = {scale: worst_step(scale) for scale in range(1, 449)}
    assert [scale for scale, step in steps.items() if step == min(steps.values())] == [2**k for k in range(9)]


def test_a_row_is_one_of_the_kinds_that_the_page_explains(repository: Path) -> None:
    found = list(rows())
    assert {status for _, _, status in found} == set(STATUSES)
    text = (repository / "reports/papers/template.md").read_text()
    assert all(f"*{status.capitalize()}*" in " ".join(text.split()) for status in STATUSES)
    for study in re.findall(r"\]\(\.\./(\w+)/\1\.md\)", text):
        assert (repository / "reports" / study / f"{study}.md").is_file()
