"""Attention as it is served: sequences of unequal length, and kernels' rules of splitting."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim.algorithms.split_rules import RULES, SplitCall, num_splits_heuristic
from npusim.config.problem import Problem
from npusim.errors import SpecError, TensorError, TilingError
from npusim.numerics.evaluate import evaluate
from npusim.numerics.inputs import recipe_source
from npusim.run import run
from schedules.test_split_kv import ASCEND, HOPPER, LOWEST, Machine, merged, one_split, program_of

if TYPE_CHECKING:
    from collections.abc import Sequence

F = np.float32
K = 1024
RAGGED = Problem(heads=2, kv_heads=1, seq_q=1, lengths=(40, 100, 16), head_dim=16)
SMALL = {"block_q": 16, "block_kv": 16}


def scalar(problem: Problem, parts: Sequence[Sequence[int]], m: Machine) -> list[np.ndarray[Any, Any]]:
    """Return each head of each sequence, number after number, its tiles of 16 keys cut into ``parts``."""
    source, heads = recipe_source(problem), []
    for batch, cut in enumerate(parts):
        one, starts = problem.sequence(batch), np.cumsum([0, *cut])
        for head in range(problem.heads):
            q, k, v = (np.asarray(source(n, batch, head if n == "q" else head // problem.group_size)) for n in "qkv")
            done = [one_split(q, k, v, range(a, b), one, m, LOWEST) for a, b in pairwise(starts)]
            heads.append((merged(done, m) if len(done) > 1 else done[0])[0].view(np.uint32))
    return heads


def computed(problem: Problem, machine: Machine, **fields: Any) -> list[np.ndarray[Any, Any]]:
    program = program_of(problem, machine.hw, machine.precision, **SMALL, **fields)
    rows = evaluate(program, problem, recipe_source(problem), rows="all", heads="all").rows
    return [block.view(np.uint32) for _, block in sorted(rows.items())]


@pytest.mark.parametrize("machine", [ASCEND, HOPPER], ids=lambda m: m.hw)
@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"splits": 2}, [(2, 1), (4, 3), (1,)]),
        ({"splits": 7}, [(1, 1, 1), (1,) * 7, (1,)]),
        ({"split_keys": 32}, [(2, 1), (2, 2, 2, 1), (1,)]),
        ({"splits": "vllm"}, [(1,) * 3, (1,) * 7, (1,)]),
        ({"splits": 2, "pack": "off"}, [(2, 1), (4, 3), (1,)]),
    ],
)
def test_sequences_of_unequal_length_have_the_bits_of_a_scalar_computation(
    fields: dict[str, Any], parts: list[tuple[int, ...]], machine: Machine
) -> None:
    found = computed(RAGGED, machine, **fields)
    assert all(map(np.array_equal, found, scalar(RAGGED, parts, machine)))


@pytest.mark.parametrize(
    ("schedule", "hw"),
    [("flash", "ascend_910b2"), ("flash", "h200"), ("fp8_attention", "ascend_910b2"), ("split_kv", "h200")],
)
def test_a_packed_batch_has_the_bits_of_its_sequences_alone(schedule: str, hw: str) -> None:
    """Queries of all tokens; packed tokens with the ends of sequences, and the same filled up with zeros."""
    lengths, rng = (70, 200, 33), np.random.default_rng(1)
    packed = {n: rng.standard_normal((sum(lengths), 2, 32)).astype(np.float16) for n in "qkv"}
    ends = np.cumsum(lengths)
    how: dict[str, Any] = {"hw": hw, "rows": "all", "heads": "all", "causal": True, "trace_groups": ()}
    how |= {"tiling": {"splits": 2, "block_kv": 32}} if schedule == "split_kv" else {}
    whole = run(schedule, tensors={**packed, "cu_seqlens": ends}, layout="tnd", **how)
    cut = {n: np.split(x, ends[:-1]) for n, x in packed.items()}
    padded = {n: np.zeros((3, 200, 2, 32), np.float16) for n in "qkv"}
    for number, length in enumerate(lengths):
        one = {n: parts[number][None] for n, parts in cut.items()}
        alone = run(schedule, tensors=one, layout="bsnd", **how).output
        assert np.array_equal(whole.output[number, :, :length].view(np.uint8), alone[0].view(np.uint8))
        for n, x in padded.items():
            x[number, :length] = one[n]
    again = run(schedule, tensors=padded, layout="bsnd", lengths=lengths, **how)
    assert np.array_equal(again.output.view(np.uint8), whole.output.view(np.uint8))
    assert again.cycles == whole.cycles


def test_equal_lengths_are_a_batch() -> None:
    lengths = run("split_kv", workload="qwen2_7b", lengths=[2 * K, 2 * K], tiling={"splits": 2})
    batch = run("split_kv", workload="qwen2_7b", batch=2, seq_q=1, seq_kv=2 * K, tiling={"splits": 2})
    assert lengths.cycles == batch.cycles
    assert np.array_equal(lengths.output.view(np.uint8), batch.output.view(np.uint8), equal_nan=False)


@pytest.mark.parametrize("deal", ["round_robin", "balanced", "work_list"])
def test_who_takes_a_block_decides_time_alone(deal: str) -> None:
    problem = Problem(heads=9, seq_q=K, lengths=(100, K, 300), head_dim=64, causal=True)
    found, usual = (run("flash", problem=problem, tiling=t) for t in ({"deal": deal, "block_q": 64}, {"block_q": 64}))
    assert np.array_equal(found.output.view(np.uint8), usual.output.view(np.uint8))
    assert found.cycles <= usual.cycles


def test_decoding_of_mixed_lengths_is_bound_by_its_bytes() -> None:
    for hw in ("ascend_910b2", "v100"):
        done = run("split_kv", workload="qwen2_7b", lengths=[K, 7 * K, 32 * K], hw=hw, numerics=False)
        seconds = done.cycles / done.device.clock_hz.value
        assert done.problem.kv_bytes() == 2 * 4 * 40 * K * 128 * 2
        assert seconds <= 1.15 * done.problem.bytes_moved() / done.device.link("hbm").bytes_per_s.value


# ---------------------------------------------------------------- published rules


def call(keys: Sequence[int], **fields: Any) -> SplitCall:
    usual = {"queries": 1, "heads": 28, "kv_heads": 4, "block_q": 128, "block_kv": 128, "cores": 132}
    return SplitCall(keys=tuple(keys), **(usual | fields))


MIXED, LONGER = (K, 7 * K, 32 * K), (K, 7 * K, 32 * K, 64 * K)
LATENT = {"heads": 128, "kv_heads": 1, "block_kv": 64}
IFA = {"cores": 24, "page": 128}


@pytest.mark.parametrize(
    ("rule", "asked", "counts"),
    [
        ("fa3_varlen", call(MIXED), (1, 6, 24)),
        ("fa3_varlen", call(LONGER), (1, 2, 10, 19)),
        ("flashinfer", call(MIXED, page=64), (2, 12, 52)),
        ("flashinfer", call(LONGER, page=16), (1, 5, 20, 40)),
        ("flashmla", call((512, 8 * K, 32 * K), **LATENT), (1, 12, 47)),
        ("flashmla", call((8 * K,), **LATENT), (43,)),
        ("vllm", call((K + 1,), block_kv=16), (13,)),
        ("vllm", call((7 * K,), block_kv=16), (16,)),
        ("fa3", call((8 * K,) * 8), (4,) * 8),
        ("fa3", call((8 * K,) * 27), (1,) * 27),
        ("fa3", call((8 * K,)), (22,)),  # 29 of 3 tiles, the last 7 of which are empty
        ("fa4", call((8 * K,) * 2), (16,) * 2),
        ("cann", call((32 * K,), **IFA), (6,)),
        ("cann", call((32 * K,) * 3, **IFA), (2,) * 3),
        ("cann", call((32 * K,) * 4, **IFA), (1,) * 4),
        ("cann", call((2 * K,), **IFA), (4,)),
        ("cann", call((K,), **IFA), (1,)),
    ],
)
def test_rules_give_what_their_kernels_do(rule: str, asked: SplitCall, counts: tuple[int, ...]) -> None:
    parts = RULES[rule](asked)
    assert tuple(map(len, parts)) == counts
    assert tuple(map(sum, parts)) == asked.tiles


@pytest.mark.parametrize(
    ("blocks", "places", "tiles", "splits"), [(12, 216, 64, 16), (48, 108, 64, 2), (16, 264, 64, 16), (16, 264, 56, 12)]
)
def test_the_heuristic_of_flash_attention_2(blocks: int, places: int, tiles: int, splits: int) -> None:
    assert num_splits_heuristic(blocks, places, tiles, skips_equal=True) == splits


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_runs_on_causal_chunks_too(rule: str) -> None:
    problem = Problem(heads=4, kv_heads=2, seq_q=40, lengths=(70, 500), head_dim=32, causal=True)
    fields = {"block_q": 16, "block_kv": 32}
    done = run("split_kv", problem=problem, tiling={"splits": rule, **fields}, rows="all", heads="all")
    assert done.numerics.error.rmse < 1e-3


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [100, 200], "seq": 100}, "seq: lengths say how many sequences"),
        ({"lengths": [100, 200], "batch": 2}, "batch: lengths say"),
        ({"lengths": [100, 0]}, "lengths.1: 0 must be"),
        ({"lengths": [100, 200], "tiling": {"splits": 2, "split_keys": 512}}, "split_keys: 512 is beside splits=2"),
        ({"lengths": [100, 200], "tiling": {"split_keys": 80}}, "split_keys: 80 is no multiple of block_kv=512"),
        ({"lengths": [100, 200], "tiling": {"splits": 2}}, "splits: 2 of 1 tiles of 512 keys"),
    ],
)
def test_lengths_and_splits_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((SpecError, TilingError), match=message):
        run("split_kv", workload="qwen2_7b", **options)


def test_schedules_of_one_length_say_so() -> None:
    with pytest.raises(SpecError, match="lengths: schedule pasa takes sequences of one length"):
        run("pasa", lengths=[100, 200])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lengths": [10, 20]}, "lengths 10,20 are 30 tokens, but [qk] has 40"),
        ({"lengths": [10, 30], "cu_seqlens": [0, 20, 40]}, "are 40 tokens, but q has 40, and cu_seqlens 20 40"),
        ({"lengths": [10, 30], "layout": "bsnd"}, r"lengths of 2 sequences of 30 keys at most; k has 1 of 40"),
    ],
)
def test_lengths_that_do_not_add_up_to_the_tensors_are_refused(fields: dict[str, Any], message: str) -> None:
    layout, lengths = fields.pop("layout", "tnd"), fields.pop("lengths")
    tensors = {n: np.ones((40, 2, 16), np.float16) for n in "qkv"}
    tensors = tensors if layout == "tnd" else {n: x[None] for n, x in tensors.items()}
    with pytest.raises(TensorError, match=message):
        run("flash", tensors={**tensors, **fields}, layout=layout, lengths=lengths)
