"""Files of cases: each case is a run with its result: a measured time, accepted cycles, or an accepted decision.

``npusim.measurements/1`` holds measured cases, with which predictions are compared; ``npusim.baseline/1`` (cycles) and
``npusim.decision/1`` (the schedule and tile that win a space) hold one case each, which ``npusim check`` runs.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, PlainValidator, ValidationError, create_model, field_validator, model_validator
from pydantic_core import PydanticCustomError

from npusim.config.device import L2State
from npusim.config.document import parse_document, read_document, read_text
from npusim.config.load import validated
from npusim.config.messages import explain
from npusim.config.model import (
    Band,
    Count,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SpecModel,
    StrictBool,
    StrictFloat,
    Text,
    fault_at,
)
from npusim.config.problem import CallFields, NamedSize, Operands, Problem
from npusim.config.quantity import LARGEST
from npusim.config.workload import WORKLOAD_SCHEMA, Workload
from npusim.errors import SpecError


class Interval(NamedTuple):
    """A measured range; a single number is a range of width 0."""

    low: float
    high: float

    def relative_error(self, predicted: float) -> float:
        """Return the signed relative error from the nearer end of the range; 0 inside the range."""
        if predicted < self.low:
            return predicted / self.low - 1
        if predicted > self.high:
            return predicted / self.high - 1
        return 0.0


def _interval(value: object) -> Interval:
    if isinstance(value, Interval):
        return value
    ends: list[object] = list(value) if isinstance(value, list | tuple) else [value, value]
    if len(ends) != 2:
        raise PydanticCustomError("interval", "expected a positive number or [low, high]")
    low, high = (_positive(end) for end in ends)
    if low > high:
        raise PydanticCustomError("interval", "the low end is above the high end")
    return Interval(low, high)


def _positive(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LARGEST:
        return float(value)
    raise PydanticCustomError("interval", "expected a positive number or [low, high]")


def _tiling_value(value: object) -> int | float | str:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise PydanticCustomError("tiling_value", "expected a number or text")
    return value


Range = Annotated[Interval, PlainValidator(_interval)]
TilingValue = Annotated[int | float | str, PlainValidator(_tiling_value)]


class Measured(SpecModel):
    """Measured results; times of calls and of their parts in microseconds."""

    latency_us: Range | None = Field(default=None, description="time of the kind that `timing` names")
    core_us: Range | None = Field(default=None, description="the cores' time, without launch")
    mac_us: Range | None = Field(default=None, description="busy time of the matrix unit")
    mte1_us: Range | None = None
    mte2_us: Range | None = None
    fixp_us: Range | None = None
    vec_us: Range | None = Field(default=None, description="busy time of the vector unit")
    phase1_us: Range | None = Field(default=None, description="a call of only the first of several kernels")
    compute_us: Range | None = None
    attention_us: Range | None = None
    linear_us: Range | None = None
    allreduce_us: Range | None = None
    upload_us: Range | None = Field(default=None, description="copy of a layer's K and V to the device")
    gpu_us: Range | None = Field(default=None, description="attention on the device")
    cpu_us: Range | None = Field(default=None, description="attention on the host")
    off_upload_us: Range | None = Field(default=None, description="copies: Q, K and V to the host, the result back")
    speedup: Range | None = Field(default=None, description="time of the baseline divided by the time of this case")
    tflops: Range | None = None
    tokens_per_s: Range | None = Field(default=None, description="throughput of a decoding step over all sequences")

    @model_validator(mode="after")
    def _something_was_measured(self) -> Self:
        if not any(True for _ in self.items()):
            raise PydanticCustomError("nothing_measured", "nothing was measured")
        return self

    def items(self) -> Iterator[tuple[str, Interval]]:
        """Yield the measured quantities by name."""
        for name, value in self:
            if value is not None:
                yield name, value


#: Kinds of latency: `npusim.program.timing.timing_result.KINDS`, in ``npusim run``'s words.
Timing = Literal["core", "kernel", "back_to_back", "call"]


def _or_none(field: Any) -> tuple[Any, Any]:
    return field.rebuild_annotation() | None, Field(default=None, description=field.description)


#: Optional keys of a call; a learned score is a key of the workload.
_OF_CALL = MappingProxyType({n: _or_none(f) for n, f in CallFields.model_fields.items() if n != "sink_logits"})


class RunSizes(create_model("OfCall", __base__=SpecModel, **_OF_CALL), SpecModel):  # type: ignore[misc]
    """Sizes that `npusim.run` accepts in addition to a workload's name; they are those of the whole layer."""

    seq: Count | None = Field(default=None, description="queries and keys of a named workload")
    seq_q: Count | None = None
    seq_kv: Count | None = None
    batch: Count | None = None
    tensor_parallel: PositiveInt | None = Field(default=None, description="divides the heads")
    causal: StrictBool | None = None
    dtype: Text | None = None


#: Keys that a case may have in addition to a workload's name.
OF_NAMED = (*RunSizes.model_fields, "phase")


#: Keys of a workload file that name the workload or its inputs; a case may state all other keys itself.
_OF_FILE = ("schema_id", "name", "description", "source", "unmodelled", "data", "tensors")
_OF_MODEL = MappingProxyType(
    {n: _or_none(f) for n, f in Workload.model_fields.items() if n not in (*_OF_FILE, *RunSizes.model_fields)}
)


class MeasuredWorkload(create_model("OfModel", __base__=RunSizes, **_OF_MODEL), RunSizes):  # type: ignore[misc]
    """What a case computes: a workload by name, or the fields of its file, with the sizes of attention; the sizes of a
    matrix product (``m n k``) or of a copy (``bytes``); or the sizes of a schedule of plain tensors by name
    (``sizes``).
    """

    name: Text | None = Field(default=None, description="a workload by name or file, in the form of -w")
    phase: Literal["prefill", "decode"] | None = Field(default=None, description="phase of a named workload")
    sizes: dict[str, NamedSize] | None = Field(default=None, description="sizes of a schedule of plain tensors")
    m: PositiveInt | None = None
    n: PositiveInt | None = None
    k: PositiveInt | None = None
    operands: Operands | None = Field(
        default=None,
        description=(
            "storage of a product's operands: row by row (nd), row by row with the second one transposed "
            "(nt), or in fractals (nz)"
        ),
    )
    bytes: PositiveInt | None = None

    @property
    def kind(self) -> Literal["named", "attention", "gemm", "copy", "launch"]:
        """The kind of the case's sizes."""
        if self.name is not None:
            return "named"
        if self.sizes is not None:
            return "launch"
        if self.bytes is not None:
            return "copy"
        return "attention" if self.m is None else "gemm"

    @model_validator(mode="after")
    def _sizes_are_complete(self) -> Self:
        needed: tuple[str, ...] = {
            "named": ("name",),
            "copy": ("bytes",),
            "launch": ("sizes",),
            "gemm": ("m", "n", "k"),
            "attention": ("heads", "seq_q", "seq_kv", "head_dim"),
        }[self.kind]
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            text = f"missing; sizes of {self.kind} are {', '.join(needed)}, or give a workload's name"
            raise fault_at(missing[0], text)
        others = type(self).model_fields.keys() - {"name", *OF_NAMED} if self.kind == "named" else {"seq", "phase"}
        wrong = [name for name, value in self if value is not None and name in others]
        if wrong:
            known = f"; allowed with a workload's name: {', '.join(OF_NAMED)}" if self.kind == "named" else ""
            raise fault_at(wrong[0], f"a workload of kind {self.kind} cannot have this size here{known}")
        return self

    def of_name(self) -> dict[str, object]:
        """Return the arguments of `npusim.run`, without the name of a named workload."""
        return {size: getattr(self, size) for size in OF_NAMED}

    def named_sizes(self) -> dict[str, Any]:
        """Return the sizes of a product, a copy or a launch by name."""
        names = "m", "n", "k", "operands", "bytes"
        return self.sizes or {name: size for name in names if (size := getattr(self, name)) is not None}

    def written(self) -> Workload:
        """Return the attention that the case describes in full, as a workload; raise `SpecError` if the case is not
        attention.
        """
        stated = {name: value for name, value in self if value is not None and name in Workload.model_fields}
        head = {"schema": WORKLOAD_SCHEMA, "name": "case", "description": "written out in a case"}
        try:
            return Workload.model_validate({**stated, **head, "seq": self.seq_q})
        except ValidationError as error:
            lines = [f"workload.{key}: {text}" for key, text in explain(error, stated, Workload)]
            raise SpecError("\n".join(lines)) from None

    def problem(self) -> Problem:
        """Return the attention problem of one device; raise `SpecError` if it is not attention."""
        return self.written().problem(seq_q=self.seq_q)


class _Options(SpecModel):
    """Options of a run other than its schedule and its sizes.

    The option names of ``npusim run`` are accepted too: ``hw`` for ``device``, a workload's name in addition to
    ``seq``, ``batch``, ...; ``problem`` for the sizes of a launch or a product; ``tiling: auto`` (or ``declared``).
    """

    @model_validator(mode="before")
    @classmethod
    def _words_of_run(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        case = dict(data)
        if "hw" in case:
            if "device" in case:
                raise fault_at("hw", "means the same as `device`, which is set too; remove one of them")
            case["device"] = case.pop("hw")
        if isinstance(case.get("tiling"), str):
            case["unnamed"] = case.pop("tiling")
            if case["unnamed"] not in ("auto", "declared"):
                raise fault_at("tiling", f"{case['unnamed']!r}: write auto, declared, or fields: {{block_q: 128}}")
        if "problem" in case and "workload" not in case:
            case["workload"] = {"sizes": case.pop("problem")}
        if isinstance(case.get("workload"), str):
            case["workload"] = {"name": case["workload"]}
        if isinstance(case.get("workload"), dict):
            sizes = {name: case.pop(name) for name in OF_NAMED if name in case}
            case["workload"] = {**case["workload"], **sizes}
        return case

    precision: Text | None = Field(default=None, description="absent: the schedule's default")
    tiling: dict[str, TilingValue] | None = Field(
        default=None, description="tiling fields of the measured kernel; auto: those that npusim run chooses"
    )
    unnamed: Literal["auto", "declared"] | None = Field(
        default=None,
        description=(
            "values of the fields that `tiling` does not name. auto: those that npusim run chooses; "
            "declared (default): the schedule's own, because a measured kernel has its author's tile"
        ),
    )
    attention: Text | None = Field(default=None, description="attention inside a node schedule")
    timing: Timing | None = Field(
        default=None,
        description=(
            "kind of the measured time: the busy time of the slowest core, a profiler's task "
            "duration, N calls in a queue divided by N, or (absent) one call that the host waits for"
        ),
    )
    host_floor_us: PositiveFloat | None = Field(
        default=None,
        description=(
            "time of the host for each call: the smallest possible back_to_back time, and a part of the "
            "time of one call"
        ),
    )
    warm: StrictBool | None = Field(default=None, description="whether the inputs are in L2 when the kernel starts")
    l2: L2State | None = Field(
        default=None,
        description=(
            "content of L2 when the kernel starts: lines of other data that must be written back (dirty), nothing "
            "useful (clean), or the inputs (warm); absent: as in the device file"
        ),
    )

    clock_mhz: PositiveFloat | None = Field(
        default=None,
        description=("clock to which the cores were locked; absent: the clock was not locked, and power limited it"),
    )
    power_watts: PositiveFloat | None = Field(
        default=None, description="power limit of the board; absent: as in the device file"
    )

    @property
    def start(self) -> L2State | None:
        """The content of L2 when the kernel starts."""
        return "warm" if self.warm else self.l2

    @property
    def is_open(self) -> bool:
        """Whether npusim chooses the fields that the case does not name, as `npusim.run` does."""
        return self.unnamed == "auto"

    @property
    def kind(self) -> Timing:
        """The kind of latencies of the case."""
        return self.timing or "call"

    @model_validator(mode="after")
    def _a_floor_is_of_the_host(self) -> Self:
        if self.host_floor_us is not None and self.timing in ("core", "kernel"):
            text = f"timing: {self.timing} does not include the host; remove it, or use back_to_back or call"
            raise fault_at("host_floor_us", text)
        return self


class Baseline(_Options):
    """The options by which the baseline of a speedup differs from the case."""

    device: Text | None = None
    schedule: Text | None = None
    workload: MeasuredWorkload | None = None


class MeasurementCase(_Options):
    """One case: the run to predict and its measured results."""

    name: Text = Field(description="unique in the file")
    group: Text | None = Field(default=None, description="cases that differ only in tiling")
    device: Text = Field(description="a hardware or node file by name")
    schedule: Text = Field(description="its name, FILE.py:NAME, or FILE.py::KERNEL of Triton, followed by its launch")
    args: Text | None = Field(default=None, description="arguments of a Triton kernel, in the form of --args")
    grid: Text | None = Field(default=None, description="grid of a Triton kernel")
    constexpr: Text | None = Field(default=None, description="constexpr parameters of a Triton kernel")
    num_warps: PositiveInt | None = Field(default=None, description="warps of a Triton kernel")
    num_stages: PositiveInt | None = Field(default=None, description="stages of a Triton kernel")
    workload: MeasuredWorkload
    baseline: Baseline | None = None
    measured: Measured
    band: Band | None = Field(default=None, description="relative error allowed")
    launches: PositiveInt | None = Field(
        default=None, description="number of launches whose median is the measured time"
    )
    spread: Band | None = Field(default=None, description=("largest difference between a launch's time and the median"))

    @model_validator(mode="after")
    def _speedup_has_a_baseline(self) -> Self:
        if self.measured.speedup is not None and self.baseline is None:
            raise fault_at("baseline", "missing; a speedup is relative to a baseline")
        return self

    def baseline_case(self) -> Self | None:
        """Return the baseline of a speedup; None if there is no baseline.

        The baseline is this case with the keys of ``baseline`` replaced.  Another schedule does not inherit this
        schedule's tiling and precision: if they are omitted, that schedule's defaults apply.
        """
        if self.baseline is None:
            return None
        changes: dict[str, object] = {"baseline": None, "group": None}
        if self.baseline.schedule not in (None, self.schedule):
            changes |= {"tiling": None, "precision": None}
        changes |= {key: value for key, value in self.baseline if value is not None}
        return self.model_copy(update=changes)


class MeasurementFile(SpecModel):
    """A file of measurements."""

    schema_id: Literal["npusim.measurements/1"] = Field(alias="schema")
    source: Text
    band: Band | None = Field(default=None, description="band of the cases that do not state one")
    cases: Annotated[tuple[MeasurementCase, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        first: dict[str, int] = {}
        for index, case in enumerate(self.cases):
            if case.name in first:
                text = f"{case.name!r} is also the name of case {first[case.name] + 1}"
                raise fault_at(f"cases.{index}.name", text)
            first[case.name] = index
        return self

    def band_of(self, case: MeasurementCase) -> float | None:
        """Return the allowed relative error that the case states, else the one that the file states, else None."""
        return case.band if case.band is not None else self.band


def load_measurements(path: str | Path) -> MeasurementFile:
    """Return a file of measurements; raise `SpecError` (``file:line  key: ``) if it is faulty."""
    return validated(MeasurementFile, read_document(Path(path)))


def measurements_text(file: str, source: str, cases: Sequence[Mapping[str, object]]) -> str:
    """Return a file of measurements with one case per line; raise `SpecError` as for a ``file``."""
    lines = [f"  - {json.dumps(case)}\n" for case in cases]
    text = f"schema: npusim.measurements/1\nsource: {json.dumps(source)}\ncases:\n{''.join(lines)}"
    validated(MeasurementFile, parse_document(text, file=file))
    return text


class KernelRule(_Options):
    """What a profile does not state about the launches whose kernel name matches a pattern."""

    kernel: Text = Field(description="a regular expression; its named groups are sizes, or fields of the tiling")
    device: Text | None = Field(default=None, description="absent: the file's")
    schedule: Text
    group: Text | None = Field(default=None, description="cases that differ only in tiling")
    workload: dict[str, object] = Field(default_factory=dict, description="sizes that the profile does not contain")
    inputs: tuple[Text, ...] = Field(default=(), description="axes of each input: batch heads seq_q ...")
    grid: Text | None = Field(default=None, description="axes of the grid of blocks, in the form of inputs")

    @field_validator("kernel")
    @classmethod
    def _is_an_expression(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise PydanticCustomError("pattern", "not a regular expression: {why}", {"why": str(error)}) from None
        return pattern


class MappingFile(SpecModel):
    """The schedules of a profile's kernels, by rule; the first rule that matches a launch applies."""

    schema_id: Literal["npusim.mapping/1"] = Field(alias="schema")
    source: Text = Field(description="who measured, when, and by which method")
    hw: Text | None = Field(default=None, description="the device of the rules that do not name one")
    l2: L2State = Field(description="content of L2 when the kernels started, which no profile states")
    kernels: Annotated[tuple[KernelRule, ...], Field(min_length=1)]


def load_mapping(path: Path) -> MappingFile:
    """Return a mapping of kernels; raise `SpecError` (``file:line  key: ``) if it is faulty."""
    return validated(MappingFile, read_document(path))


# ---------------------------------------------------------------- accepted cycles and decisions

DECISION = "npusim.decision/1"


class Acceptance(SpecModel):
    """The tool that accepted a case's result, and why; ``digest`` covers the case and all of its expectations."""

    npusim: Text = Field(description="version of npusim that computed the result")
    reason: Text = Field(description="reason of the acceptance")
    digest: Text = Field(description="hash of the case and of its expected values; written by npusim check --update")


class UnitCycles(SpecModel):
    """The parts of a unit's time in the core group that ends last, in cycles."""

    busy: NonNegativeInt
    operations: dict[str, NonNegativeInt] = Field(default_factory=dict)
    waits: dict[str, NonNegativeInt] = Field(default_factory=dict)
    phases: dict[str, NonNegativeInt] = Field(default_factory=dict, description="phases without work for the core")


class ExpectedCycles(SpecModel):
    """The accepted result of a case in whole cycles, compared exactly."""

    device_digest: Text = Field(description="hash of the device file's content when this result was accepted")
    cycles: NonNegativeInt = Field(description="cycles of the cores, without launches")
    busy_cycles: dict[str, NonNegativeInt] = Field(description="busy cycles by pipe, over all core groups")
    units: dict[str, UnitCycles] = Field(default_factory=dict, description="units of the core group that ends last")
    accepted: Acceptance | None = None


class Case(RunSizes):
    """The fields of accepted cases of both kinds, in the words of `npusim.run`."""

    description: Text | None = Field(default=None, description="why this case is here")
    hw: Text = Field(description="a device by name, or a path relative to this file")
    workload: Text | None = Field(
        default=None, description="a workload by name, or a path relative to this file; none if a problem is given"
    )
    problem: dict[str, NamedSize] | None = Field(
        default=None, description="m, n, k of gemm, bytes of copy, or sizes of a schedule of plain tensors"
    )
    dtype: Literal["float16", "bfloat16", "float8_e4m3fn", "float32"] | None = None
    ignore: tuple[Text, ...] = ()
    method: Text = "auto"
    overrides: dict[str, TilingValue] = Field(
        default_factory=dict, description="values of the device file by dotted key"
    )
    scale: dict[str, TilingValue] | None = Field(
        default=None, description="factors of the rates of units and links, as --scale sets them: {VECTOR: 0.5}"
    )


class BaselineFile(Case):
    """One case of cycles: a run and its accepted cycles."""

    schema_id: Literal["npusim.baseline/1"] = Field(alias="schema", description="schema of this file")
    schedule: Text = Field(description="its name, or FILE.py:NAME, a path relative to this file")
    tiling: dict[str, TilingValue] = Field(default_factory=dict)
    precision: Text | None = None
    expect: ExpectedCycles | None = Field(
        default=None, description="accepted result; if absent, `npusim check --update` writes it"
    )


class Candidate(SpecModel):
    """A schedule that may win: the values to try for its fields and for the fields of its precision."""

    schedule: Text
    fields: dict[str, tuple[TilingValue, ...]] = Field(min_length=1, description="write the values to try")
    tiling: dict[str, TilingValue] = Field(default_factory=dict, description="fields with a fixed value")
    precision: Text | None = None

    @property
    def name(self) -> str:
        """The schedule's name, with the requested precision."""
        return f"{self.schedule} {self.precision}" if self.precision else self.schedule


class ExpectedChoice(SpecModel):
    """The best point of one candidate; ``cycles`` has the cycles of every point of its space, in grid order."""

    candidate: Text
    point: dict[str, TilingValue] | None = Field(description="null: no point fits")
    latency_us: StrictFloat | None = None
    margin: StrictFloat | None = Field(
        default=None, description=("time of the second-best point divided by the best point's time, minus 1")
    )
    finite: StrictBool | None = Field(
        default=None, description="whether the output is finite; null: no bits are computed"
    )
    cycles: tuple[NonNegativeInt | None, ...] = ()


class ExpectedDecision(SpecModel):
    """The accepted winner of a space."""

    device_digest: Text = Field(description="hash of the device file's content when this result was accepted")
    winner: Text = Field(description="the candidate with the fastest best point")
    margin: StrictFloat | None = Field(
        default=None, description=("time of the next candidate's best point divided by the winner's time, minus 1")
    )
    choices: tuple[ExpectedChoice, ...]
    accepted: Acceptance | None = None


class DecisionFile(Case):
    """A space of schedules and tiles, and its expected winner."""

    schema_id: Literal["npusim.decision/1"] = Field(alias="schema", description="schema of this file")
    candidates: tuple[Candidate, ...] = Field(min_length=1)
    numerics: StrictBool = Field(default=True, description="whether the outputs of the best points are checked")
    expect: ExpectedDecision | None = Field(
        default=None, description="accepted result; if absent, `npusim check --update` writes it"
    )


def load_case(path: Path, *, is_edited: bool = False) -> BaselineFile | DecisionFile:
    """Return a case; raise `SpecError` (``file:line  key: ``) if it is faulty.

    A case that was edited after it was accepted is also refused; with ``is_edited`` it is read without its accepted
    result.
    """
    document = read_document(path)
    is_decision = document.data.get("schema") == DECISION
    case = validated(DecisionFile, document) if is_decision else validated(BaselineFile, document)
    accepted = None if case.expect is None else case.expect.accepted
    if case.expect is None or accepted is None or accepted.digest == digest_of(case, case.expect):
        return case
    if is_edited:
        return case.model_copy(update={"expect": None})
    raise document.error(
        "expect.accepted.digest",
        f"{accepted.digest} does not match this file: the case or its numbers were edited by hand after they were "
        f'accepted; to accept the present results of the case: npusim check {path} --update --reason "..."',
    )


def digest_of(case: Case, expected: ExpectedCycles | ExpectedDecision) -> str:
    """Return the hash of a case's request and expectations."""
    # Keys with default values are omitted: otherwise a key that a later version adds would count as an edit.
    request = case.model_dump(mode="json", exclude={"expect", "description"}, exclude_defaults=True)
    result = expected.model_dump(mode="json", exclude={"accepted"}, exclude_defaults=True)
    return sha256(json.dumps([request, result], sort_keys=True).encode()).hexdigest()[:16]


#: The comment that a file has above accepted values.
_WRITTEN = (
    "Written by\nnpusim check --update --reason TEXT, with version and reason; a value edited by hand is refused."
)
_EXPLAINED: Mapping[str, str] = MappingProxyType(
    {
        "cycles": "cycles: the cores' time without the launch; busy_cycles: of each pipe, over all core groups;\n"
        f"units: how each unit of the core group that ends last spends its cycles. {_WRITTEN}",
        "winner": (
            "winner: the fastest candidate; margin: the time of the next one over the winner's, minus "
            "1;\nchoices: the best point of each candidate, its time and its margin over the next point. "
            f"{_WRITTEN}"
        ),
    }
)


def accepted_text(
    path: Path, case: Case, expected: ExpectedCycles | ExpectedDecision, version: str, reason: str
) -> str:
    """Return a file's text with its expectations replaced; its other lines and comments are unchanged."""
    from ruamel.yaml import YAML

    # Round trip: ruamel's default loader preserves comments, order and quotes.
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 1 << 20  # a key that is split over lines is not a key
    text = io.StringIO()
    accepted = Acceptance(npusim=version, reason=reason, digest=digest_of(case, expected))
    source = read_text(path)
    content: Any = yaml.load(source)
    explanation = _EXPLAINED["winner" if isinstance(expected, ExpectedDecision) else "cycles"]
    if explanation.partition("\n")[0] not in source:
        content.yaml_set_comment_before_after_key("expect", before=explanation)
    content["expect"] = _plain(expected.model_copy(update={"accepted": accepted}).model_dump(mode="json"))
    yaml.dump(content, text)
    return text.getvalue()


def _plain(data: object) -> Any:
    """Return data in the form for YAML: mappings of numbers, and lists of them, on one line each."""
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    if not isinstance(data, dict | list):
        return data
    if isinstance(data, dict):
        node: Any = CommentedMap({key: _plain(value) for key, value in data.items() if value not in ({}, [])})
    else:
        node = CommentedSeq([_plain(value) for value in data])
    values = list(node.values() if isinstance(data, dict) else node)
    if values and not any(isinstance(v, dict | list) or (isinstance(v, str) and len(v) > 40) for v in values):
        node.fa.set_flow_style()
    return node
