from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.toy import UB, RandomProgram, Toy, fill, front
from npusim.errors import FlagError, ProgramError, RaceError
from npusim.ir.check import FlagBudget, check, check_order, first_operations, representative_blocks
from npusim.ir.op import Opcode, Step, TileOp
from npusim.ir.program import Item, Loop, TileProgram
from npusim.ir.tile import Tile
from npusim.ir.walk import ResolvedOp, Walker, walk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

AMPLE = FlagBudget(event_ids_per_pair=8, cross_core_ids=11, cross_core_counter_max=15)


def resolve(program: TileProgram) -> list[ResolvedOp]:
    phase = program.phases[0]
    walker = Walker(program)
    return [op for block in phase.blocks for op in walk(walker, phase.body(block))]


# ---------------------------------------------------------------- program order


def test_a_consumer_listed_before_its_producer_is_told_what_to_list_first() -> None:
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", [p], [c])
    program = toy.program([toy.op("read", c, front(ring)), toy.op("write", p, fill(ring))])
    with pytest.raises(ProgramError) as caught:
        check_order(program, resolve(program))
    assert str(caught.value) == (
        "toy: read on c comes too early in program order; list the commit of ring S number 1 on p before it"
    )


def test_a_producer_that_runs_too_far_ahead_is_told_which_release_to_list_first() -> None:
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", [p], [c], depth=2)
    items = [Loop("tile", range(3), lambda _i: [toy.op("write", p, fill(ring))])]
    program = toy.program(items)
    with pytest.raises(
        ProgramError,
        match=r"write on p \(tile=2\) comes too early.*list the release of ring S number 1 on c",
    ):
        check_order(program, resolve(program))


def test_the_second_of_two_producers_counts_too() -> None:
    toy = Toy()
    a, b, c = (toy.queue(n) for n in "abc")
    ring = toy.ring("S", [a, b], [c])
    program = toy.program(
        [toy.op("A", a, fill(ring)), toy.op("C", c, front(ring)), toy.op("B", b, fill(ring))]
    )
    with pytest.raises(ProgramError, match=r"C on c .*commit of ring S number 1 on b"):
        check_order(program, resolve(program))


# ---------------------------------------------------------------- flags


def flags_program(depths: Sequence[int], kind: str) -> TileProgram:
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    rings = [toy.ring(f"r{i}", [p], [c], d, flag=kind) for i, d in enumerate(depths)]
    return toy.program([toy.op("w", p, *map(fill, rings)), toy.op("r", c, *map(front, rings))])


def test_binary_rings_need_an_id_a_slot_between_each_ordered_pair_of_pipes() -> None:
    check(flags_program([3, 5], "binary"), AMPLE)  # 8 of 8
    with pytest.raises(FlagError) as caught:
        check(flags_program([3, 4, 2], "binary"), AMPLE)
    assert str(caught.value) == (
        "flags p -> c: 9 ids needed (r0 ready 3, r1 ready 4, r2 ready 2), 8 there; use shallower rings"
    )


def test_ids_of_one_pair_do_not_count_for_another() -> None:
    toy = Toy()
    p, c, d = (toy.queue(n) for n in "pcd")
    rings = [toy.ring("one", [p], [c], 8), toy.ring("two", [p], [d], 8)]
    items = [
        toy.op("w", p, *map(fill, rings)),
        toy.op("rc", c, front(rings[0])),
        toy.op("rd", d, front(rings[1])),
    ]
    check(toy.program(items), AMPLE)


def test_ids_of_the_way_back_count_with_those_of_rings_the_other_way() -> None:
    # c -> p carries the free flags of "there" and the ready flags of "back": 5 + 4 = 9 ids.
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    there, back = toy.ring("there", [p], [c], 5), toy.ring("back", [c], [p], 4)
    items = [
        toy.op("w", p, fill(there)),
        toy.op("x", c, front(there), fill(back)),
        toy.op("r", p, front(back)),
    ]
    with pytest.raises(FlagError, match=r"9 ids needed"):
        check(toy.program(items), AMPLE)


def test_counter_rings_need_one_id_each_way_whatever_their_depth() -> None:
    check(flags_program([15] * 5, "counter"), AMPLE)  # 10 of 11
    with pytest.raises(
        FlagError, match=r"cross-core flags: 12 ids needed \(r0 ready, r0 free, .*\), 11 there"
    ):
        check(flags_program([1] * 6, "counter"), AMPLE)


def test_a_counter_ring_deeper_than_the_counter_is_refused() -> None:
    with pytest.raises(
        FlagError, match=r"ring r0: 16 slots, but a cross-core flag counts to 15 at most"
    ):
        check(flags_program([16], "counter"), AMPLE)


# ---------------------------------------------------------------- loops


def loop_program(body: object, indices: range = range(4), rings: int = 1) -> TileProgram:
    """Return ``p`` filling and ``c`` reading ring r0 in a loop; ``body(toy, rings, i)`` gives its operations."""
    toy = Toy()
    toy.queue("p"), toy.queue("c")
    listed = [toy.ring(f"r{i}", ["p"], ["c"], 4) for i in range(rings)]
    return toy.program([Loop("kv", indices, lambda i: body(toy, listed, i))])  # type: ignore[operator]


def test_a_body_that_differs_when_called_twice_is_refused() -> None:
    calls = count()
    program = loop_program(lambda toy, _rings, _i: [toy.op(f"call{next(calls)}", "p")])
    with pytest.raises(ProgramError, match=r"loop kv: body\(0\) differs when called twice"):
        check(program)


def test_a_loop_whose_iterations_move_a_ring_by_different_amounts_is_refused() -> None:
    def body(toy: Toy, rings: list[object], i: int) -> Iterator[TileOp]:
        for _ in range(1 + (i == 3)):
            yield toy.op("w", "p", fill(rings[0]))  # type: ignore[arg-type]
            yield toy.op("r", "c", front(rings[0]))  # type: ignore[arg-type]

    with pytest.raises(
        ProgramError, match=r"loop kv: iterations 0 and 3 move the rings by different amounts"
    ):
        check(loop_program(body))


def test_an_iteration_of_another_shape_is_refused() -> None:
    def body(toy: Toy, _rings: object, i: int) -> list[TileOp]:
        rows = 4 if i == 3 else 8
        return [
            toy.op(
                "x", "p", steps=[Step(Opcode.FILL, Tile(UB, 0, rows, 64, 64, "float32"), (0.0,))]
            )
        ]

    with pytest.raises(ProgramError, match=r"loop kv: iterations 0 and 3 differ: .*8.*against.*4"):
        check(loop_program(body))


def test_an_iteration_with_an_operation_more_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"loop kv: iterations 0 and 3 differ in length"):
        check(loop_program(lambda toy, _r, i: [toy.op("x", "p")] * (1 + (i == 3))))


def test_inner_loops_are_checked_too() -> None:
    toy = Toy()
    q = toy.queue("q")
    inner = Loop("inner", range(2), lambda j: [toy.op("x", q)] * (1 + j))
    with pytest.raises(ProgramError, match=r"loop inner: iterations 0 and 1 differ in length"):
        check(toy.program([Loop("outer", range(2), lambda _i: [inner])]))


def test_a_pure_loop_in_a_loop_is_accepted() -> None:
    toy = Toy()
    q = toy.queue("q")
    check(
        toy.program(
            [
                Loop(
                    "outer",
                    range(2),
                    lambda _i: [Loop("inner", range(2), lambda _j: [toy.op("x", q)])],
                )
            ]
        )
    )


def test_iterations_may_differ_in_constants_and_coordinates() -> None:
    def body(toy: Toy, _rings: object, i: int) -> list[TileOp]:
        return [
            toy.op("x", "p", steps=[Step(Opcode.FILL, toy.scratch["p"].part(0, 1), (float(i),))])
        ]

    check(loop_program(body))


#: What iteration 3 (or 1) changes although a loop's iterations must be alike.
UNLIKE = {
    "waits": lambda toy, r, i: [
        toy.op("w", "p", fill(r[0])), toy.op("r", "c", front(r[0], first=i != 3)),
    ],
    "pitch": lambda toy, _r, i: [
        toy.op("x", "p", steps=[Step(Opcode.FILL, Tile(UB, 0, 8, 8, 8 if i != 3 else 64, "float32"), (0.0,))])
    ],
    "the middle": lambda toy, _r, i: [toy.op("x", "p")] * (1 + (i == 1)),
}  # fmt: skip


@pytest.mark.parametrize("what", UNLIKE)
def test_iterations_that_differ_in_what_time_depends_on_are_refused(what: str) -> None:
    # 8 rows of 8 float32 cost 1 repeat without gaps and 8 with: costs of iteration 0 stand for all.
    with pytest.raises(ProgramError, match="loop kv"):
        check(loop_program(UNLIKE[what]))


# ---------------------------------------------------------------- the whole check


def block_program(bodies: dict[str, list[Item]], toy: Toy) -> TileProgram:
    return toy.program(lambda block: bodies[str(block)], blocks=list(bodies), shape=lambda b: b)


def test_every_shape_of_block_is_checked_only_when_thorough() -> None:
    toy = Toy()
    a, b = toy.queue("a"), toy.queue("b")
    shared = toy.allocator.tile(UB, "shared", 1, 64, "float32")
    write = Step(Opcode.FILL, shared, (0.0,))
    racy: list[Item] = [toy.op("one", a, steps=[write]), toy.op("two", b, steps=[write])]
    calm: list[Item] = [toy.op("one", a, steps=[write])]
    program = block_program({"first": calm, "middle": racy, "last": calm}, toy)
    check(program, thorough=False)
    with pytest.raises(RaceError):
        check(program)


def test_what_a_block_leaves_in_a_ring_meets_the_next_block() -> None:
    # One block alone is in order, but it fills a slot more than it releases: two slots, third block.
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", [p], [c], depth=1)
    with pytest.raises(ProgramError, match=r"w on p comes too early"):
        check(toy.program([toy.op("w", p, fill(ring))]))


def test_one_block_of_each_shape_represents_it() -> None:
    toy = Toy()
    q = toy.queue("q")
    program = toy.program([toy.op("x", q)], blocks=[0, 1, 2, 3], shape=lambda b: int(str(b)) % 2)
    phase = program.phases[0]
    assert representative_blocks(phase) == {0: 0, 1: 1}
    assert representative_blocks(phase, [3]) == {1: 3}


def test_loops_are_cut_after_two_iterations_more_than_the_deepest_ring_has_slots() -> None:
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", [p], [c], depth=3)
    body = [toy.op("w", p, fill(ring)), toy.op("r", c, front(ring))]
    program = toy.program([Loop("kv", range(100), lambda _i: body)])
    phase = program.phases[0]
    assert len(list(first_operations(program, phase, [0]))) == 2 * 5


@settings(max_examples=40)
@given(st.randoms(use_true_random=False))
def test_a_legal_program_whose_operations_move_past_their_peers_is_out_of_order(
    rng: object,
) -> None:
    """Moving an operation before the one that sets what it waits for is always noticed."""
    program = RandomProgram(rng).program()  # type: ignore[arg-type]
    operations = resolve(program)
    waiting = [i for i, o in enumerate(operations) if o.waits]
    if not waiting:
        return
    at = rng.choice(waiting)  # type: ignore[attr-defined]
    moved = [operations[at], *operations[:at], *operations[at + 1 :]]
    with pytest.raises(ProgramError, match="comes too early"):
        check_order(program, moved)
