from __future__ import annotations

import pytest

from npusim.machines.tracks import track_of


@pytest.mark.parametrize(
    ("group", "queue", "expected"),
    [
        (0, "aic.CUBE", ("core0.cubecore0", "CUBE")),
        (0, "aiv0.VECTOR", ("core0.veccore0", "VECTOR")),
        (23, "aiv1.MTE3", ("core23.veccore1", "MTE3")),
        (3, "sm.TENSOR", ("sm3", "TENSOR")),
        (3, "sm1.TENSOR", ("sm3.1", "TENSOR")),
    ],
)
def test_track_names_are_those_of_the_vendors_simulator(group: int, queue: str, expected: tuple[str, str]) -> None:
    assert track_of(group, queue) == expected
