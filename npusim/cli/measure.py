"""``npusim import``: what was measured on hardware becomes what predictions are held against."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import typer

from npusim.cli import options as o
from npusim.cli.console import say, write
from npusim.cli.help import Verbs
from npusim.errors import SpecError
from npusim.simulation.request import refuse

app = Verbs()

#: Kernels without a rule that are named.
_SHOWN = 5


@app.verb(
    "import",
    ("npusim import --template > mapping.yaml", "which kernel is which schedule: a file to begin with"),
    ("npusim import msprof PROF_DIR --map mapping.yaml -o measured.yaml", "op_summary*.csv"),
    ("npusim import msopprof OPPROF_DIR --map mapping.yaml", "OpBasicInfo.csv, PipeUtilization.csv"),
    ("npusim import ncu profile.csv --map mapping.yaml", "ncu --csv --page raw, or details"),
    ("npusim import torch trace.json --map mapping.yaml", "torch.profiler's export_chrome_trace"),
)
def import_profile(
    profiler: Annotated[
        Literal["msprof", "msopprof", "ncu", "torch"] | None, o.argument("PROFILER", "msprof, msopprof, ncu or torch.")
    ] = None,
    path: Annotated[Path | None, o.argument("PATH", "Its folder, or file.")] = None,
    *,
    mapping: Annotated[
        Path | None, o.option("--map FILE", "Which kernels are which schedules (.yaml).", shown=False)
    ] = None,
    out: Annotated[Path, o.option("--out -o FILE", "File of measurements for npusim validate.")] = Path(
        "measured.yaml"
    ),
    template: Annotated[bool, o.option("--template", "Print a commented mapping file to begin with.")] = False,
) -> None:
    """Write a profiler's kernel times as measurements, which npusim validate and calibrate take.

    Launches that are alike become one case of their median. Those of kernels that no rule of the mapping file matches
    are counted and named, none is lost in silence. Without --map, the kernels are named.
    """
    if template:
        refuse({"PROFILER": profiler, "PATH": path, "--map": mapping}, "--template prints a file; leave these out")
        typer.echo((files("npusim.cli") / "new_mapping.yaml").read_text(encoding="utf-8"), nl=False)
        return
    if profiler is None or path is None:
        raise SpecError("of which profile? For example: npusim import msprof PROF_DIR --map mapping.yaml")
    from npusim.report.output import check_file_writable
    from npusim.validate.profiles import import_profile as read

    check_file_writable(out)
    profile = read(profiler, path, mapping, str(out))
    write(out, profile.text, f": {profile.cases} cases of {profile.mapped} launches")
    if missed := profile.unmapped:
        names = ", ".join(f"{name} ({count})" for name, count in missed.most_common(_SHOWN))
        more = f", and {len(missed) - _SHOWN} more kernels" if len(missed) > _SHOWN else ""
        say(f"unmapped: {missed.total()} launches of {names}{more}")
