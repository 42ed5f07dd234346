"""Code beyond the caches of a multiprocessor: constants against what was measured, and which blocks wait for it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import npusim
from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.library.published.fa2 import instructions
from npusim.machines.sm.core import warp_issue

SILICON = Path(__file__).parents[2] / "reports" / "silicon"
CODE = warp_issue(load_device("h200")).library.code  # type: ignore[union-attr]
#: FlashAttention-2's rows and keys by head dim, and whether keys are cut.
TILES = {(64, False): (128, 128), (128, False): (128, 64), (64, True): (64, 256)}


def rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of a measurement by the names of their columns."""
    measured = json.loads((SILICON / name).read_text())
    return [dict(zip(measured["names"], row, strict=True)) for row in measured["rows"]]


def test_straight_code_runs_at_full_speed_as_far_as_the_first_cache_holds_it() -> None:
    alone = {
        r["line"]: r["cycles"] / r["line"]
        for r in rows("code.json")
        if (r["inner"], r["blocks"], r["warps"]) == (0, 1, 4)
    }
    held = {line for line, cycles in alone.items() if cycles < 1.6}
    assert max(held) == CODE.cached_count.value
    assert min(cycles for line, cycles in alone.items() if line not in held) > 2.3


def test_waits_for_code_are_those_that_a_profiler_counts() -> None:
    near, far = [], []
    for row in rows("stalls.json"):
        tile, tokens = TILES[row["head_dim"], row["cut"]], row["tokens"]
        is_ragged = any(tokens % size for size in tile)
        loop, around = instructions(row["head_dim"], *tile, causal=row["causal"], is_ragged=is_ragged)
        each = row["waited"] / around
        if row["cut"] or (row["causal"] and loop + around <= CODE.far_count.value and loop <= CODE.loop_count.value):
            near.append(each)
        elif row["causal"] and loop + around > CODE.far_count.value:
            far.append(each)
    assert CODE.fetch_cycles.value == pytest.approx(median(near), abs=0.02)
    assert CODE.far_cycles.value == pytest.approx(median(far), abs=0.05)


def waited(seq: int, batch: int = 32, **more: Any) -> float:
    """Return the cycles that all blocks of a call wait for code."""
    problem = Problem(batch=batch, heads=12, seq_q=seq, head_dim=64, **more)
    result = npusim.run("flash", hw="h200", problem=problem, tiling={"kernel": "fa2"}, numerics=False)
    return sum(cycles for term, cycles in result.timing.term_cycles.items() if ".code." in term)


def test_blocks_of_several_lengths_wait_for_code_and_waves_of_blocks_alike_do_not() -> None:
    assert waited(512) == 0
    assert 0 < waited(512, causal=True) < waited(513, causal=True)
    assert waited(512, batch=1) > 0  # one wave: all of its blocks start at once
