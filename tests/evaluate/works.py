"""Answers of processes, for tests of the processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npusim.studies.evaluate.child import Question


def process_number(_question: Question) -> dict[str, Any]:
    return {"number": os.getpid()}


def dies(_question: Question) -> dict[str, Any]:
    os._exit(9)


def loops(_question: Question) -> dict[str, Any]:
    while True:
        pass


def writes(question: Question) -> dict[str, Any]:
    Path(question.more["file"]).write_text("x", encoding="utf-8")
    return {}
