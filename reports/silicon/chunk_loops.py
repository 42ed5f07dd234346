"""Loops over chunks of tokens on one GPU: ``python -m reports.silicon.chunk_loops OUT.csv`` measures them again.

Needs one GPU, torch and triton.  chunk_loops.csv has the launches of an H200 with torch 2.11 and Triton 3.6:
microseconds of a launch by the profiler, the median of five, each after a read of 256 MB.  A block has ``bk`` rows
and ``bv`` columns of the state of one head of 128 x 128; in each chunk of 64 tokens it stores the state (``stores``),
loads K and V in bfloat16 and adds K^T V, with ``decays`` after it has multiplied the state and V by decays.
``from``: chunks one after the other from memory, or the first chunk again and again, from L2 (a loop without stores
would then load once, and is not measured).
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from statistics import median
from typing import Any

FILE = Path(__file__).with_suffix(".csv")
#: Tokens of a chunk, and channels of K and of V.
CHUNK, WIDTH = 64, 128
#: Floats of a buffer that is read before each launch, so that L2 holds nothing of use.
FLUSHED = 64 << 20


def rows(file: Path = FILE) -> list[dict[str, str]]:
    """Return the launches of a file."""
    with file.open(encoding="utf-8", newline="") as read:
        return list(csv.DictReader(read))


def main() -> None:
    """Measure all launches again."""
    made = [row | measured(row) for row in rows()]
    with Path(sys.argv[1]).open("w", encoding="utf-8", newline="") as write:
        writer = csv.DictWriter(write, list(made[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(made)


def measured(row: dict[str, str]) -> dict[str, str]:
    """Return the microseconds of a launch, and the registers and shared memory that its compiler states."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from reports.silicon.chunk_loops_kernel import states

    tokens, heads, bk, bv = (int(row[n]) for n in ("tokens", "heads", "bk", "bv"))
    k, v = (torch.randn(tokens, heads, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    h = torch.empty(tokens // CHUNK, heads, WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    other, grid = torch.ones(FLUSHED, device="cuda"), (WIDTH // bk, WIDTH // bv, heads)
    sizes = {"WIDTH": WIDTH, "BT": CHUNK, "BK": bk, "BV": bv}
    flags = {"STORES": row["stores"] == "1", "NEAR": row["from"] == "l2", "DECAYS": row["decays"] == "1"}
    launched = {"num_warps": int(row["warps"]), "num_stages": int(row["stages"])}

    def call() -> Any:
        return states[grid](k, v, h, tokens, heads, **sizes, **flags, **launched)

    compiled = [call() for _ in range(3)][-1]
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(5):
            other.sum()
            call()
            torch.cuda.synchronize()
    us = median(e.device_time for e in profiler.events() if "states" in e.name and "CUDA" in str(e.device_type))
    return {"us": f"{us:.1f}", "registers": str(compiled.n_regs), "shared_bytes": str(compiled.metadata.shared)}


if __name__ == "__main__":
    main()
