"""Measures the quantities that the model of an H200 needs and no other file has, on one H200 in two minutes.

    python reports/silicon/measure_h200.py OUT_DIR [--kernels FILE] [part ...]

parts: operators (what a framework launches for unfused attention, by length of row), frames (spilled registers beside
arithmetic, by frame and shared memory), resident (FP8 and mma.sync tiles and pieces of them, so many blocks on every
multiprocessor), heldout (further shapes of the kinds given, to hold predictions against), production (cuDNN's
attention and torch's FlashAttention-2 on further shapes, for the same).

``FILE`` holds the kernels measured, as for the given measurements: ../shared/measurements/h200_kernels.py. Without it
the script omits the parts that need it, and reports this. Needs torch, triton, nvcc. Writes OUT_DIR/PART.json;
`as_cases.py` makes measurements of what is held out. Data in this folder: one H200, 2026-11-22.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pieces
import shapes
import torch
from triton.testing import do_bench

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "shared" / "measurements" / "h200_kernels.py"
LOG2_E = 1.4426950408889634
CORES = 132
#: Blocks of one head that a resident grid has: 12 x 11 blocks fill the multiprocessors once.
ACROSS, DOWN = 12, 11


def us(function: object, rep: int = 20) -> float:
    """Return the median time of a call in microseconds, L2 flushed before each."""
    return round(do_bench(function, warmup=6, rep=rep, return_mode="median") * 1e3, 3)


def load(path: Path) -> object:
    """Return the given kernels; their file's own measurements are given no time."""
    sys.argv = [str(path), "/dev/null", "0"]
    spec = importlib.util.spec_from_file_location("given_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def normal(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


# ---------------------------------------------------------------- operators of unfused attention


def operators() -> list[dict]:
    """Time what torch launches for unfused attention, each alone and all together."""
    rows: list[dict] = []
    for elements in (2**23, 2**26, 2**28):
        for cols in shapes.COLUMNS:
            x = normal(elements // cols, cols)
            rows.append(
                {
                    "operator": "softmax",
                    "dtype": "float16",
                    "rows": x.shape[0],
                    "cols": cols,
                    "us": us(lambda x=x: torch.softmax(x, -1)),
                    "wide_us": us(lambda x=x: torch.softmax(x, -1, dtype=torch.float32)),
                    "scale_us": us(lambda x=x: x * 0.125),
                }
            )
            if elements == 2**26:
                for dtype in (torch.bfloat16, torch.float32):
                    y = x.to(dtype)
                    times = {"us": us(lambda y=y: torch.softmax(y, -1)), "scale_us": us(lambda y=y: y * 0.125)}
                    what = {"operator": "softmax", "dtype": str(dtype)[6:], "rows": x.shape[0], "cols": cols}
                    rows.append(what | times)
    for heads, s, d in shapes.UNFUSED:
        q, k, v = (normal(1, heads, s, d) for _ in range(3))
        scores, above = (normal(1, heads, s, s), torch.ones(s, s, device="cuda", dtype=torch.bool).triu(1))
        added = torch.zeros(s, s, device="cuda", dtype=torch.float16).masked_fill(above, -math.inf)

        def whole(mask: torch.Tensor | None = None, q: object = q, k: object = k, v: object = v) -> torch.Tensor:
            x = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[-1]))
            return torch.softmax(x if mask is None else x + mask, -1) @ v

        def filled(mask: torch.Tensor, q: object = q, k: object = k, v: object = v) -> torch.Tensor:
            x = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[-1]))
            return torch.softmax(x.masked_fill(mask, -math.inf), -1) @ v

        rows.append(
            {
                "operator": "attention",
                "heads": heads,
                "s": s,
                "d": d,
                "scores_us": us(lambda q=q, k=k: q @ k.transpose(-1, -2)),
                "scale_us": us(lambda x=scores: x * 0.125),
                "add_us": us(lambda x=scores, m=added: x + m),
                "fill_us": us(lambda x=scores, m=above: x.masked_fill(m, -math.inf)),
                "where_us": us(lambda x=scores, m=above: torch.where(m, -math.inf, x)),
                "softmax_us": us(lambda x=scores: torch.softmax(x, -1)),
                "values_us": us(lambda p=scores, v=v: p @ v),
                "whole_us": us(whole),
                "whole_add_us": us(lambda m=added: whole(m)),
                "whole_fill_us": us(lambda m=above: filled(m)),
                "kernels": kernel_times(whole),
                "kernels_add": kernel_times(lambda m=added: whole(m)),
            }
        )
        del q, k, v, scores, above, added
        torch.cuda.empty_cache()
    return rows


def kernel_times(function: object) -> list[list]:
    """Return [name, us] of the kernels of one call, in order, one after another in a stream."""
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        function()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return [[e.name[:60], round(e.device_time, 2)] for e in seen.events() if e.device_type == cuda]


# ---------------------------------------------------------------- spilled registers


def frames(out: Path) -> list[dict]:
    """Time loops that load, use and store frames of local memory, by frame, shared memory, warps and blocks."""
    source, binary = out / "frames.cu", out / "frames"
    source.write_text(pieces.FRAMES)
    command = ["nvcc", "-w", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-o", str(binary), str(source)]
    subprocess.run(command, check=True)
    text = subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in text.splitlines()]


# ---------------------------------------------------------------- resident blocks


def residents_of(handle: object, warps: int) -> int:
    """Return how many blocks fit a multiprocessor."""
    registers = (handle.n_regs + 7) // 8 * 8 * 32 * warps
    return min(65536 // registers, 233472 // (handle.metadata.shared + 1024), 64 // warps)


def row_of(handle: object, tile: tuple[int, ...], warps: int, **more: object) -> dict:
    names = ("block_q", "block_kv", "stages", "warps")
    return dict(
        zip(names, tile, strict=True),
        registers=handle.n_regs,
        spilled=handle.n_spills,
        shared=handle.metadata.shared,
        occupancy=residents_of(handle, warps),
        **more,
    )


def resident(given: object) -> list[dict]:
    """Time r blocks on every multiprocessor over 2,048 and 4,096 keys: their difference is that of iterations."""
    found = []
    for kind, d, tile in shapes.resident_list():
        warps, heads = tile[-1], DOWN * 8

        def call(keys: int, r: int, kind: str = kind, d: int = d, tile: tuple[int, ...] = tile) -> object:
            q, kv, stages, warps = tile
            grid = (ACROSS // (2 if q > 128 else 1), DOWN * r * (2 if q > 128 else 1))
            a, b, c, o = DATA[kind, d]
            if kind.startswith("fp8"):
                return given.fp8[grid](
                    a,
                    b,
                    c,
                    o,
                    LOG2_E / math.sqrt(d),
                    256.0,
                    keys,
                    d,
                    q,
                    kv,
                    kind == "fp8_fresh",
                    stages,
                    num_warps=warps,
                )
            if kind == "fa":
                return given.fa[grid](
                    a, b, c, o, LOG2_E / math.sqrt(d), keys, 1, d, q, kv, False, stages, num_warps=warps
                )
            return pieces.part[grid](
                a, b, c, o, keys, d, q, kv, kind == "exp", kind == "reduce", stages, num_warps=warps
            )

        try:
            if (kind, d) not in DATA:
                fmt = torch.float8_e4m3fn if kind.startswith("fp8") else torch.float16
                DATA.clear()
                shape = (2 * heads * 4096 * d,)
                DATA[kind, d] = [
                    *(normal(*shape, dtype=fmt) for _ in range(3)),
                    torch.empty(shape, device="cuda", dtype=torch.float32 if kind.startswith("fp8") else fmt),
                ]
            handle = call(2048, 1)
            row = row_of(handle, tile, warps, kind=kind, head_dim=d)
            most = row["occupancy"]
            for r in sorted({1, 2, 3, 4, most}):
                if r <= min(8, most):
                    row[f"us_2048_r{r}"], row[f"us_4096_r{r}"] = (
                        us(lambda n=n, r=r: call(n, r), 10) for n in (2048, 4096)
                    )
        except Exception as error:  # noqa: BLE001 - what a tile cannot do is a result
            row = dict(
                zip(("block_q", "block_kv", "stages", "warps"), tile, strict=True),
                kind=kind,
                head_dim=d,
                error=repr(error)[:80],
            )
        found.append(row)
    return found


DATA: dict = {}


# ---------------------------------------------------------------- held out


def compile_one(job: tuple[str, str, dict]) -> str:
    """Compile one kernel into triton's cache."""
    path, kind, c = job
    given = load(Path(path))
    half, e4m3, wide = torch.float16, torch.float8_e4m3fn, torch.float32
    try:
        if kind == "fa":
            fmt = half if c.get("half") else torch.bfloat16
            given.fa.warmup(
                fmt,
                fmt,
                fmt,
                fmt,
                1.0,
                c["s"],
                c["h"] // c["hk"],
                c["d"],
                c["bm"],
                c["bn"],
                c["causal"],
                c["st"],
                num_warps=c["nw"],
                grid=(1,),
            )
        elif kind == "fp8":
            given.fp8.warmup(
                e4m3,
                e4m3,
                e4m3,
                wide,
                1.0,
                256.0,
                c["s"],
                c["d"],
                c["bm"],
                c["bn"],
                c["fresh"],
                c["st"],
                num_warps=c["nw"],
                grid=(1,),
            )
        elif kind == "pasa":
            given.pasa.warmup(
                half, half, half, half, c["s"], 1, 1.0, c["d"], c["bm"], c["bn"], c["st"], num_warps=c["nw"], grid=(1,)
            )
        elif kind == "part":
            flags = c["kind"] == "exp", c["kind"] == "reduce"
            pieces.part.warmup(
                half, half, half, half, 2048, c["d"], c["bm"], c["bn"], *flags, c["st"], num_warps=c["nw"], grid=(1,)
            )
    except Exception as error:  # noqa: BLE001 - measured again, and said, where it is used
        return repr(error)[:80]
    return ""


def heldout(given: object) -> list[dict]:
    found = [library(kind, c) for kind, c in shapes.library_cases()]
    for kind, c in shapes.cases():
        arguments = {n: v for n, v in c.items() if n != "group"}
        try:
            row = getattr(given, f"run_{kind}")(**arguments)
            row = {("us" if n == "ms" else n): round(v * 1e3, 3) if n == "ms" else v for n, v in row.items()}
        except Exception as error:  # noqa: BLE001 - a tile that does not fit is a result
            row = {"error": repr(error)[:80]}
        found.append({"kind": kind, **c, **row})
        torch.cuda.empty_cache()
    return found


def library(kind: str, c: dict) -> dict:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if kind == "copy":
        x = torch.empty(c["bytes"], device="cuda", dtype=torch.uint8)
        y = torch.empty_like(x)
        return {"kind": kind, **c, "us": us(lambda: y.copy_(x))}
    if kind == "gemm":
        a, b = normal(c["m"], c["k"]), normal(c["k"], c["n"])
        return {"kind": kind, **c, "us": us(lambda: a @ b)}
    q, k, v = (normal(c["b"], c["h"], c["s"], c["d"]) for _ in range(3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        run = torch.nn.functional.scaled_dot_product_attention
        return {"kind": kind, **c, "us": us(lambda: run(q, k, v, is_causal=c["causal"]))}


def production() -> list[dict]:
    """Time attention as frameworks call it: cuDNN's kernel, and FlashAttention-2 where blocks are few or rows one."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
    found = []
    for c in shapes.production_cases():
        dtype = getattr(torch, c["dtype"])
        q = normal(c["b"], c["h"], c["rows"], c["d"], dtype=dtype)
        k, v = (normal(c["b"], c["hk"], c["s"], c["d"], dtype=dtype) for _ in range(2))
        with sdpa_kernel(backends[c["kernel"]]):
            run = torch.nn.functional.scaled_dot_product_attention
            options = {"is_causal": c["causal"], "enable_gqa": c["h"] != c["hk"]}
            try:
                found.append({"kind": "production", **c, "us": us(lambda: run(q, k, v, **options))})  # noqa: B023
            except RuntimeError as error:  # a shape that the kernel does not take
                found.append({"kind": "production", **c, "error": repr(error)[:80]})
        torch.cuda.empty_cache()
    return found


# ---------------------------------------------------------------- all of it


def compiled_ahead(path: Path, parts: list[str]) -> None:
    """Compile all kernels on all processors: one after another would be most of the time."""
    jobs = [(str(path), kind, c) for kind, c in shapes.cases() if kind != "split"] if "heldout" in parts else []
    if "resident" in parts:
        for kind, d, t in shapes.resident_list():
            c = {"kind": kind, "d": d, **shapes.tile(t), "s": 2048, "fresh": kind == "fp8_fresh"}
            jobs.append((str(path), "fp8" if kind.startswith("fp8") else "part", c))
    jobs = list(
        {json.dumps([j[0], j[1], {n: v for n, v in j[2].items() if n not in ("group", "b")}]): j for j in jobs}.values()
    )
    with ProcessPoolExecutor(16, mp_context=multiprocessing.get_context("spawn")) as pool:
        said = [text for text in pool.map(compile_one, jobs) if text]
    print(len(jobs), "kernels compiled,", len(said), "refused", set(said), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="*", default=["operators", "frames", "resident", "heldout"])
    parser.add_argument("--kernels", type=Path, default=KERNELS)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    begun, parts = time.time(), list(chosen.parts)
    if not chosen.kernels.exists() and {"resident", "heldout"} & set(parts):
        print(f"{chosen.kernels} is missing: resident and heldout are left out", flush=True)
        parts = [p for p in parts if p not in ("resident", "heldout")]
    given = None
    if {"resident", "heldout"} & set(parts):
        given = load(chosen.kernels)
        compiled_ahead(chosen.kernels, parts)
        print("compiled", round(time.time() - begun), "s", flush=True)
    run = {
        "operators": operators,
        "frames": lambda: frames(chosen.out),
        "resident": lambda: resident(given),
        "heldout": lambda: heldout(given),
        "production": production,
    }
    for part in parts:
        rows = run[part]()
        device, driver = torch.cuda.get_device_name(), torch.version.cuda
        text = ",\n".join(json.dumps(r) for r in rows)
        head = json.dumps(
            {"device": device, "cuda": driver, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        )
        (chosen.out / f"{part}.json").write_text(f'{{"about": {head}, "rows": [\n{text}\n]}}\n')
        print(part, len(rows), "rows after", round(time.time() - begun), "s", flush=True)


if __name__ == "__main__":
    main()
