"""Faults that pydantic reports, in the terms of the file's author."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from npusim.config.quantity import BASES, has_unit

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

_HINTS = MappingProxyType(
    {
        "basis": f"missing; state how the value is known: {' | '.join(BASES)}",
        "source": "missing; state the source of the value",
        "ops": (
            "missing; needed are copy, binary, scalar, select, cast, broadcast, block_reduce, exp_float32, div_float32"
        ),
    }
)
_EXPECTED = MappingProxyType(
    {
        kind: words
        for words, kinds in (
            ("a finite number", ("finite_number",)),
            ("a number", ("float_type", "float_parsing", "number_type")),
            ("a whole number", ("int_type", "int_from_float", "int_parsing", "whole_number")),
            ("true or false", ("bool_type", "bool_parsing")),
            ("text", ("string_type",)),
            ("a mapping", ("dataclass_type", "model_type", "model_attributes_type", "dict_type")),
            ("a list", ("tuple_type", "list_type")),
        )
        for kind in kinds
    }
)
_TYPES = frozenset(("bool", "int", "float", "str"))
_LIMITS = MappingProxyType(
    {
        "greater_than": ("gt", "must be greater than"),
        "greater_than_equal": ("ge", "must be at least"),
        "less_than": ("lt", "must be less than"),
        "less_than_equal": ("le", "must be at most"),
    }
)


def suggest(wrong: str, allowed: Sequence[str]) -> str:
    """Return ``. Did you mean `x`?`` for a near miss, else the list of allowed values."""
    from difflib import get_close_matches

    # A key without its unit is the most likely slip in a hardware file: `clock` for `clock_hz`.
    near = [name for name in allowed if name.startswith(f"{wrong}_") and has_unit(name)]
    near += [name for name in allowed if name.lower() == wrong.lower()]
    near += [name for name in allowed if wrong[:2] == "fp" and name == f"float{wrong[2:]}"]  # fp16 for float16
    near += get_close_matches(wrong, allowed, n=1, cutoff=0.6)
    near += [name for name in allowed if len(name) > 2 and wrong.startswith(name)]
    if not near and len(wrong) > 2:  # the name of a device without its vendor: 910B for ascend_910b2
        near = [name for name in allowed if wrong.lower() in name.lower()]
    if near:
        return f". Did you mean `{near[0]}`?"
    return f"; allowed: {', '.join(allowed)}"


def choices(wrong: str, allowed: Sequence[str]) -> str:
    """Return ``. Did you mean `x`? Allowed: a, b, c``: the nearest name first, then all names."""
    near, listed = suggest(wrong, allowed), ", ".join(allowed)
    return f"{near} Allowed: {listed}" if near.startswith(". ") else f"; allowed: {listed}"


def explain(error: ValidationError, data: object = None, model: type | None = None) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the text of each fault; ``data`` was validated as ``model``.

    In a hardware file (the default) a missing number needs basis and source; for any other
    ``model`` the text states the purpose of the missing key.
    """
    fields: Mapping[str, FieldInfo] = getattr(model, "model_fields", {})
    descriptions = None if model is None or "links" in fields else _descriptions(fields)
    for details in error.errors(include_url=False):
        # A default that is computed from a faulty field is not reported: the field itself is.
        if details["type"] == "default_factory_not_called":
            continue
        # A list that is too short only because of faulty items is not reported: the items are.
        if details["type"] == "too_short" and len(details["input"]) >= details["ctx"]["min_length"]:
            continue
        path = _path_in_data(details, data)
        for key, text in _explain_one(details, descriptions):
            yield ".".join(str(part) for part in (*path, *([key] if key else []))), text


def _descriptions(fields: Mapping[str, FieldInfo]) -> Mapping[str, str]:
    """Return the purpose of each key of a file; for the key ``schema``, its expected value."""
    descriptions = {}
    for name, field in fields.items():
        allowed = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        key = field.alias or name
        descriptions[key] = f"write {key}: {allowed[0]}" if allowed else field.description or ""
    return descriptions


def _path_in_data(details: ErrorDetails, data: object) -> tuple[str | int, ...]:
    """Return the keys that lead to a fault, without pydantic's union tags."""
    parts = details["loc"]
    absent_is_a_key = len(parts) - 1 if details["type"] == "missing" else None
    path: list[str | int] = []
    node = data
    for index, part in enumerate(parts):
        if isinstance(node, dict) and part not in node and index != absent_is_a_key:
            continue
        if path and not isinstance(node, dict | list | tuple) and data is not None:
            continue
        # Tags of unions are names of types: bool, constrained-int, tuple[int, ...].
        is_tag = isinstance(part, str) and (part in _TYPES or not part.replace(".", "_").isidentifier())
        if is_tag and (data is None or isinstance(node, list | tuple)):
            continue
        node = _child(node, part)
        path.append(part)
    return tuple(path)


def _child(node: object, part: str | int) -> object:
    if isinstance(node, dict):
        return node.get(part)
    if isinstance(node, list | tuple) and isinstance(part, int):
        return node[part]
    return None


def _explain_one(details: ErrorDetails, descriptions: Mapping[str, str] | None) -> Iterator[tuple[str, str]]:
    """Yield the key below the fault's place (often none) and the text."""
    context = details.get("ctx", {})
    match details["type"]:
        case "unknown_keys":
            for key in context["unknown"]:
                yield str(key), f"unknown key{suggest(str(key), context['allowed'])}"
        case "at_key":
            yield context["key"], context["text"]
        case "union_tag_invalid" | "union_tag_not_found" as kind:
            allowed = context.get("expected_tags", "")
            fault = f"{context['tag']!r} is not" if kind == "union_tag_invalid" else "missing;"
            yield context["discriminator"].strip("'"), f"{fault} one of: {allowed}" if allowed else "missing"
        case _:
            yield "", _text(details, context, descriptions)


def _text(details: ErrorDetails, context: dict[str, Any], descriptions: Mapping[str, str] | None) -> str:
    kind, value = details["type"], details["input"]
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {value!r}"
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return f"{value!r} {words} {context[name]}"
    match kind:
        case "missing":
            key = str(details["loc"][-1])
            if descriptions is None:
                return _missing(key)
            return f"missing; {descriptions[key]}" if descriptions.get(key) and len(details["loc"]) == 1 else "missing"
        case "bare_value":
            return f"{value!r} has neither basis nor source; write {_sourced(value)}"
        case "literal_error":
            return f"{value!r} is not one of: {context['expected']}"
        case "multiple_of":
            return _multiple(value, context["multiple_of"])
        case "too_short":
            return f"needs at least {context['min_length']} of them, got {context['actual_length']}"
        case "string_too_short":
            return "must not be empty"
        case "file_name":
            return str(context["text"])
        case "value_error":
            return str(context["error"])
    return f"{details['msg']} (got {value!r})" if not isinstance(value, dict) else details["msg"]


def _sourced(value: object) -> str:
    return f'{{value: {value}, basis: {" | ".join(BASES)}, source: "..."}}'


def _missing(key: str) -> str:
    if key in _HINTS:
        return _HINTS[key]
    return f"missing; write {key}: {_sourced('...')}" if has_unit(key) else "missing"


def _multiple(value: object, step: object) -> str:
    text = f"{value!r} must be a multiple of {step}"
    try:
        number = int(str(value))
    except ValueError:
        return text
    if not isinstance(step, int):
        return text
    lower = number // step * step
    nearest = f"{lower} or {lower + step}" if lower > 0 else str(step)
    return f"{text}; nearest: {nearest}"
