"""Page: the kernels in paper form, as npusim runs them, with their bits, cycles and pictures on four devices."""

from __future__ import annotations

import hashlib
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import npusim
from npusim.config.problem import GemmProblem, Problem
from npusim.errors import NpusimError
from npusim.kernels.attention.online_softmax import attend, flash
from npusim.kernels.attention.preparation import scaled
from npusim.kernels.attention.products import product_by_tiles
from npusim.kernels.attention.split import merge_last, split
from npusim.kernels.form.lowering import Kernel
from npusim.library.fp8_attention import fp8
from npusim.library.pasa import pasa
from npusim.library.standard import masked, softmax_whole
from npusim.report.charts import tracks
from npusim.report.page_figures import figures_document
from npusim.report.timeline import timeline_of
from reports.parts.chart import svg
from reports.parts.document import Section, gather, number, save_page, table
from reports.parts.kernel import declared_tiling

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


__all__ = ["ENTRIES", "write"]

DEVICES = ("ascend_910b2", "ascend_950", "h200", "v100")
HEADS, TOKENS, HEAD = 4, 1024, 128
#: Operations that a picture shows, from the middle of a run.
SHOWN = 48
WIDTH = 720


class Entry(NamedTuple):
    """One kernel: its schedule, its functions in `npusim.library`, and the call that the page computes."""

    schedule: str
    title: str
    functions: tuple[Kernel | Callable[..., Any], ...]
    problem: Problem | GemmProblem


PREFILL = Problem(heads=HEADS, seq_q=TOKENS, seq_kv=TOKENS, head_dim=HEAD, causal=True)
ENTRIES = (
    Entry("flash", "FlashAttention-2", (flash, attend), PREFILL),
    Entry("pasa", "PASA, Algorithm 1", (pasa,), PREFILL),
    Entry(
        "fp8_attention", "FP8 attention: P cast to E4M3", (fp8,), PREFILL.model_copy(update={"dtype": "float8_e4m3fn"})
    ),
    Entry(
        "split_kv",
        "Split keys (flash-decoding), and the merge",
        (split, merge_last),
        PREFILL.model_copy(update={"seq_q": 1, "seq_kv": 8 * TOKENS, "causal": False}),
    ),
    Entry("standard", "Unfused attention: one kernel an operator", (scaled, masked, softmax_whole), PREFILL),
    Entry("gemm", "Matrix product", (product_by_tiles,), GemmProblem(m=TOKENS, n=TOKENS, k=TOKENS)),
)


def write(folder: Path) -> list[Path]:
    """Write ``gallery.md``, its figures and a picture for each kernel and device to ``folder``."""
    charts: dict[str, str] = {}
    entries = [_entry(entry, charts) for entry in ENTRIES]
    ran = sum(len(found) for _, figures in entries for found in figures.values() if isinstance(found, dict))
    counts = {"ran": ran, "pairs": len(ENTRIES) * len(DEVICES)}
    content = gather("gallery", entries, devices=", ".join(f"`{d}`" for d in DEVICES), **counts)
    return save_page(folder, "gallery", content, charts)


def _entry(entry: Entry, charts: dict[str, str]) -> Section:
    rows, pictures, data = [], list[str](), dict[str, Any]()
    computed: Any = {"rows": "all"} if isinstance(entry.problem, Problem) else {}
    for hw in DEVICES:
        try:
            result = npusim.run(
                entry.schedule,
                hw=hw,
                problem=entry.problem,
                tiling=declared_tiling(entry.schedule, hw),
                trace_groups="last",
                **computed,
            )
        except NpusimError as error:
            rows.append([f"`{hw}`", "", "", "", "", str(error).partition(";")[0].partition("\n")[0]])
            continue
        name = f"gallery_{entry.schedule}_{hw}.svg"
        charts[name] = _picture(entry, hw, result)
        pictures.append(f"![{entry.title} on {hw}]({name})")
        rmse = None if result.numerics is None else result.numerics.error.rmse
        bits = "" if result.output is None else hashlib.sha256(result.output.tobytes()).hexdigest()[:12]
        limit = max(result.timing.bound_cycles.items(), key=lambda item: item[1])[0] if result.timing else ""
        rows.append(
            [
                f"`{hw}`",
                f"{result.cycles:,}",
                number(result.latency_us),
                number(rmse) if bits else "",
                f"`{bits}`" if bits else "",
                limit,
            ]
        )
        data[hw] = {"cycles": result.cycles, "us": result.latency_us, "rmse": rmse, "sha256": bits}
    header = [
        "device",
        "cycles",
        "us a call",
        "relative RMSE",
        "SHA-256 of the output",
        "unit with most work, or reason",
    ]
    sources = "\n\n\n".join(
        inspect.getsource(f.function if isinstance(f, Kernel) else f).rstrip() for f in entry.functions
    )
    fields: dict[str, object] = {
        f"{entry.schedule}_title": entry.title,
        f"{entry.schedule}_source": f"```python\n{sources}\n```",
        f"{entry.schedule}_runs": table(header, rows),
        f"{entry.schedule}_pictures": "\n\n".join(pictures),
    }
    return fields, {entry.schedule: data}


def _picture(entry: Entry, hw: str, result: Any) -> str:
    """Return operations from the middle of the last core group's run, each pipe a row."""
    drawn: Any = figures_document(result, timeline_of(result))
    windows = {w["name"]: w for w in drawn["windows"]}
    window = windows.get("Steady state") or next(iter(windows.values()))
    slices = sorted((s for s in window["slices"] if s["kind"] == "operation"), key=lambda s: s["start_us"])
    middle = slices[max(0, (len(slices) - SHOWN) // 2) :][:SHOWN]
    start, end = middle[0]["start_us"], max(s["end_us"] for s in middle)
    shown = [
        {**s, "start_us": max(s["start_us"], start), "end_us": min(s["end_us"], end)}
        for s in window["slices"]
        if s["start_us"] < end and s["end_us"] > start
    ]
    spec = tracks(shown, start, end, str(WIDTH))
    return svg({**spec, "title": f"{entry.title} on {hw}: operations of each pipe, coloured by tile"}, WIDTH)
