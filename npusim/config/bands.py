"""Bands of predicted times: conformal quantiles of the errors of earlier predictions of the same kind.

``hwconfigs/validated.csv`` has the error of each measured case that the device bounds, not the host.  A band is
valid for a new group of cases: where there are enough, it uses only errors of cases on which no constant was fitted,
corrects for their number, and uses cases of the same class of kernel (its author, rows, one stage or several) where
that class has enough (``reports/validation/bands.py`` leaves out one shape at a time and checks it against the band of
the others).  Where no case is similar (its kind of kernel, each size within a factor of 4) there is no band: the errors
of the nearest class are stated as errors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import log2
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from npusim.config.packaged import read_table
from npusim.units import plural

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.model import SpecModel
    from npusim.config.tiling import Tiling

#: The table of errors, which ``reports/validation/bands.py`` writes from every measured case there is.
FILE = "validated.csv"
#: The schedule whose measured times are a framework's too, and say nothing of other kernels.
WHOLE_MODELS = "layer"
#: Sizes that say how alike two problems are.
SIZES = ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim", "hidden", "m", "n", "k", "bytes", "count")
#: Errors from which nine in ten can be told: of ten, one more than the largest of nine is expected.
FEWEST = 9
#: Errors of a schedule, or of a published kernel in any, from which the largest says more than those of other kernels:
#: six of seven are expected within it.
FEW = 6
#: How much wider a band is for each doubling of a size beyond those measured: that under which most classes of cases
#: that were kept out have their shares inside (``reports/validation/bands.py``).
A_DOUBLING = 0.05
#: Rows of a GPU's tile above which its kernel spills registers; errors there are up to four times as large. One stage,
#: whose operands pass through registers, is a class too.
MOST_ROWS = 128
#: Columns of a product's tile on Ascend up to which its rows in memory are a block of 32 bytes: errors there are up to
#: four times as large.
FEWEST_COLUMNS = 16
#: The class of kernels of a schedule's own tile, where others' (by name) were measured too.
OWN = "its own kernel"
#: Largest factor between the sizes of a case and those of one like it.
LIKE = 4.0


class MeasuredCase(NamedTuple):
    """A measured case, with the relative error of its predicted time.

    ``group``: cases of one group are left out together; ``is_fitted``: a constant of its device was fitted on it;
    ``estimated_error``: the error with estimated registers, None where registers decide nothing;
    ``kind``: the kind of its kernel (`kind_of`); ``tile``: the class of a GPU's tile (`tile_of`).
    """

    device: str
    numbers: str
    schedule: str
    group: str
    is_fitted: bool
    error: float
    estimated_error: float | None
    sizes: dict[str, int]
    kind: str = ""
    tile: str = ""

    @classmethod
    def of(cls, row: Mapping[str, str]) -> MeasuredCase:
        """Return the case of a line of the table."""
        sizes = (size.split("=") for size in row["sizes"].split())
        estimated = float(row["estimated_error"]) if row["estimated_error"] else None
        first = row["device"], row["numbers"], row["schedule"], row["group"], row["is_fitted"] == "yes"
        return cls(
            *first, float(row["error"]), estimated, {name: int(size) for name, size in sizes}, row["kind"], row["tile"]
        )


@dataclass(frozen=True)
class Validated:
    """The expected relative error of a schedule's predicted times on a device.

    Half of such times are within ``median_error``, nine in ten within ``most_error``.  The errors are those of
    ``cases`` measured cases; ``like`` of them have each size within a factor of 4 of this run's (None: no shape is
    known), and ``others_used`` belong to other schedules of the device, used where the schedule's own are too few.
    ``outside`` names a size outside the measured range and its distance: bands are ``widened`` by that factor.
    ``is_estimated``: registers of the kernel are estimated, and so are those of the errors.  ``ranked``: the number of
    cases whose errors form the band, of the class ``ranked_class`` alone (empty: no class narrower than the schedule
    has enough cases). If ``like`` is 0, there is no band; ``median_error`` and ``most_error`` are then the median and
    the largest error of the ``cases`` of the ``nearest`` class. Without cases, nothing was measured, or
    (``is_changed``) the device's numbers differ from those of the validation; ``others`` are then the other schedules
    measured on the device, each with its ``most_error``.
    """

    cases: int = 0
    like: int | None = None
    median_error: float | None = None
    most_error: float | None = None
    others_used: int = 0
    outside: str = ""
    widened: float = 1.0
    is_estimated: bool = False
    is_changed: bool = False
    others: dict[str, float] = field(default_factory=dict)
    nearest: str = ""
    ranked: int = 0
    ranked_class: str = ""

    @property
    def band(self) -> float | None:
        """The relative error within which nine in ten such times are expected; None where no case is alike."""
        return None if self.nearest else self.most_error

    def text(self, schedule: str, device: str) -> str:
        """Return it in words."""
        if self.median_error is None or self.most_error is None:
            changed = " with these numbers" if self.is_changed else ""
            met = ", ".join(f"{_percent(error)} ({name})" for name, error in self.others.items())
            others = f"; nine in ten of the times measured there were within {met}" if met else ""
            return f"no measurement of {schedule} on {device}{changed}: predicted only{others}"
        if self.nearest:
            return (
                f"not measured like this: no case of {schedule} on {device} has such a kernel and each size within a "
                f"factor of {LIKE:.0f}; errors of {self.nearest_text}, half of them up to {_percent(self.median_error)}"
            )
        used = f" and {self.others_used} of other schedules" if self.others_used else ""
        most = "nine in ten" if self.cases + self.others_used >= FEWEST else "all measured so far"
        return (
            f"by {self.cases} measured {plural(self.cases, 'time')} of {schedule} on {device}{used}, half are expected "
            f"within {_percent(self.median_error)}, {most} within {_percent(self.most_error)}{self.why}"
        )

    @property
    def nearest_text(self) -> str:
        """The nearest class, and its largest error."""
        times = f"{self.cases} measured {plural(self.cases, 'time')}"
        return f"the nearest, {times} of {self.nearest}: up to {_percent(self.most_error or 0)}"

    @property
    def why(self) -> str:
        """The similarity of the run to the measured cases, in words; empty where no shape is known."""
        cases = f"{self.cases} {plural(self.cases, 'case')}"
        reasons = [] if self.like is None else [f"{self.like} of {cases} like it"]
        reasons += [self.outside] if self.outside else []
        reasons += ["registers estimated"] if self.is_estimated else []
        reasons += [f"errors of {self.ranked} cases, {self.ranked_class}"] if self.ranked_class else []
        return f" ({'; '.join(reasons)})" if reasons else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


@cache
def measured_cases(device: str) -> tuple[MeasuredCase, ...]:
    """Return the measured cases of a device."""
    return tuple(MeasuredCase.of(row) for row in read_table(FILE) if row["device"] == device)


def validated(
    device: DeviceSpec,
    schedule: str,
    problem: SpecModel | None = None,
    tiling: Tiling | None = None,
    *,
    is_estimated: bool = False,
) -> Validated:
    """Return the band of a schedule's time on a device, if the device's numbers are those of its file.

    Without a ``problem``, the band covers shapes and kinds of kernel (``tiling``) as they were measured.
    """
    numbers = numbers_of(device) if (of_device := measured_cases(device.name)) else ""
    cases = [case for case in of_device if case.numbers == numbers]
    names = dict.fromkeys(case.schedule for case in cases)
    if schedule in names:
        kernel = kind_of(tiling), tile_of(tiling)
        return band(cases, schedule, sizes_of(problem), *kernel, is_estimated=is_estimated)
    others = {name: errors_of(cases, name, ())[0] for name in names if name != WHOLE_MODELS}
    is_changed = any(case.schedule == schedule for case in of_device)
    return Validated(is_changed=is_changed, others={name: nine_in_ten(errors) for name, errors in others.items()})


def sizes_of(problem: SpecModel | None) -> dict[str, int]:
    """Return the sizes of a problem that say how like others it is."""
    sizes = {name: getattr(problem, name, None) for name in SIZES}
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def kind_of(tiling: Tiling | None) -> str:
    """Return whose kernel a tiling means: a published one's name, ``library``, or empty for a kernel by its tile.

    A library's stages are open, or stated as ``library``.
    """
    fields, named = dict(tiling or ()), tiling.model_fields_set if tiling is not None else ()
    stages = fields.get("stages", "")
    if tiling is not None and "stages" in fields and "stages" not in named:
        stages = type(tiling).model_fields["stages"].default
    return fields.get("kernel") or ("library" if stages is None else "")


def tile_of(tiling: Tiling | None) -> str:
    """Return the class of a GPU's tile by rows and stages, of an Ascend device's product by columns; else empty."""
    fields = dict(tiling or ())
    if isinstance(columns := fields.get("block_n"), int) and "stages" not in fields:
        return f"tiles of {'up to' if columns <= FEWEST_COLUMNS else 'more than'} {FEWEST_COLUMNS} columns"
    rows, stages = fields.get("block_q"), fields.get("stages")
    if not isinstance(rows, int) or not isinstance(stages, int):
        return ""
    return (
        f"{'more than' if rows > MOST_ROWS else 'up to'} {MOST_ROWS} rows; {'one stage' if stages == 1 else 'stages'}"
    )


def classes_of(kind: str, tile: str) -> tuple[tuple[str, ...], ...]:
    """Return the classes that a kernel is in, the narrowest first: its tile's, that by rows alone, its kind's."""
    rows, _, stages = tile.partition("; ")
    return ((kind, rows, stages), (kind, rows), (kind,)) if tile else ((kind,),)


def band(
    cases: Sequence[MeasuredCase],
    schedule: str,
    sizes: Mapping[str, int],
    kind: str = "",
    tile: str = "",
    *,
    is_estimated: bool,
) -> Validated:
    """Return the band that a device's measured cases give a run of one of their schedules.

    Without ``sizes``, that of all kernels of the schedule.
    """
    classes = classes_of(kind, tile) if sizes else ()
    errors, chosen = errors_of(cases, schedule, classes, is_estimated=is_estimated)
    same = [case for case in cases if case.schedule == schedule]
    if sizes and not any(is_like(case, sizes, kind) for case in same):
        of_kind = [case for case in same if case.kind == kind]
        nearest = sorted(abs(case.error) for case in of_kind or same)
        name = f"{schedule} ({kind})" if of_kind and kind else schedule
        return Validated(len(nearest), 0, median(nearest), nearest[-1], nearest=name)
    factor, outside = distance(same, sizes)
    widened = 1 + A_DOUBLING * log2(factor)
    like = sum(is_like(case, sizes, kind) for case in same) if sizes else None
    ends = half(errors) * widened, nine_in_ten(errors) * widened
    used = len(errors) - len(same) if len(errors) > len(same) else 0
    is_told = is_estimated and any(case.estimated_error is not None for case in same)
    ranked = (len(errors), ", ".join(filter(None, chosen)) or OWN) if chosen else (0, "")
    return Validated(len(same), like, *ends, used, outside, widened, is_told, ranked=ranked[0], ranked_class=ranked[1])


def errors_of(
    cases: Iterable[MeasuredCase], schedule: str, classes: Iterable[tuple[str, ...]], *, is_estimated: bool = False
) -> tuple[list[float], tuple[str, ...]]:
    """Return the absolute errors that form a schedule's band, the least first, and the class of their cases.

    The first of these sets is used: the narrowest of the ``classes`` with enough cases for nine in ten (without the
    cases that a constant was fitted on, if the others are enough); all cases of the schedule, if enough; `FEW` or more
    of the published kernel in any schedule; `FEW` or more of the schedule; published kernels; all kernels of the
    device.  The class is empty unless the set is one of the first or third, and lacks a case of the schedule.
    """
    kernels = [case for case in cases if case.schedule == schedule or WHOLE_MODELS not in (schedule, case.schedule)]
    same = [case for case in kernels if case.schedule == schedule]
    found: tuple[str, ...] = ()
    kinds = {name[0] for name in classes} - {""}
    of_kind = [case for case in kernels if case.kind in kinds]
    few = [own for own in (of_kind, same) if len(own) >= FEW and not all(case.is_fitted for case in own)]
    published = [case for case in kernels if case.kind] if kinds else []
    chosen = few[0] if few else published if len(published) >= FEWEST else kernels
    names = (*classes, ())
    if few and few[0] is of_kind:
        names, found = names[:-1], () if all(case.kind in kinds for case in same) else tuple(kinds)
    for name in names:
        of_class = [case for case in same if not name or name in classes_of(case.kind, case.tile)]
        sets = [case for case in of_class if not case.is_fitted], of_class
        if enough := next((listed for listed in sets if len(listed) >= FEWEST), None):
            chosen, found = enough, name if len(of_class) < len(same) else ()
            break
    errors = ((case.estimated_error if is_estimated else None, case.error) for case in chosen)
    return sorted(abs(known if estimated is None else estimated) for estimated, known in errors), found


def half(errors: Sequence[float]) -> float:
    """Return the error that half of new ones are within: of n in order that of rank (n + 1) / 2."""
    return errors[(len(errors) + 2) // 2 - 1]


def nine_in_ten(errors: Sequence[float]) -> float:
    """Return the error that nine in ten new ones are within: of rank (n + 1) 9 / 10; the largest of fewer than 9."""
    return errors[min(-(-(len(errors) + 1) * 9 // 10), len(errors)) - 1]


def distance(cases: Iterable[MeasuredCase], sizes: Mapping[str, int]) -> tuple[float, str]:
    """Return the largest factor by which a size is outside the measured range, and the same in words."""
    factor, words = 1.0, ""
    listed = list(cases)
    for name, size in sizes.items():
        known = [case.sizes[name] for case in listed if name in case.sizes]
        above, below = (size / max(known), min(known) / size) if known else (1.0, 1.0)
        if max(above, below) > factor:
            factor = max(above, below)
            times = f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"
            words = f"{name} {times} times the largest measured" if above > 1 else f"{name} 1/{times} of the smallest"
    return factor, words


def is_like(case: MeasuredCase, sizes: Mapping[str, int], kind: str) -> bool:
    """Return whether a case of the same schedule is of that kind of kernel, each size within a factor of `LIKE`."""
    near = (1 / LIKE <= size / case.sizes.get(name, size) <= LIKE for name, size in sizes.items())
    return case.kind == kind and all(near)


def numbers_of(device: DeviceSpec) -> str:
    """Return a hash of all numbers and choices that affect predictions; descriptions and sources do not count."""
    facts = ((key, getattr(fact, "value", None)) for key, fact in device.facts() if not key.startswith("facts."))
    values = [(key, value) for key, value in facts if value is not None]  # a key that a later version adds is no edit
    return hashlib.sha256(repr(values).encode()).hexdigest()[:12]


def validated_schedules(device: DeviceSpec) -> dict[str, Validated]:
    """Return the band of each schedule that was measured on the device, by schedule."""
    schedules = dict.fromkeys(case.schedule for case in measured_cases(device.name))
    return {schedule: validated(device, schedule) for schedule in schedules}
