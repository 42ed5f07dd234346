"""Collectives as data: every rank ends with the sum, in the order the algorithm says."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from npusim import formats
from npusim.errors import TensorError, TilingError
from npusim.machines.node.collective import ALGORITHMS, Algorithm, Collective, collective, shard_sizes
from npusim.machines.node.reduction import execute
from reports.nodes.study import reduction_error


def samples(ranks: int, count: int, fmt: str = "float16") -> list[np.ndarray]:
    draw = np.random.default_rng(7)
    return [formats.cast(draw.standard_normal(count), fmt) for _ in range(ranks)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 16, 64])
def test_allreduce_of_integers_is_exact_on_every_rank(algorithm: Algorithm, ranks: int) -> None:
    # Small integers add up without rounding, whatever the order; 37 elements leave ragged shards.
    inputs = [np.arange(37, dtype=np.float32) + r for r in range(ranks)]
    for result in execute(collective("allreduce", algorithm, ranks), inputs, "float32"):
        assert np.array_equal(result, np.sum(inputs, axis=0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 6, 8])
def test_reduce_scatter_leaves_each_owner_its_shard(algorithm: Algorithm, ranks: int) -> None:
    chosen = collective("reduce_scatter", algorithm, ranks)
    inputs = [np.arange(48, dtype=np.float32) * (r + 1) for r in range(ranks)]
    results = execute(chosen, inputs, "float32")
    cuts = np.cumsum([0, *shard_sizes(48, chosen.shard_count)])
    for shard, owner in enumerate(chosen.owners):
        own = slice(cuts[shard], cuts[shard + 1])
        assert np.array_equal(results[owner][own], np.sum(inputs, axis=0)[own])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_gather_takes_each_shard_from_its_owner(algorithm: Algorithm) -> None:
    chosen = collective("all_gather", algorithm, 8)
    inputs = [np.full(16, r, np.float32) for r in range(8)]
    expected = np.repeat([float(o) for o in chosen.owners], 2)
    assert all(np.array_equal(r, expected) for r in execute(chosen, inputs, "float32"))


@pytest.mark.parametrize(
    ("algorithm", "rounds", "sent"),
    [("ring", 14, Fraction(7, 4)), ("mesh", 2, Fraction(7, 4)), ("halving_doubling", 6, Fraction(7, 4))],
)
def test_eight_ranks_send_the_least_an_allreduce_can(algorithm: Algorithm, rounds: int, sent: Fraction) -> None:
    # 2 (p - 1) / p of the message, the lower bound for a sum on every rank (Thakur et al.).
    chosen = collective("allreduce", algorithm, 8)
    assert len(chosen.rounds) == rounds
    for rank in range(8):
        shards = sum(len(t.shards) for r in chosen.rounds for t in r if t.source == rank)
        assert Fraction(shards, chosen.shard_count) == sent


def test_ring_adds_around_the_ring_with_a_rounding_each() -> None:
    # Shard 0 starts at rank 0 and goes round: ((x1 + x0) + x2) + x3; 2048 + 1 is a tie in float16.
    values = [2048.0, 1.0, 1.0, 1.0]
    inputs = [np.array([v, 0, 0, 0], np.float16) for v in values]
    assert execute(collective("allreduce", "ring", 4), inputs, "float16")[0][0] == 2048.0
    # By pairs (0 with 2, 1 with 3), then both: (2048 + 1) + (1 + 1) = 2048 + 2.
    halves = collective("allreduce", "halving_doubling", 4)
    assert execute(halves, inputs, "float16")[0][0] == 2050.0


def test_ring_and_mesh_of_eight_float16_sums_differ_in_bits_and_are_as_good() -> None:
    inputs = samples(8, 8192)
    found: dict[str, Collective] = {a: collective("allreduce", a, 8) for a in ("ring", "mesh")}
    results = {a: execute(c, inputs, "float16")[0] for a, c in found.items()}
    assert (results["ring"] != results["mesh"]).any()
    for chosen in found.values():
        error = reduction_error(chosen, inputs, "float16")
        assert error.is_same_on_all_ranks
        # Seven roundings of relative error at most 2**-11, uniform: about sqrt(7/3) * 2**-11 * 0.7.
        assert 2e-4 < error.rmse < 8e-4


@pytest.mark.parametrize("fmt", ["float16", "bfloat16", "float32"])
def test_error_falls_with_the_bits_of_the_format(fmt: str) -> None:
    error = reduction_error(collective("allreduce", "mesh", 8), samples(8, 4096, fmt), fmt)
    step = float(ml_dtypes.finfo(formats.get_format(fmt).dtype).eps) / 2
    assert 0.2 * step < error.rmse < 2 * step


@pytest.mark.parametrize(
    "chosen", [collective("allreduce", "mesh", 8, is_ordered=True), collective("allreduce", "halving_doubling", 8)]
)
def test_tiled_equals_untiled_bit_for_bit_where_all_shards_have_one_order(chosen: Collective) -> None:
    inputs = samples(8, 24 * 10)
    whole = execute(chosen, inputs, "float16")[0]
    tiles = [slice(0, 40), slice(40, 140), slice(140, 240)]  # unequal row blocks
    parts = [execute(chosen, [x[t] for x in inputs], "float16")[0] for t in tiles]
    assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_tiled_ring_differs_because_rows_fall_into_other_shards() -> None:
    chosen = collective("allreduce", "ring", 8)
    inputs = samples(8, 4096)
    whole = execute(chosen, inputs, "float16")[0]
    parts = [execute(chosen, [x[h] for x in inputs], "float16")[0] for h in (slice(0, 2048), slice(2048, None))]
    assert (np.concatenate(parts) != whole).any()


def test_bad_ranks_and_arrays_are_refused() -> None:
    with pytest.raises(TilingError, match="ranks: 65; allowed: 2 to 64"):
        collective("allreduce", "ring", 65)
    with pytest.raises(TensorError, match="needed: 4 arrays of one shape"):
        execute(collective("allreduce", "ring", 4), samples(3, 8), "float16")
