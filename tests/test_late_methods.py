"""`npusim.late_methods.dataclass` does what the standard library's does, and compiles methods when they are used."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import FrozenInstanceError, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from npusim import late_methods

if TYPE_CHECKING:
    from collections.abc import Callable

BOTH: tuple[Any, ...] = (dataclasses.dataclass, late_methods.dataclass)


def _classes(dataclass: Any) -> dict[str, Any]:
    """Return classes of each form that npusim has, written with one of the two decorators."""

    @dataclass
    class Open:
        """A class whose fields may be set."""

        a: int
        b: list[int] = field(default_factory=list)
        kind: ClassVar[str] = "open"

    @dataclass(frozen=True, slots=True)
    class Frozen:
        """A frozen class with slots."""

        a: int
        b: str = "x"
        c: tuple[int, ...] = field(default=(), repr=False, compare=False)
        d: list[int] = field(default_factory=list, hash=False)

    @dataclass(frozen=True, slots=True)
    class Derived(Frozen):
        """A class that derives from it, and has the order of fields of both."""

        b: str = "y"
        e: float = 0.5

    @dataclass(frozen=True, kw_only=True)
    class Named:
        """A class whose fields are named, with one that follows from another."""

        a: int
        twice: int = field(init=False)
        fixed: int = field(default=7, init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "twice", 2 * self.a)

    @dataclass(slots=True, unsafe_hash=True)
    class Record:
        """A class that is hashed although its fields may be set."""

        a: int
        _set: int = 3

    @dataclass(frozen=True, eq=False, repr=False)
    class Same:
        """A class whose objects are equal to themselves alone."""

        a: int

    @dataclass(frozen=True)
    class Shadowed:
        """A class with fields that have the names of the compiled code."""

        _set: int
        self_: int = 2
        cls: int = 4
        a: int = 5

    @dataclass(frozen=True)
    class Own:
        """A class with methods of its own."""

        a: int

        def __repr__(self) -> str:
            return f"<{self.a}>"

        def __hash__(self) -> int:
            return -2

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own) and self.a % 10 == other.a % 10

    return {c.__name__: c for c in (Open, Frozen, Derived, Named, Record, Same, Shadowed, Own)}


STANDARD, LATE = map(_classes, BOTH)
#: Of each class, calls that are right, and calls that are wrong.
CALLS: dict[str, tuple[list[Any], list[Any]]] = {
    "Open": ([((1,), {}), ((1, [2]), {}), ((), {"a": 3, "b": [4]})], [((), {}), ((1, [2], 3), {}), ((1,), {"c": 2})]),
    "Frozen": ([((1,), {}), ((1, "z", (3,), [4]), {}), ((), {"a": 1, "d": [2]})], [((), {}), ((1,), {"a": 1})]),
    "Derived": ([((1,), {}), ((1, "z", (), [], 2.5), {})], [((), {"e": 1.0})]),
    "Named": ([((), {"a": 4})], [((4,), {}), ((), {"a": 1, "twice": 2})]),
    "Record": ([((1,), {}), ((1, 2), {})], [((), {})]),
    "Same": ([((1,), {})], [((), {})]),
    "Shadowed": ([((1,), {}), ((1, 3), {"cls": 9})], [((), {})]),
    "Own": ([((1,), {}), ((11,), {})], [((), {})]),
}


def _outcome(call: Callable[[], object]) -> object:
    """Return what a call returns, or its error without the name of the class's place."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - compared with that of the standard library
        return type(error), str(error).replace("_classes.<locals>.", "")


def _values(one: Any) -> dict[str, Any]:
    return {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}


def _changed(one: Any) -> dict[str, Any]:
    return _values(dataclasses.replace(one, a=9))


@pytest.mark.parametrize("name", STANDARD)
def test_calls_give_the_same_objects_and_errors(name: str) -> None:
    right, wrong = CALLS[name]
    for args, named in right:
        objects = [kind[name](*args, **named) for kind in (STANDARD, LATE)]
        assert _values(objects[0]) == _values(objects[1])
        if name != "Same":
            assert len({repr(one) for one in objects}) == 1
    for args, named in wrong:
        first, second = (_outcome(partial(kind[name], *args, **named)) for kind in (STANDARD, LATE))
        assert first == second


@pytest.mark.parametrize("name", STANDARD)
def test_equality_hashes_and_copies_are_the_same(name: str) -> None:
    calls = CALLS[name][0]
    shown = []
    for kind in (STANDARD, LATE):
        objects = [kind[name](*args, **named) for args, named in calls for _ in range(2)]
        equal = [[one == other for one in objects] for other in objects]
        hashes = [_outcome(partial(hash, one)) for one in objects]
        alike = [[a == b for a in hashes] for b in hashes]
        copies = [_values(copy.copy(one)) for one in objects], [_values(copy.deepcopy(one)) for one in objects]
        replaced = [_outcome(partial(_changed, one)) for one in objects]
        texts = [h for h in hashes if not isinstance(h, int)]
        shown.append((equal, alike, copies, replaced, texts, objects[0] == 1, objects[0] != objects[0]))
    assert shown[0] == shown[1]


@pytest.mark.parametrize("name", STANDARD)
def test_a_class_says_the_same_of_itself(name: str) -> None:
    standard, late = STANDARD[name], LATE[name]
    assert str(inspect.signature(standard)) == str(inspect.signature(late))
    assert repr(standard.__dataclass_params__) == repr(late.__dataclass_params__)
    assert [f.name for f in dataclasses.fields(standard)] == [f.name for f in dataclasses.fields(late)]
    assert standard.__match_args__ == late.__match_args__
    assert standard.__dict__.get("__slots__") == late.__dict__.get("__slots__")
    assert (standard.__hash__ is None) == (late.__hash__ is None)
    assert standard.__init__.__qualname__ == late.__init__.__qualname__
    assert late.__init__.__annotations__ == standard.__init__.__annotations__


@pytest.mark.parametrize("name", [n for n, c in STANDARD.items() if c.__dataclass_params__.frozen])
def test_frozen_objects_refuse_changes_alike(name: str) -> None:
    args, named = CALLS[name][0][0]
    shown = []
    for kind in (STANDARD, LATE):
        one = kind[name](*args, **named)
        changes = [partial(setattr, one, "a", 2), partial(delattr, one, "a")]
        shown.append([_outcome(change) for change in changes])
        with pytest.raises((FrozenInstanceError, TypeError)):
            one.unknown = 1
    assert shown[0] == shown[1]


def test_methods_are_compiled_once_on_first_use() -> None:
    kind = _classes(late_methods.dataclass)["Frozen"]
    late = {"__init__", "__repr__", "__eq__", "__hash__"}
    assert all(type(kind.__dict__[n]) is late_methods._Late for n in late)
    one, other = kind(1), kind(1)
    assert {n for n in late if type(kind.__dict__[n]) is late_methods._Late} == {"__repr__", "__eq__", "__hash__"}
    assert one == other
    assert repr(one).endswith("Frozen(a=1, b='x', d=[])")
    assert hash(one) == hash(other)
    assert all(inspect.isfunction(kind.__dict__[n]) for n in late)


def test_the_standard_library_derives_from_such_a_class() -> None:
    base = LATE["Frozen"]

    @dataclasses.dataclass(frozen=True)
    class User(base):  # type: ignore[misc, valid-type]
        more: int = 1

    assert _values(User(1, more=5)) == {"a": 1, "b": "x", "c": (), "d": [], "more": 5}
    with pytest.raises(TypeError, match="cannot inherit non-frozen"):
        dataclasses.dataclass(type("Loose", (base,), {"__annotations__": {"e": "int"}}))


@late_methods.dataclass(frozen=True, slots=True)
class Stored:
    """A class that a file of pickle may name."""

    a: int
    b: tuple[int, ...] = ()


def test_objects_go_through_pickle() -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(Stored(1, (2,)), protocol)) == Stored(1, (2,))


def test_patterns_match_by_position() -> None:
    match Stored(1, (2,)):
        case Stored(a, b):
            assert (a, b) == (1, (2,))
