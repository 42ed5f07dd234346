"""What pages say: every figure in a sentence comes from the page's data, or is quoted with its source."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from reports.build import STUDIES
from reports.parts.document import template

if TYPE_CHECKING:
    from pathlib import Path

#: What is no sentence: code, fields, links, headings, names of sections and tables.
APART = re.compile(r"```.*?```|`[^`]*`|\{\w+\}|\]\([^)]*\)|<!--.*?-->|^\|[^\n]*$", re.DOTALL | re.MULTILINE)
#: References are no figures: a paper's parts, its number, a version, a format's or a model's name.
NAMED = re.compile(
    r"(?:[Tt]ables?|[Ff]igures?|[Ss]ections?|[Ee]quations?|[Pp]ropositions?|[Tt]heorems?|[Ll]ines?|[Aa]lgorithms?"
    r"|[Rr]emarks?|[Vv]ersions?|[Ff]indings?|pull request|CANN|arXiv)\s+\d[\d.]*(?:(?:,| and| to| or)\s+\d[\d.]*)*"
    r"|\b[A-Za-z]+[-_]?\d[\w.-]*|\b\d[\d.]*[A-Z]\w*|2\^-?\d+|^\d+\. |\(\d{4}\)",
    re.MULTILINE,
)
#: A number with a fraction, or with a unit that says it was measured or predicted.
UNIT = r"(?:%|us|ms|ns|s|times|points?|cycles|[TG]FLOP/s|[TGM]B/s|GiB|MB|kB)"
FIGURE = re.compile(
    r"(?<![\w.^/-])\d[\d,]*"
    rf"(?:\.\d+(?:e-?\d+)?x?(?![\w])|(?=(?:\s(?:and|to|or|\.\.)\s\d[\d,.]*)?\s?{UNIT}(?![\w/])))"
)


def figures(text: str) -> list[str]:
    """Return the figures of sentences, and of the cells of a page that is a table of sentences."""
    if "| where | what |" in text:
        text = text.replace("\n|", "\n").replace("|", ";")
    return [f.rstrip("x,") for f in FIGURE.findall(NAMED.sub(" ", APART.sub(" ", text)))]


def quoted(text: str) -> set[str]:
    """Return the figures that a template quotes; a line without a source is an error."""
    found = [line.partition(": ") for line in text.splitlines() if line]
    assert all(source for _, _, source in found)
    return {figure.rstrip("x") for numbers, _, _ in found for figure in numbers.split()}


@pytest.mark.parametrize("name", STUDIES)
def test_a_figure_in_a_template_is_quoted_with_its_source(name: str) -> None:
    text, sources = template(name)
    assert set(figures(text)) - quoted(sources) == set(), "computed here: make it a field; from elsewhere: quote it"
    unused = [figure for figure in quoted(sources) if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d])", text)]
    assert unused == []


@pytest.mark.parametrize("name", STUDIES)
def test_a_page_says_what_its_data_say(name: str, repository: Path) -> None:
    """The committed page is its template with the committed data's text; tables are made of the same data."""
    folder = repository / "reports" / name
    told: dict[str, str] = json.loads((folder / f"{name}.json").read_text())["text"]
    pattern = ""
    for part in re.split(r"(\{\w+\})", template(name)[0]):
        field = part[1:-1] if part.startswith("{") and part.endswith("}") else None
        if field is None:
            pattern += re.escape(part.replace("{{", "{").replace("}}", "}"))
        elif field in told:
            pattern += re.escape(told[field])
        else:
            pattern += r"[\s\S]+?"
    assert re.fullmatch(pattern, (folder / f"{name}.md").read_text())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("takes 44 us, 3.5 times as long, 12 % more", ["44", "3.5", "12"]),
        ("1.20 to 1.27 of 29 to 36 us", ["1.20", "1.27", "29", "36"]),
        ("blocks of 128 x 64 in section 5.2, table 3, FP16, 4,096 tokens, E4M3, 8 heads, LLaMA2-7B", []),
        ("`-t x=1.5` and {field} %", []),
    ],
)
def test_figures_are_told_from_sizes_and_names(text: str, found: list[str]) -> None:
    assert figures(text) == found
