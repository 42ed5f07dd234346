"""Page: decoding one token at a time: numbers of splits, transferred bytes, and the price of equal bits."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from npusim.config.load import load_device, load_workload
from npusim.config.problem import Dtype, Problem
from npusim.config.tiling import build_tiling
from npusim.errors import TilingError
from npusim.library import find_schedule
from npusim.run import run
from npusim.simulation.simulate import simulate_program
from reports.parts.chart import chart
from reports.parts.document import Section, gather, number, percent, save_page, table
from reports.parts.kernel import declared_tiling

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.program.timing.timing_result import TimingResult

__all__ = ["write"]

DEVICES = ("ascend_910b2", "ascend_950", "v100")
KEYS = (4096, 8192, 16384, 32768, 131072)
#: Keys from which on a call is bound by memory.
LONG = 32768
#: Lengths whose splits are drawn.
DRAWN = (4096, 32768)
#: Query heads of each of four KV heads of 128, one query each.
GROUPS, KV_HEADS, HEAD = (1, 4, 16), 4, 128
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32)
#: Sequences that decode together, and the model whose layer they decode.
BATCHES, MODEL, CONTEXT = (1, 2, 4, 8, 16), "qwen2_7b", 32768
K = 1024


class Found(NamedTuple):
    """The splits that the rule chooses and the best tried ones, relative to the time of the compulsory bytes."""

    auto: int
    auto_ratio: float
    best: int
    best_ratio: float
    tried: dict[int, float]


def write(folder: Path) -> list[Path]:
    """Write ``decode.md``, its chart and its data to ``folder``."""
    content = gather("decode", (part() for part in (_splits, _bytes, _price, _fp8)))
    drawn = {f"{hw}, {keys // K}k": list(_best(hw, GROUPS[0], keys).tried.items()) for keys in DRAWN for hw in DEVICES}
    title = "One query a head on 4k and 32k keys: time / time of the compulsory bytes"
    picture = chart(title, "splits", "time / time of the bytes", drawn, log_x=True, log_y=True)
    return save_page(folder, "decode", content, {"decode_ratio.svg": picture})


def _decode(group: int, keys: int) -> Problem:
    return Problem(heads=KV_HEADS * group, kv_heads=KV_HEADS, seq_q=1, seq_kv=keys, head_dim=HEAD)


def _timed(hw: str, problem: Problem, **fields: Any) -> tuple[int, TimingResult]:
    """Return the chosen splits and the time; raise `TilingError` if there are fewer tiles than splits."""
    device = load_device(hw)
    schedule = find_schedule("split_kv", device.family)
    tiling = build_tiling(schedule.tiling, fields)
    _, program = schedule.fitted(problem, tiling, device, schedule.precision())
    spans = [span for cell in program.phases[0].blocks for span in cell.spans if span[0] == "split"]
    return max((at for _, at, _ in spans), default=0) + 1, simulate_program(program, device, "steady")


def _compulsory(hw: str, problem: Problem) -> tuple[int, float]:
    """Return the bytes of Q, K, V and O, and their cycles at the bandwidth that memory reaches."""
    p, device = problem, load_device(hw)
    rows = p.heads * p.seq_q + p.kv_heads * p.seq_kv
    size = 2 * p.batch * rows * (p.head_dim + p.value_head_dim)
    return size, size / float(device.link("hbm").bytes_per_s.value) * float(device.clock_hz.value)


@cache
def _best(hw: str, group: int, keys: int) -> Found:
    problem = _decode(group, keys)
    bound = _compulsory(hw, problem)[1]
    auto, found = _timed(hw, problem)
    cycles = {auto: found.cycles}
    for splits in SPLITS:
        if splits == auto:
            continue
        try:
            cycles[splits] = _timed(hw, problem, splits=splits)[1].cycles
        except TilingError:
            break
    best = min(cycles, key=lambda n: cycles[n])
    tried = {n: cycles[n] / bound for n in sorted(cycles)}
    return Found(auto, found.cycles / bound, best, cycles[best] / bound, tried)


def _splits() -> Section:
    rows, data = [], {}
    for hw in DEVICES:
        for group in GROUPS:
            found = [_best(hw, group, n) for n in KEYS]
            cells = [
                f"{f.best}: {f.best_ratio:.2f}" + (f" ({f.auto}: {f.auto_ratio:.2f})" if f.auto != f.best else "")
                for f in found
            ]
            rows.append([hw, str(group), *cells])
            data[f"{hw} {group}"] = dict(zip(map(str, KEYS), found, strict=True))
    worst = max(f.auto_ratio / f.best_ratio - 1 for of in data.values() for f in of.values())
    header = ["device", "queries a KV head", *(f"{n // K}k keys" for n in KEYS)]
    long = [found.best_ratio - 1 for of in data.values() for n, found in of.items() if int(n) >= LONG]
    fields: dict[str, object] = {
        "splits": table(header, rows),
        "worst": percent(worst),
        "within": percent(max(long), 0),
        "tried": ", ".join(map(str, SPLITS)),
    }
    return fields, {"splits": data}


def _bytes() -> Section:
    """Grouped heads: the bytes that cross L2, with a block for each head and with one for all heads of a KV head."""
    problem = load_workload("llama2_70b").problem(seq_q=1, seq_kv=8192)
    rows, data = [], {}
    for hw in DEVICES:
        compulsory, bound = _compulsory(hw, problem)
        apart, packed = (_timed(hw, problem, pack=pack)[1] for pack in ("off", "on"))
        ratios = [t.link_bytes[link] / compulsory for link in ("l2", "hbm") for t in (apart, packed)]
        times = [t.cycles / float(load_device(hw).clock_hz.value) * 1e6 for t in (apart, packed)]
        rows.append([hw, *ratios, *times, times[1] * 1e-6 * float(load_device(hw).clock_hz.value) / bound])
        data[hw] = {"ratios": ratios, "kernel_us": times}
    header = [
        "device",
        "L2, apart",
        "L2, packed",
        "HBM, apart",
        "HBM, packed",
        "us, apart",
        "us, packed",
        "packed / bound",
    ]
    return {"bytes": table(header, rows)}, {"bytes": data}


def _price() -> Section:
    """The price of bits of a sequence that do not depend on the other sequences of the batch."""
    one = load_workload(MODEL).problem(seq_q=1, seq_kv=CONTEXT)
    rows, data = [], {}
    over: list[list[float]] = []
    for hw in DEVICES:
        clock = float(load_device(hw).clock_hz.value)
        fixed = _timed(hw, one)[0]
        for batch in BATCHES:
            problem = one.model_copy(update={"batch": batch})
            auto, free = _timed(hw, problem)
            times = [free, _timed(hw, problem, splits=fixed)[1], _timed(hw, problem, splits=1)[1]]
            us = [t.cycles / clock * 1e6 for t in times]
            over.append([x / us[0] - 1 for x in us[1:]])
            prices = [percent(x, sign="+") for x in over[-1]]
            rows.append([hw, str(batch), str(auto), number(us[0], 4), f"{fixed}: {prices[0]}", prices[1]])
            data[f"{hw} {batch}"] = {"auto": auto, "fixed": fixed, "us": us}
    header = ["device", "sequences", "splits by the rule", "kernel, us", "fixed splits", "splits=1"]
    fields: dict[str, object] = {"price": table(header, rows), "model": MODEL, "context": f"{CONTEXT // K}k"}
    most = (percent(max(prices), 0) for prices in zip(*over, strict=True))
    return fields | dict(zip(("fixed_most", "one_most"), most, strict=True)), {"price": data}


#: FP16 and FP8 on the 950: schedule, inputs, changes of the device, and name on the page.
CAST = "cores.aiv.engines.VECTOR.ops.cast_float8_e4m3fn.register_cycles"
#: Cycles a register of PTO's own tile operation (the source of that key in the device file).
PTO_CAST = "12.3"
WAYS: tuple[tuple[str, Dtype, dict[str, str], str], ...] = (
    ("flash", "float16", {}, "FlashAttention, FP16"),
    ("fp8_attention", "float8_e4m3fn", {}, "FP8, cast at the vendor's rate"),
    ("fp8_attention", "float8_e4m3fn", {CAST: PTO_CAST}, "FP8, cast at the rate of PTO's tile operation"),
)


def _fp8() -> Section:
    rows, data = [], dict[str, Any]()
    for name, dtype, changes, called in WAYS:
        tiling = declared_tiling(name, "ascend_950", block_q=64, block_kv=256)
        done = run(
            name, hw="ascend_950", seq=4096, dtype=dtype, overrides=changes, tiling=tiling, heads=[0], trace_groups=()
        )
        assert done.timing is not None
        assert done.numerics is not None
        queues = [u for group in done.timing.queues for u in group]
        error = done.numerics.error.rmse
        shares = [
            percent(max(u.busy_cycles for u in queues if u.queue == unit) / done.cycles, 0)
            for unit in ("aic.CUBE", "aiv0.VECTOR")
        ]
        rows.append([called, number(done.latency_us, 4), f"{error:.2e}", *shares])
        data[called] = {"latency_us": done.latency_us, "rmse": error}
    half, own, pto = (of["latency_us"] for of in data.values())
    fields: dict[str, object] = {
        "fp8": table(["kernel", "us", "relative RMSE", "CUBE", "VECTOR"], rows),
        "fp8_gain": number(half / own),
        "fp8_gain_pto": number(half / pto),
    }
    return fields, {"fp8": data}
