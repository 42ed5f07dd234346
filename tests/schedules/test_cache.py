"""K and V stored in 8 bits, a scale for each token and head: bits, bytes, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.errors import SpecError, TilingError
from npusim.formats import get_format
from npusim.formats.exact_rounding import round_fraction
from npusim.kernel import attention, kernel, maximum
from npusim.kernels.attention.online_softmax import FlashPrecision, attend, flash, unchanged
from npusim.kernels.declare.registry import for_inputs
from npusim.program.numerics.evaluate import evaluate
from npusim.program.numerics.input_tensors import drawn_source, recipe_source
from npusim.run import run
from reports.parts.kernel import declared_tiling as declared
from schedules.test_split_kv import ASCEND, HOPPER, Machine, merged, one_split, plain, program_of
from tests.turns import every, in_turn

if TYPE_CHECKING:
    from npusim.kernels.form.language import Value

pytestmark = pytest.mark.usefixtures("declared_tiles")

F = np.float32
FORMATS = ["int8", "float8_e4m3fn"]
DECODE = Problem(heads=4, kv_heads=2, seq_q=1, seq_kv=50, head_dim=16)
RAGGED = Problem(heads=2, kv_heads=1, seq_q=3, lengths=(40, 7), head_dim=16, page=16, causal=True)


def read_back(values: np.ndarray[Any, Any], fmt: str, each: str = "token") -> np.ndarray[Any, Any]:
    """Return what a cache of ``fmt`` says of K or V in float16, number after number."""
    if each == "channel":
        return read_back(values.T, fmt).T
    largest = {"int8": 127, "float8_e4m3fn": 448}[fmt]
    out = np.zeros(values.shape, np.float16)
    for row, token in enumerate(values.astype(np.float64)):
        scale = F(max(abs(x) for x in token) / largest)
        for col, x in enumerate(token):
            quotient = min(abs(Fraction(x / float(scale))), Fraction(largest))
            if fmt == "int8":
                stored = float(round(quotient))
            else:
                stored = float(np.uint8(round_fraction(quotient, get_format(fmt))).view(get_format(fmt).dtype))
            out[row, col] = np.float16(F(F(np.copysign(stored, x)) * scale))
    return out


CALLS = [
    pytest.param(DECODE, {"splits": 1}, id="decode"),
    pytest.param(DECODE, {"splits": 2}, id="two splits"),
    pytest.param(DECODE, {"splits": 1, "pack": "on"}, id="packed"),
    pytest.param(RAGGED, {"splits": 1}, id="lengths and pages"),
]
MACHINES = [pytest.param(m, id=m.hw) for m in (ASCEND, HOPPER)]


@pytest.mark.parametrize(
    ("shape", "fields", "machine", "fmt", "each"), in_turn(CALLS, MACHINES, FORMATS, ("token", "channel"))
)
def test_bits_are_those_of_a_scalar_computation(
    shape: Problem, machine: Machine, fmt: str, fields: dict[str, Any], each: str
) -> None:
    p = shape.model_copy(update={"cache": fmt, "cache_scale": each})
    program = program_of(p, machine.hw, machine.precision, **{"block_q": 16, "block_kv": 16, "pack": "off", **fields})
    rows = evaluate(program, p, drawn_source(p), rows="all", heads="all").rows
    source, expected = recipe_source(p), []
    for batch, head in np.ndindex(p.batch, p.heads):
        one = p.sequence(batch)
        q, k, v = (np.asarray(source(n, batch, head if n == "q" else head // p.group_size)) for n in "qkv")
        k, v = read_back(k, fmt, each), read_back(v, fmt, each)
        cuts = np.array_split(np.arange(-(-one.seq_kv // 16)), fields["splits"])
        done = [one_split(q, k, v, cut, plain(one, machine, F(-np.inf)), machine) for cut in cuts]
        expected.append((merged(done, machine) if len(done) > 1 else done[0])[0])
    computed = np.concatenate([block for _, block in sorted(rows.items())])
    assert np.array_equal(computed.view(np.uint32), np.concatenate(expected).view(np.uint32))


#: Device, schedule and format; by default each schedule on each device reads one of the formats.
READS = [
    pytest.param(hw, schedule, fmt, marks=[] if (at + number) % len(FORMATS) == which else pytest.mark.exhaustive)
    for at, hw in enumerate(("ascend_910b2", "ascend_950", "h200"))
    for number, schedule in enumerate(("flash", "split_kv", "standard", "pasa"))
    for which, fmt in enumerate(FORMATS)
]


@pytest.mark.parametrize(("hw", "schedule", "fmt"), every(2, READS))
def test_every_schedule_reads_a_cache(hw: str, schedule: str, fmt: str) -> None:
    """One query a sequence, and many; the error is against what the cache says."""
    for seq_q in (1, 128):
        problem = Problem(heads=2, seq_q=seq_q, seq_kv=200, head_dim=64, cache=fmt)
        done = run(schedule, problem=problem, hw=hw, tiling=declared(schedule, hw))
        assert done.numerics.error.rmse < 8e-3


@pytest.mark.parametrize("hw", ["ascend_910b2", "ascend_950", "h200", "t4"])
def test_bytes_of_memory_halve_and_vectors_work_more(hw: str) -> None:
    sizes = {"heads": 8, "kv_heads": 8, "seq_q": 1, "seq_kv": 4096, "head_dim": 128}
    tiling = declared("split_kv", hw, splits=8)
    plain, cached = (
        run("split_kv", problem=Problem(**sizes, **more), hw=hw, numerics=False, tiling=tiling, l2="clean")
        for more in ({}, {"cache": "int8"})
    )
    assert cached.problem.kv_bytes() == 2 * 8 * 4096 * (128 + 4)
    assert plain.problem.kv_bytes() == 2 * 8 * 4096 * 256
    saved = plain.timing.link_bytes["hbm"] - cached.timing.link_bytes["hbm"]
    assert saved == pytest.approx(plain.problem.kv_bytes() - cached.problem.kv_bytes(), rel=0.01)
    vectors = "FMA" if "sm" in cached.device.cores else "VECTOR"
    busy = [sum(u.busy_cycles for u in x.timing.uses if u.pipe == vectors) for x in (plain, cached)]
    assert busy[1] > 1.5 * busy[0]


@pytest.mark.parametrize("hw", ["ascend_910b2", "ascend_950", "h200", "xeon_avx512"])
def test_scales_of_blocks_heads_and_channels(hw: str) -> None:
    """A scale for one token is that of a block of one; larger blocks round more and hold fewer scales."""
    sizes = {"heads": 2, "seq_q": 16, "lengths": (200, 90), "head_dim": 64, "cache": "int8"}
    scaled = [Problem(**sizes, cache_scale=each) for each in ("token", 1, 64, "head", "channel")]
    done = [run("flash", problem=p, hw=hw, rows="all", tiling=declared("flash", hw)) for p in scaled]
    rows = [np.concatenate(list(x.numerics.rows.values())) for x in done]
    assert np.array_equal(rows[0], rows[1])
    assert done[0].numerics.error.rmse < 1e-3
    assert [p.kv_bytes() - 2 * 2 * 290 * 64 for p in scaled] == [16 * 290, 16 * 290, 16 * (4 + 2), 16 * 2, 16 * 2 * 64]


@pytest.mark.parametrize(("hw", "schedule"), [("ascend_910b2", "standard"), ("h200", "pasa"), ("h200", "split_kv")])
def test_a_scale_a_channel_holds_outliers_of_a_channel(hw: str, schedule: str) -> None:
    """One channel of K 16 times the others: a scale of each rounds the others as finely as without."""
    problem = Problem(heads=2, seq_q=16, seq_kv=200, head_dim=64, cache="int8")
    drawn, errors = recipe_source(problem), {}
    tensors = {n: np.stack([drawn(n, 0, h) for h in range(2)])[None] for n in "qkv"}
    tensors["k"][..., 7] *= np.float16(16)
    for each in ("head", "channel"):
        of = problem.model_copy(update={"cache_scale": each})
        read = run(schedule, problem=of, hw=hw, tensors=tensors, rows="all", tiling=declared(schedule, hw))
        bare = of.model_copy(update={"cache": None, "cache_scale": "token"})
        plain = run(schedule, problem=bare, hw=hw, tensors=tensors, rows="all", tiling=declared(schedule, hw))
        wide = [x.output.astype(np.float64) for x in (read, plain)]
        errors[each] = float(np.linalg.norm(wide[0] - wide[1]) / np.linalg.norm(wide[1]))
    assert errors["channel"] < 0.3 * errors["head"]


@kernel(q="row head", k="key head", v="key value", mask="row key")
def positive(q: Value, k: Value, v: Value, mask: Value, p: FlashPrecision, scale: float) -> Value:
    """Attention whose products read keys of 0 and more."""
    k.prepared = lambda tile: maximum(tile, 0.0)
    o, _, l = attend(q, k, v, mask, p, scale, unchanged)
    return (o.to(p.running) / l).to(p.output)


@pytest.mark.parametrize("hw", ["ascend_910b2", "ascend_950", "h200", "t4"])
def test_products_read_what_rows_make_of_a_tile(hw: str) -> None:
    """Any function of a tile's operands: as bits, what a kernel before would have left."""
    problem, device = Problem(heads=2, seq_q=100, seq_kv=200, head_dim=32, causal=True), load_device(hw)
    source, rows = recipe_source(problem), []
    for name, kernel_of in (("positive", positive), ("flash", flash)):
        (made,) = (s for s in attention(name, kernel_of, precisions=[FlashPrecision("p")]) if s.family == device.family)
        program = made.program(problem, made.tiling(block_kv=64), device, for_inputs(made.precision(), "float16"))

        def inputs(what: str, batch: int, head: int, *, is_before: bool = name == "flash") -> Any:
            values = source(what, batch, head)
            return np.maximum(values, 0) if what == "k" and is_before else values

        rows.append(evaluate(program, problem, inputs, rows="all", heads="all").rows)
    assert all(np.array_equal(block, rows[1][key]) for key, block in rows[0].items())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SpecError, match="cache_scale: head is the scale of a cache, but there is no"):
        Problem(heads=1, seq_q=16, head_dim=16, cache_scale="head")
    with pytest.raises(SpecError, match="cache: a cache in int8 is converted to float16 or bfloat16, not to float32"):
        Problem(heads=1, seq_q=16, head_dim=16, dtype="float32", cache="int8")
    with pytest.raises(TilingError, match="cache: v100 has no kernel that converts a cache of int8 to float16"):
        run("flash", problem=Problem(heads=1, seq_q=128, head_dim=64, cache="int8"), hw="v100")


@pytest.mark.parametrize("hw", ["ascend_910b3", "h200"])
@pytest.mark.parametrize("cache", [{}, {"cache": "int8"}, {"cache": "int8", "cache_scale": "channel"}])
def test_heads_of_one_column_are_padded(hw: str, cache: dict[str, Any]) -> None:
    """A scale has one column too, but only Q, K, V and the scales of channels are padded."""
    rng = np.random.default_rng(0)
    tensors = {n: rng.standard_normal((1, 1, 5, 1)).astype(np.float16) for n in "qkv"}
    result = run("flash", hw=hw, tensors=tensors, rows="all", presets=False, causal=False, **cache)
    q, k, v = (tensors[n][0, 0].astype(np.float64) for n in "qkv")
    weights = np.exp(q @ k.T)
    expected = weights @ v / weights.sum(1, keepdims=True)
    assert result.output is not None
    np.testing.assert_allclose(result.output[0, 0].astype(np.float64), expected, atol=0.02 if cache else 2e-3)


def test_a_slot_of_several_inputs_is_no_slot_of_other_operands() -> None:
    """With a bias and O in memory, loads share a slot for want of flags; V and its scales then have their own."""
    asked: dict[str, Any] = {"cache": "int8", "bias": "shared", "tiling": {"running": "gm"}, "shape": "N2,S32,D64"}
    result = run("flash", causal=True, rows="all", presets=False, hw="ascend_910b3", **asked)
    assert result.numerics is not None
    assert result.numerics.error is not None
    assert result.numerics.error.rmse < 1e-3
