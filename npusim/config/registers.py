"""Registers that a compiler gave the tiles of kernels on a device: a table that ships beside its file."""

from __future__ import annotations

import csv
from functools import cache
from types import MappingProxyType

from npusim.config.packaged import packaged_folder

#: Kernel, dtype, head size, causal, rows, keys, stages, warps -> registers of a thread, spilled ones, shared bytes,
#: loads and stores of spilled ones in an iteration.
_Table = dict[tuple[str, str, int, bool, int, int, int, int], tuple[int, int, int, int]]
#: Formats of one size take the same registers, but for a few.
_ALIKE = MappingProxyType({"bfloat16": "float16"})


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
                row["schedule"],
                row["dtype"],
                int(row["head_dim"]),
                row["causal"] == "True",
                int(row["block_q"]),
                int(row["block_kv"]),
                int(row["stages"]),
                int(row["warps"]),
            )
            sizes = row["registers_per_thread"], row["spilled_registers"], row["shared_bytes"], row["loop_accesses"]
            found[key] = (int(sizes[0]), int(sizes[1]), int(sizes[2]), int(sizes[3]))
    return found


def compiled_registers(
    device: str, kernel: str, dtype: str, head_dim: int, causal: bool, rows: int, keys: int, stages: int, warps: int
) -> tuple[int, int, int, int] | None:
    """Return registers of a thread, spilled ones, shared bytes, and an iteration's loads and stores of spilled ones.

    None where no compiler was asked.
    """
    table = _table(device)
    found = table.get((kernel, dtype, head_dim, causal, rows, keys, stages, warps))
    if found is None and dtype in _ALIKE:
        found = table.get((kernel, _ALIKE[dtype], head_dim, causal, rows, keys, stages, warps))
    return found
