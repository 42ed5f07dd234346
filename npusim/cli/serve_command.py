"""``npusim serve``: a long-lived process that answers programs over the Model Context Protocol."""

import gc
import os
from typing import Annotated

from npusim.cli import options as o
from npusim.cli.help import Verbs
from npusim.errors import SpecError

app = Verbs()
#: Number of new objects between two garbage collections: a command that ends soon needs no collections; a server does.
GARBAGE = 1000


@app.verb(
    "serve",
    ("npusim serve", "over stdin and stdout, for a client that starts it"),
    ("npusim serve --http 8765", "over HTTP on this machine: http://127.0.0.1:8765/mcp"),
)
def serve(
    *,
    http: Annotated[int | None, o.option("--http PORT", "Serve over HTTP.", shown="stdio", min=1, max=65535)] = None,
    host: Annotated[
        str,
        o.option("--host ADDRESS", "Address for HTTP; an address that other machines can reach needs NPUSIM_TOKEN."),
    ] = "127.0.0.1",
    seconds: Annotated[float, o.option("--seconds S", "Time limit for each answer of a candidate.")] = 120.0,
    gib: Annotated[float, o.option("--memory GIB", "Limit for the memory of a candidate.")] = 8.0,
    jobs: Annotated[int | None, o.option("--jobs -j N", "Candidates at once.", shown="all CPUs", min=1)] = None,
) -> None:
    """Serve the tools evaluate, predict, tune, explain, stress, program and devices to programs that write kernels.

    It speaks the Model Context Protocol and needs the extra npusim[serve]. Kernels from files run in processes with
    limits of time, memory, files and network.
    """
    from npusim.studies.evaluate.limits import Limits

    try:
        from npusim.cli.server import serve_http, server_of
    except ModuleNotFoundError as error:
        raise SpecError(f"serve: {error.name} is not installed: python -m pip install 'npusim[serve]'") from None
    server = server_of(Limits(seconds, int(gib * 2**30)), jobs or os.cpu_count() or 1)
    gc.freeze()  # garbage collection need not examine objects that are already loaded
    gc.set_threshold(GARBAGE)
    if http is None:
        server.run("stdio")
    else:
        serve_http(server, host, http, os.environ.get("NPUSIM_TOKEN", ""))
