"""A device's uncertain constants fitted to measured times: selection, fit, and validation on left-out cases."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from npusim.config.cases import load_measurements
from npusim.config.load import reader_of
from npusim.config.quantity import WholeQuantity, reads
from npusim.errors import CheckFailedError, SpecError
from npusim.kernels.declare.define import machine_of, unread_keys
from npusim.studies.validate import least_squares
from npusim.studies.validate.measured_times import Predictor
from npusim.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from npusim.config.cases import MeasurementCase
    from npusim.config.quantity import Quantity
    from npusim.studies.validate.least_squares import Array

#: Bases of constants that may be fitted: neither the vendor nor a direct measurement states them.
UNCERTAIN = ("assumed", "derived", "fitted")
#: Times of one request that differ by more than this are not explained by noise.
CONTRADICTION = 0.25
FEWEST = 4
#: Number of rounds in which constants are selected; each round starts from the values fitted in the previous ones.
ROUNDS = 2
#: Smallest number of cycles at which a constant in cycles, an integer, is fitted.
FINE_CYCLES = 100


@dataclass(frozen=True, slots=True)
class Constant:
    """A fitted constant: its value before and after, and the ends of its 90 % interval.

    ``with_it`` are the keys that these measurements cannot distinguish from this one: all of them were changed by one
    factor.
    """

    key: str
    before: float
    after: float
    low: float
    high: float
    with_it: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClassErrors:
    """Mean absolute errors of a class of cases: with the original device, fitted, and fitted without their group."""

    name: str
    cases: int
    before: float
    fitted: float
    kept_out: float


@dataclass(frozen=True)
class Calibration:
    """The fitted constants, the cases, and the errors of predictions before and after, on left-out cases too.

    ``is_whole``: whether the fit was not interrupted.
    """

    device: str
    constants: tuple[Constant, ...]
    classes: tuple[ClassErrors, ...]
    total: ClassErrors
    cases: tuple[str, ...]
    source: str
    is_whole: bool = True

    @property
    def helps(self) -> bool:
        """Whether the errors of left-out cases are smaller than before."""
        return bool(self.constants) and self.total.kept_out < self.total.before

    def check(self) -> None:
        """Raise `CheckFailedError` if the fit does not help, so that no file is written."""
        if not self.constants:
            raise CheckFailedError(
                "no change of a constant reduces the errors of left-out cases: npusim writes no file"
            )
        if not self.helps:
            was, now = (f"{100 * e:.1f} %" for e in (self.total.before, self.total.kept_out))
            raise CheckFailedError(
                f"the errors of left-out cases would be {now} on average, and are {was} now: npusim writes no file"
            )

    def device_text(self, extends: str, name: str) -> str:
        """Return the text of a device file that extends the fitted one."""
        lines = ["schema: npusim.device/1", f"extends: {json.dumps(extends)}", f"name: {name}"]
        cases = f"{len(self.cases)} {plural(len(self.cases), 'case')}"
        lines += [f"description: {json.dumps(f'{self.device}, constants fitted on {cases}')}", ""]
        for c in self.constants:
            with_it = f"; changed by the same factor as {', '.join(c.with_it)}" if c.with_it else ""
            interval = f"90 % interval {c.low:.4g} to {c.high:.4g}"
            source = f"npusim calibrate, {self.source}: {c.before:.6g} before, {interval}"
            number = int(c.after) if c.after.is_integer() else c.after
            value = {"value": number, "basis": "fitted", "fitted_on": list(self.cases), "source": source + with_it}
            lines.append(f"{c.key}: {json.dumps(value)}")
        return "\n".join(lines) + "\n"


def calibrate(
    path: Path,
    hw: str | Path | None = None,
    *,
    only: str | None = None,
    constants: Sequence[str] = ("*",),
    method: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Fit a device's uncertain constants to the times of a file of measurements.

    ``hw``: the device, if it differs from that of the cases; ``constants``: patterns of keys that may be fitted.  A
    complete key may name a measured constant; a pattern may too if the cases belong to another device, since a number
    that was measured on one chip is an assumption for another.  The fit chooses constants that reduce the error of
    left-out groups most and that the data can distinguish; times are simulated again, never interpolated.  A range is
    represented by its geometric mean.

    Raises `SpecError` if cases belong to several devices, contradict one another or are too few, if the device has no
    constant to fit, or if scipy is missing.
    """
    file = load_measurements(path)
    cases = [c for c in file.cases if only is None or any(fnmatchcase(t, only) for t in (c.name, c.schedule, c.device))]
    devices = sorted({c.device for c in cases})
    if hw is None and len(devices) != 1:
        raise SpecError(
            f"{path}: the cases are of {', '.join(devices) or 'no device'}: name the device to fit with --hw, or "
            "select cases with --only"
        )
    device = str(hw or devices[0])
    fit = _Fit(Predictor(method, folder=path.parent), device, cases, progress)
    return fit.calibration(constants, path.name)


class _Fit:
    """Times of cases under changed constants; each case is built once, and timed again for each change."""

    def __init__(
        self,
        base: Predictor,
        device: str,
        cases: Sequence[MeasurementCase],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.base, self.name, self.progress = base, device, progress
        self.device = base.machine(device)
        #: A number measured on one chip is an assumption for another.
        is_another = any(case.device not in (device, self.device.name) for case in cases)
        self.uncertain = (*UNCERTAIN, "measured") if is_another else UNCERTAIN
        cases = [case.model_copy(update={"device": device}) for case in cases]
        if (node := machine_of(self.device).node) is not None:
            raise SpecError(f"{device} is a node: npusim fits the constants of one device, here {node.device}")
        listed = [
            (case, name)
            for case in cases
            for name, _ in case.measured.items()
            if name.endswith("_us") and not base.is_floor(case, name)
        ]
        if len(listed) < FEWEST:
            raise SpecError(
                f"{len(listed)} measured times; at least {FEWEST} are needed, and more than the number of constants"
            )
        self.measured = np.log([getattr(case.measured, name) for case, name in listed]).mean(axis=1)
        self.cases = [case for case, _ in listed]
        groups = [case.group or case.schedule for case in self.cases]
        #: Cases that are left out together; each case alone if there is only one group.
        self.groups = groups if len(set(groups)) > 1 else [case.name for case in self.cases]
        self.texts = [f"{base.text(case)} {case.kind} {case.host_floor_us} {name}" for case, name in listed]
        self.asked = dict(zip(self.texts, listed, strict=True))
        self._refuse_contradictions()
        self.keys: list[str] = []
        self.reads: dict[str, set[str]] = {}
        self.known: dict[tuple[object, ...], float] = {}
        self.done = 0

    def _refuse_contradictions(self) -> None:
        alike = defaultdict(list)
        for text, case, time in zip(self.texts, self.cases, self.measured, strict=True):
            alike[text].append((float(time), case.name))
        for listed in alike.values():
            (a, low), (b, high) = min(listed), max(listed)
            if b - a > np.log1p(CONTRADICTION):
                times = f"{np.exp(a):.4g} and {np.exp(b):.4g} us"
                raise SpecError(f"cases {low} and {high} are the same call but have {times}")

    def candidates(self, patterns: Sequence[str]) -> dict[str, Quantity]:
        """Return the constants that may be fitted, by key."""
        listed = {
            key: fact
            for key, fact in self.device.quantities()
            if fact.value and _is_fine(key, fact)
            if fact.basis in self.uncertain or (fact.basis == "measured" and key in patterns)
            if reader_of(self.device, key, unread_keys) is None
        }
        matched = {key: fact for key, fact in listed.items() if any(fnmatchcase(key, p) for p in patterns)}
        if not matched:
            named = f"none of its {len(listed)} constants matches {', '.join(patterns)}"
            why = named if listed else "all are stated by the vendor or measured"
            raise SpecError(f"{self.name}: no constant may be fitted: {why} (npusim hw show {self.name})")
        return matched

    def calibration(self, patterns: Sequence[str], source: str) -> Calibration:
        """Return the constants that are chosen and fitted, and the errors before and after."""
        candidates = self.candidates(patterns)
        least_squares.scipy_part("optimize")  # a missing package is reported before the long work
        self.keys, self.values = list(candidates), {key: float(fact.value) for key, fact in candidates.items()}
        self.whole = {key for key, fact in candidates.items() if isinstance(fact, WholeQuantity)}
        x, chosen, fitted = np.zeros(len(self.keys)), np.zeros((len(self.keys), 0)), None
        base, is_seen, is_whole = self.predict(x), np.full(len(x), True), True
        try:
            for _ in range(ROUNDS):  # more constants have a visible effect after the first are right
                jac = least_squares.jacobian(self.predict, x, is_seen)
                is_seen = np.abs(jac).max(axis=0) >= least_squares.LEAST
                wider = least_squares.choose(jac, self.predict(x) - self.measured - jac @ x, self.groups, chosen)
                if wider.shape == chosen.shape:
                    break
                start = np.linalg.pinv(wider) @ x
                fitted = least_squares.fit(self._along(wider), self.measured, start, least_squares.COARSE)
                chosen, x = wider, wider @ fitted.x
            if fitted is not None:
                fitted = least_squares.fit(self._along(chosen), self.measured, fitted.x)
                x = chosen @ fitted.x
        except KeyboardInterrupt:  # the fit up to this point is judged
            if fitted is None:
                raise
            is_whole = False
        after = left = base
        constants = list[Constant]()
        if fitted is not None:
            ends = chosen @ least_squares.intervals(fitted)
            constants = [self._constant(int(row), x, ends, chosen) for row in np.flatnonzero(chosen.any(axis=1))]
            after, left = self.predict(x), self._kept_out(fitted, chosen)
        errors = [np.abs(np.expm1(times - self.measured)) for times in (base, after, left)]
        names = np.array([case.schedule for case in self.cases])
        inside = {**{name: names == name for name in dict.fromkeys(names.tolist())}, "all": np.full(len(names), True)}
        *classes, total = (
            ClassErrors(name, int(which.sum()), *(float(e[which].mean()) for e in errors))
            for name, which in inside.items()
        )
        fitted_on = tuple(dict.fromkeys(case.name for case in self.cases)) if constants else ()
        return Calibration(self.name, tuple(constants), tuple(classes), total, fitted_on, source, is_whole)

    def _constant(self, row: int, x: Array, ends: Array, chosen: Array) -> Constant:
        key = self.keys[row]
        bundle = chosen[:, np.flatnonzero(chosen[row])[0]]
        others = tuple(self.keys[other] for other in np.flatnonzero(bundle) if other != row)
        low, high = sorted(self.values[key] * np.exp(ends[row]))
        after = float(self._written(key, self.values[key] * float(np.exp(x[row]))))
        return Constant(key, self.values[key], after, float(low), float(high), others)

    def _kept_out(self, fitted: least_squares.Fitted, chosen: Array) -> Array:
        """Return times of each group, simulated with constants fitted on the others (to first order about the fit)."""
        errors = np.empty(len(self.measured))
        for group in dict.fromkeys(self.groups):
            inside = np.array([g == group for g in self.groups])
            jac, residuals = fitted.jac[~inside], fitted.fun[~inside]
            x = chosen @ least_squares.solve(jac, residuals - jac @ fitted.x)
            errors[inside] = self.predict(x, np.flatnonzero(inside))
        return errors

    def _written(self, key: str, value: float) -> str:
        return str(round(value)) if key in self.whole else f"{value:.6g}"

    def predict(self, x: Array, numbers: Iterable[int] | None = None) -> Array:
        """Return the logarithms of predicted times, for all measurements or some, from the logarithms of factors on
        `keys`.

        The result is infinite out of range.  A case whose time depends on none of the changed constants is not
        simulated again.
        """
        changed = {
            k: self._written(k, self.values[k] * float(np.exp(v))) for k, v in zip(self.keys, x, strict=True) if v
        }
        at = self.base.retimed(changed) if changed else self.base
        texts = self.texts if numbers is None else [self.texts[n] for n in numbers]
        times = {text: self._time(text, at, changed) for text in dict.fromkeys(texts)}
        self.done += 1
        if self.progress:
            self.progress(self.done, max(self.done + 1, 2 * len(self.values)))
        return np.array([times[text] for text in texts])

    def _time(self, text: str, at: Predictor, changed: Mapping[str, str]) -> float:
        """Return the logarithm of a case's time, simulated once for equal values of the constants that it reads."""
        if text not in self.reads:
            key = next(iter(self.values))  # a new device, whose numbers no code has read yet
            who = self.base.retimed({key: self._written(key, self.values[key])})
            self.base.quantity(*self.asked[text])
            with reads(who.machine(self.name).quantities()) as self.reads[text]:
                who.quantity(*self.asked[text])
        known = text, *(item for item in changed.items() if item[0] in self.reads[text])
        if known not in self.known:
            try:
                self.known[known] = float(np.log(at.quantity(*self.asked[text])))
            except SpecError:
                if not changed:
                    raise
                self.known[known] = np.inf
        return self.known[known]

    def _along(self, chosen: Array) -> least_squares.Predict:
        """Return the same result from logarithms of factors on bundles."""
        return lambda x: self.predict(chosen @ x)


def _is_fine(key: str, fact: Quantity) -> bool:
    """Return whether a number can be changed by some per cent: it is not a count, a size, or a small number
    of cycles.
    """
    return not isinstance(fact, WholeQuantity) or (key.endswith("_cycles") and fact.value >= FINE_CYCLES)
