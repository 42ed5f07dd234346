"""A condition that all kernels of libraries share."""

from __future__ import annotations

from npusim.config.device import DeviceSpec
from npusim.kernels.attention.online_softmax import FlashPrecision
from npusim.kernels.declare.define import machine_of

STORED = FlashPrecision("stored", scores="input", product="input")


def needs_groups(device: DeviceSpec) -> str:
    """Return the reason why a device cannot run the kernels of a library, or an empty text."""
    if machine_of(device).has_library:
        return ""
    return f"{device.name}'s file does not describe concurrent warp groups; h200's does"
