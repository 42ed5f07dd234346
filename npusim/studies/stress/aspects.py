"""Aspects of inputs that a search varies, and the inputs at one point of the search: base values that one aspect after
another changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim import formats
from npusim.config.messages import choices
from npusim.errors import SpecError
from npusim.formats.cast import widen
from npusim.formats.float_format import format_of_dtype
from npusim.units import ascii_digits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npusim.config.problem import Problem
    from npusim.program.numerics.executor import HeadSource
    from npusim.simulation.evaluation import Subject

#: Aspects that differ from the base by name: a point of the search.
Point = Mapping[str, float]
#: Number of values of a range that are tried, one after another.
LEVELS = 4
#: ``tokens``: one key in this number is an outlier; ``sinks``: number of first keys (P-Cast has four).
OUTLIERS, SINKS = 64, 4
#: Periods of the shared wave along the head dimension (as `workloads/pasa_resonance.yaml`).
PERIODS = 4
#: Position of the late key, as a share of the number of keys.
LATE = 7 / 8


@dataclass(frozen=True)
class Aspect:
    """One way in which inputs may be worse: its value in the base, and the values to try.

    ``needs``: ``attention`` (Q, K and V), ``plain`` tensors, a ``tail`` of keys that may be removed, or nothing.
    ``is_range``: values between the first and the last are tested too; the values of a factor differ by factors.  An
    aspect with the single value 1 is a switch.  ``is_default``: its values are not stated by the user, and may be
    exceeded.
    """

    name: str
    neutral: float
    values: tuple[float, ...] = (1.0,)
    needs: str = "attention"
    is_range: bool = False
    is_default: bool = True

    def between(self, share: float) -> float:
        """Return the value at a share of the way from the first to the last."""
        low, high = self.values[0], self.values[-1]
        value = low * (high / low) ** share if self.neutral == 1 else low + (high - low) * share
        return float(round(value)) if self.needs == "tail" else value

    def within(self, low: float, high: float) -> Aspect:
        """Return the aspect with `LEVELS` values from ``low`` to ``high``."""
        bounds = replace(self, values=(low, high), is_range=True)
        return replace(bounds, values=tuple(bounds.between(n / (LEVELS - 1)) for n in range(LEVELS)))

    def grown(self, factor: float) -> tuple[float, ...]:
        """Return amplitudes beyond the limits: ``factor`` times the last and the first value, if these are negative or
        above 1.

        None for switches, for a number of keys, and for a user's limits.
        """
        if not (self.is_range and self.is_default) or self.needs == "tail":
            return ()
        return tuple(factor * bound for bound in (self.values[-1], *self.values[:1]) if bound < 0 or bound > 1)

    def is_bound(self, value: float) -> bool:
        """Return whether a value is an end of the range."""
        return self.is_range and value in (self.values[0], self.values[-1])


#: The amplitude a of each aspect.  logit_std: Q is multiplied by a, which scales the spread of scores; logit_mean: a is
#: added to all scaled scores; resonance: a is the amplitude of a wave along the head that Q and K share, in phase, or
#: out of phase if a is negative; channels: one channel of K is multiplied by a; tokens: one key of 64 is multiplied by
#: a; sinks, late: a is added to the scaled scores of the first keys, or of one key at 7/8 of the keys (the V of sinks
#: is 0, as it nearly is in models); values: V is multiplied by a; equal: all keys equal the first one; zero: Q is 0;
#: tail: the last a keys are omitted; padding: NaN in keys that no query sees; scale: all inputs are multiplied by a.
ASPECTS: Mapping[str, Aspect] = MappingProxyType(
    {
        a.name: a
        for a in (
            Aspect("logit_std", 1).within(0.25, 4),
            Aspect("logit_mean", 0).within(-64, 64),
            Aspect("resonance", 0).within(-16, 16),
            Aspect("channels", 1, needs="").within(1, 32),
            Aspect("tokens", 1, needs="").within(1, 16),
            Aspect("sinks", 0).within(0, 8),
            Aspect("late", 0).within(0, 16),
            Aspect("values", 1).within(1, 32),
            Aspect("equal", 0),
            Aspect("zero", 0, needs=""),
            Aspect("tail", 0, (1.0, 17.0), "tail", is_range=True),
            Aspect("padding", 0),
            Aspect("scale", 1, needs="plain").within(0.25, 4),
        )
    }
)
#: The aspect that multiplies all inputs, for each kind of subject.
AMPLITUDE: Mapping[str, str] = MappingProxyType({"attention": "logit_std", "plain": "scale"})
#: Aspects that only judged calls have, and that no search tries: inputs of a kernel of plain tensors that are not above
#: 0, and a number that is added to all inputs.
NEGATIVE, MOVED = "negative", "moved"
#: Aspects by the name of a group.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "outliers": ("channels", "tokens", "sinks", "late"),
        "logits": ("logit_std", "logit_mean", "resonance"),
        "all": tuple(ASPECTS),
    }
)


def bounded(text: str) -> tuple[Aspect, ...]:
    """Return the aspects of ``NAME``, ``NAME=LOW:HIGH`` or ``NAME=A,B,C``; raise `SpecError` for any other text."""
    name, equals, values = text.partition("=")
    if name not in (known := (*ASPECTS, *GROUPS)):
        raise SpecError(f"--over {text}: unknown aspect{choices(name, known)}")
    if not equals:
        return tuple(ASPECTS[n] for n in GROUPS.get(name, (name,)))
    if name in GROUPS:
        raise SpecError(
            f"--over {text}: {name} is several aspects, {', '.join(GROUPS[name])}; set bounds for one of them"
        )
    aspect, is_range = ASPECTS[name], ":" in values
    try:
        numbers = tuple(float(part) for part in ascii_digits(values).split(":" if is_range else ","))
    except ValueError:
        numbers = (math.nan,)
    is_switch = aspect.values == (1.0,)
    if is_switch and (is_range or not set(numbers) <= {0, 1}):
        raise SpecError(f"--over {text}: {name} is a switch: write {name}, or {name}=1 (0: as in the base)")
    is_tail = aspect.needs == "tail" and any(n < 1 or n % 1 for n in numbers)
    is_wrong = is_range and (len(numbers) != 2 or numbers[0] >= numbers[1] or (aspect.neutral == 1 and numbers[0] <= 0))
    if not all(map(math.isfinite, numbers)) or is_wrong or is_tail:
        above = f", LOW below HIGH{' and above 0' if aspect.neutral == 1 else ''}, or values with commas between them"
        raise SpecError(f"--over {text}: write {name}=LOW:HIGH{above}{'; keys are whole numbers' if is_tail else ''}")
    aspect = replace(aspect, is_default=False)
    return (aspect.within(*numbers) if is_range else replace(aspect, values=numbers, is_range=False),)


def aspects_of(over: Sequence[str], kind: str, *, has_tail: bool) -> tuple[Aspect, ...]:
    """Return the aspects that are named, or all that inputs of a call have.

    Raises `SpecError` for an aspect that the inputs do not have, unless a group names it, and for an aspect that is
    named twice.
    """
    able = {"", kind, *(("tail",) if has_tail else ())}
    named = [(a, text) for text in over or ("all",) for a in bounded(text)]
    if gone := [a.name for a, text in named if a.needs not in able and text not in GROUPS]:
        raise SpecError(f"--over {', '.join(gone)}: the inputs of this call do not have this aspect")
    listed = tuple(a for a, _ in named if a.needs in able)
    if len({a.name for a in listed}) < len(listed) or not listed:
        raise SpecError(
            f"--over {', '.join(over)}: an aspect occurs twice, or no aspect applies to the inputs of this call"
        )
    return listed


def words(point: Point) -> str:
    """Return a point as text: ``logit_std=2 late=16``."""
    return " ".join(f"{name}={value:.4g}" for name, value in point.items()) or "the base"


def stressed(base: HeadSource, subject: Subject, point: Point, seed: int) -> HeadSource:
    """Return the inputs at a point: ``base``, (rows, columns) each, changed and rounded once.

    A value beyond the inputs' format becomes its largest finite number: inputs are finite.
    """
    problem = subject.attention
    change = _of_tensors if problem is None else partial(_of_attention, problem)
    # Rows of a kernel may share one row of an input: their values remain equal.
    shared = [t.name for t in subject.plain.values() if t.shared_rows > 1]

    @cache
    def source(name: str, batch: int, head: int) -> NDArray[Any]:
        stored = base(name, batch, head)
        fmt = format_of_dtype(stored.dtype)
        if not point or fmt is None:  # a format in blocks, or integers
            return stored
        changes = point if name not in shared else {n: v for n, v in point.items() if n not in ("channels", "tokens")}
        scale = getattr(problem, f"{name}_scale", 1.0)
        rng = np.random.default_rng([seed, *name.encode(), batch, head])
        wide = change(widen(stored).astype(np.float64) * scale, name, changes, rng)
        return formats.cast(wide / scale, fmt.name, overflow="saturate")

    return source


def _of_attention(
    problem: Problem, x: NDArray[np.float64], name: str, point: Point, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return Q, K or V of one head, (rows, d) in float64, with the aspects of a point."""
    width = x.shape[1]
    if name == "v":
        x = x * point.get("values", 1.0)
        x[: SINKS if point.get("sinks") else 0] = 0.0
        return x
    if name == "q":
        x = x * point.get("logit_std", 1.0)
    x = _of_tensors(x, name, {n: point[n] for n in ("channels", "tokens") if n in point and name == "k"}, rng)
    if name == "k" and point.get("equal"):
        x[:] = x[:1]
    if wave := point.get("resonance"):
        turns = [math.cos(2 * math.pi * PERIODS * c / width) for c in range(width)]
        x = x + np.array(turns) * (wave if name == "k" else abs(wave))
    if mean := point.get("logit_mean"):
        offset = math.sqrt(abs(mean) / (problem.scale * width))
        x = x + (math.copysign(offset, mean) if name == "k" else offset)
    raised = {"sinks": (-1, slice(0, SINKS)), "late": (-2, slice(int(LATE * len(x)), int(LATE * len(x)) + 1))}
    for aspect, (column, keys) in raised.items():
        if gap := point.get(aspect):
            part = math.sqrt(abs(gap) / problem.scale)  # the factor is applied to Q and to K, so that both remain small
            x[:, column] = part if name == "q" else 0.0
            if name == "k":
                x[keys, column] = math.copysign(part, gap)
    return np.zeros_like(x) if name == "q" and point.get("zero") else x


def _of_tensors(x: NDArray[np.float64], _name: str, point: Point, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return an input, (rows, columns) in float64, with the aspects that inputs of any kernel have."""
    column, rows = rng.integers(x.shape[1]), rng.random(len(x)) < 1 / OUTLIERS
    x = x * point.get("scale", 1.0)
    x[:, column] *= point.get("channels", 1.0)
    x[rows] *= point.get("tokens", 1.0)
    x = -np.abs(x) if point.get(NEGATIVE) else x
    x = x + point.get(MOVED, 0.0)
    return np.zeros_like(x) if point.get("zero") else x
