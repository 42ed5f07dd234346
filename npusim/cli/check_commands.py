"""``npusim check``, ``validate``, ``diff`` and ``invariant``: comparisons that also decide the exit code."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from npusim.cli import options as o
from npusim.cli.console import progress, say, show_either, write
from npusim.cli.flags_command import check_flags, show_time
from npusim.cli.help import Verbs
from npusim.errors import CheckFailedError, SpecError
from npusim.kernels.triton import SIGN
from npusim.late_methods import dataclass
from npusim.report.text import Block, Column, Columns, Facts, cells, document, keyed, percent
from npusim.simulation.request import BitsOptions, Request, SeedOptions, refuse, short_name

if TYPE_CHECKING:
    from npusim.studies.baseline import CheckOutcome
    from npusim.studies.validate import TimesReport
    from npusim.studies.validate.judge import Judgement

app = Verbs()


# ---------------------------------------------------------------- check

#: Number of changed parts of units that a table shows; JSON has them all.
_SHOWN = 6
#: JSON keys of a changed part of a unit.
_MOVED = ("unit", "name", "old", "new")

_FILES = """

A new baseline is a file such as this one, and then --update:
  schema: npusim.baseline/1
  schedule: flash
  hw: ascend_910b2
  workload: pangu_38b
  seq: 1024
  tiling: {block_kv: 256}

And one of a decision: which schedule and tile wins a space:
  schema: npusim.decision/1
  hw: ascend_910b2
  workload: pangu_38b
  seq: 1024
  candidates:
  - {schedule: flash, fields: {block_kv: [128, 256, 512]}}
  - {schedule: pasa, fields: {block_kv: [128, 256]}}"""

_Every = Annotated[
    str, o.option("--every NAME=STEP", "Prove the flags for each longer value of an argument, in steps.", shown=False)
]
_Hw = Annotated[
    str,
    o.option("--hw DEVICE", "Print the time of the program as written, instead of checking its flags.", shown=False),
]


@app.verb(
    "check",
    ("npusim check baselines/", "exit code 1 if any cycle or decision changed"),
    ("npusim check flash.py::flash -a seq=512", "flags and barriers of a TileLang-Ascend program"),
    ("npusim check baselines/ --tolerance 1%", "allow cycles to differ by 1 %"),
    ('npusim check baselines/ --update --reason "faster exp"', "accept today's results"),
    after=_FILES,
    first="--update --reason --tolerance --json",
)
def check(
    folder: Annotated[Path, o.argument("DIR", "Baselines (*.yaml, or a folder of them), or FILE.py::program.")],
    tolerance: Annotated[
        str, o.option("--tolerance SHARE", "Allowed difference of cycles, and allowed loss of a winner: 1%, or 0.01.")
    ] = "0",
    update: Annotated[bool, o.option("--update", "Write the current results of the cases into their files.")] = False,
    github: Annotated[bool, o.option("--github", "Annotate the files of failed cases in GitHub Actions.")] = False,
    junit: Annotated[
        Path | None, o.option("--junit FILE", "Also write the outcomes in JUnit's XML format.", shown=False)
    ] = None,
    reason: Annotated[
        str,
        o.option(
            "--reason TEXT",
            "Reason for the update, which is stored in the files; required if an accepted result is replaced.",
            shown=False,
        ),
    ] = "",
    arguments: Annotated[
        list[str] | None, o.option("--argument -a NAME=VALUE", "Argument of a program; may be repeated.", shown=False)
    ] = None,
    vector_barriers: Annotated[
        bool, o.option("--vector-barriers", "Check as if the vector pipe needed barriers between instructions.")
    ] = False,
    every: _Every = "",
    hw: _Hw = "",
    json: o.Json = False,
) -> None:
    """Compare cycles and decisions with accepted ones, or check the flags of a TileLang-Ascend program.

    Cycles are compared exactly; the exit code is 1 if any differ. --update is refused where the environment variable CI
    is set. FILE.py::program is an expert program of TileLang-Ascend, whose flags and barriers are checked instead: the
    exit code is 1 for a race, a wait without a set, or a flag that is still set at the end (npusim help tilelang);
    --every proves them for longer programs too. With --hw its time is shown instead.
    """
    of_baselines: dict[str, object] = {"--tolerance": None if tolerance == "0" else tolerance}
    of_baselines |= {"--update": update or None, "--github": github or None}
    of_baselines |= {"--junit": junit, "--reason": reason or None}
    if SIGN in str(folder):
        refuse(of_baselines, f"{folder} is a program; these options are for a folder of baselines")
        given = str(folder), arguments or []
        if hw:
            refuse(
                {"--every": every or None},
                "--hw prints a time, but --every applies only to the check; remove one of them",
            )
            show_time(*given, hw=hw, vector_barriers=vector_barriers, json=json)
        else:
            check_flags(*given, every=every, vector_barriers=vector_barriers, json=json)
        return
    if folder.suffix == ".py":
        raise SpecError(f"{folder}: name the program in the file: {folder}{SIGN}NAME")
    of_programs = {
        "-a": arguments,
        "--vector-barriers": vector_barriers or None,
        "--hw": hw or None,
        "--every": every or None,
    }
    refuse(of_programs, f"{folder} has baselines; these options are for FILE.py::program")
    if reason and not update:
        raise SpecError(f"--reason {reason}: needs --update")
    request = _Accepted(folder, o.share(tolerance, "--tolerance"), update, reason, github, junit, json)
    _check_baselines(request)


@dataclass(frozen=True, slots=True)
class _Accepted:
    """Options of a comparison with baselines."""

    folder: Path
    share: float
    update: bool
    reason: str
    github: bool
    junit: Path | None
    json: bool


def _check_baselines(asked: _Accepted) -> None:
    """Compare a folder of baselines; raise `CheckFailedError` if a comparison fails."""
    from npusim.cli import ci
    from npusim.report.output import check_file_writable
    from npusim.studies.baseline import check_baselines

    if asked.junit is not None:
        check_file_writable(asked.junit)  # before the work, not after it
    folder, junit, number = asked.folder, asked.junit, count(1)
    with progress("checking") as advance:
        outcomes = check_baselines(
            folder,
            tolerance=asked.share,
            update=asked.update,
            reason=asked.reason,
            on_case=lambda _, total: advance(next(number), total),
        )
    failed = sum(not outcome.passed for outcome in outcomes)
    show_either(
        asked.json,
        lambda: document("check", version=2, cases=_records(outcomes), passed=not failed),
        lambda: _table(outcomes),
    )
    why = {outcome.name: list(_why(outcome)) for outcome in outcomes}
    for line in ci.github_lines(outcomes, why) if asked.github else ():
        say(line)
    if junit is not None:
        write(junit, ci.junit(outcomes, why))
    if failed:
        can_accept = any(outcome.status in ("changed", "new") for outcome in outcomes)
        how = f'; accept with: npusim check {folder} --update --reason "..."' if can_accept else ""
        raise CheckFailedError(f"{failed} of {len(outcomes)} baselines not met{how}")


def _text(value: int | str | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else value


#: A comparison with an accepted result: tables show the first difference of a case, JSON all of them.
ROWS = Columns(
    *keyed("name"),
    Column("accepted", "old", _text, key="old"),
    Column("today", "new", _text, key="new"),
    Column(
        "change",
        lambda row: row.why if row.change is None else f"{row.change * 100:+.2f} %",
        align=">",
        key="change",
        json=attrgetter("change"),
    ),
    *keyed("why"),
)


def _of_first(column: Column, none: str | None = None) -> Column:
    """Return a column of a case's first comparison; ``none`` if the case has no comparison."""
    return replace(
        column, value=lambda outcome: column.of(outcome.rows[0]) if outcome.rows else none, key="", json=None
    )


def _outcomes_table(kind: str, change: str, align: Literal["<", ">"]) -> Columns:
    old, new, changed = ROWS.named("accepted", "today", "change")
    return Columns(
        Column(None, "kind", key="kind"),
        Column(kind, "name", key="name"),
        Column(None, lambda outcome: str(outcome.path), key="file"),
        *(replace(_of_first(column), align=align) for column in (old, new)),
        replace(_of_first(changed, ""), title=change),
        Column("", "status", style=lambda outcome: "good" if outcome.passed else "bad", key="status"),
        Column(None, "passed", key="passed"),
        Column(None, lambda outcome: ROWS.records(outcome.rows), key="rows"),
        Column(None, lambda outcome: [dict(zip(_MOVED, part, strict=True)) for part in outcome.moved], key="moved"),
        *(Column(None, name, key=name) for name in ("reason", "device_changed", "ignored", "band")),
        Column(
            "method",
            lambda outcome: outcome.method + (f" ±{percent(outcome.band)}" if outcome.band else ""),
            key="method",
            json=lambda outcome: outcome.method,
        ),
    )


def _tables() -> dict[str, Columns]:
    """Return the tables by kind of case."""
    return {"cycles": _outcomes_table("cycles", "change", ">"), "decision": _outcomes_table("decision", "margin", "<")}


def _table(outcomes: "Sequence[CheckOutcome]") -> list[Block]:
    tables = _tables()
    of_kind = {kind: [outcome for outcome in outcomes if outcome.kind == kind] for kind in tables}
    blocks: list[Block] = [tables[kind].grid(rows) for kind, rows in of_kind.items() if rows]
    facts = tuple((outcome.name, cells(*lines)) for outcome in outcomes if (lines := [*_why(outcome)]))
    return [*blocks, *([Facts(facts)] if facts else [])]


def _records(outcomes: "Sequence[CheckOutcome]") -> list[dict[str, object]]:
    tables = _tables()
    return [record for outcome in outcomes for record in tables[outcome.kind].records([outcome])]


def _why(outcome: "CheckOutcome") -> "Iterator[str]":
    """Yield the lines about a case below the table."""
    if outcome.reason:
        yield " ".join(outcome.reason.split())
    for row in outcome.rows[1:]:
        yield f"{row.name}: was {_text(row.old)}, is {_text(row.new)}: {row.why}"
    moved = [f"{unit} {name} {new - old:+,} ({old:,} -> {new:,})" for unit, name, old, new in outcome.moved[:_SHOWN]]
    if moved:
        more = len(outcome.moved) - len(moved)
        yield "moved, in cycles: " + "; ".join(moved) + (f"; and {more} more" if more else "")
    if outcome.ignored:
        yield f"without {', '.join(outcome.ignored)}"
    if outcome.device_changed:
        yield "the device file changed"


# ---------------------------------------------------------------- validate


@app.verb(
    "validate",
    ("npusim validate measured.yaml --band 0.15", "residuals; exit code 1 if outside the band"),
    ("npusim validate measured.yaml --only 'fa_*'", "cases by name, schedule or device"),
    ("npusim validate --template > measured.yaml", "a file of timings to begin with"),
    ("npusim validate vectors.npz", "bits of a chip's matrix unit or whole kernels"),
    first="--band --only --template --json",
)
def validate(
    file: Annotated[Path | None, o.argument("FILE", "Timings (.yaml), or recorded bits (.npz).")] = None,
    *,
    only: Annotated[
        str | None, o.option("--only GLOB", "Select cases by name, schedule or device; the others are counted.")
    ] = None,
    band: Annotated[
        str | None, o.option("--band SHARE", "Allowed relative error if the file states none: 15%, or 0.15.")
    ] = None,
    method: Annotated[str, o.request_option("method")] = "auto",
    jobs: Annotated[int, o.option("--jobs -j N", "Number of processes that predict.")] = 1,
    cluster: o.Cluster = None,
    template: Annotated[bool, o.option("--template", "Print a commented file of timings to start from.")] = False,
    json: o.Json = False,
) -> None:
    """Compare predicted times with measured ones, within a band, or bits with recorded ones.

    Exit code 1 if a time is outside its band, or a bit differs; otherwise 2 if a case has no prediction.
    """
    if template:
        refuse({"FILE": file, "--only": only, "--band": band}, "--template prints a file; remove these options")
        typer.echo((files("npusim.cli") / "new_measurements.yaml").read_text(encoding="utf-8"), nl=False)
        return
    if file is None or not file.exists():
        asked = "" if file is None else f"{file}: no such file; "
        times = "npusim validate --template > measured.yaml"
        raise SpecError(f"{asked}name a file of measured times ({times}) or of recorded bits (.npz)")
    if file.suffix == ".npz":
        others = {"--method": None if method == "auto" else method, "--jobs": None if jobs == 1 else jobs}
        refuse({"--band": band, **others}, "these options are for timings (.yaml), not for bits; remove them")
        _bits(file, only or "*", is_json=json)
        return
    from npusim.report.findings import validation_document, validation_table
    from npusim.studies.validate import validate as hold

    allowed = None if band is None else o.share(band, "--band")
    with progress("predicting") as advance:
        report = hold(file, only=only, band=allowed, method=method, jobs=jobs, cluster=cluster, progress=advance)
    show_either(json, lambda: validation_document(report), lambda: validation_table(report))
    _judge(report)


def _bits(file: Path, only: str, *, is_json: bool) -> None:
    from npusim.report.findings import bits_document, bits_table
    from npusim.studies.validate.kernels import check_bits

    report = check_bits(file, only)
    show_either(is_json, lambda: bits_document(report), lambda: bits_table(report))
    if not report.is_passed:
        how = f"; npusim probe identify searches for an explanation {file}" if report.kind == "vectors" else ""
        raise CheckFailedError(f"predicted and recorded bits differ{how}")


def _judge(report: "TimesReport") -> None:
    """Raise the exception of the exit code: 1 if a quantity is outside its band, else 2 if a case has no prediction."""
    faults = report.faults
    if report.is_outside:
        text = "predictions and measurements differ by more than allowed"
        also = f"; besides, {report.not_predicted} cases have no prediction:" if faults else ""
        raise CheckFailedError("\n".join((text + also, *faults)))
    if faults:
        raise SpecError("\n".join(faults))


# ---------------------------------------------------------------- diff


@app.verb(
    "diff",
    ("npusim diff out.npz flash --hw h200 --tensors qkv.npz", "the last rows of some heads"),
    ("npusim diff out.npz flash --hw h200 --tensors qkv.npz --rows all --heads 0", "every row of a head"),
    ("npusim diff out.npz flash --hw h200 --tensors qkv.npz --judge", "one line: right for its formats, or wrong"),
    ("npusim diff out.npz pasa --tensors qkv.npz -t block_kv=128 --json", "for a script"),
    first="--tensors --rows --heads --judge --hw --tiling --json",
)
@o.takes(BitsOptions, "numerics", own_first=True, schedule=False)
def diff(
    request: Request,
    *,
    out: Annotated[
        Path,
        o.argument(
            "OUT",
            "The kernel's output, .npz or .safetensors: key o, (batch, heads, rows, head size), as values or bits.",
        ),
    ],
    schedule: Annotated[str | None, o.argument("SCHEDULE", "Schedule that the kernel implements.")] = None,
    judge: Annotated[
        bool, o.option("--judge", "Print only the verdict: right for its formats (exit code 0), or wrong (1).")
    ] = False,
    json: o.Json = False,
) -> None:
    """Compare a kernel's output with predicted bits, and name the choice that explains a difference.

    Neighbouring problems are tried first, in float64: another mask or window, a factor omitted or applied twice, other
    heads of K and V. Then every choice that the schedule states is changed, one at a time and in pairs: arithmetic,
    order of sums, exponential, formats of intermediates, split, tile. Exit code 1 if none of these explains the output.
    """
    from npusim.report.findings import difference_document, difference_table
    from npusim.studies.validate.diff import diff as search

    request = replace(request, schedule=o.required_schedule(schedule, "diff OUT"))
    if judge:
        from npusim.studies.validate.judge import judge as judged

        with progress("computing other correct kernels") as advance:
            (judgement,) = judged([out], request, advance)
        _decide(out, judgement, short_name(request.schedule), is_json=json)
        return
    with progress("trying other choices") as advance:
        difference = search(out, request, advance)
    show_either(json, lambda: difference_document(out, difference), lambda: difference_table(out, difference))
    if not difference.passed:
        why = f"none of {difference.tried} changes of the schedule's choices explains the difference"
        if difference.blank:
            why = f"{difference.blank} are NaN"
        elif difference.problem:
            why = f"the output is nearer to the float64 result of another problem, {difference.problem.change}"
        unequal = difference.total - difference.matched
        raise CheckFailedError(f"{out}: {unequal:,} of {difference.total:,} outputs differ, and {why}")


def _decide(out: Path, judgement: "Judgement", schedule: str, *, is_json: bool) -> None:
    show_either(
        is_json,
        lambda: document(
            "judge",
            output=str(out),
            is_right=judgement.is_right,
            text=str(judgement),
            **{**asdict(judgement), "measures": [m._asdict() for m in judgement.measures]},
        ),
        lambda: [Facts(((str(out), cells(*filter(None, (judgement.reading, str(judgement))))),))],
    )
    if not judgement.is_right:
        raise CheckFailedError(f"{out}: the output is wrong for the formats of {schedule}")


# ---------------------------------------------------------------- invariant


@app.verb(
    "invariant",
    ("npusim invariant split_kv -w qwen2_7b --seq-q 1 --seq-kv 32k", "a decoding step; all choices vary"),
    ("npusim invariant split_kv --seq-q 1 -t splits=4 --require batch,position", "a test for your CI"),
    ("npusim invariant split_kv --lengths 1k,7k,32k --page 64 --require batch,page", "a batch as a server runs it"),
    (
        "npusim invariant flash_backward -t method=added",
        "gradients (or a recurrence): batches, heads and numbers of tokens vary",
    ),
    ("npusim invariant flash --seq 8192 --vary tile --json", "one aspect, as JSON for a script"),
    first="--vary --require --workload --seq-q --seq-kv --page --hw --json",
)
@o.takes(SeedOptions, own_first=True)
def invariant(
    request: Request,
    *,
    require: Annotated[
        str,
        o.option(
            "--require ASPECT,...",
            "Exit code 1 if changing one of these changes a bit: batch,splits.",
            panel="How",
            shown=False,
        ),
    ] = "",
    vary: Annotated[
        str,
        o.option(
            "--vary ASPECT,...",
            "Choices: batch, position, length, page, chunk, prefill, splits, rule, merge, tile, packing, ranks, "
            "choice.",
            panel="How",
            shown="all",
        ),
    ] = "",
    json: o.Json = False,
) -> None:
    """State which choices change a call's bits, which cannot, and the cost of fixing each.

    A change that does not change the steps of a row cannot change its bits. For other changes npusim computes the bits,
    and names the first element that differs, with the operation and tile where the computations first differ. For plain
    tensors (retention, gla, gated_delta, ssd, flash_backward) npusim varies the batch, the heads and the number of
    tokens. The row `choice` has the tile and splits that npusim chooses for a varied call; --require fails on them too.
    """
    from npusim.report.findings import invariance_document, invariance_table
    from npusim.studies.invariance import ASPECTS, examine

    required = o.names(require, "--require", ASPECTS) if require else ()
    varied = o.names(vary, "--vary", ASPECTS) if vary else ()
    varied = (*varied, "choice") if varied and "choice" in required else varied  # the aspect has a separate row
    if varied and (missing := [name for name in required if name not in varied]):
        raise SpecError(f"--require {missing[0]}: it is not in --vary {','.join(varied)}")
    with progress(f"varying {short_name(request.schedule)}") as advance:
        invariance = examine(request, varied or required or ASPECTS, advance)
    show_either(json, lambda: invariance_document(invariance, required), lambda: invariance_table(invariance))
    broken = [name for name in required if not invariance.holds(name)]
    if broken:
        others = ", ".join(dict.fromkeys(call for name in broken if (call := invariance.chosen_otherwise(name))))
        fixed = invariance["choice"].guarantee.replace(" ", ",") if others else ""
        why = f"; npusim chooses other fields for {others}; -t {fixed} fixes them" if others else ""
        raise CheckFailedError(f"bits change with {', '.join(broken)}{why}")
