"""Attention as it is served: sequences of unequal length, and kernels' rules of splitting."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim.config.load import load_workload
from npusim.config.problem import Problem
from npusim.errors import SpecError, TensorError, TilingError
from npusim.kernels.attention.split_rules import RULES, SplitCall, num_splits_heuristic, seen_parts
from npusim.program.ir.tile import GlobalTile
from npusim.program.ir.walk import Walker, walk
from npusim.program.numerics.evaluate import evaluate
from npusim.program.numerics.input_tensors import drawn_pages, drawn_source, recipe_source
from npusim.run import run
from reports.parts.kernel import declared_tiling as declared
from schedules.test_split_kv import ASCEND, HOPPER, LOWEST, Machine, merged, one_split, plain, program_of
from tests.turns import in_turn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npusim.program.ir.tile_program import TileProgram

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
            score = plain(one, m, LOWEST)
            done = [one_split(q, k, v, range(a, b), score, m) for a, b in pairwise(starts)]
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
    how["tiling"] = declared(schedule, hw, **({"splits": 2, "block_kv": 32} if schedule == "split_kv" else {}))
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


def test_lengths_and_pages_of_a_workload_are_those_of_its_calls() -> None:
    load = load_workload("qwen2_7b").model_copy(update={"lengths": (K, 300), "page": 64})
    done = run("split_kv", workload=load, numerics=False).problem
    asked = run("split_kv", workload="qwen2_7b", lengths=[K, 300], page=64, numerics=False).problem
    assert done == asked
    assert (done.seq_q, run("split_kv", workload=load, seq=512, numerics=False).problem.lengths) == (1, ())


def test_equal_lengths_are_a_batch() -> None:
    lengths = run("split_kv", workload="qwen2_7b", lengths=[2 * K, 2 * K], tiling={"splits": 2})
    batch = run("split_kv", workload="qwen2_7b", batch=2, seq_q=1, seq_kv=2 * K, tiling={"splits": 2})
    assert lengths.cycles == batch.cycles
    assert np.array_equal(lengths.output.view(np.uint8), batch.output.view(np.uint8), equal_nan=False)


@pytest.mark.parametrize("machine", [ASCEND, HOPPER], ids=lambda m: m.hw)
def test_a_decoding_step_sees_all_keys_of_its_sequence(machine: Machine) -> None:
    causal = RAGGED.model_copy(update={"causal": True})
    found, expected = (computed(p, machine, splits=2, pack="off") for p in (causal, RAGGED))
    assert all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("deal", ["round_robin", pytest.param("balanced", marks=pytest.mark.exhaustive), "work_list"])
def test_who_takes_a_block_decides_time_alone(deal: str) -> None:
    problem = Problem(heads=9, seq_q=K, lengths=(100, K, 300), head_dim=64, causal=True)
    found, usual = (
        run("flash", problem=problem, tiling=declared("flash", "ascend_910b2", deal=d, block_q=64))
        for d in (deal, "round_robin")
    )
    assert np.array_equal(found.output.view(np.uint8), usual.output.view(np.uint8))
    assert found.cycles <= usual.cycles


def test_decoding_of_mixed_lengths_is_bound_by_its_bytes() -> None:
    for hw in ("ascend_910b2", "v100"):
        done = run("split_kv", workload="qwen2_7b", lengths=[K, 7 * K, 32 * K], hw=hw, numerics=False)
        seconds = done.cycles / done.device.clock_hz.value
        assert done.problem.kv_bytes() == 2 * 4 * 40 * K * 128 * 2
        assert seconds <= 1.15 * done.problem.bytes_moved() / done.device.link("hbm").bytes_per_s.value


# ---------------------------------------------------------------- pages, latents


@pytest.mark.parametrize("machine", [ASCEND, HOPPER], ids=lambda m: m.hw)
@pytest.mark.parametrize("page", [1, 7, 16, 64, 200])
def test_pages_change_no_bit(page: int, machine: Machine) -> None:
    paged = [RAGGED.model_copy(update={"page": page, "page_seed": seed}) for seed in (0, 1)]
    assert page == 200 or drawn_pages(paged[0]) != drawn_pages(paged[1])
    program = program_of(paged[0], machine.hw, machine.precision, splits=2, **SMALL)
    expected = scalar(RAGGED, [(2, 1), (4, 3), (1,)], machine)
    for problem in paged:
        rows = evaluate(program, problem, drawn_source(problem), rows="all", heads="all").rows
        assert all(map(np.array_equal, (block.view(np.uint32) for _, block in sorted(rows.items())), expected))


@pytest.mark.parametrize("layout", ["bnsd", "bsnd"])
def test_a_cache_in_pages_is_read_by_its_table(layout: Any) -> None:
    """Pages that no sequence has are NaN in K and V, and so are keys behind a sequence's last."""
    lengths, page, rng = (70, 33), 16, np.random.default_rng(3)
    pools = {n: np.full((11, page, 2, 32), np.nan, np.float16) for n in "kv"}
    whole: dict[str, Any] = {n: rng.standard_normal((2, 70, 2, 32)).astype(np.float16) for n in "kv"}
    table = np.array([[9, 0, 4, 7, 1], [3, 8, 2, -1, -1]])
    for n in "kv":
        for sequence, length in enumerate(lengths):
            for at in range(0, length, page):
                part = whole[n][sequence, at : min(at + page, length)]
                pools[n][table[sequence, at // page], : len(part)] = part
    order = (0, 1, 2, 3) if layout == "bsnd" else (0, 2, 1, 3)
    q = rng.standard_normal((2, 1, 4, 32)).astype(np.float16).transpose(order)
    how: dict[str, Any] = {"layout": layout, "tiling": {"splits": 2, "block_kv": 32}, "rows": "all", "heads": "all"}
    paged = run(
        "split_kv",
        tensors={
            "q": q,
            **{n: x.transpose(order) for n, x in pools.items()},
            "page_table": table,
            "cache_seqlens": lengths,
        },
        **how,
    )
    plain = run(
        "split_kv", tensors={"q": q, **{n: x.transpose(order) for n, x in whole.items()}}, lengths=lengths, **how
    )
    assert paged.problem.page == page
    assert paged.problem.lengths == lengths
    assert np.array_equal(paged.output.view(np.uint16), plain.output.view(np.uint16))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0, 1, 2], [3, 4, 1]], "page 1 occurs twice: in sequences 0 and 1"),
        ([[0, 1, 2], [3, 4, 6]], "sequence 1: there is no page 6; allowed: 0 to 5"),
        ([[0, 1, 2], [3, 4, -1]], "sequence 1: there is no page -1"),
        ([[0, 1], [3, 4]], "sequence 0 has 2 pages; 40 keys need 3"),
        ([0, 1, 2], r"page_table has shape \(3,\); npusim knows the lengths of 2 sequences"),
    ],
)
def test_page_tables_that_cannot_be_are_refused(table: list[Any], message: str) -> None:
    tensors = {n: np.ones((6, 16, 2, 16), np.float16) for n in "kv"} | {"q": np.ones((2, 1, 2, 16), np.float16)}
    with pytest.raises(TensorError, match=message):
        run("split_kv", tensors={**tensors, "page_table": table}, layout="bsnd", lengths=[40, 48])


def test_a_page_costs_a_transfer() -> None:
    def cycles(layout: Any, **options: Any) -> int:
        tiling = {"block_q": 128, "block_kv": 512, "vector_rows": 8, "depth": 2, "deal": "round_robin"}
        options = {**options, "tiling": tiling, "layout": layout, "numerics": False}
        done = run("split_kv", workload="qwen2_7b", lengths=[K, 7 * K], **options)
        return int(done.cycles)

    whole, large, small, single = (cycles("bnsd", page=page) for page in (0, 128, 4, 1))
    assert whole <= large < small < single
    assert cycles("bsnd") > whole  # NHD: a row of a head is a burst of its own, in pages or not
    assert cycles("bsnd", page=128) >= cycles("bsnd")


LATENT_CALL = Problem(
    heads=4, kv_heads=1, seq_q=1, lengths=(40, 100), head_dim=48, value_head_dim=32, values_in_keys=True
)


@pytest.mark.parametrize("machine", [ASCEND, HOPPER], ids=lambda m: m.hw)
def test_latents_have_the_bits_of_keys_and_values_that_are_alike(machine: Machine) -> None:
    """The same numbers given twice, as K and as V."""
    plain = LATENT_CALL.model_copy(update={"values_in_keys": False})
    source = drawn_source(LATENT_CALL)
    both = [
        evaluate(
            program_of(p, machine.hw, machine.precision, splits=2, **SMALL), p, source, rows="all", heads="all"
        ).rows
        for p in (LATENT_CALL, plain)
    ]
    assert both[0].keys() == both[1].keys()
    assert all(np.array_equal(both[0][at].view(np.uint32), both[1][at].view(np.uint32)) for at in both[0])


def loads(program: TileProgram, names: str) -> Iterator[GlobalTile]:
    """Yield what operations read of some tensors."""
    walker = Walker(program)
    for block, phase in ((b, p) for p in program.phases for b in p.blocks):
        for step in (s for op in walk(walker, phase.body(block)) for s in op.op.steps):
            yield from (x for x in step.srcs if isinstance(x, GlobalTile) and x.tensor.name in names)


@pytest.mark.parametrize(
    ("hw", "schedule", "fields", "how"),
    in_turn(
        [
            pytest.param("ascend_910b2", "flash", {}),
            pytest.param("ascend_910b2", "split_kv", {"depth": 0}),
            pytest.param("ascend_950", "split_kv", {}),  # the next block's tiles come while the last ones are read
            pytest.param("h200", "split_kv", {}),
            pytest.param("h200", "flash", {"stages": 1}),  # through registers
            pytest.param("h200", "flash", {"stages": 3}),
            pytest.param("h200", "flash", {"kernel": "cudnn"}),
            pytest.param("h200", "flash", {"kernel": "fa3"}),  # Q K^T of a tile is issued before P V of the one before
            pytest.param("v100", "flash", {}),
        ],
        ({"seq_q": 1, "lengths": (300, 200)}, {"seq_q": 200, "seq_kv": 300}),
    ),
)
def test_a_tile_of_latents_is_loaded_once_for_both_products(
    hw: str, schedule: str, fields: dict[str, Any], how: dict[str, Any]
) -> None:
    """Its bits are those of K and V in two tensors, and what is loaded is K alone, in prefill and decoding."""
    both = []
    viewed = Problem(heads=2, kv_heads=1, head_dim=64, value_head_dim=32, values_in_keys=True, **how)
    for latent in (viewed, viewed.model_copy(update={"values_in_keys": False})):
        tiling = declared(schedule, hw, block_q=128, block_kv=128 if fields.get("kernel") else 64, **fields)
        program = run(schedule, hw=hw, problem=latent, tiling=tiling, numerics=False, trace_groups=()).program
        read = list(loads(program, "kv"))
        rows = evaluate(program, latent, drawn_source(viewed), rows="all", heads="all").rows
        both.append((rows, sum(x.rows * x.cols for x in read), {x.cols for x in read}))
    (rows, elements, widths), (apart, of_both, _) = both
    assert widths == {64}
    assert 3 * elements == 2 * of_both
    assert all(np.array_equal(rows[at].view(np.uint32), apart[at].view(np.uint32)) for at in apart)


@pytest.mark.parametrize(("hw", "tile"), [("ascend_950", {}), ("ascend_910b2", {"block_kv": 64, "block_q": 64})])
def test_latents_cross_l2_once_for_each_block_of_queries(hw: str, tile: dict[str, Any]) -> None:
    """576 elements a token and block of a decoding step of DeepSeek-V3, beside what the cores hand one another."""
    tiling = {"splits": 4, "depth": 1, **tile}
    done = run("split_kv", hw=hw, workload="deepseek_v3", lengths=[4 * K], page=64, numerics=False, tiling=tiling)
    blocks = len({b.row for b in done.program.phases[0].blocks})
    assert sum(t.payload_bytes for t in loads(done.program, "k")) == blocks * 4 * K * 576 * 2
    assert done.timing.link_bytes["hbm"] < 1.3 * 4 * K * 576 * 2


@pytest.mark.usefixtures("declared_tile")
def test_latents_are_fetched_once() -> None:
    """576 elements a token and sequence of a decoding step of DeepSeek-V3, whatever a page."""
    for page in (0, 64):
        done = run("split_kv", workload="deepseek_v3", lengths=[512, 2 * K, 4 * K], page=page, numerics=False)
        keys = sum(done.problem.lengths)
        assert done.problem.kv_bytes() == keys * 576 * 2
        fetched = done.timing.link_bytes["hbm"]
        others = 2 * 3 * 128 * (576 + 512)
        assert keys * 576 * 2 <= fetched <= 1.1 * (keys * 576 * 2 + others)


def test_absorbed_queries_meet_latents_where_they_decode() -> None:
    load = load_workload("deepseek_v3")
    prefill, step = load.problem(), load.problem(seq_q=1, is_absorbed=True)
    assert (prefill.kv_heads, prefill.head_dim, prefill.value_head_dim) == (128, 192, 128)
    assert (step.kv_heads, step.head_dim, step.value_head_dim) == (1, 576, 512)
    assert prefill.scale == step.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)


def test_latents_that_do_not_fit_say_what_does() -> None:
    with pytest.raises(TilingError, match=r"L1: Q .*UB: S .*largest values that fit.* block_q=32"):
        run(
            "split_kv",
            workload="deepseek_v3",
            lengths=[512],
            tiling={"block_q": 128, "block_kv": 512, "vector_rows": 32},
        )


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
        # blocks of 64 rows on 264 places: 8 of 64 tiles fill .97 of them with 32 splits; with pages alone, where the
        # query heads of a KV head are rows (mha_varlen_fwd, seqlenq_ngroups_swapped)
        ("fa2", call((8 * K,) * 2), (32,) * 2),
        ("fa2", call((8 * K,) * 2, page=16), (32,) * 2),
        ("fa2", call((8 * K,) * 2, kv_heads=4, heads=4), (32,) * 2),
        ("fa2", call((8 * K,) * 2, kv_heads=4, heads=4, page=16), (1,) * 2),
        ("fa2", call((8 * K,), queries=64, kv_heads=4, page=16), (1,)),
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


@pytest.mark.parametrize(
    ("blocks", "tiles", "splits"),
    [
        # hopper/heuristics.h on 132 multiprocessors, by hand: the fewest splits whose waves are filled to 85 % of the
        # best.  8 blocks: 33 splits fill two waves, 15 fill .91 of one.  1: 128 splits fill .97, 109 fill .826.
        (8, 187, 15),
        (8, 10, 9),  # at most as many as tiles: .61 of a wave, of which .545 is the least
        (1, 1024, 109),
        (44, 1024, 3),  # exactly one wave
        (105, 1024, 5),  # one to four splits fill .795 of their waves, five fill .994
        (106, 1024, 1),  # .8 of the multiprocessors have work
    ],
)
def test_the_heuristic_of_flash_attention_3_on_long_caches(blocks: int, tiles: int, splits: int) -> None:
    assert num_splits_heuristic(blocks, 132, tiles, skips_equal=False) == splits


def test_the_heuristics_share_is_taken_in_double_precision_as_their_sources_take_it() -> None:
    # 102 / 144 is less than 0.85 x 120 / 144 in double precision, and equal to it in single.
    assert num_splits_heuristic(6, 144, 100, skips_equal=True) == 20


@pytest.mark.parametrize(
    ("rule", "keys", "parts"),
    [
        # (1023 + 0 + 1 + 128 rows) / 128 = 9 tiles on 132 cores: 8 splits are 85 % of 9, so 2 tiles each.
        ("fa3", 32 * K, (2, 2, 2, 2, 1)),
        ("fa4", 32 * K, (1,) * 9),
        ("fa3", 512, (4,)),  # shorter than the window
        # 1023 + 16 rows: 17 pages of 64, 2 a chunk, 66 places.
        ("flashinfer", 32 * K, (1,) * 9),
    ],
)
def test_a_window_shortens_what_rules_count(rule: str, keys: int, parts: tuple[int, ...]) -> None:
    """hopper/heuristics and flash_attn/cute: seqlen_k_loaded; FlashInfer's scheduler: effective_kv_len."""
    assert RULES[rule](call((keys,), window=K, page=64 if rule == "flashinfer" else 0)) == (parts,)


def test_flash_attention_2_counts_all_keys_and_packs_no_heads_under_a_window() -> None:
    plain, windowed = (RULES["fa2"](call((8 * K,), window=n))[0] for n in (0, K))
    assert sum(plain) == sum(windowed) == 64
    assert windowed[0] == 64 // num_splits_heuristic(28, 264, 64, skips_equal=True)
    # Of parts of 10 tiles a block that sees tiles 55 to 63 has some of the last two.
    assert seen_parts("fa2", (10,) * 6 + (4,), range(55, 64)) == (5, 4)


@pytest.mark.parametrize(("rule", "window"), in_turn(sorted(RULES), (None, 90)))
def test_every_rule_runs_on_causal_chunks_too(rule: str, window: int | None) -> None:
    problem = Problem(heads=2, kv_heads=1, seq_q=40, lengths=(70, 500), head_dim=32, causal=True, window=window)
    tiling = declared("split_kv", "ascend_910b2", splits=rule, block_q=16, block_kv=32)
    done = run("split_kv", problem=problem, tiling=tiling, rows="all", heads="all")
    assert done.numerics.error.rmse < 1e-3


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [100, 200], "seq": 100}, "seq: lengths already state the number"),
        ({"lengths": [100, 200], "batch": 2}, "batch: lengths already state"),
        ({"lengths": [100, 0]}, "lengths.1: 0 must be"),
        (
            {"lengths": [100, 200], "tiling": {"splits": 2, "split_keys": 512}},
            ("split_keys: 512 is set together with splits=2"),
        ),
        ({"lengths": [100, 200], "tiling": {"split_keys": 80}}, "split_keys: 80 is not a multiple of block_kv=512"),
    ],
)
def test_lengths_and_splits_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((SpecError, TilingError), match=message):
        run("split_kv", workload="qwen2_7b", **options)


def test_schedules_of_one_length_say_so() -> None:
    with pytest.raises(SpecError, match="lengths: schedule pasa needs sequences of equal length"):
        run("pasa", lengths=[100, 200])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lengths": [10, 20]}, "lengths 10,20 add up to 30 tokens, but k has 40"),
        ({"lengths": [10, 30], "cu_seqlens": [0, 20, 40]}, "to 40 tokens, but q has 40, and cu_seqlens 20 40"),
        ({"lengths": [10, 30], "layout": "bsnd"}, r"lengths has 2 sequences with at most 30 keys; k has 1 with 40"),
    ],
)
def test_lengths_that_do_not_add_up_to_the_tensors_are_refused(fields: dict[str, Any], message: str) -> None:
    layout, lengths = fields.pop("layout", "tnd"), fields.pop("lengths")
    tensors = {n: np.ones((40, 2, 16), np.float16) for n in "qkv"}
    tensors = tensors if layout == "tnd" else {n: x[None] for n, x in tensors.items()}
    with pytest.raises(TensorError, match=message):
        run("flash", tensors={**tensors, **fields}, layout=layout, lengths=lengths)
