"""List what Triton makes of attention's tiles: registers, spills, shared memory, and spill accesses of the loop.

    python tests/silicon/compiled.py OUT.csv [--kernels FILE]

Rows as in hwconfigs/h200_registers.csv.  No kernel runs; needs torch, triton and cuobjdump.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import multiprocessing
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from measure_h200 import KERNELS, load

STAGES_WARPS = ((1, 4), (2, 4), (3, 8), (2, 8), (3, 4))
FIELDS = (
    "schedule",
    "dtype",
    "head_dim",
    "causal",
    "block_q",
    "block_kv",
    "stages",
    "warps",
    "registers_per_thread",
    "spilled_registers",
    "shared_bytes",
    "loop_accesses",
)
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)[^;]*?(0x[0-9a-f]+)?\s*;")


def jobs() -> list[tuple[str, int, bool, tuple[int, ...]]]:
    """Return (kernel, head size, causal, tile)."""
    wide, narrow = (16, 32, 64, 128, 256), (32, 64, 128, 256)
    found = [
        ("flash", d, causal, (q, kv, *sw))
        for d, causal, q, kv, sw in itertools.product((64, 128), (False, True), (32, 64, 128, 256), wide, STAGES_WARPS)
    ]
    others = itertools.product(
        ("fp8_attention_chained", "fp8_attention_fresh", "pasa"), (64, 128), (64, 128), narrow, STAGES_WARPS
    )
    return found + [(name, d, False, (q, kv, *sw)) for name, d, q, kv, sw in others]


def compiled(job: tuple[str, str, int, bool, tuple[int, ...]]) -> dict | None:
    """Compile one kernel; None where shared memory does not hold it."""
    path, name, d, causal, (q, kv, stages, warps) = job
    given, half, e4m3 = load(Path(path)), torch.float16, torch.float8_e4m3fn
    options = {"num_warps": warps, "grid": (1,)}
    try:
        if name == "flash":
            h = given.fa.warmup(half, half, half, half, 1.0, 2048, 1, d, q, kv, causal, stages, **options)
        elif name == "pasa":
            h = given.pasa.warmup(half, half, half, half, 2048, 1, 1.0, d, q, kv, stages, **options)
        else:
            fresh = name.endswith("fresh")
            h = given.fp8.warmup(e4m3, e4m3, e4m3, torch.float32, 1.0, 256.0, 2048, d, q, kv, fresh, stages, **options)
        h._init_handles()
    except Exception:  # noqa: BLE001 - too much shared memory, or more than the compiler takes
        return None
    dtype = "float8_e4m3fn" if name.startswith("fp8") else "float16"
    row = (
        name,
        dtype,
        d,
        causal,
        q,
        kv,
        stages,
        warps,
        h.n_regs,
        h.n_spills,
        h.metadata.shared,
        accesses(h.asm["cubin"]),
    )
    return dict(zip(FIELDS, row, strict=True))


def accesses(cubin: bytes) -> int:
    """Return loads and stores of local memory in the loop with most products."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            ["cuobjdump", "--dump-sass", file.name], check=True, capture_output=True, text=True
        ).stdout
    lines = [(int(m[1], 16), m[2], m[3]) for m in INSTRUCTION.finditer(text)]
    loops = [(int(to, 16), at) for at, name, to in lines if name == "BRA" and to and int(to, 16) < at]

    def count(loop: tuple[int, int], *names: str) -> int:
        return sum(loop[0] <= at <= loop[1] and name in names for at, name, _ in lines)

    best = max(loops, key=lambda p: count(p, "HMMA", "HGMMA", "QGMMA"), default=None)
    return 0 if best is None else count(best, "LDL", "STL")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kernels", type=Path, default=KERNELS)
    chosen = parser.parse_args()
    with ProcessPoolExecutor(16, mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = [r for r in pool.map(compiled, [(str(chosen.kernels), *j) for j in jobs()]) if r]
    with chosen.out.open("w") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    print(len(rows), "of", len(jobs()), "compiled")


if __name__ == "__main__":
    main()
