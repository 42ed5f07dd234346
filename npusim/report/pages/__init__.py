"""Committed report pages: each a function that writes its files to a folder, listed in `PAGES`.

A page is a Markdown text, its figures as JSON (floats to four digits, so that they compare), and
charts as SVG.  Everything is computed from the product's own schedules with fixed seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from npusim.errors import SpecError
from npusim.report.pages import ascend_timing, nodes, pasa, pcast, tiling_mask, volta
from npusim.report.pages.check import differences
from npusim.spec.messages import suggest

__all__ = ["PAGES", "differences", "write_pages"]

Page = Callable[[Path], list[Path]]

PAGES: Mapping[str, Page] = MappingProxyType(
    {
        "ascend_timing": ascend_timing.write,
        "nodes": nodes.write,
        "pasa_numerics": pasa.write,
        "pcast_numerics": pcast.write,
        "tiling_mask": tiling_mask.write,
        "volta": volta.write,
    }
)


def write_pages(folder: str | Path, names: Iterable[str] | None = None) -> list[Path]:
    """Write the named pages (all by default) to ``folder``; return the files written.

    Raises
    ------
    SpecError
        A name is no page's: names the near ones.
    OutputError
        The folder cannot be written.
    """
    wanted = list(PAGES) if names is None else list(names)
    for name in wanted:
        if name not in PAGES:
            raise SpecError(f"no page named {name!r}{suggest(name, list(PAGES))}")
    return [path for name in wanted for path in PAGES[name](Path(folder))]
