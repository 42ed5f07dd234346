from __future__ import annotations

import pytest
from hypothesis import given, settings

from ir.toy import RANDOMS, RandomProgram, Toy, endpoint_index, fill, front, resolve
from npusim.errors import ProgramError
from npusim.program.ir.check import check
from npusim.program.ir.tile_program import Loop, TileProgram
from npusim.program.ir.walk import ResolvedOp, Walker, compile_items, list_endpoints, walk


def waits_of(program: TileProgram, resolved: ResolvedOp) -> set[tuple[str, str, int]]:
    """Return ``(ring and flag, queue waited for, count)`` of an operation's waits."""
    ends = list_endpoints(program)
    return {(str(ends[w.endpoint]), ends[w.peer].queue, w.count) for w in resolved.waits}


def pipeline(depth: int, tiles: int, period: int = 1) -> TileProgram:
    """Return load -> compute -> store over ``tiles`` tiles through two rings of ``depth`` slots."""
    toy = Toy()
    load, compute, store = (toy.queue(n) for n in ("load", "compute", "store"))
    source = toy.ring("in", [load], [compute], depth, period=period)
    result = toy.ring("out", [compute], [store], depth)
    body = [
        toy.op("load", load, fill(source)),
        toy.op("compute", compute, front(source), fill(result)),
        toy.op("store", store, front(result)),
    ]
    return toy.program([Loop("tile", range(tiles), lambda _i: body)])


def test_a_pipeline_of_three_with_two_slots_waits_as_counted_by_hand() -> None:
    program = pipeline(depth=2, tiles=4)
    operations = resolve(program)
    # Tile t is the (t+1)-th filled.  Filling it needs t + 1 - 2 slots given back.
    expected: list[set[tuple[str, str, int]]] = [
        set(),
        {("in ready", "load", 1)},
        {("out ready", "compute", 1)},
        set(),
        {("in ready", "load", 2)},
        {("out ready", "compute", 2)},
        {("in free", "compute", 1)},
        {("in ready", "load", 3), ("out free", "store", 1)},
        {("out ready", "compute", 3)},
        {("in free", "compute", 2)},
        {("in ready", "load", 4), ("out free", "store", 2)},
        {("out ready", "compute", 4)},
    ]
    assert [waits_of(program, o) for o in operations] == expected


def test_a_pipeline_sets_what_it_hands_on() -> None:
    program = pipeline(depth=2, tiles=1)
    filled, released = (
        endpoint_index(program, "in", queue, is_producer=side) for queue, side in (("load", True), ("compute", False))
    )
    stored, taken = (
        endpoint_index(program, "out", queue, is_producer=side) for queue, side in (("compute", True), ("store", False))
    )
    assert [set(o.sets) for o in resolve(program)] == [{filled}, {released, stored}, {taken}]


def test_slots_follow_the_generation() -> None:
    program = pipeline(depth=3, tiles=5)
    loads = [o for o in resolve(program) if o.op.label == "load"]
    offsets = [o.tile(o.op.handshake[0]).offset_bytes for o in loads]
    first = program.rings[0].offset_bytes
    assert offsets == [first + 1024 * (g % 3) for g in range(5)]


def test_a_slot_is_ready_after_every_producer_and_free_after_every_consumer() -> None:
    toy = Toy()
    a, b, c, d = (toy.queue(n) for n in "abcd")
    ring = toy.ring("r", [a, b], [c, d], depth=1)
    body = [toy.op(q, q, fill(ring)) for q in (a, b)] + [toy.op(q, q, front(ring)) for q in (c, d)]
    program = toy.program([Loop("i", range(2), lambda _i: body)])
    second = resolve(program)[4:]
    assert waits_of(program, second[0]) == {("r free", "c", 1), ("r free", "d", 1)}
    assert waits_of(program, second[1]) == {("r free", "c", 1), ("r free", "d", 1)}
    assert waits_of(program, second[2]) == {("r ready", "a", 2), ("r ready", "b", 2)}
    assert waits_of(program, second[3]) == {("r ready", "a", 2), ("r ready", "b", 2)}


def test_a_producer_sees_releases_in_whole_acknowledgement_periods() -> None:
    program = pipeline(depth=4, tiles=8, period=2)
    loads = [waits_of(program, o) for o in resolve(program) if o.op.label == "load"]
    # Filling tile t needs max(0, t - 3) releases, acknowledged in twos: 1 and 2 -> 2, 3 and 4 -> 4.
    counts = [0, 0, 0, 0, 2, 2, 4, 4]
    assert loads == [{("in free", "compute", n)} if n else set() for n in counts]


def test_a_slot_held_over_several_operations_is_waited_for_once_and_handed_on_once() -> None:
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("r", [p], [c], depth=1)
    items = [
        toy.op("fill", p, fill(ring)),
        toy.op("take", c, front(ring, last=False)),
        toy.op("use", c, front(ring, first=False, last=False)),
        toy.op("drop", c, front(ring, first=False)),
        toy.op("refill", p, fill(ring)),
    ]
    program = toy.program(items)
    operations = resolve(program)
    assert [waits_of(program, o) for o in operations[1:4]] == [{("r ready", "p", 1)}, set(), set()]
    assert [len(o.sets) for o in operations[1:4]] == [0, 0, 1]
    assert waits_of(program, operations[4]) == {("r free", "c", 1)}


def test_a_queue_never_waits_for_itself() -> None:
    toy = Toy()
    q, other = toy.queue("q"), toy.queue("other")
    ring = toy.ring("state", [q], [q, other], depth=1)
    program = toy.program([toy.op("w", q, fill(ring)), toy.op("r", q, front(ring)), toy.op("o", other, front(ring))])
    assert [waits_of(program, o) for o in resolve(program)] == [set(), set(), {("state ready", "q", 1)}]


def test_an_operation_on_a_queue_that_is_no_party_of_the_ring_is_refused() -> None:
    toy = Toy()
    p, c, stranger = (toy.queue(n) for n in ("p", "c", "stranger"))
    ring = toy.ring("r", [p], [c])
    with pytest.raises(ProgramError, match=r"sneak: queue stranger is not a consumer of ring r"):
        resolve(toy.program([toy.op("sneak", stranger, front(ring))]))


def test_two_rings_of_one_name_on_one_queue_are_kept_apart_or_refused() -> None:
    toy = Toy()
    a, b, c = (toy.queue(n) for n in "abc")
    rings = [toy.ring("S", [a], [c]), toy.ring("S", [b], [c])]
    items = [toy.op("A", a, fill(rings[0])), toy.op("B", b, fill(rings[1])), toy.op("C", c, front(rings[0]))]
    try:
        resolved = resolve(toy.program(items))[-1]
    except ProgramError:
        return
    assert waits_of(toy.program(items), resolved) == {("S ready", "a", 1)}


def test_paths_name_the_enclosing_loops_and_iterations() -> None:
    toy = Toy()
    q = toy.queue("q")
    inner = Loop("inner", [7], lambda _i: [toy.op("x", q)])
    program = toy.program([Loop("outer", [2, 5], lambda _i: [inner])])
    assert [o.path for o in resolve(program)] == [(("outer", 2), ("inner", 7)), (("outer", 5), ("inner", 7))]
    assert str(resolve(program)[1]) == "x on q (outer=5 inner=7)"


# ---------------------------------------------------------------- templates


@settings(max_examples=50)
@given(RANDOMS)
def test_random_programs_are_in_legal_order(rng: object) -> None:
    # A law of the generator that other tests build on, and of check: no false alarm.
    check(RandomProgram(rng, touching=True).program())  # type: ignore[arg-type]


def test_compiling_leaves_the_walkers_cursors_alone() -> None:
    program = pipeline(depth=2, tiles=3)
    walker = Walker(program)
    list(walk(walker, program.phases[0].body(0)))
    before = list(walker.cursors)
    compile_items(walker, program.phases[0].body(0))
    assert walker.cursors == before
