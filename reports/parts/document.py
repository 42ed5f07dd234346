"""What every page is made of: Markdown tables, and figures rounded for JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from npusim.report.output import write_whole

__all__ = [
    "Section",
    "fill",
    "gather",
    "number",
    "percent",
    "rounded",
    "save",
    "save_page",
    "scattered",
    "table",
    "template",
    "told",
]

#: Fields of the page's template, and figures for its JSON.
Section = tuple[dict[str, object], dict[str, object]]

#: Where the studies' folders are.
STUDIES = Path(__file__).resolve().parents[1]
#: Significant digits of figures in JSON: more would move with the machine's float64 library.
JSON_DIGITS = 4


def template(study: str) -> tuple[str, str]:
    """Return a study's template, and apart from it the figures that its text quotes from elsewhere.

    The page ends with them, in a comment that begins with ``<!-- quoted`` and has a line for each source: ``figures:
    source``.
    """
    text, _, quoted = (STUDIES / study / "template.md").read_text(encoding="utf-8").partition("\n<!-- quoted\n")
    return text, quoted.removesuffix("-->\n")


def fill(study: str, fields: Mapping[str, object]) -> str:
    """Return a study's template with its ``{fields}`` filled in; a missing field raises KeyError."""
    return template(study)[0].format_map({name: _text(value) for name, value in fields.items()})


def told(fields: Mapping[str, object]) -> dict[str, str]:
    """Return the fields of a page's sentences as they are written: all fields except tables."""
    texts = {name: _text(value) for name, value in fields.items()}
    return {name: text for name, text in texts.items() if "\n" not in text}


def number(value: float | None, digits: int = 3) -> str:
    """Return a figure with ``digits`` significant digits; NaN and None as ``NaN``, small ones as ``1.2e-4``."""
    if value is None:
        return "NaN"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Inf" if value > 0 else "-Inf")
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if not -3 <= exponent < 6:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def percent(share: float, digits: int = 1, sign: str = "") -> str:
    """Return a share as pages write it, ``53.6 %``; ``sign="+"`` for a difference, ``+53.6 %``."""
    return f"{share * 100:{sign}z.{digits}f} %"


def scattered(value: float, deviation: float) -> str:
    """Return a figure with its scatter in percent of it: ``0.00388 ± 5.1 %``."""
    relative = deviation / abs(value) if value else 0.0
    # Two digits of the scatter, as far as they are before its first decimal.
    return f"{number(value)} ± {percent(relative, 0 if relative >= 0.1 else 1)}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; numbers are aligned right."""
    cells = [[c if isinstance(c, str) else _text(c) for c in row] for row in rows]
    right = [all(_is_figure(row[i]) for row in cells) for i in range(len(header))]
    rule = ["---:" if r else "---" for r in right]
    lines = [header, rule, *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(cell: object) -> str:
    return number(cell) if isinstance(cell, float) else str(cell)


def _is_figure(text: str) -> bool:
    return text == "" or text.lstrip("+-.<≤")[:1].isdigit() or text in ("NaN", "Inf", "-")


def rounded(value: Any) -> Any:
    """Return nested data with every float rounded to four digits; NaN and Inf become text."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return number(value)
        return float(f"{value:.{JSON_DIGITS - 1}e}")
    if isinstance(value, Mapping):
        return {str(k): rounded(v) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return rounded(value._asdict())
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return value


def gather(page: str, sections: Iterable[Section], **fields: object) -> Section:
    """Return the fields that the sections of a page add to those of its template, and their figures."""
    data: dict[str, object] = {"page": page}
    for found, figures in sections:
        fields |= found
        data |= figures
    return fields, data


def save_page(folder: Path, page: str, content: Section, charts: Mapping[str, str] | None = None) -> list[Path]:
    """Write ``page.md`` from its template, ``page.json``, and charts by file name; return their paths."""
    fields, data = content
    text = fill(page, fields)
    return save(folder, {f"{page}.md": text, f"{page}.json": {**data, "text": told(fields)}, **(charts or {})})


def save(folder: Path, contents: Mapping[str, str | Mapping[str, object]]) -> list[Path]:
    """Write the files of a page, text as it is and mappings as JSON; return their paths."""
    written = []
    for name, content in contents.items():
        if isinstance(content, str):
            text = content
        else:
            document = {"schema_version": 1, **rounded(content)}
            text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
        path = folder / name
        write_whole(path, text.encode())
        written.append(path)
    return written
