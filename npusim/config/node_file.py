"""A node as its file describes it: devices, the links between them, the driver of a collective, the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from npusim.config.device import DeviceSpec, LinkSpec
from npusim.config.family import NODE_FAMILY
from npusim.config.load import UnreadKeys, apply_overrides, load_device, read_spec, validated
from npusim.config.model import Name, NonNegativeInt, SpecModel, Text, entry, fault_at
from npusim.config.packaged import is_node_name, list_packaged, resolve
from npusim.config.quantity import HardwareModel, Positive, PositiveWhole, Quantity, Sourced, WholeQuantity
from npusim.errors import SpecError

NODE_SCHEMA = "npusim.node/1"
_HEAD_BYTES = 65536
LinkModel = Literal["full_mesh", "switch", "edges"]


class NodeLink(SpecModel):
    """Links between devices of one kind, equal in both directions.

    ``full_mesh`` is one link for each ordered pair, ``switch`` one input port and one output port for each device,
    ``edges`` the listed pairs (a pair that is listed twice has twice the bandwidth).
    """

    model: LinkModel
    bytes_per_s: Positive = Field(description="rate of one link in one direction")
    latency_s: Quantity = Field(description="time from the departure of the first byte to its arrival")
    edges: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = ()

    @model_validator(mode="after")
    def _edges_belong_to_their_model(self) -> Self:
        if (self.model == "edges") != bool(self.edges):
            raise fault_at("edges", "pairs of devices must be listed for model `edges`, and only there")
        return self


class TunerSpec(SpecModel):
    """A library's estimate for a mode, with which the library chooses: a start, a time for each round, and a rate."""

    base_s: Quantity = Field(description="time before the first round")
    step_s: Quantity = Field(description="time of each round in addition to its bytes")
    bytes_per_s: Positive = Field(description="rate at which a rank sends, summed over all rounds")


class DriverMode(SpecModel):
    """One way (protocol) in which a driver moves data.

    A transfer costs ``transfer_start_s`` and is cut into ``chunk_bytes`` (absent: one piece), of which
    ``chunks_in_flight_count`` are in flight at once.
    """

    start_s: Quantity = Field(description="time of a collective before its first byte")
    transfer_start_s: Quantity = Field(description="time to start each transfer")
    engine_bytes_per_s: Positive = Field(description="rate of one engine or core")
    local_bytes_per_s: Positive | None = Field(
        default=None,
        description=("rate of a rank's last local copy, during which it receives and sends nothing; missing: no time"),
    )
    engine_least_bytes: PositiveWhole | None = Field(
        default=None,
        description=(
            "smallest part of a message, for each rank, for which an engine is used; missing: all engines are used"
        ),
    )
    chunk_bytes: PositiveWhole | None = Field(default=None, description="chunk of a rank's message")
    chunks_in_flight_count: PositiveWhole | None = None
    tuner: TunerSpec | None = Field(
        default=None,
        description=("the library's estimate, by which it chooses a mode; missing: npusim chooses the fastest mode"),
    )

    @property
    def local_s_per_byte(self) -> float:
        """Return the time of a byte that is copied and not reduced."""
        return 0.0 if self.local_bytes_per_s is None else 1.0 / float(self.local_bytes_per_s.value)

    def transfer_bytes_per_s(self, most: int, ranks: int, size_bytes: int | None) -> float:
        """Return the rate of the engines, at most ``most``, that transfer a message of ``size_bytes`` per rank; None:
        the rate of all of them.

        NCCL uses complete channels.  Here a fraction of the last channel is used too, because otherwise a message could
        be slower than a slightly longer one.  Multiples of the step have the same value.
        """
        least, engines = self.engine_least_bytes, float(most)
        if least is not None and size_bytes is not None:
            engines = min(most, max(1, size_bytes / (least.value * ranks)))
        return engines * float(self.engine_bytes_per_s.value)


class DriverSpec(SpecModel):
    """The driver that transfers a collective's bytes: copy engines, or cores, which then do not compute."""

    engine_count: PositiveWhole = Field(description="engines or cores that take part")
    engines_per_transfer_count: PositiveWhole | None = Field(
        default=None, description="cores that serve one transfer; missing: all"
    )
    core: Text | None = Field(default=None, description="kind of core that a collective uses; missing: none")
    beside_factor: Positive | None = Field(
        default=None,
        description=(
            "time of a kernel's blocks on the remaining cores during a collective, relative to their time without it"
        ),
    )
    memory_touches_factor: Quantity = Field(description="bytes read and written in device memory for each byte sent")
    call_s: Quantity | None = Field(default=None, description="time of a call, apart from kernels and collectives")
    modes: Annotated[dict[str, DriverMode], Field(min_length=1)]

    @model_validator(mode="after")
    def _is_comparable(self) -> Self:
        """Refuse estimates for only some of a library's modes: the library could not choose a mode."""
        without = [name for name, mode in self.modes.items() if mode.tuner is None]
        if 0 < len(without) < len(self.modes):
            raise ValueError(
                f"modes: {', '.join(without)} has no tuner, but other modes have one; set it for all modes or for none"
            )
        return self

    @property
    def engines_per_transfer(self) -> int:
        """Return the number of engines that work on one transfer."""
        per = self.engines_per_transfer_count
        return self.engine_count.value if per is None else per.value


class HostSpec(SpecModel):
    """Time that the host needs to issue an operation; the host runs ahead of the device."""

    attention_issue_s: Quantity
    linear_issue_s: Quantity
    collective_issue_s: Quantity
    overlap_issue_s: Quantity = Field(description="number of events between two streams for each block of rows")


class SplitTimes(SpecModel):
    """Attention of few blocks, for which FlashAttention-2 splits the keys (`num_splits_heuristic`) and merges the
    results.
    """

    block_rows_count: PositiveWhole
    block_keys_count: PositiveWhole
    flops_per_s: Positive = Field(description="rate of products on a full core")
    merge_s: Quantity = Field(description="time of the kernel that merges the parts")


class AttentionTimes(SpecModel):
    """Attention kernels of a device without a timing model: the cores process equal blocks."""

    block_rows_count: PositiveWhole
    resident_count: PositiveWhole = Field(description="number of blocks that are resident on a core")
    alone_factor: Positive | None = Field(
        default=None,
        description=("time of a single block on a core, relative to its share of a full core's time; missing: 1"),
    )
    flops_per_s: Positive = Field(description="rate of products on a full core")
    split: SplitTimes | None = Field(default=None, description="missing: keys are never split")


class LinearTimes(SpecModel):
    """Matrix products of a device without a timing model: the cores process equal tiles."""

    block_m_count: PositiveWhole
    block_n_count: PositiveWhole
    flops_per_s: Positive = Field(description="rate of one core")


class DecodeTimes(SpecModel):
    """Attention of single queries, by a kernel that is known only by its time."""

    start_s: Quantity
    bytes_per_s: Positive = Field(description="rate of reading keys and values")


class RoofTimes(SpecModel):
    """Kernels that no schedule describes: their time follows from bytes of device memory, or from operations."""

    flops_per_s: Positive = Field(description="rate of matrix products of the whole device")
    memory_factor: Positive = Field(description="share of the memory's bandwidth that kernels without a mapping reach")


class KernelTimes(SpecModel):
    """Times of kernels, for devices whose file cannot be simulated yet."""

    core: Text | None = Field(default=None, description="core that runs the blocks of attention and linear layers")
    attention: AttentionTimes | None = None
    linear: LinearTimes | None = None
    decode: DecodeTimes | None = None
    others: RoofTimes | None = Field(
        default=None, description="costs of operations that have no schedule on the device's cores"
    )

    @model_validator(mode="after")
    def _blocks_have_a_core(self) -> Self:
        if self.core is None and (self.attention or self.linear):
            raise fault_at(
                "core", "missing; it names the kind of core that runs the blocks of `attention` and `linear`"
            )
        return self


class CpuSpec(SpecModel):
    """The host's processors and memory, if they compute attention."""

    device: Text = Field(description="name of the hardware file that states the arithmetic of the cores")
    sockets_count: PositiveWhole
    cores_count: PositiveWhole = Field(description="number of cores of a socket")
    clock_hz: Positive
    lanes_count: PositiveWhole = Field(description="number of float32 elements of a vector register")
    units_count: PositiveWhole = Field(description="number of vector units of a core")
    instructions_count: PositiveWhole = Field(
        description="number of instructions for each vector of keys or values: conversion and FMA"
    )
    dram_bytes_per_s: Positive = Field(description="bandwidth that all cores of all sockets reach together")
    dram_capacity_bytes: PositiveWhole
    reserve_bytes: WholeQuantity = Field(description="memory that is reserved for other uses")

    @property
    def elements_per_s(self) -> float:
        """Return the number of elements of keys and values that all cores process in a second."""
        cores = self.sockets_count.value * self.cores_count.value
        each = self.lanes_count.value * self.units_count.value / self.instructions_count.value
        return float(cores * each * self.clock_hz.value)


class PcieSpec(SpecModel):
    """The link between the host and each device; copies from pinned memory run concurrently with kernels."""

    bytes_per_s: Positive = Field(description="rate of one device in one direction")
    start_s: Quantity = Field(description="time to start a copy of a few rows")
    kv_start_s: Quantity = Field(description="time to start a copy of a layer's keys and values")
    wake_s: Quantity = Field(
        description="additional time of a copy after the device was idle, for each doubling of the idle time beyond "
        "1 ms"
    )


class NodeSpec(HardwareModel):
    """Several equal devices and the links between them; every number is a `Quantity`.

    ``drivers`` are listed with the default first.  ``between`` connects equal servers, if several are requested: each
    device with its counterpart.
    """

    schema_id: Literal["npusim.node/1"] = Field(alias="schema", description="schema of this file")
    name: Name
    description: Text
    device: Text = Field(description="a hardware file by name")
    device_count: PositiveWhole
    links: Annotated[dict[str, NodeLink], Field(min_length=1)]
    drivers: Annotated[dict[str, DriverSpec], Field(min_length=1)]
    between: NodeLink | None = Field(
        default=None, description="link from a device to the device of the same number on another server"
    )
    host: HostSpec | None = Field(default=None, description="missing: launches have the cost in the device file")
    kernels: KernelTimes | None = Field(default=None, description="missing: simulated")
    cpu: CpuSpec | None = Field(default=None, description="missing: the host computes nothing")
    pcie: PcieSpec | None = Field(default=None, description="missing: nothing is offloaded")
    reserve_bytes: WholeQuantity | None = Field(
        default=None,
        description=("memory of each device that is reserved for uses other than weights, KV and intermediates"),
    )

    @property
    def family(self) -> str:
        """The name under which schedules of nodes are registered."""
        return NODE_FAMILY

    @property
    def default_driver(self) -> str:
        """Return the first driver of the file."""
        return next(iter(self.drivers))

    def driver(self, name: str) -> DriverSpec:
        """Return a driver; raise `SpecError` with the node's drivers if the name is unknown."""
        return entry(self.drivers, name, f"{self.name}: there is no driver {name!r} here; allowed: ")

    @model_validator(mode="after")
    def _edges_join_what_exists(self) -> Self:
        count = self.device_count.value
        for name, link in self.links.items():
            for a, b in link.edges:
                if max(a, b) >= count or a == b:
                    text = f"{a}-{b} does not join two of the {count} devices 0..{count - 1}"
                    raise fault_at(f"links.{name}.edges", text)
        return self


#: Links of a node's file that belong to the host.
_HOST_LINKS = MappingProxyType(
    {"links.pcie.bytes_per_s": "pcie.bytes_per_s", "links.dram.bytes_per_s": "cpu.dram_bytes_per_s"}
)


class NodeDevice(DeviceSpec):
    """One of the devices of a node, as reports show it, with the facts of both files.

    It has the name and the links of the node, and its "core groups" are the node's devices; ``each`` is the device as
    its own file describes it. ``family`` is the name under which schedules of nodes are registered.
    """

    family: Literal["node"]  # a node is not a core family, but has schedules
    node: NodeSpec
    each: DeviceSpec = Field(exclude=True)

    @classmethod
    def of(cls, node: NodeSpec, device: DeviceSpec) -> NodeDevice:
        """Return ``device`` as a device of ``node``."""
        links = {name: LinkSpec(bytes_per_s=link.bytes_per_s) for name, link in node.links.items()}
        if node.pcie is not None:
            links["pcie"] = LinkSpec(bytes_per_s=node.pcie.bytes_per_s)
        if node.cpu is not None:
            links["dram"] = LinkSpec(bytes_per_s=node.cpu.dram_bytes_per_s)
        fields: dict[str, object] = {"family": NODE_FAMILY, "node": node, "each": device}
        fields |= {"name": node.name, "description": node.description}
        fields |= {"group_count": node.device_count, "links": {**device.links, **links}}
        return cls.model_construct(**{**dict(device), **fields})

    @classmethod
    def alone(cls, device: DeviceSpec) -> NodeDevice:
        """Return a single device as a node without links and host; a node is returned unchanged."""
        if isinstance(device, NodeDevice):
            return device
        count = WholeQuantity(value=1, basis="derived", source="one device")
        parts: dict[str, object] = dict.fromkeys(NodeSpec.model_fields)
        parts |= {"schema_id": NODE_SCHEMA, "name": device.name, "description": device.description}
        parts |= {"device": device.name, "device_count": count, "links": {}, "drivers": {}}
        return cls.of(NodeSpec.model_construct(**parts), device)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).of, (self.node, self.each)

    @property
    def is_timed(self) -> bool:
        """Whether kernels have times, from the table of the node or from the device file."""
        table = self.node.kernels
        return self.each.is_timed or (table is not None and table.attention is not None)

    def facts(self) -> Iterator[tuple[str, Sourced]]:
        """Yield every sourced number with its dotted key; the keys of the node begin with ``node.``."""
        for key, fact in super().facts():
            if not key.startswith("each."):
                yield key, fact


def is_node(name_or_path: object) -> bool:
    """Return whether ``name`` means a node: a name like ``<device>_x<count>``, or a file with a node's schema."""
    if not isinstance(name_or_path, str | Path):
        return isinstance(name_or_path, NodeSpec | NodeDevice)
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        # The first lines show the kind of file; a file that is not text is refused when it is read.
        with path.open(encoding="utf-8", errors="replace") as file:
            return f"schema: {NODE_SCHEMA}" in file.read(_HEAD_BYTES)
    return is_node_name(path.stem)


def list_nodes() -> list[str]:
    """Return the names of the packaged node files."""
    return [name for name in list_packaged("hwconfigs") if is_node(name)]


def load_node(name_or_path: str | Path) -> NodeSpec:
    """Return a node by packaged name (``ascend_910b2_x8``) or path.

    Raises `SpecError` for an unknown name or a faulty file: ``file:line  key: ...``.
    """
    document = read_spec("node", name_or_path)
    node = validated(NodeSpec, document)
    if node.device_count.value > 1:
        return node
    raise SpecError(
        f"{document.file}: device_count: {node.device_count.value}, but a node must have at least 2 devices"
    )


def load_node_device(
    hw: str | Path | NodeSpec | NodeDevice,
    overrides: Mapping[str, object] | None = None,
    unread: UnreadKeys | None = None,
) -> NodeDevice:
    """Return a node with its device; ``overrides`` are ``-C key=value`` for either file.

    The node's file has precedence (``links.hccs.bytes_per_s``, also written ``node.links...``; the host's links
    ``pcie`` and ``dram`` by either of their names); all other keys belong to the device.  Raises `SpecError` like
    `load_node`, and for a faulty override.
    """
    node = hw.node if isinstance(hw, NodeDevice) else hw if isinstance(hw, NodeSpec) else load_node(hw)
    of_node, of_device = {}, {}
    for key, value in (overrides or {}).items():
        node_key = key.removeprefix("node.")
        if node_key in _HOST_LINKS and node_key.split(".")[1] not in node.links:
            node_key = _HOST_LINKS[node_key]
        if node_key != key or _is_of_node(node_key.split("."), node):
            of_node[node_key] = value
        else:
            of_device[key] = value
    changed = apply_overrides(node, of_node)
    is_same = isinstance(hw, NodeDevice) and changed.device == node.device
    each = hw.each if is_same and isinstance(hw, NodeDevice) else load_device(changed.device)
    return NodeDevice.of(changed, apply_overrides(each, of_device, unread, in_node=True))


def _is_of_node(steps: list[str], node: NodeSpec) -> bool:
    if steps[0] == "links":
        return len(steps) < 2 or steps[1] in node.links
    return steps[0] in type(node).model_fields


def load_machine(
    hw: str | Path | DeviceSpec | NodeSpec,
    overrides: Mapping[str, object] | None = None,
    unread: UnreadKeys | None = None,
) -> DeviceSpec:
    """Return a device, or a node with its device, by packaged name or path, or unchanged if it is loaded already.

    ``overrides`` are ``-C key=value``; ``unread`` keys are refused.  Raises `SpecError` like `load_device` and
    `load_node_device`.
    """
    if isinstance(hw, NodeSpec | NodeDevice):
        return load_node_device(hw, overrides, unread)
    if isinstance(hw, DeviceSpec):
        return apply_overrides(hw, overrides or {}, unread)
    resolve("device or node", hw)  # the error for an unknown name lists devices and nodes
    return (load_node_device if is_node(hw) else load_device)(hw, overrides, unread)
