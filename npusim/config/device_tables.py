"""Tables in the folder of the device files, written by scripts: registers of compiled kernels."""

from __future__ import annotations

from functools import cache
from types import MappingProxyType

from npusim.config.packaged import read_table

#: Origin of a number of registers that no compiler reported.
ESTIMATED = "estimated"
#: Columns of an architecture's table of registers that identify the kernel of a row.
_KERNEL_COLUMNS = ("schedule", "dtype", "head_dim", "causal", "block_q", "block_kv", "stages", "warps")
#: Formats of equal size need almost the same number of registers.
_SAME_SIZE = MappingProxyType({"bfloat16": "float16"})


@cache
def _registers(architecture: str) -> dict[tuple[str, ...], tuple[int, int, int, int]]:
    """Return the table of `compiled_registers` by the text of `_KERNEL_COLUMNS`."""
    return {
        tuple(row[column] for column in _KERNEL_COLUMNS): (
            int(row["registers_per_thread"]),
            int(row["spilled_registers"]),
            int(row["shared_bytes"]),
            int(row["loop_accesses"]),
        )
        for row in read_table(f"{architecture}_registers.csv")
        if row["registers_per_thread"]
    }


@cache
def _of_recurrences(architecture: str) -> dict[tuple[str, ...], dict[int, tuple[int, int, int]]]:
    """Return the table of `recurrence_registers`: rows by stages and by the other columns that identify the kernel."""
    registers: dict[tuple[str, ...], dict[int, tuple[int, int, int]]] = {}
    for row in read_table(f"{architecture}_recurrences.csv"):
        key = tuple(row[column] for column in ("schedule", "phase", "dtype", "chunk", "key", "value", "warps"))
        values = (int(row[n]) for n in ("registers_per_thread", "spilled_registers", "shared_bytes"))
        registers.setdefault(key, {})[int(row["stages"])] = next(values), next(values), next(values)
    return registers


def recurrence_registers(
    architecture: str, schedule: str, phase: str, dtype: str, sizes: tuple[int, int, int], warps: int, stages: int
) -> tuple[int, int, int] | None:
    """Return the registers per thread, the spilled registers and the bytes of shared memory of a recurrence's kernel;
    None if the table has no row for it.

    ``sizes``: tokens of a chunk; channels of keys and of values that a block processes.  If a library compiles a kernel
    for only one number of stages, the kernel has the registers of that number.
    """
    table = _of_recurrences(architecture)
    formats = [dtype, *(f for f, same in _SAME_SIZE.items() if same == dtype)]
    keys = ((schedule, phase, fmt, *map(str, (*sizes, warps))) for fmt in formats)
    rows = next((table[key] for key in keys if key in table), {})
    return rows.get(stages, next(iter(rows.values())) if len(rows) == 1 else None)


def compiled_registers(
    architecture: str, kernel: str, dtype: str, d: int, causal: bool, rows: int, keys: int, stages: int, warps: int
) -> tuple[int, int, int, int] | None:
    """Return the registers per thread, the spilled registers, the bytes of shared memory, and the loads and stores of
    spilled registers in an iteration.

    None for kernels that were not compiled.
    """
    table, sizes = _registers(architecture), tuple(map(str, (d, causal, rows, keys, stages, warps)))
    same_size = table.get((kernel, _SAME_SIZE.get(dtype, dtype), *sizes))
    return table.get((kernel, dtype, *sizes), same_size)
