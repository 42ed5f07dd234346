"""Numbers of a hardware file: each says its value, how it is known, and where it comes from."""

from __future__ import annotations

import sys
from typing import Annotated, Generic, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from npusim.config.model import SpecModel, Text

Basis = Literal["vendor", "measured", "derived", "fitted", "assumed"]
ChoiceValue = TypeVar("ChoiceValue", bound=str | bool)

# Beyond it a whole number has no float any more; infinities and NaN fail the comparison too.
LARGEST = sys.float_info.max

BASES = ("vendor", "measured", "derived", "fitted", "assumed")

# The key of every number ends in one of these.
UNIT_SUFFIXES = (
    "_bytes_per_cycle",
    "_bytes_per_s",
    "_cycles_per_repeat",
    "_cycles_per_element",
    "_cycles_per_fractal",
    "_elements_per_cycle",
    "_per_group_count",
    "_elements",
    "_factor",
    "_cycles",
    "_bytes",
    "_count",
    "_hz",
    "_s",
)


def has_unit(key: str) -> bool:
    """Return whether ``key`` ends in (or is) a unit: ``clock_hz``, ``bytes_per_cycle``."""
    return f"_{key}".endswith(UNIT_SUFFIXES)


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
    """What a fact says about itself besides its value."""

    basis: Basis = Field(description="how it is known")
    source: Text = Field(description="where it comes from")
    fitted_on: tuple[str, ...] | None = Field(
        default=None, description="measurement cases a fitted value was fitted on"
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_bare_value(cls, data: object) -> object:
        if isinstance(data, dict | Sourced):
            return data
        raise PydanticCustomError("bare_value", "has no basis and no source")

    @model_validator(mode="after")
    def _fitted_names_its_cases(self) -> Self:
        if (self.basis == "fitted") != bool(self.fitted_on):
            raise PydanticCustomError("fitted_on", "`fitted_on` names the cases of a fitted value, and of no other")
        return self


class Quantity(Sourced):
    """A number with its basis and source; its unit is the suffix of its key."""

    value: Annotated[int | float, PlainValidator(_check_number), WithJsonSchema({"type": "number", "minimum": 0})] = (
        Field(description="the number, in the unit that its key ends in")
    )


class WholeQuantity(Quantity):
    """A quantity that is a whole number: bytes, counts, whole cycles."""

    value: Annotated[int, PlainValidator(_check_whole_number), WithJsonSchema({"type": "integer", "minimum": 0})] = (
        Field(description="the whole number, in the unit that its key ends in")
    )


class Choice(Sourced, Generic[ChoiceValue]):
    """A named alternative with its basis and source: which arithmetic, who blocks on a wait."""

    value: ChoiceValue = Field(description="the alternative chosen")


def _refuse_zero(quantity: Quantity) -> Quantity:
    if quantity.value == 0:
        raise PydanticCustomError("zero", "must be greater than 0")
    return quantity


Positive = Annotated[Quantity, AfterValidator(_refuse_zero)]
PositiveWhole = Annotated[WholeQuantity, AfterValidator(_refuse_zero)]
