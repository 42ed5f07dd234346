"""What pydantic found wrong, in the words of the person who wrote the value."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, get_args, get_origin

from npusim.config.quantity import BASES, has_unit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pydantic import ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

_HINTS = MappingProxyType(
    {
        "basis": f"missing; say how the value is known: {' | '.join(BASES)}",
        "source": "missing; say where the value comes from",
    }
)
_EXPECTED = MappingProxyType(
    {
        "finite_number": "a finite number",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "int_parsing": "a whole number",
        "float_type": "a number",
        "float_parsing": "a number",
        "number_type": "a number",
        "whole_number": "a whole number",
        "bool_type": "true or false",
        "bool_parsing": "true or false",
        "string_type": "text",
        "dataclass_type": "a mapping",
        "model_type": "a mapping",
        "model_attributes_type": "a mapping",
        "dict_type": "a mapping",
        "tuple_type": "a list",
        "list_type": "a list",
    }
)
_LIMITS = MappingProxyType(
    {
        "greater_than": ("gt", "must be greater than"),
        "greater_than_equal": ("ge", "must be at least"),
        "less_than": ("lt", "must be less than"),
        "less_than_equal": ("le", "must be at most"),
    }
)


def suggest(wrong: str, allowed: Sequence[str]) -> str:
    """Return ``. Did you mean `x`?`` for a near miss, else the list of what is allowed."""
    from difflib import get_close_matches

    # A key without its unit is the likeliest slip in a hardware file: `clock` for `clock_hz`.
    near = [name for name in allowed if name.startswith(f"{wrong}_") and has_unit(name)]
    near += get_close_matches(wrong, allowed, n=1, cutoff=0.6)
    near += [name for name in allowed if name.lower() == wrong.lower()]
    if near:
        return f". Did you mean `{near[0]}`?"
    return f"; allowed: {', '.join(allowed)}"


def explain(error: ValidationError, data: object = None, model: type | None = None) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the text of each fault; ``data`` is what was validated, as ``model``.

    Of a hardware file (the default) a missing number is said to need basis and source, of any other
    ``model`` what its key is for.
    """
    fields: Mapping[str, FieldInfo] = getattr(model, "model_fields", {})
    wanted = None if model is None or "links" in fields else _descriptions(fields)
    for details in error.errors(include_url=False):
        # A default that is computed from a faulty field: the field itself is reported.
        if details["type"] == "default_factory_not_called":
            continue
        # Faulty items are not counted: they themselves are reported.
        if details["type"] == "too_short" and len(details["input"]) >= details["ctx"]["min_length"]:
            continue
        path = _path_in_data(details, data)
        for key, text in _explain_one(details, wanted):
            yield ".".join(str(part) for part in (*path, *([key] if key else []))), text


def _descriptions(fields: Mapping[str, FieldInfo]) -> Mapping[str, str]:
    """Return what each key of a file is for; of its schema, what to write."""
    found = {}
    for name, field in fields.items():
        allowed = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        key = field.alias or name
        found[key] = f"write {key}: {allowed[0]}" if allowed else field.description or ""
    return found


def _path_in_data(details: ErrorDetails, data: object) -> tuple[str | int, ...]:
    """Return the keys that lead to a fault, without the union tags that pydantic adds to them."""
    parts = details["loc"]
    absent_is_a_key = len(parts) - 1 if details["type"] == "missing" else None
    path: list[str | int] = []
    node = data
    for index, part in enumerate(parts):
        if isinstance(node, dict) and part not in node and index != absent_is_a_key:
            continue
        if path and not isinstance(node, dict | list | tuple) and data is not None:
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


def _explain_one(details: ErrorDetails, wanted: Mapping[str, str] | None) -> Iterator[tuple[str, str]]:
    """Yield the key below the fault's place (often none) and the text."""
    kind, value = details["type"], details["input"]
    context = details.get("ctx", {})
    if kind == "unknown_keys":
        for key in context["unknown"]:
            yield str(key), f"unknown key{suggest(str(key), context['allowed'])}"
    elif kind == "at_key":
        yield context["key"], context["text"]
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = context["discriminator"].strip("'")
        allowed = context.get("expected_tags", "")
        given = f"{context['tag']!r} is not" if kind == "union_tag_invalid" else "missing;"
        yield tag, f"{given} one of: {allowed}" if allowed else "missing"
    else:
        yield "", _text(kind, value, context, details, wanted)


def _text(
    kind: str, value: object, context: dict[str, object], details: ErrorDetails, wanted: Mapping[str, str] | None
) -> str:
    if kind == "missing":
        key = str(details["loc"][-1])
        if wanted is None:
            return _missing(key)
        return f"missing; {wanted[key]}" if wanted.get(key) and len(details["loc"]) == 1 else "missing"
    if kind == "bare_value":
        return (
            f'{value!r} has no basis and no source; write {{value: {value}, basis: {" | ".join(BASES)}, source: "..."}}'
        )
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {value!r}"
    if kind == "literal_error":
        return f"{value!r} is not one of: {context['expected']}"
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return f"{value!r} {words} {context[name]}"
    if kind == "multiple_of":
        return _multiple(value, context["multiple_of"])
    if kind == "too_short":
        return f"needs at least {context['min_length']} of them, not {context['actual_length']}"
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "file_name":
        return str(context["text"])
    if kind == "value_error":
        return str(context["error"])
    return f"{details['msg']} (got {value!r})" if not isinstance(value, dict) else details["msg"]


def _missing(key: str) -> str:
    if key in _HINTS:
        return _HINTS[key]
    if has_unit(key):
        return f'missing; write {key}: {{value: ..., basis: {" | ".join(BASES)}, source: "..."}}'
    return "missing"


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
