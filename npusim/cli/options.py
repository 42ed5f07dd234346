"""Options that several verbs share, and parsers of their values."""

import inspect
import math
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import typer

from npusim.cli import completion
from npusim.cli.console import terminal_width
from npusim.cli.help import Command, text_of
from npusim.errors import SpecError
from npusim.kernels.triton import is_launch
from npusim.late_methods import dataclass
from npusim.simulation.request import LAST, OPTIONS, Option, Request, RunOptions, names_and_metavar, whole_number
from npusim.units import ascii_digits

if TYPE_CHECKING:
    from npusim.config.problem import CopyProblem, GemmProblem, KernelProblem


def _devices() -> list[str]:
    from npusim.config.packaged import list_packaged

    return list_packaged("hwconfigs")  # nodes of several devices too


def _workloads() -> list[str]:
    from npusim.config.load import list_workloads

    return list_workloads()


def argument(metavar: str, text: str) -> Any:
    """Return a positional argument of a verb."""
    return typer.Argument(metavar=metavar, help=text, show_default=False)


def option(
    usage: str, text: str = "", *, panel: str | None = None, shown: str | bool | None = None, **more: Any
) -> Any:
    """Return an option of a verb; ``usage`` are its names and the placeholder of its value: ``--out -o DIR``.

    ``shown`` is the default in the help text. If it is None, the help text of a flag states no default, and that of any
    other option states the option's value.
    """
    names, metavar = names_and_metavar(usage)
    is_shown = bool(metavar) if shown is None else shown
    return typer.Option(
        *names, metavar=metavar or None, help=text or None, rich_help_panel=panel, show_default=is_shown, **more
    )


def count(option: str) -> Callable[[str], int]:
    """Return a reader of an option's integer: ``4096``, ``8k``."""
    return lambda text: text if isinstance(text, int) else whole_number(option, text)


def share(text: str, option: str) -> float:
    """Return ``1%`` or ``0.01`` as a share below 1; raise `SpecError` naming the option."""
    from npusim.config.model import percent_or_share

    try:
        value = float(ascii_digits(str(percent_or_share(text))))
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise SpecError(f"{option} {text}: write a share from 0 to less than 1: 0.01, or 1%")
    return value


def _schedules() -> list[str]:
    from npusim.kernels.declare.plugins import offered
    from npusim.library import SCHEDULES

    return sorted({*(name for name, _ in SCHEDULES), *offered()})


ScheduleName = Annotated[
    str | None,
    typer.Argument(
        metavar="SCHEDULE",
        help="Schedule, for example flash; default: list all schedules.",
        show_default=False,
        autocompletion=_schedules,
    ),
]
Json = Annotated[bool, option("--json", "Print JSON instead of a table.")]


def _checked_plot(file: Path | None) -> Path | None:
    """Return the file of a picture; raise if it could not be written, before the work."""
    if file is not None:
        from npusim.report.plot import check_plot

        check_plot(file)
    return file


Plot = Annotated[
    Path | None,
    option(
        "--plot FILE",
        "Write a chart of the result, .svg or .png. Needs npusim[report].",
        shown=False,
        callback=_checked_plot,
    ),
]
Cluster = Annotated[
    str | None,
    option(
        "--cluster ADDRESS",
        "Work on a cluster of Dask: tcp://HOST:8786, or local (--jobs processes). Needs npusim[cluster].",
        shown=False,
    ),
]
#: Placeholders of numbers in a help text.
_NUMBERS = ("TOKENS", "KEYS", "N")
_COMPLETIONS: Mapping[str, Callable[..., list[str]]] = MappingProxyType(
    {
        "hw": _devices,
        "workload": _workloads,
        "tiling": completion.tiling,
        "precision": completion.precisions,
        "overrides": completion.device_keys,
    }
)
Read = TypeVar("Read")
#: Options that may be given more than once.
_REPEATED = ("overrides", "scale", "tiling")


def request_option(name: str) -> Any:
    """Return a request's field as a typer option, with its names and help."""
    declared = OPTIONS[name]
    is_number = declared.metavar in _NUMBERS and name != "seed"
    more: dict[str, Any] = {"parser": count(declared.names[-1])} if is_number else {}
    usage = " ".join((*declared.names, declared.metavar))
    words = _COMPLETIONS.get(name)
    return option(usage, declared.help, panel=declared.panel, shown=declared.shown, autocompletion=words, **more)


def _kind(name: str, option: Option) -> Any:
    kind: Any = int if option.metavar in _NUMBERS else list[str] if name in _REPEATED else str
    if not option.metavar:
        kind = Literal[option.choices] if option.choices else bool
    return kind | None if option.typed is None else kind


def takes(
    options: type = RunOptions, *but: str, own_first: bool = False, schedule: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the ``options`` of a request, except ``but``, to a verb; its function receives them as a parsed `Request`.

    The request is the first argument; the others are the verb's own options, which help shows last unless
    ``own_first``. Without ``schedule`` the verb has other arguments instead of a schedule's name, and the request has
    no schedule.
    """
    names = [name for name in OPTIONS if name in options.__annotations__ and name not in but]

    def decorated(verb: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(verb)
        def called(**values: Any) -> Any:
            name = required_schedule(values.pop("schedule"), verb.__name__) if schedule else ""
            fields = {field: _read(field, values.pop(field), name) for field in names}
            return verb(Request(name, **fields), **values)

        keyword = inspect.Parameter.KEYWORD_ONLY
        first = inspect.Parameter("schedule", keyword, default=None, annotation=ScheduleName)
        shared = [
            inspect.Parameter(
                n, keyword, default=OPTIONS[n].typed, annotation=Annotated[_kind(n, OPTIONS[n]), request_option(n)]
            )
            for n in names
        ]
        _, *extra = inspect.signature(verb, eval_str=True).parameters.values()
        named = [first] if schedule else []
        signature = inspect.Signature([*named, *extra, *shared] if own_first else [*named, *shared, *extra])
        called.__signature__ = signature  # type: ignore[attr-defined]  # what typer makes options of
        called.__doc__ = text_of(verb)
        called.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        del called.__wrapped__
        return called

    return decorated


def words(text: str) -> list[str]:
    """Return the words into which a shell splits a text; raise `SpecError` for an unclosed quote, or if there is no
    word.

    The launch of a kernel, up to its last bracket before the options, is one word.
    """
    launch = re.match(r"\S+::.*?\)(?=\s+-{1,2}[a-z]|\s*$)", text, re.DOTALL)
    try:
        listed = [launch[0], *shlex.split(text[launch.end() :])] if launch else shlex.split(text)
    except ValueError as error:
        raise SpecError(f"{text}: cannot be split into the words of a command line: {error}") from None
    if not listed:
        raise SpecError("a run is an empty text; write a schedule or a run")
    return listed


def names(text: str, option: str, known: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of ``a,b``; raise `SpecError` if one is empty, or not in ``known``."""
    listed = tuple(name.strip() for name in text.split(","))
    if not all(listed):
        raise SpecError(f"{option} {text}: a name is empty; separate names with commas")
    for name in listed if known else ():
        if name not in known:
            from npusim.config.messages import choices

            raise SpecError(f"{option} {name}: unknown name{choices(name, known)}")
    return listed


@dataclass(frozen=True)
class Worded:
    """The schedule and the options that the words of a command line state: ``flash -t depth=3``."""

    schedule: str
    changes: Mapping[str, Any]

    @classmethod
    def of(cls, text: str) -> "Worded":
        """Parse words; raise `SpecError` for words that do not describe a run."""
        schedule, *options = words(text)
        default = vars(_parsed([]))
        return cls(schedule, {n: v for n, v in vars(_parsed(options)).items() if v != default[n]})

    def on(self, base: Request) -> Request:
        """Return ``base`` with these options in addition; tiling fields and changed numbers of the device are merged
        with those of ``base``.
        """
        added = {n: {**(vars(base)[n] or {}), **self.changes.get(n, {})} for n in _REPEATED}
        return replace(base, **{**self.changes, **added, "schedule": self.schedule})


def _itself(request: Read) -> Read:
    """Return the meaning of the words."""
    return request


def _parsed(options: Sequence[str]) -> Request:
    """Return the request of options without a schedule; its errors have the same form as those of a command."""
    reader = typer.Typer(add_completion=False)
    reader.command(cls=Command)(takes(schedule=False)(_itself))
    request = typer.main.get_command(reader).main(list(options), prog_name="RUN", standalone_mode=False)
    if not isinstance(request, Request):
        raise SpecError(f"{' '.join(options)}: write options of npusim run")
    return request


def _read(name: str, value: Any, schedule: str = "") -> Any:
    """Return an option's value in the form of a request."""
    option = OPTIONS[name].names[0]
    match name:
        case "overrides" | "scale":
            return key_values(value, option) or None
        case "tiling":
            return key_values([part for item in value or () for part in item.split(",")], "-t") or None
        case "problem":
            return problem_values(value, is_launch=is_launch(schedule))
        case "window" if value is not None:
            return sides(value, option)
        case "lengths" | "query_lengths" | "documents":
            return None if value is None else tuple(map(count(option), names(value, option)))
        case "cache_scale":
            return value if value in (None, "token", "head", "channel") else count(option)(value)
        case "ignore":
            return () if value is None else names(value, option)
        case "trace_groups":
            return LAST if value is None else value
        case "softcap":
            how = "a positive number, such as 50"
            return None if value is None else numbers(value, option, how, lambda x: len(x) == 1 and x[0] > 0)[0]
        case "clock" if value is not None:
            return _hertz(value, option)
        case "power_watts" if value is not None:
            return numbers(value, option, "watts, such as 500", lambda x: len(x) == 1 and x[0] > 0)[0]
        case "timeline" if value is not None:
            how = "from and to in us, such as 0:50 or 12.5:20"
            return tuple(numbers(value, option, how, lambda x: len(x) == 2 and 0 <= x[0] < x[1], ":"))
        case "numerics":
            return not value  # the option is --no-numerics
    return value


def sides(text: str, option: str) -> int | tuple[int, int]:
    """Return a window, ``512``, or keys before a query and after it, ``256,-1``."""
    if "," not in text:
        return whole_number(option, text)
    before, _, after = text.partition(",")
    try:
        return int(ascii_digits(before)), int(ascii_digits(after))
    except ValueError:
        raise SpecError(
            f"{option} {text}: write keys of a window, 512, or keys before and after a query: 256,0"
        ) from None


def required_schedule(name: str | None, verb: str) -> str:
    """Return the schedule's name; without one raise `SpecError` with a list of all schedules."""
    if name is not None:
        return name
    from npusim.kernels.declare.plugins import offered
    from npusim.library import SCHEDULES

    families: dict[str, list[str]] = {}
    for schedule in SCHEDULES.values():
        families.setdefault(schedule.name, []).append(schedule.family)
    width = max(len(known) for known in families)
    rows = [f"which schedule? For example: npusim {verb} flash"]
    for known, where in families.items():
        summary = next(s.summary for s in SCHEDULES.values() if s.name == known)
        text, margin = f"  {known:<{width}}  {summary} ({', '.join(where)})", " " * (width + 4)
        columns = terminal_width() or len(text)
        rows += textwrap.wrap(text, columns, subsequent_indent=margin, drop_whitespace=True, break_on_hyphens=False)
    rows += [f"  {plugin:<{width}}  {source}" for plugin, source in sorted(offered().items())]
    rows.append("tiling fields and precisions of one: npusim run <schedule> --fields")
    raise SpecError("\n".join(rows))


def key_values(items: Iterable[str] | None, option: str) -> dict[str, str]:
    """Return ``KEY=VALUE`` items as a mapping.

    Raises `SpecError`, which names the option, if there is no ``=`` or if a key has two values.
    """
    values: dict[str, str] = {}
    for item in items or ():
        key, equals, value = item.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise SpecError(f"{option} {item}: write {option} key=value")
        key, value = key.strip(), value.strip()
        if key in values:
            raise SpecError(f"{option} {key}: has two values, {values[key]} and {value}; write only one")
        values[key] = value
    return values


def problem_values(text: str | None, *, is_launch: bool = False) -> "GemmProblem | CopyProblem | KernelProblem | None":
    """Return the problem of ``m=..,n=..,k=..[,dtype=..][,operands=..]`` or ``bytes=..``; None for None.

    Other names are sizes of a Triton kernel's launch; with ``is_launch`` this is true of all names. Raises `SpecError`
    if the keys do not describe a problem, or if a size is not a positive integer.
    """
    if text is None:
        return None
    from npusim.config.problem import BlockDtype, KernelProblem, kernel_problem
    from npusim.units import parse_count

    values = key_values(text.split(","), "--problem")
    if is_launch or not values.keys() <= {"m", "n", "k", "count", "bytes", "operands", "dtype"}:
        return KernelProblem(**{n: x if n == "dtype" else _size(n, x, is_launch) for n, x in values.items()})
    dtype, operands = values.pop("dtype", "float16"), values.pop("operands", None)
    allowed = {"m", "n", "k"}, {"m", "n", "k", "count"}, {"bytes"} if operands is None else set()
    if (
        set(values) not in allowed
        or dtype not in ("float16", "bfloat16", *get_args(BlockDtype))
        or operands not in (None, "nd", "nt", "nz")
    ):
        formats = "float16, bfloat16, mxfp8[_e5m2], mxfp4"
        how = f"m=..,n=..,k=.. (and count=.., dtype={formats}, operands=nd, nt, nz), or bytes=.."
        raise SpecError(f"--problem {text}: write {how}")
    sizes = {}
    for name, value in values.items():
        try:
            sizes[name] = parse_count(value, is_bytes=name == "bytes")
        except ValueError:
            like = "1048576, 1MiB or 1MB" if name == "bytes" else "4096 or 4k"
            raise SpecError(f"--problem {text}: {name} must be a positive whole number: {like}") from None
    return kernel_problem(sizes | ({"operands": operands} if operands else {}), dtype)


def _size(name: str, text: str, is_launch: bool) -> int | float:
    """Return a size: an integer (``4k``), a decimal number, or a switch.  In a launch neither 0 nor a switch is
    allowed.  A schedule checks its own sizes.
    """
    from npusim.units import parse_count

    if not is_launch and text.lower() in ("0", "true", "false"):
        return text.lower() == "true" if text != "0" else 0
    try:
        return float(ascii_digits(text)) if re.search(r"[.e]", text) else parse_count(text)
    except ValueError:
        none = "" if is_launch else "0 for none, true or false for a switch, or "
        raise SpecError(f"--problem {name}={text}: write {none}a number above 0, such as 4096, 4k or 1e-5") from None


def _hertz(text: str, option: str) -> float:
    """Return a clock in Hz; a number without a unit is in Hz."""
    units = {"ghz": 1e9, "mhz": 1e6, "hz": 1.0}
    unit = next((unit for unit in units if text.lower().endswith(unit)), "")
    how = "a clock, such as 1500MHz or 1.5GHz"
    digits = text[: len(text) - len(unit)].strip()
    return numbers(digits, option, how, lambda x: len(x) == 1 and x[0] > 0)[0] * units.get(unit, 1.0)


def numbers(
    text: str, option: str, how: str, allowed: Callable[[list[float]], bool], between: str = ","
) -> list[float]:
    """Return the numbers of a text; raise `SpecError` with their form if they are not allowed."""
    try:
        values = [float(part) for part in ascii_digits(text).split(between)]
    except ValueError:
        values = [math.nan]
    if not all(map(math.isfinite, values)) or not allowed(values):
        raise SpecError(f"{option} {text}: write {how}")
    return values
