"""Base of the tiling fields that each schedule declares, and the builder with readable errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from copy import copy
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, SupportsIndex, TypeVar, cast, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from npusim.config.messages import choices, explain, suggest
from npusim.config.model import fault_at
from npusim.config.outside import is_outside
from npusim.errors import TilingError
from npusim.late_methods import dataclass

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

__all__ = [
    "Blocks",
    "Field",
    "Lightest",
    "Tiling",
    "TilingField",
    "build_tiling",
    "composed",
    "declared",
    "lightest",
    "model_validator",
    "on",
    "one_of",
    "part_of",
    "power_of_two",
    "tile_fields",
    "tiling_fields",
    "word_of",
]

#: The value of a field that needs the least work and memory; ``any``: the field affects only how work is assigned, not
#: the amount of work or memory.
Lightest = Literal["least", "most", "any"]
#: The owner of a field.  Runs and searches may choose fields of the tile.  A field of the model states what is
#: computed: no run chooses it, and a search varies it only if ``-f`` names it.  The same is true of a field that
#: belongs to a kernel's source, although the result may be the same for all its values.
Kind = Literal["tile", "model", "source"]


class Tiling(BaseModel):
    """Block sizes and ring depths of one schedule; a schedule declares a subclass.

    A tiling is immutable and hashable. Each field has a default, a ``Field`` with its limits (``ge``, ``le``,
    ``multiple_of``, or a ``Literal`` type) and a description. Text from a command line is read as the type of the
    field; ``auto`` has the same effect as not naming the field. ``json_schema_extra`` may declare the word for None
    under ``none``, and another name that users write for the field under ``also``. The schedule checks limits that
    depend on the problem or the device.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @property
    def published(self) -> Any:
        """The published kernel that the fields name; None if no field names one."""
        return None

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        # The class of a schedule's tilings is composed at its first use, so it is not an attribute of a module.
        kind = type(self)
        if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind:
            return super().__reduce_ex__(protocol)
        return _named_values, (self.model_dump(exclude_unset=True),)


class NamedValues(Tiling):
    """Values by field name, the form in which another process receives a tiling; `build_tiling` returns a tiling of the
    schedule's class.
    """

    model_config = ConfigDict(extra="allow")


def _named_values(values: Mapping[str, object]) -> Tiling:
    return NamedValues(**values)


class Blocks(Tiling):
    """Blocks of attention."""

    block_q: int = Field(default=128, ge=16, multiple_of=16, description="query rows of a block")
    block_kv: int = Field(default=512, ge=16, multiple_of=16, description="keys of a tile")


TilingType = TypeVar("TilingType", bound=Tiling)
ValueType = TypeVar("ValueType")
#: ``names(schedule)``: the names, and the description of each.
Names = Callable[[str], Mapping[str, object]]


def lightest(value: Lightest) -> Any:
    """Return a declaration of a field that changes when and where operations run, but no operation and no bit.

    ``Field(..., json_schema_extra=lightest("least"))``: if all else is equal, a program with the smallest value needs
    at most as much work of each engine, and at most as much of each memory, as with any other value. Unless the text is
    "any", each block is computed by the same core group for all values. Searches use one bound for all points that
    differ only in such fields.
    """
    return {"lightest": value}


def one_of(names: Names, schedule: str = "") -> Any:
    """Return a declaration of a field whose value is a name from a list or FILE.py:NAME: ``Annotated[str,
    one_of(names)]``.

    ``names(schedule)`` returns the names of a schedule, each with a description; ``names("")`` returns the names of all
    schedules. It is called at the first use.
    """
    return AfterValidator(partial(_check_name, names, schedule))


def _check_name(names: Names, schedule: str, value: str) -> str:
    if not is_outside(value) and value not in (known := names(schedule)):
        listed = choices(value, sorted(known)) if known else "; it has none"
        what = f"{schedule} has no {value!r}" if schedule else f"unknown {value!r}"
        raise fault_at("", f"{what}{listed}; your own is FILE.py:NAME")
    return value


def of_schedule(cls: type[Tiling], schedule: str) -> type[Tiling]:
    """Return the class of tilings of a schedule: fields of `one_of` accept only this schedule's names.

    The class itself is returned if these are all the names.
    """
    fields: dict[str, Any] = {}
    for n, info in cls.model_fields.items():
        names, _ = _names_of(info)
        if names(schedule) != names(""):
            kind = cast("type[str]", Annotated[str, one_of(names, schedule)])
            fields[n] = (kind | None if type(None) in get_args(info.annotation) else kind, copy(info))
    return (
        cast("type[Tiling]", create_model(cls.__name__, __base__=cls, __doc__=cls.__doc__, **fields)) if fields else cls
    )


def names_of(info: FieldInfo) -> Mapping[str, object]:
    """Return the names that a field of `one_of` accepts, with a description of each; nothing for other fields."""
    names, schedule = _names_of(info)
    return names(schedule)


def _names_of(info: FieldInfo) -> tuple[Names, str]:
    """Return the function for the names of a `one_of` field, and the schedule; None for other fields."""
    kinds = (info.annotation, *get_args(info.annotation))
    rules = [getattr(rule, "func", None) for k in kinds for rule in getattr(k, "__metadata__", ())]
    return next((rule.args for rule in rules if isinstance(rule, partial)), (lambda _: {}, ""))


def power_of_two() -> Any:
    """Return a declaration of a field whose values are 1, 2, 4, 8, ... or None: ``Annotated[int, power_of_two()]``."""
    return AfterValidator(_check_power)


def _check_power(value: int | None) -> int | None:
    if value is not None and value & (value - 1):
        lower = 1 << value.bit_length() - 1
        raise fault_at("", f"{value} is not a power of two; nearest: {lower} or {2 * lower}")
    return value


def part_of(kind: Kind) -> Any:
    """Return a declaration that a field belongs to the tile, which runs may choose, or to the model.

    ``Field(..., json_schema_extra=part_of("model"))``; a field without a declaration belongs to the tile, but in
    ``attention(fields=...)`` to the model.
    """
    return {"kind": kind}


def build_tiling(cls: type[TilingType], values: Mapping[str, object] | Tiling) -> TilingType:
    """Return a tiling from field values, as numbers or as text of a command line; a `Tiling` is returned unchanged.
    Raises `TilingError` that names each wrong field, its value and the allowed values; an unknown field with a
    suggestion.
    """
    if isinstance(values, cls):
        return values
    if isinstance(values, Tiling):
        values = values.model_dump(exclude_unset=True)
    values = with_own_names(cls, values)
    unknown = [name for name in values if name not in cls.model_fields]
    if unknown:
        known = list(cls.model_fields)
        lines = [f"{name}: unknown tiling field{suggest(name, known)}" for name in unknown]
        raise TilingError("\n".join(lines))
    try:
        named = {n: v for n, v in values.items() if v != "auto" or cls.model_fields[n].default == v}
        return cls.model_validate({n: None if v == word_of(cls, n, None) else v for n, v in named.items()})
    except ValidationError as error:
        faults: dict[str, list[str]] = {}
        for key, text in explain(error, dict(values)):
            faults.setdefault(key, []).append(text)
        lines = [f"{key}: {'; '.join(texts)}" if key else "; ".join(texts) for key, texts in faults.items()]
        raise TilingError("\n".join(lines)) from None


def with_own_names(cls: type[Tiling], values: Mapping[str, ValueType]) -> dict[str, ValueType]:
    """Return values by the names of fields, with users' other names (``also``) replaced.

    Raises `TilingError` for a field that is named twice.
    """
    others = {
        extra["also"]: n for n, i in cls.model_fields.items() if "also" in (extra := _schema(i.json_schema_extra))
    }
    renamed = dict[str, ValueType]()
    for name, value in values.items():
        field_name = name if name in cls.model_fields else others.get(name, name)
        if field_name in renamed:
            raise TilingError(
                f"{field_name}: set to {renamed[field_name]}, and under its other name {name} to {value}; set it once"
            )
        renamed[field_name] = value
    return renamed


def _schema(extra: object) -> Mapping[str, Any]:
    return extra if isinstance(extra, dict) else {}


#: Key of a field's schema: the values that a search tries if the user names no fields.
SEARCHED = "searched"
#: The word for None in a field with such values; None stands for the value with the smallest predicted time.
BEST = "best"


#: Key of a field's schema: its declaration on other kinds of processors.
_ON = "on"


def on(processor: str, other: object) -> Any:
    """Return a declaration of a kernel's field on another kind of processor, ``gpu`` or ``cpu``.

    ``Field(default=128, ..., json_schema_extra=on("gpu", 64))``: another default; or a `Field`, or a type and a
    `Field`.
    """
    return {_ON: {processor: other}}


def composed(
    own: type[Tiling] | None,
    machine: type[Tiling] | None,
    usual: Mapping[str, object],
    processor: str,
    *,
    is_own_first: bool = False,
) -> type[Tiling]:
    """Return the class with a kernel's ``own`` fields and the machine's fields, for a kind of processor.

    ``usual``: the kernel's defaults (or declarations) for the machine's fields; names that the machine does not have
    are ignored.  Returns the class unchanged if nothing is added.
    """
    fields = _on_processor(own, processor) if own is not None else {}
    bases = tuple([cls for cls in (own, machine) if cls is not None])
    if machine is not None:
        fields |= {n: _changed(machine.model_fields[n], x) for n, x in usual.items() if n in machine.model_fields}
    if len(bases) == 1 and not fields:
        return bases[0]
    first = bases[0]
    if is_own_first:  # pydantic puts the fields of the last base class first
        bases = bases[::-1]
    return cast("type[Tiling]", create_model(first.__name__, __base__=bases, __doc__=first.__doc__, **fields))


def _on_processor(own: type[Tiling], processor: str) -> dict[str, Any]:
    """Return the declarations of the fields whose declaration depends on the kind of processor."""
    others = {n: _schema(info.json_schema_extra).get(_ON, {}) for n, info in own.model_fields.items()}
    return {n: _changed(own.model_fields[n], of[processor]) for n, of in others.items() if processor in of}


def _changed(info: FieldInfo, other: object) -> tuple[Any, FieldInfo]:
    """Return the type and the declaration of a field with another default, declaration, or type and declaration."""
    kind, declared = other if isinstance(other, tuple) else (info.annotation, other)
    if isinstance(declared, type(info)):
        return kind, declared
    changed = copy(info)
    changed.default = declared
    extra = {n: x for n, x in _schema(info.json_schema_extra).items() if n != _ON}
    changed.json_schema_extra = extra or None
    return kind, changed


def with_fields(name: str, fields: Mapping[str, tuple[object, object]]) -> type[Tiling]:
    """Return a class of fields by name, (default, description) or (type, `Field`), that belong to a kernel's source."""
    result: dict[str, Any] = {
        n: (type(d), Field(default=d, description=text, json_schema_extra=part_of("source")))
        if isinstance(text, str)
        else (d, text)
        for n, (d, text) in fields.items()
    }
    kind: type[Tiling] = create_model(name, __base__=Tiling, __doc__=Tiling.__doc__, **result)
    return kind


def declared_as(fields: type[Tiling], kind: Kind) -> type[Tiling]:
    """Return the class with all fields assigned to ``kind``, except those that state otherwise.

    A field that declares its lightest value belongs to the tile.
    """
    result: dict[str, Any] = {}
    for n, known in fields.model_fields.items():
        info, extra = copy(known), known.json_schema_extra
        extra = extra if isinstance(extra, dict) else {}
        info.json_schema_extra = extra if extra.keys() & {"kind", "lightest"} else {**part_of(kind), **extra}
        result[n] = (info.annotation, info)
    return cast("type[Tiling]", create_model(fields.__name__, __base__=fields, __doc__=fields.__doc__, **result))


def word_of(cls: type[Tiling], name: str, value: object) -> object:
    """Return a field's value as text; None is written as its word, if it has one."""
    extra: Any = cls.model_fields[name].json_schema_extra
    return extra.get("none") if value is None and isinstance(extra, dict) else value


@dataclass(frozen=True)
class TilingField:
    """One tiling field as help texts and searches need it."""

    name: str
    default: object
    description: str
    minimum: int | None
    maximum: int | None
    multiple_of: int | None
    choices: tuple[object, ...]
    lightest: Lightest | None = None
    kind: str = "tile"
    none: str | None = None  #: the word for None
    is_power: bool = False  #: whether the value is a power of two

    def takes(self, value: object) -> bool:
        """Return whether an integer is within the field's limits."""
        if not isinstance(value, int) or (self.multiple_of and value % self.multiple_of):
            return False
        if self.is_power and value & (value - 1):
            return False
        return (self.minimum is None or value >= self.minimum) and (self.maximum is None or value <= self.maximum)


@lru_cache(maxsize=64)
def tiling_fields(cls: type[Tiling]) -> tuple[TilingField, ...]:
    """Return the fields of a tiling class in the order of their declaration."""
    fields = []
    for name, info in cls.model_fields.items():
        none = word_of(cls, name, None)
        limits = {
            key: getattr(rule, key)
            for rule in info.metadata
            for key in ("ge", "le", "multiple_of")
            if hasattr(rule, key)
        }
        inner = get_args(info.annotation)
        kinds = (info.annotation, *(inner if type(None) in inner else ()))
        extra: Any = info.json_schema_extra
        literals = [get_args(kind) for kind in kinds if get_origin(kind) is Literal]
        names, schedule = _names_of(info)
        named = names(schedule)
        fields.append(
            TilingField(
                name=name,
                default=info.default,
                description="; ".join((info.description or "", *(f"{n}: {one}" for n, one in named.items()))),
                minimum=limits.get("ge"),
                maximum=limits.get("le"),
                multiple_of=limits.get("multiple_of"),
                choices=literals[0] if literals else tuple(named),
                lightest=extra.get("lightest") if isinstance(extra, dict) else None,
                kind=extra.get("kind", "tile") if isinstance(extra, dict) else "tile",
                none=none if isinstance(none, str) else None,
                is_power=any(getattr(rule, "func", None) is _check_power for rule in info.metadata),
            )
        )
    return tuple(fields)


#: A value of a field in a search: a number, a word, or None if a rule chooses the value.
Number = int | float | str | None
#: Largest rows, keys and depths of a declared space if a field has no limit.
MOST_ELEMENTS, MOST = 1024, 64


def declared(tiling: type[Tiling]) -> dict[str, tuple[Number, ...]]:
    """Return the space that a schedule's fields of its tile declare: choices, and doublings between a field's limits.

    For a field whose default a rule chooses, the value is the rule's word, or None.
    """
    of_tile = (field for field in tiling_fields(tiling) if field.kind == "tile")
    axes = {field.name: _declared(field, type(field.default)) for field in of_tile}
    return {name: values for name, values in axes.items() if len(values) > 1}


def _declared(field: TilingField, kind: type) -> tuple[Number, ...]:
    if field.choices and field.default is not None:  # fields that a preset decides are not chosen here
        return tuple(c for c in field.choices if isinstance(c, str | int))
    if kind is bool:
        return ("false", "true")
    if kind not in (int, type(None)) or field.minimum is None:
        return ()
    step = field.multiple_of or 1
    limit = min(field.maximum or MOST_ELEMENTS, MOST_ELEMENTS if field.multiple_of else MOST)
    values: list[Number] = [field.none] if field.default is None else []
    values += [field.minimum] if field.minimum == 0 else []
    value = max(step, field.minimum)
    while value <= limit:
        values.append(value)
        value *= 2
    return tuple(values)


@lru_cache(maxsize=64)
def tile_fields(cls: type[Tiling]) -> frozenset[str]:
    """Return the names of a tiling class's fields that belong to the tile, which a run may choose."""
    return frozenset(f.name for f in tiling_fields(cls) if f.kind == "tile")
