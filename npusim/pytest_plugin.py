"""The pytest fixture ``cycles_regression``: cycles of a run against those stored beside the test.

It needs pytest-regressions, whose ``data_regression`` keeps the file (``--force-regen`` rewrites
it).  Whoever has npusim installed loads this module in every pytest run, so it imports nothing of
weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from npusim.run_result import RunResult

__all__ = ["CyclesRegression", "cycles_regression"]


class _DataRegression(Protocol):
    """What is used of pytest-regressions' fixture."""

    original_datadir: Path

    def check(self, data_dict: dict[str, object], basename: str | None = None) -> None:
        """Compare with the stored file, or store it."""


class CyclesRegression:
    """Compares the cycles of runs with stored ones, by pipe.

    Examples
    --------
    ::

        def test_flash(cycles_regression):
            result = npusim.run("flash", seq=1024, numerics=False)
            cycles_regression.check(result)
    """

    def __init__(self, request: pytest.FixtureRequest, data_regression: _DataRegression) -> None:
        self._request, self._data_regression = request, data_regression

    def check(self, result: RunResult, rtol: float = 0, *, basename: str | None = None) -> None:
        """Fail if the kernel's cycles or a pipe's busy cycles differ from the stored ones.

        ``rtol`` allows each number that relative difference (0: exact).  ``basename`` names the
        file; by default it has the test's name, so a test that checks twice needs it.
        """
        __tracebackhide__ = True
        from npusim.baseline import cycles_of

        obtained: dict[str, object] = cycles_of(result).model_dump(exclude={"device_digest"})
        if rtol:
            obtained = _snapped(obtained, self._stored(basename), rtol)
        self._data_regression.check(obtained, basename=basename)

    def _stored(self, basename: str | None) -> dict[str, object]:
        import re

        from npusim.config.document import read_document

        name = basename or re.sub(r"[\W]", "_", self._request.node.name)
        file = Path(self._data_regression.original_datadir) / f"{name}.yml"
        return read_document(file).data if file.is_file() else {}


def _snapped(
    obtained: dict[str, object], stored: dict[str, object], rtol: float
) -> dict[str, object]:
    """Return ``obtained`` with every number that is near enough replaced by the stored one."""
    made: dict[str, object] = {}
    for key, value in obtained.items():
        old = stored.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            made[key] = _snapped(value, old, rtol)
        elif isinstance(value, int) and isinstance(old, int) and abs(value - old) <= rtol * old:
            made[key] = old
        else:
            made[key] = value
    return made


@pytest.fixture
def cycles_regression(request: pytest.FixtureRequest) -> CyclesRegression:
    """Return an object whose ``check(result)`` compares cycles with those stored for the test."""
    try:
        data_regression = request.getfixturevalue("data_regression")
    except pytest.FixtureLookupError:
        raise pytest.UsageError(
            "cycles_regression needs pytest-regressions: python -m pip install pytest-regressions"
        ) from None
    return CyclesRegression(request, data_regression)
