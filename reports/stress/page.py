"""Page: where numbers break, as `npusim stress` finds it: published cases and results, each with its command."""

from __future__ import annotations

import json
import shlex
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from typer.testing import CliRunner

from npusim.cli.app import app
from reports.parts.document import Section, gather, number, save_page, table
from reports.stress import inputs

__all__ = ["CASES", "FA4", "OFFSETS", "PUBLISHED", "SOUND", "SPREADS", "Case", "found", "write"]

#: Published for a B300 (flash-attention#2694): relative errors by spread of scores, for P times 2^8 and 2^4.
SPREADS = (0.25, 0.5, 1.0, 1.5, 2.0)
PUBLISHED = {8: (0.027, 0.031, 0.136, 0.305, 0.361), 4: (0.027, 0.028, 0.027, 0.024, 0.022)}
OFFSETS = tuple(PUBLISHED)
FA4 = (
    "stress fa4 --tensors clamped.safetensors --no-causal -t block_kv=128 --rows all "
    "--precision growth=4,p_scale={scale},operand=float8_e4m3fn --over logit_std=0.25,0.5,1,1.5,2"
)


@dataclass(frozen=True)
class Case:
    """A published case: its name, its source, the command that reports it, and the command of the corrected kernel."""

    name: str
    source: str
    command: str
    mended: str


CASES = (
    Case(
        "FP8 P, a stale maximum",
        "flash-attention#2694, #2577, #2716",
        "stress fa4 --hw h200 --dtype float8_e4m3fn --seq 1k --no-causal -t block_kv=128 "
        "--precision growth=4,operand=float8_e4m3fn --over logits",
        "stress fa4 --hw h200 --dtype float8_e4m3fn --seq 1k --no-causal -t block_kv=128 "
        "--precision growth=0.75,operand=float8_e4m3fn --over logits",
    ),
    Case(
        "FP8 P without a scale, behind a sink",
        "P-Cast, section 3.1",
        "stress fp8_attention --hw h200 --seq 1k --precision hpc_ops_s1 --over sinks=0:8",
        "stress fp8_attention --hw h200 --seq 1k --precision hpc_ops --over sinks=0:8",
    ),
    Case(
        "float16 QK^T before the factor",
        "PASA, figure 2",
        "stress flash --seq 1k --precision fa16_32 --over logit_mean=0:6000",
        "stress flash --seq 1k --precision fa2_fp32 --over logit_mean=0:6000",
    ),
    Case(
        "resonance, float16 QK^T",
        "PASA, section 3.3.2",
        "stress flash --seq 1k --precision fa16_32 --over resonance=-64:64",
        "stress pasa --seq 1k --over resonance=-64:64 --require finite",
    ),
    Case(
        "NVFP4 throughout",
        "SageAttention3",
        "stress flash --hw rtx_5090 --seq 1k --precision nvfp4 --over logit_std=0.25:4,outliers",
        "stress flash --hw rtx_5090 --seq 1k --over logit_std=0.25:4,outliers "
        "--precision nvfp4,values=float8_e4m3fn,operand=float8_e4m3fn,p_scale=256",
    ),
    Case(
        "-100 as a mask",
        "additive masks of frameworks",
        "stress reports/stress/kernels.py:SENTINEL --seq 1k --over logit_mean=-256:0",
        "stress reports/stress/kernels.py:HIDDEN --seq 1k --over logit_mean=-256:0",
    ),
    Case(
        "NaN in keys behind a window",
        "paged caches (npusim help diff)",
        "stress flash --seq-q 128 --seq-kv 1k --window 100 --over padding",
        "stress flash --seq-q 128 --seq-kv 1k --window 100 --over tail",
    ),
)
#: Schedules that hold on all that is tried by default.
SOUND = (
    "stress flash --seq 1k",
    "stress flash --seq 1k --dtype bfloat16",
    "stress flash --seq 1k --hw h200",
    "stress flash --seq 1k --hw h200 --dtype float8_e4m3fn -t kernel=fa3",
    "stress fa4 --seq 1k",
    "stress split_kv --seq 1k --hw h200",
    "stress fp8_attention --seq 1k --hw h200",
)


def write(folder: Path) -> list[Path]:
    """Write ``stress.md`` and its data to ``folder``."""
    return save_page(folder, "stress", gather("stress", (_table(), _cases(), _sound())))


def found(command: str, folder: Path) -> dict[str, Any]:
    """Return the findings of a command that is run in the checkout; ``clamped.safetensors`` and its output are in
    ``folder``.
    """
    words = shlex.split(command.replace("clamped.safetensors", str(folder / "clamped.safetensors")))
    asked = [*words, "--json", "--budget", "3600", "--out", str(folder / "worst.safetensors")]
    with chdir(Path(__file__).resolve().parents[2]):
        done = CliRunner().invoke(app, asked)
    assert done.exit_code in (0, 1), done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["is_whole"]
    return result


def _table() -> Section:
    """The published table, point by point."""
    rows, data = [], dict[str, Any]()
    with TemporaryDirectory() as name:
        folder = Path(name)
        inputs.write(folder / "clamped.safetensors")
        for offset, published in PUBLISHED.items():
            result = found(FA4.format(scale=2**offset), folder)
            ours = {o["point"].get("logit_std", 1.0): o["rmse"] for o in result["outcomes"]}
            data[f"2^{offset}"] = {str(s): ours[s] for s in SPREADS}
            for who, errors in (("published", published), ("npusim", [ours[s] for s in SPREADS])):
                rows.append([f"2^{offset}", who, *(f"{e:.3f}" for e in errors)])
            if offset == OFFSETS[0]:
                step, mass = result["first"], result["clipped_mass"]
    off = max(abs(x / p - 1) for offset, ps in PUBLISHED.items() for x, p in zip(_of(data, offset), ps, strict=True))
    fields: dict[str, object] = {
        "table": table(["factor on P", "source", *(f"{s:g}" for s in SPREADS)], rows),
        "off": f"{off * 100:.0f}",
        "step": step.partition(", batch")[0],
        "mass": f"{mass * 100:.0f}",
        "commands": "\n".join(f"    npusim {FA4.format(scale=2**offset)}" for offset in OFFSETS),
    }
    return fields, {"table": data}


def _of(data: Any, offset: int) -> list[float]:
    return [data[f"2^{offset}"][str(s)] for s in SPREADS]


def _cases() -> Section:
    """The results of each published case and of its corrected kernel."""
    rows, commands, data = [], list[str](), {}
    with TemporaryDirectory() as name:
        for case in CASES:
            bad, good = (found(command, Path(name)) for command in (case.command, case.mended))
            step = bad["first"].partition(", batch")[0] or "no single step"
            of_bad, of_good = ((result["verdict"], _worst(result)) for result in (bad, good))
            rows.append([case.name, case.source, *of_bad, f"`{step}`", *of_good])
            commands += [f"    npusim {case.command}", f"    npusim {case.mended}"]
            data[case.name] = {n: _kept(result) for n, result in (("found", bad), ("mended", good))}
    header = [
        "case",
        "published",
        "verdict",
        "worst error",
        "first wrong step",
        "verdict, corrected",
        "worst error, corrected",
    ]
    return {"cases": table(header, rows), "case_commands": "\n".join(commands)}, {"cases": data}


def _worst(result: dict[str, Any]) -> str:
    worst = result["worst"]
    point = " ".join(f"{n}={v:.3g}" for n, v in worst["point"].items()) or "base"
    return f"{'NaN or Inf' if worst['rmse'] is None else number(worst['rmse'])} at {point}"


def _kept(result: dict[str, Any]) -> dict[str, Any]:
    names = ("verdict", "worst", "limit", "first", "lost_mass", "clipped_mass", "margin", "choices")
    return {n: result[n] for n in names}


def _sound() -> Section:
    """The ratio of the worst error of correct kernels to their error on calm inputs."""
    rows, data = [], {}
    with TemporaryDirectory() as name:
        for command in SOUND:
            result = found(command, Path(name))
            calm, worst = result["calm"]["rmse"], result["worst"]["rmse"]
            rows.append([f"`npusim {command}`", calm, worst, f"{worst / calm:.2f}", len(result["outcomes"])])
            data[command] = {**_kept(result), "ratio": worst / calm}
    fields: dict[str, object] = {
        "sound": table(["command", "error, calm inputs", "worst error", "ratio", "inputs tried"], rows),
        "largest": f"{max(d['ratio'] for d in data.values()):.2f}",
        "verdicts": ", ".join(sorted({str(d["verdict"]) for d in data.values()})),
    }
    return fields, {"sound": data}
