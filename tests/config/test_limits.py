"""Numbers no machine has are refused where they are read, not found out by an overflow or a hang."""

from __future__ import annotations

import pytest

from npusim import run
from npusim.config.load import list_devices, load_device
from npusim.config.node_file import load_machine
from npusim.errors import SpecError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # each was an OverflowError, a MemoryError, a run of no end, or a deadlock that was none
        ("links.hbm.bytes_per_s=1e-300", "1e-300 must be between 1 and 1e+24"),
        ("links.hbm.bytes_per_s=1000", "too small: at 1.8 GHz a rate must be at least 1.76e+06"),
        ("clock_hz=1e-300", "1e-300 must be between 1e+06 and 1e+12"),
        ("cores.aic.engines.CUBE.queue_depth_count=1000000", "must be between 1 and 65,536"),
        ("flags.cross_core_latency_cycles=1000000000000000000", "must be between 0 and 1e+09"),
        ("cores.aic.engines.MTE1.routes.l1_l0a.bytes_per_cycle=1e-300", "must be between 0.000977"),
        ("group_count=1000000", "1000000 must be between 1 and 4,096"),
    ],
)
def test_what_no_machine_has_names_the_key_and_the_range(change: str, message: str) -> None:
    key, _, value = change.partition("=")
    with pytest.raises(SpecError) as error:
        load_device("ascend_910b2", {key: value})
    assert str(error.value).startswith(f"-C {change}: ")
    assert message in str(error.value)


def test_nodes_are_held_to_the_same() -> None:
    with pytest.raises(SpecError, match=r"-C drivers.aiv.modes.ub.start_s=1e9: .* 0 and 3,600"):
        load_machine("ascend_910b2_x8", {"drivers.aiv.modes.ub.start_s": "1e9"})


@pytest.mark.parametrize("value", ["1e24", "1.76e6"])
def test_the_ends_of_the_range_run(value: str) -> None:
    changes = {"links.hbm.bytes_per_s": value}
    assert run("flash", seq=128, numerics=False, trace_groups=(), overrides=changes).cycles > 0


def test_every_device_lies_within() -> None:
    assert all(load_device(name) for name in list_devices())
