"""Precisions by name: a preset of formats and choices, and changes to its fields."""

from __future__ import annotations

from dataclasses import fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, get_args

from npusim.algorithms.flash import Accumulate
from npusim.config.messages import suggest
from npusim.errors import SpecError
from npusim.formats import VARIANTS, get_arithmetic, get_format
from npusim.formats.reductions import ORDERS

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Fields whose values are names: what an exponential and an order of a row sum may be.
NAMED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"exp_variant": tuple(f"{f}.{v}" for f in ("exp", "exp2") for v in VARIANTS[f]), "sum_order": ORDERS}
)


class Precision(Protocol):
    """Format of every intermediate of one schedule, and its named choices, under a preset's name.

    A frozen dataclass; its fields are what ``name,field=value`` may change.
    """

    @property
    def name(self) -> str:
        """Name of the preset."""

    def formats(self) -> dict[str, str]:
        """Return ``{intermediate: format}``."""


PrecisionType = TypeVar("PrecisionType", bound=Precision)


def for_inputs(precision: PrecisionType, fmt: str) -> PrecisionType:
    """Return the same allocation with ``input`` replaced by the inputs' format."""
    chosen: Any = {n: fmt for n, f in precision.formats().items() if f == "input"}
    return cast("PrecisionType", replace(cast("Any", precision), **chosen))


def choose_precision(schedule: str, presets: Mapping[str, Precision], default: str, text: str) -> Precision:
    """Return the preset named in ``text`` with the changes that follow: ``name,field=value,...``.

    Raises `SpecError`: unknown preset or field (names those there are), two presets, a field twice, or text that is no
    value of the field; `FormatError`: a field is set to an unknown number format or matrix arithmetic.
    """
    names, changes = list[str](), dict[str, str]()
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if equals and key in changes:
            raise SpecError(f"precision field {key!r} is given twice: {changes[key]} and {value}")
        if equals:
            changes[key] = value
        elif key:
            names.append(key)
    if len(names) > 1:
        raise SpecError(f"precision {', '.join(names)}: one preset at most, then field=value")
    name = names[0] if names else default
    if name not in presets:
        raise SpecError(f"precision {name!r}: no preset of {schedule}{suggest(name, list(presets))}")
    return _changed(presets[name], changes)


def _changed(preset: Precision, changes: Mapping[str, str]) -> Precision:
    known = [f.name for f in fields(cast("Any", preset)) if f.name not in ("name", "kernel")]
    values: dict[str, object] = {}
    for key, text in changes.items():
        if key not in known:
            listed = ", ".join(known)
            raise SpecError(f"precision field {key!r}: {preset.name} has {listed}{suggest(key, known)}")
        values[key] = _value(preset, key, text)
    if values:
        values["name"] = ",".join([preset.name, *(f"{k}={v}" for k, v in changes.items())])
    return cast("Precision", replace(cast("Any", preset), **values))


def _value(preset: Precision, key: str, text: str) -> object:
    """Return ``text`` as a value of the field ``key``."""
    old = getattr(preset, key)
    if isinstance(old, bool):
        if text.lower() not in ("true", "false"):
            raise SpecError(f"precision field {key}: {text!r} is neither true nor false")
        return text.lower() == "true"
    if isinstance(old, float):
        try:
            return float(text)
        except ValueError:
            raise SpecError(f"precision field {key}: {text!r} is no number") from None
    if key == "accumulate" and text not in get_args(Accumulate):
        allowed = ", ".join(get_args(Accumulate))
        raise SpecError(f"precision field accumulate: {text!r} is not one of {allowed}")
    if key in preset.formats() and text != "input":
        return get_format(text).name
    if key == "arithmetic" and text:
        return get_arithmetic(text).name
    if key in NAMED and text not in NAMED[key]:
        allowed = ", ".join(NAMED[key])
        raise SpecError(f"precision field {key}: {text!r} is not one of {allowed}")
    return text
