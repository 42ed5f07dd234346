"""What a warp does by its machine code: the walk of stalls and scoreboards, counts, what has no body."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from npusim.config.load import load_device
from npusim.formats.reductions import normal_order
from npusim.machines.decisions import GpuDecisions, StateLoop
from npusim.machines.sm import compiled_rows
from npusim.machines.sm.compiled_rows import RowCore, body_of, code_work, loads_at_once
from npusim.machines.sm.core import SmTiling

NONE = 7
#: A core of one warp: no result but those of shared memory and L2 takes time.
ALONE = RowCore(waits=(), others=29.0, near=262.0, load_bytes=128.0, store_bytes=64.0)


def word(name: str, stall: int, result: int = NONE, operands: int = NONE, waits: int = 0) -> str:
    return f"{name}:{stall | result << 5 | operands << 8 | waits << 11:x}"


def line(at: int, text: str, control: int) -> str:
    return f"        /*{at:04x}*/  {text} ;  /* 0x{0:016x} */\n  /* 0x{control << 41:016x} */\n"


def test_code_without_scoreboards_takes_its_stalls() -> None:
    # The load's wait is the engine's, not the walk's.
    body = " ".join(["once", word("LDG", 1, result=0), word("FADD", 4, waits=1), word("FMUL", 5), word("IADD3", 2)])
    work = code_work(body, ALONE)
    assert work.alone_cycles == 4 + 5 + 2
    assert (work.issued, work.narrow, work.special, work.is_ahead) == (4, 1, 0, False)


def test_loads_of_a_row_may_be_narrower_than_those_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of bfloat16 at odd addresses are loaded 2 bytes at a time, here in two parts, a scale of float32 at once."""
    monkeypatch.setattr(compiled_rows, "_loads_of_tile", lambda _phase, _decided, width: {2: 9, 4: 5}[width])
    parts = [word("LDG*2", 1, result=k) for k in (0, 1) for _ in range(4)]
    code = [*parts[:4], word("FADD", 4, waits=1), *parts[4:], word("LDG*4", 1, result=2), word("FADD", 4, waits=6)]
    body = " ".join(["loop", *code, word("BAR", 1), word("BAR", 1), word("STG*2", 1)])
    monkeypatch.setattr(compiled_rows, "is_visited", lambda *_: True)
    phase: Any = SimpleNamespace(stages=[SimpleNamespace(written={"o"})], tensors={"o": None}, loop_axis="row")
    made = compiled_rows._state_loop(body, phase, GpuDecisions(stages=2))
    assert made == StateLoop(waits=2, near_waits=0, barriers=2)


def test_a_loop_of_several_rows_waits_for_the_loads_of_each() -> None:
    """A compiler that unrolls a loop over rows puts the load of a row after the store of the previous one."""
    row = [word("LDG*16", 1, result=0), word("FMUL", 4, waits=1), word("STG*16", 1)]
    one, four = (code_work(" ".join(["loop", *row * n, word("BRA", 5)]), ALONE, n) for n in (1, 4))
    assert four.alone_cycles <= one.alone_cycles < 20
    assert code_work(" ".join(["loop", *row * 4]), ALONE).alone_cycles > 3 * 262
    assert (one.issued, four.issued) == (4, 4)


def test_a_program_that_is_read_as_several_blocks_has_its_work_once() -> None:
    """A block of flat indices that is read as four blocks executes its code once, and holds the places of four."""
    row = [word("LDG*16", 1, result=0), word("FMUL", 4, waits=1), word("FADD", 4), word("STG*16", 1)]
    body, device = " ".join(["once", *row * 4]), load_device("h200")
    whole, part = code_work(body, ALONE), code_work(body, ALONE, parts=4)
    assert part.alone_cycles == whole.alone_cycles / 4
    assert (whole.issued, part.issued) == (16, 4)
    phase: Any = SimpleNamespace(stages=[], cells=range(4 * 1320), loop_axis="")
    made = [
        compiled_rows.with_code(SmTiling(2, decided=GpuDecisions(warps=8)), body, phase, n, device)
        for n in (4 * 1320, 1320)
    ]
    assert [(m.residents, m.parts) for m in made] == [(2, 1), (8, 4)]
    begins = [sum(c.times for c in m.decided.charges) for m in made]
    assert begins[1] == begins[0] / 4
    code = [m.decided.code for m in made]
    assert all(code)
    assert not any(c.goes_on for c in code if c)


def test_results_are_waited_for_by_their_scoreboards() -> None:
    body = " ".join(
        [
            "once",
            word("LDG", 1, result=0),
            word("MUFU", 1, result=1, waits=1),
            word("SHFL", 1, result=2, waits=2),
            word("LDG", 1, result=3, waits=4),
            word("FADD", 4, waits=8),
        ]
    )
    work = code_work(body, ALONE._replace(waits=(("MUFU", 17.0), ("SHFL", 24.0))))
    assert work.alone_cycles == 17 + 24 + 262 + 4  # a second load, behind the first, comes from L2
    assert (work.special, work.shared) == (1, 1)


def test_a_loop_that_loads_the_next_row_is_known() -> None:
    ahead = " ".join(["loop", word("FADD", 4, waits=1), word("LDG", 1, result=0), word("FMUL", 6)])
    assert code_work(ahead, ALONE).is_ahead is True
    at_once = " ".join(["loop", word("LDG", 1, result=0), word("FADD", 4, waits=1), word("FMUL", 6)])
    work = code_work(at_once, ALONE)
    assert (work.is_ahead, work.alone_cycles) == (False, 10.0)


def test_loads_under_way_are_those_before_a_wait() -> None:
    load, use, store = word("LDG*16", 1, result=0), word("FADD", 4, waits=1), word("STG*16", 1)
    # No load is moved before a store: however often a loop is unrolled, one is under way.
    assert loads_at_once(" ".join(["loop", load, use, store, load, use, store])) == (1, False, 16)
    both = " ".join(["loop", load, word("LDG*4", 1, result=1), use, word("FMUL", 4, waits=2)])
    assert loads_at_once(both) == (2, False, 16)
    assert loads_at_once(" ".join(["loop", use, load, word("FMUL", 4)])) == (1, True, 16)
    assert loads_at_once(" ".join(["once", use, load, load, use])) == (2, False, 16)
    # Warps whose data have arrived go on to the barrier.
    assert loads_at_once(" ".join(["loop", load, use, word("BAR", 1)])) is None
    assert loads_at_once(" ".join(["loop", use, store])) is None


def test_warps_queue_for_the_pipe_of_shared_memory_and_meet_at_barriers() -> None:
    body = " ".join(["once", word("LDG", 1, result=0), word("SHFL", 1, result=1, waits=1), word("FADD", 4, waits=2)])
    core = ALONE._replace(waits=(("SHFL", 24.0),), subcores=4)
    assert code_work(body, core).alone_cycles == 24 + 4
    # The last of 32 warps has its turn 31 cycles after the first; one sub-core issues the loads of 8 one by one.
    assert code_work(body, core._replace(warps=32)).alone_cycles >= 31 + 24 + 4
    met = " ".join([body, word("BAR", 5)])
    costs = {w: code_work(met, core._replace(warps=w, barrier=12.4, barrier_warp=2.0)) for w in (1, 32)}
    assert costs[1].alone_cycles == pytest.approx(24 + 4 + 2.0 + 12.4 + 5)
    assert costs[32].alone_cycles >= 32 * 2.0 + 12.4 + 24 + 4 + 5
    assert costs[32].barriers == 1


def test_a_block_ends_when_its_stores_have_left() -> None:
    body = " ".join(["once", word("LDG*16", 1, result=0), word("STG*16", 1, waits=1), word("EXIT", 5)])
    alone, many = (code_work(body, ALONE._replace(warps=w, subcores=4)).alone_cycles for w in (1, 32))
    assert alone == 32 * 16 / 64  # bytes of a warp over bytes a cycle
    assert many == 32 * alone
    near = " ".join(
        ["once", word("LDG*4", 1, result=0), word("LDG*16", 1, result=1, waits=1), word("FADD", 4, waits=2)]
    )
    assert code_work(near, ALONE).alone_cycles == 262 + 4 + (32 * 16 / 128 - 1)  # weights, from L2


def test_the_body_is_the_loop_that_loads_and_products_have_none() -> None:
    nop = line(0x40, "NOP", 0)
    code = (
        line(0x00, "MOV R1, c[0x0][0x28]", 0x3F1)
        + line(0x10, "LDG.E R2, [R4.64]", NONE << 8 | 1)
        + line(0x20, "FADD R2, R2, R2", 0xFE4)
        + line(0x30, "@P0 BRA 0x10", 0xFE5)
        + nop
        + line(0x50, "EXIT", 0xFE5)
    )
    assert [w.partition(":")[0] for w in body_of(code, "sm_90").split()] == ["loop", "LDG*4", "FADD", "BRA"]
    straight = code.replace("@P0 BRA 0x10", "FADD R3, R3, R3")
    assert body_of(straight, "sm_90").split()[0] == "once"
    assert len(body_of(straight, "sm_90").split()) == 1 + 5
    wide = {"LDG.E.128": "*16", "LDG.E.64.CONSTANT": "*8", "LDG.E.U16": "*2", "LDG.E.S8": "*1", "LDG.E.CONSTANT": "*4"}
    for name, size in wide.items():
        assert f"LDG{size}:" in body_of(code.replace("LDG.E", name), "sm_90")
    assert body_of(code, "sm_100") == ""
    assert body_of(code.replace("FADD R2, R2, R2", "HGMMA.64x8x16.F32 R2"), "sm_90") == ""


def test_an_order_of_sums_has_a_normal_form() -> None:
    assert normal_order("lanes_1x32x16", 128) == "lanes_1x32x4"
    assert normal_order("lanes_4x32x8", 4096) == "lanes_4x32x8"
    assert normal_order("lanes_4x32x1", 16) == "lanes_4x4x1"
    assert normal_order("mma_lanes", 16) == "mma_lanes"
