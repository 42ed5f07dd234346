"""What cannot be timed is refused with a reason, by every method alike; what cannot be, fails a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from ir.toy import Toy, crossed

from npusim.config.problem import Problem
from npusim.errors import ContradictionError, DeadlockError, ProgramError, SpecError
from npusim.library import find_schedule
from npusim.program.timing import METHODS
from npusim.program.timing.summary import check_sanity
from npusim.run import run
from timing.programs import device_with

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.timing.timing_result import TimingResult


def flash() -> TileProgram:
    schedule = find_schedule("flash", "ascend")
    problem = Problem(heads=1, seq_q=128, head_dim=64, causal=False)
    return schedule.program(problem, schedule.tiling(), device_with(), schedule.precision())


def without_route(core: str, engine: str, name: str) -> DeviceSpec:
    """Return the 910B2 without one of its paths."""
    device = device_with()
    kind = device.cores[core]
    mover = kind.engines[engine]
    routes = {key: route for key, route in mover.routes.items() if key != name}  # type: ignore[union-attr]
    engines = {**kind.engines, engine: mover.model_copy(update={"routes": routes})}
    cores = {**device.cores, core: kind.model_copy(update={"engines": engines})}
    return device.model_copy(update={"cores": cores})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("core", "engine", "name", "message"),
    [
        ("aic", "FIXP", "l0c_gm", r"cores\.aic\.engines\.FIXP: no route L0C->GM; its routes: L0C->L1"),
        ("aiv", "MTE3", "ub_gm", r"cores\.aiv\.engines\.MTE3: no route UB->GM; its routes: "),
    ],
)
def test_a_device_without_a_needed_route_is_refused(
    method: str, core: str, engine: str, name: str, message: str
) -> None:
    with pytest.raises(SpecError, match=rf"ascend_910b2: {message}"):
        METHODS[method](flash(), without_route(core, engine, name))


@pytest.mark.parametrize("value", ["0", "-1e9", "nan", "inf"])
@pytest.mark.parametrize(
    "key",
    [
        "links.hbm.bytes_per_s",
        "links.l2.bytes_per_s",
        "cores.aic.engines.MTE2.routes.gm_l1.bytes_per_cycle",
        "clock_hz",
    ],
)
def test_a_rate_that_is_not_positive_is_refused_with_its_key(key: str, value: str) -> None:
    with pytest.raises(SpecError, match=rf"{key}.*(greater than 0|finite|number)"):
        device_with(**{key.replace(".", "__"): value})


def test_a_ring_without_slots_and_a_queue_without_places_are_refused() -> None:
    toy = Toy()
    a, b = toy.queue("a"), toy.queue("b")
    with pytest.raises(ProgramError, match="ring S: depth 0, but it needs at least 1 slot"):
        toy.ring("S", [a], [b], depth=0)
    with pytest.raises(SpecError, match=r"CUBE\.queue_depth_count.*must be greater than 0"):
        device_with(cores__aic__engines__CUBE__queue_depth_count="0")


@pytest.mark.parametrize("method", METHODS)
def test_a_deadlock_names_engines_operations_and_flags(method: str) -> None:
    with pytest.raises(DeadlockError) as caught:
        METHODS[method](crossed(), device_with())
    text = str(caught.value)
    assert "phase toy of toy is stuck at cycle" in text
    assert "group 0 a: first waits for back ready" in text
    assert "group 0 b: second waits for there ready" in text


@pytest.mark.parametrize("method", ["block", "fold", "steady", "reserved"])
def test_a_wait_that_holds_up_the_scalar_unit_is_refused_not_ignored(method: str) -> None:
    device = device_with(flags__cross_core_wait_blocks="scalar")
    with pytest.raises(SpecError, match=r"flags\.cross_core_wait_blocks: .* use method des"):
        METHODS[method](flash(), device)


# ---------------------------------------------------------------- results that cannot be


@pytest.fixture(scope="module")
def result() -> TimingResult:
    return METHODS["steady"](flash(), device_with())


def test_a_run_whose_result_cannot_be_fails(result: TimingResult, monkeypatch: pytest.MonkeyPatch) -> None:
    impossible = replace(result, bound_cycles={"hbm": result.cycles + 1})
    monkeypatch.setattr("npusim.simulation.simulate.method_named", lambda _name: lambda *_, **__: impossible)
    with pytest.raises(ContradictionError, match="fewer than the bound of hbm"):
        run("flash", seq=256, numerics=False, method="steady", trace_groups=())


def test_a_possible_result_passes(result: TimingResult) -> None:
    check_sanity(result)


def test_a_unit_busier_than_time_allows_fails(result: TimingResult) -> None:
    use = next(u for u in result.queues[0] if u.busy_cycles)
    busier = replace(use, busy_cycles=result.cycles + 1)
    queues = ((busier, *result.queues[0][1:]), *result.queues[1:])
    with pytest.raises(ContradictionError, match=rf"group 0 {use.queue}: busy .* over 100 %"):
        check_sanity(replace(result, queues=queues))


def test_a_time_below_its_bound_fails(result: TimingResult) -> None:
    bounds = {**result.bound_cycles, "hbm": result.cycles + 1}
    with pytest.raises(ContradictionError, match=r"cycles are fewer than the bound of hbm"):
        check_sanity(replace(result, bound_cycles=bounds))


def test_fewer_bytes_than_inputs_and_outputs_have_fails(result: TimingResult) -> None:
    links = {**result.link_bytes, "hbm": result.compulsory_bytes - 1}
    with pytest.raises(
        ContradictionError,
        match="crossed to memory beyond L2, but the inputs, and the outputs that do not stay in L2, have",
    ):
        check_sanity(replace(result, link_bytes=links))
    with pytest.raises(ContradictionError, match="0 bytes crossed to memory beyond L2,"):
        check_sanity(replace(result, link_bytes={**result.link_bytes, "hbm": 0}))
