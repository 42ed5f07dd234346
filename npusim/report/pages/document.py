"""What every page is made of: Markdown tables, figures rounded for JSON, and small line charts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from npusim.report.output import write_whole

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["chart", "number", "rounded", "save", "table"]

#: Significant digits of figures in JSON: more would move with the machine's float64 library.
JSON_DIGITS = 4


def number(value: float, digits: int = 3) -> str:
    """Return a figure with ``digits`` significant digits; NaN as ``NaN``, small ones as ``1.2e-4``."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Inf" if value > 0 else "-Inf")
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if not -3 <= exponent < 6:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


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
    return text == "" or text.lstrip("-.<≤")[:1].isdigit() or text in ("NaN", "Inf", "-")


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


def save(folder: Path, files: Mapping[str, str | Mapping[str, object]]) -> list[Path]:
    """Write the files of a page, text as it is and mappings as JSON; return their paths."""
    written = []
    for name, content in files.items():
        if isinstance(content, str):
            text = content
        else:
            document = {"schema_version": 1, **rounded(content)}
            text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
        path = folder / name
        write_whole(path, text.encode())
        written.append(path)
    return written


# ------------------------------------------------------------------ charts

WIDTH, HEIGHT, MARGIN_LEFT, MARGIN, LINE = 640, 360, 64, 40, 16
COLOURS = ("#1b6ca8", "#c1440e", "#3d8b37", "#7d3c98", "#b8860b", "#555555")


class _Axis:
    """Maps values to pixels, linear or logarithmic."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, is_log: bool) -> None:
        kept = [v for v in values if math.isfinite(v) and (v > 0 or not is_log)]
        low, high = (min(kept), max(kept)) if kept else (0.0, 1.0)
        self.is_log, self.start, self.end = is_log, start, end
        if is_log:
            self.low, self.high = math.floor(math.log10(low)), math.ceil(math.log10(high))
            self.high = max(self.high, self.low + 1)
        else:
            self.low, self.high = (min(low, 0.0), high) if high > low else (low - 1, high + 1)

    def at(self, value: float) -> float:
        scaled = math.log10(value) if self.is_log else value
        share = (scaled - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.is_log:
            return [10.0**e for e in range(int(self.low), int(self.high) + 1)]
        step = 10 ** math.floor(math.log10((self.high - self.low) / 2))
        step *= next(f for f in (1, 2, 5) if (self.high - self.low) / (f * step) <= 8 or f == 5)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step) + 1)]


def chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Return a line chart as SVG text; points that are not finite are left out of their line."""
    points = [p for line in lines.values() for p in line]
    x = _Axis([p[0] for p in points], MARGIN_LEFT, WIDTH - MARGIN, is_log=log_x)
    y = _Axis([p[1] for p in points], HEIGHT - MARGIN, MARGIN, is_log=log_y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _label(title, WIDTH / 2, LINE, "middle"),
        _label(x_label, WIDTH / 2, HEIGHT - 6, "middle"),
        _label(y_label, 6, MARGIN - LINE, "start"),
    ]
    parts += [_grid_x(x.at(t), number(t, 2)) for t in x.ticks()]
    parts += [_grid_y(y.at(t), number(t, 2)) for t in y.ticks()]
    for index, (name, line) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        drawn = [(a, b) for a, b in line if math.isfinite(b) and (b > 0 or not log_y)]
        path = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in drawn)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="2.5" fill="{colour}"/>'
            for a, b in drawn[: len(drawn) if len(drawn) < LINE else 0]
        ]
        at = MARGIN + LINE * (index + 1)
        parts.append(_label(name, WIDTH - MARGIN - 4, at, "end", colour))
    return "\n".join([*parts, "</svg>", ""])


def _label(text: str, x: float, y: float, anchor: str, colour: str = "#222222") -> str:
    clean = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colour}">{clean}</text>'


def _grid_x(at: float, text: str) -> str:
    line = f'<line x1="{at:.1f}" y1="{MARGIN}" x2="{at:.1f}" y2="{HEIGHT - MARGIN}" stroke="#dddddd"/>'
    return line + _label(text, at, HEIGHT - MARGIN + LINE, "middle")


def _grid_y(at: float, text: str) -> str:
    line = f'<line x1="{MARGIN_LEFT}" y1="{at:.1f}" x2="{WIDTH - MARGIN}" y2="{at:.1f}" stroke="#dddddd"/>'
    return line + _label(text, MARGIN_LEFT - 6, at + 4, "end")
