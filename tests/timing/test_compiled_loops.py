"""Loops around products by their machine code: what is read of it, and how warps and products share a core."""

from __future__ import annotations

import pytest

from npusim.config.load import load_device
from npusim.machines.sm.compiled_loops import (
    LoopCore,
    LoopWalk,
    _awaits_an_operand,
    _core_of,
    _decoded,
    loop_work,
    loops_of,
)
from npusim.machines.sm.core import warp_issue
from reports.silicon.decode_loops import cases, iteration_cycles

#: No scoreboard.
NONE = 7
#: Beside no product, and without latencies: a core of one warp a sub-core, which is a block.
PLAIN = LoopCore(
    warps=4,
    subcores=4,
    narrow=2.0,
    special=8.0,
    memory_bytes=128.0,
    local_bytes=42.0,
    load_bytes=128.0,
    fill_bytes=128.0,
    near=29.0,
    hit=40.0,
    far=262.0,
    copied=375.0,
    shuffle=24.0,
    function=17.0,
    elements=2.0,
    warp_product=6.0,
    product=14.0,
    drain=57.0,
    copy=13.0,
    fence=95.0,
    barrier=12.4,
    barrier_warp=2.0,
    issue_beside=0.0,
    narrow_beside=0.0,
    special_beside=0.0,
    product_delay=0.0,
)


def line(at: int, text: str, control: int) -> str:
    return f"        /*{at:04x}*/  {text} ;  /* 0x{0:016x} */\n  /* 0x{control << 41:016x} */\n"


def word(name: str, stall: int, *details: int, result: int = NONE, operands: int = NONE, waits: int = 0) -> str:
    listed = "*" + ",".join(map(str, details)) if details else ""
    return f"{name}{listed}:{stall | result << 5 | operands << 8 | waits << 11:x}"


#: A product of 128 columns whose operands are in shared memory, the last that is waited for, and that wait.
PRODUCT, WAIT = word("HGMMA", 1, 128, 1, 1), word("WARPGROUP", 1, 0)


def cycles(body: list[str], core: LoopCore = PLAIN, blocks: int = 1) -> float:
    return LoopWalk([_decoded(x) for x in body], core, blocks).cycles()[0]


def test_loops_of_products_are_read_with_what_decides_their_time() -> None:
    control = 1 | NONE << 5 | NONE << 8
    text = (
        line(0x00, "MOV R1, R2", control)
        + line(0x10, "HGMMA.64x128x16.F32 R24, gdesc[UR12], R24", control)
        + line(0x20, "HGMMA.64x64x16.F32 R24, R88, gdesc[UR8].tnspB, R24, gsb0", control)
        + line(0x30, "WARPGROUP.DEPBAR.LE gsb0, 0x1", control)
        + line(0x40, "LDGSTS.E.BYPASS.128 [R41], desc[UR18][R20.64]", control)
        + line(0x50, "DEPBAR.LE SB0, 0x2", control)
        + line(0x60, "@P0 BRA 0x10", control)
        + line(0x70, "BRA 0x0", control)  # around the loop, and so not a loop of its own
    )
    (body,) = loops_of(text)
    found = [_decoded(x) for x in body.split()]
    assert [x.name for x in found] == ["HGMMA", "HGMMA", "WARPGROUP", "LDGSTS", "DEPBAR", "BRA"]
    assert [x.details for x in found] == [(128, 1, 0), (64, 0, 1), (1,), (16,), (2,), ()]


def test_code_between_the_tiles_of_a_flattened_loop_is_left_out() -> None:
    """One loop over tiles and their sums stores a tile once, after its last sum, and not in each iteration."""
    control = 1 | NONE << 5 | NONE << 8
    skipped = [(0x60, "@P1 BRA 0x90"), (0x70, "F2FP.BF16.F32.PACK_AB R1, R2, R3"), (0x80, "STG.E.128 [R4.64], R8")]
    parts = [
        (0x10, "LDG.E.128 R60, desc[UR18][R20.64]"),
        (0x20, "STS.128 [R41], R60"),
        (0x30, "HGMMA.64x128x16.F32 R24, gdesc[UR12], R24, gsb0"),
        (0x40, "WARPGROUP.DEPBAR.LE gsb0, 0x0"),
        (0x50, "LDGSTS.E.BYPASS.128 [R41], desc[UR18][R20.64]"),
        *skipped,
        (0x90, "IADD3 R5, R5, 0x1, RZ"),
        (0xA0, "@P0 BRA 0x10"),
    ]
    (body,) = loops_of("".join(line(at, text, control) for at, text in parts))
    names = [_decoded(x).name for x in body.split()]
    assert names == ["LDG", "STS", "HGMMA", "WARPGROUP", "LDGSTS", "BRA", "IADD3", "BRA"]
    assert _awaits_an_operand(body)
    assert not _awaits_an_operand(" ".join(x for x in body.split() if not x.startswith("LDG*")))
    kept = [(at, "FADD R1, R2, R3" if "STG" in text else text) for at, text in parts]
    (whole,) = loops_of("".join(line(at, text, control) for at, text in kept))
    assert len(whole.split()) == len(parts)


def test_a_warp_waits_for_its_products_and_their_drain() -> None:
    # 128 columns take 64 cycles; as much is read from shared memory in 48.
    assert cycles([PRODUCT, WAIT]) == pytest.approx(64 + 57)
    # Nobody waits: the next round's product queues behind it.
    assert cycles([PRODUCT, word("FADD", 4)] * 3) < 3 * 64 + 57


def test_blocks_hide_waits_of_one_another_until_a_unit_is_full() -> None:
    body = [PRODUCT, WAIT, *[word("FMUL", 1)] * 50]
    alone, three, many = (cycles(body, blocks=n) for n in (1, 3, 8))
    assert alone == pytest.approx(64 + 57 + 50)
    assert three / 3 < 0.6 * alone
    assert many / 8 == pytest.approx(64, rel=0.02)  # the tensor core's


def test_products_of_two_warp_groups_alternate() -> None:
    body = [*[word("HGMMA", 1, 128, 1, 0)] * 3, PRODUCT, WAIT]
    walk = LoopWalk([_decoded(x) for x in body], PLAIN._replace(warps=8))
    walk.cycles()
    # Neither has all its products first: the first group's four end one product before the second one's.
    assert [of[0] for of in walk.ends] == pytest.approx([7 * 64 + 57, 8 * 64 + 57], abs=1)


def test_work_beside_a_product_takes_longer_and_delays_it() -> None:
    body = [PRODUCT, *[word("FMUL", 1)] * 40, WAIT]
    slow = PLAIN._replace(issue_beside=1.0, product_delay=0.5)
    assert cycles(body) == pytest.approx(64 + 57)
    assert cycles(body, slow) > 64 + 57 + 0.5 * 30
    apart = [PRODUCT, WAIT, *[word("FMUL", 1)] * 40]
    assert cycles(apart, slow) < cycles(apart) + 3


def test_what_a_chip_measured_beside_products_comes_out() -> None:
    """h200_micro.json, beside_*: two warps a sub-core beside another's products, in cycles an instruction."""
    device = load_device("h200")
    spec = warp_issue(device).sharing.loops
    assert spec is not None
    core = _core_of(device, spec, 4, "wgmma")
    assert core.narrow + core.narrow_beside == pytest.approx(4.75)
    assert core.special + core.special_beside == pytest.approx(10.9)
    assert 1 + core.issue_beside == pytest.approx(1.76)
    assert 64 + core.product_delay * 116 / 1.76 == pytest.approx(116, abs=0.5)


def test_only_several_blocks_wait_for_copies_here() -> None:
    copy = [word("LDGSTS", 1, 16), word("LDGDEPBAR", 1), word("DEPBAR", 1, 0), word("BAR", 1)]
    assert cycles(copy) < 60
    assert cycles(copy, blocks=2) > 375


def test_what_the_engine_waits_for_is_left_out_of_one_stage() -> None:
    load = word("LDG", 1, 16, result=0)
    body = " ".join([load, word("STS", 1, 16, waits=1), PRODUCT, WAIT, *[word("FMUL", 1)] * 400])
    whole = cycles(body.split())
    work = loop_work(body, PLAIN, 1)
    assert work.before == work.held == pytest.approx(whole - 375 - 0.5 * 16 * 32 * 4 / 128)
    assert loop_work(body, PLAIN, 4).held < work.held


#: A product of one warp of 16 rows, 8 columns and 32 bytes along the sum.
OF_WARP = word("HMMA", 1, 32)


def test_products_of_warps_share_tensor_cores_and_take_their_pauses() -> None:
    control, of_warp = 1 | NONE << 5 | NONE << 8, "HMMA.{}.F32 R24, R28, R20, RZ"
    loop = line(0x00, of_warp.format("16816"), control) + line(0x10, "NOP", 9 | control & ~15)
    (body,) = loops_of(loop + line(0x20, "@P0 BRA 0x0", control))
    assert [(x.name, x.stall, x.details) for x in map(_decoded, body.split())] == [
        ("HMMA", 1, (32,)),
        ("NOP", 9, ()),
        ("BRA", 1, ()),
    ]
    assert loops_of(line(0x00, of_warp.format("1684"), control) + line(0x10, "@P0 BRA 0x0", control)) == []
    assert cycles([OF_WARP] * 8) == pytest.approx(8 * PLAIN.warp_product)
    assert cycles([word("HMMA", 1, 16)] * 8) == pytest.approx(4 * PLAIN.warp_product)
    pauses = [OF_WARP, word("NOP", 15), word("NOP", 9)]
    assert cycles(pauses * 4) == pytest.approx(4 * 25)
    # Two blocks fill the pauses of one another.
    assert cycles(pauses * 4, blocks=2) == pytest.approx(4 * 25, rel=0.1)
    assert loop_work(" ".join([OF_WARP] * 8), PLAIN, 1).product == 8 * PLAIN.warp_product


def test_blocks_of_fewer_warps_than_sub_cores_lie_beside_one_another() -> None:
    body, narrow = " ".join([OF_WARP] * 64), PLAIN._replace(warps=2)
    assert loop_work(body, narrow, 4).held == pytest.approx(loop_work(body, PLAIN, 2).held / 2)


def test_places_are_read_from_memory_by_64_bytes_and_from_l2_by_32() -> None:
    """What a load of places finds in L1 is what earlier loads of the same registers have read, up to their end."""
    control, at = 1 | NONE << 5 | NONE << 8, iter(range(0, 1 << 12, 16))
    load = "LDG.E.64 R22, desc[UR8][{}]"
    places = ["R20.64", "R20.64+0x20", "R20.64+0x40", "R20.64", "R40.64+0x40"]
    text = "".join(line(next(at), load.format(place), control) for place in places)
    text += line(next(at), "IMAD.WIDE R20, R22, 0x8, R2", control)
    text += "".join(line(next(at), load.format(place), control) for place in places[:1])
    text += line(next(at), "LDG.E.128 R24, desc[UR8][R20.64]", control)
    text += line(next(at), "HMMA.16816.F32 R24, R28, R20, RZ", control) + line(next(at), "@P0 BRA 0x0", control)
    (body,) = loops_of(text)
    loads = [x.details for x in map(_decoded, body.split()) if x.name == "LDG"]
    assert loads == [(8, 0), (8, 2), (8, 1), (8, 3), (8, 0), (8, 0), (16,)]


def test_a_loop_waits_for_places_one_after_the_other_where_its_code_does() -> None:
    """A chunk of a tile of K: its place, and a copy from there. V's copies find the places in L1."""

    def chunk(found: int) -> list[str]:
        return [word("LDG", 1, 8, found, result=2), word("LEA", 5, waits=1 << 2), word("LDGSTS", 1, 16)]

    body = [*[word("FMUL", 1)] * 200, OF_WARP, *chunk(0), *chunk(1) * 3, *chunk(3) * 4, word("LDGDEPBAR", 1)]
    work, other = (loop_work(" ".join(body), PLAIN, 1, is_placed=is_placed) for is_placed in (True, False))
    assert (work.lookups, other.lookups) == (4, 0)
    # Where L1 has them from earlier blocks, the first load of a line waits.
    assert loop_work(" ".join(body), PLAIN, 1, is_placed=True, is_known=True).lookups == 1
    assert other.before == pytest.approx(work.before + 4 * PLAIN.far)  # of numbers that rows compute with
    # Copies begin when the last place is there; how long places take the engine knows.
    assert work.after < 30
    assert work.before == pytest.approx(200 + 4 * PLAIN.hit + 8 * (PLAIN.copy + 8), abs=60)
    together = [word("LDG", 1, 8, 0, result=2)] * 4 + [word("LEA", 5, waits=1 << 2), *[word("LDGSTS", 1, 16)] * 4]
    assert loop_work(" ".join([OF_WARP, *together]), PLAIN, 1, is_placed=True).lookups == 1


def test_places_take_what_an_h200_measured_from_l1_and_from_memory() -> None:
    sharing = warp_issue(load_device("h200")).sharing
    assert sharing.loops is not None
    assert sharing.lookup_miss_cycles is not None
    near, far = (next(c["cycles"] for c in cases("hits") if c["loop"] == level) for level in ("l1", "l2"))
    assert far - near == pytest.approx(sharing.lookup_cycles.value - sharing.loops.hit_cycles.value, abs=5)
    # One block a multiprocessor; 16 bytes a warp, and 64 at once from memory; the tile with 231 registers is another.
    alone = [c for c in cases("loops") if (c["places"], c["residents"], c["stages"]) == ("loaded", 1, 2)]
    tiles = {(c["block_n"], c["warps"]) for c in alone if c["warps"] >= 4 and c["registers"] < 128}
    extra = []
    for tile in sorted(tiles):
        ways = {(c["where"], c["order"]): iteration_cycles(c) for c in alone if (c["block_n"], c["warps"]) == tile}
        lookups = tile[0] // (2 * tile[1])
        extra.append((ways["memory", "rand"] - ways["l2", "seq"] - 600) / lookups)
    assert len(extra) == 6
    assert extra == pytest.approx([sharing.lookup_miss_cycles.value] * 6, abs=45)
