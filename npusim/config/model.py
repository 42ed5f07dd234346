"""The base of every model that is read from a file: frozen, and without unknown keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from npusim.errors import SpecError
from npusim.units import ascii_digits, parse_count

EntryType = TypeVar("EntryType")

# Sizes that float64 represents exactly.
PositiveInt = Annotated[int, Field(strict=True, gt=0, le=2**53)]
# Far above the number of heads of any model; messages list the divisors of a number of heads.
HeadCount = Annotated[int, Field(strict=True, gt=0, le=2**20)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]


def _counted(value: object) -> object:
    """Return the number of a text such as ``8k``; other values are unchanged, so that the check of the number names the
    fault.
    """
    try:
        # the text '2' is not accepted as a number
        return parse_count(value) if isinstance(value, str) and value[-1:].isalpha() else value
    except ValueError:
        return value


#: Tokens or sequences: 8192, or 8k.
Count = Annotated[PositiveInt, BeforeValidator(_counted)]
StrictFloat = Annotated[float, Field(strict=True, allow_inf_nan=False)]
PositiveFloat = Annotated[StrictFloat, Field(gt=0)]


def percent_or_share(value: object) -> object:
    """Return ``"15%"`` as 0.15, and everything else, such as a share written as a number, unchanged."""
    if not isinstance(value, str) or not value.strip().endswith("%"):
        return value
    try:
        return float(ascii_digits(value.strip()[:-1])) / 100
    except ValueError:
        return value


#: An allowed relative error: 0.15, or 15%.
Band = Annotated[PositiveFloat, Field(lt=1), BeforeValidator(percent_or_share)]
StrictBool = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(min_length=1)]
#: Longest name that is still a valid file name with a schedule, a length and an ending.
LONGEST_NAME = 100
_NOT_IN_NAMES = frozenset('/\\:*?"<>|')


def file_name(text: str) -> str:
    """Return ``text`` if it is allowed in a file's name; raise the error that pydantic reports if not.

    Separators, characters with a meaning in a shell or a terminal, and a leading dot are not allowed.
    """
    wrong = [c for c in text if c in _NOT_IN_NAMES or not c.isprintable()]
    if wrong or text.startswith(".") or len(text) > LONGEST_NAME:
        what = f"has {wrong[0]!r}" if wrong else "starts with a dot" if text[:1] == "." else "is long"
        shown = repr(text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}...")
        raise PydanticCustomError(
            "file_name",
            "{text}",
            {
                "text": (
                    f"{shown} {what}; a name is part of file names: at most {LONGEST_NAME} printable "
                    'characters, no / \\ : * ? " < > |, and no dot at the beginning'
                )
            },
        )
    return text


Name = Annotated[Text, AfterValidator(file_name)]


class SpecModel(BaseModel):
    """A frozen model; an unknown key is reported before anything else, with the allowed keys.

    This check is first because a misspelt key would otherwise be reported as a missing key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        allowed = cls.file_keys()
        unknown = [key for key in data if key not in allowed]
        if unknown:
            # The text for users is written in `messages`, which knows the place; this text is for direct callers.
            raise PydanticCustomError(
                "unknown_keys", "unknown keys {unknown}; allowed: {allowed}", {"unknown": unknown, "allowed": allowed}
            )
        return data

    @classmethod
    def file_keys(cls) -> list[str]:
        """Return the keys of this model in the spelling of a file."""
        return [field.alias or name for name, field in cls.model_fields.items()]


def entry(table: Mapping[str, EntryType], name: str, fault: str) -> EntryType:
    """Return an entry of a table; raise `SpecError` with ``fault`` and the table's names if there is no such entry."""
    if name not in table:
        raise SpecError(fault + ", ".join(table))
    return table[name]


def fault_at(key: str, text: str) -> PydanticCustomError:
    """Return an error about a dotted key below the model that is being checked; `messages` reads it."""
    return PydanticCustomError("at_key", "{text}", {"key": key, "text": text})
