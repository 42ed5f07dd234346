"""The public surface: names, arguments and JSON documents that a release promises; stored for each minor version.

    python -m tests.surface

writes ``tests/golden/surface.json`` for the present version, which a release does once.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import npusim
from npusim.cli.app import VERBS
from npusim.cli.guide import guides

__all__ = ["FILE", "missing", "surface"]

FILE = Path(__file__).parent / "golden" / "surface.json"
#: Paths of names that warn since this minor version and go with the next, each with what to use in their place.
DEPRECATED: dict[str, str] = {}
MODULES = ("npusim", "npusim.kernel", "npusim.machine")


def surface() -> dict[str, Any]:
    """Return the present surface: for each module its names, each with its arguments; verbs; documents with keys."""
    return {
        "version": npusim.__version__,
        "names": {name: _names(importlib.import_module(name)) for name in MODULES},
        "verbs": sorted(verb for verbs in VERBS.values() for verb in verbs),
        "documents": _documents(),
        "deprecated": DEPRECATED,
    }


def _names(module: Any) -> dict[str, list[str]]:
    return {name: _arguments(getattr(module, name)) for name in sorted(module.__all__)}


def _arguments(value: Any) -> list[str]:
    """Return the arguments of a function, or the public members of a class; none of anything else."""
    if inspect.isclass(value):
        ours = [kind for kind in value.__mro__ if kind.__module__.startswith("npusim")]
        members = {name for kind in ours for name in (*vars(kind), *vars(kind).get("__annotations__", {}))}
        return sorted(name for name in members if not name.startswith(("_", "model_")))
    return list(inspect.signature(value).parameters) if inspect.isfunction(value) else []


def _documents() -> dict[str, list[str]]:
    """Return the keys of each kind of document that the guide for programs names."""
    part = guides()["agents"].partition("## Documents\n")[2].partition("\n## ")[0]
    rows = [re.split(r"\s*\|\s*", line)[1:-1] for line in part.splitlines() if line.startswith("|")][2:]
    return {kind.strip("`"): re.findall(r"`([a-z_]+)`", keys) for _, kind, keys in rows}


def missing(before: dict[str, Any], now: dict[str, Any], path: str = "") -> list[str]:
    """Return what ``before`` has and ``now`` has not, as paths: ``names.npusim.run.seq``."""
    gone: list[str] = []
    for key, value in before.items():
        at = f"{path}{key}"
        if key not in now:
            gone.append(at)
        elif isinstance(value, dict):
            gone += missing(value, now[key], f"{at}.")
        elif isinstance(value, list):
            gone += [f"{at}.{name}" for name in value if name not in now[key]]
    return gone


if __name__ == "__main__":
    FILE.write_text(json.dumps(surface(), indent=1) + "\n", encoding="utf-8")
