"""Lays out headings, facts and grids as lines of text, once for terminals, pipes and notebooks.

Lines carry styles by meaning (``good``, ``warn``); who prints them chooses colours, or none.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from npusim.foreign import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "Block", "Cell", "Facts", "Grid", "Heading", "Line", "Style",
    "cells", "lines", "percent", "plain", "pre_html", "whole",
]  # fmt: skip

Style = Literal["", "title", "label", "good", "warn", "bad", "dim"]
Line = tuple[tuple[str, Style], ...]

_INDENT = "  "
_GAP = "  "


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of text with the meaning that may colour it."""

    text: str
    style: Style = ""


@dataclass(frozen=True, slots=True)
class Heading:
    """The first line of a table: what was run, and on what."""

    left: str
    right: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Labelled lines; a fact of several cells takes several lines under one label."""

    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """Columns under a header; ``align`` has ``<`` or ``>`` for each column."""

    header: tuple[str, ...]
    align: str
    rows: tuple[tuple[Cell, ...], ...]


Block = Heading | Facts | Grid


def cells(*texts: str) -> tuple[Cell, ...]:
    """Return plain cells."""
    return tuple(Cell(text) for text in texts)


def percent(share: float) -> str:
    """Return a share as people read it: ``53.6 %``."""
    return f"{share * 100:.1f} %"


def whole(number: int) -> str:
    """Return a whole number with thousands set apart: ``328,896``."""
    return f"{number:,}"


def lines(blocks: Iterable[Block]) -> Iterator[Line]:
    """Yield the lines of ``blocks``; a grid stands between empty lines."""
    after_grid = False
    for index, block in enumerate(blocks):
        is_grid = isinstance(block, Grid)
        if index and (is_grid or after_grid):
            yield ()
        match block:
            case Heading():
                found: Iterable[Line] = (_heading(block),)
            case Facts():
                found = _facts(block)
            case Grid():
                found = _grid(block)
        for line in found:
            yield tuple((visible(text).replace("\n", " "), style) for text, style in line)
        after_grid = is_grid


def plain(blocks: Iterable[Block]) -> str:
    """Return the text without styles; every line ends in a newline."""
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines(blocks))


def pre_html(blocks: Iterable[Block]) -> str:
    """Return the text as an HTML element for notebooks, escaped."""
    return f'<pre style="line-height:1.25">{html.escape(plain(blocks))}</pre>'


def _heading(heading: Heading) -> Line:
    if not heading.right:
        return ((heading.left, "title"),)
    return ((heading.left, "title"), ("   ", ""), (heading.right, "dim"))


def _facts(facts: Facts) -> Iterator[Line]:
    width = max((len(label) for label, _ in facts.rows), default=0)
    for label, values in facts.rows:
        for index, cell in enumerate(values):
            name = label if index == 0 else ""
            yield ((f"{_INDENT}{name:<{width}}{_GAP}", "label"), (cell.text, cell.style))


def _grid(grid: Grid) -> Iterator[Line]:
    columns = range(len(grid.header))
    widths = [max(len(text) for text in _column(grid, i)) for i in columns]
    yield _row([Cell(name, "label") for name in grid.header], grid.align, widths)
    for row in grid.rows:
        yield _row(row, grid.align, widths)


def _column(grid: Grid, index: int) -> list[str]:
    return [grid.header[index], *(row[index].text for row in grid.rows)]


def _row(row: Sequence[Cell], align: str, widths: Sequence[int]) -> Line:
    segments: list[tuple[str, Style]] = []
    for index, (cell, side, width) in enumerate(zip(row, align, widths, strict=True)):
        segments.append((_GAP if index else _INDENT, ""))
        segments.append((f"{cell.text:{side}{width}}", cell.style))
    return tuple(segments)
