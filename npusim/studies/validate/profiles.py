"""Profiles of kernels, of four profilers, read as cases of measurements.

A profile states the kernels and their times; a mapping file (`npusim.config.cases.MappingFile`) states the schedule and
tile of a kernel, and the content of L2, which are never guessed.  Times are of the kind ``kernel``: a task's duration.

Sources: CANN documentation, "op_summary (Operator Details)"; torch_npu's profiler, "kernel_details.csv"; msprof op,
"OpBasicInfo" and "PipeUtilization"; Nsight Compute CLI documentation, ``--csv`` with ``--page raw`` or ``details``;
libkineto, ``CuptiActivity``, and ``torch.profiler`` with ``record_shapes``.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npusim.config.cases import MeasuredWorkload, load_mapping, measurements_text
from npusim.config.document import MOST_TABLE_BYTES, cell_number, read_csv, read_text
from npusim.errors import SpecError
from npusim.machines.tracks import MEASURED_PIPES, PROFILED_CORES, profiled_times
from npusim.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from npusim.config.cases import KernelRule, MappingFile

#: The profilers' columns of a quantity: first those of a pipe, then those of the cores.
_QUANTITIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **{name: profiled_times(name) for name in MEASURED_PIPES},
        "core_us": ("aicore_time(us)", *(f"{core}_time(us)" for core in PROFILED_CORES)),
    }
)
_FORMATS = MappingProxyType(
    {
        **dict.fromkeys(("FLOAT16", "DT_FLOAT16", "c10::Half"), "float16"),
        **dict.fromkeys(("BF16", "DT_BF16", "BFLOAT16", "c10::BFloat16"), "bfloat16"),
        **dict.fromkeys(("FLOAT", "DT_FLOAT", "float"), "float32"),
    }
)
#: Nsight Compute's units of time, and microseconds of their prefixes.
_UNIT = re.compile("([num]?)s(econd)?")
_PREFIXES = MappingProxyType({"n": 1e-3, "u": 1.0, "m": 1e3, "": 1e6})
_TASK = "Task Duration(us)"
#: Names of columns of ``op_summary`` in ``kernel_details.csv``, ``OpBasicInfo.csv`` and other versions of CANN.
_RENAMED = MappingProxyType(
    {"Name": "Op Name", "Type": "OP Type", "Op Type": "OP Type", "Duration(us)": _TASK, "Block Num": "Block Dim"}
)
_DURATION = ("gpu__time_duration.sum", "Duration")
#: Number of kernels that a message lists.
_SHOWN = 8
#: Largest number of seconds for one expression on one name.
MATCH_S = 2


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One launch: the kernel's name, times in us by quantity, shapes of its inputs, blocks of its grid."""

    names: tuple[str, ...]
    measured: Mapping[str, float]
    inputs: tuple[tuple[int, ...], ...] = ()
    dtype: str | None = None
    grid: tuple[int, ...] = ()


@dataclass(frozen=True)
class ImportedProfile:
    """A profile as a file of measurements: the file's text, its cases, the number of launches in them, and the kernels
    that no rule matches.
    """

    text: str
    cases: int
    mapped: int
    unmapped: Sequence[KernelLaunch]


def import_profile(kind: str, path: Path, mapping: Path | None, out: str = "measured.yaml") -> ImportedProfile:
    """Return a profile as measurements; equal launches are one case, with the median of their times.

    ``kind``: one of `PROFILERS`; ``path``: its folder or file; ``out``: the name of the resulting file in errors.

    Raises `SpecError` if a file cannot be read or lacks columns (the message names them), if a cell is not a number, if
    no rule matches a launch (the message names the kernels that take longest), or if a case is incomplete (``out:line
    key: ``).
    """
    launches = list(PROFILERS[kind](path))
    if not launches:
        raise SpecError(f"{path}: the file has no launch of a kernel")
    rules = load_mapping(mapping) if mapping is not None else None
    alike: dict[str, list[KernelLaunch]] = defaultdict(list)
    unmapped = []
    for launch in launches:
        case = None if rules is None else _case_of(launch, rules, mapping)
        if case is None:
            unmapped.append(launch)
        else:
            alike[json.dumps(case)].append(launch)
    if rules is None or not alike:
        raise SpecError(f"{path}: no rule matches any of its {listed(launches)}; {_HOW}")
    cases = [_measured(number, json.loads(text), of_case) for number, (text, of_case) in enumerate(alike.items())]
    text = measurements_text(out, f"{rules.source} ({kind}: {path.name})", cases)
    return ImportedProfile(text, len(cases), len(launches) - len(unmapped), unmapped)


_HOW = "npusim import --template prints a mapping file to begin with, for --map"


def listed(launches: Sequence[KernelLaunch]) -> str:
    """Return, by name, the kernels that take longest in total, with their times, and the number of others."""
    total: Counter[str] = Counter()
    for launch in launches:
        total[launch.names[0]] += launch.measured["latency_us"]  # type: ignore[assignment]  # times add up as counts do
    left = len(total) - _SHOWN
    more = f", and {left} more {plural(left, 'kernel')}" if left > 0 else ""
    kernels = ", ".join(f"{n} ({us:.4g} us)" for n, us in total.most_common(_SHOWN))
    return f"{len(launches)} {plural(len(launches), 'launch')} of {kernels}{more}"


def _matched(pattern: str, name: str, where: str) -> re.Match[str] | None:
    """Return where an expression matches a name; `SpecError` after `MATCH_S` of CPU, in a main thread with a timer."""

    def interrupt(*_: object) -> None:
        raise SpecError(
            f"{where}.kernel: {pattern} needs more than {MATCH_S} s on {name[:80]!r}; do not nest repetitions"
        )

    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return re.search(pattern, name)
    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, MATCH_S)
        return re.search(pattern, name)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _case_of(launch: KernelLaunch, rules: MappingFile, file: Path | None) -> dict[str, Any] | None:
    """Return the case of the first rule that matches a launch, without its measured values; None if no rule matches."""
    tried = ((n, r, name) for n, r in enumerate(rules.kernels) for name in launch.names)
    matches = ((n, r, m) for n, r, name in tried if (m := _matched(r.kernel, name, f"{file}: kernels.{n}")))
    number, rule, match = next(matches, (0, None, None))
    if rule is None or match is None:
        return None
    where = f"{file}: kernels.{number}"
    sizes = _sizes(launch, rule, where)
    captured = {n: int(v) if v.isdigit() else v for n, v in match.groupdict().items() if v is not None}
    tiling = {n: v for n, v in captured.items() if n not in MeasuredWorkload.model_fields}
    sizes |= {n: v for n, v in captured.items() if n not in tiling}
    for name, value in rule.workload.items():
        if sizes.setdefault(name, value) != value:
            raise SpecError(f"{where}.workload.{name}: {value}, but {launch.names[0]} was launched with {sizes[name]}")
    if launch.dtype and not {"name", "bytes"} & set(sizes):
        sizes.setdefault("dtype", launch.dtype)
    if (device := rule.device or rules.hw) is None:
        raise SpecError(f"{where}: hw: missing; name the device here, or once for all rules")
    stated = rule.model_dump(include={"precision", "attention", "group", "unnamed"}, exclude_none=True)
    fields = {**(rule.tiling or {}), **tiling}
    case = {"device": device, "schedule": rule.schedule, **stated, "workload": sizes}
    return {**case, **({"tiling": fields} if fields else {}), "timing": "kernel", "l2": rule.start or rules.l2}


def _sizes(launch: KernelLaunch, rule: KernelRule, where: str) -> dict[str, object]:
    """Return sizes by name from the shapes of inputs and the grid; the same name always means the same size."""
    shapes = [(f"inputs.{n}", axes, launch.inputs[n : n + 1]) for n, axes in enumerate(rule.inputs)]
    shapes += [("grid", rule.grid, (launch.grid,))] if rule.grid else []
    sizes: dict[str, object] = {}
    for key, axes, shape in shapes:
        names = axes.split()
        if not shape or len(shape[0]) != len(names):
            known = f"has the shape {list(shape[0])}" if shape and shape[0] else "has none in this profile"
            raise SpecError(f"{where}.{key}: {axes}: {len(names)} axes, but {launch.names[0]} {known}")
        for name, size in zip(names, shape[0], strict=True):
            if name != "_" and sizes.setdefault(name, size) != size:
                raise SpecError(f"{where}.{key}: {name} is {size} here and {sizes[name]} before it")
    return sizes


def _measured(number: int, case: dict[str, Any], launches: Sequence[KernelLaunch]) -> dict[str, object]:
    """Return a case with the medians of its launches' times, and the largest distance from the median."""
    times = [launch.measured["latency_us"] for launch in launches]
    middle = median(times)
    quantities = [name for name in launches[0].measured if all(name in one.measured for one in launches)]
    case["measured"] = {name: float(f"{median(one.measured[name] for one in launches):.6g}") for name in quantities}
    if len(launches) > 1:
        case |= {"launches": len(launches), "spread": min(0.99, round(max(abs(t / middle - 1) for t in times), 4))}
    word = re.sub(r"\W+", "_", launches[0].names[-1]).strip("_")[:40]
    return {"name": f"{word}_{number}", **case}


# ---------------------------------------------------------------- one reader for each profiler


def _rows(path: Path, patterns: Sequence[str], *needed: str) -> Iterator[tuple[Path, str, dict[str, str]]]:
    """Yield file, place and cells of each row of a file, or of all files of a folder that match the first pattern."""
    by_pattern = (sorted(path.rglob(pattern)) for pattern in patterns)
    files = next(filter(None, by_pattern), []) if path.is_dir() else [path]
    if not files:
        raise SpecError(f"{path}: it contains no file {' or '.join(patterns)}")
    for file in files:
        for number, row in enumerate(read_csv(file, *needed, renamed=_RENAMED)[1]):
            yield file, f"{file}: row {number + 1}", row


def _quantities(rows: Iterable[tuple[Path, str, Mapping[str, str]]]) -> dict[str, float]:
    """Return the largest value of each quantity over rows; quantities of 0 are omitted."""
    largest: dict[str, float] = defaultdict(float)
    for _, where, row in rows:
        for name, columns in _QUANTITIES.items():
            largest[name] = max(largest[name], *(cell_number(row, c, where) or 0.0 for c in columns))
    return {name: value for name, value in largest.items() if value}


def _shapes(text: str, where: str) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of ``"2,4096;4096,128"``; an empty one is a scalar."""
    try:
        return tuple(tuple(int(n) for n in shape.split(",") if n) for shape in text.replace('"', "").split(";"))
    except ValueError:
        raise SpecError(f"{where}: Input Shapes: {text!r} is not a list of sizes such as 2,4096;4096,128") from None


def _cann(path: Path, patterns: Sequence[str] = ("op_summary*.csv", "kernel_details*.csv")) -> Iterator[KernelLaunch]:
    for file, where, row in _rows(path, patterns, "Op Name", "OP Type", _TASK):
        pipes = file.with_name(file.name.replace("OpBasicInfo", "PipeUtilization"))
        beside = _rows(pipes, (), "block_id") if pipes != file and pipes.is_file() else [(file, where, row)]
        if task := cell_number(row, _TASK, where):
            dtype = _FORMATS.get(row.get("Input Data Types", "").strip('"').partition(";")[0])
            shapes = _shapes(row.get("Input Shapes", "").replace("N/A", ""), where)
            blocks = cell_number(row, "Block Dim", where)
            measured = {"latency_us": task, **_quantities(beside)}
            names = row["Op Name"], row["OP Type"]
            yield KernelLaunch(names, measured, shapes, dtype, () if blocks is None else (int(blocks),))


def _decimal_mark(texts: Iterable[str], path: Path) -> str:
    """Return the decimal mark that follows from numbers with only one possible reading; empty if there are none.

    Nsight Compute writes numbers by the locale: 151,360 or 151.360.
    """
    marks = set()
    for mark, other in (".,", ",."):
        grouped = rf"\d{{1,3}}(\{other}\d{{3}})"
        sure = rf"{grouped}+\{mark}\d+|{grouped}{{2,}}|(0|\d{{4,}})\{mark}\d+|\d+\{mark}(\d{{1,2}}|\d{{4,}})"
        marks |= {mark for text in texts if re.fullmatch(sure, text)}
    if len(marks) > 1:
        raise SpecError(f"{path}: some fractions have points and others commas: {_LOCALE}")
    return marks.pop() if marks else ""


_LOCALE = "export it again with LC_ALL=C"


def _ncu(path: Path) -> Iterator[KernelLaunch]:
    columns, listed = read_csv(path, "ID", "Kernel Name", start="ID")
    if "Metric Name" in columns:  # in this form, each row has one metric
        rows: dict[str, dict[str, str]] = defaultdict(dict)
        units: dict[str, str] = {}
        for row in listed:
            rows[row["ID"]] |= {**row, row["Metric Name"]: row["Metric Value"]}
            units[row["Metric Name"]] = row["Metric Unit"]
        launches = list(rows.values())
    else:  # in this form, each column has one metric, and the first row has the units
        units, *launches = listed or [{}]
    name = next((n for n in _DURATION if n in units), None)
    if name is None or (unit := _UNIT.fullmatch(units[name])) is None:
        reason = (
            f"{name} is in {units[name]!r}, which is not a unit of time"
            if name
            else (f"there is no metric {' or '.join(_DURATION)}")
        )
        raise SpecError(f"{path}: {reason}; ncu --csv --page raw --metrics {_DURATION[0]},...")
    cells = [row[c] for row in launches for c, u in units.items() if u and c in row]
    mark = _decimal_mark(cells, path)
    for row in launches:
        if not mark and re.fullmatch(r"\d{1,3}[.,]\d{3}", row[name]):
            raise SpecError(
                f"{path}: {name}: {row[name]!r} {units[name]}: does the separator mark thousands or a fraction? "
                f"{_LOCALE}"
            )
        if mark == ",":
            row[name] = row[name].translate(str.maketrans(".,", ",."))
        grid = tuple(map(int, re.findall(r"\d+", row.get("Grid Size", ""))))
        if duration := cell_number(row, name, f"{path}: ID {row['ID']}"):
            yield KernelLaunch((row["Kernel Name"],), {"latency_us": duration * _PREFIXES[unit[1]]}, grid=grid)


def _torch(path: Path) -> Iterator[KernelLaunch]:
    if path.is_dir() or path.suffix == ".csv":
        yield from _cann(path, ("kernel_details*.csv",))  # torch_npu's
        return
    try:
        content = json.loads(read_text(path, MOST_TABLE_BYTES))
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: cannot be read as JSON: {error}") from None
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise SpecError(f"{path}: no traceEvents; torch.profiler's export_chrome_trace writes them")
    complete = [(e, e.get("args") or {}) for e in events if isinstance(e, dict) and e.get("ph") == "X"]
    operators = {
        args["External id"]: args for e, args in complete if e.get("cat") == "cpu_op" and "External id" in args
    }
    for event, args in complete:
        if event.get("cat") == "kernel":
            operator = operators.get(args.get("External id"), {})
            shapes = tuple(tuple(s) for s in operator.get("Input Dims", ()) if all(isinstance(n, int) for n in s))
            dtype = _FORMATS.get(next(iter(operator.get("Input type", ())), ""))
            time = {"latency_us": cell_number(event, "dur", f"{path}: {event.get('name')}") or 0.0}
            yield KernelLaunch((str(event.get("name")),), time, shapes, dtype, tuple(args.get("grid", ())))


#: Readers of a profile's launches, by the profiler's name on the command line.
PROFILERS: Mapping[str, Callable[[Path], Iterator[KernelLaunch]]] = MappingProxyType(
    {"msprof": _cann, "msopprof": partial(_cann, patterns=("OpBasicInfo*.csv",)), "ncu": _ncu, "torch": _torch}
)
