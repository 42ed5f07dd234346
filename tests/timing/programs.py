"""Devices and random programs for tests of time."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from npusim.config.load import load_device

if TYPE_CHECKING:
    from random import Random

    from npusim.config.device import DeviceSpec
    from npusim.program.timing.timing_result import TimingResult


@cache
def device_with(**overrides: str) -> DeviceSpec:
    """Return the 910B2 with values changed; ``__`` in a name stands for a dot."""
    return load_device("ascend_910b2", {k.replace("__", "."): v for k, v in overrides.items()})


#: Rates at which no transfer is ever held up: a tick for any size.
ENDLESS_LINKS = {"links__hbm__bytes_per_s": "1e22", "links__l2__bytes_per_s": "1e22"}


def random_device(rng: Random) -> DeviceSpec:
    """Return the 910B2 with other group counts, queue depths, issue times and flag latencies.

    A few values each, so that devices are built once (``device_with`` keeps them).
    """
    depth = str(rng.randint(1, 4))
    chosen = rng.choice([("0", "0", "0"), ("3", "1", "2000"), ("17", "5", "1")])
    crossing = rng.choice([("500", "200"), ("0", "7")])
    return device_with(
        group_count=str(rng.randint(1, 3)),
        cores__aiv__engines__VECTOR__queue_depth_count=depth,
        cores__aic__engines__MTE2__queue_depth_count=depth,
        cores__aiv__engines__SCALAR__issue_cycles=chosen[0],
        cores__aic__engines__SCALAR__issue_cycles=chosen[0],
        flags__intra_core_latency_cycles=chosen[1],
        launch__block_dispatch_cycles=chosen[2],
        flags__cross_core_latency_cycles=crossing[0],
        flags__cross_core_issue_cycles=crossing[1],
        **ENDLESS_LINKS,
    )


def booked(result: TimingResult) -> list[tuple[object, ...]]:
    """Return all that a simulation books for each queue."""
    return [
        (u.group, u.queue, u.operations, u.busy_cycles, u.end_cycles, dict(sorted(u.stalls.items())))
        for group in result.queues
        for u in group
    ]


def timeline(result: TimingResult) -> list[tuple[int, str, int, int, str]]:
    """Return the spans, queue by queue in their order."""
    return sorted((s.group, s.queue, s.start, s.end, s.label) for s in result.spans)
