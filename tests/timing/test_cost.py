"""Costs against the published anchors, worked out by hand; and a row for every opcode."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir.toy import Toy, flatten

from npusim.config.core_units import VectorEngine
from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.errors import ProgramError, SpecError, UnknownOpcodeError
from npusim.formats import combine_text
from npusim.library import find_schedule
from npusim.machines.ascend.ascend_pricing import VECTOR_COSTS, AscendPricing, vector_cycles
from npusim.machines.ascend.group import VectorWork
from npusim.program.ir.op import PLAIN, Attributes, Opcode, Step, TileOp
from npusim.program.ir.tile import GlobalTensor, Operand, Tile
from npusim.program.ir.tile_program import Cost, Queue
from npusim.program.numerics.semantics import SEMANTICS

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec


def tile(space: str, rows: int, cols: int, fmt: str, stride: int | None = None) -> Tile:
    return Tile(space, 0, rows, cols, stride or cols, fmt)


def ub(rows: int, cols: int, fmt: str = "float32", stride: int | None = None) -> Tile:
    return tile("aiv0.UB", rows, cols, fmt, stride)


def model(device: DeviceSpec, *ops: TileOp, tensors: tuple[GlobalTensor, ...] = ()) -> AscendPricing:
    """Return the costs of a program made of ``ops`` (they decide what of a tensor comes from HBM)."""
    toy = Toy()
    program = toy.program(list(ops), tensors=tensors)
    pipes = {"aic": ("MTE2", "MTE1", "CUBE", "FIXP"), "aiv": ("MTE2", "VECTOR", "MTE3")}
    queues = tuple(Queue(f"{c}.{e}", c, e, c) for c, engines in pipes.items() for e in engines)
    return AscendPricing(replace(program, queues=queues), device)


def cost(device: DeviceSpec, core: str, engine: str, step: Step) -> Cost:
    return model(device).of_step(step, core, engine)


def vector(device: DeviceSpec, opcode: Opcode, dst: Operand, *srcs: Any, how: Attributes = PLAIN) -> int:
    return cost(device, "aiv", "VECTOR", Step(opcode, dst, srcs, how)).occupancy_cycles


# ---------------------------------------------------------------- anchors


def test_mmad_of_128_cubed_takes_512_cycles_and_the_start_up(device: DeviceSpec) -> None:
    # (128/16)^3 = 512 fractals of 16x16x16, one a cycle; start-up 10.
    a, b = tile("aic.L0A", 128, 128, "float16"), tile("aic.L0B", 128, 128, "float16")
    step = Step(Opcode.MATMUL, tile("aic.L0C", 128, 128, "float32"), (a, b))
    assert cost(device, "aic", "CUBE", step)[:2] == (512 + 10, 0)


@pytest.mark.parametrize(("memory", "bytes_per_cycle"), [("L0B", 128), ("L0A", 256)])
def test_32_kib_from_l1_take_their_bytes_time_and_50_cycles(
    memory: str, bytes_per_cycle: int, device: DeviceSpec
) -> None:
    # 256 + 50 to L0B, whose port is half as wide as that of L0A.
    source = tile("aic.L1", 128, 128, "float16")
    found = cost(device, "aic", "MTE1", Step(Opcode.COPY, tile(f"aic.{memory}", 128, 128, "float16"), (source,)))
    assert found.occupancy_cycles + found.latency_cycles == 32768 // bytes_per_cycle + 50
    assert found.link_bytes == ()


def test_exp_of_128_float32_repeats_takes_256_cycles_and_31(device: DeviceSpec) -> None:
    # A repeat is 256 B = 64 float32: 128 rows of 64.  2 cycles a repeat, head 13, tail 18.
    assert vector(device, Opcode.EXP, ub(128, 64), ub(128, 64)) == 256 + 31


def test_vector_add_of_64_repeats_takes_86_cycles(device: DeviceSpec) -> None:
    # asc-devkit's bank conflict sample without conflicts: 1 a repeat and 22 fixed.
    assert vector(device, Opcode.ADD, ub(64, 64), ub(64, 64), ub(64, 64)) == 86


# ---------------------------------------------------------------- vector unit


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        # 128 rows of 64 float32: 128 repeats.  ascend.md 1.5: head + tail + slope * repeats.
        (Opcode.SUB, 22 + 128),
        (Opcode.MUL, 22 + 128),
        (Opcode.MAX, 22 + 128),
        (Opcode.DIV, 31 + 4 * 128),
    ],
)
def test_elementwise_operations_cost_head_and_tail_and_slope(device: DeviceSpec, opcode: Opcode, expected: int) -> None:
    assert vector(device, opcode, ub(128, 64), ub(128, 64), ub(128, 64)) == expected


def test_an_operand_that_is_a_constant_makes_the_scalar_form(device: DeviceSpec) -> None:
    # vmuls: 1 a repeat + 26.
    assert vector(device, Opcode.MUL, ub(128, 64), ub(128, 64), 0.5) == 26 + 128


def test_float16_halves_the_repeats_and_doubles_the_slope_of_exp(device: DeviceSpec) -> None:
    half = ub(128, 64, "float16")  # 64 repeats of 128 float16
    assert vector(device, Opcode.EXP, half, half) == 31 + 4 * 64
    assert vector(device, Opcode.DIV, half, half, half) == 31 + 4 * 64
    assert vector(device, Opcode.ADD, half, half, half) == 22 + 64


def test_a_cast_counts_the_repeats_of_its_wider_side(device: DeviceSpec) -> None:
    # vconv: 1 a repeat of 64 float32, 14 + 18, both ways.
    wide, narrow = ub(128, 64), ub(128, 64, "float16")
    assert vector(device, Opcode.CAST, narrow, wide) == 32 + 128
    assert vector(device, Opcode.CAST, wide, narrow) == 32 + 128


def test_select_and_fill(device: DeviceSpec) -> None:
    mask = ub(128, 64, "int8")
    assert vector(device, Opcode.SELECT, ub(128, 64), mask, ub(128, 64), 0.0) == 27 + 2 * 128
    assert vector(device, Opcode.FILL, ub(128, 64), 0.0) == 24 + 128


@pytest.mark.parametrize(
    ("relation", "compares", "joins"),
    [("ogt", 1, 0), ("une", 1, 0), ("ult", 1, 1), ("one", 2, 1), ("uno", 2, 1), ("ueq", 2, 2)],
)
def test_a_relation_is_made_of_comparisons_and_operations_on_their_bits(
    device: DeviceSpec, relation: str, compares: int, joins: int
) -> None:
    mask, how = ub(128, 64, "int8"), Attributes(variant=relation)
    # 128 repeats of float32; a mask of 8192 bits is 1024 bytes, 4 repeats.
    expected = compares * (22 + 128) + joins * (22 + 4)
    assert vector(device, Opcode.COMPARE, mask, ub(128, 64), ub(128, 64), how=how) == expected
    half = ub(128, 64, "float16")
    assert vector(device, Opcode.COMPARE, mask, half, 1.0, how=Attributes(variant="ogt")) == 26 + 64


def test_masks_are_joined_by_their_bits(device: DeviceSpec) -> None:
    mask = ub(128, 64, "int8")
    for function, count in (("and", 1), ("or", 1), ("xor", 4)):
        cycles = vector(device, Opcode.LOGIC, mask, mask, mask, how=Attributes(variant=function))
        assert cycles == count * (22 + 4)
    assert vector(device, Opcode.LOGIC, mask, mask, 1.0, how=Attributes(variant="xor")) == 22 + 4


def test_a_column_operand_is_spread_first(device: DeviceSpec) -> None:
    # vbrcb: 64 rows, 8 rows a repeat: 8 repeats + 18; then vsub over 64 * 512 / 64 repeats + 22, its
    # second source the same block for a whole row: 1.67 a repeat.
    expected = (18 + 8) + 22 + 1.67 * 512
    assert vector(device, Opcode.SUB, ub(64, 512), ub(64, 512), ub(64, 1)) == math.ceil(expected)


#: Byte offsets of Add's two sources and its destination, 64 repeats of float32, and cycles.
#: UB has 16 groups of 3 banks; 32-byte rows go round the groups, so 512 bytes on is the same group,
#: and 64 KiB on the next bank of it.  asc-devkit's sample measured 86, 150, 135 (ascend.md 1.5).
ADDS = {
    "apart": ((0, 32, 64), 22 + 64),
    "two sources are in the same group": ((0, 512 * 40, 64), 22 + 2 * 64),
    "two sources are in the same group, other banks": ((0, 65536, 64), 22 + 2 * 64),
    "a source and the result in one bank": ((0, 32, 512 * 40), math.ceil(22 + 1.77 * 64)),
    "a source and the result in one group, other banks": ((0, 32, 65536), 22 + 64),
    "in place": ((0, 32, 0), 22 + 64),
    "twice the same source": ((0, 0, 32), 22 + 64),
}


@pytest.mark.parametrize("case", ADDS)
def test_operands_that_share_banks_are_read_one_after_the_other(case: str, device: DeviceSpec) -> None:
    offsets, cycles = ADDS[case]
    a, b, dst = (replace(ub(64, 64), offset_bytes=offset) for offset in offsets)
    assert vector(device, Opcode.ADD, dst, a, b) == cycles


def test_a_column_by_a_column_needs_no_spreading(device: DeviceSpec) -> None:
    assert vector(device, Opcode.ADD, ub(64, 1), ub(64, 1), ub(64, 1)) == 22 + 1


def test_a_row_maximum_of_512_columns_takes_three_block_reductions(device: DeviceSpec) -> None:
    # 16 rows of 512: blocks of 8 float32: 512 -> 64 -> 8 -> 1.  vcgmax 1 a repeat, 14 + 20.
    # Repeats: 16*512/64 = 128, 16*64/64 = 16, 16*8/64 = 2.
    assert vector(device, Opcode.ROW_MAX, ub(16, 1), ub(16, 512)) == 3 * 34 + 128 + 16 + 2


def test_a_row_sum_of_197_columns_pads_each_level_to_a_block(device: DeviceSpec) -> None:
    # 4 rows: 197 -> ceil(197/8) = 25 -> 4 -> 1; repeats ceil(788/64) = 13, ceil(100/64) = 2, 1.
    how = Attributes(order="vector_lanes")
    assert vector(device, Opcode.ROW_SUM, ub(4, 1), ub(4, 197), how=how) == 3 * 34 + 13 + 2 + 1


def test_a_row_sum_by_a_tree_of_halves_is_a_vector_add_a_level(device: DeviceSpec) -> None:
    # 16 rows of 256: 128, 64, 32, ..., 1 columns added: 8 adds of 16*h/64 repeats, at least 1.
    levels = [128, 64, 32, 16, 8, 4, 2, 1]
    expected = sum(22 + max(1, 16 * h // 64) for h in levels)
    how = Attributes(order="tree_halves")
    assert vector(device, Opcode.ROW_SUM, ub(16, 1), ub(16, 256), how=how) == expected


def test_a_row_sum_in_an_order_the_unit_cannot_do_is_refused(device: DeviceSpec) -> None:
    with pytest.raises(UnknownOpcodeError, match=r"ROW_SUM in order 'sequential' has no cost"):
        vector(device, Opcode.ROW_SUM, ub(16, 1), ub(16, 256), how=Attributes(order="sequential"))
    with pytest.raises(UnknownOpcodeError, match=r"ROW_SUM of products has no cost on .*: multiply first"):
        vector(device, Opcode.ROW_SUM, ub(16, 1), ub(16, 256), ub(16, 256))


def test_rows_with_gaps_start_a_repeat_each(device: DeviceSpec) -> None:
    # 8 rows of 8 float32: one repeat without gaps, one a row with.
    assert vector(device, Opcode.FILL, ub(8, 8), 0.0) == 24 + 1
    assert vector(device, Opcode.FILL, ub(8, 8, stride=64), 0.0) == 24 + 8


def test_a_source_with_gaps_starts_a_repeat_a_row_too(device: DeviceSpec) -> None:
    gapless, gaps = ub(8, 8), ub(8, 8, stride=64)
    assert vector(device, Opcode.ADD, gapless, gaps, gapless) == 22 + 8


# ---------------------------------------------------------------- matrix unit and moves


@given(m=st.integers(1, 300), n=st.integers(1, 300), k=st.integers(1, 300))
@settings(max_examples=50)
def test_a_product_counts_whole_fractals(device: DeviceSpec, m: int, n: int, k: int) -> None:
    a, b = tile("aic.L0A", m, k, "bfloat16"), tile("aic.L0B", k, n, "bfloat16")
    step = Step(Opcode.MATMUL, tile("aic.L0C", m, n, "float32"), (a, b))
    expected = ((m + 15) // 16) * ((n + 15) // 16) * ((k + 15) // 16) + 10
    assert cost(device, "aic", "CUBE", step).occupancy_cycles == expected


def test_a_product_in_a_format_the_unit_lacks_is_refused(device: DeviceSpec) -> None:
    a = tile("aic.L0A", 16, 16, "float8_e4m3fn")
    step = Step(Opcode.MATMUL, tile("aic.L0C", 16, 16, "float32"), (a, a))
    with pytest.raises(SpecError, match="does not multiply float8_e4m3fn"):
        cost(device, "aic", "CUBE", step)


def test_operands_in_l1_and_l0_are_padded_to_whole_fractals(device: DeviceSpec) -> None:
    # 69 x 64 float16: 80 x 64 * 2 B = 10240 B at 256 B a cycle, and 50.
    step = Step(Opcode.COPY, tile("aic.L0A", 69, 64, "float16"), (tile("aic.L1", 69, 64, "float16"),))
    assert sum(cost(device, "aic", "MTE1", step)[:2]) == 40 + 50


def test_the_fixpipe_is_bound_by_its_port_or_by_its_64_elements_a_cycle(device: DeviceSpec) -> None:
    # 128 x 128 to GM: float32 65536 B / 66 = 992.97 cycles; float16 32768 B / 66 = 496.5.
    source = tile("aic.L0C", 128, 128, "float32")
    for fmt, opcode, expected in (("float32", Opcode.COPY, 993), ("float16", Opcode.CAST, 497)):
        step = Step(opcode, tile("gm", 128, 128, fmt), (source,))
        assert cost(device, "aic", "FIXP", step)[:2] == (expected, 200)
    # To L1 in float16 the port takes 32768 / 128 = 256 and so do 16384 elements at 64; 20 to arrive.
    step = Step(Opcode.CAST, tile("aic.L1", 128, 128, "float16"), (source,))
    assert sum(cost(device, "aic", "FIXP", step)[:2]) == 256 + 20


def test_a_short_transfer_takes_the_issue_interval(device: DeviceSpec) -> None:
    # 128 B at 110 B a cycle would be 2 cycles; a DMA of GM is issued every 20.
    k = GlobalTensor("k", 1, 1, 64, 64, "float16", "input")
    step = Step(Opcode.COPY, tile("aic.L1", 1, 64, "float16"), (k.tile(0, 0, 0, 1),))
    op = TileOp("K.load", "aic.MTE2", "aic.MTE2", (step,))
    found = model(device, op, tensors=(k,)).of_op(op)
    # A row of 64 is padded to 16 rows in L1: 2048 B / 110 = 18.6 cycles, less than 20.  Read once, it
    # misses L2: 150 cycles beyond the 300.
    assert found[:2] == (20, 300 + 150)


#: Width of a float16 tensor, columns read of it, and what the 64 rows take on their way to L1 and to UB.  Read
#: once.  Rows that jump take 0.66 cycles more each (63 of them) to UB, to L1 1.5 and, beyond L2, 5.2 at least; a
#: pitch of 64 + 16 starts rows inside requests of 128 B, one of 64 + 1 inside blocks of 32 B: to L1 16 B a cycle.
#: A row of L1 is padded to 16 elements.
PITCHES = {
    "whole rows": (64, 64, 8192 / 110, 8192 / 67),
    "parts of rows": (128, 64, 63 * 5.2, 8192 / 67 + 63 * 0.66),
    "long parts of rows": (2048, 1024, 131072 / 110 + 63 * 1.5, 131072 / 67 + 63 * 0.66),
    "rows inside requests": (80, 64, 63 * 5.2 * 1.43, (8192 / 67 + 63 * 0.66) * 1.28),
    "one run of odd rows": (80, 80, 10240 / 110 * 1.43, 10240 / 67),
    "rows inside blocks": (65, 64, 8192 / 16, (8192 / 67 + 63 * 0.66) * 1.28),
}


@pytest.mark.parametrize("case", PITCHES)
def test_rows_that_jump_or_start_inside_a_request_take_longer(case: str, device: DeviceSpec) -> None:
    width, cols, to_l1, to_ub = PITCHES[case]
    k = GlobalTensor("k", 1, 1, 64, width, "float16", "input")
    source = k.tile(0, 0, 0, 64, 0, cols)
    for core, dst, cycles in (("aic", "aic.L1", to_l1), ("aiv", "aiv.UB", to_ub)):
        name = f"{core}.MTE2"
        step = Step(Opcode.COPY, tile(dst, 64, cols, "float16"), (source,))
        found = model(device, TileOp("load", name, name, (step,)), tensors=(k,))
        assert found.of_step(step, core, "MTE2").occupancy_cycles == math.ceil(cycles)


def test_what_l2_holds_is_read_and_written_faster(device: DeviceSpec) -> None:
    # A slot stays in L2: rows take their bytes and 1.5 cycles (V7), stores 64 B a cycle; new lines 28.5 (V1).
    o = GlobalTensor("o", 1, 1, 64, 64, "float16", "output")
    rows = Step(Opcode.COPY, tile("aic.L1", 64, 64, "float16"), (tile("gm", 64, 64, "float16", stride=128),))
    targets = tile("gm", 64, 64, "float16"), o.tile(0, 0, 0, 64)
    old, new = (Step(Opcode.COPY, to, (ub(64, 64, "float16"),)) for to in targets)
    costs = model(device, TileOp("store", "aiv.MTE3", "aiv.MTE3", (new,)), tensors=(o,))
    loaded, kept, placed = (
        costs.of_step(s, *at) for s, at in ((rows, ("aic", "MTE2")), (old, ("aiv", "MTE3")), (new, ("aiv", "MTE3")))
    )
    assert loaded[:2] == (math.ceil(8192 / 110 + 63 * 1.5), 300)
    assert (kept.occupancy_cycles, placed.occupancy_cycles) == (128, math.ceil(8192 / 28.5))


def test_a_slot_of_odd_width_is_aligned_only_as_one_run(device: DeviceSpec) -> None:
    # 32 rows of 100 float32 = 400 B, no multiple of 128: parts of a slot's rows jump and are unaligned.
    part = Step(Opcode.COPY, ub(32, 50), (tile("gm", 32, 50, "float32", stride=100),))
    run = Step(Opcode.COPY, ub(32, 100), (tile("gm", 32, 100, "float32"),))
    assert cost(device, "aiv", "MTE2", part)[0] == math.ceil((6400 / 67 + 31 * 0.66) * 1.28)
    assert cost(device, "aiv", "MTE2", run)[0] == math.ceil(12800 / 67)


def test_slots_and_outputs_that_stay_cross_l2_only(device: DeviceSpec) -> None:
    o = GlobalTensor("o", 1, 1, 64, 64, "float16", "output")
    source, small = ub(64, 64, "float16"), load_device("ascend_910b2", {"memory.l2.capacity_bytes": "128"})
    slot, out = tile("gm", 64, 64, "float16"), o.tile(0, 0, 0, 64)
    both = {"l2": 8192, "hbm": 8192}
    for chip, dst, links in ((device, slot, {"l2": 8192}), (device, out, {"l2": 8192}), (small, out, both)):
        op = TileOp("store", "aiv.MTE3", "aiv.MTE3", (Step(Opcode.COPY, dst, (source,)),))
        assert dict(model(chip, op, tensors=(o,)).of_op(op).link_bytes) == links


def test_a_tensor_read_twice_comes_from_hbm_once(device: DeviceSpec) -> None:
    k = GlobalTensor("k", 1, 1, 64, 64, "float16", "input")
    step = Step(Opcode.COPY, tile("aic.L1", 64, 64, "float16"), (k.tile(0, 0, 0, 64),))
    op = TileOp("K.load", "aic.MTE2", "aic.MTE2", (step,))
    assert dict(model(device, op, tensors=(k,)).of_op(op).link_bytes) == {"l2": 8192, "hbm": 8192}
    # Each of the two reads is charged half of what comes from HBM.
    assert dict(model(device, op, op, tensors=(k,)).of_op(op).link_bytes) == {"l2": 8192, "hbm": 4096}


def test_equal_moves_through_global_memory_are_priced_once(device: DeviceSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = (GlobalTensor(n, 1, 2, 256, 64, "float16", "input") for n in "kv")
    regions = [k.tile(0, 0, 0, 64), k.tile(0, 1, 64, 64), k.tile(0, 0, 0, 32), v.tile(0, 0, 0, 64)]
    steps = [Step(Opcode.COPY, tile("aic.L1", r.rows, 64, "float16"), (r,)) for r in regions]
    ops = [TileOp("load", "aic.MTE2", "aic.MTE2", (step,)) for step in steps]
    priced, move = list[Step](), AscendPricing.move

    def counted(self: AscendPricing, step: Step, spec: Any, key: str) -> Cost:
        priced.append(step)
        return move(self, step, spec, key)

    monkeypatch.setattr(AscendPricing, "move", counted)
    costs = model(device, *ops, tensors=(k, v))
    of_steps = [costs.of_step(step, "aic", "MTE2") for step in steps]
    # Another place of the tensor is no other move; another size is, and another tensor.
    assert priced == [steps[0], steps[2], steps[3]]
    assert of_steps == [model(device, *ops, tensors=(k, v)).of_step(step, "aic", "MTE2") for step in steps]


def test_a_move_without_a_path_is_refused_with_the_paths_there_are(device: DeviceSpec) -> None:
    step = Step(Opcode.COPY, ub(16, 16, "float32"), (tile("aic.L0C", 16, 16, "float32"),))
    with pytest.raises(SpecError, match=r"no route L0C->UB; its routes: L0C->GM, L0C->L1"):
        cost(device, "aic", "FIXP", step)


def test_the_fixpipe_writes_only_the_formats_of_its_route(device: DeviceSpec) -> None:
    source = tile("aic.L0C", 16, 16, "float32")
    step = Step(Opcode.COPY, tile("aic.L1", 16, 16, "float32"), (source,))
    with pytest.raises(
        UnknownOpcodeError, match=r"COPY to float32 has no cost on .*l0c_l1, which can write float16, bfloat16, int8"
    ):
        cost(device, "aic", "FIXP", step)


# ---------------------------------------------------------------- completeness


def some_step(opcode: Opcode) -> Step:
    """Return a step that each opcode's engine can do."""
    x, column = ub(16, 64), ub(16, 1)
    match opcode:
        case Opcode.MATMUL:
            a, b = tile("aic.L0A", 16, 16, "float16"), tile("aic.L0B", 16, 16, "float16")
            return Step(opcode, tile("aic.L0C", 16, 16, "float32"), (a, b))
        case Opcode.ROW_MAX | Opcode.ROW_SUM:
            return Step(opcode, column, (x,))
        case Opcode.CUMSUM:
            return Step(opcode, x, (x,), Attributes(order="sequential", every=16))
        case Opcode.FOLD | Opcode.SCAN:
            text = combine_text("(a0 * b0)", take=0, size=64, pads=(1.0,))
            return Step(
                opcode, column if opcode is Opcode.FOLD else x, (x,), Attributes(variant=text, order="sequential")
            )
        case Opcode.INVERSE:
            return Step(opcode, ub(64, 64), (ub(64, 64),), Attributes(order="rows"))
        case Opcode.SELECT:
            return Step(opcode, x, (ub(16, 64, "int8"), x, 0.0))
        case Opcode.COMPARE:
            return Step(opcode, ub(16, 64, "int8"), (x, 0.0), Attributes(variant="ogt"))
        case Opcode.LOGIC:
            mask = ub(16, 64, "int8")
            return Step(opcode, mask, (mask, mask), Attributes(variant="and"))
        case Opcode.CAST:
            return Step(opcode, ub(16, 64, "float16"), (x,))
        case Opcode.FILL:
            return Step(opcode, x, (0.0,))
        case Opcode.COPY | Opcode.EXP | Opcode.LOG | Opcode.RSQRT | Opcode.SQRT | Opcode.TANH | Opcode.ERF:
            return Step(opcode, x, (x,))
        case _:
            return Step(opcode, x, (x, x))


@pytest.mark.parametrize("opcode", Opcode)
def test_every_opcode_has_semantics_and_a_cost_on_some_engine(opcode: Opcode, device: DeviceSpec) -> None:
    assert opcode in SEMANTICS
    core, engine = ("aic", "CUBE") if opcode is Opcode.MATMUL else ("aiv", "VECTOR")
    assert cost(device, core, engine, some_step(opcode)).occupancy_cycles > 0


def test_tables_hold_no_opcode_that_does_not_exist() -> None:
    assert set(VECTOR_COSTS) <= set(Opcode)
    assert set(SEMANTICS) == set(Opcode)


@pytest.mark.parametrize(
    ("core", "engine", "opcode"),
    [
        ("aiv", "VECTOR", Opcode.MATMUL),
        ("aic", "CUBE", Opcode.EXP),
        ("aic", "MTE1", Opcode.ADD),
        ("aiv", "MTE2", Opcode.CAST),
        ("aic", "FIXP", Opcode.MATMUL),
        ("aic", "SCALAR", Opcode.COPY),
    ],
)
def test_an_opcode_without_a_cost_on_an_engine_raises(
    core: str, engine: str, opcode: Opcode, device: DeviceSpec
) -> None:
    with pytest.raises(UnknownOpcodeError, match=rf"{opcode.name} has no cost on .*{engine}"):
        cost(device, core, engine, some_step(opcode))


def test_a_vector_instruction_the_device_file_lacks_is_refused(device: DeviceSpec) -> None:
    half = ub(16, 64, "bfloat16")
    with pytest.raises(
        SpecError, match=r"^cores\.aiv\.engines\.VECTOR\.ops: unknown vector op 'exp_bfloat16'; allowed: "
    ):
        vector(device, Opcode.EXP, half, half)


def test_a_product_is_stored_as_it_is_added_up_and_converted_by_an_operation_that_costs(device: DeviceSpec) -> None:
    a, b = tile("aic.L0A", 16, 16, "float16"), tile("aic.L0B", 16, 16, "float16")
    how = Attributes(arithmetic="ascend.cube.k16.f16.f32")
    assert cost(device, "aic", "CUBE", Step(Opcode.MATMUL, tile("aic.L0C", 16, 16, "float32"), (a, b), how))
    with pytest.raises(
        UnknownOpcodeError, match=r"MATMUL to float16 .*cores\.aic\.engines\.CUBE, which accumulates in float32; CAST"
    ):
        cost(device, "aic", "CUBE", Step(Opcode.MATMUL, tile("aic.L0C", 16, 16, "float16"), (a, b), how))


def test_a_product_or_a_reduction_of_a_constant_is_refused(device: DeviceSpec) -> None:
    with pytest.raises(ProgramError, match="needs tiles"):
        cost(device, "aic", "CUBE", Step(Opcode.MATMUL, ub(16, 16), (1.0, 1.0)))
    with pytest.raises(ProgramError, match="ROW_MAX needs a tile"):
        vector(device, Opcode.ROW_MAX, ub(16, 1), 1.0)


# ---------------------------------------------------------------- merged operations


VECTOR_STEPS = [some_step(o) for o in Opcode if o is not Opcode.MATMUL]


@given(st.lists(st.sampled_from(VECTOR_STEPS), min_size=1, max_size=12))
@settings(max_examples=50)
def test_a_merged_operation_costs_the_sum_of_its_steps(device: DeviceSpec, steps: list[Step]) -> None:
    costs = model(device)
    merged = costs.of_op(TileOp("softmax", "aiv.VECTOR", "aiv.VECTOR", tuple(steps)))
    parts = [costs.of_step(s, "aiv", "VECTOR") for s in steps]
    # Rounded to whole cycles once.
    assert merged.occupancy_cycles == math.ceil(sum(c for _, c in merged.terms) - 1e-9)
    assert sum(p.occupancy_cycles for p in parts) - len(parts) < merged.occupancy_cycles
    assert merged.latency_cycles == parts[-1].latency_cycles
    for key in {k for p in parts for k, _ in p.terms}:
        total = sum(c for p in parts for k, c in p.terms if k == key)
        assert dict(merged.terms)[key] == pytest.approx(total)


def test_links_of_a_merged_operation_add_up(device: DeviceSpec) -> None:
    o = GlobalTensor("o", 1, 1, 64, 64, "float16", "output")
    steps = tuple(Step(Opcode.COPY, o.tile(0, 0, row, 16), (ub(16, 64, "float16"),)) for row in (0, 16, 32))
    op = TileOp("store", "aiv.MTE3", "aiv.MTE3", steps)
    small = load_device("ascend_910b2", {"memory.l2.capacity_bytes": "128"})
    assert dict(model(small, op, tensors=(o,)).of_op(op).link_bytes) == {"l2": 3 * 2048, "hbm": 3 * 2048}


def test_an_operation_is_over_when_all_of_its_moves_are() -> None:
    """A tile that misses L2 arrives after the small one that is asked for behind it."""
    device = load_device("ascend_910b2", {"memory.l2.miss_extra_latency_cycles": "5000"})
    k = GlobalTensor("k", 1, 1, 64, 64, "float16", "input")
    late = Step(Opcode.COPY, ub(64, 64, "float16"), (k.tile(0, 0, 0, 64),))
    soon = Step(Opcode.COPY, ub(16, 64, "float16"), (tile("gm", 16, 64, "float16"),))
    orders = [TileOp("load", "aiv.MTE2", "aiv.MTE2", steps) for steps in ((late, soon), (soon, late))]
    costs = model(device, *orders, tensors=(k,))
    first, second = (costs.of_step(s, "aiv", "MTE2") for s in (late, soon))
    behind, last = (costs.of_op(op).latency_cycles for op in orders)
    assert last == first.latency_cycles > 5000 > second.latency_cycles
    assert behind == first.latency_cycles - second.occupancy_cycles


def test_an_operation_that_only_passes_slots_on_takes_no_time(device: DeviceSpec) -> None:
    assert model(device).of_op(TileOp("pass", "aiv.VECTOR", "aiv.VECTOR", ())) == Cost(0, 0, (), ())


@pytest.mark.parametrize("opcode", [o for o in Opcode if o is not Opcode.MATMUL])
def test_terms_name_the_constants_behind_all_of_the_cycles(opcode: Opcode, device: DeviceSpec) -> None:
    found = cost(device, "aiv", "VECTOR", some_step(opcode))
    keys = {key for key, _ in device.quantities()}
    assert sum(c for _, c in found.terms) == pytest.approx(found.occupancy_cycles, abs=1)
    assert {key for key, _ in found.terms} <= keys


@pytest.mark.parametrize("name", ["flash", "pasa", "fp8_attention"])
def test_a_cost_found_once_is_that_of_every_step_alike(name: str, device: DeviceSpec) -> None:
    schedule = find_schedule(name, device.family)
    problem = Problem(heads=2, seq_q=700, head_dim=128, causal=True)
    program = schedule.program(problem, schedule.tiling(), device, schedule.precision())
    costs = AscendPricing(program, device)
    banks = next(b.banks for b in device.core("aiv").buffers.values() if b.banks)
    seen = 0
    for phase in program.phases:
        for op in (op for block in phase.blocks for op in flatten(phase.body(block))):
            if not op.engine.endswith("VECTOR"):
                continue
            spec, key = device.engine("aiv", "VECTOR"), "cores.aiv.engines.VECTOR"
            assert isinstance(spec, VectorEngine)
            work = op.work or VectorWork()
            assert isinstance(work, VectorWork)
            cycles, terms = vector_cycles(op.steps, spec, banks, key, work.decided)
            found = costs.of_op(replace(op, work=work._replace(hands_on="")))
            assert (found.occupancy_cycles, found.terms) == (cycles, terms)
            seen += 1
    assert seen


def test_sums_that_begin_anew_cost_by_the_columns_of_a_part(device: DeviceSpec) -> None:
    """Both in one program: what tells their costs apart is no shape."""
    x, costs = ub(1, 256), model(device)
    found = []
    for every in (32, 128):
        how = Attributes(order="sequential", every=every)
        op = TileOp("sums", "aiv.VECTOR", "VECTOR", (Step(Opcode.CUMSUM, x, (x,), how),))
        found.append(costs.of_op(op).occupancy_cycles)
    assert found[0] < found[1] / 2
