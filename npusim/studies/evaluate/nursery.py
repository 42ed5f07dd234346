"""A process that has imported npusim and runs no foreign code: processes that answer questions are forked from it.

Run as a program, ``python -m npusim.studies.evaluate.nursery CONTROL``.  On the socket ``CONTROL`` its parent sends
lines of JSON, each with a command, and reads one line as the answer.  With such a line, a process that answers
questions receives the ends of two pipes: one transfers pickled questions, the other each answer as a line of JSON. Text
that a candidate prints is discarded, and no process unpickles the bytes that a candidate writes.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

from npusim import cache
from npusim.kernels.triton.releases import load_compiler
from npusim.studies.evaluate.child import WARMED, Question, answer
from npusim.studies.evaluate.limits import Limits, confine, guard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from io import FileIO

#: Largest number of bytes of a line, and of the file descriptors that a line passes.
LINE, DESCRIPTORS = 1 << 16, 2
#: The call of a packaged kernel that loads the code of a question.
WARM = MappingProxyType({"heads": 1, "kv_heads": 1, "seq_q": 64, "seq_kv": 64, "head_dim": 64})


def main(control: str) -> None:
    """Answer the commands of the parent until it has ended."""
    _import_all()
    parent = socket.socket(fileno=int(control))
    while True:
        line, descriptors, _, _ = socket.recv_fds(parent, LINE, DESCRIPTORS)
        if not line:
            return
        asked = json.loads(line)
        done = {"fork": _forked, "end": _ended, "warm": _warmed}[asked["do"]](asked, descriptors, parent)
        for descriptor in descriptors:
            os.close(descriptor)
        parent.sendall(f"{json.dumps(done)}\n".encode())


def _import_all() -> None:
    """Import the modules that answers need, before the limits apply."""
    import npusim.program.numerics.evaluate
    import npusim.studies.tune.prediction  # noqa: F401
    from npusim.library import SCHEDULES

    len(SCHEDULES)  # imports all packaged schedules, as the look-up of a user's name does


def _warmed(asked: Mapping[str, Any], _descriptors: Sequence[int], _parent: socket.socket) -> dict[str, Any]:
    """Answer a question about a packaged kernel, so that forked processes have loaded its code."""
    from npusim.config.problem import Problem
    from npusim.simulation.request import Request

    with tempfile.TemporaryDirectory() as folder:
        request = Request("flash", problem=Problem(**WARM), hw=asked["hw"])
        answer(Question(WARMED[asked["work"]], request, {"file": f"{folder}/out.npz"}))
    return {}


def _forked(asked: Mapping[str, Any], descriptors: Sequence[int], parent: socket.socket) -> dict[str, Any]:
    """Return the number of a new process that answers questions within limits."""
    if asked["may_start"]:
        load_compiler()
    gc.freeze()  # a garbage collection in a forked process would copy every page of loaded data
    number = os.fork()
    if number == 0:
        status = 1
        try:
            parent.close()
            _serve(asked, *descriptors)
            status = 0
        finally:
            os._exit(status)
    return {"process": number}


def _serve(asked: Mapping[str, Any], questions: int, answers: int) -> None:
    """Answer questions until there are no more, in a separate session, folder and environment.

    A process that runs foreign code stores compiled code in its own folder; other processes share one folder.
    """
    os.setsid()
    folder = str(asked["folder"])
    os.chdir(folder)
    os.environ |= {"TMPDIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
    if asked["is_foreign"]:
        os.environ[cache.VARIABLE] = os.pathsep.join(map(str, (f"{folder}/cache", *cache.folders())))
    tempfile.tempdir = sys.path[0] = folder
    os.dup2(questions, 0)
    os.close(questions)
    with os.fdopen(0, "rb", closefd=False) as source, os.fdopen(answers, "wb", buffering=0) as sink:
        confine(Limits(asked["seconds"], asked["memory"]), may_start=asked["may_start"])
        guard(tuple(filter(None, (Path(folder), cache.folder()))))
        _answer_all(source, sink)


def _answer_all(questions: BinaryIO, sink: FileIO) -> None:
    while True:
        try:
            token, question = pickle.load(questions)
        except EOFError:
            return
        sink.write(f"{json.dumps([token, answer(question)])}\n".encode())


def _ended(asked: Mapping[str, Any], _descriptors: Sequence[int], _parent: socket.socket) -> dict[str, Any]:
    """Kill a process and those that it has started; return its exit code, negative for a signal."""
    number = int(asked["process"])
    for kill in (os.killpg, os.kill):  # a process that has just begun has no group yet
        with suppress(ProcessLookupError):
            kill(number, signal.SIGKILL)
    return {"code": os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])}


if __name__ == "__main__":
    main(*sys.argv[1:])
