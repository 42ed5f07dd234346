"""What starting kernels costs: its part of a device file, and the times of calls by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from npusim.config.model import SpecModel, fault_at
from npusim.config.quantity import Quantity, WholeQuantity


class LaunchSpec(SpecModel):
    """What starting kernels costs, each part by who sees it; absent: unknown of this device."""

    kernel_overhead_s: Quantity = Field(description="of a call that is waited for, beside its cores' time")
    block_dispatch_cycles: WholeQuantity = Field(description="before a core's first instruction of a launch")
    task_s: Quantity | None = Field(
        default=None, description="of a kernel's task duration on one core group, beside its time: dispatch and end"
    )
    task_all_s: Quantity | None = Field(default=None, description="the same on all core groups; absent: as on one")
    gap_s: Quantity | None = Field(default=None, description="between two kernels, one issued behind the other")
    host_issue_s: Quantity | None = Field(
        default=None, description="the host's, to issue a kernel without waiting for it"
    )

    @model_validator(mode="after")
    def _parts_are_complete(self) -> Self:
        parts = {name: getattr(self, name) for name in ("task_s", "gap_s", "host_issue_s")}
        missing = [name for name, part in parts.items() if part is None]
        if missing and len(missing) < len(parts):
            raise fault_at(missing[0], f"missing; {', '.join(parts)} are stated together, or none of them")
        return self

    def times(self, core_s: float, shares: Sequence[float]) -> tuple[dict[str, float], float]:
        """Return a call's times (s) by what would measure them, and what launches take of a stream.

        ``core_s`` is what the cores take; ``shares``: for each kernel, how many of the core groups
        work beside the first, 0 to 1.  The host issues kernels one behind the other and waits once,
        so that a call of several is held up by the slower of host and device.  Where a file states
        one cost of a launch only, each kernel pays it.
        """
        overhead, kernels = float(self.kernel_overhead_s.value), len(shares)
        if self.task_s is None or self.gap_s is None or self.host_issue_s is None:
            return {"core": core_s, "call": core_s + overhead * kernels}, overhead * kernels
        one = float(self.task_s.value)
        every = one if self.task_all_s is None else float(self.task_all_s.value)
        gap, issue = float(self.gap_s.value), float(self.host_issue_s.value)
        tasks = [one + (every - one) * share for share in shares]
        stream = sum(tasks) + gap * kernels
        # The call's own launch is that of its first kernel.
        behind = stream - tasks[0] - gap if tasks else 0.0
        return {
            "core": core_s,
            "kernel": core_s + sum(tasks),
            "back_to_back": max(issue * kernels, core_s + stream),
            "call": overhead + max(issue * (kernels - 1), core_s + behind),
        }, stream
