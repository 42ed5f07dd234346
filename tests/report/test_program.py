"""`npusim program`: every ring and wait that it prints is the program's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.program.ir.listing import number_text
from npusim.program.ir.opaque import Coordinate, Symbol
from npusim.program.ir.walk import Walker, walk
from npusim.simulation.chosen_tile import program_of
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request
from tests.turns import in_turn

if TYPE_CHECKING:
    from npusim.program.ir.tile_program import TileProgram

DEVICES = ("ascend_910b2", "ascend_950", "h200", "v100")
SCHEDULES = ("flash", "pasa", "split_kv")


def printed(*words: str) -> str:
    result = CliRunner().invoke(app, ["program", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def program(schedule: str, hw: str, seq: int) -> TileProgram:
    return program_of(plan_of(Request(schedule, hw=hw, seq=seq, tensor_parallel=8, numerics=False)))[1]


def unrolled(items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the operations of a document's items, each loop as often as it says."""
    for item in items:
        if item["kind"] == "operation":
            yield item
        else:
            for _ in range(int(item["count"])):
                yield from unrolled(item["items"])


@pytest.mark.parametrize(("schedule", "hw"), in_turn(SCHEDULES, DEVICES))
def test_rings_and_waits_are_those_of_the_program(schedule: str, hw: str) -> None:
    data, built = (
        json.loads(printed(schedule, "--hw", hw, "--seq", "384", "--tp", "8", "--json")),
        program(schedule, hw, 384),
    )
    ends = [(r["name"], r["depth"], tuple(r["producers"]), tuple(r["consumers"])) for r in data["rings"]]
    assert ends == [(r.name, r.depth, r.producers, r.consumers) for r in built.rings]
    phases = [phase for phase in built.phases if phase.blocks]
    assert [p["name"] for p in data["phases"]] == [p.name for p in phases]
    for listed, phase in zip(data["phases"], phases, strict=True):
        walker = Walker(built)
        walker.cursors = [1 << 20] * len(walker.cursors)  # so late that every ring is full: all waits are there
        endpoints, operations = walker.endpoints, list(unrolled(listed["items"]))
        resolved = list(walk(walker, phase.body(phase.blocks[listed["block"]])))
        assert [o["label"] for o in operations] == [r.op.label for r in resolved]
        for operation, found in zip(operations, resolved, strict=True):
            waits = {str(endpoints[w.endpoint]) for w in found.waits}
            assert (operation["queue"], set(operation["waits"])) == (found.op.queue, waits), found.op.label
            sides = {("free" if not endpoints[s].is_producer else "ready", endpoints[s].ring) for s in found.sets}
            assert {f"{ring} {side}" for side, ring in sides} >= set(operation["gives"])
            awaited = {(endpoints[p].is_producer, endpoints[p].ring) for e in endpoints for p in e.peers}
            assert set(operation["gives"]) == {
                f"{endpoints[s].ring} {'ready' if endpoints[s].is_producer else 'free'}"
                for s in found.sets
                if endpoints[s].peers and (endpoints[s].is_producer, endpoints[s].ring) in awaited
            }


def test_flash_is_read_on_one_screen() -> None:
    text = printed("flash", "--no-causal", "-t", "block_q=128,block_kv=512,kernel=pto")
    lines = [line for line in text.splitlines() if line]
    assert len(lines) <= 40
    loaded = next(line for line in lines if " V.load " in line and "v[" in line)
    # PV lags two tiles of 512 keys behind S; K and V arrive in pieces of 128 rows, four a tile.
    assert "4 x V.load" in loaded and "v[512*key - 1024:+128]" in loaded
    assert loaded.split()[-4:] == ["V", "free", "V", "ready"]
    assert any(line.split()[:2] == ["S", "slots"] and "3 x 256 KiB" in line for line in lines)
    assert "aiv1 runs the same operations as aiv0" in text


@pytest.mark.usefixtures("declared_tile")
@pytest.mark.usefixtures("declared_tile")
def test_a_difference_names_the_rows_of_one_program_alone() -> None:
    text = printed("flash", "--seq", "1024", "-t", "depth=2", "--diff", "flash -t depth=3")
    marked = [line.split() for line in text.splitlines() if line.strip().startswith(("-", "+"))]
    slots = {(line[0], line[1]): line[4] for line in marked if line[2:3] == ["slots"]}
    assert (slots["-", "S"], slots["+", "S"]) == ("3", "4")
    same = printed("flash", "--seq", "1024", "--diff", "flash")
    assert "rings and the commonest block of each phase are the same" in same
    other = json.loads(printed("flash", "--seq", "1024", "--json", "--diff", "flash --hw ascend_950"))
    assert other["programs"] == ["flash on ascend_910b2", "flash --hw ascend_950 on ascend_950"]
    assert {section["name"] for section in other["sections"]} >= {"rings", "phase attention"}


def test_coordinates_read_as_sums() -> None:
    key, row = Coordinate({Symbol("key"): 1}), Coordinate({Symbol("row"): 1})
    assert number_text(key * 512 - 1024 + row) == "512*key + row - 1024"
    assert number_text(key // 2) == "f(key)"
    assert number_text(key - key) == "0"
