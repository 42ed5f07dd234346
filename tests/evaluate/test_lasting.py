"""The process that stays for questions about packaged kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from npusim.cli.answers import answered
from npusim.errors import SpecError
from npusim.simulation.request import Request
from npusim.studies.evaluate.child import Question, timed
from npusim.studies.evaluate.lasting import lasting
from npusim.studies.evaluate.limits import Limits
from tests.evaluate import works

HERE = Path(__file__).parent
LIMITS = Limits(60, 4 << 30)
SHORT = Request("flash", hw="h200", seq=256)


def number(limits: Limits = LIMITS, request: Request = SHORT) -> int:
    """Return the number of the process that answers."""
    return int(answered(Question(works.process_number, request), limits)["number"])


def test_packaged_kernels_share_a_process_and_foreign_ones_have_one_each() -> None:
    first = number()
    assert number(request=Request("gemm", hw="h200")) == first
    file = f"{HERE / 'attention_kernels.py'}:each_tile"
    foreign = [
        replace(SHORT, schedule=file),
        replace(SHORT, tiling={"kernel": f"{HERE / 'attention_kernels.py'}:published"}),
        replace(SHORT, schedule=f"{HERE / 'attention_kernels.py'}::f[1](1)"),
    ]
    others = [number(request=request) for request in foreign]
    assert len({first, *others}) == 4
    assert number() == first


@pytest.mark.parametrize("work", [works.dies, works.loops])
def test_the_end_of_the_process_is_an_answer_and_the_next_question_has_another(work: Any) -> None:
    limits = Limits(1.5, 4 << 30)
    first = number(limits)
    with pytest.raises(SpecError, match=r"ended with exit code 9|no answer within"):
        answered(Question(work, SHORT), limits)
    assert number(limits) != first


@pytest.mark.parametrize("limits", [Limits(0.001, 4 << 30), Limits(60, 1 << 20)])
def test_a_process_that_has_used_its_limits_is_replaced(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = lasting(Limits(60, 4 << 30))
    first = number()
    monkeypatch.setattr(kept, "limits", limits)
    assert number() == first  # the process is replaced after its answer
    monkeypatch.setattr(kept, "limits", LIMITS)
    assert number() != first


def test_the_process_may_write_to_the_cache_alone(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="must not change"):
        answered(Question(works.writes, SHORT, {"file": str(tmp_path / "x")}), LIMITS)
    assert not (tmp_path / "x").exists()


def test_times_are_those_of_a_new_process() -> None:
    assert answered(Question(timed, SHORT), LIMITS) == timed(Question(timed, SHORT.placed()))
