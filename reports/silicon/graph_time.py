"""The time of calls in a CUDA graph, for the commands of this folder that measure kernels of microseconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def graph_us(calls: Sequence[Callable[[], object]], rounds: int) -> float:
    """Return the microseconds of one call in a CUDA graph of all ``calls``: the median of ``rounds`` replays.

    The first call runs once before the graph is captured, because Triton and cuBLAS compile or choose a kernel then.
    Two replays before the measured ones fill the caches.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = list[float]()
    for _ in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return float(median(times[2:]))


def write_rows(rows: Sequence[Mapping[str, object]]) -> None:
    """Write measured cases and the device's name to the file that the command line names."""
    text = json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1)
    Path(sys.argv[1]).write_text(text, encoding="utf-8")
