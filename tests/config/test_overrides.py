from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from npusim.config.load import apply_overrides, load_device
from npusim.kernels.declare.define import unread_keys

if TYPE_CHECKING:
    from collections.abc import Callable


def test_an_override_is_assumed_and_comes_from_the_command_line() -> None:
    device = load_device("ascend_910b2", {"flags.cross_core_latency_cycles": "300"})
    latency = device.flags.cross_core_latency_cycles
    assert (latency.value, latency.basis, latency.source) == (300, "assumed", "command line")


def test_overrides_leave_everything_else_and_the_device_itself_alone() -> None:
    device = load_device("ascend_910b2")
    changed = apply_overrides(device, {"clock_hz": "1.5e9", "cores.aiv.per_group_count": "1"})
    before, after = dict(device.quantities()), dict(changed.quantities())
    assert {key for key in before if before[key] != after[key]} == {"clock_hz", "cores.aiv.per_group_count"}
    assert device.clock_hz.value == 1.8e9


def test_choices_names_and_unset_numbers_can_be_overridden() -> None:
    overrides = {
        "flags.cross_core_wait_blocks": "scalar",
        "name": "mine",
        "cores.aiv.engines.SCALAR.issue_cycles": "3",
        "cores.aiv.engines.VECTOR.ops.copy.slope_cycles_per_repeat": "2.0",
    }
    device = load_device("ascend_910b2", overrides)
    assert device.flags.cross_core_wait_blocks.value == "scalar"
    assert device.name == "mine"
    assert device.engine("aiv", "SCALAR").issue_cycles.value == 3


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        (
            "flags.cross_core_latency",
            "3",
            "there is no key 'cross_core_latency' in flags. Did you mean `cross_core_latency_cycles`?",
        ),
        ("clock", "3", "there is no key 'clock'. Did you mean `clock_hz`?"),
        ("memory", "3", "not a single value; its keys: memory.gm, memory.l2, ..."),
        ("clock_hz", "fast", "expected a number, got 'fast'"),
        ("clock_hz", "", "expected a number, got ''"),
        ("clock_hz", "0", "must be greater than 0"),
        ("group_count", "2.5", "expected a whole number, got 2.5"),
        ("clock_hz.value", "1", "clock_hz has no keys below it"),
        ("flags.cross_core_wait_blocks", "x", "'x' is not one of: 'pipe' or 'scalar'"),
        ("cores.aic.engines.FIXP.casts", "x", "a list cannot be changed here"),
        ("cores.aic.engines.MTE1.routes.l1_l0a.source", "L7", "'L7' does not exist here; "),
    ],
)
def test_bad_overrides_are_refused_as_they_were_typed(
    key: str, text: str, message: str, fault: Callable[..., str]
) -> None:
    device = load_device("ascend_910b2")
    assert fault(apply_overrides, device, {key: text}).startswith(f"-C {key}={text}: {message}")


def test_a_number_is_what_its_text_is() -> None:
    as_text = {"group_count": "8", "clock_hz": "1500000000.0", "links.hbm.bytes_per_s": "1e12"}
    numbers = {"group_count": 8, "clock_hz": np.float64(1.5e9), "links.hbm.bytes_per_s": 1e12}
    assert load_device("ascend_910b2", numbers).digest() == load_device("ascend_910b2", as_text).digest()


@pytest.mark.parametrize("value", [[8], None, True, {"value": 8}])
def test_a_value_that_is_neither_number_nor_text_is_refused(value: object, fault: Callable[..., str]) -> None:
    said = f"-C group_count={value!r}: expected a number, or text, not a {type(value).__name__}"
    assert fault(load_device, "ascend_910b2", {"group_count": value}) == said


@pytest.mark.parametrize(
    ("hw", "key", "reader"),
    [
        ("ascend_910b2", "memory.l2.line_bytes", "no model yet; put it under `facts` with its source"),
        ("ascend_910b2", "facts.memory.l2.line_bytes", "no model yet; put it"),
        ("ascend_910b2", "architecture", "people"),
        ("v100", "flags.cross_core_latency_cycles", "schedules of ascend devices, whose cores meet"),
    ],
)
def test_keys_that_change_nothing_are_refused_with_their_reader(
    hw: str, key: str, reader: str, fault: Callable[..., str]
) -> None:
    expected = f"-C {key}=3: changes nothing on {hw}; read by {reader}"
    assert fault(load_device, hw, {key: "3"}, unread_keys).startswith(expected)
