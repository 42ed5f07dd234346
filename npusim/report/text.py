"""Tables: headings, facts and grids as text for terminals, notebooks and Markdown; and the common parts of JSON
documents.

Lines have styles by meaning (``good``, ``warn``); the printing code chooses the colours, if any.
"""

from __future__ import annotations

import html
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from npusim.late_methods import dataclass
from npusim.sanitize import json_safe, visible

Style = Literal["", "title", "label", "good", "warn", "bad", "dim"]
Line = tuple[tuple[str, Style], ...]

_INDENT = "  "
_GAP = "  "
#: Smallest width to which the text of a column is wrapped; if a table needs less, its lines are too long.
_NARROWEST = 12
#: The beginning of a number: ``+1.5 %``, ``x1.20``, ``~0 %``.
_NUMBER = re.compile(r"[-+~x<>±]? ?\d")
#: A command at the end of a message.
_COMMAND = re.compile(r"(?<=:) npusim [a-z-]+( \S+)*$")


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of text with the meaning that may colour it; ``whole`` text (a command) is never wrapped."""

    text: str
    style: Style = ""
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Heading:
    """The first line of a table: the run, and the device."""

    left: str
    right: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Labelled lines; a fact of several cells takes several lines under one label."""

    rows: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """Columns under a header; ``align`` has ``<`` or ``>`` for each column.

    ``spare``: names of columns that a terminal omits, in this order and with a note, if the grid is too wide.
    """

    header: tuple[str, ...]
    align: str
    rows: tuple[tuple[Cell, ...], ...]
    spare: tuple[str, ...] = ()


Block = Heading | Facts | Grid
#: A line of `Facts`: its label and its cells.
Fact = tuple[str, tuple[Cell, ...]]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table, under ``title``, and its key in JSON.

    ``value`` is an attribute, key or index of the row, or a function of it; ``form`` is the format specification or the
    function that writes it; None is written as ``-``. Columns of numbers have ``align`` ``>``. ``style`` may be a
    function of the row. JSON has the value under ``key``, or the result of ``json`` for the row; a column without a key
    appears only in tables; one with the title None, only in JSON.
    """

    title: str | None
    value: str | int | Callable[[Any], object]
    form: str | Callable[[Any], str] = ""
    align: Literal["<", ">"] = "<"
    style: Style | Callable[[Any], Style] = ""
    key: str = ""
    json: Callable[[Any], object] | None = None

    def of(self, row: Any) -> Any:
        """Return the value itself."""
        if callable(self.value):
            return self.value(row)
        if isinstance(self.value, int) or isinstance(row, Mapping):
            return row[self.value]
        return getattr(row, self.value)

    def cell(self, row: Any) -> Cell:
        """Return the value as text."""
        value = self.of(row)
        written = "-" if value is None else self.form(value) if callable(self.form) else format(value, self.form)
        return Cell(written, self.style(row) if callable(self.style) else self.style)


def keyed(*names: str) -> tuple[Column, ...]:
    """Return columns that only JSON has; each shows the attribute, or key, of the same name."""
    return tuple(Column(None, name, key=name) for name in names)


class Columns:
    """A table, declared once: ``grid`` for terminals, Markdown and pages, ``records`` for JSON and charts."""

    def __init__(self, *columns: Column, spare: tuple[str, ...] = ()) -> None:
        self.columns, self.spare = columns, spare

    def grid(self, rows: Iterable[Any]) -> Grid:
        """Return rows of any kind as text."""
        shown = [c for c in self.columns if c.title is not None]
        align = "".join(c.align for c in shown)
        return Grid(self.titles, align, tuple(tuple(c.cell(row) for c in shown) for row in rows), self.spare)

    def named(self, *titles: str) -> tuple[Column, ...]:
        """Return the columns with these titles, in this order: a table may show a part of the JSON keys."""
        of_title = {c.title: c for c in self.columns}
        return tuple(of_title[title] for title in titles)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a row in JSON."""
        return tuple(c.key for c in self.columns if c.key)

    @property
    def titles(self) -> tuple[str, ...]:
        """The titles of the columns of tables."""
        return tuple(c.title for c in self.columns if c.title is not None)

    def texts(self, row: object) -> tuple[str, ...]:
        """Return the cells of one row as text."""
        return tuple(c.cell(row).text for c in self.columns if c.title is not None)

    def record(self, row: object) -> dict[str, Any]:
        """Return one row in JSON's form."""
        return self.records((row,))[0]

    def records(self, rows: Iterable[Any]) -> list[dict[str, Any]]:
        """Return the rows for JSON: the values of the columns that have a key, by this key."""
        keyed = [c for c in self.columns if c.key]
        return [{c.key: c.json(row) if c.json else c.of(row) for c in keyed} for row in rows]


def document(kind: str, *, version: int = 1, **content: object) -> dict[str, object]:
    """Return JSON data that begins with its kind and the version of its keys, which changes when a key changes its
    meaning.
    """
    return {"schema_version": version, "kind": f"npusim.{kind}", **content}


def to_json(document: Mapping[str, object], indent: int | None = 1) -> str:
    """Return JSON text that ends in a newline; infinity, the relative error of a result that should be 0, is null.

    Raises `ValueError` for NaN.
    """
    content = _with_null(document)
    return json_safe(json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False)) + "\n"


def _with_null(value: object) -> Any:
    """Return JSON data with null in place of infinity."""
    if isinstance(value, Mapping):
        return {key: _with_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_null(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def cells(*texts: str, style: Style = "") -> tuple[Cell, ...]:
    """Return cells of one style."""
    return tuple(Cell(text, style) for text in texts)


def folded(message: str, width: int) -> str:
    """Return a message in lines of ``width`` columns, the second and later ones indented.

    A command after a colon at the end of a line of the message starts a new line; neither it nor a word is ever broken.
    """
    return "\n".join(part for line in message.splitlines() for part in _folded_line(line, width))


def _folded_line(line: str, width: int) -> Iterator[str]:
    if len(line) <= width:
        yield line
        return
    words, command = line, ""
    if ending := _COMMAND.search(line):
        words, command = line[: ending.start()], line[ending.start() :].lstrip()
    first, *rest = _wrapped(words, width)
    yield first
    margin = first[: len(first) - len(first.lstrip())] + _INDENT
    for text in _wrapped(" ".join(text.strip() for text in rest), width - len(margin)) if rest else ():
        yield margin + text
    if command:
        yield margin + command


def help_on(*words: str) -> str:
    """Return the commands that explain words of the glossary: ``npusim help few-blocks``."""
    return ", ".join(f"npusim help {word.replace(' ', '-')}" for word in words)


def percent(share: float) -> str:
    """Return a share in percent: ``53.6 %``."""
    return f"{share * 100:.1f} %"


def whole(number: int) -> str:
    """Return an integer with separators of thousands: ``328,896``."""
    return f"{number:,}"


def lines(blocks: Iterable[Block], width: int | None = None) -> Iterator[Line]:
    """Yield the lines of ``blocks``; a grid has an empty line before and after it.

    With ``width`` lines are wrapped between words and indented to the start of their text; a word is never cut.
    """
    after_grid = False
    for index, block in enumerate(blocks):
        is_grid = isinstance(block, Grid)
        if index and (is_grid or after_grid):
            yield ()
        match block:
            case Heading():
                block_lines = _heading(block, width)
            case Facts():
                block_lines = _facts(block, width)
            case Grid():
                block_lines = _grid(block, width)
        for line in block_lines:
            yield tuple((visible(text).replace("\n", " "), style) for text, style in line)
        after_grid = is_grid


def plain(blocks: Iterable[Block], width: int | None = None) -> str:
    """Return the text without styles; every line ends in a newline."""
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines(blocks, width))


def markdown(blocks: Iterable[Block]) -> str:
    """Return the text as Markdown: a heading, lists of facts, tables; nothing in a cell is markup."""
    parts = []
    for block in blocks:
        match block:
            case Heading():
                right = f" ({_escaped(block.right)})" if block.right else ""
                parts.append([f"### {_escaped(block.left)}{right}"])
            case Facts():
                parts.append([f"* **{_escaped(n)}**: {'; '.join(_escaped(c.text) for c in v)}" for n, v in block.rows])
            case Grid():
                rows = [[Cell(name) for name in block.header], *block.rows]
                lined = [f"| {' | '.join(_escaped(cell.text) for cell in row)} |" for row in rows]
                marks = ["---:" if side == ">" else ":---" for side in block.align]
                parts.append([lined[0], f"| {' | '.join(marks)} |", *lined[1:]])
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _escaped(text: str) -> str:
    """Return text that is shown literally in Markdown and in the HTML made from it."""
    return html.escape(re.sub(r"([\\`*_\[\]|#])", r"\\\1", visible(text).replace("\n", " ")), quote=False)


def pre_html(blocks: Iterable[Block]) -> str:
    """Return the text as an HTML element for notebooks, escaped."""
    return f'<pre style="line-height:1.25">{html.escape(plain(blocks))}</pre>'


def _heading(heading: Heading, width: int | None) -> Iterator[Line]:
    gap = 3
    first, *rest = _wrapped(heading.left, width)
    right = _wrapped(heading.right, width) if heading.right else []
    one_line = not rest and right and (width is None or len(first) + gap + len(heading.right) <= width)
    if one_line:
        yield ((first, "title"), (" " * gap, ""), (heading.right, "dim"))
        return
    for text in (first, *rest):
        yield ((text, "title"),)
    for text in right:
        yield ((text, "dim"),)


def _facts(facts: Facts, width: int | None) -> Iterator[Line]:
    labels = max((len(label) for label, _ in facts.rows), default=0)
    room = None if width is None else width - len(_INDENT) - labels - len(_GAP)
    for label, values in facts.rows:
        name = label
        for cell in values:
            for text in [cell.text] if cell.whole else _wrapped(cell.text, room):
                yield ((f"{_INDENT}{name:<{labels}}{_GAP}", "label"), (text, cell.style))
                name = ""


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None or len(text) <= width:
        return [text]
    margin = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text.lstrip(),
        max(width, _NARROWEST),
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def _grid(grid: Grid, width: int | None) -> Iterator[Line]:
    shown, left_out = grid, list[str]()
    widths = _widths(shown)
    if width is not None:
        for spare in (None, *grid.spare):
            if spare is not None:
                left_out.append(spare)
                shown = _without(shown, spare)
            if _fit(shown, widths := _widths(shown), width):
                break
    parts = [range(len(widths))] if width is None else _stacked(widths, width)
    header = tuple(Cell(name, "label") for name in shown.header)
    for row, wrapped in ((header, _wrapped_name), *((row, _wrapped) for row in shown.rows)):
        for part in parts:
            margin = _INDENT if part.start else ""
            for line in _row(row[part.start : part.stop], shown.align[part.start :], widths[part.start :], wrapped):
                yield ((margin, ""), *line) if margin else line
    if left_out:
        for text in _wrapped(f"{_INDENT}not shown at this width: {', '.join(left_out)}", width):
            yield ((text, "dim"),)


def _widths(grid: Grid) -> list[int]:
    return [max(len(text) for text in _column(grid, i)) for i in range(len(grid.header))]


def _without(grid: Grid, name: str) -> Grid:
    """Return a grid without the column of that name."""
    at = grid.header.index(name)
    rows = tuple((*row[:at], *row[at + 1 :]) for row in grid.rows)
    return Grid((*grid.header[:at], *grid.header[at + 1 :]), grid.align[:at] + grid.align[at + 1 :], rows)


def _excess(widths: Sequence[int], width: int) -> int:
    return len(_INDENT) + sum(widths) + len(_GAP) * (len(widths) - 1) - width


def _fit(grid: Grid, widths: list[int], width: int) -> bool:
    """Narrow columns until the grid fits; return whether it does.

    Text is wrapped first, beginning with the column that has most spare width; then the names of columns of numbers
    are.  A number and its unit are never separated; words in a column of numbers are wrapped like text.
    """
    least = [min(now, _least(grid, i)) for i, now in enumerate(widths)]
    while _excess(widths, width) > 0:
        widest = max(range(len(widths)), key=lambda i: widths[i] - least[i])
        if widths[widest] <= least[widest]:
            break
        widths[widest] -= 1
    if _excess(widths, width) > 0:
        for i, name in enumerate(grid.header):
            if grid.align[i] == ">":
                widths[i] = min(widths[i], max(_least_cells(grid, i), *map(len, _pieces(name)), 1))
    return _excess(widths, width) <= 0


def _least(grid: Grid, index: int) -> int:
    """Return the width below which neither the cells of a column nor its name are wrapped."""
    name = grid.header[index]
    if grid.align[index] == ">":
        return max(len(name), _least_cells(grid, index))
    return max(_NARROWEST, _least_cells(grid, index), *map(len, name.split()))


def _least_cells(grid: Grid, index: int) -> int:
    """Return the width below which the cells of a column are not wrapped: a word, or a number with its unit."""
    return max((_least_text(row[index].text, grid.align[index]) for row in grid.rows), default=0)


def _least_text(text: str, side: str) -> int:
    if side == ">" and _NUMBER.match(text):
        return len(text)
    return max(min(len(text), _NARROWEST), *map(len, text.split()), 0)


def _stacked(widths: Sequence[int], width: int) -> list[range]:
    """Return the columns in each line of a row: all columns if they fit in one line, otherwise the rest in further,
    indented lines.
    """
    parts, start = list[range](), 0
    for end in range(1, len(widths) + 1):
        room = width - (len(_INDENT) if start else 0)
        if end == len(widths) or _excess(widths[start : end + 1], room) > 0:
            parts.append(range(start, end))
            start = end
    return parts


def _pieces(name: str) -> list[str]:
    """Return the pieces between which a column's name may be broken: at spaces, and after ``_``."""
    return re.findall(r"[^\s_]+_*", name)


def _wrapped_name(name: str, width: int | None) -> list[str]:
    """Return the lines of a column's name."""
    if width is None or len(name) <= width:
        return [name]
    wrapped = [""]
    for piece in _pieces(name):
        joined = f"{wrapped[-1]}{'' if wrapped[-1].endswith('_') else ' '}{piece}".lstrip()
        if len(joined) <= width:
            wrapped[-1] = joined
        else:
            wrapped.append(piece)
    return [line for line in wrapped if line]


def _column(grid: Grid, index: int) -> list[str]:
    return [grid.header[index], *(row[index].text for row in grid.rows)]


def _row(
    row: Sequence[Cell], align: str, widths: Sequence[int], wrapped: Callable[[str, int | None], list[str]]
) -> Iterator[Line]:
    is_name = wrapped is _wrapped_name
    parts = [
        wrapped(cell.text, width if side == "<" or is_name or not _NUMBER.match(cell.text) else None)
        for cell, side, width in zip(row, align, widths, strict=False)
    ]
    height = max((len(part) for part in parts), default=1)
    if is_name:  # names are aligned with their columns
        parts = [[""] * (height - len(part)) + part for part in parts]
    for number in range(height):
        segments: list[tuple[str, Style]] = []
        for index, (cell, part, side, width) in enumerate(zip(row, parts, align, widths, strict=False)):
            text = part[number] if number < len(part) else ""
            segments.append((_GAP if index else _INDENT, ""))
            segments.append((f"{text:{side}{width}}", cell.style))
        yield tuple(segments)
