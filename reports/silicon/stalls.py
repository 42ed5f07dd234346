"""Read how long FlashAttention-2's warps wait for instructions, as a profiler counts it.

    ncu --profile-from-start off --section WarpStateStats --section InstructionStats --csv --page raw \
        python reports/silicon/stalls.py > ncu.csv
    python reports/silicon/stalls.py ncu.csv OUT.json

Needs torch, a GPU and Nsight Compute.  OUT.json: a line a call, with whether its keys are cut among blocks, the
instructions that a warp executes in a block, and the cycles that it waits for the next one to come.
"""

from __future__ import annotations

import csv
import json
import sys
from math import prod
from pathlib import Path

#: Batch, heads, tokens, head dim, causal.
CALLS = (
    *((8, 16, n, 128, True) for n in (512, 513, 768, 1024, 1025, 2048)),
    *((32, 12, n, 64, True) for n in (512, 513, 1024, 1025, 2048, 2050, 4096)),
    *((1, 12, n, 64, True) for n in (512, 577, 768, 1025)),
    *((1, 12, n, 64, False) for n in (512, 1025)),
    (3, 8, 2000, 128, True),
    (32, 32, 512, 64, True),
    (32, 32, 512, 64, False),
    (32, 12, 513, 64, False),
    (8, 16, 512, 128, False),
)
INSTRUCTIONS = "smsp__inst_executed.sum"
WAITS = "smsp__average_warps_issue_stalled_no_instruction_per_issue_active.ratio"


def call() -> None:
    """Compute every attention twice, the second time under the profiler."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    for profiled in (False, True):
        if profiled:
            torch.cuda.cudart().cudaProfilerStart()
        for batch, heads, tokens, dim, causal in CALLS:
            q, k, v = (torch.randn(batch, heads, tokens, dim, device="cuda", dtype=torch.float16) for _ in range(3))
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def read(profile: str, out: str) -> None:
    """Write what the profiler counted of each call."""
    lines = [line for line in Path(profile).read_text().splitlines() if not line.startswith("==")]
    names, _, *kernels = csv.reader(lines)
    calls, rows = iter(CALLS), []
    for kernel in (dict(zip(names, k, strict=True)) for k in kernels):
        called = kernel["Kernel Name"]
        if "flash_fwd" not in called or "combine" in called:
            continue
        blocks, threads = (prod(map(int, kernel[n].strip("()").split(","))) for n in ("Grid Size", "Block Size"))
        executed, waits = (float(kernel[n].replace(",", "")) for n in (INSTRUCTIONS, WAITS))
        executed /= blocks * threads / 32
        rows.append([*next(calls), "splitkv" in called, round(executed), round(executed * waits)])
    heading = ["batch", "heads", "tokens", "head_dim", "causal", "cut", "instructions", "waited"]
    text = ",\n".join(f"    {json.dumps(row)}" for row in sorted(rows))
    Path(out).write_text(f'{{\n  "names": {json.dumps(heading)},\n  "rows": [\n{text}\n  ]\n}}\n')


if __name__ == "__main__":
    read(*sys.argv[1:]) if len(sys.argv) > 1 else call()
