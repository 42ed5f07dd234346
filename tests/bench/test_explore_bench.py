"""A search with bounds beside plain exhaustive search, in the processor's time of one run."""

from __future__ import annotations

import gc
import random
import time

import pytest

from npusim.studies.explore import explore

pytestmark = pytest.mark.bench
FIELDS = {
    "block_q": range(32, 257, 32),
    "block_kv": range(64, 1025, 64),
    "depth": range(1, 7),
    "vector_rows": (4, 8, 16, 32),
}
#: Points simulated one by one for the comparison.
SAMPLE = 40


def test_a_search_of_3072_points_beside_exhaustive_search() -> None:
    explore("flash", {"block_kv": [512, 256]}, exhaustive=True)  # kernels are loaded
    gc.freeze()
    start = time.process_time()
    found = explore("flash", FIELDS)
    searched = (time.process_time() - start) / len(found.outcomes)
    assert len(found.outcomes) == 3072
    fits = [o for o in found.outcomes if o.status != "infeasible"]
    start = time.process_time()
    for o in random.Random(16).sample(fits, SAMPLE):
        explore("flash", {n: [v] for n, v in o.point.items()}, exhaustive=True)
    plain = (time.process_time() - start) / SAMPLE * len(fits) / len(found.outcomes)
    print(f"\n{1 / searched:,.0f} points a second, exhaustive {1 / plain:,.0f}: {plain / searched:.1f} x {found}")
    assert plain > 5 * searched


def test_a_search_over_sequences_of_unequal_length() -> None:
    fields = {"block_kv": (128, 256, 384, 512), "splits": (1, 2, 3, 4, 6, 8, 12, 16), "depth": range(1, 5)}
    lengths = [513, 1024, 4096, 777, 2048, 8192, 3000, 150] * 2
    start = time.process_time()
    found = explore(
        "split_kv", {**fields, "vector_rows": (4, 8, 16, 32)}, workload="qwen2_7b", lengths=lengths, seq_q=1
    )
    print(f"\n{len(found.outcomes) / (time.process_time() - start):,.0f} points a second: {found}")
    assert len(found.outcomes) == 512
