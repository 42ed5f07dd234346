"""Exact cycles against accepted ones: whether a change moved any number, and on which pipe.

A baseline is a small YAML file (`config.baseline_file`), one case a file.  Cycles are whole and
deterministic, so any difference counts; the pipes that moved are named.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from npusim.config.baseline_file import ExpectedCycles, load_baseline, write_expected
from npusim.errors import NpusimError, SpecError
from npusim.request import Request
from npusim.simulate import run_request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npusim.config.baseline_file import BaselineFile
    from npusim.run_result import RunResult

__all__ = ["CaseOutcome", "check_baselines", "cycles_of", "run_baseline"]

Status = Literal["ok", "changed", "new", "failed", "updated"]


@dataclass(frozen=True)
class CaseOutcome:
    """What became of one case; ``moved`` has the pipes whose busy cycles changed, (old, new).

    ``status``: ``ok``; ``changed``; ``new`` (the file expects nothing yet); ``failed`` (it does not
    run any more, see ``reason``); ``updated`` (changed or new, and accepted).  ``method`` and ``band``
    are those of the new cycles.
    """

    name: str
    path: Path
    status: Status
    old_cycles: int | None = None
    new_cycles: int | None = None
    moved: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    device_changed: bool = False
    reason: str = ""
    method: str = ""
    band: float | None = None
    ignored: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the case is as expected, or was made so."""
        return self.status in ("ok", "updated")


def check_baselines(
    folder: str | Path,
    *,
    update: bool = False,
    on_case: Callable[[CaseOutcome, int], None] | None = None,
) -> tuple[CaseOutcome, ...]:
    """Run every baseline below ``folder`` (or the one file it names) and return what became of it.

    With ``update`` the new cycles are written into the files, which is refused in CI (where the
    environment variable ``CI`` is set).  ``on_case`` gets each outcome as it is there, and the
    number of cases.

    Raises
    ------
    SpecError
        There is no baseline, one is faulty, or ``update`` in CI.  All files are read before any
        case runs.
    """
    if update and _is_ci():
        raise SpecError(
            "--update is refused where the environment variable CI is set: "
            "accept new cycles on your own machine and commit them"
        )
    files = _baseline_files(Path(folder))
    loaded = [(file, load_baseline(file)) for file in files]
    outcomes = []
    for file, case in loaded:
        outcome = _check(file, case, update=update)
        outcomes.append(outcome)
        if on_case is not None:
            on_case(outcome, len(files))
    return tuple(outcomes)


def cycles_of(result: RunResult) -> ExpectedCycles:
    """Return the cycles of a result as a baseline keeps them."""
    busy: dict[str, int] = {}
    for uses in result.timing.queues if result.timing is not None else ():
        for use in uses:
            busy[use.queue] = busy.get(use.queue, 0) + use.busy_cycles
    return ExpectedCycles(
        device_digest=result.device.digest(), cycles=result.cycles, busy_cycles=busy
    )


def run_baseline(case: BaselineFile, beside: Path) -> RunResult:
    """Run a case; paths in it are relative to the folder ``beside``."""
    places = {"hw": _resolved(case.hw, beside), "workload": _resolved(case.workload, beside)}
    return run_request(Request.of({**dict(case), **places, "numerics": False, "trace_groups": ()}))


def _baseline_files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise SpecError(f"{folder}: no such baseline, nor a folder of them")
    found = sorted(p for p in folder.rglob("*.yaml") if not p.name.startswith("."))
    if not found:
        raise SpecError(f"{folder}: holds no baseline (*.yaml); see npusim check --help for one")
    return found


def _check(file: Path, case: BaselineFile, *, update: bool) -> CaseOutcome:
    name, old = file.stem, case.expect
    try:
        result = run_baseline(case, file.parent)
        new, timing = cycles_of(result), result.timing
    except NpusimError as error:
        old_cycles = None if old is None else old.cycles
        # An override of the file is what `-C` is on the command line.
        reason = re.sub(r"^-C ", "overrides: ", str(error), flags=re.MULTILINE)
        return CaseOutcome(name, file, "failed", old_cycles, reason=reason)
    moved = {} if old is None else _moved(old.busy_cycles, new.busy_cycles)
    is_same = old is not None and not moved and old.cycles == new.cycles
    status: Status = "ok" if is_same else "new" if old is None else "changed"
    # The digest alone is no change of cycles, but an accepted file names the device of today.
    if update and old != new:
        write_expected(file, new)
        status = "ok" if is_same else "updated"
    return CaseOutcome(
        name,
        file,
        status,
        None if old is None else old.cycles,
        new.cycles,
        moved,
        device_changed=old is not None and old.device_digest != new.device_digest,
        method=timing.method if timing else "",
        band=timing.band if timing else None,
        ignored=result.ignored,
    )


def _moved(old: Mapping[str, int], new: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    pipes = dict.fromkeys([*old, *new])
    return {p: (old.get(p, 0), new.get(p, 0)) for p in pipes if old.get(p, 0) != new.get(p, 0)}


def _resolved(name: str, beside: Path) -> str | Path:
    return beside / name if name.endswith((".yaml", ".yml")) else name


def _is_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
