"""Which tile of each schedule, and which schedule, wins on each device: kept in ``tests/baselines/``.

``npusim check tests/baselines --update --reason "..."`` accepts what is new.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from npusim.config.cases import DecisionFile, load_case
from npusim.config.load import list_devices, load_device
from npusim.config.problem import KernelProblem
from npusim.library import SCHEDULES
from npusim.studies.baseline import check_baselines

FOLDER = Path(__file__).resolve().parents[1] / "baselines"
#: Attention that no real kernel computes on the device (`Schedule.study`), and a node's row operations and operators.
LEFT_OUT = {
    "fp8_attention": "a study without FP8 products",
    **dict.fromkeys(("rows", "operator"), "part of a layer, run on its node"),
}


def test_every_schedule_on_every_device_with_a_time_has_a_decision() -> None:
    kept = set()
    for file in FOLDER.glob("*.yaml"):
        case = load_case(file)
        assert isinstance(case, DecisionFile)
        assert case.expect is not None, file.name
        assert all(c.point is not None for c in case.expect.choices), file.name
        kept |= {(candidate.schedule, case.hw) for candidate in case.candidates}
    devices = {name: load_device(name) for name in list_devices()}
    timed = {name: device for name, device in devices.items() if device.is_timed}
    wanted = {
        (s, hw)
        for hw, device in timed.items()
        for (s, family), schedule in SCHEDULES.items()
        if family == device.family and not schedule.unsupported(device)
        if schedule.problem is not KernelProblem  # a decision is of attention or of a product
    }
    # What is made for one instruction runs on the devices that have it.
    without = {*(("volta_flash", hw) for hw in ("h200", "a10", "t4")), ("fp8_attention", "v100")}
    assert {(s, hw) for s, hw in wanted - kept if s not in LEFT_OUT} <= without
    assert kept <= wanted


@pytest.mark.parametrize("name", ["ascend_910b2_gemm"])
def test_a_decision_is_as_accepted(name: str) -> None:
    (outcome,) = check_baselines(FOLDER / f"{name}.yaml")
    assert outcome.passed, outcome


@pytest.mark.exhaustive
def test_all_decisions_are_as_accepted() -> None:
    assert [o.rows for o in check_baselines(FOLDER) if not o.passed] == []
