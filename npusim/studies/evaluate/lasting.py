"""A long-lived process, which answers questions about packaged kernels one after another and runs no foreign code."""

from __future__ import annotations

import atexit
import resource
import sys
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from npusim.studies.evaluate.child import Question
from npusim.studies.evaluate.process import CandidateProcess

if TYPE_CHECKING:
    from npusim.studies.evaluate.limits import Limits

#: Share of the memory limit, including loaded code and results, above which a new process replaces this one.
FULL = 0.5


class LastingProcess:
    """The process for questions about packaged kernels.

    For each answer, the process has at least the time of ``limits`` and half of its memory.  A new process replaces a
    process that has used more memory, that has ended, or that failed in an answer.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._lock = Lock()
        self._process: CandidateProcess | None = None
        atexit.register(self.end)

    def ask(self, question: Question) -> dict[str, Any]:
        """Return the answer to a question, as `CandidateProcess.ask` does; a process that ends raises no error."""
        with self._lock:
            if self._process is None or self._process.has_ended:
                self._process = CandidateProcess(self.limits, is_foreign=False)
            answer = self._process.ask(question)
            if answer.get("kind") == "crash" or self._is_used(question):
                self._process.end()
            return answer

    def end(self) -> None:
        """End the process; a later question starts another one."""
        if self._process is not None:
            self._process.end()

    def _is_used(self, question: Question) -> bool:
        """Return whether the process has too little time or memory left for another answer."""
        assert self._process is not None
        used = self._process.ask(Question(spent, question.request))
        if "error" in used:
            return True
        return bool(used["seconds"] > self.limits.seconds or used["bytes"] > FULL * self.limits.memory_bytes)


def spent(_question: Question) -> dict[str, Any]:
    """Return the processor seconds that this process has used, and its largest number of bytes of memory."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    unit = 1 if sys.platform == "darwin" else 1 << 10
    return {"seconds": used.ru_utime + used.ru_stime, "bytes": used.ru_maxrss * unit}


@cache
def lasting(limits: Limits) -> LastingProcess:
    """Return the long-lived process that answers questions within these limits."""
    return LastingProcess(limits)
