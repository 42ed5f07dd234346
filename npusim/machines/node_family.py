"""A node as a machine: its core groups are devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.config.family import NODE_FAMILY, CoreFamily
from npusim.machines.base import Machine

if TYPE_CHECKING:
    from npusim.config.node_file import NodeDevice


class NodeMachine(Machine):
    """A node: a machine whose core groups are devices.  The machine of one device times kernels and chooses their
    fields.
    """

    def __init__(self, device: NodeDevice) -> None:
        super().__init__(device)
        self.node, self.single = device.node, device.each

    @property
    def flags(self) -> None:
        """A node's queues wait for one another in software: the number of their flags has no limit."""
        return


NODE = CoreFamily(name=NODE_FAMILY, machine=NodeMachine, fields={})
