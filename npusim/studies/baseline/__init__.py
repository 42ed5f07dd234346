"""Compares accepted results with new ones: cycles exactly, and which schedule and tile is the fastest.

A case is a small YAML file (`config.cases`); ``npusim check`` runs a folder of them, and the
fixtures of `npusim.pytest_plugin` do the same inside a test suite.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from npusim.config.cases import BaselineFile, DecisionFile, load_case
from npusim.errors import NpusimError, SpecError
from npusim.simulation.figures import figures
from npusim.studies.baseline.cycles import CheckOutcome, Comparison, Update, cycles_of, cycles_today, failed
from npusim.studies.baseline.decision import decision_today

__all__ = ["CheckOutcome", "check_baselines", "cycles_of"]


def check_baselines(
    folder: str | Path,
    *,
    tolerance: float = 0.0,
    update: bool = False,
    reason: str = "",
    on_case: Callable[[CheckOutcome, int], None] | None = None,
) -> tuple[CheckOutcome, ...]:
    """Run every case below ``folder`` (or the one file that it names) and return the outcomes.

    ``tolerance`` is the allowed relative difference of a kernel's cycles, and of a pipe's busy cycles, from the
    accepted ones.  It is also the share by which an accepted winner may be slower than the current one.  With
    ``update`` the result of a case is written into its file together with ``reason``; without a reason no accepted
    result is replaced. ``update`` is refused in CI (where the environment variable ``CI`` is set).  ``on_case`` gets
    each outcome as soon as it is known, and the number of cases.

    Raises `SpecError` if there is no case, if a case is faulty or was edited by hand, or if ``update`` is set in CI.
    All files are read before any case runs.  Raises `OutputError` if a file cannot be written; the file is then
    unchanged.
    """
    if update and os.environ.get("CI", "").lower() not in ("", "0", "false"):
        raise SpecError(
            "--update is refused where the environment variable CI is set: "
            "accept the changes on your own machine and commit them"
        )
    if not 0 <= tolerance < 1:
        raise SpecError(f"tolerance {tolerance:g}: write a share from 0 to less than 1: 0.01, or 1%")
    files = _files(Path(folder))
    loaded = [(file, load_case(file, is_edited=update)) for file in files]
    outcomes = []
    for (file, case), compare in figures(loaded, _today, refused=_refused):
        outcomes.append(compare(tolerance, Update(file, case, reason) if update else None))
        if on_case is not None:
            on_case(outcomes[-1], len(files))
    return tuple(outcomes)


def _today(loaded: tuple[Path, BaselineFile | DecisionFile]) -> Comparison:
    file, case = loaded
    return cycles_today(file, case) if isinstance(case, BaselineFile) else decision_today(file, case)


def _refused(loaded: tuple[Path, BaselineFile | DecisionFile], error: NpusimError) -> Comparison:
    return lambda *_: failed(*loaded, error)


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise SpecError(f"{folder}: there is no such baseline or folder of baselines")
    files = sorted(p for p in folder.rglob("*.yaml") if not p.name.startswith("."))
    if not files:
        raise SpecError(f"{folder}: contains no baseline (*.yaml); `npusim check --help` explains them")
    return files
