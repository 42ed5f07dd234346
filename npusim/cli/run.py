"""``npusim run``: bits and cycles of one schedule on one device."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from npusim.cli import options as o
from npusim.cli.console import say, show, show_json, working
from npusim.cli.fields import show_fields
from npusim.cli.help import Command, examples

if TYPE_CHECKING:
    from npusim.run_result import RunResult

__all__ = ["add_to"]

#: A run estimated to take longer wants --force.
LONGEST_S = 600
_BITS = "Bits"
_OUTPUT = "Output"

Arithmetic = Annotated[
    str | None,
    typer.Option(
        "--arithmetic", metavar="NAME", rich_help_panel="How",
        help="How matrix units sum: hopper.wgmma.k16.f16.f32, ...; default: the device's.",
    ),
]  # fmt: skip
Tensors = Annotated[
    str | None,
    typer.Option(
        "--tensors", metavar="FILE|NAME", rich_help_panel=_BITS,
        help="Q, K and V of your own, or packaged ones: .safetensors or .npz with keys q, k, v (a node's: w_o too).",
    ),
]  # fmt: skip
Prefix = Annotated[
    str,
    typer.Option(
        "--prefix", metavar="TEXT", rich_help_panel=_BITS, show_default=False,
        help="Of the tensors' keys: <prefix>.q; needed where a file holds several.",
    ),
]  # fmt: skip
Layout = Annotated[
    Literal["bnsd", "bsnd", "bsh", "tnd"],
    typer.Option(
        "--layout", rich_help_panel=_BITS,
        help="Axes of Q, K and V, in --tensors and in memory; bsh cuts heads of the workload's size.",
    ),
]  # fmt: skip
Rows = Annotated[
    str,
    typer.Option(
        "--rows", metavar="WHICH", rich_help_panel=_BITS,
        help="Query rows to compute: sample, all, or 0,128,4000-4095 (their whole Q blocks).",
    ),
]  # fmt: skip
Heads = Annotated[
    str,
    typer.Option(
        "--heads", metavar="WHICH", rich_help_panel=_BITS,
        help="Heads to compute: sample, all, or 0,2.",
    ),
]  # fmt: skip
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        rich_help_panel=_BITS,
        help="Of tensors drawn from the workload's recipe.",
    ),
]
NoNumerics = Annotated[
    bool,
    typer.Option(
        "--no-numerics", rich_help_panel=_BITS, show_default=False, help="Time only, no bits."
    ),
]
Diagnose = Annotated[
    bool,
    typer.Option(
        "--diagnose", rich_help_panel=_BITS, show_default=False,
        help="Ranges, resonance, underflow, mass lost and saturation too.",
    ),
]  # fmt: skip
Trace = Annotated[
    Literal["perfetto", "chrome", "none"],
    typer.Option(
        "--trace", rich_help_panel=_OUTPUT, help="Timeline to write; open it in ui.perfetto.dev."
    ),
]
TraceGroups = Annotated[
    str,
    typer.Option(
        "--trace-groups", metavar="WHICH", rich_help_panel=_OUTPUT,
        help="Core groups on the timeline: 0, or 0,7.",
    ),
]  # fmt: skip
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", metavar="DIR", rich_help_panel=_OUTPUT, show_default="runs/<name>",
        help="Folder of this run; an earlier run there is replaced.",
    ),
]  # fmt: skip
NoSave = Annotated[
    bool,
    typer.Option("--no-save", rich_help_panel=_OUTPUT, show_default=False, help="Write no folder."),
]
SaveOutput = Annotated[
    bool,
    typer.Option(
        "--save-output", rich_help_panel=_OUTPUT, show_default=False,
        help="Write the output tensor too; always done with --tensors.",
    ),
]  # fmt: skip
Sensitive = Annotated[
    bool,
    typer.Option(
        "--sensitivity", rich_help_panel="How", show_default=False,
        help="Time anew with each assumed or fitted constant a fifth lower and higher.",
    ),
]  # fmt: skip
Presets = Annotated[
    bool | None,
    typer.Option(
        "--presets/--no-presets", rich_help_panel=_BITS, show_default="where a schedule has some",
        help="Show what the schedule's other presets give on the same rows.",
    ),
]  # fmt: skip
Force = Annotated[
    bool,
    typer.Option(
        "--force", rich_help_panel="How", show_default=False,
        help="Run even what is estimated to take more than ten minutes.",
    ),
]  # fmt: skip
Fields = Annotated[
    bool,
    typer.Option(
        "--fields", rich_help_panel="How", show_default=False,
        help="Only list the schedule's tiling fields and precisions.",
    ),
]  # fmt: skip


def add_to(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command(
        "run",
        cls=Command,
        epilog=examples(
            ("npusim run flash", "910B2, PanGu-38B, 4096 tokens"),
            (
                "npusim run flash -w llama2_70b --seq 8192 --hw ascend_910b1",
                "another model and device",
            ),
            ("npusim run flash --fields", "which tiling fields and precisions there are"),
            ("npusim run flash -t block_kv=256,depth=3", "other tiles"),
            (
                "npusim run flash --tensors qkv.safetensors --rows all",
                "your own Q, K and V, every row",
            ),
            (
                "npusim run flash -C flags.cross_core_latency_cycles=1000",
                "what if flags were slower",
            ),
            ("npusim run flash --no-numerics --json", "time only, for a script"),
        ),
    )(run)


def run(
    schedule: o.ScheduleName = None,
    *,
    workload: o.WorkloadName = o.DEFAULT_WORKLOAD,
    seq: o.Seq = None,
    seq_q: o.SeqQ = None,
    seq_kv: o.SeqKv = None,
    batch: o.Batch = None,
    tensor_parallel: o.TensorParallel = None,
    causal: o.Causal = None,
    dtype: o.Dtype = None,
    ignore: o.Ignore = None,
    problem: o.ProblemText = None,
    hw: o.Hw = None,
    overrides: o.Overrides = None,
    tiling: o.Tilings = None,
    precision: o.Precision = None,
    arithmetic: Arithmetic = None,
    method: o.Method = "auto",
    tensors: Tensors = None,
    prefix: Prefix = "",
    layout: Layout = "bnsd",
    rows: Rows = "sample",
    heads: Heads = "sample",
    seed: Seed = None,
    no_numerics: NoNumerics = False,
    diagnose: Diagnose = False,
    presets: Presets = None,
    trace: Trace = "perfetto",
    trace_groups: TraceGroups = "0",
    out: Out = None,
    no_save: NoSave = False,
    save_output: SaveOutput = False,
    sensitivity: Sensitive = False,
    force: Force = False,
    fields: Fields = False,
    json: o.Json = False,
) -> None:
    """Predict bits and cycles of one attention schedule on one device.

    Time always covers the whole problem; bits are computed for a stated sample of rows. A folder
    runs/<name>/ gets result.json, pipes.csv and trace.pftrace.
    """
    name = o.required_schedule(schedule, "run")
    if fields:
        show_fields(name, hw, as_json=json)
        return
    groups = () if trace == "none" or no_save else o.indices(trace_groups, "--trace-groups")
    numbers, tiles = o.key_values(overrides, "-C"), o.tiling_values(tiling)
    if not no_save:
        _check_place(out)
    beside = presets if presets is not None else not no_numerics and has_presets(name)
    with working(f"simulating {name}") as progress:
        result = _simulate(
            name, hw=hw, overrides=numbers, workload=workload, problem=o.problem_values(problem),
            seq=seq, seq_q=seq_q, seq_kv=seq_kv, batch=batch, tensor_parallel=tensor_parallel,
            causal=causal, dtype=dtype, ignore=o.ignored_names(ignore), tiling=tiles, precision=precision,
            arithmetic=arithmetic, method=method, tensors=tensors, prefix=prefix, layout=layout, seed=seed,
            rows=o.chosen(rows, "--rows"), heads=o.chosen(heads, "--heads"), numerics=not no_numerics,
            diagnose=diagnose, trace_groups=groups, presets=beside, progress=progress,
            limit_s=None if force else LONGEST_S,
        )  # fmt: skip
        folder = None if no_save else _save(result, out, trace, save_output or tensors is not None)
    _print(result, folder, as_json=json, sensitive=sensitivity)


def has_presets(name: str) -> bool:
    """Return whether a schedule shows what its other presets give."""
    from npusim.schedules import SCHEDULES

    return any(s.beside for s in SCHEDULES.values() if s.name == name)


def _simulate(name: str, **options: Any) -> "RunResult":
    from npusim.run import run as run_schedule

    return run_schedule(name, **options)


def _check_place(out: Path | None) -> None:
    """Fail before the simulation, not after it, where the folder cannot be written."""
    from npusim.report.output import check_writable, default_folder

    check_writable(out if out is not None else default_folder(".probe"))


def _save(
    result: "RunResult",
    out: Path | None,
    trace: Literal["perfetto", "chrome", "none"],
    tensor: bool,
) -> Path:
    from npusim.report.output import save_run

    return save_run(result, out, trace=trace, save_output=tensor)


def _print(result: "RunResult", folder: Path | None, *, as_json: bool, sensitive: bool) -> None:
    from npusim.report.record import record_of
    from npusim.report.result_json import result_document
    from npusim.report.sensitivity import sensitivity_document, sensitivity_table
    from npusim.report.tables import run_table
    from npusim.report.trial import Trial

    record = record_of(result)
    moved = result.sensitivity() if sensitive else ()
    if as_json:
        extra = {"sensitivity": sensitivity_document(moved)} if sensitive else {}
        show_json({**result_document(record), **extra})
    else:
        shown = run_table(record, Trial(result))
        show((*shown, *(sensitivity_table(moved) if sensitive else ())))
    if folder is not None:
        files = " ".join(sorted(path.name for path in folder.iterdir()))
        say(f"wrote {folder}/  ({files})")
