"""``npusim run``: bits and cycles of one schedule on one device."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from npusim.cli import options as o
from npusim.cli.console import in_percent, late_progress, said_late, say, show_either, write
from npusim.cli.help import Verbs
from npusim.kernels.triton import is_recorded
from npusim.report.charts import altair
from npusim.report.text import document
from npusim.simulation.request import NEEDS, Request, refuse, short_name

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.library import Schedule
    from npusim.simulation.plan import Plan
    from npusim.simulation.run_result import RunData

app = Verbs()

#: A run with a longer estimate needs --force.
LONGEST_S = 600
#: The work of a run before its progress is known.
AT_FIRST = "choosing the fields that you did not name, and building the program"
_OUTPUT = "Output"

Trace = Annotated[
    bool | None,
    o.option("--trace/--no-trace", "Write the timeline; open it in ui.perfetto.dev.", panel=_OUTPUT, shown="written"),
]
Out = Annotated[
    Path | None,
    o.option(
        "--out -o DIR",
        "Folder of this run. It replaces an earlier result of the same run; with --force, also that of another run.",
        panel=_OUTPUT,
        shown="in runs/, named after schedule, inputs, shape, device, and a digest of the other options",
    ),
]
NoSave = Annotated[bool, o.option("--no-save", "Write no folder.", panel=_OUTPUT)]
SaveOutput = Annotated[
    bool, o.option("--save-output", "Also write the output tensor; the default with --tensors.", panel=_OUTPUT)
]
Report = Annotated[
    bool,
    o.option(
        "--report",
        "Also write report.html, with a diagnosis of bits (--diagnose). Needs npusim[report].",
        panel=_OUTPUT,
    ),
]
Sensitive = Annotated[
    bool,
    o.option(
        "--sensitivity",
        "Repeat the timing with each assumed or fitted constant 20 % lower and 20 % higher.",
        panel="How",
    ),
]
Like = Annotated[
    Path | None,
    o.option("--like FILE", "Show the prediction errors of the nearest measured cases.", panel=_OUTPUT, shown=False),
]
Full = Annotated[
    bool,
    o.option(
        "--full", "Print everything: time by kind of measurement, links, other arithmetics, evidence.", panel=_OUTPUT
    ),
]
Force = Annotated[
    bool,
    o.option("--force", "Run even if the estimate exceeds ten minutes; replace another run in --out.", panel="How"),
]
Fields = Annotated[bool, o.option("--fields", "Only list the schedule's tiling fields and precisions.", panel="How")]


@app.verb(
    "run",
    ("npusim run flash", "910B2, PanGu-38B, 4096 tokens"),
    ("npusim run flash -w llama2_70b --seq 8192 --hw ascend_910b1", "another model and device"),
    ("npusim run flash --fields", "list its tiling fields and precisions"),
    ("npusim run flash -t block_kv=256,depth=3", "other tiles"),
    ("npusim run flash --tensors qkv.safetensors --rows all", "your own Q, K and V, every row"),
    ("npusim run flash -C flags.cross_core_latency_cycles=1000", "with slower flags"),
    ("npusim run pasa --report", "also a page to look at: report.html in its folder"),
    ("npusim run flash --no-numerics --json", "time only, for a script"),
    ("npusim run calls.npz --hw h200", "all recorded launches, one after another"),
    first="--workload --seq --batch --phase --problem --hw --tiling --precision --tensors --fields",
    describes_problem=True,
)
@o.takes()
def run(
    request: Request,
    *,
    trace: Trace = None,
    out: Out = None,
    no_save: NoSave = False,
    save_output: SaveOutput = False,
    report: Report = False,
    full: Full = False,
    sensitivity: Sensitive = False,
    like: Like = None,
    force: Force = False,
    fields: Fields = False,
    plot: o.Plot = None,
    json: o.Json = False,
) -> None:
    """Predict bits and cycles of one attention schedule on one device.

    Time always covers the whole problem; bits are computed for a stated sample of rows. The files result.json,
    figures.json, pipes.csv and trace.json are written to a folder in runs/; npusim compare @2 @1 compares the last two
    runs.
    """
    written = {
        "--out": out,
        "--trace": trace,
        "--save-output": save_output or None,
        "--report": report or None,
        "--timeline": request.timeline,
        "--trace-groups": request.changed().get("trace_groups"),
    }
    of_one = written | {"--full": full or None, "--plot": plot}
    if fields:
        changed = {n: x for n, x in request.changed().items() if n != "hw"}
        refuse(changed | of_one, "--fields only lists the fields for the cores of --hw; remove these options")
        request = replace(request, overrides=None)
        _show_fields(request.schedule, request.find_schedule(), request.machine(), as_json=json)
        return
    if _is_run_in_sequence(request, of_one | {"--like": like}, as_json=json):
        return
    from npusim.report.output import RUNS, check_writable, save_run
    from npusim.simulation.naming import digest_of, folder_of
    from npusim.simulation.plan import plan_of
    from npusim.simulation.simulate import run_plan

    plan = plan_of(request)
    if "time" not in plan.features:
        refuse({"--trace": trace, "--sensitivity": sensitivity or None, "--like": like}, NEEDS["time"])
    if not {"attention", "bits"} <= plan.features:
        refuse({"--save-output": save_output or None}, NEEDS["bits"])
    _refuse_unwritten(written, no_save=no_save, has_timeline=trace is not False or report)
    if not no_save:  # before a simulation of several minutes
        out = RUNS / folder_of(plan) if out is None else out
        check_writable(out, None if force else digest_of(plan))
    if report:
        altair()  # refuses before the work, not after it
    plan = _to_be_shown(plan, is_traced=not no_save and (trace is not False or report), report=report)
    limit_s = None if force else LONGEST_S
    how: dict[str, Any] = {"trace": trace is not False, "save_output": save_output or request.tensors is not None}
    how |= {"window": request.timeline, "report": report, "is_forced": force}
    doing = f"simulating {short_name(request.schedule)}"
    with late_progress(doing) as advance, said_late(AT_FIRST) as go_on:
        request = replace(plan.request, progress=in_percent(advance, go_on, doing), limit_s=limit_s)
        result = run_plan(replace(plan, request=request))
        folder = None if no_save else save_run(result, out, **how)
    _print(result, folder, plot, as_json=json, is_full=full, sensitive=sensitivity, like=like)


def _draw(result: "RunData", file: Path) -> None:
    """Write a picture of the parts of a run's time, or of its errors if it has no time."""
    from npusim.report.page_figures import figures_document
    from npusim.report.plot import picture
    from npusim.report.result_json import record_of
    from npusim.report.tables import run_figures
    from npusim.report.timeline import timeline_of

    figures = run_figures(record_of(result), figures_document(result, timeline_of(result)))
    write(file, picture(figures, file.suffix, f"{result.name} on {result.device.name}", ("time", "errors")))


def _refuse_unwritten(written: dict[str, Any], *, no_save: bool, has_timeline: bool) -> None:
    """Raise the error of an option for a file that is not written."""
    if no_save:
        refuse(written, "--no-save writes nothing; remove it, or remove these options")
    if not has_timeline:
        refuse({n: written[n] for n in ("--timeline", "--trace-groups")}, "--no-trace writes no timeline")


def _is_run_in_sequence(request: Request, options: dict[str, Any], *, as_json: bool) -> bool:
    """Run the launches of a file of several calls one after another, and list them; return whether it is such a file.

    ``options`` apply to a single run, and are refused.
    """
    if not is_recorded(request.schedule):
        return False
    from npusim.kernels.triton.calls import numbered

    if not (names := numbered(request.schedule)):
        return False
    from npusim.report.run_inputs import sequence_document, sequence_table
    from npusim.simulation.sequence import in_sequence

    refuse(options, f"launches in sequence print one table; name one launch, {names[0]}, or remove these options")
    with said_late(f"running {len(names)} launches of {request.schedule}, one after another"):
        runs = in_sequence(names, request)
    named = request.schedule, runs
    show_either(as_json, lambda: sequence_document(*named), lambda: sequence_table(*named))
    return True


def _to_be_shown(plan: "Plan", *, is_traced: bool, report: bool) -> "Plan":
    """Return the plan with the timeline, the diagnosis and the other presets that the output will show."""
    r, has_bits = plan.request, {"attention", "bits", "device"} <= plan.features
    is_ours = not plan.schedule.origin  # presets of a user's schedule are shown on request
    shown = replace(
        r,
        trace_groups=r.trace_groups if is_traced else (),
        diagnose=r.diagnose or (report and has_bits),
        presets=(has_bits and is_ours and bool(plan.schedule.beside)) if r.presets is None else r.presets,
    )
    return replace(plan, request=shown)


def _show_fields(name: str, schedule: "Schedule", device: "DeviceSpec", *, as_json: bool) -> None:
    """Print tiling fields and precision presets of a schedule on a device's cores."""
    from npusim.config.tiling import tiling_fields
    from npusim.report.run_inputs import field_columns, fields_table
    from npusim.simulation.chosen_tile import open_fields

    fields = tiling_fields(schedule.tiling)
    chosen = open_fields(schedule, device)
    show_either(
        as_json,
        lambda: document(
            "fields",
            schedule=name,
            family=schedule.family,
            tiling=field_columns(chosen).records(fields),
            precisions={n: p.formats() for n, p in schedule.precisions.items()},
            default_precision=schedule.default_precision,
        ),
        lambda: fields_table(name, schedule, fields, chosen),
    )


def _print(
    result: "RunData",
    folder: Path | None,
    plot: Path | None,
    *,
    as_json: bool,
    is_full: bool,
    sensitive: bool,
    like: Path | None,
) -> None:
    from npusim.report.advice import Trial
    from npusim.report.result_json import record_of
    from npusim.report.tables import run_table

    record, added, tables = record_of(result), {}, []
    if result.schedule.endswith(".py"):
        say(f"npusim: {result.schedule} has one schedule, {result.program.name}")
    if sensitive:
        from npusim.report.findings import sensitivity_document, sensitivity_table
        from npusim.simulation.sensitivity import sensitivity

        moved = sensitivity(result)
        added, tables = {"sensitivity": sensitivity_document(moved)}, [*sensitivity_table(moved)]
    if like is not None:
        from npusim.report.findings import NEIGHBOURS
        from npusim.studies.validate.nearest import nearest

        cases = nearest(result, like)
        added, tables = {**added, "like": NEIGHBOURS.records(cases)}, [*tables, NEIGHBOURS.grid(cases)]
    show_either(
        as_json,
        lambda: {**record.to_document(), **added},
        lambda: (*run_table(record, Trial(result), is_full=is_full), *tables),
    )
    if folder is not None:
        files = " ".join(sorted(path.name for path in folder.iterdir()))
        say(f"wrote {folder}/  ({files})")
    if plot is not None:
        _draw(result, plot)
