"""Tables beside the device files, written by scripts: errors of predicted times, registers of compiled kernels."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.config.packaged import read_table

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec

#: The table of errors, which ``reports/validation/bands.py`` writes from every measured case there is.
FILE = "validated.csv"
#: The schedule whose measured times are a framework's too, and say nothing of other kernels.
WHOLE_MODELS = "layer"
COLUMNS = ("device", "numbers", "schedule", "cases", "median", "most", "untouched", "untouched_median")


@dataclass(frozen=True)
class Validated:
    """Errors of a schedule's predicted times on a device, relative to measured ones.

    Half of ``cases`` are within ``median_error``, nine in ten within ``most_error``; no constant was fitted on
    ``untouched_cases`` of them, half of which are within ``untouched_median_error``.  No cases: nothing was
    measured, or (``is_changed``) the device's numbers are others than those that were held against it; ``others`` are
    then the other schedules that were measured there, each with its ``most_error``.
    """

    cases: int = 0
    median_error: float | None = None
    most_error: float | None = None
    untouched_cases: int = 0
    untouched_median_error: float | None = None
    is_changed: bool = False
    others: dict[str, float] = field(default_factory=dict)

    def text(self, schedule: str, device: str) -> str:
        """Return it in words."""
        if self.median_error is None or self.most_error is None:
            changed = " with these numbers" if self.is_changed else ""
            met = ", ".join(f"{_percent(error)} ({name})" for name, error in self.others.items())
            others = f"; nine in ten of the times measured there are met within {met}" if met else ""
            return f"no measurement of {schedule} on {device}{changed}: predicted only{others}"
        if self.cases == 1:
            return f"the one measured time of {schedule} on {device} is met within {_percent(self.most_error)}"
        errors = (
            f"of {self.cases} measured times of {schedule} on {device} half are met within "
            f"{_percent(self.median_error)}, nine in ten within {_percent(self.most_error)}"
        )
        untouched = self.untouched_median_error
        if untouched is None or self.untouched_cases == self.cases:
            return f"{errors}; constants were fitted on {'all' if untouched is None else 'none'} of them"
        return (
            f"{errors}; half of the {self.untouched_cases} that no constant was fitted on within {_percent(untouched)}"
        )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


@cache
def _errors() -> dict[tuple[str, str], tuple[str, Validated]]:
    """Return the hash of the device's numbers and the errors, by device and schedule."""
    errors = {}
    for row in read_table(FILE):
        untouched = int(row["untouched"])
        median = float(row["untouched_median"]) if untouched else None
        errors[row["device"], row["schedule"]] = (
            row["numbers"],
            Validated(int(row["cases"]), float(row["median"]), float(row["most"]), untouched, median),
        )
    return errors


def validated(device: DeviceSpec, schedule: str) -> Validated:
    """Return the errors of a schedule's times on a device, as far as its numbers are those of its file."""
    of_device = {name: row for (hw, name), row in _errors().items() if hw == device.name}
    if not of_device:
        return Validated()
    numbers = numbers_of(device)
    known = {name: errors for name, (measured_with, errors) in of_device.items() if measured_with == numbers}
    kernels = {name: errors.most_error for name, errors in known.items() if name != WHOLE_MODELS}
    others = {name: error for name, error in kernels.items() if error is not None}
    return known.get(schedule, Validated(is_changed=schedule in of_device, others=others))


def numbers_of(device: DeviceSpec) -> str:
    """Return a hash of all numbers and choices that decide what is predicted, whatever is said of them."""
    values = [(key, getattr(fact, "value", None)) for key, fact in device.facts() if not key.startswith("facts.")]
    return hashlib.sha256(repr(values).encode()).hexdigest()[:12]


def validated_schedules(device: DeviceSpec) -> dict[str, Validated]:
    """Return the same by schedule, of those that were measured on the device."""
    return {schedule: validated(device, schedule) for name, schedule in _errors() if name == device.name}


#: Columns of an architecture's table of registers that say which kernel a row is of.
_KERNEL_COLUMNS = ("schedule", "dtype", "head_dim", "causal", "block_q", "block_kv", "stages", "warps")
#: Formats of one size take the same registers, but for a few.
_SAME_SIZE = MappingProxyType({"bfloat16": "float16"})


@cache
def _registers(architecture: str) -> dict[tuple[str, ...], tuple[int, int, int, float | None, float | None]]:
    """Return what `compiled_registers` does by the text of `_KERNEL_COLUMNS`."""
    return {
        tuple(row[column] for column in _KERNEL_COLUMNS): (
            int(row["registers_per_thread"]),
            int(row["spilled_registers"]),
            int(row["shared_bytes"]),
            float(row["loop_words"]) if row["loop_words"] else None,
            float(row["loop_waits"]) if row["loop_waits"] else None,
        )
        for row in read_table(f"{architecture}_registers.csv")
        if row["registers_per_thread"]
    }


def compiled_registers(
    architecture: str, kernel: str, dtype: str, d: int, causal: bool, rows: int, keys: int, stages: int, warps: int
) -> tuple[int, int, int, float | None, float | None] | None:
    """Return registers of a thread, spilled ones, shared bytes; words of them that an iteration loads and stores.

    And of how many loads a warp awaits the latency; none where no compiler was asked, or nobody looked.
    """
    table, sizes = _registers(architecture), tuple(map(str, (d, causal, rows, keys, stages, warps)))
    same_size = table.get((kernel, _SAME_SIZE.get(dtype, dtype), *sizes))
    return table.get((kernel, dtype, *sizes), same_size)
