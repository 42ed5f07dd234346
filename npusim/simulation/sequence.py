"""Recorded launches one after another: what one leaves in a storage is what later ones read of it.

A launch is timed by itself.  Values go from one to the next in storages, as the launches have views of these: whatever
the shapes and strides in which one writes and the next one reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npusim.errors import SpecError
from npusim.formats import cast, get_format
from npusim.numerics.executor import POISON, execute
from npusim.numerics.inputs import kernel_source
from npusim.simulation.simulate import run_request
from npusim.ttir.calls import Argument, Call, call_of

if TYPE_CHECKING:
    from npusim.simulation.request import Request
    from npusim.simulation.result import RunData


class SequenceRun(NamedTuple):
    """The run of one launch of a kernel, and of which launch before it each parameter that it reads has values."""

    kernel: str
    result: RunData
    reads: dict[str, int]


class _Memory:
    """Bytes of storages, as launches leave them, and the launch that wrote to each last."""

    def __init__(self, calls: Sequence[Call], seed: int) -> None:
        self.writers: dict[int, int] = {}
        self._seed, self._sizes, self._storages = seed, dict[int, int](), dict[int, Any]()
        for x in (x for call in calls for x in call.tensors.values() if not x.is_integer):
            last = x.offset + sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True))
            size = (last + 1) * get_format(x.fmt).dtype.itemsize if all(x.shape) else 0
            self._sizes[x.storage] = max(size, self._sizes.get(x.storage, 0))

    def view(self, x: Argument) -> Any:
        """Return what a launch sees of a storage; of one that nobody has written, recorded or normal values."""
        dtype, is_new = get_format(x.fmt).dtype, x.storage not in self._storages
        if is_new:
            count = -(-self._sizes[x.storage] // dtype.itemsize)
            drawn = np.random.default_rng([self._seed, x.storage]).standard_normal(count, np.float32)
            self._storages[x.storage] = np.ascontiguousarray(cast(drawn, x.fmt)).view(np.uint8)
        elements = self._storages[x.storage][: self._sizes[x.storage] // dtype.itemsize * dtype.itemsize].view(dtype)
        strides = [s * dtype.itemsize for s in x.strides]
        seen = np.lib.stride_tricks.as_strided(elements[x.offset :], x.shape, strides)
        if x.data is not None and x.storage not in self.writers:
            seen[...] = x.data
        return seen

    def store(self, number: int, call: Call, result: RunData, given: dict[str, Any]) -> None:
        """Execute a launch whole, and write what it stores to its storages."""
        program = result.program
        inputs = [t for t in program.tensors.values() if t.role == "input"]
        done = execute(program, kernel_source(inputs, 0, given))
        for t in program.tensors.values():
            if t.role != "output" or t.view is None:
                continue
            x = call.tensors[t.view.parameter]
            heads = [done.tensors.head(t, b, h) for b in range(t.batch) for h in range(t.heads)]
            made = np.stack(heads).reshape(-1)
            places = t.view.array(np.arange(prod(x.shape)).reshape(x.shape)).reshape(-1)
            is_stored = np.any(made.view(np.uint8).reshape(made.size, -1) != POISON, axis=1)
            seen = self.view(x)
            seen[np.unravel_index(places[is_stored], x.shape)] = made[is_stored]
            self.writers[x.storage] = number


def in_sequence(schedules: Sequence[str], request: Request) -> tuple[SequenceRun, ...]:
    """Run recorded launches one after another on what a request has besides.

    Raises `SpecError` where a schedule is no recorded call, or tensors are given: values are those of the storages.
    """
    if request.tensors is not None:
        raise SpecError("tensors: launches in sequence have the values of their storages; record them (--floats)")
    calls, done = [call_of(name) for name in schedules], list[SequenceRun]()
    memory = _Memory(calls, request.seed or 0)
    for number, (name, call) in enumerate(zip(schedules, calls, strict=True)):
        floats = {n: x for n, x in call.tensors.items() if not x.is_integer}
        given = {n: memory.view(x).copy() for n, x in floats.items()} if request.numerics else {}
        seed = None if given else request.seed
        result = run_request(replace(request, schedule=name, tensors=given or None, seed=seed))
        read = {t.view.parameter for t in result.program.tensors.values() if t.role == "input" and t.view is not None}
        reads = {n: memory.writers[x.storage] for n, x in floats.items() if n in read and x.storage in memory.writers}
        notes = tuple(f"{n}: as launch {at} ({calls[at].name}) leaves it" for n, at in reads.items())
        done.append(SequenceRun(call.name, replace(result, notes=(*result.notes, *notes)), reads))
        later = {x.storage for other in calls[number + 1 :] for x in other.tensors.values()}
        stored = [t.view for t in result.program.tensors.values() if t.role == "output" and t.view is not None]
        written = {view.parameter for view in stored}
        if later.isdisjoint(call.tensors[n].storage for n in written):
            continue
        if request.numerics:
            memory.store(number, call, result, given)
        memory.writers |= {call.tensors[n].storage: number for n in written}
    return tuple(done)
