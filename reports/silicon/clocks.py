"""Read a GPU's clock, a microsecond at a time, while other kernels run.

    python reports/silicon/clocks.py OUT.json

One warp notes its own cycles (clock64) and the time (globaltimer) over and over; kernels run in another stream between
two marks.  ``nvidia-smi`` averages, and reads the full clock for kernels that last a millisecond.  Needs torch, triton
and cupy.  OUT.json: by kernel, its microseconds and the clock in MHz just before it and in each third of it.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import cupy
import numpy as np
import torch
import triton
import triton.language as tl

SOURCE = r"""
__device__ unsigned long long now() {
    unsigned long long t;
    asm volatile("mov.u64 %0,%globaltimer;" : "=l"(t));
    return t;
}
extern "C" __global__ void probe(unsigned long long* out, int count) {
    if (threadIdx.x) return;
    for (int i = 0; i < count; i++) {
        long long c = clock64();
        out[2 * i] = now(); out[2 * i + 1] = c;
        while (clock64() - c < 1900) {}
    }
}
extern "C" __global__ void mark(unsigned long long* out) { *out = now(); }
"""
CALLS, NEAR_NS = 6, 15000


@triton.jit
def products(left, right, out, rounds, count, pause_ns, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """Multiply ``count`` times, then sleep; repeat this for the number of rounds."""
    i, k = tl.arange(0, SIZE), tl.arange(0, DEPTH)
    a = tl.load(left + i[:, None] * DEPTH + k[None])
    b = tl.load(right + i[:, None] * DEPTH + k[None]).trans()
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for _ in range(rounds):
        for _ in range(count):
            total = tl.dot(a, b, total)
        tl.inline_asm_elementwise(
            "nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [pause_ns], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.store(out + tl.program_id(0) * SIZE * SIZE + i[:, None] * SIZE + i[None], total)


def clocks(call, count: int = 6000) -> dict[str, float | None]:
    """Return a call's microseconds, and medians of the clock before it and in its thirds."""
    module = cupy.RawModule(code=SOURCE)
    probe, mark = module.get_function("probe"), module.get_function("mark")
    reader, worker = torch.cuda.Stream(), torch.cuda.Stream()
    of_reader, of_worker = (cupy.cuda.Stream.from_external(s) for s in (reader, worker))
    samples, marks = cupy.zeros(2 * count, cupy.uint64), cupy.zeros(2 * CALLS, cupy.uint64)
    with of_reader:
        probe((1,), (32,), (samples, np.int32(1)))
    with torch.cuda.stream(worker):
        call()
        with of_worker:
            mark((1,), (1,), (marks,))
    torch.cuda.synchronize()
    with of_reader:
        probe((1,), (32,), (samples, np.int32(count)))
    with torch.cuda.stream(worker):
        for at in range(CALLS):
            torch.cuda._sleep(200_000)
            with of_worker:
                mark((1,), (1,), (marks[2 * at :],))
            call()
            with of_worker:
                mark((1,), (1,), (marks[2 * at + 1 :],))
    torch.cuda.synchronize()
    seen, ends = samples.get().reshape(-1, 2).astype(np.int64), marks.get().reshape(-1, 2).astype(np.int64)

    def mhz(first: float, last: float) -> float | None:
        i, j = np.searchsorted(seen[:, 0], first), np.searchsorted(seen[:, 0], last) - 1
        return None if j - i < 2 else float((seen[j, 1] - seen[i, 1]) / (seen[j, 0] - seen[i, 0]) * 1e3)

    def median(values: list[float | None]) -> float | None:
        known = [v for v in values if v is not None]
        return round(statistics.median(known), 1) if known else None

    thirds = [[mhz(a + (b - a) * n / 3, a + (b - a) * (n + 1) / 3) for a, b in ends] for n in range(3)]
    return {
        "us": median([(b - a) / 1e3 for a, b in ends]),
        "before": median([mhz(a - NEAR_NS, a) for a, _ in ends]),
        **{name: median(each) for name, each in zip(("first", "second", "third"), thirds, strict=True)},
    }


def main() -> None:
    torch.manual_seed(0)
    device, found = torch.device("cuda"), {}
    out = torch.empty(132 * 128 * 128, device=device)
    large, copied = torch.randn(2**26, device=device), torch.empty(2**26, device=device)
    found["copy"] = clocks(lambda: copied.copy_(large))
    found["exp"] = clocks(lambda: torch.exp(large, out=copied))
    for name, scale, blocks, count, pause in (
        ("products of zeros", 0.0, 132, 64, 0),
        ("products", 1.0, 132, 64, 0),
        ("products on one multiprocessor", 1.0, 1, 64, 0),
        ("products on 33 multiprocessors", 1.0, 33, 64, 0),
        ("a product every 2 us", 1.0, 132, 1, 2000),
        ("a product every 10 us", 1.0, 132, 1, 10000),
    ):
        a, b = ((torch.randn(128, 64, device=device) * scale).half() for _ in range(2))
        rounds = max(4, int(150 / (count * 0.28 + pause / 1e3)))
        found[name] = clocks(
            lambda a=a, b=b, r=rounds, n=count, p=pause, g=blocks: products[(g,)](a, b, out, r, n, p, 128, 64)
        )
    for m, n, k in ((2048, 2048, 2048), (4096, 4096, 4096), (512, 4096, 4096), (256, 8192, 8192)):
        for scale in (0.0, 1.0):
            a, b = (torch.randn(m, k, device=device) * scale).half(), (torch.randn(k, n, device=device) * scale).half()
            found[f"gemm {m} x {n} x {k}{'' if scale else ' of zeros'}"] = clocks(lambda a=a, b=b: torch.mm(a, b))
    Path(sys.argv[1]).write_text(json.dumps({"device": torch.cuda.get_device_name(), "kernels": found}, indent=1))


if __name__ == "__main__":
    main()
