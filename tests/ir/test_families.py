"""Blocks that differ in how often their loops run: one stands for all, and says what each of them does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pytest

from ir.toy import Toy, fill, front
from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.errors import RaceError
from npusim.library import find_schedule
from npusim.program.ir.automaton import Automaton
from npusim.program.ir.check import check
from npusim.program.ir.families import families_of, shapes_of
from npusim.program.ir.opaque import indices
from npusim.program.ir.structure import Builder, condensed
from npusim.program.ir.tile_program import Loop
from npusim.program.ir.walk import LoopTemplate, OpTemplate, Templates
from npusim.program.timing import METHODS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.program.ir.tile_program import Item, TileProgram
    from npusim.program.ir.walk import Template

CASES = [
    ("flash", "ascend_910b2", {"pipeline": "block"}),
    ("flash", "ascend_910b2", {"pipeline": "core", "deal": "balanced"}),
    ("flash", "ascend_910b2", {"pipeline": "core", "depth": 5, "block_kv": 256, "kernel": "pto"}),
    # Two pieces follow one another within a step of one block, and from one step to the next of another.
    ("flash", "ascend_910b2", {"pipeline": "core", "depth": 5, "block_kv": 256, "vector_rows": 16, "deal": "balanced"}),
    ("flash", "ascend_910b2", {"depth": 3, "kernel": "tilelang", "block_q": 64}),
    ("pasa", "ascend_910b4", {"deal": "balanced"}),
    ("two_level", "ascend_910b1", {}),
    ("flash", "ascend_950", {"pipeline": "block"}),
    ("flash", "ascend_950", {}),
    ("flash", "v100", {}),
    ("flash", "h200", {}),
]


def causal(name: str, hw: str, tiling: dict[str, object], seq: int) -> TileProgram:
    device = load_device(hw)
    schedule = find_schedule(name, device.family)
    problem = Problem(heads=3, seq_q=seq, head_dim=128, causal=True)
    fitted, _ = schedule.fitted(problem, build_tiling(schedule.tiling, tiling), device, schedule.precision())
    return schedule.program(problem, fitted, device, schedule.precision())


def operations(template: Template) -> list[object]:
    """Return what a template does and waits for, loops once."""
    parts = (operations(p.body) if isinstance(p, LoopTemplate) else p for p in template.parts)
    return [[(o.op.label, o.queue, o.sets) if isinstance(o, OpTemplate) else o for o in part] for part in parts]


@pytest.mark.parametrize(("name", "hw", "tiling"), CASES)
def test_a_family_says_of_each_block_what_its_shape_says(name: str, hw: str, tiling: dict[str, object]) -> None:
    program = causal(name, hw, tiling, 7000)
    templates = Templates(program)
    for phase in program.phases:
        forms = templates.forms(phase)
        assert sorted(n for form in forms for n in form.numbers) == list(range(len(phase.blocks)))
        for form in forms:
            for number, which in zip(form.numbers.tolist(), form.which.tolist(), strict=True):
                own = templates.of(phase, phase.blocks[number])
                assert own.loop_counts() == tuple(form.counts[which])
                assert operations(own) == operations(form.template)
    assert len(templates.forms(program.phases[-1])) < len(shapes_of(program.phases[-1]))


@pytest.mark.parametrize(("name", "hw", "tiling"), CASES)
def test_rings_come_to_the_same_states_by_family_and_by_shape(name: str, hw: str, tiling: dict[str, object]) -> None:
    program = causal(name, hw, tiling, 7000)
    found = []
    for phase in (program.phases[-1], replace(program.phases[-1], family=None)):
        builder = Builder(program, condensed)
        start = (0,) * len(builder.walker.endpoints)
        automaton = Automaton(program, builder.walker.endpoints, builder.shapes(phase), [start], frozenset())
        nodes = {
            (n.piece, n.state, frozenset((automaton.nodes[s].state, hop) for s, hop in n.successors.items()))
            for n in automaton.nodes
        }
        found.append((nodes, set(automaton.ends)))
    assert found[0] == found[1]


def test_blocks_whose_predecessors_are_of_any_head_are_told_apart_by_family(monkeypatch: pytest.MonkeyPatch) -> None:
    device = load_device("ascend_910b2")
    schedule = find_schedule("flash", device.family)
    tiling = build_tiling(schedule.tiling, {"block_q": 128, "block_kv": 512, "vector_rows": 16, "pipeline": "core"})
    problem = Problem(heads=1, seq_q=8192, head_dim=128, causal=True)
    monkeypatch.delattr(Builder, "_one_by_one")
    check(schedule.program(problem, tiling, device, schedule.precision()), device.flags)


class Row(NamedTuple):
    """A block of a toy program: where it is, and how many tiles it visits."""

    at: int
    tiles: int


def rows(toy: Toy, *, counts: range, late: int, is_odd_other: bool = False) -> TileProgram:
    """Return blocks of these counts of tiles; from ``late`` tiles on the last tile is read without a flag."""
    load, use = toy.queue("load", engine="MTE2"), toy.queue("use")
    ring = toy.ring("A", [load], [use])
    tile = [toy.op("copy", load, fill(ring), repeats=1), toy.op("read", use, front(ring), repeats=1)]
    more = toy.op("more", use, front(ring, first=False, last=False), repeats=1, steps=())

    def body(block: Row) -> Iterator[Item]:
        yield Loop("tile", indices(0, block.tiles), lambda _i: tile)
        if is_odd_other and block.tiles % 2 == 1:
            yield toy.op("odd", use, repeats=3)
        if block.tiles >= late:
            yield toy.op("fill", load, fill(ring, last=False), repeats=1)
            yield more

    program = toy.program(body, blocks=[Row(n, n) for n in counts], shape=lambda row: row.tiles)  # type: ignore[attr-defined]
    return replace(program, phases=(replace(program.phases[0], family=lambda _row: 0),))


def test_a_body_may_ask_what_is_alike_for_all_and_is_split_where_it_is_not() -> None:
    def sizes(counts: range) -> list[int]:
        families = families_of(rows(Toy(), counts=counts, late=5).phases[0])
        assert families is not None
        return sorted(len(family.numbers) for family in families)

    assert sizes(range(1, 4)) == [3]
    assert sizes(range(3, 9)) == [1, 1, 4]


def test_a_body_that_looks_at_more_is_taken_shape_by_shape() -> None:
    program = rows(Toy(), counts=range(2, 30), late=100, is_odd_other=True)
    assert families_of(program.phases[0]) is None
    check(program)
    device = load_device("ascend_910b2")
    assert METHODS["steady"](program, device).cycles == METHODS["des"](program, device).cycles


def test_a_fault_of_the_longest_blocks_alone_is_found() -> None:
    check(rows(Toy(), counts=range(1, 40), late=100))
    with pytest.raises(RaceError, match="more on use"):
        check(rows(Toy(), counts=range(1, 40), late=39))
