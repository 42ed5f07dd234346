"""Pictures of results: one chart of a page as an SVG or PNG file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from npusim.errors import NpusimError, SpecError
from npusim.report.charts import Figure, Spec, altair, with_starts
from npusim.report.output import check_file_writable
from npusim.report.page import theme

#: Suffixes of the files, and the width of a picture in pixels; a PNG has twice as many pixels.
SUFFIXES, WIDTH, SCALE = (".svg", ".png"), 700, 2.0


def check_plot(file: Path) -> None:
    """Raise `NpusimError` if no picture could be written to ``file``: because of its ending, its folder, or a missing
    library.
    """
    if file.suffix not in SUFFIXES:
        raise SpecError(f"--plot {file}: pictures end in {' or '.join(SUFFIXES)}")
    altair()
    if find_spec("vl_convert") is None:
        raise NpusimError("pictures need vl-convert: python -m pip install 'npusim[report]'")
    check_file_writable(file)


def picture(figures: Iterable[Figure], suffix: str, subject: str = "", first: Iterable[str] = ()) -> bytes:
    """Return a chart of ``figures`` as a file with that suffix: the first figure whose key begins with a text of
    ``first``, else the first of all figures.

    The title is ``subject`` and the figure's, with its meaning below.  The title of an axis that does not start at 0
    states the start.  Raises `SpecError` where no figure has a chart.
    """
    drawn = [figure for figure in figures if figure.spec is not None]
    chosen = next((f for start in (*first, "") for f in drawn if f.key.startswith(start)), None)
    if chosen is None or chosen.spec is None:
        raise SpecError("--plot: there is nothing to draw: the result has no time and no error")
    heading = f"{subject}: {chosen.title[:1].lower()}{chosen.title[1:]}" if subject else chosen.title
    title = {"text": heading, "subtitle": _broken(chosen.text), "anchor": "start", "offset": 12}
    spec = {**with_starts(chosen.spec), "title": title}
    return svg(spec, WIDTH).encode() if suffix == ".svg" else _png(spec, WIDTH)


def svg(spec: Spec, width: int = WIDTH) -> str:
    """Return a chart as SVG text in the light theme."""
    import vl_convert

    text = vl_convert.vegalite_to_svg(_document(spec, width))
    # Clip paths are numbered over all pictures of a process; a file has its own numbers.
    numbers = {name: n for n, name in enumerate(dict.fromkeys(re.findall(r"\bclip\d+\b", text)))}
    return re.sub(r"\bclip\d+\b", lambda found: f"clip{numbers[found[0]]}", text) + "\n"


def _png(spec: Spec, width: int) -> bytes:
    import vl_convert

    data: bytes = vl_convert.vegalite_to_png(_document(spec, width), scale=SCALE)
    return data


def _document(spec: Spec, width: int) -> str:
    background = {"config": {**theme("light"), "background": "white", "font": "sans-serif"}, "padding": 8}
    sized = {} if "vconcat" in spec else {"width": width}
    return json.dumps({**spec, **background, **sized})


def _broken(text: str, most: int = 100) -> list[str]:
    """Return the lines of a subtitle."""
    import textwrap

    return textwrap.wrap(text, most)
