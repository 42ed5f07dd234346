from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings

from ir.toy import RANDOMS, RandomProgram, Toy, fill, front, order_graph, resolve
from tests.ir.graph import critical_path, window_graph

if TYPE_CHECKING:
    from npusim.program.ir.tile_program import TileProgram


def diamond() -> TileProgram:
    """Return load -> (left, right) -> join: four queues, three rings."""
    toy = Toy()
    load, left, right, join = (toy.queue(n) for n in ("load", "left", "right", "join"))
    source = toy.ring("in", [load], [left, right])
    a, b = toy.ring("a", [left], [join]), toy.ring("b", [right], [join])
    return toy.program(
        [
            toy.op("load", load, fill(source)),
            toy.op("left", left, front(source), fill(a)),
            toy.op("right", right, front(source), fill(b)),
            toy.op("join", join, front(a), front(b)),
        ]
    )


def test_edges_are_queue_order_and_flags_by_name() -> None:
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", [p], [c], depth=1)
    body = [toy.op("w", p, fill(ring)), toy.op("r", c, front(ring))]
    program = toy.program([*body, *body])
    graph = window_graph(program, resolve(program))
    kinds = {(a, b): kind for a, b, kind in graph.edges(data="kind")}
    assert kinds[0, 1] == "S ready"
    assert kinds[1, 2] == "S free"
    assert kinds[1, 3] == "queue"


@settings(max_examples=40)
@given(RANDOMS)
def test_the_window_keeps_exactly_the_order_of_queues_and_flags(rng: object) -> None:
    program = RandomProgram(rng).program()  # type: ignore[arg-type]
    operations = resolve(program)
    assert set(window_graph(program, operations).edges) == set(order_graph(operations)[0].edges)


CRITICAL = {
    "left is longer": ({"load": 5, "left": 30, "right": 20, "join": 1}, 36, ["load", "left", "join"]),
    "right is longer": ({"load": 5, "left": 3, "right": 4, "join": 100}, 109, ["load", "right", "join"]),
}


@pytest.mark.parametrize("case", CRITICAL)
def test_the_critical_path_of_a_diamond_goes_through_its_longer_side(case: str) -> None:
    cycles, length, labels = CRITICAL[case]
    program = diamond()
    total, chain = critical_path(window_graph(program, resolve(program)), lambda o: cycles[o.op.label])
    assert total == length
    assert [o.op.label for o in chain] == labels


def test_the_critical_path_counts_its_last_operation() -> None:
    # a -> b on one pair of queues takes 1 + 100, c -> d on another 5 + 1.
    toy = Toy()
    queues = [toy.queue(n) for n in "abcd"]
    ab, cd = toy.ring("ab", ["a"], ["b"]), toy.ring("cd", ["c"], ["d"])
    slots = [fill(ab), front(ab), fill(cd), front(cd)]
    program = toy.program([toy.op(q, q, slot) for q, slot in zip(queues, slots, strict=True)])
    cycles = {"a": 1, "b": 100, "c": 5, "d": 1}
    total, chain = critical_path(window_graph(program, resolve(program)), lambda o: cycles[o.op.label])
    assert (total, [o.op.label for o in chain]) == (101, ["a", "b"])


def test_a_single_long_operation_is_a_critical_path() -> None:
    toy = Toy()
    a, b, c = (toy.queue(n) for n in "abc")
    ring = toy.ring("r", [a], [b])
    program = toy.program([toy.op("a", a, fill(ring)), toy.op("b", b, front(ring)), toy.op("c", c)])
    cycles = {"a": 1, "b": 1, "c": 50}
    total, _ = critical_path(window_graph(program, resolve(program)), lambda o: cycles[o.op.label])
    assert total == 50
