"""Loops whose state is a factor of a product: bits equal the recurrence, and what no route serves is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim.config.load import load_device
from npusim.config.tiling import build_tiling
from npusim.errors import ProgramError, TilingError
from npusim.kernel import GlobalTensor, Phase, Stacked, TileRun, WorkTile, exp, full, grid, kernel, tiles, with_columns
from npusim.kernels.declare.define import attention_fields, machine_of
from npusim.program.ir.check import check
from npusim.program.numerics.executor import execute
from npusim.program.timing.auto import simulate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import TileProgram

F32 = "float32"
DEVICES = ("ascend_910b2", "ascend_950", "h200", "a100", "v100")
HEADS, CHUNK, WIDTH = 2, 32, 32
Array = np.ndarray[Any, Any]


@kernel(results="o", q="row key", k="token key", v="token value", walks="row token")
def summed(q: Any, k: Any, v: Any, fmt: str) -> Any:
    """Both products of a chunk in one accumulator."""
    s = full("key value", 0.0, F32)
    for qi, kj, vj in tiles(q, k, v):
        h = s.to(fmt)
        a = (qi @ kj.T).to(F32).to(fmt)
        yield (a @ vj + qi @ h).to(F32).to(fmt)
        s = s + (kj.T @ vj).to(F32)


@kernel(results="o", q="row key", k="token key", v="token value", walks="row token")
def transposed(q: Any, k: Any, v: Any, fmt: str) -> Any:
    """The state is the left factor, transposed; so is a tile that rows make."""
    s = full("key value", 0.0, F32)
    for qi, kj, vj in tiles(q, k, v):
        yield (s.to(fmt).T @ qi.T).to(F32).to(fmt)
        twice = (kj + kj).to(fmt)
        s = s + (twice.T @ vj).to(F32)


@kernel(results="h x", k="row key", w="row key", u="row value", end="key", walks="row")
def delta_h(k: Any, w: Any, u: Any, end: Any, fmt: str) -> Any:
    """A matrix for each chunk, rows of each, and a factor of each, from a stack."""
    s = full("key value", 0.0, F32)
    for kj, wj, uj, ej in tiles(k, w, u, end):
        h, kept = s.to(fmt), s.to(fmt)
        x = uj.to(F32) - (wj @ h).to(F32)
        yield kept, x.to(fmt)
        fed = x.to(fmt)
        s = s * ej + (kj.T @ fed).to(F32)


def _tensor(name: str, rows: int, cols: int, role: Any = "input", batch: int = 1, fmt: str = "float16") -> GlobalTensor:
    return GlobalTensor(name, batch, HEADS, rows, cols, fmt, role)


def _integers(shape: Sequence[int], seed: int) -> Array:
    """Return entries -1, 0, 1, few enough that every value of a recurrence is exact."""
    draw = np.random.default_rng(seed)
    return (draw.integers(-1, 2, shape) * (draw.random(shape) < 0.25)).astype(np.float16)


def _blocks(tokens: int) -> tuple[WorkTile, ...]:
    """Return a block a head, with its chunks: the last is ragged where tokens do not fill it."""
    whole, rest = divmod(tokens, CHUNK)
    runs = [TileRun(0, CHUNK, whole, CHUNK)] if whole else []
    runs += [TileRun(whole * CHUNK, rest, 1, rest)] if rest else []
    spans = ("key", 0, WIDTH), ("value", 0, WIDTH)
    return tuple(WorkTile(0, h, spans, tuple(runs)) for h in range(HEADS))


def built(phase: Phase, device: DeviceSpec) -> TileProgram:
    """Return the program of one kernel on a device, one tile ahead where it is an Ascend."""
    machine = machine_of(device)
    tiling = build_tiling(attention_fields(device.family), {"depth": "1"} if device.family == "ascend" else {})
    fields, _ = machine.fields_for(phase.name, phase, tiling)
    made: TileProgram = machine.build("states", [(phase, fields)], 1)
    return made


def _computed(hw: str, phase: Phase, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return what a device computes, by result: (batch, heads, rows, columns); the program is checked and timed."""
    device = load_device(hw)
    program = built(phase, device)
    check(program, device.flags)
    assert simulate(program, device).cycles > 0
    done = execute(program, lambda n, b, h: inputs[n][b, h])
    outs = [t for t in program.tensors.values() if t.role == "output"]
    return {
        t.name: np.array([[done.tensors.head(t, b, h) for h in range(t.heads)] for b in range(t.batch)]) for t in outs
    }


def of_chunks(function: Any, tokens: int, out: GlobalTensor | None = None) -> Phase:
    """Return a kernel of q, k and v, chunk by chunk, with results of tokens where nothing else is said."""
    shape = (WIDTH, tokens) if function is transposed else (tokens, WIDTH)
    out = out or _tensor("o", *shape, "output")
    sizes = {"row": CHUNK, "token": CHUNK, "key": WIDTH, "value": WIDTH}
    operands = {n: _tensor(n, tokens, WIDTH) for n in "qkv"}
    return function.phase(function.__name__, _blocks(tokens), sizes, [out], fmt="float16", **operands)


@pytest.mark.parametrize("tokens", [96, 80])
@pytest.mark.parametrize("hw", DEVICES)
def test_a_state_as_right_factor_is_the_recurrence_bit_for_bit(hw: str, tokens: int) -> None:
    inputs = {n: _integers((1, HEADS, tokens, WIDTH), i) for i, n in enumerate("qkv")}
    q, k, v = (inputs[n].astype(int) for n in "qkv")
    expected = np.zeros((1, HEADS, tokens, WIDTH), int)
    for at in range(0, tokens, CHUNK):  # no mask within a chunk: every query sees the whole chunk
        end = min(at + CHUNK, tokens)
        expected[:, :, at:end] = q[:, :, at:end] @ (k[:, :, :end].transpose(0, 1, 3, 2) @ v[:, :, :end])
    found = _computed(hw, of_chunks(summed, tokens), inputs)
    assert np.array_equal(found["o"].astype(int), expected)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_state_and_a_tile_of_rows_may_be_transposed_as_left_factors(hw: str) -> None:
    tokens = 64
    inputs = {n: _integers((1, HEADS, tokens, WIDTH), i) for i, n in enumerate("qkv")}
    q, k, v = (inputs[n].astype(int) for n in "qkv")
    out = Stacked("chunk", tokens // CHUNK, _tensor("o", WIDTH, CHUNK, "output", tokens // CHUNK))
    found = _computed(hw, of_chunks(transposed, tokens, out), inputs)["o"]  # type: ignore[arg-type]
    for chunk in range(tokens // CHUNK):
        before, mine = slice(chunk * CHUNK), slice(chunk * CHUNK, chunk * CHUNK + CHUNK)
        state = 2 * k[0, :, before].transpose(0, 2, 1) @ v[0, :, before]
        assert np.array_equal(found[chunk].astype(int), state.transpose(0, 2, 1) @ q[0, :, mine].transpose(0, 2, 1))


@pytest.mark.parametrize("hw", DEVICES)
def test_a_matrix_a_chunk_and_rows_are_results_of_one_loop(hw: str) -> None:
    chunks, tokens = 3, 3 * CHUNK
    inputs = {n: _integers((1, HEADS, tokens, WIDTH), i) for i, n in enumerate("kwu")}
    inputs["end"] = np.broadcast_to(np.float32([1, 0.5, 1])[:, None, None, None], (chunks, HEADS, WIDTH, 1))
    operands = {n: _tensor(n, tokens, WIDTH) for n in "kwu"}
    stack = Stacked("chunk", chunks, _tensor("end", WIDTH, 1, "input", chunks, F32))
    outs = [
        Stacked("chunk", chunks, _tensor("h", WIDTH, WIDTH, "output", chunks)),
        _tensor("x", tokens, WIDTH, "output"),
    ]
    sizes = {"row": CHUNK, "key": WIDTH, "value": WIDTH}
    phase = delta_h.phase("delta_h", _blocks(tokens), sizes, outs, fmt="float16", end=stack, **operands)
    found = _computed(hw, phase, inputs)
    for head in range(HEADS):
        state = np.zeros((WIDTH, WIDTH))
        for chunk in range(chunks):
            at = slice(chunk * CHUNK, chunk * CHUNK + CHUNK)
            k, w, u = (inputs[n][0, head, at].astype(float) for n in "kwu")
            assert np.array_equal(found["h"][chunk, head], state)
            x = u - w @ state
            assert np.array_equal(found["x"][0, head, at], x)
            state = state * inputs["end"][chunk, head] + k.T @ x


# ---------------------------------------------------------------- faults of placement


@kernel(results="dq", q="row head", k="key head", kt="key head", v="key value", do="row value", lse="row", delta="row")
def dq(q: Any, k: Any, kt: Any, v: Any, do: Any, lse: Any, delta: Any, scale: float, fmt: str) -> Any:
    """A tile made before a product (P) is read behind it, with one of the product's (dP)."""
    total = full("row head", 0.0, F32)
    for kj, ktj, vj in tiles(k, kt, v):
        p = exp((q @ kj.T).to(F32) * scale - lse)
        ds = p * ((do @ vj.T).to(F32) - delta)
        total = total + (ds.to(fmt) @ ktj).to(F32)
    return (total * scale).to(fmt)


@kernel(results="dv", k="key head", q="row head", do="row value", lse="1 row", delta="1 row")
def dv(k: Any, q: Any, do: Any, lse: Any, delta: Any, scale: float, fmt: str) -> Any:
    """Two rows that all rows of a tile take are operands of one stage."""
    total = full("key value", 0.0, F32)
    for qi, oi, li, di in tiles(q, do, lse, delta):
        p = exp((k @ qi.T).to(F32) * scale - li - di)
        total = total + (p.to(fmt) @ oi).to(F32)
    return total.to(fmt)


@kernel(results="o", a="row token", v="token value", g="row")
def twice(a: Any, v: Any, g: Any, fmt: str) -> Any:
    """One vector is read by the rows before a product and by those behind it, without a loop."""
    w = (a.to(F32) * g).to(fmt)
    return ((w @ v).to(F32) * g).to(fmt)


def _close(found: Array, expected: Array) -> bool:
    return bool(np.linalg.norm(found - expected) < 1e-3 * np.linalg.norm(expected))


@pytest.mark.parametrize("hw", ["ascend_910b2", "ascend_950", "h200", "a100"])
def test_rows_may_read_a_tile_behind_the_product_that_others_feed(hw: str) -> None:
    tokens, tile = 128, 64
    draw = np.random.default_rng(3)
    x: dict[str, Any] = {
        n: draw.normal(size=(1, HEADS, tokens, WIDTH)).astype(np.float16) for n in ("q", "k", "v", "do")
    }
    q, k, v, do = (x[n].astype(float) for n in ("q", "k", "v", "do"))
    scores = q @ k.transpose(0, 1, 3, 2) * WIDTH**-0.5
    x |= {"lse": np.log(np.exp(scores).sum(3, keepdims=True)).astype(np.float32)}
    p = np.exp(scores - x["lse"])
    x |= {"delta": (do * (p @ v)).sum(3, keepdims=True).astype(np.float32)}
    ds = p * (do @ v.transpose(0, 1, 3, 2) - x["delta"])
    out, operands = (
        _tensor("dq", tokens, WIDTH, "output"),
        {n: _tensor(n, tokens, WIDTH) for n in ("q", "k", "v", "do")},
    )
    rows = {n: _tensor(n, tokens, 1, "input", 1, F32) for n in ("lse", "delta")}
    blocks = with_columns(grid(out, ("row", tile)), tokens, tile)
    sizes = {"row": tile, "key": tile, "head": WIDTH, "value": WIDTH}
    more: dict[str, Any] = {"scale": WIDTH**-0.5, "fmt": "float16", **operands, **rows}
    phase = dq.phase("dq", blocks, sizes, [out], kt=operands["k"], **more)
    assert _close(_computed(hw, phase, x)["dq"].astype(float), ds @ k * WIDTH**-0.5)


@pytest.mark.parametrize("hw", ["ascend_910b2", "ascend_950", "h200"])
def test_two_rows_that_all_rows_take_come_in_two_rings(hw: str) -> None:
    tokens, tile = 128, 64
    draw = np.random.default_rng(4)
    x: dict[str, Any] = {n: draw.normal(size=(1, HEADS, tokens, WIDTH)).astype(np.float16) for n in ("q", "k", "do")}
    x |= {n: draw.uniform(2, 4, (1, HEADS, 1, tokens)).astype(np.float32) for n in ("lse", "delta")}
    out, operands = _tensor("dv", tokens, WIDTH, "output"), {n: _tensor(n, tokens, WIDTH) for n in ("q", "k", "do")}
    rows = {n: _tensor(n, 1, tokens, "input", 1, F32) for n in ("lse", "delta")}
    blocks = with_columns(grid(out, ("key", tile)), tokens, tile)
    sizes = {"row": tile, "key": tile, "head": WIDTH, "value": WIDTH}
    phase = dv.phase("dv", blocks, sizes, [out], scale=WIDTH**-0.5, fmt="float16", **operands, **rows)
    scores = x["k"].astype(float) @ x["q"].astype(float).transpose(0, 1, 3, 2) * WIDTH**-0.5
    expected = np.exp(scores - x["lse"] - x["delta"]) @ x["do"].astype(float)
    assert _close(_computed(hw, phase, x)["dv"].astype(float), expected)


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200", "v100"])
def test_a_vector_may_be_read_by_two_stages_of_rows_without_a_loop(hw: str) -> None:
    x: dict[str, Any] = {"a": _integers((1, HEADS, 64, 64), 0), "v": _integers((1, HEADS, 64, WIDTH), 1)}
    x["g"] = np.random.default_rng(2).integers(1, 4, (1, HEADS, 64, 1)).astype(np.float32)
    out, g = _tensor("o", 64, WIDTH, "output"), _tensor("g", 64, 1, "input", 1, F32)
    sizes = {"row": 64, "token": 64, "value": WIDTH}
    operands = {"a": _tensor("a", 64, 64), "v": _tensor("v", 64, WIDTH), "g": g}
    phase = twice.phase("twice", grid(out, ("row", 64)), sizes, [out], fmt="float16", **operands)
    expected = ((x["a"] * x["g"]) @ x["v"].astype(float)) * x["g"]
    assert np.array_equal(_computed(hw, phase, x)["o"].astype(float), expected)


# ---------------------------------------------------------------- refused


def test_axes_that_one_loop_walks_are_axes_of_operands_and_of_one_size() -> None:
    with pytest.raises(ProgramError, match=r"walks='row tokens': no operand has the axis tokens"):
        kernel(walks="row tokens", q="row key", k="token key")(lambda q, k: q)
    sizes = {"row": CHUNK, "token": 2 * CHUNK, "key": WIDTH, "value": WIDTH}
    operands = {n: _tensor(n, 64, WIDTH) for n in "qkv"}
    with pytest.raises(
        ProgramError, match="walks: the tiles have 32 rows and 64 tokens; all tiles of a loop must have one size"
    ):
        summed.phase("s", _blocks(64), sizes, [_tensor("o", 64, WIDTH, "output")], fmt="float16", **operands)


def test_a_sum_of_products_is_stored_as_it_adds_up() -> None:
    @kernel(a="row depth", b="depth col")
    def halves(a: Any, b: Any) -> Any:
        return (a @ b + a @ b).to("float16")

    a, b = _tensor("a", 32, 32), _tensor("b", 32, 32)
    blocks, sizes = grid(a, ("row", 32)), {"row": 32, "depth": 32, "col": 32}
    with pytest.raises(
        ProgramError, match=r"\(a @ b \+ a @ b\)\.to\('float16'\): a sum of products is stored in the acc"
    ):
        halves.phase("halves", blocks, sizes, [_tensor("out", 32, 32, "output")], a=a, b=b)


def test_a_sum_of_products_has_one_accumulator_on_ascend() -> None:
    tokens, wide = 64, 256
    sizes = {"row": CHUNK, "token": CHUNK, "key": WIDTH, "value": wide}
    cells = tuple(replace(b, spans=(("key", 0, WIDTH), ("value", 0, wide))) for b in _blocks(tokens))
    operands = {"q": _tensor("q", tokens, WIDTH), "k": _tensor("k", tokens, WIDTH), "v": _tensor("v", tokens, wide)}
    phase = summed.phase("s", cells, sizes, [_tensor("o", tokens, wide, "output")], fmt="float16", **operands)
    with pytest.raises(TilingError, match="is a term of a sum of products in one accumulator"):
        _computed("ascend_910b2", phase, {})
