"""How far predictions were from measured times: a table that ships beside the device files.

``reports/validation/bands.py`` writes it from every measured case there is; nothing in it is typed.
"""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from npusim.config.packaged import packaged_folder

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec

FILE = "validated.csv"
COLUMNS = ("device", "numbers", "schedule", "cases", "median", "most", "untouched", "untouched_median")


@dataclass(frozen=True)
class Validated:
    """Errors of a schedule's predicted times on a device, relative to measured ones.

    Half of ``cases`` are within ``median_error``, nine in ten within ``most_error``; no constant was fitted on
    ``untouched_cases`` of them, half of which are within ``untouched_median_error``.  No cases: nothing was
    measured, or (``is_changed``) the device's numbers are others than those that were held against it.
    """

    cases: int = 0
    median_error: float | None = None
    most_error: float | None = None
    untouched_cases: int = 0
    untouched_median_error: float | None = None
    is_changed: bool = False

    def text(self, schedule: str, device: str) -> str:
        """Return it in words."""
        if self.median_error is None or self.most_error is None:
            changed = " with these numbers" if self.is_changed else ""
            return f"no measurement of {schedule} on {device}{changed}: predicted only"
        if self.cases == 1:
            return f"the one measured time of {schedule} on {device} is met within {_percent(self.most_error)}"
        found = (
            f"of {self.cases} measured times of {schedule} on {device} half are met within "
            f"{_percent(self.median_error)}, nine in ten within {_percent(self.most_error)}"
        )
        free = self.untouched_median_error
        if free is None or self.untouched_cases == self.cases:
            return f"{found}; constants were fitted on {'all' if free is None else 'none'} of them"
        return f"{found}; half of the {self.untouched_cases} that no constant was fitted on within {_percent(free)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


@cache
def _table() -> dict[tuple[str, str], tuple[str, Validated]]:
    found = {}
    with (packaged_folder("hwconfigs") / FILE).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            free = int(row["untouched"])
            found[row["device"], row["schedule"]] = (
                row["numbers"],
                Validated(
                    int(row["cases"]),
                    float(row["median"]),
                    float(row["most"]),
                    free,
                    float(row["untouched_median"]) if free else None,
                ),
            )
    return found


def validated(device: DeviceSpec, schedule: str) -> Validated:
    """Return the errors of a schedule's times on a device, as far as its numbers are those of its file."""
    numbers, found = _table().get((device.name, schedule), ("", Validated()))
    return found if not numbers or numbers == numbers_of(device) else Validated(is_changed=True)


def numbers_of(device: DeviceSpec) -> str:
    """Return a hash of all numbers and choices that decide what is predicted, whatever is said of them."""
    values = [(key, getattr(fact, "value", None)) for key, fact in device.facts() if not key.startswith("facts.")]
    return hashlib.sha256(repr(values).encode()).hexdigest()[:12]


def validated_schedules(device: DeviceSpec) -> dict[str, Validated]:
    """Return the same by schedule, of those that were measured on the device."""
    return {schedule: validated(device, schedule) for name, schedule in _table() if name == device.name}
