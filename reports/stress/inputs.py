"""Inputs of flash-attention#2694, N(0, 1) clamped to 3 in E4M3: ``python -m reports.stress.inputs FILE``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim import formats
from npusim.report.output import tensor_bytes, write_whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["KEYS", "QUERIES", "clamped", "write"]

#: Of the published 8,192 queries a block's, and all keys.
QUERIES, KEYS, HEAD = 128, 8192, 128
CLAMP = 3.0


def clamped(seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return Q (1, 1, QUERIES, HEAD), K and V (1, 1, KEYS, HEAD), float8_e4m3fn."""
    rng = np.random.default_rng(seed)
    sizes = {"q": QUERIES, "k": KEYS, "v": KEYS}
    drawn = {n: np.clip(rng.standard_normal((1, 1, rows, HEAD)), -CLAMP, CLAMP) for n, rows in sizes.items()}
    return {n: formats.cast(values, "float8_e4m3fn") for n, values in drawn.items()}


def write(file: Path) -> None:
    """Write them to a safetensors file."""
    write_whole(file, tensor_bytes(clamped(), {"inputs": "N(0, 1) clamped to 3"}))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
