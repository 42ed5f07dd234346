"""A process that answers questions within limits, as its parent sees it; if the process ends, that is an answer too."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

from npusim.errors import NpusimError
from npusim.studies.evaluate.child import FORMS, has_form

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from types import TracebackType

    from npusim.studies.evaluate.child import Question
    from npusim.studies.evaluate.limits import Limits

#: Size in bytes of the longest answer, and of one read operation.
LONGEST, PIECE = 1 << 24, 1 << 16
#: Variables of the environment that a candidate's process has.
PASSED = ("PATH", "HOME", "LANG", "XDG_CACHE_HOME", "NPUSIM_CACHE", "NUMBA_CACHE_DIR", "CUDA_HOME", "LD_LIBRARY_PATH")


class Nursery:
    """The process from which others are forked; it is restarted if it has ended."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._warm: set[tuple[str, str]] = set()

    def warm(self, devices: Iterable[str], works: Collection[str]) -> None:
        """Load the code that questions about packaged devices need, once: names of `child.WARMED`."""
        for device, work in product(devices, works):
            if (device, work) not in self._warm:
                self._warm.add((device, work))
                self._ask({"do": "warm", "hw": device, "work": work})

    def fork(self, folder: Path, limits: Limits, questions: int, answers: int, **how: bool) -> int:
        """Return the number of a new process that reads ``questions``, which are pickled, and writes ``answers``."""
        bounds = {"folder": str(folder), "seconds": limits.seconds, "memory": limits.memory_bytes}
        return int(self._ask({"do": "fork", **bounds, **how}, (questions, answers))["process"])

    def end(self, process: int) -> int | None:
        """Kill a process and the processes that it has started; return its exit code, None if the code is not known."""
        with suppress(NpusimError):
            return int(self._ask({"do": "end", "process": process})["code"])
        return None

    def _ask(self, words: Mapping[str, object], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                socket.send_fds(self._control, [json.dumps(words).encode()], list(descriptors))
                line = self._control.recv(PIECE)
            except OSError:
                line = b""
            if not line:
                raise NpusimError("the process that starts candidates has ended")
            answer: dict[str, Any] = json.loads(line)
            return answer

    def _start(self) -> None:
        self._control, other = socket.socketpair()
        self._process = subprocess.Popen(
            (sys.executable, "-m", f"{__package__}.nursery", str(other.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(other.fileno(),),
            cwd=os.sep,
            env=self.environment,
            start_new_session=True,
        )
        other.close()


def nursery() -> Nursery:
    """Return the nursery of this process and its environment; all candidates share it."""
    named = {name: os.environ[name] for name in PASSED if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return _nursery(os.getpid(), **named, **threads, PYTHONPATH=str(Path(__file__).parents[3]))


@cache
def _nursery(_process: int, **environment: str) -> Nursery:
    return Nursery(environment)


class CandidateProcess:
    """A process that answers questions within limits, in an empty folder that is removed afterwards.

    ``may_start``: whether it may start processes, as Triton's compiler needs; ``is_foreign``: whether it runs code from
    outside the package.
    """

    def __init__(self, limits: Limits, *, may_start: bool = False, is_foreign: bool = True) -> None:
        self.limits, self.folder = limits, Path(tempfile.mkdtemp(prefix="npusim-candidate-"))
        self._nursery = nursery()
        self._code: int | None = None
        questions, sink = os.pipe()
        self._source, answers = os.pipe()
        self._sink, self._rest = os.fdopen(sink, "wb"), b""
        try:
            how = {"may_start": may_start, "is_foreign": is_foreign}
            self._number = self._nursery.fork(self.folder, limits, questions, answers, **how)
        finally:
            os.close(questions)
            os.close(answers)

    def __enter__(self) -> Self:
        """Return the process itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the process, and all that it has started."""
        self.end()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended: it answers no further question."""
        return self._source < 0

    def ask(self, question: Question) -> dict[str, Any]:
        """Return the answer to a question; if the process ends, or does not answer in time, the answer has an
        ``error``.
        """
        token = secrets.token_hex(16)
        if not self._send((token, question)):
            return self._ended()
        until = time.monotonic() + self.limits.seconds
        while b"\n" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._source], [], [], left)[0]:
                self.end()
                return {"error": f"no answer within {self.limits.seconds:g} s", "kind": "crash"}
            piece = os.read(self._source, PIECE)
            if not piece:
                return self._ended()
            self._rest += piece
            if len(self._rest) > LONGEST:
                self.end()
                return {"error": f"its answer is longer than {LONGEST:,} bytes", "kind": "crash"}
        line, _, self._rest = self._rest.partition(b"\n")
        answer = _read(line, token)
        form = FORMS.get(question.work)
        is_known = "error" in answer or form is None or has_form(answer, form)
        return answer if is_known else {"error": "the candidate changed the answer of npusim", "kind": "crash"}

    def end(self) -> None:
        """Kill the process and the processes that it has started, and remove its folder."""
        if not self.has_ended:
            self._code = self._nursery.end(self._number)
            with suppress(BrokenPipeError):
                self._sink.close()
            os.close(self._source)
            self._source = -1
            shutil.rmtree(self.folder, ignore_errors=True)

    def _send(self, words: object) -> bool:
        if self.has_ended:
            return False
        try:
            self._sink.write(pickle.dumps(words))
            self._sink.flush()
        except BrokenPipeError:
            return False
        return True

    def _ended(self) -> dict[str, Any]:
        self.end()
        code = self._code
        by = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        return {"error": f"the candidate's process ended with {by}", "kind": "crash"}


def _read(line: bytes, token: str) -> dict[str, Any]:
    """Return an answer; an answer that is not a JSON object, or that lacks the question's token, counts as a crash."""
    try:
        said, answer = json.loads(line)
    except (ValueError, TypeError):
        said = answer = None
    is_answer = said == token and isinstance(answer, dict)
    return answer if is_answer else {"error": "the candidate wrote something that is not an answer", "kind": "crash"}
