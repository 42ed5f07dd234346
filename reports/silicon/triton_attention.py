"""Predict the times of `h200_triton_attention.csv`, and write the errors by class.

    python reports/silicon/triton_attention.py [--public FILE] [--half given|kept] [--jobs N] [--out OUT.csv]

``FILE`` holds the public kernel ``_fwd_kernel``, which stays where it is published (`reports/tune/record.py`): without
it, its rows are left out.  The halves are by tile, stages and warps: what is fitted on the given one is checked on the
other.  A row of one loop counts as the difference of 4,096 and 2,048 keys, and is left out where the compiler gave the
kernel here, whose grid has another form, another number of resident blocks.  Needs triton, but no GPU.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

from npusim.config.problem import KernelProblem
from npusim.simulation.request import Request
from npusim.studies.tune.prediction import Configuration, predict_all

HERE = Path(__file__).resolve().parent
FILE, KERNELS = "h200_triton_attention.csv", HERE / "triton_attention_kernels.py"
#: Between launches of a graph, as reports/tune/record.py has it.
GAP_US = 1.3
#: Scaled Q in registers, V loaded first, masks (1 after the product, 2 before it), sums after the last product.
FORMS = {
    "plain": (0, 0, 0, 0),
    "q_registers": (1, 0, 0, 0),
    "v_first": (0, 1, 0, 0),
    "mask_behind": (0, 0, 1, 0),
    "mask_before": (0, 0, 2, 0),
    "sum_last": (0, 0, 0, 1),
    "all": (1, 1, 2, 1),
}
GROUPS, KEYS = 132, (2048, 4096)


def rows() -> list[dict]:
    """Return the measured rows, numbers as numbers."""
    lines = (HERE / FILE).read_text("utf-8").splitlines()
    found = csv.DictReader(line for line in lines if not line.startswith("#"))
    return [{k: v if k in ("set", "form") else float(v) if k == "us" else int(v) for k, v in r.items()} for r in found]


def half(r: dict) -> str:
    """Return which half a row's tile belongs to."""
    tile = "-".join(str(r[k]) for k in ("head_dim", "block_q", "block_kv", "warps", "stages"))
    return ("given", "kept")[hashlib.sha256(tile.encode()).digest()[0] % 2]


def request(r: dict, public: Path | None) -> Request | None:
    """Return the run of a row."""
    d, rows, cols, keys, heads = (r[k] for k in ("head_dim", "block_q", "block_kv", "keys", "heads"))
    sizes = f"D={d}, BM={rows}, BN={cols}"
    if r["set"] == "public":
        t, s = f"tensor({heads}, {keys}, {d})", f"{heads * keys * d}, {keys * d}, {d}, 1"
        text = (
            f"{public}::_fwd_kernel[{keys // rows}, {heads}]({t}, {t}, {t}, 0.125, tensor({heads}, {keys})"
            f".to('float32'), {t}, {s}, {s}, {s}, {s}, 1, {heads}, {keys}, {heads * keys}, BLOCK_M={rows}, "
            f"BLOCK_DMODEL={d}, BLOCK_N={cols}, IS_CAUSAL=True)"
        )
        if public is None:
            return None
    elif r["set"] == "gqa":
        q, k = (f"tensor({n}, {keys}, {d}).to('bfloat16')" for n in (heads, heads // 7))
        last = f"{sizes}, SPLIT={int(r['form'] == 'last')}, ST={r['stages']}"
        text = f"{KERNELS}::gqa[{keys // rows}, {heads}]({q}, {k}, {k}, {q}, 0.12, {keys}, 7, {last})"
    else:
        each = r["blocks"] // GROUPS
        q, k = f"tensor({33 * each}, {4 * rows}, {d})", f"tensor(3, 4096, {d})"
        names = zip(("QREG", "VFIRST", "MASK", "SUMLAST"), FORMS[r["form"]], strict=True)
        last = f"{sizes}, ST={r['stages']}, " + ", ".join(f"{n}={v}" for n, v in names)
        text = f"{KERNELS}::place[4, {33 * each}]({q}, {k}, {k}, {q}, 0.12, {keys}, 65536, {11 * each}, {last})"
    tiling = {"warps": r["warps"], "stages": r["stages"]}
    return Request(text, hw="h200", tiling=tiling, problem=KernelProblem.of({}), l2="repeated")


def compared(measured: list[dict], public: Path | None, jobs: int) -> list[dict]:
    """Return rows with the time measured and predicted, in microseconds: of one loop those of the longer over both."""
    requests = [(r, q) for r in measured if (q := request(r, public)) is not None]
    made = predict_all([Configuration({}, q) for _, q in requests], jobs)
    found, loops = [], defaultdict(dict)
    for (r, _), p in zip(requests, made, strict=True):
        if p.us is None:
            print("refused:", r, p.reason)
        elif r["set"] in ("public", "gqa"):
            found.append({**r, "measured": r["us"], "predicted": p.us + GAP_US})
        elif p.warps == r["warps"] * (r["blocks"] // GROUPS):
            same = tuple(v for k, v in r.items() if k not in ("keys", "us"))
            loops[same][r["keys"]] = (r, p.us)
    for both in loops.values():
        if all(n in both for n in KEYS):
            (_, short), (r, long) = (both[n] for n in KEYS)
            found.append({**r, "measured": r["us"] - both[KEYS[0]][0]["us"], "predicted": long - short})
    return found


def classes(r: dict) -> list[str]:
    """Return the classes that a row counts for."""
    stages = f"{r['stages']} stages" if r["stages"] > 1 else "1 stage"
    spilled = ["spilled"] if r["spilled"] > 16 else []
    masked = ["masked"] if r["set"] in ("public", "gqa") or r["form"] in ("mask_behind", "mask_before", "all") else []
    causal = ["causal, masks in all tiles" if r["form"] == "all" else "causal, masks in the last tiles"]
    return ["all", r["set"], stages, f"{r['set']}, {stages}", *masked, *spilled, *(causal if r["set"] == "gqa" else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--public", type=Path)
    parser.add_argument("--half", choices=("given", "kept"), action="append")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    found = compared([r for r in rows() if half(r) in (chosen.half or ("given", "kept"))], chosen.public, chosen.jobs)
    if chosen.out:
        with chosen.out.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)
    for which in chosen.half or ("given", "kept"):
        errors, shapes = defaultdict(list), defaultdict(list)
        for r in found:
            if half(r) == which:
                for name in classes(r):
                    errors[name].append(100 * (r["predicted"] / r["measured"] - 1))
                if r["set"] in ("public", "gqa"):
                    shapes[r["set"], r["head_dim"], r["keys"], r["heads"]].append(r)
        print(f"{which}: class, cases, median, nine in ten, worst, mean of the error in %")
        for name, of in sorted(errors.items()):
            a = sorted(map(abs, of))
            figures = " ".join(f"{x:6.1f}" for x in (median(a), a[int(0.9 * (len(a) - 1))], a[-1]))
            print(f"  {name:34} {len(a):4} {figures} {mean(of):+6.1f}")
        for shape, of in shapes.items():
            best, first = min(r["measured"] for r in of), min(of, key=lambda r: r["predicted"])
            print(f"  regret of {shape}: {100 * (first['measured'] / best - 1):.1f} %")


if __name__ == "__main__":
    main()
