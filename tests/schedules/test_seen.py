"""Which keys a query sees and what is done to scores: every schedule against softmax written out in the test."""

from __future__ import annotations

import math
import random
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.config.head_scores import bias_row, sink_logits
from npusim.config.load import list_devices, load_device
from npusim.config.problem import NormalData, Problem
from npusim.errors import SpecError, TilingError
from npusim.program.numerics.evaluate import evaluate
from npusim.program.numerics.input_tensors import drawn_source, recipe_source
from reports.parts.kernel import declared_tiling as declared
from schedules.test_split_kv import (
    ASCEND,
    HOPPER,
    LOG2_E,
    LOWEST,
    Machine,
    Score,
    merged,
    one_split,
    program_of,
    rounded,
)
from tests.config.visible import visible_keys
from tests.turns import every

F, LEAST = np.float32, np.finfo(np.float32).smallest_subnormal

N, HEADS = 139, 4
SMALL = {"block_q": 64, "block_kv": 32}
#: With all that npusim would otherwise choose by trying.
NAMED = {**SMALL, "deal": "balanced", "depth": 2, "vector_rows": 16}
GPU = {**SMALL, "stages": 2, "warps": 4, "launch": "in_order"}
#: Schedule, device and tiling; E4M3 inputs where products are FP8.
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "flash": ("flash", "ascend_910b2", NAMED),
    "computed": ("flash", "ascend_950", {**NAMED, "mask": "computed"}),
    "split_kv": ("split_kv", "ascend_910b2", {**NAMED, "splits": 3, "mask": "loaded"}),
    "gpu": ("flash", "h200", GPU),
    "flex": ("flash", "h200", {**GPU, "kernel": "triton"}),
    "gpu splits": ("split_kv", "h200", {**GPU, "splits": 2}),
    "volta": ("volta_flash", "v100", {"block_q": 128, "block_kv": 32, "launch": "in_order"}),
    "fp8": ("fp8_attention", "ascend_910b2", NAMED),
    "pasa": ("pasa", "ascend_910b2", NAMED),
    "unfused": ("standard", "ascend_910b2", {}),
}
SEEN: dict[str, dict[str, Any]] = {
    "window": {"window": 70},
    "sinks": {"window": 50, "sinks": 3},
    "prefix": {"prefix": 90},
    "documents": {"documents": (30, 7, 70, 32)},
    "chunks": {"chunk": 48},
    "two sides": {"causal": False, "window": (30, 11)},
    "keys after": {"causal": False, "window": (-1, 40), "documents": (60, 79)},
    "keys before": {"causal": False, "window": (20, -1)},
    "windows in documents": {"documents": (30, 7, 70, 32), "window": 20, "sinks": 2},
}
SCORES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": True},
    "bias": {"bias": "shared"},
    "learned sinks": {"sink_logits": True},
    "all": {"window": 70, "sinks": 2, "softcap": 5.0, "alibi": True, "bias": "head", "sink_logits": True},
}


def added(p: Problem, head: int, row: int, key: int) -> float:
    """Return what a bias adds to a score."""
    return float(bias_row(head if p.bias == "head" else 0, row, p.seq_kv)[key].astype(np.float16)) if p.bias else 0.0


def sees(p: Problem, at: int) -> np.ndarray:
    """Return which keys the query at a position sees, as the fields' descriptions say it."""
    key = np.arange(p.seq_kv)
    ends = list(accumulate(p.documents or (p.seq_kv,)))
    end = next(e for e in ends if at < e)
    start = end - (p.documents or (p.seq_kv,))[ends.index(end)]
    if p.chunk:
        start += (at - start) // p.chunk * p.chunk
        end = min(end, start + p.chunk)
    before, after = p.window if isinstance(p.window, tuple) else ((p.window or 10**9) - 1, -1)
    is_before = key <= at + (0 if p.causal else 10**9 if after < 0 else after)
    is_near = is_before & ((before < 0) | (at - key <= before) | (key - start < p.sinks))
    return (start <= key) & (key < end) & (is_near | (key - start < p.prefix))


@cache
def seen(p: Problem) -> np.ndarray:
    """Return which query (row) sees which key (column)."""
    return np.array([sees(p, row + p.causal_offset) for row in range(p.seq_q)])


def expected(p: Problem, q: np.ndarray, k: np.ndarray, v: np.ndarray, head: int) -> np.ndarray:
    """Return one head's attention in float64, as the fields' descriptions say it."""
    s = q @ k.T * p.scale
    s = p.softcap * np.tanh(s / p.softcap) if p.softcap else s
    if p.alibi:
        s += 2.0 ** (-8 * (head + 1) / p.heads) * (np.arange(p.seq_kv) - np.arange(len(q))[:, None] - p.causal_offset)
    if p.bias:
        s += np.array([bias_row(head if p.bias == "head" else 0, row, p.seq_kv) for row in range(len(q))], np.float16)
    weights = np.where(seen(p), np.exp(s), 0)
    sink = math.exp(sink_logits(p.heads)[head]) if p.sink_logits else 0.0
    return (weights @ v) / (weights.sum(axis=1, keepdims=True) + sink)


def score_of(p: Problem, m: Machine, head: int, first_row: int) -> Score:
    """Return what is done to products of rows from ``first_row`` on, with every rounding."""
    base = LOG2_E if m.base == "2" else 1.0
    is_hooked, visible = bool(p.softcap or p.alibi or p.bias), seen(p)

    def score(s: np.ndarray, first: int) -> np.ndarray:
        out = np.full(s.shape, F(-np.inf))
        for r, c in np.ndindex(*s.shape):
            at, key = first_row + r + p.causal_offset, first + c
            if not visible[first_row + r, key]:
                continue
            x = F(s[r, c] * F(p.scale * (1.0 if is_hooked else base)))
            if p.softcap:
                x = F(rounded("tanh", float(F(x / F(p.softcap)))) * F(p.softcap))
            if p.alibi:
                x = F(x + F(2.0 ** (-8 * (head + 1) / p.heads) * (key - at)))
            if p.bias:
                x = F(x + F(added(p, head, first_row + r, key)))
            out[r, c] = F(x * F(base)) if is_hooked else x
        return out

    return score


def scalar(p: Problem, m: Machine, splits: int, where: str = "end") -> np.ndarray:
    """Return the rows of each head of each sequence, blocks of 16, whose tiles of 16 keys are in ``splits`` parts."""
    source, blocks = drawn_source(p), []
    for batch, head in np.ndindex(p.batch, p.heads):
        one = p.sequence(batch)
        q, k, v = (np.asarray(source(n, batch, head if n == "q" else head // p.group_size)) for n in "qkv")
        sink = F(sink_logits(p.heads)[head] * (LOG2_E if m.base == "2" else 1.0)) if p.sink_logits else None
        for row in range(0, one.seq_q, 16):
            rows = q[row : min(row + 16, one.seq_q)]
            visible = seen(one)[row : row + len(rows)]
            tiles = [t for t in range(0, one.seq_kv, 16) if visible[:, t : t + 16].any()]
            score, cut = (
                score_of(one, m, head, row),
                [c for c in np.array_split(np.array(tiles) // 16, splits) if len(c)],
            )
            if splits == 1:
                done = one_split(rows, k, v, cut[0], score, m, (LOWEST, F(0)), sink, where)
            else:
                done = merged([one_split(rows, k, v, c, score, m, (LOWEST, LEAST)) for c in cut], m, sink, where)
            blocks.append(done[0])
    return np.concatenate(blocks).view(np.uint32)


def problem(**fields: Any) -> Problem:
    sizes = {"heads": HEADS, "kv_heads": 2, "head_dim": 64, "causal": True}
    return Problem(**{**sizes, **({} if "lengths" in fields else {"seq_q": N}), **fields})


def ran(run: str, p: Problem, heads: Any = "all", **more: Any) -> Any:
    schedule, hw, tiling = RUNS[run]
    asked = {"hw": hw, "problem": p, "tiling": declared(schedule, hw, **{**tiling, **more}), "trace_groups": ()}
    return npusim.run(schedule, rows="all", heads=heads, **asked)


#: Schedules whose masks and scores are another's lines.
OTHERS = ("split_kv", "flex", "gpu splits", "fp8", "pasa")


def is_quick(run: str, kind: str) -> bool:
    """Whether a run takes a kind by default: flash every one, those of `OTHERS` one of six, the rest one of three."""
    step = 6 if run in OTHERS else 3
    return run == "flash" or ([*SEEN, *SCORES].index(kind) + [*RUNS].index(run)) % step == 0


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        pytest.param(run, kind, marks=[] if is_quick(run, kind) else pytest.mark.exhaustive)
        for run in RUNS
        for kind in (*SEEN, *SCORES)
    ],
)
def test_every_schedule_computes_what_the_problem_says(run: str, kind: str) -> None:
    fields = {**SEEN, **SCORES}[kind]
    if kind in SCORES and run in ("pasa", "unfused"):
        with pytest.raises(TilingError, match=r"--ignore (softcap|alibi|bias|sink_logits)"):
            ran(run, problem(**fields))
        return
    p, ends = problem(**fields), (0, HEADS - 1)
    result, source = ran(run, p, ends), recipe_source(p)
    for head in ends:
        q, k, v = (
            np.asarray(source(n, 0, h), np.float64) for n, h in (("q", head), ("k", head // 2), ("v", head // 2))
        )
        wanted = expected(p, q, k, v, head)
        error = np.asarray(result.output[0, head], np.float64) - wanted
        assert np.linalg.norm(error) / np.linalg.norm(wanted) < (0.06 if run == "fp8" else 8e-3)
    assert result.numerics.error.rmse < (0.06 if run == "fp8" else 8e-3)  # and so does the reference


TINY: dict[str, dict[str, Any]] = {
    "window": {"window": 21},
    "sinks": {"window": 9, "sinks": 3},
    "prefix": {"prefix": 35},
    "documents": {"documents": (12, 7, 16, 10), "window": 18, "sinks": 2},
    "chunks": {"chunk": 24},
    "two sides": {"causal": False, "window": (9, 4)},
    "keys after": {"causal": False, "window": (-1, 4)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "bias": {"bias": "shared"},
    "learned sinks": {"sink_logits": True},
    "all": {"window": 21, "sinks": 2, "softcap": 5.0, "alibi": True, "sink_logits": True},
    "a step": {"window": 21, "sinks": 2, "softcap": 5.0, "alibi": True, "sink_logits": True, "seq_q": 1, "seq_kv": 61},
    "lengths": {"window": 21, "sinks": 2, "softcap": 5.0, "sink_logits": True, "lengths": (40, 61, 5), "seq_q": 3},
    "documents in lengths": {"documents": (12, 28, 61, 2, 3), "lengths": (40, 61, 5), "seq_q": 3, "window": 9},
    "prompts beside steps": {"window": 21, "bias": "head", "lengths": (40, 61, 5), "query_lengths": (1, 23, 2)},
    "pages": {"window": 21, "alibi": True, "lengths": (40, 61, 5), "page": 8, "page_seed": 1, "seq_q": 3},
}


#: Machine, kind and splits; by default each kind once on each machine, in one part or in two.
OF_BITS = [
    pytest.param(m, kind, splits, marks=[] if (number + at + splits) % 2 else pytest.mark.exhaustive)
    for at, m in enumerate((ASCEND, HOPPER))
    for number, kind in enumerate(TINY)
    for splits in (1, 2)
]


@pytest.mark.parametrize(("machine", "kind", "splits"), OF_BITS)
def test_bits_of_every_variant_are_those_of_a_scalar_computation(machine: Machine, kind: str, splits: int) -> None:
    sizes = {} if "lengths" in TINY[kind] else {"seq_q": 19, "seq_kv": 45}
    p = Problem(**{"heads": 2, "kv_heads": 1, "head_dim": 16, "causal": True, **sizes, **TINY[kind]})
    fields: dict[str, Any] = {"block_q": 16, "block_kv": 16, "splits": splits, "pack": "off"}
    fields |= {"mask": "loaded"} if machine is ASCEND else {}
    program = program_of(p, machine.hw, machine.precision, **fields)
    rows = evaluate(program, p, drawn_source(p), rows="all", heads="all").rows
    computed = np.concatenate([block for _, block in sorted(rows.items())]).view(np.uint32)
    assert np.array_equal(computed, scalar(p, machine, splits))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("where", ["start", "end"])
@pytest.mark.parametrize("machine", [ASCEND, HOPPER], ids=lambda m: m.hw)
def test_learned_sinks_have_the_bits_of_either_recipe(machine: Machine, where: str, splits: int) -> None:
    """Softmax begins with them (vLLM's Triton kernels), or they are added behind the last tile (FlashAttention-4)."""
    p = Problem(heads=2, kv_heads=1, head_dim=16, seq_q=19, seq_kv=45, causal=True, sink_logits=True)
    precision = ",".join(filter(None, (machine.precision, f"sink={where}")))
    program = program_of(p, machine.hw, precision, block_q=16, block_kv=16, splits=splits, pack="off")
    rows = evaluate(program, p, drawn_source(p), rows="all", heads="all").rows
    computed = np.concatenate([block for _, block in sorted(rows.items())]).view(np.uint32)
    assert np.array_equal(computed, scalar(p, machine, splits, where))


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=[pytest.mark.exhaustive] if run in OTHERS else []) for run in RUNS]
)
def test_a_window_of_all_keys_is_a_causal_mask_bit_for_bit(run: str) -> None:
    assert np.array_equal(ran(run, problem(window=N)).output, ran(run, problem()).output)


def test_bits_are_the_same_however_a_tile_gets_its_mask() -> None:
    outputs = {kind: ran("flash", problem(window=70), mask=kind) for kind in ("cut", "computed", "loaded")}
    assert np.array_equal(outputs["cut"].output, outputs["computed"].output)
    assert np.array_equal(outputs["cut"].output, outputs["loaded"].output)
    assert len({r.cycles for r in outputs.values()}) == 3  # but not what it costs
    with pytest.raises(TilingError, match="mask=cut: one constant matrix can express only causal masks and windows"):
        ran("flash", problem(documents=(60, 79)), mask="cut")


def test_decode_sees_its_window_as_the_last_row_of_prefill_does() -> None:
    whole, one = problem(window=70, sinks=3), problem(window=70, sinks=3, seq_q=1, seq_kv=N)
    assert visible_keys(one, 0) == visible_keys(whole, N - 1) == 73
    for run in ("flash", "split_kv", "gpu", "gpu splits"):
        result = ran(run, one)
        assert result.numerics.error.rmse < 2e-3
        assert result.timing.link_bytes["hbm"] < ran(run, problem(seq_q=1, seq_kv=N)).timing.link_bytes["hbm"]


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_bytes_of_a_window_are_proportional_to_it(hw: str) -> None:
    """One query of 32k keys: what is read beyond L2 is K and V of the window."""
    sizes = {"heads": 8, "kv_heads": 8, "seq_q": 1, "seq_kv": 32768, "head_dim": 128, "causal": True}
    for window in (1024, 4096):
        p = Problem(window=window, **sizes)
        moved = npusim.run("split_kv", hw=hw, problem=p, numerics=False, l2="clean").timing.link_bytes["hbm"]
        assert window * 8 * 128 * 2 * 2 <= moved <= 1.1 * window * 8 * 128 * 2 * 2 + 2**20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 0}, "window: 0 must be greater than 0"),
        ({"sinks": 4}, "sinks: the 4 first keys need a window, but there is none;"),
        ({"documents": (100, 100)}, "documents: they add up to 200, but there are 139 keys"),
        ({"window": (8, -2)}, "window.*: -2 must be at least -1"),
        (
            {"lengths": (100, 103), "documents": (99, 104)},
            "documents: a document contains the end of a sequence; .* 100, 203",
        ),
        ({"query_lengths": (1, 2)}, "query_lengths: 2 sequences, but lengths has 0"),
        ({"lengths": (9, 7), "query_lengths": (9, 8)}, "query_lengths: sequence 1 has 8 queries but only 7 keys"),
        ({"window": 8, "causal": False}, "window: 8 keys, counted from the query backwards, need a causal mask"),
        ({"softcap": 0.0}, "softcap: 0.0 must be greater than 0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        problem(**fields)


def drawn_call(seed: int) -> dict[str, Any]:
    """Return fewer queries than keys, a window open to one side or both, and no size that tiles divide."""
    rng = random.Random(seed)
    keys = rng.choice([5, 33, 64, 97, 150])
    before, after = rng.choice([-1, -1, 4, 40]), rng.choice([-1, 0, 4, 40])
    lengths = [keys, *(rng.randint(1, keys) for _ in range(rng.randrange(3)))]
    queries = [1 if seed % 2 else rng.randint(1, n) for n in lengths]  # one sees every key of its tiles
    sizes = {"lengths": tuple(lengths), "query_lengths": tuple(queries)}
    sizes = sizes if rng.random() < 0.4 else {"seq_q": rng.choice([1, queries[0]]), "seq_kv": keys}
    return {**sizes, "causal": rng.random() < 0.2, "window": (before, after), "data": NormalData(seed=seed)}


#: Each device, and how its blocks get their rows; with ``stages`` a GPU's loop masks every tile, as compilers' do.
STAGED, OF_STAGES = {"stages": 2}, {"t4": {"stages": 1}, "v100": {}}
PLACED: list[tuple[str, str, dict[str, Any]]] = [
    *(
        ("flash", hw, OF_STAGES.get(hw, STAGED) if load_device(hw).family == "nvidia" else {})
        for hw in list_devices()
        if load_device(hw).family != "cpu"
    ),
    *(("split_kv", hw, {"pack": pack, "splits": 2, **STAGED}) for hw in ("h200", "a100") for pack in ("on", "off")),
    *(("split_kv", "ascend_910b2", {"pack": pack, "splits": 2}) for pack in ("on", "off")),
    ("flash", "h200", {"kernel": "triton"}),
    ("standard", "ascend_910b2", {}),
    ("pasa", "ascend_910b2", {}),
]


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("schedule", "hw", "fields"), every(2, PLACED))
def test_a_query_stands_at_its_own_position_whatever_tiles_its_mask_cuts(
    schedule: str, hw: str, fields: dict[str, Any], count: int
) -> None:
    """A kernel that masks every tile reads the position of a block even where the mask cuts through no tile of it."""
    computed, blocks = 0, {} if schedule == "standard" else {"block_q": 128 if hw in ("v100", "t4") else 64}
    for seed in range(count):
        p, keys = problem(**drawn_call(seed)), {"block_kv": 32 + 32 * (seed % 2)} if blocks else {}
        try:
            tiling = declared(schedule, hw, **blocks, **keys, **fields)
            result = npusim.run(schedule, hw=hw, problem=p, tiling=tiling, rows="all", heads=(0,), trace_groups=())
        except (SpecError, TilingError):  # rows that cannot be packed, or sequences of various lengths
            continue
        computed += 1
        assert result.numerics is not None
        assert result.numerics.error.rmse < 8e-3, p
    assert computed >= count // 3


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
@pytest.mark.parametrize("finite_starts", [False, True])
def test_states_start_as_they_are_written_unless_the_kernels_author_says_otherwise(
    hw: str, finite_starts: bool
) -> None:
    p, path = problem(window=16, head_dim=16), Path(__file__).parents[1] / "plugins" / "starts.py"
    own = f"{path}:{'FINITE' if finite_starts else 'WRITTEN'}"
    result = npusim.run(own, hw=hw, problem=p, tiling=SMALL, rows="all", heads=(0,), trace_groups=())
    visited = [max(0, row // 64 * 64 - 15) // 32 * 32 for row in range(N)]  # first key of the first tile of its block
    hidden = [row - 15 >= first + 32 for row, first in enumerate(visited)]
    is_nan = np.isnan(result.output[0, 0].astype(np.float32)).any(axis=1)
    assert is_nan.tolist() == [not finite_starts and x for x in hidden]
    assert 40 < sum(hidden) < N
    assert any("starts at the lowest finite number" in n for n in result.notes) == finite_starts
    if not finite_starts:
        assert result.numerics.first_events[0].cause == "-inf - -inf"
        assert "because the mask hides all of them; a kernel in the paper's form may use finite_starts" in str(result)
    packaged = npusim.run("flash", hw=hw, problem=p, tiling=declared("flash", hw, **SMALL), rows="all", trace_groups=())
    assert packaged.numerics.error.rmse < 8e-3
    assert any("starts at the lowest finite number" in n for n in packaged.notes)
