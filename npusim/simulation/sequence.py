"""Recorded launches one after another: later launches read the values that earlier launches store.

Each launch is timed separately.  Values pass from one launch to the next in storages, through the launches' views; the
views of writer and reader may have any shapes and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim.errors import SpecError
from npusim.formats import cast, get_format
from npusim.kernels.triton.calls import Argument, Call, call_of
from npusim.kernels.triton.rolled_rows import with_scratch_kept
from npusim.kernels.triton.ttir_text import read as read_ttir
from npusim.program.numerics.executor import POISON, execute
from npusim.program.numerics.input_tensors import kernel_source
from npusim.simulation.simulate import run_request

if TYPE_CHECKING:
    from npusim.program.ir.tile_program import TileProgram
    from npusim.simulation.request import Request
    from npusim.simulation.run_result import RunData


class SequenceRun(NamedTuple):
    """The run of one launch of a kernel and, for each parameter that it reads, the earlier launch that wrote the
    values.
    """

    kernel: str
    result: RunData
    reads: dict[str, int]


class Storages:
    """Bytes of storages after the launches, and the last launch that wrote to each."""

    def __init__(self, calls: Sequence[Call], seed: int) -> None:
        self.writers: dict[int, int] = {}
        self._seed, self._sizes, self._storages = seed, dict[int, int](), dict[int, Any]()
        self._written: dict[int, Any] = {}  # by storage: a bit is 1 if a launch wrote the byte
        for x in (x for call in calls for x in call.tensors.values() if not x.is_integer):
            last = x.offset + sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True))
            size = (last + 1) * get_format(x.fmt).dtype.itemsize if all(x.shape) else 0
            self._sizes[x.storage] = max(size, self._sizes.get(x.storage, 0))

    def view(self, x: Argument) -> Any:
        """Return the values that a launch reads; elements that no earlier launch wrote have their recorded values, or
        are drawn from a normal distribution.
        """
        dtype = get_format(x.fmt).dtype
        if x.storage not in self._storages:
            count = -(-self._sizes[x.storage] // dtype.itemsize)
            drawn = np.random.default_rng([self._seed, x.storage]).standard_normal(count, np.float32)
            self._storages[x.storage] = np.ascontiguousarray(cast(drawn, x.fmt)).view(np.uint8)
            self._written[x.storage] = np.zeros_like(self._storages[x.storage])
        seen = self._part(self._storages, x, dtype)
        if x.data is not None:
            np.copyto(seen, x.data, where=self._part(self._written, x, f"u{dtype.itemsize}") == 0)
        return seen

    def _part(self, of: dict[int, Any], x: Argument, dtype: Any) -> Any:
        """Return a view of bytes of a storage."""
        size = np.dtype(dtype).itemsize
        elements = of[x.storage][: self._sizes[x.storage] // size * size].view(dtype)
        return np.lib.stride_tricks.as_strided(elements[x.offset :], x.shape, [s * size for s in x.strides])

    def is_written(self, x: Argument) -> Any:
        """Return which elements of a view a launch has written."""
        self.view(x)
        return self._part(self._written, x, f"u{get_format(x.fmt).dtype.itemsize}") != 0

    def store(self, number: int, call: Call, program: TileProgram, given: dict[str, Any]) -> None:
        """Execute all blocks of a launch, and write its results to its storages."""
        inputs = [t for t in program.tensors.values() if t.role == "input"]
        done = execute(program, kernel_source(inputs, 0, given))
        for t in program.tensors.values():
            if t.role != "output" or t.view is None:
                continue
            x = call.tensors[t.view.parameter]
            heads = [done.tensors.head(t, b, h) for b in range(t.batch) for h in range(t.heads)]
            values = np.stack(heads).reshape(-1)
            places = t.view.array(np.arange(prod(x.shape)).reshape(x.shape)).reshape(-1)
            is_stored = np.any(values.view(np.uint8).reshape(values.size, -1) != POISON, axis=1)
            seen, at = self.view(x), np.unravel_index(places[is_stored], x.shape)
            seen[at] = values[is_stored]
            bits = f"u{seen.dtype.itemsize}"
            self._part(self._written, x, bits)[at] = np.iinfo(bits).max
            self.writers[x.storage] = number


def _scratch(call: Call) -> set[str]:
    """Return the parameters whose stored values the same launch loads again; these are not results of its run."""
    text = call.configurations[0].ttir
    return set(with_scratch_kept(read_ttir(text))[1]) if text else set()


def _refuse_scratch(calls: Sequence[Call]) -> None:
    """Raise `SpecError` for a launch that receives such a tensor of an earlier launch as several arguments."""
    # by storage: the launch that uses it as scratch memory, and the launch's parameter
    left = dict[int, tuple[int, str]]()
    for number, call in enumerate(calls):
        scratch = _scratch(call)
        for n, x in call.tensors.items():
            if x.storage in left and n not in scratch:
                at, name = left[x.storage]
                why = "the launch stores to it and immediately loads it again, so that the run has no such result"
                raise SpecError(f"launch {at} ({calls[at].name}), {name}, which is {n} of {call.name}: {why}")
        for n in scratch & call.tensors.keys():
            left.setdefault(call.tensors[n].storage, (number, n))


def in_sequence(schedules: Sequence[str], request: Request) -> tuple[SequenceRun, ...]:
    """Run recorded launches one after another with the other options of a request.

    Raises `SpecError` if a schedule is not a recorded call, or if tensors are passed, because the storages have the
    values.
    """
    if request.tensors is not None:
        raise SpecError(
            "tensors: launches in sequence use the recorded values of their tensors; record them (--floats)"
        )
    calls, done = [call_of(name) for name in schedules], list[SequenceRun]()
    _refuse_scratch(calls)
    memory = Storages(calls, request.seed or 0)
    for number, (name, call) in enumerate(zip(schedules, calls, strict=True)):
        floats = {n: x for n, x in call.tensors.items() if not x.is_integer}
        given = {n: memory.view(x).copy() for n, x in floats.items()} if request.numerics else {}
        seed = None if given else request.seed
        result = run_request(replace(request, schedule=name, tensors=given or None, seed=seed))
        read = {t.view.parameter for t in result.program.tensors.values() if t.role == "input" and t.view is not None}
        reads = {n: memory.writers[x.storage] for n, x in floats.items() if n in read and x.storage in memory.writers}
        notes = tuple(f"{n}: the values that launch {at} ({calls[at].name}) stored" for n, at in reads.items())
        done.append(SequenceRun(call.name, replace(result, notes=(*result.notes, *notes)), reads))
        later = {x.storage for other in calls[number + 1 :] for x in other.tensors.values()}
        stored = [t.view for t in result.program.tensors.values() if t.role == "output" and t.view is not None]
        written = {view.parameter for view in stored}
        if later.isdisjoint(call.tensors[n].storage for n in written):
            continue
        if request.numerics:
            memory.store(number, call, result.program, given)
        memory.writers |= {call.tensors[n].storage: number for n in written}
    return tuple(done)
