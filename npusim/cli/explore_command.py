"""``npusim explore``: the fastest point of a space, and the proof."""

import json as json_text
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from npusim.cli import completion
from npusim.cli import options as o
from npusim.cli.console import late_progress, say, show_either, write
from npusim.cli.help import Verbs
from npusim.errors import TilingError
from npusim.kernels.triton import launch_parts
from npusim.simulation.request import Request, TensorOptions, short_name
from npusim.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from npusim.studies.explore.exploration import Exploration
    from npusim.studies.explore.search import Options, Progress
    from npusim.studies.explore.space import SearchSpec
    from npusim.studies.explore.store import PointOutcome

app = Verbs()

_HOW, _OUT = "How", "Output"
#: A search that is expected to take at least this number of seconds states its duration.
LONG_S = 2.0
Fields = Annotated[
    list[str] | None,
    o.option(
        "--field -f AXIS=VALUES",
        "Values to try: block_kv=128,256 or a range 128:1024:128; also precision=..., seq=2k,4k, workload=..., "
        "batch=..., or a key of the device; repeat for a grid.",
        panel=_HOW,
        autocompletion=completion.axes,
    ),
]
Precisions = Annotated[
    str | None,
    o.option(
        "--precisions NAME,...", "Presets to try: -f precision=...; all: all presets of each schedule.", panel=_HOW
    ),
]
Studies = Annotated[
    bool, o.option("--studies", "With --auto, also rank studies, which model no real kernel.", panel=_HOW)
]
Auto = Annotated[bool, o.option("--auto", "Search the space that the schedules declare.", panel=_HOW)]
Jobs = Annotated[int | None, o.option("--jobs -j N", "Number of processes.", shown="all CPUs", min=1)]
Exhaustive = Annotated[bool, o.option("--exhaustive", "Simulate every point; prune none.", panel=_HOW)]
CheckAll = Annotated[bool, o.option("--check-all", "Check all pruned points for races, not only some.", panel=_HOW)]
Pareto = Annotated[bool, o.option("--pareto", "Rank time against error; computes the bits of each point.", panel=_HOW)]
MaxRmse = Annotated[
    float | None, o.option("--max-rmse R", "Reject points whose relative RMSE is larger: 1e-3.", panel=_HOW)
]
Finite = Annotated[bool, o.option("--finite", "Reject points whose outputs have NaN or Inf.", panel=_HOW)]
Out = Annotated[
    Path | None,
    o.option(
        "--out -o FILE",
        "File of results (.sqlite), or a table (.csv) with such a file next to it; each point is written immediately.",
        shown="in runs/, named after schedule, workload, keys, device and space",
    ),
]
Budget = Annotated[
    float | None,
    o.option(
        "--budget SECONDS",
        "Stop after this time; print the best point so far and the largest possible gain of the remaining ones.",
    ),
]
Resume = Annotated[bool, o.option("--resume", "Continue an interrupted search from its file of results.")]
Best = Annotated[Path | None, o.option("--best FILE", "Write the best point as JSON.")]
Top = Annotated[int, o.option("--top N", "Number of points in the table.", min=1)]


@app.verb(
    "explore",
    ("npusim explore flash --field block_kv=128,256,512", "three tiles"),
    ("npusim explore flash -f block_q=64,128 -f block_kv=128:1024:128 -j2", "a grid"),
    ("npusim explore pasa,flash --pareto --auto", "declared spaces, latency against error"),
    ("npusim explore flash -f depth=1,2,3 -C group_count=20,24,32", "the gain of other hardware"),
    ("npusim explore volta_flash -f acc_qk=float16,float32 -f block_kv=32,64", "a format, too"),
    first="--field --auto --pareto --budget --jobs --workload --seq --hw --json",
)
@o.takes(TensorOptions, own_first=True)
def explore(
    request: Request,
    *,
    fields: Fields = None,
    precisions: Precisions = None,
    auto: Auto = False,
    pareto: Pareto = False,
    max_rmse: MaxRmse = None,
    finite: Finite = False,
    exhaustive: Exhaustive = False,
    check_all: CheckAll = False,
    studies: Studies = False,
    jobs: Jobs = None,
    cluster: o.Cluster = None,
    out: Out = None,
    resume: Resume = False,
    budget: Budget = None,
    best: Best = None,
    top: Top = 10,
    plot: o.Plot = None,
    json: o.Json = False,
) -> None:
    """Search schedules' tilings, precisions and hardware for the fastest point.

    Points that cannot win are pruned with proof; points that do not fit are listed with the reason. After Ctrl-C or
    --budget, npusim shows the finished points and bounds the others; --resume continues.
    """
    from npusim.report.search_tables import about_of, exploration_document, exploration_table
    from npusim.studies.explore.search import Options
    from npusim.studies.explore.space import SearchRequest

    fields = [*(fields or ()), *([f"precision={precisions}"] if precisions else ())]
    given, fixed = _given({key: str(value) for key, value in (request.overrides or {}).items()}, fields)
    schedules = _names(request.schedule)
    asked = SearchRequest(replace(request, schedule=schedules[0], overrides=fixed or None), schedules)
    axes, notes = asked.auto_space(given) if auto else (given, ())
    schedules = tuple(map(str, axes.get("schedule", schedules)))
    name, spec = ", ".join(map(short_name, schedules)), asked.spec(axes, studies=studies or not auto)
    options = Options(
        jobs=jobs or os.cpu_count() or 1,
        cluster=cluster,
        resume=resume,
        budget_s=budget,
        exhaustive=exhaustive,
        check_all=check_all,
        pareto=pareto,
        max_rmse=max_rmse,
        finite=finite,
        notes=notes,
    )
    path = out or _default_out(spec, schedules, options)
    options = replace(options, store=path)
    done, last, exploration = _searched(name, spec, options)
    show_either(
        json,
        lambda: exploration_document(name, done, exploration, last),
        lambda: exploration_table(name, done, exploration, last, about_of(path), top=top, is_pareto=pareto),
    )
    if done:
        say(f"wrote {path}")
        _draw(name, done, path, plot)
    _end(exploration, path, best)


def _draw(name: str, done: "Sequence[PointOutcome]", path: Path, file: Path | None) -> None:
    """Write a picture of a search, if a file is named: a map of two axes, or the ranking."""
    if file is not None:
        from npusim.report.plot import picture
        from npusim.report.search_tables import about_of, exploration_part

        part = exploration_part(name, [outcome.row() for outcome in done], about_of(path))
        write(file, picture(part.figures, file.suffix, part.title, ("map", "ranking")))


def _end(exploration: "Exploration | None", path: Path, best: Path | None) -> None:
    """Write the best point; raise `TilingError` if a finished search has no point with a time."""
    if exploration is None:
        raise KeyboardInterrupt
    if exploration.best is not None:
        if best is not None:
            write(best, f"{json_text.dumps(exploration.tiling(exploration.best), indent=1, default=str)}\n")
        return
    if exploration.undecided:
        say("npusim: no point has a time yet; --resume continues the search")
        return
    closest = exploration.closest_misfit()
    hint = f". The closest: {closest}" if closest else ""
    raise TilingError(f"{exploration.why_none()}; {path} has the reasons{hint}")


def _searched(
    name: str, spec: "SearchSpec", options: "Options"
) -> "tuple[list[PointOutcome], Progress, Exploration | None]":
    """Return the outcomes in order, the progress of the search, and the search; None for an interrupted search."""
    from npusim.studies.explore.exploration import search
    from npusim.studies.explore.search import Progress, Size

    done: list[PointOutcome] = []
    last, exploration, is_long = Progress("", 0, 0), None, False

    def on_size(size: Size) -> None:
        nonlocal last, is_long
        last, is_long = Progress("start", 0, size.points), size.seconds >= LONG_S
        if is_long:
            end = "" if options.budget_s is not None else "; --budget S ends earlier, Ctrl-C at any time"
            long = f"{size.seconds:.0f} s" if size.seconds < 100 else f"{size.seconds / 60:.0f} min"
            families = "family" if size.families == 1 else "families"
            words = f"{size.points:,} {plural(size.points, 'point')} in {size.families:,} {families}, about {long}"
            say(f"{name}: {words} with {options.jobs} {plural(options.jobs, 'process')}{end}")

    with late_progress(f"exploring {name}") as advance:

        def on_progress(now: Progress) -> None:
            nonlocal last
            last = now
            best = "" if now.best_us is None else f", best {now.best_us:,.2f} us"
            least = "" if now.remaining_us is None else f", none left below {now.remaining_us:,.2f}"
            note = f"{now.stage}{best}{least}" if is_long else ""
            advance(now.decided, now.points, note, now.remaining_s)

        watched = replace(options, on_outcome=lambda o, _: done.append(o), on_size=on_size, on_progress=on_progress)
        with suppress(KeyboardInterrupt):  # finished points are shown first
            exploration = search(spec, watched)
    return sorted(done, key=lambda outcome: outcome.index), last, exploration


def _names(schedules: str) -> tuple[str, ...]:
    """Return the schedules of ``a,b``; the launch of a kernel contains commas."""
    names = [schedules] if "(" in launch_parts(schedules)[1] else schedules.split(",")
    return tuple(name.strip() for name in names if name.strip()) or (schedules,)


def _given(overrides: "Mapping[str, str]", fields: "Iterable[str]") -> "tuple[dict[str, Any], dict[str, str]]":
    """Return the axes of lists in ``-C`` and of ``-f``, and the numbers of the device that are fixed."""
    from npusim.studies.explore.space import parse_field

    given: dict[str, Any] = {}
    lists = [f"{key}={value}" for key, value in overrides.items() if "," in value]
    for axis, values in map(parse_field, [*lists, *fields]):
        if axis in given:
            raise TilingError(f"--field {axis}: occurs twice; write all values in one list")
        given[axis] = values
    return given, {key: value for key, value in overrides.items() if "," not in value}


def _default_out(spec: "SearchSpec", schedules: "Iterable[str]", options: "Options") -> Path:
    """Return the path of a search's table, whose name differs for other searches and other options."""
    request = spec.asked
    load = request.load()
    inputs = f"{load.name}-{request.seq_kv or request.seq or load.seq_kv or load.seq}"
    if request.problem is not None:
        sizes = request.problem.model_dump(exclude_defaults=True).items()
        inputs = "".join(f"{n}{size}" for n, size in sizes if isinstance(size, int))
    if isinstance(request.tensors, str | Path):
        inputs = Path(request.tensors).stem
    names = (name.partition("[")[0] for name in schedules)
    schedule = "-".join(Path(name.rpartition(":")[2] or name).name for name in names)
    how = "-exhaustive" * options.exhaustive + "-bits" * options.needs_bits
    parts = f"explore-{schedule}-{inputs}-{spec.device.name}-{spec.digest()[:6]}{how}.csv"
    return Path("runs") / "_".join(parts.split())
