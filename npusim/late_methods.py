"""Dataclasses whose methods are compiled when they are first used.

The standard library compiles up to six methods of every dataclass when its module is imported, which is a fifth of the
CPU time of a short command; most of these classes have no instance in it.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import MISSING
from reprlib import recursive_repr
from types import MappingProxyType, MemberDescriptorType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - what type checkers know it as

    from _typeshed import DataclassInstance
else:

    def dataclass(cls=None, /, *, repr=True, eq=True, frozen=False, slots=False, kw_only=False, unsafe_hash=False):
        """Do what `dataclasses.dataclass` does, as a decorator or as a call with a class; only the parts that npusim
        uses.

        ``__init__``, ``__repr__``, ``__eq__`` and ``__hash__`` are compiled separately on first use; they are then the
        methods that the standard library compiles. A field without a default after one with a default is an error at
        that time.
        """

        def decorated(cls):
            storage = {"slots": slots, "kw_only": kw_only}
            return _with_methods(cls, storage, repr=repr, eq=eq, frozen=frozen, unsafe_hash=unsafe_hash)

        return decorated if cls is None else decorated(cls)


class _Late:
    """Placeholder of a method in a class's namespace: on first use the method is compiled and replaces this object."""

    __slots__ = ("build", "name", "of")

    def __init__(self, of: type, name: str, build: Callable[[type], Any]) -> None:
        self.of, self.name, self.build = of, name, build

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        method = self.build(self.of)
        method.__qualname__, method.__module__ = f"{self.of.__qualname__}.{self.name}", self.of.__module__
        if self.of.__dict__.get(self.name) is self:
            setattr(self.of, self.name, method)
        return method.__get__(instance, owner)


def _with_methods(cls: type, storage: Mapping[str, bool], *, frozen: bool, **wanted: bool) -> type:
    """Return the dataclass of a class: fields by the standard library, methods late."""
    # The standard library compiles the methods of a frozen class immediately; only derived classes need them.
    derives = frozen and any(hasattr(base, "__dataclass_fields__") for base in cls.__mro__[1:])
    own = dict(cls.__dict__)
    has_hash = own.get("__hash__") is not None or ("__hash__" in own and "__eq__" not in own)
    done: type = dataclasses.dataclass(init=False, repr=False, eq=False, frozen=derives, **storage)(cls)
    parameters = done.__dict__["__dataclass_params__"]
    for name, value in {"init": True, "frozen": frozen, **wanted}.items():
        setattr(parameters, name, value)
    for name, build in _BUILDERS.items():
        if wanted.get(name, True) and f"__{name}__" not in own:
            setattr(done, f"__{name}__", _Late(done, f"__{name}__", build))
    if wanted["unsafe_hash"] or (wanted["eq"] and not has_hash):
        is_hashed = frozen or wanted["unsafe_hash"]
        done.__hash__ = _Late(done, "__hash__", _hash) if is_hashed else None  # type: ignore[assignment]
    if frozen and not derives:
        for refuses in _frozen(done, frozenset(field.name for field in _fields(done))):
            setattr(done, refuses.__name__, refuses)
    if frozen and storage["slots"]:
        for name, method in (("__getstate__", _state), ("__setstate__", _set_state)):
            if name not in own:
                setattr(done, name, method)
    return done


def _frozen(cls: type, names: frozenset[str]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return ``__setattr__`` and ``__delattr__`` of a frozen class, which refuse its fields."""

    def __setattr__(self: object, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)  # type: ignore[arg-type]

    def __delattr__(self: object, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)  # type: ignore[arg-type]

    return __setattr__, __delattr__


def _state(self: object) -> list[Any]:
    return [getattr(self, field.name) for field in _fields(type(self))]


def _set_state(self: object, state: Sequence[Any]) -> None:
    for field, value in zip(_fields(type(self)), state, strict=True):
        object.__setattr__(self, field.name, value)


def _fields(cls: type) -> tuple[dataclasses.Field[object], ...]:
    return dataclasses.fields(cast("type[DataclassInstance]", cls))


# ---------------------------------------------------------------- methods, as in the standard library


def _compiled(cls: type, name: str, parameters: str, lines: Sequence[str], names: Mapping[str, Any]) -> Any:
    """Return a function of the class's module with these lines, which may use these names too."""
    body = "".join(f"    {line}\n" for line in lines or ("pass",))
    text = f"def _made({', '.join(names)}):\n  def {name}({parameters}):\n{body}  return {name}"
    result: dict[str, Any] = {}
    module = sys.modules.get(cls.__module__)
    exec(text, {} if module is None else module.__dict__, result)
    return result["_made"](**names)


def _init(cls: type) -> Any:
    names: dict[str, Any] = {"__dataclass_set__": object.__setattr__, "__dataclass_factory__": _FACTORY}
    parameters, by_name, lines = ["self"], list[str](), list[str]()
    annotations: dict[str, Any] = {}
    for field in _fields(cls):
        name, value = field.name, field.name
        has_factory = field.default_factory is not MISSING
        if has_factory:
            names[f"__dataclass_make_{name}"] = field.default_factory
            value = (
                f"__dataclass_make_{name}()"
                if not field.init
                else f"__dataclass_make_{name}() if {name} is __dataclass_factory__ else {name}"
            )
        if field.default is not MISSING:
            names[f"__dataclass_default_{name}"] = field.default
            value = name if field.init else f"__dataclass_default_{name}"
        if field.init:
            default = (
                " = __dataclass_factory__"
                if has_factory
                else f" = __dataclass_default_{name}"
                if field.default is not MISSING
                else ""
            )
            (by_name if field.kw_only else parameters).append(f"{name}{default}")
            annotations[name] = field.type
        elif not has_factory and (field.default is MISSING or "__slots__" not in cls.__dict__):
            continue  # the slot has no value yet, or the class's value
        slot = getattr(cls, name, None)
        if not cls.__dict__["__dataclass_params__"].frozen:
            lines.append(f"self.{name} = {value}")
        elif type(slot) is MemberDescriptorType:  # setting a slot directly is faster than by its name
            names[f"__dataclass_set_{name}"] = slot.__set__
            lines.append(f"__dataclass_set_{name}(self, {value})")
        else:
            lines.append(f"__dataclass_set__(self, {name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    if by_name:
        parameters += ["*", *by_name]
    method = _compiled(cls, "__init__", ", ".join(parameters), lines, names)
    method.__annotations__ = annotations | {"return": None}
    return method


class _Factory:
    """The default of a parameter whose field has a factory."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


def _values(of: str, names: Sequence[str]) -> str:
    return f"({''.join(f'{of}.{name}, ' for name in names)})"


def _repr(cls: type) -> Any:
    fields = ", ".join(f"{field.name}={{self.{field.name}!r}}" for field in _fields(cls) if field.repr)
    shown = f'return f"{{self.__class__.__qualname__}}({fields})"'
    return recursive_repr()(_compiled(cls, "__repr__", "self", [shown], {}))


def _eq(cls: type) -> Any:
    names = [field.name for field in _fields(cls) if field.compare]
    lines = [
        "if other.__class__ is self.__class__:",
        f"  return {_values('self', names)} == {_values('other', names)}",
        "return NotImplemented",
    ]
    return _compiled(cls, "__eq__", "self, other", lines, {})


def _hash(cls: type) -> Any:
    names = [f.name for f in _fields(cls) if (f.compare if f.hash is None else f.hash)]
    return _compiled(cls, "__hash__", "self", [f"return hash({_values('self', names)})"], {})


_BUILDERS = MappingProxyType({"init": _init, "repr": _repr, "eq": _eq})
