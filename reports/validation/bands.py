"""Write ``hwconfigs/validated.csv`` anew: ``python reports/validation/bands.py [DEVICE ...]``, computes the bands of
all or some devices and tests them on left-out cases.

The errors of predicted times, one case a line, for every case of `study`.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from functools import cache
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from npusim.config.bands import (
    A_DOUBLING,
    FILE,
    LAUNCHES,
    SPILLED,
    MeasuredCase,
    band,
    cores_of,
    kind_of,
    launch_kind,
    numbers_of,
    sizes_of,
    tile_of,
)
from npusim.config.device_tables import ESTIMATED
from npusim.config.family import NODE_FAMILY
from npusim.config.node_file import NodeDevice, load_machine
from npusim.config.packaged import packaged_folder, read_table
from npusim.errors import BufferOverflowError
from npusim.library import SCHEDULES
from npusim.report.output import write_whole
from npusim.studies.validate.measured_times import Predictor
from reports.tune import fresh, record, recorded
from reports.validation import study

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.config.cases import MeasurementCase
    from npusim.config.device import DeviceSpec

HEAD = """\
# How far predicted times were from measured ones, by case: predicted over measured less one; `estimated_error` with
# registers estimated. `group`: what is kept out together. Written by reports/validation/bands.py from the measurements
# beside it, less those with a share of the host's (`host_floor_us`); `numbers` a hash of the device file's then;
# `cores`: devices of the same cores; `kind`: whose kernel it is; `tile`: the class of a tile.
"""
#: Tried factors for each doubling, and the required shares of left-out cases inside the inner and the outer band.
FACTORS = (0.0, 0.03, 0.1, 0.2, 0.4)
SHARES = ((0.45, 0.60), (0.85, 0.95))
#: Cases from which a class of them is judged; how unlikely a count at its range's end is that is no chance.
JUDGED, CHANCE = 10, 0.025


def machine_of(device: str, schedule: str) -> DeviceSpec:
    """Return the device of runs of the schedule: for schedules of nodes a single device is a node."""
    machine = load_machine(device)
    is_alone = (schedule, NODE_FAMILY) in SCHEDULES and not isinstance(machine, NodeDevice)
    return NodeDevice.alone(machine) if is_alone else machine


def table(*devices: str) -> str:
    """Return the file's text, lines of other devices than these (all, where none is named) as they are."""
    kept = [tuple(row.values()) for row in read_table(FILE) if devices and row["device"] not in devices]
    lines = [line for device in devices or (None,) for line in _lines(study.times(device))]
    if not devices or record.DEVICE in devices:
        lines += _launches()
    if not devices or recorded.DEVICE in devices:
        lines += _fresh_launches()
    return HEAD + "\n".join(",".join(line) for line in [MeasuredCase._fields, *sorted([*kept, *lines])]) + "\n"


def _lines(rows: Sequence[study.Row]) -> list[tuple[str, ...]]:
    who, lines = Predictor(), list[tuple[str, ...]]()
    groups = defaultdict(set)
    rows = [row for row in rows if row.case.host_floor_us is None]
    for row in rows:
        groups[row.case.device, row.case.schedule].add(_group(row))
    for row in rows:
        device, schedule = key = row.case.device, row.case.schedule
        group = _group(row) if len(groups[key]) > 1 else row.case.name
        estimated = _estimated_error(row)
        plan = who.plan(row.case)
        sizes = " ".join(f"{name}={size}" for name, size in sizes_of(plan.problem).items())
        errors = f"{row.error:.4f}", "" if estimated is None else f"{estimated:.4f}"
        machine = machine_of(*key)
        fitted = "" if row.is_untouched else "yes"
        kernel = kind_of(plan.tiling), tile_of(plan.tiling, is_spilled=_is_spilled(who, row.case))
        of_device = device, cores_of(machine), numbers_of(machine)
        lines.append((*of_device, schedule, group, fitted, *errors, sizes, *kernel))
    return lines


def _fresh_launches() -> list[tuple[str, ...]]:
    """Return the same for the launches of public kernels at fresh shapes; no constant was fitted on their times."""
    machine = load_machine(recorded.DEVICE)
    of_device = recorded.DEVICE, cores_of(machine), numbers_of(machine)
    lines, predictions = list[tuple[str, ...]](), fresh.predictions()
    for measured in recorded.fresh_shapes():
        row = predictions.get(tuple(measured[n] for n in fresh.NAMES))
        if row is None or not row["predicted_us"] or row["numbers"] != of_device[2] or row["kind"] == SPILLED:
            continue
        error = f"{float(row['predicted_us']) / float(measured['us']) - 1:.4f}"
        sizes = measured["shape"].split()[0].split("x")
        shape = " ".join(f"size{i}={size}" for i, size in enumerate(sizes, 1))
        group = measured["kernel"].partition(":")[0]
        lines.append((*of_device, LAUNCHES, group, "", error, "", shape, row["kind"], ""))
    return lines


def _is_spilled(who: Predictor, case: MeasurementCase) -> bool:
    try:
        return who.plan(case).program().is_spilled
    except BufferOverflowError:  # a run halves tiles that do not fit
        return who.result(case).program.is_spilled


def _launches() -> list[tuple[str, ...]]:
    """Return the lines of launches of Triton kernels that are predicted by the numbers that their device has now."""
    machine = load_machine(record.DEVICE)
    of_device = record.DEVICE, cores_of(machine), numbers_of(machine)
    lines = list[tuple[str, ...]]()
    for row in record.recorded():
        if row["measured_us"] and row["predicted_us"] and row["numbers"] == of_device[2]:
            launch = record.LAUNCHES[row["kernel"]]
            error = f"{(float(row['predicted_us']) + record.GAP_US) / float(row['measured_us']) - 1:.4f}"
            kind = launch_kind(has_products=bool(launch.tile), is_spilled=bool(int(row["spilled"])))
            if kind == SPILLED:
                continue
            shape = " ".join(f"{n}={x}" for n, x in zip(launch.sizes, row["shape"].split("x"), strict=True))
            lines.append((*of_device, LAUNCHES, row["kernel"], "", error, "", shape, kind, ""))
    return lines


def _group(row: study.Row) -> str:
    return row.case.group or f"{row.file} {row.case.schedule}"


def _estimated_error(row: study.Row) -> float | None:
    """Return the error with registers estimated, as of a kernel that no compiler was asked about; None if no matter."""
    tiling = row.case.tiling or {}
    if "stages" not in tiling:
        return None
    named = ("registers", "spilled_registers", "shared_bytes")
    case = row.case.model_copy(update={"tiling": {name: v for name, v in tiling.items() if name not in named}})
    with patch("npusim.machines.sm.groups.compiled_registers", return_value=None):
        who = Predictor()
        predicted = who.latency_us(case)
    is_estimated = any(f"registers {ESTIMATED}" in note for note in who.result(case).notes)
    assert case.measured.latency_us is not None
    return case.measured.latency_us.relative_error(predicted) if is_estimated else None


def write(*devices: str) -> Path:
    """Write the file; return its path."""
    path = packaged_folder("hwconfigs") / FILE
    write_whole(path, table(*devices).encode())
    return path


class KeptOut(NamedTuple):
    """A measured case, and the ends of the bands that other shapes give it, before they are widened.

    ``given``: most's end where its own shape is among the cases; ``doublings``: how far a size is beyond the others'.
    """

    case: MeasuredCase
    median: float
    most: float
    given: float
    doublings: float

    def is_inside(self, factor: float) -> tuple[bool, bool]:
        """Return whether its error is within the median's band and most's, so much wider for each doubling."""
        widened = 1 + factor * self.doublings
        return abs(self.case.error) <= self.median * widened, abs(self.case.error) <= self.most * widened


class Width(NamedTuple):
    """Most's bands of a class: shares inside where shapes are given and left out, what it needs, the widest.

    ``need``: the error that nine in ten of its own cases do not exceed.
    """

    given: float
    left_out: float
    need: float
    widest: float

    @classmethod
    def of(cls, cases: Sequence[KeptOut]) -> Width:
        """Return the figures of the cases of a class."""
        given = sum(abs(c.case.error) <= c.given for c in cases) / len(cases)
        need = nine_in_ten(sorted(abs(c.case.error) for c in cases))
        return cls(given, shares(cases)[1], need, max(c.most * (1 + A_DOUBLING * c.doublings) for c in cases))


def nine_in_ten(errors: Sequence[float]) -> float:
    """Return the error of rank (n + 1) 9 / 10 among ``errors`` in order; the largest of fewer than 9."""
    return errors[min(-(-(len(errors) + 1) * 9 // 10), len(errors)) - 1]


@cache
def kept_out() -> dict[tuple[str, str, str, str], tuple[KeptOut, ...]]:
    """Return every measured case with the band that other shapes give it, by device, schedule, kind and tile's class.

    A shape is left out on all devices of a pool.  Cases for which the others give no band are left out.
    """
    pools = defaultdict(list)
    for row in read_table(FILE):
        pools[row["cores"], row["schedule"]].append(MeasuredCase.of(row))
    found = defaultdict(list)
    for pool in pools.values():
        for case in pool:
            others = [other for other in pool if other.shape != case.shape]
            known, given = (
                band(cases, case.sizes, case.kind, case.tile, is_estimated=False, device=case.device)
                for cases in (others, pool)
            )
            if known.band is None or given.most_error is None:
                continue
            assert known.median_error is not None
            doublings = (known.widened - 1) / A_DOUBLING
            ends = known.median_error / known.widened, known.band / known.widened, given.most_error / given.widened
            found[case.device, case.schedule, case.kind, case.tile].append(KeptOut(case, *ends, doublings))
    return {key: tuple(listed) for key, listed in sorted(found.items())}


def shares(cases: Sequence[KeptOut], factor: float = A_DOUBLING) -> tuple[float, float]:
    """Return the shares of cases inside the median's band and most's."""
    inside = [case.is_inside(factor) for case in cases]
    return sum(a for a, _ in inside) / len(inside), sum(b for _, b in inside) / len(inside)


def untouched() -> dict[tuple[str, str, str, str], tuple[KeptOut, ...]]:
    """Return the classes' cases that no constant was fitted on."""
    return {key: tuple(c for c in cases if not c.case.is_fitted) for key, cases in kept_out().items()}


def judged() -> dict[tuple[str, str, str, str], tuple[KeptOut, ...]]:
    """Return the classes with cases enough, of those that no constant was fitted on."""
    return {key: cases for key, cases in untouched().items() if len(cases) >= JUDGED}


def by_kind() -> dict[tuple[str, str, str], tuple[KeptOut, ...]]:
    """Return the cases that no constant was fitted on by device, schedule and kind of kernel, whatever their tiles."""
    kinds = dict[tuple[str, str, str], tuple[KeptOut, ...]]()
    for (*kind, _), cases in untouched().items():
        key = kind[0], kind[1], kind[2]
        kinds[key] = kinds.get(key, ()) + cases
    return {key: cases for key, cases in kinds.items() if cases}


def holding(factor: float) -> int:
    """Return the number of classes whose shares, of the median band and of the outer band, are as required."""
    return sum(low <= share <= high for cases in judged().values() for share, low, high in _ranges(cases, factor))


def is_by_chance(cases: Sequence[KeptOut]) -> bool:
    """Return whether shares are as required, or differ no more than by chance for this number of cases (binomial).

    Counts are of shapes: cases of one have similar errors.
    """
    shapes = len({case.case.shape for case in cases})
    for share, low, high in _ranges(cases, A_DOUBLING):
        count = round(share * shapes)
        if min(_at_most(count, shapes, low), _at_most(shapes - count, shapes, 1 - high)) < CHANCE:
            return False
    return True


def _ranges(cases: Sequence[KeptOut], factor: float) -> list[tuple[float, float, float]]:
    return [(share, *ends) for share, ends in zip(shares(cases, factor), SHARES, strict=True)]


def _at_most(count: int, cases: int, share: float) -> float:
    """Return the probability that at most this number of cases are inside, if each is with the given probability."""
    return sum(comb(cases, n) * share**n * (1 - share) ** (cases - n) for n in range(count + 1))


if __name__ == "__main__":
    sys.stdout.write(f"{write(*sys.argv[1:])}\n")
