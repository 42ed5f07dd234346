"""The server over HTTP: a token, progress, cancellation, hostile candidates, and a thousand calls."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

from npusim.studies.evaluate.limits import landlock_version

if TYPE_CHECKING:
    from mcp import ClientSession

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="npusim[serve] is not installed")
HERE = Path(__file__).parent
TOKEN = "a-token-of-the-test"
CALL = {"hw": "h200", "seq": 256}
HOSTILE = {
    "loop": ("while True: pass", "no answer within"),
    "memory": ("x = bytearray(1 << 36)", "MemoryError"),
    "fork": ("import os\nwhile True: os.fork()", "not permitted"),
    "threads": ("import threading\nwhile True: threading.Thread(target=lambda: None).start()", ""),
    "socket": ("import socket\nsocket.create_connection(('127.0.0.1', 9))", "not permitted"),
    "file": ("open({elsewhere!r}, 'w').write('x')", "must not change"),
    "moved file": ("open('x', 'w').write('x')\nimport os\nos.rename('x', {elsewhere!r})", "must not change"),
    "linked file": ("import os\nos.link('/etc/passwd', 'mine')", "must not change"),
    "native file": (
        "import ctypes\nctypes.CDLL(None).creat({elsewhere!r}.encode(), 0o600)\nraise SystemExit(4)",
        "SystemExit",
    ),
    "native file of its own": (
        "import ctypes\nraise SystemExit(ctypes.CDLL(None).creat(b'mine', 0o600) > 0 and 7)",
        "SystemExit: 7",
    ),
    "exit": ("import os\nos._exit(0)", "ended with exit code 0"),
    "signal": ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", "not permitted"),
    "escape": (
        "import npusim.formats as f, builtins\nf.cast = builtins.open = None\n"
        "import npusim.studies.evaluate.child as c\nc.answer = lambda q: {{'error': 'mine'}}\nraise SystemExit(4)",
        "SystemExit",
    ),
    "huge": (
        "from npusim.kernel import *\n\n@kernel(results='o', x='row col')\ndef f(x): return x\n\n"
        "def phases(problem, tiling, p, machine):\n"
        "    x, o = (GlobalTensor(n, 1, 1, 1 << 40, 64, 'float16', r) for n, r in (('x', 'input'), ('o', 'output')))\n"
        "    return [f.phase('f', grid(o, ('row', 1 << 40)), {{'row': 64, 'col': 64}}, [o], x=x)]\n\n"
        "k = schedule('huge', phases, precisions=[FlashPrecision('stored')])",
        "",
    ),
    "answer": (
        "import os\nfor n in range(3, 30):\n    try: os.write(n, b'{{\"us\": 1}}\\n')\n    except OSError: pass",
        "",
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    """Yield the address and the process of a server that needs a token."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = (sys.executable, "-m", "npusim", "serve", "--http", str(port), "--seconds", "6", "--memory", "2")
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "NPUSIM_TOKEN": TOKEN}
    process = subprocess.Popen(words, env=environment)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp", process.pid
    finally:
        process.terminate()
        process.wait(30)


def talk(address: str, work: Callable[[ClientSession], Awaitable[Any]]) -> Any:
    """Return the result of work in a session with the token."""
    import anyio
    import httpx2
    from mcp import ClientSession
    from mcp.client.streamable_http import streamable_http_client

    async def run() -> Any:
        async with (
            httpx2.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=300) as http,
            streamable_http_client(address, http_client=http) as streams,
            ClientSession(*streams[:2]) as session,
        ):
            await session.initialize()
            return await work(session)

    return anyio.run(run)


def test_without_the_token_nothing_is_answered(server: tuple[str, int]) -> None:
    import httpx2

    for headers in ({}, {"Authorization": "Bearer another"}):
        assert httpx2.post(server[0], json={}, headers=headers).status_code == 401


def test_other_machines_need_a_token() -> None:
    environment = {n: x for n, x in os.environ.items() if n != "NPUSIM_TOKEN"} | {"PYTHONPATH": str(HERE.parents[1])}
    words = (sys.executable, "-m", "npusim", "serve", "--http", "1234", "--host", "0.0.0.0")
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "NPUSIM_TOKEN" in done.stderr


def test_hostile_candidates_are_verdicts_and_the_next_call_is_answered(server: tuple[str, int], tmp_path: Path) -> None:
    elsewhere, names = tmp_path / "elsewhere", []
    hostile = {n: of for n, of in HOSTILE.items() if n != "native file" or landlock_version()}
    for name, (code, _) in hostile.items():
        file = tmp_path / f"{name.replace(' ', '_')}.py"
        file.write_text(code.format(elsewhere=str(elsewhere)) + "\n", encoding="utf-8")
        names.append(f"{file}:k")
    progress: list[float] = []

    async def work(session: ClientSession) -> Any:
        async def told(done: float, total: float | None, message: str | None) -> None:
            progress.append(done)

        before = await session.call_tool("predict", {"kernel": "flash", "call": CALL})
        judged = await session.call_tool("evaluate", {"kernels": names, "call": CALL}, progress_callback=told)
        after = await session.call_tool("predict", {"kernel": "flash", "call": CALL})
        return before, judged, after

    before, judged, after = talk(server[0], work)
    for (name, (_, words)), found in zip(hostile.items(), judged.structured_content["kernels"], strict=True):
        assert found["verdict"] != "right", (name, found)
        assert words in found["reason"], (name, found["reason"])
        assert found["us"]["h200"]["mid"] is None, name
    assert not elsewhere.exists()
    assert before.structured_content == after.structured_content
    assert progress == list(range(1, len(names) + 1))


def test_a_cancelled_call_ends_and_the_next_is_answered(server: tuple[str, int]) -> None:
    import anyio

    names = [f"{HERE / 'attention_kernels.py'}:each_tile"] * 24

    async def work(session: ClientSession) -> Any:
        start = time.monotonic()
        with anyio.move_on_after(3):
            await session.call_tool("evaluate", {"kernels": names, "call": CALL})
        assert time.monotonic() - start < 30
        answer = await session.call_tool("devices", {})
        return answer, time.monotonic() - start

    answer, seconds = talk(server[0], work)
    assert any(d["name"] == "h200" for d in answer.structured_content["devices"])
    assert seconds < 90  # all candidates take longer


def processes_of(first: int) -> list[int]:
    """Return the numbers of a process and of all that it and its children have started."""
    found = [first]
    for number in found:
        with suppress(OSError):  # it has ended since
            for task in Path(f"/proc/{number}/task").iterdir():
                found += map(int, (task / "children").read_text(encoding="utf-8").split())
    return found


def spent(first: int) -> float:
    """Return the seconds of the processor that these processes have used, and their children that have ended."""
    ticks = 0
    for number in processes_of(first):
        with suppress(OSError):
            fields = Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory(first: int) -> int:
    """Return the KiB of memory that these processes use; a page of several counts once."""
    total = 0
    for number in processes_of(first):
        with suppress(OSError):
            lines = Path(f"/proc/{number}/smaps_rollup").read_text(encoding="utf-8").splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


@pytest.mark.parametrize("calls", [24, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_calls_are_soon_answered_and_need_no_further_memory(server: tuple[str, int], calls: int) -> None:
    async def work(session: ClientSession) -> list[float]:
        seconds = list[float]()
        for number in range(calls + 16):  # each of the eight lengths twice before
            if number == 16:
                sizes.append(memory(server[1]))
            start = spent(server[1])
            call = {**CALL, "seq": 256 + 64 * (number % 8)}
            got = await session.call_tool("predict", {"kernel": "flash", "call": call})
            assert got.structured_content["mid"] > 0
            seconds.append(spent(server[1]) - start)
        sizes.append(memory(server[1]))
        return seconds[16:]

    sizes: list[int] = []
    seconds = talk(server[0], work)
    assert sizes[1] <= min(1.1, 1 + calls / 600) * sizes[0], sizes  # of few calls, what each leaves shows less
    assert median(seconds) < 0.3, median(seconds)
