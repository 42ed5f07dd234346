"""Files of what was accepted, one case a file: cycles (``npusim.baseline/1``), decisions (``npusim.decision/1``)."""

from __future__ import annotations

import io
import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from npusim.config.document import read_document, read_text
from npusim.config.load import validated
from npusim.config.measurements import TilingValue
from npusim.config.model import NonNegativeInt, PositiveInt, SpecModel, StrictBool, StrictFloat, Text, fault_at

if TYPE_CHECKING:
    from pathlib import Path

DECISION = "npusim.decision/1"


class Acceptance(SpecModel):
    """Who accepted what a case gave: the tool, and why; ``digest`` is of the case and of all that it expects."""

    npusim: Text = Field(description="version of npusim that gave it")
    reason: Text = Field(description="why it was accepted")
    digest: Text = Field(description="hash of the case and of what is expected; written by npusim check --update")


class UnitCycles(SpecModel):
    """Where a unit's time goes in the core group that ends last, in cycles."""

    busy: NonNegativeInt
    operations: dict[str, NonNegativeInt] = Field(default_factory=dict)
    waits: dict[str, NonNegativeInt] = Field(default_factory=dict)
    phases: dict[str, NonNegativeInt] = Field(default_factory=dict, description="in which it has nothing to do")


class ExpectedCycles(SpecModel):
    """What a case gave when it was accepted; whole numbers, compared exactly."""

    device_digest: Text = Field(description="hash of the device file's content at that time")
    cycles: NonNegativeInt = Field(description="of the kernel, without its launch")
    busy_cycles: dict[str, NonNegativeInt] = Field(description="by pipe, over all core groups")
    units: dict[str, UnitCycles] = Field(default_factory=dict, description="of the core group that ends last")
    accepted: Acceptance | None = None


class Case(SpecModel):
    """What cases of all kinds say in the words of `npusim.run`."""

    description: Text | None = Field(default=None, description="why this case is here")
    hw: Text = Field(description="a device by name, or a path relative to this file")
    workload: Text | None = Field(
        default=None, description="a workload by name, or a path relative to this file; none where a problem is given"
    )
    seq: PositiveInt | None = None
    seq_q: PositiveInt | None = None
    seq_kv: PositiveInt | None = None
    batch: PositiveInt | None = None
    tensor_parallel: PositiveInt | None = None
    causal: StrictBool | None = None
    dtype: Literal["float16", "bfloat16", "float8_e4m3fn", "float32"] | None = None
    ignore: tuple[Text, ...] = ()
    method: Text = "auto"
    overrides: dict[str, TilingValue] = Field(
        default_factory=dict, description="values of the device file by dotted key"
    )


class BaselineFile(Case):
    """One case of cycles: what to run, and the cycles it should take."""

    schema_id: Literal["npusim.baseline/1"] = Field(alias="schema", description="of this file")
    schedule: Text = Field(description="its name, or FILE.py:NAME, a path relative to this file")
    tiling: dict[str, TilingValue] = Field(default_factory=dict)
    precision: Text | None = None
    expect: ExpectedCycles | None = Field(default=None, description="absent: written by `npusim check --update`")


class Candidate(SpecModel):
    """A schedule that may win: the values to try of its fields (of its precision's, too), or a store of them."""

    schedule: Text
    fields: dict[str, tuple[TilingValue, ...]] | None = Field(default=None, min_length=1)
    store: Text | None = Field(default=None, description="what npusim explore kept, a path relative to this file")
    tiling: dict[str, TilingValue] = Field(default_factory=dict, description="fields that stay as they are")
    precision: Text | None = None

    @model_validator(mode="after")
    def _has_a_space(self) -> Self:
        if (self.fields is None) == (self.store is None):
            raise fault_at("fields", "write the values to try, or a store of npusim explore; one of them")
        return self

    @property
    def name(self) -> str:
        """What it is called: the schedule, with the precision that is asked for."""
        return f"{self.schedule} {self.precision}" if self.precision else self.schedule


class ExpectedChoice(SpecModel):
    """The best point of one candidate; ``cycles`` of every point of its space, in the order of the grid."""

    candidate: Text
    point: dict[str, TilingValue] | None = Field(description="null: no point fits")
    latency_us: StrictFloat | None = None
    margin: StrictFloat | None = Field(default=None, description="how much longer its next point takes, relative")
    finite: StrictBool | None = Field(default=None, description="of its output; null: no bits")
    cycles: tuple[NonNegativeInt | None, ...] = ()


class ExpectedDecision(SpecModel):
    """What won a space when it was accepted."""

    device_digest: Text = Field(description="hash of the device file's content at that time")
    winner: Text = Field(description="the candidate whose best point takes least time")
    margin: StrictFloat | None = Field(default=None, description="how much longer the next candidate's takes, relative")
    choices: tuple[ExpectedChoice, ...]
    accepted: Acceptance | None = None


class DecisionFile(Case):
    """A space of schedules and tiles, and what should win it."""

    schema_id: Literal["npusim.decision/1"] = Field(alias="schema", description="of this file")
    problem: dict[str, PositiveInt] | None = Field(default=None, description="m, n, k of gemm, or bytes of copy")
    candidates: tuple[Candidate, ...] = Field(min_length=1)
    numerics: StrictBool = Field(default=True, description="whether the best points' outputs are looked at")
    expect: ExpectedDecision | None = Field(default=None, description="absent: written by `npusim check --update`")


def load_case(path: Path, *, is_edited: bool = False) -> BaselineFile | DecisionFile:
    """Return a case; raise `SpecError` (``file:line  key: ``) if it is faulty.

    So is one that was edited since it was accepted, unless ``is_edited``: then it expects nothing.
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
        f"{accepted.digest} is not of this file: the case or its numbers were edited by hand since they were "
        f'accepted; to accept what the case gives today: npusim check {path} --update --reason "..."',
    )


def digest_of(case: Case, expected: ExpectedCycles | ExpectedDecision) -> str:
    """Return the hash of what a case asks for and expects."""
    # Defaults left out: a key that a later version adds is no edit.
    asked = case.model_dump(mode="json", exclude={"expect", "description"}, exclude_defaults=True)
    told = expected.model_dump(mode="json", exclude={"accepted"}, exclude_defaults=True)
    return sha256(json.dumps([asked, told], sort_keys=True).encode()).hexdigest()[:16]


def accepted_text(
    path: Path, case: Case, expected: ExpectedCycles | ExpectedDecision, version: str, reason: str
) -> str:
    """Return a file's text with what it expects replaced; its other lines and comments stay as they are."""
    from ruamel.yaml import YAML

    # Round trip: the default loader of ruamel keeps comments, order and quotes.
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 1 << 20  # a key that is broken over lines is none
    text = io.StringIO()
    accepted = Acceptance(npusim=version, reason=reason, digest=digest_of(case, expected))
    content: Any = yaml.load(read_text(path))
    content["expect"] = _plain(expected.model_copy(update={"accepted": accepted}).model_dump(mode="json"))
    yaml.dump(content, text)
    return text.getvalue()


def _plain(told: Any) -> Any:
    """Return data as YAML is to have it: mappings of numbers and lists of them on one line each."""
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    if not isinstance(told, (dict, list)):
        return told
    if isinstance(told, dict):
        made: Any = CommentedMap({key: _plain(value) for key, value in told.items() if value not in ({}, [])})
    else:
        made = CommentedSeq([_plain(value) for value in told])
    values = list(made.values() if isinstance(told, dict) else made)
    if values and not any(isinstance(v, (dict, list)) or (isinstance(v, str) and len(v) > 40) for v in values):
        made.fa.set_flow_style()
    return made
