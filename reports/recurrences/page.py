"""Page: kernels with a matrix as their state, predicted, and measured with FLA on an H100 and PTO on a 910B2."""

from __future__ import annotations

import csv
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import npusim
from npusim.config.load import load_device
from npusim.config.problem import KernelProblem
from npusim.config.tiling import build_tiling
from npusim.errors import TilingError
from npusim.library import find_schedule
from npusim.program.timing.auto import simulate
from reports.parts.document import Section, gather, percent, save_page, table
from reports.recurrences import backward

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["write"]

HERE = Path(__file__).resolve().parent
#: FLA's kernels: the schedule and the phase that predict each.
KERNELS = {
    "chunk_fwd_kernel_h": ("retention", "states"),
    "chunk_fwd_kernel_o": ("gated_delta", "outputs"),
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": ("gated_delta", "kkt"),
    "recompute_w_u_fwd_kernel": ("gated_delta", "wy"),
}
#: Calls whose configurations are all predicted; `configurations.csv` has four more.
SHAPES = "1x8192x16x128", "8x2048x32x64"
#: SGLang's kernels: the phase that predicts each, and the fields with which SGLang launches it.
SGLANG: dict[str, tuple[str, dict[str, int]]] = {
    "l2norm_fwd_kernel": ("unit", {"warps": 8}),
    "chunk_local_cumsum_scalar_kernel": ("decays", {"warps": 8}),
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": ("kkt", {"warps": 4, "stages": 3, "solve_warps": 1}),
    "recompute_w_u_fwd_kernel": ("wy", {"warps": 4, "stages": 3}),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": ("states", {"warps": 4, "stages": 2, "block_value": 32}),
    "chunk_fwd_kernel_o": ("outputs", {"warps": 4, "stages": 2, "block_value": 64}),
}
#: Sequences, tokens of each and heads of the calls that are predicted; `sglang.csv` has more.
CALLS = (1, 2048, 16), (1, 8192, 16), (8, 2048, 16), (1, 16384, 8), (2, 2048, 32), (4, 512, 32)
#: Tokens of a chunk: FLA's, PTO's.
CHUNK, PTO_CHUNK = 64, 128
#: PTO's stages, and the phase that predicts each.
STAGES = {
    "chunk_cumsum": "decays",
    "scaled_dot_kkt": "kkt",
    "solve_tril": "solve",
    "wy_fast": "wy",
    "chunk_h": "states",
    "chunk_o": "outputs",
}
#: Milliseconds of PTO's stages by tokens of a sequence and heads.  source: huawei-csl/megagdn-pto, outputs/data,
#: kernel_bench.json, kernel_bench_L8192.json and kernel_bench_L4096.json (2 May 2026: 16 sequences, d 128, float16)
PTO: dict[tuple[int, int], tuple[float, ...]] = {
    (16384, 16): (0.322, 4.668, 15.892, 6.965, 10.121, 11.120),
    (16384, 32): (0.345, 9.417, 31.821, 13.090, 20.459, 21.959),
    (16384, 48): (0.439, 13.680, 47.889, 20.871, 30.183, 33.228),
    (16384, 64): (0.290, 18.228, 63.950, 26.140, 40.572, 45.450),
    (8192, 16): (0.162, 2.177, 7.421, 3.513, 5.070, 5.530),
    (4096, 16): (0.088, 1.186, 4.007, 1.786, 2.414, 2.814),
}
#: As PTO's kernels are written, and what its matrix unit leaves in global memory.
PTO_TILING: dict[str, Any] = {"chunk": PTO_CHUNK, "block_value": 128, "kernel": "pto_chunks"}
PTO_PRECISION = "stored,product=float16"


class Choice(NamedTuple):
    """A configuration of a kernel's own list: its fields, us predicted alone, and us measured in its sequence."""

    fields: dict[str, int]
    us: float
    measured: float

    def __str__(self) -> str:
        return " ".join(f"{n}={x}" for n, x in self.fields.items() if n not in ("chunk", "registers", "shared_bytes"))


def write(folder: Path) -> list[Path]:
    """Write ``recurrences.md`` and its data to ``folder``."""
    return save_page(
        folder,
        "recurrences",
        gather("recurrences", [_on_h100(), _on_h200(), _on_910b2(), backward.on_h100(), backward.of_both_methods()]),
    )


def _rows(file: str) -> list[dict[str, str]]:
    with (HERE / file).open(encoding="utf-8", newline="") as read:
        return list(csv.DictReader(read))


def _sizes(schedule: str, shape: str) -> dict[str, int]:
    """Return the sizes of a call; FLA's calls of the gated delta rule have no kernel that normalises K."""
    batch, tokens, heads, width = map(int, shape.split("x"))
    unit = {"unit": 0} if schedule == "gated_delta" else {}
    return {"batch": batch, "heads": heads, "tokens": tokens, "key": width, "value": width, **unit}


def _fields(kernel: str, row: dict[str, str]) -> dict[str, int]:
    """Return the fields of a run of a configuration, with the registers that its compiler reports."""
    fields = {"chunk": CHUNK, "warps": int(row["warps"]), "stages": int(row["stages"])}
    fields |= {"registers": int(row["registers"]), "shared_bytes": int(row["shared_bytes"])}
    if kernel == "chunk_fwd_kernel_h":
        fields |= {"block_key": int(row["bk"])}
    if row["bv"]:
        fields |= {"block_value": int(row["bv"])}
    if "kkt" in kernel:  # four warps for the others, which a run computes too
        fields |= {"solve_warps": int(row["warps"]), "warps": 4}
    return fields


def _times_of(
    schedule: str, phase: str, sizes: dict[str, int], fields: dict[str, int], *, alone: bool, hw: str = "h100"
) -> float:
    """Return the time of a schedule's kernel on a GPU, in microseconds: alone, or after the kernels before it.

    For a kernel that was measured alone, L2 has lines that were read, and none that were written; a sequence begins as
    the device
    file says.
    """
    device = load_device(hw)
    declared = find_schedule(schedule, device.family)
    tiling = build_tiling(declared.tiling, {n: str(x) for n, x in fields.items()})
    problem = KernelProblem.of({**sizes, "dtype": "bfloat16"})
    program = declared.program(problem, tiling, device, declared.precision())
    assert device.memory.l2.starts is not None
    if alone:
        phases = tuple(p for p in program.phases if p.name == phase)
        return simulate(replace(program, l2="clean", phases=phases), device).core_us
    return _times(replace(program, l2=device.memory.l2.starts.value), device)[phase]


def _times(program: Any, device: Any) -> dict[str, float]:
    timing = simulate(program, device)
    assert timing.account is not None
    return {p.name: timing.core_us * p.cycles / timing.cycles for p in timing.account.phases}


def _choices(kernel: str, shape: str) -> Iterator[Choice]:
    """Yield configurations without spills whose tiles are no wider than a head, which npusim has none of."""
    schedule, phase = KERNELS[kernel]
    sizes = _sizes(schedule, shape)
    for row in _rows("configurations.csv"):
        is_meant = (row["kernel"], row["shape"], row["spilled"]) == (kernel, shape, "0")
        if is_meant and int(row["bv"] or 0) <= sizes["value"]:
            fields = _fields(kernel, row)
            with suppress(TilingError):
                yield Choice(fields, _times_of(schedule, phase, sizes, fields, alone=True), float(row["us"]))


def _command(schedule: str, hw: str, sizes: dict[str, Any], fields: dict[str, Any], more: str = "") -> str:
    words = (",".join(f"{n}={x}" for n, x in named.items()) for named in (sizes, fields))
    problem, tiling = words
    return f"`npusim run {schedule} --hw {hw} --problem {problem} -t {tiling} {more}--no-numerics`"


def _on_h100() -> Section:
    rows, listed, commands = list[list[str]](), list[list[str]](), list[str]()
    figures, sums = list[dict[str, Any]](), dict[str, float]()
    for shape in SHAPES:
        total, where = [0.0, 0.0], shape.replace("x", " x ")
        for kernel, (schedule, phase) in KERNELS.items():
            ranked = sorted(_choices(kernel, shape), key=lambda c: c.us)
            first, best = ranked[0], min(ranked, key=lambda c: c.measured)
            us = _times_of(schedule, phase, _sizes(schedule, shape), first.fields, alone=False)
            total = [total[0] + us, total[1] + first.measured]
            off, regret = us / first.measured - 1, first.measured / best.measured - 1
            cells = str(first), f"{us:.1f}", f"{first.measured:.1f}", percent(off), str(best), f"{best.measured:.1f}"
            rows.append([where, f"`{kernel}`", *cells, percent(regret), f"{ranked.index(best) + 1} of {len(ranked)}"])
            for at, c in enumerate(ranked, 1):
                listed.append([where, f"`{kernel}`", str(at), str(c), f"{c.us:.1f}", f"{c.measured:.1f}"])
            sizes = {**_sizes(schedule, shape), "dtype": "bfloat16"}
            commands.append(
                f"* {shape}, `{kernel}`: phase `{phase}` of {_command(schedule, 'h100', sizes, first.fields)}"
            )
            known = {"us": us, "measured": first.measured, "off": off, "best": best.measured, "regret": regret}
            figures.append({"shape": shape, "kernel": kernel, **first.fields, **known})
        sums[shape] = total[0] / total[1] - 1
        rows.append([where, "sum", "", *(f"{x:.1f}" for x in total), percent(sums[shape]), "", "", "", ""])
    header = ["batch x tokens x heads x width", "kernel", "predicted best", "us", "measured", "off", "best on the chip"]
    fields = {
        "h100": table([*header, "us", "slower than it", "its place"], rows),
        "h100_listed": table([*header[:2], "place", "configuration", "us alone", "measured"], listed),
        "h100_commands": "\n".join(commands),
        "worst_h100": percent(max((abs(float(str(f["off"]))) for f in figures), default=0.0)),
        "worst_sum": percent(max(map(abs, sums.values()))),
        "worst_regret": percent(max(float(str(f["regret"])) for f in figures)),
    }
    return dict(fields), {"h100": figures, "h100_sums": sums}


def _on_h200() -> Section:
    """Return SGLang's chain, kernel by kernel in its sequence, as its server calls it: sequences end to end."""
    lines, figures, sums = list[list[str]](), list[dict[str, Any]](), list[float]()
    rows = [r for r in _rows("sglang.csv") if r["solve_warps"] in ("", "1") and r["heads"] == r["key_heads"]]
    for batch, tokens, heads in CALLS:
        known = dict[str, dict[str, str]]()
        for r in rows:
            if (int(r["batch"]), int(r["tokens"]), int(r["heads"])) == (batch, tokens, heads):
                known.setdefault(r["kernel"], r)
        sizes = {"batch": batch, "tokens": tokens, "heads": heads, "key": 128, "value": 128}
        cells, total = list[str](), [0.0, 0.0]
        for kernel, (phase, decided) in SGLANG.items():
            row, fields = known[kernel], {"chunk": CHUNK, **decided}
            if phase not in ("unit", "decays"):
                fields |= {"registers": int(row["registers"]), "shared_bytes": int(row["shared_bytes"])}
            us = _times_of("gated_delta", phase, sizes, fields, alone=False, hw="h200")
            measured, count = float(row["us"]), int(row["count"])
            total = [total[0] + us * count, total[1] + measured * count]
            cells.append(f"{us:.1f} ({percent(us / measured - 1)})")
            figures.append({**sizes, "kernel": kernel, "us": us, "measured": measured})
        sums.append(total[0] / total[1] - 1)
        call, whole = f"{batch} x {tokens:,} x {heads}", f"{float(known['zeros_like']['graph_us']):.0f}"
        lines.append([call, *cells, f"{total[0]:.0f}", f"{total[1]:.0f}", percent(sums[-1]), whole])
    names = ["norm", "sums", "inverse", "W and U", "states", "outputs", "chain", "measured", "off", "graph"]
    shown: dict[str, object] = {
        "sglang": table(["sequences x tokens x heads", *names], lines),
        "sglang_least": percent(min(sums)),
        "sglang_most": percent(max(sums)),
    }
    return shown, {"sglang": figures, "sglang_sums": dict(zip(map(str, CALLS), sums, strict=True))}


def _on_910b2() -> Section:
    rows, commands, figures, sums = list[list[str]](), list[str](), list[dict[str, Any]](), dict[str, float]()
    for (tokens, heads), published in PTO.items():
        sizes = {"batch": 16, "heads": heads, "tokens": tokens, "key": 128, "value": 128, "unit": 0}
        run = npusim.run(
            "gated_delta",
            hw="ascend_910b2",
            problem=KernelProblem.of(sizes),
            tiling=PTO_TILING,
            precision=PTO_PRECISION,
            numerics=False,
        )
        assert run.timing is not None
        times = _times(run.program, run.device)
        total = [0.0, 0.0]
        for (stage, phase), known in zip(STAGES.items(), published, strict=True):
            ms = times[phase] / 1e3
            total = [total[0] + ms, total[1] + known]
            of = {"tokens": tokens, "heads": heads, "stage": stage}
            rows.append([f"{tokens:,}", str(heads), f"`{stage}`", f"{ms:.2f}", f"{known:.2f}", percent(ms / known - 1)])
            figures.append({**of, "ms": ms, "published": known, "off": ms / known - 1})
        called = f"{tokens} tokens, {heads} heads"
        sums[called] = total[0] / total[1] - 1
        cells = f"{total[0]:.2f}", f"{total[1]:.2f}", percent(sums[called])
        rows.append([f"{tokens:,}", str(heads), "sum of six", *cells])
        more = f"--precision {PTO_PRECISION} "
        commands.append(f"* {called}: {_command('gated_delta', 'ascend_910b2', sizes, PTO_TILING, more)}")
    apart = [f for f in figures if f["stage"] != "chunk_cumsum"]
    fields = {
        "pto": table(["tokens", "heads", "PTO's stage", "ms", "published", "off"], rows),
        "pto_commands": "\n".join(commands),
        "pto_worst": percent(max(abs(float(str(f["off"]))) for f in apart)),
        "pto_states": percent(max(abs(float(str(f["off"]))) for f in figures if f["stage"] == "chunk_h")),
        "pto_sums": percent(max(abs(float(str(f["off"]))) for f in figures if f["stage"] == "chunk_cumsum")),
        "pto_sum": percent(max(map(abs, sums.values()))),
    }
    return dict(fields), {"910b2": figures, "910b2_sums": sums}
