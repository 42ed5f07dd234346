"""Bits of a layer on several devices: partial sums of every rank, added as the collective transfers them."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npusim
from npusim.errors import SpecError, TensorError
from npusim.machines.node.collective import ALGORITHMS, CollectiveCall, collective, plan_collective
from npusim.machines.node.reduction import Sums, execute
from npusim.machines.node.topology import Topology

if TYPE_CHECKING:
    from npusim.config.node_file import NodeSpec
    from npusim.simulation.run_result import RunData

RANKS, WIDTH, HIDDEN, TOKENS = 4, 16, 24, 40


def tensors(seed: int = 3, **changes: np.ndarray) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    found = {n: draw.standard_normal((1, RANKS, TOKENS, WIDTH)).astype(np.float16) for n in "qkv"}
    found["w_o"] = draw.standard_normal((RANKS * WIDTH, HIDDEN)).astype(np.float16)
    return {**found, **changes}


def layer(given: dict[str, np.ndarray] | None = None, **options: Any) -> RunData:
    options = {"rows": "all", "tensor_parallel": RANKS, "trace_groups": (), **options}
    return npusim.run("tiling_allreduce", tensors=given or tensors(), **options)


@pytest.fixture
def partials(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, list[np.ndarray]]]:
    """Collect (first row, first row of its message, each rank's partial sums) as they come."""
    seen: list[tuple[int, int, list[np.ndarray]]] = []
    add = Sums.add

    def spy(self: Sums, op: Any, row: int, terms: Any, watch: Any) -> np.ndarray:
        seen.append((row, op.row, [t.copy() for t in terms]))
        return add(self, op, row, terms, watch)

    monkeypatch.setattr(Sums, "add", spy)
    return seen


def in_turn(values: list[np.generic]) -> np.generic:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def scalar_sum(algorithm: str, shard: int, values: list[np.generic]) -> np.generic:
    """Add one number a rank in the order that the algorithm's description gives for its shard."""
    count = len(values)
    if algorithm == "ring":  # starts at the shard's own rank and goes round
        return in_turn([values[(shard + i) % count] for i in range(count)])
    if algorithm == "mesh":  # the owner's first, the others by rank
        return in_turn([values[shard], *(v for r, v in enumerate(values) if r != shard)])
    while len(values) > 1:  # pairs half the ranks apart
        half = len(values) // 2
        values = [values[i] + values[i + half] for i in range(half)]
    return values[0]


@pytest.mark.parametrize("precision", ["float16", "float32"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_output_is_the_scalar_sum_of_the_ranks_partial_sums(
    algorithm: str, precision: str, partials: list[Any]
) -> None:
    found = layer(tiling={"algorithm": algorithm, "blocks": 2}, precision=precision)
    assert [(row, first) for row, first, _ in partials] == [(0, 0), (20, 20)]
    size = 20 * HIDDEN // RANKS  # elements of a shard
    for row, _, terms in partials:
        assert {t.dtype for t in terms} == {np.dtype(precision)}
        own = found.output[0, 0, row : row + 20].reshape(-1)
        for element in range(0, own.size, 7):
            expected = scalar_sum(algorithm, element // size, [t[element] for t in terms])
            assert own[element].tobytes() == expected.tobytes()


def test_partial_sums_are_those_of_one_device(partials: list[Any]) -> None:
    given = tensors(w_o=np.eye(RANKS * WIDTH, dtype=np.float16))
    found = layer(given, tiling={"blocks": 3})
    alone = npusim.run("two_level", tensors={n: given[n] for n in "qkv"}, rows="all", trace_groups=())
    heads = alone.output[0].transpose(1, 0, 2).reshape(TOKENS, -1)
    # The identity hands on what a rank's heads are, and zeros of all others add nothing.
    assert found.output[0, 0].tobytes() == heads.tobytes()
    assert len(partials) == 3


def test_tiled_equals_untiled_bit_for_bit_where_the_order_is_the_same() -> None:
    runs = {n: layer(tiling={"algorithm": "halving_doubling", "blocks": n}) for n in (1, 3)}
    assert runs[1].output.tobytes() == runs[3].output.tobytes()
    orders = {o.arithmetic: o for o in runs[3].orders}
    assert orders["blocks=1"].differing == 0.0
    assert orders["algorithm=ring"].differing > 0.1


@pytest.mark.parametrize("algorithm", ["mesh", "ring"])
def test_what_is_said_of_other_orders_is_what_they_give(algorithm: str) -> None:
    tiled, whole = (layer(tiling={"algorithm": algorithm, "blocks": n}) for n in (2, 1))
    told = {o.arithmetic: o.differing for o in tiled.orders}
    assert told["blocks=1"] == np.mean(tiled.output != whole.output) > 0
    other = layer(tiling={"algorithm": "halving_doubling", "blocks": 2})
    assert told["algorithm=halving_doubling"] == np.mean(tiled.output != other.output)
    # The same distance the other way round.
    assert {o.arithmetic: o.differing for o in whole.orders}["blocks=2"] == told["blocks=1"]


def test_error_is_that_of_float64_on_the_same_inputs() -> None:
    given, found = tensors(), layer(precision="float32")
    q, k, v = (given[n][0].astype(np.float64) for n in "qkv")
    scores = q @ k.transpose(0, 2, 1) / 4.0
    scores[:, np.triu(np.ones((TOKENS, TOKENS), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    heads = (weights / weights.sum(axis=-1, keepdims=True)) @ v
    exact = heads.transpose(1, 0, 2).reshape(TOKENS, -1) @ given["w_o"].astype(np.float64)
    error = np.linalg.norm(found.output[0, 0] - exact) / np.linalg.norm(exact)
    assert found.numerics is not None
    assert found.numerics.error.rmse == pytest.approx(error, rel=1e-9)
    assert 1e-5 < error < 1e-3  # O is stored in float16


def test_rows_chosen_have_the_bits_they_have_among_all() -> None:
    every = layer(tiling={"blocks": 3})
    some = layer(tiling={"blocks": 3}, rows=(0, 39))
    computed = some.numerics.computed[0, 0]
    assert 0 < computed.sum() < TOKENS
    assert computed[0]
    assert computed[39]
    assert some.output[0, 0, computed].tobytes() == every.output[0, 0, computed].tobytes()


def test_sample_has_rows_from_the_midst_of_messages() -> None:
    draw = np.random.default_rng(4)
    given = {n: draw.standard_normal((1, RANKS, 1024, WIDTH)).astype(np.float16) for n in "qkv"}
    bits = layer(given, rows="sample")
    assert bits.numerics.sample.startswith("rows 640..703, 896..1023 of 1024")  # of blocks that the run chose
    # The last rows alone lie in the last shard, which mesh and ring add in one order.
    assert {o.arithmetic: o.differing for o in bits.orders}["algorithm=ring"] > 0.05
    last = layer(given, rows=range(896, 1024))
    assert {o.arithmetic: o.differing for o in last.orders}["algorithm=ring"] == 0.0


def test_overflow_of_a_sum_is_counted_and_found() -> None:
    # Every rank's partial sum is 16 x 2000 = 32000: three of them are beyond float16.
    v, w_o = np.ones((1, RANKS, TOKENS, WIDTH)), np.full((RANKS * WIDTH, HIDDEN), 2000.0)
    given = tensors(v=v.astype(np.float16), w_o=w_o.astype(np.float16))
    bits = layer(given, tiling={"blocks": 1}).numerics
    assert bits.overflow_counts == {"allreduce 0.add": TOKENS * HIDDEN}
    (event,) = bits.first_events
    assert str(event) == "overflow in allreduce 0.add (rank 0 adds what rank 2 sent row 0 col 0)"
    assert np.isinf(bits.output).all()
    assert layer(given, precision="float32").numerics.error.is_finite


def test_allreduce_of_row_blocks_is_the_allreduce_of_all_rows_in_float64() -> None:
    # FastAttention equations 17 and 18: [AllReduce(O W)]_i = AllReduce(O_i W).
    draw = np.random.default_rng(5)
    o, w = draw.standard_normal((8, 300, 16)), draw.standard_normal((8, 16, 12))
    for algorithm in ALGORITHMS:
        chosen = collective("allreduce", algorithm, 8)
        whole = execute(chosen, list(o @ w), "float64")[0]
        cuts = [slice(0, 40), slice(40, 140), slice(140, 300)]
        parts = [execute(chosen, list(o[:, c] @ w), "float64")[0] for c in cuts]
        assert np.abs(np.concatenate(parts) - whole).max() < 1e-13
        assert np.abs(whole - (o @ w).sum(axis=0)).max() < 1e-13


def test_no_transfer_cuts_an_element_apart(pair: NodeSpec) -> None:
    call = CollectiveCall("allreduce", "ring", "sm", 70_000_006, element_bytes=2)
    plan = plan_collective(pair, Topology(pair, 2), call)
    chunks = plan.shard_edges()
    assert [c[0] for c in chunks] == [0, 11_666_668, 23_333_336]
    assert chunks[-1][-1] == 35_000_003
    assert all(a[-1] == b[0] for a, b in pairwise(chunks))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_o": np.ones((HIDDEN, RANKS * WIDTH), np.float16)}, "(64, hidden); this one is transposed"),
        ({"w_o": np.ones((3, HIDDEN), np.float16)}, "w_o has shape (3, 24)"),
        ({"w_o": np.full((RANKS * WIDTH, HIDDEN), np.nan, np.float16)}, "w_o has 1536 NaN"),
        ({"w_o": np.full((RANKS * WIDTH, HIDDEN), 1e6, np.float32)}, "w_o are beyond float16's largest"),
    ],
)
def test_bad_projections_are_refused(changes: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(TensorError, match=re.escape(message)):
        layer(tensors(**changes))


def test_heads_that_ranks_cannot_share_and_rows_that_are_not_there_are_refused() -> None:
    with pytest.raises(SpecError, match="tensor_parallel: 8 does not divide 4 query heads; possible: 1 2 4"):
        layer(tensor_parallel=None)
    with pytest.raises(SpecError, match="rows: there is no 40; choose from 0 to 39"):
        layer(rows=(40,))


def test_a_node_of_v100s_has_bits_too() -> None:
    result = layer(hw="v100_x8")
    assert result.numerics is not None
    assert result.numerics.error.rmse < 1e-3


@pytest.mark.usefixtures("declared_tile")
def test_long_sample_is_left_out_and_a_long_run_refused() -> None:
    result = npusim.run("tiling_allreduce", seq=32768, trace_groups=())
    assert result.numerics is None
    assert any("--rows 32640-32767 computes the last rows" in note for note in result.notes)
    with pytest.raises(SpecError, match="this run would take about"):
        npusim.run("tiling_allreduce", seq=32768, rows="all", limit_s=600)
