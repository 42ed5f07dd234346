"""Write ``hwconfigs/validated.csv`` anew: ``python reports/validation/bands.py``.

How far predicted times were from measured ones, by device and schedule, from every case that `study` knows.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from npusim.config.device_tables import COLUMNS, FILE, numbers_of
from npusim.config.node import NODE_FAMILY, NodeDevice, load_machine
from npusim.config.packaged import packaged_folder
from npusim.report.output import write_whole
from npusim.schedules import SCHEDULES
from reports.validation import study

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec

HEAD = """\
# How far predicted times were from measured ones: half of the cases are within `median`, nine in ten within `most`.
# Written by reports/validation/bands.py from the measurements beside it; `numbers` a hash of the device file's then.
"""


def machine_of(device: str, schedule: str) -> DeviceSpec:
    """Return the device as runs of the schedule see it: a single one is a node of its own to schedules of nodes."""
    machine = load_machine(device)
    is_alone = (schedule, NODE_FAMILY) in SCHEDULES and not isinstance(machine, NodeDevice)
    return NodeDevice.alone(machine) if is_alone else machine


def table() -> str:
    """Return the file's text."""
    lines = [",".join(COLUMNS)]
    for (device, schedule), (every, free) in study.bands().items():
        figures = (every.cases, *(f"{e:.4f}" for e in (every.median, every.most)), free.cases, f"{free.median:.4f}")
        lines.append(",".join(map(str, (device, numbers_of(machine_of(device, schedule)), schedule, *figures))))
    return HEAD + "\n".join(lines) + "\n"


def write() -> Path:
    """Write the file; return its path."""
    path = packaged_folder("hwconfigs") / FILE
    write_whole(path, table().encode())
    return path


if __name__ == "__main__":
    sys.stdout.write(f"{write()}\n")
