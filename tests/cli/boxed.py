"""Commands run one after another in copies of one process that has everything imported, each in a folder of its own.

``python -m tests.cli.boxed TEMPLATE BOX [few]`` reads cases from stdin and answers each with a line of JSON.  Starting
npusim anew takes a second; a copy (``fork``) takes milliseconds.  A copy has at most `MOST_BYTES` of data and
`LONGEST_S` seconds, and may write in its box alone: what else it opens for writing is refused and told.
"""

from __future__ import annotations

import base64
import errno
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tests.cli.drawn import Drawn

LONGEST_S = 10
MOST_BYTES = 2 << 30
#: Seconds: of the clock, with none of a processor, and for kernels that are compiled for the first time.  A crowded
#: machine may stop a process for a while.
_CROWDED_S, _IDLE_S, _COMPILING_S = 600, 60, 120
#: Commands that import and compile what most others need.
_WARMING = """run flash --seq 64 --report
run pasa --seq 64 --hw h200 --sensitivity
explore flash --seq 64 -f depth=1,2 -j1 --pareto
compare one two --html a.html
invariant split_kv --seq 64 --vary batch
diff o.npz flash --tensors ok.npz
validate measured.yaml
check base.yaml
report store.csv
hw list
workload list
run fp8_attention --hw h200 --seq 64
run gemm --problem m=64,n=64,k=64
run standard --seq 64
run mine.py:mine --seq 64
explore flash --seq 64 -f depth=1 -j1 -o a.csv"""
#: Devices on which launches of Triton kernels are compiled ahead.
_COMPILED_FOR = ("h200", "ascend_910b2")
_REPOSITORY = Path(__file__).resolve().parents[2]
_CHANGING = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended: its exit code (negative: a signal; None: killed after `LONGEST_S`), and what it said."""

    code: int | None
    stdout: str
    stderr: str
    escaped: list[str]
    seconds: float
    peak_bytes: int


class Boxed:
    """The process that runs commands; ``template`` are the files that each finds.

    ``are_few``: for tens of commands, which take less than all that thousands should find warm.
    """

    def __init__(self, template: Path, box: Path, *, are_few: bool) -> None:
        command = [sys.executable, "-m", __name__, str(template), str(box), *(["few"] if are_few else [])]
        paths = os.pathsep.join(filter(None, (str(_REPOSITORY), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": paths}
        for name in ("CI", "COLUMNS"):
            env.pop(name, None)
        self._ended: dict[tuple[tuple[str, ...], str], Ended] = {}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=_REPOSITORY
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(self, case: Drawn) -> Ended:
        """Run a command and return how it ended; one without damaged files is run once, however often it is drawn."""
        if not case.files and (case.words, case.stdout) in self._ended:
            return self._ended[case.words, case.stdout]
        assert self._process.stdin is not None and self._process.stdout is not None
        files = {name: base64.b64encode(data).decode() for name, data in case.files.items()}
        print(json.dumps([case.words, files, case.stdout]), file=self._process.stdin, flush=True)
        ended = Ended(**json.loads(self._process.stdout.readline()))
        if not case.files:
            self._ended[case.words, case.stdout] = ended
        return ended


def main(template: Path, box: Path, *few: str) -> None:
    """Answer cases until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.dont_write_bytecode = True
    gc.disable()
    _warm(template, box, are_few=bool(few))
    gc.freeze()  # so that copies look through, and thereby copy, nothing of what they share
    gc.enable()
    for line in sys.stdin:
        words, files, stdout = json.loads(line)
        here = _folder(template, box)
        for name, data in files.items():
            (here / name).write_bytes(base64.b64decode(data))
        print(json.dumps(_ended(words, stdout, box, here)), file=answers, flush=True)


def _warm(template: Path, box: Path, *, are_few: bool) -> None:
    """Import and compile what commands need, so that copies of this process have it."""
    import typer.main

    typer.main.get_command = cache(typer.main.get_command)  # made once, not for every command
    from typer.testing import CliRunner

    from npusim.cli.app import app
    from tests.cli.drawn import LAUNCHES

    os.chdir(_folder(template, box))
    for line in _WARMING.splitlines()[: 1 if are_few else None]:
        CliRunner().invoke(app, line.split())
    for launch, sizes in LAUNCHES.items() if find_spec("triton") and not are_few else ():
        for hw in _COMPILED_FOR:
            CliRunner().invoke(app, ["run", launch, *sizes, "--hw", hw])
    os.chdir("/")


def _folder(template: Path, box: Path) -> Path:
    """Return a fresh copy of the template, three folders down in the box."""
    shutil.rmtree(box, ignore_errors=True)
    here = box / "a" / "b" / "here"
    shutil.copytree(template, here, symlinks=True)
    for name in ("home", "tmp"):
        (box / name).mkdir()
    for name in ("fifo", "fifo.yaml", "fifo.json", "fifo.npz", "fifo.safetensors", "fifo.csv"):
        os.mkfifo(here / name)
    return here


def _ended(words: list[str], stdout: str, box: Path, here: Path) -> dict[str, Any]:
    begun = time.monotonic()
    child = os.fork()
    if not child:
        _command(words, stdout, box, here)
    status, usage = _waited(child, box / "err")
    seconds = time.monotonic() - begun
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    said = {n: p.read_text(errors="replace") if (p := box / n).exists() else "" for n in ("out", "err", "escaped")}
    return {
        "code": None if status is None else os.waitstatus_to_exitcode(status),
        "stdout": said["out"],
        "stderr": said["err"],
        "escaped": said["escaped"].splitlines(),
        "seconds": seconds,
        "peak_bytes": usage.ru_maxrss * 1024,
    }


def _waited(child: int, stderr: Path) -> tuple[int | None, resource.struct_rusage]:
    """Wait for a process; kill it and its own when it is over time (status None)."""
    begun, seen, idle_since = time.monotonic(), 0.0, time.monotonic()
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return status, usage
        now, busy = time.monotonic(), _cpu_s(child)
        if busy > seen:
            seen, idle_since = busy, now
        compiling = stderr.exists() and "compiling" in stderr.read_text(errors="replace")
        most = _COMPILING_S if compiling else LONGEST_S
        is_over = busy > most or now - begun > max(most, _CROWDED_S)
        if is_over or (now - begun > most and now - idle_since > _IDLE_S):
            os.killpg(child, signal.SIGKILL)
            return None, os.wait4(child, 0)[2]
        time.sleep(0.002 if now - begun < 1 else 0.05)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _command(words: list[str], stdout: str, box: Path, here: Path) -> None:
    """Run a command in this process, which ends with it."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    err = os.open(box / "err", os.O_CREAT | os.O_WRONLY)
    out = os.open("/dev/full" if stdout == "full" else box / "out", os.O_CREAT | os.O_WRONLY)
    for number, file in enumerate((os.open("/dev/null", os.O_RDONLY), out, err)):
        os.dup2(file, number)
    os.closerange(3, 100)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    if stdout == "closed":
        os.close(1)
        sys.stdout = None  # as Python starts where there is none
    os.chdir(here)
    os.environ.update(HOME=str(box / "home"), TMPDIR=str(box / "tmp"), TRITON_CACHE_DIR=str(box / "tmp" / "triton"))
    tempfile.tempdir = None
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _confine(box, here, words)
    sys.argv = ["npusim", *words]
    code = 0
    try:
        from npusim.cli import main as npusim

        npusim()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - as Python ends a process
        traceback.print_exc()
        code = 1
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        code = code or 120  # as Python ends where the last words cannot be written
    sys.stderr.flush()
    os._exit(code)


def _confine(box: Path, here: Path, words: list[str]) -> None:
    """Refuse, and tell, what this process opens for writing elsewhere than a command of these words may.

    That is its folder; the box around it, where a word leads out of the folder; and the folder of compiled code.
    """
    leads_out = any(".." in word or word.startswith(("/", "~")) or "=/" in word or "=~" in word for word in words)
    allowed = [str(box if leads_out else here), str(box / "tmp"), "/dev/null", "/dev/full", "/dev/zero", "/dev/tty"]
    allowed += [os.path.realpath(kept)] if (kept := os.environ.get("NPUSIM_CACHE")) else []
    told = os.open(box / "escaped", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            changing = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            paths = [path] if changing and not isinstance(path, int) else []
        elif event in _CHANGING:
            paths = [a for a in arguments[: 2 if event in ("os.rename", "os.link") else 1] if not isinstance(a, int)]
        else:
            return
        for path in paths:
            whole = os.path.realpath(os.fsdecode(path))
            if (
                not any(Path(whole).is_relative_to(a) for a in allowed)
                and "__pycache__" not in whole
                and "numba" not in whole
            ):
                os.write(told, f"{event} {whole}\n".encode("utf-8", "surrogateescape"))
                raise PermissionError(errno.EACCES, "Permission denied", path)

    sys.addaudithook(watch)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
