from __future__ import annotations

import pytest

from npusim.errors import BufferOverflowError, ProgramError
from npusim.program.ir.buffers import AddressSpace, Allocator, Ring


def allocator(capacity_bytes: int = 4096, alignment_bytes: int = 32) -> Allocator:
    return Allocator({n: AddressSpace(n, capacity_bytes, alignment_bytes) for n in ("UB", "L1")})


def test_tenants_start_at_multiples_of_the_memorys_alignment() -> None:
    a = allocator(alignment_bytes=64)
    first = a.tile("UB", "m", 1, 3, "float32")  # 12 bytes: the next free multiple of 64 is 64
    second = a.tile("UB", "l", 5, 13, "float16")  # 130 bytes from 64 on, to 194: then 256
    third = a.tile("UB", "O", 1, 1, "int8")
    assert [t.offset_bytes for t in (first, second, third)] == [0, 64, 256]


def test_each_slot_of_a_ring_is_aligned() -> None:
    a = allocator()
    a.tile("UB", "m", 1, 1, "int8")
    ring = a.ring("UB", "S", 33, 3, producers=["p"], consumers=["c"])  # 33 bytes: slots of 64
    slots = [ring.fill(1, 33, "int8").slot(generation) for generation in range(4)]
    assert [s.offset_bytes for s in slots] == [32, 96, 160, 32]


def test_memories_are_placed_independently() -> None:
    a = allocator()
    a.tile("UB", "m", 1, 100, "int8")
    assert a.tile("L1", "Q", 1, 1, "int8").offset_bytes == 0


def test_a_memory_filled_to_its_last_byte_is_no_overflow() -> None:
    a = allocator(capacity_bytes=128)
    a.ring("UB", "S", 32, 2, producers=["p"], consumers=["c"])
    a.tile("UB", "O", 2, 16, "float16")
    a.check()


def test_overflow_names_every_tenant_and_the_bytes_needed_and_there() -> None:
    a = allocator(capacity_bytes=3 * 1024)
    a.ring("UB", "S", 1024, 2, producers=["p"], consumers=["c"])
    a.tile("UB", "O", 4, 64, "float32")
    a.tile("UB", "m", 1, 10, "float32")
    with pytest.raises(BufferOverflowError) as caught:
        a.check()
    # 2 x 1024 + 4 * 64 * 4 + 40 bytes
    assert str(caught.value) == (
        "UB: S 2×1 KiB + O 1 KiB + m 40 B = 3.0 KiB > 3 KiB (3,112 bytes needed, 3,072 available)"
    )


def test_overflow_names_every_memory_that_is_too_small() -> None:
    a = allocator(capacity_bytes=32)
    a.tile("UB", "O", 1, 33, "int8")
    a.tile("L1", "K", 1, 64, "int8")
    with pytest.raises(BufferOverflowError, match=r"UB: O 33 B.*33 bytes.*; L1: K 64 B.*64 bytes"):
        a.check()


def test_a_memory_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ProgramError, match=r"no memory 'L2' on this device; its memories: UB, L1"):
        allocator().tile("L2", "O", 1, 1, "int8")


def test_phases_reuse_each_others_memory_and_the_peak_is_the_larger() -> None:
    a = allocator()
    a.tile("UB", "first", 1, 1024, "int8")
    a.start_phase()
    second = a.tile("UB", "second", 1, 96, "int8")
    assert second.offset_bytes == 0
    assert a.peak_bytes["UB"] == 1024


def test_a_later_phase_overflows_by_its_own_tenants_alone() -> None:
    a = allocator(capacity_bytes=64)
    a.tile("UB", "first", 1, 64, "int8")
    a.start_phase()
    a.tile("UB", "second", 1, 65, "int8")
    with pytest.raises(BufferOverflowError, match=r"^UB: second 65 B = 65 B > 64 B"):
        a.check()


def test_an_overflow_of_an_earlier_phase_is_not_forgotten() -> None:
    a = allocator(capacity_bytes=64)
    a.tile("UB", "first", 1, 65, "int8")
    with pytest.raises(BufferOverflowError, match="first"):
        a.start_phase()


def ring(depth: int, period: int = 1) -> Ring:
    return Ring("S slots", "gm", 0, 1024, depth, ("p",), ("c",), "counter", period)


def test_a_ring_needs_a_slot() -> None:
    with pytest.raises(ProgramError, match=r"ring S slots: depth 0"):
        ring(0)


@pytest.mark.parametrize("period", [0, 3])
def test_an_acknowledgement_period_past_the_depth_is_refused(period: int) -> None:
    # With period 3 and two slots the producer would wait for three releases of two tiles.
    with pytest.raises(ProgramError, match=rf"ring S slots: acknowledgement period {period} .*1\.\.depth = 2"):
        ring(2, period)


def test_parts_of_a_slot_stay_inside_it_and_keep_its_pitch() -> None:
    whole = ring(2).fill(8, 32, "float16")
    part = whole.part(2, 3, 16, 8)
    tile = part.slot(5)  # generation 5 of two slots: the second
    assert (tile.offset_bytes, tile.stride) == (1024 + (2 * 32 + 16) * 2, 32)
    assert (tile.rows, tile.cols) == (3, 8)


def test_two_parts_of_parts_equal_one_part() -> None:
    whole = ring(2).fill(8, 32, "float16")
    assert whole.part(2, 5, 8, 16).part(1, 2, 4, 8) == whole.part(3, 2, 12, 8)
