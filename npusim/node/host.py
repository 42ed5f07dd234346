"""The host in SimPy: a link to each device, and cores that share the host's memory."""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING

from simpy.events import AllOf

from npusim.errors import SpecError
from npusim.node.kernel import HostCall
from npusim.node.machine import FEMTOSECONDS, LINK_BITS, femtoseconds, flow
from npusim.timing.link import SharedLink

if TYPE_CHECKING:
    from collections.abc import Generator

    from simpy import Environment
    from simpy.events import Event

    from npusim.config.node import CpuSpec, NodeSpec, PcieSpec
    from npusim.node.kernel import CopyCall

    Steps = Generator[Event, object, None]

#: A device that stood idle no longer than this wakes at once (`PcieSpec.wake_s`).
AWAKE_S = 1e-3


class Host:
    """Links and memory of the host, for ``ranks`` devices."""

    def __init__(self, env: Environment, node: NodeSpec, ranks: int) -> None:
        self.env, self.node, self.ranks = env, node, ranks
        self._links: dict[tuple[int, str], SharedLink] = {}
        self._dram: SharedLink | None = None
        self._worked_fs = [0] * ranks

    @property
    def pcie(self) -> PcieSpec:
        """Return the link's numbers; raise `SpecError` where the file has none."""
        if self.node.pcie is None:
            raise SpecError(f"{self.node.name}: pcie: missing; its host has no link to the devices to copy over")
        return self.node.pcie

    @property
    def cpu(self) -> CpuSpec:
        """Return the host's cores and memory; raise `SpecError` where the file has none."""
        if self.node.cpu is None:
            raise SpecError(f"{self.node.name}: cpu: missing; its host computes no attention")
        return self.node.cpu

    def copy(self, rank: int, call: CopyCall) -> Steps:
        """Copy over a device's link; both ends are pinned, so that kernels run beside it."""
        pcie = self.pcie
        start = float(pcie.kv_start_s.value if call.is_bulk else pcie.start_s.value)
        # Model: a device that waited for the host's attention is awake the later the longer it waited.
        idle, self._worked_fs[rank] = self._worked_fs[rank] / FEMTOSECONDS, 0
        if idle > AWAKE_S:
            start += float(pcie.wake_s.value) * log2(idle / AWAKE_S)
        yield self.env.timeout(femtoseconds(start))
        link = self._link((rank, call.way), pcie.bytes_per_s.value)
        yield AllOf(self.env, [flow(self.env, one, call.size_bytes) for one in (link, *self._memory())])

    def attention(self, rank: int, call: HostCall) -> Steps:
        """Compute one device's heads on its share of the cores; all devices' heads share the memory."""
        began = int(self.env.now)
        share = self.cpu.elements_per_s / self.ranks
        computed = self.env.timeout(femtoseconds(call.elements / share))
        yield AllOf(self.env, [computed, *(flow(self.env, one, call.size_bytes) for one in self._memory())])
        self._worked_fs[rank] = int(self.env.now) - began

    def _link(self, key: tuple[int, str], bytes_per_s: float) -> SharedLink:
        if key not in self._links:
            self._links[key] = SharedLink(self.env, f"pcie {key}", bytes_per_s / FEMTOSECONDS, LINK_BITS)
        return self._links[key]

    def _memory(self) -> list[SharedLink]:
        if self._dram is None and self.node.cpu is not None:
            rate = self.node.cpu.dram_bytes_per_s.value / FEMTOSECONDS
            self._dram = SharedLink(self.env, "dram", rate, LINK_BITS)
        return [] if self._dram is None else [self._dram]

    def link_bytes(self) -> dict[str, int]:
        """Return the bytes over the busiest device's link, and over the host's memory."""
        found = {}
        if self._links:
            found["pcie"] = max(link.total_bytes for link in self._links.values())
        if self._dram is not None:
            found["dram"] = self._dram.total_bytes
        return found

    def terms(self, call: CopyCall | HostCall) -> tuple[tuple[str, float], ...]:
        """Return the constants behind an operation's time, by their shares of it."""
        if isinstance(call, HostCall):
            memory = call.size_bytes * self.ranks / self.cpu.dram_bytes_per_s.value
            is_memory = memory >= call.elements * self.ranks / self.cpu.elements_per_s
            return ((f"node.cpu.{'dram_bytes_per_s' if is_memory else 'clock_hz'}", 1.0),)
        key = "kv_start_s" if call.is_bulk else "start_s"
        start, moved = float(getattr(self.pcie, key).value), call.size_bytes / self.pcie.bytes_per_s.value
        whole = (start + moved) or 1.0
        return ((f"node.pcie.{key}", start / whole), ("node.pcie.bytes_per_s", moved / whole))
