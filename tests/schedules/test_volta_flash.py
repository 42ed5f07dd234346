"""FlashAttention-2 on Volta: bits through lanes, occupancy, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npusim
from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.errors import BufferOverflowError, SpecError, TilingError
from npusim.library import find_schedule
from npusim.machines.sm.core import occupancy
from npusim.program.ir.check import check
from npusim.program.ir.op import TileOp
from npusim.program.ir.tile_program import Loop
from npusim.program.numerics.executor import execute
from npusim.program.numerics.input_tensors import recipe_source
from npusim.studies.explore import explore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from npusim.program.ir.tile_program import Item, TileProgram

pytestmark = pytest.mark.usefixtures("declared_tiles")

SCHEDULE = find_schedule("volta_flash", "nvidia")
V100 = load_device("v100", {"group_count": "3"})


def problem(seq: int = 256, **changes: Any) -> Problem:
    sizes: dict[str, Any] = {"heads": 2, "kv_heads": 2, "seq_q": seq, "seq_kv": seq, "head_dim": 64, "dtype": "float16"}
    return Problem(**{**sizes, **changes})


def program_of(what: Problem, precision: str = "acc_fp16", **tiling: object) -> TileProgram:
    fields = build_tiling(SCHEDULE.tiling, tiling)
    return SCHEDULE.program(what, fields, V100, SCHEDULE.precision(precision))


def mapped(items: Iterable[Item], change: Callable[[TileOp], TileOp]) -> Iterable[Item]:
    for item in items:
        if isinstance(item, Loop):
            body = item.body
            yield replace(item, body=lambda n, body=body: mapped(body(n), change))
        else:
            yield change(item)


def on_tiles(program: TileProgram) -> TileProgram:
    """Return the same program on whole tiles: no lanes, and P stays where it is."""

    def plain(op: TileOp) -> TileOp:
        steps = tuple(replace(s, attributes=replace(s.attributes, warp=None)) for s in op.steps)
        return TileOp(op.label, op.queue, op.engine, steps, op.handshake)

    (phase,) = program.phases
    body = phase.body
    return replace(program, phases=(replace(phase, body=lambda b: mapped(body(b), plain)),))


def output(program: TileProgram, what: Problem) -> dict[tuple[int, int], Any]:
    done = execute(program, recipe_source(what))
    return {k: v.view(np.uint16).copy() for k, v in done.tensors.written(program.tensors["o"]).items()}


@pytest.mark.parametrize(
    ("precision", "tiling", "changes"),
    [
        ("acc_fp16", {}, {"causal": True}),
        ("acc_fp32", {}, {"causal": True}),
        ("acc_fp16,acc_qk=float32", {"smem": "swizzled"}, {}),
        ("acc_fp32,acc_qk=float16", {"smem": "plain", "stages": 2}, {"kv_heads": 1}),
        ("acc_fp16", {"arrangement": "2x2", "block_q": 64}, {"seq": 200, "causal": True}),
        ("acc_fp32", {"arrangement": "1x4", "block_q": 64, "access_bytes": 8, "padding": 4}, {"seq": 130}),
        ("acc_fp32", {"warps": 8, "block_q": 256, "block_kv": 16}, {"seq": 300, "head_dim": 128}),
        ("acc_fp32", {"q": "shared", "smem": "swizzled"}, {"seq": 260, "head_dim": 128, "causal": True}),
        # Fewer rows, or keys, than groups of warps: some only keep step.
        ("acc_fp16", {"warps": 8, "block_q": 256}, {"seq": 257}),
        ("acc_fp32", {"warps": 16, "block_q": 512, "q": "shared"}, {"seq": 66, "seq_q": 3, "causal": True}),
        ("acc_fp16", {}, {"seq_q": 1, "seq": 333, "head_dim": 80}),
        (
            "acc_fp32,acc_qk=float16",
            {},
            {"seq": 130, "head_dim": 32, "value_head_dim": 96, "causal_offset": 10, "seq_q": 90, "causal": True},
        ),
    ],
)
def test_bits_through_lanes_are_those_of_whole_tiles(
    precision: str, tiling: dict[str, object], changes: dict[str, Any]
) -> None:
    what = problem(**changes)
    program = program_of(what, precision, **tiling)
    check(program, V100.flags)
    lanes, tiles = output(program, what), output(on_tiles(program), what)
    assert lanes.keys() == tiles.keys() == {(0, 0), (0, 1)}
    for head, bits in lanes.items():
        np.testing.assert_array_equal(bits, tiles[head])


def test_it_is_flash_with_a_precision_of_its_own() -> None:
    """`flash` with the same formats and choices: the same bits and cycles on the same device."""
    what = problem(200, causal=True)
    text = "scores=float16,product=float16,output=float16,exp_variant=exp2.correct"
    own, other = (
        npusim.run(name, hw="v100", problem=what, precision=precision, rows="all", trace_groups=())
        for name, precision in (("volta_flash", "acc_fp16"), ("flash", text))
    )
    np.testing.assert_array_equal(own.output.view(np.uint16), other.output.view(np.uint16))
    assert own.cycles == other.cycles


def test_products_that_start_anew_for_each_tile_are_attention_too() -> None:
    fresh = npusim.run("flash", hw="v100", problem=problem(), precision="accumulate=fresh", rows="all", trace_groups=())
    assert fresh.numerics is not None
    assert fresh.numerics.error.rmse < 1e-2
    assert fresh.cycles > 0


def test_accumulators_are_what_the_precision_says() -> None:
    found = {
        name: set(npusim.run("volta_flash", problem=problem(128), precision=name, trace_groups=()).numerics.arithmetic)
        for name in ("acc_fp16", "acc_fp32", "acc_fp16,acc_qk=float32")
    }
    half, single = "volta.mma.k4.f16.f16", "volta.mma.k4.f16.f32"
    assert found == {"acc_fp16": {half}, "acc_fp32": {single}, "acc_fp16,acc_qk=float32": {half, single}}


def test_float16_scores_overflow_where_float32_ones_do_not() -> None:
    rng = np.random.default_rng(7)
    q, k, v = (rng.uniform(-1, 1, (1, 1, 128, 64)).astype(np.float16) for _ in range(3))
    q, k = q + np.float16(36), k + np.float16(36)  # Q K^T about 64 * 36 * 36 = 83k > 65504
    runs = {
        name: npusim.run(
            "volta_flash", tensors={"q": q, "k": k, "v": v}, causal=False, precision=name, trace_groups=()
        ).numerics
        for name in ("acc_fp16", "acc_fp32")
    }
    assert runs["acc_fp16"].overflow_counts
    assert runs["acc_fp16"].first_events[0].operation.startswith("S.mma")
    assert not runs["acc_fp32"].overflow_counts
    assert runs["acc_fp32"].error.rmse < 1e-2


def test_only_float32_accumulators_and_other_arrangements_move_p() -> None:
    def labels(precision: str, **tiling: object) -> set[str]:
        program = program_of(problem(), precision, **tiling)
        (phase,) = program.phases
        found: set[str] = set()
        tuple(mapped_labels(phase.body(phase.blocks[0]), found))
        return found

    assert "P.exchange" not in labels("acc_fp16")
    assert "P.exchange" in labels("acc_fp32")
    assert "P.exchange" in labels("acc_fp16", arrangement="2x2")
    assert "P.exchange" not in labels("acc_fp32,acc_qk=float16")


def mapped_labels(items: Iterable[Item], found: set[str]) -> Iterable[None]:
    for item in items:
        if isinstance(item, Loop):
            yield from mapped_labels(item.body(item.indices[0]), found)
        else:
            found.add(item.label)
            yield None


@pytest.mark.parametrize(
    ("precision", "tiling", "error", "message"),
    [
        ("acc_fp32", {"block_kv": 128}, BufferOverflowError, r"registers: Q 32 \+ S and P 128 \+ O 64 .* allowed: 255"),
        ("acc_fp32", {"block_q": 1024, "warps": 32}, BufferOverflowError, r"multiprocessor has 65,536"),
        ("acc_fp16", {"stages": 4, "block_kv": 96}, BufferOverflowError, r"shared memory: K .* > 96 KiB of a block"),
        ("acc_fp16", {"block_q": 96}, TilingError, r"96 rows are not a multiple of 128 \(4 warps of 32\)"),
        ("acc_fp16", {"block_kv": 56, "arrangement": "1x4", "block_q": 64}, TilingError, "not a multiple of 32"),
        ("acc_fp32", {"exchange": "none"}, TilingError, r"32 of 64 values are in the right lane.*not allowed"),
        ("acc_fp16", {"exchange": "none", "arrangement": "2x2"}, TilingError, "exchange is not allowed"),
        ("acc_fp16", {"padding": 4}, TilingError, r"136 bytes, so that accesses of 16 bytes \(LDS.128\) would be mis"),
        ("acc_fp16", {"padding": 2, "access_bytes": 8}, TilingError, "pad by a multiple of 4 elements$"),
        ("acc_fp16", {"residents": 4}, TilingError, r"residents: 4 blocks, but 3 resident blocks"),
        ("acc_fp16", {"warps": 6}, TilingError, "warps"),
        ("acc_fp16,acc_pv=bfloat16", {}, TilingError, "accumulator bfloat16: .* float16 or float32"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    precision: str, tiling: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        program_of(problem(1024), precision, **tiling)


def test_rows_that_cannot_be_swizzled_are_refused_with_a_way_out() -> None:
    with pytest.raises(TilingError, match=r"smem=swizzled: rows of 80 elements .* at least 64; use smem=padded"):
        program_of(problem(head_dim=80), smem="swizzled")


def test_other_inputs_and_other_devices_are_refused() -> None:
    with pytest.raises(TilingError, match="multiplies float16, not bfloat16"):
        program_of(problem(dtype="bfloat16"))
    with pytest.raises(SpecError, match="runs on nvidia"):
        npusim.run("volta_flash", hw="ascend_910b2", problem=problem())
    with pytest.raises(TilingError, match=r"arrangement, smem: no effect on h200, .* remove them"):
        npusim.run("flash", hw="h200", problem=problem(), tiling={"arrangement": "2x2", "smem": "plain"})
    with pytest.raises(SpecError, match="h200 has no m8n8k4"):
        npusim.run("volta_flash", hw="h200", problem=problem())


# ---------------------------------------------------------------- occupancy


@pytest.mark.parametrize("warps", [4, 8, 16, 32])
@pytest.mark.parametrize("registers", [24, 63, 64, 127, 128, 200, 231])
@pytest.mark.parametrize("shared", [0, 1000, 18_432, 49_152, 98_304])
def test_occupancy_is_the_most_that_fits(warps: int, registers: int, shared: int) -> None:
    issue: Any = V100.engine("sm", "WARPS")

    def fits(blocks: int) -> bool:
        # One warp has its registers in units of 256; a block its memory in units of 256 bytes.
        of_warp = -(-(registers + 24) * 32 // 256) * 256
        memory = -(-shared // 256) * 256
        return (
            blocks * warps * of_warp <= 65_536 and blocks * memory <= 98_304 and blocks * warps <= 64 and blocks <= 32
        )

    needs = issue, 98_304, warps, {"all": registers}, {"K": shared}
    if not fits(1):
        with pytest.raises(BufferOverflowError):
            occupancy(*needs)
        return
    found = occupancy(*needs)
    assert fits(found.blocks)
    assert not fits(found.blocks + 1)
    assert found.limits[found.limit] == found.blocks


def test_fields_left_open_are_the_largest_that_fit() -> None:
    def chosen(head_dim: int, precision: str, **tiling: object) -> str:
        return program_of(problem(head_dim=head_dim), precision, **tiling).notes[0].split("; ")[1]

    assert chosen(64, "acc_fp32") == "tiles of 128 x 64, Q in registers"
    assert chosen(128, "acc_fp16") == "tiles of 128 x 64, Q in registers"
    assert chosen(128, "acc_fp32") == "tiles of 128 x 32, Q in shared memory"
    assert chosen(64, "acc_fp16", q="shared") == "tiles of 128 x 64, Q in shared memory"


def test_float32_accumulators_cost_a_resident_block() -> None:
    notes = {p: program_of(problem(), p).notes[0] for p in ("acc_fp16", "acc_fp32")}
    assert notes["acc_fp16"].startswith("3 resident blocks of 4 warps (limit: registers), 156 registers")
    assert notes["acc_fp32"].startswith("2 resident blocks of 4 warps (limit: registers), 224 registers")


# ---------------------------------------------------------------- as users meet it


def test_it_runs_on_its_own_device_and_its_fields_can_be_explored() -> None:
    assert npusim.run("volta_flash", problem=problem(), numerics=False).device.name == "v100"
    fields = {"block_kv": (32, 64), "smem": ("plain", "padded"), "arrangement": ("4x1", "2x2")}
    found = explore("volta_flash", fields, problem=problem(512), exhaustive=True)
    assert len(found.feasible) == 8
    # Rows that follow one another without a gap make banks conflict: of two tiles that differ so, the padded is faster.
    cycles = {tuple(sorted(o.point.items())): o.cycles for o in found.feasible}
    plain = {key: value for key, value in cycles.items() if ("smem", "plain") in key}
    padded = {tuple((n, "padded" if n == "smem" else v) for n, v in key): value for key, value in plain.items()}
    assert all(cycles[key] < value for key, value in padded.items())


def test_accumulators_can_be_explored() -> None:
    fields = {"acc_qk": ("float16", "float32"), "acc_pv": ("float16", "float32"), "block_kv": (64,)}
    found = explore("volta_flash", fields, problem=problem(512))
    cycles = {(o.point["acc_qk"], o.point["acc_pv"]): o.cycles for o in found.outcomes}
    assert len(set(cycles.values())) == 4
    presets = explore("volta_flash", {"precision": ("acc_fp16", "acc_fp32"), "block_kv": (64,)}, problem=problem(512))
    assert [o.cycles for o in presets.outcomes] == [cycles["float16", "float16"], cycles["float32", "float32"]]
    mixed = explore(
        "volta_flash", {"acc_qk": ("float16",), "block_kv": (64,)}, precision="acc_fp32", problem=problem(512)
    )
    assert [o.cycles for o in mixed.outcomes] == [cycles["float16", "float32"]]
    with pytest.raises(SpecError, match="'acc_fp8': not a preset"):
        explore("volta_flash", {"precision": ("acc_fp16", "acc_fp8")}, problem=problem(512))
    bad = explore("volta_flash", {"acc_pv": ("bfloat16", "float16")}, problem=problem(512))
    assert ["accumulator bfloat16" in o.reason for o in bad.infeasible] == [True]


def test_a_run_says_that_no_published_kernel_is_as_fast() -> None:
    own = npusim.run("volta_flash", seq=512, numerics=False)
    published = npusim.run("volta_flash", seq=512, tiling={"kernel": "xformers"}, precision="acc_fp32", numerics=False)
    assert any("about twice as fast as any published kernel; kernel=xformers" in note for note in own.notes)
    assert not any("published kernel" in note for note in published.notes)
