"""What became of one case, and the writing of what it gives today into its file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from npusim import __version__
from npusim.config.cases import BaselineFile, DecisionFile, accepted_text
from npusim.report.output import write_whole
from npusim.simulation.request import Request

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.config.cases import Case, ExpectedCycles, ExpectedDecision
    from npusim.errors import NpusimError

Status = Literal["ok", "changed", "new", "failed", "updated"]
#: What an acceptance says where nothing was accepted before.
FIRST = "first accepted"


@dataclass(frozen=True)
class Row:
    """One thing that is held against what was accepted: cycles, or a choice in words; ``change`` is relative."""

    name: str
    old: int | str | None
    new: int | str | None
    change: float | None = None
    why: str = ""


@dataclass(frozen=True)
class CheckOutcome:
    """What became of one case.

    ``status``: ``ok``; ``changed``; ``new`` (the file expects nothing yet); ``failed`` (it does not
    run any more, see ``reason``); ``updated`` (changed or new, and accepted).  ``rows`` say old and new: of cycles
    the kernel's, of a decision the winner and each candidate's best point that changed.  ``moved`` are the parts
    of units that changed (unit, kind and name, old, new cycles), the largest first; ``method`` and ``band`` are
    those of the new cycles.
    """

    kind: Literal["cycles", "decision"]
    name: str
    path: Path
    status: Status
    rows: tuple[Row, ...] = ()
    reason: str = ""
    moved: tuple[tuple[str, str, int, int], ...] = ()
    device_changed: bool = False
    method: str = ""
    band: float | None = None
    ignored: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the case is as expected, or was made so."""
        return self.status in ("ok", "updated")


@dataclass(frozen=True)
class Update:
    """Accepts what a case gives: writes it into the case's file, with the reason."""

    path: Path
    case: BaselineFile | DecisionFile
    reason: str

    def accept(self, status: Status, new: ExpectedCycles | ExpectedDecision) -> Status:
        """Write what is new and return the status after it; what was accepted is replaced for a reason only."""
        old = self.case.expect
        if old is None:
            self._write(new, self.reason or FIRST)
            return "updated"
        was = None if old.accepted is None else old.accepted.reason
        alike = new.model_copy(update={"device_digest": old.device_digest, "accepted": old.accepted}) == old
        if alike and new.device_digest != old.device_digest:
            self._write(new, was or FIRST)  # nothing else changed: it names the device of today
        elif not alike and self.reason:
            self._write(new, self.reason)
            return "updated" if status == "changed" else status
        return status

    def _write(self, new: ExpectedCycles | ExpectedDecision, reason: str) -> None:
        write_whole(self.path, accepted_text(self.path, self.case, new, __version__, reason).encode())


def request_of(case: Case, schedule: str, beside: Path) -> Request:
    """Return what a case asks for of a schedule; paths, a schedule's too, are relative to the folder ``beside``."""
    places = {
        "hw": _resolved(case.hw, beside),
        "workload": case.workload and _resolved(case.workload, beside),
        "schedule": str(beside / schedule) if schedule.rpartition(":")[0].endswith(".py") else schedule,
    }
    return Request.of({**dict(case), **places, "numerics": False, "trace_groups": ()})


def said(error: NpusimError) -> str:
    """Return an error's text in the words of the file: an override of it is what `-C` is on the command line."""
    return re.sub(r"^-C ", "overrides: ", str(error), flags=re.MULTILINE)


def _resolved(name: str, beside: Path) -> str | Path:
    return beside / name if name.endswith((".yaml", ".yml")) else name
