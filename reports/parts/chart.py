"""Small line charts as SVG text, for pages; no library, and the same bytes on every machine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reports.parts.document import number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["chart"]

WIDTH, HEIGHT, MARGIN_LEFT, MARGIN, LINE = 760, 360, 64, 40, 16
#: Right edge of the plot; names of lines stand beside it.
RIGHT = 570
COLOURS = ("#1b6ca8", "#c1440e", "#3d8b37", "#7d3c98", "#b8860b", "#555555")


class _Axis:
    """Maps values to pixels, linear or logarithmic."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, is_log: bool) -> None:
        kept = [v for v in values if math.isfinite(v) and (v > 0 or not is_log)]
        low, high = (min(kept), max(kept)) if kept else (0.0, 1.0)
        self.is_log, self.start, self.end = is_log, start, end
        if is_log:
            self.low, self.high = float(math.floor(math.log10(low))), math.log10(high)
            self.high = max(float(math.ceil(self.high)), self.low + 1)
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
    x = _Axis([p[0] for p in points], MARGIN_LEFT, RIGHT, is_log=log_x)
    y = _Axis([p[1] for p in points], HEIGHT - MARGIN, MARGIN, is_log=log_y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _label(title, (MARGIN_LEFT + RIGHT) / 2, LINE, "middle"),
        _label(x_label, (MARGIN_LEFT + RIGHT) / 2, HEIGHT - 6, "middle"),
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
        parts.append(_label(name, RIGHT + LINE, at, "start", colour))
    return "\n".join([*parts, "</svg>", ""])


def _label(text: str, x: float, y: float, anchor: str, colour: str = "#222222") -> str:
    clean = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colour}">{clean}</text>'


def _grid_x(at: float, text: str) -> str:
    line = (
        f'<line x1="{at:.1f}" y1="{MARGIN}" x2="{at:.1f}" y2="{HEIGHT - MARGIN}" stroke="#dddddd"/>'
    )
    return line + _label(text, at, HEIGHT - MARGIN + LINE, "middle")


def _grid_y(at: float, text: str) -> str:
    line = f'<line x1="{MARGIN_LEFT}" y1="{at:.1f}" x2="{RIGHT}" y2="{at:.1f}" stroke="#dddddd"/>'
    return line + _label(text, MARGIN_LEFT - 6, at + 4, "end")
