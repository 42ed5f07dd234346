"""The server of ``npusim serve``: tools of the Model Context Protocol over stdio or HTTP."""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from npusim import __version__
from npusim.cli import answers
from npusim.cli.options import problem_values
from npusim.errors import NpusimError, SpecError
from npusim.report.text import to_json
from npusim.simulation.request import Request
from npusim.studies.evaluate.child import Question, timed
from npusim.studies.evaluate.evaluation import Evaluation, Microseconds, evaluate, time_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from npusim.studies.evaluate.limits import Limits

Value = TypeVar("Value")
#: Largest number of candidates of one call, and largest number of characters of a text in a call.
MOST_KERNELS, MOST_TEXT = 256, 100_000
#: Hosts that need no token.
LOCAL = frozenset(("127.0.0.1", "localhost", "::1"))
#: Largest number of bytes of a request over HTTP.
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class ServedCall:
    """The call of a kernel: a problem ``M=4096,N=4096`` or the sizes of attention, and the kernel's fields."""

    hw: str = "h200"
    problem: str | None = None
    seq: int | None = None
    batch: int | None = None
    workload: str | None = None
    causal: bool | None = None
    dtype: str | None = None
    precision: str | None = None
    tiling: Mapping[str, str | int | bool] | None = None

    def options(self) -> dict[str, Any]:
        """Return the options of a request."""
        named = {n: v for n, v in vars(self).items() if v is not None and n != "problem"}
        problem = problem_values(self.problem)
        return named if problem is None else {**named, "problem": problem}

    def on(self, kernel: str) -> Request:
        """Return the request of a kernel."""
        return Request(kernel, **self.options())


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of the kernels of one call, in its order."""

    kernels: Sequence[Evaluation]


@dataclass(frozen=True)
class ServedDevice:
    """A packaged device."""

    name: str
    family: str
    description: str


@dataclass(frozen=True)
class Devices:
    """The packaged devices."""

    devices: Sequence[ServedDevice]


def server_of(limits: Limits, jobs: int) -> MCPServer[Any]:
    """Return the server with its tools; candidates run in ``jobs`` processes with ``limits``."""
    server: MCPServer[Any] = MCPServer(
        "npusim",
        version=__version__,
        instructions=(
            "Judges kernels for NPUs and GPUs without the device: right or wrong, bits, and time with its error."
        ),
        log_level="ERROR",
    )
    turn, alone = anyio.CapacityLimiter(1), Lock()

    async def worked(work: Callable[[], Value]) -> Value:
        is_over = Event()

        def in_turn() -> Value:
            # a cancelled call gives up its turn immediately, but its thread ends later; two simulations never overlap
            with alone:
                if is_over.is_set():
                    raise SpecError("cancelled")
                return work()

        try:
            done: Value = await anyio.to_thread.run_sync(in_turn, limiter=turn, abandon_on_cancel=True)
        except NpusimError as error:
            raise ToolError(answers.in_words(error)) from None
        finally:
            is_over.set()
        return done

    async def asked(
        work: Callable[[Question], dict[str, Any]], kernel: str, call: ServedCall, **more: Any
    ) -> dict[str, Any]:
        def answer() -> dict[str, Any]:
            document = answers.answered(Question(work, call.on(_bounded(kernel)), more), limits)
            plain: dict[str, Any] = json.loads(to_json(document))
            return plain

        return await worked(answer)

    _offer_evaluate(server, worked, limits, jobs)
    _offer_answers(server, asked, limits)

    @server.tool()
    async def devices() -> Devices:
        """List the packaged devices."""
        return await worked(_devices)

    return server


def _offer_answers(server: MCPServer[Any], asked: Callable[..., Awaitable[dict[str, Any]]], limits: Limits) -> None:
    """Add the tools for questions about one kernel; ``asked`` awaits the answer of a child."""

    @server.tool()
    async def predict(kernel: str, call: ServedCall = ServedCall()) -> Microseconds:
        """Predict the time of a kernel on a device, with its band and its limit."""
        return time_of(await asked(timed, kernel, call))

    @server.tool()
    async def tune(
        kernel: str, fields: dict[str, list[str | int]], call: ServedCall = ServedCall(), bits: str = "any"
    ) -> dict[str, Any]:
        """Rank configurations of a kernel by predicted time, with their classes of equal bits."""
        return await asked(answers.tuned, kernel, call, fields=fields, bits=bits)

    @server.tool()
    async def explain(kernel: str, other: str, call: ServedCall = ServedCall()) -> dict[str, Any]:
        """Explain why one kernel is slower than another: the difference of latency, split into causes."""
        return await asked(answers.explained, kernel, call, other=_bounded(other))

    @server.tool()
    async def stress(kernel: str, call: ServedCall = ServedCall(), budget: float = 10.0) -> dict[str, Any]:
        """Search for inputs on which a kernel is furthest from float64, and name the step at which accuracy is lost."""
        return await asked(answers.stressed, kernel, call, budget=min(budget, limits.seconds))

    @server.tool()
    async def program(kernel: str, call: ServedCall = ServedCall()) -> dict[str, Any]:
        """Return the tile program of a kernel: its queues and waits, and the depth of each ring."""
        return await asked(answers.programmed, kernel, call)


def _offer_evaluate(server: MCPServer[Any], worked: Callable[..., Any], limits: Limits, jobs: int) -> None:
    """Add the tool that judges kernels; ``worked`` awaits a function in a thread."""

    @server.tool(name="evaluate")
    async def evaluate_tool(
        ctx: Context,  # type: ignore[type-arg]
        kernels: list[str],
        reference: str | None = None,
        call: ServedCall = ServedCall(),
        shapes: list[dict[str, int]] | None = None,
        seed: int = 0,
    ) -> Evaluations:
        """Judge kernels: right, wrong or unproved, the same bits or not, time on each device (hw: a,b), trust."""
        if len(kernels) > MOST_KERNELS:
            raise ToolError(f"kernels: {len(kernels)}; at most {MOST_KERNELS}")
        is_over, count = Event(), iter(range(1, len(kernels) + 1))

        def told(done: Evaluation) -> None:
            if is_over.is_set():
                raise SpecError("cancelled")
            words = f"{done.kernel}: {done.verdict}"
            anyio.from_thread.run(partial(ctx.report_progress, next(count), len(kernels), words))

        try:
            more: dict[str, Any] = {
                "shapes": shapes or (),
                "seed": seed,
                "jobs": jobs,
                "limits": limits,
                "on_done": told,
            }
            judged = partial(evaluate, [*map(_bounded, kernels)], reference=reference, **more, **call.options())
            return Evaluations(await worked(judged))
        finally:
            is_over.set()


def _devices() -> Devices:
    from npusim.config.load import list_devices, load_device

    listed = [load_device(name) for name in list_devices()]
    return Devices([ServedDevice(d.name, d.family, d.description) for d in listed])


def _bounded(text: str) -> str:
    if len(text) > MOST_TEXT:
        raise SpecError(f"a kernel's name has {len(text):,} characters; at most {MOST_TEXT:,}")
    return text


def serve_http(server: MCPServer[Any], host: str, port: int, token: str) -> None:
    """Serve over HTTP at ``/mcp``; clients on other machines need the token."""
    import uvicorn

    if host not in LOCAL and not token:
        raise SpecError(f"--host {host}: other machines can reach it: set a token in NPUSIM_TOKEN")
    app = server.streamable_http_app(host=host, max_request_body_size=MOST_BYTES)
    uvicorn.run(_guarded(app, token) if token else app, host=host, port=port, log_level="error")


def _guarded(app: ASGIApp, token: str) -> ASGIApp:
    """Return an application that answers 401 to requests without the token."""
    wanted = f"Bearer {token}".encode()

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] != "http" or secrets.compare_digest(given, wanted):
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"a token is needed"})

    return checked
