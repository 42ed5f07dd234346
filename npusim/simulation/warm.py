"""Compiles ahead what runs usually need: small runs, one for each kind of arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.simulation.request import Request
from npusim.simulation.simulate import run_request

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Schedule, device and formats: together they run every kernel that default runs of packaged devices do.
USUAL = (
    ("pasa", "ascend_910b2", "float16"),
    ("flash", "ascend_910b2", "float16"),
    ("flash", "ascend_910b2", "bfloat16"),
    ("flash", "h200", "float16"),
    ("flash", "h200", "bfloat16"),
    ("fp8_attention", "h200", "float8_e4m3fn"),
    ("volta_flash", "v100", "float16"),
    ("tiling_allreduce", "ascend_910b2_x8", "float16"),
)


def warm() -> Iterator[str]:
    """Run what is usual, small, and yield what was run: its machine code is then kept in the cache folder."""
    for schedule, hw, dtype in USUAL:
        is_node = hw.endswith("_x8")
        run_request(Request(schedule, hw=hw, seq=256, dtype=dtype, presets=None if is_node else True))  # type: ignore[arg-type]
        yield f"{schedule} on {hw}, {dtype}"
