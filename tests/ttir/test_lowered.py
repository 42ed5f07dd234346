"""Orders of sums by layouts in TTGIR, and contraction in PTX and machine code, on short texts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from npusim.kernels.triton.compiled_choices import UNKNOWN, orders_of
from npusim.kernels.triton.compiled_choices import contraction_of as whole_of
from npusim.kernels.triton.compiler import Compiled


def contraction_of(ptx: str, ttgir: str, assembled: Callable[[], list[str]]) -> str:
    return whole_of(ptx, ttgir, assembled).digest


REDUCTION = """
      %s = "tt.reduce"(%p) <{{axis = {axis} : i32}}> ({{
      ^bb0(%a: f32 loc(callsite(#loc1 at #loc2)), %b: f32 loc(callsite(#loc1 at #loc2))):
        %c = arith.{by} %a, %b : f32 loc(#loc4)
        tt.reduce.return %c : f32 loc(#loc3)
      }}) : (tensor<64x64xf32{layout}>) -> tensor<64xf32> loc(#loc3)"""
PLACES = """
#loc1 = loc("/somewhere/standard.py":263:15)
#loc2 = loc("/home/kernel.py":20:30)
#loc3 = loc(callsite(#loc1 at #loc2))
#loc4 = loc("total"(#loc3))"""
MMA = "#mma = #ttg.nvidia_mma<{{versionMajor = {}, versionMinor = 0, warpsPerCTA = [{}], instrShape = [{}]}}>"
ROW = "standard.py:263:15 at kernel.py:20:30[64x64]"


def text_of(layouts: str, *reductions: tuple[str, int, str]) -> str:
    made = (REDUCTION.format(layout=layout, axis=axis, by=by) for layout, axis, by in reductions)
    return "\n".join([layouts, *made, PLACES])


@pytest.mark.parametrize(
    ("layouts", "layout", "axis", "order"),
    [
        (MMA.format(2, "1, 4", "16, 8"), ", #mma", 1, "lanes_2x4x4"),
        (MMA.format(2, "4, 1", "16, 8"), ", #mma", 1, "mma_lanes"),
        (MMA.format(2, "2, 2", "16, 8"), ", #mma", 0, "lanes_1x8x2_16"),
        (MMA.format(3, "4, 2", "16, 32, 16"), ", #mma", 1, "lanes_2x4x2_32"),
        # One warp has all 64 columns: the other has a copy.
        (MMA.format(3, "4, 2", "16, 64, 16"), ", #mma", 1, "mma_lanes"),
        (
            "#b = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [4, 8], warpsPerCTA = [2, 2]}>",
            ", #b",
            1,
            "lanes_4x8x2",
        ),
        (
            "#b = #ttg.blocked<{sizePerThread = [1, 4, 1], threadsPerWarp = [4, 8, 1], warpsPerCTA = [2, 2, 1], "
            "order = [1, 0, 2]}>",
            ", #ttg.slice<{dim = 0, parent = #b}>",
            0,
            "lanes_4x8x2",
        ),
        ("#l = #ttg.linear<{register = [[0, 32]], lane = [[1, 0]], warp = [], block = []}>", ", #l", 1, UNKNOWN),
        ("", "", 1, UNKNOWN),
    ],
)
def test_the_order_of_a_sum_is_that_of_its_layout(layouts: str, layout: str, axis: int, order: str) -> None:
    assert orders_of(text_of(layouts, (layout, axis, "addf"))) == {ROW: order}
    assert Compiled("", orders={ROW: order}, contraction="x").choices == UNKNOWN or order != UNKNOWN


def test_a_thread_of_later_releases_adds_its_own_as_a_tree() -> None:
    layouts = MMA.format(2, "4, 1", "16, 8"), MMA.format(2, "1, 4", "16, 8")
    for layout, order in zip(layouts, ("trees_2x4x1", "trees_2x4x4"), strict=True):
        assert orders_of(text_of(layout, (", #mma", 1, "addf")), is_tree=True) == {ROW: order}


def test_maxima_have_no_order_and_one_place_has_one() -> None:
    layouts = "\n".join([MMA.format(2, "1, 4", "16, 8"), MMA.format(2, "4, 1", "16, 8").replace("#mma =", "#mma1 =")])
    assert orders_of(text_of(layouts, (", #mma", 1, "maxnumf"))) == {}
    twice = text_of(layouts, (", #mma", 1, "addf"), (", #mma1", 1, "addf"))
    assert orders_of(twice) == {ROW: UNKNOWN}
    same = text_of(layouts, (", #mma", 1, "addf"), (", #mma", 1, "addf"))
    assert orders_of(same) == {ROW: "lanes_2x4x4"}
    assert orders_of(same.replace("tt.reduce", "tt.scan")) == {ROW: "lanes_2x4x4"}


HEAD = '.file\t1 "/home/kernel.py"\n.loc 1 7 9\nld.global.v2.b32 {%r1, %r2}, [%rd1];\nmov.b32 {%rs1, %rs2}, %r1;\n'


def ptx_of(*lines: tuple[str, str]) -> str:
    """Return PTX of instructions with their lines and columns."""
    return HEAD + "\n".join(f".loc 1 {place}\n\t{line};" for place, line in lines)


def unasked() -> list[str]:
    raise AssertionError("nothing is left to contract")


FIRST = [("9 20", "mul.bf16 %rs5, %rs3, %rs4"), ("9 15", "fma.rn.bf16 %rs6, %rs1, %rs2, %rs5")]
SECOND = [("9 10", "mul.bf16 %rs5, %rs1, %rs2"), ("9 15", "fma.rn.bf16 %rs6, %rs3, %rs4, %rs5")]


def test_which_product_an_addition_takes_in_is_told_apart_and_packing_is_not() -> None:
    first, second = (contraction_of(ptx_of(*x), "", unasked) for x in (FIRST, SECOND))
    assert first != second
    packed = [(at, x.replace("bf16", "bf16x2").replace("%rs", "%r")) for at, x in FIRST]
    assert contraction_of(ptx_of(*packed), "", unasked) == first
    signs = [FIRST[0], ("9 15", "neg.bf16 %rs7, %rs5"), ("9 15", "fma.rn.bf16 %rs6, %rs1, %rs2, %rs7")]
    assert contraction_of(ptx_of(*signs), "", unasked) == first
    # The same instructions for more elements.
    assert contraction_of(ptx_of(*FIRST, *FIRST), "", unasked) == first
    moved = [FIRST[0], ("9 15", "mov.b16 %rs9, %rs5"), (FIRST[1][0], FIRST[1][1].replace("%rs5", "%rs9"))]
    assert contraction_of(ptx_of(*moved), "", unasked) == first


def test_an_addition_says_which_product_it_adds() -> None:
    for lines, stays in ((FIRST, "kernel.py:9:20"), (SECOND, "kernel.py:9:10"), (FIRST[1:], "")):
        assert whole_of(ptx_of(*lines), "", unasked).addends == {"kernel.py:9:15": stays}
    more = [(at, x.replace("%rs5", "%rs7").replace("%rs6", "%rs8")) for at, x in SECOND]
    assert whole_of(ptx_of(*FIRST, *more), "", unasked).addends == {}


def test_elements_that_are_contracted_otherwise_than_others_make_a_class_of_their_own() -> None:
    addition = '%x = arith.addf %y, %z : tensor<4xbf16> loc(#loc1)\n#loc1 = loc("/home/kernel.py":9:15)'
    more = [(at, x.replace("%rs5", "%rs7").replace("%rs6", "%rs8")) for at, x in SECOND]
    one, other = ptx_of(*FIRST, *more), ptx_of(*more, *FIRST)
    made = {contraction_of(x, addition, unasked) for x in (one, other, ptx_of(*FIRST), ptx_of(*SECOND))}
    assert len(made) == 4
    # Two additions of one line, each in one form for all elements.
    two = addition.replace("\n", "\n%w = arith.addf %y, %z : tensor<4xbf16> loc(#loc1)\n", 1)
    assert contraction_of(one, two, unasked) == contraction_of(other, two, unasked)


def test_a_library_s_own_fma_is_no_contraction() -> None:
    library = ("9 15", "fma.rn.ftz.f32 %f4, %f1, %f2, %f3")
    both = [contraction_of(ptx_of(*FIRST, *more), "", unasked) for more in ((), (library,))]
    assert both[0] == both[1]
    flushed = ("9 20", "mul.ftz.f32 %f3, %f1, %f2")
    assert len({contraction_of(ptx_of(*x), "", unasked) for x in ((flushed,), (flushed, library))}) == 2


def test_what_ptxas_contracts_further_is_part_of_the_class() -> None:
    left = ptx_of(("9 20", "div.full.f32 %f3, %f1, %f2"), ("9 15", "add.f32 %f4, %f3, %f5"))
    line = '\t//## File "/home/kernel.py", line 9\n'

    def assembled(of_both: str) -> str:
        return contraction_of(left, "", lambda: [line + text for text in (of_both, "FADD R1, R2, R3 ;")])

    assert assembled("FADD R1, R2, R3 ;") != assembled("FFMA R1, R2, R3, R4 ;")
    assert assembled("FADD R1, R2, R3 ;") == contraction_of(left, "", list)  # both are the same code
    rounded = left.replace("div.full", "div.rn")
    contraction_of(rounded, "", unasked)


def test_the_arithmetic_of_products_is_part_of_the_class() -> None:
    one = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};"
    group = "wgmma.fence.sync.aligned;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1;"
    assert contraction_of(one, "", unasked) == contraction_of(group, "", unasked)
    eight, of_group = (x.replace("k16", "k32").replace("bf16", "e4m3") for x in (one, group))
    assert contraction_of(eight, "", unasked) != contraction_of(of_group, "", unasked)


def test_a_sum_that_takes_products_in_is_told_by_the_product_that_begins_it() -> None:
    begins, combines = ("9 20", "mul.f32 %f3, %f1, %f1"), "fma.rn.f32 %f{}, %f{}, %f{}, %f{}"
    chain = [begins, ("20 5", combines.format(4, 2, 2, 3)), ("20 5", combines.format(6, 5, 5, 4))]
    assert whole_of(ptx_of(*chain), "", unasked).sums == {"kernel.py:9:20": "kernel.py:20:5"}
    plain = [
        ("9 20", "mul.rn.f32 %f3, %f1, %f1"),
        ("20 5", "add.rn.f32 %f4, %f2, %f3"),
        ("20 5", "add.rn.f32 %f6, %f5, %f4"),
    ]
    assert whole_of(ptx_of(*plain), "", unasked).sums == {}
    assert whole_of(ptx_of(*FIRST), "", unasked).sums == {"kernel.py:9:20": "kernel.py:9:15"}
