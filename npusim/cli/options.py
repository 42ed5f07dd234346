"""Options that several verbs share, and the reading of their small notations."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from npusim.errors import SpecError

if TYPE_CHECKING:
    from npusim.spec.kernels import CopyProblem, GemmProblem

__all__ = [
    "DEFAULT_HW", "DEFAULT_WORKLOAD", "Batch", "Causal", "Dtype", "Hw", "Ignore", "Json", "Method", "Overrides",
    "Precision", "ProblemText", "ScheduleName", "Seq", "SeqKv", "SeqQ", "TensorParallel", "Tilings",
    "WorkloadName", "chosen", "count", "ignored_names", "indices", "key_values", "problem_values", "required_schedule",
    "tiling_values",
]  # fmt: skip

# As in `npusim.run`, which is not imported for a help text: it would load numpy.
DEFAULT_HW = "ascend_910b2"
DEFAULT_WORKLOAD = "pangu_38b"

_PROBLEM = "What to compute"
_DEVICE = "On what"
_HOW = "How"


def _devices() -> list[str]:
    from npusim.spec.load import list_devices

    return list_devices()


def _workloads() -> list[str]:
    from npusim.spec.load import list_workloads

    return list_workloads()


def count(option: str) -> Callable[[str], int]:
    """Return a reader of an option's whole number: ``4096``, ``8k``."""

    def read(text: str | int) -> int:
        from npusim.units import parse_count

        try:
            return text if isinstance(text, int) else parse_count(text)
        except ValueError:
            raise SpecError(
                f"{option} {text}: write a positive whole number: 4096, 8k (8,192), 1M"
            ) from None

    return read


ScheduleName = Annotated[
    str | None,
    typer.Argument(
        metavar="SCHEDULE",
        help="For example flash; without one, all are listed.",
        show_default=False,
    ),
]
Hw = Annotated[
    str | None,
    typer.Option(
        "--hw", metavar="NAME|FILE", rich_help_panel=_DEVICE, autocompletion=_devices,
        show_default=f"{DEFAULT_HW}, or what the schedule is for",
        help="Device: a name of npusim hw list, or your own .yaml.",
    ),
]  # fmt: skip
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "-C", metavar="KEY=VALUE", rich_help_panel=_DEVICE,
        help="Change one number of the device, by its dotted key; may be repeated.",
    ),
]  # fmt: skip
WorkloadName = Annotated[
    str,
    typer.Option(
        "--workload", "-w", metavar="NAME|FILE", rich_help_panel=_PROBLEM,
        autocompletion=_workloads,
        help="Model: a name of npusim workload list, or your own .yaml.",
    ),
]  # fmt: skip
Seq = Annotated[
    int | None,
    typer.Option(
        "--seq", metavar="TOKENS", parser=count("--seq"), rich_help_panel=_PROBLEM,
        help="Queries and keys: 4096, or 8k.",
    ),
]
SeqQ = Annotated[
    int | None,
    typer.Option(
        "--seq-q", metavar="TOKENS", parser=count("--seq-q"), rich_help_panel=_PROBLEM, help="Queries alone."
    ),
]
SeqKv = Annotated[
    int | None,
    typer.Option("--seq-kv", metavar="TOKENS", parser=count("--seq-kv"), rich_help_panel=_PROBLEM, help="Keys alone."),
]
Batch = Annotated[
    int | None,
    typer.Option("--batch", metavar="N", parser=count("--batch"), rich_help_panel=_PROBLEM, help="Sequences."),
]
TensorParallel = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel", "--tp", metavar="N", parser=count("--tp"), rich_help_panel=_PROBLEM,
        help="Devices that share the heads; one device's share is run.",
    ),
]  # fmt: skip
Causal = Annotated[
    bool | None,
    typer.Option(
        "--causal/--no-causal", rich_help_panel=_PROBLEM, show_default=False,
        help="Mask the future, or do not; default: as the workload says.",
    ),
]  # fmt: skip
Tilings = Annotated[
    list[str] | None,
    typer.Option(
        "--tiling", "-t", metavar="FIELD=VALUE,...", rich_help_panel=_HOW,
        help="Tiling fields: -t block_kv=256,depth=2; may be repeated.",
    ),
]  # fmt: skip
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision", metavar="NAME[,FIELD=FORMAT]", rich_help_panel=_HOW,
        show_default="the schedule's",
        help="Formats of all intermediates: a preset, with changes: fa2_fp32,scores=float16.",
    ),
]  # fmt: skip
Ignore = Annotated[
    str | None,
    typer.Option(
        "--ignore", metavar="NAME,...", rich_help_panel=_PROBLEM,
        help="Leave out what npusim does not model of the workload: window,softcap, ...",
    ),
]  # fmt: skip
Dtype = Annotated[
    Literal["float16", "bfloat16", "float8_e4m3fn", "float32"] | None,
    typer.Option(
        "--dtype", rich_help_panel=_PROBLEM, show_default="the workload's",
        help="Of Q, K and V; --tensors are rounded to it (to float8_e4m3fn with a scale each).",
    ),
]  # fmt: skip
ProblemText = Annotated[
    str | None,
    typer.Option(
        "--problem", metavar="KEY=VALUE,...", rich_help_panel=_PROBLEM,
        help="Sizes of gemm (m=4096,n=4096,k=4k) or copy (bytes=1MiB).",
    ),
]  # fmt: skip
Method = Annotated[
    str,
    typer.Option(
        "--method", metavar="NAME", rich_help_panel=_HOW,
        help="How time is computed: auto; des (SimPy, the reference), block, fold, steady: exact; "
        "reserved: approximate; replay: where no link is shared.",
    ),
]  # fmt: skip
Json = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of a table.", show_default=False)
]


def required_schedule(name: str | None, verb: str) -> str:
    """Return the schedule's name; without one raise `SpecError` that lists all there are."""
    if name is not None:
        return name
    from npusim.schedules import SCHEDULES

    families: dict[str, list[str]] = {}
    for schedule in SCHEDULES.values():
        families.setdefault(schedule.name, []).append(schedule.family)
    width = max(len(known) for known in families)
    rows = [f"which schedule? For example: npusim {verb} {next(iter(families))}"]
    for known, where in families.items():
        summary = next(s.summary for s in SCHEDULES.values() if s.name == known)
        rows.append(f"  {known:<{width}}  {summary} ({', '.join(where)})")
    rows.append("tiling fields and precisions of one: npusim run <schedule> --fields")
    raise SpecError("\n".join(rows))


def key_values(items: Iterable[str] | None, option: str) -> dict[str, str]:
    """Return ``KEY=VALUE`` items as a mapping; the later of two wins.

    Raises `SpecError` naming the option where there is no ``=``.
    """
    found: dict[str, str] = {}
    for item in items or ():
        key, equals, value = item.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise SpecError(f"{option} {item}: write {option} key=value")
        found[key.strip()] = value.strip()
    return found


def problem_values(text: str | None) -> "GemmProblem | CopyProblem | None":
    """Return the problem of ``m=..,n=..,k=..[,dtype=..]`` or ``bytes=..``; None for None.

    Raises `SpecError` where the keys make no problem or a size is no positive whole number.
    """
    if text is None:
        return None
    from npusim.spec.kernels import CopyProblem, GemmProblem
    from npusim.units import parse_count

    given = key_values(text.split(","), "--problem")
    dtype = given.pop("dtype", "float16")
    if set(given) not in ({"m", "n", "k"}, {"bytes"}) or dtype not in ("float16", "bfloat16"):
        raise SpecError(
            f"--problem {text}: write m=..,n=..,k=.. (and dtype=float16 or bfloat16), or bytes=.."
        )
    sizes = {}
    for name, value in given.items():
        try:
            sizes[name] = parse_count(value, is_bytes=name == "bytes")
        except ValueError:
            like = "1048576, 1MiB or 1MB" if name == "bytes" else "4096 or 4k"
            raise SpecError(
                f"--problem {text}: {name} must be a positive whole number: {like}"
            ) from None
    if "bytes" in sizes:
        return CopyProblem(bytes=sizes["bytes"])
    kind: Literal["float16", "bfloat16"] = "bfloat16" if dtype == "bfloat16" else "float16"
    return GemmProblem(m=sizes["m"], n=sizes["n"], k=sizes["k"], dtype=kind)


def tiling_values(items: Iterable[str] | None) -> dict[str, object]:
    """Return tiling fields given as ``-t a=1,b=2 -t c=3``."""
    parts = [part for item in items or () for part in item.split(",")]
    return dict(key_values(parts, "-t"))


def ignored_names(text: str | None) -> tuple[str, ...]:
    """Return the names of ``window,softcap``."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def chosen(text: str, option: str) -> Literal["sample", "all"] | list[int]:
    """Return ``sample``, ``all``, or indices; raise `SpecError` if it is none of them."""
    if text == "sample":
        return "sample"
    if text == "all":
        return "all"
    return indices(text, option, also="sample, all, or ")


def indices(text: str, option: str, *, also: str = "") -> list[int]:
    """Return the numbers of ``0,128,4000-4095``; ``also`` is what else the option takes.

    Raises `SpecError` where a part is neither a number nor a rising range.
    """
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise SpecError(f"{option} {text}: write {also}numbers such as 0,128,4000-4095")
        end = int(last) if dash else int(first)
        if end < int(first):
            raise SpecError(f"{option} {text}: {part.strip()} runs backwards")
        found += range(int(first), end + 1)
    return found
