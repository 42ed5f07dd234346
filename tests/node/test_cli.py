"""Nodes on the command line: what is printed, searched and refused."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from npusim.cli.app import app

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

pytestmark = pytest.mark.usefixtures("declared_tiles")

LAYER = ("--hw", "h200_x2", "--seq", "2048", "--no-save")


def npusim(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_fields_of_a_node_schedule() -> None:
    text = npusim("run", "tiling_allreduce", "--fields", "--hw", "ascend_910b2_x8").stdout
    assert "tiling_allreduce on node cores" in text
    assert "first_share" in text
    assert "auto | mesh | ring | halving_doubling" in text


def test_result_tells_what_is_exposed_and_the_closed_form() -> None:
    text = npusim("run", "tiling_allreduce", *LAYER, "--rows", "0").stdout
    assert "collectives: 2, ring by sm (simple); alpha-beta form" in text
    assert "after 68.0 us to issue them" in text  # twice 20, and 14 for the events between streams
    assert re.search(r"exposed communication \d+\.\d us, overlap efficiency \d+%", text)
    assert "bits not computed" not in text  # its kernels have programs
    assert "kernel times are fitted" in text


def test_cluster_prints_its_assumption() -> None:
    arguments = ("--hw", "ascend_910b2_x8", "-t", "servers=512", "--problem", "bytes=1048576")
    text = npusim("run", "allreduce", "--no-save", *arguments).stdout
    assert "4096 devices: one server is simulated for 512 equal servers" in text


def test_search_over_blocks_and_the_first_ones_share(tmp_path: Path) -> None:
    fields = ("-f", "blocks=1,2,4", "-f", "first_share=0.25,0.5", "-j1", "--json")
    where = ("--hw", "h200_x2", "--seq", "2048", "-o", str(tmp_path / "sweep.csv"))
    found = json.loads(npusim("explore", "tiling_allreduce", *where, *fields).stdout)
    assert len(found["points"]) == 6
    # Driven by SMs, one block is best.
    assert found["best"]["tiling"]["blocks"] == 1


def test_node_is_shown_and_validated() -> None:
    text = npusim("hw", "show", "h200_x2", "--only", "node.host").stdout
    assert "node.host" in text
    assert "overlap_issue_s" in text
    assert "h200x2" not in text
    assert npusim("hw", "validate", "h200_x2").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tp", "7"), "tensor_parallel: 7 does not divide 40 query heads; possible: 1 2 4 5 8"),
        (("--tp", "8"), "8 ranks, but h200_x2 has 2 devices"),
        (("-t", "blocks=2049"), "blocks: 2049 blocks, but there are only 2048 rows"),
        (("-t", "blocks=4,first_share=0.9999"), "gives a block without rows"),
        (("-t", "collective=sdma"), "there is no driver 'sdma' here; allowed: sm"),
        (("-C", "links.nvlink.bytes_per_s=0"), "links.nvlink.bytes_per_s=0: must be greater than 0"),
        (("-C", "links.nvlnk.bytes_per_s=1"), "no key 'nvlnk'"),
        (("-t", "first_share=1.5"), "first_share"),
    ],
)
def test_bad_input_exits_with_2_and_says_what_is_wrong(arguments: tuple[str, ...], message: str) -> None:
    result = npusim("run", "tiling_allreduce", *LAYER, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_disconnected_file_names_its_devices(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "schema: npusim.node/1\nextends: ascend_910b2_x8\nname: mine\n"
        "links.hccs.model: edges\nlinks.hccs.edges: [[0, 1], [1, 2], [2, 3], [4, 5], [5, 6], [6, 7]]\n"
    )
    result = npusim("run", "allreduce", "--hw", str(file), "--problem", "bytes=8", "--no-save")
    assert result.exit_code == 2
    assert "mine: no link joins device 4, 5, 6, 7 to device 0, 1, 2, 3" in result.stderr
