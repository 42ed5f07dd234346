"""Write what `measure_h200.py` holds out as measurements: as_cases.py heldout.json operators.json OUT.yaml."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HEAD = """# An NVIDIA H200 again, other shapes than those given: measured once by measure_h200.py, never fitted.
schema: npusim.measurements/1
source: "own measurements, {device} (CUDA {cuda}, torch {torch}, triton 3.6), medians of CUDA-event times, {date}"
cases:
"""


#: Share of a call that its kernels take (by a profiler) below which the host, which issues them one by one, decides it.
HOST_SHARE = 0.6


def workload(b: int, heads: tuple[int, int], s: int, d: int, *, causal: bool, dtype: str, rows: int = 0) -> str:
    return (
        f"{{batch: {b}, heads: {heads[0]}, kv_heads: {heads[1]}, seq_q: {rows or s}, seq_kv: {s}, head_dim: {d}, "
        f"causal: {str(causal).lower()}, dtype: {dtype}}}"
    )


def case(r: dict) -> str:
    """Return name, schedule, tiling and workload of a row."""
    kind = r["kind"]
    if kind == "copy":
        return f"copy_{r['bytes'] >> 20}MiB, schedule: copy, workload: {{bytes: {r['bytes']}}}"
    if kind == "gemm":
        sizes = f"m: {r['m']}, n: {r['n']}, k: {r['k']}"
        return f"gemm_{r['m']}x{r['n']}x{r['k']}, schedule: gemm, workload: {{{sizes}, dtype: float16}}"
    if kind == "torch_flash":
        name = f"flash_b{r['b']}h{r['h']}s{r['s']}d{r['d']}" + ("_causal" if r["causal"] else "")
        tiling = f"{{block_q: 128, block_kv: {64 if r['d'] == 128 else 128}, warps: 4}}"
        what = workload(r["b"], (r["h"], r["h"]), r["s"], r["d"], causal=r["causal"], dtype="float16")
        return f"{name}, schedule: flash, tiling: {tiling}, workload: {what}"
    group = f"group: {r['group']}"
    if kind == "split":
        tiling = f"{{splits: {r['n']}, block_kv: {r['bn']}, stages: {r['st']}, warps: {r['nw']}}}"
        what = workload(r["b"], (r["hk"] * r["g"], r["hk"]), r["s"], r["d"], causal=False, dtype="float16", rows=1)
        name = f"{r['group']}_n{r['n']}_kv{r['bn']}_st{r['st']}_w{r['nw']}"
        return f"{name}, {group}, schedule: split_kv, tiling: {tiling}, workload: {what}"
    name = f"{r['group']}_{r['bm']}x{r['bn']}_st{r['st']}_w{r['nw']}"
    compiled = f"registers: {r['regs']}, spilled_registers: {r['spills']}"
    tiling = f"{{block_q: {r['bm']}, block_kv: {r['bn']}, stages: {r['st']}, warps: {r['nw']}, {compiled}}}"
    if kind == "fp8":
        what = workload(r["b"], (r["h"], r["h"]), r["s"], r["d"], causal=False, dtype="float8_e4m3fn")
        order = "fresh" if r["fresh"] else "chained"
        how = f'schedule: fp8_attention, precision: "accumulate={order}"'
    else:
        dtype = "float16" if kind == "pasa" or r.get("half") else "bfloat16"
        what = workload(r["b"], (r["h"], r["hk"]), r["s"], r["d"], causal=bool(r.get("causal")), dtype=dtype)
        how = f"schedule: {'pasa' if kind == 'pasa' else 'flash'}"
    return f"{name}, {group}, {how}, tiling: {tiling}, workload: {what}"


def measured(r: dict) -> str:
    first = r.get("prep_ms", r.get("split_ms"))
    return f"latency_us: {r['us']}" + (f", phase1_us: {round(first * 1e3, 3)}" if first else "")


def unfused(r: dict, time: str, *, causal: bool) -> str:
    name = f"standard_h{r['heads']}s{r['s']}d{r['d']}" + ("_causal" if causal else "")
    what = workload(1, (r["heads"],) * 2, r["s"], r["d"], causal=causal, dtype="float16")
    busy = sum(us for _, us in r["kernels_add" if causal else "kernels"])
    floor = f"host_floor_us: {round(r[time] - busy, 2)}, " if busy < HOST_SHARE * r[time] else ""
    return f"{name}, device: h200, schedule: standard, workload: {what}, {floor}measured: {{latency_us: {r[time]}}}"


def main() -> None:
    heldout, operators = (json.loads(Path(p).read_text()) for p in sys.argv[1:3])
    lines = []
    for r in heldout["rows"]:
        if "error" not in r:
            name, rest = case(r).split(",", 1)
            lines.append(f"{name}, device: h200,{rest}, measured: {{{measured(r)}}}")
    for r in operators["rows"]:
        if r["operator"] == "attention":
            lines += [unfused(r, "whole_us", causal=False), unfused(r, "whole_add_us", causal=True)]
    text = "".join(f"  - {{name: {line}}}\n" for line in lines)
    Path(sys.argv[3]).write_text(HEAD.format(**heldout["about"]) + text)


if __name__ == "__main__":
    main()
