"""Registers that a compiler gave the tiles of kernels on a device: a table that ships beside its file."""

from __future__ import annotations

import csv
from functools import cache

from npusim.config.packaged import packaged_folder

#: Kernel, dtype, head size, causal, rows, keys, stages, warps -> registers of a thread, spilled ones, shared bytes.
_Table = dict[tuple[str, str, int, bool, int, int, int, int], tuple[int, int, int]]


@cache
def _table(device: str) -> _Table:
    path = packaged_folder("hwconfigs") / f"{device}_registers.csv"
    if not path.is_file():
        return {}
    found: _Table = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            if not row["registers_per_thread"]:
                continue
            key = (
                row["schedule"], row["dtype"], int(row["head_dim"]), row["causal"] == "True", int(row["block_q"]),
                int(row["block_kv"]), int(row["stages"]), int(row["warps"]),
            )  # fmt: skip
            sizes = row["registers_per_thread"], row["spilled_registers"], row["shared_bytes"]
            found[key] = (int(sizes[0]), int(sizes[1]), int(sizes[2]))
    return found


def compiled_registers(
    device: str, kernel: str, dtype: str, head_dim: int, causal: bool, rows: int, keys: int, stages: int, warps: int
) -> tuple[int, int, int] | None:
    """Return registers of a thread, spilled ones and shared bytes of a tile; None where no compiler was asked."""
    return _table(device).get((kernel, dtype, head_dim, causal, rows, keys, stages, warps))
