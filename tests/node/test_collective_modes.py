"""Modes of a collective's driver: which one a library takes, and how many engines a small message has."""

from __future__ import annotations

from pathlib import Path

import pytest

from npusim.config.node_file import load_node_device
from npusim.errors import SpecError
from npusim.machines.node.collective import CollectiveCall, PlannedCollective, plan_collective
from npusim.machines.node.topology import Topology

KIB = 1024


def planned(node: str, kib: int) -> PlannedCollective:
    spec = load_node_device(node).node
    assert spec is not None
    return plan_collective(spec, Topology(spec), CollectiveCall("allreduce", "ring", "sm", kib * KIB))


@pytest.mark.parametrize(
    ("node", "kib", "mode"),
    # NCCL's tables for Hopper and NVLink: 6.6 us + 0.6 a step + n / 141 GB/s against 8.4 + 3.4 + n / 370.8, which
    # meet at 1.65 MiB of two ranks and at 2.7 MiB of four.
    [
        ("h200_x2", 1024, "ll"),
        ("h200_x2", 1536, "ll"),
        ("h200_x2", 1792, "simple"),
        ("h200_x4", 2560, "ll"),
        ("h200_x4", 3072, "simple"),
    ],
)
def test_nccl_takes_the_protocol_that_its_tables_expect_to_be_fastest(node: str, kib: int, mode: str) -> None:
    assert planned(node, kib).mode_name == mode


def test_a_small_message_has_as_many_channels_as_find_work() -> None:
    # 512 threads of 8 bytes and 2 ranks: 8 KiB a channel, of which there are 24.
    each = 7.725e9
    rates = {kib: planned("h200_x2", kib).transfer_bytes_per_s / each for kib in (4, 64, 192, 1024)}
    assert rates == pytest.approx({4: 1, 64: 8, 192: 24, 1024: 24})


@pytest.mark.parametrize("node", ["h200_x2", "h200_x4"])
def test_no_longer_message_takes_less_time(node: str) -> None:
    seconds = [planned(node, kib).seconds for kib in range(1, 512)]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-12)


def test_an_estimate_of_one_mode_alone_is_refused(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "hwconfigs" / "h200_x2.yaml").read_text(encoding="utf-8")
    at = text.rindex("        tuner:\n")
    file = tmp_path / "pair.yaml"
    file.write_text(text[:at] + text[text.index("        local_bytes_per_s:", at) :], encoding="utf-8")
    with pytest.raises(
        SpecError, match="modes: simple has no tuner, but other modes have one; set it for all modes or for none"
    ):
        load_node_device(str(file))
