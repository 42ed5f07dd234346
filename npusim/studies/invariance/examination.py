"""Varies a call, one aspect after another, and compares the bits of one row block with the bits of the unchanged call.

Aspects are other batches, positions in batches, further tokens, pages, numbers of queries at a time, splits and rules
of splits, tiles and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, zip_longest
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Unpack, cast, get_args

from npusim.config.tiling import tiling_fields
from npusim.errors import ProgramError, SpecError, TilingError, one_line
from npusim.kernels.attention.split_rules import RULES
from npusim.kernels.declare.define import machine_of
from npusim.library.split_kv import SplitFields
from npusim.program.ir.op import Step
from npusim.program.ir.sameness import ProgramContent
from npusim.program.ir.tile import GlobalTile
from npusim.program.numerics.executor import steps_of
from npusim.program.numerics.input_tensors import drawn_source
from npusim.program.numerics.paths import Computed, Place, compute, first_difference, parting
from npusim.simulation.chosen_tile import choose_tile, fields_of_run, open_fields, program_of
from npusim.simulation.classes import class_key
from npusim.simulation.evaluation import source_of, subject_of
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request, SeedOptions, takes_options
from npusim.simulation.simulate import BuiltPlan, run_plan
from npusim.simulation.variants import Variant, Variants, named_fields, row_steps
from npusim.studies.invariance.company import (
    VariedCall,
    alike,
    batches,
    chunks,
    inputs_of,
    pages,
    plain_calls,
    positions,
    prefills,
    shares,
    structural_difference,
    with_bias_of_one_row,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npusim.config.problem import AnyProblem
    from npusim.config.tiling import Tiling
    from npusim.program.ir.tile_program import TileProgram
    from npusim.simulation.plan import Plan
    from npusim.simulation.run_result import RunData

#: ``length``: tokens that follow the tokens of a recurrence; ``chunk``: the number of queries at a time; ``prefill``:
#: the queries of a prompt or of a decoding step; ``rule``: the rule of splits; ``merge``: the order in which partial
#: results are merged, or the kernel that adds them; ``choice``: npusim chooses the fields that are not named separately
#: for each call. With all other aspects, each call has the fields of the examined call.
Aspect = Literal[
    "batch",
    "position",
    "length",
    "page",
    "chunk",
    "prefill",
    "splits",
    "rule",
    "merge",
    "tile",
    "packing",
    "ranks",
    "choice",
]
ASPECTS: tuple[Aspect, ...] = get_args(Aspect)
#: Aspects for whose calls npusim may choose other fields.
CHOSEN_FOR: tuple[Aspect, ...] = ("batch", "page", "chunk", "prefill", "packing", "ranks")
#: Other aspects, which no field of the kernel names.
UNNAMED: tuple[Aspect, ...] = ("position", "length")
#: Other split counts that are tried.
SPLITS = (1, 2, 8)
#: Sizes of blocks that are halved for other tiles.
BLOCKS = (*("block_kv", "block_q", "block", "tile_q", "tile_kv"), *("chunk", "block_value", "block_key", "block_sums"))
#: Fields that name the order in which partial results are merged, and the kernel that adds them.
MERGING = ("merge", "method")
#: Number of keys of all KV heads whose bits are compared: this limits the time of a variant.
KEYS = 1 << 16
Part = TypeVar("Part")
#: ``cannot``: the bits are the same by structure, for any inputs; ``same class``: the bits are the same by structure
#: for finite inputs; ``not seen``: the steps differ, but the bits are the same on these inputs; ``changes``: the bits
#: differ; ``none``: there is no other way to run the call.
Verdict = Literal["cannot", "same class", "not seen", "changes", "none"]


@dataclass(frozen=True)
class BitDifference:
    """The first element of the result that differs, and both values."""

    element: str
    value: float
    other: float

    def __str__(self) -> str:
        return f"{self.element}: {self.value:.9g} | {self.other:.9g}"


@dataclass(frozen=True)
class Tried:
    """One varied call; ``reason`` states why it cannot be run.

    ``parted`` is the first operation and tile whose values differ, even where the result rounds to the same bits.
    ``is_same_class``: a tile of the same class of bits (`npusim.simulation.classes`), whose steps differ.
    """

    what: str
    is_same_structure: bool = False
    is_same_class: bool = False
    difference: BitDifference | None = None
    parted: str = ""
    latency_us: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Finding:
    """Effect of one aspect on the bits, and the fields that prevent it. ``cost_us``: the largest cost of ``guarantee``
    among the tried calls, negative if the guarantee makes the call faster; None without a time.
    """

    aspect: Aspect
    tried: tuple[Tried, ...]
    guarantee: str = ""
    cost_us: float | None = None
    cost_at: str = ""

    @property
    def verdict(self) -> Verdict:
        """Whether the bits can change."""
        done = [t for t in self.tried if not t.reason]
        if any(t.difference for t in done):
            return "changes"
        if not done:
            return "none"
        if all(t.is_same_structure for t in done):
            return "cannot"
        return "same class" if all(t.is_same_structure or t.is_same_class for t in done) else "not seen"

    @property
    def first(self) -> Tried | None:
        """The first variation that changed the bits; if none did, the first that changed intermediate values."""
        seen = [t for t in self.tried if t.difference] or [t for t in self.tried if t.parted]
        return seen[0] if seen else None


@dataclass(frozen=True, repr=False)
class Invariance:
    """The result of `npusim.invariant`: how the bits of a call's last block of rows change, aspect by aspect.

    Attributes
    ----------
    findings : tuple of Finding
        One per aspect: ``verdict``, the calls that were ``tried``, the fields of the ``guarantee`` and ``cost_us``, its
        cost in microseconds; ``invariance["batch"]`` is the finding of one aspect.
    base : RunResult
        The run of the call itself.
    row, heads, sequence : int
        The first row that is compared, the number of compared heads, and the number of the sequence that contains them:
        the first sequence, or the longest one if sequences differ in length.

    Examples
    --------
    >>> import npusim
    >>> invariance = npusim.invariant("flash", seq=256, vary=["batch"])
    >>> invariance["batch"].verdict, invariance.holds("batch")
    ('not seen', True)
    """

    base: RunData
    row: int
    heads: int
    findings: tuple[Finding, ...]
    sequence: int = 0

    def __getitem__(self, aspect: str) -> Finding:
        """Return the finding of one aspect; raise `SpecError`, which names the examined aspects."""
        finding = next((f for f in self.findings if f.aspect == aspect), None)
        if finding is None:
            raise SpecError(f"aspect {aspect!r}: the examined aspects are {', '.join(f.aspect for f in self.findings)}")
        return finding

    def holds(self, *aspects: str) -> bool:
        """Return whether no change of these aspects changed a bit, either directly or through the fields that npusim
        chose for it.
        """
        return all(self[aspect].verdict != "changes" and not self.chosen_otherwise(aspect) for aspect in aspects)

    def chosen_otherwise(self, aspect: str) -> str:
        """Return the first call of an aspect for which npusim chooses fields that change bits; empty if there
        is none.
        """
        calls = {t.what for t in self[aspect].tried}
        choices = [f for f in self.findings if f.aspect == "choice"]
        return next((t.what for f in choices for t in f.tried if t.difference and t.what in calls), "")

    def __repr__(self) -> str:
        """Return the call, its time, and each aspect's verdict, on one line."""
        time = "" if self.base.timing is None else f", {self.base.latency_us:,.2f} us"
        verdicts = ", ".join(f"{f.aspect}: {f.verdict}" for f in self.findings)
        return f"<Invariance of {self.base.name} on {self.base.device.name}{time}; {verdicts}>"


@takes_options(SeedOptions)
def invariant(schedule: str, *, vary: Collection[str] = ASPECTS, **options: Unpack[SeedOptions]) -> Invariance:
    """Vary a call and report which variations change the bits of its first sequence.

    Parameters
    ----------
    vary
        Aspects to vary, from `ASPECTS`; the other options are as for `npusim.run`.

    Returns
    -------
    Invariance
        By aspect: the bits change (with the first element, operation and tile that differ), cannot change by structure,
        or did not change on these inputs; and the cost, in microseconds, of excluding the change.

    Raises
    ------
    SpecError
        An unknown aspect, or a node: a run on a node reports the effect of other orders of its collective.
    NpusimError
        Errors as `npusim.run`.

    Examples
    --------
    >>> invariance = invariant("flash", seq=256, vary=["batch"])
    >>> invariance["batch"].verdict
    'not seen'
    """
    return examine(Request(schedule, **options), vary)


def examine(
    request: Request, vary: Collection[str] = ASPECTS, on_tried: Callable[[int, int], None] | None = None
) -> Invariance:
    """Examine a request; see :func:`invariant`.  ``on_tried`` receives the number of finished variants and
    their total.
    """
    unknown = [name for name in vary if name not in ASPECTS]
    if unknown or not vary:
        raise SpecError(f"vary: {unknown[0] if unknown else 'nothing'!r}; allowed: {', '.join(ASPECTS)}")
    device = request.machine()
    if (node := machine_of(device).node) is not None:
        raise SpecError(f"{node.name}: invariance is examined on one device; use --hw {node.device}")
    plan = plan_of(replace(request, hw=device, overrides=None), is_bare=True)
    if not plan.schedule.has_bits:
        raise SpecError(f"schedule {plan.schedule.name} has no bits: nothing to examine")
    plan = replace(plan, problem=with_bias_of_one_row(plan.problem))
    base = run_plan(plan)
    chosen, named = choose_tile(plan).fields, plan.tiling.model_fields_set
    examination = _Examination(plan, base, on_tried)
    is_ruled = isinstance(base.tiling, SplitFields) and base.tiling.splits == "auto"
    may_choose = open_fields(plan.schedule, plan.device) - named or is_ruled
    if not (plan.is_open and may_choose):
        return examination.findings(vary)
    return examination.findings({*vary, *(("choice",) if {*CHOSEN_FOR} & {*vary} else ())}, chosen)


class _AsAsked(Generic[Part]):
    """The parts that an iterator yields, each computed when it is requested, and stored."""

    def __init__(self, parts: Iterator[Part]) -> None:
        self._parts, self._known = parts, list[Part]()

    def __iter__(self) -> Iterator[Part]:
        for number in count():
            if number == len(self._known) and (part := next(self._parts, None)) is not None:
                self._known.append(part)
            if number == len(self._known):
                return
            yield self._known[number]


#: The bits of the examined rows: the bits of one group's heads, and those of the other heads; the latter are not needed
#: if the former differ.
_Bits = _AsAsked[Computed]


def _is_equal(one: Iterable[Hashable], two: Iterable[Hashable]) -> bool:
    return all(part == other for part, other in zip_longest(one, two))


def _differing(one: _Bits, two: _Bits) -> tuple[tuple[int, int, int], list[dict[int, NDArray[Any]]]] | None:
    """Return head, row and column of the first value that differs, and the rows of that part of the heads."""
    for part, other in zip(one, two, strict=False):
        at = first_difference(part.rows, other.rows)
        if at is not None:
            return at, [part.rows, other.rows]
    return None


class _Examination:
    def __init__(self, plan: Plan, base: RunData, on_tried: Callable[[int, int], None] | None) -> None:
        problem, request = base.problem, plan.request
        self.base, self.problem, self.attention = base, problem, problem.attention
        self.on_tried, self.count, self.total = on_tried, 0, 0
        self._made: dict[tuple[int, Place, bool], _Bits] = {}
        #: Memories that one execution after another uses.
        self._memories: dict[str, NDArray[Any]] = {}
        self._keys: dict[tuple[int, Place], _AsAsked[Hashable]] = {}
        #: Programs that others are compared with, whose bits and keys are stored.
        self._kept: dict[int, TileProgram] = {id(base.program): base.program}
        self._calls_fixed: dict[str, BuiltPlan] = {}
        self.plan = plan
        self.lengths: tuple[int, ...] = () if self.attention is None else self.attention.lengths
        self.sequence = self.lengths.index(max(self.lengths)) if self.lengths else 0
        self.place = Place(_row(base, self.sequence), batch=self.sequence)
        # The fields that the user or the run chose, the same for every call.  Sizes may still shrink to fit.
        self.asked = Request(
            request.schedule,
            problem=problem,
            hw=base.device,
            tiling=request.tiling,
            method=request.method,
            precision=request.precision,
            arithmetic=request.arithmetic,
        )
        self.variants = Variants(replace(self.asked, tiling=fields_of_run(plan, base.tiling)))
        self._tried: dict[str, tuple[Tiling, Tried]] = {}
        #: Programs of the examined problem; several rules of splits build the same one.
        self._same: dict[ProgramContent, Tried] = {}
        self._other: dict[str, None] = {}
        if (p := self.attention) is not None:
            self.source = drawn_source(p.model_copy(update={"page": 0}))
            self.heads = p.group_size * max(1, min(p.kv_heads, KEYS // p.seq_kv))
            self.first_heads = p.group_size
        else:
            output = base.program.tensors["o"]
            self.heads = max(1, min(output.heads, KEYS // output.rows))
            self.first_heads = 1
        self.latency = None if base.timing is None else base.latency_us

    def findings(self, vary: Collection[str], chosen: Collection[str] | None = None) -> Invariance:
        """Return the findings, in the order of `ASPECTS`; ``chosen``: the fields that npusim chose, None if it may not
        choose.
        """
        every = self._calls()
        calls = {name: listed for name, listed in every.items() if name in vary}
        others = [call for name in CHOSEN_FOR for call in (calls.get(name, []) if calls else every[name])]
        others = others if chosen is not None and "choice" in vary else []
        self.total = sum(map(len, calls.values())) + len(others)
        findings = {name: self._finding(name, listed) for name, listed in calls.items()}
        if "choice" in vary:
            findings["choice"] = self._choice(others, chosen or ())
        listed = tuple(findings[name] for name in ASPECTS if name in findings)
        return Invariance(self.base, self.place.row, self.heads, listed, self.sequence)

    def _counted(self, tried: Tried) -> Tried:
        self.count += 1
        if self.on_tried:
            self.on_tried(self.count, self.total)
        return tried

    # ---------------------------------------------------------------- variations

    def _calls(self) -> dict[Aspect, list[VariedCall]]:
        """Return the calls to try, by aspect; none if a call cannot be varied."""
        calls: dict[str, list[VariedCall]]
        if (p := self.attention) is not None:
            of_problem, sizes = (p, self.sequence), {"heads": p.heads, "kv_heads": p.kv_heads}
            calls = {
                "batch": batches(*of_problem),
                "position": positions(*of_problem),
                "page": pages(*of_problem),
                "chunk": chunks(*of_problem),
                "prefill": prefills(*of_problem),
                "ranks": list(shares(sizes, self.sequence)),
            }
        else:
            schedule = self.plan.schedule
            stated = {**schedule.sizes, **self.problem.sizes}
            sizes = {n: size for n, size in stated.items() if isinstance(size, int)}
            calls = plain_calls(sizes, schedule.grows(self.problem, self.base.tiling))
        calls |= self._calls_of_fields()
        return {name: calls.get(name, []) for name in ASPECTS if name != "choice"}

    def _calls_of_fields(self) -> dict[str, list[VariedCall]]:
        tiling = self.base.tiling
        known = {f.name: f for f in tiling_fields(type(tiling))}
        values: dict[str, list[tuple[str, object]]] = {aspect: [] for aspect in ("splits", "rule", "tile", "packing")}
        if isinstance(tiling, SplitFields):
            values["splits"] = [("splits", n) for n in (*SPLITS, self.splits + 1) if n != self.splits]
            if not tiling.split_keys:
                values["rule"] = [("splits", rule) for rule in ("auto", *RULES) if rule != tiling.splits]
        values["merge"] = [(n, x) for n in MERGING if n in known for x in known[n].choices if x != getattr(tiling, n)]
        constexprs = [n for n, f in known.items() if f.description.startswith("constexpr of ") and f.minimum is None]
        for name in (n for n in (*BLOCKS, *constexprs) if n in known and isinstance(getattr(tiling, n), int)):
            half = (getattr(tiling, name) or 0) // 2
            if half >= (known[name].minimum or 1) and half % (known[name].multiple_of or 1) == 0:
                values["tile"].append((name, half))
        if "pack" in known and getattr(self.problem, "group_size", 1) > 1:
            # In a packed tensor, rows of several query heads are rows of one block.
            values["packing"] = [("pack", "off" if self.base.program.tensors["o"].packed > 1 else "on")]
        return {
            aspect: [VariedCall(f"{n}={value}", Variant(tiling={n: value}), self.sequence) for n, value in listed]
            for aspect, listed in values.items()
        }

    @cached_property
    def splits(self) -> int:
        """Largest number of parts into which the keys of a block of queries are split."""
        spans = [span for block in self.base.program.phases[0].blocks for span in block.spans]
        return max((start for axis, start, _ in spans if axis == "split"), default=0) + 1

    def _try(self, call: VariedCall, *, as_run: bool = False) -> Tried:
        """Try a call in the kernel of the examined call, or in the kernel that a run of it chooses."""
        try:
            built = self._as_run(call) if as_run else self.variants.build(call.variant)
        # the tile does not fit, or a user's kernel does not accept such a call
        except (TilingError, ProgramError) as error:
            return Tried(call.what, reason=one_line(error))
        tiling, tried = self._tried.get(call.what, (None, None))
        if as_run and tried and tiling == built.plan.tiling:
            return tried
        tried = self._compared_once(call, built)
        self._tried.setdefault(call.what, (built.plan.tiling, tried))
        return tried

    def _as_run(self, call: VariedCall) -> BuiltPlan:
        built = BuiltPlan(*program_of(plan_of(call.variant.on(self.asked), is_bare=True)))
        named = {*named_fields(self.asked.tiling), *call.variant.tiling}
        self._other |= {n: None for n, v in built.plan.tiling if n not in named and v != getattr(self.base.tiling, n)}
        return built

    def _choice(self, calls: list[VariedCall], chosen: Collection[str]) -> Finding:
        """Return the effect of chosen fields on the bits of varied calls, and the cost of naming this call's fields."""
        self._other = dict.fromkeys(chosen)
        finding = Finding("choice", tuple(self._counted(self._try(call, as_run=True)) for call in calls))
        if finding.verdict != "changes":
            return finding
        tiling = self.base.tiling
        fields = {n: dict(tiling)[n] for n in self._other}
        if isinstance(tiling, SplitFields) and tiling.splits == "auto" and not tiling.split_keys:
            is_size = bool(self.lengths) or any(c.is_last_query for c in calls)
            fields |= {n: v for n, v in self._fixed(is_size=is_size).items() if v != "auto"}
        latencies = {what: tried.latency_us or 0.0 for what, (_, tried) in self._tried.items()}
        costs = [(latencies[t.what] - (t.latency_us or 0.0), f"at {t.what}") for t in finding.tried if t.difference]
        return replace(finding, guarantee=" ".join(f"{n}={v}" for n, v in fields.items()), **_cost(costs))

    def _compared_once(self, call: VariedCall, built: BuiltPlan) -> Tried:
        """Return `_compared`, or the result for an equal program: equal programs of one problem have the same bits and
        times.

        Constants are not part of a program's content, so that programs with constants are compared separately.
        """
        if call.variant != Variant(tiling=call.variant.tiling) or built.program.constants:
            return self._compared(call, built)
        content = ProgramContent(built.program)
        if content not in self._same:
            self._same[content] = self._compared(call, built)
        return replace(self._same[content], what=call.what)

    def _compared(self, call: VariedCall, built: BuiltPlan) -> Tried:
        """Return a varied call compared with the examined call, by structure and otherwise by bits."""
        latency, program = built.latency_us(), built.program
        problem = built.plan.problem
        # Positions of sequences of equal length are compared within the larger batch.
        is_moved = call.position != self.sequence and not self.lengths
        base = (program, self.place) if is_moved else (self.base.program, self._row_of(call, self.problem, self.place))
        place = self._row_of(call, problem, replace(self.place, batch=call.position))
        keys = self._key_of(*base), self._key_of(program, place)
        if _is_equal(*keys) and not _adds(program):
            return Tried(call.what, is_same_structure=True, latency_us=latency)
        # classes are valid within one problem
        if call.variant == Variant(tiling=call.variant.tiling) and not _adds(program):
            classes = [class_key(p, self.base.device) for p in (self.base.program, program)]
            if classes[0] and classes[0] == classes[1]:
                return Tried(call.what, is_same_class=True, latency_us=latency)
        has_path = not call.is_last_query
        expected = self._computed(*base, problem if is_moved else self.problem, has_path=has_path)
        changed = self._computed(program, place, problem, has_path=has_path)
        parts, difference = _differing(expected, changed), None
        if parts is not None:
            (head, row, column), rows = parts
            values = (float(one[head][row, column]) for one in rows)
            difference = BitDifference(f"O head {head} row {base[1].row + row} column {column}", *values)
        parted = structural_difference(*keys) if call.is_last_query else ""
        if not call.is_last_query and (difference or not call.is_longer):
            parted = parting(*(next(iter(bits)).events for bits in (expected, changed)))
        return Tried(call.what, difference=difference, parted=parted, latency_us=latency)

    def _row_of(self, call: VariedCall, problem: AnyProblem, place: Place) -> Place:
        p = problem.attention
        return replace(place, row=p.queries[place.batch] - 1) if p is not None and call.is_last_query else place

    def _key_of(self, program: TileProgram, place: Place) -> _AsAsked[Hashable]:
        result = id(program), place
        if result in self._keys:
            return self._keys[result]
        key = _AsAsked(row_steps(program, place, has_rows=self.attention is None))
        if result[0] in self._kept:
            self._keys[result] = key
        return key

    def _computed(
        self, program: TileProgram, place: Place, problem: AnyProblem, *, has_path: bool, at_once: bool = False
    ) -> _Bits:
        """Return the bits of rows of the examined sequence from a position on, of the first heads and of the others.

        If other programs are compared with this one, its bits are stored.  Without ``has_path`` the steps of the
        place's row are not recorded.  ``at_once``: compute the bits of all heads in one execution, because no
        difference is expected in the first ones.
        """
        key = id(program), place, at_once
        if key[0] in self._kept and not at_once:  # other programs are compared with this one
            has_path = True
        if key in self._made:
            return self._made[key]
        plan = replace(self.plan, problem=problem)
        subject = subject_of(plan, program)
        if (p := subject.attention) is not None:
            source, executed = inputs_of(self.source, self.sequence, p), program
        else:
            drawn = source_of(plan, subject)
            source, executed = (lambda name, _batch, head: drawn(name, 0, head)), alike(program)
        heads = min(self.heads, subject.output.heads)
        first = min(self.first_heads, heads)
        parts = ((0, first), (first, heads - first)) if heads > first and not at_once else ((0, heads),)
        bits = _AsAsked(
            # Steps are compared only in the first part.
            compute(
                executed, replace(place, head=head), source, n, has_path=has_path and not head, memories=self._memories
            )
            for head, n in parts
        )
        if key[0] in self._kept:
            self._made[key] = bits
        return bits

    # ---------------------------------------------------------------- guarantees

    def _finding(self, aspect: Aspect, calls: list[VariedCall]) -> Finding:
        tried = [self._counted(self._try(call)) for call in calls]
        finding, latency = Finding(aspect, tuple(tried)), self.latency
        if finding.verdict == "not seen" and aspect in CHOSEN_FOR + UNNAMED and _adds(self.base.program):
            return self._in_order(finding)
        if finding.verdict != "changes":
            return finding
        times = [(t.latency_us, t.what) for t in tried if t.latency_us is not None]
        match aspect:
            case "splits":
                one = next((time for time, what in times if what == "splits=1"), latency)
                cost = None if latency is None or one is None else one - latency
                where = "" if cost is None else "this call"
                return replace(finding, guarantee="splits=1", cost_us=cost, cost_at=where)
            case "rule":
                rule = f"splits={cast('SplitFields', self.base.tiling).splits}"
                return _against(replace(finding, guarantee=rule), latency, times)
            case "tile" | "merge":
                names = dict.fromkeys(name for call in calls for name in call.variant.tiling)
                fixed = " ".join(f"{n}={getattr(self.base.tiling, n)}" for n in names)
                return _against(replace(finding, guarantee=fixed), latency, times)
            case _:
                return self._fixed_splits(finding, calls)

    def _in_order(self, finding: Finding) -> Finding:
        """Return the cost of adding parts in one fixed order instead of the order of their arrival."""
        for call in self._calls()["merge"]:
            built = self.variants.build(call.variant)
            if not _adds(built.program):
                latency = built.latency_us()
                cost = None if latency is None or self.latency is None else latency - self.latency
                return replace(finding, guarantee=call.what, cost_us=cost, cost_at="" if cost is None else "this call")
        return finding

    def _fixed(self, *, is_size: bool) -> dict[str, object]:
        """Return the tiling in which splits depend only on a sequence: a fixed number of splits, or a fixed size."""
        if not is_size:
            return {"splits": self.splits}
        blocks = cast("tuple[Any, ...]", self.base.program.phases[0].blocks)
        runs = next(b.runs for b in blocks if b.batch == self.sequence)
        return {"splits": "auto", "split_keys": sum(run.count for run in runs) * runs[0].cols}

    def _fixed_splits(self, finding: Finding, calls: list[VariedCall]) -> Finding:
        """Return the cost of splits that do not depend on the number of blocks."""
        if not isinstance(self.base.tiling, SplitFields):
            return finding
        is_size = bool(self.lengths) or finding.aspect in ("chunk", "prefill")
        if is_size and "split_keys" not in type(self.base.tiling).model_fields:
            return finding
        fixed_fields = self._fixed(is_size=is_size)
        base = self._fixed_call(fixed_fields) if is_size else None
        call_latency = None if base is None else base.latency_us()
        costs: list[tuple[float, str]] = []
        for tried, call in zip(finding.tried, calls, strict=True):
            if not tried.difference:
                continue
            fixed = self.variants.build(replace(call.variant, tiling={**call.variant.tiling, **fixed_fields}))
            if not self._is_alike(call, base.program if base else self.base.program, fixed):
                return finding  # the splits do not cause the difference
            latency = fixed.latency_us()
            if tried.latency_us is not None and latency is not None:
                costs.append((latency - tried.latency_us, f"at {tried.what}"))
        if call_latency is not None and self.latency is not None and costs:
            costs.append((call_latency - self.latency, "this call"))
        guarantee = " ".join(f"{n}={v}" for n, v in fixed_fields.items() if v != "auto")
        return replace(finding, guarantee=guarantee, **_cost(costs))

    def _fixed_call(self, fields: Mapping[str, object]) -> BuiltPlan:
        """Return the call itself with fixed splits; it is stored with its bits."""
        if str(fields) not in self._calls_fixed:
            built = self._calls_fixed[str(fields)] = self.variants.build(Variant(tiling=fields))
            self._kept[id(built.program)] = built.program
        return self._calls_fixed[str(fields)]

    def _is_alike(self, call: VariedCall, base: TileProgram, fixed: BuiltPlan) -> bool:
        """Return whether the row has the same bits in a varied call as in a program of the call itself."""
        problem = fixed.plan.problem
        place = self._row_of(call, problem, replace(self.place, batch=call.position))
        own = self._row_of(call, self.problem, self.place)
        if _is_equal(self._key_of(base, own), self._key_of(fixed.program, place)):
            return True
        if not call.is_last_query:
            return False
        whole = (base, own, self.problem), (fixed.program, place, problem)
        rows = [self._computed(*of, has_path=False, at_once=True) for of in whole]
        return _differing(*rows) is None


def _adds(program: TileProgram) -> bool:
    """Return whether the output has sums to which blocks add in order of arrival; npusim uses one of the possible
    orders.
    """
    tensors = (t.of for t in program.tensors.values() if t.of is not None and t.of.added)
    final = next(p for p in reversed(program.phases) if p.serves != "none")
    steps = (step for step in steps_of(final.body(final.blocks[0])) if isinstance(step, Step))
    return not {x.tensor.of for step in steps for x in step.srcs if isinstance(x, GlobalTile)}.isdisjoint(tensors)


def _cost(costs: list[tuple[float, str]]) -> dict[str, Any]:
    return dict(zip(("cost_us", "cost_at"), max(costs), strict=True)) if costs else {}


def _against(finding: Finding, latency: float | None, times: list[tuple[float, str]]) -> Finding:
    """Return the finding, with the cost of the unchanged call compared with the fastest of the other calls."""
    if latency is None:
        return finding
    best, what = min(times, default=(latency, ""))
    where = f"against {what}" if best < latency else "none tried is faster"
    return replace(finding, cost_us=latency - min(latency, best), cost_at=where)


def _row(base: RunData, sequence: int) -> int:
    out = base.program.tensors["o"]
    final = next(p for p in reversed(base.program.phases) if p.serves != "none")
    blocks = [b for b in final.blocks if b.batch == sequence]
    parts = (part for b in blocks for part in out.heads_of(b.batch, b.head, b.row, b.rows))
    return max(row for head, row, _, _ in parts if head == 0)
