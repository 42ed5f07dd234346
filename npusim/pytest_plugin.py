"""Pytest fixture: cycles of a run, compared with the cycles stored next to the test.

It needs pytest-regressions (``npusim[pytest]``), whose ``data_regression`` stores the file (``--force-regen`` rewrites
it).  Every pytest run with npusim installed loads this module, so it imports nothing slow.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from npusim.simulation.run_result import RunData

__all__ = ["CyclesRegression", "cycles_regression"]


class _DataRegression(Protocol):
    """The used part of pytest-regressions' fixture."""

    original_datadir: Path

    def check(self, data_dict: dict[str, object], basename: str | None = None) -> None:
        """Compare with the stored file, or store it."""


class CyclesRegression:
    """Compares the cycles of runs with stored ones, by pipe, operation and wait.

    Examples
    --------
    ::

        def test_flash(cycles_regression):
            result = npusim.run("flash", seq=1024, numerics=False)
            cycles_regression.check(result)
    """

    def __init__(self, request: pytest.FixtureRequest, data_regression: _DataRegression) -> None:
        self._request, self._data_regression = request, data_regression

    def check(self, result: RunData, rtol: float = 0, *, basename: str | None = None) -> None:
        """Fail if the cores' cycles, or a pipe's, differ from the stored ones; name the part that changed.

        ``rtol`` is the allowed relative difference of the cores' cycles, and of a pipe's busy cycles (0: exact, to the
        last operation and wait).  ``basename`` names the file; by default it is the test's name, so that a test with
        two checks must set it.
        """
        __tracebackhide__ = True
        import re

        from npusim.config.cases import ExpectedCycles
        from npusim.config.document import read_document
        from npusim.studies.baseline.cycles import cycles_of, why_of

        obtained: dict[str, Any] = cycles_of(result).model_dump(exclude={"device_digest", "accepted"})
        name = basename or re.sub(r"[\W]", "_", self._request.node.name)
        file = Path(self._data_regression.original_datadir) / f"{name}.yml"
        stored = read_document(file).data if file.is_file() else {}
        why = why_of(ExpectedCycles(device_digest="stored", **stored), result) if "units" in stored else ""
        if rtol and stored:
            totals = {key: obtained[key] for key in ("cycles", "busy_cycles")}
            obtained = {**obtained, "units": stored.get("units"), **_snapped(totals, stored, rtol)}
        try:
            self._data_regression.check(obtained, basename=basename)
        except AssertionError as error:
            if why:
                error.add_note(f"npusim: {why}")
            raise


def _snapped(obtained: dict[str, object], stored: dict[str, object], rtol: float) -> dict[str, object]:
    """Return ``obtained`` with every number that is near enough replaced by the stored one."""
    snapped: dict[str, object] = {}
    for key, value in obtained.items():
        old = stored.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            snapped[key] = _snapped(value, old, rtol)
        elif isinstance(value, int) and isinstance(old, int) and abs(value - old) <= rtol * old:
            snapped[key] = old
        else:
            snapped[key] = value
    return snapped


@pytest.fixture
def cycles_regression(request: pytest.FixtureRequest) -> CyclesRegression:
    """Return an object whose ``check(result)`` compares cycles with the test's stored cycles."""
    try:
        return CyclesRegression(request, request.getfixturevalue("data_regression"))
    except pytest.FixtureLookupError:
        why = "cycles_regression needs pytest-regressions: python -m pip install 'npusim[pytest]'"
        raise pytest.UsageError(why) from None
