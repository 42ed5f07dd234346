"""A kernel's output compared with predicted bits: where they differ, and which other choice explains it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin

import numpy as np

from npusim.config.tiling import word_of
from npusim.errors import NpusimError, SpecError
from npusim.formats import ARITHMETICS
from npusim.formats.mma_arithmetic import sums_key
from npusim.kernels.declare.registry import NAMED
from npusim.library import find_schedule
from npusim.program.numerics.evaluate import chosen, chosen_heads, named_choices, rows_alone
from npusim.program.numerics.paths import Place, bits_of, compute, first_unlike, parting
from npusim.simulation.chosen_tile import fields_of_run, open_fields, program_of
from npusim.simulation.evaluation import source_of, subject_of
from npusim.simulation.figures import figures
from npusim.simulation.plan import plan_of
from npusim.simulation.simulate import run_plan
from npusim.simulation.variants import Variant, Variants
from npusim.studies.validate.given_output import GivenOutput, check_output_file, read_output
from npusim.studies.validate.neighbours import Neighbour, nearest_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from npusim.config.problem import Problem
    from npusim.config.tiling import Tiling
    from npusim.kernels.declare.registry import Precision
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.numerics.evaluate import BlockRows
    from npusim.program.numerics.executor import HeadSource
    from npusim.program.numerics.paths import Computed
    from npusim.simulation.evaluation import Subject
    from npusim.simulation.plan import Plan
    from npusim.simulation.request import Request
    from npusim.simulation.run_result import RunData
    from npusim.simulation.simulate import BuiltPlan

#: Number of nearest single changes that are tried in pairs with all others. A change is near if its number of equal
#: outputs exceeds chance by ``CHANCE`` square roots of the number of outputs.
NEAREST, CHANCE = 3, 4.0
#: A change is named as the nearest only if it makes at least this share of the differing outputs equal. By chance, a
#: change that explains nothing makes as many outputs equal as unequal, and the best of some hundred such changes makes
#: a few more equal.
CLOSES = 0.5
#: Tried formats of an intermediate, scales of an FP8 P, keys of a tile, and splits.
FORMATS = ("float32", "float16", "bfloat16")
SCALES = (1.0, 16.0, 256.0, 448.0)
#: Numeric fields and their tried values: scales of P, and powers of two by which a maximum grows.
NUMBERS = MappingProxyType({"scale": SCALES, "p_scale": SCALES, "growth": (0.0, 4.0, 8.0)})
TILES = (16, 32, 64, 128, 256, 512)
SPLITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Change:
    """Another value of a stated choice: a field of the precision or of the tiling."""

    kind: Literal["precision", "tiling"]
    field: str
    value: object

    def __str__(self) -> str:
        return f"{self.field}={self.value}"


@dataclass(frozen=True)
class Explanation:
    """Other values of stated choices, the number of outputs that are then equal, and the step of the difference.

    ``of``: the number of compared outputs: all outputs, or, if not all are equal, only those from the row of the first
    difference to the end of its block.
    """

    changes: tuple[Change, ...]
    matched: int
    of: int
    parted: str = ""

    def __str__(self) -> str:
        return ",".join(map(str, self.changes))


@dataclass(frozen=True)
class Difference:
    """A kernel's output compared with predicted bits, on the computed rows.

    ``reading``: how tensors were read, if another layout is likelier (`Plan.reading`).  ``tile``: the fields of the
    tile that were named or chosen.  ``first`` is the first element that differs (batch, head, row, column), ``given``
    and ``predicted`` its values.  ``blank``: rows of the output that are all NaN, in words; ``problem`` is another
    problem that the kernel computes: no choice is tried then.  ``explained`` are the simplest changes that make every
    output equal; ``nearest`` is the closest change if no change does: the arithmetic that the device's vendor states,
    or another choice if it makes the share `CLOSES` of the differing outputs equal; ``tried`` counts the changes.
    """

    run: RunData
    reading: str
    tile: str
    matched: int
    total: int
    first: tuple[int, int, int, int] | None = None
    given: float = 0.0
    predicted: float = 0.0
    blank: str = ""
    explained: tuple[Explanation, ...] = ()
    nearest: Explanation | None = None
    tried: int = 0
    problem: Neighbour | None = None

    @property
    def passed(self) -> bool:
        """Whether every output is equal, or a stated choice explains the difference."""
        return self.matched == self.total or bool(self.explained)


def diff(
    output: str | Path | NDArray[Any], request: Request, on_tried: Callable[[int, int], None] | None = None
) -> Difference:
    """Compare a kernel's output with the prediction of a request, and search for an explanation of the difference.

    ``output`` is (batch, heads, seq_q, value head size), without the first axis if its size is 1, in the run's output
    format or as unsigned bit patterns of its width; or a ``.npz`` or ``.safetensors`` file that contains it as ``o``,
    ``out`` or ``output``, or as its only array.  A key ``computed`` of such a file, (batch, heads, seq_q), is not 0 for
    the rows that the file has: only these are compared, and all of them unless the request names rows or heads.
    ``on_tried`` gets the number of changes that were tried, and the number of all changes.

    Tiling fields that the request does not name are chosen, as `npusim.run` chooses them.

    Raises `TensorError` if the file is not readable or has no output, if the output is of another shape or dtype, or if
    it has none of the requested rows; `SpecError` if the request is not an attention, or runs on a node; `NpusimError`
    as `npusim.run`.
    """
    return comparison(output, request, on_tried).difference()


def comparison(
    output: str | Path | NDArray[Any], request: Request, on_tried: Callable[[int, int], None] | None = None
) -> HeldOutput:
    """Return a kernel's output with the program of a request; arguments and errors as for `diff`."""
    check_output_file(output)  # before a tile is chosen, which may take seconds
    plan = plan_of(request, is_bare=True)
    base = run_plan(plan)
    if not base.problem.has_bits or "o" not in base.program.tensors:
        raise SpecError(f"diff: schedule {request.schedule} computes no output of attention to compare with")
    subject = subject_of(plan, base.program)
    given = read_output(output, subject, base.program.tensors["o"].fmt)
    rows, heads = given.asked(request.rows, request.heads)
    asked = replace(request, rows=rows, heads=heads, tiling=fields_of_run(plan, base.tiling))
    of_run = replace(plan, tiling=base.tiling)
    return HeldOutput(of_run, base, plan.tiling, asked, subject, source_of(plan, subject), given, on_tried)


@dataclass
class HeldOutput:
    """A kernel's output, and the prediction that it is compared with; ``request`` states the tile of the run ``base``.

    ``declared``: the tile of the schedule before any field was chosen.
    """

    plan: Plan
    base: RunData
    declared: Tiling
    request: Request
    subject: Subject
    source: HeadSource
    given: GivenOutput
    on_tried: Callable[[int, int], None] | None
    tried: int = 0
    total: int = 0

    def of(self, output: str | Path | NDArray[Any]) -> HeldOutput:
        """Return another output of the same request."""
        return replace(self, given=read_output(output, self.subject, self.base.program.tensors["o"].fmt))

    @property
    def tile(self) -> str:
        """The fields of the run's tile that are named or may be chosen, as a user writes them."""
        named = dict(self.request.tiling or {})
        names = open_fields(self.plan.schedule, self.plan.device) if self.plan.is_open else frozenset()
        words = {n: word_of(type(self.declared), n, x) for n, x in self.base.tiling if n in names or n in named}
        return " ".join(f"{n}={word}" for n, word in words.items() if word is not None)

    @cached_property
    def _variants(self) -> Variants:
        return Variants(self.request)

    def difference(self) -> Difference:
        """Return the difference, with its explanation."""
        written = self.given.cut(self.rows(self.base.program))
        matched, total = self.equal(written)
        at = self._first(written)
        if at is None:
            return Difference(self.base, self.plan.reading, self.tile, matched, total)
        batch, head, row, column = at
        start, rows = next((r, b) for (n, h, r), b in sorted(written.items()) if (n, h) == at[:2] and row < r + len(b))
        given, predicted = float(self.given.values[at]), float(rows[row - start, column])
        blank = self.given.blank(written)
        found = Difference(self.base, self.plan.reading, self.tile, matched, total, at, given, predicted, blank)
        if found.blank:
            return found
        place = Place(row, head, batch)
        if other := self.neighbour(place, written):
            return replace(found, problem=other)
        explained, nearest = self._explain(place, total)
        return replace(found, explained=tuple(explained), nearest=nearest, tried=self.tried)

    def neighbour(self, place: Place, written: Mapping[BlockRows, NDArray[Any]]) -> Neighbour | None:
        """Return another problem that the output computes from a row on; ``written``: the predicted rows."""
        schedule, problem = self.plan.schedule, self.subject.attention
        if problem is None or schedule.reference or schedule.sees or schedule.is_hooked:
            return None
        batch, head, row = place.batch, place.head, place.row
        start, rows = next(
            (r, b) for (n, h, r), b in written.items() if (n, h) == (batch, head) and r <= row < r + len(b)
        )
        both = self.given.values[batch, head, row : start + len(rows)], rows[row - start :]
        return nearest_problem(*both, problem, self.source, place, partial(self._predicted, place))

    def _explain(self, place: Place, total: int) -> tuple[list[Explanation], Explanation | None]:
        """Return the single changes that explain all outputs, or the pairs that do, and the nearest change if none
        does.
        """
        base = self._compute(self.base.program, place)
        singles = alternatives(self.base)
        listed = [*((c,) for c in singles), *self._declared()]
        self.total = len(listed)
        base_matched, of = self._probe(base, place)
        ranked = sorted(self._try(listed, place, base), key=_rank)
        explained = [e for e in ranked if e.matched == total and self._holds(e)]
        if explained:
            return _simplest(explained), None
        least = base_matched + CHANCE * of**0.5
        better = list(islice((e for e in ranked if e.matched > least and self._holds(e)), NEAREST))
        leads = [e.changes for e in better]
        pairs = [
            (*lead, c)
            for n, lead in enumerate(leads)
            for c in singles
            if c.field not in {x.field for x in lead} and (c,) not in leads[:n]
        ]
        self.total += len(pairs)
        ranked = sorted([*ranked, *self._try(pairs, place, base)], key=_rank)
        explained = [e for e in ranked if e.matched == total and self._holds(e)]
        near = next((e for e in ranked if not any(map(self.is_foreign, e.changes)) and self._holds(e)), None)
        if explained or near is None or near.matched - base_matched < CLOSES * (near.of - base_matched):
            return _simplest(explained), None
        return [], near

    def _predicted(self, place: Place, problem: Problem) -> NDArray[Any]:
        """Return the schedule's rows from a row on for another problem; NaN if it does not compute that problem."""
        plan = replace(self.plan, problem=problem, is_open=False)
        try:
            return self._compute(program_of(plan, is_hinted=False)[1], place).rows[place.head]
        except NpusimError:
            return np.full((1, problem.output_cols), np.nan)

    def _declared(self) -> list[tuple[Change, ...]]:
        """Return the fields that were chosen for the run, with their declared values: the tile of a published kernel as
        a whole.
        """
        kind, declared = type(self.declared), dict(self.declared)
        moved = [n for n, value in dict(self.request.tiling or {}).items() if declared[n] != value]
        return [tuple(Change("tiling", n, word_of(kind, n, declared[n])) for n in moved)] if moved else []

    def is_foreign(self, change: Change) -> bool:
        """Return whether a change is to the matrix arithmetic of another vendor's device."""
        makers = {name.partition(".")[0] for name in named_choices(self.base.program)[0]}
        return change.field == "arithmetic" and str(change.value).partition(".")[0] not in makers

    def _try(self, listed: Sequence[tuple[Change, ...]], place: Place, base: Computed) -> Iterator[Explanation]:
        """Yield the results of changes on the block of the first difference; on all rows if that block is equal.

        Programs of changes are not checked (`_holds`): a check takes longer than the bits, and few changes are
        reported.  Changes that cannot differ in bits (`_bits_key`) are computed once.
        """
        outcomes: dict[Hashable, tuple[int, int, str]] = {}

        def outcome(changes: tuple[Change, ...]) -> tuple[int, int, str]:
            self.tried += 1
            if self.on_tried:
                self.on_tried(self.tried, self.total)
            key = tuple(map(_bits_key, changes))
            if key not in outcomes:
                built = self.built(changes)
                other = self._compute(built.program, place)
                matched, of = self._probe(other, place)
                if matched == of:
                    matched, of = self.equal(self.given.cut(self.rows(built.program)))
                outcomes[key] = matched, of, parting(base.events, other.events)
            return outcomes[key]

        for changes, (matched, of, first) in figures(listed, outcome):
            yield Explanation(changes, matched, of, first)

    def built(self, changes: tuple[Change, ...]) -> BuiltPlan:
        """Return the program of a run with changes; raise `NpusimError` if the call does not have them."""
        tiling, precision = ({c.field: c.value for c in changes if c.kind == k} for k in ("tiling", "precision"))
        return self._variants.build(Variant(tiling=tiling, precision=precision))

    def _holds(self, explanation: Explanation) -> bool:
        """Return whether the program of an explanation passes the check of every run."""
        try:
            self.built(explanation.changes).check()
        except NpusimError:
            return False
        return True

    def _compute(self, program: TileProgram, place: Place) -> Computed:
        return compute(program, place, self.source)

    def _probe(self, computed: Computed, place: Place) -> tuple[int, int]:
        """Return the number of equal outputs in the block from a row on, and the number of compared ones."""
        return self.equal(self.given.cut({(place.batch, place.head, place.row): computed.rows[place.head]}))

    def rows(self, program: TileProgram) -> dict[BlockRows, NDArray[Any]]:
        """Return a program's result for the requested rows, by batch, head and first row."""
        r, output = self.request, self.subject.output
        rows, heads = chosen("rows", r.rows, output.seq_q), chosen_heads(output, r.heads)
        return rows_alone(program, self.source, rows, heads)

    def equal(self, written: Mapping[BlockRows, NDArray[Any]]) -> tuple[int, int]:
        """Return the number of outputs with the bits of some rows, and the number of compared ones."""
        given = self.given.beside(written)
        return sum(_count(x, given[at]) for at, x in written.items()), sum(x.size for x in written.values())

    def _first(self, written: Mapping[BlockRows, NDArray[Any]]) -> tuple[int, int, int, int] | None:
        given = self.given.beside(written)
        for (n, h, r), block in sorted(written.items()):
            at = first_unlike(block, given[n, h, r])
            if at is not None:
                return n, h, r + at[0], at[1]
        return None


def _count(a: NDArray[Any], b: NDArray[Any]) -> int:
    return int((bits_of(a) == bits_of(b)).sum()) if (a.dtype, a.shape) == (b.dtype, b.shape) else 0


def _bits_key(change: Change) -> Hashable:
    """Return a value that is equal for changes to equal matrix arithmetic, which devices name differently."""
    if change.field != "arithmetic" or not isinstance(change.value, str):
        return change
    return change.kind, sums_key(change.value)


def _rank(explanation: Explanation) -> tuple[int, int]:
    return -explanation.matched, len(explanation.changes)


def _simplest(explained: list[Explanation]) -> list[Explanation]:
    fewest = min((len(e.changes) for e in explained), default=0)
    return [e for e in explained if len(e.changes) == fewest]


# ---------------------------------------------------------------- other choices


def alternatives(base: RunData) -> tuple[Change, ...]:
    """Return every single change to the choices of a run that its schedule states."""
    schedule = find_schedule(base.schedule, base.device.family)
    precision = schedule.precision(base.precision)
    return tuple(dict.fromkeys([*_of_precision(base, precision), *_of_tiling(base, schedule.tiling)]))


def _of_precision(base: RunData, precision: Precision) -> Iterator[Change]:
    formats = precision.formats()
    for field in dataclasses.fields(cast("Any", precision)):
        stated = getattr(precision, field.name)
        for value in _values(base, field.name, stated, is_format=field.name in formats):
            if value != stated:
                yield Change("precision", field.name, value)


def _values(base: RunData, name: str, stated: object, *, is_format: bool) -> tuple[object, ...]:
    if is_format:
        return FORMATS
    if name == "arithmetic":
        return _arithmetics(base)
    if name == "sink" and not getattr(base.problem, "sink_logits", False):
        return ()
    if isinstance(stated, bool):
        return (not stated,)
    return NUMBERS.get(name, ()) if isinstance(stated, float) else NAMED.get(name, ())


def _arithmetics(base: RunData) -> tuple[str, ...]:
    """Return the other matrix arithmetics for the operands of the run's products."""
    used = [ARITHMETICS[name] for name in named_choices(base.program)[0]]
    operands = {(a.a_format, a.b_format, a.scale_format) for a in used}
    return tuple(
        n for n, a in ARITHMETICS.items() if (a.a_format, a.b_format, a.scale_format) in operands and a not in used
    )


def _of_tiling(base: RunData, tiling: type[Tiling]) -> Iterator[Change]:
    keys, of_run = getattr(base.problem, "seq_kv", 0), dict(base.tiling)
    for name, field in tiling.model_fields.items():
        stated = of_run.get(name)
        kind = field.annotation
        if get_origin(kind) is Literal:
            values: tuple[object, ...] = get_args(kind)
        elif kind is bool:
            values = (True, False)
        else:
            sizes = {"block_kv": TILES, "block": TILES, "splits": SPLITS}.get(name, ())
            values = tuple(size for size in sizes if size <= keys)
        yield from (Change("tiling", name, value) for value in values if value != stated)
