"""Advice on a run: the first rule of a short table that applies, and values that the user could try.

A rule reads the run's counts and names what they show and what to try on this same run: values that fit and that
change the program.  It promises no gain: the next run shows it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable  # noqa: TC003 - a field of a NamedTuple
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from npusim.errors import NpusimError
from npusim.report.text import percent
from npusim.schedules.registry import effective
from npusim.simulation.request import Request, command
from npusim.simulation.variants import Variant, Variants, work_key

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from npusim.report.record import RunRecord
    from npusim.simulation.result import RunData
    from npusim.timing.result import QueueUse, TimingRecord

#: Below this share of the cores' time no pipe is the limit: the pipes wait for each other.
BOUND_SHARE = 0.6
#: Core groups whose mean end lies below this share of the last end are unevenly loaded.
EVEN_SHARE = 0.85
#: From this share of its bandwidth on, a shared link slows transfers down.
LINK_SHARE = 0.8
#: Cause of a stall where a queue is empty: its scalar unit has issued nothing for it.
_EMPTY = "no instruction"
#: Queries up to which a call over more keys is a decoding step (one a sequence, some more if speculated).
DECODED_QUERIES = 16
#: Start-up of instructions worth mentioning, as a share of the vector unit's time.
STARTUP_SHARE = 0.2


class Advice(NamedTuple):
    """What the counts show, a field whose other values may help, and the command that tries some."""

    text: str
    field: str = ""
    values: Callable[[int], tuple[int, ...]] | None = None
    command: str = ""


def advise(record: RunRecord, trial: Trial | None = None) -> Advice | None:
    """Return the advice of the first rule that applies, led by its name: ``[vector] ...``.

    Its command is there where ``trial`` (of the live run) finds values that fit and change something.
    """
    timing = record.timing
    busiest = None if timing is None else timing.busiest
    if timing is None or busiest is None:
        return None
    for name, rule in RULES.items():
        if (advice := rule(record, timing, busiest)) is not None:
            return advice._replace(text=f"[{name}] {advice.text}", command=_command(advice, trial))
    return None


def _command(advice: Advice, trial: Trial | None) -> str:
    """Return a command that tries values of the advice's field, the run's own among them."""
    now = trial.value(advice.field) if trial is not None and advice.field else None
    if trial is None or now is None or advice.values is None:
        return ""
    useful = trial.useful(advice.field, (v for v in advice.values(now) if v not in (0, now)))
    return trial.explore(advice.field, sorted([now, *useful])) if useful else ""


def decoding(record: RunRecord) -> str | None:
    """Return in one line what a decoding step leaves undone; None where it is none or leaves nothing."""
    timing, p = record.timing, record.problem
    if timing is None or "seq_q" not in p or timing.overlap is not None:
        return None
    queries, heads, kv_heads = (int(str(p[n])) for n in ("seq_q", "heads", "kv_heads"))
    if queries > DECODED_QUERIES or queries == int(str(p["seq_kv"])):
        return None
    lines, fields = [], record.tiling
    working, groups = len(timing.group_ends), record.device.group_count
    if working < groups:
        part, split = "", "split_kv, which splits keys over cores, or"
        if "splits" in fields:
            part, split = "part of ", "more splits or"
        lines.append(
            f"{working} of {groups} core groups work: a block is {part}a head of a sequence; "
            f"{split} a larger --batch fills them"
        )
    is_packed = fields.get("pack") == "on" or (fields.get("pack") == "auto" and queries == 1)
    if heads > kv_heads and not is_packed:
        lines.append(
            f"K and V are loaded {heads // kv_heads} times: each of the query heads that share them is a block "
            "of its own"
        )
    return "; ".join(lines) or None


def _few_blocks(record: RunRecord, timing: TimingRecord, busiest: QueueUse) -> Advice | None:
    working, groups = len(timing.group_ends), record.device.group_count
    # On a node, the user chose how many devices share a layer: no block is missing.
    if working >= groups or decoding(record) or timing.overlap is not None:
        return None
    text = f"only {working} of {groups} core groups have a block to work on"
    return Advice(text, "block_q", _smaller)


def _imbalance(record: RunRecord, timing: TimingRecord, busiest: QueueUse) -> Advice | None:
    ends = timing.group_ends
    mean = sum(ends.values()) / len(ends) / max(ends.values())
    if mean >= EVEN_SHARE:
        return None
    text = (
        f"core groups end after {percent(mean)} of the cores' time on average, group "
        f"{timing.last_group} last: blocks are dealt out unevenly"
    )
    return Advice(text, "block_q", _smaller)


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
    text += f"; {percent(startup / total)} starts and ends instructions"
    return Advice(text, "vector_rows", _larger)


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
    seconds = timing.core_us * 1e-6
    for name, size in timing.link_bytes.items():
        share = size / seconds / record.device.link_bytes_per_s[name]
        if share >= LINK_SHARE:
            text = f"{busiest.pipe} is the limit, with link {name} at {percent(share)} of its bandwidth"
            return Advice(text, "block_q", _larger)
    return None


def _transfers(record: RunRecord, timing: TimingRecord, busiest: QueueUse) -> Advice | None:
    costs = _routes(timing, busiest)
    if not costs or timing.busy_share(busiest) < BOUND_SHARE:
        return None
    route = max(costs, key=lambda key: costs[key])
    return Advice(f"moving bytes is the limit ({busiest.pipe}, {route}): the core's own port, no shared link")


def _waiting(record: RunRecord, timing: TimingRecord, busiest: QueueUse) -> Advice | None:
    stall = busiest.main_stall
    # No other rule can name constants of a node's queue; one that is busy is no waiting one.
    if stall is None or (timing.overlap is not None and timing.busy_share(busiest) >= BOUND_SHARE):
        return None
    cause, cycles = stall
    share = percent(cycles / timing.cycles)
    waits = f"has {cause} for {share}" if cause == _EMPTY else f"waits {share} for {cause}"
    works = percent(timing.busy_share(busiest))
    text = f"no pipe is the limit: the busiest, {busiest.pipe}, works {works} of the cores' time and {waits}"
    return Advice(text, "depth", _deeper)


def _costs_of(timing: TimingRecord, busiest: QueueUse) -> dict[str, float]:
    """Return the cycles of the busiest pipe by the constant behind them, its key below the pipe's own."""
    core = busiest.queue.partition(".")[0].rstrip("0123456789")
    prefix = f"cores.{core}.engines.{busiest.pipe}."
    return {c.key.removeprefix(prefix): c.cycles for c in timing.constants if c.key.startswith(prefix)}


def _routes(timing: TimingRecord, busiest: QueueUse) -> dict[str, float]:
    """Return those of them that are its routes'; none for what moves no bytes."""
    costs = _costs_of(timing, busiest)
    return {key.partition(".")[2]: cycles for key, cycles in costs.items() if key.startswith("routes.")}


def _smaller(value: int) -> tuple[int, ...]:
    return (value // 4, value // 2)


def _larger(value: int) -> tuple[int, ...]:
    return (value * 2, value * 4)


def _deeper(value: int) -> tuple[int, ...]:
    return (value + 1, value + 2)


#: In the order of their precedence; a rule returns None where it does not apply.
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


# ---------------------------------------------------------------- values to try


class Trial:
    """Tries other values of one tiling field on the schedule, problem and device of a run."""

    def __init__(self, result: RunData) -> None:
        self._result = r = result
        # Field by field, not the tiling as a whole, so that the limits of each field are checked too.
        fields = r.tiling.model_dump()
        self._variants = Variants(
            Request(r.schedule, problem=r.problem, hw=r.device, tiling=fields, precision=r.precision)
        )

    @cached_property
    def _work(self) -> Hashable:
        return work_key(self._result.program)

    def value(self, field: str) -> int | None:
        """Return the number that a field has, or that its default stands for; None if it is none."""
        return effective(self._result.tiling, field)

    def useful(self, field: str, values: Iterable[int]) -> list[int]:
        """Return those of ``values`` that fit and whose program differs from the run's own."""
        return [value for value in values if self._work_of(field, value) not in (None, self._work)]

    def _work_of(self, field: str, value: int) -> Hashable:
        try:
            return work_key(self._variants.build(Variant(tiling={field: value}), is_hinted=False).program)
        except (NpusimError, ValueError):
            return None

    def explore(self, field: str, values: Sequence[int]) -> str:
        """Return the command that tries ``values`` on this very run; empty where none can say it."""
        r = self._result
        if r.asked is None:
            return ""
        options = [(o, v) for o, v in r.asked if (o, v.partition("=")[0]) != ("-t", field)]
        listed = f"{field}={','.join(str(value) for value in values)}"
        return command("explore", r.schedule, options, ["--field", listed])
