"""Pages: one HTML file that needs nothing else, neither network nor server.

Charts are Vega-Lite specifications drawn in the browser by the library that comes with vl-convert, in the
colours of the reader's theme; each has its numbers as a table besides.  What runs and compares brought along
(names, notes) is escaped by jinja2, and the page's policy lets nothing run but its own two scripts.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npusim import __version__
from npusim.report.charts import altair
from npusim.sanitize import json_safe, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.report.charts import Figure, FigureTile
    from npusim.report.text import Block

TEMPLATES = Path(__file__).with_name("template")


@dataclass(frozen=True)
class PagePart:
    """A part of a page: a heading, the few numbers, a table as the terminal has it, figures."""

    title: str
    subtitle: str = ""
    tiles: Sequence[FigureTile] = ()
    blocks: Sequence[Block] = ()
    figures: Sequence[Figure] = ()


def theme(name: str) -> dict[str, Any]:
    """Return the look of charts, ``light`` or ``dark``, as Vega-Lite's ``config``."""
    looks = json.loads((TEMPLATES / "theme.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = {
        key: dict(value) if isinstance(value, dict) else value for key, value in looks["common"].items()
    }
    for key, value in looks[name].items():
        found[key] = {**found.get(key, {}), **value}
    return found


def page_html(title: str, parts: Sequence[PagePart]) -> str:
    """Return a page as HTML; raise `NpusimError` where a library of the extra ``report`` is missing."""
    altair()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    shown = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown.filters["visible"] = lambda text: visible(str(text))
    figures = [f for part in parts for f in part.figures if f.spec is not None]
    data = {"themes": {name: theme(name) for name in ("light", "dark")}, "charts": {f.key: f.spec for f in figures}}
    draw = (TEMPLATES / "draw.js").read_text(encoding="utf-8")
    return shown.get_template("page.html").render(
        title=title,
        parts=parts,
        version=__version__,
        style=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        vega=_vega(),
        draw=draw,
        hashes=[_hash(_vega()), _hash(draw)],
        data=_inline(data),
        kind_of=lambda b: type(b).__name__,
    )


def svg(spec: dict[str, Any], width: int = 700) -> str:
    """Return a chart as SVG text in the light theme, for pages that are no HTML."""
    altair()
    import vl_convert

    background = {"config": {**theme("light"), "background": "white", "font": "sans-serif"}, "padding": 8}
    sized = {} if "vconcat" in spec else {"width": width}
    text: str = vl_convert.vegalite_to_svg(json.dumps({**spec, **background, **sized}))
    return f"{text}\n"


def _inline(data: object) -> str:
    """Return JSON that no HTML parser can leave: no tag begins or ends in it."""
    return (
        json_safe(json.dumps(data, allow_nan=False))
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
    )


@cache
def _vega() -> str:
    import vl_convert

    text: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")  # without the notices of its parts
    notices = (TEMPLATES / "licences.txt").read_text(encoding="utf-8")
    return f"/*!\n{notices}*/\n{text}".replace("</script", "<\\/script")


def _hash(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
