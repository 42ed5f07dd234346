"""Work that another process does concurrently."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Value = TypeVar("Value")


def is_single() -> bool:
    """Return whether this process may fork: on Linux, with a single thread."""
    return sys.platform == "linux" and threading.active_count() == 1


@contextmanager
def done_apart(function: Callable[[], Value]) -> Iterator[Callable[[], Value] | None]:
    """Return a function that returns the result: a forked process computes it concurrently, or, if the fork fails, this
    process does.

    None if this process may not fork, or if no core is free.
    """
    if not is_single() or (os.cpu_count() or 1) == 1:
        yield None
        return
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        os.close(source)
        _work(function, sink)
    os.close(sink)

    @cache
    def result() -> Value:
        with open(source, "rb", closefd=False) as pipe:
            answer = pipe.read()
        try:
            value: Value = pickle.loads(answer)
        # the process was killed, or it raised an error, which this computation raises again
        except (EOFError, pickle.UnpicklingError):
            value = function()
        return value

    try:
        yield result
    finally:
        os.close(source)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _work(function: Callable[[], object], sink: int) -> NoReturn:
    """Write the function's value and end, without output and without the parent's exit handlers."""
    with suppress(BaseException):
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        answer = pickle.dumps(function())
        with open(sink, "wb") as pipe:
            pipe.write(answer)
    os._exit(0)
