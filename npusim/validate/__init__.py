"""Compares predictions with measurements: times, and vectors of matrix units.

``validate(path)`` looks at the file and returns the report of its kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from npusim.errors import SpecError
from npusim.simulation.request import refuse
from npusim.validate.bits import BitsReport, validate_bits
from npusim.validate.times import TimesReport, validate_times

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BitsReport", "TimesReport", "validate", "validate_bits", "validate_times"]


def validate(
    path: str | Path,
    *,
    only: str | None = None,
    band: float | None = None,
    method: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> TimesReport | BitsReport:
    """Return the report of a file: ``.yaml`` of timings, ``.npz`` of vectors.

    ``only`` selects cases by name, schedule or device (a glob); ``band`` is the relative error
    allowed where the file states none; ``progress`` is called with each case before it is predicted.
    """
    file = Path(path)
    if not file.exists():
        raise SpecError(f"{file}: no such file")
    if file.suffix == ".npz":
        timed = {"band": band, "method": None if method == "auto" else method}
        refuse(timed, "read for timings (.yaml); bits of an .npz are equal or not: leave these options out")
        return validate_bits(file, only=only)
    if file.suffix in (".yaml", ".yml"):
        return validate_times(file, only=only, band=band, method=method, progress=progress)
    raise SpecError(f"{file}: neither .yaml (timings) nor .npz (vectors of matrix units)")
