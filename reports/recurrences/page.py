"""Page: kernels with a matrix as their state, predicted beside FLA's on an H100 and PTO's on a 910B2, each command."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import npusim
from npusim.config.load import load_device
from npusim.config.problem import KernelProblem
from npusim.config.tiling import build_tiling
from npusim.errors import TilingError
from npusim.schedules import find_schedule
from npusim.timing.auto import simulate
from reports.parts.document import Section, gather, percent, save_page, table
from reports.recurrences import backward

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["write"]

HERE = Path(__file__).resolve().parent
#: FLA's kernels: the schedule and the phase that stands for each, and whose call measured it.
KERNELS = {
    "chunk_fwd_kernel_h": ("retention", "states", "retention"),
    "chunk_fwd_kernel_o": ("gated_delta", "outputs", "gated_delta_rule"),
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": ("gated_delta", "kkt", "gated_delta_rule"),
    "recompute_w_u_fwd_kernel": ("gated_delta", "wy", "gated_delta_rule"),
}
#: Tokens of a chunk: FLA's, PTO's.
CHUNK, PTO_CHUNK = 64, 128
#: PTO's stages: the phase that stands for each, and milliseconds at 16 and 32 heads.  source: huawei-csl/megagdn-pto,
#: outputs/data/kernel_bench.json (16 x 16384 tokens, d 128, float16).
PTO: dict[str, tuple[str, dict[int, float]]] = {
    "chunk_cumsum": ("decays", {16: 0.32, 32: 0.35}),
    "scaled_dot_kkt": ("kkt", {16: 4.62, 32: 9.21}),
    "solve_tril": ("solve", {16: 20.60, 32: 40.46}),
    "wy_fast": ("wy", {16: 6.94, 32: 12.99}),
    "chunk_h": ("states", {16: 9.63, 32: 20.55}),
    "chunk_o": ("outputs", {16: 11.39, 32: 22.44}),
}


class Choice(NamedTuple):
    """A configuration of a kernel's own list: fields of its run, what it takes, and what a call of it took, in us."""

    fields: dict[str, int]
    us: float
    call_us: float


def write(folder: Path) -> list[Path]:
    """Write ``recurrences.md`` and its data to ``folder``."""
    return save_page(
        folder,
        "recurrences",
        gather("recurrences", [_on_h100(), _on_910b2(), backward.on_h100(), backward.of_both_methods()]),
    )


def _rows(file: str) -> list[dict[str, str]]:
    with (HERE / file).open(encoding="utf-8", newline="") as read:
        return list(csv.DictReader(read))


def _sizes(shape: str) -> dict[str, int]:
    batch, tokens, heads, width = map(int, shape.split("x"))
    return {"batch": batch, "heads": heads, "tokens": tokens, "key": width, "value": width}


def _fields(kernel: str, row: dict[str, str]) -> dict[str, int]:
    """Return the fields of a run that has a configuration, with what its compiler says of registers."""
    fields = {"chunk": CHUNK, "warps": int(row["warps"]), "stages": int(row["stages"])}
    fields |= {"registers": int(row["registers"]), "shared_bytes": int(row["shared_bytes"])}
    if kernel == "chunk_fwd_kernel_h":
        fields |= {"block_key": int(row["bk"])}
    if row["bv"]:
        fields |= {"block_value": int(row["bv"])}
    if "kkt" in kernel:  # four warps for the others, which a run has beside it
        fields |= {"solve_warps": int(row["warps"]), "warps": 4}
    return fields


def _times_of(schedule: str, phase: str, sizes: dict[str, int], fields: dict[str, int], *, alone: bool) -> float:
    """Return what a kernel of a schedule takes on an H100, in microseconds: alone, or behind those before it."""
    device = load_device("h100")
    declared = find_schedule(schedule, device.family)
    tiling = build_tiling(declared.tiling, {n: str(x) for n, x in fields.items()})
    problem = KernelProblem.of({**sizes, "dtype": "bfloat16"})
    program = declared.program(problem, tiling, device, declared.precision())
    if alone:
        timing = simulate(replace(program, phases=tuple(p for p in program.phases if p.name == phase)), device)
        return timing.core_us
    return _times(program, device)[phase]


def _times(program: Any, device: Any) -> dict[str, float]:
    timing = simulate(program, device)
    assert timing.account is not None
    return {p.name: timing.core_us * p.cycles / timing.cycles for p in timing.account.phases}


def _choices(kernel: str, shape: str) -> Iterator[Choice]:
    schedule, phase, _ = KERNELS[kernel]
    for row in _rows("configurations.csv"):
        if (row["kernel"], row["shape"], row["spilled"]) == (kernel, shape, "0"):
            fields = _fields(kernel, row)
            try:
                us = _times_of(schedule, phase, _sizes(shape), fields, alone=True)
                yield Choice(fields, us, float(row["call_us"]))
            except TilingError:
                continue


def _command(schedule: str, hw: str, sizes: dict[str, Any], fields: dict[str, int]) -> str:
    words = (",".join(f"{n}={x}" for n, x in named.items()) for named in (sizes, fields))
    problem, tiling = words
    return f"`npusim run {schedule} --hw {hw} --problem {problem} -t {tiling} --no-numerics`"


def _on_h100() -> Section:
    measured = {(r["operation"], r["shape"], r["kernel"]): float(r["us"]) for r in _rows("measured.csv")}
    shapes = list(dict.fromkeys(shape for _, shape, _ in measured))
    rows, commands, figures, sums = list[list[str]](), list[str](), list[dict[str, Any]](), dict[str, float]()
    for shape in shapes:
        total = [0.0, 0.0]
        for kernel, (schedule, phase, operation) in KERNELS.items():
            listed = list(_choices(kernel, shape))
            first = min(listed, key=lambda c: c.us)
            best = first._replace(us=_times_of(schedule, phase, _sizes(shape), first.fields, alone=False))
            calls = f"{first.call_us:.0f}", f"{min(c.call_us for c in listed):.0f}"
            us = measured[operation, shape, kernel]
            total = [total[0] + best.us, total[1] + us]
            off = best.us / us - 1
            shown = " ".join(
                f"{n}={x}" for n, x in best.fields.items() if n not in ("chunk", "registers", "shared_bytes")
            )
            cells = f"{best.us:.1f}", f"{us:.1f}", percent(off), *calls
            rows.append([shape.replace("x", " x "), f"`{kernel}`", shown, *cells])
            sizes = {**_sizes(shape), "dtype": "bfloat16"}
            commands.append(
                f"* {shape}, `{kernel}`: phase `{phase}` of {_command(schedule, 'h100', sizes, best.fields)}"
            )
            known = {"us": best.us, "measured": us, "off": off, "call_us": first.call_us}
            figures.append({"shape": shape, "kernel": kernel, **best.fields, **known})
        sums[shape] = total[0] / total[1] - 1
        rows.append(
            [shape.replace("x", " x "), "sum", "", f"{total[0]:.1f}", f"{total[1]:.1f}", percent(sums[shape]), "", ""]
        )
    header = [
        "batch x tokens x heads x width",
        "kernel",
        "predicted best",
        "us",
        "measured",
        "off",
        "call",
        "best call",
    ]
    fields = {
        "h100": table(header, rows),
        "h100_commands": "\n".join(commands),
        "worst_h100": percent(max((abs(float(str(f["off"]))) for f in figures), default=0.0)),
        "worst_sum": percent(max(map(abs, sums.values()))),
    }
    return dict(fields), {"h100": figures, "h100_sums": sums}


def _on_910b2() -> Section:
    rows, commands, figures, sums = list[list[str]](), list[str](), list[dict[str, Any]](), dict[str, float]()
    for heads in (16, 32):
        sizes = {"batch": 16, "heads": heads, "tokens": 16384, "key": 128, "value": 128, "unit": 0}
        tiling = {"chunk": PTO_CHUNK, "block_value": 128}
        run = npusim.run(
            "gated_delta", hw="ascend_910b2", problem=KernelProblem.of(sizes), tiling=tiling, numerics=False
        )
        assert run.timing is not None
        times = _times(run.program, run.device)
        total = [0.0, 0.0]
        for stage, (phase, published) in PTO.items():
            ms, known = times[phase] / 1e3, published[heads]
            total = [total[0] + ms, total[1] + known]
            rows.append([str(heads), f"`{stage}`", f"{ms:.2f}", f"{known:.2f}", percent(ms / known - 1)])
            figures.append({"heads": heads, "stage": stage, "ms": ms, "published": known, "off": ms / known - 1})
        sums[str(heads)] = total[0] / total[1] - 1
        rows.append([str(heads), "sum of six", f"{total[0]:.2f}", f"{total[1]:.2f}", percent(sums[str(heads)])])
        commands.append(f"* {heads} heads: {_command('gated_delta', 'ascend_910b2', sizes, tiling)}")
    within = [str(f["stage"]) for f in figures if f["heads"] == 16 and abs(float(str(f["off"]))) <= 0.25]
    fields = {
        "pto": table(["heads", "PTO's stage", "ms", "published", "off"], rows),
        "pto_commands": "\n".join(commands),
        "pto_within": ", ".join(within),
        "pto_sum": percent(max(map(abs, sums.values()))),
    }
    return dict(fields), {"910b2": figures, "910b2_sums": sums}
