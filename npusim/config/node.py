"""A node as its file describes it: devices, the links between them, who drives a collective.

Also the problems that only a node has: a layer's attention with its output projection and AllReduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from npusim.config.device import DeviceSpec, LinkSpec, _facts, content_digest
from npusim.config.limits import fault_in
from npusim.config.load import load_device, read_spec, validated
from npusim.config.model import Name, NonNegativeInt, PositiveInt, SpecModel, Text, fault_at
from npusim.config.overrides import apply_overrides
from npusim.config.packaged import is_node_name, list_packaged, resolve
from npusim.config.problem import Problem
from npusim.config.quantity import Positive, PositiveWhole, Quantity, Sourced
from npusim.errors import SpecError

__all__ = [
    "DriverMode",
    "DriverSpec",
    "HostSpec",
    "KernelTimes",
    "LayerProblem",
    "NodeDevice",
    "NodeLink",
    "NodeSpec",
    "is_node",
    "list_nodes",
    "load_machine",
    "load_node",
    "load_node_device",
]

NODE_FAMILY = "node"
NODE_SCHEMA = "npusim.node/1"
_HEAD_BYTES = 65536
LinkModel = Literal["full_mesh", "switch", "edges"]


class NodeLink(SpecModel):
    """Links between devices of one kind, equal in both directions.

    ``full_mesh`` is one link for each ordered pair, ``switch`` a port into and one out of a switch
    for each device, ``edges`` the pairs listed (a pair listed twice has twice the bandwidth).
    """

    model: LinkModel
    bytes_per_s: Positive = Field(description="of one link and direction")
    latency_s: Quantity = Field(description="from the first byte's departure to its arrival")
    edges: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = ()

    @model_validator(mode="after")
    def _edges_belong_to_their_model(self) -> Self:
        if (self.model == "edges") != bool(self.edges):
            raise fault_at("edges", "pairs of devices are listed for model `edges`, and only there")
        return self


class DriverMode(SpecModel):
    """One way (protocol) in which a driver moves data.

    A transfer costs ``transfer_start_s`` and is cut into ``chunk_bytes`` (missing: one piece) of
    which ``chunks_in_flight_count`` are on their way at once.
    """

    start_s: Quantity = Field(description="of a whole collective, before its first byte")
    transfer_start_s: Quantity = Field(description="of each transfer")
    engine_bytes_per_s: Positive = Field(description="moved by one engine or core")
    chunk_bytes: PositiveWhole | None = Field(default=None, description="of a rank's message")
    chunks_in_flight_count: PositiveWhole | None = None


class DriverSpec(SpecModel):
    """Who moves a collective's bytes: copy engines, or cores taken away from compute."""

    engine_count: PositiveWhole = Field(description="engines or cores that take part")
    engines_per_transfer_count: PositiveWhole | None = Field(
        default=None, description="that serve one transfer; missing: all"
    )
    core: Text | None = Field(default=None, description="kind of core taken away; missing: none")
    memory_touches_factor: Quantity = Field(
        description="bytes read and written in device memory for each byte sent"
    )
    modes: Annotated[dict[str, DriverMode], Field(min_length=1)]


class HostSpec(SpecModel):
    """Time the host needs to issue an operation; it runs ahead of the device."""

    attention_issue_s: Quantity
    linear_issue_s: Quantity
    collective_issue_s: Quantity
    overlap_issue_s: Quantity = Field(description="events between two streams, a block of rows")


class AttentionTimes(SpecModel):
    """Attention kernels of a device without a timing model: equal blocks on the cores."""

    block_rows_count: PositiveWhole
    resident_count: PositiveWhole = Field(description="blocks that a core holds at once")
    flops_per_s: Positive = Field(description="of one core, the products' operations")


class LinearTimes(SpecModel):
    """Matrix products of a device without a timing model: equal tiles on the cores."""

    block_m_count: PositiveWhole
    block_n_count: PositiveWhole
    flops_per_s: Positive = Field(description="of one core")


class KernelTimes(SpecModel):
    """Times of kernels, for a device whose own file cannot be simulated yet."""

    core: Text
    attention: AttentionTimes
    linear: LinearTimes


class NodeSpec(SpecModel):
    """Several equal devices and what joins them; every number is a `Quantity`.

    ``drivers`` are listed with the default first.  ``between`` joins equal servers, each device to
    its counterpart, where more than one server is asked for.
    """

    schema_id: Literal["npusim.node/1"] = Field(alias="schema", description="of this file")
    name: Name
    description: Text
    device: Text = Field(description="a hardware file by name")
    device_count: PositiveWhole
    links: Annotated[dict[str, NodeLink], Field(min_length=1)]
    drivers: Annotated[dict[str, DriverSpec], Field(min_length=1)]
    between: NodeLink | None = Field(default=None, description="one device to its counterpart")
    host: HostSpec | None = Field(default=None, description="missing: launches are the device's")
    kernels: KernelTimes | None = Field(default=None, description="missing: simulated")

    @property
    def family(self) -> str:
        """Return what schedules of nodes are registered under."""
        return NODE_FAMILY

    def digest(self) -> str:
        """Return a hash of the content, as a device has one."""
        return content_digest(self)

    @property
    def default_driver(self) -> str:
        """Return the first driver of the file."""
        return next(iter(self.drivers))

    def driver(self, name: str) -> DriverSpec:
        """Return a driver; raise `SpecError` naming those the node has."""
        if name not in self.drivers:
            raise SpecError(
                f"{self.name}: no collective is driven by {name!r} here; there are {', '.join(self.drivers)}"
            )
        return self.drivers[name]

    def facts(self) -> Iterator[tuple[str, Sourced]]:
        """Yield every sourced number with its dotted key."""
        yield from _facts("", self)

    @model_validator(mode="after")
    def _numbers_are_of_this_world(self) -> Self:
        fault = fault_in(self.facts())
        if fault is not None:
            raise fault
        return self

    @model_validator(mode="after")
    def _edges_join_what_exists(self) -> Self:
        count = self.device_count.value
        for name, link in self.links.items():
            for a, b in link.edges:
                if max(a, b) >= count or a == b:
                    text = f"{a}-{b} joins no two of the {count} devices 0..{count - 1}"
                    raise fault_at(f"links.{name}.edges", text)
        return self


class NodeDevice(DeviceSpec):
    """A node with its device: one of the devices as reports see it, and facts of both files.

    Name and links are the node's too, "core groups" are the node's devices; ``each`` is the device
    as its own file has it.  ``family`` is what schedules of nodes are registered under.
    """

    family: Literal["node"]  # a node is no core family, but has schedules
    node: NodeSpec
    each: DeviceSpec = Field(exclude=True)

    @classmethod
    def of(cls, node: NodeSpec, device: DeviceSpec) -> NodeDevice:
        """Return ``device`` as one of ``node``."""
        links = {
            name: LinkSpec(bytes_per_s=link.bytes_per_s) for name, link in node.links.items()
        }
        own: dict[str, object] = {"family": NODE_FAMILY, "node": node, "each": device}
        own |= {"name": node.name, "description": node.description}
        own |= {"group_count": node.device_count, "links": {**device.links, **links}}
        return cls.model_construct(**{**dict(device), **own})

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).of, (self.node, self.each)

    @property
    def is_timed(self) -> bool:
        """Whether kernels have times: from the node's table, or because the device's file has them."""
        return self.node.kernels is not None or self.each.is_timed

    def facts(self) -> Iterator[tuple[str, Sourced]]:
        """Yield every sourced number with its dotted key; the node's begin with ``node.``."""
        for key, fact in super().facts():
            if not key.startswith("each."):
                yield key, fact


class LayerProblem(Problem):
    """Attention, output projection and AllReduce of one layer on ``ranks`` devices.

    The sizes are those of one device's share of the heads; every device computes all ``hidden``
    columns of its partial product, which the AllReduce adds up.
    """

    hidden: PositiveInt
    ranks: PositiveInt

    @classmethod
    def around(cls, attention: Problem, *, hidden: int, ranks: int) -> Self:
        """Return the layer whose attention on one device is ``attention``."""
        return cls(**dict(attention), hidden=hidden, ranks=ranks)

    @property
    def attention(self) -> Problem:
        """Return the attention of one device."""
        return Problem(**{name: getattr(self, name) for name in Problem.model_fields})

    @property
    def rows(self) -> int:
        """Return the rows over batch and sequence."""
        return self.batch * self.seq_q

    @property
    def width(self) -> int:
        """Return the columns of the attention's output on one device."""
        return self.heads * self.value_head_dim

    def flops(self) -> int:
        """Return the operations of one device: attention and projection."""
        return super().flops() + 2 * self.rows * self.width * self.hidden


def is_node(name_or_path: object) -> bool:
    """Return whether a node is meant: a name like ``<device>_x<count>``, or a file with its schema."""
    if not isinstance(name_or_path, str | Path):
        return isinstance(name_or_path, NodeSpec | NodeDevice)
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        # Its first lines say it; what is no text at all is refused where it is read.
        with path.open(encoding="utf-8", errors="replace") as file:
            return f"schema: {NODE_SCHEMA}" in file.read(_HEAD_BYTES)
    return is_node_name(path.stem)


def list_nodes() -> list[str]:
    """Return the names of the packaged node files."""
    return [name for name in list_packaged("hwconfigs") if is_node(name)]


def load_node(name_or_path: str | Path) -> NodeSpec:
    """Return a node by packaged name (``ascend_910b2_x8``) or path.

    Raises
    ------
    SpecError
        Unknown name or faulty file: ``file:line  key: ...``.
    """
    document = read_spec("hwconfigs", "node", name_or_path)
    node = validated(NodeSpec, document)
    if node.device_count.value > 1:
        return node
    raise SpecError(f"{document.file}: device_count: {node.device_count.value}, but a node has at least 2")


def load_node_device(
    hw: str | Path | NodeSpec | NodeDevice, overrides: Mapping[str, str] | None = None
) -> NodeDevice:
    """Return a node with its device; ``overrides`` are ``-C key=value`` of either of their files.

    Keys of the node's file come first (``links.hccs.bytes_per_s``, also written ``node.links...``),
    all others are the device's.  Raises `SpecError` as `load_node`, and for a faulty override.
    """
    node = hw.node if isinstance(hw, NodeDevice) else hw if isinstance(hw, NodeSpec) else load_node(hw)
    of_node, of_device = {}, {}
    for key, value in (overrides or {}).items():
        own = key.removeprefix("node.")
        if own != key or _is_of_node(own.split("."), node):
            of_node[own] = value
        else:
            of_device[key] = value
    name = node.device
    node = apply_overrides(node, of_node) if of_node else node
    is_same = isinstance(hw, NodeDevice) and node.device == name
    each = hw.each if is_same and isinstance(hw, NodeDevice) else load_device(node.device)
    return NodeDevice.of(node, apply_overrides(each, of_device, in_node=True) if of_device else each)


def _is_of_node(steps: list[str], node: NodeSpec) -> bool:
    if steps[0] == "links":
        return len(steps) < 2 or steps[1] in node.links
    return steps[0] in type(node).model_fields


def load_machine(
    hw: str | Path | DeviceSpec | NodeSpec, overrides: Mapping[str, str] | None = None
) -> DeviceSpec:
    """Return a device, or a node with its device, by packaged name or path or as it is loaded.

    ``overrides`` are ``-C key=value``.  Raises `SpecError` as `load_device` and `load_node_device`.
    """
    if isinstance(hw, NodeSpec | NodeDevice):
        return load_node_device(hw, overrides)
    if isinstance(hw, DeviceSpec):
        return apply_overrides(hw, overrides) if overrides else hw
    resolve("hwconfigs", hw, what="device or node")  # an unknown name lists both
    return (load_node_device if is_node(hw) else load_device)(hw, overrides)
