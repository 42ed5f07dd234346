"""Which constants a sensitivity table considers, and what it says of them."""

from __future__ import annotations

import pytest

from npusim.report.findings import sensitivity_table
from npusim.report.text import plain
from npusim.run import run
from npusim.simulation import sensitivity as under_test
from npusim.simulation.sensitivity import Sensitivity, sensitivity

pytestmark = pytest.mark.usefixtures("declared_tiles")

#: One tile a core: flags and latencies between the cores decide.
SMALL = {"seq": 256, "numerics": False, "trace_groups": ()}


def test_all_doubtful_constants_that_delay_the_run_are_listed_strongest_first() -> None:
    result = run("flash", **SMALL)  # type: ignore[arg-type]
    found = sensitivity(result)
    keys = [s.key for s in found]
    # A latency and a queue depth keep nothing busy, but count; a route that is not taken does not.
    assert "flags.cross_core_latency_cycles" in keys
    assert "cores.aiv.engines.MTE3.routes.ub_gm.latency_cycles" in keys
    assert not any("l1_bt" in key for key in keys)
    assert {s.basis for s in found} <= {"assumed", "fitted"}
    strength = [max(abs(s.lower), abs(s.higher)) for s in found]
    assert strength == sorted(strength, reverse=True)


def test_a_change_is_that_of_a_run_with_the_constant_replaced() -> None:
    key = "flags.cross_core_latency_cycles"
    result = run("flash", **SMALL)  # type: ignore[arg-type]
    (found,) = (s for s in sensitivity(result) if s.key == key)
    slower = run("flash", **SMALL, overrides={key: "600"})  # type: ignore[arg-type]
    assert found.value == 500
    assert found.higher == pytest.approx(slower.latency_us / result.latency_us - 1)
    assert found.higher > 0 > found.lower


def test_links_of_a_host_are_changed_where_its_file_states_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The links alone: for each other constant of a node the tiles of its kernels are chosen anew."""
    result = run("offload_cooperative", **SMALL)  # type: ignore[arg-type]
    links = [(key, fact) for key, fact in under_test._doubtful(result) if key.startswith("links.")]
    monkeypatch.setattr(under_test, "_doubtful", lambda _result: links)
    found = {s.key: s for s in sensitivity(result)}
    assert {"links.pcie.bytes_per_s", "links.dram.bytes_per_s"} <= found.keys()
    pcie = found["links.pcie.bytes_per_s"]
    assert pcie.higher < 0 < pcie.lower


def test_a_table_has_a_line_for_each_constant_that_changes_the_time_and_the_number_of_the_others() -> None:
    key = "cores.aic.engines.MTE2.routes.gm_l1.burst_overhead_cycles"
    constants = [Sensitivity(key, 1.5, "fitted", -0.006, 0.006), Sensitivity("launch.gap_s", 1e-6, "fitted", 0.0, 4e-4)]
    lines = plain(sensitivity_table(constants), 80).splitlines()
    assert [line for line in lines if key in line] == [f"  {key}  -0.6 %  +0.6 %"]
    assert all(len(line) <= 80 for line in lines)
    assert not any("launch.gap_s" in line for line in lines)
    assert any("1 more constant in --json" in line and "0.05 %" in line for line in lines)
