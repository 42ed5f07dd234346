"""The wait of loops that store while L2 writes lines back, beside loops measured on an H200."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from npusim.config.load import load_device
from npusim.errors import SpecError
from npusim.machines.sm.sm_pricing import LoopTime

FILE = Path(__file__).parents[2] / "reports/silicon/stored_loops.json"
ROUNDS = 128
SAME = "depth", "tile", "blocks", "readers", "work"


def test_the_wait_has_the_error_that_the_device_file_states() -> None:
    device = load_device("h200")
    longest = device.memory.l2.written_wait_cycles
    assert longest is not None
    rate, rows = device.link("hbm").rate / device.clock_hz.value, json.loads(FILE.read_text("utf-8"))["rows"]
    alone = {tuple(r[n] for n in SAME): r["late"] for r in rows if not r["stored"] and r["kept"] == ROUNDS}
    errors, without = [], []
    for row in rows:
        written = row["blocks"] * row["stored"]
        moved = written + row["blocks"] * row["tile"] / row["readers"]
        if written * ROUNDS <= 35e6 or moved / rate >= 0.75 * row["late"]:
            continue
        usual, depth = alone[tuple(row[n] for n in SAME)], row["depth"]
        wait = LoopTime(moved / rate, written / rate, 0.0).wait(longest.value, depth, usual * depth)
        least = max(moved / rate, usual)
        errors.append(abs(max(least, usual + wait / depth) / row["late"] - 1))
        without.append(abs(least / row["late"] - 1))
    assert len(errors) == 124
    assert mean(errors) == pytest.approx(0.033, abs=5e-4)
    assert mean(without) == pytest.approx(0.197, abs=5e-4)
    assert "3.3 % off on average" in str(longest.source)


def test_an_exponent_below_that_of_a_norm_is_refused(tmp_path: Path) -> None:
    """With 0.002, memory would need 2**500 times its time."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "schema: npusim.device/1\nextends: h200\nname: mine\ndescription: mine\nmemory:\n  gm:\n    rounds:\n"
        "      exponent_factor: {value: 0.002, basis: assumed, source: x}\n"
    )
    with pytest.raises(SpecError, match=r"mine\.yaml:8  memory\.gm\.rounds\.exponent_factor"):
        load_device(str(file))
