from __future__ import annotations

import contextlib
import copy
import numbers
import pickle
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ir.toy import UB, Toy, fill, flatten, front, phase, resolve
from npusim.config.load import load_device
from npusim.errors import FlagError, ProgramError, RaceError
from npusim.program.ir.check import check
from npusim.program.ir.op import Opcode, Step, TileOp
from npusim.program.ir.opaque import varying
from npusim.program.ir.tile import GlobalTensor, Tile
from npusim.program.ir.tile_program import Body, Item, Loop, TileProgram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from npusim.program.ir.buffers import Ring

AMPLE = load_device("ascend_910b2").flags


# ---------------------------------------------------------------- program order


def test_a_consumer_listed_before_its_producer_is_told_what_to_list_first() -> None:
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", [p], [c])
    program = toy.program([toy.op("read", c, front(ring)), toy.op("write", p, fill(ring))])
    with pytest.raises(ProgramError) as caught:
        check(program)
    assert str(caught.value) == (
        "toy: read on c comes too early in program order; put the commit number 1 of ring S on p before it"
    )


def test_a_producer_that_runs_too_far_ahead_is_told_which_release_to_list_first() -> None:
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", [p], [c], depth=2)
    items = [Loop("tile", range(3), lambda _i: [toy.op("write", p, fill(ring))])]
    program = toy.program(items)
    with pytest.raises(
        ProgramError, match=r"write on p \(tile=2\) comes too early.*put the release number 1 of ring S on c"
    ):
        check(program)


def test_the_second_of_two_producers_counts_too() -> None:
    toy = Toy()
    a, b, c = (toy.queue(n) for n in "abc")
    ring = toy.ring("S", [a, b], [c])
    program = toy.program([toy.op("A", a, fill(ring)), toy.op("C", c, front(ring)), toy.op("B", b, fill(ring))])
    with pytest.raises(ProgramError, match=r"C on c .*commit number 1 of ring S on b"):
        check(program)


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
        "flags p -> c: 9 ids needed (r0 ready 3, r1 ready 4, r2 ready 2), 8 available; "
        "fewer slots: buffers=1, slots=1, slots_l1a, slots_l1b or a smaller depth (--fields lists the schedule's), or "
        "fewer operands"
    )
    with pytest.raises(FlagError, match=r"9 ids needed .*, 8 available; load fewer operands in a kernel: each has one"):
        check(flags_program([1] * 9, "binary"), AMPLE)
    check(flags_program([3, 4, 2], "scoreboard"), AMPLE)


def test_ids_of_one_pair_do_not_count_for_another() -> None:
    toy = Toy()
    p, c, d = (toy.queue(n) for n in "pcd")
    rings = [toy.ring("one", [p], [c], 8), toy.ring("two", [p], [d], 8)]
    items = [toy.op("w", p, *map(fill, rings)), toy.op("rc", c, front(rings[0])), toy.op("rd", d, front(rings[1]))]
    check(toy.program(items), AMPLE)


def test_ids_of_the_way_back_count_with_those_of_rings_the_other_way() -> None:
    # c -> p carries the free flags of "there" and the ready flags of "back": 5 + 4 = 9 ids.
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    there, back = toy.ring("there", [p], [c], 5), toy.ring("back", [c], [p], 4)
    items = [toy.op("w", p, fill(there)), toy.op("x", c, front(there), fill(back)), toy.op("r", p, front(back))]
    with pytest.raises(FlagError, match=r"9 ids needed"):
        check(toy.program(items), AMPLE)


def test_counter_rings_need_one_id_each_way_whatever_their_depth() -> None:
    check(flags_program([15] * 5, "counter"), AMPLE)  # 10 of 11
    with pytest.raises(FlagError, match=r"cross-core flags: 12 ids needed \(r0 ready, r0 free, .*\), 11 available"):
        check(flags_program([1] * 6, "counter"), AMPLE)


def test_a_counter_ring_deeper_than_the_counter_is_refused() -> None:
    with pytest.raises(FlagError, match=r"ring r0: 16 slots, but a cross-core flag counts at most to 15; use fewer"):
        check(flags_program([16], "counter"), AMPLE)


# ---------------------------------------------------------------- loops


def loop_program(body: Any, indices: range = range(4)) -> TileProgram:
    """Return ``p`` filling and ``c`` reading a ring in a loop; ``body(toy, ring, i)`` gives its operations."""
    toy = Toy()
    toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", ["p"], ["c"], 4)
    return toy.program([Loop("kv", indices, lambda i: body(toy, ring, i))])


@dataclass(frozen=True)
class Part:
    """Coordinates, or a block, as a dataclass."""

    x: Any
    y: int


class Lax:
    """Equal to everything of its kind."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lax)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"Lax({self.x!r})"


def scale(toy: Toy, factor: Any) -> TileOp:
    return toy.op("x", "p", steps=[Step(Opcode.FILL, toy.scratch["p"].part(0, 1), (factor,))])


#: What a body may do with its index (in 1) but look at it.
LOOKS: dict[str, Callable[[Any], object]] = {
    "compares": lambda i: i == 3,
    "compares ": lambda i: i < 3,
    "compares  ": lambda i: max(i, 2),
    "compares   ": lambda i: 2 * i + 1 in (1, 3),
    "branches on": lambda i: "odd" if i else "even",
    "branches on ": lambda i: i % 2 or 1,
    "converts": lambda i: float(i) + 1,
    "converts ": lambda i: list(range(i)),
    "converts  ": lambda i: ["a", "b", "c", "d"][i],
    "converts   ": lambda i: abs(3 - i),
    "hashes": lambda i: i in {0, 1},
    "converts to text": lambda i: f"tile {i}",
    "converts to text ": lambda i: str(i * 2),
    "converts to text  ": lambda i: repr([i]),
    "converts to text   ": lambda i: f"{i!r}",
    "asks for 'bit_length' of": lambda i: i.bit_length(),
    "asks for 'real' of": lambda i: getattr(i, "real", 0),
    "asks for 'numerator' of": lambda i: hasattr(i, "numerator"),
    "copies": lambda i: copy.copy(i) > 3,
    "copies ": lambda i: copy.deepcopy([i]),
    "copies  ": lambda i: pickle.dumps([i]),
    "copies   ": lambda i: sys.getsizeof(i) > 28,
}


@pytest.mark.parametrize("verb", LOOKS)
def test_a_body_that_looks_at_its_index_is_refused_with_its_line(verb: str) -> None:
    look = LOOKS[verb]

    def body(toy: Toy, _ring: Ring, i: Any) -> list[TileOp]:
        look(i)
        return [toy.op("x", "p")]

    with pytest.raises(ProgramError) as caught:
        check(loop_program(body))
    line = look.__code__.co_firstlineno
    assert str(caught.value).startswith(
        f"toy: loop kv: {__file__}:{line}: the body {verb.strip()} the index of loop kv, so that iterations or "
        "blocks would differ"
    )


def test_a_coordinate_is_of_the_class_of_its_number() -> None:
    """So that what asks is told the truth: no body does otherwise in the proof than for a number."""

    def classes(i: Any) -> list[Any]:
        match i:
            case int():
                matched = True
            case _:
                matched = False
        sums = (i, -i, 3 * i + 1, i * i, i // 2, i & 1, i - i, i / 2, i * 0.5, i // 2 + 0.5, i * i / 3)
        return [matched, *(isinstance(x, k) for x in sums for k in (int, float, bool, str, Tile, numbers.Number))]

    seen: list[Any] = []
    check(loop_program(lambda toy, _r, i: [toy.op("x", "p")] * (seen.append(classes(i)) or 1)))  # type: ignore[func-returns-value]
    assert seen and all(found == classes(3) for found in seen)
    assert isinstance(varying(float, 3), float)


@pytest.mark.parametrize("verb", LOOKS)
@pytest.mark.parametrize("kind", ["loop", "coordinate", "block"])
def test_a_look_that_the_body_lets_pass_counts(verb: str, kind: str) -> None:
    toy = Toy()
    q = toy.queue("q")

    def looked(i: Any) -> list[TileOp]:
        with contextlib.suppress(Exception):
            LOOKS[verb](i)
            return [toy.op("x", q)] * 2
        return [toy.op("x", q)]

    def stage(_static: int, at: Any, _index: Any) -> list[TileOp]:
        return looked(at)

    if kind == "block":  # each by itself, then: what looks at its numbers may do so
        check(toy.program(looked, blocks=range(1, 4), shape=lambda n: n == 10))
        with pytest.raises(ProgramError, match="but not the same operations"):
            check(toy.program(lambda n: looked(n)[: 1 + (n == 2)], blocks=range(1, 4)))
        return
    loop = looked if kind == "loop" else Body(stage, 1, 5)
    with pytest.raises(ProgramError, match=rf"the body {verb.strip()} (the index of loop kv|at), so"):
        check(toy.program([Loop("kv", range(2), loop)]))


def test_an_iteration_with_an_operation_more_is_refused_where_it_branches() -> None:
    with pytest.raises(ProgramError, match=r"loop kv: .*test_check.py:\d+: the body compares the index of loop kv"):
        check(loop_program(lambda toy, _r, i: [toy.op("x", "p")] * (1 + (i == 3))))


def test_iterations_may_differ_in_constants_and_coordinates() -> None:
    x = GlobalTensor("x", 1, 1, 64, 64, "float32", "input")
    seen = []

    def body(toy: Toy, _ring: Ring, i: Any) -> list[TileOp]:
        half = varying(lambda n: n / 2, i)
        seen.append(half)
        row = 3 * i + 1 - i * 2
        load = Step(Opcode.COPY, toy.scratch["p"].part(0, 2), (x.tile(0, 0, row, 2),))
        return [toy.op("load", "p", steps=[load]), scale(toy, i * 0.5), scale(toy, half)]

    program = loop_program(body)
    check(program)
    assert [o.op.steps[0].srcs[0] for o in resolve(program)[2::3]] == [0.0, 0.5, 1.0, 1.5]
    assert [o.op.steps[0].srcs[0].row for o in resolve(program)[::3]] == [1, 2, 3, 4]  # type: ignore[union-attr]


@pytest.mark.parametrize("part", ["offset", "rows"])
def test_tiles_on_the_chip_do_not_move_with_an_index(part: str) -> None:
    def body(toy: Toy, _ring: Ring, i: Any) -> Iterator[TileOp]:
        tile = Tile(UB, 65536 + i * 32, 1, 8, 8, "float32") if part == "offset" else toy.scratch["p"].part(0, i)
        yield toy.op("x", "p", steps=[Step(Opcode.FILL, tile, (0.0,))])

    with pytest.raises(
        ProgramError, match=r"test_check.py:\d+: toy: x on p accesses on-chip bytes whose place or size depends"
    ):
        check(loop_program(body))


def test_inner_loops_and_their_outer_indices_are_opaque_too() -> None:
    toy = Toy()
    q = toy.queue("q")

    def program(inner: Any) -> TileProgram:
        return toy.program([Loop("outer", range(2), lambda i: [Loop("inner", range(3), lambda j: inner(i, j))])])

    check(program(lambda _i, _j: [toy.op("x", q)]))
    for which, inner in (
        ("inner", lambda _i, j: [toy.op("x", q)] * (1 + j)),
        ("outer", lambda i, _j: [toy.op("x", q)] if i > 0 else []),
    ):
        with pytest.raises(ProgramError, match=rf"the index of loop {which}, "):
            check(program(inner))


def test_a_loop_that_moves_the_ends_of_a_ring_apart_is_out_of_order() -> None:
    def body(toy: Toy, ring: Ring, _i: Any) -> list[TileOp]:
        return [toy.op("w", "p", fill(ring))]

    with pytest.raises(ProgramError, match=r"w on p \(kv=4\) comes too early.*release number 1 of ring S on c"):
        check(loop_program(body, range(100)))


def test_coordinates_of_a_shared_body_are_opaque() -> None:
    toy = Toy()
    q = toy.queue("q")

    def stage(static: int, at: tuple[int, int], _index: Any) -> list[TileOp]:
        return [toy.op("x", q)] * (static + (at[1] > 3))

    program = toy.program([Loop("kv", range(2), Body(stage, 1, (0, 5)))])
    with pytest.raises(ProgramError, match=r"loop kv: .*test_check.py:\d+: the body compares at\[1\]"):
        check(program)


@pytest.mark.parametrize("part", [True, "a", None, 0.5, [1], {1}, frozenset({1}), range(2), Opcode.ADD, np.int64(1)])
def test_coordinates_of_a_shared_body_are_integers(part: Any) -> None:
    toy = Toy()
    q = toy.queue("q")
    program = toy.program([Loop("kv", range(2), Body(lambda *_: [toy.op("x", q)], 1, (0, (part,))))])
    with pytest.raises(ProgramError, match=r"loop kv: the coordinates of a body contain .* may contain only integers"):
        check(program)


def test_indices_are_integers() -> None:
    with pytest.raises(ProgramError, match="loop kv: its indices must be integers"):
        check(loop_program(lambda toy, _r, _i: [toy.op("x", "p")], (0.5, 1.5)))  # type: ignore[arg-type]


def test_bodies_of_equal_but_other_contents_are_not_one() -> None:
    own = (None, flatten, partial(flatten, 1), partial(flatten, 1), Toy().queue)
    parts = (1, True, 1.0, 0, 0.0, -0.0, "1", Opcode.ADD, np.float32(1), *own)
    statics = [wrap(p) for p in parts for wrap in (lambda p: p, lambda p: (p,), lambda p: frozenset({p}))]
    ats = [(1, (2,)), ((1,), 2), (1, 2), Part(1, 2)]
    keys = [Body(flatten, s, at).key for s in statics for at in ats]  # type: ignore[arg-type]
    assert len(set(keys)) == len(statics) * len(ats)
    assert Body(flatten, (1, 0.0), Part(1, 2)).key == Body(flatten, (1, 0.0), Part(3, 4)).key  # type: ignore[arg-type]

    toy = Toy()
    a, b = toy.queue("a"), toy.queue("b")
    write = Step(Opcode.FILL, toy.allocator.tile(UB, "shared", 1, 64, "float32"), (0.0,))

    def stage(static: object, _at: int, _index: Any) -> list[TileOp]:
        return [toy.op("one", a, steps=[write]), toy.op("two", b, steps=[write] * (static is True))]

    for statics in ([1, 1], [1, True]):
        program = toy.program([Loop(f"l{n}", range(2), Body(stage, s, 0)) for n, s in enumerate(statics)])
        with pytest.raises(RaceError) if True in [s is True for s in statics] else contextlib.nullcontext():
            check(program)


def test_a_shared_body_is_built_once_however_many_blocks_have_it() -> None:
    toy = Toy()
    q = toy.queue("q")
    calls = count()

    def stage(rows: int, _at: int, _index: Any) -> list[TileOp]:
        next(calls)
        return [toy.op(f"x{rows}", q)]

    def body(block: Any) -> list[Item]:
        return [Loop("kv", range(block[0]), Body(stage, 3, block[1]))]

    check(toy.program(body, blocks=[(n % 7 + 1, n) for n in range(50)], shape=lambda block: block[0]))
    assert next(calls) == 1


# ---------------------------------------------------------------- blocks


def test_blocks_of_one_shape_that_differ_in_more_than_coordinates_are_refused() -> None:
    toy = Toy()
    q = toy.queue("q")
    program = toy.program(lambda n: [toy.op("x", q)] * (1 + (n == 3)), blocks=range(5))
    with pytest.raises(ProgramError, match=r"blocks 0 and 3 have one shape, 0, but not the same operations"):
        check(program)


def test_blocks_that_a_body_tells_apart_without_doing_otherwise_are_taken_one_by_one() -> None:
    toy = Toy()
    q = toy.queue("q")
    out = GlobalTensor("out", 1, 1, 64, 64, "float32", "output")

    def body(n: Any) -> list[TileOp]:
        row = {0: 8, 1: 0, 2: 32}[n]
        return [toy.op("x", q, steps=[Step(Opcode.COPY, out.tile(0, 0, row, 4), (toy.scratch[q].part(0, 4),))])]

    check(toy.program(body, blocks=range(3), tensors=[out]))


def test_queues_that_write_at_other_coordinates_of_a_block_race_where_those_meet() -> None:
    toy = Toy()
    queues = toy.queue("a"), toy.queue("b")
    out = GlobalTensor("out", 1, 1, 64, 64, "float32", "output")

    def body(rows: tuple[int, int]) -> list[TileOp]:
        regions = (out.tile(0, 0, row, 4) for row in rows)
        parts = (toy.scratch[q].part(0, 4) for q in queues)
        steps = (Step(Opcode.COPY, region, (part,)) for region, part in zip(regions, parts, strict=True))
        return [toy.op(q, q, steps=[step]) for q, step in zip(queues, steps, strict=True)]

    check(toy.program(body, blocks=[(0, 32), (8, 40), (16, 28)], shape=lambda _rows: 0, tensors=[out]))
    with pytest.raises(RaceError, match="out"):
        check(toy.program(body, blocks=[(0, 32), (8, 40), (16, 19)], shape=lambda _rows: 0, tensors=[out]))


@pytest.mark.parametrize("pair", [(1, True), (1, 1.0), (0.0, -0.0), ((0, 1), (0, True))], ids=str)
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, 1), lambda x: Part(x, 1), Lax])
def test_blocks_that_are_equal_but_not_alike_are_told_apart(pair: Any, wrap: Any) -> None:
    toy = Toy()
    q = toy.queue("q")
    blocks = [wrap(part) for part in pair]
    assert blocks[0] == blocks[1]

    def body(block: Any) -> list[TileOp]:
        return [toy.op("x", q)] * (1 + (repr(block) != repr(blocks[0])))

    with pytest.raises(ProgramError, match="have one shape, 0, but not the same operations"):
        check(toy.program(body, blocks=blocks))


@pytest.mark.parametrize("dealt", [((0, 1), (1, 2)), ((0,), (2,)), ((0, 1), (2, 3)), ((0, 1), (-1,))])
def test_a_block_is_dealt_once(dealt: Any) -> None:
    toy = Toy()
    q = toy.queue("q")
    program = toy.program([toy.op("x", q)], blocks=range(3))
    for given in (dealt, ((0, 2), (1,))):
        program = replace(program, phases=(replace(program.phases[0], dealt=given),))
        with (
            pytest.raises(ProgramError, match=r"is distributed \d times")
            if given is dealt
            else contextlib.nullcontext()
        ):
            check(program)


def test_blocks_may_be_anything_that_their_body_understands() -> None:
    toy = Toy()
    q = toy.queue("q")
    bodies = {"first": [toy.op("a", q)], "middle": [toy.op("b", q)], "last": [toy.op("a", q)]}
    check(toy.program(lambda name: bodies[str(name)], blocks=list(bodies), shape=lambda name: name))
    check(toy.program(lambda pair: bodies[pair[0]], blocks=[("first", 1), ("last", 5)]))


def test_every_shape_of_block_is_checked() -> None:
    toy = Toy()
    a, b = toy.queue("a"), toy.queue("b")
    shared = toy.allocator.tile(UB, "shared", 1, 64, "float32")
    write = Step(Opcode.FILL, shared, (0.0,))
    racy: list[Item] = [toy.op("one", a, steps=[write]), toy.op("two", b, steps=[write])]
    bodies = {"first": [toy.op("x", a)], "middle": racy, "last": [toy.op("y", a)]}
    with pytest.raises(RaceError):
        check(toy.program(lambda n: bodies[str(n)], blocks=list(bodies), shape=lambda n: n))


def test_what_a_block_leaves_in_a_ring_meets_the_next_block() -> None:
    # One block alone is in order, but it fills a slot more than it releases.
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", [p], [c], depth=1)
    with pytest.raises(ProgramError, match=r"w on p comes too early"):
        check(toy.program([toy.op("w", p, fill(ring))]))


# ---------------------------------------------------------------- bad programs


def test_a_ring_name_that_a_queue_has_in_two_phases_is_refused() -> None:
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    phases = []
    for name in ("one", "two"):
        ring = toy.ring("S", [p], [c])
        items = [toy.op("w", p, fill(ring)), toy.op("r", c, front(ring))]
        phases.append(phase(name, [0], lambda _b, items=items: items, lambda _b: 0))
    with pytest.raises(
        ProgramError, match=r"toy: queue p has two rings called S, in one phase or in several; rename one"
    ):
        check(toy.program((), phases=phases))


def test_a_ring_that_is_not_the_programs_is_refused() -> None:
    toy, other = Toy(), Toy()
    p, c = toy.queue("p"), toy.queue("c")
    toy.ring("S", [p], [c])
    twin = other.ring("S", [p], [c])
    with pytest.raises(ProgramError, match=r"w on p works on ring S, which is not the program's ring of that name"):
        check(toy.program([toy.op("w", p, fill(twin))]))


def test_a_queue_that_does_not_exist_is_refused() -> None:
    toy = Toy()
    toy.queue("p")
    with pytest.raises(
        ProgramError, match=r"toy: w on q is not issued to a queue of the program; its queues are p \(block 0\)"
    ):
        check(toy.program([TileOp("w", "q", "q", ())]))


def test_a_region_that_cannot_be_expressed_is_refused_with_its_line() -> None:
    toy = Toy()
    q = toy.queue("q")
    out = GlobalTensor("out", 1, 1, 64, 64, "float32", "output")

    def step(i: Any) -> Iterator[TileOp]:
        yield toy.op("store", q, steps=[Step(Opcode.COPY, out.tile(0, 0, i * i, 1), (toy.scratch[q].part(0, 1),))])

    with pytest.raises(
        ProgramError,
        match=r"test_check.py:\d+: toy: store on q accesses a region of tensor out that cannot be expressed: its row ",
    ):
        check(toy.program([Loop("i", range(8), step)], tensors=[out]))
