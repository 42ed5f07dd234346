"""Measure when NCCL's kernels start and end while attention runs, and which kernel gets the SMs first on each GPU.

``torchrun --nproc_per_node 2 reports/silicon/overlap.py OUT`` writes ``OUT/overlap_RANK.csv``: for each length, cut and
priority of NCCL's stream a row for each kernel of one profiled call (stream, name, start and duration in
microseconds), and the median of 10 calls that are not profiled.  Attention, output projection and all-reduce are as in
the cases ``h200x2_attn_linear_allreduce`` of measurements/h200.yaml.
"""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable

HEADS, DIM = 40, 128
LENGTHS, BLOCKS = (4096, 16384, 32768), (1, 2, 4, 8)


def call_of(length: int, blocks: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """Return a call: all rows in ``blocks`` blocks, each reduced on the group's stream while the next is computed."""
    heads = HEADS // dist.get_world_size()
    q, k, v = (torch.randn(1, heads, length, DIM, device="cuda", dtype=torch.float16) for _ in range(3))
    weight = torch.randn(heads * DIM, HEADS * DIM, device="cuda", dtype=torch.float16) / 64

    def call() -> None:
        waiting = []
        for rows in q.chunk(blocks, dim=2):
            out = attention(rows, k, v).transpose(1, 2).reshape(-1, heads * DIM) @ weight
            waiting.append((dist.all_reduce(out, group=group, async_op=True), out))
        for work, _ in waiting:
            work.wait()

    return call


def timed_us(call: Callable[[], None]) -> float:
    """Return the median time of 10 calls between CUDA events."""
    times = []
    for _ in range(13):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times[3:])


def kernels_of(call: Callable[[], None]) -> list[tuple[int, str, float, float]]:
    """Return stream, name, start and duration of each kernel of one call."""
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        call()
        torch.cuda.synchronize()
    events = [e for e in profiler.profiler.kineto_results.events() if "CUDA" in str(e.device_type())]
    first = min(e.start_ns() for e in events)
    return [
        (e.device_resource_id(), e.name()[:60], (e.start_ns() - first) / 1e3, e.duration_ns() / 1e3) for e in events
    ]


def main(folder: Path) -> None:
    """Measure all lengths and cuts with NCCL's stream of both priorities."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"overlap_{dist.get_rank()}.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["length", "blocks", "priority", "call_us", "stream", "kernel", "start_us", "duration_us"])
        for is_high in (False, True):
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=is_high)
            group = dist.new_group(pg_options=options)
            for length in LENGTHS:
                for blocks in BLOCKS:
                    call = call_of(length, blocks, group)
                    call_us = timed_us(call)
                    for kernel in sorted(kernels_of(call), key=lambda k: k[2]):
                        rows.writerow([length, blocks, "high" if is_high else "default", call_us, *kernel])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
