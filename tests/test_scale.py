"""What-ifs: rates of units and links that are other than the device file's (``--scale``)."""

from __future__ import annotations

import json
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.config.load import load_device, scaled
from npusim.errors import SpecError
from npusim.program.ir.tile_program import Cost
from npusim.simulation.naming import digest_of
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request

if TYPE_CHECKING:
    from pathlib import Path

#: A tile of each device, so that a changed device changes rates alone.
TILES = {
    "ascend_910b2": {"block_q": 128, "block_kv": 128, "depth": 2, "deal": "round_robin"},
    "ascend_950": {"block_q": 128, "block_kv": 128},
    "h200": {"block_q": 128, "block_kv": 64},
    "v100": {"block_q": 64, "block_kv": 64},
}
FACTOR = 0.25
timed = partial(npusim.run, "flash", seq=512, numerics=False, presets=False)


def cli(*words: str) -> tuple[int, str]:
    """Return the exit status of a command, and all that it prints."""
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    return result.exit_code, result.output


def busy(run: npusim.RunResult) -> dict[str, int]:
    """Return the busy cycles of each pipe of the core group that ends last, by name."""
    assert run.timing is not None
    last = max(run.timing.uses, key=lambda use: use.end_cycles).group
    return {use.queue: use.busy_cycles for use in run.timing.uses if use.group == last}


@pytest.mark.parametrize(
    ("hw", "unit"), [(hw, unit) for hw in ("ascend_910b2", "ascend_950") for unit in ("MTE1", "CUBE", "FIXP", "VECTOR")]
)
def test_each_operation_of_a_unit_takes_its_cycles_over_the_factor(hw: str, unit: str) -> None:
    plain, slow = (timed(hw=hw, tiling=TILES[hw], scale=scale) for scale in (None, {unit: FACTOR}))
    before, after = busy(plain), busy(slow)
    assert slow.cycles > plain.cycles
    of_unit = [name for name in before if name.endswith(f".{unit}")]
    assert of_unit
    for name in of_unit:
        # The hand-over of a tile between cores is no operation of the unit.
        assert 0.8 * before[name] / FACTOR <= after[name] <= before[name] / FACTOR
    within_core = [n for n in before if n.endswith((".MTE1", ".CUBE", ".FIXP", ".VECTOR")) and n not in of_unit]
    assert {n: after[n] for n in within_core if n.endswith((".MTE1", ".CUBE"))} == {
        n: before[n] for n in within_core if n.endswith((".MTE1", ".CUBE"))
    }


@pytest.mark.parametrize("hw", ["h200", "v100"])
@pytest.mark.parametrize("unit", ["TENSOR", "FMA", "MUFU", "LSU", "LDG", "hbm"])
def test_units_of_a_gpu_and_links_have_their_rates_scaled(hw: str, unit: str) -> None:
    plain, slow, same = (timed(hw=hw, tiling=TILES[hw], scale={unit: f}) for f in (1, FACTOR, "1.0"))
    assert slow.cycles > plain.cycles == same.cycles
    assert slow.device.scale == {unit: FACTOR}
    assert plain.device.scale == {}


def test_the_products_of_a_tensor_core_take_twice_as_long_at_half_its_rate() -> None:
    plain, slow = (timed(hw="h200", tiling=TILES["h200"], scale=scale) for scale in (None, {"TENSOR": 0.5}))
    assert plain.timing is not None
    assert slow.timing is not None
    cycles = [sum(n for pipe, n in busy(run).items() if pipe.endswith("TENSOR")) for run in (plain, slow)]
    assert cycles[1] == pytest.approx(2 * cycles[0], rel=0.02)
    peaks = [run.timing.roofline.peak_flops_per_s for run in (plain, slow) if run.timing and run.timing.roofline]
    assert peaks[0] == pytest.approx(2 * peaks[1])


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.7, 2.0, 3.0])
def test_cycles_over_a_rate_are_rounded_up_once(rate: float) -> None:
    cost = Cost(21, 5, (("hbm", 64),), (("key", 20.5),))
    changed = cost.at_rate(rate)
    assert changed.occupancy_cycles == ceil(round(21 / rate, 9))
    assert (changed.latency_cycles, changed.link_bytes) == (5, (("hbm", 64),))
    assert changed.terms[0][1] == pytest.approx(20.5 / rate)
    assert cost.at_rate(1.0) is cost


def test_the_bits_stay() -> None:
    plain, slow = (npusim.run("flash", seq=256, tiling={"block_kv": 128}, scale=s) for s in (None, {"VECTOR": 0.5}))
    assert np.isfinite(plain.output).any()
    assert np.array_equal(plain.output, slow.output, equal_nan=True)


@pytest.mark.usefixtures("declared_tile")
def test_a_result_states_the_what_if_and_has_no_measured_band(tmp_path: Path) -> None:
    asked = ("run", "flash", "--seq", "512", "--no-numerics", "--scale", "VECTOR=0.5", "--scale", "hbm=2")
    shown = cli(*asked, "--out", str(tmp_path / "run"))[1]
    assert "what if    hbm at 2 times its rate, VECTOR at 0.5 times its rate" in shown
    assert "not measured with these numbers" in shown
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert record["device"]["scale"] == {"VECTOR": 0.5, "hbm": 2.0}
    assert record["device"]["link_bytes_per_s"]["hbm"] == 2 * load_device("ascend_910b2").link("hbm").bytes_per_s.value


def test_runs_searches_and_folders_of_a_what_if_are_their_own() -> None:
    plain, slow = Request("flash", seq=512), Request("flash", seq=512, scale={"VECTOR": 0.5})
    plans = [plan_of(request) for request in (plain, slow)]
    assert digest_of(plans[0]) != digest_of(plans[1])
    assert slow.asked() == (("--seq", "512"), ("--scale", "VECTOR=0.5"))
    assert slow.about()["scale"] == {"VECTOR": 0.5}
    assert "scale" not in plain.about()


@pytest.mark.usefixtures("declared_tile")
def test_a_comparison_splits_the_difference_by_the_units_operations() -> None:
    shown = cli("compare", "flash", "flash --scale VECTOR=0.5", "--seq", "512", "--no-numerics")[1]
    assert "device.scale" in shown
    assert "aiv0.VECTOR: rows of P +" in shown


def test_a_search_has_the_times_of_its_runs_and_prints_their_command() -> None:
    found = npusim.explore("flash", {"block_kv": [64, 128]}, seq=512, scale={"VECTOR": 0.5})
    best = found.best
    assert best is not None
    run = timed(tiling={"block_kv": best.point["block_kv"]}, scale={"VECTOR": 0.5})
    assert run.latency_us == best.latency_us
    assert run.latency_us > timed(tiling={"block_kv": best.point["block_kv"]}).latency_us


def test_a_device_that_is_scaled_already_is_itself() -> None:
    device = load_device("ascend_910b2")
    once = scaled(device, {"MTE2": "0.5"})
    assert scaled(once, {"MTE2": 0.5}) is once
    assert scaled(device, {"MTE2": 1}) is device
    assert once.scale == {"MTE2": 0.5}
    only = load_device("ascend_910b2", {"cores.aiv.engines.MTE2.rate_factor": 2})
    assert only.scale == {"aiv.MTE2": 2.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scale": {"VECTR": 2}}, "--scale VECTR=2: ascend_910b2 has no unit 'VECTR'. Did you mean `VECTOR`"),
        ({"scale": {"SCALAR": 2}}, "has no unit 'SCALAR'; allowed: MTE2, MTE1, CUBE, FIXP, VECTOR, MTE3, hbm, l2"),
        ({"scale": {"VECTOR": 0}}, "--scale VECTOR=0: write a number from 0.001 to 1,000"),
        ({"scale": {"VECTOR": "-1"}}, "--scale VECTOR=-1: write a number"),
        ({"scale": {"VECTOR": "nan"}}, "--scale VECTOR=nan: write a number"),
        ({"scale": {"VECTOR": True}}, "--scale VECTOR=True: write a number"),
        ({"scale": ["VECTOR"]}, "scale: expected a mapping of units to factors"),
        (
            {"scale": {"VECTOR": 2}, "overrides": {"cores.aiv.engines.VECTOR.rate_factor": 0.5}},
            "--scale VECTOR=2: the device already has the factor 0.5; set",
        ),
        ({"scale": {"CUBE": 2}, "hw": "ascend_910b2_x8", "schedule": "layer"}, "is a node"),
        ({"scale": {"VECTOR": 2}, "hw": "xeon_avx512"}, "xeon_avx512 is not timed"),
    ],
)
def test_what_no_device_can_have_is_refused(changes: dict[str, object], said: str) -> None:
    options = {"schedule": "flash", "seq": 256, "numerics": False, **changes}
    with pytest.raises(SpecError) as refused:
        npusim.run(options.pop("schedule"), **options)  # type: ignore[arg-type]
    assert said in str(refused.value)


def test_a_factor_without_effect_is_said() -> None:
    run = npusim.run("copy", hw="h200", problem={"bytes": 1 << 20}, numerics=False, scale={"TENSOR": 2, "hbm": 0.5})
    said = [note for note in run.notes if note.startswith("--scale")]
    assert said == [
        "--scale TENSOR=2 changes no time here: this run has the same time with the number in the device file"
    ]


def test_a_case_of_a_baseline_may_be_a_what_if_and_a_measurement_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    case = tmp_path / "case.yaml"
    text = "schema: npusim.baseline/1\nhw: ascend_910b2\nschedule: flash\nworkload: pangu_38b\nseq: 256\n"
    case.write_text(f"{text}scale: {{VECTOR: 0.5}}\n")
    assert cli("check", str(case), "--update")[0] == 0
    assert cli("check", str(case))[0] == 0
    case.write_text(case.read_text().replace("VECTOR: 0.5", "VECTOR: 0.25"))
    assert cli("check", str(case))[0] != 0
    measured = tmp_path / "measured.yaml"
    measured.write_text(
        "schema: npusim.measurements/1\nsource: s\ncases:\n"
        "  - {name: a, device: ascend_910b2, schedule: flash, measured_us: 3, scale: {VECTOR: 0.5}}\n"
    )
    status, said = cli("validate", str(measured))
    assert status == 2
    assert "scale: unknown key" in said
