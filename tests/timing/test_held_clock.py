"""A clock that is held, a board's limit in watts: parameters of a run and of a measured case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.config.node_file import load_machine
from npusim.config.packaged import list_packaged
from npusim.config.problem import CopyProblem, GemmProblem
from npusim.errors import SpecError
from npusim.studies.validate.measured_times import validate_times

PRODUCT = GemmProblem(m=4096, n=4096, k=4096, dtype="float16")
COPY = CopyProblem(bytes=1 << 20)


def timed(problem: Any, **options: Any) -> Any:
    schedule = "gemm" if isinstance(problem, GemmProblem) else "copy"
    options = {"hw": "h200", "numerics": False, **options}
    return npusim.run(schedule, problem=problem, **options).timing


def test_a_board_that_is_held_below_what_power_allows_keeps_its_clock() -> None:
    free, held = timed(PRODUCT), timed(PRODUCT, clock=1.5e9)
    assert 1.5e9 < free.clock_hz < 1.805e9  # power holds it below the clock of products
    assert held.clock_hz == 1.5e9
    assert timed(PRODUCT, clock=1.9e9).clock_hz == free.clock_hz  # held where power does not let it be


def test_a_lower_limit_slows_what_is_at_its_limit_alone() -> None:
    free, limited = timed(PRODUCT), timed(PRODUCT, power_watts=500)
    assert limited.clock_hz / free.clock_hz == pytest.approx((500 / 700) ** 0.3, rel=0.1)
    assert limited.cycles == free.cycles
    assert timed(COPY, power_watts=100).latency_s == timed(COPY).latency_s


def test_a_held_clock_slows_kernels_without_products_too() -> None:
    free, held = timed(COPY), timed(COPY, clock=0.99e9)
    assert held.clock_hz == 0.99e9
    assert free.clock_hz == 1.98e9
    assert held.times_s["core"] > free.times_s["core"]


def test_a_limit_in_watts_needs_one_in_the_file() -> None:
    with pytest.raises(SpecError, match=r"power-watts 50: .*does not state a power limit in watts"):
        timed(PRODUCT, hw="l4", power_watts=50)
    with pytest.raises(SpecError, match=r"--clock 2.5e9: .*allowed: up to the device's 1,980 MHz"):
        timed(PRODUCT, clock=2.5e9)
    with pytest.raises(SpecError, match=r"--clock 1.*read by runs of one device only"):
        npusim.run("tiling_allreduce", hw="h200_x2", seq=1024, numerics=False, clock=1e9)
    with pytest.raises(SpecError, match=r"--clock 1e9.*the devices of a node use clock_hz"):
        npusim.run("tiling_allreduce", hw="h200_x2", seq=1024, overrides={"held_clock_hz": "1e9"})


def test_what_a_board_is_set_to_is_no_change_of_the_model() -> None:
    assert timed(COPY, clock=1e9).validated == timed(COPY).validated


def test_a_case_states_its_clock(tmp_path: Path) -> None:
    case = "device: h200, schedule: gemm, problem: {m: 4096, n: 4096, k: 4096}, measured: {latency_us: 186}"
    lines = (f"  - {{name: {name}, {case}{more}}}" for name, more in (("free", ""), ("held", ", clock_mhz: 1500")))
    path = tmp_path / "cases.yaml"
    path.write_text("schema: npusim.measurements/1\nsource: a test\ncases:\n" + "\n".join(lines) + "\n")
    free, held = validate_times(path).residuals
    assert held.predicted > 1.02 * free.predicted
    launch = timed(PRODUCT, clock=1.5e9)
    assert held.predicted == pytest.approx(launch.latency_s * 1e6)


@pytest.mark.parametrize(("text", "said"), [("1500MHz", "at 1,500 MHz"), ("1.5GHz", "at 1,500 MHz")])
def test_the_clock_is_said_beside_the_cycles(text: str, said: str) -> None:
    words = ["run", "gemm", "--hw", "h200", "--problem", "m=4096,n=4096,k=4096", "--no-numerics", "--no-save"]
    result = CliRunner().invoke(app, [*words, "--clock", text])
    assert said in result.stdout
    refused = CliRunner().invoke(app, [*words, "--clock", "fast"])
    assert refused.exit_code == 2


@pytest.mark.parametrize(
    ("device", "option", "said"),
    [
        ("h200", ("--clock", "3GHz"), "--clock 3e9: 3,000 MHz; allowed: up to the device's 1,980 MHz"),
        (
            "ascend_910b2",
            ("--power-watts", "300"),
            "--power-watts 300.0: the file does not state a power limit in watts",
        ),
        ("h200_x2", ("--clock", "1.5GHz"), "--clock 1.5e9: changes nothing on h200"),
    ],
)
def test_a_refusal_names_the_option(device: str, option: tuple[str, str], said: str) -> None:
    words = ["run", "gemm", "--hw", device, "--problem", "m=512,n=512,k=512", "--no-numerics", "--no-save"]
    refused = CliRunner().invoke(app, [*words, *option])
    assert refused.exit_code == 2
    assert said in refused.stderr


def test_a_file_s_limit_holds_at_its_clock() -> None:
    """A file that extends another one's has a clock of its own, at which the other's limit does not hold.

    The limit holds at the clock of products, or at the vendor's.
    """
    stated = set()
    for name in list_packaged("hwconfigs"):
        machine = load_machine(name)
        if machine.power is None or machine.power.load_clock_hz is None:
            continue
        stated.add(name)
        assert machine.products_clock_hz is not None, name
        known = machine.products_clock_hz, machine.clock_hz
        assert machine.power.load_clock_hz.value in {clock.value for clock in known}, name
    assert {"h100", "h200"} <= stated
