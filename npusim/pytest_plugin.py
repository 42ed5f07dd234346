"""Pytest fixtures: cycles of a run, and which schedule and tile wins, against those stored beside the test.

They need pytest-regressions (``npusim[pytest]``), whose ``data_regression`` keeps the files (``--force-regen`` rewrites
them).  Whoever has npusim installed loads this module in every pytest run, so it imports nothing of weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from npusim.explore.exploration import Exploration
    from npusim.simulation.result import RunData

__all__ = ["CyclesRegression", "DecisionRegression", "cycles_regression", "decision_regression"]


class _DataRegression(Protocol):
    """What is used of pytest-regressions' fixture."""

    original_datadir: Path

    def check(self, data_dict: dict[str, object], basename: str | None = None) -> None:
        """Compare with the stored file, or store it."""


class _Stored:
    """What both fixtures are: a test's stored file, and the fixture that compares with it."""

    def __init__(self, request: pytest.FixtureRequest, data_regression: _DataRegression) -> None:
        self._request, self._data_regression = request, data_regression

    def _stored(self, basename: str | None) -> dict[str, Any]:
        """Return what the file holds; nothing where it is not there yet."""
        import re

        from npusim.config.document import read_document

        name = basename or re.sub(r"[\W]", "_", self._request.node.name)
        file = Path(self._data_regression.original_datadir) / f"{name}.yml"
        return read_document(file).data if file.is_file() else {}

    def _check(self, obtained: dict[str, object], basename: str | None, why: str) -> None:
        __tracebackhide__ = True
        try:
            self._data_regression.check(obtained, basename=basename)
        except AssertionError as error:
            if why:
                error.add_note(f"npusim: {why}")
            raise


class CyclesRegression(_Stored):
    """Compares the cycles of runs with stored ones, by pipe, operation and wait.

    Examples
    --------
    ::

        def test_flash(cycles_regression):
            result = npusim.run("flash", seq=1024, numerics=False)
            cycles_regression.check(result)
    """

    def check(self, result: RunData, rtol: float = 0, *, basename: str | None = None) -> None:
        """Fail if the cores' cycles, or a pipe's, differ from the stored ones; say which part moved.

        ``rtol`` allows the cores' cycles, and those a pipe is busy, that relative difference (0: exact, to
        the last operation and wait).  ``basename`` names the file; by default it has the test's name, so a
        test that checks twice needs it.
        """
        __tracebackhide__ = True
        from npusim.baseline.cycles import cycles_of, why_of
        from npusim.config.cases import ExpectedCycles

        obtained: dict[str, Any] = cycles_of(result).model_dump(exclude={"device_digest", "accepted"})
        stored = self._stored(basename)
        why = why_of(ExpectedCycles(device_digest="stored", **stored), result) if "units" in stored else ""
        if rtol and stored:
            totals = {key: obtained[key] for key in ("cycles", "busy_cycles")}
            obtained = {**obtained, "units": stored.get("units"), **_snapped(totals, stored, rtol)}
        self._check(obtained, basename, why)


class DecisionRegression(_Stored):
    """Compares which schedule and tile wins with what is stored.

    Examples
    --------
    ::

        def test_tile(decision_regression):
            found = npusim.explore("flash", {"block_kv": [128, 256]}, seq=1024)
            decision_regression.check(found)
    """

    def check(self, *searched: Exploration, numerics: bool = True, basename: str | None = None) -> None:
        """Fail if another schedule or tile wins than the stored one, or one that is (or is not) finite.

        ``searched`` are the candidates, one schedule and precision each; ``numerics`` says whether the best
        points' outputs are looked at.  Times and margins may move.
        """
        __tracebackhide__ = True
        from npusim.baseline.decision import decide, outcome_of

        candidates = [outcome_of(_name(e), e, numerics=numerics) for e in searched]
        obtained = decide(candidates).expected().model_dump(mode="json", exclude={"device_digest", "accepted"})
        self._check(_choices(obtained, self._stored(basename)), basename, "")


def _name(searched: Exploration) -> str:
    request = searched.request
    return f"{request.schedule} {request.precision}" if request.precision else request.schedule


def _choices(obtained: dict[str, Any], stored: dict[str, Any]) -> dict[str, object]:
    """Return what was obtained with all that may move as it is stored: times, margins, cycles."""
    moves = ("latency_us", "margin", "cycles")
    before = {c["candidate"]: c for c in stored.get("choices", ())}
    choices = [
        {key: before.get(c["candidate"], c).get(key, value) if key in moves else value for key, value in c.items()}
        for c in obtained["choices"]
    ]
    return {**obtained, "choices": choices, "margin": stored.get("margin", obtained["margin"])}


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
    """Return an object whose ``check(result)`` compares cycles with those stored for the test."""
    return CyclesRegression(request, _data_regression(request, "cycles_regression"))


@pytest.fixture
def decision_regression(request: pytest.FixtureRequest) -> DecisionRegression:
    """Return an object whose ``check(*explorations)`` compares who wins with what is stored for the test."""
    return DecisionRegression(request, _data_regression(request, "decision_regression"))


def _data_regression(request: pytest.FixtureRequest, fixture: str) -> Any:
    try:
        return request.getfixturevalue("data_regression")
    except pytest.FixtureLookupError:
        raise pytest.UsageError(f"{fixture} needs pytest-regressions: python -m pip install 'npusim[pytest]'") from None
