"""Page: attention in servers: mixed lengths, pages, latents, and the choices that change bits, with their prices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import npusim
from npusim.kernels.attention.split_rules import RULES
from npusim.report.findings import VERDICTS
from npusim.run import run
from reports.parts.document import Section, gather, save_page, table
from reports.parts.kernel import declared_tiling

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write"]

DEVICES = ("ascend_910b2", "h200")
K = 1024
MODEL, LENGTHS, PAGE = "qwen2_7b", (K, 7 * K, 32 * K), 64
PAGES = (0, 128, 64, 16, 4, 1)
LATENT_LENGTHS = (512, 8 * K, 32 * K)
VARIED = ("batch", "position", "page", "chunk", "prefill", "splits", "rule", "merge", "tile", "packing", "ranks")


def write(folder: Path) -> list[Path]:
    """Write ``served.md`` and its data to ``folder``."""
    content = gather("served", (part() for part in (_invariance, _rules, _pages, _latents)))
    return save_page(folder, "served", content, {})


def _invariance() -> Section:
    rows, data, prices = [], {}, dict[str, object]()
    for hw in DEVICES:
        tiling = declared_tiling("split_kv", hw)
        found = npusim.invariant(
            "split_kv", workload=MODEL, lengths=LENGTHS, page=PAGE, hw=hw, tiling=tiling, vary=VARIED
        )
        for f in found.findings:
            first = f.first
            where = parted = ""
            if first is not None and first.difference is not None:
                where = f"{first.what}: {first.difference}".replace(" | ", " against ")
                parted = first.parted.partition(",")[0]
            cost = "" if f.cost_us is None else f"{f.cost_us:+.2f} ({f.cost_at})"
            rows.append([hw, f.aspect, VERDICTS[f.verdict][0], where, parted, f.guarantee, cost])
            if f.aspect == "batch" and f.cost_us is not None:
                prices[f"price_{hw}"] = f"{f.cost_us:.0f}"
            data[f"{hw} {f.aspect}"] = {"verdict": f.verdict, "guarantee": f.guarantee, "cost_us": f.cost_us}
    header = [
        "device",
        "vary",
        "changes bits",
        "first difference",
        "first differing operation",
        "guarantee",
        "cost, us",
    ]
    fields = {"invariance": table(header, rows), "lengths": _listed(LENGTHS), "page": PAGE, **prices}
    return fields, {"invariance": data}


def _rules() -> Section:
    rows, data = [], {}
    for rule in ("auto", *RULES, 2 * K):
        fields = {"split_keys": rule} if isinstance(rule, int) else {"splits": rule}
        tilings = [declared_tiling("split_kv", hw, **fields) for hw in DEVICES]
        calls = [
            run("split_kv", workload=MODEL, lengths=LENGTHS, page=PAGE, hw=hw, tiling=tiling, numerics=False)
            for hw, tiling in zip(DEVICES, tilings, strict=True)
        ]
        kernels = [done.cycles / float(done.device.clock_hz.value) * 1e6 for done in calls]
        parts = [_parts(done) for done in calls]
        called = f"split_keys={rule}" if isinstance(rule, int) else rule
        rows.append([called, *(x for pair in zip(parts, kernels, strict=True) for x in pair)])
        data[called] = {"parts": parts, "kernel_us": kernels}
    header = ["rule", *(x for hw in DEVICES for x in (f"parts, {hw}", f"us, {hw}"))]
    return {"rules": table(header, rows)}, {"rules": data}


def _parts(done: npusim.RunResult) -> str:
    """Return the parts of each sequence."""
    blocks = [b for b in done.program.phases[0].blocks if b.head == 0]
    return ", ".join(str(sum(b.batch == n for b in blocks)) for n in range(len(LENGTHS)))


def _pages() -> Section:
    rows, data = [], {}
    for layout in ("bnsd", "bsnd"):
        tiling = declared_tiling("split_kv", "ascend_910b2")
        calls = [
            run("split_kv", workload=MODEL, lengths=LENGTHS, page=n, layout=layout, tiling=tiling, numerics=False)
            for n in PAGES
        ]
        times = [done.latency_us for done in calls]
        rows.append([layout, *times])
        data[layout] = dict(zip(map(str, PAGES), times, strict=True))
    header = ["layout", *("no pages" if not n else f"{n} key{'s' * (n > 1)}" for n in PAGES)]
    return {"pages": table(header, rows)}, {"pages": data}


def _latents() -> Section:
    rows, data = [], {}
    for hw in ("ascend_910b2", "ascend_950", "h200"):
        call = {"lengths": LATENT_LENGTHS, "page": PAGE, "tiling": declared_tiling("split_kv", hw), "numerics": False}
        done = run("split_kv", workload="deepseek_v3", hw=hw, **call)  # type: ignore[arg-type]
        assert done.timing is not None
        elements = done.timing.link_bytes["hbm"] / 2 / sum(LATENT_LENGTHS)
        rate = done.timing.roofline.attained_flops_per_s / 1e12 if done.timing.roofline else None
        rows.append([hw, done.latency_us, elements, rate])
        data[hw] = {"latency_us": done.latency_us, "elements_a_token": elements}
    header = ["device", "us a call", "elements a token, from memory", "TFLOP/s"]
    return {"latents": table(header, rows), "latent_lengths": _listed(LATENT_LENGTHS)}, {"latents": data}


def _listed(lengths: tuple[int, ...]) -> str:
    return ",".join(f"{n // K}k" if n % K == 0 else str(n) for n in lengths)
