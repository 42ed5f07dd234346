"""A device as its hardware file describes it: cores, engines, buffers, memory, links, flags."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from npusim.config.engine import DmaEngine, EngineSpec, FixpipeEngine, MatrixEngine, VectorEngine
from npusim.config.installed import clash, installed
from npusim.config.launch import LaunchSpec
from npusim.config.limits import fault_in, slow_link
from npusim.config.model import Name, SpecModel, Text, fault_at
from npusim.config.quantity import Choice, Positive, PositiveWhole, Quantity, Sourced, WholeQuantity
from npusim.errors import SpecError

GM = "GM"

#: Core families of the package, and the kinds of core that their devices have.
FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"ascend": ("aic", "aiv"), "nvidia": ("sm",), "cpu": ("sm",)}
)
#: Entry points of installed packages that bring a family: ``name = "package.module:Machine"``.
MACHINES = "npusim.machines"


def _family(name: str) -> str:
    """Return ``name`` if a machine for it is known; raise what pydantic reports if not."""
    others = installed(MACHINES)
    if name in FAMILIES or name in others:
        if twice := clash(MACHINES, name, is_ours=name in FAMILIES):
            raise PydanticCustomError("family", "{text}", {"text": twice})
        return name
    known = " or ".join(repr(n) for n in (*FAMILIES, *sorted(others)))
    raise PydanticCustomError("family", "{text}", {"text": f"{name!r} is not one of: {known}"})


#: Numbers and choices with their sources, under the keys that a model would have them by.
Facts = TypeAliasType("Facts", "dict[str, Quantity | Choice[str] | Facts]")


class BankSpec(SpecModel):
    """Banks of an on-chip buffer: banks in groups, each bank a column of rows."""

    group_count: PositiveWhole
    rows_count: PositiveWhole = Field(description="of one bank")
    row_bytes: PositiveWhole


class BufferSpec(SpecModel):
    """An on-chip buffer of one core."""

    capacity_bytes: PositiveWhole
    alignment_bytes: PositiveWhole = Field(description="addresses are multiples of it")
    banks: BankSpec | None = None


class GlobalMemorySpec(SpecModel):
    """Device memory."""

    capacity_bytes: PositiveWhole
    alignment_bytes: PositiveWhole = Field(description="preferred, for full bandwidth")
    request_min_bytes: PositiveWhole = Field(description="transfers are split into requests of this at least")


class L2Spec(SpecModel):
    """The cache that all cores share."""

    capacity_bytes: PositiveWhole
    miss_extra_latency_cycles: WholeQuantity
    writes: Choice[Literal["back", "through"]] | None = Field(
        default=None,
        description="back: what is written stays until something else needs its place; absent: outputs go through",
    )
    same_data_factor: Positive | None = Field(
        default=None, description="of its rate, where many cores read the same bytes together, over each its own"
    )
    same_data_cores_count: PositiveWhole | None = Field(default=None, description="cores that are many")


class MemorySpec(SpecModel):
    """Memory outside the cores."""

    gm: GlobalMemorySpec
    l2: L2Spec


class LinkSpec(SpecModel):
    """A bandwidth that all cores share."""

    bytes_per_s: Positive = Field(description="reached, summed over all cores, by reads and writes together")


class FlagsSpec(SpecModel):
    """Flags within a core and between the cores of a group."""

    intra_core_latency_cycles: WholeQuantity
    usable_event_ids_count: PositiveWhole = Field(
        description="binary flags per ordered pair of pipes that a kernel may use"
    )
    cross_core_latency_cycles: WholeQuantity = Field(description="from set to the end of a wait")
    cross_core_issue_cycles: WholeQuantity = Field(description="of the setting or waiting side")
    tile_cycles: Quantity | None = Field(
        default=None, description="of a tile that cores hand one another, where all core groups work; alone: none"
    )
    tile_extra_cycles: Quantity | None = Field(
        default=None, description="the same of PTO's FlashAttention beyond it; its cause is not known"
    )
    cross_core_ids_count: PositiveWhole = Field(description="counter flags per core group")
    cross_core_counter_max_count: PositiveWhole = Field(description="sets not yet waited for")
    cross_core_wait_blocks: Choice[Literal["pipe", "scalar"]] = Field(
        description="who stands still in a wait: the pipe it is queued on, or the scalar unit"
    )


class CoreSpec(SpecModel):
    """One kind of core."""

    per_group_count: PositiveWhole = Field(description="cores of this kind in one core group")
    engines: dict[str, EngineSpec]
    buffers: dict[str, BufferSpec]

    def buffer(self, name: str) -> BufferSpec:
        """Return a buffer; raise `SpecError` naming those the core has."""
        if name not in self.buffers:
            raise SpecError(f"no buffer {name!r} in this core; it has: {', '.join(self.buffers)}")
        return self.buffers[name]


class PowerSpec(SpecModel):
    """How the clock falls where products keep it under power: (limit / (share of peak x share of time)) ** exponent."""

    limit_factor: Positive = Field(description="share of the tensor cores' peak that the full clock sustains")
    exponent_factor: Positive
    pause_s: Quantity = Field(description="without load between two calls")


class DeviceSpec(SpecModel):
    """A device; every number is a `Quantity`, its unit the end of its key.

    Immutable.  Cycles are those of ``clock_hz``; ``group_count`` core groups are what a launch
    fills (on the 910B a group is one AIC and its two AIV).
    """

    schema_id: Literal["npusim.device/1"] = Field(alias="schema", description="of this file")
    name: Name
    description: Text
    family: Annotated[str, AfterValidator(_family)] = Field(
        description="of cores: ascend, nvidia, cpu, or one that an installed package brings"
    )
    architecture: Text
    clock_hz: Positive
    group_count: PositiveWhole
    cores: Annotated[dict[str, CoreSpec], Field(min_length=1)]
    memory: MemorySpec
    links: dict[str, LinkSpec]
    stated: Facts = Field(default_factory=dict, alias="facts", description="known, but read by no model yet")
    flags: FlagsSpec | None = Field(default=None, description="missing: the device is not timed")
    launch: LaunchSpec | None = Field(default=None, description="missing: the device is not timed")
    power: PowerSpec | None = Field(default=None, description="missing: the clock stays")

    @model_validator(mode="after")
    def _numbers_are_of_this_world(self) -> Self:
        fault = fault_in(self.facts())
        for name, link in self.links.items():
            if fault is None:
                rate = link.bytes_per_s.value
                fault = slow_link(f"links.{name}.bytes_per_s", rate, self.clock_hz.value)
        if fault is not None:
            raise fault
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
                            f"{route.source} to {route.destination}: neither is a buffer of {core_name}, whose engine "
                            f"moves it; it has: {', '.join(sorted(core.buffers))}",
                        )
                    for link in route.links:
                        _known(f"{key}.links", link, set(self.links))
        return self

    @model_validator(mode="after")
    def _family_has_its_parts(self) -> Self:
        for core in FAMILIES.get(self.family, ()):
            if core not in self.cores:
                raise fault_at("cores", f"{self.family} devices have a core kind `{core}`; missing")
        if self.family == "ascend" and self.core("aic").per_group_count.value != 1:
            raise fault_at("cores.aic.per_group_count", "a core group has one AIC; must be 1")
        for part in ("flags", "launch"):
            if self.family == "ascend" and getattr(self, part) is None:
                raise fault_at(part, "missing; ascend devices are timed")
        for link in ("l2", "hbm"):
            if link not in self.links:
                raise fault_at("links", f"a device has a link `{link}`; missing")
        return self

    def core(self, name: str) -> CoreSpec:
        """Return a kind of core; raise `SpecError` naming those the device has."""
        if name not in self.cores:
            raise SpecError(f"{self.name}: no core {name!r}; it has: {', '.join(self.cores)}")
        return self.cores[name]

    def engine(self, core: str, name: str) -> EngineSpec:
        """Return an engine by core and pipe name; raise `SpecError` naming those there are."""
        engines = self.core(core).engines
        if name not in engines:
            known = ", ".join(engines)
            raise SpecError(f"{self.name}: no engine {name!r} in {core}; it has: {known}")
        return engines[name]

    def link(self, name: str) -> LinkSpec:
        """Return a shared link; raise `SpecError` naming those the device has."""
        if name not in self.links:
            raise SpecError(f"{self.name}: no link {name!r}; it has: {', '.join(self.links)}")
        return self.links[name]

    @property
    def is_timed(self) -> bool:
        """Whether the file has what a simulation of time needs, not only arithmetic and buffers."""
        return self.flags is not None and self.launch is not None

    def timed_flags(self) -> FlagsSpec:
        """Return the flags; raise `SpecError` on a device that is described for its values only."""
        if self.flags is None:
            raise SpecError(f"{self.name}: its file has no flags; it is described for values only")
        return self.flags

    def timed_launch(self) -> LaunchSpec:
        """Return the launch costs; raise `SpecError` on a device described for its values only."""
        if self.launch is None:
            raise SpecError(f"{self.name}: its file has no launch; it is described for values only")
        return self.launch

    def has_route(self, core: str, source: str, destination: str) -> bool:
        """Return whether an engine of a kind of core moves bytes from one buffer to another."""
        movers = (e for e in self.core(core).engines.values() if isinstance(e, DmaEngine | FixpipeEngine))
        return any((r.source, r.destination) == (source, destination) for e in movers for r in e.routes.values())

    def matrix_engine(self, core: str) -> MatrixEngine:
        """Return the matrix unit of a kind of core; raise `SpecError` where there is none."""
        self.core(core)
        if core not in self.matrix_engines:
            raise SpecError(f"{self.name}: {core} has no matrix unit")
        return self.matrix_engines[core]

    @property
    def matrix_engines(self) -> dict[str, MatrixEngine]:
        """Matrix units by the kind of core that has one."""
        engines = ((name, engine) for name, core in self.cores.items() for engine in core.engines.values())
        return {name: engine for name, engine in engines if isinstance(engine, MatrixEngine)}

    @property
    def row_sum(self) -> Choice[Literal["vector_lanes", "tree_halves"]] | None:
        """Order in which its vector unit adds up a row; None where it has none."""
        engines = (e for core in self.cores.values() for e in core.engines.values())
        return next((e.row_sum for e in engines if isinstance(e, VectorEngine)), None)

    def core_count(self, kind: str) -> int:
        """Return how many cores of a kind the whole device has."""
        return self.group_count.value * self.core(kind).per_group_count.value

    def seconds(self, cycles: float) -> float:
        """Return the duration of ``cycles`` of the device clock."""
        return cycles / self.clock_hz.value

    def quantities(self) -> Iterator[tuple[str, Quantity]]:
        """Yield every number with its dotted key, in the order of the file."""
        for key, fact in self.facts():
            if isinstance(fact, Quantity):
                yield key, fact

    def facts(self) -> Iterator[tuple[str, Sourced]]:
        """Yield every sourced number and choice with its dotted key."""
        yield from _facts("", self)

    def __reduce__(self) -> tuple[object, ...]:
        # A device holds classes that pydantic makes while running, which do not pickle.
        return type(self).model_validate_json, (self.model_dump_json(by_alias=True),)

    def launched(self, core_s: float, blocks: Iterable[int]) -> tuple[dict[str, float], float]:
        """Return `LaunchSpec.times` of a call of kernels with so many blocks each."""
        most = self.group_count.value
        shares = [(min(n, most) - 1) / max(1, most - 1) for n in blocks]
        return self.timed_launch().times(core_s, shares)

    def sustained(self, flops: int, seconds: float) -> float:
        """Return the clock that a kernel of so many operations runs at, over ``clock_hz``."""
        if self.power is None or not flops:
            return 1.0
        kind = next(k for k, c in self.cores.items() if any(isinstance(e, MatrixEngine) for e in c.engines.values()))
        engine = self.matrix_engine(kind)
        step = next(iter(engine.fractals.values()))
        products = step.m_elements.value * step.n_elements.value * step.k_elements.value
        peak = 2 * products / engine.cycles_per_fractal.value * self.clock_hz.value * self.core_count(kind)
        load = flops / seconds / peak * seconds / (seconds + self.power.pause_s.value)
        return min(1.0, float((self.power.limit_factor.value / load) ** self.power.exponent_factor.value))

    def digest(self) -> str:
        """Return a hash of the content, the same for equal devices: for a result's provenance."""
        return content_digest(self)


def content_digest(model: SpecModel) -> str:
    """Return a short hash of a file's content."""
    return hashlib.sha256(model.model_dump_json(by_alias=True).encode()).hexdigest()[:12]


def _facts(prefix: str, node: object) -> Iterator[tuple[str, Sourced]]:
    if isinstance(node, Sourced):
        yield prefix, node
        return
    if isinstance(node, SpecModel):
        fields = type(node).model_fields
        children: Iterator[tuple[str, object]] = ((fields[name].alias or name, v) for name, v in node)
    elif isinstance(node, Mapping):
        children = iter(node.items())
    elif isinstance(node, tuple):
        children = ((str(index), child) for index, child in enumerate(node))
    else:
        return
    for key, child in children:
        yield from _facts(f"{prefix}.{key}" if prefix else key, child)


def _known(key: str, value: str, allowed: set[str]) -> None:
    if value not in allowed:
        raise fault_at(key, f"{value!r} does not exist here; there are: {', '.join(sorted(allowed))}")
