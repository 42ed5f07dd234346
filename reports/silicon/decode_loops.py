"""Loops of decode attention on one GPU: ``python decode_loops.py SGLANG.py OUT.json``; `cases` reads decode_loops.json.

Needs one GPU, torch and triton.  Measures the launches of decode_loops.json, of an H200 with Triton 3.6, again.
``SGLANG.py`` is SGLang's file of decode attention (decode_attention.py), which stays where it is published.

loops: SGLang's grouped decode, ``residents`` blocks on each multiprocessor, four heads of K and V of 128 columns in
bfloat16, 16 rows of Q in a block.  Microseconds of a launch in a graph of equal launches, the median of five replays,
of 1,024 and of 2,048 keys a block, the difference of which is that of the loops.  ``places``: whether the loop loads
the places of its rows (``loaded``) or computes them (``computed``); ``where``: whether K, V and places come from memory
or from L2; ``order`` of the rows: ``seq`` or ``rand``.  ``most_residents``: blocks that fit on a multiprocessor.

hits: cycles of a round of a loop in which the result of a load of 8 bytes, always the same line, decides the address of
the next one: ``l1`` (ld.global), ``l2`` (ld.global.cg), or ``l1`` with a copy of 512 bytes of a warp (cp.async.cg) in
each round, which nothing waits for and which comes from ``copied_from``.  The loops were written in PTX by hand.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

FILE = Path(__file__).with_suffix(".json")
#: Multiprocessors, heads of K and V, heads of Q that share one, and columns of each.
CORES, HEADS, GROUP, COLUMNS = 132, 4, 4, 128
#: Rows of K and V that stay in L2.
NEAR_ROWS = 4096


def cases(group: str, file: Path = FILE) -> list[dict[str, Any]]:
    """Return the cases of a group, ``loops`` or ``hits``, of a file."""
    found = json.loads(file.read_text(encoding="utf-8"))[group]
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def iteration_cycles(case: dict[str, Any], clock_mhz: float = 1980) -> float:
    """Return the cycles of an iteration of a case of ``loops``, by the difference of its two launches."""
    return float((case["us_2048"] - case["us_1024"]) * clock_mhz / (1024 / case["block_n"]))


def main() -> None:
    """Measure all loops whose places are loaded."""
    import torch

    spec = importlib.util.spec_from_file_location("published", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    published = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(published)
    found = json.loads(FILE.read_text(encoding="utf-8"))
    for row in found["loops"]["rows"]:
        case = dict(zip(found["loops"]["columns"], row, strict=True))
        if case["places"] == "loaded":
            row[7:9] = [round(timed(published, case, keys), 3) for keys in (1024, 2048)]
    found["device"] = torch.cuda.get_device_name()
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")


def timed(published: Any, case: dict[str, Any], keys: int) -> float:
    """Return the microseconds of a launch."""
    import torch

    batch, made = CORES // HEADS * case["residents"], {"dtype": torch.bfloat16, "device": "cuda"}
    listed = batch * keys
    rows = listed if case["where"] == "memory" else NEAR_ROWS
    k, v = (torch.zeros(rows, HEADS, COLUMNS, **made) for _ in "kv")
    q = torch.zeros(batch, HEADS * GROUP, COLUMNS, **made)
    out, sums = (torch.zeros(batch, HEADS * GROUP, 1, *size, device="cuda") for size in ((COLUMNS,), ()))
    ends = (torch.arange(batch + 1, device="cuda") * keys).to(torch.int32)
    order = torch.randperm if case["order"] == "rand" else torch.arange
    places, splits = order(listed, device="cuda") % rows, torch.ones(batch, dtype=torch.int32, device="cuda")
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], 0, 0, 0, 0, *out.stride()[:3])
    sizes = {"BLOCK_DMODEL": COLUMNS, "BLOCK_DPE": 0, "BLOCK_DV": COLUMNS, "MIN_BLOCK_KV": 32, "BLOCK_H": 16}
    sizes |= {"Lk": COLUMNS, "Lv": COLUMNS, "BLOCK_N": case["block_n"], "q_head_num": HEADS * GROUP}
    sizes |= {"num_warps": case["warps"], "num_stages": case["stages"], "kv_group_num": GROUP}
    sizes |= {"xai_temperature_len": -1, "logit_cap": 0.0}
    tensors = (q, k, v, COLUMNS**-0.5, ends, places, out, sums, splits)

    def launch() -> None:
        published._fwd_grouped_kernel_stage1[(batch, HEADS, 1)](*tensors, *strides, **sizes)

    launch()
    torch.cuda.synchronize()
    graph, count, times = torch.cuda.CUDAGraph(), 6, []
    with torch.cuda.graph(graph):
        for _ in range(count):
            launch()
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return median(times)


if __name__ == "__main__":
    main()
