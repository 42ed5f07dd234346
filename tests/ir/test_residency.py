"""What misses L2: least recently used by regions, all groups in step, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf
from typing import TYPE_CHECKING, Any

import pytest

from ir.toy import GM, Toy
from npusim.program.ir.residency import LOST, residency
from npusim.program.ir.tile import GlobalTensor
from npusim.program.ir.tile_program import ProgramPhase, Touch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.program.ir.tile_program import TileProgram

#: One head of 64 rows of 64 float16 is 8 KiB.
HEAD = 8192


def tensor(name: str, role: Any = "input", heads: int = 8) -> GlobalTensor:
    return GlobalTensor(name, 1, heads, 64, 64, "float16", role)


K, V = tensor("k"), tensor("v")


class Placed(int):
    """A block by its number; ``place``: that of the core group on which it runs."""

    place = 0


class Second(Placed):
    """A block beside another one."""

    place = 1


def touching(*phases: Sequence[Sequence[Touch]], slot_bytes: int = 0, residents: int = 1) -> TileProgram:
    """Return a program of phases whose blocks touch what is listed; ``residents``: blocks of a group at a time, 1
    or 2.
    """
    toy = Toy()
    toy.queue("q")
    if slot_bytes:
        toy.ring("S slots", ["q"], ["q"], 1, space=GM, slot_bytes=slot_bytes)
    listed = [
        ProgramPhase(
            f"p{i}",
            [(Placed, Second)[n % residents](n) for n in range(len(blocks))],
            lambda _b: (),
            lambda _b: 0,
            lambda together, blocks=blocks: [touch for b in together for touch in blocks[b]],
        )
        for i, blocks in enumerate(phases)
    ]
    tensors = {t.region.tensor.name: t.region.tensor for blocks in phases for b in blocks for t in b}
    return toy.program((), phases=listed, tensors=list(tensors.values()))


def read(source: GlobalTensor, head: int, rows: int = 64, times: int = 1) -> Touch:
    return Touch(source.tile(0, head, 0, rows), times)


def misses(program: TileProgram, *, groups: int = 1, heads_that_fit: float = 100, name: str = "k") -> float:
    return residency(program, groups, int(HEAD * heads_that_fit)).read_misses[name]


def test_what_is_read_once_is_fetched_once() -> None:
    assert misses(touching([[read(K, 0)], [read(K, 1)]])) == 1.0


def test_what_stays_is_fetched_once_however_often_it_is_read() -> None:
    assert misses(touching([[read(K, 0)]] * 4)) == 1 / 4


def test_groups_that_read_a_region_in_the_same_step_fetch_it_once() -> None:
    blocks = [[read(K, 0)]] * 4
    assert misses(touching(blocks), groups=4, heads_that_fit=0.5) == 1 / 4


def test_groups_in_step_wait_for_one_fetch_together() -> None:
    # Of four reads by two groups, two at a time, the first two find nothing: half of the reads, a quarter of the bytes.
    found = residency(touching([[read(K, 0)]] * 4), 2, 100 * HEAD)
    assert (found.read_waits["k"], found.read_misses["k"]) == (1 / 2, 1 / 4)


def test_a_write_is_new_where_nothing_of_it_is_there() -> None:
    workspace = tensor("k_shifted", "workspace")
    block = [Touch(workspace.tile(0, 0, 0, 64), 0)]
    twice = touching([block, [read(K, 0)], block])
    stays, goes = (residency(twice, 1, size * HEAD, True) for size in (3, 1))
    assert (stays.new_writes["k_shifted"], goes.new_writes["k_shifted"]) == (1 / 2, 1.0)


def test_a_cycle_over_more_than_fits_misses_every_time() -> None:
    cycle = [[read(K, 0)], [read(K, 1)], [read(K, 2)]] * 2
    # Between two reads of a head the two others and itself pass: three heads.
    assert misses(touching(cycle), heads_that_fit=3) == 1 / 2
    assert misses(touching(cycle), heads_that_fit=2.9) == 1.0


def test_the_least_recently_used_goes_first() -> None:
    # 0 1 0 2 0 1 with room for two heads: 0 stays throughout, 1 has gone when 2 came.
    order = [[read(K, h)] for h in (0, 1, 0, 2, 0, 1)]
    assert misses(touching(order), heads_that_fit=2) == pytest.approx(4 / 6)


def test_another_tensor_takes_its_place_too() -> None:
    order = [[read(K, 0)], [read(V, 0)], [read(K, 0)]]
    assert misses(touching(order), heads_that_fit=2) == 1 / 2
    assert misses(touching(order), heads_that_fit=1.5) == 1.0


def test_a_causal_block_fetches_only_the_keys_that_the_one_before_did_not() -> None:
    # 16, 32, 48, 64 rows: 160 rows read, 64 fetched.
    grows = [[read(K, 0, rows)] for rows in (16, 32, 48, 64)]
    assert misses(touching(grows)) == pytest.approx(64 / 160)


def test_a_region_that_cannot_stay_is_fetched_by_every_pass_over_it() -> None:
    assert misses(touching([[read(K, 0, times=3)]]), heads_that_fit=100) == pytest.approx(1 / 3)
    assert misses(touching([[read(K, 0, times=3)]]), heads_that_fit=0.5) == 1.0


def test_slots_between_the_cores_take_their_part_of_the_cache() -> None:
    cycle = [[read(K, 0)], [read(K, 1)]] * 2
    free = touching(cycle)
    occupied = touching(cycle, slot_bytes=HEAD)
    assert misses(free, heads_that_fit=2) == 1 / 2
    assert misses(occupied, heads_that_fit=2) == 1.0
    # One slot a group, and two groups that read the same: two slots.
    pairs = [block for block in cycle for _ in range(2)]
    assert misses(touching(pairs, slot_bytes=HEAD), groups=2, heads_that_fit=4) == 1 / 4
    assert misses(touching(pairs, slot_bytes=HEAD), groups=2, heads_that_fit=3.9) == 1 / 2


def test_an_output_is_written_through_and_a_workspace_that_fits_is_not() -> None:
    workspace, output = tensor("k_shifted", "workspace"), tensor("o", "output")
    first = [[Touch(t.tile(0, 0, 0, 64), 0) for t in (workspace, output)]]
    program = touching(first, [[read(workspace, 0)]])
    # The whole workspace is eight heads.
    fits, spills = residency(program, 1, 8 * HEAD), residency(program, 1, 7 * HEAD)
    assert (fits.write_misses["k_shifted"], fits.write_misses["o"]) == (0.0, 1.0)
    assert spills.write_misses["k_shifted"] == 1.0


def test_a_second_pass_finds_what_the_other_resident_blocks_have_not_evicted() -> None:
    rows, heads = [[read(K, h, times=2)] for h in range(4)], 8
    # Two blocks of each of two groups read four rows between two passes over one.
    gone = LOST * 4 / heads
    assert misses(touching(rows, residents=2), groups=2, heads_that_fit=heads) == pytest.approx(
        (1 + gone) / 2, abs=1e-3
    )
    assert misses(touching(rows), groups=2, heads_that_fit=heads) == pytest.approx((1 + gone / 2) / 2, abs=1e-3)
    assert misses(touching(rows, residents=2), groups=2, heads_that_fit=2) == 1.0
    # What all blocks read is touched meanwhile: once for each step.
    shared = [[read(K, h, times=2), read(V, 0, times=2)] for h in range(4)]
    assert misses(touching(shared, residents=2), groups=2, heads_that_fit=2, name="v") == 1 / 4
    # Half of what the blocks write is written between two passes.
    output = tensor("o", "output")
    stored = [[read(K, h, times=2), Touch(output.tile(0, h, 0, 64), 0)] for h in range(4)]
    found = misses(touching(stored, residents=2), groups=2, heads_that_fit=heads)
    assert found == pytest.approx((1 + LOST * 6 / heads) / 2, abs=1e-3)


def test_what_a_phase_wrote_is_there_for_the_next() -> None:
    workspace = tensor("k_shifted", "workspace")
    program = touching([[Touch(workspace.tile(0, 0, 0, 64), 0)]], [[read(workspace, 0)]])
    assert misses(program, name="k_shifted") == 0.0
    late = touching([[Touch(workspace.tile(0, 0, 0, 64), 0)], [read(K, h) for h in range(8)]], [[read(workspace, 0)]])
    assert misses(late, name="k_shifted", heads_that_fit=8.5) == 1.0


def test_a_tensor_that_is_never_read_misses_nothing() -> None:
    program = touching([[Touch(tensor("o", "output").tile(0, 0, 0, 64), 0)]])
    assert misses(program, name="o") == 0.0


def test_new_bytes_push_out_their_share_of_what_others_left_to_be_written_back() -> None:
    program = touching([[read(K, h)] for h in range(8)])
    assert residency(program, 1, 16 * HEAD, True, 0.0).read_pushes["k"] == 0.0
    held = residency(program, 1, 16 * HEAD, True, 12 * HEAD)
    assert held.read_pushes["k"] * 8 == pytest.approx(12 * (1 - exp(-8 / 16)))
    twice = touching([[read(K, h)] for h in (*range(8), *range(8))])
    assert residency(twice, 1, 16 * HEAD, True, 12 * HEAD).read_pushes["k"] * 2 == pytest.approx(held.read_pushes["k"])


def test_a_full_l2_has_no_more_written_bytes_than_its_share() -> None:
    """An H200's share is 2/3: of what a kernel cleared, the next kernel's reads evict no more (reports/recurrences)."""
    output = tensor("o", "output")
    writes, reads = [[Touch(output.tile(0, h, 0, 64), 0)] for h in range(8)], [[read(K, h)] for h in range(64)]
    usual, least = (residency(touching(writes, reads), 1, 8 * HEAD, True, 0.0, most_dirty_bytes=x) for x in (inf, HEAD))
    assert least.write_pushes["o"] * 8 == pytest.approx(7)
    assert least.read_pushes["k"] * 64 == pytest.approx(1, rel=1e-3)
    assert usual.read_pushes["k"] * 64 > 4


def test_what_was_written_is_pushed_out_by_what_comes_after_it() -> None:
    output = tensor("o", "output")
    writes = [[Touch(output.tile(0, h, 0, 64), 0)] for h in range(8)]
    alone, before = (residency(touching(*p), 1, 16 * HEAD, True, 0.0) for p in ([writes], [writes, [[read(K, 0)]]]))
    assert alone.write_misses["o"] == 0.0
    left = sum(exp(-n / 16) for n in range(1, 9))
    assert alone.write_pushes["o"] * 8 == pytest.approx(8 - left)
    assert before.write_pushes == alone.write_pushes
    assert before.read_pushes["k"] == pytest.approx(left * (1 - exp(-1 / 16)))
    # A region that is written again is no more to be written back; nor is anything new to L2.
    again = residency(touching([writes[0]] * 3), 1, 16 * HEAD, True, 0.0)
    assert again.write_pushes["o"] * 3 == pytest.approx(1 - exp(-1 / 16))


def test_nothing_is_pushed_out_of_an_l2_with_room() -> None:
    output = tensor("o", "output")
    writes = [[Touch(output.tile(0, h, 0, 64), 0)] for h in range(8)]
    fits, spills = (residency(touching(writes), 1, heads * HEAD, True) for heads in (8, 7))
    assert fits.write_pushes["o"] == 0.0
    assert spills.write_pushes["o"] == pytest.approx(1 - exp(-1 / 7))


def test_a_stream_has_left_the_share_of_lines_that_its_launches_write() -> None:
    output = tensor("o", "output")
    written = [Touch(output.tile(0, h, 0, 64), 0) for h in range(2)]
    program = touching([[read(K, 0), written[0]], [read(K, 1), written[1]], [read(K, 2)]])
    found, alone = (residency(program, 1, 16 * HEAD, True, in_a_stream=stream) for stream in (True, False))
    # Both tensors have eight heads: half of the sixteen that fit are to be written back when the launch begins.
    left, of_reads, of_writes = 8.0, 0.0, 0.0
    for puts in (1, 1, 0):
        left += puts
        evicted = left * (1 - exp(-(1 + puts) / 16))
        left, of_reads, of_writes = (
            left - evicted,
            of_reads + evicted / (1 + puts),
            of_writes + evicted * puts / (1 + puts),
        )
    # As much is evicted of what was written as the launch writes, two heads.
    scale = 2 / (of_reads + of_writes)
    assert 0.7 < scale < 1
    assert found.read_pushes["k"] * 3 == pytest.approx(scale * of_reads)
    assert found.write_pushes["o"] * 2 == pytest.approx(scale * of_writes)
    assert (alone.read_pushes["k"], alone.write_pushes["o"]) == (0.0, 0.0)
    # What the launch writes is written back too, by the next one at the latest.
    assert found.compulsory_bytes == alone.compulsory_bytes + 2 * HEAD
    assert (found.read_misses, found.write_misses) == (alone.read_misses, alone.write_misses)


@pytest.mark.parametrize(("share", "missed"), [(0.8, 0.0), (0.9, 0.4), (1.0, 0.8), (1.1, 1.0)])
def test_launches_on_the_same_bytes_find_what_a_device_says_stays_of_them(share: float, missed: float) -> None:
    """All inputs up to 0.8 of the capacity, none from 1.05 on, and in proportion between; nothing is written."""
    program = replace(touching([[read(K, head)] for head in range(8)]), l2="repeated")
    found = residency(program, 1, round(8 * HEAD / share), staying=(0.8, 1.05, 0.5))
    assert found.read_misses["k"] == pytest.approx(missed, abs=1e-4)


def test_tiles_of_parts_of_lines_have_neighbours_in_their_rows() -> None:
    whole = GlobalTensor("x", 1, 2, 64, 256, "float16", "input")
    beside = replace(whole, is_interleaved=True)

    def is_part(tensor: GlobalTensor, rows: int, cols: int) -> bool:
        return tensor.tile(0, 0, 0, rows, 0, cols).is_part_of_lines(128)

    assert is_part(whole, 16, 32)
    assert not is_part(whole, 1, 32)  # one piece
    assert not is_part(whole, 16, 64)  # a line
    assert not is_part(whole, 16, 256)  # rows behind one another
    assert not is_part(replace(whole, cols=32), 16, 32)
    assert is_part(replace(beside, cols=32), 16, 32)  # of another head
    assert is_part(replace(whole, is_transposed=True), 16, 32)
    assert not is_part(replace(whole, cols=264), 16, 8 * 3 + 1)  # an edge, whose line nothing else reads


@pytest.mark.parametrize("l2", ["repeated", "warm"])
def test_what_is_left_of_a_launch_before_is_there_for_rows_that_later_blocks_add(l2: Any) -> None:
    """As the blocks of rows of a causal head do: each reads from the first key to its own."""
    program = replace(touching([[read(K, 0, 16)], [read(K, 0, 40)], [read(K, 0, 64)]]), l2=l2)
    found = residency(program, 1, 100 * HEAD)
    assert (found.read_misses["k"], found.read_waits["k"]) == (0.0, 0.0)
    assert found.compulsory_bytes == 0
    cold = residency(replace(program, l2="clean"), 1, 100 * HEAD)
    assert cold.read_misses["k"] == pytest.approx(64 / (16 + 40 + 64))
    assert cold.compulsory_bytes == HEAD


@pytest.mark.parametrize(("heads_that_fit", "evicted"), [(16, 2), (6, 10)])
def test_a_stream_writes_back_a_workspace_that_does_not_fit(heads_that_fit: int, evicted: int) -> None:
    """Eight heads of a workspace, and two of an output: the next launch finds none of the larger workspace in L2."""
    space, output = tensor("h", "workspace"), tensor("o", "output", 2)
    writes = [[Touch(space.tile(0, h, 0, 64), 0)] for h in range(8)]
    puts = [[read(space, h), Touch(output.tile(0, h, 0, 64), 0)] for h in range(2)]
    found = residency(touching(writes, puts), 1, heads_that_fit * HEAD, True, in_a_stream=True)
    pushed = 8 * found.write_pushes["h"] + 2 * (found.read_pushes["h"] + found.write_pushes["o"])
    assert pushed == pytest.approx(evicted)
