"""What a user holds: each object that a public function returns states its attributes, an example and its class."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import re
from typing import Any

import pytest

import npusim
from npusim.kernels.triton.calls import Calls
from npusim.report.comparison import Comparison
from npusim.report.tuning import Tuning
from npusim.run import RunResult
from npusim.studies.evaluate.evaluation import Evaluation
from npusim.studies.explore.exploration import Exploration
from npusim.studies.invariance.examination import Invariance
from npusim.studies.stress.worst_search import Stress
from reports.site.build import MODULES

pytestmark = pytest.mark.usefixtures("declared_tiles")

OBJECTS: tuple[type, ...] = (RunResult, Exploration, Comparison, Tuning, Stress, Invariance, Calls, Evaluation)


def attributes(kind: type) -> set[str]:
    """Return the names under the heading Attributes of a class's docstring."""
    _, _, text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes\n----------\n")
    rows = re.split(r"\n\n[A-Z]\w+\n-+\n", text)[0].splitlines()
    return {name.strip() for row in rows if row[:1].strip() for name in row.partition(" : ")[0].split(",")}


def test_each_class_that_a_public_function_returns_is_in_the_list() -> None:
    functions = [f for name in npusim.__all__ if inspect.isfunction(f := getattr(npusim, name))]
    returned = {
        name for f in functions for name in re.findall(r"\b[A-Z]\w+", str(inspect.signature(f).return_annotation))
    }
    # `triton` returns the decorated kernel, which is Triton's.
    assert returned - {"Iterator", "Any"} <= {kind.__name__ for kind in OBJECTS}
    assert {f.__name__ for f in functions} >= {"run", "compare", "explore", "stress", "invariant", "evaluate", "record"}


@pytest.mark.parametrize("kind", OBJECTS, ids=lambda kind: kind.__name__)
def test_an_object_states_every_attribute(kind: Any) -> None:
    stated = attributes(kind)
    declared = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    hidden = {"compared", "asked", "digest", "folder", "ignored"}  # RunResult's, for files and the command line
    assert declared - hidden <= stated
    assert all(name in declared or hasattr(kind, name) for name in stated)


@pytest.mark.parametrize("kind", OBJECTS, ids=lambda kind: kind.__name__)
def test_the_example_of_an_object_is_true(kind: type) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(kind, kind.__name__)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("kind", OBJECTS, ids=lambda kind: kind.__name__)
def test_a_page_of_the_site_has_each_object(kind: type) -> None:
    assert f"{kind.__module__}.{kind.__name__}" in MODULES["objects"]


def test_objects_name_their_class_on_one_line() -> None:
    options: dict[str, Any] = {"seq": 64, "numerics": False}
    result = npusim.run("flash", **options)
    shown = [
        result,
        npusim.compare(result, "pasa", **options),
        npusim.explore("flash", {"block_kv": [64]}, seq=64),
        npusim.invariant("flash", seq=64, vary=["batch"]),
        npusim.stress("pasa", ["logit_std=1:2"], seq=64, budget_s=2),
        Calls(),
    ]
    for one in shown:
        assert repr(one).startswith(f"<{type(one).__name__}")
        assert "\n" not in repr(one)
        assert len(repr(one)) < 800
