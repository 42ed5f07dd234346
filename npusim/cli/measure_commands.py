"""``npusim import``, ``calibrate`` and ``export``: import of measurements, export of predictions in other tools'
forms.
"""

import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import typer

from npusim.cli import options as o
from npusim.cli.console import progress, say, show_either, show_json, write
from npusim.cli.help import Verbs
from npusim.errors import SpecError
from npusim.report.text import document
from npusim.simulation.request import refuse

app = Verbs()
export = Verbs(name="export", no_args_is_help=True, help="Predictions in the forms that other tools read.")

#: Number of shapes without a row that are listed.
_SHOWN = 5


@app.verb(
    "import",
    ("npusim import --template > mapping.yaml", "a first version of the file that maps kernels to schedules"),
    ("npusim import msprof PROF_DIR --map mapping.yaml -o measured.yaml", "op_summary*.csv"),
    ("npusim import msopprof OPPROF_DIR --map mapping.yaml", "OpBasicInfo.csv, PipeUtilization.csv"),
    ("npusim import ncu profile.csv --map mapping.yaml", "ncu --csv --page raw, or details"),
    ("npusim import torch trace.json --map mapping.yaml", "torch.profiler's export_chrome_trace"),
)
def import_profile(
    profiler: Annotated[
        Literal["msprof", "msopprof", "ncu", "torch"] | None, o.argument("PROFILER", "msprof, msopprof, ncu or torch.")
    ] = None,
    path: Annotated[Path | None, o.argument("PATH", "Folder or file of the profile.")] = None,
    *,
    mapping: Annotated[
        Path | None, o.option("--map FILE", "Mapping of kernels to schedules (.yaml).", shown=False)
    ] = None,
    out: Annotated[Path, o.option("--out -o FILE", "File of measurements for npusim validate.")] = Path(
        "measured.yaml"
    ),
    template: Annotated[bool, o.option("--template", "Print a commented mapping file to start from.")] = False,
    json: o.Json = False,
) -> None:
    """Write a profiler's kernel times as measurements for npusim validate and calibrate.

    Equal launches become one case of their median. Kernels that no rule of the mapping file matches are counted and
    named. Without --map, the kernels of the profile are listed.
    """
    if template:
        refuse(
            {"PROFILER": profiler, "PATH": path, "--map": mapping, "--json": json or None},
            "--template prints a file; remove these options",
        )
        typer.echo((files("npusim.cli") / "new_mapping.yaml").read_text(encoding="utf-8"), nl=False)
        return
    if profiler is None or path is None:
        raise SpecError("name the profile: npusim import msprof PROF_DIR --map mapping.yaml")
    from npusim.report.output import check_file_writable
    from npusim.studies.validate.profiles import import_profile as read
    from npusim.studies.validate.profiles import listed

    check_file_writable(out)
    profile = read(profiler, path, mapping, str(out))
    write(out, profile.text, f": {profile.cases} cases of {profile.mapped} launches")
    if missed := profile.unmapped:
        say(f"unmapped: {listed(missed)}")
    if json:
        counts = {"cases": profile.cases, "mapped": profile.mapped}
        show_json(
            document(
                "import", file=str(out), **counts, unmapped=sorted({name for launch in missed for name in launch.names})
            )
        )


@app.verb(
    "calibrate",
    ("npusim calibrate measured.yaml -o mine.yaml", "then: npusim run flash --hw mine.yaml"),
    ("npusim calibrate measured.yaml --hw h200", "show the changes to the H200's file, without writing them"),
    (
        "npusim calibrate measured.yaml --fit '*.gap_cycles,links.*' --html page.html",
        ("only these constants; also write a page"),
    ),
    first="--hw --out --fit --html --json",
)
def calibrate(
    file: Annotated[Path, o.argument("FILE", "Timings (.yaml), in the format of npusim validate.")],
    *,
    hw: Annotated[
        str | None, o.option("--hw DEVICE", "Device whose constants are fitted.", shown="that of the cases")
    ] = None,
    only: Annotated[str | None, o.option("--only GLOB", "Cases by name, schedule or device.")] = None,
    fit: Annotated[
        str,
        o.option(
            "--fit KEY,...",
            "Patterns of the constants to fit; a full key may also be that of a measured constant.",
            shown="all uncertain constants",
        ),
    ] = "*",
    method: Annotated[str, o.request_option("method")] = "auto",
    out: Annotated[
        Path | None, o.option("--out -o FILE", "Device file to write, which extends the device's file.", shown=False)
    ] = None,
    html: Annotated[
        Path | None, o.option("--html FILE", "Also write a page. Needs npusim[report].", shown=False)
    ] = None,
    json: o.Json = False,
) -> None:
    """Fit a device's uncertain constants (assumed, derived, fitted; never the vendor's) to measured times.

    Few constants are fitted: those that reduce the errors of left-out cases, group by group, and that the measurements
    can distinguish. If these errors do not become smaller, nothing is written and the exit code is 1. Needs
    npusim[calibrate].
    """
    from npusim.config.packaged import list_packaged, resolve
    from npusim.report.charts import altair
    from npusim.report.findings import calibration_document, calibration_part, calibration_table
    from npusim.report.output import check_file_writable
    from npusim.report.page import page_html
    from npusim.studies.validate.calibrate import calibrate as fit_constants

    if out is not None:
        check_file_writable(out)
        if out.suffix not in (".yaml", ".yml"):
            raise SpecError(f"--out {out}: a device file ends in .yaml")
    if html is not None:
        altair()  # refuses before the work, not after it
        check_file_writable(html)
    with progress("fitting") as advance:
        done = fit_constants(file, hw, only=only, constants=o.names(fit, "--fit"), method=method, progress=advance)
    show_either(json, lambda: calibration_document(done), lambda: calibration_table(done))
    if html is not None:
        write(html, page_html(f"constants of {done.device} · npusim", [calibration_part(done)]))
    done.check()
    if out is not None:
        beside = resolve("device or node", done.device, beside=file.parent if "." in done.device else None)
        is_packaged = done.device in list_packaged("hwconfigs")
        extends = done.device if is_packaged else os.path.relpath(beside.resolve(), out.resolve().parent)
        write(out, done.device_text(extends, out.stem.replace("-", "_")))
    if not done.is_whole:
        raise KeyboardInterrupt


@export.callback()
def root() -> None:
    """Write predictions in the forms of other tools."""


@export.verb(
    "rows",
    ("npusim export rows a.csv --schedule gemm --hw h200 -g m=16 -g n=4k -g k=4k", "AIConfigurator's columns"),
    ("npusim export rows a.csv -g heads=32 -g seq_q=1k,4k -g head_dim=128", "attention, causal"),
    ("npusim export rows a.csv -g heads=32 -g seq_q=1k,4k -g head_dim=128 --plot a.svg", "and latency by length"),
    ("npusim export rows a.csv --form msmodeling -g heads=8 -g seq_q=1k -g head_dim=64", "msModeling's"),
    first="--schedule --hw --grid --form",
)
def export_rows(
    file: Annotated[Path, o.argument("FILE", "Table to write (.csv).")],
    *,
    schedule: Annotated[str, o.option("--schedule NAME", "Schedule whose latencies are written.")] = "flash",
    hw: Annotated[str, o.request_option("hw")] = "ascend_910b2",
    grid: Annotated[
        list[str], o.option("--grid -g SIZE=VALUES", "Values of a size; each combination is a row of the table.")
    ] = [],  # noqa: B006
    form: Annotated[
        Literal["aiconfigurator", "msmodeling"], o.option("--form FORM", "Tool whose columns to write.")
    ] = "aiconfigurator",
    precision: Annotated[str | None, o.request_option("precision")] = None,
    dtype: Annotated[
        Literal["float16", "bfloat16"] | None, o.option("--dtype FORMAT", "Of inputs.", shown="float16")
    ] = None,
    force: Annotated[bool, o.option("--force", "Replace the file even if it is not a table of latencies.")] = False,
    plot: o.Plot = None,
    json: o.Json = False,
) -> None:
    """Write predicted latencies of a grid of shapes as a table that serving simulators read.

    The last column, band, is the expected error of nine in ten such times at each shape; empty if no such shape was
    measured.
    """
    from npusim.report.latency_rows import drawn_size, latencies_figure, latency_rows, refuse_other_table
    from npusim.report.output import check_file_writable
    from npusim.report.plot import picture

    check_file_writable(file)
    if not force:
        refuse_other_table(file)
    given = o.key_values(grid, "--grid")
    axes = {n: [o.count(f"--grid {n}")(value) for value in o.names(text, f"--grid {n}")] for n, text in given.items()}
    if plot is not None:
        drawn_size(axes)  # refuses before the work, not after it
    times: list[tuple[Mapping[str, int], float]] = []
    with progress("predicting") as advance:
        text, faults = latency_rows(
            schedule, axes, form, advance, lambda *time: times.append(time), hw=hw, precision=precision, dtype=dtype
        )
    write(file, text)
    if plot is not None:
        write(plot, picture([latencies_figure(schedule, hw, axes, times)], plot.suffix))
    for fault in (*faults[:_SHOWN], *([f"{len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else [])):
        say(f"no row: {fault}")
    if json:
        show_json(document("export", file=str(file), rows=text.count("\n") - 1, faults=list(faults)))
