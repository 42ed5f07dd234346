"""The runs of a comparison: results, stored runs by their names, and schedules, which are run first."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from npusim.errors import SpecError
from npusim.kernels.triton import is_launch
from npusim.report.output import kept_run
from npusim.report.result_json import RunRecord, load_result
from npusim.simulation.request import Request, refuse
from npusim.simulation.simulate import run_request

if TYPE_CHECKING:
    from npusim.simulation.run_result import RunData

    #: A run to compare: a result, or the name of one, a file, or a schedule.
    Compared = RunData | RunRecord | str | Path

#: The part of a launch of a kernel that is not its name.
_LAUNCH = re.compile(r"\[.*\)", re.DOTALL)
#: Endings of names that are files, whether or not they exist.
_FILES = (".json", ".csv", ".yaml")


def compared_runs(
    runs: Sequence[Compared],
    base: Request,
    requested: Callable[[str, Request], Request] | None = None,
    simulate: Callable[[str, Request], RunData] | None = None,
) -> list[RunData | RunRecord | Path]:
    """Return runs as results or paths; a word that names no stored run is a schedule and is run as ``base`` states.

    ``requested(word, base)`` is the request of a word (default: the word is the schedule's name),
    ``simulate(word, request)`` its result.  Everything is read before anything is run.

    Raises `SpecError` for fewer than two runs, for a word that names nothing, and for options of ``base`` where no
    run would read them.
    """
    if len(runs) < 2:
        raise SpecError(f"compare {' '.join(map(_name, runs))}: compare needs two runs or more")
    base = replace(base, trace_groups=(), presets=False)
    sources: list[RunData | RunRecord | Path | Request] = []
    for run in runs:
        if isinstance(run, str):
            sources.append(stored_run(run) or (requested or _named)(run, base))
        else:
            sources.append(run)
    if not any(isinstance(source, Request) for source in sources):
        unread = {name: value for name, value in base.changed().items() if name not in ("trace_groups", "presets")}
        refuse(unread, "stored runs are not run again; leave these options out")
    for run, source in zip(runs, sources, strict=True):
        _check(run, source)
    short = [_LAUNCH.sub("", _name(run)) for run in runs]
    names = short if len(set(short)) == len(runs) else [_name(run) for run in runs]
    return [
        replace((simulate or _simulated)(name, source), name=name) if isinstance(source, Request) else source
        for name, source in zip(names, sources, strict=True)
    ]


def stored_run(word: str) -> Path | None:
    """Return the file or folder that a word names (``@1``: the last run), or None where it names a schedule."""
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


def _check(run: Compared, source: RunData | RunRecord | Path | Request) -> None:
    """Read a file, and find a schedule; raise `SpecError` where there is none."""
    if isinstance(source, Path):
        if source.suffix != ".csv":
            load_result(source)
    elif isinstance(source, Request):
        try:
            source.find_schedule()
        except SpecError as error:
            raise SpecError(f"{run}: no run folder or result of that name, and as a schedule: {error}") from None


def _name(run: Compared) -> str:
    return str(run) if isinstance(run, str | Path) else run.name


def _named(word: str, base: Request) -> Request:
    return replace(base, schedule=word)


def _simulated(_word: str, request: Request) -> RunData:
    return run_request(request)
