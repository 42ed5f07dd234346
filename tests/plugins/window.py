"""Sliding-window attention: a query sees the last WINDOW keys, itself included, and the first SINKS."""

from npusim.kernel import Field, FlashPrecision, Tiling, attention, flash

FP32 = FlashPrecision("fp32", *["float32"] * 3, "input", "float32", "float32", "input")


class Window(Tiling):
    """How far a query sees."""

    window: int = Field(default=256, ge=1, description="keys that a query sees, itself included")
    sinks: int = Field(default=0, ge=0, description="first keys that every query sees")


def sees(problem, tiling):
    return lambda q, k: (k <= q) & ((k > q - tiling.window) | (k < tiling.sinks))


WINDOW = attention("window", flash, precisions=[FP32], fields=Window, sees=sees)
