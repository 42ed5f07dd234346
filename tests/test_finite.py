"""An output that is not finite: no error figure, and what would have been finite on the same sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from npusim.config.problem import Problem, UniformData
from npusim.run import run

pytestmark = pytest.mark.usefixtures("declared_tiles")


def overflowing(**fields: Any) -> Any:
    """Return a run on scores of 115,200, which float16 does not hold; PASA table 4's first case."""
    data = UniformData(kind="uniform", x0=30.0, amplitude=0.5)
    problem = Problem(heads=1, seq_q=16, seq_kv=128, head_dim=128, data=data)
    return run(problem=problem, numerics=True, trace_groups=(), **fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"schedule": "flash", "precision": "fa16_32"}, [("flash", "fa2_fp32"), ("pasa", "fp16_mean")]),
        ({"schedule": "standard"}, [("flash", "fa2_fp32")]),
        (
            {"schedule": "flash", "hw": "h200", "precision": "scores=float16", "tiling": {"block_q": 64}},
            [("flash", "fa2_fp32"), ("pasa", "fp16_mean")],
        ),
        ({"schedule": "volta_flash"}, [("volta_flash", "acc_fp32"), ("flash", "fa2_fp32")]),
    ],
)
def test_what_is_finite_on_the_same_sample_is_named_with_its_error(
    fields: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    found = overflowing(**fields)
    assert not found.numerics.error.is_finite
    assert found.numerics.first_events[0].kind == "overflow"
    assert found.spread == ()
    assert [(f.schedule, f.precision) for f in found.finite] == expected
    for choice in found.finite:
        changed = {**fields, "schedule": choice.schedule, "precision": choice.precision}
        if choice.schedule != fields["schedule"]:
            changed.pop("tiling", None)
        again = overflowing(**{"hw": found.device.name, **changed})
        assert choice.rmse == again.numerics.error.rmse < 1e-2


def test_a_finite_output_names_nothing() -> None:
    assert overflowing(schedule="flash").finite == ()


def test_what_overflows_as_well_is_passed_over() -> None:
    """Flat scores and large values: a float16 sum of P V overflows in fa16 and in PASA alike."""
    tensors = {n: np.zeros((1, 1, 16, 64), np.float16) for n in "qk"}
    tensors["v"] = np.full((1, 1, 16, 64), 65504.0, np.float16)
    found = run("flash", tensors=tensors, precision="fa16", causal=False, trace_groups=())
    assert found.numerics is not None
    assert not found.numerics.error.is_finite
    named = [(f.schedule, f.precision) for f in found.finite]
    assert named == [("flash", "fa2_fp32"), ("two_level", "fa2_fp32")]
