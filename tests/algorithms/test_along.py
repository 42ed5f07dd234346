"""Operations along a tile, states that are given and left, numbers by head: bits on five devices, refusals by line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from algorithms.test_states import CHUNK, DEVICES, F32, HEADS, WIDTH, _blocks, _computed, _integers, _tensor
from npusim.errors import ProgramError, UnknownOpcodeError
from npusim.kernel import Ends, Stacked, WorkTile, full, grid, initial, inverse, kernel, tiles


@kernel(results="x", a="row token")
def inverted(a: Any) -> Any:
    """The inverse of a tile by itself."""
    return inverse(a)


@kernel(results="g", d="1 token")
def summed(d: Any, every: int) -> Any:
    """Sums along one row, begun anew."""
    return d.cumsum(every=every)


@kernel(results="e", b="row", d="1 token")
def spanned(b: Any, d: Any) -> Any:
    """A column and a row span a tile."""
    return (b - d) * 0.5


@kernel(results="o last", q="row key", k="token key", v="token value", first="key value", keep="1", walks="row token")
def walked(q: Any, k: Any, v: Any, first: Any, keep: Any, fmt: str) -> Any:
    """A state that is given, decays by a number a head and a chunk, and is left."""
    s = initial(first)
    for qi, kj, vj, e in tiles(q, k, v, keep):
        h = s.to(fmt)
        yield (qi @ h).to(F32).to(fmt)
        s = s * e + (kj.T @ vj).to(F32)
    return s


@pytest.mark.parametrize("rows", [64, 48, 120])
@pytest.mark.parametrize("hw", DEVICES)
def test_the_inverse_of_a_tile_is_exact(hw: str, rows: int) -> None:
    """Of one square, of one that lacks rows, and of two, of which the second does."""
    n = 64
    draw = np.random.default_rng(rows)
    a = np.float32(draw.integers(-1, 2, (1, HEADS, rows, n)) * (draw.random((1, HEADS, rows, n)) < 0.05))
    tensor = _tensor("a", rows, n, fmt=F32)
    sizes, out = {"row": rows, "token": n}, _tensor("x", rows, n, "output", fmt=F32)
    found = _computed(hw, inverted.phase("inverted", grid(tensor, ("row", rows)), sizes, [out], a=tensor), {"a": a})
    for at in range(0, rows, n):
        part = np.zeros((HEADS, n, n))
        part[:, : rows - at] = a[0, :, at : at + n]
        expected = np.linalg.inv(np.eye(n) + np.tril(part, -1))[:, : rows - at]
        assert np.array_equal(found["x"][0, :, at : at + n], np.round(expected))


@pytest.mark.parametrize("hw", DEVICES)
def test_sums_along_a_row_begin_anew(hw: str) -> None:
    n = 80
    d = np.random.default_rng(1).integers(-3, 3, (1, HEADS, 1, n)).astype(np.float32)
    cells = tuple(WorkTile(0, h, (("1", 0, 1), ("token", 0, n))) for h in range(HEADS))
    out = _tensor("g", 1, n, "output", fmt=F32)
    phase = summed.phase("summed", cells, {"token": n}, [out], d=_tensor("d", 1, n, fmt=F32), every=32)
    expected = np.concatenate([d[..., at : at + 32].cumsum(-1) for at in (0, 32, 64)], -1)
    assert np.array_equal(_computed(hw, phase, {"d": d})["g"], expected)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_tensor_of_one_row_is_read_as_a_column_and_as_a_row(hw: str) -> None:
    n = 96
    d = np.random.default_rng(2).integers(-9, 9, (1, HEADS, 1, n)).astype(np.float32)
    one, out = _tensor("d", 1, n, fmt=F32), _tensor("e", n, n, "output", fmt=F32)
    sizes = {"row": 32, "token": n}
    phase = spanned.phase("spanned", grid(out, ("row", 32)), sizes, [out], b=one, d=one)
    assert np.array_equal(_computed(hw, phase, {"d": d})["e"], (d.swapaxes(-1, -2) - d) / 2)


@pytest.mark.parametrize("tokens", [96, 80])
@pytest.mark.parametrize("hw", DEVICES)
def test_a_state_is_given_and_left(hw: str, tokens: int) -> None:
    chunks = -(-tokens // CHUNK)
    x: dict[str, Any] = {n: _integers((1, HEADS, tokens, WIDTH), i) for i, n in enumerate("qkv")}
    x["first"] = _integers((1, HEADS, WIDTH, WIDTH), 9).astype(np.float32)
    x["keep"] = np.random.default_rng(5).integers(1, 3, (chunks, HEADS, 1, 1)).astype(np.float32) / 2
    operands: dict[str, Any] = {n: _tensor(n, tokens, WIDTH) for n in "qkv"}
    operands["first"] = _tensor("first", WIDTH, WIDTH, fmt=F32)
    operands["keep"] = Stacked("chunk", chunks, _tensor("keep", 1, 1, "input", chunks, F32))
    outs = [_tensor("o", tokens, WIDTH, "output"), _tensor("last", WIDTH, WIDTH, "output", fmt=F32)]
    sizes = {"row": CHUNK, "token": CHUNK, "key": WIDTH, "value": WIDTH}
    found = _computed(hw, walked.phase("walked", _blocks(tokens), sizes, outs, fmt="float16", **operands), x)
    for head in range(HEADS):
        state = x["first"][0, head].astype(float)
        for chunk in range(chunks):
            at = slice(chunk * CHUNK, min(tokens, chunk * CHUNK + CHUNK))
            q, k, v = (x[n][0, head, at].astype(float) for n in "qkv")
            assert np.array_equal(found["o"][0, head, at], q @ state)
            state = state * x["keep"][chunk, head] + k.T @ v
        assert np.array_equal(found["last"][0, head], state)


# ---------------------------------------------------------------- refused


def _phase(function: Any, **tensors: Any) -> Any:
    out = _tensor("x", 32, 32, "output", fmt=F32)
    sizes = {"row": 32, "token": 32, "key": 32, "value": 32}
    return function.phase("f", grid(out, ("row", 32)), sizes, [out], **tensors)


def _fails(body: Any, message: str, axes: str = "row token", fmt: str = F32) -> None:
    with pytest.raises(ProgramError, match=message) as caught:
        _phase(kernel(results="x", a=axes)(body), a=_tensor("a", 32, 32, fmt=fmt))
    assert "test_along.py" in str(caught.value)  # with the line


def test_mistakes_are_told_with_their_line() -> None:
    _fails(lambda a: inverse(a, "lu"), r"inverse\(a, 'lu'\): unknown order; allowed: rows, blocks")
    _fails(lambda a: inverse(a.to("float16")), "an inverse is computed in float32; convert")
    _fails(lambda a: inverse(a.max()), "the tile must be square")
    _fails(lambda a: a.max().cumsum(), "sums run along the columns of a row; bind the vector as one row, '1 row'")
    _fails(lambda a: a.cumsum("tree"), "unknown order; allowed: sequential, warps")
    _fails(lambda a: a.cumsum(every=-1), r"cumsum\(every=-1\): a number of columns is 0 or more")
    _fails(lambda a: initial(a + a), "the argument must be an operand of the kernel")


def test_a_state_that_starts_as_an_operand_has_no_axis_of_the_loop() -> None:
    @kernel(results="x", a="row token", b="row token")
    def walks_it(a: Any, b: Any) -> Any:
        s = initial(b)
        for aj in tiles(a):
            s = s + aj
        return s

    a, b = _tensor("a", 32, 32, fmt=F32), _tensor("b", 32, 32, fmt=F32)
    with pytest.raises(ProgramError, match="starts as b, whose token axis is that of a loop"):
        _phase(walks_it, a=a, b=b)


def test_the_last_number_of_an_axis_that_nothing_has_a_part_of_is_refused() -> None:
    @kernel(results="x", a="row token", e="1")
    def ends(a: Any, e: Any) -> Any:
        return a * e

    a, g = _tensor("a", 32, 32, fmt=F32), _tensor("g", 1, 32, fmt=F32)
    with pytest.raises(ProgramError, match="e is the last number along value, but no block and no tile"):
        _phase(ends, a=a, e=Ends("value", g))


def test_an_order_that_a_unit_does_not_have_costs_nothing_known() -> None:
    @kernel(results="x", a="row token")
    def other(a: Any) -> Any:
        return inverse(a, "blocks")

    a = _tensor("a", 32, 32, fmt=F32)
    with pytest.raises(
        UnknownOpcodeError, match=r"INVERSE in order 'blocks' has no cost on this vector unit; allowed: rows"
    ):
        _computed("ascend_910b2", _phase(other, a=a), {"a": np.zeros((1, HEADS, 32, 32), np.float32)})


def test_full_states_start_at_numbers() -> None:
    with pytest.raises(ProgramError, match="its arguments are axes as text"):
        _phase(kernel(results="x", a="row token")(lambda a: full(a, 0.0, F32)), a=_tensor("a", 32, 32, fmt=F32))
