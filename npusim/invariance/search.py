"""Runs a call otherwise, aspect by aspect, and holds the bits of one row block against its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

from npusim.config.node import NodeDevice
from npusim.config.problem import Problem
from npusim.config.tiling import Tiling
from npusim.errors import NpusimError, SpecError, TilingError
from npusim.invariance.aspects import ASPECTS, Variant, of_element, other_orders, splits_of, sums, variants
from npusim.invariance.paths import Place, compute, first_difference, parting, structure
from npusim.numerics.inputs import recipe_source
from npusim.simulation.request import Request, SeedOptions, takes_options
from npusim.simulation.simulate import run_request

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from npusim.invariance.aspects import Aspect, SumsAspect
    from npusim.invariance.paths import Computed
    from npusim.ir.program import TileProgram
    from npusim.numerics.executor import HeadSource
    from npusim.simulation.result import RunData

#: Keys of all KV heads whose bits are compared: bounds the time of a variant.
KEYS = 1 << 16
#: ``cannot``: the same by structure, whatever the inputs; ``not seen``: other steps, but the same bits on
#: these inputs; ``changes``: other bits; ``none``: a call cannot be run otherwise.
Verdict = Literal["cannot", "not seen", "changes", "none"]


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
    """One way to run the call otherwise; ``reason`` says why it cannot be.

    ``parted`` is the first operation and tile whose values differ, even where the result rounds to the same bits.
    """

    what: str
    is_same_structure: bool = False
    difference: BitDifference | None = None
    parted: str = ""
    latency_us: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Finding:
    """What one aspect does to the bits, and what keeps it from doing so.

    ``cost_us`` is what ``guarantee`` costs, at most among what was tried: negative where it is faster; None
    where there is no time.
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
        return "cannot" if all(t.is_same_structure for t in done) else "not seen"

    @property
    def first(self) -> Tried | None:
        """What first changed the bits, or else the values on the way to them."""
        seen = [t for t in self.tried if t.difference] or [t for t in self.tried if t.parted]
        return seen[0] if seen else None


@dataclass(frozen=True, repr=False)
class Invariance:
    """What changes the bits of a call's last block of rows from ``row`` on in some ``heads``, aspect by aspect."""

    base: RunData
    row: int
    heads: int
    findings: tuple[Finding, ...]

    def __getitem__(self, aspect: str) -> Finding:
        """Return what was found of one aspect; raise `SpecError` naming those there are."""
        found = next((f for f in self.findings if f.aspect == aspect), None)
        if found is None:
            raise SpecError(f"aspect {aspect!r}: examined are {', '.join(f.aspect for f in self.findings)}")
        return found

    def holds(self, *aspects: str) -> bool:
        """Return whether no change of these aspects was seen to change a bit."""
        return all(self[aspect].verdict != "changes" for aspect in aspects)

    def __repr__(self) -> str:
        verdicts = ", ".join(f"{f.aspect} {f.verdict}" for f in self.findings)
        return f"<Invariance of {self.base.name} on {self.base.device.name}: {verdicts}>"


@takes_options(SeedOptions)
def invariant(schedule: str, *, vary: Collection[str] = ASPECTS, **options: Unpack[SeedOptions]) -> Invariance:
    """Run a call otherwise and say what changes the bits of its first sequence.

    Parameters
    ----------
    vary
        Aspects to examine, of `ASPECTS`; the rest is as for `npusim.run`.

    Returns
    -------
    Invariance
        By aspect: whether the bits change (with the first element, operation and tile that differ), cannot
        by structure, or did not on these inputs; and what ruling the change out costs in microseconds.

    Raises
    ------
    SpecError
        An unknown aspect, or a node: its collective is varied by the aspect ``order`` of its device.
    NpusimError
        As `npusim.run`.

    Examples
    --------
    >>> found = invariant("flash", seq=256, vary=["batch"])
    >>> found["batch"].verdict
    'cannot'
    """
    return examine(Request(schedule, **options), vary)


def examine(
    request: Request, vary: Collection[str] = ASPECTS, on_tried: Callable[[int, int], None] | None = None
) -> Invariance:
    """Examine a request; see :func:`invariant`.  ``on_tried`` is told how many of how many variants are done."""
    unknown = [name for name in vary if name not in ASPECTS]
    if unknown or not vary:
        raise SpecError(f"vary: {unknown[0] if unknown else 'nothing'!r}; there are {', '.join(ASPECTS)}")
    device = request.machine()
    if isinstance(device, NodeDevice):
        raise SpecError(f"{device.node.name}: invariance is of one device; --hw {device.node.device}")
    hidden = None if request.problem is not None else request.load().hidden
    ranks = request.tensor_parallel or (1 if request.problem is not None else request.load().tensor_parallel)
    base = run_request(replace(request, hw=device, overrides=None), is_bare=True)
    if not isinstance(base.problem, Problem):
        raise SpecError(f"schedule {request.schedule} is no attention: nothing to examine")
    return _Examination(request, base, base.problem, ranks, hidden, on_tried).done(vary)


class _Examination:
    """A call as it is run, and its variants."""

    def __init__(
        self,
        request: Request,
        base: RunData,
        problem: Problem,
        ranks: int,
        hidden: int | None,
        on_tried: Callable[[int, int], None] | None,
    ) -> None:
        self.request, self.base, self.problem, self.ranks, self.hidden = request, base, problem, ranks, hidden
        self.on_tried, self.count = on_tried, 0
        self.source = recipe_source(problem)
        self.place = Place(_row(base))
        # What the user chose; all else stays open, as where such a call is run by itself.
        given = request.chosen_tiling(type(base.tiling))
        names = given.model_fields_set if isinstance(given, Tiling) else given.keys()
        self.fields = {name: getattr(base.tiling, name) for name in names}
        self.heads = problem.group_size * max(1, min(problem.kv_heads, KEYS // problem.seq_kv))
        self.own = structure(base.program, self.place, problem.group_size)
        self._computed: Computed | None = None

    def done(self, vary: Collection[str]) -> Invariance:
        """Return the findings, in the order of `ASPECTS`."""
        ways = {name: listed for name, listed in variants(self.base, self.problem).items() if name in vary}
        total = sum(map(len, ways.values())) + (2 if "order" in vary else 0)
        findings = {
            name: self._finding(name, [self._tell(self._try(v), total) for v in of], of) for name, of in ways.items()
        }
        if "order" in vary:
            findings["order"] = self._orders(total)
        listed = tuple(findings[name] for name in ASPECTS if name in findings)
        return Invariance(self.base, self.place.row, self.heads, listed)

    def _tell(self, tried: Tried, total: int) -> Tried:
        self.count += 1
        if self.on_tried:
            self.on_tried(self.count, total)
        return tried

    # ---------------------------------------------------------------- one variant

    def _run(self, variant: Variant, more: Mapping[str, object] | None = None) -> RunData:
        problem = self.problem.model_copy(update=dict(variant.sizes))
        tiling = {**self.fields, **variant.tiling, **(more or {})}
        return run_request(
            Request(
                self.request.schedule,
                problem=problem,
                hw=self.base.device,
                tiling=tiling,
                method=self.request.method,
                precision=self.request.precision,
                arithmetic=self.request.arithmetic,
            ),
            is_bare=True,
        )

    def _try(self, variant: Variant) -> Tried:
        try:
            result = self._run(variant)
        except TilingError as error:
            return Tried(variant.what, reason=" ".join(str(error).split()))
        latency = _latency(result)
        group = cast("Problem", result.problem).group_size
        place, own = replace(self.place, batch=variant.position), self.own
        if variant.position:
            own = structure(result.program, self.place, group)
        if structure(result.program, place, group) == own:
            return Tried(variant.what, is_same_structure=True, latency_us=latency)
        mine = self._own(result.program if variant.position else None, group)
        heads = min(self.heads, cast("Problem", result.problem).heads)
        other = compute(result.program, place, group, self._moved(place.batch), heads)
        at, difference = first_difference(mine.rows, other.rows), None
        if at is not None:
            head, *where = at
            element = f"O head {head} row {self.place.row + at[1]} column {at[2]}"
            values = (float(one.rows[head][*where]) for one in (mine, other))
            difference = BitDifference(element, *values)
        parted = parting(mine.events, other.events)
        return Tried(variant.what, False, difference, str(parted or ""), latency)

    def _own(self, program: TileProgram | None, group: int) -> Computed:
        """Return the bits of the call itself, or of the first sequence of another program."""
        if program is not None:
            return compute(program, self.place, group, self.source, self.heads)
        if self._computed is None:
            self._computed = compute(self.base.program, self.place, self.problem.group_size, self.source, self.heads)
        return self._computed

    def _moved(self, position: int) -> HeadSource:
        """Return the inputs with the first sequence at another place of the batch."""
        swapped = {0: position, position: 0}
        return lambda name, batch, head: self.source(name, swapped.get(batch, batch), head)

    # ---------------------------------------------------------------- guarantees

    def _finding(self, aspect: Aspect, tried: list[Tried], listed: list[Variant]) -> Finding:
        found = Finding(aspect, tuple(tried))
        if found.verdict != "changes":
            return found
        own, times = _latency(self.base), [(t.latency_us, t.what) for t in tried if t.latency_us is not None]
        match aspect:
            case "splits":
                one = next((time for time, what in times if what == "splits=1"), own)
                cost = None if own is None or one is None else one - own
                where = "" if cost is None else "this call"
                return replace(found, guarantee="splits=1", cost_us=cost, cost_at=where)
            case "tile" | "merge":
                names = [name for v in listed for name in v.tiling]
                fixed = " ".join(f"{n}={getattr(self.base.tiling, n)}" for n in dict.fromkeys(names))
                if own is None:
                    return replace(found, guarantee=fixed)
                best, what = min(times)
                return replace(found, guarantee=fixed, cost_us=own - min(own, best), cost_at=_against(own, best, what))
            case _:
                return self._fixed_splits(found, tried, listed)

    def _fixed_splits(self, found: Finding, tried: list[Tried], listed: list[Variant]) -> Finding:
        """Return what it costs that splits do not go by the number of blocks."""
        if "splits" not in type(self.base.tiling).model_fields:
            return found
        splits, costs = splits_of(self.base), list[tuple[float, str]]()
        for done, variant in zip(tried, listed, strict=True):
            if not done.difference:
                continue
            fixed = self._run(variant, {"splits": splits})
            group = cast("Problem", fixed.problem).group_size
            if structure(fixed.program, replace(self.place, batch=variant.position), group) != self.own:
                return found  # it is not the splits
            if done.latency_us is not None:
                costs.append((fixed.latency_us - done.latency_us, done.what))
        if not costs:
            return replace(found, guarantee=f"splits={splits}")
        cost, what = max(costs)
        return replace(found, guarantee=f"splits={splits}", cost_us=cost, cost_at=f"at {what}")

    # ---------------------------------------------------------------- a collective's order

    def _orders(self, total: int) -> Finding:
        chosen = sums(self.base.device.name, self.problem, self.ranks)
        own, added = chosen.results(chosen.own)
        times, tried = {chosen.own: self._allreduce(chosen, chosen.own)}, list[Tried]()
        for name in other_orders(chosen.own):
            other, others = chosen.results(name)
            times[name] = self._allreduce(chosen, name)
            at, difference, parted = first_difference({0: own[None]}, {0: other[None]}), None, ""
            if at is not None:
                element = at[2]
                pairs = zip(of_element(added, element), of_element(others, element), strict=False)
                (what, a), (_, b) = next((one, two) for one, two in pairs if one[1] != two[1])
                parted = f"AllReduce: {what}, shard of element {element}: {a:.9g} | {b:.9g}"
                values = float(own[element]), float(other[element])
                difference = BitDifference(f"sum {element} of {chosen.ranks} ranks", *values)
            done = Tried(name, difference=difference, parted=parted, latency_us=times[name])
            tried.append(self._tell(done, total))
        found, known = Finding("order", tuple(tried)), {n: t for n, t in times.items() if t is not None}
        found = replace(found, guarantee=f"algorithm={chosen.own}" if found.verdict == "changes" else "")
        if not found.guarantee or chosen.own not in known:
            return found
        best = min(known, key=lambda name: known[name])
        cost = known[chosen.own] - known[best]
        where = _against(known[chosen.own], known[best], best)
        return replace(found, cost_us=cost, cost_at=where)

    def _allreduce(self, chosen: SumsAspect, algorithm: Any) -> float | None:
        """Return the microseconds of one step's AllReduce on a packaged node of the device, if there is one."""
        if chosen.node is None or self.hidden is None:
            return None
        message = chosen.bytes(self.problem, self.hidden)
        tiling = {"algorithm": algorithm}
        try:
            done = run_request(Request("allreduce", hw=chosen.node, problem=message, tiling=tiling), is_bare=True)
        except NpusimError:
            return None
        return done.latency_us


def _latency(result: RunData) -> float | None:
    return None if result.timing is None else result.latency_us


def _against(own: float, best: float, what: str) -> str:
    return f"against {what}" if best < own else "none tried is faster"


def _row(base: RunData) -> int:
    """Return the first row of head 0's last block."""
    out = base.program.tensors["o"]
    found = (part for b in base.program.phases[-1].blocks for part in out.heads_of(b.head, b.row, b.rows))
    return max(row for head, row, _, _ in found if head == 0)
