"""Page: Volta's m8n8k4, accumulators compared: lanes, banks, cycles, occupancy, and bits."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import npusim
from npusim.config.cases import load_measurements
from npusim.config.load import load_device
from npusim.config.problem import Problem, UniformData
from reports.parts.chart import chart
from reports.parts.document import Section, gather, number, percent, save_page, table
from reports.parts.kernel import declared_tiling
from reports.volta.study import MEMORIES, Kernel, bank_cycles, chains, instruction_times, kernel, numerics, shape

__all__ = ["write"]


FP16, FP32 = "acc_fp16", "acc_fp32"
#: Presets and changes, with their names on the page (Q K, then P V).
PRECISIONS = {
    FP16: "FP16, FP16",
    f"{FP32},acc_qk=float16": "FP16, FP32",
    f"{FP16},acc_qk=float32": "FP32, FP16",
    FP32: "FP32, FP32",
}.items()
#: FastAttention figure 8, no mask: tokens -> speed-up over xformers; 5.2.3: causal, at most.
FIGURE_8 = {2048: 1.03, 4096: 1.06, 8192: 1.12, 16384: 1.17}.items()
CAUSAL_MOST = 1.43
CAUSAL = (2048, 8192)
#: Largest error with which a figure counts as met.
ALLOWED = 0.1
#: Published times of xformers' kernel.
XFORMERS = Path(__file__).resolve().parents[1] / "validation" / "measured_xformers.yaml"
#: The shape at which layouts are compared, and the rows of the default's blocks.
TOKENS, ROWS = 4096, 128


def write(folder: Path) -> list[Path]:
    """Write ``volta.md``, its charts and its data to ``folder``."""
    parts = (_layouts, _banks, _accumulators, _fields, _figure_8)
    accuracy, picture = _accuracy()
    content = gather("volta", (*(part() for part in parts), accuracy))
    return save_page(folder, "volta", content, {"volta_rmse.svg": picture})


@cache
def run(problem: Problem, precision: str, **tiling: object) -> Kernel:
    """Return the prediction of fields that fit."""
    found = kernel(problem, precision, tiling)
    assert isinstance(found, Kernel), found
    return found


def _layouts() -> Section:
    """Lanes of P, and the instruction's own times."""
    rows = chains()
    header = ["accumulator", "quad pairs", "P in the right lane", "SHFL", "selects", "permutes", "for a tile of"]
    shown = [
        [r.accumulator, r.arrangement, r.share, r.shuffles, r.selects, r.permutes, f"{r.tile[0]} x {r.tile[1]}"]
        for r in rows
    ]
    times = instruction_times()
    head = ["accumulator", "SASS steps", "wmma 16x16x16 alone", "each m8n8k4 more, dependent", "among many"]
    keys = ("steps", "wmma_alone", "dependent", "among_many")
    times_shown = table(head, [[fmt, *(str(of[k]) for k in keys)] for fmt, of in times.items()])
    device = load_device("v100")
    peak = 2 * device.group_count.value * float(device.clock_hz.value) * _macs(times["float32"]["among_many"]) / 1e12
    fields: dict[str, object] = {"chains": table(header, shown), "instructions": times_shown, "peak": f"{peak:.1f}"}
    data = {"chains": [r._asdict() for r in rows], "instructions": times, "peak_tflops": peak}
    return fields, data


def _macs(cycles: int) -> float:
    """Return multiply-adds a cycle of a multiprocessor: 4 quad pairs of 8x8x4 on each of 4 sub-cores."""
    return 4 * (8 * 8 * 4) * 4 / cycles  # as the docstring says


def _banks() -> Section:
    rows = bank_cycles()
    shown = table(["access", *MEMORIES], [[name, *map(str, found)] for name, found in rows])
    return {"banks": shown}, {"wavefronts": {n: dict(zip(MEMORIES, f, strict=True)) for n, f in rows}}


def _row(found: Kernel) -> list[object]:
    of = found.shares
    return [
        f"{found.ms:.2f}",
        f"{found.tflops:.0f}",
        str(found.blocks),
        str(found.registers),
        *(percent(of[pipe], 0) for pipe in ("TENSOR", "LSU", "FMA", "MUFU")),
    ]


KERNEL_HEADER = ("ms", "TFLOP/s", "resident blocks", "registers", "TENSOR", "LSU", "FMA", "MUFU")


def _accumulators() -> Section:
    """The four choices of accumulators, at one shape."""
    problem = shape(TOKENS)
    found = {name: run(problem, precision) for precision, name in PRECISIONS}
    shown = [[name, *_row(k), number(k.shuffles), number(k.casts)] for name, k in found.items()]
    header = ["accumulators of Q K, P V", *KERNEL_HEADER, "shuffles", "cast cycles"]
    equal = {p: run(problem, p, residents=2).ms for p in (FP16, FP32)}
    ratio = found["FP32, FP32"].ms / found["FP16, FP16"].ms
    fields: dict[str, object] = {
        "accumulators": table(header, shown),
        "tokens": TOKENS,
        "tflops": f"{found['FP16, FP16'].tflops:.0f}",
        "gain": f"{ratio:.2f}",
        "gain_equal": f"{equal[FP32] / equal[FP16]:.2f}",
        "blocks16": found["FP16, FP16"].blocks,
        "blocks32": found["FP32, FP32"].blocks,
    }
    data = {
        name: {"ms": k.ms, "cycles": k.cycles, "resident_blocks": k.blocks, "thread_registers": k.registers}
        | {"pipe_shares": k.shares, "shuffles": k.shuffles, "cast_cycles": k.casts}
        for name, k in found.items()
    }
    return fields, {"accumulators": data, "equal_occupancy_ms": equal}


#: Fields other than the defaults, and the effect that each shows.
CHOICES: tuple[tuple[str, dict[str, object]], ...] = (
    ("default: 4x1, padded by 8, LDS.128", {}),
    ("plain rows", {"smem": "plain"}),
    ("swizzled rows", {"smem": "swizzled"}),
    ("padded by 4, LDS.64", {"padding": 4, "access_bytes": 8}),
    ("quad pairs 2x2", {"arrangement": "2x2"}),
    ("quad pairs 2x2, 64 queries a block", {"arrangement": "2x2", "block_q": 64}),
    ("quad pairs 1x4, 32 queries a block", {"arrangement": "1x4", "block_q": 32}),
    ("keys 32 at a time", {"block_kv": 32}),
    ("Q in shared memory", {"q": "shared"}),
    ("padded by 4, LDS.128", {"padding": 4}),
    ("exchange not allowed", {"exchange": "none"}),
    ("keys 128 at a time", {"block_kv": 128}),
)


def _fields() -> Section:
    """Layout fields for both accumulators; a field that does not fit has its reason."""
    problem, rows, data = shape(TOKENS), [], {}
    faults: dict[str, list[str]] = {}
    best: dict[str, tuple[float, str]] = {}
    for name, fields in CHOICES:
        cells: list[object] = [name]
        for precision in (FP16, FP32):
            found = kernel(problem, precision, fields) if fields else run(problem, precision)
            if isinstance(found, str):
                cells += ["refused", "-"]
                faults.setdefault(f"{name}: {found.partition('; ')[0]}", []).append(precision)
            else:
                cells += [f"{found.ms:.2f}", percent(found.shares["LSU"], 0)]
                data[f"{name}, {precision}"] = {"ms": found.ms, "lsu": found.shares["LSU"]}
                best[precision] = min(best.get(precision, (found.ms, name)), (found.ms, name))
        rows.append(cells)
    header = ["fields", "FP16, ms", "LSU", "FP32, ms", "LSU"]
    said = [f"* {' and '.join(who)}, {fault}" for fault, who in faults.items()]
    (half, half_name), (single, single_name) = (best[p] for p in (FP16, FP32))
    shown: dict[str, object] = {
        "fields": table(header, rows),
        "faults": "\n".join(said),
        "best16": half_name.partition(":")[0],
        "best32": single_name.partition(":")[0],
        "best16_ms": f"{half:.2f}",
        "best32_ms": f"{single:.2f}",
        "best_ratio": f"{single / half:.2f}",
    }
    return shown, {"fields": data, "best_ratio": single / half}


def _figure_8() -> Section:
    """Speed-up of FP16 over FP32 accumulators, and the paper's speed-up over xformers."""
    rows, data = [], {}
    for tokens, paper in FIGURE_8:
        half, single, equal = _three(tokens, causal=False)
        ratio = single.ms / half.ms
        gains = (ratio, single.ms / equal.ms)
        rows.append(_compared(f"{tokens}", half, single, gains, f"{paper:.2f}", ratio / paper - 1))
        data[f"{tokens}"] = {"fp16_ms": half.ms, "fp32_ms": single.ms, "ratio": ratio, "paper": paper}
    for tokens in CAUSAL:
        half, single, equal = _three(tokens, causal=True)
        ratio = single.ms / half.ms
        gains = (ratio, single.ms / equal.ms)
        most = f"at most {CAUSAL_MOST}"
        rows.append(_compared(f"{tokens}, causal", half, single, gains, most, None))
        data[f"{tokens} causal"] = {"fp16_ms": half.ms, "fp32_ms": single.ms, "ratio": ratio}
    header = ["tokens", "FP16, ms", "FP32, ms", "FP32 / FP16", "at 2 blocks each", "paper", "difference"]
    errors = [abs(ratio / paper - 1) for (_, paper), ratio in zip(FIGURE_8, _ratios(data), strict=True)]
    ratios, (baseline, published) = _ratios(data), _baseline()
    fields: dict[str, object] = {
        "figure_8": table(header, rows),
        "inside": sum(e <= ALLOWED for e in errors),
        "of": len(errors),
        "allowed": f"{100 * ALLOWED:.0f}",
        "ratio_first": f"{ratios[0]:.2f}",
        "ratio_last": f"{ratios[-1]:.2f}",
        **baseline,
    }
    implied, found = _implied()
    return fields | implied, {"figure_8": data, "xformers": published, "implied": found}


def _baseline() -> Section:
    """Published times of xformers' kernel, and predicted times of its program."""
    cases = [c for c in load_measurements(XFORMERS).cases if c.schedule == "volta_flash"]
    rows, errors, rates = [], {}, []
    for case in cases:
        problem, measured = case.workload.problem(), case.measured.latency_us
        assert isinstance(problem, Problem)
        assert measured is not None
        ms, published = _xformers_ms(problem), measured.low / 1e3
        errors[case.name], shape_of = ms / published - 1, (problem.batch, problem.seq_q, problem.head_dim)
        rates.append(problem.dense_flops() / measured.low / 1e6)
        error = percent(errors[case.name], sign="+")
        rows.append([*shape_of, f"{published:.2f}", f"{rates[-1]:.0f}", f"{ms:.2f}", error])
    header = ["heads", "tokens", "head dim", "published, ms", "TFLOP/s", "predicted, ms", "error"]
    fields: dict[str, object] = {
        "baseline": table(header, rows),
        "baseline_worst": percent(max(map(abs, errors.values())), 0),
        "published_tflops": number(max(rates)),
    }
    return fields, {**errors}


def _implied() -> Section:
    """The time of FastAttention's kernel by figure 8, if its baseline has the predicted time."""
    rows, taken, base = [], {}, {}
    for tokens, paper in FIGURE_8:
        base[tokens] = _xformers_ms(shape(tokens))
        taken[tokens] = base[tokens] / paper
        rate = shape(tokens).dense_flops() / taken[tokens] / 1e9
        rows.append([tokens, f"{base[tokens]:.1f}", f"{paper:.2f}", f"{taken[tokens]:.1f}", f"{rate:.0f}"])
    (first, _), *_, (last, _) = FIGURE_8
    times = last / first
    # A time a + b tokens + c tokens^2 without a: its part that grows with the tokens alone, at the first length.
    once = (times * times * taken[first] - taken[last]) / (times * times - times)
    blocks = shape(first).batch * shape(first).heads * first / ROWS
    device = load_device("v100")
    resident = run(shape(first), FP16).blocks * device.group_count.value
    cycles = once / 1e3 * float(device.clock_hz.value) / (blocks / resident)
    header = ["tokens", "xformers as predicted, ms", "paper", "FastAttention then takes, ms", "TFLOP/s"]
    fields: dict[str, object] = {
        "implied": table(header, rows),
        "baseline_change": percent(base[last] / base[first] / times**2 - 1, 0, sign="+"),
        "implied_change": percent(taken[last] / taken[first] / times**2 - 1, 0, sign="+"),
        "once_share": percent(once / taken[first], 0),
        "once_cycles": f"{round(cycles, -3):,.0f}",
        "rows": ROWS,
    }
    data: dict[str, object] = {"ms": taken, "once_cycles": cycles}
    return fields, data


@cache
def _xformers_ms(problem: Problem) -> float:
    """Return the time on the cores of xformers' kernel."""
    named = declared_tiling("volta_flash", "v100", kernel="xformers")
    result = npusim.run(
        "volta_flash", hw="v100", problem=problem, precision=FP32, tiling=named, numerics=False, trace_groups=()
    )
    return result.device.seconds(result.cycles) * 1e3


def _ratios(data: dict[str, dict[str, float]]) -> list[float]:
    return [of["ratio"] for of in data.values() if "paper" in of]


def _three(tokens: int, *, causal: bool) -> tuple[Kernel, Kernel, Kernel]:
    """Return FP16, FP32, and FP16 with as many resident blocks as FP32 has."""
    problem = shape(tokens, causal=causal)
    return run(problem, FP16), run(problem, FP32), run(problem, FP16, residents=2)


def _compared(
    name: str, half: Kernel, single: Kernel, gains: tuple[float, float], paper: str, error: float | None
) -> list[object]:
    shown = "-" if error is None else percent(error, sign="+")
    return [name, f"{half.ms:.2f}", f"{single.ms:.2f}", *(f"{g:.2f}" for g in gains), paper, shown]


# ---------------------------------------------------------------- bits

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
#: Means of Q and K: 64 x^2 reaches 65504, the largest float16, at 31.99.
MEANS = (0.0, 8.0, 16.0, 24.0, 31.0, 33.0, 40.0)
OVERFLOW_TOKENS = 1024


def _accuracy() -> tuple[Section, str]:
    """RMSE over length, and overflow over the size of the scores, for the same kernels."""
    lines: dict[str, list[tuple[float, float]]] = {name: [] for _, name in PRECISIONS}
    rows = []
    for tokens in LENGTHS:
        problem = shape(tokens, heads=1, batch=1)
        errors = [numerics(problem, precision).error.rmse for precision, _ in PRECISIONS]
        rows.append([tokens, *(number(e) for e in errors)])
        for line, error in zip(lines.values(), errors, strict=True):
            if error is not None:
                line.append((tokens, error))
    picture = chart(
        "Relative error of the output by length, normal inputs (accumulators of Q K, P V)",
        "tokens",
        "RMSE",
        lines,
        log_x=True,
        log_y=True,
    )
    over, figures = [], []
    for mean in MEANS:
        problem = shape(OVERFLOW_TOKENS, heads=1, batch=1, data=UniformData(kind="uniform", x0=mean, amplitude=0.5))
        half, single = (numerics(problem, precision) for precision in (FP16, FP32))
        scores = 64 * mean * mean  # d = 64 products of the mean
        count = sum(half.overflow_counts.values())
        first = str(half.first_events[0].operation) if half.first_events else "-"
        over.append(
            [
                number(mean),
                f"{scores:.0f}",
                f"{count:,}",
                first,
                percent(half.error.nan_row_fraction, 0),
                number(half.error.rmse),
                number(single.error.rmse),
            ]
        )
        figures.append({"mean": mean, "overflows": count, "nan_rows": half.error.nan_row_fraction})
    header = ["tokens", *(name for _, name in PRECISIONS)]
    head = ["mean of Q and K", "64 mean^2", "FP16: overflows", "first in", "NaN rows", "RMSE, FP16", "RMSE, FP32"]
    fields: dict[str, object] = {
        "rmse": table(header, rows),
        "overflow": table(head, over),
        "overflow_tokens": OVERFLOW_TOKENS,
    }
    data: dict[str, object] = {"rmse": {n: dict(line) for n, line in lines.items()}, "overflow": figures}
    return (fields, data), picture
