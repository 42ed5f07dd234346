"""A device as its hardware file describes it: cores, engines, buffers, memory, links, flags."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import expm1
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from npusim.config.core_units import DmaEngine, EngineSpec, FixpipeEngine, MatrixEngine, RatedUnit, VectorUnit
from npusim.config.family import FAMILIES, MACHINES, is_registered, registered
from npusim.config.messages import suggest
from npusim.config.model import Name, SpecModel, Text, entry, fault_at
from npusim.config.packaged import clash, installed
from npusim.config.quantity import Choice, HardwareModel, Positive, PositiveWhole, Quantity, WholeQuantity, format_limit
from npusim.errors import SpecError

GM = "GM"

#: Links are simulated in units of 2**-20 byte a cycle: with a lower rate, the rounding error would exceed a thousandth.
SLOWEST_BYTES_PER_CYCLE = 2**-10


def _family(name: str) -> str:
    """Return ``name`` if a machine for it is known; raise the error that pydantic reports if not."""
    if is_registered(name):
        if twice := clash(MACHINES, name, is_ours=name in FAMILIES):
            raise PydanticCustomError("family", "{text}", {"text": twice})
        return name
    known = " or ".join(repr(n) for n in (*FAMILIES, *sorted(installed(MACHINES))))
    text = f"{name!r} is not one of: {known}; an installed package brings one as an entry point {MACHINES}"
    raise PydanticCustomError("family", "{text}", {"text": text})


#: Numbers and choices with their sources, under the keys that a model of them would read.
Facts = TypeAliasType("Facts", "dict[str, Quantity | Choice[str] | Facts]")


class BankSpec(SpecModel):
    """Banks of an on-chip buffer: groups of banks, where each bank is a column of rows."""

    group_count: PositiveWhole
    rows_count: PositiveWhole = Field(description="number of rows of one bank")
    row_bytes: PositiveWhole


class BufferSpec(SpecModel):
    """An on-chip buffer of one core."""

    capacity_bytes: PositiveWhole
    alignment_bytes: PositiveWhole = Field(description="addresses must be multiples of this number")
    banks: BankSpec | None = None


class PartsSpec(SpecModel):
    """Reads of parts of lines, which occur where a row continues beyond a tile's columns: the rest of the row's last
    line is read later.
    """

    line_bytes: PositiveWhole = Field(description="bytes of a line; a read of fewer bytes is a part of a line")
    read_factor: Positive = Field(
        description="time of reads of parts of lines on a link to memory beyond L2, relative to the time of their bytes"
    )


class RoundsSpec(SpecModel):
    """Rounds of blocks without a loop, each of which loads a row, computes, stores it, and is replaced by another one,
    and iterations of loops that wait for each of their loads.

    The time of a round is a norm of two times: of the round if no other block uses memory, and of memory for the bytes
    of all blocks.  The larger the norm's exponent, the less the shorter of the two times adds.
    """

    round_trip_cycles: WholeQuantity = Field(
        description="time from one read of memory to the next if a loop waits for each and no other core reads"
    )
    exponent_factor: PositiveWhole = Field(description="exponent of the norm")
    warp_bytes_per_cycle: Positive | None = Field(
        default=None,
        description=(
            "rate of a warp's reads from L2 after the first one; programs that go on with further rows wait for a row "
            "as long as one read takes, plus the time of the row's bytes at this rate, and at most the route's latency"
        ),
    )


class GlobalMemorySpec(SpecModel):
    """Device memory."""

    capacity_bytes: PositiveWhole
    alignment_bytes: PositiveWhole = Field(description="preferred, for full bandwidth")
    request_min_bytes: PositiveWhole = Field(description="smallest size of the requests into which transfers are split")
    parts: PartsSpec | None = Field(
        default=None, description="cost of reads of parts of lines; absent: these reads cost their bytes"
    )
    rounds: RoundsSpec | None = Field(
        default=None, description="cost of few bytes in flight; absent: memory has one rate for any number of them"
    )


#: Content of L2 when a kernel starts: nothing useful, other data that must be written back, the inputs, or the state
#: after a series of equal launches.  If each launch has other inputs (``steady``), it moves all data that it reads and
#: writes; if all have the same inputs (``repeated``), a launch finds those that fit in L2
#: (`npusim.program.ir.residency`).
L2State = Literal["clean", "dirty", "warm", "steady", "repeated"]
#: The states after which another launch follows.
FOLLOWED: frozenset[L2State] = frozenset({"steady", "repeated"})


class StaysSpec(SpecModel):
    """The shares of inputs that successive launches on the same bytes find in L2 (``repeated``)."""

    whole_factor: Positive = Field(
        description=("size of the inputs, as a share of the capacity, up to which all of them stay in the cache")
    )
    none_factor: Positive = Field(
        description=(
            "size of the inputs, as a share of the capacity, above which none of them stays in the cache; between "
            "the two sizes, the part that stays falls linearly"
        )
    )

    written_factor: Positive | None = Field(
        default=None,
        description=(
            "how far whole_factor falls if all bytes that a launch moves are written; with the written share of the "
            "bytes, in proportion"
        ),
    )

    @model_validator(mode="after")
    def _whole_is_less(self) -> Self:
        if self.whole_factor.value >= self.none_factor.value:
            raise fault_at("none_factor", f"not above whole_factor, {self.whole_factor.value}; must be larger")
        return self

    @property
    def factors(self) -> tuple[float, float, float]:
        """Both shares, and how far the first one falls with the written share of the bytes."""
        falls = 0.0 if self.written_factor is None else float(self.written_factor.value)
        return float(self.whole_factor.value), float(self.none_factor.value), falls


class L2Spec(SpecModel):
    """The cache that all cores share."""

    capacity_bytes: PositiveWhole
    miss_extra_latency_cycles: WholeQuantity
    written_wait_cycles: PositiveWhole | None = Field(
        default=None,
        description=(
            "additional latency of a read that misses, in a loop that stores results, while memory only writes lines "
            "back; otherwise it is multiplied by the geometric mean of two shares of the time: that of the lines "
            "written back, and that of all lines"
        ),
    )
    writes: Choice[Literal["back", "through"]] | None = Field(
        default=None, description=("write-back: a written line stays until its place is needed; absent: write-through")
    )
    starts: Choice[L2State] | None = Field(
        default=None, description="content when a kernel starts, unless a run names it; absent: clean"
    )
    dirty_factor: Positive | None = Field(
        default=None, description="share of the capacity that has other data to be written back, if L2 is dirty"
    )
    same_data_factor: Positive | None = Field(
        default=None,
        description=(
            "rate of many cores that read the same bytes at the same time, relative to their rate for different bytes"
        ),
    )
    same_data_cores_count: PositiveWhole | None = Field(
        default=None,
        description=(
            "smallest number of cores for which `same_data_factor` applies in full; for fewer cores it applies in "
            "proportion"
        ),
    )
    stays: StaysSpec | None = Field(
        default=None,
        description=(
            "inputs that a launch finds in L2 if an earlier launch read the same bytes, by their size as a share of "
            "the capacity; absent: all inputs up to 0.885, none above 1.3275"
        ),
    )

    def dirty_bytes(self) -> float:
        """Return the number of bytes of other data that must be written back first if L2 is dirty."""
        if self.dirty_factor is None:
            raise SpecError(
                "l2: dirty: the device file does not state which share has to be written back "
                "(memory.l2.dirty_factor); allowed here: clean, warm"
            )
        return self.dirty_factor.value * self.capacity_bytes.value


class MemorySpec(SpecModel):
    """Memory outside the cores."""

    gm: GlobalMemorySpec
    l2: L2Spec


class CatchUpSpec(SpecModel):
    """Higher rate of a link after idle time: cores whose data arrived late issue their next requests while other cores
    compute.
    """

    idle_cycles: WholeQuantity = Field(description="longest idle time for which the link makes up later")
    rate_factor: PositiveWhole = Field(description=("factor of the rate while the link makes up for idle time"))


class LinkSpec(SpecModel):
    """A bandwidth that all cores share."""

    bytes_per_s: Positive = Field(description="measured rate of reads and writes together, summed over all cores")
    catch_up: CatchUpSpec | None = Field(
        default=None, description="how cores that queue for the link fall out of step; absent: they stay in step"
    )
    writes_factor: Positive | None = Field(
        default=None, description="rate while cores only write, relative to bytes_per_s; absent: the same rate"
    )
    rate_factor: Positive | None = Field(default=None, description="factor of bytes_per_s, set by --scale; missing: 1")

    @property
    def rate(self) -> float:
        """The bandwidth that runs use, in bytes a second."""
        return float(self.bytes_per_s.value) * self.factor

    @property
    def factor(self) -> float:
        """The bandwidth relative to ``bytes_per_s``."""
        return 1.0 if self.rate_factor is None else float(self.rate_factor.value)


class FlagsSpec(SpecModel):
    """Flags within a core and between the cores of a group."""

    intra_core_latency_cycles: WholeQuantity
    usable_event_ids_count: PositiveWhole = Field(
        description="number of binary flags that a kernel may use for each ordered pair of pipes"
    )
    cross_core_latency_cycles: WholeQuantity = Field(description=("time from the set of a flag to the end of the wait"))
    cross_core_issue_cycles: WholeQuantity = Field(description="time of the core to issue a set or a wait")
    tile_cycles: Quantity | None = Field(
        default=None,
        description=(
            "additional time of a tile that one core passes to another while all core groups work; zero "
            "if only one group works"
        ),
    )
    tile_extra_cycles: Quantity | None = Field(
        default=None,
        description=(
            "time of such a tile in addition to `tile_cycles` in PTO's FlashAttention; the cause is not known"
        ),
    )
    cross_core_ids_count: PositiveWhole = Field(description="counter flags per core group")
    cross_core_counter_max_count: PositiveWhole = Field(
        description=("largest number of sets that are not yet waited for")
    )
    cross_core_wait_blocks: Choice[Literal["pipe", "scalar"]] = Field(
        description="unit that a wait stops: the pipe in whose queue the wait is, or the scalar unit"
    )


class CoreSpec(SpecModel):
    """One kind of core."""

    per_group_count: PositiveWhole = Field(description="number of cores of this kind in one core group")
    engines: dict[str, EngineSpec]
    buffers: dict[str, BufferSpec]

    def buffer(self, name: str) -> BufferSpec:
        """Return a buffer; raise `SpecError` with the core's buffers if it has none of this name."""
        return entry(self.buffers, name, f"no buffer {name!r} in this core; its buffers: ")


class PowerSpec(SpecModel):
    """The clock under the power limit, as a share of the full clock: (limit / (products' share of peak x time share))
    ** exponent.

    The limit is ``limit_w / load_w``, or ``limit_factor`` at ``board_w`` watts; a board that is set to other watts has
    a limit in proportion.  The formula gives the clock relative to ``load_clock_hz``: a board with a lower fixed clock
    draws less power and reaches the limit later.
    """

    limit_factor: Positive | None = Field(
        default=None, description="share of the tensor cores' peak that the full clock sustains"
    )
    limit_w: Positive | None = Field(default=None, description="limit of the board's power; needs load_w or board_w")
    load_w: Positive | None = Field(default=None, description="power at the tensor cores' peak and the full clock")
    board_w: Positive | None = Field(
        default=None, description="limit of the board for which limit_factor was determined"
    )
    load_clock_hz: Positive | None = Field(
        default=None, description="clock for which limit_factor was determined; missing: the device's clock"
    )
    exponent_factor: Positive
    pause_s: Quantity = Field(description="idle time before each call; 0: calls follow one another without a pause")
    settle_s: Positive | None = Field(
        default=None,
        description=(
            "time constant with which the clock falls to its value at the limit; missing: it falls immediately"
        ),
    )
    calls_count: PositiveWhole | None = Field(
        default=None,
        description=(
            "number of successive calls, starting at the full clock, whose mean is the time of a call; requires "
            "settle_s"
        ),
    )
    at_once: PowerSpec | None = Field(
        default=None, description=("a second limit, which depends on how busy the tensor cores are")
    )

    def clock(self, load: float, seconds: float, watts: float = 1.0) -> float:
        """Return the clock relative to the full clock at a load (share of the peak) of this duration; it has no upper
        limit.

        ``watts``: the power limit that the board is set to, relative to the file's limit.
        """
        average = load * seconds / (seconds + self.pause_s.value)
        return float((self.limit * watts / average) ** self.exponent_factor.value)

    def mean_clock(self, share: float, seconds: float) -> float:
        """Return the mean clock of calls with this duration in seconds, as a share of the full clock; ``share`` is the
        clock at the limit.

        Where the clock falls to the limit with a time constant: the mean over ``calls_count`` calls that begin at the
        full clock.
        """
        if self.settle_s is None or self.calls_count is None or share >= 1:
            return share
        lasted = seconds * self.calls_count.value / self.settle_s.value
        return share - (1 - share) * expm1(-lasted) / lasted

    @model_validator(mode="after")
    def _limit_is_stated_once(self) -> Self:
        if (self.limit_factor is None) == (self.load_w is None):
            raise fault_at("limit_factor", "set either limit_factor, or limit_w with load_w, not both")
        if self.load_w is not None and self.limit_w is None:
            raise fault_at("limit_w", "missing: a limit needs limit_w together with load_w")
        if self.limit_factor is not None and self.limit_w is not None and self.board_w is None:
            raise fault_at("limit_w", "the file does not state board_w, the power limit to which limit_factor belongs")
        if (self.settle_s is None) != (self.calls_count is None):
            raise fault_at("settle_s", "settle_s and calls_count must be set together")
        return self

    @property
    def stated_w(self) -> Positive | None:
        """The limit that the board is set to, in watts; None if the file states no limit."""
        return self.board_w if self.limit_w is None else self.limit_w

    def watts(self, held: Positive | None) -> float:
        """Return the power limit (``held``, if the board has such a setting), relative to the power limit to which
        ``limit`` belongs.
        """
        known, stated = self.limit_w if self.limit_factor is None else self.board_w, held or self.stated_w
        return stated.value / known.value if stated and known else 1.0

    @property
    def limit(self) -> float:
        """Largest share of the tensor cores' peak that is possible at the full clock."""
        if self.limit_factor is not None:
            return float(self.limit_factor.value)
        assert self.limit_w is not None
        assert self.load_w is not None
        return float(self.limit_w.value / self.load_w.value)


class LaunchSpec(SpecModel):
    """Costs of starting kernels, each under the observer that measures it; an absent cost is unknown for this
    device.
    """

    kernel_overhead_s: Quantity = Field(
        description="time of a call that the host waits for, in addition to the time of the cores"
    )
    products_overhead_s: Quantity | None = Field(
        default=None,
        description=(
            "time of a call with products that the host waits for, in addition to the time "
            "of the cores; missing: kernel_overhead_s"
        ),
    )
    products_s: Quantity | None = Field(
        default=None,
        description="additional time, only in a stream, of the first task of a program with products; absent: none",
    )
    block_dispatch_cycles: WholeQuantity = Field(
        description=("time before the first instruction of a launch on a core")
    )
    task_s: Quantity | None = Field(
        default=None,
        description="dispatch and end of a kernel in a profiler's task duration, in addition to the time on one "
        "core group",
    )
    task_all_s: Quantity | None = Field(
        default=None, description=("dispatch and end of a kernel on all core groups; absent: as on one group")
    )
    attention_s: Quantity | None = Field(
        default=None,
        description=(
            "dispatch and end of the vendor's fused attention, on any number of core groups; absent: the times of "
            "other kernels"
        ),
    )
    masked_s: Quantity | None = Field(
        default=None, description="additional time of a task that loads a mask; absent: none"
    )
    gap_s: Quantity | None = Field(
        default=None, description="time between two kernels that are issued one after the other"
    )
    host_issue_s: Quantity | None = Field(
        default=None, description="time in which the host issues a kernel without waiting for its end"
    )

    @model_validator(mode="after")
    def _parts_are_complete(self) -> Self:
        parts = {name: getattr(self, name) for name in ("task_s", "gap_s", "host_issue_s")}
        missing = [name for name, part in parts.items() if part is None]
        if missing and len(missing) < len(parts):
            raise fault_at(missing[0], f"missing; set all of {', '.join(parts)}, or none of them")
        return self

    def times(
        self,
        core_s: float,
        shares: Sequence[float],
        *,
        is_masked: bool = False,
        is_attention: bool = False,
        clears: int = 0,
    ) -> tuple[dict[str, float], float]:
        """Return a call's times (s) by observer, and the part of a stream's time that is launches.

        ``core_s`` is the time of the cores; ``shares``: for each kernel, the fraction, 0 to 1, of the other core groups
        that work in addition to the first; ``is_masked``: whether one of the kernels loads a mask; ``is_attention``:
        whether the first is the vendor's fused attention; ``clears``: number of memory fills before the kernels; a fill
        has neither the dispatch nor the end of a kernel.  The host issues kernels one after another and waits once, so
        that the slower of host and device determines the time of a call of several kernels.  If a file states a single
        cost of a launch, each kernel has this cost.
        """
        masked = float(self.masked_s.value) if is_masked and self.masked_s is not None else 0.0
        overhead, kernels, busy_s = float(self.kernel_overhead_s.value), len(shares) + clears, core_s + masked
        if self.task_s is None or self.gap_s is None or self.host_issue_s is None:
            return {"core": core_s, "call": busy_s + overhead * kernels}, masked + overhead * kernels
        one = float(self.task_s.value)
        every = one if self.task_all_s is None else float(self.task_all_s.value)
        gap, issue = float(self.gap_s.value), float(self.host_issue_s.value)
        tasks = [one + (every - one) * share for share in shares]
        if is_attention and self.attention_s is not None:
            tasks[0] = float(self.attention_s.value)
        if tasks and self.products_s is not None:
            tasks[0] += float(self.products_s.value)
        stream = sum(tasks) + gap * kernels
        # The call's launch is that of its first kernel.
        behind = stream - tasks[0] - gap if tasks else 0.0
        return {
            "core": core_s,
            "kernel": busy_s + sum(tasks),
            "back_to_back": max(issue * kernels, busy_s + stream),
            "call": overhead + max(issue * (kernels - 1), busy_s + behind),
        }, masked + stream


class DeviceSpec(HardwareModel):
    """A device. Every number is a `Quantity`; the end of its key is its unit.

    A device is immutable. Cycles are cycles of ``clock_hz``. A launch uses ``group_count`` core groups (on the 910B a
    group is one AIC with its two AIV).
    """

    schema_id: Literal["npusim.device/1"] = Field(alias="schema", description="schema of this file")
    name: Name
    description: Text
    family: Annotated[str, AfterValidator(_family)] = Field(
        description="core family: ascend, nvidia, cpu, or one of an installed package"
    )
    architecture: Text
    clock_hz: Positive
    products_clock_hz: Positive | None = Field(
        default=None, description="clock while the tensor cores of any multiprocessor work; missing: clock_hz"
    )
    held_clock_hz: Positive | None = Field(
        default=None,
        description=(
            "clock to which the cores are locked (--clock), which is an upper limit for every kernel; missing: "
            "the clock is not locked"
        ),
    )
    held_power_w: Positive | None = Field(
        default=None, description="power limit of the board (--power-watts); missing: the limit that `power` states"
    )
    group_count: PositiveWhole
    cores: Annotated[dict[str, CoreSpec], Field(min_length=1)]
    memory: MemorySpec
    links: dict[str, LinkSpec]
    stated: Facts = Field(default_factory=dict, alias="facts", description="known facts that no model uses yet")
    flags: FlagsSpec | None = Field(default=None, description="missing: the device is not timed")
    launch: LaunchSpec | None = Field(default=None, description="missing: the device is not timed")
    power: PowerSpec | None = Field(default=None, description="missing: the clock does not fall")
    _clock_share: float = 1.0
    _free_hz: float | None = None
    _unchanged: DeviceSpec | None = None

    @model_validator(mode="after")
    def _links_are_not_slower_than_the_clock_resolves(self) -> Self:
        clock, least = self.clock_hz.value, SLOWEST_BYTES_PER_CYCLE * self.clock_hz.value
        for name, link in self.links.items():
            if (rate := link.rate) < least:
                raise fault_at(
                    f"links.{name}.bytes_per_s",
                    f"{rate:g} is too small: at {clock / 1e9:g} GHz a rate must be at least {format_limit(least)}, "
                    f"1/{1 / SLOWEST_BYTES_PER_CYCLE:.0f} byte a cycle",
                )
        return self

    @model_validator(mode="after")
    def _is_held_at_what_it_has(self) -> Self:
        held, watts = self.held_clock_hz, self.held_power_w
        if held is not None and held.value > self.clock_hz.value:
            clock = f"{self.clock_hz.value / 1e6:,.0f} MHz"
            raise fault_at("held_clock_hz", f"{held.value / 1e6:,.0f} MHz; allowed: up to the device's {clock}")
        if watts is not None and (self.power is None or self.power.stated_w is None):
            text = (
                "the file does not state a power limit in watts (power.board_w, or power.limit_w with load_w) "
                "that could be changed"
            )
            raise fault_at("held_power_w", text)
        return self

    @model_validator(mode="after")
    def _routes_join_what_exists(self) -> Self:
        places = {GM, *(name for core in self.cores.values() for name in core.buffers)}
        for core_name, core in self.cores.items():
            for engine_name, engine in core.engines.items():
                if not isinstance(engine, DmaEngine | FixpipeEngine):
                    continue
                for name, route in engine.routes.items():
                    key = f"cores.{core_name}.engines.{engine_name}.routes.{name}"
                    _known(f"{key}.source", route.source, places)
                    _known(f"{key}.destination", route.destination, places)
                    if not {route.source, route.destination} & set(core.buffers):
                        raise fault_at(
                            f"{key}.source",
                            f"{route.source} to {route.destination}: one of them must be a buffer of {core_name}, "
                            f"whose engine moves it; its buffers: {', '.join(sorted(core.buffers))}",
                        )
                    for link in route.links:
                        _known(f"{key}.links", link, set(self.links))
        return self

    @model_validator(mode="after")
    def _links_are_crossed(self) -> Self:
        routes = [route for _, engine in self.engines() for route in getattr(engine, "routes", {}).values()]
        crossed = {"l2", "hbm", *(link for route in routes for link in route.links)}
        for link in self.links:
            if link not in crossed:
                raise fault_at(f"links.{link}", f"no route of an engine uses this link{suggest(link, sorted(crossed))}")
        return self

    @model_validator(mode="after")
    def _family_has_its_parts(self) -> Self:
        try:
            family = registered(self.family)
        except SpecError as error:
            raise fault_at("family", str(error)) from None
        for core in family.cores:
            if core not in self.cores:
                raise fault_at("cores", f"{self.family} devices have a core kind `{core}`; missing")
        for core in family.sole:
            if self.core(core).per_group_count.value != 1:
                raise fault_at(f"cores.{core}.per_group_count", f"must be 1: a core group has one {core.upper()}")
        for part in family.parts:
            if getattr(self, part) is None:
                raise fault_at(part, f"missing; {self.family} devices need it for their timing")
        for link in ("l2", "hbm"):
            if link not in self.links:
                raise fault_at("links", f"a device has a link `{link}`; missing")
        return self

    def core(self, name: str) -> CoreSpec:
        """Return a kind of core; raise `SpecError` with the device's kinds if the name is unknown."""
        return entry(self.cores, name, f"{self.name}: there is no core {name!r}; its cores: ")

    def engine(self, core: str, name: str) -> EngineSpec:
        """Return an engine by core and pipe name; raise `SpecError` with the engines if the name is unknown."""
        return entry(
            self.core(core).engines, name, f"{self.name}: there is no engine {name!r} in {core}; its engines: "
        )

    def engines(self) -> Iterator[tuple[str, EngineSpec]]:
        """Yield all engines with the kinds of their cores."""
        yield from ((name, engine) for name, core in self.cores.items() for engine in core.engines.values())

    def link(self, name: str) -> LinkSpec:
        """Return a shared link; raise `SpecError` with the device's links if the name is unknown."""
        return entry(self.links, name, f"{self.name}: there is no link {name!r}; its links: ")

    @property
    def rate_keys(self) -> dict[str, tuple[str, ...]]:
        """Keys of the factors of rates (`--scale`), by unit or link. A unit that occurs in several kinds of core has
        several keys.
        """
        keys: dict[str, tuple[str, ...]] = {}
        for name, core in self.cores.items():
            for engine, unit in core.engines.items():
                if isinstance(unit, RatedUnit):
                    keys[engine] = (*keys.get(engine, ()), f"cores.{name}.engines.{engine}.rate_factor")
        return keys | {link: (*keys.get(link, ()), f"links.{link}.rate_factor") for link in self.links}

    @property
    def scale(self) -> dict[str, float]:
        """Factors of rates that differ from 1, by link or unit, or by core and unit if the unit has different factors
        in different cores.
        """
        rates: dict[str, dict[str, float]] = {}
        for name, core in self.cores.items():
            for engine, unit in core.engines.items():
                if isinstance(unit, RatedUnit):
                    rates.setdefault(engine, {})[f"{name}.{engine}"] = unit.rate
        factors = {name: link.factor for name, link in self.links.items()}
        for engine, by_core in rates.items():
            first = next(iter(by_core.values()))
            factors |= {engine: first} if set(by_core.values()) == {first} else by_core
        return {name: factor for name, factor in factors.items() if factor != 1}

    @property
    def unchanged(self) -> DeviceSpec | None:
        """The device before its numbers were changed (``-C``); None if no number was changed."""
        return self._unchanged

    def changed_from(self, device: DeviceSpec) -> Self:
        """Return this device, marked as a version of ``device`` with changed numbers."""
        self._unchanged = device.unchanged or device
        return self

    @property
    def is_timed(self) -> bool:
        """Whether the file has the numbers that a simulation of time needs, not only those of arithmetic and
        buffers.
        """
        return self.flags is not None and self.launch is not None

    def timed_flags(self) -> FlagsSpec:
        """Return the flags; raise `SpecError` on a device that is described for its values only."""
        if self.flags is None:
            raise SpecError(f"{self.name}: its file does not describe flags, so that it has values but no time")
        return self.flags

    def timed_launch(self) -> LaunchSpec:
        """Return the launch costs; raise `SpecError` on a device that is described for its values only."""
        if self.launch is None:
            raise SpecError(f"{self.name}: its file does not describe launches, so that it has values but no time")
        return self.launch

    def has_route(self, core: str, source: str, destination: str) -> bool:
        """Return whether an engine of a kind of core transfers bytes from one buffer to another."""
        movers = (e for e in self.core(core).engines.values() if isinstance(e, DmaEngine | FixpipeEngine))
        return any((r.source, r.destination) == (source, destination) for e in movers for r in e.routes.values())

    def matrix_engine(self, core: str) -> MatrixEngine:
        """Return the matrix unit of a kind of core; raise `SpecError` if it has no matrix unit."""
        return entry(self.matrix_engines, core, f"{self.name}: {core} has no matrix unit; cores that have one: ")

    @property
    def matrix_engines(self) -> dict[str, MatrixEngine]:
        """Matrix units by the kind of core that has one."""
        return {name: engine for name, engine in self.engines() if isinstance(engine, MatrixEngine)}

    @property
    def vector_unit(self) -> VectorUnit | None:
        """Vector unit of the device; None if the device has no vector unit."""
        return next((engine for _, engine in self.engines() if isinstance(engine, VectorUnit)), None)

    @property
    def row_sum(self) -> Choice[Any] | None:
        """Order in which the vector unit sums a row; None if there is no vector unit."""
        unit = self.vector_unit
        return None if unit is None else unit.row_sum

    @property
    def arithmetic_choices(self) -> dict[str, Choice[Any]]:
        """Possible arithmetics of the matrix units by key in the file: one per input format, or one per accumulator
        format.
        """
        facts = ((key, fact) for key, fact in self.facts() if ".arithmetic" in key and not key.startswith("facts."))
        return {key: fact for key, fact in facts if isinstance(fact, Choice)}

    @property
    def rounding_choices(self) -> dict[str, Choice[Any]]:
        """Rounding of the vector unit for kernels and precisions that state none, by the field of the precision.

        If a field is absent, results are rounded to nearest even, and products are rounded before they are added.
        """
        keys = {"rounding": "cast_rounding", "multiply_add": "multiply_add"}
        return {name: fact for name, key in keys.items() if (fact := getattr(self.vector_unit, key, None)) is not None}

    @property
    def row_sums(self) -> tuple[str, ...]:
        """Possible orders in which the vector unit sums a row, by name."""
        unit = self.vector_unit
        return () if unit is None else unit.row_sums

    def core_count(self, kind: str) -> int:
        """Return how many cores of a kind the device has."""
        return self.group_count.value * self.core(kind).per_group_count.value

    def seconds(self, cycles: float) -> float:
        """Return the duration of ``cycles`` of the device clock."""
        return cycles / self.clock_hz.value

    def clocked(self, flops: int) -> DeviceSpec:
        """Return the device at its clock for a program with this number of operations in products, and the launch at
        this clock.
        """
        launch, held = self.launch, self.held_clock_hz
        clock = self.products_clock_hz if flops else None
        slower = launch.products_overhead_s if launch is not None and flops else None
        lacks_products = launch is not None and not flops and launch.products_s is not None
        if clock is None and slower is None and held is None and not lacks_products:
            return self
        clocks = [one for one in (clock or self.clock_hz, held) if one is not None]
        update: dict[str, Any] = {"clock_hz": min(clocks, key=lambda one: one.value), "products_clock_hz": None}
        update["held_clock_hz"] = None
        if launch is not None and slower is not None:
            overhead = {"kernel_overhead_s": slower, "products_overhead_s": None}
            update["launch"] = launch.model_copy(update=overhead)
        elif launch is not None and lacks_products:
            update["launch"] = launch.model_copy(update={"products_s": None})
        changed = self.model_copy(update=update)
        changed._free_hz = float((clock or self.clock_hz).value)
        changed._clock_share = changed._free_hz / self.clock_hz.value  # a locked clock applies to all units
        return changed

    @property
    def clock_share(self) -> float:
        """The clock of this device over its clock for kernels without products."""
        return self._clock_share

    def __reduce__(self) -> tuple[object, ...]:
        # A device contains classes that pydantic creates at run time, which cannot be pickled.
        return _restored, (type(self), self.model_dump_json(by_alias=True), self.unchanged)

    def launched(
        self,
        core_s: float,
        blocks: Iterable[int],
        *,
        is_masked: bool = False,
        is_attention: bool = False,
        clears: int = 0,
    ) -> tuple[dict[str, float], float]:
        """Return the result of `LaunchSpec.times` for a call whose kernels have the given numbers of blocks."""
        most = self.group_count.value
        shares = [(min(n, most) - 1) / max(1, most - 1) for n in blocks]
        how = {"is_masked": is_masked, "is_attention": is_attention}
        return self.timed_launch().times(core_s, shares, **how, clears=clears)

    def peak_flops_per_s(self, input_format: str) -> float | None:
        """Return the rate of the matrix units for a format, or their highest rate if they do not multiply this format.

        A multiply-add is two operations. None for a device whose file describes no matrix unit.
        """
        for kind, unit in self.matrix_engines.items():
            steps = [input_format] if input_format in unit.fractals else unit.fractals
            rate = max(2 * unit.fractals[name].products / unit.fractal_cycles(name) for name in steps)
            return float(self.core_count(kind) * rate * self.clock_hz.value)
        return None

    def sustained(self, flops: int, seconds: float, busy_cycles: Mapping[str, int]) -> float:
        """Return the clock of a kernel with this number of operations, relative to ``clock_hz``.

        ``busy_cycles``: busy cycles of the average core's units, by unit name (``sm.TENSOR``).
        """
        if self.power is None or not flops:
            return 1.0
        peak, limit = self.peak_flops_per_s("float16"), self.power.at_once
        assert peak is not None
        kind, engine = next(iter(self.matrix_engines.items()))
        busy = max(busy_cycles.get(f"{kind}.{name}", 0) for name, e in self.core(kind).engines.items() if e is engine)
        share = busy / self.clock_hz.value / seconds
        # Products of narrower formats do more operations in the same number of cycles at the same power.
        load = min(flops / seconds / peak, share) if busy else flops / seconds / peak
        watts = self.power.watts(self.held_power_w)
        clock = self.power.clock(load, seconds, watts)
        clock = min(clock, limit.clock(share, seconds, watts)) if limit and busy else clock
        own = float(self.clock_hz.value)
        full = own if self._free_hz is None else self._free_hz
        full = full if self.power.load_clock_hz is None else float(self.power.load_clock_hz.value)
        return self.power.mean_clock(min(1.0, clock * full / own), seconds)


def _restored(kind: type[DeviceSpec], text: str, unchanged: DeviceSpec | None) -> DeviceSpec:
    device = kind.model_validate_json(text)
    return device if unchanged is None else device.changed_from(unchanged)


def _known(key: str, value: str, allowed: set[str]) -> None:
    if value not in allowed:
        raise fault_at(key, f"{value!r} does not exist here; allowed: {', '.join(sorted(allowed))}")
