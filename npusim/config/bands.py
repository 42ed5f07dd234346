"""Bands of predicted times: prediction intervals from the errors of earlier predictions of the same family of kernels.

``hwconfigs/validated.csv`` has the error of each measured case whose time depends on the device and not on the host. A
family is a schedule with a kind of kernel; a device has bands of the families that were measured on it. Devices with
the same cores share their cases, but no band is narrower than the band of the device's own cases. Cases of one shape
have similar errors, so all shapes have the same weight, and cases on which a constant was fitted do not count. A class
of a family (tiles that spill registers, products with narrow tiles) has a separate band if it has at least `FEWEST`
shapes. (``reports/validation/bands.py`` leaves out one shape at a time and compares it with the band of the other
shapes.) If a family was never measured on the device, or if no case is similar (each size within a factor of `LIKE`),
there is no band. Launches of Triton kernels are one family, `LAUNCHES`, of three kinds (`launch_kind`): their sizes
have other names and are not compared, and devices do not share them, because other kernels were measured on each.
Launches that spill registers have no band: fewer than 85 % of the left-out shapes were within it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from math import log2, sqrt
from statistics import fmean, median
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from npusim.config.family import NODE_FAMILY
from npusim.config.packaged import read_table
from npusim.identity import Itself
from npusim.late_methods import dataclass
from npusim.units import plural

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.model import SpecModel
    from npusim.config.tiling import Tiling

#: The table of the errors of all measured cases; ``reports/validation/bands.py`` writes it.
FILE = "validated.csv"
#: The value of a field that leaves a choice to the program.
OWN = "auto"
#: Sizes that decide how similar two problems are.
SIZES = ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim", "hidden", "m", "n", "k", "bytes", "count")
#: The schedule of all launches of Triton kernels.
LAUNCHES = "triton"
#: Smallest number of shapes of a class.
FEWEST = 3
#: If no shape is similar to a run, the errors of this number of nearest shapes are stated: the largest of nine errors
#: bounds nine errors in ten.
NEAREST = 9
#: Shares of new errors that the inner and the outer limit of a band include.
HALF, MOST = 0.5, 0.9
#: Student's t at 0.95 by degrees of freedom, used if there are too few shapes for a rank of nine in ten.
STUDENT = MappingProxyType({3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860})
#: Relative widening of a band for each doubling of a size beyond the measured sizes.  It is fitted: with this widening,
#: the band contains the same share of the left-out cases (``reports/validation/bands.py``).
A_DOUBLING = 0.03
#: The class of a GPU's tile that does not fit in registers: errors there are up to four times as large.
SPILLED = "spilled registers"
#: Largest number of columns with which each row of a product's tile in an Ascend device's memory is one block of 32
#: bytes. The errors of such tiles are up to four times as large.
FEWEST_COLUMNS = 16
#: Facts about a board and its settings, which are not numbers of the model.
OF_NO_MODEL = ("facts.", "held_")
#: Largest rounding error of a sum of shares.
ROUNDING = 1e-9
#: Largest factor between the sizes of a case and those of a similar case.
LIKE = 4.0


class MeasuredCase(NamedTuple):
    """A measured case, with the relative error of its predicted time.

    ``cores``: the pool of the case's device (`cores_of`); ``group``: cases of one group are left out together;
    ``is_fitted``: a constant of the device was fitted on the case; ``estimated_error``: the error with estimated
    registers, None if registers have no effect; ``kind``: the kind of its kernel (`kind_of`); ``tile``: the class of
    its tile (`tile_of`).
    """

    device: str
    cores: str
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
        first = row["device"], row["cores"], row["numbers"], row["schedule"], row["group"], row["is_fitted"] == "yes"
        return cls(
            *first, float(row["error"]), estimated, {name: int(size) for name, size in sizes}, row["kind"], row["tile"]
        )

    @property
    def shape(self) -> tuple[tuple[str, int], ...]:
        """The sizes, in a form that is equal for all cases of a shape; launches of different kernels, whose sizes are
        not compared, have different shapes.
        """
        kernel = ((self.group, 0),) if self.schedule == LAUNCHES else ()
        return (*kernel, *self.sizes.items())


@dataclass(frozen=True)
class Validated:
    """The expected relative error of a family's predicted times on a device.

    Half of such times are within ``median_error``, nine in ten within ``most_error``. Both come from the errors of
    ``shapes`` shapes of the class ``ranked_class`` (empty: all of the family).  The family has ``cases`` measured cases
    on the devices ``measured_on``, and ``like`` of them have each size within a factor of 4 of this run's (None: no
    shape is known).  ``outside`` names a size outside the measured range and its distance: bands are ``widened`` by
    that factor.  ``is_estimated``: registers of the kernel are estimated, and so are the registers with which the
    errors were computed.

    ``lacks`` states why there is no band: too few ``shapes`` on which no constant was fitted, or no case ``like`` the
    run; ``median_error`` and ``most_error`` are then the median and the largest error of the family.  Without cases,
    the family was never measured on the device, or (``is_changed``) the device's numbers differ from those of the
    validation.  ``kind``: the kind of kernel.  ``nearest_error``: for a run without a similar case, the error that nine
    in ten of the nearest shapes of the class do not exceed.
    """

    cases: int = 0
    like: int | None = None
    median_error: float | None = None
    most_error: float | None = None
    shapes: int = 0
    outside: str = ""
    widened: float = 1.0
    is_estimated: bool = False
    is_changed: bool = False
    kind: str = ""
    measured_on: tuple[str, ...] = ()
    lacks: Literal["", "shapes", "like"] = ""
    ranked_class: str = ""
    nearest_error: float | None = None

    @property
    def band(self) -> float | None:
        """The relative error within which nine in ten such times are expected; None if the error is not known."""
        return None if self.lacks else self.most_error

    @property
    def missing(self) -> str:
        """Why there is no band, in a few words."""
        numbers = " with these numbers" if self.is_changed else ""
        return f"not measured{ {'like': ' at this size', 'shapes': ' enough'}.get(self.lacks, numbers) }"

    @property
    def verdict(self) -> str:
        """The band, or the reason why there is none, in a few words; `text` has the evidence."""
        if self.band is not None:
            return self.short
        return f"{self.missing} ({self.short})" if self.short else self.missing

    @property
    def short(self) -> str:
        """The band, or the band of the nearest shapes, as a column shows it; empty if neither is known."""
        if self.band is not None:
            return f"± {self.band * 100:.0f} %"
        return "" if self.nearest_error is None else f"nearest ± {self.nearest_error * 100:.0f} %"

    def after(self, time: str) -> str:
        """Return a time with the verdict: ``158 us ± 14 %``, ``158 us, not measured at this size (nearest ± 14 %)``."""
        return f"{time}{', ' if self.band is None else ' '}{self.verdict}"

    def text(self, schedule: str, device: str) -> str:
        """Return the band in words."""
        family = f"{schedule} ({self.kind})" if self.kind else schedule
        if self.median_error is None or self.most_error is None:
            return f"{self.missing}: no time of {family} on {device} was measured"
        times = f"{self._times} of {family} on {' and '.join(self.measured_on or (device,))}"
        half, most = _percent(self.median_error), _percent(self.most_error)
        if self.lacks == "like":
            none = (
                f"no measured time of {family} on {device} has each size within a factor of {LIKE:.0f} of this call's"
            )
            return f"{self.missing}: {none}; the errors of {times} are at most {most}, half of them at most {half}"
        if self.lacks:
            few = f"a band needs {FEWEST} shapes on which no constant was fitted, and {self.shapes} were measured"
            return f"{self.missing}: {few}; the errors of {times} are at most {most}, half of them at most {half}"
        return f"from {times}: half of such predictions are within {half}, nine in ten within {most}{self.why}"

    @property
    def why(self) -> str:
        """The similarity of the run to the measured cases, in words; empty if no shape is known."""
        cases = f"{self.cases} {plural(self.cases, 'case')}"
        reasons = [] if self.like is None else [f"{self.like} of {cases} like it"]
        reasons += [self.outside] if self.outside else []
        reasons += ["registers estimated"] if self.is_estimated else []
        if self.shapes:
            reasons.append(f"errors of {', '.join(filter(None, (f'{self.shapes} shapes', self.ranked_class)))}")
        return f" ({'; '.join(reasons)})" if reasons else ""

    @property
    def _times(self) -> str:
        return f"{self.cases} measured {plural(self.cases, 'time')}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


@cache
def measured_cases(cores: str) -> tuple[MeasuredCase, ...]:
    """Return the measured cases of all devices with some cores."""
    return tuple(MeasuredCase.of(row) for row in read_table(FILE) if row["cores"] == cores)


def cores_of(device: DeviceSpec) -> str:
    """Return the pool of a device: the architecture of its cores; nodes of devices with such cores have a separate
    pool.
    """
    return f"nodes of {device.architecture}" if device.family == NODE_FAMILY else device.architecture


def validated(
    device: DeviceSpec,
    schedule: str,
    problem: SpecModel | None = None,
    tiling: Tiling | None = None,
    *,
    launch: str = "",
    is_estimated: bool = False,
    is_spilled: bool = False,
) -> Validated:
    """Return the band of a schedule's time on a device, if the device's numbers are unchanged.

    Without a ``problem``, the band covers shapes and kinds of kernel (``tiling``) as they were measured.  ``launch``:
    the kind of a launch of a Triton kernel (`launch_kind`); empty for another schedule.
    """
    pool = [case for case in measured_cases(cores_of(device)) if case.schedule == (LAUNCHES if launch else schedule)]
    kind = None if problem is None else launch or kind_of(tiling)
    of_device = [case for case in pool if case.device == device.name and kind in (None, case.kind)]
    if not of_device or any(case.numbers != numbers_of(device) for case in of_device[:1]):
        return Validated(is_changed=bool(of_device), kind=kind or "")
    sizes = {} if launch else sizes_of(problem)
    tile = tile_of(tiling, is_spilled=is_spilled)
    return band(pool, sizes, kind, tile, is_estimated=is_estimated, device=device.name)


def sizes_of(problem: SpecModel | None) -> dict[str, int]:
    """Return the sizes with which a problem is compared with others."""
    sizes = {name: getattr(problem, name, None) for name in SIZES}
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def kind_of(tiling: Tiling | None) -> str:
    """Return the origin of a tiling's kernel: the name of a published kernel, ``library``, or an empty text if the tile
    defines the kernel.

    The number of stages of a library's kernel is not stated, or is ``library``.  For a program of several kernels, the
    result is the attention kernel that the caller named.
    """
    fields, named = dict(tiling or ()), tiling.model_fields_set if tiling is not None else ()
    stages = fields.get("stages", "")
    if tiling is not None and "stages" in fields and "stages" not in named:
        stages = type(tiling).model_fields["stages"].default
    attention = fields.get("attention", OWN)
    return fields.get("kernel") or ("library" if stages is None else "" if attention == OWN else attention)


def launch_kind(*, has_products: bool, is_spilled: bool) -> str:
    """Return the kind of a launch of a Triton kernel: with products or without, or one that spills registers."""
    return SPILLED if is_spilled else "products" if has_products else "no products"


def tile_of(tiling: Tiling | None, *, is_spilled: bool = False) -> str:
    """Return the class of a tile: one that spills registers, or an Ascend device's product by its columns; else empty.

    ``is_spilled``: whether the program's blocks spill registers.
    """
    fields = dict(tiling or ())
    if isinstance(columns := fields.get("block_n"), int) and "stages" not in fields:
        return f"tiles of {'up to' if columns <= FEWEST_COLUMNS else 'more than'} {FEWEST_COLUMNS} columns"
    return SPILLED if is_spilled else ""


def band(
    pool: Sequence[MeasuredCase],
    sizes: Mapping[str, int],
    kind: str | None = None,
    tile: str = "",
    *,
    is_estimated: bool,
    device: str = "",
) -> Validated:
    """Return the band that the measured cases of a schedule give for a run of one kind of kernel (None: of any kind).

    Without ``sizes``, sizes are not compared; without a kind, the band covers all classes of tiles.  If ``device`` has
    `FEWEST` shapes or more, the band is no narrower than the same rank of that device's errors.
    """
    family = [
        case for case in pool if kind in (None, case.kind) and (case.schedule != LAUNCHES or case.device == device)
    ]
    if not family:
        return Validated(kind=kind or "")
    like = sum(is_like(case, sizes) for case in family) if sizes else None
    ranked, chosen = ranked_cases(family, None if kind is None else tile)
    devices = tuple(sorted({case.device for case in family}))
    known = Validated(
        len(family), like, shapes=len(by_shape(ranked)), kind=kind or "", measured_on=devices, ranked_class=chosen
    )
    factor, outside = distance(family, sizes)
    widened = 1 + A_DOUBLING * log2(factor)
    errors = [_errors(cases, is_estimated=is_estimated) for cases in by_shape(ranked)]
    own = [_errors(cases, is_estimated=is_estimated) for cases in by_shape(c for c in ranked if c.device == device)]
    at_least = own if len(own) >= FEWEST else [[0.0]]
    shares = (HALF, MOST) if len(errors) >= FEWEST else ()
    ends = [max(within(errors, n), rank(at_least, n * len(at_least))) * widened for n in shares]
    lacks: Literal["", "shapes", "like"] = "like" if like == 0 else "" if ends else "shapes"
    if lacks:
        every = sorted(abs(case.error) for case in family)
        near = within(_nearest(ranked, sizes, is_estimated=is_estimated), MOST) if ends and lacks == "like" else None
        known = replace(known, nearest_error=near, ranked_class="")
        return replace(known, median_error=median(every), most_error=every[-1], lacks=lacks)
    is_told = is_estimated and any(case.estimated_error is not None for case in family)
    known = replace(known, outside=outside, widened=widened, is_estimated=is_told)
    return replace(known, median_error=ends[0], most_error=ends[1])


def _nearest(cases: Sequence[MeasuredCase], sizes: Mapping[str, int], *, is_estimated: bool) -> list[list[float]]:
    """Return the absolute errors of the shapes nearest to the given sizes: a size that is larger by a factor is as far
    away as a size that is smaller by this factor.
    """
    shapes = sorted(by_shape(cases), key=lambda listed: _away(listed[0], sizes))
    return [_errors(listed, is_estimated=is_estimated) for listed in shapes[:NEAREST]]


def _away(case: MeasuredCase, sizes: Mapping[str, int]) -> float:
    """Return the distances, in doublings of sizes, between a case and others."""
    return sum(abs(log2(max(1, size) / max(1, case.sizes.get(name, size)))) for name, size in sizes.items())


def ranked_cases(family: Iterable[MeasuredCase], tile: str | None) -> tuple[list[MeasuredCase], str]:
    """Return the cases of a family from whose errors a band is computed, and the name of their class.

    The shapes are those of the class ``tile`` (None: any) on which no constant was fitted, or, if the class has fewer
    than `FEWEST` shapes, all such shapes of the family; the name is then empty.
    """
    free = [case for case in family if not case.is_fitted]
    of_class = [case for case in free if tile in (None, case.tile)]
    if len(by_shape(of_class)) < FEWEST:
        return free, ""
    return of_class, (tile or "") if len(of_class) < len(free) else ""


def by_shape(cases: Iterable[MeasuredCase]) -> list[list[MeasuredCase]]:
    """Return the cases of each shape."""
    shapes = defaultdict[tuple[tuple[str, int], ...], list[MeasuredCase]](list)
    for case in cases:
        shapes[case.shape].append(case)
    return list(shapes.values())


def _errors(cases: Iterable[MeasuredCase], *, is_estimated: bool) -> list[float]:
    """Return the absolute errors of cases; if the caller requests it, and where registers have an effect, the errors
    with estimated registers.
    """
    errors = ((case.estimated_error if is_estimated else None, case.error) for case in cases)
    return [abs(known if estimated is None else estimated) for estimated, known in errors]


def within(shapes: Sequence[Sequence[float]], share: float) -> float:
    """Return the error that a ``share`` of a new shape's errors is expected not to exceed, from the absolute errors of
    known shapes.

    With enough shapes the result is a quantile: each known shape has the same weight, and the new shape has this weight
    too, because its errors may be larger than all others (hierarchical conformal prediction: Lee, Barber and Willett
    2023).  With fewer shapes the error is the interval of Student's t about zero.
    """
    need = share * (len(shapes) + 1)
    if need > len(shapes):
        return STUDENT[len(shapes)] * sqrt(fmean(fmean(e * e for e in listed) for listed in shapes))
    return rank(shapes, need)


def rank(shapes: Sequence[Sequence[float]], need: float) -> float:
    """Return the absolute error that ``need`` shapes do not exceed, if each shape has the same weight."""
    errors = sorted((error, 1 / len(listed)) for listed in shapes for error in listed)
    total = 0.0
    for error, weight in errors:
        total += weight
        if total >= need - ROUNDING:
            return error
    return errors[-1][0]


def distance(cases: Iterable[MeasuredCase], sizes: Mapping[str, int]) -> tuple[float, str]:
    """Return the largest factor by which a size is outside the measured range, as a number and in words."""
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


def is_like(case: MeasuredCase, sizes: Mapping[str, int]) -> bool:
    """Return whether a case of the same family has each size within a factor of `LIKE`."""
    return all(1 / LIKE <= size / case.sizes.get(name, size) <= LIKE for name, size in sizes.items())


def numbers_of(device: DeviceSpec) -> str:
    """Return a hash of all numbers and choices that affect predictions; it does not cover descriptions and sources."""
    return _numbers_of(Itself(device))


@lru_cache(maxsize=32)
def _numbers_of(device: Itself) -> str:
    every = ((key, getattr(fact, "value", None)) for key, fact in device.thing.facts())
    facts = ((key, value) for key, value in every if not key.startswith(OF_NO_MODEL))
    # a key that a later version adds does not count as an edit
    values = [(key, value) for key, value in facts if value is not None]
    return hashlib.sha256(repr(values).encode()).hexdigest()[:12]


def validated_schedules(device: DeviceSpec) -> dict[str, Validated]:
    """Return the band of each schedule that was measured on the device, by schedule."""
    cases = measured_cases(cores_of(device))
    schedules = dict.fromkeys(case.schedule for case in cases if case.device == device.name)
    return {schedule: validated(device, schedule) for schedule in schedules}
