"""Page: the Ascend 950: FlashAttention Lite's versions step by step, and FP8 against FP16."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npusim.config.cases import load_measurements
from npusim.config.problem import Problem
from npusim.program.timing.timing_result import TimingResult
from npusim.run import run
from reports.parts.document import Section, gather, percent, save_page, table

if TYPE_CHECKING:
    from npusim.run import RunResult

__all__ = ["write"]

HW = "ascend_950"
MEASURED = Path(__file__).with_name("measured.yaml")
CANN = Path(__file__).with_name("measured_cann.yaml")
BOARDS = {"ascend_950": "32 cores", "ascend_950_28": "28 cores"}
#: From version to version one thing after the other; those between were never measured.
STEPS: dict[str, dict[str, object]] = {
    "v1": {"order": "serial", "slots": 1, "route": "gm", "vector": "stages", "chains": 1, "depth": 1},
    "P on the chip": {"route": "chip"},
    "v3: groups of two tiles": {"order": "groups", "depth": 2},
    "v5: two slots of L0": {"slots": 2},
    "v8 unfused: rolling, four tiles ahead": {"order": "rolling", "depth": 4},
    "four accumulators": {"chains": 4},
    "v8: softmax and cast in one function": {"vector": "fused"},
}
TILE: dict[str, object] = {"block_q": 128, "block_kv": 128, "vector_rows": 64, "deal": "round_robin"}
#: Cycles of a cast to FP8 a register: the vendor's table, and PTO's own instruction.
CASTS = {"32 elements a cycle (the vendor's table)": 2.0, "12.3 cycles a register (PTO's TCVT)": 12.3}
CAST = "cores.aiv.engines.VECTOR.ops.cast_float8_e4m3fn.register_cycles"
SHAPE: dict[str, Any] = {"batch": 1, "heads": 32, "seq_q": 8192, "head_dim": 128}


def write(folder: Path) -> list[Path]:
    """Write ``ascend_950.md`` and its data to ``folder``."""
    return save_page(folder, "ascend_950", gather("ascend_950", (part() for part in (_ladder, _cann, _eight))), {})


def _busy(done: RunResult) -> dict[str, float]:
    """Return the share of the cores' time that each pipe of the last core group is busy."""
    assert done.timing is not None
    uses = [u for group in done.timing.queues for u in group]
    last = max(u.group for u in uses)
    return {u.queue: u.busy_cycles / done.cycles for u in uses if u.group == last and not u.queue.startswith("aiv1")}


def _limit(done: RunResult) -> str:
    pipe, share = max(_busy(done).items(), key=lambda item: item[1])
    return f"{pipe} {percent(share, 0)}"


def _ladder() -> Section:
    cases = load_measurements(MEASURED).cases
    measured = {
        c.name.removeprefix("falite_").replace("_", " "): c.measured.latency_us.low / 1e3
        for c in cases
        if c.measured.latency_us
    }
    workload = Problem(heads=1, seq_q=131072, head_dim=128, dtype="bfloat16")
    fields, rows, data = dict(TILE), [], dict[str, Any]()
    for name, changed in STEPS.items():
        fields |= changed
        more = {"pipeline": "block"} if fields["order"] == "rolling" else {}
        done = run("flash", hw=HW, problem=workload, tiling={**fields, **more}, numerics=False, trace_groups=())
        version = name.partition(":")[0]
        data[name] = {
            "ms": done.cycles / 1.65e6,
            "measured_ms": measured.get(version),
            "cycles_a_tile": done.cycles / 32 / 1024,
            "limit": _limit(done),
        }
    before: dict[str, float | None] = {"ms": None}
    for name, of in data.items():
        known = of["measured_ms"]
        off = "" if known is None else percent(of["ms"] / known - 1, sign="+")
        gain = "" if before["ms"] is None else f"{before['ms'] / of['ms']:.2f}"
        shown = "" if known is None else f"{known:.2f}"
        rows.append([name, f"{of['ms']:.2f}", shown, off, gain, f"{of['cycles_a_tile']:,.0f}", of["limit"]])
        before = of
    known = [of for of in data.values() if of["measured_ms"]]
    ratios = [(a["ms"] / b["ms"]) / (a["measured_ms"] / b["measured_ms"]) - 1 for a, b in pairwise(known)]
    header = ["step", "predicted ms", "measured ms", "off", "times faster", "cycles a tile", "busiest pipe"]
    worst = max(ratios, key=abs)
    return {"ladder": table(header, rows), "ratio": percent(worst, sign="+")}, {"ladder": data}


#: Calls longer than this, in microseconds, decide the layout of rows.
LONG_US = 30


def _cann() -> Section:
    """CANN's prefill on either board, rows transposed or not."""
    rows, data = [], dict[str, Any]()
    listed = {
        (latency.low, c.name): Problem(**c.workload.model_dump(exclude_unset=True))
        for c in load_measurements(CANN).cases
        if c.schedule == "flash" and (latency := c.measured.latency_us)
    }
    for (measured, name), problem in sorted(listed.items(), reverse=True):
        errors = []
        for board in BOARDS:  # with CANN's own tile, not one chosen for the call
            for layout in ("dn", "nd"):
                tiling = {"kernel": "cann", "layout": layout}
                done = run("flash", hw=board, problem=problem, tiling=tiling, numerics=False, trace_groups=())
                assert isinstance(done.timing, TimingResult)
                errors.append(done.timing.times_s["kernel"] * 1e6 / measured - 1)
        shape = f"{problem.batch} x {problem.heads}/{problem.kv_heads} x {problem.seq_q} x {problem.seq_kv}"
        mask = "causal" if problem.causal else ""
        rows.append([shape, str(problem.head_dim), mask, f"{measured:.1f}", *(percent(e, sign="+") for e in errors)])
        data[name] = dict(zip([f"{b} {y}" for b in BOARDS for y in ("dn", "nd")], errors, strict=True))
    header = ["batch x heads/KV heads x queries x keys", "D", "", "measured us"]
    # The calls that decide, and the others, each with the layout that npusim chooses: row by row with a mask.
    long = [(p, data[n]) for (us, n), p in listed.items() if us > LONG_US]
    causal, full = (next(of for p, of in long if p.causal is mask) for mask in (True, False))
    apart = [(1 + causal[key]) / (1 + full[key]) - 1 for key in full if key.endswith("dn")]
    short = [
        abs(of * us)
        for (us, n), p in listed.items()
        if us <= LONG_US
        for key, of in data[n].items()
        if key.endswith("nd" if p.causal else "dn")
    ]
    fields = {"long_us": LONG_US, "above": percent(max(apart), 0), "short_off": f"{max(short):.0f}"}
    return {**fields, "cann": table([*header, *(f"{b}, {y}" for b in BOARDS.values() for y in ("dn", "nd"))], rows)}, {
        "cann": data
    }


def _eight() -> Section:
    rows, data = [], dict[str, Any]()
    half = run("flash", hw=HW, problem=Problem(**SHAPE), tiling={"kernel": "cann"}, numerics=False, trace_groups=())
    calls = {"FP16": half}
    for name, cycles in CASTS.items():
        problem = Problem(**SHAPE, dtype="float8_e4m3fn")
        calls[f"FP8, P cast at {name}"] = run(
            "fp8_attention",
            hw=HW,
            problem=problem,
            tiling={"block_kv": 128, "depth": 4},
            numerics=False,
            trace_groups=(),
            overrides={CAST: cycles},
        )
    for name, done in calls.items():
        busy = _busy(done)
        shares = [percent(busy[q], 0) for q in ("aic.CUBE", "aiv0.VECTOR", "aic.MTE2", "aic.FIXP")]
        ratio = half.cycles / done.cycles
        rows.append([name, f"{done.cycles / 1.65e6:.3f}", f"{ratio:.2f}", *shares])
        data[name] = {"ms": done.cycles / 1.65e6, "times_faster": ratio, "busy": busy}
    header = ["", "ms on the cores", "times faster", "CUBE", "VECTOR", "MTE2", "FIXP"]
    shape = "{heads} heads of {head_dim}, {seq_q} queries and keys".format(**SHAPE)
    return {"eight": table(header, rows), "shape": shape}, {"eight": data}
