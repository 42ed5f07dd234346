"""Timelines side by side as SVG text, drawn from simulated spans; the same bytes on every machine."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from reports.parts.document import number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Bar", "Panel", "gantt"]

PANEL_WIDTH, GAP, NAME_WIDTH, TOP, ROW, BAR = 560, 20, 76, 56, 24, 18
#: Narrowest bar with room for a letter and a digit.
LABEL_WIDTH = 18
COLOURS: Mapping[str, str] = MappingProxyType(
    {"attention": "#1b6ca8", "linear": "#3d8b37", "allreduce": "#c1440e"}
)


class Bar(NamedTuple):
    """One operation: what kind it is, its number, and its edges in microseconds."""

    kind: str
    label: str
    start: float
    end: float


class Panel(NamedTuple):
    """Runs on one time axis: each a name with the bars of its tracks."""

    title: str
    runs: Mapping[str, Mapping[str, Sequence[Bar]]]

    @property
    def end(self) -> float:
        """Return the end of the last bar."""
        return max(b.end for tracks in self.runs.values() for bars in tracks.values() for b in bars)

    @property
    def height(self) -> int:
        """Return the pixels of all rows."""
        return sum(ROW * (len(tracks) + 1) for tracks in self.runs.values())


def gantt(title: str, panels: Sequence[Panel]) -> str:
    """Return the panels side by side as SVG text, each with its own time axis from 0."""
    width = len(panels) * (PANEL_WIDTH + GAP) + GAP
    height = TOP + max(p.height for p in panels) + 2 * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(title, GAP, 16),
    ]
    for index, (kind, colour) in enumerate(COLOURS.items()):
        at = width - GAP - 90 * (len(COLOURS) - index)
        parts.append(f'<rect x="{at}" y="6" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(kind, at + 16, 16))
    for index, panel in enumerate(panels):
        parts += _panel(panel, GAP + index * (PANEL_WIDTH + GAP))
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, left: int) -> Iterator[str]:
    scale = (PANEL_WIDTH - NAME_WIDTH) / panel.end
    start, top = left + NAME_WIDTH, TOP
    yield _text(panel.title, left, TOP - ROW + 8, weight="bold")
    for run, tracks in panel.runs.items():
        end = max(b.end for bars in tracks.values() for b in bars)
        yield _text(f"{run}: {number(end, 4)} us", left, top + BAR - 4)
        top += ROW
        for name, bars in tracks.items():
            yield _text(name, left, top + BAR - 5, colour="#555555")
            for bar in bars:
                yield from _bar(bar, start, top, scale)
            top += ROW
        at = start + end * scale
        line = top - ROW * len(tracks) - 4
        yield f'<line x1="{at:.1f}" y1="{line}" x2="{at:.1f}" y2="{top}" stroke="#222222"/>'
    yield f'<line x1="{start}" y1="{top + 4}" x2="{left + PANEL_WIDTH}" y2="{top + 4}" stroke="#222222"/>'
    yield _text("0", start, top + ROW)
    yield _text(f"{number(panel.end, 4)} us", left + PANEL_WIDTH, top + ROW, anchor="end")


def _bar(bar: Bar, start: int, top: int, scale: float) -> Iterator[str]:
    x, width = start + bar.start * scale, (bar.end - bar.start) * scale
    yield (
        f'<rect x="{x:.1f}" y="{top}" width="{max(width, 0.5):.1f}" height="{BAR}" '
        f'fill="{COLOURS[bar.kind]}" stroke="white" stroke-width="0.5"/>'
    )
    if width >= LABEL_WIDTH:
        yield _text(bar.label, x + width / 2, top + BAR - 5, anchor="middle", colour="white")


def _text(
    text: str, x: float, y: float, *, anchor: str = "start", colour: str = "#222222", weight: str = "normal"
) -> str:  # fmt: skip
    clean = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}">{clean}</text>'
