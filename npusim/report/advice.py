"""Advice on a run: the first rule that matches the run's counts states the finding, and a change that was simulated and
found to be faster.

A rule reads the run's counts, names the finding, and lists changes of the tiling that may help.  These changes are
simulated, and the best one is named with the time of the changed run; if no change helps, none is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from math import inf
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from npusim.errors import NpusimError
from npusim.kernels.declare.registry import effective
from npusim.machines.published_kernel import GpuKernel, PublishedKernel
from npusim.machines.published_kernels import find_kernel
from npusim.program.timing.timing_result import BOUND_SHARE, LINK_SHARE, LOST
from npusim.report.text import percent
from npusim.simulation.chosen_tile import PAIRS, WORTH, remembered
from npusim.simulation.request import Request, command
from npusim.simulation.variants import Variant, Variants

if TYPE_CHECKING:
    from npusim.program.timing.timing_result import QueueUse, TimingRecord
    from npusim.report.result_json import RunRecord
    from npusim.simulation.run_result import RunData

#: The load counts as uneven if core groups end, on average, before this share of the time at which the last one ends.
EVEN_SHARE = 0.85
#: Cause of a stall of an empty queue: the scalar unit has issued nothing for it.
_EMPTY = "no instruction"
#: Largest number of queries of a decoding step: one per sequence, or more if the step speculates tokens.
DECODED_QUERIES = 16
#: The start-up time of instructions is mentioned from this share of the vector unit's time.
STARTUP_SHARE = 0.2


#: Largest number of (query, key) pairs of a call for which changes are tried: each trial takes some tenths of a second.
MOST_PAIRS = 4 * PAIRS
#: Fields of a tiling by name.
Fields = Mapping[str, object]


class Advice(NamedTuple):
    """The finding, the changes that may help, the command of the change that does help, and the name of the rule."""

    text: str
    changes: Callable[[Fields], Iterable[Fields]] | None = None
    command: str = ""
    name: str = ""


def advise(record: RunRecord, trial: Trial | None = None) -> Advice | None:
    """Return the advice of the first rule that applies, preceded by its name: ``[vector] ...``.

    If ``trial`` (only for a run in this process) returns a change that makes the run faster, the text ends with the
    change, its time and its gain, and the advice has its command.
    """
    timing = record.timing
    busiest = None if timing is None else timing.busiest
    if timing is None or busiest is None:
        return None
    for name, rule in RULES.items():
        if (advice := rule(record, timing, busiest)) is not None:
            gain = trial.best(advice.changes) if trial is not None and advice.changes else None
            text = f"[{name}] {advice.text}"
            if gain is None:
                return Advice(text, name=name)
            return Advice(f"{text}; {gain}", advice.changes, gain.command, name)
    return None


def decoding(record: RunRecord) -> str | None:
    """Return in one line the unused capacity of a decoding step; None for other runs, or if nothing is unused."""
    timing, p = record.timing, record.problem
    if timing is None or "seq_q" not in p or timing.overlap is not None:
        return None
    queries, heads, kv_heads = (int(str(p[n])) for n in ("seq_q", "heads", "kv_heads"))
    if queries > DECODED_QUERIES or queries == int(str(p["seq_kv"])):
        return None
    lines, fields = [], record.tiling
    kernel = find_kernel(PublishedKernel, str(fields.get("kernel")))
    # the kernel splits keys and packs heads by its own rules
    if isinstance(kernel, GpuKernel) and kernel.split_rule is not None:
        return None
    working, groups = len(timing.group_ends), record.device.group_count
    if working < groups:
        part, split = "", "split_kv, which splits keys over cores, or"
        if "splits" in fields:
            part, split = "part of ", "more splits or"
        lines.append(
            f"{working} of {groups} core groups work: a block is {part}a head of a sequence; {split} a larger "
            "--batch gives the others work"
        )
    is_packed = fields.get("pack") == "on" or (fields.get("pack") == "auto" and queries == 1)
    if heads > kv_heads and not is_packed:
        lines.append(
            f"K and V are loaded {heads // kv_heads} times: each query head that shares them is a separate block"
        )
    return "; ".join(lines) or None


def _few_blocks(record: RunRecord, timing: TimingRecord, busiest: QueueUse) -> Advice | None:
    working, groups = len(timing.group_ends), record.device.group_count
    # On a node, the user has chosen the number of devices that share a layer: few blocks are not a fault of the tile.
    if working >= groups or decoding(record) or timing.overlap is not None:
        return None
    text = f"only {working} of {groups} core groups have a block to run"
    return Advice(text, _smaller_blocks)


def _imbalance(record: RunRecord, timing: TimingRecord, busiest: QueueUse) -> Advice | None:
    ends = timing.group_ends
    mean = sum(ends.values()) / len(ends) / max(ends.values())
    if mean >= EVEN_SHARE:
        return None
    text = (
        f"on average core groups end after {percent(mean)} of the cores' time; group {timing.last_group} ends "
        "last: the blocks are distributed unevenly"
    )
    return Advice(text, _even_blocks)


def _vector(record: RunRecord, timing: TimingRecord, busiest: QueueUse) -> Advice | None:
    costs = {key: cycles for key, cycles in _costs_of(timing, busiest).items() if key.startswith("ops.")}
    total = sum(costs.values())
    if not total or timing.busy_share(busiest) < BOUND_SHARE:
        return None
    startup = sum(n for key, n in costs.items() if key.endswith((".head_cycles", ".tail_cycles")))
    by_op: dict[str, float] = defaultdict(float)
    for key, cycles in costs.items():
        by_op[key.split(".")[1]] += cycles
    top = sorted(by_op.items(), key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{name} {percent(cycles / total)}" for name, cycles in top)
    text = f"the vector unit is the limit: {shares} of its time"
    if startup / total < STARTUP_SHARE:
        return Advice(text)
    text += f"; {percent(startup / total)} issue overhead (heads and tails of instructions)"
    return Advice(text, partial(_scaled, names=("vector_rows", "block_q", "block"), factors=(2, 4)))


def _matrix(record: RunRecord, timing: TimingRecord, busiest: QueueUse) -> Advice | None:
    costs = _costs_of(timing, busiest)
    total = sum(costs.values())
    if "cycles_per_fractal" not in costs or not total or timing.busy_share(busiest) < BOUND_SHARE:
        return None
    startup = costs.get("startup_cycles", 0.0)
    return Advice(
        f"the matrix unit is the limit, {percent(1 - startup / total)} of its time spent on fractals (padding included)"
    )


def _link(record: RunRecord, timing: TimingRecord, busiest: QueueUse) -> Advice | None:
    if not _routes(timing, busiest) or timing.busy_share(busiest) < BOUND_SHARE:
        return None
    for name, share in timing.used_shares(record.device.link_bytes_per_s).items():
        if share >= LINK_SHARE:
            lost = timing.idle_shares(record.device.link_bytes_per_s).get(name, 0.0)
            parts = f" ({percent(lost)} {LOST})" if lost > 0 else ""
            text = f"{busiest.pipe} is the limit, with link {name} at {percent(share)} of its bandwidth{parts}"
            return Advice(text, _larger_blocks)
    return None


def _transfers(record: RunRecord, timing: TimingRecord, busiest: QueueUse) -> Advice | None:
    costs = _routes(timing, busiest)
    if not costs or timing.busy_share(busiest) < BOUND_SHARE:
        return None
    route = max(costs, key=lambda key: costs[key])
    text = f"transfers are the limit ({busiest.pipe}, {route}): the core's port, not a shared link"
    return Advice(text, _larger_blocks)


def _waiting(record: RunRecord, timing: TimingRecord, busiest: QueueUse) -> Advice | None:
    stall = busiest.main_stall
    # Only this rule can name the constants of a node's queue; if a pipe or a link is the limit, no queue waits.
    if stall is None or timing.limit(record.device.link_bytes_per_s).is_limit:
        return None
    cause, cycles = stall
    share = percent(cycles / timing.cycles)
    waits = f"has {cause} for {share}" if cause == _EMPTY else f"waits {share} for {cause}"
    works = percent(timing.busy_share(busiest))
    text = f"no pipe is the limit: the busiest, {busiest.pipe}, is busy {works} of the cores' time and {waits}"
    return Advice(text, _further_ahead)


def _costs_of(timing: TimingRecord, busiest: QueueUse) -> dict[str, float]:
    """Return the cycles of the busiest pipe by the constant that determines them; the keys of constants are relative to
    the pipe's key.
    """
    core = busiest.queue.partition(".")[0].rstrip("0123456789")
    prefix = f"cores.{core}.engines.{busiest.pipe}."
    return {c.key.removeprefix(prefix): c.cycles for c in timing.constants if c.key.startswith(prefix)}


def _routes(timing: TimingRecord, busiest: QueueUse) -> dict[str, float]:
    """Return the links of an operation's routes; none for an operation without transfers."""
    costs = _costs_of(timing, busiest)
    return {key.partition(".")[2]: cycles for key, cycles in costs.items() if key.startswith("routes.")}


# ---------------------------------------------------------------- changes that may help


def _scaled(fields: Fields, names: Iterable[str], factors: Iterable[float]) -> Iterator[Fields]:
    for name in names:
        if isinstance(value := fields.get(name), int):
            yield from ({name: int(value * factor)} for factor in factors)


def _smaller_blocks(fields: Fields) -> Iterator[Fields]:
    yield from _scaled(fields, ("block_q", "block"), (1 / 2, 1 / 4))
    if "arrangement" in fields:  # a warp's quad pairs cover fewer rows next to one another
        yield {"block_q": 64, "arrangement": "2x2"}


def _even_blocks(fields: Fields) -> Iterator[Fields]:
    longest_first = {"deal": "balanced", "launch": "longest_first"}
    yield from ({name: order} for name, order in longest_first.items() if name in fields)
    yield from _scaled(fields, ("block_q", "block"), (1 / 2,))


def _larger_blocks(fields: Fields) -> Iterator[Fields]:
    yield from _scaled(fields, ("block_q", "block", "block_kv"), (2,))
    if isinstance(warps := fields.get("warps"), int):
        yield from ({**change, "warps": 2 * warps} for change in _scaled(fields, ("block_q",), (2,)))


def _further_ahead(fields: Fields) -> Iterator[Fields]:
    for name in ("depth", "stages"):
        if isinstance(value := fields.get(name), int):
            yield from ({name: value + more} for more in (1, 2))
    yield from _scaled(fields, ("block_kv", "block"), (2,))


#: The rules in the order of precedence; a rule returns None if it does not apply.
RULES: Mapping[str, Callable[[RunRecord, TimingRecord, QueueUse], Advice | None]] = MappingProxyType(
    {
        "few blocks": _few_blocks,
        "imbalance": _imbalance,
        "vector": _vector,
        "matrix": _matrix,
        "link": _link,
        "transfers": _transfers,
        "waiting": _waiting,
    }
)


# ---------------------------------------------------------------- trials of changes


class Gain(NamedTuple):
    """A change that makes a run faster, the resulting time, and the command of the changed run."""

    change: Fields
    latency_us: float
    share: float
    command: str

    def __str__(self) -> str:
        return f"with {_words(self.change)} {self.latency_us:,.2f} us ({-self.share * 100:+.1f} %)"


class Trial:
    """Tries changes of the tiling on the schedule, problem and device of a run."""

    def __init__(self, result: RunData) -> None:
        self._result = result

    @cached_property
    def fields(self) -> Fields:
        """The run's fields, with the numbers that its defaults stand for."""
        tiling = self._result.tiling
        return {name: effective(tiling, name) or value for name, value in tiling.model_dump().items()}

    def best(self, changes: Callable[[Fields], Iterable[Fields]]) -> Gain | None:
        """Return the change that gains most; None if no change gains at least `WORTH`, or if trials would take long."""
        r = self._result
        if r.problem.all_pairs() > MOST_PAIRS:
            return None
        own = r.tiling.model_dump(exclude_unset=True)
        times = [(self._latency_us({**own, **c}), c) for c in changes(self.fields) if c.items() - self.fields.items()]
        named = None if r.asked is None else dict(v.split("=", 1) for o, v in r.asked if o == "-t")
        for fixed_us, change in sorted(times, key=itemgetter(0)):
            if fixed_us >= r.latency_us * (1 - WORTH):
                return None
            # As for the command, fields that are not named are chosen again, and flags and races are checked.
            fields = {**(own if named is None else named), **change}
            latency_us = self._latency_us(fields, is_open=named is not None, is_checked=True)
            share = 1 - latency_us / r.latency_us
            if share >= WORTH:
                return Gain(change, latency_us, share, self._command(change))
        return None

    def _latency_us(self, fields: Fields, *, is_open: bool = False, is_checked: bool = False) -> float:
        """Return the time of the run with other fields; infinity if they do not fit, or if a check refuses them."""
        r = self._result
        request = Request(r.schedule, problem=r.problem, hw=r.device, tiling=fields, precision=r.precision)
        request = replace(request, l2=r.program.l2)

        def simulated() -> float:
            try:
                built = Variants(request, is_open=is_open).build(Variant(), is_hinted=False)
                if is_checked:
                    built.check()
                timing = built.timing()
            except (NpusimError, ValueError, ImportError):
                return inf
            return inf if timing is None else timing.latency_s * 1e6

        call = r.problem, fields, r.precision, request.l2, is_open, is_checked
        latency_us: float = remembered("trial", request.find_schedule(), r.device, call, simulated)
        return latency_us

    def _command(self, change: Fields) -> str:
        r = self._result
        if r.asked is None:
            return ""
        options = [(o, v) for o, v in r.asked if o != "-t" or v.partition("=")[0] not in change]
        return command("run", r.schedule, options, ["-t", _words(change)])


def _words(change: Fields) -> str:
    return ",".join(f"{name}={value}" for name, value in change.items())
