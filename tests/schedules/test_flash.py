"""Flash on the 910B2: it builds, passes all checks, and says what does not fit."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ir.toy import flatten

from npusim import formats
from npusim.config.load import load_device, load_workload
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.errors import BufferOverflowError, NpusimError, SpecError, TilingError
from npusim.library import find_schedule
from npusim.program.ir.check import check
from npusim.program.ir.op import Opcode
from npusim.program.ir.tile import GlobalTile
from npusim.program.numerics.executor import execute
from npusim.run import run

if TYPE_CHECKING:
    from collections.abc import Callable

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import TileProgram

pytestmark = pytest.mark.usefixtures("declared_tiles")


def workload(name: str, **changes: Any) -> dict[str, Any]:
    """Return a packaged workload's problem as fields."""
    return load_workload(name).problem(**changes).model_dump()


PROBLEMS: dict[str, dict[str, Any]] = {
    "pangu_38b": workload("pangu_38b"),
    "llama2_70b, shared keys": workload("llama2_70b", seq=1024),
    "svd, head 64": workload("svd_img2vid", seq=2304),
    "deit, ragged 197": workload("deit_b"),
    "decode": workload("qwen2_7b", seq_q=1, seq_kv=4097),
    "one row, one key": {"heads": 1, "seq_q": 1, "seq_kv": 1, "head_dim": 64},
}
TILINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "small": {"block_q": 64, "block_kv": 128, "depth": 1},
    "odd": {"block_q": 112, "block_kv": 208, "vector_rows": 11, "depth": 3},
    "no lead": {"block_kv": 256, "depth": 0},
}


#: Every problem with the default tiling, every tiling with those of few block shapes.
CHECKED = [
    (p, t) for p in PROBLEMS for t in TILINGS if t == "default" or p not in ("pangu_38b", "llama2_70b, shared keys")
]


@pytest.mark.parametrize(("problem", "tiling"), CHECKED)
def test_flash_passes_all_checks_and_stays_within_every_memory(
    problem: str, tiling: str, build_flash: Callable[..., TileProgram], device: DeviceSpec
) -> None:
    program = build_flash(TILINGS[tiling], **PROBLEMS[problem])
    check(program, device.flags)
    for name, (used, there) in program.occupancy_bytes().items():
        assert used <= there, name


@pytest.mark.parametrize("problem", PROBLEMS)
def test_blocks_of_one_shape_run_the_same_operations(problem: str, build_flash: Callable[..., TileProgram]) -> None:
    """What `Phase.shape` promises: the same labels, queues, opcodes, sizes, formats and constants."""
    fields = {**PROBLEMS[problem], "batch": 1, "heads": 2, "kv_heads": 1}
    fields["seq_q"] = min(fields["seq_q"], 700)
    fields["causal_offset"] = max(0, fields["seq_kv"] - fields["seq_q"])
    phase = build_flash({"block_q": 64, "block_kv": 128}, **fields).phases[0]
    seen: dict[object, object] = {}
    for block in phase.blocks:
        structure = [
            (
                op.label,
                op.queue,
                op.handshake,
                [(s.opcode, s.attributes, [(o.rows, o.cols, o.fmt) for o in s.operands()]) for s in op.steps],
                [[x for x in s.srcs if isinstance(x, float)] for s in op.steps],
            )
            for op in flatten(phase.body(block))
        ]
        assert seen.setdefault(phase.shape(block), structure) == structure


@pytest.mark.parametrize("causal", [True, False])
def test_products_multiply_each_visible_tile_once(causal: bool, build_flash: Callable[..., TileProgram]) -> None:
    """Multiply-adds of all MATMUL steps: those the mask leaves, and what masked tiles add."""
    fields: dict[str, Any] = {"heads": 1, "seq_q": 256, "seq_kv": 256, "head_dim": 64, "causal": causal}
    program = build_flash({"block_q": 64, "block_kv": 64}, **fields)
    done = 0
    for block in program.phases[0].blocks:
        for op in flatten(program.phases[0].body(block)):
            for s in op.steps:
                if s.opcode is Opcode.MATMUL:
                    done += 2 * s.dst.rows * s.dst.cols * s.srcs[0].cols  # type: ignore[union-attr]
    # Two products of 64 x 64 x 64 a tile; 16 tiles, or 1 + 2 + 3 + 4 under the mask.
    tiles = 10 if causal else 16
    assert done == tiles * 2 * 2 * 64**3
    assert program.flops == Problem(**fields).flops()
    # The mask leaves 256 * 257 / 2 of the pairs.
    pairs = 256 * 257 // 2 if causal else 256 * 256
    assert program.flops == pairs * 2 * (64 + 64)


def test_every_output_row_is_written_once(build_flash: Callable[..., TileProgram]) -> None:
    program = build_flash({"block_q": 96}, batch=2, heads=2, seq_q=197, seq_kv=60, head_dim=32)
    written: Counter[tuple[int, int, int]] = Counter()
    for block in program.phases[0].blocks:
        for op in flatten(program.phases[0].body(block)):
            for s in op.steps:
                if isinstance(s.dst, GlobalTile):
                    assert (s.dst.tensor.name, s.dst.col, s.dst.cols) == ("o", 0, 32)
                    written.update((s.dst.batch, s.dst.head, s.dst.row + r) for r in range(s.dst.rows))
    assert written == Counter((b, h, r) for b in range(2) for h in range(2) for r in range(197))


# ---------------------------------------------------------------- what does not fit


PANGU: dict[str, Any] = {"heads": 5, "seq_q": 4096, "seq_kv": 4096, "head_dim": 128}


def test_a_block_that_overflows_names_every_tenant_the_bytes_and_the_largest_that_fits(
    build_flash: Callable[..., TileProgram],
) -> None:
    with pytest.raises(BufferOverflowError) as caught:
        build_flash({"block_kv": 16384, "kernel": "pto"}, **PANGU)
    message = str(caught.value)
    # Slices of one row of 16384: float32 S 64 KiB, float16 P 32 KiB.  An AIV has 192 KiB and keeps
    # 64 x 128 of O in float32 (32 KiB).
    assert message.startswith("aiv0.UB, aiv1.UB: S 2×64 KiB + P 2×32 KiB")
    for tenant in ("PV", "out", "O 32 KiB", "m 256 B", "l 256 B", "alpha", "reduction"):
        assert f" {tenant}" in message
    assert re.search(r"\([\d,]+ bytes needed, 196,608 available\)", message)
    assert "largest values that fit, each with the other fields unchanged: " in message


@pytest.mark.parametrize(
    ("tiling", "fields"),
    [
        ({"block_kv": 10240}, PANGU),
        ({"block_q": 512}, PANGU),
        ({"block_kv": 2048, "vector_rows": 16}, PANGU),
        ({"block_q": 512, "block_kv": 10240}, PANGU),
    ],
)
def test_the_largest_block_named_fits_and_one_step_more_does_not(
    tiling: dict[str, Any], fields: dict[str, Any], build_flash: Callable[..., TileProgram]
) -> None:
    with pytest.raises(BufferOverflowError) as caught:
        build_flash(tiling, **fields)
    named = re.findall(r"(block_\w+)=(\d+)", str(caught.value))
    if "a smaller block does not fit" in str(caught.value):
        for name in ("block_q", "block_kv"):
            with pytest.raises(TilingError):
                build_flash({**tiling, name: 16}, **fields)
        return
    assert named
    for name, value in named:
        build_flash({**tiling, name: int(value)}, **fields)
        with pytest.raises(BufferOverflowError):
            build_flash({**tiling, name: int(value) + 16}, **fields)


def test_a_causal_block_too_large_for_the_tiling_mask_is_refused(build_flash: Callable[..., TileProgram]) -> None:
    with pytest.raises(TilingError, match=r"tiling-mask: a block of 128x1024 needs .* = 1151 <= 2M = 1024"):
        build_flash({"block_kv": 1024, "vector_rows": 1}, **PANGU, causal=True)


@pytest.mark.parametrize(
    ("tiling", "message"),
    [
        ({"block_q": 100}, "block_q"),
        ({"block_kv": 0}, "block_kv"),
        ({"depth": 15}, "depth"),
        ({"vector_rows": 0}, "vector_rows"),
        ({"block": 128}, "block: unknown tiling field"),
    ],
)
def test_tiling_fields_outside_their_limits_are_refused(
    tiling: dict[str, Any], message: str, build_flash: Callable[..., TileProgram]
) -> None:
    with pytest.raises(TilingError, match=message):
        build_flash(tiling, **PANGU)


def test_an_unknown_schedule_is_refused_with_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"unknown schedule 'flsh'. Did you mean `flash`\? Allowed: .*flash"):
        find_schedule("flsh", "ascend")


def test_a_schedule_without_a_mapping_for_a_family_is_refused_with_those_that_have_it() -> None:
    with pytest.raises(SpecError, match=r"schedule 'flash' has no mapping for tpu cores; it runs on ascend"):
        find_schedule("flash", "tpu")


@pytest.mark.parametrize("shape", [{"seq_q": 150, "seq_kv": 333}, {"seq_q": 1, "seq_kv": 200}])
def test_o_in_global_memory_changes_no_bit(shape: dict[str, int]) -> None:
    """Slices of O come and go between tiles; one core of a decode has none of them."""
    problem = Problem(heads=2, kv_heads=1, head_dim=64, causal=True, **shape)
    found = [
        run("flash", problem=problem, tiling={"block_kv": 64, "vector_rows": 16, "running": place}, rows="all")
        for place in ("core", "gm")
    ]
    np.testing.assert_array_equal(*(r.output.view(np.uint16) for r in found))
    assert found[0].cycles < found[1].cycles


def test_o_in_global_memory_makes_room_for_larger_first_level_blocks(
    build_flash: Callable[..., TileProgram], device: DeviceSpec
) -> None:
    """FastAttention's B_r = 512 with B_c = 512: O alone would take 128 KiB of an AIV's 192."""
    tiling = {"block_q": 512, "vector_rows": 8}
    with pytest.raises(BufferOverflowError, match="O 128 KiB"):
        build_flash(tiling, **PANGU)
    program = build_flash({**tiling, "running": "gm"}, **PANGU)
    check(program, device.flags)
    used, there = program.occupancy_bytes()["aiv0.UB"]
    assert used < there


def test_flash_attention_4_keeps_a_maximum_until_it_grew_by_2_to_the_8_bit_for_bit() -> None:
    """flash_attn/cute/softmax.py at 0251105a: kept where (m - new) c >= -8, then the factor is exactly 1."""
    problem = Problem(batch=1, heads=1, kv_heads=1, seq_q=16, seq_kv=192, head_dim=32, causal=False)
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((rows, 32)).astype(np.float16) for rows in (16, 192, 192))
    k[64:] *= np.float16(3)
    k[128:] *= np.float16(8)  # grows by little, then by much
    chosen, device = find_schedule("fa4", "nvidia"), load_device("h200")
    tiling = build_tiling(chosen.tiling, {"block_q": 64, "block_kv": 64})
    program = chosen.program(problem, tiling, device, chosen.precision())
    state = execute(program, lambda name, *_: {"q": q, "k": k, "v": v}[name])

    f32, unit = "float32", "hopper.mma.k16.f16.f32"
    add, sub, mul = (partial(getattr(formats, n), fmt=f32) for n in ("add", "sub", "mul"))
    c = float(formats.cast(np.float64(problem.scale * math.log2(math.e)), f32))
    exp2 = partial(formats.exp2, fmt=f32, variant="fa4_degree3")
    zeros, kept = np.zeros((16, 1), np.float32), []
    m, l, o = zeros - np.float32(np.inf), zeros, np.zeros((16, 32), np.float32)
    for at in range(0, 192, 64):
        s = formats.matmul(q, k[at : at + 64].T, arithmetic=unit)
        larger = np.maximum(m, formats.reduce_max(s, f32)[:, None])
        z = mul(sub(m, larger), c)
        kept.append(z >= -8.0)
        m_new = np.where(kept[-1], m, larger)
        alpha = exp2(mul(sub(m, m_new), c))
        e = exp2(formats.fma(s, c, mul(m_new, -c), f32))
        l = add(mul(l, alpha), formats.reduce_sum(e, f32, "sequential")[:, None])
        o = formats.matmul(formats.cast(e, "float16"), v[at : at + 64], mul(o, alpha), arithmetic=unit)
        m = m_new
    assert not kept[0].any() and kept[1].any() and not kept[2].all()
    taken = sum(int((~x).sum()) for x in kept)
    assert state.events.chosen["m_new"].tolist() == [48, taken, 3, sum(not x.all() for x in kept)]
    expected = formats.cast(formats.div(o, l, f32), "float16")
    written = state.tensors.head(program.tensors["o"], 0, 0)
    np.testing.assert_array_equal(written.view(np.uint16), expected.view(np.uint16))


def test_flash_attention_4_takes_the_time_of_its_share_of_cases_with_the_same_bits() -> None:
    options: dict[str, Any] = {"hw": "h200", "workload": "pangu_38b", "seq": 1024, "rows": "0", "trace_groups": ()}
    every, few, special, fewest = (
        run("fa4", precision=p, **options) for p in ("fa4", "rescaled=0.1", "polynomial=0.2", "rescaled=0,polynomial=0")
    )
    cycles = [one.timing.cycles for one in (every, few, special, fewest) if one.timing]
    assert cycles[0] > cycles[1] > cycles[2] > cycles[3]
    for one in (few, special, fewest):
        np.testing.assert_array_equal(one.output.view(np.uint16), every.output.view(np.uint16))
    assert every.numerics is not None
    assert every.numerics.choices is not None
    counts = every.numerics.choices["m_new"]
    assert (counts.count % 64, counts.taken > 0, counts.tiles_with_one <= counts.tiles) == (0, True, True)
    for wrong, why in (
        ("rescaled=2", "a share must be from 0 to 1"),
        ("polynomial=0.5,exp_variant=exp2.exp2p", "exp2.exp2p is not"),
    ):
        with pytest.raises(NpusimError, match=why):
            run("fa4", precision=wrong, **options)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_warp_group_without_rows_waits_for_all_copies_that_it_releases(stages: int) -> None:
    """The last of 129 rows leaves one of two groups none: it released V's slot without having waited for it."""
    device, schedule = load_device("h200"), find_schedule("flash", "nvidia")
    fields = {"block_q": 128, "block_kv": 128, "warps": 8, "stages": stages}
    problem = Problem(heads=1, seq_q=129, seq_kv=513, head_dim=64)
    tiling = build_tiling(schedule.tiling, fields)
    check(schedule.program(problem, tiling, device, schedule.precision("")), device.flags)


@pytest.mark.parametrize("stages", [2, 3])
def test_warp_groups_wait_for_what_the_others_make_of_stored_values(stages: int) -> None:
    """Of an int8 cache each of two groups brings half of V to shared memory: P V read the other's half unawaited."""
    device, schedule = load_device("h200"), find_schedule("flash", "nvidia")
    fields = {"block_q": 128, "block_kv": 64, "warps": 8, "stages": stages}
    problem = Problem(heads=2, kv_heads=1, seq_q=128, seq_kv=1000, head_dim=64, cache="int8")
    tiling = build_tiling(schedule.tiling, fields)
    check(schedule.program(problem, tiling, device, schedule.precision("")), device.flags)


FAST = "exp_variant=exp2.hopper_ex2,div_variant=div.hopper_full"


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_a_kernel_may_have_the_functions_that_its_code_has(kernel: str) -> None:
    """2^x and 1 / l times O as an H200's instructions give them: a call of one tile, computed again here."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 64, 64)).astype(np.float16) for _ in "qkv")
    problem = Problem(heads=1, seq_q=64, seq_kv=64, head_dim=64)
    precision = f"fa2_fp32,output=float32,{FAST}"
    request: Any = {"tiling": {"kernel": kernel}, "tensors": {"q": q, "k": k, "v": v}, "rows": "all", "heads": "all"}
    done = run("flash", hw="h200", problem=problem, precision=precision, **request)
    unit, factor = {"arithmetic": "hopper.mma.k16.f16.f32"}, np.float32(problem.scale / math.log(2))
    s = formats.matmul(q[0, 0], np.ascontiguousarray(k[0, 0].T), **unit)
    most = formats.mul(s.max(1, keepdims=True), factor, "float32")
    p = formats.exp2(
        formats.fma(s, np.full_like(s, factor), np.broadcast_to(-most, s.shape), "float32"),
        "float32",
        variant="hopper_ex2",
    )
    total = formats.reduce_sum(p, "float32", order="sequential")[:, None]
    o = formats.matmul(p.astype(np.float16), v[0, 0], **unit)
    wanted = formats.mul(o, formats.rcp(total, "float32", variant="hopper_approx"), "float32")
    assert np.array_equal(np.reshape(done.output, o.shape), wanted)
    assert not np.array_equal(wanted, formats.div(o, total, "float32"))
    (note,) = (n for n in done.notes if "--use_fast_math" in n)
    assert note.startswith("div.hopper_full, exp2.hopper_ex2: the instructions of an H200, to which nvcc")


def test_functions_of_an_h200_are_assumed_elsewhere_and_refused_in_float16() -> None:
    (note,) = (n for n in run("flash", seq=64, hw="a100", precision=FAST).notes if "--use_fast_math" in n)
    assert "instructions of an H200, assumed for a100," in note
    with pytest.raises(NpusimError, match=r"div\.hopper_full"):
        run("flash", seq=64, hw="ascend_910b2", precision="fa16,div_variant=div.hopper_full")
    with pytest.raises(NpusimError, match=r"div_variant: 'fast' is not one of .*div\.hopper_full"):
        run("flash", seq=64, precision="div_variant=fast")
