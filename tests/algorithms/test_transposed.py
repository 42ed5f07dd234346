"""Products whose left operand is stored transposed: bits are those of the transposed values, costs those of its way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npusim
from npusim import formats
from npusim.config.load import load_device
from npusim.config.problem import GemmProblem, Problem
from npusim.config.tiling import build_tiling
from npusim.errors import TilingError
from npusim.kernel import FlashPrecision, GlobalTensor, full, grid, kernel, schedule, tiles, with_columns
from npusim.kernels.declare.define import attention_fields, machine_of
from npusim.program.ir.check import check
from npusim.program.numerics.executor import execute
from npusim.simulation.simulate import simulate_program
from tests.algorithms.interpreter import Machine, Numbers

if TYPE_CHECKING:
    from npusim.program.ir.tile_program import TileProgram

LINEAR = f"{Path(__file__).parents[1]}/plugins/linear_attention.py:LINEAR_ATTENTION"
M, N, K, TILE = 128, 96, 200, 64
PIECES = [slice(at, min(at + TILE, K)) for at in range(0, K, TILE)]


@kernel(results="c", a="k m", b="k n")
def whole(a: Any, b: Any) -> Any:
    return (a.T @ b).to("float16")


@kernel(results="c", a="k m", b="k n")
def summed(a: Any, b: Any) -> Any:
    c = full("m n", 0.0, "float32")
    for ak, bk in tiles(a, b):
        c = c + (ak.T @ bk).to("float32")
    return c.to("float16")


@kernel(results="c", a="k m", b="k n")
def chained(a: Any, b: Any) -> Any:
    c = full("m n", 0.0, "float32")
    for ak, bk in tiles(a, b):
        c = c + ak.T @ bk
    return c.to("float16")


@kernel(results="c", a="k m", b="n k")
def held(a: Any, b: Any) -> Any:
    for bn in tiles(b, axis="n"):
        yield (a.T @ bn.T).to("float16")


@kernel(results="c", a="m k", b="k n")
def plain(a: Any, b: Any) -> Any:
    c = full("m n", 0.0, "float32")
    for ak, bk in tiles(a, b):
        c = c + (ak @ bk).to("float32")
    return c.to("float16")


def program_of(function: Any, hw: str, fmt: str = "float16") -> TileProgram:
    sizes = {"m": M, "n": N, "k": K}
    a, b = (GlobalTensor(n, 1, 1, *(sizes[x] for x in function.axes[n].split()), fmt, "input") for n in "ab")
    c = GlobalTensor("c", 1, 1, M, N, "float16", "output")
    blocks, spans = grid(c, ("m", 64), ("n", N)), {"m": 64, "n": N, "k": K}
    if function is held:
        blocks, spans["n"] = with_columns(grid(c, ("m", 64)), N, TILE), TILE
    elif function is not whole:
        blocks, spans["k"] = with_columns(blocks, K, TILE), TILE

    def phases(*_: Any) -> Any:
        return [function.phase("product", blocks, spans, [c], a=a, b=b)]

    device = load_device(hw)
    of_family = {
        s.family: s for s in schedule("product", phases, precisions=[FlashPrecision("p")], problem=GemmProblem)
    }
    one = of_family[device.family]
    return one.program(GemmProblem(m=M, n=N, k=K, dtype=fmt), build_tiling(one.tiling, {}), device, FlashPrecision("p"))


def expected(function: Any, hw: str, a: Any, b: Any) -> Any:
    """Return C as the kernel's lines have it, on values: ``a`` is M x K, ``b`` K x N."""
    run: Any = SimpleNamespace(machine=Machine(load_device(hw)))
    left, right = (
        [Numbers(x, "float16", run) for x in cut] for cut in ([a[:, p] for p in PIECES], [b[p] for p in PIECES])
    )
    if function in (whole, held):
        return (Numbers(a, "float16", run) @ Numbers(b, "float16", run)).to("float16").of
    total = Numbers(formats.cast(np.zeros((M, N)), "float32"), "float32", run)
    for x, y in zip(left, right, strict=True):
        total = total + (x @ y if function is chained else (x @ y).to("float32"))
    return total.to("float16").of


DEVICES = "ascend_910b2", "ascend_950", "h200", "a10", "v100"


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize("function", [whole, summed, chained, held], ids=lambda f: f.__name__)
def test_bits_are_those_of_the_transposed_values(function: Any, hw: str) -> None:
    rng = np.random.default_rng(7)
    a, b = (formats.cast(rng.standard_normal(size), "float16") for size in ((K, M), (K, N)))
    program, stored = program_of(function, hw), {"a": a, "b": b.T.copy() if function is held else b}
    check(program, load_device(hw).flags)
    written = execute(program, lambda n, *_: stored[n]).tensors.head(program.tensors["c"], 0, 0)
    assert np.array_equal(written, expected(function, hw, a.T, b))


def _weighted(turns: bool) -> Any:
    """Return a kernel that weighs V by scaled scores, made as keys by rows where it ``turns`` them."""

    @kernel(results="o", q="row head", k="key head", v="key value")
    def weighted(q: Any, k: Any, v: Any) -> Any:
        o = full("row value", 0.0, "float32")
        for kj, vj in tiles(k, v):
            w = ((kj @ q.T if turns else q @ kj.T).to("float32") * 0.5).to("float16")
            o = o + ((w.T if turns else w) @ vj).to("float32")
        return o.to("float16")

    return weighted


@pytest.mark.parametrize("hw", [*DEVICES, "a100", "t4"])
def test_what_rows_make_is_transposed_in_a_loop(hw: str) -> None:
    device, sizes = load_device(hw), {"q": (200, 64), "k": (300, 64), "v": (300, 48)}
    machine, draw, outputs = machine_of(device), np.random.default_rng(0), list[Any]()
    inputs = {n: formats.cast(draw.standard_normal(shape), "float16") for n, shape in sizes.items()}
    o = GlobalTensor("o", 1, 1, 200, 48, "float16", "output")
    blocks = with_columns(grid(o, ("row", 128)), 300, 64)
    for turns in (True, False):
        bound = {n: GlobalTensor(n, 1, 1, *shape, "float16", "input") for n, shape in sizes.items()}
        spans = {"row": 128, "key": 64, "head": 64, "value": 48}
        phase = _weighted(turns).phase("weighted", blocks, spans, [o], **bound)
        fields = machine.fields_for("weighted", phase, build_tiling(attention_fields(device.family), {}))[0]
        program = machine.build("weighted", [(phase, fields)], 1)
        check(program, device.flags)
        outputs.append(execute(program, lambda n, *_: inputs[n]).tensors.head(program.tensors["o"], 0, 0))
    assert np.abs(outputs[0].astype(float)).max() > 100
    assert np.array_equal(*outputs)


@pytest.mark.parametrize("hw", DEVICES)
def test_the_way_of_a_transposed_operand_costs_what_memories_have_of_it(hw: str) -> None:
    transposed, straight = (simulate_program(program_of(f, hw), load_device(hw), "auto") for f in (summed, plain))
    works = [
        sum(n for name, n in t.term_cycles.items() if "step" in name or "fractal" in name)
        for t in (transposed, straight)
    ]
    assert works[0] == works[1]
    match hw:
        case "h200" | "a10":  # ldmatrix.trans and wgmma's descriptors are as fast; pieces of K may be parts of sectors
            assert 0.98 * straight.cycles < transposed.cycles < straight.cycles
        case "v100":  # lanes read down the columns: more rows of banks
            assert straight.cycles < transposed.cycles < 1.05 * straight.cycles
        case _:  # L1 to L0A as fast; pieces of K are fewer, longer rows of global memory
            assert 0.9 * straight.cycles < transposed.cycles < straight.cycles


def test_eight_bits_are_transposed_by_ascend_alone() -> None:
    assert program_of(summed, "ascend_950", "float8_e4m3fn").phases
    with pytest.raises(
        TilingError, match=r"A\^T in float8_e4m3fn: tensor cores can read a left operand only along its rows"
    ):
        program_of(summed, "h200", "float8_e4m3fn")


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200", "v100"])
def test_linear_attention_is_two_products(hw: str) -> None:
    problem = Problem(heads=4, kv_heads=2, seq_q=150, seq_kv=200, head_dim=64)
    found = npusim.run(LINEAR, hw=hw, problem=problem)  # a sample of rows needs all of the state
    assert found.numerics is not None
    assert found.numerics.error.rmse < 4e-4
