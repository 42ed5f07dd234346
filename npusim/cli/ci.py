"""Outcomes of checks in the forms of continuous integration: annotations of GitHub Actions, and JUnit's XML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from npusim.studies.baseline import CheckOutcome

#: GitHub's escapes in a message, and the additional escapes in a property (actions/toolkit, command.ts).
_MESSAGE = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = str.maketrans({**{chr(c): t for c, t in _MESSAGE.items()}, ":": "%3A", ",": "%2C"})
#: The start of a fault in a file.
_FILE = re.compile(r"(?P<file>\S.*?):(?P<line>\d+)\s")


def github_lines(outcomes: Iterable[CheckOutcome], why: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each failed case that GitHub shows at the case's file, or at the file that is faulty.

    ``why``: lines about each case, by the case's name.
    """
    return [
        f"::error {_place(o)},title={f'{o.name}: {o.status}'.translate(_PROPERTY)}"
        f"::{_message(o, why).translate(_MESSAGE)}"
        for o in outcomes
        if not o.passed
    ]


def junit(outcomes: Sequence[CheckOutcome], why: Mapping[str, Sequence[str]]) -> str:
    """Return the outcomes as one suite of JUnit: a case that does not run is an error, a changed case is a failure."""
    failed = [o for o in outcomes if not o.passed]
    errors = sum(o.status == "failed" for o in failed)
    counts = {"tests": str(len(outcomes)), "failures": str(len(failed) - errors), "errors": str(errors)}
    suite = ET.Element("testsuite", {"name": "npusim check", **counts})
    for o in outcomes:
        case = ET.SubElement(suite, "testcase", {"classname": o.kind, "name": o.name, "file": str(o.path)})
        if not o.passed:
            kind = "error" if o.status == "failed" else "failure"
            ET.SubElement(case, kind, {"message": o.status}).text = _message(o, why)
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _place(outcome: CheckOutcome) -> str:
    """Return the file of an annotation, and its line if a reason begins with one: ``FILE:LINE  KEY: ...``."""
    named = _FILE.match(outcome.reason)
    if named is None or not Path(named["file"]).is_file():
        return f"file={str(outcome.path).translate(_PROPERTY)}"
    return f"file={named['file'].translate(_PROPERTY)},line={named['line']}"


def _message(outcome: CheckOutcome, why: Mapping[str, Sequence[str]]) -> str:
    moved = [f"was {row.old}, is {row.new} {row.why}".strip() for row in outcome.rows[:1]]
    return "\n".join([*moved, *why.get(outcome.name, ())]) or outcome.status
