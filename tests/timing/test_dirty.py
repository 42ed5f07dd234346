"""What L2 still has to write back: its cost against what was measured, on H100 and H200."""

from __future__ import annotations

import json
from math import exp
from pathlib import Path

import pytest

import npusim
from npusim.config.load import load_device
from npusim.config.problem import CopyProblem, GemmProblem, Problem

pytestmark = pytest.mark.usefixtures("declared_tiles")

SILICON = Path(__file__).parents[2] / "reports" / "silicon"
MIB = 2**20


def rows(device: str) -> list[dict[str, float]]:
    """Return what was measured of each size, by name."""
    measured = json.loads((SILICON / f"dirty_{device}.json").read_text())
    return [dict(zip(measured["names"], row, strict=True)) for row in measured["rows"]]


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_each_byte_read_pushes_out_its_share_of_what_others_left(name: str) -> None:
    device = load_device(name)
    l2, rate = device.memory.l2, device.link("hbm").bytes_per_s.value
    for row in rows(name):
        pushed = l2.dirty_bytes() * (1 - exp(-row["mib"] * MIB / l2.capacity_bytes.value))
        assert pushed / rate * 1e6 == pytest.approx(row["read_dirty"] - row["read_clean"], abs=2.5)


@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_a_kernel_that_reads_and_writes_takes_as_long_as_measured(device: str, keys: int) -> None:
    overhead = load_device(device).clocked(1).timed_launch().kernel_overhead_s.value
    for row in rows(device):
        if row["mib"] not in (8, 16, 32, 128):  # of 64 the H100's time is another's work
            continue
        problem = Problem(heads=int(row["mib"]) * 4, seq_q=64, seq_kv=1024, head_dim=128)
        tiling = {"block_q": 64, "block_kv": keys, "stages": 2, "warps": 4}
        timing = npusim.run("pasa", problem=problem, hw=device, numerics=False, tiling=tiling, l2="dirty").timing
        first = timing.account.phases[0].cycles / timing.clock_hz + overhead
        assert first * 1e6 == pytest.approx(row[f"prologue_{keys}_dirty"], rel=0.125)


def test_a_kernel_that_multiplies_starts_later() -> None:
    def launch(schedule: str, problem: CopyProblem | GemmProblem) -> float:
        return float(npusim.run(schedule, problem=problem, hw="h200", numerics=False).timing.launch_s)

    spec = load_device("h200").timed_launch()
    assert spec.products_overhead_s is not None
    assert launch("copy", CopyProblem(bytes=MIB)) == spec.kernel_overhead_s.value
    assert launch("gemm", GemmProblem(m=128, n=128, k=128)) == spec.products_overhead_s.value
