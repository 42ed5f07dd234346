"""The pictures of ``layouts`` as SVG text: no library, and the same bytes on every machine."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npusim.report.layouts import Picture, Square

# Sizes in pixels: a square, the edge with the numbers of the rows, a line of text.
_WIDTH, _HEIGHT, _EDGE, _LINE = 66, 42, 34, 18
_MARK = "#8b0000"


def picture_svg(picture: Picture) -> str:
    """Return the picture as SVG text: no library, the same bytes on every machine."""
    widest = max(len(square.target) for row in picture.rows for square in row)
    width = max(_WIDTH, 9 * (widest + 3))
    columns, rows = len(picture.rows[0]), len(picture.rows)
    left, top = _EDGE + 8, 2 * _LINE + _EDGE + 14
    note = "; ".join(filter(None, (picture.note, picture.legend.replace(">", "→"))))
    words = [(label, cell.text) for label, cells in picture.facts.rows for cell in cells]
    longest = max(len(text) for _, text in words) + 14
    full = max(left + columns * width + 16, 16 + round(7.3 * longest), 16 + round(6.6 * len(note)))
    below = top + rows * _HEIGHT + 26
    height = below + _LINE * len(words) + 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{full}" height="{height}" '
        f'viewBox="0 0 {full} {height}" role="img" font-family="Helvetica, Arial, sans-serif">',
        f"<title>{html.escape(picture.title)}</title>",
        f'<rect width="{full}" height="{height}" fill="white"/>',
        _text(16, 26, picture.title, size=16, weight="bold"),
        _text(16, 26 + _LINE, note, size=12, fill="#555"),
    ]
    parts += [
        _text(left + c * width + width / 2, top - 8, str(c), size=11, fill="#777", anchor="middle")
        for c in range(columns)
    ]
    moving: list[str] = []
    for r, row in enumerate(picture.rows):
        y = top + r * _HEIGHT
        parts.append(_text(left - 9, y + _HEIGHT / 2 + 4, str(r), size=11, fill="#777", anchor="end"))
        for c, square in enumerate(row):
            (moving if square.needed_by else parts).append(_square_svg(square, left + c * width, y, width))
    parts += moving  # last, so that their frames lie over their neighbours
    for number, (label, text) in enumerate(words):
        y = below + _LINE * number
        parts.append(_text(16, y, label, size=12, fill="#555"))
        parts.append(_text(100, y, text, size=12))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _square_svg(square: Square, x: float, y: float, width: float) -> str:
    middle = x + width / 2
    box = f'<rect x="{x:g}" y="{y:g}" width="{width}" height="{_HEIGHT}" fill="{square.colour}" '
    name = f"T{square.lane} V{square.value}"
    if not square.needed_by:
        box += 'stroke="white" stroke-width="1.5"/>'
        return box + _text(middle, y + _HEIGHT / 2 + 5, name, size=13, anchor="middle")
    inner = f'<rect x="{x + 2:g}" y="{y + 2:g}" width="{width - 4}" height="{_HEIGHT - 4}" fill="none" '
    dashes = ' stroke-dasharray="4 3"' if square.is_in_place else ""
    box += 'stroke="white" stroke-width="1.5"/>' + inner + f'stroke="{_MARK}" stroke-width="2"{dashes}/>'
    sign = "+ " if square.is_in_place else "→ "
    return (
        box
        + _text(middle, y + 18, name, size=13, anchor="middle")
        + _text(middle, y + 34, sign + square.target, size=12, weight="bold", fill=_MARK, anchor="middle")
    )


def _text(
    x: float, y: float, text: str, *, size: int, weight: str = "normal", fill: str = "#111", anchor: str = "start"
) -> str:
    look = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {look}>{html.escape(text)}</text>'
