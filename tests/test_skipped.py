"""Tests that a run skips are listed in a file, so that CI runs exactly these with the packages that they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def test_skipped_tests_are_listed_and_others_are_not(
    pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(pytestconfig.rootpath / "tests" / "conftest.py"))
    file = tmp_path / "skipped"
    monkeypatch.setenv("SKIPPED_TESTS", str(file))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    skipped, failed, expected = (
        pytest.TestReport(name, ("a.py", 1, name), {}, outcome, None, when)
        for name, outcome, when in (
            ("a.py::skipped[no x]", "skipped", "setup"),
            ("a.py::failed", "failed", "call"),
            ("a.py::expected to fail", "skipped", "call"),
        )
    )
    expected.wasxfail = "a reason"  # as pytest reports it
    for report in (skipped, failed, expected):
        conftest.pytest_runtest_logreport(report)
    assert file.read_text().splitlines() == ["a.py::skipped[no x]"]
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")  # whose reports the process that runs it has too
    conftest.pytest_runtest_logreport(skipped)
    assert len(file.read_text().splitlines()) == 1
