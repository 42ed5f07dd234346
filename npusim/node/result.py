"""What a simulation of a node returns beside cycles: parts, exposed communication, closed form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from npusim.timing.result import TimingResult

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class NodeTiming(TimingResult):
    """Predicted time of a node program; ``queues[rank]`` are those of one device.

    ``attention_s``, ``linear_s`` are the kernels' times alone, one after the other, launch and
    issue included; ``allreduce_s`` is what the collectives took, ``closed_form_s`` what the
    alpha-beta form gives for them.  ``exposed_s`` is the part of the whole in which no kernel runs,
    ``overlap_s`` that in which kernels and collectives run side by side; ``running_s`` are the times
    of kernels and of collectives as they ran.  ``alone_s`` is what the kernels, cut as they are,
    take on a device that does nothing else, without the host's issue.  ``parts_s`` is device 0's time
    by what its operations are called, as they ran: ``attention``, ``upload``, ``cpu``, ...
    """

    attention_s: float = 0.0
    linear_s: float = 0.0
    allreduce_s: float = 0.0
    exposed_s: float = 0.0
    overlap_s: float = 0.0
    running_s: tuple[float, float] = (0.0, 0.0)
    alone_s: float = 0.0
    closed_form_s: float = 0.0
    modes: tuple[str, ...] = field(default=())  #: each collective's, as ``mesh by sdma (stream)``
    parts_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def compute_s(self) -> float:
        """Time of all kernels alone."""
        return self.attention_s + self.linear_s

    @property
    def overlap_efficiency(self) -> float:
        """Share of the shorter of compute and communication that runs beside the other one."""
        shorter = min(self.running_s)
        return self.overlap_s / shorter if shorter else 0.0
