"""Products of operands in blocks: bits are those of `formats.matmul` with scales, and time counts the scales."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from npusim import formats
from npusim.config.load import load_device
from npusim.config.problem import GemmProblem, Problem
from npusim.config.tiling import build_tiling
from npusim.errors import NpusimError, SpecError, TilingError
from npusim.library import find_schedule
from npusim.library.pasa import Shift
from npusim.machines.ascend import registers
from npusim.machines.ascend.ascend_pricing import AscendPricing
from npusim.machines.decisions import VectorCode
from npusim.program.ir.op import Attributes, Opcode, Step
from npusim.program.ir.tile import Tile
from npusim.program.numerics.executor import execute
from npusim.simulation.request import Request
from npusim.simulation.simulate import run_request
from npusim.studies.validate.diff import diff
from tests.ir.toy import flatten

pytestmark = pytest.mark.usefixtures("declared_tiles")

DEVICE, BLACKWELL = load_device("ascend_950"), load_device("rtx_5090")


def program_of(problem: GemmProblem, device: Any = DEVICE, **fields: Any) -> Any:
    chosen = find_schedule("gemm", device.family)
    tiling = build_tiling(chosen.tiling, fields)
    return chosen.program(problem, tiling, device, chosen.precision(None))


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp8_e5m2"])
@pytest.mark.parametrize(
    ("m", "n", "k", "outlier", "operands"),
    [(40, 48, 320, 1.0, "nd"), (40, 48, 320, 1.0, "nt"), (33, 17, 100, np.nan, "nd")],
)
def test_a_product_in_blocks_is_that_of_its_quantised_operands(
    fmt: str, m: int, n: int, k: int, outlier: float, operands: str
) -> None:
    rng = np.random.default_rng(m)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    a *= np.exp2(rng.integers(-20, 20, (m, 1))).astype(np.float32)  # scales differ
    b[5, 3] *= np.float32(outlier)
    is_turned = operands == "nt"  # B lies as (n, k)
    stored = {"a": formats.quantize(a, fmt), "b": formats.quantize(b.T if is_turned else b, fmt, axis=int(is_turned))}
    problem = GemmProblem(m=m, n=n, k=k, dtype=fmt, operands=operands)
    program = program_of(problem, block_m=32, block_n=32, block_k=64)
    state = execute(program, lambda name, *_: stored[name].stored())
    written = state.tensors.head(program.tensors["c"], 0, 0)

    tail = -k % 64
    padded = [formats.quantize(np.pad(a, ((0, 0), (0, tail))), fmt)]
    padded.append(formats.quantize(np.pad(b, ((0, tail), (0, 0))), fmt, axis=0))
    expected = formats.matmul(
        *(p.elements for p in padded),
        arithmetic=DEVICE.matrix_engine("aic").arithmetic_of(fmt),
        a_scale=padded[0].scales,
        b_scale=padded[1].scales,
    )
    np.testing.assert_array_equal(written.view(np.uint16), formats.cast(expected, "bfloat16").view(np.uint16))
    assert bool(state.events.nan) is False  # a NaN in an operand is no event
    assert np.isnan(written.astype(np.float32)).any() == np.isnan(outlier)


def test_scales_are_bytes_that_move() -> None:
    program = program_of(GemmProblem(m=256, n=256, k=512, dtype="mxfp8"))
    assert program.tensors["a"].size_bytes == 256 * 512 * 33 // 32
    assert program.tensors["c"].fmt == "bfloat16"


def test_a_load_into_l0_pays_for_scales_at_their_rate() -> None:
    """asc-devkit: data / 256 + scales / 32 cycles, and 30."""
    costs = AscendPricing(program_of(GemmProblem(m=256, n=256, k=512, dtype="mxfp8")), DEVICE)

    def cycles(fmt: str) -> int:
        there, here = (Tile(f"aic.{memory}", 0, 128, 128, 128, fmt) for memory in ("L0A", "L1"))
        return costs.of_step(Step(Opcode.COPY, there, (here,)), "aic", "MTE1").occupancy_cycles

    assert cycles("float8_e4m3fn") == 128 * 128 // 256 + 30
    assert cycles("mxfp8") == 128 * 128 // 256 + 128 * 128 // 32 // 32 + 30


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_a_device_without_the_unit_names_those_that_have_it(hw: str) -> None:
    with pytest.raises(SpecError, match=rf"{hw}: .* mxfp8 .*; packaged devices that do: ascend_950"):
        program_of(GemmProblem(m=64, n=64, k=64, dtype="mxfp8"), load_device(hw))


def test_pieces_of_k_are_whole_pairs_of_blocks() -> None:
    with pytest.raises(TilingError, match="block_k: 16 is not a multiple of 64"):
        program_of(GemmProblem(m=64, n=64, k=64, dtype="mxfp8"), block_k=16)


def product(a: Any, b: Any, c: Any = None, device: Any = DEVICE, core: str = "aic") -> Any:
    """Return a b + c of operands in blocks, filled up with zeros to what an instruction adds up."""
    elements = [np.pad(a.elements, ((0, 0), (0, -a.elements.shape[1] % 64)))]
    elements.append(np.pad(b.elements, ((0, -b.elements.shape[0] % 64), (0, 0))))
    blocks = elements[0].shape[1] // a.fmt.block
    missing = ((0, 0), (0, blocks - a.scales.shape[1])), ((0, blocks - b.scales.shape[0]), (0, 0))
    a_scale, b_scale = (
        np.pad(x.scales.view(np.uint8), width).view(x.scales.dtype) for x, width in zip((a, b), missing, strict=True)
    )
    unit = device.matrix_engine(core).arithmetic_of(a.fmt.name)
    return formats.matmul(*elements, c, arithmetic=unit, a_scale=a_scale, b_scale=b_scale)


def part_of(values: Any, at: int, keys: int) -> Any:
    """Return the keys from ``at`` on of V in blocks along keys."""
    first, last = at // values.fmt.block, -(-(at + keys) // values.fmt.block)
    return replace(values, elements=values.elements[at : at + keys], scales=values.scales[first:last])


def hidden(s: Any, at: int, queries: int) -> Any:
    """Return scores of keys from ``at`` on, the later ones of a causal call masked; 0 ``queries``: none are."""
    seen = at + np.arange(s.shape[1]) < np.arange(len(s))[:, None] + queries
    return np.where(seen, s, np.float32(-np.inf)) if queries else s


def attended(q: Any, k: Any, v: Any, scale: float, keys: int, rule: str, queries: int, fmt: str = "mxfp8") -> Any:
    """Return attention of one head on the 950 as the recipe says it, (rows, d) each: a tile of keys after the other.

    ``queries``: of a causal call, how many keys the first one sees; 0: all see all.
    """
    f32 = np.float32
    quantised = formats.quantize(q, fmt, rule=rule), formats.quantize(k.T, fmt, rule=rule, axis=0)
    m, l, o = np.full((len(q), 1), -np.inf, f32), np.zeros((len(q), 1), f32), np.zeros((len(q), v.shape[1]), f32)
    values = formats.quantize(v, fmt, rule=rule, axis=0)
    scores = formats.mul(product(*quantised), f32(scale), "float32")
    for at in range(0, len(k), keys):
        s = hidden(scores[:, at : at + keys], at, queries)
        m_new = np.maximum(m, formats.reduce_max(s, "float32")[:, None])
        alpha, e = (formats.exp(formats.sub(x, m_new, "float32"), "float32") for x in (m, s))
        m, l = (
            m_new,
            formats.add(
                formats.mul(l, alpha, "float32"), formats.reduce_sum(e, "float32", "vector_lanes")[:, None], "float32"
            ),
        )
        added = product(formats.quantize(e, fmt, rule=rule), part_of(values, at, keys))
        o = formats.add(formats.mul(o, alpha, "float32"), added, "float32")
    return formats.cast(formats.div(o, l, "float32"), "float16")


def tensors_of(problem: Problem, seed: int) -> dict[str, Any]:
    """Return Q, K and V of a call by name, (heads, rows, d), one key of which is large."""
    rng, rows = np.random.default_rng(seed), (problem.seq_q, problem.seq_kv, problem.seq_kv)
    heads = problem.heads, problem.kv_heads, problem.kv_heads
    sizes = zip("qkv", heads, rows, strict=True)
    made = {n: rng.standard_normal((h, r, problem.head_dim)).astype(np.float16) for n, h, r in sizes}
    made["k"][0, 70] *= 30
    return made


def executed(
    problem: Problem, device: Any, precision: str, tensors: Any, called: str = "flash", **fields: Any
) -> tuple[Any, Any]:
    """Return a program of a schedule, and the tensors it leaves."""
    chosen = find_schedule(called, device.family)
    program = chosen.program(problem, build_tiling(chosen.tiling, fields), device, chosen.precision(precision))
    return program, execute(program, lambda name, _, head: tensors[name][head]).tensors


@pytest.mark.parametrize(
    ("fmt", "rule", "causal"), [("mxfp8", "floor", False), ("mxfp8", "rceil", True), ("mxfp4", "even", True)]
)
def test_attention_in_blocks_is_the_recipe_bit_for_bit(fmt: str, rule: str, causal: bool) -> None:
    problem = Problem(batch=1, heads=2, kv_heads=1, seq_q=40, seq_kv=164, head_dim=48, causal=causal)
    tensors, precision = tensors_of(problem, 34), f"{fmt},scale_rule={rule}"
    program, left = executed(problem, DEVICE, precision, tensors, block_q=32, block_kv=64, layout="nd")
    assert [p.name for p in program.phases] == ["quantise_q", "quantise_k", "quantise_v", "attention"]
    for head in range(2):
        written = left.head(program.tensors["o"], 0, head)
        q, k, v = tensors["q"][head], tensors["k"][0], tensors["v"][0]
        expected = attended(q, k, v, problem.scale, 64, rule, problem.causal_offset + 1 if causal else 0, fmt)
        np.testing.assert_array_equal(written.view(np.uint16), expected.view(np.uint16))


def smoothed(k: Any, arithmetic: str) -> Any:
    """Return K without its mean over keys, whose sums the matrix unit takes 256 at a time."""
    total, ones = np.zeros((1, k.shape[1]), np.float32), np.ones((1, 256), np.float16)
    for at in range(0, len(k), 256):
        part = np.pad(k[at : at + 256], ((0, -len(k[at : at + 256]) % 16), (0, 0)))
        total = formats.add(total, formats.matmul(ones[:, : len(part)], part, arithmetic=arithmetic), "float32")
    return formats.sub(k.astype(np.float32), formats.mul(total, np.float32(1 / len(k)), "float32"), "float32")


class NvFp4:
    """SageAttention3's numbers (sageattn3, blackwell/softmax.h): P to 448 * 6, then blocks of 16 to 6."""

    device, precision, sums, factor = BLACKWELL, "nvfp4", "rtx_blackwell.mma.k16.f16.f32", 448 * 6.0
    unit = staticmethod(partial(product, device=BLACKWELL, core="sm"))

    @staticmethod
    def stored(x: Any, axis: int = -1) -> Any:
        pads = (-len(x) % 16, 0) if axis == 0 else (0, -x.shape[1] % 16)  # as its kernels pad K and V
        return formats.quantize(np.pad(x, ((0, pads[0]), (0, pads[1]))), "nvfp4", rule="sage3", axis=axis)

    @staticmethod
    def weights(e: Any) -> Any:
        pad = np.pad(e, ((0, 0), (0, -e.shape[1] % 16)))
        blocks = pad.reshape(len(e), -1, 16)
        exact = blocks.max(axis=2) / np.float32(6)
        with np.errstate(invalid="ignore"):
            elements = np.where(exact[..., None] > 0, blocks / exact[..., None], np.float32(0)).reshape(pad.shape)
        made = formats.quantize(pad, "nvfp4", rule="sage3_p")
        assert made.block_scales.max() <= 448
        np.testing.assert_array_equal(made.scales, formats.cast(exact, "float8_e4m3fn"))
        codes = formats.cast(elements, "float4_e2m1fn")
        np.testing.assert_array_equal(made.elements.view(np.uint8), codes.view(np.uint8))
        return made

    part = staticmethod(part_of)


class Fp8:
    """SageAttention2's numbers without the scales of its operands: P to 448."""

    device, precision, sums, factor = load_device("h200"), "sage_fp8", "hopper.mma.k16.f16.f32", 448.0

    @staticmethod
    def unit(a: Any, b: Any, c: Any = None) -> Any:
        pad = -a.shape[1] % 32
        a, b = np.pad(a, ((0, 0), (0, pad))), np.pad(b, ((0, pad), (0, 0)))
        return formats.matmul(a, b, c, arithmetic="hopper.wgmma.k32.e4m3.f32")

    @staticmethod
    def stored(x: Any, axis: int = -1) -> Any:
        return formats.cast(x, "float8_e4m3fn")

    @staticmethod
    def weights(e: Any) -> Any:
        return formats.cast(e, "float8_e4m3fn")

    @staticmethod
    def part(values: Any, at: int, keys: int) -> Any:
        return values[at : at + keys]


def sage(q: Any, k: Any, v: Any, scale: float, keys: int, queries: int, numbers: Any) -> Any:
    """Return SageAttention of one head: K without its mean, P times a factor in its exponent, O chained."""
    f32 = np.float32
    values = numbers.stored(v, axis=0)
    raw = numbers.unit(numbers.stored(q), numbers.stored(smoothed(k, numbers.sums).T, axis=0))
    scores = formats.mul(raw, f32(scale * np.log2(np.e)), "float32")
    m, l, o = np.full((len(q), 1), -np.inf, f32), np.zeros((len(q), 1), f32), np.zeros((len(q), v.shape[1]), f32)
    for at in range(0, len(k), keys):
        s = hidden(scores[:, at : at + keys], at, queries)
        m_new = np.maximum(m, s.max(axis=1, keepdims=True))
        top = formats.sub(m_new, f32(np.log2(numbers.factor)), "float32")
        decay, e = (
            formats.exp2(formats.sub(a, b, "float32"), "float32", variant="exp2p") for a, b in ((m, m_new), (s, top))
        )
        sums = formats.reduce_sum(e, "float32", "sequential")[:, None]
        l, m = formats.add(formats.mul(l, decay, "float32"), sums, "float32"), m_new
        p = numbers.weights(e)
        width = s.shape[1] if numbers is Fp8 else p.elements.shape[1]
        o = numbers.unit(p, numbers.part(values, at, width), formats.mul(o, decay, "float32"))
    return formats.cast(formats.div(o, l, "float32"), "float16")


@pytest.mark.parametrize(("numbers", "seq_kv", "causal"), [(NvFp4, 272, False), (NvFp4, 263, True), (Fp8, 272, False)])
def test_sageattention_is_the_recipe_bit_for_bit(numbers: Any, seq_kv: int, causal: bool) -> None:
    problem = Problem(batch=1, heads=2, kv_heads=1, seq_q=40, seq_kv=seq_kv, head_dim=48, causal=causal)
    tensors = tensors_of(problem, 36)
    tensors["k"] += np.float16(3)  # a mean, which smoothing takes away
    program, left = executed(problem, numbers.device, numbers.precision, tensors, block_q=64, block_kv=64)
    assert [p.name for p in program.phases][1:3] == ["sum_k", "average_k"]
    for head in range(2):
        written = left.head(program.tensors["o"], 0, head)
        q, k, v = tensors["q"][head], tensors["k"][0], tensors["v"][0]
        expected = sage(q, k, v, problem.scale, 64, problem.causal_offset + 1 if causal else 0, numbers)
        np.testing.assert_array_equal(written.view(np.uint16), expected.view(np.uint16))


def test_two_elements_of_4_bits_share_a_byte() -> None:
    """Twice as many a cycle as MXFP8's, half the bytes: a product bound by the matrix unit takes half its cycles."""
    wide, narrow = (program_of(GemmProblem(m=256, n=256, k=512, dtype=f)) for f in ("mxfp8", "mxfp4"))
    assert [p.tensors["a"].size_bytes for p in (wide, narrow)] == [256 * 512 * n // 32 for n in (33, 17)]
    costs, busy = AscendPricing(wide, DEVICE), []
    for fmt in ("mxfp8", "mxfp4"):
        a, b = (Tile(f"aic.{memory}", 0, 128, 128, 128, fmt) for memory in ("L0A", "L0B"))
        how = Attributes(arithmetic=DEVICE.matrix_engine("aic").arithmetic_of(fmt))
        busy.append(
            costs.of_step(Step(Opcode.MATMUL, Tile("aic.L0C", 0, 128, 128, 128, "float32"), (a, b), how), "aic", "CUBE")
        )
    startup = DEVICE.matrix_engine("aic").startup_cycles.value
    assert busy[0].occupancy_cycles - startup == 2 * (busy[1].occupancy_cycles - startup)


@pytest.mark.parametrize(("device", "precision"), [(DEVICE, "mxfp8"), (BLACKWELL, "nvfp4")])
def test_keys_of_formats_in_blocks_are_split_as_others_are(device: Any, precision: str) -> None:
    problem = Problem(batch=1, heads=2, kv_heads=1, seq_q=1, seq_kv=300, head_dim=64, causal=False)
    tensors = tensors_of(problem, 38)
    sizes = {"block_q": 32, "block_kv": 64}

    def written(name: str, **fields: Any) -> Any:
        program, left = executed(problem, device, precision, tensors, name, **sizes, **fields)
        o = program.tensors["o"]  # packed heads lie below one another
        return np.concatenate([left.head(o, 0, head) for head in range(o.heads)])

    whole, one, three = (
        written("flash"),
        written("split_kv", splits=1, pack="off"),
        written("split_kv", splits=3, pack="on"),
    )
    np.testing.assert_array_equal(one.view(np.uint16), whole.view(np.uint16))
    # Another maximum of a split moves what P is rounded to, by half a step of E4M3 or of E2M1.
    np.testing.assert_allclose(three.astype(float), whole.astype(float), atol=0.02 if precision == "mxfp8" else 0.15)


@pytest.mark.parametrize(("factor", "rule"), [(1.0, "start"), (256.0, "start"), (256.0, "end")])
def test_a_factor_of_p_cancels_with_a_learned_sink(factor: float, rule: str) -> None:
    problem = Problem(batch=1, heads=2, kv_heads=1, seq_q=40, seq_kv=164, head_dim=48, causal=False, sink_logits=True)
    tensors = tensors_of(problem, 37)
    plain, scaled = (
        left.head(program.tensors["o"], 0, 1).astype(np.float64)
        for text in ("", f"sink={rule},p_scale={factor}")
        for program, left in [executed(problem, DEVICE, text, tensors, block_q=32, block_kv=64)]
    )
    np.testing.assert_allclose(scaled, plain, atol=2e-3)


def test_rows_of_blocks_stay_on_one_vector_core() -> None:
    problem = Problem(batch=1, heads=1, kv_heads=1, seq_q=40, seq_kv=40, head_dim=96, causal=False)
    chosen = find_schedule("flash", "ascend")
    program = chosen.program(problem, build_tiling(chosen.tiling, {}), DEVICE, chosen.precision("mxfp8"))
    phase = next(p for p in program.phases if p.name == "quantise_v")
    loads = [o.steps[0].srcs[0] for o in flatten(phase.body(phase.blocks[0])) if o.queue.endswith("MTE2")]
    assert [(at.row, at.rows) for at in loads] == [(0, 32), (32, 8)]


def test_a_cast_to_blocks_costs_a_pass_for_scales_and_one_for_quotients() -> None:
    """64 rows of 128 on a unit of registers: by blocks the largest of 32, then multiply, cast and pack."""
    code = VectorCode("fused", "nd", 4, frozenset({"x"}))
    spec: Any = DEVICE.engine("aiv", "VECTOR")

    def cycles(fmt: str, **attributes: Any) -> int:
        source, made = (Tile("aiv0.UB", at, 64, 128, 128, f) for at, f in ((0, "float32"), (1 << 16, fmt)))
        step = Step(Opcode.CAST, made, (source,), Attributes(**attributes), "x")
        return registers.function_cycles([step], spec, "unit", code)[0]

    plain, across, down = cycles("float8_e4m3fn"), cycles("mxfp8"), cycles("mxfp8", axis=-2)
    assert plain < down < across < 4 * plain  # a block within a register takes a reduction of its own there


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("mxfp8,scale_rule=te", "scale_rule: 'te' is not one of floor, ceil"),
        ("mxfp8,scale_rule=sage3", "'sage3' gives float8_e4m3fn scales"),
        ("scale_rule=floor", "operands=float16 is not a block-scaled format"),
        ("mxfp8,operand=float16", "P v_mxfp8: float16 by mxfp8"),
    ],
)
def test_precisions_that_do_not_fit_are_refused(precision: str, message: str) -> None:
    problem, chosen = Problem(seq_q=64, seq_kv=64, heads=1, kv_heads=1, head_dim=64), find_schedule("flash", "ascend")
    with pytest.raises(NpusimError, match=message):
        chosen.program(problem, build_tiling(chosen.tiling, {}), DEVICE, chosen.precision(precision))


def test_tiles_of_keys_are_whole_pairs_of_blocks() -> None:
    problem, chosen = Problem(seq_q=64, seq_kv=64, heads=1, kv_heads=1, head_dim=64), find_schedule("flash", "ascend")
    with pytest.raises(TilingError, match="keys of a tile: 48 is not a multiple of 64"):
        chosen.program(problem, build_tiling(chosen.tiling, {"block_kv": 48}), DEVICE, chosen.precision("mxfp8"))


def shifted(q: Any, k: Any, v: Any, shift: Shift, keys: int) -> Any:
    """Return PASA of one head in float16, K' in blocks along the head, P and V along keys."""
    half = {n: partial(getattr(formats, n), fmt="float16") for n in ("add", "sub", "mul", "div", "exp")}
    add, sub, mul, div, exp = half.values()
    zeros = np.zeros((len(q), 1), np.float16)
    m, l, f, o = zeros - np.float16(np.inf), zeros, zeros, np.zeros((len(q), v.shape[1]), np.float16)
    quantised = formats.quantize(q, "mxfp8"), formats.quantize(k.T, "mxfp8", axis=0)
    scores, values = formats.cast(product(*quantised), "float16"), formats.quantize(v, "mxfp8", axis=0)
    for index, at in enumerate(range(0, len(k), keys)):
        s = scores[:, at : at + keys]
        n = s.shape[1]
        mean = formats.reduce_sum(mul(s, 1 / n), "float16", "vector_lanes")[:, None]
        m_tile = formats.reduce_max(s, "float16")[:, None]
        e = exp(sub(s, m_tile))
        f_new = div(add(mul(f, float(index)), mean), index + 1.0)
        d_old, d_tile = mul(sub(f, f_new), shift.inva_before(index, n)), mul(sub(mean, f_new), shift.inva(n))
        m_new = formats.maximum(add(m, d_old), add(m_tile, d_tile), "float16")
        e_old, e_tile = exp(add(sub(m, m_new), d_old)), exp(add(sub(m_tile, m_new), d_tile))
        l = add(mul(e_old, l), mul(e_tile, formats.reduce_sum(e, "float16", "vector_lanes")[:, None]))
        added = formats.cast(product(formats.quantize(e, "mxfp8"), part_of(values, at, keys)), "float16")
        o, m, f = add(mul(added, e_tile), mul(o, e_old)), m_new, f_new
    return div(o, l)


def test_pasa_in_blocks_is_the_recipe_bit_for_bit() -> None:
    problem = Problem(batch=1, heads=1, kv_heads=1, seq_q=24, seq_kv=164, head_dim=48, causal=False)
    rng = np.random.default_rng(35)
    tensors = {n: rng.standard_normal((rows, 48)).astype(np.float16) for n, rows in (("q", 24), ("k", 164), ("v", 164))}
    tensors["k"] += np.float16(8)  # a mean, which the shift takes away
    chosen = find_schedule("pasa", "ascend")
    tiling = build_tiling(chosen.tiling, {"block_q": 32, "block_kv": 64, "layout": "nd"})
    program = chosen.program(problem, tiling, DEVICE, chosen.precision("mxfp8"))
    assert [p.name for p in program.phases] == ["shift_keys", "quantise_q", "quantise_k", "quantise_v", "attention"]
    state = execute(program, lambda name, *_: tensors[name])
    keys = state.tensors.head(program.tensors["k_shifted"], 0, 0)
    shift = Shift(tiling.beta, 1 / problem.scale, None, is_ideal=False, fmt="float16")
    written = state.tensors.head(program.tensors["o"], 0, 0)
    expected = shifted(tensors["q"], keys, tensors["v"], shift, 64)
    np.testing.assert_array_equal(written.view(np.uint16), expected.view(np.uint16))


def test_another_rule_of_p_explains_a_difference() -> None:
    asked: dict[str, Any] = {"hw": "rtx_5090", "seq_q": 16, "seq_kv": 64, "causal": False, "rows": "all", "heads": "0"}
    other = run_request(Request("flash", precision="nvfp4,p_rule=sage3", **asked)).numerics
    assert other is not None
    found = diff(other.output, Request("flash", precision="nvfp4", **asked))
    assert "p_rule=sage3" in [str(change) for e in found.explained for change in e.changes]
