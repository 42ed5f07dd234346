"""Searches of drawn spaces against a run of every point, under one limit and resumed under others."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from npusim.config.problem import GemmProblem, Problem
from npusim.errors import TilingError
from npusim.library import find_schedule
from npusim.simulation.request import Request
from npusim.simulation.simulate import run_request
from npusim.studies.explore import explore
from npusim.studies.explore.space import SearchRequest

if TYPE_CHECKING:
    from npusim.config.problem import AnyProblem
    from npusim.studies.explore import Exploration
    from npusim.studies.explore.store import PointOutcome

WINDOW = f"{Path(__file__).parents[1] / 'plugins' / 'window.py'}:WINDOW"
SIZES = (16, 32, 64, 128)
ASCEND: dict[str, tuple[Any, ...]] = {"vector_rows": (4, 8, 16, 32), "depth": (0, 1, 2, 3)}
SM: dict[str, tuple[Any, ...]] = {"warps": (4, 8), "stages": (1, 2, 3)}
FORMATS = {"precision": ("fa2_fp32", "fa16_32", "fa16")}
SPLIT = {"splits": (1, 2, 3), "merge": ("sequential", "tree")}
#: Its bits are not computed: none of its axes changes them.
PRODUCT: dict[str, tuple[Any, ...]] = {"stages": (2, 3, 4), "splits": (1, 2), "block_n": (64, 128, 256)}
#: Sequences of other lengths, one query each.
LENGTHS = "lengths"
LAUNCH = (
    f"{Path(__file__).parents[1] / 'ttir' / 'kernels.py'}::plain[cdiv(seq_q, BM), batch * heads]"
    "(q, k, v, o, scale * log2e, seq_kv, D=head_dim, BM=64, BN=64, CAUSAL=causal)"
)
#: Schedule, family, device, and its axes besides blocks; the last one changes bits.
PLACES: tuple[tuple[str, str, str, dict[str, tuple[Any, ...]]], ...] = (
    ("flash", "ascend", "ascend_910b2", {**ASCEND, **FORMATS}),
    ("split_kv", "ascend", "ascend_910b2", {**ASCEND, **SPLIT, **FORMATS}),
    ("flash", "nvidia", "h200", {**SM, "running": ("float32", "float16")}),
    ("flash", "nvidia", "a10", {**SM, "running": ("float32", "float16")}),
    ("split_kv", "nvidia", "h200", {**SM, **SPLIT, "running": ("float32", "float16")}),
    (WINDOW, "ascend", "ascend_910b2", {**ASCEND, "window": (20, 50, 90)}),
    ("gemm", "nvidia", "h100", PRODUCT),
    ("gemm", "nvidia", "h200", PRODUCT),
    ("gemm", "nvidia", "a100", PRODUCT),
    ("split_kv", "ascend", "ascend_910b2", {**ASCEND, **SPLIT, LENGTHS: (), **FORMATS}),
    ("split_kv", "nvidia", "h200", {**SM, **SPLIT, LENGTHS: (), "running": ("float32", "float16")}),
    (LAUNCH, "nvidia", "h200", {"stages": (2, 3), "warps": (4, 8), "BN": (16, 32, 64)}),
)
#: Spaces that need Triton.
OF_TRITON = {number for number in range(24) if PLACES[number % len(PLACES)][0] == LAUNCH}
#: A point's latency in us, its error (None: not finite) and the sampling error of that; None for one that does not fit.
Exact = tuple[float, float | None, float] | None


def _problem(rng: random.Random, schedule: str, *, has_lengths: bool) -> AnyProblem:
    if schedule == "gemm":  # of several waves: little else is as near its bound
        return GemmProblem(m=rng.randrange(1000, 4000), n=rng.randrange(500, 3000), k=rng.randrange(33, 400))
    heads, seq = rng.randrange(1, 4), rng.randrange(64, 200)
    if has_lengths:
        lengths = tuple(rng.randrange(1, 300) for _ in range(rng.randrange(2, 5)))
        return Problem(
            batch=len(lengths), lengths=lengths, heads=heads, seq_q=1, seq_kv=max(lengths), head_dim=64, causal=True
        )
    causal = schedule == WINDOW or rng.random() < 0.5  # its window ends at the diagonal
    return Problem(heads=heads, seq_q=seq, seq_kv=seq, head_dim=64, causal=causal)


class Drawn:
    """A space, what each of its points gives alone, and limits on it."""

    def __init__(self, number: int) -> None:
        rng = random.Random(f"space {number}")
        self.schedule, family, self.hw, axes = PLACES[number % len(PLACES)]
        *usual, bits = (n for n in axes if n != LENGTHS)
        chosen = [rng.choice(usual), bits]
        count = 2
        if axes is PRODUCT:  # whose points cost little: all of them
            chosen, count = list(axes), 3
        self.own = set(find_schedule(self.schedule, family).tiling.model_fields)
        blocks = {n: SIZES for n in ("block_q", "block_kv") if n in self.own}
        self.axes = {
            n: rng.sample(v, min(count, len(v))) for n, v in {**blocks, **axes}.items() if n in (*blocks, *chosen)
        }
        self.problem = _problem(rng, self.schedule, has_lengths=LENGTHS in axes)
        self.exact = [self.alone(dict(zip(self.axes, at, strict=True))) for at in product(*self.axes.values())]
        errors = sorted({e[1] for e in self.exact if e is not None and e[1] is not None})
        self.limits: list[dict[str, Any]] = [{}]
        if errors:
            self.limits = [
                {"pareto": True},
                {"max_rmse": rng.choice(errors)},
                {"max_rmse": errors[0], "finite": True, "pareto": True},
            ]
        rng.shuffle(self.limits)

    def alone(self, point: dict[str, Any]) -> Exact:
        asked = Request(self.schedule, hw=self.hw, problem=self.problem)
        variants = SearchRequest(asked, (self.schedule,)).spec(self.axes).variants
        try:  # with the fields that the search has for those that are no axes
            found = run_request(replace(variants.request_of(point), numerics=True))
        except TilingError:
            return None
        assert (found.numerics is None) == isinstance(self.problem, GemmProblem)
        bits = found.numerics
        return found.latency_us, *((None, 0.0) if bits is None else (bits.error.rmse, bits.sampling_error))

    def search(self, **more: Any) -> Exploration:
        return explore(self.schedule, self.axes, hw=self.hw, problem=self.problem, **more)

    def agrees(
        self, found: Exploration, *, pareto: bool = False, finite: bool = False, max_rmse: float = math.inf
    ) -> None:
        is_strict = finite or max_rmse < math.inf
        kept = {
            i: e
            for i, e in enumerate(self.exact)
            if e is not None and (e[1] <= max_rmse if e[1] is not None else not is_strict)
        }
        for o, exact in zip(found.outcomes, self.exact, strict=True):
            # One that cannot win with its family need not fit.
            assert o.status != "infeasible" if exact is not None else o.status in ("infeasible", "pruned", "rejected")
            if exact is not None:
                assert (o.status == "rejected") == (o.index not in kept)
                assert o.latency_us in (None, exact[0])
                assert o.status != "pruned" or (o.bound_us is not None and o.bound_us <= exact[0])
        fastest = min((e[0] for e in kept.values()), default=None)
        assert (found.best.latency_us if found.best else None) == fastest
        if pareto:
            best, least, sampled = list[tuple[float, float]](), math.inf, 0.0
            for latency, error, sampling in sorted({e for e in kept.values() if e[1] is not None}):
                if error + max(sampling, sampled) < least:  # by more than chance
                    best.append((latency, error))
                    least, sampled = error, sampling
            rows = {(o.latency_us, o.relative_rmse): o.point.get("precision") for o in found.front}
            assert [row for row in rows if row in best] == best
            # Besides, a row of each precision that has none of the best.
            assert {rows[row] for row in rows if row not in best}.isdisjoint({rows[row] for row in best})


def _agree(number: int, folder: Path) -> None:
    drawn = Drawn(number)
    assert any(drawn.exact)
    drawn.agrees(drawn.search())
    first, *others = drawn.limits
    rows: list[PointOutcome] = []

    def stop(outcome: PointOutcome, _: int) -> None:
        rows.append(outcome)
        if len(rows) == len(drawn.exact) // 2:
            raise KeyboardInterrupt

    store = folder / "s.sqlite"
    with pytest.raises(KeyboardInterrupt):
        drawn.search(out=store, on_outcome=stop, **first)
    for limits in (*others, first):
        drawn.agrees(drawn.search(out=store, resume=True, **limits), **limits)


@pytest.mark.parametrize("number", [7])
def test_a_search_finds_what_runs_of_all_its_points_find(number: int, tmp_path: Path) -> None:
    _agree(number, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [n for n in range(24) if n != 7])
def test_more_searches_find_what_runs_of_all_their_points_find(number: int, tmp_path: Path) -> None:
    if number in OF_TRITON and find_spec("triton") is None:
        pytest.skip("Triton is not installed: npusim[triton]")
    _agree(number, tmp_path)
