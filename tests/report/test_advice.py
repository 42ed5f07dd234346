"""Rules of advice on counts made by hand: one pipe, one group, what it must say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npusim.report.advice import advise
from npusim.report.record import (
    ConstantRecord,
    DeviceRecord,
    QueueRecord,
    RunRecord,
    TimingRecord,
)

CYCLES = 1000


def _record(
    busy: dict[str, int],
    *,
    constants: dict[str, float] | None = None,
    ends: tuple[int, ...] = (CYCLES,),
    groups: int = 1,
    link_bytes: int = 0,
    stalls: dict[str, int] | None = None,
) -> RunRecord:
    queues = tuple(
        QueueRecord(g, name, cycles, 1, end, stalls or {})
        for g, end in enumerate(ends)
        for name, cycles in busy.items()
    )
    timing = TimingRecord(
        method="des", cycles=CYCLES, latency_us=1.0, kernel_us=1.0, launch_us=0.0, operations=1,
        flops=1, bound_cycles={}, link_bytes={"l2": link_bytes}, queues=queues,
        constants=tuple(ConstantRecord(k, "vendor", c) for k, c in (constants or {}).items()),
    )  # fmt: skip
    device = DeviceRecord("d", "0", 1e9, groups, {"l2": 1e9})
    tiling: dict[str, object] = {"block_q": 128, "vector_rows": 16, "depth": 2}
    return RunRecord("0", "n", "flash", "p", {}, "w", {}, tiling, device, timing, None, (), ())


def _advice(record: RunRecord) -> tuple[str, str]:
    advice = advise(record)
    assert advice is not None
    return advice.text, advice.command


def test_idle_core_groups_come_first() -> None:
    text, command = _advice(_record({"aiv0.VECTOR": 900}, groups=24))
    assert text == "[few blocks] only 1 of 24 core groups have a block to work on"
    assert command == "npusim explore flash --field block_q=32,64,128"


def test_uneven_ends_name_the_group_that_decides() -> None:
    text, _ = _advice(_record({"aiv0.VECTOR": 500}, ends=(400, 1000, 400), groups=3))
    assert "end after 60.0 % of the kernel on average, group 1 last" in text


def test_vector_bound_names_the_costliest_instructions_and_their_startup() -> None:
    key = "cores.aiv.engines.VECTOR.ops"
    constants = {
        f"{key}.exp_float32.slope_cycles_per_repeat": 40.0,
        f"{key}.exp_float32.head_cycles": 20.0,
        f"{key}.binary.head_cycles": 40.0,
    }
    text, command = _advice(_record({"aiv0.VECTOR": 900}, constants=constants))
    assert text == (
        "[VECTOR] the vector unit is the limit: exp_float32 60.0 %, binary 40.0 % of its time; "
        "60.0 % starts and ends instructions"
    )
    assert command == "npusim explore flash --field vector_rows=16,32,64"


def test_cube_bound_says_how_much_is_work() -> None:
    key = "cores.aic.engines.CUBE"
    constants = {f"{key}.cycles_per_fractal": 98.0, f"{key}.startup_cycles": 2.0}
    text, command = _advice(_record({"aic.CUBE": 900}, constants=constants))
    assert "[CUBE]" in text
    assert "98.0 % of its time spent on fractals" in text
    assert command == ""


def test_a_full_link_is_told_from_a_full_port() -> None:
    # One microsecond at 1e9 bytes a second is 1000 bytes.
    text, _ = _advice(_record({"aic.MTE2": 900}, link_bytes=900))
    assert text == "[link] MTE2 is the limit, with link l2 at 90.0 % of its bandwidth"
    constants = {
        "cores.aic.engines.MTE2.routes.gm_l1.bytes_per_cycle": 90.0,
        "cores.aiv.engines.MTE2.routes.gm_ub.bytes_per_cycle": 99.0,
    }
    text, _ = _advice(_record({"aic.MTE2": 900}, constants=constants))
    assert text == (
        "[transfers] moving bytes is the limit (MTE2, gm_l1.bytes_per_cycle): "
        "the core's own port, no shared link"
    )


def test_fixpipe_bound_is_draining() -> None:
    constants = {"cores.aic.engines.FIXP.routes.l0c_gm.bytes_per_cycle": 1.0}
    text, _ = _advice(_record({"aic.FIXP": 900}, constants=constants))
    assert text.startswith("[transfers] draining L0C is the limit")


def test_waiting_names_the_busiest_pipe_and_its_wait() -> None:
    text, command = _advice(_record({"aiv0.VECTOR": 400, "aic.CUBE": 100}, stalls={"S ready": 300}))
    assert "no pipe is the limit: the busiest, VECTOR, works 40.0 %" in text
    assert "waits 30.0 % for S ready" in text
    assert command == "npusim explore flash --field depth=2,3,4"


@pytest.mark.parametrize("field", [None, "rounded"])
def test_a_field_without_a_number_is_not_suggested(field: object) -> None:
    record = replace(_record({"aiv0.VECTOR": 900}, groups=24), tiling={"block_q": field})
    assert _advice(record)[1] == ""


def test_no_time_no_advice() -> None:
    assert advise(replace(_record({}), timing=None)) is None
    assert advise(_record({})) is None
