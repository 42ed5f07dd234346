"""Races: by hand, each hole that sampling left open, and by dropping each wait of every schedule in turn."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ir.oracle import Changed, Flag, Runs, find_race, flags_of
from ir.toy import UB, Toy, fill, front, phase, resolve, touched_bytes
from npusim.config.load import load_device
from npusim.config.problem import CopyProblem, GemmProblem, Problem
from npusim.config.tiling import build_tiling
from npusim.errors import ProgramError, RaceError
from npusim.library import SCHEDULES
from npusim.program.ir.check import check
from npusim.program.ir.op import PLAIN, Attributes, Opcode, Step, TileOp
from npusim.program.ir.structure import Bytes
from npusim.program.ir.tile import GlobalTensor, Tile
from npusim.program.ir.tile_program import Item, Loop, TileProgram
from npusim.program.ir.walk import Endpoint, list_endpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from npusim.program.ir.tile import RingTile


# ---------------------------------------------------------------- by hand


def write(tile: Tile) -> Step:
    return Step(Opcode.FILL, tile, (0.0,))


def two_queues(first: Callable[[Toy], Step], second: Callable[[Toy], Step]) -> TileProgram:
    """Return two operations on two queues that nothing orders."""
    toy = Toy()
    a, b = toy.queue("a"), toy.queue("b")
    return toy.program([toy.op("one", a, steps=[first(toy)]), toy.op("two", b, steps=[second(toy)])])


def ub(offset: int, rows: int = 1, cols: int = 8, stride: int | None = None) -> Tile:
    return Tile(UB, 65536 + offset, rows, cols, stride or cols, "float32")


def test_a_write_after_an_unordered_write_names_both_and_the_bytes() -> None:
    program = two_queues(lambda _t: write(ub(0)), lambda _t: write(ub(16)))
    with pytest.raises(RaceError) as caught:
        check(program)
    assert str(caught.value) == (
        "two on b writes bytes 65552..65584 of aiv.UB that one on a writes, and no flag orders them"
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda t: write(ub(0)), lambda t: Step(Opcode.COPY, t.scratch["b"].part(0, 1, 0, 8), (ub(0),))),
        (lambda t: Step(Opcode.COPY, t.scratch["a"].part(0, 1, 0, 8), (ub(0),)), lambda t: write(ub(0))),
    ],
    ids=["read after write", "write after read"],
)
def test_a_read_beside_a_write_is_a_race(first: Callable[[Toy], Step], second: Callable[[Toy], Step]) -> None:
    program = two_queues(first, second)
    with pytest.raises(RaceError, match=r"two on b .* one on a"):
        check(program)


def test_two_reads_are_no_race() -> None:
    program = two_queues(
        lambda t: Step(Opcode.COPY, t.scratch["a"].part(0, 1, 0, 8), (ub(0),)),
        lambda t: Step(Opcode.COPY, t.scratch["b"].part(0, 1, 0, 8), (ub(0),)),
    )
    check(program)


def test_an_accumulating_product_reads_its_destination() -> None:
    toy = Toy()
    a, b = toy.queue("a"), toy.queue("b")
    total, x = Tile("aic.L0C", 0, 16, 16, 16, "float32"), Tile("aic.L0A", 0, 16, 16, 16, "float16")
    for how in (PLAIN, Attributes(accumulate=True)):
        program = toy.program(
            [toy.op("start", a, steps=[write(total)]), TileOp("mmad", b, b, (Step(Opcode.MATMUL, total, (x, x), how),))]
        )
        reads = touched_bytes(resolve(program)[1])[0]
        assert ("aic.L0C" in reads) == how.accumulate
        with pytest.raises(RaceError):
            check(program)


def test_neighbouring_bytes_are_no_race() -> None:
    program = two_queues(lambda _t: write(ub(0)), lambda _t: write(ub(32)))
    check(program)


def test_interleaved_columns_of_one_pitch_are_no_race() -> None:
    # Rows of 16 columns: the left and the right 8 of each row never share a byte.
    program = two_queues(lambda _t: write(ub(0, 4, 8, 16)), lambda _t: write(ub(32, 4, 8, 16)))
    check(program)


def test_columns_that_wrap_into_the_next_row_are_a_race() -> None:
    # From column 12 on, 8 columns of a pitch of 16 reach into columns 0..3 of the row below.
    program = two_queues(lambda _t: write(ub(16 * 4, 3, 4, 16)), lambda _t: write(ub(12 * 4, 3, 8, 16)))
    with pytest.raises(RaceError):
        check(program)


def test_the_message_names_both_iterations() -> None:
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", [p], [c], depth=1)

    def body(_i: int) -> list[TileOp]:
        taken = front(ring)
        own = toy.scratch[c].part(0, taken.rows)
        return [
            toy.op("w", p, steps=[Step(Opcode.FILL, fill(ring), (0.0,))]),
            toy.op("r", c, steps=[Step(Opcode.COPY, own, (taken,))]),
        ]

    program = toy.program([Loop("kv", range(3), body)])
    program = Changed(Flag("w", p, "S", is_producer=True).dropped).program(program)
    with pytest.raises(RaceError, match=r"w on p \(kv=1\) writes .* that r on c \(kv=0\) reads"):
        check(program)


@pytest.mark.parametrize("is_late", [False, True])
def test_what_is_read_before_its_slot_is_released_is_ordered_and_after_it_a_race(*, is_late: bool) -> None:
    """Step n reads tile n and, a tile later, reads it again and releases it."""
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.allocator.ring(UB, "K", 1024, 2, producers=[p], consumers=[c], peeks=[c])
    shape = 4, 64, "float32"

    def read(label: str, taken: RingTile) -> TileOp:
        return toy.op(label, c, steps=[Step(Opcode.COPY, toy.scratch[c].part(0, 4), (taken,))])

    def body(_index: int, *, has_both: bool) -> Iterator[TileOp]:
        yield toy.op("load", p, steps=[Step(Opcode.FILL, ring.fill(*shape), (0.0,))])
        reads = [read("first", ring.peek(*shape)), *([read("again", ring.front(*shape))] if has_both else [])]
        yield from reversed(reads) if is_late else reads

    start = [] if is_late else list(body(0, has_both=False))
    end = [] if is_late else [read("again", ring.front(*shape))]
    program = toy.program([*start, Loop("kv", range(5), partial(body, has_both=True)), *end])
    if not is_late:
        check(program)
        return
    with pytest.raises(RaceError, match=r"load on p .*writes .* that first on c .*reads"):
        check(program)


@pytest.mark.parametrize("role", ["output", "workspace"])
def test_two_queues_on_one_cut_of_a_tensor_race(role: Any) -> None:
    tensor = GlobalTensor("o", 1, 2, 8, 64, "float32", role)
    same = [tensor.tile(0, 1, 2, 2), tensor.tile(0, 1, 3, 2)]
    other_head = [tensor.tile(0, 1, 2, 2), tensor.tile(0, 0, 2, 2)]
    for cuts, is_race in ((same, True), (other_head, False)):
        toy = Toy()
        queues = [toy.queue("a"), toy.queue("b")]
        items = [
            toy.op(f"store {q}", q, steps=[Step(Opcode.COPY, cut, (toy.scratch[q].part(0, 2),))])
            for q, cut in zip(queues, cuts, strict=True)
        ]
        program = toy.program(items, tensors=[tensor])
        if is_race:
            with pytest.raises(RaceError, match="of tensor o"):
                check(program)
        else:
            check(program)


# ---------------------------------------------------------------- holes that sampling left open


def ring_program(depth: int, *, blocks: int = 8, drop: bool = False) -> TileProgram:
    """Return blocks that use a ring once: its slot comes round after ``depth`` blocks."""
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", [p], [c], depth=depth)
    items = [
        toy.op("w", p, steps=[write(fill(ring, first=not drop))]),
        toy.op("r", c, steps=[Step(Opcode.COPY, toy.scratch[c].part(0, 4), (front(ring),))]),
    ]
    return toy.program(items, blocks=range(blocks))


@pytest.mark.parametrize("depth", [1, 2, 3, 7])
def test_a_ring_that_a_block_uses_once_needs_its_wait_for_a_free_slot(depth: int) -> None:
    check(ring_program(depth))
    with pytest.raises(RaceError, match=r"w on p writes bytes .* \(ring S\) that r on c of .*before reads"):
        check(ring_program(depth, drop=True))


@pytest.mark.parametrize("order", ["AB", "BA", "ABA", "BABA"])
def test_blocks_of_two_shapes_that_share_a_tile_through_different_queues_race(order: str) -> None:
    """Each shape alone is in order: one queue has the tile for itself."""
    toy = Toy()
    a, b = toy.queue("a"), toy.queue("b")
    shared = toy.allocator.tile(UB, "shared", 1, 64, "float32")
    bodies = {"A": [toy.op("one", a, steps=[write(shared)])], "B": [toy.op("two", b, steps=[write(shared)])]}

    def program(letters: str) -> TileProgram:
        blocks = [(letter, i) for i, letter in enumerate(letters)]
        return toy.program(lambda block: bodies[block[0]], blocks=blocks, shape=lambda block: block[0])

    for alone in "AB":
        check(program(alone * 3))
    with pytest.raises(RaceError, match=r"(one on a|two on b) writes .* that (two on b|one on a) of the block before"):
        check(program(order))


OUT = GlobalTensor("out", 1, 1, 64, 64, "float32", "output")


def store_program(row_of: Callable[[Any], Any], *, reads_row: Callable[[Any], Any] | None = None) -> TileProgram:
    """Return blocks that store 4 rows of a tensor each, from ``row_of(block)`` on, and may read others."""
    toy = Toy()
    q = toy.queue("q")

    def body(block: Any) -> Iterator[Item]:
        mine = toy.scratch[q].part(0, 4)
        if reads_row:
            yield toy.op("load", q, steps=[Step(Opcode.COPY, mine, (OUT.tile(0, 0, reads_row(block), 4),))])
        yield toy.op("store", q, steps=[Step(Opcode.COPY, OUT.tile(0, 0, row_of(block), 4), (mine,))])

    return toy.program(body, blocks=range(8), tensors=[OUT])


def test_blocks_that_keep_to_their_own_rows_are_no_race() -> None:
    check(store_program(lambda b: b * 4))
    check(store_program(lambda b: 60 - b * 8, reads_row=lambda b: 60 - b * 8))


@pytest.mark.parametrize(
    ("row_of", "reads_row"),
    [
        (lambda b: b * 3, None),
        (lambda b: b // 2 * 4, None),
        (lambda b: b * 4, lambda b: b * 4 + 4),
        (lambda _b: 0, None),
    ],
    ids=["rows overlap", "two blocks, one region", "reads what the next writes", "all one region"],
)
def test_a_block_that_touches_what_another_writes_in_its_phase_is_a_race(row_of: Any, reads_row: Any) -> None:
    """They may run on two core groups, which nothing orders."""
    program = store_program(row_of, reads_row=reads_row)
    assert find_race(program) is not None
    with pytest.raises(RaceError, match=r"store on q of block \d writes elements of tensor out that .* of block \d"):
        check(program)


def test_what_a_phase_writes_the_next_may_read() -> None:
    toy = Toy()
    q = toy.queue("q")
    mine = toy.scratch[q].part(0, 4)
    middle = GlobalTensor("middle", 1, 1, 64, 64, "float32", "workspace")

    def first(block: Any) -> list[Item]:
        return [toy.op("store", q, steps=[Step(Opcode.COPY, middle.tile(0, 0, block * 4, 4), (mine,))])]

    def second(_block: Any) -> list[Item]:
        return [toy.op("load", q, steps=[Step(Opcode.COPY, mine, (middle.tile(0, 0, 0, 4),))])]

    phases = [phase(n, range(4), b, lambda _b: 0) for n, b in (("one", first), ("two", second))]
    check(toy.program((), phases=phases, tensors=[middle]))


def test_a_store_and_a_load_of_one_block_are_ordered_by_flags_or_race() -> None:
    """Regions of one block, at its own coordinates: happens-before decides, as for memory on the chip."""
    middle = GlobalTensor("middle", 1, 1, 64, 64, "float32", "workspace")

    def program(*, ordered: bool) -> TileProgram:
        toy = Toy()
        a, b = toy.queue("a"), toy.queue("b")
        ring = toy.ring("done", [a], [b], depth=1)

        def body(block: Any) -> Iterator[Item]:
            def step(index: Any) -> Iterator[TileOp]:
                region = middle.tile(0, 0, block * 8 + index * 2, 2)
                yield toy.op(
                    "store",
                    a,
                    *([fill(ring)] if ordered else []),
                    steps=[Step(Opcode.COPY, region, (toy.scratch[a].part(0, 2),))],
                )
                yield toy.op(
                    "load",
                    b,
                    *([front(ring)] if ordered else []),
                    steps=[Step(Opcode.COPY, toy.scratch[b].part(0, 2), (region,))],
                )

            yield Loop("i", range(4), step)

        return toy.program(body, blocks=range(8), tensors=[middle])

    check(program(ordered=True))
    with pytest.raises(RaceError, match=r"load on b .* reads 2 x 64 elements of tensor middle that store on a"):
        check(program(ordered=False))


@pytest.mark.parametrize("name", ["kv", "block", ""])
def test_an_iteration_races_with_the_next_whatever_the_loop_is_called(name: str) -> None:
    """The load of an iteration is after its store, the store of the next one is not after that load."""
    toy = Toy()
    a, b = toy.queue("a"), toy.queue("b")
    done = toy.ring("done", [a], [b], depth=2)
    cut, read = OUT.tile(0, 0, 0, 2), toy.scratch[b].part(0, 2)
    store = Step(Opcode.COPY, cut, (toy.scratch[a].part(0, 2),))

    def step(_index: Any) -> list[TileOp]:
        load = Step(Opcode.COPY, read, (cut,))
        return [toy.op("store", a, fill(done), steps=[store]), toy.op("load", b, front(done), steps=[load])]

    program = toy.program([Loop(name, range(8), step)], tensors=[OUT])
    assert find_race(program) is not None
    with pytest.raises(RaceError, match="of tensor out"):
        check(program)


HEADS = GlobalTensor("o", 1, 2, 8, 64, "float32", "output")
FLAT = replace(HEADS, heads=1, rows=16)


@pytest.mark.parametrize(
    "cut",
    [
        FLAT.tile(0, 0, 10, 2),
        replace(HEADS, role="input").tile(0, 1, 2, 2),
        replace(HEADS, role="workspace").tile(0, 1, 2, 2),
        replace(HEADS, packed=2).tile(0, 1, 2, 2),
    ],
    ids=["flat", "input", "workspace", "packed"],
)
@pytest.mark.parametrize("listed", [True, False])
def test_a_tensor_seen_as_another_is_refused(cut: Any, listed: bool) -> None:
    toy = Toy()
    a, b = toy.queue("a"), toy.queue("b")
    mine = toy.scratch[a].part(0, 2)
    items = [
        toy.op("store", a, steps=[Step(Opcode.COPY, HEADS.tile(0, 1, 2, 2), (mine,))]),
        toy.op("load", b, steps=[Step(Opcode.COPY, toy.scratch[b].part(0, 2), (cut,))]),
    ]
    with pytest.raises(ProgramError, match=r"load on b uses the name o for .* elsewhere"):
        check(toy.program(items, tensors=[HEADS] if listed else []))


@pytest.mark.parametrize(
    ("cut_of", "said"),
    [
        (lambda b, i: HEADS.tile(0, 0, 6 + b, 2), "row 7 to 8; allowed: 0 to 7"),
        (lambda b, i: HEADS.tile(0, b, 8 - i, 1), "row 7 to 8; allowed: 0 to 7"),
        (lambda b, i: HEADS.tile(0, b, i, 1, 60, 5), "col 60 to 64; allowed: 0 to 63"),
        (lambda b, i: HEADS.tile(0, b, i, 1, b - 1, 1), "col -1 to -1; allowed: 0 to 63"),
        (lambda b, i: HEADS.tile(0, b + i, 0, 1), "head 1 to 2; allowed: 0 to 1"),
        (lambda b, i: HEADS.tile(b, i, 0, 1), "batch 1 to 1; allowed: 0 to 0"),
    ],
)
@pytest.mark.parametrize("writes", [True, False])
def test_a_region_that_runs_out_of_its_head_is_refused(cut_of: Any, said: str, writes: bool) -> None:
    toy = Toy()
    q = toy.queue("q")

    def body(b: Any) -> list[Item]:
        def step(i: Any) -> Iterator[TileOp]:
            cut = cut_of(b, i)
            mine = toy.scratch[q].part(0, cut.rows, 0, cut.cols)
            yield toy.op("move", q, steps=[Step(Opcode.COPY, *((cut, (mine,)) if writes else (mine, (cut,))))])

        return [Loop("i", range(2), step)]

    with pytest.raises(ProgramError, match=rf"test_races.py:\d+: toy: .* move on q .* runs out of tensor o: {said}"):
        check(toy.program(body, blocks=range(2), tensors=[HEADS]))


def test_interleaved_stores_of_two_queues_in_a_loop_do_not_meet() -> None:
    toy = Toy()
    queues = [toy.queue("a"), toy.queue("b")]

    def body(gap: int) -> Callable[[Any], Iterator[TileOp]]:
        def step(index: Any) -> Iterator[TileOp]:
            for number, q in enumerate(queues):
                region = OUT.tile(0, 0, index * 4 + number * gap, 2)
                yield toy.op(f"store {q}", q, steps=[Step(Opcode.COPY, region, (toy.scratch[q].part(0, 2),))])

        return step

    check(toy.program([Loop("i", range(8), body(2))], tensors=[OUT]))
    with pytest.raises(RaceError, match="of tensor out"):
        check(toy.program([Loop("i", range(8), body(1))], tensors=[OUT]))


@pytest.mark.parametrize("role", ["input", "constant"])
def test_a_tensor_that_is_not_to_be_written_is_refused(role: Any) -> None:
    toy = Toy()
    q = toy.queue("q")
    tensor = GlobalTensor("k", 1, 1, 64, 64, "float32", role)

    def body(block: Any) -> Iterator[Item]:
        yield toy.op(
            "store", q, steps=[Step(Opcode.COPY, tensor.tile(0, 0, block * 4, 4), (toy.scratch[q].part(0, 4),))]
        )

    with pytest.raises(ProgramError) as caught:
        check(toy.program(body, blocks=range(4), tensors=[tensor]))
    line = body.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"{__file__}:{line}: toy: store on q writes tensor k, whose role is {role}; only tensors of role output or "
        "workspace may be written (block 0)"
    )


def kept_program(depth: int, lead: int) -> TileProgram:
    """Return a queue that hands itself values, ``lead`` operations later."""
    toy = Toy()
    v = toy.queue("v")
    ring = toy.ring("kept", [v], [v], depth=depth)
    own = toy.scratch[v].part(0, 4)

    def make(_index: Any) -> Iterator[TileOp]:
        yield toy.op("make", v, steps=[Step(Opcode.COPY, fill(ring), (own,))])

    def both(index: Any) -> Iterator[TileOp]:
        yield from make(index)
        yield from use(index)

    def use(_index: Any) -> Iterator[TileOp]:
        yield toy.op("use", v, steps=[Step(Opcode.COPY, own, (front(ring),))])

    return toy.program([Loop("start", range(lead), make), Loop("kv", range(9), both), Loop("end", range(lead), use)])


@pytest.mark.parametrize("lead", [0, 1, 2, 5])
def test_a_ring_from_a_queue_to_itself_needs_a_slot_more_than_it_runs_ahead(lead: int) -> None:
    check(kept_program(lead + 1, lead))
    if lead:
        with pytest.raises(
            RaceError,
            match=r"make on v \(\w+=\d\) fills a slot of ring kept again before use on v has read it: the ring has",
        ):
            check(kept_program(lead, lead))


def test_flash_with_a_slot_too_few_for_what_it_carries_is_refused() -> None:
    """Its softmax would overwrite the factor that the update of an earlier tile has still to read."""
    program = small_program("flash", "ascend_910b2", depth=2)
    shallower = {id(r): r for r in program.rings if r.producers == r.consumers}
    assert shallower
    for ring in shallower.values():
        object.__setattr__(ring, "depth", ring.depth - 1)
    try:
        with pytest.raises(RaceError, match=r"rows of P on aiv0.VECTOR .* before update on aiv0\.VECTOR has read it:"):
            check(program)
    finally:  # programs of equal phases share their rings
        for ring in shallower.values():
            object.__setattr__(ring, "depth", ring.depth + 1)


def test_a_slot_is_not_left() -> None:
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", [p], [c])
    too_far = ring.fill(5, 64, "float32")
    with pytest.raises(ProgramError, match=r"w on p accesses bytes 0..1280 of a slot of ring S, which has 1024"):
        check(toy.program([toy.op("w", p, steps=[write(too_far)]), toy.op("r", c, front(ring))]))


def test_tiles_and_rings_that_share_bytes_are_ordered_or_race() -> None:
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", [p], [c])
    inside = Tile(UB, ring.offset_bytes + 1024, 1, 64, 64, "float32")
    items = [
        toy.op("w", p, steps=[write(fill(ring))]),
        toy.op("r", c, front(ring)),
        toy.op("x", c, steps=[write(inside)]),
    ]
    with pytest.raises(RaceError, match=r"of aiv.UB"):
        check(toy.program(items))


def test_a_ring_and_a_tile_of_one_queue_share_bytes_in_order() -> None:
    toy = Toy()
    v = toy.queue("v")
    ring = toy.ring("kept", [v], [v])
    inside = Tile(UB, ring.offset_bytes, 1, 64, 64, "float32")
    steps = [write(fill(ring)), Step(Opcode.COPY, toy.scratch[v].part(0, 4), (front(ring),)), write(inside)]
    program = toy.program([toy.op(f"op{n}", v, steps=[s]) for n, s in enumerate(steps)])
    check(program)
    assert find_race(program) is None


@pytest.mark.parametrize("flag", ["binary", "counter"])
@pytest.mark.parametrize("eager", ["p", "c"])
def test_a_flag_that_is_set_again_before_it_is_waited_for_is_a_race(flag: str, eager: str) -> None:
    """A ring that no byte goes through: whoever does not wait in it may run any number of slots ahead."""
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    ring = toy.ring("S", [p], [c], flag=flag)

    def program(waits: bool) -> TileProgram:
        fills, reads = (fill(ring, first=waits or eager != p), front(ring, first=waits or eager != c))
        return toy.program([Loop("kv", range(9), lambda _i: [toy.op("w", p, fills), toy.op("r", c, reads)])])

    check(program(waits=True))
    assert find_race(program(waits=True)) is None
    assert find_race(program(waits=False)) is not None
    said = "ready" if eager == p else "free"
    with pytest.raises(RaceError, match=rf"writes the flag 'S {said}' of a slot, which is set again before"):
        check(program(waits=False))


@pytest.mark.parametrize(
    "tile", [ub(0, 2, 8, 7), ub(0, 2, 8, -8), replace(ub(0, 2, 8), stride=0), ub(0, 0), ub(-1 << 17)]
)
def test_tiles_whose_rows_overlap_or_are_none_are_refused(tile: Tile) -> None:
    with pytest.raises(ProgramError, match=r"one on a accesses .* rows -?\d+ elements apart; rows"):
        check(two_queues(lambda _t: write(tile), lambda _t: write(ub(0))))


def test_runs_of_bytes_meet_where_one_byte_does() -> None:
    """All runs of up to 3 bytes in up to 3 rows of a pitch up to 5, from each of 7 places."""
    runs = [
        Bytes(start, width, pitch, rows)
        for start in range(7)
        for width in (1, 2, 3)
        for pitch in range(width, 6)
        for rows in (1, 2, 3)
    ]
    listed = [{b.start + r * b.pitch + n for r in range(b.rows) for n in range(b.width)} for b in runs]
    for a, in_a in zip(runs, listed, strict=True):
        for b, in_b in zip(runs, listed, strict=True):
            meets = not in_a.isdisjoint(in_b)
            assert a.overlaps(b) or not meets, (a, b)
            assert a.overlaps(b) == meets or a.pitch != b.pitch, (a, b)
            assert Runs(a.start, a.width, a.pitch, a.rows).meets(Runs(b.start, b.width, b.pitch, b.rows)) == meets


def test_a_phase_may_not_take_the_memory_of_slots_that_are_not_read_yet() -> None:
    toy = Toy()
    p, c = toy.queue("p"), toy.queue("c")
    one = toy.ring("one", [p], [c], depth=1)
    toy.allocator.start_phase()
    toy.allocator.used_bytes[UB] = one.offset_bytes
    two = toy.ring("two", [p], [c], depth=1)
    first = phase("first", [0], lambda _b: [toy.op("w", p, fill(one))], lambda _b: 0)
    read = [toy.op("r", c, front(one))]
    clobber = [toy.op("w2", p, fill(two)), toy.op("r2", c, front(two))]
    for items in (clobber, [*read, *clobber]):
        second = phase("second", [0], lambda _b, items=items: items, lambda _b: 0)
        with pytest.raises((RaceError, ProgramError), match="ring one"):
            check(toy.program((), phases=[first, second]))


# ---------------------------------------------------------------- every schedule: drop each wait in turn

ATTENTION: dict[str, Any] = {"heads": 2, "kv_heads": 1, "seq_q": 100, "seq_kv": 210, "head_dim": 32, "causal": True}
FIELDS: dict[str, dict[str, Any]] = {
    "flash": {"block_q": 64, "block_kv": 64, "vector_rows": 16},
    "split_kv": {"block_q": 64, "block_kv": 64, "vector_rows": 16, "splits": 3},
    "pasa": {"block_q": 64, "block_kv": 64, "vector_rows": 16},
    "fp8_attention": {"block_q": 64, "block_kv": 64, "vector_rows": 16},
    "two_level": {"block_q": 64, "block_kv": 64, "vector_rows": 16},
    "unified": {"block": 64},
    "standard": {"block_m": 64, "block_n": 64, "block_k": 32, "block_rows": 64},
    "gemm": {"block_m": 64, "block_n": 64, "block_k": 32},
    "copy": {"block_bytes": 512},
    "volta_flash": {"block_q": 256, "block_kv": 32, "warps": 8, "residents": 2},
}
SHIPPED = [
    *((name, "ascend_910b2") for name in FIELDS if name != "volta_flash"),
    ("volta_flash", "v100"),
    ("flash", "h200"),
    ("pasa", "h200"),
    ("fp8_attention", "h200"),
]
#: Those with mechanisms of their own; the others run with ``-m exhaustive``.
QUICK = (("flash", "ascend_910b2"), ("gemm", "ascend_910b2"), ("copy", "ascend_910b2"), ("volta_flash", "v100"))
CASES = [case if case in QUICK else pytest.param(*case, marks=pytest.mark.exhaustive) for case in SHIPPED]


def small_program(name: str, hw: str, **changes: Any) -> TileProgram:
    """Return a schedule on a ragged causal problem with grouped heads, tiles small."""
    device = load_device(hw)
    chosen = SCHEDULES[name, device.family]
    problem: Any = Problem(**ATTENTION)
    if chosen.problem is GemmProblem:
        problem = GemmProblem(m=150, n=100, k=130)
    elif chosen.problem is CopyProblem:
        problem = CopyProblem(bytes=512 * 37)
    elif (name, hw) == ("fp8_attention", "h200"):
        problem = problem.model_copy(update={"dtype": "float32"})
    fields = {"block_q": 64, "block_kv": 64} if hw == "h200" else FIELDS.get(name, {})
    tiling = build_tiling(chosen.tiling, fields | changes)
    return chosen.program(problem, tiling, device, chosen.precision(None))


@pytest.mark.parametrize(("name", "hw"), CASES)
def test_each_wait_of_every_schedule_is_needed_or_implied_by_the_others(
    name: str, hw: str, record_property: Callable[[str, object], None]
) -> None:
    """A wait whose loss passes is implied: whole sequences of blocks on three groups have no race without it."""
    program = small_program(name, hw)
    check(program)
    assert find_race(program) is None
    needed, implied = [], []
    for flag in flags_of(program):
        without = Changed(flag.dropped).program(program)
        try:
            check(without)
        except RaceError as race:
            needed.append(flag)
            assert flag.ring in str(race) or " and no flag orders them" in str(race)
        else:
            implied.append(flag)
            assert find_race(without) is None, str(flag)
    record_property("waits", f"{name} on {hw}: {len(needed)} needed, {len(implied)} implied")
    assert needed or not flags_of(program)


@pytest.mark.parametrize(("name", "hw"), CASES)
def test_the_waits_of_each_endpoint_for_each_peer_are_needed_or_implied(
    name: str, hw: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, endpoint by endpoint: all waits of one queue at a ring for one queue at its other side."""
    program = small_program(name, hw)
    ends = list_endpoints(program)
    raced = set()
    for end in ends:
        for peer in end.peers:
            monkeypatch.setattr("npusim.program.ir.walk.list_endpoints", partial(_without_peer, ends, end, peer))
            try:
                check(program)
            except RaceError:
                raced.add((end.ring, end.queue, end.is_producer))
            else:
                ignored = (end.ring, end.queue, end.is_producer, ends[peer].queue)
                assert find_race(program, ignored=ignored) is None, (str(end), end.queue)
            monkeypatch.undo()
    assert raced or not any(e.peers for e in ends)


def _without_peer(ends: tuple[Endpoint, ...], end: Endpoint, peer: int, _program: TileProgram) -> tuple[Endpoint, ...]:
    peers = tuple(p for p in end.peers if p != peer)
    return tuple(replace(e, peers=peers) if e is end else e for e in ends)
