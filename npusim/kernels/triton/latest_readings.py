"""The latest readings of launches: a run asks for one before code is compiled, for its program, and in float64."""

from __future__ import annotations

from collections import OrderedDict
from copy import copy
from dataclasses import fields, replace
from functools import cache
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from npusim.kernels.triton.kernel_draft import OF_CODE, Choices
from npusim.kernels.triton.launch_ways import launched
from npusim.kernels.triton.tensor_axes import IntegerTensor
from npusim.kernels.triton.ttir_text import read

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.kernels.triton.launch_phases import Check, LaunchGrid
    from npusim.kernels.triton.reader import Reader

#: Number of launches whose readings are stored, and the largest number of programs of such a launch: arrays have an
#: entry for each program.
MOST_LAUNCHES, MOST_PROGRAMS = 16, 2**14
#: Launches whose readings are known to need a check.
MOST_CHECKED = 2**10


class _Reading(NamedTuple):
    """Blocks of a launch, the choices that they were read with, and those of the code that the reading asked for."""

    choices: Choices
    asked: frozenset[str]
    blocks: list[LaunchGrid]


_Read = TypeVar("_Read", "LaunchGrid", "Reader")


@cache
def _latest() -> OrderedDict[bytes, list[_Reading]]:
    return OrderedDict()


@cache
def _checked() -> OrderedDict[bytes, None]:
    return OrderedDict()


def is_checked(text: str, grid: tuple[int, ...]) -> bool:
    """Return whether one of the latest readings of a kernel in a grid was checked, so that further readings have to be
    checked too.
    """
    return _digest_of(text, grid) in _checked()


def _digest_of(text: str, grid: tuple[int, ...]) -> bytes:
    return sha256(repr((text, grid)).encode()).digest()


def blocks_of(
    text: str, arguments: Mapping[str, Any], grid: tuple[int, ...], choices: Choices, check: Check | None = None
) -> list[LaunchGrid]:
    """Return the blocks of a launch of a kernel's TTIR, as `npusim.kernels.triton.launch_ways.launched`.

    A reading that asked for no choice of compiled code in which ``choices`` differ is not repeated, unless its blocks
    are checked.
    """
    if check is not None:
        _checked()[_digest_of(text, grid)] = None
        while len(_checked()) > MOST_CHECKED:
            _checked().popitem(last=False)
    if prod(grid) > MOST_PROGRAMS:
        return launched(read(text), arguments, grid, choices, check)
    latest, key = _latest(), _key(text, arguments, grid, choices)
    known = latest.setdefault(key, [])
    latest.move_to_end(key)
    for each in known if check is None else ():
        if all(getattr(each.choices, n) == getattr(choices, n) for n in each.asked):
            return _copied(each.blocks)
    own = replace(choices, asked_of_code=set())
    blocks = launched(read(text), arguments, grid, own, check)
    known.insert(0, _Reading(own, frozenset(own.asked_of_code), _copied(blocks)))
    while len(latest) > MOST_LAUNCHES:
        latest.popitem(last=False)
    return blocks


def _key(text: str, arguments: Mapping[str, Any], grid: tuple[int, ...], choices: Choices) -> bytes:
    """Return a digest of everything that a reading depends on, except the choices that compiled code decides."""
    given = [(n, repr(x), _digest(x)) for n, x in arguments.items()]
    chosen = [getattr(choices, f.name) for f in fields(choices) if f.compare and f.name not in OF_CODE]
    # the elements of sets have no order
    listed = [sorted(x) if isinstance(x, frozenset) else x for x in chosen]
    return sha256(repr((text, given, grid, listed)).encode()).digest()


def _digest(x: object) -> bytes:
    """Return a digest of the integers of a tensor, which a tensor's text lacks."""
    data = x.data if isinstance(x, IntegerTensor) else None
    return b"" if data is None else sha256(data.tobytes()).digest()


def _copied(blocks: list[LaunchGrid]) -> list[LaunchGrid]:
    """Return blocks to which notes, and tensors that are looked at later, can be added apart from others."""
    result = [_with_own_lists(one) for one in blocks]
    readers = {id(one.reader): _with_own_lists(one.reader) for one in blocks}
    for one, of in zip(result, blocks, strict=True):
        one.reader = readers[id(of.reader)]
    return result


def _with_own_lists(of: _Read) -> _Read:
    """Return a copy whose lists, dictionaries and sets are separate ones."""
    result = copy(of)
    for name, value in vars(of).items():
        if isinstance(value, list | dict | set):
            setattr(result, name, copy(value))
    return result
