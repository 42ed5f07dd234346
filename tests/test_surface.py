"""The public surface is that of the last release, and what it lost was deprecated a minor version before."""

from __future__ import annotations

import copy
import json
from typing import Any

import npusim
from tests.surface import FILE, missing, surface

LAST: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))


def _minor(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def test_nothing_public_is_lost_without_a_minor_version_of_warning() -> None:
    gone = missing({k: LAST[k] for k in ("names", "verbs", "documents")}, surface())
    unannounced = [
        name for name in gone if name not in LAST["deprecated"] or _minor(npusim.__version__) <= _minor(LAST["version"])
    ]
    assert unannounced == [], "deprecate the name for a minor version first (.github/CONTRIBUTING.md, Deprecation)"


def test_the_stored_surface_is_that_of_this_version_or_the_one_before() -> None:
    (major, minor), (now_major, now_minor) = _minor(LAST["version"]), _minor(npusim.__version__)
    assert major == now_major
    assert now_minor - minor in (0, 1), "a release stores its surface: python -m tests.surface"


def test_the_comparison_finds_what_is_lost() -> None:
    less = copy.deepcopy(surface())
    del less["names"]["npusim"]["compare"]
    less["names"]["npusim"]["run"].remove("seq")
    less["verbs"].remove("stress")
    less["documents"]["npusim.compare"].remove("moved")
    assert missing(surface(), less) == [
        "names.npusim.compare",
        "names.npusim.run.seq",
        "verbs.stress",
        "documents.npusim.compare.moved",
    ]
    assert missing(less, surface()) == []
