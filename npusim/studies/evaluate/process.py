"""A candidate's process, as its parent sees it: questions out, answers in, and its death as an answer."""

from __future__ import annotations

import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType

    from npusim.studies.evaluate.child import Question
    from npusim.studies.evaluate.limits import Limits

#: Bytes of the longest answer, and of one reading.
LONGEST, PIECE = 1 << 24, 1 << 16
#: Variables of the environment that a candidate's process has.
PASSED = ("PATH", "HOME", "LANG", "XDG_CACHE_HOME", "NPUSIM_CACHE", "NUMBA_CACHE_DIR", "CUDA_HOME", "LD_LIBRARY_PATH")


class CandidateProcess:
    """A process that runs one candidate's code within limits, in an empty folder that is removed afterwards.

    ``may_start``: whether it may start processes, as Triton's compiler needs.
    """

    def __init__(self, limits: Limits, *, may_start: bool) -> None:
        self.limits, self.folder = limits, Path(tempfile.mkdtemp(prefix="npusim-candidate-"))
        source, sink = os.pipe()
        named = {name: os.environ[name] for name in PASSED if name in os.environ}
        package = str(Path(__file__).parents[3])
        paths = {"PYTHONPATH": package, "TMPDIR": str(self.folder), "TRITON_CACHE_DIR": str(self.folder)}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            (sys.executable, "-m", f"{__package__}.child", str(self.folder), str(sink)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(sink,),
            cwd=self.folder,
            env={**named, **paths, **threads},
            start_new_session=True,
        )
        os.close(sink)
        self._source, self._rest = source, b""
        self._send((limits, may_start))

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
        """Return the answer to a question; the end of the process, or none in time, is one with an ``error``."""
        if not self._send(question):
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
        return _read(line)

    def end(self) -> None:
        """Kill the process and those that it has started, and remove its folder."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stdin is not None:
                with suppress(BrokenPipeError):
                    self._process.stdin.close()
            os.close(self._source)
            self._source = -1
            shutil.rmtree(self.folder, ignore_errors=True)

    def _send(self, words: object) -> bool:
        sink = self._process.stdin
        if self.has_ended or sink is None:
            return False
        try:
            sink.write(pickle.dumps(words))
            sink.flush()
        except BrokenPipeError:
            return False
        return True

    def _ended(self) -> dict[str, Any]:
        self.end()
        code = self._process.returncode
        by = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        return {"error": f"the candidate's process ended with {by}", "kind": "crash"}


def _read(line: bytes) -> dict[str, Any]:
    """Return an answer; one that is no object of JSON is a crash."""
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"error": "its answer is not JSON", "kind": "crash"}
