"""One loop for studies of changes: `npusim.simulation.figures`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from npusim.errors import NpusimError, SpecError, TilingError
from npusim.simulation.figures import figures
from tests.parsed import nodes_of_kind, tree_of

PACKAGE = Path(__file__).resolve().parents[1] / "npusim"


def half(number: int) -> float:
    if number == 3:
        raise TilingError("3 does not fit")
    return number / 2


def test_a_change_that_does_not_fit_has_no_figure() -> None:
    assert list(figures([2, 3, 4], half)) == [(2, 1.0), (4, 2.0)]
    assert list(figures([2, 3, 4], half, (TilingError,))) == [(2, 1.0), (4, 2.0)]


@pytest.mark.parametrize("unfit", [(), (SpecError,)])
def test_other_errors_are_raised(unfit: tuple[type[NpusimError], ...]) -> None:
    found = figures([2, 3, 4], half, unfit)
    assert next(found) == (2, 1.0)
    with pytest.raises(TilingError, match="3 does not fit"):
        next(found)


def test_a_change_that_does_not_fit_may_have_its_reason() -> None:
    reasons = figures([2, 3], lambda n: str(half(n)), refused=lambda n, error: f"{n}: {error}")
    assert [text for _, text in reasons] == ["1.0", "3: 3 does not fit"]
    with pytest.raises(TilingError):
        list(figures([3], half, (SpecError,), refused=lambda *_: 0.0))


def _errors_of_npusim(handler: ast.ExceptHandler) -> bool:
    names = {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)} if handler.type else set()
    return bool(names & {"NpusimError", "SpecError", "TilingError"})


def test_no_study_of_alternatives_has_a_loop_of_its_own() -> None:
    """A loop that goes on to the next change after an error of npusim's is `figures`."""
    files = [PACKAGE / f"simulation/{name}.py" for name in ("robustness", "sensitivity", "simulate", "plan")]
    files += (PACKAGE / "studies").rglob("*.py")
    assert len(files) > 40
    found = []
    for path in files:
        for loop in nodes_of_kind(tree_of(path), ast.For):
            handlers = (h for n in ast.walk(loop) if isinstance(n, ast.Try) for h in n.handlers)
            ours = (h for h in handlers if isinstance(h.body[-1], ast.Continue) and _errors_of_npusim(h))
            found += [f"{path.name}:{h.lineno}" for h in ours]
    assert found == []
