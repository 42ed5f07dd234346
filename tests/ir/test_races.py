"""Races: by hand, against reachability in networkx, and by dropping each wait of flash in turn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.toy import (
    UB,
    RandomProgram,
    Toy,
    conflict,
    fill,
    front,
    order_graph,
    touched_bytes,
    unordered_conflicts,
)  # fmt: skip
from npusim.errors import RaceError
from npusim.ir.check import check, first_operations
from npusim.ir.op import PLAIN, Attributes, Opcode, Step, TileOp
from npusim.ir.program import Loop, TileProgram
from npusim.ir.races import check_races
from npusim.ir.tile import GlobalTensor, RingTile, Tile
from npusim.ir.walk import Endpoint, ResolvedOp, Walker, list_endpoints, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def resolve(program: TileProgram) -> list[ResolvedOp]:
    phase = program.phases[0]
    walker = Walker(program)
    return [op for block in phase.blocks for op in walk(walker, phase.body(block))]


# ---------------------------------------------------------------- by hand


def write(tile: Tile) -> Step:
    return Step(Opcode.FILL, tile, (0.0,))


def two_queues(first: Callable[[Toy], Step], second: Callable[[Toy], Step]) -> TileProgram:
    """Return two operations on two queues that nothing orders."""
    toy = Toy()
    a, b = toy.queue("a"), toy.queue("b")
    return toy.program(
        [toy.op("one", a, steps=[first(toy)]), toy.op("two", b, steps=[second(toy)])]
    )


def ub(offset: int, rows: int = 1, cols: int = 8, stride: int | None = None) -> Tile:
    return Tile(UB, 65536 + offset, rows, cols, stride or cols, "float32")


def test_a_write_after_an_unordered_write_names_both_and_the_bytes() -> None:
    program = two_queues(lambda _t: write(ub(0)), lambda _t: write(ub(16)))
    with pytest.raises(RaceError) as caught:
        check_races(program, resolve(program))
    assert str(caught.value) == (
        "two on b writes bytes 65552..65584 of aiv.UB that one on a writes, and no flag orders them"
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            lambda t: write(ub(0)),
            lambda t: Step(Opcode.COPY, t.scratch["b"].part(0, 1, 0, 8), (ub(0),)),
        ),
        (
            lambda t: Step(Opcode.COPY, t.scratch["a"].part(0, 1, 0, 8), (ub(0),)),
            lambda t: write(ub(0)),
        ),
    ],
    ids=["read after write", "write after read"],
)
def test_a_read_beside_a_write_is_a_race(
    first: Callable[[Toy], Step], second: Callable[[Toy], Step]
) -> None:
    program = two_queues(first, second)
    with pytest.raises(RaceError, match=r"two on b .* one on a"):
        check_races(program, resolve(program))


def test_two_reads_are_no_race() -> None:
    program = two_queues(
        lambda t: Step(Opcode.COPY, t.scratch["a"].part(0, 1, 0, 8), (ub(0),)),
        lambda t: Step(Opcode.COPY, t.scratch["b"].part(0, 1, 0, 8), (ub(0),)),
    )
    check_races(program, resolve(program))


def test_an_accumulating_product_reads_its_destination() -> None:
    toy = Toy()
    a, b = toy.queue("a"), toy.queue("b")
    total, x = Tile("aic.L0C", 0, 16, 16, 16, "float32"), Tile("aic.L0A", 0, 16, 16, 16, "float16")
    for how in (PLAIN, Attributes(accumulate=True)):
        program = toy.program(
            [
                toy.op("start", a, steps=[write(total)]),
                TileOp("mmad", b, b, (Step(Opcode.MATMUL, total, (x, x), how),)),
            ]
        )
        reads = touched_bytes(resolve(program)[1])[0]
        assert ("aic.L0C" in reads) == how.accumulate
        with pytest.raises(RaceError):
            check_races(program, resolve(program))


def test_neighbouring_bytes_are_no_race() -> None:
    program = two_queues(lambda _t: write(ub(0)), lambda _t: write(ub(32)))
    check_races(program, resolve(program))


def test_interleaved_columns_of_one_pitch_are_no_race() -> None:
    # Rows of 16 columns: the left and the right 8 of each row never share a byte.
    program = two_queues(lambda _t: write(ub(0, 4, 8, 16)), lambda _t: write(ub(32, 4, 8, 16)))
    check_races(program, resolve(program))


def test_columns_that_wrap_into_the_next_row_are_a_race() -> None:
    # From column 12 on, 8 columns of a pitch of 16 reach into columns 0..3 of the row below.
    program = two_queues(
        lambda _t: write(ub(16 * 4, 3, 4, 16)), lambda _t: write(ub(12 * 4, 3, 8, 16))
    )
    with pytest.raises(RaceError):
        check_races(program, resolve(program))


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
    operations = [replace(o, waits=() if o.op.label == "w" else o.waits) for o in resolve(program)]
    with pytest.raises(RaceError, match=r"w on p \(kv=1\) writes .* that r on c \(kv=0\) reads"):
        check_races(program, operations)


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
                check_races(program, resolve(program))
        else:
            check_races(program, resolve(program))


# ---------------------------------------------------------------- random programs, by reachability


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_vector_clocks_find_a_race_exactly_where_no_path_orders_two_accesses(rng: Any) -> None:
    """With some waits removed at random; ring tiles of one pitch, so that no overlap is guessed."""
    program = RandomProgram(rng, touching=True).program()
    dropped = rng.choice([0.0, 0.1, 0.5])
    operations = [
        replace(o, waits=tuple(w for w in o.waits if rng.random() >= dropped))
        for o in resolve(program)[:60]
    ]
    conflicts = unordered_conflicts(operations)
    if not conflicts:
        check_races(program, operations)
        return
    with pytest.raises(RaceError) as caught:
        check_races(program, operations)
    # The one reported is the first operation, in program order, that conflicts with an earlier one.
    second = min(b for _, b in conflicts)
    firsts = [str(operations[a]) for a, b in conflicts if b == second]
    assert str(caught.value).startswith(f"{operations[second]} ")
    assert any(f" that {first} " in str(caught.value) for first in firsts)


@settings(max_examples=40)
@given(st.randoms(use_true_random=False))
def test_a_legal_program_through_rings_alone_has_no_race(rng: Any) -> None:
    """Whatever rings of several producers and consumers are drawn, all waits together suffice.

    Several producers fill one slot together and each its own part; here they may overlap, which
    nothing orders, so only rings with one producer are drawn.
    """
    drawn = RandomProgram(rng, touching=True)
    if any(len(r.producers) > 1 for r in drawn.toy.allocator.rings):
        return
    check(drawn.program())


# ---------------------------------------------------------------- flash: drop each wait in turn


@dataclass(frozen=True)
class WaitKind:
    """All waits of one operation's label for one flag of one queue, over all iterations."""

    queue: str
    label: str
    flag: str
    of: str

    def __str__(self) -> str:
        return f"{self.label} on {self.queue} waiting for {self.flag} of {self.of}"


class Mutant:
    """The first operations of a program without one kind of wait."""

    def __init__(self, program: TileProgram) -> None:
        self.program = program
        self.ends: tuple[Endpoint, ...] = list_endpoints(program)
        phase = program.phases[0]
        block = max(phase.blocks, key=lambda b: len(list(walk(Walker(program), phase.body(b)))))
        self.operations = list(first_operations(program, phase, [block, block]))
        self.kinds = sorted({self.kind(o, w) for o in self.operations for w in o.waits}, key=str)

    def kind(self, resolved: ResolvedOp, wait: Any) -> WaitKind:
        end, peer = self.ends[wait.endpoint], self.ends[wait.peer]
        return WaitKind(resolved.op.queue, resolved.op.label, str(end), peer.queue)

    def without(self, kind: WaitKind) -> list[ResolvedOp]:
        return [
            replace(o, waits=tuple(w for w in o.waits if self.kind(o, w) != kind))
            for o in self.operations
        ]

    def unproved(self, kind: WaitKind, kept: Sequence[ResolvedOp]) -> list[str]:
        """Return the dropped waits that the others do not imply, by reachability.

        A wait is implied if a path leads from the operation that sets its flag to the one that
        waits.  Either may only pass the slot on: then the last operation of its queue that touched
        the ring before, and the first that does after, stand for it; a queue without one (a core
        with no rows) has nothing to guard.
        """
        graph, sets = order_graph(kept)
        reach = nx.transitive_closure_dag(graph)
        missing = []
        for node, (full, cut) in enumerate(zip(self.operations, kept, strict=True)):
            for wait in set(full.waits) - set(cut.waits):
                own, peer = self.ends[wait.endpoint], self.ends[wait.peer]
                before = self._touching(peer, range(sets[wait.peer, wait.count] + 1))
                after = self._touching(own, range(node, len(kept)))
                if before and after and not reach.has_edge(before[-1], after[0]):
                    missing.append(
                        f"{self.operations[after[0]]} after {self.operations[before[-1]]}"
                    )
        return missing

    def _touching(self, end: Endpoint, among: Sequence[int]) -> list[int]:
        """Return the operations of an endpoint's queue that touch slots of its ring."""
        return [
            n
            for n in among
            if self.operations[n].op.queue == end.queue and _touches(self.operations[n], end.ring)
        ]

    def is_race(self, message: str, kept: Sequence[ResolvedOp]) -> bool:
        """Whether two operations that a message names share a byte and no path orders them."""
        graph = order_graph(kept)[0]
        seconds = [n for n, o in enumerate(kept) if message.startswith(f"{o} ")]
        firsts = [n for n, o in enumerate(kept) if f" that {o} " in message]
        return any(
            conflict(kept[a], kept[b]) and not nx.has_path(graph, a, b)
            for b in seconds
            for a in firsts
            if a < b
        )


def _touches(resolved: ResolvedOp, ring: str) -> bool:
    return any(
        isinstance(o, RingTile) and o.ring.name == ring
        for step in resolved.op.steps
        for o in step.operands()
    )


#: Small windows of flash: every ring, ragged tails, masks, several slices, pieces and bands.
WINDOWS: dict[str, dict[str, Any]] = {
    "whole tiles": {
        "tiling": {"block_kv": 128, "depth": 1},
        "heads": 1, "seq_q": 128, "seq_kv": 640, "head_dim": 64,
    },
    "causal and ragged": {
        "tiling": {"block_q": 64, "block_kv": 64, "vector_rows": 16, "depth": 2},
        "heads": 1, "seq_q": 197, "seq_kv": 197, "head_dim": 32, "causal": True,
    },
    "one query row": {
        "tiling": {"block_kv": 64, "depth": 1},
        "heads": 1, "seq_q": 1, "seq_kv": 300, "head_dim": 64,
    },
    "no lead, pieces and bands": {
        "tiling": {"block_q": 256, "block_kv": 256, "vector_rows": 32, "depth": 0},
        "heads": 1, "seq_q": 256, "seq_kv": 512, "head_dim": 192, "value_head_dim": 64,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def mutant(build_flash: Callable[..., TileProgram]) -> Callable[[str], Mutant]:
    return lru_cache(lambda name: Mutant(build_flash(**WINDOWS[name])))


@pytest.mark.parametrize("window", WINDOWS)
def test_each_wait_of_flash_is_needed_or_implied_by_the_others(
    window: str, mutant: Callable[[str], Mutant]
) -> None:
    m = mutant(window)
    check_races(m.program, m.operations)
    needed = 0
    for kind in m.kinds:
        kept = m.without(kind)
        try:
            check_races(m.program, kept)
        except RaceError as race:
            needed += 1
            assert m.is_race(str(race), kept), (str(kind), str(race))
        else:
            assert m.unproved(kind, kept) == [], str(kind)
    assert needed >= len(m.kinds) // 3  # the check is not simply silent


@pytest.mark.parametrize("window", ["whole tiles", "causal and ragged"])
def test_dropping_a_wait_of_any_ring_of_flash_is_a_race_for_at_least_one_of_its_waits(
    window: str, mutant: Callable[[str], Mutant]
) -> None:
    m = mutant(window)
    waited_for = {kind.flag.rpartition(" ")[0] for kind in m.kinds}
    raced = set()
    for kind in m.kinds:
        try:
            check_races(m.program, m.without(kind))
        except RaceError:
            raced.add(kind.flag.rpartition(" ")[0])
    assert raced == waited_for
    # On-chip rings and those between the cores alike.
    assert {"L0A", "L0B", "L0C", "Q", "K", "V", "P", "S", "O_tmp", "out"} <= raced
    assert {"S slots", "P slots", "O_tmp slots"} <= raced
    assert ("mask" in raced) == (window == "causal and ragged")


def test_flash_without_any_cross_core_wait_is_a_race_between_the_cores(
    mutant: Callable[[str], Mutant],
) -> None:
    m = mutant("whole tiles")
    kept = [
        replace(o, waits=tuple(w for w in o.waits if not m.ends[w.endpoint].is_cross_core))
        for o in m.operations
    ]
    with pytest.raises(RaceError, match=r"of gm that .* on aic\.FIXP .*writes"):
        check_races(m.program, kept)
