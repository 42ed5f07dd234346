"""The runs of a comparison: results, stored runs by their names, and schedules, which are run first."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from npusim.errors import SpecError
from npusim.kernels.triton import is_launch
from npusim.report import comparison
from npusim.report.output import kept_run
from npusim.report.result_json import RunRecord, load_result
from npusim.simulation.request import BitsOptions, Request, refuse, takes_options
from npusim.simulation.simulate import run_request

if TYPE_CHECKING:
    from npusim.report.comparison import Comparison
    from npusim.simulation.run_result import RunData

    #: A run to compare: a result, its name, its file, or a schedule.
    Compared = RunData | RunRecord | str | Path

#: The part of a kernel's launch that follows its name.
_LAUNCH = re.compile(r"\[.*\)", re.DOTALL)
#: Endings of names that are files, whether or not they exist.
_FILES = (".json", ".csv", ".yaml")


@takes_options(BitsOptions)
def compare(*runs: Compared, **options: Unpack[BitsOptions]) -> Comparison:
    """Compare two or more runs with the first: why the latencies differ, which inputs differ, how the bits differ.

    A run is a result of `npusim.run`, its folder or ``result.json`` (``"@1"``: the last folder in ``runs``), the
    ``PipeUtilization.csv`` of a vendor's profiler, or the name of a schedule.  Schedules are run with ``options``,
    which are those of `npusim.run`; ``npusim compare`` on the command line gives the same result.  For options that
    only one of the runs has, pass the result of `npusim.run`.

    Raises `SpecError` if there are fewer than two runs, if a word names neither a stored run nor a schedule, if a file
    is none of these, or for options if no run is a schedule.

    Examples
    --------
    >>> import npusim
    >>> comparison = npusim.compare("flash", "pasa", seq=256, numerics=False)
    >>> comparison.labels
    ('flash', 'pasa')
    """
    base = Request("", **options)
    return comparison.compare(*compared_runs(runs, lambda word: replace(base, schedule=word), base.changed()))


def compared_runs(
    runs: Sequence[Compared],
    requested: Callable[[str], Request],
    options: Mapping[str, object],
    watched: Callable[[str], AbstractContextManager[Callable[[float], None] | None]] = lambda _: nullcontext(),
) -> list[RunData | RunRecord | Path]:
    """Return runs as results or paths; a word that names no stored run is a schedule, which is run as
    ``requested(word)``.

    ``options`` are the options of the call; at least one run must use each.  ``watched(word)`` yields the function that
    receives a run's progress.  All stored runs are read before any schedule is run.

    Raises `SpecError` for fewer than two runs, for a word that names nothing, and for options that no run reads.
    """
    if len(runs) < 2:
        raise SpecError(f"compare {' '.join(map(_name, runs))}: compare needs two runs or more")
    sources = [(stored_run(run) or requested(run)) if isinstance(run, str) else run for run in runs]
    if not any(isinstance(source, Request) for source in sources):
        refuse(options, "npusim does not run stored runs again; remove these options")
    for run, source in zip(runs, sources, strict=True):
        if isinstance(source, Path) and source.suffix != ".csv":
            load_result(source)
        elif isinstance(source, Request):
            try:
                source.find_schedule()
            except SpecError as error:
                raise SpecError(
                    f"{run}: there is no run folder or result of that name, and it is not a schedule: {error}"
                ) from None
    short = [_LAUNCH.sub("", _name(run)) for run in runs]
    names = short if len(set(short)) == len(runs) else [_name(run) for run in runs]
    results: list[RunData | RunRecord | Path] = []
    for name, source in zip(names, sources, strict=True):
        if isinstance(source, Request):
            with watched(name) as progress:
                run_of = replace(source, trace_groups=(), presets=False, progress=progress)
                results.append(replace(run_request(run_of), name=name))
        else:
            results.append(source)
    return results


def stored_run(word: str) -> Path | None:
    """Return the file or folder that a word names (``@1``: the last run), or None if it names a schedule."""
    if is_launch(word) or word.endswith(".py"):
        return None
    return kept_run(word) or (Path(word) if _is_file(word) else None)


def _is_file(word: str) -> bool:
    """Return whether a word is a file or folder, rather than a schedule with its options."""
    if Path(word).exists():
        return True
    first, *options = word.split() or [""]
    if not options and word.endswith(_FILES):
        return True
    return ("/" in first or "\\" in first) and ":" not in first


def _name(run: Compared) -> str:
    return str(run) if isinstance(run, str | Path) else run.name
