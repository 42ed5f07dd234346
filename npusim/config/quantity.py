"""Numbers of a hardware file: each states its value, its basis, and its source.

The allowed range of a number follows from the unit that its key ends in.  The ranges are far wider than any machine:
they prevent a slip (a missing exponent, another unit) from causing an overflow, a false deadlock, or a simulation that
takes a day.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Generic, Literal, Self, TypeVar, get_args

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from npusim.config.model import SpecModel, Text, fault_at
from npusim.identity import Itself
from npusim.units import parse_count

Basis = Literal["vendor", "measured", "derived", "fitted", "assumed"]
BASES: tuple[str, ...] = get_args(Basis)
ChoiceValue = TypeVar("ChoiceValue", bound=str | bool)

# A float cannot represent an integer beyond this limit; infinities and NaN fail the comparison too.
LARGEST = sys.float_info.max

#: Units with which keys of numbers end, the longest first, each with its smallest and largest value; whether 0 is
#: allowed depends on the key.
RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "group_count": (1, 4096),
        "_per_group_count": (1, 1024),
        "_count": (1, 65536),
        "_bytes_per_cycle": (2**-10, 2**20),
        "_elements_per_cycle": (2**-10, 2**20),
        "_flops_per_s": (1, 1e24),
        "_bytes_per_s": (1, 1e24),
        "_per_s": (1, 1e24),
        "_elements": (1, 65536),
        "_factor": (1e-3, 1e3),
        "_cycles": (0, 1e9),
        "_cycles_per_repeat": (0, 1e6),
        "_cycles_per_element": (0, 1e6),
        "_cycles_per_fractal": (0, 1e6),
        "_bytes": (1, 2**50),
        "_hz": (1e6, 1e12),
        "_w": (1e-3, 1e6),
        "_s": (0, 3600),
    }
)


def has_unit(key: str) -> bool:
    """Return whether ``key`` ends in (or is) a unit: ``clock_hz``, ``bytes_per_cycle``."""
    return f"_{key}".endswith(tuple(RANGES))


def _check_number(value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("number_type", "expected a number")
    if not 0 <= value <= LARGEST:
        raise PydanticCustomError("number_range", "must be finite and not negative")
    return value


def _check_whole_number(value: object) -> int:
    number = _check_number(value)
    if not isinstance(number, int):
        raise PydanticCustomError("whole_number", "expected a whole number")
    return number


class Sourced(SpecModel):
    """The fields of a fact other than its value."""

    basis: Basis = Field(description="evidence for the number")
    source: Text = Field(description="source of the value")
    fitted_on: tuple[str, ...] | None = Field(
        default=None, description="measurement cases on which a fitted value was fitted"
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_bare_value(cls, data: object) -> object:
        if isinstance(data, dict | Sourced):
            return data
        raise PydanticCustomError("bare_value", "has neither basis nor source")

    @model_validator(mode="after")
    def _fitted_names_its_cases(self) -> Self:
        if (self.basis == "fitted") != bool(self.fitted_on):
            raise PydanticCustomError("fitted_on", "`fitted_on` is allowed only for a fitted value")
        return self


class Quantity(Sourced):
    """A number with its basis and source; its unit is the suffix of its key."""

    value: Annotated[int | float, PlainValidator(_check_number), WithJsonSchema({"type": "number", "minimum": 0})] = (
        Field(description="the number, in the unit at the end of its key")
    )


#: An integer in a file, as an editor checks it.
_WHOLE_OR_BYTES = (
    {"type": "integer", "minimum": 0},
    {"type": "string", "pattern": r"^[0-9][0-9_.]*([kKmMgG]i?)?[bB]?$"},
)


class WholeQuantity(Quantity):
    """A quantity that is an integer: bytes, counts, whole cycles."""

    value: Annotated[int, PlainValidator(_check_whole_number), WithJsonSchema({"anyOf": [*_WHOLE_OR_BYTES]})] = Field(
        description="the integer, in the unit at the end of its key; bytes may have a unit: 192KiB"
    )


@contextmanager
def reads(quantities: Iterable[tuple[str, Quantity]]) -> Iterator[set[str]]:
    """Yield a set, to which the keys of numbers are added as they are read."""
    keys, read = {id(quantity): key for key, quantity in quantities}, set[str]()

    def attribute(self: Quantity, name: str) -> object:
        if name == "value" and id(self) in keys:
            read.add(keys[id(self)])
        return object.__getattribute__(self, name)

    Quantity.__getattribute__ = attribute  # type: ignore[method-assign, assignment]
    try:
        yield read
    finally:
        del Quantity.__getattribute__


class Choice(Sourced, Generic[ChoiceValue]):
    """A named alternative with its basis and source, such as an arithmetic, or the engine that blocks on a wait."""

    value: ChoiceValue = Field(description="the alternative chosen")


def _refuse_zero(quantity: Quantity) -> Quantity:
    if quantity.value == 0:
        raise PydanticCustomError("zero", "must be greater than 0")
    return quantity


Positive = Annotated[Quantity, AfterValidator(_refuse_zero)]
PositiveWhole = Annotated[WholeQuantity, AfterValidator(_refuse_zero)]


class HardwareModel(SpecModel):
    """A file of sourced numbers, each within the range of its unit; a number of bytes may be written with its unit:
    ``192KiB``.
    """

    @model_validator(mode="before")
    @classmethod
    def _bytes_may_have_a_unit(cls, data: object) -> object:
        return _with_bytes(data)

    @model_validator(mode="after")
    def _numbers_are_within_the_range_of_their_unit(self) -> Self:
        for key, quantity in self.quantities():
            name = f"_{key.rpartition('.')[2]}"
            low, high = next((limits for unit, limits in RANGES.items() if name.endswith(unit)), (0, LARGEST))
            if quantity.value and not low <= quantity.value <= high:
                text = f"{quantity.value!r} must be between {format_limit(low)} and {format_limit(high)}"
                raise fault_at(key, text)
        return self

    def quantities(self) -> Iterator[tuple[str, Quantity]]:
        """Yield every number with its dotted key, in the order of the file."""
        for key, fact in self.facts():
            if isinstance(fact, Quantity):
                yield key, fact

    def facts(self) -> Iterator[tuple[str, Sourced]]:
        """Yield every sourced number and choice with its dotted key."""
        return iter(_facts_of(Itself(self)))

    def digest(self) -> str:
        """Return a short hash of the content, for a result's provenance; it is equal for equal files."""
        return _digest_of(Itself(self))


#: Files whose facts and digests are stored: every run needs them, and a file that was read does not change.
_MOST_FILES = 32


@lru_cache(maxsize=_MOST_FILES)
def _facts_of(file: Itself) -> tuple[tuple[str, Sourced], ...]:
    return tuple(_facts("", file.thing))


@lru_cache(maxsize=_MOST_FILES)
def _digest_of(file: Itself) -> str:
    # Absent keys are omitted, so that a key that a later version adds does not count as an edit.
    return hashlib.sha256(file.thing.model_dump_json(by_alias=True, exclude_none=True).encode()).hexdigest()[:12]


def _with_bytes(node: object, key: str = "") -> object:
    """Return a part of a file in which sizes with a unit, such as ``192KiB``, are numbers; other text is unchanged, and
    is refused later.
    """
    if isinstance(node, list | tuple):
        return [_with_bytes(child) for child in node]
    if not isinstance(node, Mapping):
        return node
    content = {name: _with_bytes(child, name) for name, child in node.items()}
    if key.endswith("_bytes") and isinstance(text := content.get("value"), str):
        with suppress(ValueError):
            content["value"] = parse_count(text, is_bytes=True)
    return content


def _facts(prefix: str, node: object) -> Iterator[tuple[str, Sourced]]:
    if isinstance(node, Sourced):
        yield prefix, node
        return
    if isinstance(node, SpecModel):
        fields = type(node).model_fields
        children: Iterator[tuple[str, object]] = ((fields[name].alias or name, v) for name, v in node)
    elif isinstance(node, Mapping):
        children = iter(node.items())
    elif isinstance(node, tuple):
        children = ((str(index), child) for index, child in enumerate(node))
    else:
        return
    for key, child in children:
        yield from _facts(f"{prefix}.{key}" if prefix else key, child)


def format_limit(value: float) -> str:
    """Return a limit in the form of messages: ``4,096``, ``1.76e+06``."""
    return f"{value:,.0f}" if 1 <= value < 1e6 or not value else f"{value:.3g}"
