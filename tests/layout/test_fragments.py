"""Lane maps and products on registers, against PTX's formulas, CuTe's atoms and plain A·B + C."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from layout.execute import from_registers, gather, scatter, to_registers
from layout.warp import mma, warp_product
from npusim.errors import LayoutError
from npusim.formats.layout.fragment import Arrangement, arrangement
from npusim.formats.layout.instruction import instruction

if TYPE_CHECKING:
    from npusim.formats.layout.fragment import Fragment
    from npusim.formats.layout.instruction import MmaInstruction

AMPERE = [instruction(name, acc=acc) for name in ("m16n8k8", "m16n8k16") for acc in ("f16", "f32")]
VOLTA = [
    instruction("m8n8k4", acc=acc, a=a, b=b) for acc in ("f16", "f32") for a in ("row", "col") for b in ("row", "col")
]
ALL = [*VOLTA, *AMPERE]
LANES = range(32)


def ptx(mma: MmaInstruction, fragment: Fragment, lane: int, i: int) -> tuple[int, int]:
    """PTX ISA, "Matrix Fragments for ..." of each shape, as volta.md §1 and §2 quote it."""
    high, low = 4 * (lane >= 16), lane % 4
    if mma.name == "m8n8k4":
        match fragment.operand, fragment.order:
            case "A", "row":
                return low + high, i
            case "A", "col":
                return i + high, low
            case "B", "col":
                return i, low + high
            case "B", "row":
                return low, i + high
        if mma.accumulator == "f16":
            return low + high, i
        return (lane & 1) + (i & 2) + high, (i & 4) + (lane & 2) + (i & 1)
    g, t = lane >> 2, lane % 4
    match fragment.operand:
        case "A" if mma.k == 8:
            return g + 8 * (i >= 2), 2 * t + (i & 1)
        case "A":
            return g + 8 * (i in {2, 3, 6, 7}), 2 * t + (i & 1) + 8 * (i >= 4)
        case "B":
            return 2 * t + (i & 1) + 8 * (i >= 2), g
    return g + 8 * (i >= 2), 2 * t + (i & 1)


@pytest.mark.parametrize("mma", ALL, ids=str)
def test_maps_equal_ptx_and_are_bijections(mma: MmaInstruction) -> None:
    for fragment in (mma.a, mma.b, mma.c):
        seen = set()
        for lane in LANES:
            group = lane % 16 // 4 if mma.name == "m8n8k4" else 0
            assert fragment.group(lane) == group
            for i in range(fragment.values):
                element = fragment.coordinate(lane, i)
                assert element == ptx(mma, fragment, lane, i)
                assert fragment.holder(*element, group) == (lane, i)
                seen.add((group, *element))
        assert len(seen) == 32 * fragment.values == fragment.groups * fragment.rows * fragment.columns


def test_maps_equal_the_atoms_of_tensor_layouts() -> None:
    atoms = pytest.importorskip("tensor_layouts.atoms_nv")
    letter = {("A", "row"): "T", ("A", "col"): "N", ("B", "row"): "T", ("B", "col"): "N"}
    for instr in VOLTA:
        kind = letter["A", instr.a.order] + letter["B", instr.b.order]
        out = instr.accumulator.upper()
        atom = getattr(atoms, f"SM70_8x8x4_{out}F16F16{out}_{kind}")
        assert str(atom.a_layout).replace(" ", "").startswith(str(instr.a.layout))
        assert str(atom.c_layout).replace(" ", "").startswith(str(instr.c.layout))
        for thread in range(8):
            for value in range(4):  # CuTe writes B as (n, k)
                k, n = instr.b.coordinate(instr.b.lane(thread), value)
                assert atom.b_layout(thread, value) == n + 8 * k


def test_registers_and_steps_are_those_of_the_machine() -> None:
    narrow, wide = instruction("m8n8k4", acc="f16"), instruction("m8n8k4", acc="f32")
    assert (narrow.a.registers, narrow.b.registers) == (2, 2)
    assert (narrow.c.registers, wide.c.registers) == (4, 8)
    assert (len(narrow.steps), len(wide.steps)) == (2, 4)  # HMMA.884 (volta.md §5)
    assert wide.steps == ((0, 0), (2, 0), (0, 4), (2, 4))
    assert instruction("m16n8k16").c.registers == 4


def test_butterflies_of_a_row_are_none_one_and_two() -> None:
    assert instruction("m8n8k4", acc="f16").c.butterflies() == ()
    assert instruction("m8n8k4", acc="f32").c.butterflies() == (2,)
    assert instruction("m16n8k16").c.butterflies() == (1, 2)
    for instr in ALL:
        masks = instr.c.butterflies()
        for row in range(instr.c.rows):
            lanes = {instr.c.holder(row, column)[0] for column in range(instr.c.columns)}
            reached = {min(lanes)}
            for mask in masks:
                reached |= {lane ^ mask for lane in reached}
            assert reached == lanes


# ---------------------------------------------------------------- products


def tiles(fragment: Fragment, seed: int) -> np.ndarray[Any, Any]:
    shape = (3, fragment.groups, fragment.rows, fragment.columns)
    return np.random.default_rng(seed).integers(-9, 10, shape)


@pytest.mark.parametrize("instr", ALL, ids=str)
def test_products_on_registers_equal_a_b_plus_c(instr: MmaInstruction) -> None:
    a, b, c = (tiles(f, seed) for seed, f in enumerate((instr.a, instr.b, instr.c)))
    registers = (gather(f, t) for f, t in zip((instr.a, instr.b, instr.c), (a, b, c), strict=True))
    d = scatter(instr.c, mma(instr, *registers))
    assert np.array_equal(d, a @ b + c)


@pytest.mark.parametrize("instr", VOLTA, ids=str)
def test_a_product_step_by_step_and_lane_by_lane_is_the_same(instr: MmaInstruction) -> None:
    """HMMA.884 as it runs: every lane writes its register pair of each step, from A and B lanes."""
    a, b, c = (gather(f, tiles(f, 7))[0] for f in (instr.a, instr.b, instr.c))
    d = c.copy()
    each = instr.c.values // len(instr.steps)
    rows = each  # 64 bits down the rows of a B half
    for step, (first_row, first_column) in enumerate(instr.steps):
        for lane in LANES:
            quad_pair = instr.c.group(lane)
            for value in range(each * step, each * (step + 1)):
                row, column = instr.c.coordinate(lane, value)
                assert 4 * (lane >= 16) + first_row <= row < 4 * (lane >= 16) + first_row + rows
                assert first_column <= column < first_column + 4
                for k in range(4):
                    la, va = instr.a.holder(row, k, quad_pair)
                    lb, vb = instr.b.holder(k, column, quad_pair)
                    assert (la >= 16) == (lane >= 16), "rows of A come from the own threadgroup"
                    assert (lb >= 16) == first_column // 4
                    d[lane, value] += a[la, va] * b[lb, vb]
    assert np.array_equal(d, mma(instr, a, b, c))


@pytest.mark.parametrize("order", ["group", "lane"])
@pytest.mark.parametrize("where", ["4x1", "2x2", "1x4"])
@pytest.mark.parametrize("instr", VOLTA, ids=str)
def test_a_warps_product_of_whole_tiles(instr: MmaInstruction, where: str, order: str) -> None:
    spread = arrangement(where, order)
    rng = np.random.default_rng(5)
    m, n, k = 64, 32, 8
    a, b, c = (rng.integers(-9, 10, shape) for shape in ((m, k), (k, n), (m, n)))
    operands = zip((instr.a, instr.b, instr.c), (a, b, c), strict=True)
    held = [to_registers(f, spread, tile) for f, tile in operands]
    assert np.array_equal(from_registers(instr.a, spread, held[0]), a)
    assert np.array_equal(from_registers(instr.b, spread, held[1]), b)
    d = warp_product(instr, *held)
    assert np.array_equal(from_registers(instr.c, spread, d), a @ b + c)


def test_m16n8k16_multiplies_whole_tiles_too() -> None:
    instr, one = instruction("m16n8k16"), Arrangement(1, 1)
    rng = np.random.default_rng(5)
    a, b, c = (rng.integers(-9, 10, s) for s in ((2, 32, 48), (48, 24), (2, 32, 24)))
    operands = zip((instr.a, instr.b, instr.c), (a, b, c), strict=True)
    held = [to_registers(f, one, tile) for f, tile in operands]
    assert np.array_equal(from_registers(instr.c, one, warp_product(instr, *held)), a @ b + c)


def test_products_take_any_arithmetic() -> None:
    from npusim.formats import matmul

    instr = instruction("m8n8k4", acc="f16")
    rng = np.random.default_rng(3)
    a, b, c = (rng.normal(size=(4, *s)).astype(np.float16) for s in ((8, 4), (4, 8), (8, 8)))

    def volta(x: Any, y: Any, z: Any) -> Any:
        return matmul(x, y, z, arithmetic="volta.mma.k4.f16.f16")

    registers = (gather(f, t) for f, t in zip((instr.a, instr.b, instr.c), (a, b, c), strict=True))
    d = scatter(instr.c, mma(instr, *registers, multiply=volta))
    assert d.tobytes() == volta(a, b, c).tobytes()


@pytest.mark.parametrize("acc", ["f16", "f32"])
def test_bits_of_a_warps_product_are_those_of_the_tile(acc: str) -> None:
    """Layouts change nothing but the lanes: the same k4 blocks in the same order."""
    from npusim.formats import matmul

    def volta(x: Any, y: Any, z: Any) -> Any:
        return matmul(x, y, z, arithmetic=f"volta.mma.k4.f16.{acc}")

    instr, spread = instruction("m8n8k4", acc=acc), arrangement("4x1", "lane")
    rng = np.random.default_rng(4)
    a, b = (rng.normal(size=(32, 64)).astype(np.float16), rng.normal(size=(64, 16)).astype(np.float16))
    c = rng.normal(size=(32, 16)).astype(np.float16 if acc == "f16" else np.float32)
    operands = zip((instr.a, instr.b, instr.c), (a, b, c), strict=True)
    held = [to_registers(f, spread, tile) for f, tile in operands]
    d = from_registers(instr.c, spread, warp_product(instr, *held, multiply=volta))
    assert d.tobytes() == volta(a, b, c).tobytes()


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "m8n8k8"}, "unknown instruction 'm8n8k8': choose one of m8n8k4, m16n8k8, m16n8k16"),
        ({"name": "m8n8k4", "acc": "bf16"}, "accumulator 'bf16': choose f16 or f32"),
        ({"name": "m8n8k4", "b": "column"}, "B 'column': choose row or col"),
        ({"name": "m16n8k16", "a": "col"}, "A is always row and B col"),
    ],
)
def test_unknown_instructions_are_refused(arguments: dict[str, str], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        instruction(**arguments)


def test_what_does_not_fit_is_refused() -> None:
    volta = instruction("m8n8k4")
    with pytest.raises(LayoutError, match="no operand 'q'"):
        volta.operand("q")
    with pytest.raises(LayoutError, match="lanes 0 to 31, not 32"):
        volta.c.coordinate(32, 0)
    with pytest.raises(LayoutError, match="values 0 to 3, not 4"):
        volta.a.coordinate(0, 4)
    with pytest.raises(LayoutError, match=r"no element \(8, 0\)"):
        volta.c.holder(8, 0)
    with pytest.raises(LayoutError, match=r"registers of shape \(32, 4\), wanted \(..., 32, 8\)"):
        scatter(volta.c, np.zeros((32, 4)))
    with pytest.raises(LayoutError, match="A has 2 fragments along k, B 1"):
        one = np.zeros((1, 1, 32, 4))
        warp_product(volta, np.zeros((1, 2, 32, 4)), one, np.zeros((1, 1, 32, 8)))


def test_tiles_that_do_not_divide_among_quad_pairs_and_warps_are_refused() -> None:
    volta, stacked = instruction("m8n8k4"), arrangement("4x1")
    assert stacked.repeats(volta.c, 128, 64, warps=(2, 1)) == (2, 8)
    with pytest.raises(LayoutError, match=r"in 4x1: 48 rows are not a multiple of 32 \(1 warps of 32\)"):
        stacked.repeats(volta.c, 48, 64)
    with pytest.raises(LayoutError, match=r"96 rows are not a multiple of 64 \(2 warps of 32\)"):
        stacked.repeats(volta.c, 96, 64, warps=(2, 1))
    with pytest.raises(LayoutError, match="12 columns are not a multiple of 8"):
        to_registers(volta.c, stacked, np.zeros((32, 12)))
    with pytest.raises(LayoutError, match="arrangement 2x1: m8n8k4 has 4 groups of lanes, not 2"):
        Arrangement(2, 1).tile(volta.c)
    with pytest.raises(LayoutError, match="has one group only"):
        Arrangement(1, 1, "lane").tile(instruction("m16n8k16").c)


@pytest.mark.parametrize("text", ["4", "x4", "0x4", "4x-1", "4x1x1"])
def test_arrangements_are_written_m_x_n(text: str) -> None:
    with pytest.raises(LayoutError, match="such as 4x1"):
        arrangement(text)


def test_row_orders_are_two() -> None:
    with pytest.raises(LayoutError, match="choose group or lane"):
        arrangement("4x1", "quad")


def test_by_lane_a_lane_holds_the_row_of_its_number() -> None:
    by_lane, a = arrangement("4x1", "lane"), instruction("m8n8k4").a
    assert [by_lane.element(a, lane, 0)[0] for lane in LANES] == list(LANES)
