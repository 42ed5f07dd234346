"""Tiles of long calls, and of changed devices, are judged on the call itself."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import npusim
from npusim.config.load import apply_overrides, load_device, load_workload
from npusim.simulation import chosen_tile
from npusim.simulation.chosen_tile import HEADS, final_problem, judged_problem
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request

LIBRARY = {"warps": 4, "stages": "library"}
#: Calls whose shorter call has another best tile, and tiles that are fast on them.
CALLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("a10", {"workload": "llama2_7b", "seq": 2048, "batch": 4}, {"block_q": 64, "block_kv": 64, "launch": "in_order"}),
    ("l40s", {"workload": "llama2_7b", "seq": 4096, "batch": 2}, {"block_q": 64, "block_kv": 64, "launch": "in_order"}),
    ("a100", {"workload": "llama3_8b", "seq": 8192}, {"block_q": 128, "block_kv": 64, **LIBRARY}),
    ("a100", {"workload": "llama2_7b", "seq": 4096, "batch": 4}, {"launch": "in_order"}),
]


def _us(hw: str, *, schedule: str = "flash", **options: Any) -> float:
    us = npusim.run(schedule, hw=hw, numerics=False, trace_groups=(), **options).latency_us
    assert us is not None
    return us


@pytest.mark.parametrize(
    ("hw", "call", "fast"), [CALLS[0], *(pytest.param(*c, marks=pytest.mark.exhaustive) for c in CALLS[1:])]
)
def test_what_is_chosen_for_a_long_call_is_no_slower_there(hw: str, call: dict[str, Any], fast: dict[str, Any]) -> None:
    assert _us(hw, **call) <= _us(hw, **call, tiling=fast) * 1.01


def test_what_is_chosen_for_a_long_call_of_volta_is_no_slower_there(tmp_path: Any) -> None:
    load = load_workload("svd_img2vid").model_copy(update={"heads": 32, "kv_heads": 32, "tensors": None})
    call: dict[str, Any] = {
        "schedule": "volta_flash",
        "workload": load,
        "seq": 8192,
        "batch": 8,
        "precision": "acc_fp16",
    }
    assert load.head_dim == 64
    assert _us("v100", **call) <= _us("v100", **call, tiling={"block_kv": 128}) * 1.01 < 55e3


def test_longest_first_keeps_the_keys_of_heads_in_l2() -> None:
    """Heads of 1 MiB of K and V in an L2 of 6: all heads' longest blocks at once would read 40 times as much of HBM."""
    read = {}
    for launch in ("in_order", "longest_first"):
        fields = {"block_q": 64, "block_kv": 64, "launch": launch, **LIBRARY}
        call: dict[str, Any] = {"workload": "llama2_7b", "seq": 2048, "batch": 4, "numerics": False, "trace_groups": ()}
        timing = npusim.run("flash", hw="a10", tiling=fields, **call).timing
        assert timing is not None
        read[launch] = timing.link_bytes["hbm"]
    assert read["longest_first"] <= 1.5 * read["in_order"]


@pytest.mark.parametrize("seq", [2048, 4096, 8192, 32768, 131072])
@pytest.mark.parametrize("batch", [1, 8])
def test_the_last_comparison_is_on_the_call_or_a_part_with_many_heads(seq: int, batch: int) -> None:
    problem = load_workload("llama2_7b").problem(seq=seq, batch=batch)
    last, first = final_problem(problem), judged_problem(problem)
    assert last.heads * last.pairs() >= min(problem.heads * problem.pairs(), first.heads * first.pairs())
    assert last == problem or last.batch * last.kv_heads >= HEADS
    if seq <= 8192:
        assert last.seq_kv == seq


def test_a_changed_device_knows_the_unchanged_one_in_other_processes_too() -> None:
    device = load_device("a10", {"links.hbm.bytes_per_s": "3e11"})
    twice = pickle.loads(pickle.dumps(apply_overrides(device, {"clock_hz": "1e9"})))
    assert load_device("a10").unchanged is None
    assert device.unchanged == twice.unchanged == load_device("a10")


def test_a_what_if_takes_no_slower_tile_than_the_unchanged_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile of the unchanged device lies two steps away, of which the first is slower on the changed one."""
    two_steps = (128, 256, 8, 3)
    of_device = {True: {(64, 128, 4, 3): 0.8, two_steps: 0.6}, False: {(64, 128, 4, 3): 1.2, two_steps: 0.9}}

    def simulated(trial: chosen_tile._Trial, tiling: Any, fields: Any) -> chosen_tile._Tried:
        sizes = tiling.block_q, tiling.block_kv, tiling.warps, tiling.stages
        changed = {n: v for n, v in tiling if v != getattr(trial.tiling, n)}
        return chosen_tile._Tried(of_device[trial.device.unchanged is None].get(sizes, 1.0), changed)

    monkeypatch.setattr(chosen_tile._Trial, "_simulated", simulated)
    monkeypatch.setattr(chosen_tile, "remembered", lambda _kind, _schedule, _device, _call, make: make())
    for overrides in (None, {"clock_hz": "1e9"}):
        chosen_tile._choice.cache_clear()
        request = Request("flash", hw="h200", workload="smollm2", seq=512, overrides=overrides, numerics=False)
        fields = chosen_tile.choose_tile(plan_of(request)).fields
        assert {"block_kv": 256, "warps": 8, "stages": 3}.items() <= fields.items()
    chosen_tile._choice.cache_clear()
